"""`moco runs` and `moco clean`: what a folder of runs is said to be, and what may never be removed from one."""

import json
import multiprocessing
import os
import re
import subprocess
import sys

import pytest
import torch

import moco
from moco.cli import main
from moco.data import fashion
from moco.errors import UserError
from moco.run_folders import age, clean, size
from moco.train.checkpoints import digest
from moco.train.lock import RunLock, is_held

TINY = {
    "recipe": "small", "base_width": 8, "epochs": 2, "batch_size": 64, "queue_size": 96, "precision": "fp32",
    "image_size": 8, "monitor": "knn", "tensorboard": False, "threads": 1, "log_every": 1, "keep_checkpoints": 9,
}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr("moco.pretraining.draw_curves", lambda run: "")
    x, y, *_ = fashion.load()
    return moco.pretrain(x[:128], labels=y[:128], out=str(tmp_path / "runs" / "first"), quiet=True, **TINY)


def checkpoints(run):
    return sorted(path.name for path in (run.path / "checkpoints").iterdir() if path.suffix != ".sha256")


def test_a_finished_run_and_one_that_stopped(run, tmp_path):
    (found,) = moco.runs(tmp_path)
    assert (found.path, found.state, found.epoch, found.epochs) == (run.path, "finished", 2, 2)
    assert (found.recipe, found.method, found.backbone, found.checkpoints) == ("small", "moco", "resnet18", 2)
    lines = run.metrics()
    assert found.loss == [line["loss"] for line in lines if "loss" in line][-1]
    assert found.knn_accuracy == max(line["knn_accuracy"] for line in lines if "knn_accuracy" in line)
    assert found.retrieval is None
    assert 0 <= found.age < 60

    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if line["epoch"] <= 1.5))
    (found,) = moco.runs(run.path)
    assert (found.state, found.epoch) == ("stopped", 1.5)
    (run.path / "not-finite-step-4.json").write_text("{}")
    assert moco.runs(run.path)[0].state == "failed"
    (run.path / "not-finite-step-4.json").rename(run.path / "not-finite-step-3.json")  # it got past that one
    assert moco.runs(run.path)[0].state == "stopped"
    (run.path / "settings.yaml").write_text("epochs: many\n")
    (found,) = moco.runs(run.path)
    assert found.state == "damaged"
    assert "settings.yaml" in found.note


def test_disk_use_is_that_of_du(run):
    os.link(run.path / "metrics.jsonl", run.path / "a second name")
    used = int(subprocess.run(["du", "-sb", run.path], capture_output=True, text=True, check=True).stdout.split()[0])
    folders = sum(path.stat().st_size for path in [run.path, *run.path.rglob("*")] if path.is_dir())
    assert moco.runs(run.path)[0].bytes == used - folders


def test_runs_are_found_up_to_three_levels_deep_and_not_inside_runs(run, tmp_path):
    for place in ("b/c/deep", "b/c/d/too-deep", "first/inside", ".hidden", "none"):
        (tmp_path / "runs" / place).mkdir(parents=True)
        if place != "none":
            (tmp_path / "runs" / place / "settings.yaml").write_bytes((run.path / "settings.yaml").read_bytes())
    (tmp_path / "runs" / "again").symlink_to(run.path)
    assert [str(one.path.relative_to(tmp_path / "runs")) for one in moco.runs(tmp_path / "runs")] == [
        "b/c/deep",
        "first",
    ]
    with pytest.raises(UserError, match="no such folder"):
        moco.runs(tmp_path / "elsewhere")


