"""What is looked at before hours go into the first training: settings, test data, and whether each row can be built."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from moco.bench.parts import build_job
from moco.comparing.plan import Row, idle
from moco.data.sources import Source, open_source
from moco.errors import UserError
from moco.recipes import ONLY_FOR, RECIPES, pretrain_settings
from moco.resolve import resolve
from moco.settings import PretrainSettings
from moco.train.parallel import Processes, find_device
from moco.train.trackers import wanted


def check_settings(base: Mapping[str, Any], rows: Iterable[Row]) -> PretrainSettings:
    """The settings that all rows share. Raises UserError for a row whose settings are none, naming it."""
    for row in rows:
        row_settings(base, row)
    settings = pretrain_settings(**base)
    wanted(settings)
    if settings.views == "custom":
        raise UserError(
            "views custom are a function, which trainings in processes of their own do not get: choose others"
        )
    return settings


def row_settings(base: Mapping[str, Any], row: Row) -> PretrainSettings:
    """The settings of a row. What its method does not know is no mistake where all rows have it: the others may."""
    values = {**base, **row.settings}
    usual = RECIPES.get(str(values.get("recipe")), {}).get("method", "moco")
    method = str(values.get("method", usual))
    own = {
        name: value for name, value in values.items() if name in row.settings or method in ONLY_FOR.get(name, (method,))
    }
    try:
        return pretrain_settings(**own)
    except UserError as error:
        raise UserError(f"{row.name}: {error}") from error


def check_varied(base: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Raise UserError for a row of an ablation whose settings would change nothing."""
    for row in rows:
        settings = row_settings(base, row)
        for name in row.settings:
            why = idle(name, settings)
            if why is not None:
                raise UserError(f"{row.name}: {name} changes nothing here: {why}")


def check_budget(given: Mapping[str, Any], minutes: float | None, images_seen: int | None) -> None:
    """Raise UserError for a budget that is none, and for several."""
    for flag, budget in (("--minutes", minutes), ("--images-seen", images_seen)):
        if budget is not None and not 0 < budget < math.inf:
            raise UserError(f"{flag} {budget}: a budget is more than nothing")
    budgets = {"--minutes": minutes, "--images-seen": images_seen, "--epochs": given.get("epochs")}
    named = [flag for flag, budget in budgets.items() if budget is not None]
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)} are {'two' if len(named) == 2 else 'three'} budgets: choose one")


def check_test(test: str, source: Source) -> None:
    """Raise UserError where the pictures to test on cannot be opened, or there are no labels, there or in the data."""
    labels = open_source(test).labels
    if labels is None or not (labels >= 0).any():
        raise UserError(f"--test {test} has no labels: use sub-folders, y in the .npz, or a list with labels")
    if not has_labels(source):
        raise UserError("--test needs pictures with labels to learn from: DATA has none, or one class; leave it out")


def has_labels(source: Source) -> bool:
    """Whether there are classes to tell apart."""
    return source.labels is not None and len(set(source.labels[source.labels >= 0].tolist())) > 1


def check_trainings(base: Mapping[str, Any], rows: Sequence[Row], source: Source) -> None:
    """Raise UserError for the first row that does not fit the data or the machine, or cannot be built."""
    measured: dict[str, Any] = {}
    for row in rows:
        asked = row_settings(base, row)
        kept = {name: value for name, value in measured.items() if getattr(asked, name) == "auto"}
        try:
            found = resolve(asked.model_copy(update=kept), source, Processes(0, 1, find_device(asked.device)))
            # The same for all rows, and pictures have to be decoded for it.
            measured = {"mean": found.mean, "std": found.std}
            # On the CPU, so that a GPU is left to the trainings; and without what takes long or writes a file.
            plain = found.model_copy(update={"compile": False, "bank_on_disk": False, "precision": "fp32"})
            build_job(plain, source, Processes(0, 1, torch.device("cpu")))
        except UserError as error:
            raise UserError(f"{row.name}: {error}") from error
