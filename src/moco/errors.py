"""The exceptions that the command line turns into one clear line, and how such a line says what is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


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


def explain(error: ValidationError) -> str:
    """The first problem of a pydantic error as one line: which setting, what was given, what is wrong."""
    first, *rest = error.errors()
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    # A field of several types has one error for each of them.
    others = [other["msg"].removeprefix("Input should be ") for other in rest if other["loc"][0] == first["loc"][0]]
    if first["type"] == "missing":
        return f"{first['loc'][0]} needs another value: {message[:1].lower()}{message[1:]}"
    return f"{first['loc'][0]} = {first['input']!r}: {' or '.join([message[:1].lower() + message[1:], *others])}"
