"""Side by side: which trainings, with what, and that they go on where they were interrupted."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from moco import cli
from moco.comparing import cells, job
from moco.comparing.cells import Result, Work, carry_out, finished
from moco.comparing.job import ablate, compare
from moco.comparing.plan import ABLATIONS, Cell, Row, ablated, compared
from moco.comparing.table import lines, markdown, picture, table
from moco.errors import Interrupted, UserError
from moco.evaluation import evaluate
from moco.recipes import METHODS, pretrain_settings
from moco.train.run import Run

TINY = {
    "recipe": "small", "base_width": 8, "epochs": 1, "batch_size": 32, "precision": "fp32", "threads": 1,
    "tensorboard": False, "monitor": "none", "queue_size": 64,
}  # fmt: skip


@pytest.fixture
def data(garments, tmp_path):
    labels = np.arange(96) % 3
    np.savez(tmp_path / "pictures.npz", x=garments[:96], y=labels)
    return tmp_path / "pictures.npz"


def test_a_method_brings_what_makes_it_and_nothing_else():
    rows = compared(["moco", "simclr", "end-to-end"])
    assert [row.name for row in rows] == ["moco", "simclr", "end-to-end"]
    assert rows[0].settings == {}
    assert rows[1].settings["method"] == "simclr"
    for values in METHODS.values():
        assert not {"learning_rate", "epochs", "batch_size", "crop_scale", "backbone", "optimizer"} & set(values)
    with pytest.raises(UserError, match="unknown method 'simclrr'; did you mean simclr"):
        compared(["simclrr"])
    with pytest.raises(UserError, match="each method once"):
        compared(["moco", "moco"])


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_is_a_set_of_valid_settings(name):
    found = [pretrain_settings(recipe="small", **row.settings) for row in ablated([name])]
    assert len({json.dumps(one.model_dump(mode="json")) for one in found}) == len(found) >= 2


def test_the_values_of_an_ablation_may_be_others():
    assert [row.settings for row in ablated(["queue"], [8, 16])] == [{"queue_size": 8}, {"queue_size": 16}]
    with pytest.raises(UserError, match="--values goes with one of --over momentum, queue, temperature"):
        ablated(["head"], [1])


def test_cells_have_folders_of_their_own():
    names = [Cell(row, seed).folder for name in ABLATIONS for row in ABLATIONS[name] for seed in (0, 1)]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() and "/" not in name and " " not in name for name in names)


def result(row, seed, knn, failed=""):
    return Result(row, seed, f"{row}-{seed}", {"knn": knn} if not failed else {}, 100.0, 60.0, 2**30, failed)


def test_the_table_has_means_and_spreads_and_marks_the_best():
    found = [result("a", 0, 0.5), result("b", 0, 0.9), result("a", 1, 0.7), result("b", 1, 0, "no | luck")]
    rows = lines([*found, result("c", 0, 0, "neither")])
    assert rows[0].figures["knn"] == (pytest.approx(0.6), pytest.approx(0.1414, abs=1e-3))
    assert rows[1].figures["knn"] == (0.9, 0.0)
    assert rows[1].failed == ("seed 1: no | luck",)
    text = markdown(rows)
    assert "| a | 60.0 ± 14.1 | 100 | 1.0 | 1.00 |" in text
    assert "| b | 90.0 | 100 | 1.0 | 1.00 |" in text
    assert "| c | failed | – | – | – |" in text
    assert text.endswith("\nFailed:\n\n- b, seed 1: no | luck\n- c, seed 0: neither\n")
    assert table("t", rows).row_count == 3
    assert picture("t", rows).startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_comparison_from_the_command_line(data, tmp_path, capsys):
    flags = [
        word for name, value in TINY.items() if name != "tensorboard" for word in (f"--{name.replace('_', '-')}", value)
    ]
    command = ["compare", str(data), *map(str, flags), "--no-tensorboard", "--methods", "moco,simclr", "--out"]
    assert cli.main([*command, str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "2/2 simclr-seed0: knn" in shown
    for name in ("moco-seed0", "simclr-seed0"):
        run = Run(tmp_path / "out" / name)
        assert finished(run.path)
        assert run.settings.seed == 0
        assert run.settings.base_width == 8
    assert Run(tmp_path / "out" / "simclr-seed0").settings.method == "simclr"
    for file in ("table.md", "table.png", "comparison.html", "results.json"):
        assert (tmp_path / "out" / file).stat().st_size > 0
    held = json.loads((tmp_path / "out" / "results.json").read_text())
    assert all(0 < one["figures"]["linear"] <= 1 and one["peak_bytes"] > 2**26 and one["seconds"] > 0 for one in held)
    beside = evaluate("knn", tmp_path / "out" / "moco-seed0", k=20, quiet=True).rows["untrained"]["kNN accuracy"]
    assert f"\n| untrained | {beside * 100:.1f} | " in (tmp_path / "out" / "table.md").read_text()
    assert len(held) == 2  # trainings
    # Once more: nothing is trained again, and another plan does not mix with this one.
    before = (tmp_path / "out" / "moco-seed0" / "metrics.jsonl").stat().st_mtime_ns
    assert cli.main([*command, str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "moco-seed0" / "metrics.jsonl").stat().st_mtime_ns == before
    shown = capsys.readouterr().out
    assert "2 of them are from an earlier call and are not repeated: moco-seed0, simclr-seed0" in shown
    assert cli.main([*command, str(tmp_path / "out"), "--test", str(data)]) == 2
    assert "holds something else (its test differ)" in capsys.readouterr().err
    assert cli.main([*command, str(tmp_path / "out"), "--seed", "3"]) == 2
    assert "holds something else (its base differ)" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_training_is_resumed_and_a_failed_one_is_told(data, tmp_path, monkeypatch):
    work = Work(tmp_path, TINY | {"data": str(data), "epochs": 2, "save_every": "1"}, 1, (), {})
    cell = Cell(Row("moco", {}), 4)
    started = []
    popen = cells.subprocess.Popen

    def interrupted_once(command, **options):
        started.append(command[3])
        if len(started) == 1:
            # The loop hears the signal at its first step, since it is sent at once to a process that has begun it.
            code = (
                "import os, signal, sys; from moco import cli; from moco.contrast.moco import MomentumContrast as M\n"
                "end = M.end_step\n"
                "def stop(self):\n    end(self)\n    os.kill(os.getpid(), signal.SIGINT)\n"
                "M.end_step = stop; sys.exit(cli.main(sys.argv[1:]))"
            )
            command = [command[0], "-c", code, *command[3:]]
        return popen(command, **options)

    monkeypatch.setattr(cells.subprocess, "Popen", interrupted_once)
    with pytest.raises(Interrupted, match="stopped in moco-seed4"):
        carry_out(work, cell)
    assert not finished(tmp_path / cell.folder)
    found = carry_out(work, cell)
    assert started == ["pretrain", "resume"]
    assert finished(tmp_path / cell.folder)
    assert not found.failed
    assert found.seconds > 0
    bad = carry_out(work, Cell(Row("bad", {"queue_size": 0}), 0))
    assert "queue_size = 0" in bad.failed
    assert "queue_size" in yaml.safe_load((tmp_path / "bad-seed0.yaml").read_text())


def test_a_training_that_the_system_killed_is_told_as_such(data, tmp_path, monkeypatch):
    popen = cells.subprocess.Popen
    killed = [sys.executable, "-c", "import os; print('epoch 1/2', flush=True); os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(cells.subprocess, "Popen", lambda command, **options: popen(killed, **options))
    found = carry_out(Work(tmp_path, TINY | {"data": str(data)}, 1, (), {}), Cell(Row("moco", {}), 4))
    assert found.failed == "killed by signal 9: out of memory?"


def test_a_budget_in_minutes_is_measured_once(data, tmp_path, monkeypatch):
    speeds, epochs = iter([16.0, 160.0, 160.0]), []

    def stopped(work, *_):
        epochs.append(work.base["epochs"])
        raise Interrupted("stopped", 130)

    monkeypatch.setattr(job, "measure", lambda *_, **__: SimpleNamespace(job=next(speeds)))
    monkeypatch.setattr(job, "_carry_out_all", stopped)
    given = {name: value for name, value in TINY.items() if name != "epochs"}
    for minutes in (1, 1, 0.5):
        with pytest.raises(UserError if minutes < 1 else Interrupted, match=r"minutes differ|stopped"):
            compare(data, ["moco"], minutes=minutes, out=str(tmp_path / "out"), quiet=True, **given)
    assert epochs == [10, 10]


def test_mistakes_are_found_before_hours_are_spent(data, tmp_path):
    with pytest.raises(UserError, match="unknown setting 'epoch'"):
        compare(data, ["moco"], epoch=3, out=str(tmp_path / "out"), quiet=True)
    with pytest.raises(UserError, match=r"K = 256: .*batch_size"):
        ablate(data, "queue", batch_size=0, out=str(tmp_path / "out"), quiet=True)
    with pytest.raises(UserError, match="two budgets"):
        compare(data, ["moco"], minutes=1, images_seen=5, out=str(tmp_path / "out"), quiet=True)
    with pytest.raises(UserError, match="name the pictures"):
        compare(np.zeros((9, 8, 8), np.uint8), ["moco"], out=str(tmp_path / "out"), quiet=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="not an empty folder"):
        compare(data, ["moco"], out=str(tmp_path / "full"), quiet=True, **TINY)
    assert not (tmp_path / "out").exists()
