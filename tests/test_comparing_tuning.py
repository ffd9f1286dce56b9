"""The search of settings: what it tries, that it ends what falls behind, and that it goes on."""

import json

import numpy as np
import optuna
import pytest

from moco import cli
from moco.comparing import tuning
from moco.comparing.plan import SEARCHED
from moco.comparing.tuning import tune
from moco.errors import Interrupted, TrainingError, UserError
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


class Killed(BaseException):
    """What nothing can be done about, as far as a process can be killed in a test."""


@pytest.mark.parametrize("stop", [Interrupted("stopped after step 7", 143), KeyboardInterrupt(), Killed()])
def test_a_trial_that_was_interrupted_goes_on_and_counts_once(data, tmp_path, monkeypatch, capfd, recwarn, stop):
    curves = [[0.1 * number + 0.01 * epoch for epoch in range(1, 10)] for number in (3, 2, 6, 5, 4, 7)]
    whole, _ = pretend(curves)

    def interrupted(*given, out, on_epoch, **values):
        def after_epoch(progress):
            on_epoch(progress)
            if progress.epoch == 3:
                raise stop

        whole(*given, out=out, on_epoch=after_epoch if out.endswith("002") else on_epoch, **values)

    given = {"epochs": 9, "recipe": "small", "trials": 6, "quiet": True, "seed": 3}
    monkeypatch.setattr(tuning, "pretrain", whole)
    expected = tune(data, out=str(tmp_path / "whole"), **given)
    monkeypatch.setattr(tuning, "pretrain", interrupted)
    told = "trial 2 of .*parts; the same command goes on" if isinstance(stop, KeyboardInterrupt) else None
    with pytest.raises((Interrupted, Killed), match=told) as raised:
        tune(data, out=str(tmp_path / "parts"), **given)
    if isinstance(stop, KeyboardInterrupt):
        assert raised.value.status == getattr(stop, "status", 130)
    monkeypatch.setattr(tuning, "pretrain", whole)
    found = tune(data, out=str(tmp_path / "parts"), **given)
    assert found.trials == expected.trials
    assert len({trial.settings["learning_rate"] for trial in found.trials}) == 6
    assert capfd.readouterr() == ("", "")  # no word of Optuna's
    assert not [told for told in recwarn if "already reported" in str(told.message)]


def test_what_is_said_of_a_search_that_is_stopped_or_fails(data, tmp_path, monkeypatch, capfd):
    def stopped(**_):
        raise Interrupted("stopped after step 7", 130)

    monkeypatch.setattr(tuning, "pretrain", stopped)
    command = ["tune", str(data), "--epochs", "3", "--trials", "3", "--out", str(tmp_path / "out")]
    assert cli.main(command) == 130
    assert capfd.readouterr() == ("", f"moco: stopped in trial 0 of {tmp_path / 'out'}; the same command goes on\n")
    pretrain, _ = pretend([[0.5, 0.6, 0.7], None, [0.1, 0.1, 0.1]])
    monkeypatch.setattr(tuning, "pretrain", pretrain)
    assert cli.main(command) == 0
    out, err = capfd.readouterr()
    said = [line.partition(" with ")[0] for line in out.splitlines() if line.startswith("trial ")]
    assert said == ["trial 0: 70.0%", "trial 1: failed (the loss is no number)", "trial 2: fell behind"]
    assert err == ""


def test_the_best_are_all_settings_of_the_search(data, tmp_path, monkeypatch):
    pretrain, trained = pretend([[0.1], [0.2]])
    monkeypatch.setattr(tuning, "pretrain", pretrain)
    (tmp_path / "given.yaml").write_text("recipe: small\nkey_view: {hue: 0.2}\n")
    found = tune(
        data, over=("crop_scale",), trials=2, epochs=1, config=tmp_path / "given.yaml", stem="small", quiet=True,
        out=str(tmp_path / "out"),
    )  # fmt: skip
    held = read_yaml(found.file)
    assert held == {
        "recipe": "small", "key_view": {"hue": 0.2}, "epochs": 1, "stem": "small",
        "crop_scale": list(found.best["crop_scale"]),
    }  # fmt: skip
    best = {name: value for name, value in trained[1][1].items() if name != "monitor_every"}
    assert pretrain_settings(found.file) == pretrain_settings(**best)


def test_only_what_the_method_knows_is_searched(data, tmp_path, monkeypatch):
    pretrain, _ = pretend([[0.1]] * 3)
    monkeypatch.setattr(tuning, "pretrain", pretrain)
    for method, dropped in (("simclr", {"momentum"}), ("byol", {"temperature"}), ("moco", set())):
        found = tune(data, trials=1, epochs=1, method=method, out=str(tmp_path / method), quiet=True)
        assert set(found.best) == set(tuning.USUAL) - dropped
    with pytest.raises(UserError, match="--over momentum changes nothing here: it is for method moco or byol"):
        tune(data, over=("learning_rate", "momentum"), method="simclr", out=str(tmp_path / "none"), quiet=True)
    with pytest.raises(UserError, match="--over momentum changes nothing here: no key encoder follows"):
        tune(data, over=("momentum",), dictionary="memory-bank", out=str(tmp_path / "none"), quiet=True)
    with pytest.raises(UserError, match="--over momentum momentum: each name once"):
        tune(data, over=("momentum", "momentum"), out=str(tmp_path / "none"), quiet=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_search_of_real_trainings(data, tmp_path, monkeypatch, capsys):
    pretrain, resume, resumed = tuning.pretrain, tuning.resume, []

    def interrupted(*, on_epoch, **given):
        def after_epoch(progress):
            on_epoch(progress)
            raise KeyboardInterrupt

        pretrain(on_epoch=after_epoch, **given)

    monkeypatch.setattr(tuning, "resume", lambda run, **given: resumed.append(run.name) or resume(run, **given))
    monkeypatch.setattr(tuning, "pretrain", interrupted)
    given = {
        "over": ("learning_rate",), "trials": 2, "out": str(tmp_path / "search"), "recipe": "small", "base_width": 8,
        "epochs": 2, "batch_size": 32, "precision": "fp32", "threads": 1, "tensorboard": False, "queue_size": 32,
    }  # fmt: skip
    with pytest.raises(Interrupted, match="stopped in trial 0"):
        tune(data, **given)
    monkeypatch.setattr(tuning, "pretrain", pretrain)
    found = tune(data, **given)
    assert resumed == ["trial-000"]
    assert found.trials[0].ended == 2
    checks = [line for line in Run(tmp_path / "search" / "trial-000").metrics() if "knn_accuracy" in line]
    assert found.trials[0].figure == max(line["knn_accuracy"] for line in checks)
    assert len(checks) == 2
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
    with pytest.raises(UserError, match="--trials 0: a search takes one trial or more"):
        tune(data, trials=0, quiet=True)
    with pytest.raises(UserError, match="name the pictures"):
        tune(np.zeros((3, 8, 8), np.uint8), quiet=True)
