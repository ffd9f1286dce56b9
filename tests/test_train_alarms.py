"""Warnings while training: when they come, and that each comes once."""

import pytest

from moco.train.alarms import Alarms

GOOD = {"feature_spread": 0.9, "contrast_accuracy": 0.5, "loss": 5.0, "chance_loss": 8.3}


CHECK = {"effective_rank": 30.0, "dead_dimensions": 0.0, "spread": 0.9, "random_cosine": 0.02}


def heard_after(checks, **given):
    alarms = Alarms(steps=1000, queue_steps=20, **given)
    return [text for check in checks for text in alarms.check_epoch(CHECK | check)]


def heard(lines):
    alarms = Alarms(steps=1000, queue_steps=20)
    return [text for line in lines for text in alarms.check(GOOD | line)]


def every_ten(count, **values):
    return [{"step": step, "epoch": step / 100, **values} for step in range(10, count + 1, 10)]


def test_a_good_training_is_left_in_peace():
    assert heard(every_ten(1000)) == []


def test_collapse_is_said_once_after_fifty_steps():
    assert heard(every_ten(50, feature_spread=0.01)) == []
    (text,) = heard(every_ten(1000, feature_spread=0.01))
    assert "collapse" in text
    assert "--learning-rate" in text
    assert heard(every_ten(40, feature_spread=0.01) + [{"step": 50, "epoch": 0.5}] + [
        {"step": 60 + 10 * i, "epoch": 1, "feature_spread": 0.01} for i in range(5)
    ]) == []  # fmt: skip


def test_saturation_counts_early_and_only_with_real_keys():
    assert heard(every_ten(20, contrast_accuracy=1.0)) == []
    (text,) = heard(every_ten(100, contrast_accuracy=0.995))
    assert "saturation" in text
    assert heard([{"step": 500, "epoch": 5, "contrast_accuracy": 0.995}]) == []  # late: the task is learned


def test_no_learning_after_some_epochs():
    assert heard(every_ten(200, loss=8.3)) == []
    (text,) = heard(every_ten(400, loss=8.3))
    assert "no learning" in text


LEAKS = {"batch_leak": 0.1, "batch_leak_error": 0.01, "batch_leak_share": 0.05}


@pytest.mark.parametrize(
    ("bad", "good", "word"),
    [
        ({"effective_rank": 1.2}, {"effective_rank": 1.6}, "dimensional collapse"),
        ({"dead_dimensions": 0.96}, {"dead_dimensions": 0.9}, "dimensional collapse"),
        ({"random_cosine": 0.96}, {"random_cosine": 0.9}, "dimensional collapse"),
        ({"oldest_key_cosine": 0.5}, {"oldest_key_cosine": 0.7}, "stale keys"),
    ],
)
def test_checks_that_are_bad_twice_in_a_row_are_said_once(bad, good, word):
    (text,) = heard_after([bad] * 4)
    assert word in text
    assert "--" in text
    assert heard_after([bad, good, bad, good]) == []
    # A check without the figure says nothing, good or bad.
    assert len(heard_after([bad, {}, bad] if word == "stale keys" else [bad, bad])) == 1


def test_a_leak_is_said_at_once_where_it_is_sure_and_large():
    (text,) = heard_after([LEAKS, LEAKS])
    assert "5.0%" in text
    assert "--shuffle-bn true" in text
    assert heard_after([LEAKS | {"batch_leak_share": 0.02}]) == []
    assert heard_after([LEAKS | {"batch_leak_error": 0.03}]) == []  # three standard errors
    assert heard_after([{"batch_leak": 0.1, "batch_leak_error": 0.01}]) == []  # nothing is learned yet
    assert heard_after([LEAKS], shuffled=True) == []


def test_good_checks_say_nothing():
    assert heard_after([{}] * 5 + [{"batch_leak": 0.0, "batch_leak_error": 0.01, "batch_leak_share": 0.0}]) == []
    assert Alarms(steps=10, queue_steps=1).check_epoch({"knn_accuracy": 0.5}) == []
