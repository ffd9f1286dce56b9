"""The check after an epoch sees what a user would want to know."""

import numpy as np
import pytest
import torch
from torch import nn

from moco.contrast.method import Method
from moco.data import fashion
from moco.data.sources import ArraySource
from moco.evaluate.monitor import make_monitor
from moco.recipes import pretrain_settings
from moco.resolve import resolve
from moco.train.parallel import Processes

CPU = torch.device("cpu")


def settings(source, **given):
    given = {"recipe": "small", "base_width": 8, "batch_size": 32, "device": "cpu", "precision": "fp32"} | given
    return resolve(pretrain_settings(**given), source, Processes(0, 1, CPU))


class Untrained(Method):
    """A check looks at the backbone; it takes no training step."""

    def forward(self, view_a, view_b, ids=None):
        raise AssertionError("a check must not take a training step")


def seen_by(backbone):
    return Untrained(backbone, None)


class Pixels(nn.Module):
    """Features that are the picture itself."""

    def forward(self, x):
        return x.flatten(1)


class Blind(nn.Module):
    """Features that say nothing about the picture."""

    generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return torch.randn(len(x), 16, generator=self.generator)


@pytest.fixture(scope="module")
def source():
    x, y, _, _ = fashion.load()
    return ArraySource(x[:600], y[:600])


def test_knn_leaves_each_picture_out_of_its_own_vote(source):
    check = make_monitor(source, settings(source, monitor="knn"), CPU)
    assert 0.6 < check(seen_by(Pixels()))["knn_accuracy"] < 0.85
    assert check(seen_by(Blind()))["knn_accuracy"] < 0.2


def test_retrieval_tells_seeing_from_blind(source):
    check = make_monitor(source, settings(source, monitor="retrieval"), CPU)
    seeing, blind = check(seen_by(Pixels())), check(seen_by(Blind()))
    assert seeing["retrieval"] > 5 / 512
    assert blind["retrieval"] < 5 / 512
    assert seeing["alignment"] < blind["alignment"]
    assert blind["effective_rank"] > 10
    assert check(seen_by(Pixels())) == seeing


def test_no_more_pictures_than_asked_for(source):
    seen = []

    class Counting(Pixels):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    make_monitor(source, settings(source, monitor="knn", monitor_images=100), CPU)(seen_by(Counting()))
    assert sum(seen) == 100


def test_pictures_marked_as_unlabelled_stay_out(source):
    labels = source.labels.copy()
    labels[::2] = -1
    half = ArraySource(source.images, labels)
    seen = []

    class Counting(Pixels):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    assert 0.5 < make_monitor(half, settings(half, monitor="knn"), CPU)(seen_by(Counting()))["knn_accuracy"] < 0.85
    assert sum(seen) == 300


def test_none_checks_nothing(source):
    assert make_monitor(source, settings(source, monitor="none"), CPU) is None


def test_fewer_pictures_than_a_batch_of_the_check():
    x = fashion.load()[0][:40]
    source = ArraySource(np.ascontiguousarray(x))
    found = make_monitor(source, settings(source, monitor="retrieval", batch_size=8), CPU)(seen_by(Pixels()))
    assert 0 < found["retrieval"] <= 1
