import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from moco.data import fashion
from moco.errors import UserError
from moco.evaluate import linear
from moco.evaluate.linear import few_labels, linear_accuracy, stratified_parts


@pytest.fixture(autouse=True)
def one_thread():
    """Thousands of tiny steps: on a busy machine, threads that wait for each other take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pixels():
    x_train, y_train, x_test, y_test = (torch.from_numpy(array) for array in fashion.load())
    return x_train.flatten(1), y_train, x_test.flatten(1), y_test


def gaussians(rows, seed=0, classes=3, size=20, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, size, generator=torch.Generator().manual_seed(99)) * spread
    labels = torch.arange(rows) % classes
    return centres[labels] + torch.randn(rows, size, generator=generator), labels


def test_raw_pixels_reach_what_is_known_of_them():
    accuracy = linear_accuracy(*pixels())
    assert 0.845 <= accuracy <= 0.865  # 84.9 % with one strength that was not searched for


def test_agrees_with_scikit_learn_at_one_strength():
    x_train, y_train, x_test, y_test = pixels()
    x_train, y_train, x_test = x_train[:1000, ::14], y_train[:1000], x_test[:, ::14]
    scaler = StandardScaler().fit(x_train.numpy())
    model = LogisticRegression(C=1 / (1000 * 0.01), max_iter=1000, tol=1e-6)
    model.fit(scaler.transform(x_train.numpy()), y_train.numpy())
    wanted = model.score(scaler.transform(x_test.numpy()), y_test.numpy())
    found = linear_accuracy(x_train, y_train, x_test, y_test, strengths=(0.01,), iterations=500)
    assert found == pytest.approx(wanted, abs=0.004)  # the floor of the scale is the difference


def test_the_scale_of_the_features_does_not_matter():
    train, labels = gaussians(300)
    test, test_labels = gaussians(600, seed=1)
    plain = linear_accuracy(train, labels, test, test_labels)
    factors = torch.logspace(-3, 3, 20)
    scaled = linear_accuracy(train * factors + 5 * factors, labels, test * factors + 5 * factors, test_labels)
    assert plain > 0.95
    # The floor lets the smallest dimensions go, never all of them.
    assert linear_accuracy(train * 1e-4, labels, test * 1e-4, test_labels) == pytest.approx(plain, abs=0.005)
    assert scaled > 0.8


@pytest.mark.parametrize("rows", [100, 3000])
def test_the_strength_is_chosen_on_training_rows(rows):
    # Weak signal in many dimensions: a weak penalty overfits, and the choice must see it without the test rows.
    train, labels = gaussians(rows, size=300, spread=0.12 if rows == 100 else 0.05)
    test, test_labels = gaussians(3000, seed=1, size=300, spread=0.12 if rows == 100 else 0.05)
    alone = {
        strength: linear_accuracy(train, labels, test, test_labels, strengths=(strength,))
        for strength in (1.0, 0.1, 0.01, 1e-4, 1e-6)
    }
    chosen = linear_accuracy(train, labels, test, test_labels, strengths=tuple(alone))
    assert chosen in alone.values()  # the refit is on all rows, at one of the strengths
    assert chosen >= max(alone.values()) - 0.03
    assert chosen >= min(alone.values())


def test_ten_labels_per_class_are_enough_to_run_on():
    x_train, y_train, x_test, y_test = pixels()
    rows = few_labels(y_train, 10, seed=0)
    accuracy = linear_accuracy(x_train[rows], y_train[rows], x_test, y_test)
    assert 0.6 < accuracy < 0.75
    assert accuracy == linear_accuracy(x_train[rows], y_train[rows], x_test, y_test)  # same seed, same figure


@pytest.mark.parametrize("per_class", [1, 2])
def test_even_one_row_per_class_runs(per_class):
    train, labels = gaussians(3 * per_class)
    test, test_labels = gaussians(600, seed=1)
    assert linear_accuracy(train, labels, test, test_labels) > 0.6


def test_collapsed_features_give_chance_and_no_error():
    train, labels = gaussians(300)
    point = torch.full_like(train, 0.3)
    accuracy = linear_accuracy(point, labels, point, labels)
    assert accuracy == pytest.approx(1 / 3, abs=0.01)
    noise = point + 1e-7 * torch.randn(point.shape, generator=torch.Generator().manual_seed(0))
    assert linear_accuracy(noise, labels, point, labels) == pytest.approx(1 / 3, abs=0.01)


def test_a_dimension_almost_constant_in_training_does_no_harm():
    train, labels = gaussians(300)
    test, test_labels = gaussians(600, seed=1)
    train[:, 0], test[:, 0] = 0.7, 0.7
    train[0, 0] += 1e-4  # divided by its own deviation alone, the test rows would stand 35,000 deviations out
    test[::2, 0] += 0.2
    assert linear_accuracy(train, labels, test, test_labels, strengths=(1e-4,)) > 0.95


@pytest.mark.parametrize(("rows", "held_out"), [(100, [20] * 5), (3000, [300])])
def test_few_rows_are_all_held_out_in_turn_and_many_only_a_tenth(rows, held_out, monkeypatch):
    seen = []
    scores = linear._scores

    def recorded(train, train_labels, test, *rest):
        seen.append((len(train), len(test)))
        return scores(train, train_labels, test, *rest)

    monkeypatch.setattr(linear, "_scores", recorded)
    train, labels = gaussians(rows)
    linear_accuracy(train, labels, train[:50], labels[:50])
    assert seen == [(rows - count, count) for count in held_out] + [(rows, 50)]


def test_a_class_that_only_the_test_set_has_is_wrong():
    train, labels = gaussians(300)
    test, test_labels = gaussians(300, seed=1)
    assert linear_accuracy(train, labels, test, torch.full_like(test_labels, 7)) == 0


def test_the_features_are_left_alone():
    train, labels = gaussians(60)
    before = train.clone()
    linear_accuracy(train, labels, train, labels)
    assert torch.equal(train, before)
    with torch.no_grad():
        linear_accuracy(train, labels, train, labels)  # also from code that switched gradients off


def test_parts_are_even_in_every_class():
    labels = torch.tensor(np.random.default_rng(0).choice(4, 203, p=[0.5, 0.3, 0.15, 0.05]))
    part = stratified_parts(labels, 5, seed=0)
    for label in range(4):
        counts = torch.bincount(part[labels == label], minlength=5)
        assert counts.max() - counts.min() <= 1
    counts = torch.bincount(part, minlength=5)
    assert counts.max() - counts.min() <= 1
    assert not torch.equal(part, stratified_parts(labels, 5, seed=1))


def test_few_labels():
    labels = torch.from_numpy(fashion.load()[1])
    rows = few_labels(labels, 10, seed=3)
    assert torch.bincount(labels[rows]).tolist() == [10] * 10
    assert len(rows.unique()) == 100
    assert torch.equal(rows, rows.sort().values)
    assert torch.equal(rows, few_labels(labels, 10, seed=3))
    assert not torch.equal(rows, few_labels(labels, 10, seed=4))
    with pytest.raises(UserError, match="class 0 has only 942 rows, 950 were asked for"):
        few_labels(labels, 950)
    with pytest.raises(UserError, match="per_class must be at least 1"):
        few_labels(labels, 0)
    with pytest.raises(UserError, match="no labels"):
        few_labels(labels[:0], 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": torch.ones(30, 19)}, "training rows have 20 features, test rows have 19"),
        ({"train_labels": torch.zeros(30, dtype=torch.int64)}, "at least two classes"),
        ({"test_labels": torch.zeros(29, dtype=torch.int64)}, r"the test labels must have the shape \(30,\)"),
        ({"train": torch.full((30, 20), torch.inf)}, "the training features hold values that are not finite"),
        ({"strengths": ()}, "strengths"),
        ({"strengths": (0.0,)}, "strengths"),
    ],
)
def test_bad_input(change, message):
    train, labels = gaussians(30)
    arguments = {"train": train, "train_labels": labels, "test": train, "test_labels": labels} | change
    with pytest.raises(UserError, match=message):
        linear_accuracy(**arguments)
