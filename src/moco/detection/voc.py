"""Pascal VOC: a folder with Annotations/*.xml, ImageSets/Main/*.txt and JPEGImages/."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree
from xml.parsers import expat

from moco.detection.marked import LeftOut, Marked, MarkedSet, Marks
from moco.detection.sizes import size_of
from moco.errors import UserError

EDGES = ("xmin", "ymin", "xmax", "ymax")


def read_voc(folder: Path, part: str) -> MarkedSet:
    """The pictures named in ImageSets/Main/PART.txt and the objects in them, without masks.

    Pixels count from 1 in these files, and the last one belongs to the box. Difficult objects are set aside. Classes
    are sorted by name. Entries that cannot be used are left out and counted. Raises UserError where there is no such
    list, or none of its pictures is there.
    """
    listing = folder / "ImageSets" / "Main" / f"{part}.txt"
    try:
        lines = listing.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        parts = ", ".join(sorted(path.stem for path in listing.parent.glob("*.txt"))[:8])
        there = f"; there are {parts}" if parts else ""
        raise UserError(f"cannot read {listing}: voc:FOLDER/PART needs the list of PART there{there}") from error
    left_out = LeftOut()
    found = []
    for name in (line.split()[0] for line in lines if line.strip()):
        file = folder / "Annotations" / f"{name}.xml"
        try:
            found.append((name, file, parse(file.read_bytes())))
        except OSError:
            left_out.add("annotation files that are not there", str(file))
        except ValueError as error:
            left_out.add(f"annotation files that cannot be read ({error})", str(file))
    classes = tuple(sorted({_text(item, "name") for _, _, root in found for item in root.iter("object")} - {""}))
    pictures = [_picture(folder, name, file, root, classes, left_out) for name, file, root in found]
    usable = tuple(picture for picture in pictures if picture is not None)
    if not usable:
        raise UserError(f"none of the {len(lines)} pictures in {listing} can be used{_first(left_out)}")
    return MarkedSet(f"{folder.name}/{part}", classes, usable, tuple(left_out.lines(f"{folder.name}/{part}")))


def parse(data: bytes) -> ElementTree.Element:
    """An XML document. Raises ValueError for what is none, or declares a document type.

    A document type can define entities that grow to gigabytes or name files of this machine; VOC has none.
    """
    looked_at = expat.ParserCreate()

    def refuse(*_: object) -> NoReturn:
        raise ValueError("it declares a document type")

    looked_at.StartDoctypeDeclHandler = refuse
    try:
        looked_at.Parse(data, True)
        return ElementTree.fromstring(data)
    except (expat.ExpatError, ElementTree.ParseError) as error:
        raise ValueError("no XML") from error


def _text(element: ElementTree.Element, name: str) -> str:
    return (element.findtext(name) or "").strip()


def _first(left_out: LeftOut) -> str:
    return "".join(f"; {reason}: {where}" for reason, (_, where) in list(left_out.found.items())[:1])


def _picture(
    folder: Path, name: str, file: Path, root: ElementTree.Element, classes: tuple[str, ...], left_out: LeftOut
) -> Marked | None:
    pictures = folder / "JPEGImages"
    named = _text(root, "filename")
    paths = [pictures / f"{name}.jpg", *([pictures / Path(named).name] if named else [])]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        left_out.add("pictures that are not there", str(paths[0]))
        return None
    size = _size(root) or size_of(path)
    if size is None:
        left_out.add("pictures without a size that cannot be read either", str(path))
        return None
    marks = Marks(path, *size, left_out)
    for item in root.iter("object"):
        where = f"{file.name}, {_text(item, 'name') or 'without a name'}"
        box = item.find("bndbox")
        try:
            if box is None:
                raise ValueError
            left, top, right, bottom = (float(_text(box, edge)) for edge in EDGES)
            label = classes.index(_text(item, "name"))
        except ValueError:
            left_out.add("objects without a name or a box", where)
            continue
        aside = _text(item, "difficult") not in ("", "0")
        marks.add((left - 1, top - 1, right, bottom), label, where, aside=aside)
    return marks.done()


def _size(root: ElementTree.Element) -> tuple[int, int] | None:
    element = root.find("size")
    texts = ("", "") if element is None else (_text(element, "width"), _text(element, "height"))
    if not all(text.isdecimal() and int(text) > 0 for text in texts):
        return None
    return int(texts[0]), int(texts[1])
