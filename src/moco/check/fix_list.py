"""The list of good files that `moco pretrain` takes in place of the data set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from moco.data.sources import Source
from moco.errors import UserError

Array = np.ndarray[Any, Any]


def write_list(file: Path, source: Source, numbers: Array) -> int:
    """Write the absolute paths of some pictures of a source, one a line; return how many cannot be in such a list.

    Raises UserError for a source that is not made of files, and where the list cannot be written.
    """
    if len(numbers) == 0:
        raise UserError(f"--fix-list {file}: no image can be read, so that there is nothing to list")
    left_out = 0
    try:
        with open(file, "w", encoding="utf-8", errors="surrogateescape", newline="\n") as out:
            for number in numbers:
                path = _path(source, int(number))
                if "\n" in path or "\r" in path:
                    left_out += 1
                else:
                    out.write(f"{path}\n")
    except OSError as error:
        raise UserError(f"--fix-list {file}: {error.strerror}") from error
    return left_out


def _path(source: Source, number: int) -> str:
    names: Any = getattr(source, "names", None)
    root: Any = getattr(source, "root", None)
    if names is not None and root is not None:
        return os.path.abspath(os.path.join(str(root), str(names[number])))
    path = os.path.abspath(source[number].name)  # several folders or lists as one source
    if not os.path.isfile(path):
        raise UserError("--fix-list: only images that are files of their own can be listed, not those in archives")
    return path
