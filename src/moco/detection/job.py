"""`moco eval detect` as a story: open the marked pictures, train the same detector from each start, compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moco import __version__
from moco.detection.batches import BatchStream
from moco.detection.marked import MarkedSet, common_classes
from moco.detection.network import Plan, build_detector, pyramid_levels
from moco.detection.opening import HINT, open_marked
from moco.detection.outlines import check_installed
from moco.detection.scoring import score
from moco.detection.starts import Start, starts
from moco.detection.table import Detection, rows_of, show
from moco.detection.training import Course, Schedule, train_detector
from moco.errors import Interrupted, UserError, counted
from moco.evaluate.cache import weights_fingerprint
from moco.evaluate.subject import Subject, Where, load_run, locate
from moco.evaluation import write_figures
from moco.evaluation_settings import DetectSettings, inspection
from moco.train.checkpoints import write_atomically
from moco.train.lock import RunLock
from moco.train.parallel import find_device
from moco.train.run import Run
from moco.train.stopping import stop_on_signal

PASSES, FEWEST = 12, 1000
RATE, RATE_BATCH = 0.02, 16
LONG_WARMUP = 1000
USUAL_SIZE, SMALL_SIZE = 800, 320
LONGEST = 1333 / 800
SIZES = 5
"""Sizes that training draws from."""
FIGURES = "figures.json"


@dataclass(frozen=True)
class Work:
    """What a comparison works with. plan, schedule: the settings with every `auto` resolved."""

    settings: DetectSettings
    subject: Subject
    train: MarkedSet
    test: MarkedSet
    plan: Plan
    schedule: Schedule
    device: torch.device
    folder: Path
    console: Console | None
    notes: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Tell the user something, in one line."""
        if self.console is not None:
            self.console.print(text, highlight=False, markup=False)


def detect(subject: str | Path | Run, *, quiet: bool = False, **given: Any) -> Detection:
    """Train a detector from a run's backbone, and from random and other weights; compare, as `moco eval detect` does.

    subject: a run of a ResNet (folder or `moco.Run`), or a checkpoint file in one. given: fields of
    `moco.evaluation_settings.DetectSettings`. quiet: print nothing.

    Trainings that are done, and checkpoints of one that was stopped, lie in OUT/detect; the same call goes on there.
    Raises UserError for anything wrong with subject, data or settings, TrainingError where a loss is no number, and
    Interrupted after Ctrl-C, when everything is saved.
    """
    settings = inspection(DetectSettings, given)
    if not settings.data:
        raise UserError(f"name marked pictures to learn from: --data {HINT}")
    check_installed()
    where = locate(subject)
    if where.run is None:
        raise UserError(f"moco eval detect takes a run folder or a checkpoint in one; {where.name} is a timm model")
    loaded = load_run(where)
    pyramid_levels(loaded.backbone, loaded.channels)  # is it a network that can be taken?
    found_starts = starts(settings, loaded)
    console = None if quiet else Console(soft_wrap=True)
    work = _work(settings, where, loaded, console)
    done: dict[str, list[dict[str, Any]]] = {start.label: [] for start in found_starts}
    _make_folder(work)
    lock = RunLock(work.folder)
    lock.take()
    try:
        for number in range(settings.seeds):
            for start in found_starts:
                done[start.label].append(_trained(work, start, settings.seed + number))
    finally:
        lock.release()
    rows = rows_of({label: [one["figures"] for one in several] for label, several in done.items()})
    details = _details(where, work, rows, done)
    path = write_figures(work.folder.parent, _file_name(where), details, {})
    found = Detection(rows, details, tuple(work.notes), path)
    if console is not None:
        show(found, console)
    return found


def _make_folder(work: Work) -> None:
    try:
        work.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {work.folder}: {error.strerror}; name another folder with --out") from error


