"""The command line as a user meets it: help from the settings class, and one line for bad input."""

import itertools
import os
import re
import subprocess
import sys
from typing import Literal, get_args, get_origin

import numpy as np
import pytest

from moco import cli
from moco.recipes import pretrain_settings
from moco.settings import PretrainSettings


def moco(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(list(arguments))
    found = capsys.readouterr()
    return status, found.out, found.err


def help_text(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main([*arguments, "--help"])
    assert caught.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_lists_every_field_with_its_meaning_and_default(capsys):
    text = help_text(capsys, "pretrain")
    for name, field in PretrainSettings.model_fields.items():
        assert name == "data" or f"--{name.replace('_', '-')}" in text
        assert " ".join(field.description.split()) in text, name
    assert "(default: 0.03)" in text
    assert "(default: 0.2 1)" in text


def test_bench_takes_the_same_settings_and_no_resume(capsys, monkeypatch):
    text = help_text(capsys, "bench")
    for name in set(PretrainSettings.model_fields) - {"data"}:
        assert f"--{name.replace('_', '-')}" in text
    assert "--seconds" in text
    assert "--json" in text
    assert "--resume" not in text
    seen = {}
    monkeypatch.setattr("moco.bench.benchmark", lambda data, **given: seen.update(data=data, **given))
    line = "bench photos/ --recipe v1 --workers 3 --queue-size auto --config run.yaml --seconds 20"
    with pytest.raises(AttributeError):  # nothing was measured
        cli.main(line.split())
    assert seen == {
        "data": "photos/", "recipe": "v1", "workers": 3, "queue_size": "auto", "config": "run.yaml", "seconds": 20.0,
    }  # fmt: skip


def test_help_shows_the_defaults_of_the_recipe(capsys):
    for words in (["--recipe", "v1"], ["--recipe=v1"]):
        assert "softmax temperature (τ) (default: 0.07)" in help_text(capsys, "pretrain", *words)
    assert "softmax temperature (τ) (default: 0.2)" in help_text(capsys, "pretrain")


def test_flags_become_settings(monkeypatch):
    seen = {}
    monkeypatch.setattr("moco.pretraining.pretrain", lambda data, **given: seen.update(data=data, **given))
    line = (
        "pretrain photos/ --recipe v1 --crop-scale 0.3 0.9 --queue-size auto --batch-size 64 "
        "--learning-rate 1e-3 --symmetric --no-tensorboard --clip-gradient none --shuffle-bn false "
        "--milestones 0.5 --out 2024 --channels 1 "
        "--std auto --monitor none --key-view {blur_probability:\\ 0.1} --mean 0.5"
    )
    arguments = [part.replace("\\ ", " ") for part in re.split(r"(?<!\\) ", line)]
    assert cli.main(arguments) == 0
    assert seen.pop("data") == "photos/"
    found = pretrain_settings(**seen)
    assert (found.recipe, found.crop_scale, found.queue_size, found.batch_size) == ("v1", (0.3, 0.9), "auto", 64)
    assert (found.learning_rate, found.symmetric, found.tensorboard, found.clip_gradient) == (1e-3, True, False, None)
    assert (found.shuffle_bn, found.milestones, found.out, found.channels) == (False, (0.5,), "2024", 1)
    assert found.key_views.blur_probability == 0.1
    assert (found.mean, found.std, found.monitor) == ((0.5,), "auto", "none")


CHOICES = [
    (name, choice)
    for name, field in PretrainSettings.model_fields.items()
    for choice in itertools.chain.from_iterable(
        get_args(part) for part in (field.annotation, *get_args(field.annotation)) if get_origin(part) is Literal
    )
]


@pytest.mark.parametrize(("name", "choice"), CHOICES)
def test_every_choice_of_every_setting_can_be_made_with_its_flag(monkeypatch, name, choice):
    seen = {}
    monkeypatch.setattr("moco.pretraining.pretrain", lambda data, **given: seen.update(given))
    # Keys that learn need a dictionary that hands gradients on.
    with_it = ["--dictionary", "in-batch"] if name == "key_encoder" else []
    assert cli.main(["pretrain", "photos/", f"--{name.replace('_', '-')}", str(choice), *with_it]) == 0
    assert getattr(pretrain_settings(**seen), name) == choice


@pytest.fixture
def photos(tmp_path):
    import cv2

    rng = np.random.default_rng(0)
    for i in range(12):
        path = tmp_path / "photos" / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), rng.integers(0, 255, (40, 50, 3), np.uint8))
    return tmp_path / "photos"


