"""Masks of objects, run length encoded as COCO keeps them, by pycocotools."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moco.errors import UserError

Array = np.ndarray[Any, Any]
Outline = Mapping[str, Any]
"""size: [height, width]; counts: bytes, lengths of runs in column order, compressed."""

NEEDED = ("pycocotools", "torchmetrics")


def check_installed() -> None:
    """Raise UserError where the extra `detection` is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"moco eval detect needs {' and '.join(missing)}: pip install 'momentum-contrast[detection]' brings it"
        )


def outline_of(segmentation: Any, height: int, width: int) -> Outline:
    """The mask that COCO's `segmentation` stands for: polygons, runs as numbers, or compressed runs.

    Raises ValueError where it is none of them, or of another size than the picture.
    """
    from pycocotools import mask as rle

    if isinstance(segmentation, Mapping):
        return _runs(segmentation, height, width)
    if not isinstance(segmentation, Sequence) or isinstance(segmentation, str) or not segmentation:
        raise ValueError("neither polygons nor runs")
    polygons = [np.asarray(polygon, np.float64) for polygon in segmentation]
    if any(one.ndim != 1 or len(one) < 6 or len(one) % 2 or not np.isfinite(one).all() for one in polygons):
        raise ValueError("a polygon must be x, y, x, y, … of three points or more")
    found: Outline = rle.merge(rle.frPyObjects([one.tolist() for one in polygons], height, width))
    return found


def _runs(segmentation: Mapping[str, Any], height: int, width: int) -> Outline:
    from pycocotools import mask as rle

    counts, size = segmentation.get("counts"), segmentation.get("size")
    if not isinstance(size, Sequence) or list(size) != [height, width]:
        raise ValueError("runs of another size than the picture")
    if isinstance(counts, (str, bytes)):
        found: Outline = {"size": [height, width], "counts": counts.encode() if isinstance(counts, str) else counts}
    elif isinstance(counts, Sequence) and all(type(count) is int and count >= 0 for count in counts):
        if sum(counts) != height * width:
            raise ValueError("runs that do not fill the picture")
        found = rle.frPyObjects({"counts": list(counts), "size": [height, width]}, height, width)
    else:
        raise ValueError("runs that are no numbers")
    mask_of(found)  # pycocotools looks at compressed runs when it expands them
    return found


def mask_of(outline: Outline) -> Array:
    """(height, width) uint8, 1 inside."""
    from pycocotools import mask as rle

    found: Array = rle.decode(dict(outline))
    return found


def box_of(outline: Outline) -> tuple[float, float, float, float]:
    """Left, top, right and bottom edge of a mask in pixels; without an area where it is empty."""
    from pycocotools import mask as rle

    left, top, width, height = map(float, rle.toBbox(dict(outline)))
    return left, top, left + width, top + height
