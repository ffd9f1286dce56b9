"""Python sequences and torch data sets: what an item may be, where labels come from, what is refused."""

import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from moco.data.decode import decode
from moco.data.reading import Unreadable, read_pixels, readable
from moco.data.sources import ArraySource, FolderSource, Sample, open_source
from moco.errors import UserError


class Items(Dataset):
    """Gives what it was given, and counts how often."""

    def __init__(self, items, **attributes):
        self.items, self.given = items, 0
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.given += 1
        return self.items[index]


@pytest.fixture
def colours(photographs):
    """One picture, 20 × 30 × 3."""
    return np.ascontiguousarray(photographs[0][100:120, 200:230])


def test_what_an_item_may_be(colours, tmp_path):
    file = io.BytesIO()
    Image.fromarray(colours).save(file, "png")
    (tmp_path / "a.png").write_bytes(file.getvalue())
    first = torch.from_numpy(colours).permute(2, 0, 1)
    items = [
        Image.fromarray(colours),
        colours,
        torch.from_numpy(colours),
        first,
        first.float() / 255,
        (first.double() / 255).requires_grad_(),
        file.getvalue(),
        bytearray(file.getvalue()),
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        Sample(colours, "x", None),
        Image.open(tmp_path / "a.png"),
    ]
    for wrapped in (items, [(item, 3) for item in items], [(item, 3, "more") for item in items], Items(items)):
        source = open_source(wrapped)
        for index in range(len(items)):
            assert (decode(source[index].image, 3) == colours).all(), index
    assert source[2].name == "Items[2]"


