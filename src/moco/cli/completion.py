"""Scripts that complete the command line in a shell, made from its parsers by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from moco.errors import UserError
from moco.recipes import RECIPES

SHELLS = ("bash", "zsh", "fish")
NO_WORDS = ("N", "X", "NAME", "FILE", "{name: value}")
"""In the help of a flag, what stands for something that the user makes up."""
NUMBERS = ("N", "X")


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script of a shell for this parser and its verbs. The parser is changed on the way.

    Raises UserError where shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise UserError("shell completion needs the package shtab: pip install shtab") from error
    for action in _actions(parser):
        if action.choices or action.nargs == 0:
            continue
        words = _words(action)
        if words:
            action.choices = words
        elif action.metavar not in NUMBERS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    script = str(shtab.complete(parser, shell=shell))
    if shell == "zsh":
        script = script.replace('"(*)::', '"*:')  # every DATA of several, not only the first
        # Sourced from a file as from `eval`: the script would call the completer at once, outside of any Tab.
        script = script.replace("$zsh_eval_context[-1] == eval ", "$zsh_eval_context[-1] == (eval|file) ")
    return script


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a parser and of all its verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in dict.fromkeys(action.choices.values()):
                yield from _actions(below)
        else:
            yield action


def _words(action: argparse.Action) -> list[str]:
    """The words that a flag takes, as its help shows them: auto|NAME takes auto."""
    if action.dest == "recipe":
        return list(RECIPES)
    shown = action.metavar.split("|") if isinstance(action.metavar, str) else []
    return [word for word in shown if word not in NO_WORDS] if len(shown) > 1 else []
