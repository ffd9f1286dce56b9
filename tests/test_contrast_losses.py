"""InfoNCE against a plain dense computation in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moco.contrast.losses import info_nce, own_pairs


def unit(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, columns, generator=generator, dtype=torch.float64), dim=1).to(dtype)


def dense(q, k, keys, temperature, own=None):
    """Equation 1 as everybody writes it: positive in column 0, cross-entropy."""
    negatives = q @ keys.T
    if own is not None:
        negatives = negatives.masked_fill(own, -torch.inf)
    logits = torch.cat([(q * k).sum(1, keepdim=True), negatives], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)), logits * temperature


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("temperature", [0.01, 0.07, 0.2, 1.0])
@pytest.mark.parametrize(("n", "k_size", "chunk"), [(1, 1, 4), (7, 1000, 64), (64, 513, 512), (33, 100, 1000)])
def test_equals_the_dense_form(temperature, n, k_size, chunk):
    q, keys = unit(n, 32, 0), unit(k_size, 32, 2)
    k = F.normalize(q + 0.6 * unit(n, 32, 1), dim=1)
    # Some keys are as close as the positive: else the dense form itself is rounding noise at τ = 0.01.
    near = min(n, k_size)
    keys[-near:] = F.normalize(q[:near] + 0.6 * unit(near, 32, 3), dim=1)
    q64, k64 = q.clone().requires_grad_(), k.clone().requires_grad_()
    expected, _ = dense(q64, k64, keys, temperature)
    expected.backward()
    q32, k32 = q.float().requires_grad_(), k.float().requires_grad_()
    found = info_nce(q32, k32, keys.float(), temperature, chunk=chunk)
    found.loss.backward()
    bound = 1e-5
    assert found.loss.item() == pytest.approx(expected.item(), rel=bound)
    assert relative(q32.grad, q64.grad) < bound
    assert relative(k32.grad, k64.grad) < bound


@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_gradcheck(temperature):
    q, k, keys = unit(5, 8, 0).requires_grad_(), unit(5, 8, 1).requires_grad_(), unit(23, 8, 2)
    ids, key_ids = torch.arange(5), torch.arange(23) % 7
    assert torch.autograd.gradcheck(
        lambda q, k: info_nce(q, k, keys, temperature, ids=ids, key_ids=key_ids, chunk=6).loss,
        (q, k),
        eps=1e-7,
        atol=1e-4,
    )


def test_extreme_margins_stay_exact():
    q = torch.eye(2)[:1]
    for k, key, expected in ((q, -q, math.exp(-200)), (-q, q, 200.0)):
        found = info_nce(q, k, key, 0.01)
        assert float(found.loss) == pytest.approx(expected, rel=1e-5, abs=1e-38)


def test_by_products():
    q, k, keys = unit(20, 4, 0), unit(20, 4, 1), unit(50, 4, 2)
    k[:10] = q[:10]
    found = info_nce(q, k, keys, 0.2, chunk=7)
    _, similarities = dense(q, k, keys, 0.2)
    assert float(found.accuracy) == pytest.approx((similarities.argmax(1) == 0).double().mean().item())
    assert 0.5 <= float(found.accuracy) < 1
    assert float(found.positive_similarity) == pytest.approx(similarities[:, 0].mean().item())
    assert float(found.negative_similarity) == pytest.approx(similarities[:, 1:].mean().item())
    assert float(found.hardest_similarity) == pytest.approx(similarities[:, 1:].amax(1).mean().item())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**16))
def test_own_keys_are_never_negatives(n, k_size, chunk, seed):
    generator = torch.Generator().manual_seed(seed)
    ids, key_ids = (torch.randint(-1, 6, (size,), generator=generator) for size in (n, k_size))
    ids = ids.abs()  # a sample's id is never −1, which marks random keys
    q, k, keys = unit(n, 6, seed), unit(n, 6, seed + 1), unit(k_size, 6, seed + 2)
    own = ids[:, None] == key_ids[None]
    expected, similarities = dense(q, k, keys, 0.1, own)
    found = info_nce(q, k, keys, 0.1, ids=ids, key_ids=key_ids, chunk=chunk)
    assert float(found.loss) == pytest.approx(float(expected), rel=1e-9, abs=1e-12)
    if (~own).any():
        assert float(found.negative_similarity) == pytest.approx(float(similarities[:, 1:][~own].mean()), abs=1e-6)
    rows, columns = own_pairs(ids, key_ids)
    assert set(zip(rows.tolist(), columns.tolist(), strict=True)) == set(map(tuple, own.nonzero().tolist()))
    assert columns.tolist() == sorted(columns.tolist())


def test_all_keys_masked_gives_no_loss_and_no_gradient():
    q = unit(3, 4, 0, torch.float32).requires_grad_()
    found = info_nce(
        q,
        unit(3, 4, 1, torch.float32),
        unit(5, 4, 2, torch.float32),
        ids=torch.zeros(3).long(),
        key_ids=torch.zeros(5).long(),
    )
    found.loss.backward()
    assert found.loss.item() == 0
    assert q.grad.abs().max() == 0


def test_chance_level_of_random_features():
    q, k, keys = unit(512, 128, 0), unit(512, 128, 1), unit(4096, 128, 2)
    assert float(info_nce(q, k, keys, 1.0).loss) == pytest.approx(math.log(4097), abs=0.02)


def test_no_gradient_reaches_the_keys():
    keys = unit(9, 4, 2).requires_grad_()
    info_nce(unit(3, 4, 0).requires_grad_(), unit(3, 4, 1), keys).loss.backward()
    assert keys.grad is None


def test_bfloat16_keys():
    q, k, keys = (unit(rows, 64, seed, torch.float32) for rows, seed in ((32, 0), (32, 1), (2000, 2)))
    exact, rounded = info_nce(q, k, keys, 0.2), info_nce(q, k, keys.bfloat16(), 0.2)
    assert rounded.loss.dtype == torch.float32
    assert float(rounded.loss) == pytest.approx(float(exact.loss), rel=2e-3)


def test_full_precision_under_autocast():
    q, k, keys = (unit(rows, 64, seed, torch.float32) for rows, seed in ((8, 0), (8, 1), (100, 2)))
    plain = info_nce(q, k, keys, 0.07).loss
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(info_nce(q, k, keys, 0.07).loss, plain)


def test_refuses_ids_of_another_length_and_no_keys():
    q = unit(5, 4, 0)
    with pytest.raises(ValueError, match="ids and key_ids"):
        info_nce(q, q, unit(9, 4, 1), ids=torch.arange(3), key_ids=torch.arange(9))
    with pytest.raises(ValueError, match="at least one"):
        info_nce(q, q, unit(9, 4, 1)[:0])
    with pytest.raises(ValueError, match="temperature"):
        info_nce(q, q, unit(9, 4, 1), float("nan"))


@pytest.mark.parametrize(
    ("shapes", "temperature"),
    [(((2, 3), (2, 4), (5, 3)), 1), (((2, 3), (2, 3), (5, 4)), 1), (((2, 3), (2, 3), (5, 3)), 0)],
)
def test_refuses_what_does_not_fit(shapes, temperature):
    with pytest.raises(ValueError, match="must be"):
        info_nce(*(torch.ones(shape) for shape in shapes), temperature)