@pytest.mark.parametrize("mode", ["1", "L", "P", "PA", "LA", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F", "LAB", "HSV"])
def test_pil_images_are_as_the_file_would_be(colours, mode):
    picture = Image.fromarray(colours)
    if mode in ("PA", "LA"):
        picture = picture.convert("RGBA").convert("LA")
    picture = picture.convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        picture = Image.fromarray(np.asarray(picture).astype(np.uint16) * 257)
    pixels = decode(open_source([picture])[0].image, 3)
    assert pixels.shape == (20, 30, 3)
    if mode == "RGBA":
        picture.putalpha(0)
        assert (decode(open_source([picture])[0].image, 3) == 255).all()
    if mode in ("L", "I;16"):
        assert (pixels[..., 0] == np.asarray(Image.fromarray(colours).convert("L"))).all()


def test_orientation_of_a_pil_image_counts(colours):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(colours).save(file, "jpeg", exif=exif)
    assert decode(open_source([Image.open(file)])[0].image, 3).shape == (30, 20, 3)


@pytest.mark.parametrize("name", ["targets", "labels"])
@pytest.mark.parametrize("form", [list, np.array, torch.tensor, lambda values: np.array(values)[:, None]])
def test_labels_come_without_loading_pictures(garments, name, form):
    data = Items(list(garments[:6]), **{name: form([2, 0, 1, -1, 1, 0])}, classes=["a", "b", "c"])
    source = open_source(data)
    assert data.given <= 1
    assert source.labels.tolist() == [2, 0, 1, -1, 1, 0]
    assert source.labels.dtype == np.int64
    assert source.classes == ["a", "b", "c"]
    assert source[3].label == -1
    assert open_source(data, labels="none")[3].label is None
    data.classes = ["a", "b"]  # of labels up to 2
    assert open_source(data).classes is None
    data.classes = ["a", "b", "c"]
    part = open_source(Subset(Subset(data, [5, 4, 2]), [2, 0]))
    assert (part.labels.tolist(), part.classes) == ([1, 0], ["a", "b", "c"])
    assert (part[0].image == data.items[2][..., None]).all()
    assert open_source(ConcatDataset([data, Subset(data, [0])])).labels.tolist() == [2, 0, 1, -1, 1, 0, 2]
    assert open_source(ConcatDataset([data, Items(data.items)])).labels is None


@pytest.mark.parametrize("labels", [[1, 2], "abcdef", [0.5] * 6, [[1], [2, 3]] * 3, None, np.zeros((6, 2), int)])
def test_other_labels_are_not_taken(garments, labels):
    source = open_source(Items(list(garments[:6]), targets=labels, classes=["a"]))
    assert source.labels is None
    assert source.classes is None


def test_labels_of_lists_and_tuples(garments):
    assert open_source([(image, 4) for image in garments[:3]]).labels.tolist() == [4, 4, 4]
    assert open_source([(image, None) for image in garments[:3]]).labels is None
    assert open_source([(garments[0], 1), (garments[1],)]).labels is None


def test_arrays_of_one_shape_become_one_array(garments, colours):
    assert isinstance(open_source(list(garments[:5])), ArraySource)
    mixed = open_source([colours, colours[:10], garments[0]])
    assert [mixed[index].image.shape for index in range(3)] == [(20, 30, 3), (10, 30, 3), (28, 28, 1)]
    stack = open_source(TensorDataset(torch.from_numpy(garments[:5])[:, None]))
    assert stack.channels == 1
    assert (stack[3].image[..., 0] == garments[3]).all()


def test_a_source_is_taken_as_it_is(garments):
    own = ArraySource(garments[:5], np.arange(5))
    taken = open_source(own, labels="none")
    assert isinstance(taken, ArraySource)
    assert (taken.labels, taken[3].label) == (None, None)
    assert own.labels.tolist() == list(range(5))


def test_unusable_items_later_on_are_unreadable_pictures(garments):
    data = [garments[0], "nowhere.png", 7, Image.fromarray(garments[3]), torch.zeros(3, 4, 4) - 1, b"", None, (), "a\0"]
    source = open_source(Items(data))
    for index in (1, 2, 4, 6, 7, 8):
        with pytest.raises(OSError, match=r"No such file|it is"):
            source[index]
    _, _, skipped = readable(source, 4, 1)
    assert skipped[0][0] == "Items[4]"
    reasons = {}
    for index in (4, 5, 6, 7, 8):
        with pytest.raises(Unreadable) as found:
            read_pixels(source, index, 1)
        reasons[index] = found.value.reason
    assert "Normalize" in reasons[4]
    assert "NoneType" in reasons[6]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Broken(Items):
    def __getitem__(self, index):
        raise KeyError("pixels")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], ["empty"]),
        ((), ["empty"]),
        (Items([]), ["Items", "empty"]),
        ([7.5, "x"], ["item 0 is of type float"]),
        ([{"image": 1}], ["item 0 is of type dict"]),
        ([None], ["item 0 is of type NoneType"]),
        ([np.zeros((4, 4), np.float32), "x"], ["float32", "not of uint8"]),
        ([np.zeros((3, 32, 32), np.uint8), "x"], ["(3, 32, 32)", "(height, width, channels)"]),
        ([torch.full((3, 8, 8), 2.5)], ["2.5", "Normalize"]),
        ([torch.full((3, 8, 8), float("nan"))], ["nan"]),
        ([torch.zeros(3, 8, 8, dtype=torch.int64)], ["int64"]),
        ([torch.zeros(8)], ["shape (8,)"]),
        ({"a": 1}, ["dict", "no random access"]),
        ({1, 2}, ["set", "no random access"]),
        (iter([1]), ["no random access"]),
        (5, ["int", "no random access"]),
        (None, ["NoneType"]),
        (Stream(), ["IterableDataset", "no random access"]),
        (DataLoader([1, 2]), ["DataLoader", "moco makes the batches"]),
        (Broken([1]), ["item 0 of the Broken cannot be read", "KeyError", "pixels"]),
        ([[1, 2], [3, 4]], ["uint8", "int64"]),
    ],
)
def test_what_is_refused(data, words):
    with pytest.raises(UserError) as caught:
        open_source(data)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_random_transforms_are_pointed_out(garments):
    class RandomCrop:
        def __repr__(self):
            return "RandomCrop(\n  size=3)"

    source = open_source(Items(list(garments[:2]), transform=RandomCrop()))
    assert len(source.notices) == 1
    assert "RandomCrop( size=3)" in source.notices[0]
    assert open_source(Items(list(garments[:2]), transform="Resize")).notices == []


def test_pickles(garments, tmp_path):
    Image.fromarray(garments[0]).save(tmp_path / "a.png")
    for data in (Items(list(garments[:3])), [str(tmp_path / "a.png")], [garments[0], garments[1][:5]]):
        source = open_source(data)
        copy = pickle.loads(pickle.dumps(source))
        assert (decode(copy[0].image, 1) == decode(source[0].image, 1)).all()
    assert isinstance(open_source(tmp_path), FolderSource)
