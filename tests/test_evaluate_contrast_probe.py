"""Queries and keys on fresh batches: figures query by query against the dense loss; models that leak by design."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moco.contrast.dictionary import Queue
from moco.contrast.losses import info_nce
from moco.contrast.moco import MomentumContrast
from moco.data import fashion
from moco.errors import UserError
from moco.evaluate.contrast_probe import ViewPairs, batch_leak, encode_pairs, query_figures


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1)


def test_query_figures_are_those_of_the_dense_loss():
    q, k, keys = unit(20, 8), unit(20, 8, seed=1), unit(200, 8, seed=2)
    ids, key_ids = torch.arange(20), torch.arange(200) % 50
    found = query_figures(q, k, keys, 0.2, ids, key_ids, chunk=7)
    logits = q @ keys.T / 0.2
    logits[ids[:, None] == key_ids] = -math.inf
    positive = (q * k).sum(1) / 0.2
    dense = F.cross_entropy(
        torch.cat([positive[:, None], logits], 1), torch.zeros(20, dtype=torch.int64), reduction="none"
    )
    assert torch.allclose(found.loss, dense)
    assert found.own.tolist() == [4] * 20
    assert torch.allclose(found.above, (logits > positive[:, None]).sum(1) / 196)
    weights = logits.softmax(1).sort(1, descending=True).values
    assert torch.allclose(found.hardest, weights[:, :2].sum(1))
    mean = info_nce(q, k, keys, 0.2, ids=ids, key_ids=key_ids)
    assert float(found.loss.mean()) == pytest.approx(float(mean.loss))
    assert float((found.above == 0).double().mean()) == pytest.approx(float(mean.accuracy))


def test_negatives_all_alike_share_the_gradient_evenly():
    q = unit(3, 4)
    keys = unit(1, 4, seed=1).expand(1000, 4)
    assert query_figures(q, q, keys, 0.1).hardest.tolist() == pytest.approx([0.01] * 3)


class Signature(nn.Module):
    """Features that hold the picture and, `leaking`, a mark of the batch it came with: its mean."""

    def __init__(self, leaking):
        super().__init__()
        self.leaking, self.norm = leaking, nn.BatchNorm1d(64)
        self.still = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        small = F.adaptive_avg_pool2d(x, 8).flatten(1)
        own = self.norm(small) + self.still
        mark = 3 * torch.sin(40 * small.mean(0, keepdim=True)).expand_as(own) if self.training and self.leaking else 0
        return own + mark


def leak(leaking, groups, shuffled):
    x = torch.from_numpy(fashion.load()[0][:512])[:, None]
    noise = torch.randint(0, 60, (2, *x.shape), generator=torch.Generator().manual_seed(0))
    views = [(x + extra).clamp(max=255).to(torch.uint8).split(64) for extra in noise]
    pairs = ViewPairs(views[0], views[1], torch.arange(512).split(64), (0.3,), (0.35,))
    model = MomentumContrast(
        Signature(leaking), dictionary=Queue(512, 64), bn_groups=groups, shuffle_bn=shuffled, temperature=0.1
    ).train()
    others = torch.from_numpy(fashion.load()[0][1000:1512])[:, None].split(64)
    for batch in others:
        model.begin_step()
        model((batch / 255 - 0.3) / 0.35, (batch / 255 - 0.3) / 0.35)
        model.end_step()
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    found = batch_leak(model, encode_pairs(model, pairs, groups=groups, shuffled=shuffled))
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(module.training for module in model.modules())
    return found


def test_a_mark_of_the_group_is_seen_and_shuffling_takes_it_away():
    marked = leak(leaking=True, groups=8, shuffled=False)
    assert marked.gap > 10 * marked.error
    assert marked.gap == marked.most
    assert marked.as_trained > marked.fresh + 0.1
    shuffled = leak(leaking=True, groups=8, shuffled=True)
    assert shuffled.gap < 0.5 * shuffled.most


def test_a_mark_of_the_whole_batch_is_seen():
    marked, plain = leak(leaking=True, groups=1, shuffled=False), leak(leaking=False, groups=1, shuffled=False)
    assert marked.gap > 10 * marked.error
    assert marked.gap > 5 * abs(plain.gap)


def test_one_batch_has_no_strangers():
    view = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    model = MomentumContrast(Signature(False), dictionary=Queue(8, 64))
    with pytest.raises(UserError, match="two batches or more"):
        encode_pairs(model, ViewPairs([view], [view], [torch.arange(4)], (0.3,), (0.3,)), groups=1, shuffled=False)
