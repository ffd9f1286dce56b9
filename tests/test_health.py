"""`moco health` on real runs: a sound one, one that leaks, one that collapsed, one whose weights are no numbers."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import moco
from moco.data import fashion
from moco.errors import UserError
from moco.health import health


def pretrain(out, pictures=None, **given):
    given = {
        "recipe": "small", "base_width": 8, "image_size": 16, "epochs": 4, "batch_size": 64, "queue_size": 1024,
        "seed": 1, "out": str(out), "quiet": True, "monitor": "none", "tensorboard": False, "device": "cpu",
        "precision": "fp32", "threads": 1,
    } | given  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    return moco.pretrain(fashion.load()[0][:2048] if pictures is None else pictures, **given)


def verdicts(found):
    return {finding.name: finding.verdict for finding in found.findings}


def changed(run, tmp_path, change):
    """A copy of a run whose newest checkpoint was changed."""
    state = run.load()
    change(state["model"])
    (tmp_path / "checkpoints").mkdir(parents=True)
    (tmp_path / "settings.yaml").write_bytes((run.path / "settings.yaml").read_bytes())
    torch.save(state, tmp_path / "checkpoints" / run.checkpoints()[-1].name)
    return moco.Run(tmp_path)


@pytest.fixture(scope="module")
def pictures():
    return fashion.load()[0][:2048]


@pytest.fixture(scope="module")
def proper(tmp_path_factory):
    return pretrain(tmp_path_factory.mktemp("health") / "proper", bn_groups=4, shuffle_bn=True)


def test_a_sound_run_is_good_and_nothing_of_it_changes(proper, pictures, capsys):
    before = {path: path.read_bytes() for path in proper.path.rglob("*") if path.is_file()}
    found = health(proper, pictures)
    assert found.verdict != "bad"
    assert verdicts(found)["batch norm leak"] == "good"
    assert verdicts(found)["stale keys"] == "good"
    assert verdicts(found)["spread"] == "good"
    assert verdicts(found)["loss"] == "good"
    stale = next(finding for finding in found.findings if finding.name == "stale keys")
    assert stale.figures["age_1"] == pytest.approx(1, abs=1e-3)  # its views and groups are made just as they were
    assert {path: path.read_bytes() for path in before} == before
    written = json.loads((proper.path / "eval" / "health.json").read_text())
    assert written["verdict"] == found.verdict
    assert [finding["name"] for finding in written["findings"]] == [finding.name for finding in found.findings]
    shown = capsys.readouterr().out
    assert all(finding.name.split()[0] in shown for finding in found.findings)


def test_whole_batch_statistics_without_shuffling_leak(pictures, tmp_path):
    found = health(pretrain(tmp_path / "run", bn_groups=1, shuffle_bn=False), pictures, quiet=True)
    assert found.verdict == "bad"
    assert [name for name, verdict in verdicts(found).items() if verdict == "bad"] == ["batch norm leak"]
    leak = next(finding for finding in found.findings if finding.name == "batch norm leak")
    assert leak.figures["accuracy_as_trained"] > leak.figures["accuracy_fresh"]
    assert "--shuffle-bn true" in leak.advice


def test_a_collapsed_run_is_caught(proper, pictures, tmp_path):
    def collapse(weights):
        for encoder in ("query", "key"):
            weights[f"{encoder}_encoder.head.weight"] *= 1e-3
            weights[f"{encoder}_encoder.head.bias"] += 1
        weights["dictionary.keys"][:] = weights["dictionary.keys"].shape[1] ** -0.5

    found = verdicts(health(changed(proper, tmp_path / "run", collapse), pictures, quiet=True, images=256))
    assert found["spread"] == found["alignment"] == "bad"
    assert found["loss"] == "watch"  # at chance, after four epochs


def test_stale_keys_are_caught(proper, pictures, tmp_path):
    def age(weights):
        # What a key encoder that ran ahead of its queue would look like: the older, the less alike.
        queue, generator = weights["dictionary.keys"], torch.Generator().manual_seed(0)
        old = weights["dictionary.births"].max() - weights["dictionary.births"]
        queue += old[:, None] / 4 * torch.randn(queue.shape, generator=generator) / queue.shape[1] ** 0.5

    found = health(changed(proper, tmp_path / "run", age), pictures, quiet=True, images=256)
    stale = next(finding for finding in found.findings if finding.name == "stale keys")
    assert stale.verdict == "bad"
    assert "--momentum 0.9975" in stale.advice


def test_a_damaged_newest_checkpoint_is_noted_and_not_warned_of(proper, pictures, tmp_path, recwarn):
    run = changed(proper, tmp_path / "run", lambda model: None)
    (run.path / "checkpoints" / "step-999999999.pt").write_bytes(b"torn")
    found = health(run, pictures[:256], quiet=True)
    note = f"step-999999999.pt is damaged; the figures are of step {run.load()['step']}"
    assert found.notes.count(note) == 1
    assert json.loads((run.path / "eval" / "health.json").read_text())["notes"].count(note) == 1
    assert [str(one.message) for one in recwarn if "damaged" in str(one.message)] == [
        f"{run.path / 'checkpoints' / 'step-999999999.pt'} is damaged and is passed over"  # of run.load() above
    ]


def test_weights_that_are_no_numbers(proper, pictures, tmp_path):
    def spoil(weights):
        weights["query_encoder.backbone.conv1.weight"][0] = torch.nan

    found = health(changed(proper, tmp_path / "run", spoil), pictures, quiet=True)
    assert found.verdict == "bad"
    assert [finding.name for finding in found.findings] == ["weights"]


def test_other_pictures_say_nothing_about_the_queue(proper):
    found = health(proper, fashion.load()[2][:256], quiet=True)
    assert "stale keys" not in verdicts(found)
    assert any("stale keys were not looked at" in note for note in found.notes)
    negatives = next(finding for finding in found.findings if finding.name == "negatives")
    assert negatives.figures["own_keys"] == 0
    same_number = health(proper, np.ascontiguousarray(fashion.load()[0][3000:5048]), quiet=True, images=256)
    assert "stale keys" not in verdicts(same_number)


def test_duplicates_are_found(proper, pictures):
    double = pictures.copy()
    double[1024:1536] = double[:512]
    found = health(proper, double, quiet=True, images=256)
    duplicates = next(finding for finding in found.findings if finding.name == "duplicates")
    assert duplicates.figures["duplicates"] == pytest.approx(0.5, abs=0.001)
    assert duplicates.figures["near_duplicates"] < 0.1
    assert duplicates.verdict == "bad"


def test_near_duplicates_are_found(proper, pictures):
    alike = pictures.copy()
    alike[1024:1536] = pictures[:512] // 8 * 8 + 4  # coarser levels: equal nowhere, and the same to the eye
    found = health(proper, alike, quiet=True, images=256)
    duplicates = next(finding for finding in found.findings if finding.name == "duplicates")
    assert duplicates.figures["duplicates"] < 0.01
    assert duplicates.figures["near_duplicates"] > 0.45
    assert duplicates.verdict == "watch"
    assert "moco check" in duplicates.advice


class Small(nn.Module):
    """A backbone of a moment."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten()
        )

    def forward(self, x):
        return self.layers(x)


