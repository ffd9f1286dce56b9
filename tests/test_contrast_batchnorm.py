"""Split batch norm and the shuffle between its groups."""

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from moco.contrast.batchnorm import encode_in_groups, shuffle, synchronise


@pytest.mark.parametrize("rows", [8, 10])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, BatchNormAct2d])
def test_each_group_is_normalised_by_itself(rows, kind):
    x = torch.randn(rows, 3, 4, 4) * torch.linspace(1, 9, rows).reshape(-1, 1, 1, 1)
    found = encode_in_groups(kind(3), x, 4)
    expected = torch.cat([kind(3)(part) for part in x.tensor_split(4)])
    assert torch.equal(found, expected)
    assert not torch.allclose(found, kind(3)(x), atol=0.1)


def test_running_statistics_move_as_by_one_batch_towards_the_mean_of_the_groups():
    x = torch.randn(12, 3, 4, 4) * torch.linspace(1, 3, 12).reshape(-1, 1, 1, 1) + 5
    layer = nn.BatchNorm2d(3)
    encode_in_groups(layer, x, 3)
    mean = torch.stack([part.mean((0, 2, 3)) for part in x.chunk(3)]).mean(0)
    variance = torch.stack([part.var((0, 2, 3)) for part in x.chunk(3)]).mean(0)
    assert torch.allclose(layer.running_mean, 0.1 * mean, atol=1e-6)
    assert torch.allclose(layer.running_var, 0.9 + 0.1 * variance, atol=1e-6)
    assert layer.momentum == 0.1


def test_momentum_comes_back_also_after_a_fault():
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Linear(5, 2))
    with pytest.raises(RuntimeError, match="shapes"):
        encode_in_groups(net, torch.randn(8, 3, 4, 4), 2)
    assert net[0].momentum == 0.1


def test_the_gradient_is_that_of_the_groups():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x, weight = torch.randn(9, 3, 6, 6), torch.randn(9, 4)
    found = torch.autograd.grad((encode_in_groups(net, x, 2) ** 2 * weight).sum(), net.parameters())
    parts = [(net(part) ** 2 * w).sum() for part, w in zip(x.tensor_split(2), weight.tensor_split(2), strict=True)]
    for ours, expected in zip(found, torch.autograd.grad(sum(parts), net.parameters()), strict=True):
        assert torch.allclose(ours, expected, atol=1e-5)


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


def test_synchronised_layers_keep_their_names_and_statistics():
    torch.manual_seed(0)
    net = nn.ModuleDict({"query_encoder": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))})
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert not synchronise(net, torch.device("cpu"))
    assert type(net["query_encoder"][1]) is nn.BatchNorm1d
    assert synchronise(net, torch.device("cuda"))  # the layers are replaced wherever they lie
    assert isinstance(net["query_encoder"][1], nn.SyncBatchNorm)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert list(net.state_dict()) == list(before)
