"""Kill a run at random moments, resume it every time, and compare what it ends with, bit for bit.

    python benchmarks/faults/kill_and_resume.py [--kills 20] [--seed 0] [--keep FOLDER] [--json out.json]

Each case trains on real pictures (the packaged ones; for the folder and the tar shard, written out as PNG) as a
process of its own, which is killed with SIGKILL: within a step, while a checkpoint is written, during a check. The
undisturbed run and the one that was killed and resumed must hold the same weights, queue, optimiser and metrics.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import moco
from moco.data import fashion

PICTURES = 640
COMMON = {
    "recipe": "small", "base_width": 8, "epochs": 12, "batch_size": 64, "queue_size": 200, "precision": "fp32",
    "threads": 1, "log_every": 4, "save_every": 3, "tensorboard": False,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "array, views by batch": ("array", {"monitor": "none"}),
    "array, check after each epoch": ("array", {"monitor": "knn"}),
    "array, symmetric, in pieces, groups": ("array", {"symmetric": True, "accumulate": 2, "bn_groups": 4}),
    "folder, 2 workers": ("folder", {"workers": 2, "monitor": "none", "channels": 1}),
    "tar shard, 2 workers, v1": ("tar", {"workers": 2, "recipe": "v1", "backbone": "resnet18", "image_size": 32,
                                         "monitor": "none", "channels": 1}),
    "array, v3 with LARS": ("array", {"dictionary": "in-batch", "head": "mlp-bn", "predictor_layers": 2,
                                      "symmetric": True, "scale_loss": True, "momentum_schedule": "cosine",
                                      "optimizer": "lars", "learning_rate": 0.6, "temperature": 1.0,
                                      "monitor": "none"}),
    "array, memory bank": ("array", {"dictionary": "memory-bank", "monitor": "none"}),
}  # fmt: skip


def prepare(folder: Path) -> dict[str, Path]:
    """The same pictures as an array, a folder and a tar shard."""
    images, labels = (part[:PICTURES] for part in fashion.load()[:2])
    np.savez(folder / "array.npz", x=images, y=labels)
    (folder / "pictures").mkdir()
    with tarfile.open(folder / "shard-0.tar", "w") as shard:
        for number, image in enumerate(images):
            data = cv2.imencode(".png", image)[1].tobytes()
            (folder / "pictures" / f"{number:04}.png").write_bytes(data)
            member = tarfile.TarInfo(f"{number:04}.png")
            member.size = len(data)
            shard.addfile(member, io.BytesIO(data))
    return {"array": folder / "array.npz", "folder": folder / "pictures", "tar": folder / "shard-0.tar"}


def command(data: Path, out: Path, settings: dict[str, Any]) -> list[str]:
    words = [sys.executable, "-m", "moco", "pretrain", str(data), "--out", str(out)]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_again_and_again(words: list[str], out: Path, kills: int, seconds: float, dice: random.Random) -> int:
    """Run to the end, killed `kills` times at moments drawn over a run's length. Returns how many hit training."""
    hit = 0
    for number in range(kills + 1):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if number < kills:
            began, before = time.monotonic(), lines(out)
            while process.poll() is None and lines(out) == before and time.monotonic() - began < 60:
                time.sleep(0.002)
            if process.poll() is None:
                time.sleep(dice.random() * seconds / kills)
                process.kill()
                hit += 1
        _, said = process.communicate()
        if number == kills and process.returncode != 0:
            raise RuntimeError(said)
        words = [sys.executable, "-m", "moco", "pretrain", "--resume", str(out)]
    return hit


def differences(one: moco.Run, other: moco.Run) -> list[str]:
    """What is not the same, in words."""
    a, b = one.load(), other.load()
    found = [f"step {a['step']} and {b['step']}"] if a["step"] != b["step"] else []
    for part in ("model", "optimizer", "window"):
        left, right = tree_leaves(a[part]), tree_leaves(b[part])
        same = len(left) == len(right) and all(
            torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(left, right, strict=True)
        )
        if not same and part != "window":  # the clock counts there as well
            found.append(part)
    by_the_clock = ("images_per_second", "data_wait")
    figures = [
        [{k: v for k, v in line.items() if k not in by_the_clock} for line in run.metrics()] for run in (one, other)
    ]
    return found + (["metrics"] if figures[0] != figures[1] else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="over all cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    dice, rows = random.Random(given.seed), {}
    each = -(-given.kills // len(CASES))
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(Path(folder))
        for number, (name, (kind, special)) in enumerate(CASES.items()):
            settings = COMMON | special
            whole, cut = Path(folder) / f"whole-{number}", Path(folder) / f"cut-{number}"
            began = time.monotonic()
            subprocess.run(command(data[kind], whole, settings), check=True, capture_output=True)
            seconds = time.monotonic() - began
            hit = kill_again_and_again(command(data[kind], cut, settings), cut, each, seconds / 2, dice)
            found = differences(moco.Run(whole), moco.Run(cut))
            rows[name] = {"kills": hit, "differences": found}
            print(
                f"{name:40} {hit} kills   {'identical' if not found else 'DIFFERENT: ' + ', '.join(found)}", flush=True
            )
    total, good = sum(row["kills"] for row in rows.values()), sum(not row["differences"] for row in rows.values())
    print(f"{total} kills, {good} of {len(rows)} runs identical to the undisturbed one")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(good != len(rows))


if __name__ == "__main__":
    main()
