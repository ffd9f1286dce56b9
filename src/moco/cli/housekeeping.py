"""The verbs around the work: runs, clean, completion."""

from __future__ import annotations

from typing import Any

from moco.cli.completion import SHELLS, completion_script
from moco.cli.parsing import Given, Output, add_output, leaf
from moco.errors import UserError


def _add_runs(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "runs",
        _runs,
        help="the run folders in a folder: state, best figures, disk use",
        usage="moco runs [FOLDER] [--json FILE]",
        description="List run folders, up to three levels deep: running, finished, stopped at which epoch, failed\n"
        "(at a loss that was no number) or damaged; newest loss, best check after an epoch, disk use, age.",
        epilog="examples:\n  moco runs\n  moco runs /scratch/me --json -\n",
    )
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="where to look (default: runs)")
    add_output(parser)


def _runs(given: Given) -> int:
    from rich.console import Console

    from moco.run_folders import runs, show_runs

    with Output(given) as output:
        folder = given.get("folder", "runs")
        found = runs(folder)
        show_runs(found, folder, Console(soft_wrap=True))
        output.result = [one.as_dict() for one in found]
    return 0


def _add_clean(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "clean",
        _clean,
        help="make room: remove older checkpoints and cached features of runs",
        usage="moco clean RUN ... [--keep N] [--dry-run]\n       moco clean --all FOLDER [--keep N] [--dry-run]",
        description="Remove checkpoints but the newest whole ones and the best one, what a crash left half-written,\n"
        "and features that moco eval can compute again. A run that is being trained is refused; --all passes it over.",
        epilog="examples:\n  moco clean runs/first --dry-run\n  moco clean --all runs/\n",
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folder")
    parser.add_argument("--all", metavar="FOLDER", help="every run folder in there, up to three levels deep")
    parser.add_argument("--keep", type=int, metavar="N", help="newest whole checkpoints that stay (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go, and how much room it takes")
    add_output(parser)


def _clean(given: Given) -> int:
    from rich.console import Console

    from moco.run_folders import clean, find_runs, show_cleaned

    with Output(given) as output:
        named, folder = given.get("runs", []), given.get("all")
        if bool(named) == (folder is not None):
            raise UserError(
                "name run folders, or all of those in a folder: moco clean RUN ..., or moco clean --all FOLDER"
            )
        dry_run = given.get("dry_run", False)
        found = clean(
            find_runs(folder) if folder is not None else named,
            keep=given.get("keep", 1),
            dry_run=dry_run,
            skip_held=folder is not None,
        )
        show_cleaned(found, Console(soft_wrap=True), dry_run=dry_run)
        output.result = [one.as_dict() for one in found]
    return 0


def _add_completion(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "completion",
        _completion,
        help="print a script with which a shell completes verbs, flags, choices and files",
        usage=f"moco completion {'|'.join(SHELLS)}",
        description="Print a completion script. It knows the flags of this version: write it again after an update.",
        epilog="examples:\n"
        '  eval "$(moco completion bash)"        # in ~/.bashrc; quicker: write it to a file and source that\n'
        "  moco completion zsh > ~/.zfunc/_moco  # a folder of $fpath\n"
        "  moco completion fish > ~/.config/fish/completions/moco.fish\n",
    )
    parser.add_argument("shell", choices=SHELLS, help="for which shell")


def _completion(given: Given) -> int:
    from moco.cli import make_parser

    print(completion_script(make_parser([])[0], given["shell"]))
    return 0


VERBS = (_add_runs, _add_clean, _add_completion)
