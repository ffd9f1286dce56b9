"""Whatever happens, a run goes on as if nothing had: real processes, real kills, real signals."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from several import moco_process

import moco
from moco.data import fashion
from moco.errors import TrainingError, UserError

TINY = {
    "recipe": "small", "base_width": 8, "epochs": 2, "batch_size": 64, "queue_size": 96, "precision": "fp32",
    "monitor": "none", "tensorboard": False, "threads": 1, "log_every": 4, "save_every": "3",
}  # fmt: skip


@pytest.fixture(scope="module")
def pictures():
    return fashion.load()[0][:320]


def pretrain(pictures, folder, **given):
    return moco.pretrain(pictures, out=str(folder), quiet=True, **(TINY | given))


def assert_same(one, other):
    a, b = one.load(), other.load()
    assert a["step"] == b["step"]
    for part in ("model", "optimizer"):
        left, right = torch.utils._pytree.tree_leaves(a[part]), torch.utils._pytree.tree_leaves(b[part])
        assert len(left) == len(right)
        for x, y in zip(left, right, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
    assert figures(one) == figures(other)


def figures(run):
    """The lines of metrics.jsonl, but for what the clock says."""
    return [{k: v for k, v in line.items() if k not in ("images_per_second", "data_wait")} for line in run.metrics()]


def command(folder, data, **given):
    words = ["pretrain", str(data), "--out", str(folder)]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        words += [flag if value is True else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, str(value)]
    return words


@pytest.fixture(scope="module")
def data(pictures, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pictures.npz"
    np.savez(path, x=pictures, y=fashion.load()[1][:320])
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{}, {"symmetric": True, "accumulate": 2, "monitor": "knn", "workers": 1, "views": "image"}]
)
def test_killed_anywhere_and_resumed_a_run_ends_bit_for_bit_the_same(data, tmp_path, given):
    """The short form of benchmarks/faults/kill_and_resume.py."""
    settings = TINY | {"epochs": 8} | given
    whole = moco.pretrain(str(data), out=str(tmp_path / "whole"), quiet=True, **settings)
    dice, cut, kills = random.Random(0), tmp_path / "cut", 0
    words = command(cut, data, **settings)
    while True:
        process = moco_process(*words)
        deadline = time.monotonic() + 60
        before = lines(cut)
        while kills < 3 and process.poll() is None and lines(cut) < before + 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        if kills < 3 and process.poll() is None:
            time.sleep(dice.random() * 0.2)
            process.kill()
            kills += 1
        if process.wait() == 0:
            break
        words = ["pretrain", "--resume", str(cut)]
    assert kills == 3
    assert_same(whole, moco.Run(cut))


def lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_saves_and_ends_with_143(data, tmp_path, workers):
    """Also where it reaches the workers, as from Slurm, systemd and timeout."""
    given = {"workers": workers, "views": "image" if workers else "batch"}
    whole = moco.pretrain(str(data), out=str(tmp_path / "whole"), quiet=True, **(TINY | {"epochs": 6} | given))
    cut = tmp_path / "cut"
    process = moco_process(*command(cut, data, **(TINY | {"epochs": 6} | given)))
    while lines(cut) < 2:
        time.sleep(0.005)
        assert process.poll() is None, process.said
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert f"continue with: moco resume {cut}" in process.said
    assert_same(whole, moco.resume(cut, quiet=True, workers=workers // 2))  # another number changes nothing


def test_two_processes_on_one_run_folder(data, tmp_path):
    run = pretrain(data, tmp_path / "run", epochs=1)
    first = moco_process("pretrain", "--resume", run.path, "--epochs", 200)
    try:
        while lines(run.path) < 4:
            time.sleep(0.005)
            assert first.poll() is None, first.said
        before = run.settings
        with pytest.raises(UserError, match=f"is being trained by process {first.pid}"):
            moco.resume(run.path, epochs=300, quiet=True)
        assert run.settings == before
    finally:
        first.kill()
        first.wait()
    assert moco.resume(run.path, epochs=5, quiet=True).load()["step"] >= 5


class Poison:
    """Makes the loss of some steps, or the gradient alone, no number."""

    def __init__(self, monkeypatch, steps, only_gradient=False):
        original = moco.MomentumContrast.forward

        def forward(model, *arguments):
            output = original(model, *arguments)
            if model.step not in steps:
                return output
            loss = output.loss * float("nan")
            if only_gradient:
                loss = output.loss + (loss - loss.detach()).nan_to_num(0).clone()
                loss.register_hook(lambda gradient: gradient * float("nan"))
            return moco.StepOutput(loss, output.metrics)

        monkeypatch.setattr(moco.MomentumContrast, "forward", forward)


@pytest.mark.parametrize("only_gradient", [False, True])
def test_a_step_without_a_number_stops_with_a_report(pictures, tmp_path, monkeypatch, only_gradient):
    Poison(monkeypatch, {6}, only_gradient)
    folder = tmp_path / "run"
    with pytest.raises(TrainingError, match=r"no finite number at step 7 \(learning rate 0\.0\d+; gradient norms"):
        pretrain(pictures, folder)
    report = json.loads((folder / "not-finite-step-7.json").read_text())
    assert len(report["ids"]) == 64
    assert report["first_names"][0] == f"array[{report['ids'][0]}]"
    assert report["gradient_norms"]["backbone.conv1.weight"] == "NaN"
    run = moco.Run(folder)
    assert run.load()["step"] == 6
    monkeypatch.undo()
    assert_same(pretrain(pictures, tmp_path / "whole"), moco.resume(folder, data=pictures, quiet=True))


@pytest.mark.parametrize("only_gradient", [False, True])
def test_a_bad_step_can_be_passed_over(pictures, tmp_path, monkeypatch, only_gradient):
    seen = {}
    original = moco.MomentumContrast.begin_step

    def look(model, progress=0.0):
        seen[model.step] = [p.detach().clone() for p in model.query_encoder.parameters()]
        original(model, progress)

    monkeypatch.setattr(moco.MomentumContrast, "begin_step", look)
    Poison(monkeypatch, {6}, only_gradient)
    run = pretrain(pictures, tmp_path / "run", on_nan="skip")
    assert run.load()["step"] == 10
    assert run.load()["model"]["dictionary.births"].max() == 9
    assert not (run.load()["model"]["dictionary.births"] == 6).any()
    assert all(torch.equal(a, b) for a, b in zip(seen[6], seen[7], strict=True))
    assert not torch.equal(seen[7][0], seen[8][0])
    assert (run.path / "warnings.csv").read_text().count("no finite number at step 7") == 1


def test_ten_bad_steps_in_a_row_stop_all_the_same(pictures, tmp_path, monkeypatch):
    Poison(monkeypatch, set(range(3, 40)))
    with pytest.raises(TrainingError, match=r"step 13 .*and so were the 9 before"):
        pretrain(pictures, tmp_path / "run", on_nan="skip", epochs=8)


def test_back_to_the_last_checkpoint(pictures, tmp_path, monkeypatch):
    at = {}
    original = moco.MomentumContrast.begin_step

    def look(model, progress=0.0):
        at[model.step] = model.query_encoder.backbone.conv1.weight.detach().clone()
        original(model, progress)

    monkeypatch.setattr(moco.MomentumContrast, "begin_step", look)
    Poison(monkeypatch, {7})
    run = pretrain(pictures, tmp_path / "run", on_nan="rollback")
    assert torch.equal(at[8], at[6])  # checkpoints after steps 3, 5, 6
    assert not torch.equal(at[7], at[6])
    assert run.load()["step"] == 10
    assert "back to the weights of step 6" in (run.path / "warnings.csv").read_text()


def test_the_run_folder_goes_away(pictures, tmp_path, monkeypatch):
    original = moco.MomentumContrast.begin_step

    def remove(model, progress=0.0):
        if model.step == 6:
            shutil.rmtree(tmp_path / "run")
        original(model, progress)

    monkeypatch.setattr(moco.MomentumContrast, "begin_step", remove)
    with pytest.raises(TrainingError, match=r"the run folder .*run is gone|cannot write .*run"):
        pretrain(pictures, tmp_path / "run")


def test_memory_that_does_not_suffice_says_what_to_lower(pictures, tmp_path, monkeypatch):
    def forward(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(moco.MomentumContrast, "forward", forward)
    with pytest.raises(TrainingError, match=r"out of memory on cpu with batch_size 64.*--accumulate 2"):
        pretrain(pictures, tmp_path / "run")


def test_a_worker_that_dies_says_what_to_lower(data, tmp_path, monkeypatch):
    from moco.data.loader import ViewStream

    original = ViewStream.batch

    def die(stream, step):
        if step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(stream, step)

    monkeypatch.setattr(ViewStream, "batch", die)
    with pytest.raises(TrainingError, match=r"a data worker died .*lower --workers \(now 1\).*moco resume"):
        pretrain(data, tmp_path / "run", workers=1, views="image")


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
    """The fixture is of the version that introduced format 1: it must stay readable, or be refused in words."""
    folder = tmp_path / "run"
    shutil.copytree(Path(__file__).parent / "fixtures" / "run-format-1", folder)
    run = moco.resume(folder, data=fashion.load()[0][:64], epochs=2, quiet=True)
    assert run.load()["step"] == 8
    assert [line["step"] for line in run.metrics()] == [2, 4, 6, 8]
    assert run.backbone()(torch.zeros(1, 1, 32, 32)).shape == (1, 8)


def test_a_bad_file_is_listed_once_whatever_happens(pictures, tmp_path, monkeypatch):
    import cv2

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for number, picture in enumerate(pictures[:40]):
            (tmp_path / folder / f"{number}.png").write_bytes(cv2.imencode(".png", picture)[1].tobytes())
        (tmp_path / folder / "broken.png").write_bytes(b"not a picture")
    monkeypatch.chdir(tmp_path)
    given = TINY | {"epochs": 2, "batch_size": 16, "channels": 1, "workers": 1}
    run = moco.pretrain(["a", "b"], out="run", quiet=True, **given)
    moco.resume(run.path, epochs=4, quiet=True)
    assert sorted(name for name, _ in run.skipped()) == [str(tmp_path / folder / "broken.png") for folder in "ab"]
    with pytest.raises(UserError, match=r"2 of 82 images cannot be read, more than the 0 allowed.*skipped\.csv"):
        moco.pretrain(["a", "b"], out="strict", quiet=True, **(given | {"max_bad": 0.0}))
