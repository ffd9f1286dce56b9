"""The exceptions that the command line turns into one clear line, and how such a line says what is wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails


class UserError(ValueError):
    """Bad input. The message is one line: what is wrong, where, and what to do about it. Exit status 2."""


class TrainingError(RuntimeError):
    """Training cannot go on, though the input was well-formed. The message is one line. Exit status 1."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after the step was finished and saved. The message says how to resume.

    status: exit status, 130 after Ctrl-C and 143 after SIGTERM.
    """

    def __init__(self, message: str, status: int = 130) -> None:
        super().__init__(message)
        self.status = status


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known name closest to `name`, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def check_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise UserError for the first given name that is not known."""
    known = list(known)
    for name in given:
        if name not in known:
            raise UserError(f"unknown {what} {name!r}{nearest(name, known)}")


def counted(number: int, one: str, several: str = "") -> str:
    """A number with its noun: `1 image`, `2,000 images`."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def explain(error: ValidationError) -> str:
    """The first problem of a pydantic error as one line: which setting, what was given, what is wrong."""
    first, *rest = error.errors()
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ")
    name, given = first["loc"][0], first["input"]
    if first["type"] == "missing":
        several = (
            f" needs another value beside {', '.join(map(str, given))}" if len(first["loc"]) > 1 else " is missing"
        )
        return f"{name}{several}"
    if (whole := _sentence(first)) is not None:
        return f"{name} = {given!r}: {whole}"
    # A field of several types has one error for each of them; one of several values has one for each that is wrong.
    problems = [first, *(other for other in rest if other["loc"][0] == name and _sentence(other) is None)]
    choices = list(dict.fromkeys(choice for problem in problems for choice in _allowed(problem)))
    near = nearest(given, [choice.strip("'") for choice in choices if choice[0] == "'"]) if type(given) is str else ""
    return f"{name} = {given!r}: must be {', '.join(choices[:-1])}{' or ' * (len(choices) > 1)}{choices[-1]}{near}"


_PLAIN = {
    "int_parsing": ("a whole number",),
    "int_type": ("a whole number",),
    "int_from_float": ("a whole number",),
    "float_parsing": ("a number",),
    "float_type": ("a number",),
    "finite_number": ("a finite number",),
    "bool_parsing": ("true", "false"),
    "bool_type": ("true", "false"),
    "string_type": ("text",),
    "tuple_type": ("several values",),
    "dict_type": ("{name: value}",),
    "mapping_type": ("{name: value}",),
}  # by pydantic's names of the errors
_RANGE = "Input should be "


def _allowed(problem: ErrorDetails) -> tuple[str, ...]:
    """What one problem says that is allowed, as it stands behind `must be`."""
    if problem["type"] == "literal_error":
        return tuple(re.split(", | or ", str(problem["ctx"]["expected"])))
    return _PLAIN.get(problem["type"]) or (problem["msg"].removeprefix(_RANGE),)


def _sentence(problem: ErrorDetails) -> str | None:
    """What one problem says where that is a sentence of its own and not what is allowed."""
    if problem["type"] == "too_long":
        return f"takes {problem['ctx']['max_length']} values, not {problem['ctx']['actual_length']}"
    if problem["type"] in _PLAIN or problem["type"] == "literal_error" or problem["msg"].startswith(_RANGE):
        return None
    text = problem["msg"].removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
