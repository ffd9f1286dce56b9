"""Reading tar headers: which members lie where. Nothing is ever unpacked, and names are only names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

BLOCK = 512
MOST_EXTENDED = 2**20  # bytes of an extended header; real ones have hundreds

FILES = b"0\0" + b"7"
EXTENDED = b"xXgLK"
SPARSE = b"S"

Read = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class Member:
    """One member: its name; whether it is a plain file, and not a folder, link or sparse file; where its bytes are."""

    name: str
    plain: bool
    folder: bool
    offset: int
    size: int


class DamagedTar(Exception):
    """The archive cannot be read further. `position` is where the trouble starts."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.reason, self.position = reason, position


@dataclass(frozen=True, slots=True)
class _Header:
    name: str
    size: int
    kind: bytes
    extended: bool  # of an old GNU sparse file: more of the map follows


def members(read: Read, end: int) -> Iterator[Member]:
    """The members of a tar archive of `end` bytes, in order: USTAR, GNU and PAX, as Python's tarfile finds them.

    `read(offset, size)` gives bytes. Raises DamagedTar where the archive is cut off or is no archive.
    """
    position = 0
    while True:
        start, name, size, sparse = position, None, None, False
        while True:  # headers that say something about the next one, then that one
            header = _header(read(position, BLOCK), position)
            if header is None:
                return
            position += BLOCK
            if header.kind not in EXTENDED:
                break
            if header.size > MOST_EXTENDED:
                raise DamagedTar("an extended header is too long", start)
            data = read(position, header.size)
            if len(data) < header.size:
                raise DamagedTar("it is cut off", start)
            position += _padded(header.size)
            if header.kind == b"L":
                name = name if name is not None else _text(data)
            elif header.kind in b"xX":
                records = _records(data, start)
                sparse = sparse or any(key.startswith("GNU.sparse") for key in records)
                if name is None and (found := records.get("GNU.sparse.name", records.get("path"))) is not None:
                    name = found.decode("utf-8", "surrogateescape")
                if "size" in records:
                    size = _decimal(records["size"], start)
        more = header.extended
        while more:  # the map of an old GNU sparse file
            block = read(position, BLOCK)
            if len(block) < BLOCK:
                raise DamagedTar("it is cut off", start)
            position, more = position + BLOCK, bool(block[504])
        name, size = header.name if name is None else name, header.size if size is None else size
        folder = header.kind == b"5" or (header.kind == b"\0" and name.endswith("/"))
        # Links, devices and folders have no bytes, whatever their size says.
        stored = size if header.kind not in b"12346" + b"5" and not folder else 0
        if position + stored > end:
            raise DamagedTar("it is cut off", start)
        plain = header.kind in FILES and not folder and not sparse
        yield Member(name, plain, folder, position, stored)
        position += _padded(stored)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _header(block: bytes, position: int) -> _Header | None:
    """A header, or None for the mark at the end of an archive. Raises DamagedTar."""
    if len(block) < BLOCK:
        raise DamagedTar("it is cut off" if position else "it is no tar file", position)
    if block.count(0) == BLOCK:
        return None
    try:
        if not _checked(block, _number(block[148:156])):
            raise ValueError
        size = _number(block[124:136])
        if size < 0:
            raise ValueError
    except ValueError as error:
        raise DamagedTar("it is damaged" if position else "it is no tar file", position) from error
    kind = block[156:157]
    name = _text(block[:100])
    gnu = block[257:265] == b"ustar  \0"  # other things stand there instead of a prefix
    if block[345] and not gnu and kind not in EXTENDED:
        name = f"{_text(block[345:500])}/{name}"
    return _Header(name, size, kind, kind == SPARSE and bool(block[482]))


def _checked(block: bytes, stored: int) -> bool:
    """Whether the checksum of a header is right: the sum of its bytes, unsigned, or signed as some programs had it."""
    total = sum(block) - sum(block[148:156]) + 8 * 32  # its own field counts as blanks
    return stored == total or stored == total - 256 * sum(byte > 127 for byte in block[:148] + block[156:])


def _number(field: bytes) -> int:
    """A number in a header: octal digits, or binary after a marker. Raises ValueError."""
    if field[0] in (0o200, 0o377):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0o377 else 0)
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _records(data: bytes, position: int) -> dict[str, bytes]:
    """The records "length key=value\\n" of a PAX header. Raises DamagedTar."""
    records = {}
    at = 0
    while at < len(data) and data[at]:
        digits, blank, _ = data[at : at + 20].partition(b" ")
        length = _decimal(digits, position)
        record = data[at + len(digits) + 1 : at + length]
        if not blank or length < len(digits) + 3 or at + length > len(data) or not record.endswith(b"\n"):
            raise DamagedTar("a PAX header is damaged", position)
        key, _, value = record[:-1].partition(b"=")
        records[key.decode("utf-8", "surrogateescape")] = value
        at += length
    return records


def _decimal(digits: bytes, position: int) -> int:
    if not digits.isdigit() or len(digits) > 19:
        raise DamagedTar("a PAX header is damaged", position)
    return int(digits)
