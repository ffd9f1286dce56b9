"""Folders and arrays: what is found, in which order, with which labels; one clear line for anything else."""

import inspect
import os
import pickle
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from moco.data.decode import decode
from moco.data.loader import resident
from moco.data.sources import ArraySource, FolderSource, PackedNames, open_source
from moco.errors import UserError


def write(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def names(source) -> list[str]:
    return [source[index].name for index in range(len(source))]


@pytest.fixture
def folder(tmp_path, garments):
    root = tmp_path / "pictures"
    places = ["shoe/b.png", "bag/deep/er/c.JPG", "bag/a.PnG", "shoe/a.jpeg", "bag/.hidden.png", ".cache/x.png"]
    for number, name in enumerate(places):
        write(root / name, garments[number])
    (root / "bag" / "notes.txt").write_text("no picture")
    (root / "empty.png").mkdir()
    return root


def test_folder_order_names_labels(folder):
    source = open_source(folder)
    assert names(source) == ["bag/a.PnG", "bag/deep/er/c.JPG", "shoe/a.jpeg", "shoe/b.png"]
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert source.labels.dtype == np.int64
    assert source.classes == ["bag", "shoe"]
    assert [source[index].label for index in range(4)] == [0, 0, 1, 1]
    assert source.channels is None
    assert source[0].image == (folder / "bag/a.PnG").read_bytes()
    with pytest.raises(IndexError):
        source[4]


def test_folder_order_does_not_depend_on_the_file_system(folder, monkeypatch):
    wanted = names(open_source(folder))
    scandir = os.scandir

    class Shuffled:
        def __init__(self, path):
            with scandir(path) as found:
                self.entries = list(found)
            random.Random(len(str(path))).shuffle(self.entries)
            self.entries.reverse()

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(os, "scandir", Shuffled)
    assert names(open_source(folder)) == wanted


def test_links_are_followed_once(folder, tmp_path, garments):
    write(tmp_path / "elsewhere" / "z.png", garments[9])
    (folder / "bag" / "loop").symlink_to(folder)
    (folder / "more").symlink_to(tmp_path / "elsewhere")
    (folder / "shoe" / "again.png").symlink_to(folder / "shoe" / "b.png")
    (folder / "shoe" / "gone.png").symlink_to(folder / "nowhere.png")
    found = names(open_source(folder))
    assert found == ["bag/a.PnG", "bag/deep/er/c.JPG", "more/z.png", "shoe/a.jpeg", "shoe/again.png", "shoe/b.png"]


def test_links_to_themselves_and_deep_folders(tmp_path, garments):
    deep = tmp_path.joinpath("deep", *["d"] * 400)
    write(tmp_path / "a.png", garments[0])
    (tmp_path / "self.png").symlink_to(tmp_path / "self.png")
    (tmp_path / "self").symlink_to("self")
    write(deep / "b.png", garments[1])
    depth, limit = len(inspect.stack()), sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 150)
    try:
        found = names(open_source(tmp_path))
    finally:
        sys.setrecursionlimit(limit)
    assert found[0] == "a.png"
    assert found[1].endswith("/d/b.png")
    assert len(found) == 2


def test_labels_by_folder_when_asked(folder, garments):
    source = open_source(folder, labels="folder")
    assert (source.labels.tolist(), source.classes) == ([0, 0, 1, 1], ["bag", "shoe"])
    with pytest.raises(UserError, match="one folder, er"):
        open_source(folder / "bag" / "deep", labels="folder")
    write(folder / "loose.png", garments[0])
    with pytest.raises(UserError, match=r"loose\.png lies directly in the top folder"):
        open_source(folder, labels="folder")


def test_several_folders_come_one_after_the_other(folder, tmp_path, garments):
    write(tmp_path / "more" / "shoe" / "x.png", garments[11])
    write(tmp_path / "more" / "boot" / "y.png", garments[12])
    source = open_source([folder, str(tmp_path / "more")])
    assert [name.removeprefix(f"{tmp_path}/") for name in names(source)] == [
        *(f"pictures/{name}" for name in ("bag/a.PnG", "bag/deep/er/c.JPG", "shoe/a.jpeg", "shoe/b.png")),
        *("more/boot/y.png", "more/shoe/x.png"),
    ]
    assert source.classes == ["bag", "boot", "shoe"]
    assert source.labels.tolist() == [0, 0, 2, 2, 1, 2]
    assert source[5].label == 2
    assert source[5].image == (tmp_path / "more/shoe/x.png").read_bytes()
    assert open_source((folder, folder / "bag")).labels is None
    assert open_source([folder, tmp_path / "more"], labels=np.arange(6)).labels.tolist() == list(range(6))
    with pytest.raises(UserError, match="nowhere"):
        open_source([folder, tmp_path / "nowhere"])
    with pytest.raises(IndexError):
        source[6]


