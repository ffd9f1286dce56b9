"""Verdicts: hand-made figures on either side of every bound."""

import math

import pytest

from moco.evaluate import findings as judge
from moco.evaluate.contrast_probe import Leak

CHANCE = math.log(65_537)


def leak(gap, error=0.004, most=None, loss=2.3):
    return Leak(0.7, 0.6, 0.65, gap, error, gap if most is None else most, loss)


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (judge.loss_finding(6.9, CHANCE, 200), "good"),  # where v2 ends on ImageNet
        (judge.loss_finding(10.5, CHANCE, 200), "watch"),
        (judge.loss_finding(11.09, CHANCE, 200), "bad"),
        (judge.loss_finding(11.09, CHANCE, 1), "watch"),  # it has hardly begun
        (judge.loss_finding(math.nan, CHANCE, 1), "bad"),
        (judge.spread_finding(0.95, 0.0), "good"),
        (judge.spread_finding(0.3, 0.5), "watch"),
        (judge.spread_finding(0.01, 1.0), "bad"),
        (judge.spread_finding(0.9, 0.97), "bad"),
        (judge.rank_finding(70, 0.0, 128), "good"),
        (judge.rank_finding(3, 0.0, 128), "watch"),
        (judge.rank_finding(1.0, 0.0, 128), "bad"),
        (judge.rank_finding(70, 0.6, 128), "watch"),
        (judge.alignment_finding(0.3, -3.7), "good"),
        (judge.alignment_finding(1.2, -3.7), "watch"),
        (judge.alignment_finding(2.0, -3.9), "bad"),  # the views have nothing in common
        (judge.alignment_finding(0.0, 0.0), "bad"),  # one point
        (judge.leak_finding(leak(0.2), 8.3, shuffled=False, groups=1), "bad"),  # 3.3 % of what was gained
        (judge.leak_finding(leak(0.12), 8.3, shuffled=False, groups=1), "watch"),  # 2 %
        (judge.leak_finding(leak(0.02), 8.3, shuffled=False, groups=1), "watch"),  # sure, but small
        (judge.leak_finding(leak(0.008), 8.3, shuffled=False, groups=1), "good"),  # two standard errors
        (judge.leak_finding(leak(0.008, loss=8.0), 8.3, shuffled=False, groups=1), "watch"),  # too young to tell
        (judge.leak_finding(leak(0.008, loss=8.0), 8.3, shuffled=True, groups=8), "good"),  # shuffled: nothing to find
        (judge.leak_finding(leak(0.2, most=0.5), 8.3, shuffled=True, groups=8), "good"),  # what shuffling leaves
        (judge.leak_finding(leak(-0.2), 8.3, shuffled=False, groups=8), "good"),
        (judge.stale_finding({16: 0.99, 1: 1.0}, 0.99), "good"),
        (judge.stale_finding({16: 0.8, 1: 1.0}, 0.99), "watch"),
        (judge.stale_finding({16: 0.2, 1: 1.0}, 0.0), "bad"),
        (judge.stale_finding({16: 0.99, 1: 1.0}, 0.99, 0.8, 3.0), "good"),
        (judge.stale_finding({16: 0.99, 1: 1.0}, 0.99, -0.4, 3.0), "good"),
        (judge.stale_finding({16: 0.95, 1: 1.0}, 0.99, 1.2, 3.0), "watch"),
        (judge.stale_finding({16: 0.95, 1: 1.0}, 0.99, 2.2, 3.0), "bad"),
        (judge.negatives_finding(0.01, 0.1, 4096, 60_000), "good"),
        (judge.negatives_finding(0.01, 6.5, 65_536, 10_000), "watch"),
        (judge.negatives_finding(0.2, 0.1, 4096, 60_000), "watch"),
        (judge.negatives_finding(0.5, 0.1, 4096, 60_000), "bad"),
        (judge.duplicates_finding(0.0, 0.05, 2000), "good"),
        (judge.duplicates_finding(0.1, 0.0, 2000), "watch"),
        (judge.duplicates_finding(0.0, 0.2, 2000), "watch"),
        (judge.duplicates_finding(0.0, 0.9, 2000), "watch"),  # alike is not the same
        (judge.duplicates_finding(0.5, 0.0, 2000), "bad"),
        (judge.temperature_finding(0.5, 0.1), "good"),
        (judge.temperature_finding(0.01, 10), "watch"),
        (judge.temperature_finding(1.0, 0.001), "watch"),
        (judge.augmentation_finding(0.05, 0.001), "good"),
        (judge.augmentation_finding(0.99, 0.001), "watch"),
        (judge.augmentation_finding(0.001, 0.001), "watch"),
        (judge.data_wait_finding(0.02), "good"),
        (judge.data_wait_finding(0.6), "watch"),
        (judge.gradient_finding({"stem": 0.1, "head": 2.0}), "good"),
        (judge.gradient_finding({"stem": 0.0, "head": 2.0}), "watch"),
        (judge.gradient_finding({"stem": math.nan, "head": 2.0}), "bad"),
        (judge.finite_finding([]), "good"),
        (judge.finite_finding(["queue"]), "bad"),
    ],
)
def test_verdicts(finding, verdict):
    assert finding.verdict == verdict
    assert bool(finding.advice) == (verdict != "good")
    assert finding.reason
    assert "\n" not in finding.value + finding.reason + finding.advice


