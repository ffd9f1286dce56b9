"""The probe of the paper on real pictures and on an encoder that is nothing but the picture itself."""

import copy

import pytest
import torch
from torch import nn

from moco.data import fashion
from moco.errors import TrainingError, UserError
from moco.evaluate.linear import linear_accuracy
from moco.evaluate.paper_probe import encode_views, find_rate, paper_probe
from moco.evaluate.pictures import open_part

MEAN, STD = (0.28,), (0.35,)


class Frozen(nn.Module):
    """Pooled pixels behind a batch norm, whose statistics would move in train mode."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.norm, self.scale = nn.BatchNorm2d(1), scale

    def forward(self, x):
        return nn.functional.adaptive_avg_pool2d(self.norm(x), 7).flatten(1) * self.scale


@pytest.fixture(scope="module")
def parts():
    x, y, x_test, y_test = fashion.load()
    return open_part(x[:1000], y[:1000], needed=True), open_part(x_test[:500], y_test[:500], needed=True)


def features(backbone, part):
    x = torch.from_numpy(part.source.images).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        return copy.deepcopy(backbone).eval()((x - MEAN[0]) / STD[0])


def probe(backbone, parts, **given):
    train, test = parts
    given = {"size": 28, "channels": 1, "mean": MEAN, "std": STD, "classes": 10, "epochs": 5, "batch_size": 64} | given
    return paper_probe(backbone, train, features(backbone, test), test.labels, **given)


def test_it_learns_leaves_every_byte_of_the_backbone_and_repeats_itself(parts):
    backbone = Frozen().train()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    done = []
    found = probe(backbone, parts, learning_rate=0.03, say=done.append)
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    assert backbone.training
    train, test = parts
    reference = linear_accuracy(features(backbone, train), train.labels, features(backbone, test), test.labels)
    assert 0.3 < found.accuracy < reference + 0.05  # pooled pixels mean little in crops of a tenth of the picture
    assert found.accuracy == pytest.approx(float((found.found == test.labels).double().mean()))
    assert found.warning == ""
    assert found.losses[-1] < found.losses[0]
    assert done[-1] == 1
    assert probe(backbone, parts, learning_rate=0.03).losses == found.losses


def test_a_backbone_that_changes_is_not_trusted(parts):
    class Drifting(Frozen):
        def forward(self, x):
            self.norm.running_mean += 1e-3
            return super().forward(x)

    with pytest.raises(TrainingError, match="changed the weights of the backbone"):
        probe(Drifting(), parts, epochs=1)


def test_the_rate_follows_the_scale_of_the_features(parts):
    train, _ = parts
    views, rows = encode_views(Frozen(), train, size=28, channels=1, mean=MEAN, std=STD, batch_size=64)
    assert len(views) == len(rows) == 960  # whole batches
    bank, found = features(Frozen(), train), {}
    for scale in (1, 10):
        found[scale], scores = find_rate(views * scale, rows, bank * scale, train.labels, classes=10)
        assert scores[found[scale]] == max(scores.values()) > 0.4
    # Features × s is a rate × s² but for the bias: 100 here, give or take a place in the grid.
    assert 10 <= found[1] / found[10] <= 1000


def test_a_rate_of_30_is_not_for_features_of_any_scale(parts):
    found = probe(Frozen(100.0), parts, learning_rate=30.0, epochs=3)
    assert "learning rate 30 is unstable" in found.warning
    assert "try --lr auto" in found.warning


def test_no_rate_is_good_enough_for_features_out_of_all_bounds(parts):
    train, _ = parts
    huge = features(Frozen(1e6), train)
    with pytest.raises(UserError, match="no learning rate from"):
        find_rate(huge, torch.arange(1000), huge, train.labels, classes=10)
