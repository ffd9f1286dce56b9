"""Warnings about a training that goes wrong in a way known from the field, each said once, with advice."""

from __future__ import annotations

from collections.abc import Mapping

COLLAPSED_SPREAD = 0.1
COLLAPSED_STEPS = 50
SATURATED_ACCURACY = 0.99
EARLY = 0.2
IDLE_EPOCHS = 3
IDLE_SHARE = 0.99
# Of the checks after epochs: the bounds of `moco health` for bad.
COLLAPSED_RANK = 1.5
COLLAPSED_COSINE = 0.95
DEAD_DIMENSIONS = 0.95
CHECKS_IN_A_ROW = 2
LEAK_SHARE = 0.025
LEAK_ERRORS = 4.0
STALE_COSINE = 0.6


class Alarms:
    """Looks at the lines of a training.

    steps: of the whole training; queue_steps: until every key of the queue is a real one. shuffled: keys are shuffled
    between groups of batch norm, so that the small part of the leak that is left is no fault.
    """

    def __init__(self, *, steps: int, queue_steps: int, shuffled: bool = False) -> None:
        self._steps, self._queue_steps, self._shuffled = steps, queue_steps, shuffled
        self._in_a_row = {"rank": 0, "stale": 0}
        self._low_since: float | None = None
        self._said: set[str] = set()

    def check(self, line: Mapping[str, float]) -> list[str]:
        """What is new and alarming about a line: one sentence with advice each."""
        return self._new(
            {"collapse": self._collapse(line), "saturation": self._saturation(line), "idle": self._idle(line)}
        )

    def check_epoch(self, checks: Mapping[str, float]) -> list[str]:
        """The same for the figures of the check after an epoch (`moco.evaluate.monitor`), whichever there are."""
        return self._new({"rank": self._rank(checks), "leak": self._leak(checks), "stale": self._stale(checks)})

    def _new(self, found: Mapping[str, str | None]) -> list[str]:
        new = {name: text for name, text in found.items() if text is not None and name not in self._said}
        self._said |= set(new)
        return list(new.values())

    def _collapse(self, line: Mapping[str, float]) -> str | None:
        if line["feature_spread"] >= COLLAPSED_SPREAD:
            self._low_since = None
            return None
        if self._low_since is None:
            self._low_since = line["step"]
        if line["step"] - self._low_since < COLLAPSED_STEPS:
            return None
        return (
            f"collapse: the features have been nearly equal (spread {line['feature_spread']:.3f}, below "
            f"{COLLAPSED_SPREAD}) for {line['step'] - self._low_since:.0f} steps; lower --learning-rate, raise "
            "--momentum, add --warmup-epochs"
        )

    def _saturation(self, line: Mapping[str, float]) -> str | None:
        early = self._queue_steps < line["step"] <= EARLY * self._steps
        if not early or line.get("contrast_accuracy", 0) <= SATURATED_ACCURACY:
            return None
        return (
            f"saturation: {line['contrast_accuracy']:.1%} of the pictures find their positive already; the task is too "
            "easy: harder crops (--crop-scale), more --queue-size, or batch norm gives the answer away "
            "(--shuffle-bn, --bn-groups)"
        )

    def _idle(self, line: Mapping[str, float]) -> str | None:
        if line["epoch"] < IDLE_EPOCHS or line["step"] < 2 * self._queue_steps:
            return None
        if "chance_loss" not in line or line["loss"] < IDLE_SHARE * line["chance_loss"]:
            return None
        return (
            f"no learning: after {line['epoch']:.1f} epochs the loss {line['loss']:.2f} is still that of chance "
            f"({line['chance_loss']:.2f}); check the pictures and their normalisation, raise --learning-rate, or lower "
            "--momentum for a short training"
        )

    def _rank(self, checks: Mapping[str, float]) -> str | None:
        rank, cosine = checks.get("effective_rank"), checks.get("random_cosine", 0.0)
        dead = checks.get("dead_dimensions", 0.0)
        if rank is None:
            return None
        bad = rank <= COLLAPSED_RANK or cosine >= COLLAPSED_COSINE or dead >= DEAD_DIMENSIONS
        if not self._again("rank", bad):
            return None
        return (
            f"dimensional collapse: next to no direction of the features is in use (effective rank {rank:.1f}, "
            f"{dead:.0%} dead, cosine of random pairs {cosine:+.2f}); lower --learning-rate or --weight-decay, and see "
            "moco health"
        )

    def _leak(self, checks: Mapping[str, float]) -> str | None:
        share = checks.get("batch_leak_share", 0.0)
        if self._shuffled or share < LEAK_SHARE or checks["batch_leak"] < LEAK_ERRORS * checks["batch_leak_error"]:
            return None
        return (
            f"batch norm leak: {share:.1%} of what the loss has gained comes from the batch that a key was normalised "
            "in, not from its picture; train with --shuffle-bn true (and --bn-groups 8)"
        )

    def _stale(self, checks: Mapping[str, float]) -> str | None:
        if "oldest_key_cosine" not in checks:
            return None
        cosine = checks["oldest_key_cosine"]
        if not self._again("stale", cosine < STALE_COSINE):
            return None
        return (
            f"stale keys: the oldest keys of the queue are no longer what the key encoder makes of their views (cosine "
            f"{cosine:.2f}); raise --momentum, or take a smaller --queue-size"
        )

    def _again(self, name: str, bad: bool) -> bool:
        """Whether checks were bad often enough in a row: one alone may be bad because training has just begun."""
        self._in_a_row[name] = self._in_a_row[name] + 1 if bad else 0
        return self._in_a_row[name] >= CHECKS_IN_A_ROW
