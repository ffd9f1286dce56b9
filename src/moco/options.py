"""Settings fields as flags of the command line: name, meaning, default and choices come from the settings class."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo


def add_options(
    parser: argparse.ArgumentParser,
    kind: type[BaseModel],
    *,
    skip: frozenset[str] = frozenset(),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """A flag for each field of a settings class. The classes it is made of are the headings.

    skip: fields without a flag. defaults: those to show where they differ from the class's; None shows none at all.
    """
    shown = set(skip)
    for part in reversed(kind.__mro__):
        own = [name for name in getattr(part, "__annotations__", {}) if name in kind.model_fields and name not in shown]
        if not own:
            continue
        group = parser.add_argument_group((part.__doc__ or part.__name__).strip().lower())
        for name in own:
            field = kind.model_fields[name]
            add_option(group, name, field, "" if defaults is None else defaults.get(name, field.default))
            shown.add(name)


def add_option(group: argparse._ArgumentGroup, name: str, field: FieldInfo, default: Any) -> None:
    """Add the flag of one settings field: its name in kebab case, its description and default as help."""
    flag, text = "--" + name.replace("_", "-"), (field.description or name).replace("%", "%%")
    if default not in ("", ()) and "(default: " not in text:  # a description may say what None stands for
        text += f" (default: {_shown(default)})"
    if field.annotation is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif field.annotation is str:
        group.add_argument(flag, metavar="NAME", help=text)
    else:
        several = _is_tuple(field.annotation)
        read = _value_or_none if type(None) in get_args(field.annotation) else _value
        words = "|".join(dict.fromkeys(_words(field.annotation)))
        group.add_argument(flag, nargs="+" if several else None, type=read, metavar=words, help=text)


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(f"{number:.4g}" for number in default)
    if isinstance(default, bool):
        return "yes" if default else "no"
    return "none" if default is None else str(default)


def _words(annotation: Any) -> Iterator[str]:
    """What a value of this type may look like, in the help: choices as they are, N for whole numbers, X for others."""
    plain = {str: "NAME", int: "N", float: "X", bool: "true|false", type(None): "none"}
    if annotation in plain:
        yield plain[annotation]
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) is Mapping:
        yield "{name: value}"
    else:
        yield from itertools.chain.from_iterable(map(_words, get_args(annotation)))


def _is_tuple(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(map(_is_tuple, get_args(annotation)))


def _value(text: str) -> Any:
    """A flag's value as YAML would read it, or a number that is none as Python writes it."""
    if text.lower().lstrip("+-") in ("nan", "inf"):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _value_or_none(text: str) -> Any:
    """The same for a setting that may be left empty: `none` stands for nothing."""
    return None if text.lower() == "none" else _value(text)
