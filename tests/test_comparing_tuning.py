"""The search of settings: what it tries, that it ends what falls behind, and that it goes on."""

import json

import numpy as np
import optuna
import pytest

from moco.comparing import tuning
from moco.comparing.plan import SEARCHED
from moco.comparing.tuning import tune
from moco.errors import TrainingError, UserError
from moco.recipes import pretrain_settings
from moco.settings_file import read_yaml
from moco.train.callbacks import Progress
from moco.train.run import Run


@pytest.fixture
def data(garments, tmp_path):
    np.savez(tmp_path / "pictures.npz", x=garments[:96], y=np.arange(96) % 3)
    return tmp_path / "pictures.npz"


def test_every_range_gives_valid_settings():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(20):
        trial = study.ask()
        chosen = {name: searched.suggested(trial) for name, searched in SEARCHED.items()}
        found = pretrain_settings(**chosen)
        assert 0.8 <= found.momentum <= 0.9995
        assert 0.08 <= found.crop_scale[0] <= 0.8
        assert found.crop_scale[1] == 1.0
        assert {name: searched.setting(trial.params) for name, searched in SEARCHED.items()} == chosen


def pretend(curves):
    """Trainings that are curves of checks: those of trial i are curves[i]."""
    trained = []

    def pretrain(data=None, *, out, quiet, on_epoch, **values):
        number = int(out[-3:])
        trained.append((number, values))
        if curves[number] is None:
            raise TrainingError("the loss is no number")
        for epoch, figure in enumerate(curves[number], start=1):
            try:
                on_epoch(Progress(None, epoch, 9, epoch, 9, {"knn_accuracy": figure}))
            except StopIteration:
                trained[-1] = (number, epoch)
                return

    return pretrain, trained


def test_trials_that_fall_behind_end_and_the_best_is_written_down(data, tmp_path, monkeypatch):
    good, poor = [0.1 * epoch for epoch in range(1, 10)], [0.01 * epoch for epoch in range(1, 10)]
    curves = [good, poor, None, [0.05 + figure for figure in good], poor, poor]
    pretrain, trained = pretend(curves)
    monkeypatch.setattr(tuning, "pretrain", pretrain)
    found = tune(data, out=str(tmp_path / "search"), epochs=9, recipe="small", trials=6, quiet=True, seed=1)
    assert [trial.figure for trial in found.trials] == [pytest.approx(0.9), 0.01, None, pytest.approx(0.95), 0.01, 0.01]
    assert [trial.ended for trial in found.trials] == [9, 1, 0, 9, 1, 1]
    assert dict(trained)[1] == 1  # stopped after its first epoch
    assert found.best == found.trials[3].settings
    settings = pretrain_settings(found.file)
    assert settings.learning_rate == found.best["learning_rate"]
    assert settings.crop_scale == found.best["crop_scale"]
    # The same search again: everything is there.
    assert (
        len(tune(data, out=str(tmp_path / "search"), epochs=9, recipe="small", trials=6, quiet=True, seed=1).trials)
        == 6
    )
    assert len(trained) == 6
    with pytest.raises(UserError, match="holds something else"):
        tune(data, out=str(tmp_path / "search"), epochs=3, recipe="small", trials=6, quiet=True)


@pytest.mark.slow
def test_a_search_of_real_trainings(data, tmp_path, capsys):
    tune(
        data, over=("learning_rate",), trials=2, out=str(tmp_path / "search"), recipe="small", base_width=8, epochs=2,
        batch_size=32, precision="fp32", threads=1, tensorboard=False, queue_size=32,
    )  # fmt: skip
    assert "best: moco pretrain DATA --config" in capsys.readouterr().out
    best = read_yaml(tmp_path / "search" / "best.yaml")
    rates = [Run(tmp_path / "search" / f"trial-00{number}").settings.learning_rate for number in (0, 1)]
    assert best["learning_rate"] in rates
    assert rates[0] != rates[1]
    assert json.loads((tmp_path / "search" / "plan.json").read_text())["over"] == ["learning_rate"]


def test_mistakes(data, tmp_path):
    with pytest.raises(UserError, match="unknown setting to search 'rate'"):
        tune(data, over=("rate",), quiet=True)
    with pytest.raises(UserError, match="leave --monitor none away"):
        tune(data, monitor="none", quiet=True)
    with pytest.raises(UserError, match="name the pictures"):
        tune(np.zeros((3, 8, 8), np.uint8), quiet=True)
