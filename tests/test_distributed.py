"""Several processes with gloo on the CPU: the same training as one process, equal queues, shuffled keys."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import moco
from moco.data import fashion

SCRIPT = """
import os, sys, torch, moco
from moco.contrast.moco import MomentumContrast
from moco.data import fashion

models = []
end_step = MomentumContrast.end_step
def remember(self):
    models[:] = [self]
    end_step(self)
MomentumContrast.end_step = remember

options = eval(sys.argv[2])
moco.pretrain(fashion.load()[0][:128], out=sys.argv[1], quiet=True, **options)
rank = os.environ.get("RANK", "0")
torch.save(models[0].dictionary.state_dict(), f"{sys.argv[1]}-queue-{rank}.pt")
"""

OPTIONS = {
    "recipe": "small", "epochs": 2, "batch_size": 32, "queue_size": 80, "precision": "fp32", "monitor": "retrieval",
    "tensorboard": False, "log_every": 1, "device": "cpu", "threads": 1,
}  # fmt: skip
NO_BATCHNORM = OPTIONS | {"backbone": "vit_tiny_patch16_224", "image_size": 32}


def launch(folder: Path, name: str, options: dict, processes: int) -> moco.Run:
    (folder / "script.py").write_text(SCRIPT)
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*start, str(folder / "script.py"), str(folder / name), repr(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return moco.Run(folder / name)


@pytest.mark.dist
def test_two_processes_agree_with_one_of_the_same_global_batch(tmp_path):
    one = launch(tmp_path, "one", NO_BATCHNORM, 1)
    two = launch(tmp_path, "two", NO_BATCHNORM, 2)
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
    run = launch(tmp_path, "run", OPTIONS | {"base_width": 8, "symmetric": True, "accumulate": 2}, 2)
    assert run.settings.shuffle_bn is True
    assert run.settings.bn_groups == 1
    queues = [torch.load(tmp_path / f"run-queue-{rank}.pt") for rank in (0, 1)]
    for name, value in queues[0].items():
        assert torch.equal(value, queues[1][name]), name
    assert (queues[0]["births"] >= 0).all()
    plain = launch(
        tmp_path, "plain", OPTIONS | {"base_width": 8, "symmetric": True, "accumulate": 2, "shuffle_bn": False}, 2
    )
    assert plain.metrics()[0]["loss"] != run.metrics()[0]["loss"]


@pytest.mark.dist
def test_torchrun_on_the_command_line(tmp_path):
    import numpy as np

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


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_killed_process_brings_the_group_back_from_the_last_checkpoint(tmp_path, processes):
    import numpy as np

    np.savez(tmp_path / "x.npz", x=fashion.load()[0][:128])
    (tmp_path / "run.yaml").write_text("monitor: none")  # torchrun takes --monitor for an abbreviation of its own
    words = [
        "-m", "moco", "pretrain", str(tmp_path / "x.npz"), "--recipe", "small", "--base-width", "8",
        "--batch-size", "32", "--epochs", "12", "--device", "cpu", "--threads", "1", "--precision", "fp32",
        "--no-tensorboard", "--log-every", "2", "--save-every", "3", "--config", str(tmp_path / "run.yaml"),
    ]  # fmt: skip
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def go(*more):
        return subprocess.Popen([*start, *more], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    cut = tmp_path / "cut"
    group = go("--max-restarts=3", *words, "--out", str(cut))
    while not (cut / "metrics.jsonl").exists() or len(moco.Run(cut).metrics()) < 6:
        time.sleep(0.01)
        assert group.poll() is None, group.communicate()[1].decode()[-3000:]
    victim = max(children(group.pid))
    os.kill(victim, signal.SIGKILL)
    _, said = group.communicate(timeout=240)
    assert group.returncode == 0, said.decode()[-3000:]
    whole = go(*words, "--out", str(tmp_path / "whole"))
    assert whole.wait() == 0
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
def test_nproc_starts_the_same_and_a_mistake_stays_one_line(tmp_path):
    import numpy as np

    np.savez(tmp_path / "x.npz", x=fashion.load()[0][:64])
    words = [
        sys.executable, "-m", "moco", "pretrain", "x.npz", "--nproc", "2", "--recipe", "small", "--base-width", "8",
        "--batch-size", "32", "--epochs", "1", "--device", "cpu", "--threads", "1", "--monitor", "none", "--out", "run",
    ]  # fmt: skip
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert moco.Run(tmp_path / "run").load()["step"] == 2
    again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert again.returncode == 2
    assert again.stderr.count("moco: run already holds a run") == 1
    assert "Traceback" not in again.stderr