KINDS = {
    "simclr": {"recipe": "simclr"},
    "byol": {"recipe": "byol"},
    "swav": {"recipe": "swav", "prototypes": 32, "queue_size": 128},
    "cpc": {"recipe": "cpc", "epochs": 1},
    "in-batch": {"dictionary": "in-batch", "key_encoder": "learned", "bn_groups": 1, "shuffle_bn": False},
    "memory-bank": {"dictionary": "memory-bank", "bn_groups": 1, "shuffle_bn": False, "queue_size": 256},
}
SEEN = {"rank", "duplicates", "augmentation", "data wait"}
COMPARED = SEEN | {"spread", "alignment", "loss", "batch norm leak", "negatives", "temperature"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_and_dictionary_is_looked_at(kind, pictures, tmp_path):
    plain = {"base_width": None, "queue_size": None}
    given = plain | {"backbone": Small, "epochs": 3, "learning_rate": 0.05} | KINDS[kind]
    run = pretrain(tmp_path / "run", pictures[:512], **given)
    own = health(run, pictures[:512], quiet=True)
    others = health(run, pictures[1024:1280], quiet=True)
    wanted = (
        COMPARED
        if kind in ("in-batch", "memory-bank")
        else SEEN | (set() if kind == "cpc" else {"spread", "alignment"})
    )
    for found in (own, others):
        assert set(verdicts(found)) == wanted
        assert verdicts(found)["spread" if "spread" in wanted else "rank"] != "bad"
        for finding in found.findings:
            assert all(math.isfinite(value) for value in finding.figures.values()), finding
    if "loss" not in wanted:
        assert any("MoCo only" in note for note in own.notes)
        return
    for found in (own, others):
        figures = {finding.name: finding.figures for finding in found.findings}
        # With other pictures all keys are of strangers, and are met.
        assert 0 < figures["loss"]["loss"] < 1.05 * figures["loss"]["chance_loss"]
        assert figures["negatives"]["own_keys"] == 0
        assert figures["temperature"]["hardest"] > 0
    chance = next(finding for finding in others.findings if finding.name == "loss").figures["chance_loss"]
    assert chance == pytest.approx(math.log(64 if kind == "in-batch" else 257))
    leak = next(finding for finding in own.findings if finding.name == "batch norm leak")
    assert ("earlier steps" in leak.reason) == (kind == "memory-bank")
    assert leak.verdict != "bad"  # the keys that a query meets share its batch as much as the positive does


@pytest.mark.parametrize(
    ("subject", "count", "given", "message"),
    [
        ("resnet18", 50, {}, "resnet18 is a timm model"),
        (None, None, {}, "was trained on an array in memory; name the pictures too"),
        (None, 3, {}, "has 3 pictures: four or more are needed"),
        (None, 50, {"imagess": 3}, "unknown setting 'imagess'; did you mean images"),
    ],
)
def test_mistakes_are_one_line(proper, pictures, tmp_path, subject, count, given, message):
    with pytest.raises(UserError, match=message) as caught:
        health(subject or proper, count and pictures[:count], out=tmp_path / "out", quiet=True, **given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
