import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier

from moco.data import fashion
from moco.errors import UserError
from moco.evaluate.knn import knn_accuracy, knn_predict, usable_k


def brute_force(bank, labels, queries, k, temperature, classes):
    """The definition, in float64, one query at a time."""
    bank, queries = bank.double(), queries.double()
    bank, queries = bank / bank.norm(dim=1, keepdim=True), queries / queries.norm(dim=1, keepdim=True)
    found = []
    for query in queries:
        similarity = bank @ query
        votes = torch.zeros(classes, dtype=torch.float64)
        for row in similarity.argsort(descending=True)[:k]:
            votes[labels[row]] += torch.exp(similarity[row] / temperature)
        found.append(int(votes.argmax()))
    return torch.tensor(found)


def random_case(seed, bank_rows=60, rows=25, size=7, classes=4):
    generator = torch.Generator().manual_seed(seed)
    bank = torch.randn(bank_rows, size, generator=generator) * 5 + 1
    queries = torch.randn(rows, size, generator=generator) * 0.1
    return bank, torch.randint(0, classes, (bank_rows,), generator=generator), queries


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 80),  # also more than the bank's 60
    temperature=st.sampled_from([0.01, 0.07, 0.5, 5.0]),
    chunk=st.sampled_from([None, 1, 3, 25, 100]),
)
def test_agrees_with_brute_force_in_float64(seed, k, temperature, chunk):
    bank, labels, queries = random_case(seed)
    found = knn_predict(bank, labels, queries, k=k, temperature=temperature, chunk=chunk)
    assert torch.equal(found, brute_force(bank, labels, queries, min(k, 60), temperature, 4))


def test_agrees_with_scikit_learn_on_real_pictures():
    x_train, y_train, x_test, y_test = fashion.load()
    bank, queries = x_train[:2000].reshape(2000, -1), x_test[:300].reshape(300, -1)
    model = KNeighborsClassifier(
        20, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / 0.07)
    )
    wanted = model.fit(bank.astype(np.float64), y_train[:2000]).predict(queries.astype(np.float64))
    arguments = [torch.from_numpy(array) for array in (bank, y_train[:2000], queries)]
    assert knn_predict(*arguments, k=20).tolist() == wanted.tolist()
    accuracy = knn_accuracy(*arguments, torch.from_numpy(y_test[:300]), k=20)
    assert accuracy == pytest.approx(float((wanted == y_test[:300]).mean()))


def test_raw_pixels_reach_what_is_known_of_them():
    x_train, y_train, x_test, y_test = (torch.from_numpy(array) for array in fashion.load())
    accuracy = knn_accuracy(x_train.flatten(1), y_train, x_test.flatten(1), y_test, k=20)
    assert accuracy == pytest.approx(0.811, abs=0.002)


def test_weights_count_and_not_heads():
    # One neighbour straight ahead against two farther off: few degrees of τ decide.
    bank = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, -1.0]])
    labels = torch.tensor([0, 1, 1])
    query = torch.tensor([[3.0, 0.0]])
    assert knn_predict(bank, labels, query, k=3, temperature=0.07).tolist() == [0]
    assert knn_predict(bank, labels, query, k=3, temperature=10.0).tolist() == [1]
    assert knn_predict(bank, labels, query, k=1, temperature=10.0).tolist() == [0]


def test_a_tiny_temperature_does_not_overflow():
    bank, labels, queries = random_case(1)
    found = knn_predict(bank, labels, queries, k=10, temperature=1e-4)
    assert torch.equal(found, knn_predict(bank, labels, queries, k=1))


def test_missing_classes():
    bank, labels, queries = random_case(2)
    labels = torch.where(labels == 1, 3, labels)
    found = knn_predict(bank, labels, queries, classes=9)
    assert torch.equal(found, knn_predict(bank, labels, queries))
    assert 1 not in found.tolist()
    assert knn_accuracy(bank, labels, queries, torch.full((25,), 8), classes=9) == 0


def test_leave_one_out_is_a_bank_without_the_row():
    bank, labels, _ = random_case(3)
    found = knn_predict(bank, labels, bank, k=5, exclude_self=True, chunk=7)
    for row in range(len(bank)):
        others = torch.arange(len(bank)) != row
        alone = knn_predict(bank[others], labels[others], bank[row : row + 1], k=5, classes=4)
        assert found[row] == alone[0], row
    # A row that votes for itself is always right with one neighbour; without itself it is not.
    assert knn_accuracy(bank, labels, bank, labels, k=1) == 1
    assert knn_accuracy(bank, labels, bank, labels, k=1, exclude_self=True) < 0.6


def test_k_is_capped_by_the_bank():
    assert usable_k(200, 1000) == 200
    assert usable_k(200, 60) == 60
    assert usable_k(200, 60, exclude_self=True) == 59
    bank, labels, queries = random_case(4)
    assert torch.equal(knn_predict(bank, labels, queries, k=200), knn_predict(bank, labels, queries, k=60))
    knn_predict(bank, labels, bank, k=200, exclude_self=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k must be at least 1, not 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"classes": 2}, "the bank has label 3, but there are only 2 classes"),
        ({"queries": torch.ones(5, 6)}, "7 features per row, the queries have 6"),
        ({"queries": torch.full((5, 7), torch.nan)}, "not finite"),
        ({"queries": torch.ones(7)}, r"must have the shape \(N, D\)"),
        ({"bank_labels": torch.zeros(59, dtype=torch.int64)}, r"must have the shape \(60,\)"),
        ({"bank_labels": torch.full((60,), -1)}, "must not be negative"),
        ({"bank_labels": torch.zeros(60)}, "whole numbers"),
        ({"exclude_self": True}, "leave-one-out needs the bank itself as queries: 60 rows, not 25"),
        ({"chunk": 0}, "chunk must be at least 1"),
    ],
)
def test_bad_input(change, message):
    bank, labels, queries = random_case(5)
    labels[0] = 3
    arguments = {"bank": bank, "bank_labels": labels, "queries": queries} | change
    with pytest.raises(UserError, match=message):
        knn_predict(**arguments)


LARGE = """
import torch
from pathlib import Path
from moco.evaluate.knn import knn_predict
def most():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
generator = torch.Generator().manual_seed(0)
bank, queries = torch.randn(50_000, 4, generator=generator), torch.randn(10_000, 4, generator=generator)
before = most()
knn_predict(bank, torch.arange(50_000) % 10, queries, k=20)
print(most() - before)
"""


def test_fifty_thousand_by_ten_thousand_never_exist_together():
    found = subprocess.run([sys.executable, "-c", LARGE], check=True, capture_output=True, text=True)
    assert int(found.stdout) < 400e6  # all similarities at once would be 2,000 MB


def test_a_bank_of_one_has_no_others():
    with pytest.raises(UserError, match="leaves no neighbour"):
        knn_predict(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64), torch.ones(1, 2), exclude_self=True)
