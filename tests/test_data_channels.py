"""Pictures of any number of channels: read, cropped, recoloured both ways, measured; gain and noise."""

import dataclasses

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from moco.data.colour import without_meaning
from moco.data.drawing import DRAWS, MOST_CHANNELS, draw, parameters
from moco.data.loader import ViewStream, evaluation_batches
from moco.data.noise import gaussian
from moco.data.sources import ArraySource, FolderSource
from moco.data.sources.base import Pictures
from moco.data.statistics import measure_statistics
from moco.data.views import apply_batch, apply_image, normalize, recolour
from moco.errors import UserError
from moco.settings import ViewSettings

ANY = (1, 2, 3, 4, 5, 13, 64)
CPU = torch.device("cpu")


PLAIN = {
    "flip_probability": 0.0,
    "jitter_probability": 0.0,
    "grayscale_probability": 0.0,
    "blur_probability": 0.0,
    "crop_scale": (1, 1),
    "crop_ratio": (1, 1),
}
STRONG = ViewSettings(hue=0.3, solarize_probability=0.3, gain=0.5, noise=0.03, brightness=0.8, contrast=0.8)


def picture(photographs, channels, height=70, width=64):
    """A picture whose channels are shifted copies of a photograph's, uint8 (H, W, channels)."""
    gray = cv2.cvtColor(photographs[0], cv2.COLOR_RGB2GRAY)
    planes = [gray[7 * n % 300 :, 11 * n % 500 :][:height, :width] for n in range(channels)]
    return np.ascontiguousarray(np.dstack(planes))


def batch_of(pixels, count):
    return torch.from_numpy(np.repeat(pixels[None], count, 0)).permute(0, 3, 1, 2)


def stream(source, **changed):
    options = {
        "query": STRONG, "key": ViewSettings(), "size": 24, "channels": 5, "batch_size": 8, "seed": 5, "workers": 0,
        "way": "image", "device": CPU,
    }  # fmt: skip
    return ViewStream(source, **(options | changed))


@pytest.mark.parametrize("channels", ANY)
def test_both_ways_give_the_same_picture(photographs, channels):
    """With everything switched on, gain and noise included: the same numbers, within rounding."""
    pixels = picture(photographs, channels)
    for size in (24, 96):  # shrunk and enlarged
        view = parameters(draw(5, 0, size, 12)[:, 0], 70, 64, STRONG)
        many = apply_batch(batch_of(pixels, 12), view, size)
        assert many.shape == (12, channels, size, size)
        assert 0 <= float(many.min()) <= float(many.max()) <= 1.0001
        for row in range(12):
            one = apply_image(pixels, view, row, size)
            assert one.shape == (size, size, channels)
            assert np.abs(one.transpose(2, 0, 1) - many[row].numpy() * 255.0).mean() < 1.2


def test_what_has_no_meaning_is_told():
    assert without_meaning(ViewSettings(), 3) == ()
    assert without_meaning(ViewSettings(), 5) == ("saturation", "hue", "grayscale")
    assert without_meaning(ViewSettings(jitter_probability=0), 1) == ("grayscale",)
    assert without_meaning(ViewSettings(hue=0, saturation=0, grayscale_probability=0), 13) == ()


@pytest.mark.parametrize("channels", [2, 4, 5, 13])
def test_what_has_no_meaning_is_left_out(photographs, channels):
    """Saturation, hue and grayscale change nothing; brightness and contrast do, each channel by itself."""
    pixels = picture(photographs, channels, 32, 32)
    no_colour = ViewSettings(**PLAIN | {"jitter_probability": 1, "brightness": 0, "contrast": 0, "saturation": 1,
                                        "hue": 0.5, "grayscale_probability": 1})  # fmt: skip
    view = parameters(draw(1, 0, 0, 6)[:, 0], 32, 32, no_colour)
    assert (apply_image(pixels, view, 0, 32) == pixels).all()
    assert (apply_batch(batch_of(pixels, 6), view, 32) * 255 - batch_of(pixels, 6)).abs().max() < 0.01
    contrast = ViewSettings(**PLAIN | {"jitter_probability": 1, "brightness": 0.5, "contrast": 0.9})
    view = parameters(draw(1, 0, 0, 6)[:, 0], 32, 32, contrast)
    for row in range(6):
        wanted = pixels.astype(float)
        for operation in view.order[row]:
            if operation == 0:
                wanted = (wanted * view.brightness[row]).clip(0, 255)
            elif operation == 1:
                wanted = (wanted.mean((0, 1)) * (1 - view.contrast[row]) + wanted * view.contrast[row]).clip(0, 255)
        assert np.abs(apply_image(pixels, view, row, 32) - wanted).max() < 2
        many = apply_batch(batch_of(pixels, 6), view, 32)[row].permute(1, 2, 0).numpy() * 255
        assert np.abs(many - wanted).max() < 0.1


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_gain_is_a_factor_of_each_channel(photographs, channels):
    pixels = picture(photographs, channels, 32, 32)
    view = parameters(draw(1, 0, 0, 200)[:, 0], 32, 32, ViewSettings(**PLAIN, gain=0.4))
    assert view.gain.shape == (200, MOST_CHANNELS)
    assert stats.kstest(view.gain.ravel(), "uniform", (0.6, 0.8)).pvalue > 1e-3
    assert np.abs(np.corrcoef(view.gain[:, :6].T) - np.eye(6)).max() < 0.3
    for row in range(5):
        wanted = (pixels * view.gain[row, :channels]).clip(0, 255)
        assert np.abs(apply_image(pixels, view, row, 32) - wanted).max() <= 0.51
        many = apply_batch(batch_of(pixels, 200), view, 32)[row].permute(1, 2, 0).numpy() * 255
        assert np.abs(many - wanted).max() < 0.01


