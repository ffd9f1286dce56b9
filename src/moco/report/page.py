"""One page in one file: template, style and script, and a policy that lets it fetch nothing and run nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def render(template: str, values: Mapping[str, Any]) -> bytes:
    """A page from a template in this folder. Whatever is in `values` is escaped but for `markupsafe.Markup`.

    The page brings its Content-Security-Policy: its own style and script by their hashes, pictures as data URIs, and
    nothing from outside.
    """
    style, script = _text("page.css"), _text("page.js")
    policy = "; ".join(
        (
            "default-src 'none'",
            "img-src data:",
            f"style-src '{_hash(style)}'",
            f"script-src '{_hash(script)}'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    made = _environment().get_template(template).render(values, style=style, script=script, policy=policy)
    # Names of files may hold what is no Unicode (lone surrogates): shown as they are written in Python.
    return made.encode("utf-8", "backslashreplace")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("moco.report", "."),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = _percent
    environment.filters["flags"] = _flags
    return environment


def _percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{share * 100:.{digits}f}\N{NO-BREAK SPACE}%"


def _flags(text: object) -> Markup:
    """A text in which no line ends inside the name of an option, though these have hyphens."""
    return Markup(_FLAG.sub(r'<span class="flag">\g<0></span>', str(escape(text))))


def _text(name: str) -> str:
    return (resources.files("moco.report") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
