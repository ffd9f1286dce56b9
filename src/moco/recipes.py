"""Recipes: sets of values to start from, and the layers in which values come: defaults < recipe < file < given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError

from moco.errors import UserError
from moco.settings import PretrainSettings, check_names, explain
from moco.settings_file import read_yaml

# What else a recipe may have made of MoCo, and a row of a comparison must not inherit.
_PLAIN: dict[str, Any] = {
    "method": "moco",
    "dictionary": "queue",
    "key_encoder": "momentum",
    "momentum_schedule": "constant",
    "predictor_layers": 0,
    "symmetric": False,
    "scale_loss": False,
}

# What makes a method itself, whatever the pictures, the backbone and the budget.
METHODS: dict[str, dict[str, Any]] = {
    "v1": {**_PLAIN, "head": "linear", "feature_size": 128, "temperature": 0.07},
    "v2": {**_PLAIN, "head": "mlp", "feature_size": 128, "temperature": 0.2},
    "v3": {
        **_PLAIN,
        "dictionary": "in-batch",
        "head": "mlp-bn",
        "predictor_layers": 2,
        "feature_size": 256,
        "momentum": 0.99,
        "momentum_schedule": "cosine",
        "symmetric": True,
        "scale_loss": True,
        "bn_groups": 1,
        "shuffle_bn": False,
        "sync_bn": True,
    },
    "end-to-end": {**_PLAIN, "dictionary": "in-batch", "key_encoder": "learned"},
    "memory-bank": {**_PLAIN, "dictionary": "memory-bank"},
    "simclr": {
        "method": "simclr",
        "head": "mlp-bn",
        "head_last_norm": False,
        "feature_size": 128,
        "temperature": 0.1,
        "sync_bn": True,
    },
    "byol": {
        "method": "byol",
        "head": "mlp-bn",
        "head_last_norm": False,
        "predictor_layers": 2,
        "feature_size": 256,
        "momentum": 0.99,
        "momentum_schedule": "cosine",
        "sync_bn": True,
    },
    "swav": {
        "method": "swav",
        "head": "mlp-bn",
        "head_last_norm": False,
        "feature_size": 128,
        "temperature": 0.1,
        "queue_size": 3840,
        "sync_bn": True,
    },
    "cpc": {"method": "cpc", "head": "linear", "feature_size": 64, "temperature": 0.1},
}

# Which methods a setting is for, where not for all.
ONLY_FOR: dict[str, tuple[str, ...]] = {
    "dictionary": ("moco",),
    "key_encoder": ("moco",),
    "bank_momentum": ("moco",),
    "bank_on_disk": ("moco",),
    "queue_size": ("moco", "swav"),
    "queue_precision": ("moco",),
    "momentum": ("moco", "byol"),
    "momentum_schedule": ("moco", "byol"),
    "predictor_layers": ("moco", "byol"),
    "predictor_last_norm": ("moco", "byol"),
    "temperature": ("moco", "simclr", "swav", "cpc"),
    "scale_loss": ("moco",),
    "symmetric": ("moco",),
    "prototypes": ("swav",),
    "sinkhorn_epsilon": ("swav",),
    "freeze_prototypes": ("swav",),
    "queue_from": ("swav",),
    "small_crops": ("swav",),
    "small_crop_size": ("swav",),
    "small_crop_scale": ("swav",),
    "patch_share": ("cpc",),
}

# BYOL's asymmetric pair of views, appendix B of arXiv 2006.07733.
_ASYMMETRIC: dict[str, Any] = {
    "saturation": 0.2,
    "hue": 0.1,
    "blur_probability": 1.0,
    "key_view": {"blur_probability": 0.1, "solarize_probability": 0.2},
}

# SimCLR's views at full strength, appendix A of arXiv 2002.05709.
_STRONG: dict[str, Any] = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}

# [v1] section 3 and appendix; [v2] table 1; [v3] section 4 and appendix; the end-to-end and memory-bank dictionaries
# with the rest of v2; the rivals' papers (arXiv 2002.05709, 2006.07733, 2006.09882, 1905.09272: docs/methods.md says
# where from); `small` is this project's own, tuned in benchmarks/README.md.
RECIPES: dict[str, dict[str, Any]] = {
    "v1": {
        **METHODS["v1"],
        "schedule": "step",
        "hue": 0.4,
        "jitter_probability": 1.0,
        "grayscale_first": True,
        "blur_probability": 0.0,
    },
    "v2": METHODS["v2"],
    "v3": {
        **METHODS["v3"],
        **_ASYMMETRIC,
        "head_width": 4096,
        "temperature": 1.0,
        "optimizer": "lars",
        "learning_rate": 0.6,
        "weight_decay": 1e-6,
        "epochs": 100,
        "batch_size": 4096,
    },
    "end-to-end": METHODS["end-to-end"],
    "memory-bank": METHODS["memory-bank"],
    "simclr": {
        **METHODS["simclr"],
        **_STRONG,
        "crop_scale": (0.08, 1.0),
        "optimizer": "lars",
        "learning_rate": 0.3,
        "weight_decay": 1e-6,
        "epochs": 100,
        "batch_size": 4096,
    },
    "byol": {
        **METHODS["byol"],
        **_ASYMMETRIC,
        "crop_scale": (0.08, 1.0),
        "head_width": 4096,
        "momentum": 0.996,
        "optimizer": "lars",
        "learning_rate": 0.2,
        "weight_decay": 1.5e-6,
        "epochs": 1000,
        "batch_size": 4096,
    },
    "swav": {
        **METHODS["swav"],
        **_STRONG,
        "crop_scale": (0.14, 1.0),
        "small_crops": 6,
        "optimizer": "lars",
        "learning_rate": 0.6,
        "weight_decay": 1e-6,
        "epochs": 400,
    },
    "cpc": {**METHODS["cpc"], "optimizer": "adamw", "learning_rate": 2e-4, "weight_decay": 0.0},
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


# Where a recipe reads otherwise for vision transformers ([v3] section 4.2 and appendix).
FOR_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "v3": {
        "vit_rules": "v3",
        "head_layers": 3,
        "predictor_last_norm": True,
        "temperature": 0.2,
        "optimizer": "adamw",
        "learning_rate": 1.5e-4,
        "weight_decay": 0.1,
        "epochs": 300,
        "crop_scale": (0.08, 1.0),
    },
}


def recipe_values(recipe: str, backbone: str | None = None) -> dict[str, Any]:
    """What a recipe sets, for this backbone. Raises UserError for a recipe that is not there."""
    check_names([recipe], RECIPES, "recipe")
    transformer = FOR_TRANSFORMERS.get(recipe, {}) if backbone is not None and backbone.startswith("vit_") else {}
    return RECIPES[recipe] | transformer


def pretrain_settings(config: str | Path | None = None, **given: Any) -> PretrainSettings:
    """The settings for a run: defaults, then the recipe, then the YAML file `config`, then what is `given`.

    Raises UserError with one line for an unknown name or recipe and for a value out of range.
    """
    values = (read_yaml(config) if config else {}) | given
    values = {name: str(value) if isinstance(value, PurePath) else value for name, value in values.items()}
    values.pop("processes", None)  # the settings.yaml of a run says by how many it was trained
    check_names(values, PretrainSettings.model_fields, "setting")
    recipe = str(values.get("recipe", PretrainSettings.model_fields["recipe"].default))
    chosen = recipe_values(recipe, str(values.get("backbone", ""))) | _method_values(values)
    try:
        settings = PretrainSettings(**(chosen | values))
    except ValidationError as error:
        raise UserError(explain(error)) from error
    # Only what is given by name: a file may list everything, as the settings.yaml of a run does.
    for name, value in given.items():
        usual = PretrainSettings.model_fields[name].default
        if settings.method not in ONLY_FOR.get(name, (settings.method,)) and value != usual:
            raise UserError(f"{name} {value} is for method {' or '.join(ONLY_FOR[name])}, not for {settings.method}")
    return settings


def _method_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a method itself, where a method is asked for that is not that of the recipe."""
    asked = str(values.get("method", "moco"))
    return METHODS.get(asked, {}) if asked != RECIPES.get(str(values.get("recipe")), {}).get("method", "moco") else {}
