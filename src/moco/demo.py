"""`moco demo`: pre-train on the pictures in the package, compare with raw pixels and an untrained net, show it all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor, nn

from moco.bench import measure
from moco.data import fashion
from moco.data.loader import evaluation_batches
from moco.data.sources import ArraySource
from moco.evaluate.features import encode
from moco.evaluate.handheld import handheld
from moco.evaluate.knn import knn_accuracy
from moco.evaluate.linear import few_labels, linear_accuracy
from moco.pretraining import pretrain
from moco.settings import RunSettings
from moco.train.checkpoints import write_atomically
from moco.train.run import SETTINGS, Run

MOST_EPOCHS, FEWEST_EPOCHS = 16, 3
TRAINING_SECONDS = 160  # a demonstration takes under five minutes; where the processor is slow, so is the rest
MEASURING_SECONDS = 10
BASE_WIDTH = 16
FEW_LABEL_DRAWS = 5  # a hundred labels are few: one draw would say little
COLUMNS = ("kNN", "linear probe", "kNN, hand-held", "linear, 10 labels/class")
Pictures = NDArray[np.uint8]
Features = Callable[[Pictures], Tensor]


def demonstrate(out: str = "runs/demo", epochs: int | None = None) -> Run:
    """Pre-train a small ResNet on 10,000 Fashion-MNIST pictures and print how good its features are on 2,000 others.

    out: the run folder; a number is added if it is taken. Besides a run's usual files it gets demo.json. epochs: None
    for as many as this machine trains in `TRAINING_SECONDS`. Raises UserError for epochs below 1.
    """
    began = time.monotonic()
    console = Console(soft_wrap=True)
    with resources.as_file(resources.files(fashion) / "fashion.npz") as pictures:
        if epochs is None:
            epochs = epochs_that_fit(pictures, console)
        run = pretrain(
            pictures, recipe="small", base_width=BASE_WIDTH, epochs=epochs, monitor_every=2, out=free_folder(out)
        )
    x, y, x_test, y_test = fashion.load()
    rows = evaluate_on(run, (x, y), (x_test, y_test), console)
    write_atomically(run.path / "demo.json", json.dumps(rows, indent=2).encode())
    console.print(table(rows))
    console.print(f"run folder: {run.path}", highlight=False)
    console.print(f"curves:     {run.path / 'curves.png'}", highlight=False)
    console.print(f"took {(time.monotonic() - began) / 60:.1f} minutes", highlight=False)
    return run


def epochs_that_fit(pictures: Path, console: Console) -> int:
    """How many epochs this machine trains in `TRAINING_SECONDS`, by a measurement; says so where it is not the most."""
    found = measure(pictures, seconds=MEASURING_SECONDS, recipe="small", base_width=BASE_WIDTH)
    fit = int(TRAINING_SECONDS * found.job / found.images)
    epochs = max(min(fit, MOST_EPOCHS), FEWEST_EPOCHS)
    if epochs < MOST_EPOCHS:
        console.print(
            f"{epochs} epochs, since this machine trains on {found.job:,.0f} images/s; {MOST_EPOCHS} make better "
            f"features: moco demo --epochs {MOST_EPOCHS}",
            highlight=False,
        )
    return epochs


def free_folder(path: str) -> str:
    """`path`, or `path-2`, `path-3` … if it holds a run already."""
    number, free = 1, path
    while (Path(free) / SETTINGS).exists():
        number += 1
        free = f"{path}-{number}"
    return free


def evaluate_on(
    run: Run, train: tuple[Pictures, Pictures], test: tuple[Pictures, Pictures], console: Console | None = None
) -> dict[str, dict[str, float]]:
    """Accuracy (0 to 1) by row (raw pixels, untrained, pre-trained) and column.

    train: pictures (N, H, W) uint8 and their labels, the bank of the kNN and what the probes learn from. test: others.
    """
    (x, y), (x_test, y_test) = train, test
    moved = handheld(x_test)
    labels, test_labels = torch.from_numpy(y).long(), torch.from_numpy(y_test).long()
    settings = run.settings
    torch.manual_seed(settings.seed)
    kinds: dict[str, Features] = {
        "raw pixels": lambda images: torch.from_numpy(images.reshape(len(images), -1).astype(np.float32)),
        "untrained": _encoder(run.new_backbone(), settings),
        "pre-trained": _encoder(run.backbone(), settings),
    }
    rows: dict[str, dict[str, float]] = {}
    columns = (TextColumn("evaluating"), BarColumn(None), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=console is None) as progress:
        task = progress.add_task("", total=len(kinds) * len(COLUMNS))
        for kind, features in kinds.items():
            progress.update(task, description=kind)
            rows[kind] = {}
            figures = _figures(features(x), labels, features(x_test), features(moved), test_labels)
            for name, figure in zip(COLUMNS, figures, strict=True):
                rows[kind][name] = figure
                progress.advance(task)
    return rows


def _figures(bank: Tensor, labels: Tensor, test: Tensor, moved: Tensor, test_labels: Tensor) -> Iterator[float]:
    """The columns of the table, one after the other."""
    yield knn_accuracy(bank, labels, test, test_labels, k=20)
    yield linear_accuracy(bank, labels, test, test_labels)
    yield knn_accuracy(bank, labels, moved, test_labels, k=20)
    draws = [few_labels(labels, 10, seed) for seed in range(FEW_LABEL_DRAWS)]
    yield mean(linear_accuracy(bank[few], labels[few], test, test_labels) for few in draws)


def _encoder(network: nn.Module, settings: RunSettings) -> Features:
    network.to(memory_format=torch.channels_last)
    return lambda images: encode(
        network, _pictures(images, settings), mean=settings.mean, std=settings.std, device="cpu"
    )


def _pictures(images: Pictures, settings: RunSettings) -> Iterator[Tensor]:
    source = ArraySource(images)
    return evaluation_batches(
        source, np.arange(len(images)), size=settings.image_size, channels=settings.channels, batch_size=256
    )


def table(rows: dict[str, dict[str, float]]) -> Table:
    """The result as a table; the best of each column stands out."""
    shown = Table(title="accuracy on test pictures it has not seen, %")
    shown.add_column("features")
    for column in COLUMNS:
        shown.add_column(column, justify="right")
    for kind, figures in rows.items():
        best = {column: max(row[column] for row in rows.values()) for column in COLUMNS}
        cells = (f"{'[bold]' * (v == best[c])}{v * 100:.1f}{'[/bold]' * (v == best[c])}" for c, v in figures.items())
        shown.add_row(kind, *cells)
    return shown
