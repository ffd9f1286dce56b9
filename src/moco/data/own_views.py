"""Views made by a function of the user, picture by picture, from random numbers that follow from the step."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from moco.data.reading import readable
from moco.data.sources import Source
from moco.errors import UserError

Array = np.ndarray[Any, Any]

OwnView = Callable[[Array, np.random.Generator], Array]
"""(picture uint8 (H, W, C), random numbers) → view uint8 (S, S, C)."""

MISSING = "the views of this run are made by a function: hand it over in Python, moco.resume(RUN, views=FUNCTION)"
_STREAM = 0x6F776E76  # keeps these numbers apart from everybody else's with the same seed


def make_own_views(
    source: Source, ids: Array, view: OwnView, *, seed: int, step: int, first_row: int, size: int, channels: int
) -> tuple[Array, Array, list[tuple[str, str]]]:
    """Two views of the pictures `ids`, uint8 (2, n, S, S, C); the numbers of those used, (name, reason) of the others.

    first_row: of these pictures in the batch of all processes. A view is a function of (seed, step, row, which of the
    two), so that a run can be continued at any step, with any number of workers. Raises UserError where `view` returns
    something else than a view.
    """
    views = np.empty((2, len(ids), size, size, channels), np.uint8)
    used, skipped = ids.copy(), []
    for row, index in enumerate(ids):
        pixels, used[row], missed = readable(source, int(index), channels)
        skipped += missed
        for which in range(2):
            key = (_STREAM, step, first_row + row, which)
            generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
            made = view(pixels.copy(), generator)
            views[which, row] = _checked(made, size, channels)
    return views, used, skipped


def check_own_view(view: OwnView, workers: int) -> None:
    """Raise UserError where the function cannot travel to worker processes."""
    if workers == 0 or multiprocessing.get_start_method() == "fork":
        return
    try:
        pickle.dumps(view)
    except Exception as error:  # whatever the parts of it come up with
        raise UserError(
            f"views: the function cannot go to worker processes ({' '.join(str(error).split())}): define it at the top "
            "of a module, or set workers to 0"
        ) from error


def _checked(made: Any, size: int, channels: int) -> Array:
    found = made[:, :, None] if isinstance(made, np.ndarray) and made.ndim == 2 else made
    if not isinstance(found, np.ndarray) or found.dtype != np.uint8 or found.shape != (size, size, channels):
        what = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else f"a {type(made).__name__}"
        raise UserError(f"views: the function must return uint8 ({size}, {size}, {channels}), not {what}")
    return found
