"""Several processes with gloo on the CPU: the same training as one process, equal queues, shuffled keys."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from several import Started, in_processes, moco_process

import moco
from moco.data import fashion

SCRIPT = """
import os, torch, moco
from moco.contrast.moco import MomentumContrast
from moco.data import fashion

models = []
end_step = MomentumContrast.end_step
def remember(self):
    models[:] = [self]
    end_step(self)
MomentumContrast.end_step = remember

out, options = eval(os.environ["RUNS"])[group]
moco.pretrain(fashion.load()[0][:128], out=out, quiet=True, **options)
torch.save(models[0].dictionary.state_dict(), f"{out}-queue-{rank}.pt")
"""

OPTIONS = {
    "recipe": "small", "epochs": 2, "batch_size": 32, "queue_size": 80, "precision": "fp32", "monitor": "retrieval",
    "tensorboard": False, "log_every": 1, "device": "cpu", "threads": 1,
}  # fmt: skip
NO_BATCHNORM = OPTIONS | {"backbone": "vit_tiny_patch16_224", "image_size": 32}


def trained(folder: Path, **runs: tuple[dict, int]) -> list[moco.Run]:
    """Runs by name, each of some options in so many processes."""
    given = [(str(folder / name), options) for name, (options, _) in runs.items()]
    in_processes(SCRIPT, [processes for _, processes in runs.values()], RUNS=repr(given))
    return [moco.Run(out) for out, _ in given]


@pytest.mark.dist
def test_two_processes_agree_with_one_of_the_same_global_batch(tmp_path):
    one, two = trained(tmp_path, one=(NO_BATCHNORM, 1), two=(NO_BATCHNORM, 2))
    expected, found = one.load()["model"], two.load()["model"]
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.allclose(found[name].float(), value.float(), atol=2e-4), name
    for a, b in zip(one.metrics(), two.metrics(), strict=True):
        for name in {"loss", "contrast_accuracy", "positive_similarity", "retrieval"} & set(a):
            assert a[name] == pytest.approx(b[name], abs=2e-3), (name, a["step"])
    queues = [torch.load(tmp_path / f"two-queue-{rank}.pt") for rank in (0, 1)]
    for name, value in queues[0].items():
        assert torch.equal(value, queues[1][name]), name
    assert torch.equal(queues[0]["ids"], expected["dictionary.ids"])


@pytest.mark.dist
def test_batch_norm_shuffles_across_processes_and_queues_stay_equal(tmp_path):
    given = OPTIONS | {"base_width": 8, "symmetric": True, "accumulate": 2}
    run, plain = trained(tmp_path, run=(given, 2), plain=(given | {"shuffle_bn": False}, 2))
    assert run.settings.shuffle_bn is True
    assert run.settings.bn_groups == 1
    queues = [torch.load(tmp_path / f"run-queue-{rank}.pt") for rank in (0, 1)]
    for name, value in queues[0].items():
        assert torch.equal(value, queues[1][name]), name
    assert (queues[0]["births"] >= 0).all()
    assert plain.metrics()[0]["loss"] != run.metrics()[0]["loss"]


DIFFERENT = """
from types import SimpleNamespace
from moco.contrast.dictionary import Queue
from moco.errors import TrainingError
from moco.train.faults import check_same_queue
from moco.train.parallel import processes

queue = Queue(8, 4)
with processes("cpu") as own:
    model, run = SimpleNamespace(remembered=lambda: list(queue.buffers())), SimpleNamespace(path="runs/x")
    job = SimpleNamespace(model=model, processes=own, run=run)
    check_same_queue(job)
    if rank == 1:
        queue.keys[[0, 1]] = queue.keys[[1, 0]]
    try:
        check_same_queue(job)
    except TrainingError as error:
        print(error)
