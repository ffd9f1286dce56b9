"""Split batch norm and the shuffle between its groups."""

import copy

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from moco.contrast.batchnorm import shuffle, split_batchnorm


def running(layer, parts, momentum=0.1):
    """The running mean after one batch: towards the mean of the groups' means."""
    return (1 - momentum) * layer.running_mean + momentum * torch.stack([part.mean((0, 2, 3)) for part in parts]).mean(
        0
    )


@pytest.mark.parametrize("rows", [8, 10])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, BatchNormAct2d])
def test_each_group_is_normalised_by_itself(rows, kind):
    x = torch.randn(rows, 3, 4, 4) * torch.linspace(1, 9, rows).reshape(-1, 1, 1, 1)
    plain = kind(3)
    split = split_batchnorm(copy.deepcopy(plain), 4)
    parts = x.tensor_split(4)
    expected = torch.cat([copy.deepcopy(plain)(part) for part in parts])
    assert torch.allclose(split(x), expected, atol=1e-6)
    assert not torch.allclose(split(x), copy.deepcopy(plain)(x), atol=0.1)


def test_running_statistics_move_once_towards_the_mean_of_the_groups():
    x = torch.randn(12, 3, 4, 4) + 5
    layer = split_batchnorm(nn.BatchNorm2d(3), 3)
    expected_mean = running(layer, x.chunk(3))
    expected_var = 0.9 + 0.1 * torch.stack([part.var((0, 2, 3)) for part in x.chunk(3)]).mean(0)
    layer(x)
    assert torch.allclose(layer.running_mean, expected_mean, atol=1e-6)
    assert torch.allclose(layer.running_var, expected_var, atol=1e-6)
    assert layer.num_batches_tracked == 1
    assert layer.momentum == 0.1


def test_evaluation_and_names_are_those_of_the_plain_layer():
    plain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    plain(torch.randn(8, 3, 4, 4))
    split = split_batchnorm(copy.deepcopy(plain), 4)
    x = torch.randn(8, 3, 4, 4)
    assert torch.equal(split.eval()(x), plain.eval()(x))
    assert list(split.state_dict()) == list(plain.state_dict())
    assert torch.equal(copy.deepcopy(split)(x), split(x))


def test_shuffle_and_back():
    rows = torch.arange(40.0).reshape(10, 4)
    shuffled, restore = shuffle(rows, torch.Generator().manual_seed(0))
    assert not torch.equal(shuffled, rows)
    assert sorted(shuffled[:, 0].tolist()) == rows[:, 0].tolist()
    assert torch.equal(restore(shuffled * 2), rows * 2)


def test_shuffle_changes_each_keys_group_partners():
    changed = 0
    for seed in range(20):
        shuffled, _ = shuffle(torch.arange(64), torch.Generator().manual_seed(seed))
        groups = [set(group.tolist()) for group in shuffled.chunk(8)]
        plain = [set(group.tolist()) for group in torch.arange(64).chunk(8)]
        for i in range(64):
            partners = next(group for group in groups if i in group)
            changed += partners != plain[i // 8]
    assert changed == 20 * 64
