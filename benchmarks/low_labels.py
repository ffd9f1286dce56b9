"""Few labels: what MoCo features and MoCo weights give, against supervised training from scratch on the same labels.

    python benchmarks/low_labels.py RUN --data train.npz --test test.npz

RUN: pre-trained on the pictures of --data without their labels. The probes are tried on several layers; they choose
their penalty on the labelled pictures alone, fine-tuning has one rate. The training from scratch is tried at several
rates and lengths. Of either side the best row counts, chosen on the test pictures.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from moco.evaluation import evaluate

SCRATCH = "supervised from scratch"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--data", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--labels", default="1%")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--layers", nargs="*", default=["3:7", "2:7", "1:7"], help="probes on LAYER:GRID, too")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1, 0.02], help="of training from scratch")
    parser.add_argument("--steps", type=int, nargs="+", default=[1000], help="of training from scratch and fine-tuning")
    parser.add_argument("--tune", type=float, nargs="*", default=[], help="rates of fine-tuning (default: its own)")
    parser.add_argument(
        "--contrast", type=float, nargs="*", default=[], help="fine-tune with such --contrastive-weight"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="bf16", help="of backbones; the probes compute in fp32")
    found = parser.parse_args()
    torch.set_num_threads(found.threads)
    console, rows = Console(), {}
    common: dict[str, Any] = {
        "test": found.test, "labels": [found.labels], "draws": found.draws, "precision": found.precision, "quiet": True
    }  # fmt: skip

    def add(label: str, values: list[float]) -> None:
        console.print(f"{label}:", *(f"{value * 100:.1f}" for value in values))
        rows[label] = values

    for where in found.layers:
        layer, grid = map(int, where.split(":"))
        result = evaluate("fewshot", found.run, found.data, layer=layer, grid=grid, **common)
        for label, by_amount in result.details["draws"].items():
            if not label.startswith("raw pixels"):
                add(f"{label}, layer {layer} in {grid} × {grid} parts", next(iter(by_amount.values())))
    for number, (rate, steps) in enumerate(itertools.product(found.rates, found.steps)):
        result = evaluate(
            "fewshot", found.run, found.data, scratch=True, scratch_lr=rate, scratch_steps=steps,
            baseline=number == 0, **common,
        )  # fmt: skip
        for label, by_amount in result.details["draws"].items():
            if label == SCRATCH or label not in rows:
                name = f"{label}, rate {rate:g}, {steps} steps" if label == SCRATCH else label
                add(name, next(iter(by_amount.values())))
    tuned = [(rate, steps, weight) for rate in found.tune or ["auto"] for steps in found.steps
             for weight in (0.0, *found.contrast)]  # fmt: skip
    for rate, steps, weight in tuned:
        further = {"contrastive_weight": weight, "unlabelled": found.data} if weight else {}
        result = evaluate(
            "finetune", found.run, found.data, lr=rate, steps=steps, validation_share=0, baseline=False,
            **further, **common,
        )  # fmt: skip
        label, by_amount = next(iter(result.details["draws"].items()))
        add(f"{label}, rate {rate}, {steps} steps", next(iter(by_amount.values())))
    console.print(_table(rows, found.labels, result.details["pictures"]["to test on"]))


def _table(rows: dict[str, list[float]], labels: str, tested: int) -> Table:
    shown = Table(title=f"{labels} of the labels, accuracy on {tested} pictures, %")
    shown.add_column("trained on the labels")
    for column in ("mean", "±", *(f"draw {number}" for number in range(len(next(iter(rows.values())))))):
        shown.add_column(column, justify="right")
    for label, values in rows.items():
        held = torch.tensor(values, dtype=torch.float64) * 100
        spread = held.std() if len(held) > 1 else torch.zeros(())
        shown.add_row(label, *(f"{value:.1f}" for value in (held.mean(), spread, *held)))
    return shown


if __name__ == "__main__":
    main()
