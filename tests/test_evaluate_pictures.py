import shutil

import cv2
import numpy as np
import pytest
import torch

from moco.data import fashion
from moco.data.sources import ArraySource, open_source
from moco.errors import UserError
from moco.evaluate.pictures import data_fingerprint, open_part, same_classes, split


@pytest.fixture
def folder(tmp_path):
    x, y, _, _ = fashion.load()
    for index in range(30):
        path = tmp_path / "train" / fashion.CLASSES[y[index]].replace("/", "-")
        path.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path / f"{index}.png"), x[index])
    return tmp_path / "train"


def test_a_split_is_stratified_seeded_and_without_overlap():
    x, y, _, _ = fashion.load()
    whole = open_part(x, y, needed=True)
    train, test = split(whole, 0.2, seed=0)
    assert set(train.indices) | set(test.indices) == set(range(10_000))
    assert len(train) + len(test) == 10_000
    for label in range(10):
        share = int((test.labels == label).sum()) / int((whole.labels == label).sum())
        assert share == pytest.approx(0.2, abs=0.001)
    assert (test.labels.numpy() == y[test.indices]).all()
    assert (split(whole, 0.2, seed=0)[1].indices == test.indices).all()
    assert not np.array_equal(split(whole, 0.2, seed=1)[1].indices, test.indices)


def test_a_class_keeps_one_picture_to_learn_from():
    part = open_part(fashion.load()[0][:5], np.array([0, 0, 0, 1, 2]), needed=True)
    train, test = split(part, 0.9, seed=0)
    assert train.labels.tolist() == [0, 1, 2]
    assert test.labels.tolist() == [0, 0]
    with pytest.raises(UserError, match="one picture of each class: nothing can be set aside; name --test"):
        split(open_part(fashion.load()[0][:2], np.array([0, 1]), needed=True), 0.5, seed=0)


def test_classes_meet_by_name(folder):
    x, y, _, _ = fashion.load()
    train = open_part(folder, "auto", needed=True)
    numbers = open_part(x[:20], y[:20] + 5, needed=True)
    first, second = same_classes(train, numbers)
    assert first.classes == second.classes
    assert [first.classes[label] for label in first.labels] == [train.classes[label] for label in train.labels]
    assert [second.classes[label] for label in second.labels] == [str(label + 5) for label in y[:20]]
    numbered, _ = same_classes(numbers, open_part(x[:20], y[:20], needed=True))
    assert list(numbered.classes) == sorted(numbered.classes, key=int)  # not 1, 10, 11, 2


def test_one_class_only_is_said_to_be_so(folder):
    for path in folder.iterdir():
        if path.name != "Bag":
            shutil.rmtree(path)
    with pytest.raises(UserError, match=r"train has one class only, Bag: two or more are needed, each a folder of its"):
        open_part(folder, "auto", needed=True)
    with pytest.raises(UserError, match=f"has one class only, train: .*; name {folder} if its folders are the classes"):
        open_part(folder.parent, "auto", needed=True)
    for path in (folder / "Bag").iterdir():
        path.rename(folder / path.name)
    with pytest.raises(UserError, match="has no labels: put each class into a folder of its own"):
        open_part(folder, "auto", needed=True)


def test_pictures_without_a_label_stay_out_only_where_labels_are_needed():
    x, y, _, _ = fashion.load()
    labels = np.where(np.arange(100) % 2, y[:100].astype(int), -1)
    part = open_part(x[:100], labels, needed=True)
    assert part.indices.tolist() == list(range(1, 100, 2))
    assert len(open_part(x[:100], labels, needed=False)) == 100
    with pytest.raises(UserError, match="none of its 100 pictures has a label"):
        open_part(x[:100], np.full(100, -1), needed=True)
    with pytest.raises(UserError, match="the array has no labels: put each class into a folder"):
        open_part(x[:100], "auto", needed=True)


def test_at_most_so_many_pictures():
    x, y, _, _ = fashion.load()
    part = open_part(x, y, needed=True, most=70, seed=3)
    assert len(part) == 70
    assert (part.indices == open_part(x, y, needed=True, most=70, seed=3).indices).all()
    assert np.array_equal(part.as_source()[5].image[..., 0], x[part.indices[5]])


def test_a_part_of_a_folder_is_a_source_with_its_own_numbers(folder):
    part = open_part(folder, "auto", needed=True).rows(torch.tensor([4, 9]))
    source = part.as_source()
    assert len(source) == 2
    assert source[1].image == open_source(folder)[9].image


def test_the_fingerprint_follows_what_is_in_the_data(folder, tmp_path):
    x = fashion.load()[0][:50]
    before = data_fingerprint(ArraySource(x))
    assert data_fingerprint(ArraySource(x.copy())) == before
    x[49, 27, 27] ^= 1
    assert data_fingerprint(ArraySource(x)) != before
    assert data_fingerprint(ArraySource(x[::2])) != data_fingerprint(ArraySource(x[1::2]))

    before = data_fingerprint(open_source(folder))
    assert data_fingerprint(open_source(folder)) == before
    changed = next(folder.rglob("*.png"))
    source = open_source(folder)
    content = changed.read_bytes()
    changed.write_bytes(content + b"\0")
    assert data_fingerprint(open_source(folder)) != before
    changed.unlink()
    assert data_fingerprint(source) is None

    np.save(tmp_path / "x.npy", x)
    before = data_fingerprint(open_source(tmp_path / "x.npy"))
    np.save(tmp_path / "x.npy", x[:40])
    assert data_fingerprint(open_source(tmp_path / "x.npy")) != before
