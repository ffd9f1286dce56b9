"""`moco VERB`. Options are generated from the settings classes; what is wrong is said in one line, exit status 2.

Each verb is a function that adds its parser, and one that runs it with what was given.

The parser is made here in a few lines rather than by a library, since layered settings (recipe < file < flags) need
to know which flags were really given, and a mistake should be one line with the nearest name.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pydantic import BaseModel

from moco import __version__
from moco.errors import Interrupted, TrainingError, UserError
from moco.evaluation_settings import TASKS, HealthSettings
from moco.options import add_options
from moco.settings import RECIPES, PretrainSettings, nearest

Given = dict[str, Any]

EPILOGUE = """\
examples:
  moco pretrain photos/ --recipe v2 --backbone resnet50 --epochs 200 --out runs/first
  moco pretrain digits.npz --recipe small --out runs/digits
  moco resume runs/first
  moco pretrain photos/ --nproc 4 --out runs/first
  torchrun --nnodes=2 --nproc-per-node=8 --max-restarts=3 … -m moco pretrain photos/ --out runs/first
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


class _Help(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # or it would tear flags apart


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, 1 (training failed), 2 (bad input), 130 or 143 (stopped)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _dispatch(arguments)
    except UserError as error:
        return _complain(error, 2)
    except TrainingError as error:
        return _complain(error, 1)
    except Interrupted as stop:
        return _complain(stop, stop.status)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)


def _complain(what: object, status: int) -> int:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"moco: {what}", file=sys.stderr)
    return status


def _dispatch(arguments: list[str]) -> int:
    parser = _Parser(prog="moco", description="Self-supervised pre-training with Momentum Contrast", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"moco {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)
    for add in (_add_pretrain, _add_resume, _add_eval, _add_health, _add_check, _add_bench, _add_demo):
        add(verbs, arguments)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in verbs.choices:
        raise UserError(f"unknown verb {arguments[0]!r}{nearest(arguments[0], verbs.choices)} (see moco --help)")
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        if not unknown[0].startswith("-"):
            raise UserError(f"unexpected argument {unknown[0]!r}: put DATA together, before the options")
        flags = getattr(found, "own_parser", parser)._option_string_actions
        raise UserError(f"unknown option {unknown[0]}{nearest(unknown[0], flags)}")
    if "run_verb" not in found:
        parser.print_help()
        return 0
    given: Given = {
        name: "auto" if value == ["auto"] else value
        for name, value in vars(found).items()
        if name not in ("verb", "task", "run_verb", "own_parser") and value != []
    }
    if isinstance(given.get("data"), list) and len(given["data"]) == 1:
        given["data"] = given["data"][0]
    if given.pop("nproc", 1) > 1:
        return _launch(int(found.nproc), arguments)
    run: Callable[[Given], int] = found.run_verb
    return run(given)


def _launch(processes: int, arguments: list[str]) -> int:
    """Run the same command in several processes of this machine, by torchrun. Returns the first bad exit status."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    rest = arguments.copy()
    place = next(i for i, word in enumerate(rest) if word.partition("=")[0] == "--nproc")
    del rest[place : place + (1 if "=" in rest[place] else 2)]
    try:
        launch = parse_args(["--standalone", f"--nproc-per-node={processes}", "-m", "moco"])
        launch.training_script_args = rest  # not through its parser, which would take --monitor for one of its own
        run(launch)
    except ChildFailedError as failed:  # the process has said why
        status = failed.get_first_failure()[1].exitcode
        return status if status > 0 else 1
    return 0


def _leaf(verbs: Any, name: str, run: Callable[[Given], int], **texts: str) -> argparse.ArgumentParser:
    """The parser of a verb that `run` runs with what was given."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, formatter_class=_Help, argument_default=argparse.SUPPRESS, allow_abbrev=False, **texts
    )
    parser.set_defaults(run_verb=run, own_parser=parser)
    return parser


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="*", metavar="DATA", help=PretrainSettings.model_fields["data"].description)


