"""What the verbs' parsers are made of. Mistakes become one line, with the nearest name where a name is wrong.

The parser is made here in a few lines rather than by a library, since layered settings (recipe < file < flags) need
to know which flags were really given, and a mistake should be one line with the nearest name.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from pydantic import BaseModel

from moco.errors import UserError
from moco.options import add_options
from moco.recipes import RECIPES, recipe_values
from moco.settings import PretrainSettings

Given = dict[str, Any]
"""What was given on the command line, by name."""


class Parser(argparse.ArgumentParser):
    """A parser that raises its complaints, for `cli.main` to show."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message} (see {self.prog} --help)")


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that keeps descriptions as they are written, and flags whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # or it would tear flags apart


def leaf(verbs: Any, name: str, run: Callable[[Given], int], **texts: str) -> argparse.ArgumentParser:
    """The parser of a verb that `run` runs with what was given."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, formatter_class=Help, argument_default=argparse.SUPPRESS, allow_abbrev=False, **texts
    )
    parser.set_defaults(run_verb=run, own_parser=parser)
    return parser


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """--quiet."""
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def add_output(parser: argparse.ArgumentParser) -> None:
    """--quiet and --json, which `Output` acts on."""
    add_quiet(parser)
    parser.add_argument(
        "--json", dest="json_file", metavar="FILE",
        help="write the result there as JSON; - for standard output, where nothing else goes then",
    )  # fmt: skip


class Output:
    """What a verb prints, and its result as JSON, the same for every verb.

    >>> with Output(given) as output:
    ...     output.result = …

    With --quiet nothing is printed, and with `--json -` all words go to standard error. The result is written when the
    block ends well. Raises UserError at the start where the file could not be written: not after hours of work.
    """

    def __init__(self, given: Given) -> None:
        self.result: Any = None
        self._quiet, self._file = given.pop("quiet", False), str(given.pop("json_file", ""))
        self._stack = contextlib.ExitStack()
        path = Path(self._file)
        if self._file not in ("", "-") and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UserError(f"--json {path}: cannot write there; name a file in a folder that exists")

    @property
    def wanted(self) -> bool:
        """Whether a result is asked for at all."""
        return bool(self._file)

    def __enter__(self) -> Output:
        if self._quiet:
            nowhere = self._stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            self._stack.enter_context(contextlib.redirect_stdout(nowhere))
        elif self._file == "-":
            self._stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is None and self._file:
            self._write(json.dumps(plain(self.result), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def _write(self, text: str) -> None:
        path = Path(self._file)
        try:
            if self._file == "-":
                print(text, end="")
            elif path.exists() and not path.is_file():  # a pipe
                path.write_text(text, encoding="utf-8")
            else:
                partial = path.with_name(path.name + ".partial")
                partial.write_text(text, encoding="utf-8")
                partial.replace(path)
        except OSError as error:
            raise UserError(f"--json {self._file}: {error.strerror}") from error


def plain(value: Any) -> Any:
    """A result as JSON can hold it: a number that is none becomes null, paths and the like become text."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def add_data(parser: argparse.ArgumentParser) -> None:
    """DATA, one or several."""
    parser.add_argument("data", nargs="*", metavar="DATA", help=PretrainSettings.model_fields["data"].description)


def add_training_options(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """--config and a flag for each setting of a training. `arguments` choose the recipe whose defaults are shown."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings, one `name: value` a line")
    words = [word for argument in arguments for word in argument.split("=", 1)]
    chosen = dict(itertools.pairwise(words))
    recipe = chosen.get("--recipe", "v2")
    defaults = recipe_values(recipe, chosen.get("--backbone")) if recipe in RECIPES else {}
    add_options(parser, PretrainSettings, skip=frozenset({"data"}), defaults=defaults)


def add_nproc(parser: argparse.ArgumentParser) -> None:
    """--nproc, which `cli.main` acts on."""
    parser.add_argument("--nproc", type=_processes, metavar="N", help="processes on this machine (default: 1)")


def _processes(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise UserError(f"--nproc {text}: must be a number of processes, 1 or more")
    return int(text)


def add_inspection(verbs: Any, name: str, run: Callable[[Given], int], kind: type[BaseModel], **texts: str) -> None:
    """The parser of a verb that looks at a run: RUN, DATA, and a flag for each field of its settings."""
    parser = leaf(verbs, name, run, **texts)
    parser.add_argument("subject", metavar="RUN", help="run folder, a checkpoint in one, or the name of a timm model")
    parser.add_argument("data", nargs="?", metavar="DATA", help=kind.model_fields["data"].description)
    add_output(parser)
    add_options(parser, kind, skip=frozenset({"data"}), defaults={})