def test_no_labels_without_two_folders_or_with_pictures_in_the_root(folder, garments):
    assert open_source(folder / "bag").labels is None  # a.PnG lies in its root
    write(folder.parent / "one" / "only" / "a.png", garments[0])
    assert open_source(folder.parent / "one").labels is None
    assert open_source(folder, labels="none").labels is None
    assert open_source(folder, labels="none")[0].label is None
    write(folder / "loose.png", garments[0])
    source = open_source(folder)
    assert source.labels is None
    assert source.classes is None
    assert len(source) == 5


def test_folder_survives_pickling(folder):
    source = open_source(folder)
    assert names(pickle.loads(pickle.dumps(source))) == names(source)


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.text(st.characters(blacklist_categories=("Cs",)), max_size=30), max_size=30))
def test_packed_names_round_trip(strings):
    packed = PackedNames.of(iter(strings))
    assert [packed[index] for index in range(len(packed))] == strings
    assert list(packed) == strings
    twice = PackedNames.joined([packed, PackedNames.of([]), packed])
    assert list(twice) == strings * 2
    assert [twice[index] for index in range(len(twice))] == strings * 2


def test_packed_names_that_are_no_unicode():
    strange = [os.fsdecode(b"caf\xe9.jpg"), "\ud800.png", "", "æ日本.png"]
    assert list(PackedNames.of(strange)) == strange
    assert list(PackedNames.of(str(number) for number in range(10_000))) == [str(number) for number in range(10_000)]


def test_packed_names_are_small():
    count = 100_000
    packed = PackedNames.of(f"folder{index % 100:03}/picture{index:08}.jpg" for index in range(count))
    assert len(pickle.dumps(packed)) < count * (len("folder000/picture00000000.jpg") + 8) + 1000
    assert packed[98_765] == "folder065/picture00098765.jpg"


@pytest.mark.parametrize("channels", [None, 1, 3, 13])
def test_arrays_and_tensors(garments, channels):
    images = garments if channels is None else np.repeat(garments[..., None], channels, axis=3)
    for data in (images, torch.from_numpy(images)):
        source = open_source(data)
        assert source.images.shape == (400, 28, 28, channels or 1)
        assert source.channels == (channels or 1)
        assert source.labels is None
        assert source[7].name == "array[7]"
        assert (source[7].image[..., 0] == garments[7]).all()


@pytest.mark.parametrize("keys", [("x", "y"), ("images", "labels"), ("pictures", "labels")])
def test_npz(tmp_path, garments, keys):
    path = tmp_path / "data.npz"
    np.savez(path, **{keys[0]: garments, keys[1]: (np.arange(400) % 10).astype(np.uint8), "extra": np.arange(3)})
    source = open_source(path)
    assert len(source) == 400
    assert source.labels.tolist() == (np.arange(400) % 10).tolist()
    assert source.labels.dtype == np.int64
    assert source[3].label == 3
    assert source[3].name == "data.npz[3]"
    assert open_source(str(path), labels="none").labels is None
    assert open_source(path, labels=np.zeros(400, int)).labels.sum() == 0


def test_npy_is_mapped_and_stays_unchanged(tmp_path, garments):
    np.save(tmp_path / "x.npy", garments)
    np.save(tmp_path / "y.npy", np.arange(400)[:, None])
    source = open_source(tmp_path / "x.npy", labels=str(tmp_path / "y.npy"))
    assert source.labels.tolist() == list(range(400))
    assert isinstance(source.images, np.memmap)
    assert len(pickle.dumps(source)) < 10_000
    copy = pickle.loads(pickle.dumps(source))
    assert (copy[5].image == source[5].image).all()
    before = (tmp_path / "x.npy").read_bytes()
    source.images[0] = 7
    assert (tmp_path / "x.npy").read_bytes() == before