def _work(settings: DetectSettings, where: Where, subject: Subject, console: Console | None) -> Work:
    """Data opened, every `auto` resolved, and said in a line."""
    assert where.run is not None
    outlines = settings.masks != "no"
    whole = open_marked(settings.data, outlines=outlines)
    train, test = (
        _split(whole, settings) if not settings.test else (whole, open_marked(settings.test, outlines=outlines))
    )
    classes = common_classes(train, test)
    notes = list(dict.fromkeys([*train.notes, *test.notes]))
    if settings.norm == "frozen" and settings.baseline:
        notes.append("from random weights batch norm learns, since there are no statistics to freeze")
    test = test.named(classes)
    train = _limited(train.named(classes).to_learn(empty=settings.empty), settings)
    if not train.objects() or not test.objects():
        raise UserError(f"{(test if train.objects() else train).name} has no objects to learn from or to find")
    masks = outlines and train.has_outlines() and test.has_outlines()
    if settings.masks == "yes" and not masks:
        raise UserError("--masks yes: not every object has a mask; use --masks auto, or data with masks (COCO)")
    size = _size(settings, train)
    longest = round(max(size) * LONGEST)
    plan = Plan(len(classes), masks, settings.norm, subject.mean, subject.std, size, longest, settings.rois)
    schedule = _schedule(settings, len(train))
    out = Path(settings.out).expanduser() if settings.out else where.run.path / "eval"
    work = Work(
        settings, subject, train, test, plan, schedule, find_device(settings.device), out / "detect", console, notes
    )
    rate = f"{schedule.learning_rate:.4g}"
    work.say(
        f"{'Mask' if masks else 'Faster'} R-CNN, {counted(len(classes), 'class', 'classes')} · "
        f"{counted(len(train), 'picture')} with {counted(train.objects(), 'object')}, tested on {len(test)} · "
        f"{schedule.iterations:,} iterations of {settings.batch_size} "
        f"({schedule.iterations * settings.batch_size / len(train):.1f} passes) · lr {rate} · side {max(size)}"
    )
    return work


def _split(whole: MarkedSet, settings: DetectSettings) -> tuple[MarkedSet, MarkedSet]:
    count = round(settings.test_share * len(whole))
    if not 0 < count < len(whole):
        raise UserError(f"{whole.name} has {counted(len(whole), 'picture')}: too few to set some aside; name --test")
    order = np.random.default_rng(settings.seed).permutation(len(whole))
    return whole.rows(np.sort(order[count:])), whole.rows(np.sort(order[:count]))


def _limited(train: MarkedSet, settings: DetectSettings) -> MarkedSet:
    if settings.images is None or settings.images >= len(train):
        return train
    return train.rows(np.sort(np.random.default_rng(settings.seed).permutation(len(train))[: settings.images]))


def _size(settings: DetectSettings, train: MarkedSet) -> tuple[int, ...]:
    """Shorter sides to train with; the largest, which is the one of testing, is the last."""
    usual = int(np.median([min(picture.width, picture.height) for picture in train.pictures]))
    own = (USUAL_SIZE if usual >= SMALL_SIZE else usual) if settings.size == "auto" else settings.size
    return tuple(round(float(part) * own) for part in np.linspace(settings.size_range, 1, SIZES))