def test_a_run_is_running_while_its_lock_is_held_here_or_elsewhere(run):
    lock = RunLock(run.path)
    lock.take()
    assert moco.runs(run.path)[0].state == "running"
    # Looking must not let go of it: a process that reads and closes its own lock file would.
    with pytest.raises(UserError, match="by this process"):
        RunLock(run.path).take()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(is_held, (run.path,))
    lock.release()
    assert not is_held(run.path)
    holding = "import sys; from moco.train.lock import *; from pathlib import Path; lock = RunLock(Path(sys.argv[1]))"
    script = f"{holding}; lock.take(); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script, run.path], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "held\n"
        assert moco.runs(run.path)[0].state == "running"
        before = checkpoints(run)
        with pytest.raises(UserError, match="is being trained"):
            clean([run.path])
        (passed,) = clean([run.path], skip_held=True)
        assert (passed.removed, checkpoints(run)) == ((), before)
        other.kill()
    assert not is_held(run.path)


def test_clean_keeps_the_newest_that_is_whole_and_the_best(run):
    first, second = run.checkpoints()
    (run.path / "features").mkdir()
    (run.path / "features" / "a.pt").write_bytes(b"1" * 1000)
    (run.path / "checkpoints" / "step-000000009.partial").write_bytes(b"2" * 500)
    before = {path: digest(path) for path in run.path.rglob("*") if path.is_file()}
    (planned,) = clean([run.path], dry_run=True)
    assert {path: digest(path) for path in run.path.rglob("*") if path.is_file()} == before
    assert planned.bytes >= 1500
    size_before = moco.runs(run.path)[0].bytes
    (done,) = clean([run.path])
    assert done == planned
    assert set(done.removed) == {
        f"checkpoints/{first.name}", f"checkpoints/{first.name}.sha256", "checkpoints/step-000000009.partial",
        "features",
    }  # fmt: skip
    assert size_before - moco.runs(run.path)[0].bytes == pytest.approx(done.bytes, abs=200)  # the lock file
    assert checkpoints(run) == ["best.pt", second.name]
    assert run.load()["step"] == 4
    assert torch.load(run.path / "checkpoints" / "best.pt", weights_only=True)["best"]


def test_clean_never_trusts_a_damaged_checkpoint(run):
    first, second = run.checkpoints()
    second.write_bytes(second.read_bytes()[:-100])
    (found,) = clean([run.path])
    assert found.removed == ()
    assert "damaged" in found.note
    assert run.checkpoints() == [first, second]
    with pytest.warns(UserWarning, match="damaged"):
        assert run.load()["step"] == 2


def test_keep_and_what_is_refused(run, tmp_path):
    assert clean([run.path], keep=2)[0].removed == ()
    with pytest.raises(UserError, match="keep 0"):
        clean([run.path], keep=0)
    before = checkpoints(run)
    with pytest.raises(UserError, match="not a run folder"):
        clean([run.path, tmp_path])
    assert checkpoints(run) == before


def test_the_command_line(run, tmp_path, capsys):
    folder = str(tmp_path / "runs")
    assert main(["runs", folder]) == 0
    out = capsys.readouterr().out
    assert re.search(r"first +small resnet18 +finished +\d\.\d{3} +kNN \d", out)
    assert max(map(len, out.splitlines())) <= 80
    assert main(["runs", folder, "--json", "-"]) == 0
    (read,) = json.loads(capsys.readouterr().out)
    assert (read["path"], read["state"]) == (str(run.path), "finished")
    assert main(["clean", "--all", folder, "--dry-run"]) == 0
    assert "nothing is removed yet" in capsys.readouterr().out
    assert len(run.checkpoints()) == 2
    assert main(["clean", str(run.path)]) == 0
    assert "freed" in capsys.readouterr().out
    assert len(run.checkpoints()) == 1
    for wrong in (["clean"], ["clean", str(run.path), "--all", folder]):
        assert main(wrong) == 2
        assert "moco clean RUN" in capsys.readouterr().err


def test_words_for_sizes_and_ages():
    assert [size(n) for n in (0, 999, 1500, 123_456, 2.5e9, 1e15)] == [
        "0 B", "999 B", "1.5 kB", "123 kB", "2.5 GB", "1000.0 TB",
    ]  # fmt: skip
    assert [age(s) for s in (3, 120, 7300, 2e5)] == ["3 s", "2 min", "2 h", "2 d"]
