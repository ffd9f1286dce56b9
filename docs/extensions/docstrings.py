"""The docstrings of this project are Markdown; autodoc wants reStructuredText."""

from __future__ import annotations

import itertools
import re
from typing import Any


def to_rst(lines: list[str]) -> list[str]:
    """Docstring lines with code in double backticks, tables as lists of columns, and examples apart."""
    found: list[str] = []
    for line in lines:
        if line.lstrip().startswith(">>>") and found and found[-1].strip() and not found[-1].lstrip().startswith(">>>"):
            found.append("")
        if line.lstrip().startswith("|"):
            found += _row(line, first=not (found and found[-1].startswith("   ")))
        else:
            found.append(line if line.lstrip().startswith(">>>") else _inline(line))
    return found


def _inline(text: str) -> str:
    parts = re.split(r"(?<!`)`([^`]+)`(?!`)", text)  # text, code, text, …
    words = (re.sub(r"(\w)_(?!\w)", r"\1\\_", part).replace("|", "\\|") for part in parts[::2])
    return "".join(
        part
        for pair in itertools.zip_longest(words, (f"``{code}``" for code in parts[1::2]), fillvalue="")
        for part in pair
    )


def _row(line: str, first: bool) -> list[str]:
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    if all(set(cell) <= set("-:") for cell in cells) and any(cells):
        return []
    start = ["", ".. list-table::", "   :header-rows: 1", ""] if first else []
    return start + [f"   {'* ' if number == 0 else '  '}- {_inline(cell)}" for number, cell in enumerate(cells)]


def _process(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", _process, priority=100)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
