"""`moco demo`: pre-train on the pictures in the package, compare with raw pixels and an untrained net, show it all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor, nn

from moco.data import fashion
from moco.data.loader import evaluation_batches
from moco.data.sources import ArraySource
from moco.evaluate.features import encode
from moco.evaluate.handheld import handheld
from moco.evaluate.knn import knn_accuracy
from moco.evaluate.linear import few_labels, linear_accuracy
from moco.pretraining import pretrain
from moco.settings import PretrainSettings
from moco.train.run import SETTINGS, Run, write_atomically

EPOCHS = 16
BASE_WIDTH = 16
COLUMNS = ("kNN", "linear probe", "kNN, hand-held", "linear, 10 labels/class")
Features = Callable[[np.ndarray], Tensor]


def demonstrate(out: str = "runs/demo") -> Run:
    """Pre-train a small ResNet on 10,000 Fashion-MNIST pictures and print how good its features are on 2,000 others.

    out: the run folder; a number is added if it is taken. Besides a run's usual files it gets demo.json.
    """
    began = time.monotonic()
    console = Console(soft_wrap=True)
    with resources.as_file(resources.files(fashion) / "fashion.npz") as pictures:
        run = pretrain(
            pictures, recipe="small", base_width=BASE_WIDTH, epochs=EPOCHS, monitor_every=2, out=free_folder(out)
        )
    rows = evaluate(run, console)
    write_atomically(run.path / "demo.json", json.dumps(rows, indent=2).encode())
    console.print(table(rows))
    console.print(f"run folder: {run.path}", highlight=False)
    console.print(f"curves:     {run.path / 'curves.png'}", highlight=False)
    console.print(f"took {(time.monotonic() - began) / 60:.1f} minutes", highlight=False)
    return run


def free_folder(path: str) -> str:
    """`path`, or `path-2`, `path-3` … if it holds a run already."""
    number, free = 1, path
    while (Path(free) / SETTINGS).exists():
        number += 1
        free = f"{path}-{number}"
    return free


def evaluate(run: Run, console: Console | None = None) -> dict[str, dict[str, float]]:
    """Accuracy by row (raw pixels, untrained, pre-trained) and column, on the packaged pictures."""
    x, y, x_test, y_test = fashion.load()
    moved = handheld(x_test)
    labels, test_labels = torch.from_numpy(y).long(), torch.from_numpy(y_test).long()
    few = few_labels(labels, 10)
    settings = run.settings
    torch.manual_seed(settings.seed)
    kinds: dict[str, Features] = {
        "raw pixels": lambda images: torch.from_numpy(images.reshape(len(images), -1).astype(np.float32)),
        "untrained": _encoder(_settled(run.new_backbone(), x, settings), settings),
        "pre-trained": _encoder(run.backbone(), settings),
    }
    rows: dict[str, dict[str, float]] = {}
    columns = (TextColumn("evaluating"), BarColumn(None), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=console is None) as progress:
        task = progress.add_task("", total=len(kinds) * len(COLUMNS))
        for kind, features in kinds.items():
            progress.update(task, description=kind)
            train, test, shaken = features(x), features(x_test), features(moved)
            figures = (
                lambda train=train, test=test: knn_accuracy(train, labels, test, test_labels, k=20),
                lambda train=train, test=test: linear_accuracy(train, labels, test, test_labels),
                lambda train=train, shaken=shaken: knn_accuracy(train, labels, shaken, test_labels, k=20),
                lambda train=train, test=test: linear_accuracy(train[few], labels[few], test, test_labels),
            )
            rows[kind] = {}
            for name, figure in zip(COLUMNS, figures, strict=True):
                rows[kind][name] = figure()
                progress.advance(task)
    return rows


def _settled(network: nn.Module, images: np.ndarray, settings: PretrainSettings) -> nn.Module:
    """An untrained net whose batch norm has at least seen the pictures: else it would compare badly for that alone."""
    assert settings.mean != "auto"
    assert settings.std != "auto"
    network.train()
    with torch.no_grad():
        for batch in _pictures(images[:2560], settings):
            mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (settings.mean, settings.std))
            network((batch.float() / 255 - mean) / std)
    return network.eval()


def _encoder(network: nn.Module, settings: PretrainSettings) -> Features:
    assert settings.mean != "auto"
    assert settings.std != "auto"
    mean, std = settings.mean, settings.std
    network.to(memory_format=torch.channels_last)
    return lambda images: encode(network, _pictures(images, settings), mean=mean, std=std, device="cpu")


def _pictures(images: np.ndarray, settings: PretrainSettings):
    source = ArraySource(images)
    return evaluation_batches(
        source, np.arange(len(images)), size=settings.image_size, channels=settings.channels, batch_size=256
    )


def table(rows: dict[str, dict[str, float]]) -> Table:
    """The result as a table; the best of each column stands out."""
    shown = Table(title="accuracy on 2,000 test pictures it has not seen, %")
    shown.add_column("features")
    for column in COLUMNS:
        shown.add_column(column, justify="right")
    for kind, figures in rows.items():
        best = {column: max(row[column] for row in rows.values()) for column in COLUMNS}
        cells = (f"{'[bold]' * (v == best[c])}{v * 100:.1f}{'[/bold]' * (v == best[c])}" for c, v in figures.items())
        shown.add_row(kind, *cells)
    return shown
