"""Layers of settings, and one clear line for each mistake."""

import itertools
import re

import pytest
import yaml
from pydantic import ValidationError

from moco.errors import UserError, explain
from moco.recipes import METHODS, RECIPES, pretrain_settings
from moco.settings import PretrainSettings, RunSettings


def test_layers_defaults_recipe_file_flags(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("recipe: v1\nbatch-size: 64\ntemperature: 0.3\nlearning_rate: 1e-2\n")
    found = pretrain_settings(file, temperature=0.5)
    assert found.head == "linear"  # the recipe
    assert found.batch_size == 64  # the file
    assert found.learning_rate == 0.01  # YAML reads 1e-2 as text
    assert found.temperature == 0.5  # the flag
    assert found.sgd_momentum == 0.9  # the default


def test_recipes_agree_with_the_papers():
    v1, v2 = (pretrain_settings(recipe=name) for name in ("v1", "v2"))
    for recipe in (v1, v2):
        assert (recipe.momentum, recipe.learning_rate, recipe.sgd_momentum, recipe.weight_decay) == (
            "auto",  # 0.999, but for very short trainings: tests/test_resolve.py
            0.03,
            0.9,
            1e-4,
        )
        assert (recipe.feature_size, recipe.batch_size, recipe.epochs, recipe.symmetric) == (128, 256, 200, False)
        assert recipe.crop_scale == (0.2, 1.0)
        assert recipe.grayscale_probability == 0.2
    assert (v1.head, v1.temperature, v1.schedule, v1.milestones) == ("linear", 0.07, "step", (0.6, 0.8))
    assert (v1.hue, v1.jitter_probability, v1.blur_probability, v1.grayscale_first) == (0.4, 1.0, 0.0, True)
    assert (v2.head, v2.temperature, v2.schedule) == ("mlp", 0.2, "cosine")
    assert (v2.hue, v2.jitter_probability, v2.blur_probability, v2.blur_sigma) == (0.1, 0.8, 0.5, (0.1, 2.0))


def test_v3_agrees_with_the_paper_for_both_kinds_of_encoder():
    resnet, vit = (pretrain_settings(recipe="v3", backbone=name) for name in ("resnet50", "vit_small_patch16_224"))
    for found in (resnet, vit):
        assert (found.dictionary, found.key_encoder, found.symmetric, found.scale_loss) == (
            "in-batch",
            "momentum",
            True,
            True,
        )
        assert (found.momentum, found.momentum_schedule, found.feature_size, found.batch_size) == (
            0.99,
            "cosine",
            256,
            4096,
        )
        assert (found.head, found.head_width, found.predictor_layers) == ("mlp-bn", 4096, 2)
        assert (found.query_views.blur_probability, found.key_views.blur_probability) == (1.0, 0.1)
        assert (found.query_views.solarize_probability, found.key_views.solarize_probability) == (0.0, 0.2)
        assert (found.brightness, found.contrast, found.saturation, found.hue) == (0.4, 0.4, 0.2, 0.1)
    assert (resnet.optimizer, resnet.learning_rate, resnet.weight_decay, resnet.temperature) == ("lars", 0.6, 1e-6, 1.0)
    assert (resnet.head_layers, resnet.head_last_norm, resnet.predictor_last_norm) == (2, True, False)
    assert (vit.optimizer, vit.learning_rate, vit.weight_decay, vit.temperature) == ("adamw", 1.5e-4, 0.1, 0.2)
    assert (vit.head_layers, vit.head_last_norm, vit.predictor_last_norm, vit.vit_rules) == (3, True, True, "v3")
    assert (resnet.crop_scale[0], vit.crop_scale[0]) == (0.2, 0.08)


def test_keys_that_learn_need_a_dictionary_that_passes_gradients_on():
    with pytest.raises(UserError, match="key_encoder learned goes with --dictionary in-batch"):
        pretrain_settings(key_encoder="learned")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_value_can_be_overridden(recipe):
    for name in RECIPES[recipe]:
        value = PretrainSettings.model_fields[name].default
        # Some values of a method only go together.
        if name not in ("dictionary", "key_encoder"):
            assert getattr(pretrain_settings(recipe=recipe, **{name: value}), name) == value


def test_a_key_view_takes_the_querys_values_where_it_says_nothing():
    found = pretrain_settings(key_view={"blur_probability": 0.1, "solarize_probability": 0.2}, hue=0.05)
    assert found.query_views.blur_probability == 0.5
    assert found.key_views.blur_probability == 0.1
    assert found.key_views.hue == 0.05
    assert pretrain_settings().key_views == pretrain_settings().query_views


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipe": "v22"}, "unknown recipe 'v22'; did you mean v2"),
        ({"bacth_size": 3}, "unknown setting 'bacth_size'; did you mean batch_size"),
        ({"queue_size": 0}, "queue_size = 0: .*greater than 0"),
        ({"queue_size": -5}, "queue_size = -5: .*greater than 0"),
        ({"batch_size": 0}, "batch_size = 0: .*greater than 0"),
        ({"image_size": -1}, "image_size = -1: .*greater than 0"),
        ({"momentum": 1}, "momentum = 1: .*less than 1"),
        ({"momentum": -0.1}, "momentum = -0.1: .*greater than or equal to 0"),
        ({"temperature": 0}, "temperature = 0: .*greater than 0"),
        ({"temperature": float("inf")}, "temperature = inf: .*finite"),
        ({"learning_rate": float("nan")}, "learning_rate = nan: .*"),
        ({"std": (0.0,)}, "std = .*greater than 0"),
        ({"seed": 2**40}, "seed = .*less than"),
        ({"epochs": "many"}, "^epochs = 'many': must be a whole number$"),
        ({"epochs": 1.5}, "^epochs = 1.5: must be a whole number$"),
        ({"learning_rate": "fast"}, "^learning_rate = 'fast': must be a number$"),
        ({"momentum": "high"}, "^momentum = 'high': must be 'auto' or a number$"),
        ({"momentum": 2}, "^momentum = 2: must be 'auto' or less than 1$"),
        ({"shuffle_bn": "perhaps"}, "^shuffle_bn = 'perhaps': must be 'auto', true or false$"),
        ({"mean": ("x", "y", 0.5)}, "^mean = .*: must be 'auto' or a number$"),
        ({"key_view": "blur"}, "^key_view = 'blur': must be {name: value}$"),
        ({"optimizer": "adam"}, "^optimizer = 'adam': must be 'sgd', 'lars' or 'adamw'; did you mean adamw"),
        ({"crop_scale": (0.1, 0.2, 0.3)}, r"^crop_scale = \(0.1, 0.2, 0.3\): takes 2 values, not 3$"),
        ({"crop_scale": (0.9,)}, "^crop_scale needs another value beside 0.9$"),
        ({"crop_scale": ("a",)}, "^crop_scale = 'a': must be a number$"),
        ({"crop_scale": (0.9, 0.1)}, "crop_scale must be two numbers"),
        ({"crop_scale": (0.5, 2)}, "at most 1"),
        ({"crop_scale": (0.5,)}, "crop_scale"),
        ({"batch_size": 10, "accumulate": 3}, "does not divide"),
        ({"warmup_epochs": 10, "epochs": 10}, "fewer than epochs"),
        ({"key_view": {"blurr_probability": 1}}, "did you mean blur_probability"),
        ({"key_view": {"blur_probability": 7}}, "less than or equal to 1"),
        ({"head": "cubic"}, "head = 'cubic': .*'linear', 'mlp' or 'mlp-bn'"),
    ],
)
def test_one_clear_line_for_a_mistake(given, message):
    with pytest.raises(UserError, match=message) as caught:
        pretrain_settings(**given)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "message"),
    [("- 1\n", "name: value"), ("a: [", "not valid YAML"), ("recipee: v1\n", "did you mean recipe")],
)
def test_a_bad_settings_file(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        pretrain_settings(tmp_path / "run.yaml")
    assert "\n" not in str(caught.value)
    (tmp_path / "run.yaml").write_bytes("recipe: v1".encode("utf-16"))
    with pytest.raises(UserError, match="not UTF-8"):
        pretrain_settings(tmp_path / "run.yaml")
    with pytest.raises(UserError, match="cannot read"):
        pretrain_settings(tmp_path / "absent.yaml")


def test_no_setting_is_explained_in_the_words_of_the_validator():
    """Any wrong value of any setting: what is said is this program's own."""
    said = set()
    for name, wrong in itertools.product(PretrainSettings.model_fields, ("zzz", -7, [[]], {"a": []}, None, 1.5)):
        try:
            pretrain_settings(**{name: wrong})
        except UserError as error:
            said.add(str(error))
    assert len(said) > 300
    for line in said:
        assert not re.search(r"[Ii]nput should|valid |parse|string|integer|boolean|valid dictionary|tuple", line), line


def test_a_value_that_is_not_there_is_called_missing():
    with pytest.raises(ValidationError) as caught:
        RunSettings(**PretrainSettings().model_dump(exclude={"channels"}))
    assert explain(caught.value) == "channels is missing"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_itself_whatever_recipe_it_is_tried_with(recipe, name, tmp_path):
    """As a comparison does it: the values of the method over those of a recipe."""
    file = tmp_path / "row.yaml"
    file.write_text(yaml.safe_dump({"recipe": recipe, "backbone": "resnet18", **METHODS[name]}))
    found, plain = pretrain_settings(file), pretrain_settings(recipe=name)
    parts = ["method", "head"]
    if plain.method == "moco":
        parts += ["dictionary", "key_encoder", "momentum_schedule", "predictor_layers", "symmetric", "scale_loss"]
        parts += ["feature_size", "temperature"] if name in ("v1", "v2") else []
    if name in ("end-to-end", "memory-bank"):
        parts.remove("head")  # a dictionary; the head is that of the others
    assert {part: getattr(found, part) for part in parts} == {part: getattr(plain, part) for part in parts}
