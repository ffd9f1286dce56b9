"""What a JPEG or PNG file says about itself at its beginning, without decoding it."""

from __future__ import annotations

import zlib
from typing import NamedTuple

PNG = b"\x89PNG\r\n\x1a\n"
PIXEL_CHUNKS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"fcTL", b"fdAT"))
"""Chunks of a PNG that its pixels, or those of its animation, are made of."""
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # start of frame; the others are tables
_ALONE = frozenset(range(0xD0, 0xD8)) | {0x01}  # markers without content
_ENDS = frozenset((0xD8, 0xD9, 0xDA))  # from here on there is no header


class Header(NamedTuple):
    """What a JPEG file says: its size in pixels as `decode` returns it, upright, and how its pixels are meant.

    Attributes:
        turned: whether EXIF has it turned or mirrored.
        components: 1 (grayscale), 3 (colour) or 4 (CMYK or YCCK).
        adobe: whether the file has Adobe's marker, which says that its inks are inverted.
        depth: bits per component.
    """

    height: int
    width: int
    turned: bool
    components: int = 3
    adobe: bool = False
    depth: int = 8

    def reduced(self, reduction: int) -> tuple[int, int]:
        """Height and width after decoding at 1 / reduction."""
        return -(-self.height // reduction), -(-self.width // reduction)

    def divides(self, reduction: int) -> bool:
        """Whether pixel i of the reduced picture holds pixels reduction · i … of the whole one.

        A cut-off last pixel comes first when the picture is mirrored.
        """
        return not self.turned or (self.height % reduction == 0 and self.width % reduction == 0)


def read_header(data: bytes) -> Header | None:
    """The header of a JPEG file, or None for any other file and for whatever is not plain."""
    if data[:3] != b"\xff\xd8\xff":
        return None
    orientation, place, adobe, found = 0, 2, False, None
    while place + 9 <= len(data):
        if data[place] != 0xFF:
            break
        marker = data[place + 1]
        if marker == 0xFF or marker in _ALONE:  # a byte of filling, or nothing to pass over
            place += 1 if marker == 0xFF else 2
            continue
        if marker in _ENDS:
            break
        if marker in _FRAMES and found is None:
            height, width = (int.from_bytes(data[place + at : place + at + 2], "big") for at in (5, 7))
            if height == 0 or width == 0:  # said at the end of the file, if at all
                return None
            if orientation >= 5:
                height, width = width, height
            components = int.from_bytes(data[place + 9 : place + 10], "big")
            found = Header(height, width, orientation > 1, components, adobe, data[place + 4])
            if components != 4 or adobe:
                return found
        adobe |= marker == 0xEE and data[place + 4 : place + 9] == b"Adobe"
        length = int.from_bytes(data[place + 2 : place + 4], "big")
        if marker == 0xE1 and orientation == 0 and data[place + 4 : place + 10] == b"Exif\0\0":
            orientation = _orientation(data[place + 10 : place + 2 + length])
        place += 2 + length
    return found and found._replace(adobe=adobe)  # of four components, whose marker may come late


def read_png_header(data: bytes) -> tuple[int, int, int, int] | None:
    """Height, width, bits per channel and kind of colour (0 L, 2 RGB, 3 P, 4 LA, 6 RGBA) of a PNG file, or None."""
    if data[:8] != PNG or data[12:16] != b"IHDR" or len(data) < 26:
        return None
    return int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big"), data[24], data[25]


def png_pixels(data: bytes) -> bytes | None:
    """A PNG file with nothing but what its pixels are made of, or None where that is cut off or fails its checksums.

    What libpng thinks of colour profiles, texts and damage it says on the process's stderr, and cannot be told not to.
    """
    place, parts, whole = len(PNG), [PNG], True
    while whole and place + 12 <= len(data):
        kind, end = data[place + 4 : place + 8], place + 12 + int.from_bytes(data[place : place + 4], "big")
        if kind in PIXEL_CHUNKS:
            whole = zlib.crc32(data[place + 4 : end - 4]) == int.from_bytes(data[end - 4 : end], "big")
            parts.append(data[place:end])
        if kind == b"IEND":
            return b"".join(parts) if whole else None
        place = end
    return None


def _orientation(exif: bytes) -> int:
    """The orientation in an EXIF block, 1…8; 1 where it says none."""
    order = {b"II*\0": "little", b"MM\0*": "big"}.get(exif[:4])
    if order not in ("little", "big"):
        return 1

    def number(place: int, size: int) -> int:
        return int.from_bytes(exif[place : place + size], "little" if order == "little" else "big")

    first = number(4, 4)
    for entry in range(first + 2, min(first + 2 + 12 * number(first, 2), len(exif) - 11), 12):
        if number(entry, 2) == 0x0112:
            found = number(entry + 8, 2)
            return found if 1 <= found <= 8 else 1
    return 1
