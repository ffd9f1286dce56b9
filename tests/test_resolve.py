"""What auto comes to."""

import numpy as np
import pytest
import torch

from moco.data.sources import ArraySource
from moco.errors import UserError
from moco.recipes import pretrain_settings
from moco.resolve import resolve, statistics_change
from moco.settings import PretrainSettings
from moco.train.parallel import Processes, best_precision, find_device


def found(images=None, world=1, labels=None, **given):
    images = np.random.default_rng(0).integers(0, 255, (600, 8, 8), np.uint8) if images is None else images
    given = {"recipe": "small", "base_width": 8, "device": "cpu"} | given
    return resolve(pretrain_settings(**given), ArraySource(images, labels), Processes(0, world, torch.device("cpu")))


QUEUE_SIZES = {
    300: 128,
    10_000: 4096,
    40_000: 16_384,
    60_000: 16_384,
    131_071: 32_768,
    131_072: 65_536,
    1_281_167: 65_536,
}


@pytest.mark.parametrize(("images", "size"), QUEUE_SIZES.items())
def test_queue_size_follows_the_data(images, size):
    # A million pictures of one pixel, as a view of a single one.
    pictures = np.broadcast_to(np.uint8(7), (images, 1, 1))
    assert found(pictures, batch_size=64).queue_size == size
    assert found(pictures, batch_size=64, queue_size=77).queue_size == 77


@pytest.mark.parametrize(
    ("images", "epochs", "momentum"),
    [(1_281_167, 200, 0.999), (256 * 25, 200, 0.999), (2560, 50, 0.99), (256, 50, 0.9), (256, 1, 0.5)],
)
def test_momentum_follows_the_number_of_steps(images, epochs, momentum):
    pictures = np.broadcast_to(np.uint8(7), (images, 1, 1))
    given = {"recipe": "v2", "backbone": "resnet18", "image_size": 16, "epochs": epochs}
    assert found(pictures, **given).momentum == pytest.approx(momentum)
    assert found(pictures, **given, momentum=0.25).momentum == 0.25


@pytest.mark.parametrize(
    ("backbone", "epochs", "warmup"),
    [("resnet18", 100, 10), ("resnet18", 1000, 10), ("resnet18", 5, 0.5), ("vit_tiny_patch16_224", 300, 40)],
)
def test_the_warm_up_of_v3_is_the_papers_and_follows_short_trainings(backbone, epochs, warmup):
    given = {"recipe": "v3", "backbone": backbone, "base_width": None, "image_size": 32, "batch_size": 64}
    assert found(**given, epochs=epochs).warmup_epochs == pytest.approx(warmup)
    assert found(**given, epochs=epochs, warmup_epochs=1).warmup_epochs == 1
    assert found(recipe="v2", backbone="resnet18", image_size=16, epochs=100).warmup_epochs == 0


def test_one_picture_is_no_data_set():
    with pytest.raises(UserError, match=r"has 1 image: there is no other to tell it from"):
        found(np.zeros((1, 9, 9), np.uint8), batch_size=256)
    with pytest.raises(UserError, match=r"has 2 images, fewer than one batch of 256: set --batch-size 2 or lower"):
        found(np.zeros((2, 9, 9), np.uint8), batch_size=256)


def test_small_data_may_be_repeated():
    few = np.zeros((50, 8, 8), np.uint8)
    with pytest.raises(UserError, match=r"50 images, fewer than one batch of 256: .*--batch-size 50 .*--repeat 6 "):
        found(few)
    assert found(few, repeat=6).repeat == 6


def test_batch_norm_groups_and_shuffling():
    for batch, groups in ((256, 8), (128, 8), (64, 4), (32, 2), (31, 1), (4, 1)):
        settings = found(batch_size=batch, bn_groups="auto")
        assert (settings.bn_groups, settings.shuffle_bn) == (groups, groups > 1)
    several = found(batch_size=256, bn_groups="auto", world=2)
    assert (several.bn_groups, several.shuffle_bn) == (1, True)
    none = found(backbone="vit_tiny_patch16_224", base_width=None, image_size=32)
    assert (none.bn_groups, none.shuffle_bn) == (1, False)
    with pytest.raises(UserError, match="no batch norm"):
        found(backbone="vit_tiny_patch16_224", base_width=None, image_size=32, shuffle_bn=True)


def test_the_small_recipe_normalises_a_batch_as_a_whole():
    assert (found(batch_size=256).bn_groups, found(batch_size=256).shuffle_bn) == (1, False)


