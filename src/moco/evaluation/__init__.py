"""`moco eval`: what a network knows, by its features or fine-tuned, always beside an untrained one.

comparison  the networks side by side, their pictures and features    tasks, finetuning  from there to figures
scratch     the supervised baseline, trained on the same labels
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moco import __version__
from moco.data.sources import ArraySource
from moco.errors import UserError, counted
from moco.evaluate.cache import FeatureCache, weights_fingerprint
from moco.evaluate.pictures import Part, open_part, same_classes, split
from moco.evaluate.subject import Subject, Where, load_run, load_timm, locate
from moco.evaluation.comparison import Comparison
from moco.evaluation.figures import Figures
from moco.evaluation.tasks import run_task
from moco.evaluation_settings import TASKS, EvaluationSettings, RetrievalSettings, inspection
from moco.settings import check_names
from moco.train.checkpoints import write_atomically
from moco.train.parallel import find_device
from moco.train.run import Run

MOST_CLASSES_SHOWN = 30
WHOLE = ("L2 penalty", "learning rate", "last training loss")
"""Figures that are no shares: shown as they are, not in percent."""


@dataclass(frozen=True)
class Evaluation:
    """What was found.

    task: knn, linear, fewshot, finetune or retrieval. rows: figures by row (the subject first) and name; shares are
    0 to 1. details: everything that is in the JSON. notes: lines for the reader. path: where the JSON is, or None.
    """

    task: str
    rows: dict[str, dict[str, float]]
    details: dict[str, Any]
    notes: tuple[str, ...]
    path: Path | None


def evaluate(
    task: str,
    subject: str | Path | Run,
    data: Any = None,
    *,
    labels: Any = None,
    test: Any = None,
    test_labels: Any = None,
    unlabelled: Any = None,
    quiet: bool = False,
    **given: Any,
) -> Evaluation:
    """Evaluate a network and return the figures; print a table and write them down, as `moco eval` does.

    task: knn, linear, fewshot, finetune or retrieval. subject: a run (folder or `moco.Run`), a checkpoint file in one,
    or the name of a timm model. data: labelled pictures, whatever `moco.pretrain` takes; by default those of the run.
    test: pictures to test on; by default a part of the data is set aside. labels, test_labels: where they do not come
    with the pictures. unlabelled: further pictures, for the contrastive loss of finetune. given: fields of the task's
    settings in `moco.evaluation_settings`. quiet: print nothing.

    No tensor of the subject changes. Raises UserError for anything wrong with subject, data, labels or settings.
    """
    check_names([task], TASKS, "evaluation")
    kind = TASKS[task]
    if _is_words(labels):  # percentages
        given, labels = given | {"labels": tuple(labels)}, None
    named = {"data": data, "test": test, "labels": labels, "test_labels": test_labels, "unlabelled": unlabelled}
    settings = inspection(kind, given | {name: str(value) for name, value in named.items() if is_text(value)})
    in_memory = None if is_text(unlabelled) else unlabelled
    if in_memory is not None:
        check_names(["unlabelled"], kind.model_fields, "setting")
    where = locate(subject)
    device = find_device(settings.device)
    train, tested = _parts(where, settings, named)
    notes: list[str] = []
    loaded = _load(where, settings, train, notes)
    console = None if quiet else Console(soft_wrap=True)
    folder = _folder(where, settings)
    cache = FeatureCache(where.run.path / "features" if where.run is not None else None)
    work = Comparison(settings, where, loaded, train, tested, device, cache, console, in_memory, notes)
    _note_missing(work)
    figures = run_task(task, work)
    details, name = _details(task, where, work, figures), _file_name(task, where, settings)
    other = replaced(folder, name, details)  # nothing about these figures: not in their file
    pictures = {f"{name}-{what}.png": content for what, content in figures.pictures.items()}
    path = write_figures(folder, name, details, pictures)
    found = Evaluation(task, figures.rows, details, (*work.notes, *other), path)
    if console is not None:
        show(found, console)
    return found


def is_text(value: Any) -> bool:
    """Whether a value names something (a file, a folder, a word) and so belongs into the settings."""
    return isinstance(value, (str, Path)) and bool(str(value))


def _is_words(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, str) for item in value)


def _parts(where: Where, settings: EvaluationSettings, named: Mapping[str, Any]) -> tuple[Part, Part]:
    """What to learn from and what to test on."""
    needed = not isinstance(settings, RetrievalSettings) or settings.by == "label"
    data, labels = opened_data(where, settings.data, named["data"], _label_source(settings), named["labels"])
    whole = open_part(data, labels, needed=needed, most=settings.images, seed=settings.seed)
    given = named["test"] if named["test"] is not None and not is_text(named["test"]) else settings.test
    if isinstance(given, str) and not given:
        train, test = split(whole, settings.test_share, settings.seed)
        if whole.labels is None:
            test = whole  # nothing is learned: two views of every picture
    else:
        own = named["test_labels"]
        test_labels = settings.test_labels if own is None or is_text(own) else own
        train, test = whole, open_part(given, test_labels, needed=needed, most=settings.images, seed=settings.seed)
    if train.labels is not None and test.labels is not None:
        train, test = same_classes(train, test)
        if len(train.known().unique()) < 2 and needed:
            only = train.classes[int(train.known()[0])]
            raise UserError(f"{train.name} has pictures of one class only, {only}: two or more are needed")
    return train, test


def _label_source(settings: Any) -> str:
    return str(settings.label_source)


def opened_data(where: Where, text: str, given: Any, label_text: str, given_labels: Any) -> tuple[Any, Any]:
    """The data and labels to open: those given, else those of the run. Raises UserError where there are none."""
    if given is not None and not is_text(given):
        data: Any = given
    elif text:
        data = text
    elif where.run is None:
        raise UserError(f"no data: {where.name} is a timm model, so name the pictures too")
    else:
        stored = where.run.settings
        if not stored.data:
            raise UserError(f"no data: {where.run.path} was trained on an array in memory; name the pictures too")
        data, label_text = stored.data, label_text or stored.labels
    if given_labels is not None and not is_text(given_labels):
        return data, np.asarray(given_labels)
    return data, label_text or "auto"


def _load(where: Where, settings: EvaluationSettings, train: Part, notes: list[str]) -> Subject:
    """The network that is asked about; notes: gets lines for the reader."""
    if where.run is not None:
        if settings.pretrained or settings.image_size is not None:
            raise UserError("--pretrained and --image-size are for timm names: a run has its own weights and size")
        return load_run(where, notes)
    source = train.source
    side = max(source.images.shape[1:3]) if isinstance(source, ArraySource) else None
    return load_timm(
        where,
        channels=source.channels,
        picture_side=side,
        image_size=settings.image_size,
        pretrained=settings.pretrained,
        seed=settings.seed,
        notes=notes,
    )


def _note_missing(work: Comparison) -> None:
    """Say which classes have nothing to learn from: their test pictures cannot be found."""
    if work.train.labels is None or work.test.labels is None:
        return
    there = set(work.train.known().tolist())
    for label, count in zip(*work.test.known().unique(return_counts=True), strict=True):
        if int(label) not in there:
            name = work.train.classes[int(label)]
            work.notes.append(
                f"class {name} has no pictures to learn from: its {int(count)} test pictures count as wrong"
            )


def _folder(where: Where, settings: EvaluationSettings) -> Path | None:
    if settings.out:
        return Path(settings.out).expanduser()
    return where.run.path / "eval" if where.run is not None else None


def _file_name(task: str, where: Where, settings: EvaluationSettings) -> str:
    protocol = "-paper" if getattr(settings, "protocol", "") == "paper" else ""
    layer = "" if settings.layer is None else f"-layer{settings.layer}"
    grid = "" if settings.grid == 1 else f"-grid{settings.grid}"
    return task + protocol + layer + grid + (f"-{where.checkpoint.stem}" if where.checkpoint is not None else "")


def _details(task: str, where: Where, work: Comparison, figures: Figures) -> dict[str, Any]:
    return {
        "evaluation": task,
        "subject": where.name,
        "step": work.subject.step,
        "weights": weights_fingerprint(work.subject.backbone),
        "moco": __version__,
        "torch": torch.__version__,
        "settings": json.loads(work.settings.model_dump_json()),
        "pictures": {"from": work.train.name, "to learn from": len(work.train), "to test on": len(work.test)},
        "rows": figures.rows,
        "notes": work.notes,
        **figures.details,
    }


def replaced(folder: Path | None, name: str, details: Mapping[str, Any]) -> list[str]:
    """A note where NAME.json in a folder has figures of other settings or pictures, and is about to be overwritten."""
    if folder is None:
        return []
    try:
        before = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        other = _differing(before["settings"], details["settings"])
        # What was asked for says more than how many pictures that came to.
        other = other or _differing(before.get("pictures", {}), details.get("pictures", {}), "pictures ")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or changed by hand
        return []
    return [f"replaces {name}.json, made with {', '.join(other)}; --out FOLDER keeps both"] if other else []


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], what: str = "") -> list[str]:
    """Names and former values of what is not the same; where and on what it was computed does not count."""
    names = [name for name in now if name in before and name not in ("data", "out", "device", "workers")]
    return [f"{what}{name} {_word(before[name])}" for name in names if before[name] != now[name]]


def _word(value: Any) -> str:
    """A setting as text."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value in (None, "") else str(value)


