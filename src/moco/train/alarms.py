"""Warnings about a training that goes wrong in a way known from the field, each said once, with advice."""

from __future__ import annotations

from collections.abc import Mapping

COLLAPSED_SPREAD = 0.1
COLLAPSED_STEPS = 50
SATURATED_ACCURACY = 0.99
EARLY = 0.2
IDLE_EPOCHS = 3
IDLE_SHARE = 0.99


class Alarms:
    """Looks at the lines of a training.

    steps: of the whole training; queue_steps: until every key of the queue is a real one.
    """

    def __init__(self, *, steps: int, queue_steps: int) -> None:
        self._steps, self._queue_steps = steps, queue_steps
        self._low_since: float | None = None
        self._said: set[str] = set()

    def check(self, line: Mapping[str, float]) -> list[str]:
        """What is new and alarming about a line: one sentence with advice each."""
        found = {"collapse": self._collapse(line), "saturation": self._saturation(line), "idle": self._idle(line)}
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