"""


@pytest.mark.dist
def test_queues_that_hold_the_same_keys_in_another_order_are_noticed():
    assert in_processes(DIFFERENT, [2]).count("the queues of the processes differ") == 2


@pytest.mark.dist
def test_torchrun_on_the_command_line(tmp_path):
    np.savez(tmp_path / "x.npz", x=fashion.load()[0][:64])
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "moco", "pretrain",
        "x.npz", "--recipe", "small", "--base-width", "8", "--batch-size", "32", "--epochs", "1", "--device", "cpu",
        "--out", "run",
    ]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("epoch 1/1") == 1
    assert moco.Run(tmp_path / "run").load()["step"] == 2


TORCHRUN = "from torch.distributed.run import main; main(words)"
MOCO = """
import os
from moco.cli import main
raise SystemExit(main(eval(os.environ["WORDS"])))
"""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_killed_process_brings_the_group_back_from_the_last_checkpoint(tmp_path, processes):
    np.savez(tmp_path / "x.npz", x=fashion.load()[0][:128])
    words = [
        "pretrain", str(tmp_path / "x.npz"), "--recipe", "small", "--base-width", "8",
        "--batch-size", "32", "--epochs", "6", "--device", "cpu", "--threads", "1", "--precision", "fp32",
        "--no-tensorboard", "--log-every", "2", "--save-every", "3", "--monitor", "none",
    ]  # fmt: skip
    cut = tmp_path / "cut"
    torchrun = ["--standalone", f"--nproc-per-node={processes}", "--max-restarts=3", "-m", "--", "moco"]
    group = Started(TORCHRUN, {"words": [*torchrun, *words, "--out", str(cut)]})
    while not (cut / "metrics.jsonl").exists() or len(moco.Run(cut).metrics()) < 4:
        time.sleep(0.01)
        assert group.poll() is None, group.said[-3000:]
    victim = max(children(group.pid))
    os.kill(victim, signal.SIGKILL)
    assert group.wait() == 0, group.said[-3000:]
    in_processes(MOCO, [processes], WORDS=[*words, "--out", str(tmp_path / "whole")])
    a, b = moco.Run(tmp_path / "whole"), moco.Run(cut)
    assert [line["step"] for line in a.metrics()] == [line["step"] for line in b.metrics()]
    expected, found = a.load()["model"], b.load()["model"]
    for name in ("ids", "births", "pointer"):
        assert torch.equal(expected[f"dictionary.{name}"], found[f"dictionary.{name}"])
    # Gloo adds the gradients of two processes in one order only; of more, in any, and training magnifies the rounding.
    # Batch norm's running statistics are each process's own, and only those of the first are kept.
    for name, value in expected.items():
        if isinstance(value, torch.Tensor) and processes == 2 and "running" not in name:
            assert torch.allclose(value, found[name], atol=1e-4), name
    assert a.metrics()[-1]["loss"] == pytest.approx(b.metrics()[-1]["loss"], rel=0.1)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.dist
def test_nproc_starts_the_same_stops_in_order_goes_on_and_a_mistake_stays_one_line(tmp_path):
    np.savez(tmp_path / "x.npz", x=fashion.load()[0][:64])
    run, several = tmp_path / "run", ["--nproc", "2", "--device", "cpu", "--threads", "1"]
    words = [
        "pretrain", tmp_path / "x.npz", *several, "--recipe", "small", "--base-width", "8", "--batch-size", "32",
        "--epochs", "20", "--monitor", "none", "--log-every", "2", "--save-every", "none", "--out", run,
    ]  # fmt: skip
    first = moco_process(*words)
    while not (run / "metrics.jsonl").exists() or not moco.Run(run).metrics():
        time.sleep(0.01)
        assert first.poll() is None, first.said[-3000:]
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait() == 143, first.said[-3000:]
    assert first.said.count(f"continue with: moco resume {run}") == 1
    assert "Traceback" not in first.said
    assert 2 <= moco.Run(run).load()["step"] < 40
    second = moco_process("resume", run, *several)
    assert second.wait() == 0, second.said[-3000:]
    assert moco.Run(run).load()["step"] == 40
    assert [line["step"] for line in moco.Run(run).metrics()] == list(range(2, 41, 2))
    again = moco_process(*words)
    assert again.wait() == 2
    assert again.said.count(f"moco: {run} already holds a run") == 1
    assert "Traceback" not in again.said


SHARED_CHECK = """
import json, torch
from moco.contrast.method import Method
from moco.data import fashion
from moco.data.sources import ArraySource
from moco.evaluate import monitor
from moco.recipes import pretrain_settings
from moco.resolve import resolve
from moco.train.parallel import processes
from moco.train.run import backbone_of

class Untrained(Method):
    def forward(self, view_a, view_b, ids=None):
        raise AssertionError("a check must not take a training step")

def check(own, kind, count, chunk):
    monitor.BATCH = chunk
    source = ArraySource(*(array[:count] for array in fashion.load()[:2]))
    asked = pretrain_settings(recipe="small", base_width=8, batch_size=6, precision="fp32", monitor=kind, threads=1)
    settings = resolve(asked, source, own)
    torch.manual_seed(0)
    backbone = backbone_of(settings).train()
    if rank:  # as in training: running statistics of its own
        for buffer in backbone.buffers():
            buffer.data.add_(rank)
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    numbers = torch.get_rng_state()
    figures = monitor.make_monitor(source, settings, own.device)(Untrained(backbone, None))
    assert all(module.training for module in backbone.modules())
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    assert all(parameter.grad is None for parameter in backbone.parameters())
    assert torch.equal(numbers, torch.get_rng_state())
    assert bool(figures) == own.main
    return figures