def write_figures(
    folder: Path | None, name: str, details: Mapping[str, Any], pictures: Mapping[str, bytes]
) -> Path | None:
    """Write NAME.json and the pictures into a folder, each whole or not at all. Raises UserError."""
    if folder is None:
        return None
    path = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in pictures.items():
            write_atomically(folder / file, content)
        write_atomically(path, json.dumps(details, indent=2, ensure_ascii=False).encode())
    except OSError as error:
        raise UserError(
            f"cannot write the figures to {folder}: {error.strerror}; name another folder with --out"
        ) from error
    return path


def show(found: Evaluation, console: Console) -> None:
    """Print the table of an evaluation, its classes and its notes."""
    console.print(table(found))
    classes = found.details.get("per_class")
    if classes is not None and len(classes) <= MOST_CLASSES_SHOWN:
        shown = Table(title=f"by class: {escape(next(iter(found.rows)))}")
        shown.add_column("class")
        shown.add_column("found, %", justify="right")
        for name, share in classes.items():
            shown.add_row(escape(name), "–" if share is None else f"{share * 100:.1f}")
        console.print(shown)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if found.path is not None:
        console.print(f"figures: {found.path}", highlight=False, markup=False)


def table(found: Evaluation) -> Table:
    """The rows of an evaluation: shares in percent, other figures as they are."""
    pictures = found.details["pictures"]
    task = f"{found.task}, k = {found.details['k']}" if "k" in found.details else found.task
    layer, grid = (found.details["settings"][name] for name in ("layer", "grid"))
    task += "" if layer is None else f", layer {layer}"
    task += "" if grid == 1 else f", {grid} × {grid} parts"
    what = f"{task}: {counted(pictures['to learn from'], 'picture')}, tested on {pictures['to test on']} others, %"
    over = plus_minus(found.details)
    what += f"; {over}" if over else ""
    columns = list(dict.fromkeys(name for row in found.rows.values() for name in row))
    plain = [name for name in columns if not name.endswith(" ±")]
    shown = Table(title=escape(what))
    shown.add_column("features")
    for name in plain:
        shown.add_column(escape(name), justify="right")
    for label, row in found.rows.items():
        shown.add_row(escape(label), *(_cell(row, name) for name in plain))
    return shown


def plus_minus(details: Mapping[str, Any]) -> str:
    """What the ± of a table is, from the details of an evaluation; "" for one without."""
    draws = details.get("draws")  # of a file that may have been changed by hand
    rows = [row for row in draws.values() if isinstance(row, Mapping)] if isinstance(draws, Mapping) else []
    counts = [len(values) for row in rows for values in row.values() if isinstance(values, list)]
    if not counts:
        return ""
    what = "trainings" if details.get("evaluation") == "finetune" else "draws of the labels"
    return f"mean ± standard deviation of {counts[0]} {what}" if counts[0] > 1 else f"one of the {what}: no ±"


def _cell(row: Mapping[str, float], name: str) -> str:
    if name not in row:
        return "–"
    if name in WHOLE:
        return f"{row[name]:.3g}"
    spread = row.get(f"{name} ±")
    return f"{row[name] * 100:.1f}" + (f" ± {spread * 100:.1f}" if spread is not None else "")