def test_a_leak_that_is_not_found_is_not_ruled_out_where_nothing_shuffles():
    plain = judge.leak_finding(leak(0.008), 8.3, shuffled=False, groups=1)
    shuffled = judge.leak_finding(leak(0.008), 8.3, shuffled=True, groups=8)
    assert plain.verdict == shuffled.verdict == "good"
    assert "nothing shuffles them" in plain.reason
    assert "nothing shuffles them" not in shuffled.reason
    assert shuffled.value.startswith("8 groups, shuffled: ")
    young = leak(0.008, loss=8.0)
    same = [judge.leak_finding(young, 8.3, shuffled=False, groups=1, in_batch=within) for within in (False, True)]
    assert [finding.verdict for finding in same] == ["watch", "good"]  # with keys of its own batch nothing can tell
    assert "nothing shuffles them" not in same[1].reason
    assert same[1].value.startswith("the whole batch, keys of the same batch: ")


def test_the_worst_verdict_counts():
    good, watch, bad = (judge.loss_finding(loss, CHANCE, 200) for loss in (5.0, 10.5, 11.09))
    assert judge.worst([good, bad, watch]) == "bad"
    assert judge.worst([good, watch]) == "watch"
    assert judge.worst([]) == "good"


def test_advice_says_what_to_set():
    unsplit = judge.leak_finding(leak(0.2), 8.3, shuffled=False, groups=1)
    split = judge.leak_finding(leak(0.2), 8.3, shuffled=False, groups=8)
    small = judge.leak_finding(leak(0.1), 8.3, shuffled=False, groups=1)
    assert "nothing for a short training" in small.advice
    assert "1.7%" in small.reason
    assert "--bn-groups 8 --shuffle-bn true" in unsplit.advice
    assert unsplit.value.startswith("the whole batch, not shuffled: accuracy 70.0% as trained, 60.0% in fresh groups")
    assert split.value.startswith("8 groups, not shuffled: ")
    assert split.advice == "train with --shuffle-bn true"
    assert "--momentum 0.9975" in judge.stale_finding({16: 0.3}, 0.99).advice
    assert "--queue-size 4096" in judge.negatives_finding(0.01, 6.5, 65_536, 10_000).advice


@pytest.mark.parametrize(
    ("finding", "value"),
    [
        (judge.temperature_finding(0.0295, 0.1), "2.9% of the gradient on the hardest 1%"),
        (judge.temperature_finding(0.02999, 0.1), "2.999% of the gradient on the hardest 1%"),
        (judge.temperature_finding(0.03, 0.1), "3.0% of the gradient on the hardest 1%"),
        (judge.temperature_finding(0.9804, 0.1), "98.04% of the gradient on the hardest 1%"),
        (judge.data_wait_finding(0.304), "30.4% of the time"),
        (judge.data_wait_finding(0.07), "7% of the time"),
        (judge.negatives_finding(0.09999, 0, 8, 8), "9.999% above the positive, 0.00 own keys masked per query (K 8)"),
        (judge.duplicates_finding(0.019999, 0.05, 9), "1.9999% exact, 5.0000% near of 9"),
        (judge.spread_finding(0.396, 0.7512), "spread 0.396, cosine of random pairs +0.751"),
        (judge.rank_finding(3.96, 0.496, 64), "effective rank 3.96 of 64, 49.6% dead"),
        (judge.augmentation_finding(0.9001, 0.001), "90.01% found by an untrained network"),
    ],
)  # fmt: skip
def test_a_value_never_contradicts_its_verdict(finding, value):
    assert finding.value == value
    assert " %" not in finding.value + finding.reason + finding.advice
