"""`--data coco:… | voc:…`: from words to pictures with objects."""

from __future__ import annotations

import re
from pathlib import Path

from moco.detection.coco import read_coco
from moco.detection.marked import MarkedSet, joined
from moco.detection.voc import read_voc
from moco.errors import UserError

HINT = "coco:FILE.json, or voc:FOLDER/PART such as voc:VOC2007/trainval; several are joined by a comma"


def open_marked(text: str, *, outlines: bool = True) -> MarkedSet:
    """The pictures that `--data` names, one set or several. outlines: read masks where there are some.

    Raises UserError where it is not clear what is meant, or it cannot be read.
    """
    return joined([_open(one, outlines) for one in re.split(r",(?=coco:|voc:)", text)])


def _open(text: str, outlines: bool) -> MarkedSet:
    kind, colon, rest = text.partition(":")
    path = Path(rest).expanduser()
    if kind not in ("coco", "voc") or not colon or not rest:
        raise UserError(f"{text!r} is no marked data: {HINT}")
    if kind == "voc":
        return read_voc(path.parent, path.name)
    if not path.is_file():
        raise UserError(f"there is no file {path}: coco: takes the annotation file, such as instances_train2017.json")
    return read_coco(path, outlines=outlines)
