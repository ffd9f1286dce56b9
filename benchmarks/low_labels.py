"""Few labels: a linear probe on MoCo features against supervised training from scratch on the same labels.

    python benchmarks/low_labels.py RUN --data train.npz --test test.npz

RUN: pre-trained on the pictures of --data without their labels. The probe chooses its penalty on the labelled
pictures alone. The training from scratch is tried at several rates and lengths, and its best row counts, chosen on
the test pictures: the comparison leans towards it.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from rich.console import Console
from rich.table import Table

from moco.evaluation import evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--data", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--labels", default="1%")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1, 0.02])
    parser.add_argument("--steps", type=int, nargs="+", default=[1000])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="bf16", help="of backbones; the probes compute in fp32")
    found = parser.parse_args()
    torch.set_num_threads(found.threads)
    console, rows = Console(), {}
    for number, (rate, steps) in enumerate(itertools.product(found.rates, found.steps)):
        result = evaluate(
            "fewshot", found.run, found.data, test=found.test, labels=[found.labels], draws=found.draws, scratch=True,
            scratch_lr=rate, scratch_steps=steps, baseline=number == 0, precision=found.precision, quiet=True,
        )  # fmt: skip
        for label, by_amount in result.details["draws"].items():
            scratch = label == "supervised from scratch"
            values = next(iter(by_amount.values()))
            console.print(f"{label}, rate {rate:g}, {steps} steps:", [round(value * 100, 1) for value in values])
            rows[f"{label}, rate {rate:g}, {steps} steps" if scratch else label] = values
    shown = Table(title=f"{found.labels} of the labels, accuracy on {result.details['pictures']['to test on']}, %")
    shown.add_column("trained on the labels")
    for column in ("mean", "±", *(f"draw {number}" for number in range(found.draws))):
        shown.add_column(column, justify="right")
    for label, values in rows.items():
        held = torch.tensor(values, dtype=torch.float64) * 100
        spread = held.std() if len(held) > 1 else torch.zeros(())
        shown.add_row(label, *(f"{value:.1f}" for value in (held.mean(), spread, *held)))
    console.print(shown)


if __name__ == "__main__":
    main()
