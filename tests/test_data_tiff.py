"""TIFF files as measurements: whatever the layout, the values that were written."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from moco.data import tiff
from moco.data.decode import DecodeError, decode

LETTERS = {1: "B", 3: "H", 4: "I", 11: "f"}


def write(values, *, order="<", big=False, separate=False, compression=1, predictor=1, tile=None, rows=None,
          orientation=1, photometric=1, more=()):  # fmt: skip
    """A TIFF file of (H, W, C) values, as plain as the format allows."""
    height, width, samples = values.shape
    block_height, block_width = tile or (rows or height, width)
    planes = [values[:, :, [number]] for number in range(samples)] if separate else [values]
    blocks = []
    for plane in planes:
        for top in range(0, height, block_height):
            for left in range(0, width, block_width):
                block = plane[top : top + block_height, left : left + block_width]
                if tile:
                    lacking = (block_height - block.shape[0], block_width - block.shape[1])
                    block = np.pad(block, ((0, lacking[0]), (0, lacking[1]), (0, 0)))
                if predictor == 2:
                    block = np.diff(block, axis=1, prepend=np.zeros_like(block[:, :1]))
                content = block.astype(block.dtype.newbyteorder(order)).tobytes()
                if predictor == 3:
                    size = block.dtype.itemsize
                    split = np.frombuffer(block.astype(block.dtype.newbyteorder(">")).tobytes(), np.uint8)
                    split = split.reshape(block.shape[0], -1, size).transpose(0, 2, 1).reshape(block.shape[0], -1)
                    deep = block.shape[2]
                    split = split.reshape(block.shape[0], -1, deep)
                    content = np.diff(split, axis=1, prepend=np.zeros_like(split[:, :1])).tobytes()
                blocks.append(zlib.compress(content) if compression == 8 else content)
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    tags = {
        256: (4, [width]), 257: (4, [height]), 258: (3, [values.dtype.itemsize * 8] * samples), 259: (3, [compression]),
        262: (3, [photometric]), 274: (3, [orientation]), 277: (3, [samples]), 284: (3, [2 if separate else 1]),
        317: (3, [predictor]), 339: (3, [kind] * samples), **dict(more),
    }  # fmt: skip
    tags |= {322: (4, [block_width]), 323: (4, [block_height])} if tile else {278: (4, [block_height])}
    offsets, counts = (324, 325) if tile else (273, 279)
    tags |= {offsets: (4, [0] * len(blocks)), counts: (4, [len(block) for block in blocks])}
    head, entry = (16, 20) if big else (8, 12)
    place = head + (8 if big else 2) + entry * len(tags) + (8 if big else 4)
    extra = b""
    for letter, numbers in tags.values():
        room = struct.calcsize(f"{len(numbers)}{LETTERS[letter]}")
        if room > (8 if big else 4):
            extra += bytes(room)
    starts = place + len(extra) + np.cumsum([0, *map(len, blocks)])[:-1]
    tags[offsets] = (4, [int(start) for start in starts])
    extra, entries = b"", b""
    for tag, (letter, numbers) in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(numbers)}{LETTERS[letter]}", *numbers)
        if len(packed) > (8 if big else 4):
            packed, extra = struct.pack(order + ("Q" if big else "I"), place + len(extra)), extra + packed
        entries += struct.pack(order + ("HHQ" if big else "HHI"), tag, letter, len(numbers))
        entries += packed.ljust(8 if big else 4, b"\0")
    mark = b"II" if order == "<" else b"MM"
    start = mark + (struct.pack(order + "HHHQ", 43, 8, 0, 16) if big else struct.pack(order + "HI", 42, 8))
    directory = struct.pack(order + ("Q" if big else "H"), len(tags)) + entries + bytes(8 if big else 4)
    return start + directory + extra + b"".join(blocks)


def values_of(dtype, channels=5, height=13, width=17):
    rng = np.random.default_rng(channels)
    if np.dtype(dtype).kind == "f":
        return rng.normal(size=(height, width, channels)).astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, (height, width, channels), dtype=dtype, endpoint=True)


LAYOUTS = {
    "plain": {},
    "strips": {"rows": 4},
    "tiles": {"tile": (16, 16)},
    "planes": {"separate": True},
    "planes in strips": {"separate": True, "rows": 5},
    "planes in tiles": {"separate": True, "tile": (16, 16)},
    "big endian": {"order": ">"},
    "BigTIFF": {"big": True},
    "BigTIFF, big endian, tiles": {"big": True, "order": ">", "tile": (16, 32)},
    "deflate": {"compression": 8, "rows": 3},
    "differences": {"compression": 8, "predictor": 2},
    "differences, big endian, planes": {"predictor": 2, "order": ">", "separate": True},
}


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (layout, dtype)
        for layout in LAYOUTS
        for dtype in ("u1", "u2", "i2", "u4", "f4", "f8")
        if "differences" not in layout or dtype[0] != "f"  # those of floats are taken in another way, below
    ],
)
def test_values_come_back(layout, dtype):
    for channels in (1, 2, 5, 13):
        values = values_of(dtype, channels)
        data = write(values, **LAYOUTS[layout])
        (page,) = tiff.pages(data)
        found = tiff.read(data, page)
        assert found.dtype == np.dtype(dtype)
        assert np.array_equal(found, values)


@pytest.mark.parametrize("layout", ["plain", "strips", "tiles", "planes"])
def test_differences_of_floats(layout):
    for dtype in ("f4", "f8", "f2"):
        values = values_of(dtype, 3)
        data = write(values, predictor=3, compression=8, **LAYOUTS[layout])
        assert np.array_equal(tiff.read(data, tiff.pages(data)[0]), values)


@pytest.mark.parametrize("name", ["tiff_lzw", "packbits", "tiff_deflate", "zstd", "lzma"])
def test_what_pillow_packs(name):
    """Compressions that libtiff knows, by pages of one channel."""
    planes = values_of("u2", 5).transpose(2, 0, 1)
    buffer = io.BytesIO()
    first, *others = map(Image.fromarray, np.ascontiguousarray(planes))
    try:
        first.save(buffer, "TIFF", compression=name, save_all=True, append_images=others)
    except (OSError, RuntimeError, ValueError, KeyError):
        pytest.skip(f"this Pillow does not write {name}")
    pages = tiff.pages(buffer.getvalue())
    assert len(pages) == 5
    for page, plane in zip(pages, planes, strict=True):
        assert np.array_equal(tiff.read(buffer.getvalue(), page)[:, :, 0], plane)
    found = decode(buffer.getvalue(), 5)
    assert np.abs(found - planes.transpose(1, 2, 0) / 257).max() <= 0.51


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation):
    """As Pillow turns a picture of one channel."""
    values = values_of("u1", 1)
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.fromarray(values[:, :, 0]).save(buffer, "TIFF", exif=exif)
    wanted = decode(buffer.getvalue(), 1)
    data = write(values.repeat(5, axis=2), orientation=orientation)
    assert np.array_equal(decode(data, 5), wanted.repeat(5, axis=2))


def test_white_may_be_zero():
    values = values_of("u2", 5)
    assert np.array_equal(decode(write(values, photometric=0), 5), 255 - decode(write(values), 5))


@pytest.mark.parametrize("channels", [2, 5, 13])
def test_exactly_as_many_channels_as_there_are(channels):
    for kind in ("u1", "u2"):
        data = write(values_of(kind, channels))
        assert decode(data, channels).shape == (13, 17, channels)
        for wanted in {1, 2, 3, 4, 5, 7, 13} - {channels}:
            with pytest.raises(DecodeError, match=f"{channels} channels, and {wanted} "):
                decode(data, wanted)


def test_three_gray_pages_are_three_channels_and_more_are_frames():
    planes = values_of("u1", 4).transpose(2, 0, 1)
    for count in (2, 3, 4):
        buffer = io.BytesIO()
        first, *others = map(Image.fromarray, np.ascontiguousarray(planes[:count]))
        first.save(buffer, "TIFF", save_all=True, append_images=others)
        found = decode(buffer.getvalue(), 3)
        wanted = planes[:3] if count == 3 else planes[[0, 0, 0]]
        assert np.array_equal(found, wanted.transpose(1, 2, 0))
        assert np.array_equal(decode(buffer.getvalue(), count), planes[:count].transpose(1, 2, 0))
        with pytest.raises(DecodeError, match=f"{count} pages of 1 channel, and 5 channels are wanted"):
            decode(buffer.getvalue(), 5)


def test_more_beside_rgb_is_no_transparency():
    """RGB and infrared: four channels, or without the fourth."""
    values = values_of("u2", 4)
    data = write(values, photometric=2, more={338: (3, [0])})
    assert decode(data, 4).shape == (13, 17, 4)
    assert np.array_equal(decode(data, 3), decode(data, 4)[:, :, :3])
    data = write(values, photometric=2, more={338: (3, [2])})
    whole = decode(data, 4).astype(float)
    alpha = whole[:, :, 3:] / 255
    assert np.abs(decode(data, 3) - (whole[:, :, :3] * alpha + 255 * (1 - alpha))).max() <= 0.51


@settings(max_examples=200, deadline=None)
@given(place=st.floats(0, 1), byte=st.integers(0, 255), length=st.integers(1, 4), cut=st.floats(0, 1),
       layout=st.sampled_from(sorted(LAYOUTS)))  # fmt: skip
@example(place=0.7421875, byte=128, length=1, cut=1.0, layout="BigTIFF, big endian, tiles")  # an offset of 2⁶³
def test_a_damaged_file_is_a_picture_or_a_decode_error(place, byte, length, cut, layout):
    data = bytearray(write(values_of("u2", 5), **LAYOUTS[layout]))
    start = int(place * min(len(data), 400))
    data[start : start + length] = bytes([byte] * length)
    data = bytes(data[: int(cut * len(data))]) if cut < 0.4 else bytes(data)
    try:
        pixels = decode(data, 5)
    except DecodeError:
        return
    assert pixels.shape[2] == 5
