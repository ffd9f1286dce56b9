"""Start-up times, listing a large folder, and memory, each beside its bound. For Linux: memory is read from /proc.

    python benchmarks/startup_and_memory.py [--files 200000] [--paths 1000000] [--keys 1048576] [--json out.json]

Memory is measured in processes of its own. That of the loader is the peak of the proportional set size, summed over
the training process and its workers, above the same with 1,000 paths: names, labels and order of the pictures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import in_turns, write

MB = 1e6
WORKERS = 4
KNN = (50_000, 10_000, 512)
"""Rows to learn from, rows to test on, length of the features."""


def tree_memory(root: int) -> int:
    """Bytes that a process and its descendants hold in memory; a page shared by n processes counts 1/n in each."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # some end while we look
                parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        waiting += children.get(process, [])
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
    return total


def run_watched(command: list[str], pause: float = 0.25, **environment: str) -> tuple[str, int]:
    """What a command prints, and the peak memory of its processes in bytes. Raises SystemExit where it fails."""
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment) as child:
        while child.poll() is None:
            peak = max(peak, tree_memory(child.pid))
            time.sleep(pause)
        printed = child.stdout.read() if child.stdout else ""
    if child.returncode:
        sys.exit(f"failed with status {child.returncode}: {' '.join(command)}")
    return printed, peak


def start_up(rounds: int) -> dict[str, float]:
    """Seconds until `import moco` and `moco --help` are done, interpreter included."""
    script = Path(sysconfig.get_path("scripts"), "moco")
    help_command = [str(script)] if script.exists() else [sys.executable, "-m", "moco"]
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import moco": [sys.executable, "-c", "import moco"],
        "moco --help": [*help_command, "--help"],
        "moco pretrain --help": [*help_command, "pretrain", "--help"],
    }

    def run(command: list[str]) -> Callable[[], object]:
        return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    times = in_turns({name: run(command) for name, command in commands.items()}, rounds, warm_up=1)
    return {name: statistics.median(values) for name, values in times.items()}


def list_folder(files: int) -> float:
    """Seconds to list a folder of empty files in sub-folders of 1,000, just made and so in the cache of the system."""
    from moco.data.sources import FolderSource

    with tempfile.TemporaryDirectory() as root:
        for number in range(files):
            folder = Path(root, f"class{number // 1000:04}")
            if number % 1000 == 0:
                folder.mkdir()
            os.close(os.open(folder / f"picture_{number:08}.jpg", os.O_CREAT | os.O_WRONLY))
        began = time.perf_counter()
        found = len(FolderSource(root))
        seconds = time.perf_counter() - began
    if found != files:
        sys.exit(f"{found} files found of {files}")
    return seconds


def loader_memory(paths: int) -> dict[str, float]:
    """Peak bytes of a loader over so many paths and over 1,000, and the difference."""
    few, many = (float(probe("loader", "--paths", str(count))["bytes"]) for count in (1_000, paths))
    return {"few": few, "many": many, "difference": many - few}


def probe(kind: str, *arguments: str) -> dict[str, float]:
    """What a probe, in a process of its own, prints."""
    command = [sys.executable, __file__, "--probe", kind, *arguments]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def probe_loader(paths: int) -> None:
    """In a process of its own: a folder source without its files, and a few batches from worker processes."""
    import cv2
    import numpy as np
    import torch

    from moco.data.loader import ViewStream
    from moco.data.sources import PackedNames
    from moco.data.sources.folder import FileSource
    from moco.data.sources.labels import by_first_folder
    from moco.settings import ViewSettings

    jpeg = cv2.imencode(".jpg", np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))[1].tobytes()

    class Listed(FileSource):
        def read(self, index: int) -> tuple[bytes, str]:
            return jpeg, self.names[index]

    folders = (f"a_class_of_pictures_with_a_name_{number // 1000:04}" for number in range(paths))
    names = (f"{folder}/picture_{number:09}.jpeg" for number, folder in enumerate(folders))
    source = Listed(Path(), PackedNames.of(names))
    found = by_first_folder(source.names)
    if not isinstance(found, str):
        source.labels, source.classes = found
    stream = ViewStream(
        source,
        query=ViewSettings(),
        key=ViewSettings(),
        size=32,
        channels=3,
        batch_size=64,
        seed=0,
        workers=WORKERS,
        way="image",
        device=torch.device("cpu"),
    )
    peak = tree_memory(os.getpid())
    for _ in zip(range(6 * WORKERS), stream.run(0, 10**6), strict=False):
        peak = max(peak, tree_memory(os.getpid()))
    print(json.dumps({"bytes": peak}))


