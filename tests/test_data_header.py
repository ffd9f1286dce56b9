"""What a JPEG's header says is what decoding gives; whatever is not plain is left to the decoder."""

import io

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from moco.data.decode import DecodeError, decode
from moco.data.header import read_header


def jpeg(pixels, **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def oriented(orientation, order="little"):
    """An EXIF block that also holds other entries before and after the orientation."""
    exif = Image.Exif()
    exif.endian = "<" if order == "little" else ">"
    exif[0x010F], exif[0x0112], exif[0x0131] = "maker", orientation, "program"
    return exif


KINDS = {
    "plain": {},
    "progressive": {"progressive": True},
    "4:4:4": {"subsampling": 0},
    "4:2:0": {"subsampling": 2},
    "tables first": {"optimize": True},
    "comment": {"comment": b"\xff\xc0 no frame \xff\xd9"},
    "profile": {"icc_profile": bytes(70_000)},
    "resolution": {"dpi": (72, 72)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 1), (61, 47), (64, 48)])
def test_the_size_is_that_of_the_decoded_picture(photographs, kind, size):
    data = jpeg(photographs[0][: size[0], : size[1]], **KINDS[kind])
    header = read_header(data)
    assert header[:3] == (*decode(data, 3).shape[:2], False)
    assert header[:2] == size


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("orientation", range(10))
def test_orientation(photographs, orientation, order):
    data = jpeg(photographs[0][:61, :47], exif=oriented(orientation, order))
    assert read_header(data)[:3] == (*decode(data, 3).shape[:2], 2 <= orientation <= 8)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_other_modes(photographs, mode):
    buffer = io.BytesIO()
    Image.fromarray(photographs[0][:50, :70]).convert(mode).save(buffer, "JPEG")
    assert read_header(buffer.getvalue()) == (50, 70, False, len(mode), mode == "CMYK", 8)


def test_opencvs_files_and_filling(photographs):
    data = cv2.imencode(".jpg", photographs[1][:33, :44])[1].tobytes()
    assert read_header(data)[:3] == (33, 44, False)
    filled = data[:2] + b"\xff\xff\xff" + data[2:]  # a marker may begin with any number of these
    assert read_header(filled)[:3] == (33, 44, False)
    assert decode(filled, 3).shape == (33, 44, 3)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "TIFF", "WEBP", "BMP", "JPEG2000"])
def test_other_formats_are_left_to_the_decoder(photographs, kind):
    buffer = io.BytesIO()
    Image.fromarray(photographs[0][:50, :70]).save(buffer, kind)
    assert read_header(buffer.getvalue()) is None


def test_a_height_of_zero_is_left_to_the_decoder(photographs):
    data = jpeg(photographs[0][:50, :70])
    place = data.index(b"\xff\xc0")
    assert read_header(data[: place + 5] + b"\0\0" + data[place + 7 :]) is None


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xe1\x00", b"\xff\xd8\xff" * 9])
def test_garbage_has_no_header(data):
    assert read_header(data) is None


@settings(max_examples=150, deadline=None)
@given(place=st.floats(0, 1), byte=st.integers(0, 255), length=st.integers(1, 4), cut=st.floats(0, 1))
def test_damage_never_raises(photographs, place, byte, length, cut):
    """A header is read or not; where a damaged one is read, decoding fails or gives a picture of its own size."""
    data = bytearray(jpeg(photographs[1][::16, ::16], exif=oriented(6)))
    start = int(place * 700)
    data[start : start + length] = bytes([byte] * length)
    data = bytes(data[: int(cut * len(data))]) if cut < 0.5 else bytes(data)
    header = read_header(data)
    assert header is None or min(header[:2]) >= 1
    try:
        decode(data, 3)
    except DecodeError:
        return


@pytest.mark.parametrize("reduction", [2, 4, 8])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
def test_reduced_decoding(photographs, reduction, channels, orientation):
    """Sides are divided and rounded up; where they divide, pixels are averages of those of the whole picture."""
    for height, width in ((424, 640), (421, 637)):
        data = jpeg(photographs[0][:height, :width], quality=95, exif=oriented(orientation))
        header = read_header(data)
        small = decode(data, channels, reduction)
        assert small.shape == (*header.reduced(reduction), channels)
        assert header.divides(reduction) == (orientation == 1 or height == 424)
        if header.divides(reduction):
            whole = decode(data, channels)
            rows, columns = whole.shape[0] // reduction, whole.shape[1] // reduction
            whole = whole[: rows * reduction, : columns * reduction]
            means = whole.reshape(rows, reduction, columns, reduction, channels).mean(axis=(1, 3))
            gaps = [np.abs(small[:rows, :columns] - np.roll(means, shift, axis=(0, 1))).mean() for shift in (0, 1, -1)]
            print("gaps", gaps)
            assert gaps[0] < 2 < 4 < min(gaps[1:])


def test_other_formats_are_decoded_in_full(photographs):
    for kind in ("PNG", "TIFF", "GIF"):
        buffer = io.BytesIO()
        Image.fromarray(photographs[0][:50, :70]).save(buffer, kind)
        assert decode(buffer.getvalue(), 3, 4).shape == (50, 70, 3)
    assert decode(photographs[0][:50, :70], 3, 4).shape == (50, 70, 3)
