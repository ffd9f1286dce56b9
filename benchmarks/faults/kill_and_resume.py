"""Kill runs at random moments, resume them every time, and compare what they end with, bit for bit.

    python benchmarks/faults/kill_and_resume.py [--kills 20] [--seed 0] [--json out.json]

Each case trains on real pictures (the packaged ones; for the folder and the tar shard, written out as PNG) in a process
of its own, which is killed with SIGKILL, its workers left behind: in turn anywhere, while a checkpoint is written, and
during a check where the case has one. The undisturbed run and the one that was killed and resumed must hold the same
weights, queue, optimiser and metrics. What was going on at a kill is read from what it left, and counted.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import random
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import moco
from moco.cli import main as moco_main
from moco.data import fashion

PICTURES = 640
COMMON = {
    "recipe": "small", "base_width": 8, "epochs": 12, "batch_size": 64, "queue_size": 200, "precision": "fp32",
    "threads": 1, "log_every": 4, "save_every": 3, "tensorboard": False, "monitor": "auto",
}  # fmt: skip
SMALL = {"backbone": "resnet18", "image_size": 32}
# Checks are kNN where there are labels (the array), retrieval in the folder.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "array, v2": ("array", {"recipe": "v2", **SMALL}),
    "array, symmetric, in pieces, groups": ("array", {"symmetric": True, "accumulate": 2, "bn_groups": 4}),
    "folder, 2 workers": ("folder", {"workers": 2, "channels": 1}),
    "tar shard, 2 workers, v1": ("tar", {"recipe": "v1", **SMALL, "workers": 2, "channels": 1, "monitor": "none"}),
    "array, v3 with LARS": ("array", {"dictionary": "in-batch", "head": "mlp-bn", "predictor_layers": 2,
                                      "symmetric": True, "scale_loss": True, "momentum_schedule": "cosine",
                                      "optimizer": "lars", "learning_rate": 0.6, "temperature": 1.0}),
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
    words = ["pretrain", str(data), "--out", str(out)]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def work(words: list[str], log: Path) -> None:
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.exit(moco_main(words))


def start(words: list[str], log: Path) -> Any:
    """`moco WORDS` in a process of its own, forked: what takes long to import is there already."""
    process = multiprocessing.get_context("fork").Process(target=work, args=(words, log))
    process.start()
    return process


def finish(process: Any, log: Path) -> None:
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{log}: {log.read_text()[-2000:]}")


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def in_a_check(run: Path) -> bool:
    """Whether the last line is that of an epoch's end, and its check has not been written yet."""
    text = (run / "metrics.jsonl").read_bytes()
    last = json.loads(text.splitlines()[-1]) if text.endswith(b"\n") else {}
    return "loss" in last and float(last["epoch"]).is_integer()


def half_written(run: Path) -> set[tuple[str, int, int]]:
    """Checkpoints that do not have their final name yet."""
    found = set()
    for path in (run / "checkpoints").glob("*.partial"):
        try:
            found.add((path.name, path.stat().st_ino, path.stat().st_mtime_ns))
        except FileNotFoundError:  # it has it now
            continue
    return found


def kill_again_and_again(
    words: list[str], out: Path, kills: int, *, total: int, seconds: float, checks: bool, dice: random.Random
) -> Counter[str]:
    """Run to the end, killed `kills` times. Returns how often, by what was going on.

    total: lines of metrics.jsonl of the undisturbed run, which took `seconds`. Each kill comes at a moment drawn from
    its part of the run, and the last part is left alone, so that every one meets a training.
    """
    found: Counter[str] = Counter()
    moments, log = ["anywhere", "checkpoint"] + ["check"] * checks, out.with_suffix(".log")
    for number in range(kills):
        before, left_over = lines(out), half_written(out)
        process, moment = start(words, log), moments[(number + dice.randrange(2)) % len(moments)]
        due = total * (number + dice.random()) / (kills + 1)
        while process.is_alive() and (lines(out) < due or lines(out) == before):
            time.sleep(0.002)
        time.sleep(dice.random() * seconds / total)
        while process.is_alive() and not (
            half_written(out) - left_over if moment == "checkpoint" else moment == "anywhere" or in_a_check(out)
        ):
            time.sleep(0.0005)
        process.kill()
        process.join()
        if process.exitcode == -9:
            writing, checking = half_written(out) - left_over, checks and in_a_check(out)
            found["in a checkpoint" if writing else "in a check" if checking else "elsewhere"] += 1
        words = ["resume", str(out)]
    finish(start(words, log), log)
    return found


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
    parser.add_argument("--kills", type=int, default=20, help="over all cases (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)  # no threads here, which a fork would not take along
    cv2.setNumThreads(0)
    dice, rows = random.Random(given.seed), {}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(Path(folder))
        for number, (name, (kind, special)) in enumerate(CASES.items()):
            settings = COMMON | special
            whole, cut = Path(folder) / f"whole-{number}", Path(folder) / f"cut-{number}"
            began = time.monotonic()
            finish(start(command(data[kind], whole, settings), whole.with_suffix(".log")), whole.with_suffix(".log"))
            hit = kill_again_and_again(
                command(data[kind], cut, settings), cut, (given.kills + number) // len(CASES), total=lines(whole),
                seconds=time.monotonic() - began, checks=settings["monitor"] != "none", dice=dice,
            )  # fmt: skip
            found = differences(moco.Run(whole), moco.Run(cut))
            rows[name] = {"kills": hit.total(), **hit, "differences": found}
            said = ", ".join(f"{count} {where}" for where, count in sorted(hit.items()))
            print(
                f"{name:36} {hit.total()} kills ({said})   "
                f"{'identical' if not found else 'DIFFERENT: ' + ', '.join(found)}",
                flush=True,
            )
    total, good = sum(row["kills"] for row in rows.values()), sum(not row["differences"] for row in rows.values())
    within = {where: sum(row.get(where, 0) for row in rows.values()) for where in ("in a checkpoint", "in a check")}
    print(
        f"{total} kills ({', '.join(f'{count} {where}' for where, count in within.items())}), {good} of {len(rows)} "
        "runs identical to the undisturbed one"
    )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(good != len(rows) or total < given.kills)


if __name__ == "__main__":
    main()
