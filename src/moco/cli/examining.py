"""The verbs that look: eval, health, report, check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from moco.cli.parsing import Given, Output, Parser, add_inspection, add_output, leaf
from moco.errors import UserError
from moco.evaluation_settings import TASKS, DetectSettings, HealthSettings, ReportSettings
from moco.options import add_options
from moco.settings import PretrainSettings, nearest

TASK_HELP = {
    "knn": "nearest neighbours vote on the label",
    "linear": "a linear classifier on frozen features",
    "fewshot": "a linear classifier from few labels",
    "finetune": "the whole network learns from labels, beside training from scratch",
    "retrieval": "are the nearest pictures of the same label, or the same picture?",
}
EVALUATIONS = (*TASKS, "detect")


def _add_eval(verbs: Any, arguments: list[str]) -> None:
    usage = "moco eval knn|linear|fewshot|finetune|retrieval|detect RUN [DATA] [--test DATA] [--OPTION VALUE ...]"
    parser = leaf(
        verbs,
        "eval",
        _no_task,
        help="evaluate what a run has learned, beside an untrained network",
        usage=usage,
        description="Evaluate a run (a folder, a checkpoint in one, or the name of a timm model) on labelled pictures.",
        epilog="example:\n  moco eval linear runs/first photos/ --test more-photos/\n",
    )
    tasks = parser.add_subparsers(dest="task", prog="moco eval", metavar="|".join(EVALUATIONS), parser_class=Parser)
    for task, kind in TASKS.items():
        add_inspection(
            tasks, task, _evaluating(task), kind, help=TASK_HELP[task], usage=usage.replace("|".join(EVALUATIONS), task)
        )
    _add_detect(tasks)
    if len(arguments) > 1 and arguments[0] == "eval" and arguments[1] not in EVALUATIONS and arguments[1][:1] != "-":
        near = nearest(arguments[1], EVALUATIONS)
        raise UserError(f"unknown evaluation {arguments[1]!r}{near} (see moco eval --help)")


def _no_task(given: Given) -> int:
    raise UserError(f"name an evaluation: moco eval {'|'.join(EVALUATIONS)} RUN [DATA] (see moco eval --help)")


def _evaluating(task: str) -> Callable[[Given], int]:
    def run(given: Given) -> int:
        from moco.evaluation import evaluate

        with Output(given) as output:
            output.result = evaluate(task, given.pop("subject"), given.pop("data", None), **given).details
        return 0

    return run


def _add_detect(tasks: Any) -> None:
    parser = leaf(
        tasks,
        "detect",
        _detect,
        help="object detection and segmentation, beside random and supervised weights",
        usage="moco eval detect RUN --data coco:FILE.json|voc:FOLDER/PART [--test …] [--OPTION VALUE ...]",
        description="Train Faster R-CNN or Mask R-CNN from the run's backbone, and the same from random weights.\n"
        "AP of boxes and masks. Stopped, the same command goes on.",
        epilog="example:\n  moco eval detect runs/first --data voc:VOC2007/trainval --test voc:VOC2007/test\n",
    )
    parser.add_argument("subject", metavar="RUN", help="run folder, or a checkpoint in one")
    add_output(parser)
    add_options(parser, DetectSettings, defaults={})


def _detect(given: Given) -> int:
    from moco.detection import detect

    with Output(given) as output:
        output.result = detect(given.pop("subject"), **given).details
    return 0


def _add_health(verbs: Any, arguments: list[str]) -> None:
    add_inspection(
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

    with Output(given) as output:
        found = health(given.pop("subject"), given.pop("data", None), **given)
        output.result = asdict(found)
    return int(found.verdict == "bad")


def _add_report(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "report",
        _report,
        help="one page of a run to look at: curves, verdicts, views, neighbours, a map; or several runs compared",
        usage="moco report RUN [RUN ...] [--data DATA] [--watch] [--OPTION VALUE ...]",
        description="Write RUN/report.html: one file that needs no server and no network. Several runs are\n"
        "compared on one page, comparison.html in the folder of the first.",
        epilog="examples:\n  moco report runs/first --watch\n  moco report runs/first runs/second\n",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    add_output(parser)
    add_options(parser, ReportSettings, defaults={})


def _report(given: Given) -> int:
    from moco.reporting import report

    with Output(given) as output:
        output.result = {"report": report(given.pop("runs"), given.pop("data", None), **given)}
    return 0


def _add_check(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
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
    add_output(parser)
    parser.add_argument("--fix-list", metavar="FILE", help="write the paths of the good pictures there (.txt)")


def _check(given: Given) -> int:
    from moco.check import run_check, words

    with Output(given) as output:
        found = run_check(given.pop("data"), **given)
        output.result = found.as_dict() | {"verdict": words(found)}
    return 0


VERBS = (_add_eval, _add_health, _add_report, _add_check)
