"""Speed and memory of a whole job, data included: moco against the package lightly, each in a process of its own.

    pip install lightly                                            # not needed by moco itself
    python benchmarks/speed_whole_job.py --photos FOLDER [--case photos small ...] [--rounds 3] [--json out.json]

Both train a ResNet-18 with a two-layer head, v2 views, K 4,096, on the same pictures, with the same batch size, number
of workers and threads; lightly as its documentation puts it together (`lightly_recipe.py`). Cases:

    photos       JPEGs of a folder at 224 pixels, batch 32 (the folder: real photographs of usual size, 200 or more)
    small        packaged Fashion-MNIST at 32 pixels, small-image stem, 16 base channels, batch 256, as three channels
    small-gray   the same with one channel
    small-full   the same with three channels and all 64 base channels

In each round each side runs once, from start to end: images/s are of the steps behind the first few, in which
start-up and buffers filled in advance show. Memory is the peak of the proportional set size, summed over the training
process and its workers, over the whole run. For Linux.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import show, summary, write
from startup_and_memory import run_watched

QUEUE = 4096
AHEAD = 5  # steps whose batches may have been made before the clock starts; as many follow after it stops


@dataclass(frozen=True)
class Case:
    size: int
    batch_size: int
    steps: int
    """Steps that count."""
    channels: int = 3
    base_width: int = 64
    small_stem: bool = False


CASES = {
    "photos": Case(size=224, batch_size=32, steps=8),
    "small": Case(size=32, batch_size=256, steps=16, base_width=16, small_stem=True),
    "small-gray": Case(size=32, batch_size=256, steps=16, channels=1, base_width=16, small_stem=True),
    "small-full": Case(size=32, batch_size=256, steps=4, small_stem=True),
}
BY_DEFAULT = ["photos", "small", "small-gray"]


class Clock:
    """Notes when each step begins."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def __call__(self) -> None:
        self.ticks.append(time.perf_counter())

    def seconds(self, steps: int) -> float:
        """Time of so many steps, from the one after AHEAD on."""
        return self.ticks[AHEAD + steps] - self.ticks[AHEAD]


def pictures(case: Case, photos: Path | None) -> Any:
    if not case.small_stem:
        return photos
    from moco.data import fashion

    return fashion.load()[0][: case.batch_size * (case.steps + 2 * AHEAD)]


def moco_side(case: Case, photos: Path | None, workers: int, options: dict[str, Any]) -> float:
    """Seconds of the steps that count, in a run of `moco.pretrain` with everything it writes."""
    import moco
    from moco.train import loop

    clock, step = Clock(), loop.optimise

    def timed(*arguments: Any) -> Any:
        clock()
        return step(*arguments)

    loop.optimise = timed
    data = pictures(case, photos)
    count = len(data) if case.small_stem else sum(1 for path in Path(data).rglob("*") if path.is_file())
    with tempfile.TemporaryDirectory() as folder:
        chosen = {
            "recipe": "small" if case.small_stem else "v2",
            "backbone": "resnet18",
            "head": "mlp",
            "crop_scale": (0.2, 1.0),
            "blur_probability": 0.5,
            "temperature": 0.2,
            "momentum": 0.996,
            "image_size": case.size,
            "channels": case.channels,
            "base_width": None if case.base_width == 64 else case.base_width,
            "batch_size": case.batch_size,
            "queue_size": QUEUE,
            "workers": workers,
            "device": "cpu",
            "monitor": "none",
            "epochs": math.ceil((case.steps + 2 * AHEAD) / (count // case.batch_size)),
            "checkpoint_every": 10**6,
        }
        moco.pretrain(data, out=f"{folder}/run", quiet=True, **(chosen | options))
    return clock.seconds(case.steps)


def lightly_side(case: Case, photos: Path | None, workers: int) -> float:
    """Seconds of the steps that count."""
    import lightly_recipe

    clock = Clock()
    lightly_recipe.train(
        pictures(case, photos),
        size=case.size,
        channels=case.channels,
        batch_size=case.batch_size,
        base_width=case.base_width,
        small_stem=case.small_stem,
        queue_size=QUEUE,
        workers=workers,
        steps=case.steps + 2 * AHEAD,
        tick=clock,
    )
    return clock.seconds(case.steps)


def compare(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Table of one case."""
    case, sides = CASES[name], ["lightly", "moco"]
    times: dict[str, list[float]] = {side: [] for side in sides}
    peaks: dict[str, list[int]] = {side: [] for side in sides}
    for _ in range(given.rounds):
        for side in sides:
            command = [sys.executable, __file__, "--side", side, "--case", name, "--workers", str(given.workers)]
            command += ["--photos", str(given.photos)] if given.photos else []
            command += ["--set", *given.set] if given.set else []
            printed, peak = run_watched(command, LIGHTLY_DID_VERSION_CHECK="True")
            times[side].append(float(printed.split()[-1]))
            peaks[side].append(peak)
    rows = summary(times, case.steps * case.batch_size, "lightly")
    show(f"{name}: {case.size} pixels, batch {case.batch_size}, {given.workers} workers", rows, "images")
    highest = {side: max(values) for side, values in peaks.items()}
    memory = ", ".join(f"{side} {value / 1e6:,.0f} MB" for side, value in highest.items())
    print(f"peak memory: {memory}, ratio {highest['moco'] / highest['lightly']:.2f}\n", flush=True)
    return {"rows": rows, "seconds": times, "peak_bytes": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, help="folder of JPEGs for the case photos")
    parser.add_argument("--case", nargs="+", choices=CASES, help=f"default: {' '.join(BY_DEFAULT)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="worker processes of each side")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="further settings of moco")
    parser.add_argument("--side", choices=["moco", "lightly"], help="run one side and print its seconds")
    given = parser.parse_args()
    if importlib.util.find_spec("lightly") is None and given.side != "moco":
        sys.exit("the package lightly is not installed: pip install lightly")
    cases = given.case or [name for name in BY_DEFAULT if given.photos or CASES[name].small_stem]
    if given.photos is None and any(not CASES[name].small_stem for name in cases):
        sys.exit("the case photos needs --photos FOLDER")
    if given.side == "lightly":
        print(lightly_side(CASES[cases[0]], given.photos, given.workers))
    elif given.side == "moco":
        import yaml

        options = {name: yaml.safe_load(value) for name, value in (item.split("=", 1) for item in given.set)}
        print(moco_side(CASES[cases[0]], given.photos, given.workers, options))
    else:
        write(given.json, {"cases": {name: compare(name, given) for name in cases}})


if __name__ == "__main__":
    main()
