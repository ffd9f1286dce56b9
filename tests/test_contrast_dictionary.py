"""The queue is a true ring, for any batch size."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moco.contrast.dictionary import Queue


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 20), st.lists(st.integers(1, 45), max_size=8))
def test_holds_the_newest_keys_whatever_the_batches(size, batches):
    queue = Queue(size, 3, seed=1)
    # An independent model of it: a list of which the last `size` entries count.
    history = [(key, -1, -1) for key in queue.keys.clone()]
    sample = 0
    for step, count in enumerate(batches):
        keys = F.normalize(torch.randn(count, 3), dim=1)
        ids = torch.arange(sample, sample + count)
        queue.enqueue(keys, ids, step)
        history += [(key, int(i), step) for key, i in zip(keys, ids, strict=True)]
        sample += count
        expected = history[-size:]
        order = (torch.arange(size) + queue.pointer) % size  # the oldest first
        assert torch.allclose(queue.keys[order], torch.stack([key for key, _, _ in expected]))
        assert queue.ids[order].tolist() == [i for _, i, _ in expected]
        assert queue.births[order].tolist() == [birth for _, _, birth in expected]
    assert torch.allclose(queue.keys.norm(dim=1), torch.ones(size))


def test_starts_as_random_unit_vectors_and_repeats_with_its_seed():
    queue = Queue(4096, 64)
    assert torch.allclose(queue.keys.norm(dim=1), torch.ones(4096))
    assert queue.keys.mean(0).norm() < 0.05
    assert torch.equal(queue.keys, Queue(4096, 64).keys)
    assert not torch.equal(queue.keys, Queue(4096, 64, seed=1).keys)


def test_keys_are_of_unit_norm_after_every_write():
    queue = Queue(8, 4)
    queue.enqueue(torch.randn(5, 4) * 100)
    assert torch.allclose(queue.keys.norm(dim=1), torch.ones(8))


def test_keys_in_bfloat16_are_the_rounded_ones():
    full, half = Queue(64, 32), Queue(64, 32, dtype=torch.bfloat16)
    keys = torch.randn(50, 32)
    for queue in (full, half):
        queue.enqueue(keys)
    assert half.keys.dtype == torch.bfloat16
    assert torch.equal(half.keys, full.keys.bfloat16())
    query = F.normalize(torch.randn(9, 32), dim=1)
    found, expected = half.lookup(query, query, 0.2), full.lookup(query, query, 0.2)
    assert found.loss.dtype == torch.float32
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-3)


def test_lookup_changes_nothing_and_leaves_own_keys_out():
    queue = Queue(16, 4)
    queue.enqueue(F.normalize(torch.randn(5, 4), dim=1), torch.arange(5))
    before = {name: value.clone() for name, value in queue.state_dict().items()}
    query = queue.keys[:5].clone()
    with_ids = queue.lookup(query, query, 0.1, torch.arange(5))
    without = queue.lookup(query, query, 0.1)
    assert with_ids.hardest_similarity < without.hardest_similarity
    assert float(without.hardest_similarity) == pytest.approx(1, abs=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in queue.state_dict().items())


def test_is_part_of_the_state():
    queue = Queue(8, 4)
    queue.enqueue(torch.randn(5, 4), torch.arange(5), 3)
    other = Queue(8, 4, seed=9)
    other.load_state_dict(queue.state_dict())
    for name in ("keys", "ids", "births", "pointer"):
        assert torch.equal(getattr(queue, name), getattr(other, name))


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_refuses_impossible_sizes(sizes):
    with pytest.raises(ValueError, match="positive"):
        Queue(*sizes)
