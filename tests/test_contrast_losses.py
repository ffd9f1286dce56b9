"""InfoNCE against a plain dense computation in float64."""

import math
from unittest.mock import patch

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
    q, k, keys = (unit(rows, 8, seed).requires_grad_() for seed, rows in enumerate((5, 5, 23)))
    ids, key_ids = torch.arange(5), torch.arange(23) % 7
    assert torch.autograd.gradcheck(
        lambda q, k, keys: info_nce(q, k, keys, temperature, ids=ids, key_ids=key_ids, chunk=6).loss,
        (q, k, keys),
        eps=1e-7,
        atol=1e-4,
    )


@pytest.mark.parametrize("temperature", [0.01, 0.07, 1.0])
def test_keys_of_the_batch_learn_as_in_the_dense_form(temperature):
    """The dictionary of the same batch: every other key is a negative, and all get a gradient ([v1] figure 2a)."""
    ids = torch.arange(40)
    gradients = []
    for dtype, loss_of in (
        (torch.float64, lambda q, k: dense(q, k, k, temperature, own=torch.eye(40, dtype=torch.bool))[0]),
        (torch.float32, lambda q, k: info_nce(q, k, k, temperature, ids=ids, key_ids=ids, chunk=16).loss),
    ):
        q, k = unit(40, 16, 0, dtype).requires_grad_(), unit(40, 16, 1, dtype).requires_grad_()
        loss_of(q, k).backward()
        gradients.append((q.grad, k.grad))
    (q_expected, k_expected), (q_found, k_found) = gradients
    assert relative(q_found, q_expected) < 1e-5
    assert relative(k_found, k_expected) < 1e-5


def test_keys_that_are_all_a_querys_own_get_no_gradient():
    keys = unit(5, 4, 2, torch.float32).requires_grad_()
    q = unit(3, 4, 0, torch.float32)
    info_nce(q, q, keys, ids=torch.zeros(3).long(), key_ids=torch.zeros(5).long()).loss.backward()
    assert torch.equal(keys.grad, torch.zeros(5, 4))


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
    with patch("torch.compiler.is_compiling", lambda: True):  # the way of a GPU: whole masks, no places
        masked = info_nce(q, k, keys, 0.1, ids=ids, key_ids=key_ids, chunk=chunk)
    assert [float(value) for value in vars(masked).values()] == pytest.approx(
        [float(value) for value in vars(found).values()], nan_ok=True
    )
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


def test_bfloat16_keys():
    q, k, keys = (unit(rows, 64, seed, torch.float32) for rows, seed in ((32, 0), (32, 1), (2000, 2)))
    exact, rounded = info_nce(q, k, keys, 0.2), info_nce(q, k, keys.bfloat16(), 0.2)
    assert rounded.loss.dtype == torch.float32
    assert float(rounded.loss) == pytest.approx(float(exact.loss), rel=2e-3)


def test_half_precision_never_enters_the_sums():
    """Keys in bfloat16 are rounded themselves; beyond that, loss and gradient differ by the rounding of products."""
    q, k, keys = (unit(rows, 64, seed, torch.float32) for rows, seed in ((32, 0), (32, 1), (50_000, 2)))
    rounded = keys.bfloat16()
    q_half, q_full = q.clone().requires_grad_(), q.clone().requires_grad_()
    half, full = info_nce(q_half, k, rounded, 0.2), info_nce(q_full, k, rounded.float(), 0.2)
    half.loss.backward()
    full.loss.backward()
    assert half.loss.item() == pytest.approx(full.loss.item(), rel=2e-4)
    assert relative(q_half.grad, q_full.grad.double()) < 5e-3


@pytest.mark.slow
def test_compiles():
    q, k, keys = (unit(rows, 16, seed, torch.float32).requires_grad_() for rows, seed in ((8, 0), (8, 1), (50, 2)))
    ids, key_ids = torch.arange(8), torch.arange(50) % 20

    def loss(q, k, keys):
        return info_nce(q, k, keys, 0.2, ids=ids, key_ids=key_ids, chunk=32).loss

    plain = torch.autograd.grad(loss(q, k, keys), (q, k, keys))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for found, expected in zip(torch.autograd.grad(compiled(q, k, keys), (q, k, keys)), plain, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


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