SMALL = ["--recipe", "small", "--batch-size", "4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent/"], "absent"),
        (["empty/"], "no images"),
        (["photos", "--recipe", "small"], "has 12 images, fewer than one batch of 256: set --batch-size 12"),
        (["photos", "--recipe", "smal"], "did you mean small"),
        (["photos", *SMALL, "--backbone", "resnet19"], "did you mean resnet18"),
        (["photos", *SMALL, "--bacth-size", "4"], "did you mean --batch-size"),
        (["photos", *SMALL, "--queue-size", "0"], "queue_size = 0"),
        (["photos", *SMALL, "--batch-size", "0"], "batch_size = 0"),
        (["photos", *SMALL, "--image-size", "-3"], "image_size = -3"),
        (["photos", *SMALL, "--momentum", "1"], "momentum = 1"),
        (["photos", *SMALL, "--temperature", "0"], "temperature = 0"),
        (["photos", *SMALL, "--epochs"], "expected one argument"),
        (["photos", *SMALL, "--device", "cuda:77"], "device cuda"),
        (["photos", *SMALL, "--device", "gpu"], "unknown device 'gpu'"),
        (["photos", *SMALL, "--out", "taken"], "already holds a run"),
        (["photos", *SMALL, "--out", "full"], "not an empty folder"),
        (["photos", *SMALL, "--labels", "short.npy"], "labels"),
        (["photos", *SMALL, "--views", "batch"], "--views image"),
        (["photos", *SMALL, "--bn-groups", "1", "--shuffle-bn", "true"], "shuffle_bn changes nothing"),
        (["photos", *SMALL, "--bn-groups", "3"], "fewer than 2 of 4 images in a group"),
        (["photos", *SMALL, "--mean", "0.5"], "mean has 1 value, but the images have 3 channels"),
        (["photos", *SMALL, "--precision", "fp16", "--device", "cpu"], "fp16 needs a CUDA device"),
        (["photos", *SMALL, "--config", "absent.yaml"], "cannot read"),
        (["flat.npz", *SMALL, "--monitor", "knn"], "monitor knn needs labels"),
        (["flat.npz", *SMALL, "--labels", "short.npy"], "labels"),
        (["floats.npz", *SMALL], "uint8"),
        (["--recipe", "small"], "no data"),
        (["photos", "more", *SMALL], "no such file or folder"),
        (["photos", *SMALL, "--batch-size", "1"], "one picture at a time"),
        (["photos", *SMALL, "--crop-scale", "2"], "crop_scale needs another value"),
        (["photos", *SMALL, "--key-view", "{hue: 3}"], "hue = 3"),
        (["damaged", *SMALL], "none of the 12 images can be read"),
        (["--resume", "full", "--config", "x.yaml"], "does not go with --resume"),
        (["--resume", "full"], "not a run folder"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2_and_writes_nothing(photos, capsys, monkeypatch, arguments, message):
    folder = photos.parent
    monkeypatch.chdir(folder)
    for name in ("empty", "taken", "full"):
        (folder / name).mkdir()
    (folder / "taken" / "settings.yaml").write_text("recipe: v2\n")
    (folder / "full" / "letter.txt").write_text("dear")
    (folder / "damaged").mkdir()
    for i in range(12):
        (folder / "damaged" / f"{i}.jpg").write_bytes(b"no picture")
    np.save(folder / "short.npy", np.zeros(3, np.int64))
    np.savez(folder / "flat.npz", x=np.zeros((12, 28, 28), np.uint8))
    np.savez(folder / "floats.npz", x=np.zeros((12, 28, 28), np.float32))
    before = sorted(folder.rglob("*"))
    status, out, err = moco(capsys, "pretrain", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("moco: ")
    assert err.count("\n") == 1, err
    assert message in err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrian"], "did you mean pretrain"),
        (["--verison"], "did you mean --version"),
        (["bench", "photos", "--bacth-size", "4"], "did you mean --batch-size"),
        (["bench", "photos", "--secnods", "9"], "did you mean --seconds"),
        (["demo", "--otu", "x"], "did you mean --out"),
    ],
)
def test_unknown_verbs_and_options(capsys, arguments, message):
    status, _, err = moco(capsys, *arguments)
    assert status == 2
    assert message in err


def test_the_installed_command_and_the_module_are_the_same():
    for command in ([sys.executable, "-m", "moco"], [os.path.join(os.path.dirname(sys.executable), "moco")]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("moco 0.")
        done = subprocess.run([*command, "pretrain", "nowhere/"], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_several_data_and_resume_as_a_verb(monkeypatch):
    seen = []
    monkeypatch.setattr("moco.pretraining.pretrain", lambda data, **given: seen.append(("pretrain", data, given)))
    monkeypatch.setattr("moco.pretraining.resume", lambda run, **given: seen.append(("resume", run, given)))
    cli.main(["pretrain", "a", "b", "--recipe", "small"])
    cli.main(["resume", "runs/x", "--epochs", "9", "--data", "c"])
    cli.main(["pretrain", "--resume", "runs/x"])
    assert seen == [
        ("pretrain", ["a", "b"], {"recipe": "small"}),
        ("resume", "runs/x", {"epochs": 9, "data": "c"}),
        ("resume", "runs/x", {}),
    ]


def test_resume_shows_no_defaults_since_the_run_has_its_own(capsys):
    text = help_text(capsys, "resume")
    assert "images per optimiser step, over all processes" in text
    assert "(default: 256)" not in text
