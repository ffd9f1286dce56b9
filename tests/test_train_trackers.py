"""Curves for Weights & Biases and MLflow, by their own clients where they are installed, without a network."""

import json
import sys
from importlib.machinery import ModuleSpec

import pytest
from torch import nn

import moco
from moco.data import fashion
from moco.errors import UserError
from moco.settings import PretrainSettings
from moco.train import trackers
from moco.train.trackers import TrackerWriter, wanted

TINY = {
    "recipe": "small", "batch_size": 64, "queue_size": 96, "precision": "fp32", "image_size": 8, "monitor": "none",
    "tensorboard": False, "threads": 1, "log_every": 1, "quiet": True,
}  # fmt: skip


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())


@pytest.fixture
def twice(tmp_path, monkeypatch):
    """Trains an epoch, then resumes for a second one; settings as given."""
    monkeypatch.setattr("moco.pretraining.draw_curves", lambda run: "")
    x = fashion.load()[0][:128]

    def train(**given):
        run = moco.pretrain(x, out=str(tmp_path / "first"), backbone=network, epochs=1, **TINY, **given)
        return moco.resume(run.path, data=x, backbone=network, epochs=2, quiet=True)

    return train


def identities(run):
    return json.loads((run.path / "trackers.json").read_text())


def test_mlflow_has_the_curves_of_both_halves_in_one_run(twice, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow.tracking import MlflowClient

    run = twice(mlflow="clothes")
    client = MlflowClient((run.path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("clothes")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_id, found.info.run_name, found.info.status) == (
        identities(run)["mlflow"],
        "first",
        "FINISHED",
    )
    assert found.data.params["batch_size"] == "64"
    kept = {point.step: point.value for point in client.get_metric_history(found.info.run_id, "loss")}
    assert kept == {line["step"]: line["loss"] for line in run.metrics()}
    assert list(kept) == [1, 2, 3, 4]


def test_wandb_stays_offline_and_goes_on_with_the_same_run(twice, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = twice(wandb="clothes")
    kept = sorted((run.path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [path.stem for path in kept] == [f"run-{identities(run)['wandb']}"] * 2
    text = b"".join(path.read_bytes() for path in kept)
    assert b"clothes" in text
    for line in run.metrics():
        assert repr(line["loss"]).encode()[:12] in text


class Client:
    """A tracker that writes down what it gets, and fails from a step on."""

    identity = "7"

    def __init__(self, fails=99):
        self.fails, self.got = fails, []

    def log(self, step, values):
        if step >= self.fails:
            raise ConnectionError("no\nnetwork")
        self.got.append((step, values))

    def close(self, finished):
        self.got.append(finished)


def test_figures_of_a_step_go_together_and_a_broken_tracker_is_let_go_of():
    client, said = Client(fails=3), []
    writer = TrackerWriter("wandb", client, said.append)
    for step in (1, 2, 3, 4):
        writer.add_scalar("loss", step / 2, step)
        writer.add_scalar("rate", step / 4, step)
        writer.flush()
    writer.close(True)
    assert client.got == [(1, {"loss": 0.5, "rate": 0.25}), (2, {"loss": 1.0, "rate": 0.5})]
    assert said == ["warning: wandb gave up (ConnectionError: no network): the training goes on without it"]


def test_the_end_of_the_run_is_told_and_a_project_that_cannot_be_opened_is_one_line(twice, monkeypatch):
    clients = []
    monkeypatch.setattr(trackers, "find_spec", lambda name: sys.modules["json"].__spec__)
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda *given: clients.append(Client()) or clients[-1])
    run = twice(wandb="clothes")
    assert [client.got[-1] for client in clients] == [True, True]

    def refuse(*given):
        raise RuntimeError("not\nlogged in")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", refuse)
    with pytest.raises(UserError, match="--wandb clothes: RuntimeError: not logged in; go on without it: moco resume"):
        moco.resume(run.path, data=fashion.load()[0][:128], backbone=network, epochs=3, quiet=True)


def test_a_missing_package_is_said_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # as its runs lie about; it is no package
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for name, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny")):
        with pytest.raises(UserError, match=rf"--{name} needs the package {package}: pip install"):
            moco.pretrain(fashion.load()[0][:128], out="run", **{name: "x"}, **TINY)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(trackers, "find_spec", lambda name: ModuleSpec(name, None))
    with pytest.raises(UserError, match="needs the package"):
        wanted(PretrainSettings(wandb="x"))
    assert wanted(PretrainSettings()) == {}
