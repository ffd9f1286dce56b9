"""`moco check` looks at every picture, names bad ones, finds doubles, and dies of nothing; neither do batches."""

import io
import json
import os
import shlex
import signal
import struct
import zlib

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, PngImagePlugin

from moco.check import check, run_check
from moco.check.display import shown, words
from moco.check.duplicates import MOST_BITS, MOST_GAP, difference_hash, exact_groups, near_groups
from moco.check.examine import THUMBNAIL, thumbnail
from moco.check.pool import DIED, examine_all
from moco.cli import main, make_parser
from moco.data.bad_files import BadFiles
from moco.data.decode import MAX_PIXELS, DecodeError, decode
from moco.data.loader import ViewStream
from moco.data.sources import ArraySource, open_source
from moco.data.sources.base import Pictures
from moco.errors import UserError
from moco.recipes import pretrain_settings
from moco.resolve import resolve
from moco.settings import PretrainSettings, ViewSettings
from moco.train.parallel import Processes


def encoded(picture, kind, **options):
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def with_size(jpeg, height, width):
    place = jpeg.index(b"\xff\xc0")
    return jpeg[: place + 5] + struct.pack(">HH", height, width) + jpeg[place + 9 :]


def tiff_of(*entries, tail=b""):
    body = struct.pack("<2sHIH", b"II", 42, 8, len(entries))
    return body + b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries) + bytes(4) + tail


