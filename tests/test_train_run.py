"""The run folder."""

import json

import pytest
import torch

from moco.errors import UserError
from moco.recipes import pretrain_settings
from moco.settings import RunSettings
from moco.train.checkpoints import write_atomically
from moco.train.run import Run

CHOSEN = {"recipe": "small", "base_width": 8, "crop_scale": (0.3, 1), "key_view": {"hue": 0.0}}
FOUND = {
    "channels": 1, "mean": (0.3,), "std": (0.35,), "workers": 0, "views": "batch", "stem": "small", "queue_size": 64,
    "bn_groups": 1, "shuffle_bn": False, "precision": "bf16", "threads": 2, "monitor": "none", "device": "cpu",
    "head_width": 8, "momentum": 0.99, "warmup_epochs": 0.0,
}  # fmt: skip
SETTINGS = RunSettings(**(pretrain_settings(**CHOSEN).model_dump() | FOUND))


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "run", SETTINGS)


def test_settings_come_back_as_they_went(run):
    assert run.settings == SETTINGS


def test_damaged_settings_are_one_clear_line(run):
    (run.path / "settings.yaml").write_text("recipe: small\nbatch_size: -3\n")
    with pytest.raises(UserError, match=r"settings\.yaml: ") as caught:
        _ = run.settings
    assert "\n" not in str(caught.value)


def test_a_folder_in_use_is_refused(run, tmp_path):
    with pytest.raises(UserError, match="already holds a run"):
        Run.create(run.path, run.settings)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("dear")
    with pytest.raises(UserError, match="not an empty folder"):
        Run.create(tmp_path / "letters", run.settings)
    (tmp_path / "empty").mkdir()
    Run.create(tmp_path / "empty", run.settings)
    with pytest.raises(UserError, match="not a run folder"):
        Run(tmp_path / "letters")


def test_checkpoints_keep_the_newest_and_load_with_weights_only(run):
    for step in (1, 20, 300):
        run.save({"step": step, "model": {"a": torch.full((3,), step)}}, keep=2)
    assert [path.name for path in run.checkpoints()] == ["step-000000020.pt", "step-000000300.pt"]
    assert run.load()["step"] == 300
    assert torch.load(run.checkpoints()[0], weights_only=True)["model"]["a"].tolist() == [20, 20, 20]
    assert not list(run.path.rglob("*.partial"))


def test_a_failed_write_leaves_the_old_checkpoint(run):
    run.save({"step": 1}, keep=2)
    with pytest.raises(Exception, match="pickle"):
        run.save({"step": 2, "bad": lambda: None}, keep=2)
    assert run.load()["step"] == 1


def test_no_checkpoint_yet_is_said(run):
    with pytest.raises(UserError, match="no checkpoint yet"):
        run.load()
    with pytest.raises(UserError, match="no checkpoint yet"):
        run.backbone()


def test_metrics_survive_a_torn_last_line_and_rewind(run):
    for step in (10, 20, 30):
        run.log({"step": step, "loss": step / 10})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')
    assert [line["step"] for line in run.metrics()] == [10, 20, 30]
    run.rewind(20)
    run.log({"step": 30, "loss": 9})
    assert [line["loss"] for line in run.metrics()] == [1, 2, 9]
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) == 3


def test_skipped_pictures_are_listed_as_csv(run):
    run.skip('a "b", c.jpg', "truncated")
    run.skip("d.jpg", "empty")
    assert (run.path / "skipped.csv").read_text() == 'name,reason\n"a ""b"", c.jpg","truncated"\n"d.jpg","empty"\n'


def test_write_atomically_replaces_the_whole_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("x" * 1000)
    write_atomically(path, json.dumps([1]).encode())
    assert path.read_text() == "[1]"
    assert list(tmp_path.iterdir()) == [path]


class Trap:
    """A pickle that would run code when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_checkpoint_cannot_run_code(run, tmp_path):
    run.save({"step": 1, "trap": Trap(tmp_path / "sprung")}, keep=2)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(UserError, match="can be read"):
        run.load()
    assert not (tmp_path / "sprung").exists()