with processes("cpu") as own:
    cases = [(kind, count, chunk) for kind in ("knn", "retrieval") for count, chunk in CASES]
    found = [check(own, *case) for case in cases]
if own.main:
    print(json.dumps(found))
"""


@pytest.mark.dist
def test_a_shared_check_gives_the_figures_of_one_process_and_changes_nothing():
    """Unequal shares, processes without any, and running statistics that differ: the same to the last bit."""
    cases = [(7, 1), (7, 2), (7, 256), (300, 64)]  # pictures, and how many are encoded at once
    said = in_processes(SHARED_CHECK.replace("CASES", repr(cases)), [1, 2, 3]).splitlines()
    one, two, three = (json.loads(line) for line in said)
    assert one == two == three
    space = {"effective_rank", "dead_dimensions", "spread", "random_cosine"}
    assert [set(figures) for figures in one[::4]] == [
        {"knn_accuracy", *space}, {"retrieval", "alignment", "uniformity", *space},
    ]  # fmt: skip
    assert 0.2 < one[3]["knn_accuracy"] < 0.9


STOPPED = """
import os, signal, sys
from moco.cli import main
from moco.contrast.moco import MomentumContrast
from moco.train import parallel

sys.stderr = sys.stdout
os.chdir(os.environ["FOLDER"])
if os.environ["WATCHED"] == "True":
    there = parallel._patience
    parallel._patience = lambda _, seconds: there("nccl", seconds)
