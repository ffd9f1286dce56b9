"""Every kind of file becomes the same kind of array; every damaged one a DecodeError."""

import io
import zlib

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, TiffImagePlugin

from moco.data import decode as decoding
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
    for scale, offset in ((4000, -1000), (1e6, 0), (3, 0), (2, -2)):  # no usual range: the one they have
        assert difference(decode(encoded(Image.fromarray(ramp * scale + offset), "TIFF"), 1), wanted) <= 0.01
    holes = ramp.copy()
    holes[0, 9:12] = np.nan, np.inf, -np.inf
    assert decode(encoded(Image.fromarray(holes), "TIFF"), 1)[0, 8:13, 0].tolist() == [8, 0, 255, 0, 12]
    assert (decode(np.full((3, 3), -7, np.int32), 1) == 0).all()
    with pytest.raises(DecodeError, match="none of its pixels is a number"):
        decode(encoded(Image.fromarray(ramp * np.nan), "TIFF"), 1)


def test_a_stated_range_is_used(tmp_path):
    """Twelve bits in sixteen, and floats whose range the file states."""
    twelve = np.tile((np.arange(256) * 4095 / 255).round().astype(np.uint16), (4, 1))
    wanted = np.tile(np.arange(256, dtype=np.uint8), (4, 1))[..., None]
    info = TiffImagePlugin.ImageFileDirectory_v2()
    info[281] = 4095
    info[280] = 0
    assert difference(decode(encoded(Image.fromarray(twelve), "TIFF", tiffinfo=info), 1), wanted) <= 0.01
    assert (
        difference(
            decode(encoded(Image.fromarray(twelve), "TIFF"), 1), np.rint(twelve / 257)[..., None].astype(np.uint8)
        )
        < 0.1
    )
    info = TiffImagePlugin.ImageFileDirectory_v2()
    info[340], info[341] = -10.0, 30.0
    info.tagtype[340] = info.tagtype[341] = 11
    values = np.float32(np.linspace(-10, 50, 256))[None].repeat(4, 0)
    found = decode(encoded(Image.fromarray(values), "TIFF", tiffinfo=info), 1)
    assert difference(found, np.rint((values + 10) / 40 * 255).clip(0, 255).astype(np.uint8)[..., None]) < 0.1


# Colours that are known: (cyan, magenta, yellow, black) inks, and what they look like.
INKS = {
    (0, 0, 0, 0): (255, 255, 255),
    (255, 0, 0, 0): (0, 255, 255),
    (0, 255, 0, 0): (255, 0, 255),
    (0, 0, 255, 0): (255, 255, 0),
    (0, 255, 255, 0): (255, 0, 0),
    (0, 0, 0, 255): (0, 0, 0),
    (0, 0, 0, 128): (127, 127, 127),
    (51, 102, 0, 0): (204, 153, 255),
}


def without_marker(jpeg):
    """A JPEG file without Adobe's marker."""
    place = jpeg.index(b"\xff\xee")
    return jpeg[:place] + jpeg[place + 2 + int.from_bytes(jpeg[place + 2 : place + 4], "big") :]


def ycck(inks):
    """A JPEG file of inverted inks, the first three of them as luminance and colour differences."""
    values = np.asarray(inks)
    colours = Image.fromarray(values[:, :, :3]).convert("YCbCr")  # of 255 minus what is stored, says Adobe
    # Pillow writes four channels as they are, but for inverting them.
    channels = np.dstack([np.asarray(colours), 255 - values[:, :, 3]])
    jpeg = bytearray(encoded(Image.fromarray(255 - channels, "CMYK"), "JPEG", quality=100, subsampling=0))
    jpeg[jpeg.index(b"Adobe") + 11] = 2
    return bytes(jpeg)


@pytest.mark.parametrize(("inks", "colour"), INKS.items())
def test_colours_of_inks(inks, colour):
    picture = Image.new("CMYK", (16, 16), inks)
    adobe = encoded(picture, "JPEG", quality=100)
    plain = without_marker(encoded(Image.fromarray(255 - np.asarray(picture), "CMYK"), "JPEG", quality=100))
    files = {
        "inverted, and so marked": adobe,
        "not marked, and so as they are": plain,
        "late marker": move_marker(adobe),
        "YCCK": ycck(picture),
        "TIFF": encoded(picture, "TIFF"),
    }
    for kind, data in files.items():
        for reduction in (1, 8):
            found = decode(data, 3, reduction)
            assert found.shape == (16, 16, 3)
            assert np.abs(found.astype(int) - colour).max() <= 2, kind
        gray = np.dot(colour, (0.299, 0.587, 0.114))
        assert np.abs(decode(data, 1).astype(int) - gray).max() <= 3, kind


def move_marker(jpeg):
    """Adobe's marker behind the frame header, right before the scan."""
    place = jpeg.index(b"\xff\xee")
    length = 2 + int.from_bytes(jpeg[place + 2 : place + 4], "big")
    rest = jpeg[:place] + jpeg[place + length :]
    scan = rest.index(b"\xff\xda")
    return rest[:scan] + jpeg[place : place + length] + rest[scan:]


