"""Queued keys against their re-encodings, through real steps on real pictures."""

import numpy as np
import pytest
import torch
from torch import nn

from moco.contrast.dictionary import Queue
from moco.contrast.moco import MomentumContrast
from moco.data import fashion
from moco.data.loader import ViewStream
from moco.data.sources import ArraySource
from moco.data.views import normalize
from moco.evaluate.findings import stale_finding
from moco.evaluate.staleness import age_gap, key_drift
from moco.recipes import pretrain_settings

CPU = torch.device("cpu")
MEAN, STD = (0.28,), (0.35,)


def stream():
    views = pretrain_settings(recipe="small").query_views
    return ViewStream(
        ArraySource(fashion.load()[0][:256]), query=views, key=views, size=16, channels=1, batch_size=32, seed=3,
        workers=0, way="batch", device=CPU,
    )  # fmt: skip


def trained(steps, *, momentum, symmetric=False, groups=2, rate=0.0, queue=200, pieces=1):
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )
    model = MomentumContrast(
        encoder, dictionary=Queue(queue, 32), momentum=momentum, symmetric=symmetric, bn_groups=groups,
        shuffle_bn=groups > 1, seed=5,
    )  # fmt: skip
    solver, batches = torch.optim.SGD(model.query_encoder.parameters(), lr=rate), stream()
    for step in range(steps):
        batch = batches.batch(step)
        model.begin_step()
        for a, b, ids in zip(*(rows.chunk(pieces) for rows in (batch.query, batch.key, batch.ids)), strict=True):
            model(normalize(a, MEAN, STD), normalize(b, MEAN, STD), ids).loss.backward()
        solver.step()
        solver.zero_grad()
        model.end_step()
    return model


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("groups", "pieces"), [(1, 1), (2, 1), (2, 2)])
def test_an_encoder_that_stood_still_makes_the_same_keys_again(symmetric, groups, pieces):
    model = trained(10, momentum=0.9, symmetric=symmetric, groups=groups, pieces=pieces)
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    drift = key_drift(model, stream().batch, mean=MEAN, std=STD, accumulate=pieces)
    assert [step.similarity for step in drift] == pytest.approx([1.0] * len(drift), abs=1e-5)
    assert len(drift) == (4 if symmetric else 7)  # 200 keys: the oldest step is cut in two
    assert [step.age for step in drift] == list(range(len(drift), 0, -1))
    assert len(drift[0].queued) == (200 - 3 * 64 if symmetric else 200 - 6 * 32)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_a_hasty_key_encoder_leaves_old_keys_behind():
    hasty, slow = (
        key_drift(trained(7, momentum=momentum, rate=20.0), stream().batch, mean=MEAN, std=STD)
        for momentum in (0.0, 0.999)
    )
    assert stale_finding({step.age: step.similarity for step in hasty}, 0.0).verdict == "bad"
    assert stale_finding({step.age: step.similarity for step in slow}, 0.999).verdict == "good"
    assert hasty[-1].similarity > 0.99  # the newest were made by the encoder as it is


def test_what_the_age_of_keys_hides_is_the_loss_against_a_queue_made_anew():
    """All keys of a full queue, by plain NumPy; and a sample of them stands for as many as there are."""
    drift = key_drift(trained(10, momentum=0.5, rate=5.0), stream().batch, mean=MEAN, std=STD)
    generator = torch.Generator().manual_seed(0)
    query, positive = (torch.nn.functional.normalize(torch.randn(24, 32, generator=generator), dim=1) for _ in range(2))
    ids = torch.cat([drift[0].ids[:4], torch.arange(1000, 1020)])  # four pictures that wait in the queue themselves

    def loss(name):
        keys = np.concatenate([getattr(step, name).double().numpy() for step in drift])
        theirs = np.concatenate([step.ids.numpy() for step in drift])
        found = []
        for q, own, number in zip(query.double().numpy(), positive.double().numpy(), ids.numpy(), strict=True):
            logits = np.array([q @ own, *(keys[theirs != number] @ q)]) / 0.2
            found.append(np.log(np.exp(logits).sum()) - logits[0])
        return np.mean(found)

    gap = age_gap(drift, query, positive, ids, temperature=0.2, keys=200)
    assert gap == pytest.approx(loss("anew") - loss("queued"), abs=1e-9)
    assert abs(gap) > 0.01
    twice = age_gap([*drift, *drift], query, positive, ids, temperature=0.2, keys=200)
    assert twice == pytest.approx(gap, abs=1e-9)


def test_an_encoder_that_stood_still_hides_nothing():
    model = trained(10, momentum=0.9)
    drift = key_drift(model, stream().batch, mean=MEAN, std=STD)
    keys = torch.cat([step.queued for step in drift])
    assert age_gap(drift, keys, keys, keys[:, 0].long() - 5, temperature=0.2, keys=200) == pytest.approx(0, abs=1e-5)


def test_nothing_to_compare():
    assert key_drift(trained(0, momentum=0.9), stream().batch, mean=MEAN, std=STD) == []
    other = stream()
    other.seed = 4  # another run's order: none of the ids fit
    assert key_drift(trained(4, momentum=0.9), other.batch, mean=MEAN, std=STD) == []
