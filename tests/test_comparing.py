"""Side by side: which trainings, with what, and that they go on where they were interrupted."""

import json
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from moco import cli
from moco.comparing import checks, children, job
from moco.comparing.cells import Result, Work, carry_out, finished
from moco.comparing.job import ablate, compare
from moco.comparing.plan import ABLATIONS, Cell, Row, ablated, compared
from moco.comparing.table import lines, markdown, picture, table
from moco.errors import Interrupted, UserError
from moco.evaluation import evaluate
from moco.recipes import METHODS, pretrain_settings
from moco.train.lock import RunLock
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
    assert rows[0].settings == {"method": "moco"}
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
    # As the command line gives them.
    assert [row.name for row in ablated(["queue"], [256.0, 512.0])] == ["queue 256", "queue 512"]
    assert [row.name for row in ablated(["momentum"], [0.0, 0.9])] == ["momentum 0.0", "momentum 0.9"]


def test_nothing_is_varied_twice():
    with pytest.raises(UserError, match="--over temperature head temperature: each name once"):
        ablated(["temperature", "head", "temperature"])
    with pytest.raises(UserError, match=r"--values 0\.1 0\.2 0\.1: each value once"):
        ablated(["temperature"], [0.1, 0.2, 0.1])


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


@pytest.mark.parametrize(
    ("over", "given", "why"),
    [
        ("queue", {"dictionary": "in-batch"}, r"K = 256: queue_size changes nothing here: dictionary in-batch has no"),
        ("queue", {"method": "simclr"}, r"K = 256: queue_size 256 is for method moco or swav, not for simclr"),
        ("momentum", {"dictionary": "memory-bank"}, r"m = 0: momentum changes nothing here: no key encoder follows"),
        (
            "momentum",
            {"dictionary": "in-batch", "key_encoder": "learned"},
            r"m = 0: .* nothing here: .*encoder learned",
        ),
        ("momentum", {"recipe": "simclr"}, r"m = 0: momentum 0.0 is for method moco or byol, not for simclr"),
        ("bn-shuffle", {"method": "byol"}, r"8 groups, shuffled: bn_groups changes nothing here: .* for method moco"),
        ("temperature", {"method": "byol", "values": [0.2]}, r"temperature 0.2: temperature changes nothing here"),
    ],
)
def test_what_changes_nothing_is_not_varied(over, given, why, tmp_path):
    with pytest.raises(UserError, match=why):
        ablate("no-such-pictures", over, out=str(tmp_path / "out"), quiet=True, **given)


def test_what_has_an_effect_may_be_varied():
    for over, base in (("queue", {"dictionary": "memory-bank"}), ("momentum", {"method": "byol"}), ("queue", {})):
        checks.check_varied(base, ablated([over]))
    # All rows have it, and some of them know it.
    checks.row_settings({"recipe": "simclr", "momentum": 0.9}, Row("moco", {}))
    checks.check_settings({"queue_size": 64, "momentum": 0.9}, compared(["moco", "simclr"]))


