"""Learning rate and parameter groups."""

import math

import pytest
import torch
from timm.optim.lars import Lars
from torch import nn

from moco.recipes import pretrain_settings
from moco.train.optim import learning_rate, make_optimizer


def test_the_rate_grows_linearly_with_the_global_batch():
    small, large = (pretrain_settings(batch_size=size, warmup_epochs=0) for size in (256, 1024))
    assert learning_rate(0, 10, small) == pytest.approx(0.03)
    assert learning_rate(0, 10, large) == pytest.approx(0.12)


def test_cosine_per_step():
    settings = pretrain_settings(recipe="v2", epochs=10, warmup_epochs=0)
    rates = [learning_rate(step, 7, settings) for step in range(70)]
    torch_rates = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 70)
    for _ in range(70):
        torch_rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(torch_rates)


def test_steps_at_120_and_160_of_200():
    settings = pretrain_settings(recipe="v1", warmup_epochs=0)
    for epoch, expected in ((0, 0.03), (119, 0.03), (120, 0.003), (159, 0.003), (160, 0.0003), (199, 0.0003)):
        assert learning_rate(epoch * 5, 5, settings) == pytest.approx(expected), epoch


def test_warm_up_rises_to_the_peak_and_the_cosine_starts_there():
    settings = pretrain_settings(epochs=10, warmup_epochs=2)
    rates = [learning_rate(step, 10, settings) for step in range(100)]
    assert rates[0] == pytest.approx(0.03 / 20)
    assert rates[19] == pytest.approx(0.03)
    assert rates[20] == pytest.approx(0.03)
    assert rates[60] == pytest.approx(0.03 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert max(rates) == pytest.approx(0.03)


def test_weight_decay_spares_norm_and_bias_only_where_asked():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    (everything,) = make_optimizer(net, pretrain_settings()).param_groups
    assert everything["weight_decay"] == 1e-4
    assert len(everything["params"]) == 4
    decayed, spared = make_optimizer(net, pretrain_settings(decay_norm_and_bias=False)).param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 3, 3, 3)]
    assert [p.ndim for p in spared["params"]] == [1, 1, 1]
    assert spared["weight_decay"] == 0


def test_frozen_parameters_are_left_out():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    assert len(make_optimizer(net, pretrain_settings()).param_groups[0]["params"]) == 2


@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_lars_spares_norm_and_bias_decay_and_trust_ratio(decay):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = make_optimizer(net, pretrain_settings(optimizer="lars", learning_rate=0.5, weight_decay=decay))
    assert isinstance(optimizer, Lars)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    gradients = {}
    for name, parameter in net.named_parameters():
        gradients[name] = torch.randn(parameter.shape)
        parameter.grad = gradients[name].clone()
    optimizer.step()
    for name in ("0.bias", "1.weight", "1.bias"):  # plain SGD
        expected = before[name] - 0.5 * gradients[name]
        assert torch.allclose(net.get_parameter(name), expected, atol=1e-6), name
    weight, gradient = before["0.weight"], gradients["0.weight"]
    trust = 0.001 * weight.norm() / (gradient.norm() + decay * weight.norm())
    expected = weight - 0.5 * trust * (gradient + decay * weight)
    assert torch.allclose(net.get_parameter("0.weight"), expected, atol=1e-6)


def test_adamw_decays_apart_from_the_gradient():
    net = nn.Linear(3, 2)
    optimizer = make_optimizer(net, pretrain_settings(optimizer="adamw", learning_rate=0.1, weight_decay=0.5))
    before = net.weight.detach().clone()
    net.weight.grad, net.bias.grad = torch.zeros(2, 3), torch.zeros(2)
    optimizer.step()
    assert torch.allclose(net.weight, before * (1 - 0.1 * 0.5))
