"""Every kind of file becomes the same kind of array; every damaged one a DecodeError."""

import io

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from moco.data.decode import DecodeError, decode


def encoded(picture, kind, **options):
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def difference(found, wanted):
    assert found.dtype == np.uint8
    assert found.shape == wanted.shape
    assert found.flags.c_contiguous
    return np.abs(found.astype(int) - wanted.astype(int)).mean()


@pytest.fixture(scope="module")
def photo(photographs):
    return Image.fromarray(photographs[0]).resize((96, 64))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "TGA", "JPEG2000"])
def test_lossless_files_come_back_exactly(photo, kind):
    assert difference(decode(encoded(photo, kind), 3), np.asarray(photo)) == 0
    assert difference(decode(encoded(photo, kind), 1), np.asarray(photo.convert("L"))[..., None]) < 0.6


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_other_files_look_as_pillow_shows_them(photo, kind):
    data = encoded(photo, kind)
    wanted = Image.open(io.BytesIO(data))
    assert difference(decode(data, 3), np.asarray(wanted.convert("RGB"))) < 1
    assert difference(decode(data, 1), np.asarray(wanted.convert("RGB").convert("L"))[..., None]) < 1


# A PNG cannot hold CMYK, nor a JPEG a palette.
MODES = {"PNG": ("L", "1", "P"), "TIFF": ("L", "1", "P", "CMYK"), "JPEG": ("L", "1", "CMYK")}


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_modes(photo, mode, kind):
    data = encoded(photo.convert(mode), kind)
    wanted = Image.open(io.BytesIO(data)).convert("RGB")
    assert difference(decode(data, 3), np.asarray(wanted)) < 2
    assert difference(decode(data, 1), np.asarray(wanted.convert("L"))[..., None]) < 2


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_laid_on_white(photo, kind, mode):
    opaque = photo.convert("L" if mode == "LA" else "RGB")
    picture = opaque.convert(mode)
    picture.putalpha(Image.fromarray(np.tile(np.linspace(0, 255, 96).astype(np.uint8), (64, 1))))
    data = encoded(picture, kind, **({"lossless": True} if kind == "WEBP" else {}))
    share = np.linspace(0, 255, 96).astype(np.uint8)[None, :, None] / 255
    wanted = np.rint(np.asarray(opaque.convert("RGB")) * share + 255 * (1 - share)).astype(np.uint8)
    found = decode(data, 3)
    assert difference(found, wanted) < 0.6
    assert (found[:, 0] == 255).all()


def test_transparent_palette_colour_is_white(photo):
    picture = photo.convert("P")
    index = int(np.asarray(picture)[10, 20])
    for kind in ("PNG", "GIF"):
        assert (decode(encoded(picture, kind, transparency=index), 3)[10, 20] == 255).all()


@pytest.mark.parametrize("kind", [".png", ".tiff"])
@pytest.mark.parametrize("colour", [False, True])
def test_sixteen_bits_are_scaled_not_clipped(kind, colour):
    ramp = np.tile(np.linspace(0, 65535, 256).astype(np.uint16), (8, 1))
    data = cv2.imencode(kind, np.dstack([ramp] * 3) if colour else ramp)[1].tobytes()
    wanted = np.tile(np.arange(256, dtype=np.uint8), (8, 1))[..., None]
    assert difference(decode(data, 1), wanted) <= 0.01
    assert difference(decode(data, 3), np.repeat(wanted, 3, axis=2)) <= 0.01


def test_floating_point_files():
    ramp = np.tile(np.linspace(0, 1, 256, dtype=np.float32), (4, 1))
    wanted = np.tile(np.arange(256, dtype=np.uint8), (4, 1))[..., None]
    for scale in (1, 255, 65535):
        assert difference(decode(encoded(Image.fromarray(ramp * scale), "TIFF"), 1), wanted) == 0
    with pytest.raises(DecodeError, match="outside"):
        decode(encoded(Image.fromarray(ramp - 2), "TIFF"), 1)
    with pytest.raises(DecodeError, match="outside"):
        decode(encoded(Image.fromarray(ramp * np.nan), "TIFF"), 1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(photo, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo, kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert difference(decode(data, 3), np.asarray(upright)) < 3
    assert difference(decode(data, 1), np.asarray(upright.convert("L"))[..., None]) < 3


def test_first_frame_of_an_animation(photo):
    frames = [photo, photo.transpose(Image.Transpose.FLIP_TOP_BOTTOM), photo.convert("L").convert("RGB")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50, loop=0)
    assert difference(decode(data, 3), np.asarray(photo)) < 3


def test_arrays(photo, garments):
    colours = np.asarray(photo)
    assert difference(decode(colours, 3), colours) == 0
    assert difference(decode(colours, 1), np.asarray(photo.convert("L"))[..., None]) < 0.6
    assert difference(decode(garments[0], 1), garments[0][..., None]) == 0
    assert difference(decode(garments[0][..., None], 3), np.repeat(garments[0][..., None], 3, axis=2)) == 0
    assert difference(decode(colours[::2, ::-1], 3), np.ascontiguousarray(colours[::2, ::-1])) == 0
    assert difference(decode(garments[0].astype(np.uint16) * 257, 1), garments[0][..., None]) == 0
    assert difference(decode(garments[0] > 127, 1), np.where(garments[0] > 127, 255, 0)[..., None]) == 0


@pytest.mark.parametrize("array", [np.zeros((0, 4), np.uint8), np.zeros((2, 3, 5), np.uint8), np.zeros(7, np.uint8)])
def test_arrays_that_are_no_pictures(array):
    with pytest.raises(DecodeError):
        decode(array, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"])
def test_truncated_files_are_errors(photo, kind, capfd):
    data = encoded(photo, kind)
    for share in (0.1, 0.5, 0.9):
        with pytest.raises(DecodeError) as caught:
            decode(data[: int(len(data) * share)], 3)
        assert "\n" not in caught.value.reason
    assert "WARN" not in capfd.readouterr().err


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"not a picture at all" * 9, b"\x89PNG\r\n\x1a\n", b"GIF89a"])
def test_garbage_is_an_error(data):
    with pytest.raises(DecodeError):
        decode(data, 3)


@settings(max_examples=60, deadline=None)
@given(place=st.floats(0, 1), byte=st.integers(0, 255), kind=st.sampled_from(["JPEG", "PNG", "GIF", "TIFF", "BMP"]))
def test_a_damaged_file_is_a_picture_or_a_decode_error(photographs, place, byte, kind):
    data = bytearray(encoded(Image.fromarray(photographs[1][::16, ::16]), kind))
    start = int(place * (len(data) - 1))
    data[start : start + 3] = bytes([byte] * len(data[start : start + 3]))
    try:
        pixels = decode(bytes(data), 3)
    except DecodeError:
        return
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3
