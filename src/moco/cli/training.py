"""The verbs that train: pretrain, resume, bench, compare, ablate, tune, demo."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import Any

from moco.cli.parsing import Given, Output, add_data, add_nproc, add_output, add_training_options, leaf
from moco.comparing.plan import ABLATIONS, SEARCHED
from moco.errors import UserError
from moco.options import add_options
from moco.recipes import METHODS
from moco.settings import PretrainSettings

EPILOGUE = """\
examples:
  moco pretrain photos/ --recipe v2 --backbone resnet50 --epochs 200 --out runs/first
  moco pretrain digits.npz --recipe small --out runs/digits
  moco resume runs/first
  moco pretrain photos/ --nproc 4 --out runs/first
  torchrun --nnodes=2 --nproc-per-node=8 --max-restarts=3 … -m -- moco pretrain photos/ --out runs/first
"""


def _add_pretrain(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "pretrain",
        _pretrain,
        help="pre-train an encoder on images without labels",
        usage="moco pretrain DATA [--config FILE] [--SETTING VALUE ...]\n       moco pretrain --resume RUN",
        description="Pre-train an encoder on images without labels. Values: defaults < recipe < --config < flags.",
        epilog=EPILOGUE,
    )
    add_data(parser)
    add_output(parser)
    parser.add_argument("--resume", metavar="RUN", help="run folder to continue from its newest checkpoint")
    add_nproc(parser)
    add_training_options(parser, arguments)


def _pretrain(given: Given) -> int:
    from moco.pretraining import pretrain, resume

    if "resume" in given and "config" in given:
        raise UserError("--config does not go with --resume: the run has its settings")
    with _training_output(given) as output:
        run = resume(given.pop("resume"), **given) if "resume" in given else pretrain(given.pop("data", ""), **given)
        if output.wanted:
            output.result = _outcome(run)
    return 0


def _training_output(given: Given) -> Output:
    """Where the words and the result of a training go; of several processes the first one has a result."""
    if os.environ.get("RANK", "0") != "0":
        given.pop("json_file", None)
    return Output(given)


def _outcome(run: Any) -> dict[str, Any]:
    """What a training came to, a `moco.Run`: its last line of metrics, and its last check where there was one."""
    lines = run.metrics()
    training, checks = ([line for line in lines if ("loss" in line) == kind] for kind in (True, False))
    return {
        "run": run.path,
        "step": lines[-1]["step"] if lines else 0,
        "epochs": run.settings.epochs,
        "metrics": training[-1] if training else None,
        "checks": checks[-1] if checks else None,
    }


def _add_resume(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "resume",
        _resume,
        help="continue a run from its newest checkpoint",
        usage="moco resume RUN [--data DATA] [--SETTING VALUE ...]",
        description="Continue a run where its newest whole checkpoint was written. Settings that would make it\n"
        "another run are refused; more --epochs, other --workers, --device, --save-every and the like are taken.",
        epilog="examples:\n  moco resume runs/first\n  moco resume runs/first --epochs 400 --data /elsewhere/photos\n",
    )
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--data", nargs="+", metavar="DATA", help="where the pictures are now, if they moved")
    add_output(parser)
    add_nproc(parser)
    add_options(parser, PretrainSettings, skip=frozenset({"data"}))


def _resume(given: Given) -> int:
    from moco.pretraining import resume

    with _training_output(given) as output:
        run = resume(given.pop("run"), **given)
        if output.wanted:
            output.result = _outcome(run)
    return 0


def _add_bench(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "bench",
        _bench,
        help="measure where a training's time would go on this data and machine, and what to change",
        usage="moco bench DATA [--seconds X] [--json FILE] [--config FILE] [--SETTING VALUE ...]",
        description="Measure reading, decoding, views, the model step and the whole job; say what limits it, what to\n"
        "change, and how long the planned epochs would take. Takes the settings of moco pretrain, and writes\n"
        "nothing: those that concern only the run folder (--out and the like) change nothing.",
        epilog="example:\n  moco bench photos/ --backbone resnet50 --epochs 200 --workers 12\n",
    )
    add_data(parser)
    parser.add_argument("--seconds", type=float, metavar="X", help="how long to measure, about (default: 60)")
    add_output(parser)
    add_training_options(parser, arguments)


def _bench(given: Given) -> int:
    from moco.bench import benchmark
    from moco.bench.advice import words

    with Output(given) as output:
        found = benchmark(given.pop("data", ""), **given)
        output.result = found.as_dict() | {"words": words(found)}
    return 0


def _add_demo(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(verbs, "demo", _demo, help="pre-train on the pictures in the package, evaluate, show")
    parser.add_argument("--out", metavar="RUN", help="run folder; a number is added if it exists (default: runs/demo)")
    parser.add_argument("--epochs", type=int, metavar="N", help="default: what takes under five minutes, 16 at most")
    add_output(parser)


def _demo(given: Given) -> int:
    from moco.demo import demonstrate

    with Output(given) as output:
        run = demonstrate(given.get("out", "runs/demo"), given.get("epochs"))
        output.result = {"run": run.path, "figures": json.loads((run.path / "demo.json").read_text(encoding="utf-8"))}
    return 0


def _add_compare(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "compare",
        _compare,
        help="train the same backbone by several methods with the same budget, side by side",
        usage="moco compare DATA --methods moco,simclr,byol [--seeds N] [--epochs N] [--SETTING VALUE ...]",
        description="Pre-train on the same pictures by several methods, evaluate them, show table, picture and page.\n"
        "A row is what makes the method itself; views, rate, backbone and budget are those of the other settings.\n"
        "The same command goes on where it was interrupted.",
        epilog="example:\n  moco compare photos/ --recipe small --methods moco,v3,simclr,byol --epochs 20 --seeds 3\n",
    )
    _add_side_by_side(parser, arguments)
    parser.add_argument(
        "--methods",
        metavar="A,B,…",
        help=f"moco (as the settings say), {', '.join(METHODS)} (default: moco,simclr,byol)",
    )


def _compare(given: Given) -> int:
    from moco.comparing.job import compare

    methods = given.pop("methods", "moco,simclr,byol").split(",")
    with Output(given) as output:
        found = compare(given.pop("data", ""), methods, **given)
        output.result = asdict(found)
    return int(any(line.failed for line in found.lines))


def _add_ablate(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "ablate",
        _ablate,
        help="vary one setting as the papers do, everything else the same",
        usage="moco ablate DATA --over momentum [--values 0 0.9 0.99] [--seeds N] [--SETTING VALUE ...]",
        description="Pre-train with one setting varied as in the papers, evaluate and show table, picture and page.\n"
        "The same command goes on where it was interrupted.",
        epilog="example:\n  moco ablate photos/ --over temperature --recipe small --epochs 20 --seeds 3\n",
    )
    _add_side_by_side(parser, arguments)
    parser.add_argument("--over", nargs="+", metavar="NAME", required=True, help=", ".join(ABLATIONS))
    parser.add_argument(
        "--values", nargs="+", type=float, metavar="X", help="instead of the papers', of momentum, queue or temperature"
    )


def _ablate(given: Given) -> int:
    from moco.comparing.job import ablate

    with Output(given) as output:
        found = ablate(given.pop("data", ""), given.pop("over"), **given)
        output.result = asdict(found)
    return int(any(line.failed for line in found.lines))


def _add_side_by_side(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    add_data(parser)
    parser.add_argument("--seeds", type=int, metavar="N", help="trainings of each row (default: 1)")
    parser.add_argument("--minutes", type=float, metavar="X", help="budget of a training instead of --epochs, about")
    parser.add_argument("--images-seen", type=int, metavar="N", help="budget of a training instead of --epochs")
    parser.add_argument("--test", metavar="DATA", help="labelled pictures to test on (default: a part set aside)")
    parser.add_argument(
        "--parallel", type=int, metavar="N",
        help="trainings at a time, which share the cores unless --threads says how many each takes (default: 1)",
    )  # fmt: skip
    add_output(parser)
    add_training_options(parser, arguments)


def _add_tune(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "tune",
        _tune,
        help="search rate, temperature, momentum and crops; trials that fall behind are ended early",
        usage="moco tune DATA [--over NAME ...] [--trials N] [--epochs N] [--SETTING VALUE ...]",
        description="Search settings by successive halving, judged by kNN where there are labels, else by whether two\n"
        "views of a picture find each other. The same command goes on where it was interrupted.",
        epilog="example:\n  moco tune photos/ --recipe small --epochs 9 --trials 30 --out runs/search\n",
    )
    add_data(parser)
    parser.add_argument(
        "--over", nargs="+", metavar="NAME",
        help=f"{', '.join(SEARCHED)} (default: those of the first four that the method knows)",
    )  # fmt: skip
    parser.add_argument("--trials", type=int, metavar="N", help="trainings in all (default: 20)")
    add_output(parser)
    add_training_options(parser, arguments)


def _tune(given: Given) -> int:
    from moco.comparing.tuning import tune

    if "over" in given:
        given["over"] = tuple(name.replace("-", "_") for name in given["over"])
    with Output(given) as output:
        output.result = asdict(tune(given.pop("data", ""), **given))
    return 0


VERBS = (_add_pretrain, _add_resume, _add_bench, _add_compare, _add_ablate, _add_tune, _add_demo)
