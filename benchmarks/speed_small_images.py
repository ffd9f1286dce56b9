"""Images per second on small pictures: moco's `small` recipe against the Pillow, float32 form of it, in turns.

    python benchmarks/speed_small_images.py [--rounds 5] [--json out.json]

Both train a ResNet-18 with the small-image stem and 16 base channels at 32 pixels, batch 256, K 4,096, on the packaged
10,000 pictures: everything from the pictures in memory to the updated weights and queue. In each round each side
trains for `--steps` steps while the other rests. The median over the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import reference_recipe
import torch

from moco.building import build_model
from moco.data import fashion
from moco.data.sources import ArraySource
from moco.pretraining import build_stream
from moco.recipes import pretrain_settings
from moco.resolve import resolve
from moco.train.job import Job
from moco.train.loop import optimise
from moco.train.parallel import Processes, find_device
from moco.train.run import NoRun

BATCH = 256
REST = 2.0  # seconds: the workers of the reference fill their buffers and fall idle
AHEAD = 4  # steps that those buffers hold; they are not counted


def our_steps(**options: object) -> Iterator[None]:
    """One optimiser step of moco per item."""
    source = ArraySource(fashion.load()[0])
    own = Processes(0, 1, find_device("cpu"))
    asked = pretrain_settings(recipe="small", base_width=16, batch_size=BATCH, device="cpu", monitor="none", **options)
    settings = resolve(asked, source, own)
    torch.set_num_threads(settings.threads)
    job = Job(settings, build_model(settings), build_stream(settings, source, own), NoRun(), own, None, None)
    job.model.train()
    for step, batch in enumerate(job.stream.run(0, 10**6)):
        optimise(job, job.model, batch, step, 0.03)
        yield


def rate(steps: Callable[[], object], count: int) -> float:
    """Images per second over `count` steps, after those that were prepared in advance."""
    for _ in range(AHEAD):
        steps()
    began = time.perf_counter()
    for _ in range(count):
        steps()
    return count * BATCH / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="steps of each side in a round")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    given = parser.parse_args()
    torch.set_num_threads(torch.get_num_threads())
    sides = {
        "Pillow, fp32 (reference_recipe.py)": reference_recipe.steps(fashion.load()[0], 10**6),
        "moco, recipe small": our_steps(),
        "moco, recipe small, bn_groups 8": our_steps(bn_groups=8),
        "moco, recipe small, fp32": our_steps(precision="fp32"),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(given.rounds):
        for name, steps in sides.items():
            time.sleep(REST)
            rates[name].append(rate(lambda steps=steps: next(steps), given.steps))
    reference = next(iter(sides))
    print(f"{'':38}{'images/s':>9}{'ratio':>7}   (median of {given.rounds} rounds, {torch.get_num_threads()} threads)")
    rows = {}
    for name, values in rates.items():
        ratios = [value / base for value, base in zip(values, rates[reference], strict=True)]
        rows[name] = {"images_per_second": statistics.median(values), "ratio": statistics.median(ratios), "all": values}
        print(f"{name:38}{rows[name]['images_per_second']:9.0f}{rows[name]['ratio']:7.2f}")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
