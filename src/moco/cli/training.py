"""The verbs that train: pretrain, resume, bench, demo."""

from __future__ import annotations

from typing import Any

from moco.cli.parsing import Given, add_data, add_nproc, add_training_options, leaf
from moco.errors import UserError
from moco.options import add_options
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
    parser.add_argument("--resume", metavar="RUN", help="run folder to continue from its newest checkpoint")
    add_nproc(parser)
    add_training_options(parser, arguments)


def _pretrain(given: Given) -> int:
    from moco.pretraining import pretrain, resume

    if "resume" not in given:
        pretrain(given.pop("data", ""), **given)
    elif "config" in given:
        raise UserError("--config does not go with --resume: the run has its settings")
    else:
        resume(given.pop("resume"), **given)
    return 0


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
    add_nproc(parser)
    add_options(parser, PretrainSettings, skip=frozenset({"data"}))


def _resume(given: Given) -> int:
    from moco.pretraining import resume

    resume(given.pop("run"), **given)
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
    parser.add_argument(
        "--json", dest="json_file", metavar="FILE", help="write the figures there; - for standard output, and no table"
    )
    add_training_options(parser, arguments)


def _bench(given: Given) -> int:
    from moco.bench import benchmark

    benchmark(given.pop("data", ""), **given)
    return 0


def _add_demo(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(verbs, "demo", _demo, help="pre-train on the pictures in the package, evaluate, show")
    parser.add_argument("--out", metavar="RUN", help="run folder; a number is added if it exists (default: runs/demo)")


def _demo(given: Given) -> int:
    from moco.demo import demonstrate

    demonstrate(given.get("out", "runs/demo"))
    return 0


VERBS = (_add_pretrain, _add_resume, _add_bench, _add_demo)