def test_statistics_are_measured():
    gray = found()
    assert gray.mean == pytest.approx((0.498,), abs=0.01)
    assert gray.std == pytest.approx((0.289,), abs=0.01)
    colour = found(np.full((600, 8, 8, 3), (0, 51, 255), np.uint8))
    assert colour.mean == pytest.approx((0, 0.2, 1), abs=1e-4)
    five = found(np.full((600, 8, 8, 5), (0, 51, 102, 153, 255), np.uint8))
    assert (five.channels, five.mean) == (5, pytest.approx((0, 0.2, 0.4, 0.6, 1), abs=1e-4))
    assert found(mean=(0.25,)).mean == (0.25,)
    assert found(np.zeros((600, 8, 8), np.uint8)).std[0] > 0


def test_monitor_needs_labels_for_knn():
    assert found().monitor == "retrieval"
    assert found(labels=np.arange(600) % 2).monitor == "knn"
    assert found(labels=np.zeros(600, np.int64)).monitor == "retrieval"
    assert found(labels=np.zeros(600, np.int64), monitor="none").monitor == "none"
    with pytest.raises(UserError, match="needs labels"):
        found(monitor="knn")
    assert found(labels=np.full(600, -1)).monitor == "retrieval"
    assert found(labels=np.arange(600) % 3 - 1).monitor == "knn"


def test_views_by_batch_for_small_arrays_split_on_a_gpu_by_image_elsewhere():
    assert found().views == "batch"
    assert found().workers == 0
    assert found(np.zeros((600, 8, 8, 3), np.uint8)).views == "batch"
    assert found(np.zeros((300, 100, 100), np.uint8)).views == "image"
    assert found(np.zeros((300, 100, 100), np.uint8)).workers > 0
    assert found(np.zeros((600, 8, 8, 3), np.uint8), views="batch").views == "batch"


def test_batches_that_do_not_divide_over_the_processes():
    with pytest.raises(UserError, match="3 processes × accumulate 2: set --batch-size 252"):
        found(batch_size=256, world=3, accumulate=2)


def test_a_numbered_device_is_kept_only_where_asked_for():
    assert found(device="auto").device in ("cpu", "cuda", "mps")
    assert found().device == "cpu"


def test_precision_is_what_the_processor_has(monkeypatch):
    cpu = torch.device("cpu")
    for avx, amx, expected in ((False, False, "fp32"), (True, False, "bf16"), (False, True, "bf16")):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        assert best_precision(cpu) == expected
    for capability, expected in (((7, 0), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert best_precision(torch.device("cuda")) == expected


def test_devices(monkeypatch):
    assert find_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert find_device("auto", 2) == torch.device("cuda", 2)
    assert find_device("cuda:1", 2) == torch.device("cuda", 1)
    with pytest.raises(UserError, match="there are 4 CUDA devices"):
        find_device("cuda:4")


def continued(before, world, **given):
    """Settings of a run that `before` processes trained, continued by `world`."""
    images = np.random.default_rng(0).integers(0, 255, (600, 8, 8), np.uint8)
    first = found(images, world=before, **given)
    asked = PretrainSettings(**first.model_dump(exclude={"processes"}))
    own = Processes(0, world, torch.device("cpu"))
    return first, resolve(asked, ArraySource(images), own, trained_by=first.processes)


@pytest.mark.parametrize(
    ("before", "groups", "after", "expected"),
    [
        (1, 8, 2, (4, True)), (1, 8, 8, (1, True)), (8, 1, 1, (8, True)), (8, 1, 2, (4, True)), (2, 2, 1, (4, True)),
        (1, 1, 1, (1, False)), (1, 1, 4, (1, True)), (1, 8, 3, (3, True)),
    ],
)  # fmt: skip
def test_another_number_of_processes_keeps_the_groups_of_batch_norm(before, groups, after, expected):
    first, now = continued(before, after, bn_groups=groups, batch_size=96)
    assert (now.bn_groups, now.shuffle_bn) == expected
    assert now.processes == after
    change = statistics_change(first, now)
    if groups * before == expected[0] * after:
        assert change is None
    else:
        assert f"{96 / (expected[0] * after):g} pictures are normalised together from here on" in change


def test_another_number_of_processes_leaves_what_was_chosen():
    assert continued(1, 2, bn_groups=8, batch_size=96, shuffle_bn=False)[1].shuffle_bn is False
    kept = {"backbone": "vit_tiny_patch16_224", "base_width": None, "image_size": 32, "batch_size": 96}
    for before, after in ((1, 2), (2, 1)):
        now = continued(before, after, **kept)[1]
        assert (now.bn_groups, now.shuffle_bn) == (1, False)


def test_a_run_that_does_not_know_its_processes_keeps_its_settings():
    first, now = continued(1, 1, bn_groups=8, batch_size=96)
    assert statistics_change(first.model_copy(update={"processes": None}), now) is None
