"""Batches on the way to the training device."""

import numpy as np
import pytest
import torch

from moco.data.device import place, prefetch
from moco.data.loader import ViewStream
from moco.data.sources import ArraySource
from moco.settings import ViewSettings


@pytest.fixture(scope="module")
def source():
    return ArraySource(np.random.default_rng(0).integers(0, 256, (40, 24, 20, 3), dtype=np.uint8))


def stream(source, way, device="cpu", **options):
    views = ViewSettings(solarize_probability=0.3)
    return ViewStream(
        source, query=views, key=views, size=16, channels=3, batch_size=8, seed=1, workers=0, way=way,
        device=torch.device(device), **options,
    )  # fmt: skip


def test_what_the_workers_left_is_done_on_the_device(source):
    """Split and by image: the same views, but for the rounding between the crop and the colours."""
    small = {"small": (ViewSettings(crop_scale=(0.1, 0.3)),), "small_size": 8}
    whole, split = stream(source, "image", **small), stream(source, "split", **small)
    for step in range(4):
        expected, found = whole.batch(step), split.batch(step)
        assert found.query.dtype == torch.uint8
        placed = place(found, torch.device("cpu"))
        assert placed.rest is None
        assert torch.equal(placed.ids, expected.ids)
        for ours, view in zip(placed.views, expected.views, strict=True):
            assert (ours * 255 - view.float()).abs().mean() < 1.5
            assert (found.query.float() - expected.query.float()).abs().mean() > 5  # there was something left to do


@pytest.mark.parametrize("way", ["image", "split", "batch"])
def test_prefetch_gives_every_batch_once_and_in_order(source, way):
    made = list(prefetch(stream(source, way).run(2, 9), torch.device("cpu")))
    assert len(made) == 7
    for step, batch in enumerate(made, 2):
        expected = place(stream(source, way).batch(step), torch.device("cpu"))
        assert torch.equal(batch.query, expected.query)
        assert torch.equal(batch.key, expected.key)
        assert torch.equal(batch.ids, expected.ids)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["split", "batch"])
def test_the_side_stream_gives_what_the_processor_gives(source, way):
    device = torch.device("cuda")
    for step, batch in enumerate(prefetch(stream(source, way, "cuda").run(0, 6), device)):
        assert batch.query.device.type == batch.ids.device.type == "cuda"
        expected = place(stream(source, way).batch(step), torch.device("cpu"))
        assert (batch.query.cpu() - expected.query).abs().max() < 1e-3
        assert torch.equal(batch.ids.cpu(), expected.ids)
