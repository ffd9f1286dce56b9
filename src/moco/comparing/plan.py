"""Which trainings stand side by side: a row for each method or value, a cell for each row and seed. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moco.errors import UserError, check_names
from moco.recipes import METHODS, ONLY_FOR, RECIPES
from moco.settings import PretrainSettings, ViewSettings


@dataclass(frozen=True)
class Row:
    """A row of the table. name: as in the table. settings: where it differs from what all rows have."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One training. folder: the name of its run folder, unique among the cells."""

    row: Row
    seed: int

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return f"{re.sub(r'[^a-z0-9.]+', '-', self.row.name.lower()).strip('-')}-seed{self.seed}"


def compared(methods: Sequence[str]) -> list[Row]:
    """The rows of `moco compare`: what makes each method itself, and nothing of its paper's views, rate or budget.

    moco is what the other settings describe, as MoCo. Raises UserError for a method that is not there or twice.
    """
    check_names(methods, ["moco", *METHODS], "method")
    if len(set(methods)) < len(methods):
        raise UserError(f"each method once: {','.join(methods)}")
    # Also where the recipe is that of a rival: its row has its own name.
    return [Row(name, METHODS.get(name, {"method": "moco"})) for name in methods]


def _recipe_views(recipe: str) -> dict[str, Any]:
    chosen = {name: field.default for name, field in ViewSettings.model_fields.items()}
    own = {name: value for name, value in RECIPES[recipe].items() if name in chosen}
    # The crop belongs to the size of the pictures, not to the kind of augmentation.
    return {name: value for name, value in (chosen | own).items() if name not in ("crop_scale", "crop_ratio")}


_NO_COLOURS = {"jitter_probability": 0.0, "grayscale_probability": 0.0, "blur_probability": 0.0}

# What the papers vary ([v1] tables 1 and figure 3; [v2] tables 1 and 2), by the name of --over.
ABLATIONS: dict[str, list[Row]] = {
    "momentum": [Row(f"m = {m:g}", {"momentum": m}) for m in (0.0, 0.9, 0.99, 0.999)],
    "queue": [Row(f"K = {k}", {"queue_size": k}) for k in (256, 1024, 4096)],
    "dictionary": [
        Row("queue", {"dictionary": "queue"}),
        Row("memory bank", METHODS["memory-bank"]),
        Row("end-to-end", METHODS["end-to-end"]),
    ],
    "bn-shuffle": [
        Row("8 groups, shuffled", {"bn_groups": 8, "shuffle_bn": True}),
        Row("8 groups, not shuffled", {"bn_groups": 8, "shuffle_bn": False}),
        Row("whole batch", {"bn_groups": 1, "shuffle_bn": False}),
    ],
    "temperature": [Row(f"τ = {t:g}", {"temperature": t}) for t in (0.07, 0.1, 0.2, 0.3, 0.4, 0.5)],
    "head": [Row("linear", {"head": "linear"}), Row("MLP", {"head": "mlp"})],
    "augmentation": [
        Row("crops and flips", _NO_COLOURS),
        Row("v1", _recipe_views("v1")),
        Row("v2", _recipe_views("v2")),
    ],
    "schedule": [Row("steps", {"schedule": "step"}), Row("cosine", {"schedule": "cosine"})],
}


def ablated(over: Sequence[str], values: Sequence[Any] = ()) -> list[Row]:
    """The rows of `moco ablate`: one after the other for each of `over`, everything else as it is.

    values: instead of the papers', for momentum, queue or temperature. Raises UserError for names and values that do
    not fit, or are there twice.
    """
    check_names(over, ABLATIONS, "ablation")
    if len(set(over)) < len(over):
        raise UserError(f"--over {' '.join(over)}: each name once")
    if not values:
        return [row for name in over for row in ABLATIONS[name]]
    settings = {"momentum": "momentum", "queue": "queue_size", "temperature": "temperature"}
    if len(over) != 1 or over[0] not in settings:
        raise UserError(f"--values goes with one of --over {', '.join(settings)}")
    if len(set(values)) < len(values):
        raise UserError(f"--values {' '.join(map(str, values))}: each value once")
    if over[0] == "queue":  # from the command line they are all floats
        values = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    return [Row(f"{over[0]} {value}", {settings[over[0]]: value}) for value in values]


def idle(name: str, settings: PretrainSettings) -> str | None:
    """Why a setting changes nothing in a training with these settings, in words, or None where it does."""
    method = settings.method
    if method not in ONLY_FOR.get(name, (method,)):
        return f"it is for method {' or '.join(ONLY_FOR[name])}, not for {method}"
    if name in ("bn_groups", "shuffle_bn") and method != "moco":
        return f"it is for method moco: {method} normalises a batch as a whole"
    if name == "queue_size" and method == "moco" and settings.dictionary == "in-batch":
        return "dictionary in-batch has no queue"
    if name == "momentum" and method == "moco":
        if settings.dictionary == "memory-bank":
            return "no key encoder follows with dictionary memory-bank"
        if settings.key_encoder != "momentum":
            return f"no key encoder follows with key_encoder {settings.key_encoder}"
    return None


@dataclass(frozen=True)
class Searched:
    """How a setting is searched. low, high: of the number that is drawn. kind: log
    (evenly by its logarithm), slow (the same for 1 − m) or crop (evenly; the smallest share that a crop takes).
    name: of the number in the trials."""

    low: float
    high: float
    kind: str = "log"
    name: str = ""

    def suggested(self, trial: Any) -> Any:
        """A value from an Optuna trial, as the setting takes it."""
        trial.suggest_float(self.name, self.low, self.high, log=self.kind in ("log", "slow"))
        return self.setting(trial.params)

    def setting(self, drawn: Mapping[str, float]) -> Any:
        """The setting that a drawn number stands for."""
        number = float(f"{drawn[self.name]:.3g}")
        if self.kind == "slow":
            return round(1 - number, 6)
        return (number, 1.0) if self.kind == "crop" else number


# The ranges reach a factor of about five to either side of the papers' values.
SEARCHED: dict[str, Searched] = {
    "learning_rate": Searched(0.006, 0.5, name="learning_rate"),
    "temperature": Searched(0.05, 0.5, name="temperature"),
    "momentum": Searched(0.0005, 0.2, "slow", name="one_minus_momentum"),
    "crop_scale": Searched(0.08, 0.8, "crop", name="crop_scale_low"),
    "weight_decay": Searched(1e-6, 5e-3, name="weight_decay"),
}
