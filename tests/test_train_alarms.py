"""Warnings while training: when they come, and that each comes once."""

from moco.train.alarms import Alarms

GOOD = {"feature_spread": 0.9, "contrast_accuracy": 0.5, "loss": 5.0, "chance_loss": 8.3}


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
