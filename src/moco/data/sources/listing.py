"""Lists of image files: a .txt, .csv or .tsv file, or Python strings. A million paths never become a Python list."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from moco.data.sources.base import EXTENSIONS, PackedNames, one_line
from moco.data.sources.folder import FileSource
from moco.data.sources.labels import LABEL_NAMES, LabelTexts, number_texts
from moco.errors import UserError, counted

LIST_SUFFIXES = (".txt", ".csv", ".tsv")

PATH_NAMES = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "image_", "img_")
    for name in ("path", "paths", "name", "names", "file", "files", "filename", "file_name", "filepath", "file_path")
) | {"image", "images", "img", "picture"}
"""What a column of paths is called."""


class ListSource(FileSource):
    """The images that a text file names, in its order.

    One image per line. A .csv separates columns by commas (or semicolons, if the first line has no comma), a .tsv by
    tabs, with quotes as csv has them; a .txt is read as plain paths, or as path and label with a tab, a comma or the
    last blank between them, whichever its first line shows. The first row may name the columns. Labels are in the
    column called label, class, target or y, otherwise in the second of two. Empty lines and lines that start with #
    are left out; relative paths start in the folder of the list. A file that is missing is found out when it is read.

    Raises UserError for a list that cannot be read, is empty, or of whose paths none exists.
    """

    def __init__(self, path: Path) -> None:
        texts = LabelTexts()
        try:
            with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
                names = PackedNames.of(_pictures(_rows(_lines(file, path), path), texts))
        except OSError as error:
            raise UserError(f"cannot read {path}: {one_line(error)}") from error
        super().__init__(path.parent, names)
        if len(names) == 0:
            raise UserError(f"{path} names no images: one path per line is expected")
        _refuse_if_none_exists(self, str(path))
        self.labels, self.classes = number_texts(texts.codes, texts.texts)


def source_of_paths(paths: Iterable[str | Path], what: str) -> FileSource:
    """The images that Python strings or paths name. Raises UserError if none of them exists."""
    source = FileSource(Path(), PackedNames.of(os.path.expanduser(os.fspath(path)) for path in paths))
    _refuse_if_none_exists(source, what)
    return source


def _refuse_if_none_exists(source: FileSource, what: str) -> None:
    if not any("\0" not in name and os.path.exists(os.path.join(source.root, name)) for name in source.names):
        first = source.root / source.names[0]
        raise UserError(f"{what}: none of the {counted(len(source), 'path')} in it exists; the first: {first}")


def _lines(file: Iterable[str], path: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of the lines that count. Raises UserError for what is no text."""
    for number, line in enumerate(file, start=1):
        if "\0" in line:
            raise UserError(f"{path} line {number}: not a text file in UTF-8; save the list as UTF-8")
        if not line.startswith("#") and (text := line.rstrip("\r\n")).strip():
            yield number, text


def _rows(lines: Iterator[tuple[int, str]], path: Path) -> Iterator[list[str]]:
    """The lines cut into columns."""
    first = next(lines, None)
    if first is None:
        return
    lines = chain([first], lines)
    separator = _separator(first[1], path.suffix.lower())
    if separator == "":
        yield from ([text.strip()] for _, text in lines)
    elif separator == " ":  # blanks belong to the path, but for the last
        yield from ([part.strip() for part in text.rsplit(None, 1)] for _, text in lines)
    else:
        yield from _cells(lines, separator, path)


def _cells(lines: Iterator[tuple[int, str]], separator: str, path: Path) -> Iterator[list[str]]:
    """Rows as csv reads them, but a row that goes on over several lines is an error."""
    numbers: list[int] = []  # of the lines that the row took

    def texts() -> Iterator[str]:
        for number, text in lines:
            numbers.append(number)
            yield text

    reader = csv.reader(texts(), delimiter=separator)
    try:
        for row in reader:
            if len(numbers) != 1:
                raise UserError(f"{path} line {numbers[0]}: a quotation mark without its counterpart")
            numbers.clear()
            yield [cell.strip() for cell in row]
    except csv.Error as error:
        raise UserError(f"{path} line {numbers[0]}: {one_line(error)}") from error


def _separator(line: str, suffix: str) -> str:
    """What stands between the columns, from the first line; "" where the whole line is the path."""
    if suffix == ".tsv":
        return "\t"
    if suffix == ".csv":
        return ";" if ";" in line and "," not in line else ","
    if _is_image(line):
        return ""
    for separator in ("\t", ","):
        start = line.split(separator)[0].strip()
        if separator in line and (_is_image(start) or start.lower() in PATH_NAMES):
            return separator
    return " " if len(parts := line.rsplit(None, 1)) == 2 and _is_image(parts[0]) else ""


def _is_image(text: str) -> bool:
    return os.path.splitext(text.strip())[1].lower() in EXTENSIONS


def _pictures(rows: Iterator[list[str]], texts: LabelTexts) -> Iterator[str]:
    """The paths of the rows; their labels go to `texts`."""
    start = list(islice(rows, 2))
    names = [cell.lower() for cell in start[0]] if start else []
    path, label = 0, 1
    headed = not any(map(_is_image, names)) and (
        not PATH_NAMES.isdisjoint(names)
        or not set(LABEL_NAMES).isdisjoint(names)
        or (len(start) == 2 and bool(start[1]) and _is_image(start[1][0]))
    )
    if headed:
        label = next((names.index(name) for name in LABEL_NAMES if name in names), 1 if len(names) == 2 else -1)
        path = next((at for at, name in enumerate(names) if name in PATH_NAMES), int(label == 0 < len(names) - 1))
        label = (1 - path) if label == path else label
    for row in chain(start[headed:], rows):
        if len(row) > path and row[path]:
            texts.add(row[label] if 0 <= label < len(row) else None)
            yield row[path]
