"""Recipes: sets of values to start from, and the layers in which values come: defaults < recipe < file < given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moco.errors import UserError
from moco.settings import PretrainSettings, check_names, explain, read_yaml

# [v1] section 3 and appendix; [v2] table 1; `small` is this project's own, tuned in benchmarks/README.md.
RECIPES: dict[str, dict[str, Any]] = {
    "v1": {
        "head": "linear",
        "temperature": 0.07,
        "schedule": "step",
        "hue": 0.4,
        "jitter_probability": 1.0,
        "grayscale_first": True,
        "blur_probability": 0.0,
    },
    "v2": {},
    "small": {
        "backbone": "resnet18",
        "image_size": 32,
        "crop_scale": (0.6, 1.0),
        "head": "linear",
        "temperature": 0.1,
        "momentum": 0.99,
        "learning_rate": 0.12,
        "weight_decay": 1e-3,
        "blur_probability": 0.0,
        # Groups cost a quarter of the speed at this size and gained nothing in 15 epochs; for long runs: auto.
        "bn_groups": 1,
    },
}


def pretrain_settings(config: str | Path | None = None, **given: Any) -> PretrainSettings:
    """The settings for a run: defaults, then the recipe, then the YAML file `config`, then what is `given`.

    Raises UserError with one line for an unknown name or recipe and for a value out of range.
    """
    values = (read_yaml(config) if config else {}) | given
    check_names(values, PretrainSettings.model_fields, "setting")
    recipe = values.get("recipe", PretrainSettings.model_fields["recipe"].default)
    check_names([str(recipe)], RECIPES, "recipe")
    try:
        return PretrainSettings(**(RECIPES[str(recipe)] | values))
    except ValidationError as error:
        raise UserError(explain(error)) from error
