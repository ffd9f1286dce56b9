"""Functions of the user in the loop: what they are told, and how a training ends that they end."""

import dataclasses
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import moco
from moco.data import fashion
from moco.errors import Interrupted
from moco.train import loop
from moco.train.callbacks import Callbacks

TINY = {
    "recipe": "small", "epochs": 2, "batch_size": 64, "queue_size": 96, "precision": "fp32", "image_size": 8,
    "monitor": "knn", "tensorboard": False, "threads": 1, "log_every": 2,
}  # fmt: skip


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())


@pytest.fixture
def pretrain(tmp_path, monkeypatch):
    monkeypatch.setattr("moco.pretraining.draw_curves", lambda run: "")
    x, y, *_ = fashion.load()

    def train(name="run", **given):
        return moco.pretrain(
            x[:320], labels=y[:320], out=str(tmp_path / name), backbone=network, quiet=True, **(TINY | given)
        )

    return train


def test_what_they_are_told(pretrain):
    steps, epochs = [], []
    run = pretrain(on_step=steps.append, on_epoch=epochs.append)
    assert [(seen.step, seen.epoch) for seen in steps] == [(step, step / 5) for step in range(1, 11)]
    assert [(seen.step, seen.epoch) for seen in epochs] == [(5, 1.0), (10, 2.0)]
    assert {(seen.steps, seen.epochs, seen.run.path) for seen in steps + epochs} == {(10, 2, run.path)}
    lines = run.metrics()
    assert [dict(seen.metrics) for seen in steps if seen.metrics] == [line for line in lines if "loss" in line]
    assert [seen.metrics["knn_accuracy"] for seen in epochs] == [
        line["knn_accuracy"] for line in lines if "knn_accuracy" in line
    ]
    with pytest.raises(TypeError):
        epochs[0].metrics["loss"] = 0.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        epochs[0].step = 7


def stop_at(step, error):
    def call(progress):
        if progress.step == step:
            raise error

    return call


def test_stop_iteration_ends_well_and_a_resume_comes_to_the_same_end(pretrain):
    run = pretrain(on_step=stop_at(3, StopIteration))
    assert run.load()["step"] == 3
    assert moco.runs(run.path)[0].state == "stopped"
    x, y, *_ = fashion.load()
    moco.resume(run.path, data=x[:320], labels=y[:320], backbone=network, quiet=True)
    whole = pretrain("whole").load()["model"]
    resumed = run.load()["model"]
    assert all(torch.equal(resumed[k], v) for k, v in whole.items() if isinstance(v, torch.Tensor))


def test_another_error_comes_out_once_everything_is_saved(pretrain, tmp_path):
    with pytest.raises(ZeroDivisionError):
        pretrain(on_epoch=stop_at(5, ZeroDivisionError()))
    assert moco.Run(tmp_path / "run").load()["step"] == 5
    # At the last step there is nothing to stop; the error is not lost.
    with pytest.raises(ZeroDivisionError):
        pretrain("second", on_step=stop_at(10, ZeroDivisionError()))
    assert moco.Run(tmp_path / "second").load()["step"] == 10


def test_the_first_error_counts_and_nothing_returned_matters():
    first, callbacks = KeyError("first"), Callbacks(lambda _: False)
    callbacks.step(None)
    assert not callbacks.stopping
    callbacks = Callbacks(stop_at(1, first), stop_at(1, StopIteration()))
    progress = moco.Progress(None, 1, 2, 0.5, 1, {})
    callbacks.step(progress)
    callbacks.epoch(progress)
    with pytest.raises(KeyError, match="first"):
        callbacks.leave()


def test_processes_agree_and_a_signal_counts_more(pretrain, monkeypatch):
    class Others:
        world, device = 8, torch.device("cpu")

    class Job:
        processes, callbacks = Others, Callbacks()
        settings = moco.PretrainSettings(log_every=2)

    for answers, expected in (([0, 0], loop.GO_ON), ([0, 1], loop.ASKED), ([2, 1], loop.SIGNALLED)):
        monkeypatch.setattr(loop, "gather_rows", lambda own, answers=answers: torch.tensor(answers))
        assert loop._stopping(Job, None, 2) == expected
        assert loop._stopping(Job, None, 3) == loop.GO_ON
    Job.steps, Job.run = 9, SimpleNamespace(path="runs/x")
    with pytest.raises(Interrupted, match="after step 2 of 9; continue with: moco resume runs/x") as stopped:
        loop._leave(Job, loop.SIGNALLED, 2, signal.SIGTERM)
    assert stopped.value.status == 143
