import hashlib
from importlib import resources

import numpy as np

from moco.data import fashion


def test_shapes_and_types():
    arrays = fashion.load()
    assert [array.shape for array in arrays] == [(10_000, 28, 28), (10_000,), (2_000, 28, 28), (2_000,)]
    assert all(array.dtype == np.uint8 for array in arrays)


def test_labels_are_those_of_the_published_order():
    _, y_train, _, y_test = fashion.load()
    assert len(fashion.CLASSES) == 10
    assert np.bincount(y_train).tolist() == [942, 1027, 1016, 1019, 974, 989, 1021, 1022, 990, 1000]
    assert np.bincount(y_test).tolist() == [200, 203, 214, 190, 219, 195, 197, 200, 194, 188]
    assert y_train[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]  # the first ones of the published file


def test_pixels_are_unchanged():
    x_train, _, x_test, _ = fashion.load()
    digests = [hashlib.sha256(array.tobytes()).hexdigest()[:16] for array in (x_train, x_test)]
    assert digests == ["2929ae1c7b89e0ee", "09bbac78738f0229"]


def test_size_and_licence():
    folder = resources.files("moco.data.fashion")
    assert len(folder.joinpath("fashion.npz").read_bytes()) < 6_000_000
    licence = folder.joinpath("LICENSE").read_text(encoding="utf-8")
    assert "2017 Zalando SE" in licence
    assert "Permission is hereby granted, free of charge" in licence