def test_labels_for_a_folder(folder, tmp_path):
    np.save(tmp_path / "y.npy", np.array([3, 1, 4, 1]))
    source = open_source(folder, labels=str(tmp_path / "y.npy"))
    assert source.labels.tolist() == [3, 1, 4, 1]
    assert source.classes is None
    assert source[2].label == 4


def test_read_only_arrays_bring_no_warning(garments):
    images = garments.copy()
    images.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resident(ArraySource(images), torch.device("cpu"))
        decode(images[0], 3)


def unusable(case: str, root: Path, garments: np.ndarray):
    """(data, labels, words of the message) of one kind of bad input."""
    path = root / case
    match case:
        case "nowhere":
            return path, "auto", ["no such file or folder", "nowhere"]
        case "bare":
            path.mkdir()
            (path / "a.txt").write_text("no picture")
            return path, "auto", ["no images in", "bare"]
        case "notes.doc":
            path.write_text("hello")
            return path, "auto", ["notes.doc", "neither"]
        case "single.png":
            write(path, garments[0])
            return path, "auto", ["single.png", "single image", "folder"]
        case "no name":
            return "", "auto", ["no data"]
        case "long name":
            return root / ("x" * 5000), "auto", ["cannot open", "too long"]
        case "no such home":
            return "~nobody-of-this-name/x", "auto", ["cannot open", "home"]
        case "bfloat":
            return torch.zeros(2, 4, 4, dtype=torch.bfloat16), "auto", ["the array", "BFloat16"]
        case "many channels":
            return np.zeros((2, 90, 90, 65), np.uint8), "auto", ["1…64 channels", "2 × 90 × 90 × 65"]
        case "spectral first":
            return np.zeros((2, 13, 40, 40), np.uint8), "auto", ["move the channels"]
        case "folder of an array":
            return garments, "folder", ["labels folder", "no folders"]
        case "damaged.npz" | "damaged.npy":
            path.write_bytes(b"PK\x03\x04 this is no archive")
            return path, "auto", [case, "not a readable"]
        case "renamed.npy":
            np.savez(root / "archive.npz", x=garments)
            (root / "archive.npz").rename(path)
            return path, "auto", [case, "not a readable"]
        case "two.npz":
            np.savez(path, a=garments, b=garments)
            return path, "auto", ["two.npz", "no array called x or images", "a 400 × 28 × 28"]
        case "pickled.npz":
            np.savez(path, x=np.array([{}, {}], dtype=object))
            return path, "auto", ["pickled.npz", "not a readable"]
        case "float":
            return garments / 255, "auto", ["uint8", "float64"]
        case "flat":
            return garments.reshape(400, -1), "auto", ["N × H × W", "400 × 784"]
        case "channels first":
            return np.zeros((5, 3, 32, 32), np.uint8), "auto", ["5 × 3 × 32 × 32", "move the channels"]
        case "none":
            return garments[:0], "auto", ["no images"]
        case "short labels":
            return garments, np.arange(399), ["399 labels for 400 images"]
        case "float labels":
            return garments, np.zeros(400), ["integer", "float64"]
        case "square labels":
            return garments, np.zeros((400, 2), int), ["400 × 2"]
        case "no labels":
            return garments, str(root / "absent.npy"), ["no such file", "absent.npy"]
        case "short.npz":
            np.savez(path, x=garments, y=np.arange(10))
            return path, "auto", ["short.npz", "10 labels for 400 images"]
    raise AssertionError(case)


@pytest.mark.parametrize(
    "case",
    [
        *("nowhere", "bare", "notes.doc", "single.png", "no name", "long name", "no such home", "bfloat"),
        *(
            "many channels",
            "spectral first",
            "folder of an array",
            "damaged.npz",
            "damaged.npy",
            "renamed.npy",
            "two.npz",
            "pickled.npz",
        ),
        *("float", "flat", "channels first", "none", "short labels", "float labels", "square labels", "no labels"),
        "short.npz",
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, garments, case):
    data, labels, words = unusable(case, tmp_path, garments)
    with pytest.raises(UserError) as caught:
        open_source(data, labels)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_nobody_is_advised_to_unpickle_a_file(tmp_path):
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(UserError, match=r"is not a readable \.npz file: it is cut off, or none") as caught:
        open_source(tmp_path / "text.npz")
    assert "pickle" not in str(caught.value)


def test_folder_source_says_what_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "nowhere"):
        with pytest.raises(UserError, match=name):
            FolderSource(tmp_path / name)