def test_a_row_that_cannot_be_trained_is_found_first(data, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_carry_out_all", None)
    given = TINY | {"out": str(tmp_path / "out"), "quiet": True}
    transformer = {"backbone": "vit_tiny_patch16_224", "recipe": "v2", "image_size": 32, "base_width": None}
    with pytest.raises(UserError, match=r"^cpc: method cpc encodes patches of 8 pixels"):
        compare(data, ["moco", "cpc"], **given | transformer)
    with pytest.raises(UserError, match=r"8 groups, shuffled: bn_groups 8 leaves fewer than 2 of 8"):
        ablate(data, "bn-shuffle", **given | {"batch_size": 8})
    for test, why in ((tmp_path / "gone", "gone"), (tmp_path / "plain.npy", r"--test .*plain.npy has no labels")):
        np.save(tmp_path / "plain.npy", np.zeros((4, 28, 28), np.uint8))
        with pytest.raises(UserError, match=why):
            compare(data, ["moco"], test=str(test), **given)
    with pytest.raises(UserError, match="--test needs pictures with labels to learn from"):
        compare(tmp_path / "plain.npy", ["moco"], test=str(data), **given)
    assert not (tmp_path / "out").exists()


def test_where_all_is_done_nothing_is_looked_at_again(data, tmp_path, monkeypatch):
    def stopped(*_):
        raise Interrupted("here", 130)

    monkeypatch.setattr(job, "_carry_out_all", stopped)
    given = TINY | {"out": str(tmp_path / "out"), "quiet": True}
    with pytest.raises(Interrupted, match="here"):
        compare(data, ["moco"], **given)
    monkeypatch.setattr(job, "check_trainings", None)
    with pytest.raises(TypeError):
        compare(data, ["moco"], **given)
    (tmp_path / "out" / "moco-seed0.json").write_text(json.dumps(result("moco", 0, 0.5).__dict__))
    with pytest.raises(Interrupted, match="here"):
        compare(data, ["moco"], **given)


def test_a_budget_is_one_and_more_than_nothing(data, tmp_path):
    given = {name: value for name, value in TINY.items() if name != "epochs"} | {"out": str(tmp_path / "out")}
    for name, value in (("minutes", 0), ("minutes", float("nan")), ("minutes", float("inf")), ("images_seen", -1)):
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} {value}: a budget is more than nothing"):
            compare(data, ["moco"], quiet=True, **given, **{name: value})
    with pytest.raises(UserError, match="--images-seen and --epochs are two budgets: choose one"):
        compare(data, ["moco"], quiet=True, images_seen=96, epochs=1, **given)
    assert not (tmp_path / "out").exists()


def test_a_budget_counts_pictures_as_often_as_they_occur(data, tmp_path, monkeypatch):
    works = []

    def stopped(work, *_):
        works.append(work)
        raise Interrupted("stopped", 130)

    monkeypatch.setattr(job, "_carry_out_all", stopped)
    monkeypatch.setattr(job, "measure", lambda *_, **__: SimpleNamespace(job=16.0))
    given = {name: value for name, value in TINY.items() if name != "epochs"}
    for number, budget in enumerate([{"images_seen": 960}, {"minutes": 1}]):
        with pytest.raises(Interrupted):
            compare(data, ["moco"], repeat=2, out=str(tmp_path / str(number)), quiet=True, **budget, **given)
    assert [work.base["epochs"] for work in works] == [5, 5]


def test_trainings_at_a_time_share_the_cores_unless_the_threads_are_given(monkeypatch):
    monkeypatch.setattr(job, "cores", lambda: 8)
    auto, own = pretrain_settings(), pretrain_settings(threads=3)
    assert [job._threads(auto, 1), job._threads(auto, 2), job._threads(auto, 16)] == [None, 4, 1]
    assert [job._threads(own, 1), job._threads(own, 2)] == [None, 3]


