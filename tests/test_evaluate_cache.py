import os

import pytest
import torch
from torch import nn

from moco.evaluate.cache import FeatureCache, weights_fingerprint

DEPENDS = {"weights": "a", "data": "b", "mean": (0.5,)}


def test_features_come_back_only_for_what_they_depend_on(tmp_path):
    cache, features = FeatureCache(tmp_path / "features"), torch.randn(5, 3)
    assert cache.get(DEPENDS, 5) is None
    cache.put(DEPENDS, features)
    assert torch.equal(cache.get(DEPENDS, 5), features)
    assert cache.get(DEPENDS, 6) is None
    for name in DEPENDS:
        assert cache.get(DEPENDS | {name: "changed"}, 5) is None


def test_what_is_not_known_is_not_kept(tmp_path):
    cache = FeatureCache(tmp_path)
    cache.put(DEPENDS | {"data": None}, torch.ones(2, 2))
    assert list(tmp_path.iterdir()) == []
    FeatureCache(None).put(DEPENDS, torch.ones(2, 2))
    assert FeatureCache(None).get(DEPENDS, 2) is None


@pytest.mark.parametrize("content", [b"", b"no such thing", None])
def test_a_damaged_file_counts_as_absent(tmp_path, content):
    cache = FeatureCache(tmp_path)
    cache.put(DEPENDS, torch.ones(200, 20))
    (path,) = tmp_path.glob("*.pt")
    path.write_bytes(path.read_bytes()[:2000] if content is None else content)
    assert cache.get(DEPENDS, 200) is None


def test_those_not_used_for_longest_go(tmp_path):
    cache = FeatureCache(tmp_path, limit=10_000)
    for number in range(3):  # about 5,000 bytes each
        cache.put({"number": number}, torch.ones(1000, 1))
        for age, path in enumerate(sorted(tmp_path.glob("*.pt"), key=os.path.getmtime, reverse=True)):
            os.utime(path, (1e9 - age, 1e9 - age))
    assert cache.get({"number": 0}, 1000) is None
    assert cache.get({"number": 2}, 1000) is not None
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000


def test_any_change_of_a_weight_or_a_buffer_changes_the_fingerprint():
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = weights_fingerprint(network)
    assert weights_fingerprint(network) == before
    for tensor in (network[0].weight, network[1].running_var):
        old = tensor.data.clone()
        tensor.data[-1] += 1e-7 if tensor is network[0].weight else 1e-3
        assert weights_fingerprint(network) != before
        tensor.data.copy_(old)
    assert weights_fingerprint(network) == before