def loss_memory(keys: int) -> dict[str, dict[str, float]]:
    """What the loss adds to the memory of a process with 256 queries and so many keys, and its seconds."""
    return {kind: probe(kind, "--keys", str(keys)) for kind in ("info_nce", "info_nce_ids", "dense")}


def probe_loss(kind: str, keys: int) -> None:
    """In a process of its own: forward and backward once, nothing warmed up."""
    import torch
    import torch.nn.functional as F

    from moco.contrast.losses import info_nce

    queue = torch.empty(keys, 128)
    for part in queue.split(4096):  # in place, so that nothing larger was held before
        part.copy_(F.normalize(torch.randn_like(part), dim=1))
    q, k = (F.normalize(torch.randn(256, 128), dim=1) for _ in range(2))
    q.requires_grad_()
    ids = {"ids": torch.arange(256), "key_ids": torch.arange(keys)} if kind == "info_nce_ids" else {}
    before = highest_memory()
    began = time.perf_counter()
    if kind == "dense":
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], dim=1) / 0.2
        F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)).backward()
    else:
        info_nce(q, k, queue, 0.2, **ids).loss.backward()
    seconds = time.perf_counter() - began
    print(json.dumps({"bytes": highest_memory() - before, "seconds": seconds}))


def probe_knn(bank: int, queries: int, features: int) -> None:
    """In a process of its own: neighbours of many among many, whose similarities at once would take gigabytes."""
    import torch

    from moco.evaluate.knn import knn_predict

    generator = torch.Generator().manual_seed(0)
    known, asked = (torch.randn(rows, features, generator=generator) for rows in (bank, queries))
    labels = torch.randint(10, (bank,), generator=generator)
    before = highest_memory()
    began = time.perf_counter()
    knn_predict(known, labels, asked, k=200)
    print(json.dumps({"bytes": highest_memory() - before, "seconds": time.perf_counter() - began}))


def highest_memory() -> int:
    """The most bytes that this process has held (resource.getrusage would count those of its parent too)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="starts of each command")
    parser.add_argument("--files", type=int, default=200_000)
    parser.add_argument("--paths", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=1_048_576)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument(
        "--probe", choices=["loader", "knn", "info_nce", "info_nce_ids", "dense"], help=argparse.SUPPRESS
    )
    given = parser.parse_args()
    if given.probe == "knn":
        return probe_knn(*KNN)
    if given.probe:
        return probe_loader(given.paths) if given.probe == "loader" else probe_loss(given.probe, given.keys)

    started = start_up(given.rounds)
    listed = list_folder(given.files)
    loader = loader_memory(given.paths)
    loss = loss_memory(given.keys)
    knn = probe("knn")
    rows: list[tuple[str, float, float | None, str]] = [
        ("python -c pass", started["python -c pass"], None, "s"),
        ("import moco", started["import moco"], 0.2, "s"),
        ("moco --help", started["moco --help"], 0.7, "s"),
        ("moco pretrain --help", started["moco pretrain --help"], None, "s"),
        (f"list {given.files:,} files", listed, 10, "s"),
        (f"loader, {WORKERS} workers, 1,000 paths", loader["few"] / MB, None, "MB"),
        (f"loader, {WORKERS} workers, {given.paths:,} paths", loader["many"] / MB, None, "MB"),
        ("… the difference", loader["difference"] / MB, 300, "MB"),
        (f"info_nce, {given.keys:,} keys, above the queue", loss["info_nce"]["bytes"] / MB, 256, "MB"),
        ("… with ids", loss["info_nce_ids"]["bytes"] / MB, 256, "MB"),
        ("… all logits at once, for comparison", loss["dense"]["bytes"] / MB, None, "MB"),
        (f"kNN, {KNN[0]:,} × {KNN[1]:,}, {KNN[2]} wide, above the features", knn["bytes"] / MB, 512, "MB"),
        ("… its time", knn["seconds"], None, "s"),
    ]
    print(f"{'':54}{'':>10}{'bound':>14}")
    for name, value, bound, unit in rows:
        limit = "" if bound is None else f"{'<' if value < bound else 'NOT <'} {bound:g} {unit}"
        print(f"{name:54}{value:10.{3 if unit == 's' else 0}f} {unit:3}{limit:>14}")
    found: dict[str, Any] = {
        "start_up": started,
        "list_seconds": listed,
        "loader_bytes": loader,
        "loss": loss,
        "knn": knn,
    }
    write(given.json, found)
    return None


if __name__ == "__main__":
    main()