def test_known_values_of_sixteen_bits():
    values = np.array([[0, 257, 32896, 65535]], np.uint16)
    files = [cv2.imencode(".png", values)[1].tobytes(), cv2.imencode(".tiff", values)[1].tobytes()]
    files += [encoded(Image.fromarray(values), "TIFF", compression=name) for name in ("tiff_lzw", "tiff_deflate")]
    files += [b"P5 4 1 65535\n" + values.astype(">u2").tobytes(), encoded(Image.fromarray(values), "PNG")]
    for data in files:
        assert decode(data, 1).ravel().tolist() == [0, 1, 128, 255]
    assert decode(b"P5 2 1 1000\n" + np.array([500, 1000], ">u2").tobytes(), 1).ravel().tolist() == [128, 255]
    assert decode(b"P5 2 1 100\n" + bytes([50, 100]), 1).ravel().tolist() == [128, 255]
    colours = np.random.default_rng(0).integers(0, 65536, (5, 7, 3), dtype=np.uint16)
    for kind in (".png", ".tiff"):
        found = decode(cv2.imencode(kind, colours)[1].tobytes(), 3)
        assert np.abs(found[..., ::-1] - colours / 257).max() <= 0.51


@pytest.mark.parametrize(("mode", "key"), [("L", 77), ("RGB", (10, 20, 30)), ("I;16", 5000)])
def test_a_transparent_colour_is_white(mode, key):
    picture = Image.new(mode, (6, 4), key)
    picture.putpixel((2, 1), {"L": 70, "RGB": (11, 20, 30), "I;16": 7000}[mode])
    found = decode(encoded(picture, "PNG", transparency=key), 3)
    assert (found[0] == 255).all()
    assert (found[1, 2] < 80).all()


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("LA", 2), ("RGB", 3), ("RGBA", 4)])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_as_many_channels_as_there_are(photo, mode, channels, kind):
    picture = photo.convert(mode)
    if channels in (2, 4):
        picture.putalpha(Image.fromarray(np.tile(np.linspace(0, 255, 96).astype(np.uint8), (64, 1))))
    data = encoded(picture, kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    if kind != "WEBP" or channels > 2:  # which knows no gray
        assert difference(decode(data, channels), np.asarray(picture).reshape(64, 96, channels)) == 0
    for wanted in {2, 4, 5, 13} - {channels, 4 if kind == "WEBP" and channels == 2 else channels}:
        with pytest.raises(DecodeError, match=rf"{channels if kind != 'WEBP' else '[34]'} channels?.* {wanted} "):
            decode(data, wanted)
    assert decode(data, 3).shape == (64, 96, 3)


@pytest.mark.parametrize("channels", [2, 5, 13])
def test_arrays_of_any_number_of_channels(channels):
    pixels = np.random.default_rng(0).integers(0, 65536, (6, 8, channels), dtype=np.uint16)
    assert difference(decode(pixels, channels), np.rint(pixels / 257).astype(np.uint8)) <= 0.01
    with pytest.raises(DecodeError, match=f"{channels} channels") as caught:
        decode(pixels, 7)
    assert caught.value.channels == channels
    if channels > 4:
        with pytest.raises(DecodeError, match=f"{channels} channels, and 3 are wanted"):
            decode(pixels, 3)


def test_files_that_want_a_program_are_refused():
    """Pillow would hand this to Ghostscript."""
    with pytest.raises(DecodeError, match="not an image"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", 3)


def test_the_size_is_looked_at_before_decoding(photo, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_PIXELS", 96 * 64 - 1)
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "JPEG2000", "PPM"):
        with pytest.raises(DecodeError, match="96 × 64 pixels are more than the 6,143"):
            decode(encoded(photo, kind), 3)
    monkeypatch.setattr(decoding, "MAX_PIXELS", 96 * 64)
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "JPEG2000", "PPM"):
        assert decode(encoded(photo, kind), 3).shape == (64, 96, 3)


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


def png(*chunks):
    """A PNG file of these chunks, (kind, content), with right checksums."""
    parts = [len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")
             for kind, content in chunks]  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_odd_and_damaged_pngs_say_nothing_on_stderr(photo, capfd):
    """libpng warns of profiles, texts and checksums past Python: hundreds of lines beside the progress bar."""
    pixels = np.asarray(photo)
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels))
    size = photo.width.to_bytes(4, "big") + photo.height.to_bytes(4, "big")
    first, last = (b"IHDR", size + bytes((8, 2, 0, 0, 0))), (b"IEND", b"")
    bad_profile = b"sRGB\0\0" + zlib.compress(bytes(3000))
    odd = [(b"iCCP", b"x" * 40), (b"iCCP", bad_profile), (b"cHRM", bytes(32)), (b"tEXt", b"no end"), (b"oops", b"")]
    for chunk in odd:
        assert (decode(png(first, chunk, (b"IDAT", rows), last), 3) == pixels).all()
    whole = png(first, (b"IDAT", rows[:3000]), (b"IDAT", rows[3000:]), last)
    assert (decode(whole, 3) == pixels).all()
    changed = bytearray(whole)
    changed[1000] ^= 4
    for damaged in (bytes(changed), whole[:5000], whole[:-30]):
        with pytest.raises(DecodeError):
            decode(damaged, 3)
    assert capfd.readouterr().err == ""