def _add_training_options(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """--config and a flag for each setting of a training. `arguments` choose the recipe whose defaults are shown."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings, one `name: value` a line")
    words = [word for argument in arguments for word in argument.split("=", 1)]
    recipe = next((b for a, b in itertools.pairwise(words) if a == "--recipe"), "v2")
    add_options(parser, PretrainSettings, skip=frozenset({"data"}), defaults=RECIPES.get(recipe, {}))


def _add_nproc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=_processes, metavar="N", help="processes on this machine (default: 1)")


def _processes(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise UserError(f"--nproc {text}: must be a number of processes, 1 or more")
    return int(text)


def _add_pretrain(verbs: Any, arguments: list[str]) -> None:
    parser = _leaf(
        verbs,
        "pretrain",
        _pretrain,
        help="pre-train an encoder on images without labels",
        usage="moco pretrain DATA [--config FILE] [--SETTING VALUE ...]\n       moco pretrain --resume RUN",
        description="Pre-train an encoder on images without labels. Values: defaults < recipe < --config < flags.",
        epilog=EPILOGUE,
    )
    _add_data(parser)
    parser.add_argument("--resume", metavar="RUN", help="run folder to continue from its newest checkpoint")
    _add_nproc(parser)
    _add_training_options(parser, arguments)


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
    parser = _leaf(
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
    _add_nproc(parser)
    add_options(parser, PretrainSettings, skip=frozenset({"data"}))


def _resume(given: Given) -> int:
    from moco.pretraining import resume

    resume(given.pop("run"), **given)
    return 0


def _add_bench(verbs: Any, arguments: list[str]) -> None:
    parser = _leaf(
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
    _add_data(parser)
    parser.add_argument("--seconds", type=float, metavar="X", help="how long to measure, about (default: 60)")
    parser.add_argument(
        "--json", dest="json_file", metavar="FILE", help="write the figures there; - for standard output, and no table"
    )
    _add_training_options(parser, arguments)


def _bench(given: Given) -> int:
    from moco.bench import benchmark

    benchmark(given.pop("data", ""), **given)
    return 0


TASK_HELP = {
    "knn": "nearest neighbours vote on the label",
    "linear": "a linear classifier on frozen features",
    "fewshot": "a linear classifier from few labels",
    "retrieval": "are the nearest pictures of the same label, or the same picture?",
}


def _add_eval(verbs: Any, arguments: list[str]) -> None:
    usage = "moco eval knn|linear|fewshot|retrieval RUN [DATA] [--test DATA] [--OPTION VALUE ...]"
    parser = _leaf(
        verbs,
        "eval",
        _no_task,
        help="evaluate what a run has learned, beside an untrained network",
        usage=usage,
        description="Evaluate a run (a folder, a checkpoint in one, or the name of a timm model) on labelled pictures.",
        epilog="example:\n  moco eval linear runs/first photos/ --test more-photos/\n",
    )
    tasks = parser.add_subparsers(dest="task", metavar="|".join(TASKS), parser_class=_Parser)
    for task, kind in TASKS.items():
        _add_inspection(
            tasks, task, _evaluating(task), kind, help=TASK_HELP[task], usage=usage.replace("|".join(TASKS), task)
        )
    if len(arguments) > 1 and arguments[0] == "eval" and arguments[1] not in TASKS and arguments[1][:1] != "-":
        raise UserError(f"unknown evaluation {arguments[1]!r}{nearest(arguments[1], TASKS)} (see moco eval --help)")


def _no_task(given: Given) -> int:
    raise UserError(f"name an evaluation: moco eval {'|'.join(TASKS)} RUN [DATA] (see moco eval --help)")


def _evaluating(task: str) -> Callable[[Given], int]:
    def run(given: Given) -> int:
        from moco.evaluation import evaluate

        evaluate(task, given.pop("subject"), given.pop("data", None), **given)
        return 0

    return run


def _add_health(verbs: Any, arguments: list[str]) -> None:
    _add_inspection(
        verbs,
        "health",
        _health,
        HealthSettings,
        help="is a run healthy: collapse, batch norm leaks, stale keys; exit status 1 if something is bad",
        usage="moco health RUN [DATA] [--OPTION VALUE ...]",
        description="Examine a run: each figure with a verdict (good, watch, bad), the reason and what to do.\n"
        "Exit status 1 if something is bad.",
        epilog="example:\n  moco health runs/first\n",
    )


def _health(given: Given) -> int:
    from moco.health import health

    return int(health(given.pop("subject"), given.pop("data", None), **given).verdict == "bad")


def _add_inspection(verbs: Any, name: str, run: Callable[[Given], int], kind: type[BaseModel], **texts: str) -> None:
    parser = _leaf(verbs, name, run, **texts)
    parser.add_argument("subject", metavar="RUN", help="run folder, a checkpoint in one, or the name of a timm model")
    parser.add_argument("data", nargs="?", metavar="DATA", help=kind.model_fields["data"].description)
    add_options(parser, kind, skip=frozenset({"data"}), defaults={})


def _add_check(verbs: Any, arguments: list[str]) -> None:
    parser = _leaf(
        verbs,
        "check",
        _check,
        help="look at every picture before hours are spent: what there is, what is damaged, what is there twice",
        usage="moco check DATA [--json FILE] [--fix-list good.txt] [--labels ...] [--workers N]",
        description="Read every picture: counts by format, size, mode and label, unreadable files with reasons,\n"
        "exact and near duplicates, and settings that fit.",
        epilog="example:\n  moco check photos/ --fix-list good.txt && moco pretrain good.txt\n",
    )
    parser.add_argument("data", metavar="DATA", help=PretrainSettings.model_fields["data"].description)
    parser.add_argument("--labels", metavar="NAME", help=PretrainSettings.model_fields["labels"].description)
    parser.add_argument("--workers", type=int, metavar="N", help="processes that read (default: one for each core)")
    parser.add_argument("--json", dest="json_file", metavar="FILE", help="write what was found there; - for stdout")
    parser.add_argument("--fix-list", metavar="FILE", help="write the paths of the good pictures there (.txt)")


def _check(given: Given) -> int:
    from moco.check import run_check

    run_check(given.pop("data"), **given)
    return 0


def _add_demo(verbs: Any, arguments: list[str]) -> None:
    parser = _leaf(verbs, "demo", _demo, help="pre-train on the pictures in the package, evaluate, show")
    parser.add_argument("--out", metavar="RUN", help="run folder; a number is added if it exists (default: runs/demo)")


def _demo(given: Given) -> int:
    from moco.demo import demonstrate

    demonstrate(given.get("out", "runs/demo"))
    return 0
