import numpy as np
import pytest

from moco.data import fashion
from moco.errors import UserError
from moco.evaluate import handheld as module
from moco.evaluate.handheld import handheld


def pictures(count=40):
    return fashion.load()[2][:count]


def only(monkeypatch, shift=0.0, zoom=1.0, tilt=0.0):
    """Leave one of the three movements, at a known size; the draw has nothing left to choose but the sign."""
    monkeypatch.setattr(module, "SHIFT", shift)
    monkeypatch.setattr(module, "ZOOM", (zoom, zoom))
    monkeypatch.setattr(module, "TILT", tilt)


@pytest.mark.parametrize("shape", [(28, 28), (28, 28, 1), (28, 28, 3), (20, 36, 4), (20, 36, 7)])
def test_keeps_shape_and_type_and_leaves_the_input(shape):
    images = np.random.default_rng(0).integers(0, 256, (3, *shape), dtype=np.uint8)
    before = images.copy()
    moved = handheld(images)
    assert moved.shape == images.shape
    assert moved.dtype == np.uint8
    assert np.array_equal(images, before)
    assert not np.array_equal(moved, images)


def test_channels_move_together():
    images = pictures()
    moved = handheld(images)
    for channels in (1, 3, 7):
        coloured = handheld(np.repeat(images[..., None], channels, axis=3))
        assert all(np.array_equal(coloured[..., channel], moved) for channel in range(channels))


def test_repeats_for_a_seed_whatever_the_number_of_pictures():
    images = pictures()
    moved = handheld(images, seed=5)
    assert np.array_equal(moved, handheld(images, seed=5))
    assert np.array_equal(moved[:7], handheld(images[:7], seed=5))
    assert not np.array_equal(moved, handheld(images, seed=6))
    same = handheld(np.repeat(images[:1], 10, axis=0))
    assert len({picture.tobytes() for picture in same}) == 10  # each by its own numbers


def test_no_movement_is_no_change(monkeypatch):
    only(monkeypatch)
    assert np.array_equal(handheld(pictures()), pictures())


def centre_and_spread(picture):
    """Centre of mass in pixels (down, right) and root mean squared distance from it."""
    weight = picture / picture.sum()
    rows, columns = np.indices(picture.shape)
    centre = np.array([(weight * rows).sum(), (weight * columns).sum()])
    return centre, np.sqrt((weight * ((rows - centre[0]) ** 2 + (columns - centre[1]) ** 2)).sum())


def blob(down=0.0, right=0.0, size=41, sigma=3.0):
    rows, columns = np.indices((size, size)) - size // 2
    return (255 * np.exp(-((rows - down) ** 2 + (columns - right) ** 2) / (2 * sigma**2))).astype(np.uint8)


def test_movements_stay_in_their_ranges_and_use_them():
    images = np.repeat(blob()[None], 400, axis=0)
    moved = [centre_and_spread(picture) for picture in handheld(images)]
    shift = np.array([centre for centre, _ in moved]) - 20
    zoom = np.array([spread for _, spread in moved]) / centre_and_spread(blob())[1]
    assert shift.max(axis=0) == pytest.approx(0.10 * 41, abs=0.15)  # down and right, each
    assert shift.min(axis=0) == pytest.approx(-0.10 * 41, abs=0.15)
    assert zoom.min() == pytest.approx(0.85, abs=0.03)
    assert zoom.max() == pytest.approx(1.15, abs=0.03)
    assert np.abs(shift.mean(axis=0)).max() < 0.4


def test_tilt_turns_about_the_centre(monkeypatch):
    only(monkeypatch, tilt=12.0)
    moved = handheld(np.repeat(blob(right=12.0, sigma=2.0)[None], 400, axis=0))
    down, right = (np.array([centre_and_spread(picture)[0] for picture in moved]) - 20).T
    angle = np.degrees(np.arctan2(down, right))
    assert angle.min() == pytest.approx(-12, abs=0.4)
    assert angle.max() == pytest.approx(12, abs=0.4)
    assert np.hypot(down, right) == pytest.approx(12, abs=0.2)


def test_borders_are_repeated(monkeypatch):
    white = np.full((5, 28, 28, 3), 200, dtype=np.uint8)
    assert np.array_equal(handheld(white), white)  # no dark corner comes in
    only(monkeypatch, zoom=0.5)
    picture = np.zeros((1, 28, 28), dtype=np.uint8)
    picture[:, 0] = 250
    assert handheld(picture)[0, :7].min() == 250  # the top row fills what lies above it


def test_bad_input():
    with pytest.raises(UserError, match="expected uint8 pictures"):
        handheld(pictures().astype(np.float32))
    with pytest.raises(UserError, match="expected uint8 pictures"):
        handheld(pictures()[0])
