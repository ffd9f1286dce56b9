"""The line of an epoch: shares in percent, and nothing that was not measured."""

import io

from rich.console import Console

from moco.train.progress import ProgressDisplay

LINE = {
    "loss": 6.5, "chance_loss": 7.625, "contrast_accuracy": 0.0371, "positive_similarity": 0.12,
    "negative_similarity": -0.06, "feature_spread": 0.62, "learning_rate": 0.033, "images_per_second": 221.4,
    "data_wait": 0.06,
}  # fmt: skip


def said(checks):
    written = io.StringIO()
    display = ProgressDisplay(Console(file=written, width=400), first_step=0, steps=20, steps_per_epoch=10, epochs=2)
    display.epoch(2, LINE, checks)
    return written.getvalue()


def test_shares_are_percentages():
    line = said({"knn_accuracy": 0.6994, "retrieval": 0.125, "effective_rank": 17.866, "spread": 0.4})
    assert line.endswith(" · kNN accuracy 69.9% · retrieval 12.5% · rank 17.9\n")
    assert " · accuracy 3.7% · " in line


def test_checks_that_were_not_made_are_left_out():
    assert said({}).endswith(" · rate 0.033\n")
