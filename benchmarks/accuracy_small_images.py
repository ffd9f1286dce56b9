"""Accuracy of the `small` recipe on Fashion-MNIST beside raw pixels and the untrained network.

    python benchmarks/accuracy_small_images.py --epochs 15                          # the packaged 10,000 pictures
    python benchmarks/accuracy_small_images.py --data train.npz --test test.npz --epochs 15 --out runs/full

ResNet-18 with the small-image stem and 16 base channels, 32 pixels. Whatever is trained on, bank and probe are the
first `--bank` training pictures, and the test pictures the first `--test-images`. A .npz holds x: uint8 N × 28 × 28 and
y: N. Prints one table and writes it as JSON into the run folder; other settings go behind `--set`, as name=value.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch
import yaml
from rich.console import Console

import moco
from moco.data import fashion
from moco.demo import evaluate_on, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="training pictures (.npz); default: the packaged ones")
    parser.add_argument("--test", help="test pictures (.npz); default: the packaged ones")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--bank", type=int, default=10_000)
    parser.add_argument("--test-images", type=int, default=2_000)
    parser.add_argument("--out", default="runs/accuracy")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="further settings")
    given = parser.parse_args()
    x, y, x_test, y_test = fashion.load()
    if given.data:
        with np.load(given.data) as held:
            x, y = held["x"], held["y"]
    if given.test:
        with np.load(given.test) as held:
            x_test, y_test = held["x"], held["y"]
    options = {name: yaml.safe_load(value) for name, value in (item.split("=", 1) for item in given.set)}
    began = time.perf_counter()
    run = moco.pretrain(x, recipe="small", base_width=16, epochs=given.epochs, monitor="none", out=given.out, **options)
    seconds = time.perf_counter() - began
    bank, test = slice(given.bank), slice(given.test_images)
    rows = evaluate_on(run, (x[bank], y[bank]), (x_test[test], y_test[test]))
    Console().print(table(rows))
    rate = len(x) * given.epochs / seconds
    print(f"{len(x)} pictures × {given.epochs} epochs in {seconds / 60:.1f} minutes ({rate:.0f} images/s)")
    found = {"minutes": seconds / 60, "images_per_second": rate, "torch": torch.__version__, "accuracy": rows}
    (run.path / "accuracy.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
