"""Learning rate and parameter groups."""

import math

import pytest
import torch
from torch import nn

from moco.recipes import pretrain_settings
from moco.train.optim import learning_rate, make_optimizer


def test_the_rate_grows_linearly_with_the_global_batch():
    small, large = (pretrain_settings(batch_size=size) for size in (256, 1024))
    assert learning_rate(0, 10, small) == pytest.approx(0.03)
    assert learning_rate(0, 10, large) == pytest.approx(0.12)


def test_cosine_per_step():
    settings = pretrain_settings(recipe="v2", epochs=10)
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
    settings = pretrain_settings(recipe="v1")
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
