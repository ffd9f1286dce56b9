"""torch.compile as an option: the same numbers, compiled once, and a way on where nothing compiles."""

import functools
import io

import pytest
import torch
from rich.console import Console
from torch import nn

from moco.contrast.dictionary import Queue
from moco.contrast.moco import MomentumContrast
from moco.train.compiling import compile_encoders

CPU = torch.device("cpu")


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 8))
    return MomentumContrast(net, dictionary=Queue(16, 8), bn_groups=4, shuffle_bn=True)


def run(net):
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        net.begin_step()
        output = net(torch.randn(12, 1, 8, 8), torch.randn(12, 1, 8, 8))
        output.loss.backward()
        net.end_step()
        losses.append(output.loss.item())
    return losses, net.state_dict()


def test_compiled_encoders_give_the_same_and_are_compiled_once(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = model()
    assert compile_encoders(compiled, CPU, None)
    losses, state = run(compiled)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 3  # the trial and the two encoders: neither for each group nor for each step
    expected_losses, expected = run(model())
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert list(state) == list(expected)
    for name in ("query_encoder.backbone.1.running_var", "key_encoder.backbone.1.running_mean"):
        assert torch.allclose(state[name], expected[name], rtol=1e-5)


def test_goes_on_without_where_nothing_compiles(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no working C++ compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", broken)
    said = io.StringIO()
    net = model()
    assert not compile_encoders(net, CPU, Console(file=said, width=200))
    assert said.getvalue() == "compile: not possible here (no working C++ compiler); going on without\n"
    assert run(net)[0] == run(model())[0]
