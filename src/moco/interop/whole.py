"""A folder that is there as a whole, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moco.errors import UserError


def check_free(folder: Path) -> None:
    """Raise UserError unless there is nothing of this name, or an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: choose another --out")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to fill, which takes its place at the end, or goes where something fails."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
