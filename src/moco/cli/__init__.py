"""`moco VERB`. Options are generated from the settings classes; what is wrong is said in one line, exit status 2.

Each verb is a function that adds its parser, and one that runs it with what was given. parsing: what parsers are
made of; training, examining, using, housekeeping: the verbs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from moco import __version__
from moco.cli import examining, housekeeping, training, using
from moco.cli.parsing import Given, Parser
from moco.errors import Interrupted, TrainingError, UserError
from moco.settings import nearest


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


def make_parser(arguments: list[str]) -> tuple[argparse.ArgumentParser, Any]:
    """The parser of the whole command line, and the group of its verbs. `arguments` choose the defaults in the help."""
    parser = Parser(prog="moco", description="Self-supervised pre-training with Momentum Contrast", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"moco {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    for add in (*training.VERBS, *examining.VERBS, *using.VERBS, *housekeeping.VERBS):
        add(verbs, arguments)
    return parser, verbs


def _dispatch(arguments: list[str]) -> int:
    parser, verbs = make_parser(arguments)
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
    from torch.distributed.elastic.multiprocessing import SignalException
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
    except SignalException as stop:  # passed on to the processes, which have saved and said how to go on
        return 128 + stop.sigval.value
    return 0