original = MomentumContrast.end_step
def stop(model):
    original(model)
    if model.step == 3 and rank == int(os.environ["VICTIM"]):
        print(f"victim {os.getpid()}", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
MomentumContrast.end_step = stop
sys.exit(main([
    "pretrain", "x.npz", "--recipe", "small", "--base-width", "8", "--batch-size", "24", "--epochs", "9",
    "--device", "cpu", "--threads", "1", "--precision", "fp32", "--monitor", "none", "--no-tensorboard",
    "--timeout", "0.05", "--out", "run",
]))
"""


@pytest.mark.dist
@pytest.mark.parametrize(("victim", "watched"), [(2, False), (0, False), (1, True)])
def test_a_stopped_process_is_named_by_those_who_wait_for_it(tmp_path, victim, watched):
    """watched: as with NCCL, whose waiting raises nothing."""
    np.savez(tmp_path / "x.npz", x=fashion.load()[0][:96])
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps it
    said = in_processes(
        STOPPED, [3], statuses=[None if rank == victim else 1 for rank in range(3)], port=store.port,
        TORCHELASTIC_USE_AGENT_STORE=True, TORCHELASTIC_RESTART_COUNT=0, FOLDER=tmp_path, VICTIM=victim,
        WATCHED=watched,
    )  # fmt: skip
    (pid,) = [line.removeprefix("victim ") for line in said.splitlines() if line.startswith("victim ")]
    (line,) = [line for line in said.splitlines() if line.startswith("moco: ")]
    assert line.startswith(f"moco: process {victim} of 3 (pid {pid} on ")
    assert "gives no sign of life since" in line
    assert line.count("process ") == 1
    assert "moco resume" in line
    assert "Traceback" not in said


RUNS = """
import os, sys
import numpy as np
import moco
from moco.data import fashion

folder = os.environ["FOLDER"].format(other=3 - world)
given = eval(os.environ.get("GIVEN", "{}"))  # may depend on `world`
pictures = fashion.load()[0][:64]
if os.environ.get("STOP_AFTER"):  # epochs of the whole training decide the learning rate: it is cut, not shortened
    from moco.train.job import Job
    save = Job.save
    def save_and_stop(job, step, **more):
        save(job, step, **more)
        if step == int(os.environ["STOP_AFTER"]):
            job.saver.close()
            os.kill(os.getpid(), 2)
    Job.save = save_and_stop
try:
    if os.environ.get("RESUME"):
        moco.resume(folder, data=pictures, quiet=rank > 0 or "WORDS" not in os.environ)
    else:
        moco.pretrain(pictures, out=f"{folder}-{world}", quiet=True, **given)
except KeyboardInterrupt:
    pass
"""
WITHOUT_BATCH_NORM = {
    "recipe": "small", "backbone": "test_vit", "image_size": 32, "epochs": 10, "batch_size": 32,
    "queue_size": 80, "precision": "fp32", "monitor": "none", "tensorboard": False, "log_every": 1, "device": "cpu",
    "threads": 1, "learning_rate": 0.03, "save_every": "none",
}  # fmt: skip
WITH_BATCH_NORM = WITHOUT_BATCH_NORM | {"backbone": "resnet18", "base_width": 8}
TOLERANCE = 1e-4
"""Of losses without batch norm, over 20 steps, whatever the number of processes: what docs/scale.md promises."""
TOLERANCE_WITH_BATCH_NORM = 1e-3
"""Of losses over 4 steps after a change, with the same groups of batch norm: likewise."""


def losses(folder: Path) -> list[float]:
    found = {line["step"]: line["loss"] for line in moco.Run(folder).metrics() if "loss" in line}
    return [found[step] for step in sorted(found)]


@pytest.mark.dist
def test_without_batch_norm_losses_agree_whatever_the_number_of_processes_even_if_it_changes(tmp_path):
    """20 steps on 1, 2 and 4 processes; half of them on 1, the rest on 2; and the other way round."""
    more = {"GIVEN": repr(WITHOUT_BATCH_NORM)}
    in_processes(RUNS, [1, 2, 4], FOLDER=tmp_path / "whole", **more)
    expected = losses(tmp_path / "whole-1")
    assert len(expected) == 20
    slower = moco.pretrain(
        fashion.load()[0][:64],
        out=str(tmp_path / "slower"),
        quiet=True,
        **(WITHOUT_BATCH_NORM | {"learning_rate": 0.02}),
    )
    assert abs(losses(slower.path)[-1] - expected[-1]) > 20 * TOLERANCE  # it learns: equal losses are no accident
    for world in (2, 4):
        assert losses(tmp_path / f"whole-{world}") == pytest.approx(expected, abs=TOLERANCE)
    in_processes(RUNS, [1, 2], FOLDER=tmp_path / "half", STOP_AFTER=10, **more)
    assert [moco.Run(tmp_path / f"half-{world}").load()["step"] for world in (1, 2)] == [11, 11]
    in_processes(RUNS, [1, 2], FOLDER=tmp_path / "half-{other}", RESUME=1)
    for before, after in ((1, 2), (2, 1)):
        folder = tmp_path / f"half-{before}"
        assert losses(folder) == pytest.approx(expected, abs=TOLERANCE)
        assert losses(folder)[:11] == losses(tmp_path / f"whole-{before}")[:11]
        settings = moco.Run(folder).settings
        assert (settings.processes, settings.bn_groups, settings.shuffle_bn) == (after, 1, False)


@pytest.mark.dist
def test_groups_of_one_process_are_the_processes_of_several(tmp_path):
    """Split in 4 groups on one process, in 2 on two, or one each on four: the same pictures are normalised together.

    Equal to rounding as long as training has not magnified it; and a run that changes from one to the other goes on
    with the same groups.
    """
    gentle = WITH_BATCH_NORM | {"learning_rate": 0.003}  # larger ones magnify rounding tenfold each
    groups = repr(gentle).replace("}", ", 'bn_groups': 4 // world}")
    in_processes(RUNS, [1, 2, 4], FOLDER=tmp_path / "run", GIVEN=groups)
    one, two, four = (losses(tmp_path / f"run-{world}") for world in (1, 2, 4))
    assert two[:5] == pytest.approx(one[:5], abs=TOLERANCE)
    assert four[:5] == pytest.approx(one[:5], abs=TOLERANCE)
    whole = gentle | {"bn_groups": 1}
    plain = moco.pretrain(fashion.load()[0][:64], out=str(tmp_path / "plain"), quiet=True, **whole)
    assert max(abs(a - b) for a, b in zip(one[:5], losses(plain.path), strict=False)) > 100 * TOLERANCE
    in_processes(RUNS, [1], FOLDER=tmp_path / "half", GIVEN=groups, STOP_AFTER=10)
    said = in_processes(RUNS, [4], FOLDER=tmp_path / "half-1", RESUME=1, WORDS=1)
    assert "batch norm:" not in said
    settings = moco.Run(tmp_path / "half-1").settings
    assert (settings.processes, settings.bn_groups, settings.shuffle_bn) == (4, 1, True)
    after = losses(tmp_path / "half-1")
    assert after[11:15] == pytest.approx(one[11:15], abs=TOLERANCE_WITH_BATCH_NORM)
    assert after[11:] == pytest.approx(one[11:], abs=10 * TOLERANCE_WITH_BATCH_NORM)  # rounding, magnified