def hostile_files(photo):
    """(content, whether it can be read) of files by name: what lies around in folders, and what somebody may plant.

    None: that depends on the release of OpenCV.
    """
    rgb, gray = Image.fromarray(photo), Image.fromarray(photo).convert("L")
    jpeg, png, gif = encoded(rgb, "JPEG"), encoded(rgb, "PNG"), encoded(rgb, "GIF")
    bmp, mirrored = encoded(rgb, "BMP"), encoded(ImageOps.mirror(rgb), "PNG")
    cmyk = encoded(rgb.convert("CMYK"), "JPEG")
    deep = photo.astype(np.uint16) * 257
    exif = Image.Exif()
    exif[0x0112] = 6
    info = PngImagePlugin.PngInfo()
    info.add_text("note", "A" * 50_000_000, zip=True)
    broken = bytearray(png)
    broken[png.index(b"IDAT") + 40] ^= 0xFF
    wrong_sum = png[: png.index(b"IEND") - 8] + bytes(4) + png[png.index(b"IEND") - 4 :]
    five = struct.pack("<2sHI", b"II", 42, 8)
    fives = [(256, 3, 4), (257, 3, 4), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 200), (277, 3, 5), (279, 4, 80)]
    return {
        "zero.jpg": (b"", False),
        "cut.jpg": (jpeg[: len(jpeg) // 2], False),
        "cut.png": (png[: len(png) // 2], False),
        "cut.gif": (gif[: len(gif) // 2], False),
        "cut.webp": (encoded(rgb, "WEBP")[:300], False),
        "cut.tif": (encoded(rgb, "TIFF")[:300], False),
        "cut.bmp": (encoded(rgb, "BMP")[:300], False),
        "text.png": (b"this is a text\n" * 99, False),
        "page.jpg": (b"<!DOCTYPE html><html><body>404</body></html>", False),
        "drawing.png": (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", False),
        "program.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", False),
        "broken.png": (bytes(broken), False),
        "wrong checksum.png": (wrong_sum, None),
        "really a gif.jpg": (gif, True),
        "really a jpeg.png": (jpeg, True),
        "no frames.gif": (b"GIF89a\x08\0\x08\0\0\0\0;", False),
        "zeros.jpg": (bytes(5000), False),
        "beginning.jpg": (b"\xff\xd8\xff", False),
        "markers.jpg": (b"\xff\xd8\xff" * 99, False),
        "header only.png": (png[:33], False),
        "no height.jpg": (with_size(jpeg, 0, 48), False),
        "wide.jpg": (encoded(Image.new("RGB", (65_500, 1), (9, 8, 7)), "JPEG"), True),
        "too wide.jpg": (with_size(jpeg, 64, 65_535), False),
        "bomb.jpg": (with_size(jpeg, 65_000, 65_000), False),
        "bomb.png": (png[:16] + struct.pack(">II", 40_000, 40_000) + png[24:], False),
        "whole bomb.png": (
            b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(bytes(7501 * 6000))) + chunk(b"IEND", b""), False,
        ),
        "bomb.gif": (gif[:6] + struct.pack("<HH", 60_000, 60_000) + gif[10:], False),
        "bomb.bmp": (bmp[:18] + struct.pack("<ii", 60_000, 60_000) + bmp[26:], False),
        "bomb.tif": (tiff_of((256, 4, 60_000), (257, 4, 60_000), (258, 3, 16), (273, 4, 8), (279, 4, 8)), False),
        "loop.tif": (tiff_of((256, 3, 4), (257, 3, 4))[:-4] + struct.pack("<I", 8), False),
        "outside.tif": (tiff_of((256, 3, 4), (257, 3, 4), (258, 3, 16), (273, 4, 2**31), (279, 4, 32)), False),
        "text bomb.png": (encoded(rgb, "PNG", pnginfo=info), True),
        "five.tif": (tiff_of(*fives, tail=bytes(200)), True),
        "no tags.tif": (five + bytes(2), False),
        "dot.png": (encoded(Image.new("L", (1, 1), 77), "PNG"), True),
        "thread.png": (encoded(Image.new("RGB", (1, 5000), (1, 2, 3)), "PNG"), True),
        "cmyk.jpg": (cmyk, True),
        "progressive.jpg": (encoded(rgb, "JPEG", progressive=True), True),
        "turned.jpg": (encoded(rgb, "JPEG", exif=exif), True),
        "tail.jpg": (jpeg + b"and something behind it" * 99, True),
        "deep.png": (cv2.imencode(".png", deep)[1].tobytes(), True),
        "deep gray.tif": (cv2.imencode(".tiff", deep[:, :, 0])[1].tobytes(), True),
        "deep.tif": (cv2.imencode(".tiff", deep)[1].tobytes(), True),
        "float.tif": (encoded(Image.fromarray(np.where(deep[:, :, 0] > 9e3, deep[:, :, 0] - 2e4, np.nan)
                                              .astype(np.float32)), "TIFF"), True),
        "alpha.png": (encoded(rgb.convert("RGBA"), "PNG"), True),
        "gray alpha.png": (encoded(gray.convert("LA"), "PNG"), True),
        "palette.png": (encoded(rgb.convert("P"), "PNG", transparency=7), True),
        "moving.gif": (encoded(rgb, "GIF", save_all=True, append_images=[gray.convert("RGB")] * 3), True),
        "moving.webp": (encoded(rgb, "WEBP", save_all=True, append_images=[gray.convert("RGB")] * 3), True),
        "moving.png": (encoded(rgb, "PNG", save_all=True, append_images=[gray.convert("RGB")] * 3), True),
        "picture.jp2": (encoded(rgb, "JPEG2000"), True),
        "with space.png": (png, True),
        "with 'quotes\".png": (png, True),
        "with, comma; and more.png": (png, True),
        "#hash.png": (png, True),
        "[bold]markup.png": (png, True),
        "画像 é.png": (png, True),
        "line\nbreak.png": (mirrored, True),
        os.fsdecode(b"not \xff\xfe utf-8.png"): (encoded(ImageOps.flip(rgb), "PNG"), True),
    }  # fmt: skip


def can(content):
    try:
        return decode(content, 3).shape == (64, 48, 3)
    except DecodeError:
        return False


@pytest.fixture(scope="module")
def hostile(photographs, tmp_path_factory):
    """A folder full of trouble, and the names of the files in it that cannot be read."""
    root = tmp_path_factory.mktemp("hostile")
    files = hostile_files(np.ascontiguousarray(photographs[0][100:164, 200:248]))
    for name, (content, _) in files.items():
        (root / name).write_bytes(content)
    (root / "folder.jpg").mkdir()
    (root / "nothing.jpg").symlink_to(root / "gone.jpg")
    (root / "itself.jpg").symlink_to(root / "itself.jpg")
    os.mkfifo(root / "pipe.jpg")
    (root / "secret.png").write_bytes(files["with space.png"][0])
    (root / "secret.png").chmod(0)
    bad = {name for name, (content, readable) in files.items() if not (can(content) if readable is None else readable)}
    if not os.access(root / "secret.png", os.R_OK):  # the administrator may read it all the same
        bad.add("secret.png")
    return root, bad


@pytest.fixture(scope="module")
def trouble(hostile):
    return check(hostile[0], workers=2)


# Hostile files --------------------------------------------------------------------------------------------------------


def test_every_bad_file_is_named_with_its_reason(hostile, trouble):
    _, bad = hostile
    assert trouble.images >= 58
    assert {os.path.basename(name) for name, _ in trouble.unreadable} == bad
    assert all(reason and "\n" not in reason for _, reason in trouble.unreadable)
    assert trouble.readable == trouble.images - len(bad)


@pytest.mark.parametrize("name", ["bomb.jpg", "bomb.png", "whole bomb.png", "bomb.gif", "bomb.bmp", "bomb.tif"])
def test_bombs_are_refused_for_their_size(trouble, name):
    assert f"{MAX_PIXELS:,}" in dict(trouble.unreadable)[name]


def test_what_is_in_a_hostile_folder(trouble):
    assert ("really a gif.jpg", "GIF") in trouble.misnamed
    assert ("really a jpeg.png", "JPEG") in trouble.misnamed
    assert len(trouble.misnamed) == 2
    assert trouble.bits["16"] == 3
    assert trouble.bits["32"] == 1
    assert trouble.modes["CMYK"] == 1
    assert trouble.modes["5 channels"] == 1
    assert trouble.smallest == (1, 1)
    assert trouble.largest == (65_500, 1)
    (copies,) = (group for group in trouble.exact if "with space.png" in group)
    assert len(copies) >= 8


@pytest.mark.parametrize("way", ["image", "split"])
def test_training_goes_through_a_hostile_folder(hostile, way):
    """Two epochs with two workers, resumed: each bad file is replaced, and named the same way everywhere."""
    root, bad = hostile
    source = open_source(root)
    views = ViewSettings()
    options = {
        "query": views, "key": views, "size": 32, "channels": 3, "batch_size": 8, "seed": 3, "workers": 2, "way": way,
        "device": torch.device("cpu"),
    }  # fmt: skip
    stream = ViewStream(source, **options)
    last = 2 * stream.steps_per_epoch
    batches = list(stream.run(0, last))
    assert len(batches) == last
    wanted = bad | {"five.tif"}  # which can be read, but not as RGB
    names = {name for batch in batches for name, _ in batch.skipped}
    assert names <= wanted
    assert len(names) >= len(wanted) - len(source) % 8
    used = {source.names[int(index)] for batch in batches for index in batch.ids}
    assert not used & wanted
    again = list(ViewStream(source, **(options | {"workers": 0})).run(5, last))
    for first, second in zip(batches[5:], again, strict=True):
        assert torch.equal(first.query, second.query)
        assert torch.equal(first.ids, second.ids)
        assert first.skipped == second.skipped


def test_a_hostile_folder_ends_a_training_early(hostile):
    source = open_source(hostile[0])
    views = ViewSettings()
    stream = ViewStream(
        source, query=views, key=views, size=16, channels=3, batch_size=8, seed=0, workers=0, way="image",
        device=torch.device("cpu"),
    )  # fmt: skip
    bad = BadFiles(len(source))
    new = []
    for step in range(stream.steps_per_epoch):
        new += bad.add(stream.batch(step).skipped)
        assert len(new) == len({name for name, _ in new}) == len(bad)
        if len(bad) > 10:
            with pytest.raises(UserError, match=r"more than the 10 allowed.*skipped\.csv"):
                bad.check(seen=(step + 1) * 8)
            break
        bad.check(seen=(step + 1) * 8)
    assert len(bad) > 10


# Files of the command -------------------------------------------------------------------------------------------------


def test_what_the_command_writes(hostile, tmp_path, capsys):
    root, bad = hostile
    assert main(["check", str(root), "--json", "-", "--fix-list", str(tmp_path / "good.txt"), "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    read, found = json.loads(out), check(root, workers=0)
    assert read["images"] == found.images
    assert {os.path.basename(item["name"]) for item in read["unreadable"]} == bad
    assert read["suggestions"]["channels"]["value"] == 3
    assert all(item["reason"] for item in read["suggestions"].values())
    assert "cannot be read" in err
    assert "[bold]markup.png" in err
    assert "1 readable file has a line break" in err
    again = open_source(tmp_path / "good.txt")
    good = {os.path.basename(again[number].name) for number in range(len(again))}
    assert len(again) == len(good) == len(found.good) - 1  # but for the name with a line break
    assert not good & bad
    assert check(tmp_path / "good.txt", workers=0).exact == []


def test_what_the_command_refuses(hostile, tmp_path):
    root = str(hostile[0])
    for options in ({"fix_list": str(tmp_path)}, {"fix_list": "no/such/folder/x.txt"}, {"fix_list": "-"},
                    {"fix_list": str(tmp_path / "good.csv")}):  # fmt: skip
        with pytest.raises(UserError, match=r"cannot write there|name a \.txt file"):
            run_check(root, workers=0, **options)
    with pytest.raises(UserError, match="workers -1"):
        run_check(root, workers=-1)
    with pytest.raises(UserError, match="no data"):
        run_check("")
    np.save(tmp_path / "x.npy", np.zeros((3, 8, 8), np.uint8))
    with pytest.raises(UserError, match="in archives"):
        run_check(str(tmp_path / "x.npy"), fix_list=str(tmp_path / "good.txt"))


def test_names_can_be_shown():
    assert shown("plain ü.png") == "plain ü.png"
    assert shown("a\nb\x1b[31m.png") == "a\\nb\\x1b[31m.png"
    shown("\udcff.png").encode("utf-8")


# Any source -----------------------------------------------------------------------------------------------------------


def test_arrays_and_their_labels(garments):
    pictures = np.concatenate([garments, garments[:5]])
    labels = np.arange(405) % 3
    labels[:4] = -1
    found = check(pictures, labels=labels)
    assert found.images == found.readable == 405
    assert found.formats == {"array": 405}
    assert found.modes == {"L": 405}
    assert found.median == (28, 28)
    assert sum(found.labels.values()) == 401
    assert found.unlabelled == 4
    assert len(found.exact) == found.copies == 5
    assert found.good.tolist() == list(range(400))
    values = {item.setting: item.value for item in found.suggestions}
    assert values["channels"] == 1
    assert values["image_size"] == 32
    assert values["stem"] == values["recipe"] == "small"
    assert any("few" in line for line in words(found))


def test_the_number_of_processes_does_not_matter(hostile, trouble):
    alone = check(hostile[0], workers=0)
    for name in ("unreadable", "misnamed", "formats", "modes", "common_sizes", "exact", "near", "suggestions"):
        assert getattr(alone, name) == getattr(trouble, name), name
    assert alone.good.tolist() == trouble.good.tolist()


@pytest.mark.slow
def test_processes_may_be_spawned(hostile, trouble):
    spawned = check(hostile[0], workers=1, start_method="spawn")
    assert spawned.unreadable == trouble.unreadable
    assert spawned.exact == trouble.exact


class Killing(Pictures):
    """Pictures of which some end the process that reads them, and one raises what nobody expects."""

    def __init__(self, pixels, deadly):
        super().__init__()
        self.pixels, self.deadly = pixels, deadly

    def __len__(self):
        return len(self.pixels)

    def read(self, index):
        if index in self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 100:
            raise RuntimeError("a bug\nin somebody's code")
        return self.pixels[index], f"picture {index}"


def test_a_picture_that_kills_its_process_is_named_and_nothing_else_is_lost(garments):
    found = list(examine_all(Killing(garments, {70, 71, 399}), workers=2))
    bad = {number: reason for part in found for number, _, reason in part.bad}
    assert bad == {70: DIED, 71: DIED, 399: DIED, 100: "RuntimeError: a bug in somebody's code"}
    assert sorted(np.concatenate([part.ids for part in found]).tolist()) == sorted(set(range(400)) - set(bad))
    again = check(Killing(garments, {70, 399}), workers=2)
    assert [name for name, _ in again.unreadable] == ["70", "100", "399"]
    assert again.readable == 397


# Duplicates -----------------------------------------------------------------------------------------------------------


def test_copies_are_found_and_other_pictures_are_not(photographs, tmp_path):
    tiles = [
        photo[top : top + 120, left : left + 120] for photo in photographs for top in (0, 150, 300)
        for left in (0, 150, 300, 450)
    ]  # fmt: skip
    for number, tile in enumerate(tiles):
        Image.fromarray(tile).save(tmp_path / f"{number:02}.png")
    first, second = Image.fromarray(tiles[5]), Image.fromarray(tiles[17])
    first.save(tmp_path / "same pixels.bmp")
    first.save(tmp_path / "worse.jpg", quality=30)
    first.resize((77, 80), Image.Resampling.BICUBIC).save(tmp_path / "smaller.png")
    Image.fromarray(cv2.convertScaleAbs(tiles[5], alpha=1, beta=12)).save(tmp_path / "brighter.png")
    second.crop((1, 1, 119, 119)).save(tmp_path / "trimmed.png")
    found = check(tmp_path, workers=0)
    assert found.exact == [["05.png", "same pixels.bmp"]]
    assert sorted(map(sorted, found.near)) == [
        ["05.png", "brighter.png", "smaller.png", "worse.jpg"],
        ["17.png", "trimmed.png"],
    ]
    assert found.copies == 1
    assert found.near_copies == 4


def test_near_groups_are_those_of_all_pairs():
    """No pair within the bound is missed, whichever bits differ."""
    rng = np.random.default_rng(0)
    bases = rng.integers(0, 256, (60, *THUMBNAIL), dtype=np.uint8)
    pictures = np.concatenate([bases, *(np.clip(bases + rng.integers(-6, 7, bases.shape), 0, 255) for _ in range(3))])
    pictures = pictures.astype(np.uint8)
    hashes = difference_hash(pictures)
    apart = np.array([[bin(int(one) ^ int(other)).count("1") for other in hashes] for one in hashes])
    assert np.array_equal(np.bincount(apart[apart <= 8])[: MOST_BITS + 1] > 0, [True] * (MOST_BITS + 1))
    gaps = pictures[:, None].astype(float) - pictures[None]
    gaps = np.abs(gaps - gaps.mean((2, 3), keepdims=True)).mean((2, 3))
    linked = (apart <= MOST_BITS) & (gaps <= MOST_GAP)
    members = np.arange(len(pictures))
    for _ in range(len(pictures)):
        members = np.where(linked, members[None, :], len(members)).min(axis=1)
    wanted = {tuple(np.flatnonzero(members == one)) for one in members}
    assert {tuple(group) for group in near_groups(pictures)} == {group for group in wanted if len(group) > 1}


@pytest.mark.parametrize("flips", range(7))
def test_four_bits_may_differ_wherever_they_are(flips):
    """Thumbnails with chosen bits: up to four of them flipped, each in another part of the hash."""
    rising = np.random.default_rng(1).random((8, 8)) < 0.5
    other = rising.copy()
    other[[0, 2, 4, 6, 1, 3, 5][:flips], 7] ^= True
    pair = [np.cumsum(np.where(bits, 10, -10), axis=1) for bits in (rising, other)]
    pictures = np.stack([np.pad(steps, ((0, 0), (1, 0))) + 120 for steps in pair]).astype(np.uint8)
    assert len(near_groups(pictures)) == (flips <= MOST_BITS)


def test_flat_pictures_are_no_doubles():
    flat = np.full((9, *THUMBNAIL), 100, np.uint8) + np.arange(9, dtype=np.uint8)[:, None, None]
    assert near_groups(flat) == []
    assert near_groups(flat[:0]) == []
    assert exact_groups(np.zeros((0, 16), np.uint8)) == []
    assert [group.tolist() for group in exact_groups(flat.reshape(9, -1)[[3, 1, 3, 2, 1, 3]])] == [[0, 2, 5], [1, 4]]


def test_thousands_of_equal_hashes_are_one_group():
    rng = np.random.default_rng(0)
    base = np.linspace(0, 250, 72).reshape(THUMBNAIL).astype(np.uint8)
    many = np.repeat(base[None], 5000, axis=0)
    many[rng.integers(0, 5000, 900), 0, 0] += 1
    (group,) = near_groups(many)
    assert len(group) == 5000


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 13])
def test_thumbnails_of_any_picture(channels):
    assert thumbnail(np.full((1, 50, channels), 9, np.uint8)).shape == THUMBNAIL


# Suggestions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (
            (300, 28, 28),
            {"image_size": 32, "channels": 1, "stem": "small", "batch_size": 32, "queue_size": 128, "repeat": 2},
        ),
        ((40, 96, 200, 3), {"image_size": 96, "channels": 3, "stem": "imagenet", "recipe": "v2", "batch_size": 32}),
        ((20, 300, 400, 5), {"image_size": 224, "channels": 5, "batch_size": 16, "repeat": 13, "epochs": 100}),
        ((1100, 8, 8), {"batch_size": 64, "epochs": 800, "backbone": "resnet18"}),
    ],
)
def test_suggestions(shape, wanted):
    pictures = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    found = {item.setting: item.value for item in check(ArraySource(pictures)).suggestions}
    assert {name: found[name] for name in wanted} == wanted
    assert found["queue_size"] <= shape[0] / 2
    assert min(32, shape[0] / 2) <= found["batch_size"] <= shape[0]
    assert ("repeat" in found) == (shape[0] < 512)


def copied(line):
    """Settings, resolved for their data, of a command as a shell would take it."""
    words = shlex.split(line)
    assert words[:2] == ["moco", "pretrain"]
    given = vars(make_parser(words[1:])[0].parse_args(words[1:]))
    (data,), values = given["data"], {name: given[name] for name in given if name in PretrainSettings.model_fields}
    settings = pretrain_settings(**(values | {"data": data}))
    return resolve(settings, open_source(data, settings.labels), Processes(0, 1, torch.device("cpu")))


@pytest.mark.parametrize(
    ("count", "shape"),
    [(2, (8, 8)), (3, (50, 40, 3)), (33, (64, 64, 3)), (600, (9, 9)), (6, (250, 250, 5)), (5, (40, 40, 4))],
)
def test_the_command_that_is_suggested_works(count, shape, tmp_path):
    file = tmp_path / "some 'pictures'.npy"
    np.save(file, np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8))
    found = check(file, workers=0)
    values = copied(found.command).model_dump()
    assert {item.setting: values[item.setting] for item in found.suggestions} == {
        item.setting: item.value for item in found.suggestions
    }
    assert found.as_dict()["command"] == found.command


def test_the_command_stands_last_and_passes_bad_files_over(hostile, tmp_path, capsys):
    root, bad = hostile
    run_check(str(root), labels="none", workers=0)
    settings = copied(capsys.readouterr().out.splitlines()[-1])
    assert settings.labels == "none"
    assert BadFiles(len(open_source(root)), settings.max_bad).limit >= len(bad) + 1  # and five.tif, which is not RGB
    run_check(str(root), fix_list=str(tmp_path / "good.txt"), workers=0)
    line = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(line)[2] == str(tmp_path / "good.txt")
    assert "--max-bad" not in line
    copied(line)


def test_no_command_where_there_is_none(garments, tmp_path):
    assert check(garments).command == ""
    np.save(tmp_path / "one.npy", np.repeat(garments[:1], 3, axis=0))
    alone = check(tmp_path / "one.npy", workers=0)
    assert alone.command == ""
    assert "one picture alone" in words(alone)[-1]
    np.save(tmp_path / "two\nlines.npy", garments)
    assert check(tmp_path / "two\nlines.npy", workers=0).command == ""


def test_gray_pages_suggest_channels(tmp_path):
    for number in range(3):
        pages = np.random.default_rng(number).integers(0, 65536, (5, 40, 50), dtype=np.uint16)
        first, *others = map(Image.fromarray, pages)
        first.save(tmp_path / f"{number}.tif", save_all=True, append_images=others)
    found = check(tmp_path, workers=0)
    assert found.modes == {"L × 5 pages": 3}
    assert {item.setting: item.value for item in found.suggestions}["channels"] == 5


def test_a_folder_of_which_nothing_can_be_read(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"nothing")
    found = check(tmp_path, workers=0)
    assert found.suggestions == []
    assert "nothing to train on" in words(found)[-1]
