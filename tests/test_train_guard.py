"""A loss that is no number never reaches the weights, whenever it is noticed."""

import pytest
import torch
from torch import nn

from moco.train.guard import FiniteGuard, NotFinite


def steps(weight, losses, fused):
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused)
    guard = FiniteGuard(torch.device("cpu"), optimizer, fused=fused)
    history = [weight.detach().clone()]
    for step, factor in enumerate(losses):
        loss = (weight * factor).sum()
        guard.note(loss, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(weight.detach().clone())
    return guard, history


def test_weights_stay_as_before_the_bad_step_although_nobody_looks():
    """On CUDA the host looks only now and then; the fused optimiser itself must skip, also the good steps after."""
    guard, history = steps(nn.Parameter(torch.ones(3)), [1.0, 2.0, float("nan"), 1.0, float("inf")], fused=True)
    with pytest.raises(NotFinite) as fault:
        guard.check()
    assert fault.value.step == 2
    assert torch.equal(history[5], history[2])
    assert not torch.equal(history[2], history[1])


def test_nothing_happens_while_all_is_well():
    guard, history = steps(nn.Parameter(torch.ones(3)), [1.0, 2.0, 3.0], fused=True)
    _, expected = steps(nn.Parameter(torch.ones(3)), [1.0, 2.0, 3.0], fused=False)
    guard.check()
    assert all(torch.allclose(ours, theirs) for ours, theirs in zip(history, expected, strict=True))


def test_looks_at_once_where_that_costs_nothing():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    guard = FiniteGuard(torch.device("cpu"), optimizer, fused=False)
    guard.note(torch.tensor(1.0), 0)
    with pytest.raises(NotFinite):
        guard.note(torch.tensor(float("inf")), 1)
    guard.clear()
    guard.note(torch.tensor(2.0), 2)
