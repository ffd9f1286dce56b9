import math

import pytest
import torch

from moco.errors import UserError
from moco.evaluate import label_free
from moco.evaluate.label_free import alignment, effective_rank, feature_spread, retrieval, uniformity


def normal(rows, size, seed=0):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


def circle(rows):
    angle = torch.arange(rows) * (2 * math.pi / rows)
    return torch.stack([angle.cos(), angle.sin()], dim=1) * 3


@pytest.fixture(params=[None, 700])
def chunked(request, monkeypatch):
    """Once in one piece, once in several that do not divide the rows."""
    if request.param:
        monkeypatch.setattr(label_free, "HELD_AT_ONCE", request.param)


@pytest.mark.usefixtures("chunked")
def test_retrieval():
    a = normal(101, 16)
    assert retrieval(a, a * 7) == 1
    assert retrieval(a, a.roll(1, dims=0)) == 0
    b = a.clone()
    b[:10] = b[:10].roll(1, dims=0)  # ten pictures whose other views are each other's
    assert retrieval(a, b) == pytest.approx(91 / 101)
    assert retrieval(a, torch.ones_like(a)) == pytest.approx(1 / 101)  # collapse is chance, not success
    assert retrieval(normal(2000, 8), normal(2000, 8, seed=1)) < 0.01


def test_retrieval_looks_both_ways():
    # From a each finds its own; from b the third one, which sits nearer to another, does not.
    a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    b = torch.tensor([[1.0, 0.0], [1.0, 0.9]])
    assert retrieval(a, b) == pytest.approx(0.75)
    assert retrieval(b, a) == pytest.approx(0.75)


def test_alignment():
    a = normal(4000, 64)
    assert alignment(a, a * 5) == pytest.approx(0, abs=1e-6)
    assert alignment(a, -a) == pytest.approx(4, abs=1e-5)
    assert alignment(a, normal(4000, 64, seed=1)) == pytest.approx(2, abs=0.02)
    right_angle = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 9.0]])
    assert alignment(*right_angle) == pytest.approx(2)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("t", [1.0, 2.0])
def test_uniformity_of_a_circle(t):
    # Over a whole circle the mean of exp(−t d²) with d² = 2 − 2 cos is exp(−2 t) I0(2 t). Pairs leave out d = 0.
    rows = 301
    mean = math.exp(-2 * t) * float(torch.special.i0(torch.tensor(2 * t, dtype=torch.float64)))
    wanted = math.log((mean * rows - 1) / (rows - 1))
    assert uniformity(circle(rows), t=t) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.usefixtures("chunked")
def test_uniformity_of_other_shapes():
    assert uniformity(torch.full((50, 8), 0.3)) == pytest.approx(0, abs=1e-5)
    assert uniformity(torch.tensor([[1.0, 0.0], [-2.0, 0.0]])) == pytest.approx(-8)  # one pair, d² = 4
    assert uniformity(normal(2000, 512)) == pytest.approx(-4, abs=0.05)
    a = normal(40, 3)
    unit = torch.nn.functional.normalize(a, dim=1)
    assert uniformity(a) == pytest.approx(float(torch.pdist(unit).square().mul(-2).exp().mean().log()), abs=1e-5)


def test_effective_rank():
    assert effective_rank(torch.full((50, 8), 0.3)) == pytest.approx(1, abs=1e-4)
    assert effective_rank(normal(20_000, 32)) == pytest.approx(32, abs=0.05)
    basis = torch.linalg.qr(normal(200, 5, seed=1)).Q
    directions = torch.linalg.qr(normal(64, 5, seed=2)).Q
    assert effective_rank(basis @ directions.T) == pytest.approx(5, abs=1e-3)
    # Shares 1/2, 1/4, 1/4: entropy 1.5 ln 2.
    shares = basis[:, :3] @ torch.diag(torch.tensor([2.0, 1.0, 1.0])) @ directions[:, :3].T
    assert effective_rank(shares) == pytest.approx(2**1.5, abs=1e-3)
    assert effective_rank(torch.zeros(5, 3)) == 0


def test_feature_spread():
    assert feature_spread(normal(5000, 64)) == pytest.approx(1, abs=0.02)
    assert feature_spread(normal(5000, 64) * torch.rand(5000, 1)) == pytest.approx(1, abs=0.02)
    assert feature_spread(torch.full((50, 8), 0.3)) == pytest.approx(0, abs=1e-6)
    half = torch.cat([normal(5000, 32), torch.zeros(5000, 32)], dim=1)  # spread, but over half the dimensions
    assert feature_spread(half) == pytest.approx(math.sqrt(0.5), abs=0.02)


def test_bad_input():
    a = normal(10, 4)
    with pytest.raises(UserError, match="same pictures"):
        retrieval(a, a[:9])
    with pytest.raises(UserError, match="same pictures"):
        alignment(a, a[:, :3])
    with pytest.raises(UserError, match="two rows"):
        uniformity(a[:1])
    with pytest.raises(UserError, match="t must be above 0"):
        uniformity(a, t=0)
    for figure in (uniformity, effective_rank, feature_spread):
        with pytest.raises(UserError, match="not finite"):
            figure(a / 0)
        with pytest.raises(UserError, match="shape"):
            figure(a[0])
