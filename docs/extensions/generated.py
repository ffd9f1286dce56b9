"""Pages made from the code: `<!-- generated: PART WORDS -->` in a page becomes Markdown before Sphinx reads it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from moco import __all__ as PUBLIC
from moco.cli import make_parser
from moco.options import _shown, _words
from moco.recipes import RECIPES, recipe_values
from moco.settings import PretrainSettings

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))
from messages import Message, messages

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"^<!-- generated: (\w+)(.*?)-->$", re.MULTILINE)


def fill(text: str) -> str:
    """A page with its generated parts. Raises KeyError for a part that is not there."""
    return MARK.sub(lambda mark: "\n".join(PARTS[mark[1]](mark[2].split())), text)


def verbs() -> dict[str, argparse.ArgumentParser]:
    """The parser of each verb; evaluations by their full name."""
    return dict(_leaves("moco", make_parser([])[0]))


def _leaves(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    if name != "moco":
        yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from _leaves(f"{name} {word}", below)


def commands(_: list[str]) -> Iterator[str]:
    """A section for each verb: what it does, how it is called, its options, examples."""
    for name, parser in verbs().items():
        yield from ("", f"## {name}", "")
        yield from ("```text", _usage(parser), "```", "")
        if parser.description:
            yield from (" ".join(parser.description.split()), "")
        takes_settings, rows = False, []
        for action in parser._actions:
            if action.dest in PretrainSettings.model_fields and action.option_strings and _is_training(parser):
                takes_settings = True
            elif not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
                rows.append(f"| {_how(action)} | {_cell(action.help or '')} |")
        if rows:
            yield from ("| | |", "|---|---|", *rows, "")
        if takes_settings:
            yield from ("And a flag for each [setting of a training](settings.md).", "")
        if parser.epilog:
            lines = [line.strip() for line in parser.epilog.splitlines() if line.startswith(" ")]
            yield from ("```", *lines, "```", "")


def _usage(parser: argparse.ArgumentParser) -> str:
    return re.sub(r"^ +", "", parser.format_usage().removeprefix("usage: ").rstrip(), flags=re.MULTILINE)


def _is_training(parser: argparse.ArgumentParser) -> bool:
    return {"backbone", "temperature", "epochs"} <= {action.dest for action in parser._actions}


def _how(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    takes = action.nargs != 0 and action.option_strings and not isinstance(action, argparse.BooleanOptionalAction)
    return names + (f" `{_cell(str(action.metavar or action.dest.upper()))}`" if takes else "")


def _cell(text: str) -> str:
    """Text for a table: one line, without what Markdown or HTML would take for its own."""
    return " ".join(text.replace("%%", "%").split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def settings(_: list[str]) -> Iterator[str]:
    """A table for each group of settings: flag, values, default, meaning."""
    shown = {"data"}
    for part in reversed(PretrainSettings.__mro__):
        own = [n for n in getattr(part, "__annotations__", {}) if n in PretrainSettings.model_fields and n not in shown]
        if not own:
            continue
        yield from ("", f"## {(part.__doc__ or part.__name__).strip()}", "")
        yield from ("| flag | values | default | |", "|---|---|---|---|")
        for name in own:
            field = PretrainSettings.model_fields[name]
            words = "\\|".join(dict.fromkeys(_words(field.annotation)))
            default = _shown(field.default) or "–"
            yield f"| `--{name.replace('_', '-')}` | `{words}` | `{default}` | {_cell(field.description or '')} |"
            shown.add(name)
        yield ""


def recipes(_: list[str]) -> Iterator[str]:
    """What each recipe sets beside the defaults."""
    yield from ("| recipe | differs from the defaults in |", "|---|---|")
    fields = PretrainSettings.model_fields
    for recipe in RECIPES:
        changed = {name: value for name, value in recipe_values(recipe).items() if fields[name].default != value}
        yield f"| `{recipe}` | {_words_of(changed)} |"
        transformer = recipe_values(recipe, "vit_small_patch16_224")
        if transformer != recipe_values(recipe):
            other = {name: value for name, value in transformer.items() if recipe_values(recipe).get(name) != value}
            yield f"| `{recipe}`, vision transformers | as above, but {_words_of(other)} |"


def _words_of(values: dict[str, Any]) -> str:
    return ", ".join(f"`{name} {_shown(value)}`" for name, value in values.items()) or "nothing"


def errors(places: list[str]) -> Iterator[str]:
    """The messages of these files, and of folders (ending in /) but for files named elsewhere; `rest`: of no place."""
    named = _named_places()
    chosen = [m for m in all_messages() if (_place(m.module, named) or "rest") in places]
    for text, kind in dict.fromkeys((message.text.strip(), message.kind) for message in chosen):
        yield f"- ``{text}``{f' ({kind})' if kind else ''}"
    yield "" if chosen else "Nothing."


@cache
def all_messages() -> list[Message]:
    """The messages of this program."""
    return messages(ROOT / "src" / "moco")


@cache
def _named_places() -> list[str]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return [name for mark in MARK.finditer(page) if mark[1] == "errors" for name in mark[2].split()]


def _place(module: str, named: list[str]) -> str | None:
    """The name on the page that a file belongs to: its own, or else that of its folder."""
    return module if module in named else next((n for n in named if n[-1] == "/" and module.startswith(n)), None)


def api(_: list[str]) -> Iterator[str]:
    """Each public name, by autodoc."""
    import moco

    for name in PUBLIC:
        if name.startswith("_"):
            continue
        kind = "autoclass" if isinstance(getattr(moco, name), type) else "autofunction"
        yield from ("", f"## {name}", "", "```{eval-rst}", f".. {kind}:: moco.{name}")
        if kind == "autoclass" and not issubclass(getattr(moco, name), (BaseException, PretrainSettings)):
            yield "   :members:"
        yield from ("```", "")


def guides(_: list[str]) -> Iterator[str]:
    """The pages that index.md does not name: a new page is listed as soon as it is there."""
    named = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()
    pages = (path.stem for path in sorted((ROOT / "docs").glob("*.md")))
    yield from (page for page in pages if page not in (*named, "index"))


PARTS: dict[str, Callable[[list[str]], Iterator[str]]] = {
    "commands": commands,
    "settings": settings,
    "recipes": recipes,
    "errors": errors,
    "api": api,
    "guides": guides,
}


def _read(_app: Any, _name: str, source: list[str]) -> None:
    source[0] = fill(source[0])


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
