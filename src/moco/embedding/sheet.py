"""Contact sheets: rows of small pictures with captions, drawn from what an embedding names."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from moco.data.decode import DecodeError, decode
from moco.data.sources import Source, open_source
from moco.embedding.reading import Embeddings, Entries
from moco.embedding.writing import safe_text
from moco.errors import UserError
from moco.train.checkpoints import write_atomically

Array = np.ndarray[Any, Any]

SIDE, GAP, LINE, HEADING = 128, 8, 14, 26
"""Pixels: a picture, between two, a line of its caption, a heading."""
COLUMNS = 8
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}
WHITE, GREY, DARK, MARK = (255, 255, 255), (200, 200, 200), (60, 60, 60), (214, 96, 0)


@dataclass(frozen=True)
class Tile:
    """A picture, RGB uint8 (H, W, 3), or None where it cannot be opened; lines under it; whether it has a frame."""

    picture: Array | None
    caption: tuple[str, ...]
    marked: bool = False


def printable(text: str) -> str:
    r"""A name that can be shown: what would move a cursor or break a line becomes \x1b, \n and the like."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape", "backslashreplace").decode() for sign in text
    )


class Album:
    """The pictures of an embedding: from their files, or else from the data it was made of, where that is here."""

    def __init__(self, embeddings: Embeddings, entries: Entries) -> None:
        self._about, self._entries = embeddings.about, entries
        self._folder = str(self._about.get("folder") or "")

    def path(self, row: int) -> str:
        """Where the picture of a row is; its name where it is no file of its own."""
        name = self._entries.paths[row]
        return os.path.join(self._folder, name) if self._about.get("files") else name

    def file(self, row: int) -> str | None:
        """The file of a row's picture, as it is found from here, or None where there is none."""
        name = self._entries.paths[row]
        paths = (os.path.join(self._folder, name), name)
        return next((path for path in paths if "\0" not in path and os.path.isfile(path)), None)

    def picture(self, row: int) -> Array | None:
        """The pixels of a row's picture, RGB uint8 (H, W, 3), or None where it cannot be opened."""
        name, path = self._entries.paths[row], self.file(row)
        if path is not None:
            return _opened(Path(path).read_bytes)
        source, index = self._source, int(self._entries.index[row])
        if source is None:
            return None
        return _opened(lambda: _content(source, index, name))

    @functools.cached_property
    def _source(self) -> Source | None:
        """The data, if the embedding names some on this machine that has as many pictures as then."""
        data = self._about.get("data")
        texts = [str(text) for text in data] if isinstance(data, list) else []
        if not texts or any("://" in text or text.startswith("hf:") for text in texts):  # nothing is fetched for this
            return None
        try:
            source = open_source(texts if len(texts) > 1 else texts[0], "none")
        except UserError:
            return None
        return source if len(source) == self._about.get("pictures") else None


def _content(source: Source, index: int, name: str) -> Any:
    sample = source[index]
    if os.path.basename(safe_text(sample.name)) != os.path.basename(name):
        raise OSError("another picture is in its place")
    return sample.image


def _opened(read: Any) -> Array | None:
    try:
        return decode(read(), 3)
    except (OSError, IndexError, DecodeError):
        return None


def draw_sheet(sections: Sequence[tuple[str, Sequence[Tile]]]) -> Image.Image:
    """Tiles in rows of eight, section by section, each under its heading."""
    lines = max((len(tile.caption) for _, tiles in sections for tile in tiles), default=0)
    step = SIDE + GAP + lines * LINE
    rows = sum(-(-len(tiles) // COLUMNS) for _, tiles in sections)
    columns = min(COLUMNS, max(len(tiles) for _, tiles in sections))
    width = max(columns, 4) * (SIDE + GAP) + GAP
    sheet = Image.new("RGB", (width, GAP + HEADING * len(sections) + rows * step), WHITE)
    pencil, top = ImageDraw.Draw(sheet), GAP
    for heading, tiles in sections:
        pencil.text((GAP, top + 4), _fitting(printable(heading), width - 2 * GAP, 14), DARK, _font(14))
        top += HEADING
        for number, tile in enumerate(tiles):
            left = GAP + number % COLUMNS * (SIDE + GAP)
            _draw_tile(sheet, pencil, tile, left, top + number // COLUMNS * step)
        top += -(-len(tiles) // COLUMNS) * step
    return sheet


def _draw_tile(sheet: Image.Image, pencil: ImageDraw.ImageDraw, tile: Tile, left: int, top: int) -> None:
    if tile.picture is None:
        pencil.rectangle((left, top, left + SIDE - 1, top + SIDE - 1), GREY)
    else:
        picture = Image.fromarray(tile.picture)
        scale = SIDE / max(picture.size)
        size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        way = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS  # small pictures stay sharp
        small = picture.resize(size, way, reducing_gap=2.0)
        sheet.paste(small, (left + (SIDE - size[0]) // 2, top + (SIDE - size[1]) // 2))
    if tile.marked:
        pencil.rectangle((left - 3, top - 3, left + SIDE + 2, top + SIDE + 2), outline=MARK, width=3)
    for number, line in enumerate(tile.caption):
        text = _fitting(printable(line), SIDE, 11)
        pencil.text((left, top + SIDE + 2 + number * LINE), text, DARK, _font(11))


def _fitting(text: str, width: int, size: int) -> str:
    """The end of a text, as much as fits into so many pixels: of a path it tells the most."""
    font = _font(size)
    if font.getlength(text[-400:]) <= width and len(text) <= 400:
        return text
    kept = text[-400:]
    while kept and font.getlength("…" + kept) > width:
        kept = kept[1:]
    return "…" + kept


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which matplotlib brings: Pillow's own font knows few letters."""
    import matplotlib

    return ImageFont.truetype(os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size)


def check_sheet_name(path: Path) -> None:
    """Raise UserError unless a sheet can be written under this name."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--sheet {path}: name a .jpg or .png file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--sheet {path}: there is no folder {path.parent}")


def save_sheet(path: Path, sections: Sequence[tuple[str, Sequence[Tile]]]) -> None:
    """Draw a contact sheet into a file. Raises OSError."""
    written = io.BytesIO()
    draw_sheet(sections).save(written, FORMATS[path.suffix.lower()], quality=88)
    write_atomically(path, written.getvalue())