def test_the_page_has_the_order_of_the_table(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(job, "report", lambda runs, **_: asked.extend(runs))
    found = [result("a", 0, 0, "no luck"), result("b", 0, 0.9), result("c", 0, 0.5), result("a", 1, 0.7)]
    found += [result("b", 1, 0.8), result("c", 1, 0.4)]
    job._write(job.Comparison(tuple(lines(found)), tuple(found), tmp_path), "t", None)
    assert [run.name for run in asked] == ["a-1", "b-0", "c-0"]


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
    popen = children.subprocess.Popen

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

    monkeypatch.setattr(children.subprocess, "Popen", interrupted_once)
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
    popen = children.subprocess.Popen
    killed = [sys.executable, "-c", "import os; print('epoch 1/2', flush=True); os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(children.subprocess, "Popen", lambda command, **options: popen(killed, **options))
    found = carry_out(Work(tmp_path, TINY | {"data": str(data)}, 1, (), {}), Cell(Row("moco", {}), 4))
    assert found.failed == "killed by signal 9: out of memory?"


POPEN = subprocess.Popen
# A training that knows how to stop, and says so.
STOPPABLE = """
import os, signal, sys, time
def stop(number, frame):
    os.write(1, b"saved\\n")  # not print: the signal may come in the middle of one
    sys.exit(128 + number)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
os.write(1, b"alone\\n" if os.getsid(0) == os.getpid() else b"in the terminal's group\\n")
time.sleep(20)
"""
PARENT = """
import os, signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests run under
from moco.comparing.children import Children
from moco.errors import Interrupted
with Children() as children, open(sys.argv[1], "ab") as log:
    try:
        if sys.argv[2:]:
            print("code", *children.run([sys.executable, *sys.argv[2:]], log, os.environ, "a-seed0")[:1], flush=True)
            children.check("a-seed0")
        print("waiting", flush=True)
        time.sleep(20)
    except Interrupted as stop:
        print(stop, stop.status, flush=True)
"""


@pytest.mark.parametrize(
    ("number", "status", "code"), [(signal.SIGINT, 130, 130), (signal.SIGTERM, 143, 143), (signal.SIGHUP, 129, 143)]
)
def test_a_signal_is_passed_on_to_the_training_which_saves(tmp_path, number, status, code):
    log = tmp_path / "log"
    parent = [sys.executable, "-c", PARENT, str(log)]
    with subprocess.Popen([*parent, "-c", STOPPABLE], stdout=subprocess.PIPE, text=True) as process:
        while not (log.exists() and log.read_text()):
            assert process.poll() is None
        process.send_signal(number)
        said = process.communicate(timeout=30)[0]
    assert log.read_text() == "alone\nsaved\n"
    assert said == f"code {code}\nstopped in a-seed0; the same command goes on there {status}\n"
    with subprocess.Popen(parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"stopped in the evaluation; the same command goes on there {status}\n"


def test_signals_are_those_of_the_main_thread_and_given_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with children.Children():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

    def elsewhere():
        with children.Children():
            seen.append([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)])

    seen = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


def test_what_was_asked_to_stop_begins_nothing_more(tmp_path, monkeypatch):
    monkeypatch.setattr(children.subprocess, "Popen", None)
    asked = children.Children()
    asked.received = signal.SIGTERM
    with pytest.raises(Interrupted, match="stopped in moco-seed4") as stop:
        carry_out(Work(tmp_path, TINY, 1, (), {}), Cell(Row("moco", {}), 4), asked)
    assert stop.value.status == 143


def fake_training(monkeypatch, code, *held):
    def started(command, **options):
        for lock in held:
            lock.take()
        return POPEN([sys.executable, "-c", code], **options)

    monkeypatch.setattr(children.subprocess, "Popen", started)


@pytest.mark.parametrize("before", [True, False])
def test_a_training_that_goes_on_elsewhere_is_no_failure(tmp_path, monkeypatch, before):
    (tmp_path / "moco-seed4").mkdir()
    lock = RunLock(tmp_path / "moco-seed4")
    fake_training(monkeypatch, "raise SystemExit(2)", *[] if before else [lock])
    if before:
        lock.take()
    try:
        with pytest.raises(UserError, match=r"moco-seed4 is being trained by another process: wait for it, or stop it"):
            carry_out(Work(tmp_path, TINY, 1, (), {}), Cell(Row("moco", {}), 4))
    finally:
        lock.release()
    assert (tmp_path / "moco-seed4.log").exists() is not before
    assert not (tmp_path / "moco-seed4.json").exists()


def test_a_failure_is_told_by_what_this_attempt_wrote(tmp_path, monkeypatch):
    work, cell = Work(tmp_path, TINY, 1, (), {}), Cell(Row("moco", {}), 4)
    fake_training(monkeypatch, "print('moco: no luck'); raise SystemExit(1)")
    assert carry_out(work, cell).failed == "no luck"
    fake_training(monkeypatch, "raise SystemExit(1)")
    assert carry_out(work, cell).failed == "ended with status 1"


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