def test_gain_comes_before_the_jitter(photographs):
    """Contrast after gain pulls to the mean of what the gain made."""
    pixels = picture(photographs, 3, 32, 32)
    settings = ViewSettings(**PLAIN | {"jitter_probability": 1, "brightness": 0, "saturation": 0, "hue": 0}, gain=0.9)
    view = parameters(draw(1, 0, 0, 8)[:, 0], 32, 32, settings)
    for row in range(8):
        gained = (pixels * view.gain[row, :3]).clip(0, 255)
        mean = (gained @ (0.2989, 0.587, 0.114)).mean()
        wanted = (mean * (1 - view.contrast[row]) + gained * view.contrast[row]).clip(0, 255)
        assert np.abs(apply_image(pixels, view, row, 32) - wanted).max() < 2


def test_noise_is_a_pure_function_of_its_key():
    keys = np.random.default_rng(0).integers(0, 2**53, 64)
    noise = gaussian(keys, 3001, CPU)
    assert noise.shape == (64, 3001)
    assert noise.dtype == torch.float32
    assert torch.equal(gaussian(keys[7:9], 3001, CPU), noise[7:9])
    assert torch.equal(gaussian(keys, 100, CPU), noise[:, :100])
    values = noise.numpy().astype(np.float64)
    assert stats.kstest(values.ravel(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(values) - np.eye(64)).max() < 0.09
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.01
    assert stats.kstest(values[:, 0], "norm").pvalue > 1e-3  # from picture to picture
    for high in (0, 1, 2**21 - 1):  # keys that differ in a few bits only
        close = gaussian((high << 32) + np.arange(256), 64, CPU).numpy().astype(np.float64)
        assert stats.kstest(close[:, 1], "norm").pvalue > 1e-4
        assert np.abs(np.corrcoef(close) - np.eye(256)).max() < 0.7
        assert len(np.unique(close[:, ::2])) > 0.99 * 256 * 32


@pytest.mark.parametrize("channels", [1, 3, 13])
def test_noise_has_its_standard_deviation(channels):
    pixels = np.full((64, 64, channels), 128, np.uint8)
    view = parameters(draw(1, 0, 0, 4)[:, 0], 64, 64, ViewSettings(**PLAIN, noise=0.05))
    many = apply_batch(batch_of(pixels, 4), view, 64) * 255 - 128
    for row in range(4):
        one = apply_image(pixels, view, row, 64).astype(float) - 128
        assert abs(one.std() - 0.05 * 255) < 0.4
        assert abs(one.mean()) < 0.7
        assert np.abs(one.transpose(2, 0, 1) - many[row].numpy()).max() < 0.51  # the same noise, not only as much
    assert (many[0] != many[1]).any()


def test_new_draws_leave_the_old_ones_as_they_are():
    """The table of the first release, and views whose settings have neither gain nor noise."""
    table = draw(3, 2, 17, 8)
    sequence = np.random.SeedSequence(3, spawn_key=(0x76696577, 2, 17))
    assert (table[:, :, :33] == np.random.default_rng(sequence).random((33, 8, 2)).transpose(1, 2, 0)).all()
    assert DRAWS == 33 + 1 + MOST_CHANNELS
    view = parameters(table[:, 0], 20, 20, ViewSettings())
    assert (view.noise_key == np.floor(table[:, 0, 33] * 2**53)).all()
    assert view.gain.shape == (8, 0)
    assert not view.noise.any()


def test_recolouring_with_gain_and_noise_is_the_rest_of_the_view(photographs):
    pixels = picture(photographs, 5, 32, 32)
    view = parameters(draw(5, 0, 0, 8)[:, 0], 32, 32, STRONG.model_copy(update={"crop_scale": (1, 1)}))
    whole = dataclasses.replace(view, top=view.top * 0, left=view.left * 0, height=view.height * 0 + 32,
                                width=view.width * 0 + 32)  # fmt: skip
    found = recolour(batch_of(pixels, 8), whole)
    for row in range(8):
        wanted = apply_image(pixels, whole, row, 32).transpose(2, 0, 1)
        assert np.abs(found[row].numpy() * 255 - wanted).mean() < 1


# Streams and measures -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def five(photographs):
    """48 pictures of 5 channels, uint8 48 × 40 × 40 × 5."""
    whole = picture(photographs, 5, 90, 130)
    return np.stack([whole[y : y + 40, x : x + 40] for y in range(0, 48, 6) for x in range(0, 90, 15)])


@pytest.mark.parametrize("way", ["image", "split", "batch"])
@pytest.mark.parametrize("stored", ["array", "files"])
def test_streams_of_five_channels(five, tmp_path, way, stored):
    """From an array, or from TIFF files of five pages: the same views for any number of workers."""
    source = ArraySource(five)
    if stored == "files":
        if way == "batch":
            return
        for number, pixels in enumerate(five):
            first, *others = (Image.fromarray(plane) for plane in pixels.transpose(2, 0, 1))
            first.save(tmp_path / f"{number:02}.tif", save_all=True, append_images=others)
        source = FolderSource(tmp_path)
    wanted = [stream(ArraySource(five), way=way).batch(step) for step in range(3)]
    found = list(stream(source, way=way, workers=0 if way == "batch" else 2).run(0, 3))
    for one, other in zip(wanted, found, strict=True):
        assert one.query.shape == (8, 5, 24, 24)
        assert torch.equal(one.query, other.query)
        assert torch.equal(one.key, other.key)
        assert other.skipped == []
    views = [stream(ArraySource(five), way=way, size=20).batch(1).query for way in ("image", "batch")]
    assert views[1].dtype == torch.float32
    assert (views[0].double() - views[1].double() * 255).abs().mean() < 1


def test_another_number_of_channels_is_refused(five, tmp_path):
    with pytest.raises(UserError, match="5 channels, and 3 are wanted: set channels to 5"):
        stream(ArraySource(five), channels=3, way="batch").batch(0)
    with pytest.raises(UserError, match=r"none of the 48 images can be read.*5 channels, and 3 are wanted"):
        stream(ArraySource(five), channels=3).batch(0)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_arrays_with_transparency_in_both_ways(photographs, count, channels):
    pictures = np.stack([picture(photographs, count, 40, 40)] * 8)
    settings = ViewSettings(**PLAIN)
    options = {"channels": channels, "query": settings, "key": settings}
    one = stream(ArraySource(pictures), **options).batch(0).query
    many = stream(ArraySource(pictures), **options, way="batch").batch(0).query
    assert (one.double() - many.double() * 255).abs().max() < 1.5


def test_measures_of_any_number_of_channels(five):
    for channels in (2, 5):
        pictures = five[..., :channels]
        mean, deviation = measure_statistics(ArraySource(pictures), channels, count=100)
        assert mean == pytest.approx((pictures.mean((0, 1, 2)) / 255).tolist(), abs=1e-6)
        assert deviation == pytest.approx((pictures.std((0, 1, 2)) / 255).tolist(), abs=1e-6)
        batches = evaluation_batches(ArraySource(pictures), range(6), size=32, channels=channels, batch_size=4)
        views = torch.cat(list(batches))
        assert views.shape == (6, channels, 32, 32)
        wanted = normalize(views, mean, deviation)
        assert wanted.shape == views.shape


class Two(Pictures):
    """A picture, twice."""

    def __init__(self, pixels):
        super().__init__()
        self.pixels = pixels

    def __len__(self):
        return 2

    def read(self, index):
        return self.pixels, str(index)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5000), (5000, 1), (3, 65_535)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_thin_and_tiny_pictures_give_valid_views(photographs, shape, channels):
    pixels = np.resize(photographs[0], (*shape, channels)).astype(np.uint8)
    source = Two(pixels)
    views = stream(source, channels=channels, batch_size=2, size=16)
    for step in range(3):
        made = views.batch(step)
        assert made.query.shape == (2, channels, 16, 16)
        assert made.skipped == []
