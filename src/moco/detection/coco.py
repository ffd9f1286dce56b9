"""COCO: one JSON file with images, annotations and categories. Read without pycocotools' own reader, which prints, and
stops with a Python error at the first thing that is not as it should be."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moco.detection.marked import LeftOut, MarkedSet, Marks
from moco.detection.outlines import Outline, box_of, outline_of
from moco.detection.sizes import size_of
from moco.errors import UserError

LOOKED_FOR = 50
"""Pictures by which the folder of all is found."""

Entry = dict[str, Any]


def read_coco(file: Path, *, outlines: bool = True) -> MarkedSet:
    """The pictures of an annotation file and the objects in them.

    outlines: read masks too. Pictures are looked for beside the file, in a folder `images` or one named after the file
    (instances_train2017.json: train2017), there or one level up. Entries that cannot be used are left out and counted.
    Raises UserError for a file that is no COCO annotation file, or none of whose pictures is there.
    """
    content = _content(file)
    left_out = LeftOut()
    names = _categories(file, content["categories"])
    classes = tuple(dict.fromkeys(names.values()))
    labels = {number: classes.index(name) for number, name in names.items()}
    images = _images(content["images"], left_out)
    by_image = _annotations(content["annotations"], images, labels, left_out)
    folder = _folder(file, images)
    pictures = []
    for number, image in images.items():
        path = folder / image["file_name"]
        if not path.is_file():
            left_out.add("pictures that are not there", str(path))
            continue
        size = _size(image, path)
        if size is None:
            left_out.add("pictures without a size that cannot be read either", str(path))
            continue
        marks = Marks(path, *size, left_out)
        for entry in by_image.get(number, ()):
            _add(marks, entry, labels[entry["category_id"]], size, outlines, left_out)
        pictures.append(marks.done())
    return MarkedSet(str(file), classes, tuple(pictures), tuple(left_out.lines(file.name)))


def _content(file: Path) -> Entry:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is no JSON file, or a damaged one: {' '.join(str(error).split())[:120]}") from error
    needed = ("images", "annotations", "categories")
    missing = [name for name in needed if not (isinstance(content, dict) and isinstance(content.get(name), list))]
    if missing:
        raise UserError(f"{file} is no COCO annotation file: it has no list of {', '.join(missing)}")
    found: Entry = content
    return found


def _categories(file: Path, given: Sequence[Any]) -> dict[int, str]:
    """Names by number; COCO's numbers have gaps."""
    try:
        names = {int(entry["id"]): str(entry["name"]) for entry in given}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: each category needs an id (a number) and a name") from error
    if not names:
        raise UserError(f"{file} has no categories: there is nothing to tell apart")
    return names


def _images(given: Sequence[Any], left_out: LeftOut) -> dict[Any, Entry]:
    images: dict[Any, Entry] = {}
    for place, entry in enumerate(given):
        named = isinstance(entry, dict) and isinstance(entry.get("file_name"), str)
        if not named or type(entry.get("id")) not in (int, str):
            left_out.add("images without id or file_name", f"images[{place}]")
        elif entry["id"] in images:
            left_out.add("images with the id of another one", f"images[{place}], id {entry['id']}")
        else:
            images[entry["id"]] = entry
    return images


def _annotations(
    given: Sequence[Any], images: dict[Any, Entry], labels: dict[int, int], left_out: LeftOut
) -> dict[Any, list[Entry]]:
    found: dict[Any, list[Entry]] = defaultdict(list)
    for place, entry in enumerate(given):
        where = f"annotations[{place}]"
        if not isinstance(entry, dict):
            left_out.add("annotations that are no entries", where)
        elif type(entry.get("image_id")) not in (int, str) or entry["image_id"] not in images:
            left_out.add("objects of a picture that is not listed", where)
        elif type(entry.get("category_id")) is not int or entry["category_id"] not in labels:
            left_out.add("objects of a category that is not listed", where)
        else:
            found[entry["image_id"]].append(entry | {"where": where})
    return found


def _folder(file: Path, images: dict[Any, Entry]) -> Path:
    """Where the pictures are: the candidate with the most of the first ones."""
    beside, above = file.parent, file.parent.parent
    part = file.stem.removeprefix("instances_")
    candidates = [beside, *(place / name for place in (above, beside) for name in (part, "images", f"images/{part}"))]
    first = [entry["file_name"] for entry in list(images.values())[:LOOKED_FOR]]
    found = [sum((folder / name).is_file() for name in first) for folder in candidates]
    if not any(found):
        example = f", such as {first[0]}," if first else ""
        raise UserError(
            f"none of the pictures{example} of {file} is there: put them beside it, into {above / part} or into "
            f"{above / 'images'}"
        )
    return candidates[found.index(max(found))]


def _size(image: Entry, path: Path) -> tuple[int, int] | None:
    width, height = image.get("width"), image.get("height")
    if type(width) is int and type(height) is int and width > 0 and height > 0:
        return width, height
    return size_of(path)


def _add(marks: Marks, entry: Entry, label: int, size: tuple[int, int], outlines: bool, left_out: LeftOut) -> None:
    """Add an object, by its box or else that of its mask."""
    width, height = size
    outline: Outline | None = None
    segmentation = entry.get("segmentation")
    if segmentation and outlines:
        try:
            outline = outline_of(segmentation, height, width)
        except (ValueError, TypeError, OverflowError):
            left_out.add("masks that cannot be read", entry["where"])
            return
    box = entry.get("bbox")
    if isinstance(box, list) and len(box) == 4 and all(type(value) in (int, float) for value in box):
        edges: tuple[float, ...] = (box[0], box[1], box[0] + box[2], box[1] + box[3])
    elif outline is not None:
        edges = box_of(outline)
    else:
        left_out.add("objects without a box", entry["where"])
        return
    marks.add(edges, label, entry["where"], aside=bool(entry.get("iscrowd", 0)), outline=outline)