def _schedule(settings: DetectSettings, pictures: int) -> Schedule:
    fitting = max(-(-PASSES * pictures // settings.batch_size), FEWEST)
    iterations = fitting if settings.iterations == "auto" else settings.iterations
    rate = RATE * settings.batch_size / RATE_BATCH if settings.lr == "auto" else settings.lr
    warmup = min(LONG_WARMUP, iterations // 10) if settings.warmup == "auto" else settings.warmup
    drops = tuple(round(part * iterations) for part in settings.drops)
    return Schedule(iterations, rate, warmup, drops, settings.weight_decay)


# ---------------------------------------------------------------- one training


def _trained(work: Work, start: Start, seed: int) -> dict[str, Any]:
    """One training from a start, tested: figures, losses, pictures that could not be read. Done before: read."""
    settings, backbone = work.settings, start.make(seed)
    plan = replace(work.plan, mean=start.mean, std=start.std, norm=start.norm)
    folder = work.folder / f"{start.label.split()[0]}-{seed}-{_identity(work, plan, backbone, seed)}"
    known = _read(folder / FIGURES)
    if known is not None:
        work.say(f"{start.label}, seed {seed}: done before")
        return known
    folder.mkdir(exist_ok=True)
    network = build_detector(backbone, plan, seed=seed)
    channels = work.subject.channels
    stream = BatchStream(
        work.train, channels=channels, masks=plan.masks, batch_size=settings.batch_size, seed=seed,
        workers=settings.workers,
    )  # fmt: skip
    with stop_on_signal() as stop, _bar(work, f"{start.label}, seed {seed}", work.schedule.iterations) as say:
        course = Course(
            work.schedule, folder, work.device, settings.precision, settings.save_every,
            lambda: stop.received is not None, say, work.say,
        )  # fmt: skip
        finished = train_detector(network, stream, course)
    if not finished:
        raise Interrupted(
            f"stopped and saved in {folder}; the same command goes on there", 128 + int(stop.received or 2)
        )
    with _bar(work, "testing", len(work.test)) as say:
        figures, unreadable = score(
            network, work.test, channels=channels, masks=plan.masks, device=work.device, precision=settings.precision,
            say=say,
        )  # fmt: skip
    found = {"seed": seed, "figures": figures, "losses": course.losses, "unreadable": course.skipped | unreadable}
    write_atomically(folder / FIGURES, json.dumps(found, indent=2, ensure_ascii=False).encode())
    for path in folder.glob("step-*"):  # the figures are there: the weights have done their work
        path.unlink()
    work.say(f"{start.label}, seed {seed}: " + ", ".join(f"{name} {value:.1%}" for name, value in figures.items()))
    return found


def _identity(work: Work, plan: Plan, backbone: torch.nn.Module, seed: int) -> str:
    """A short hash of all that a training depends on, so that none is taken for another one."""
    found = hashlib.sha256(
        repr((plan, work.schedule, work.settings.batch_size, work.settings.precision, seed)).encode()
    )
    found.update(weights_fingerprint(backbone).encode())
    for part in (work.train, work.test):
        found.update(repr((part.name, part.classes)).encode())
        for picture in part.pictures:
            found.update(f"{picture.path}\0{picture.width}\0{picture.height}".encode("utf-8", "surrogateescape"))
            for array in (picture.boxes, picture.labels, picture.aside):
                found.update(array.tobytes())
            for outline in picture.outlines if plan.masks else ():
                found.update(outline["counts"] if outline is not None else b"-")
    return found.hexdigest()[:10]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "figures" in found else None


def _bar(work: Work, what: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
    """A progress bar; what it gives is told of so many more that are done."""
    if work.console is None:
        return nullcontext(lambda count: None)
    return _Bar(work.console, what, total)


class _Bar:
    def __init__(self, console: Console, what: str, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task(what, total=total)

    def __enter__(self) -> Callable[[int], object]:
        self._progress.start()
        return lambda count: self._progress.advance(self._task, count)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


# ---------------------------------------------------------------- what was found


def _file_name(where: Where) -> str:
    return "detect" + (f"-{where.checkpoint.stem}" if where.checkpoint is not None else "")


def _details(
    where: Where, work: Work, rows: dict[str, dict[str, float]], done: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    unreadable = {name: why for several in done.values() for one in several for name, why in one["unreadable"].items()}
    if unreadable:
        name, why = next(iter(unreadable.items()))
        left_out = counted(len(unreadable), "picture")
        work.notes.append(f"{left_out} could not be read and passed over, such as {name}: {why}")
    plan = work.plan
    return {
        "evaluation": "detect",
        "subject": where.name,
        "step": work.subject.step,
        "weights": weights_fingerprint(work.subject.backbone),
        "moco": __version__,
        "torch": torch.__version__,
        "settings": json.loads(work.settings.model_dump_json()),
        "resolved": {
            "detector": "Mask R-CNN" if plan.masks else "Faster R-CNN",
            "iterations": work.schedule.iterations,
            "learning rate": work.schedule.learning_rate,
            "warm-up": work.schedule.warmup,
            "drops": list(work.schedule.drops),
            "sizes": list(plan.sizes),
            "longest side": plan.longest,
            "strides": [level.stride for level in pyramid_levels(work.subject.backbone, work.subject.channels)],
        },
        "pictures": {
            "from": work.train.name, "to learn from": len(work.train), "objects": work.train.objects(),
            "tested": work.test.name, "to test on": len(work.test), "objects to find": work.test.objects(),
        },
        "classes": list(work.train.classes),
        "rows": rows,
        "trainings": done,
        "notes": work.notes,
    }  # fmt: skip
