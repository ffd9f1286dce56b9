import pytest
import torch
from sklearn.metrics import average_precision_score

from moco.data import fashion
from moco.errors import UserError
from moco.evaluate import ranking
from moco.evaluate.ranking import ranking_figures


def pixels(count):
    x, y, _, _ = (torch.from_numpy(array[:count]) for array in fashion.load())
    return x.flatten(1).float(), y.long()


def test_mean_average_precision_is_that_of_scikit_learn(monkeypatch):
    features, labels = pixels(300)
    queries, bank, asked, held = features[:60], features[60:], labels[:60], labels[60:]
    unit = torch.nn.functional.normalize(bank, dim=1)
    wanted = [
        average_precision_score((held == label).numpy(), (unit @ query).numpy())
        for query, label in zip(queries, asked, strict=True)
    ]
    monkeypatch.setattr(ranking, "SORTED_AT_ONCE", 7 * 240)  # several chunks, the last one smaller
    found = ranking_figures(queries, asked, bank, held)
    assert found["mAP"] == pytest.approx(sum(wanted) / len(wanted), abs=1e-5)
    nearest = torch.nn.functional.normalize(queries, dim=1) @ unit.T
    assert found["recall@1"] == pytest.approx(float((held[nearest.argmax(1)] == asked).double().mean()))


def test_the_other_view_at_a_known_rank_has_its_reciprocal():
    bank = torch.eye(4)
    query = torch.tensor([[1.0, 2.0, 3.0, 0.0]])  # row 0 comes third
    found = ranking_figures(query, torch.tensor([0]), bank, torch.arange(4), recall_at=(1, 2, 3))
    assert found == {"mAP": pytest.approx(1 / 3), "recall@1": 0, "recall@2": 0, "recall@3": 1}


def test_leave_one_out_and_queries_with_nothing_to_find():
    features, labels = pixels(200)
    alone = ranking_figures(features, labels, features, labels, exclude_self=True)
    assert ranking_figures(features, labels, features, labels)["recall@1"] == 1  # each finds itself
    assert 0.5 < alone["recall@1"] < 0.9
    # Two pictures, one of each class: neither has anything left to find.
    few = ranking_figures(features[:2], torch.tensor([0, 1]), features[:2], torch.tensor([0, 1]), exclude_self=True)
    assert few["mAP"] == few["recall@10"] == 0


def test_bad_input():
    features, labels = pixels(10)
    with pytest.raises(UserError, match="not finite"):
        ranking_figures(features * torch.nan, labels, features, labels)
    with pytest.raises(UserError, match="784 features per row, the queries have 9"):
        ranking_figures(features[:, :9], labels, features, labels)
    with pytest.raises(UserError, match="recall@k needs k of 1 or more, not 0"):
        ranking_figures(features, labels, features, labels, recall_at=(0, 5))
