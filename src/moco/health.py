"""`moco health`: is the run learning, and is it sound? Each figure with a verdict, the reason and what to do."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from moco import __version__
from moco.building import build_model
from moco.check.duplicates import exact_groups, near_groups
from moco.check.examine import examine
from moco.contrast.dictionary import InBatch, MemoryBank, Queue
from moco.contrast.method import Method
from moco.contrast.moco import MomentumContrast
from moco.data.device import place
from moco.data.loader import ViewStream
from moco.data.sources import ArraySource
from moco.errors import UserError, counted
from moco.evaluate import findings as judge
from moco.evaluate.contrast_probe import (
    Encoded,
    ViewPairs,
    batch_leak,
    compare,
    encode_pairs,
    negative_count,
    normalises_batches,
)
from moco.evaluate.features import encode
from moco.evaluate.findings import Finding, Verdict
from moco.evaluate.label_free import (
    alignment,
    dead_dimensions,
    effective_rank,
    feature_spread,
    random_cosine,
    retrieval,
    uniformity,
)
from moco.evaluate.pictures import Part, open_part
from moco.evaluate.staleness import age_gap, key_drift
from moco.evaluate.subject import Where, checkpoint_of, load_run, locate
from moco.evaluation import is_text, opened_data, write_figures
from moco.evaluation_settings import HealthSettings, inspection
from moco.pretraining import build_stream
from moco.settings import RunSettings
from moco.train.parallel import Processes, find_device
from moco.train.run import Run

HASHED = 10_000
"""Pictures of an array that are looked through for duplicates; of other data, those that are looked at anyway."""
FOUND_AMONG = 1000
"""Pictures among which an untrained network looks for the other view."""
OTHER_PICTURES = 0.8
"""Cosine of the newest keys with their re-encodings below which pictures that were named are not those of the run.

For those it is nearly 1, since the key encoder has not moved since.
"""
ASSUMED_GROUP = 32
"""Pictures per batch norm group of a run of several processes, whose number it does not note."""
STYLES: dict[Verdict, str] = {"good": "green", "watch": "yellow", "bad": "red"}


@dataclass(frozen=True)
class Health:
    """What was found. verdict: the worst one. notes: what could not be looked at. path: where the JSON is."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    path: Path | None


@dataclass
class _Patient:
    """A run with its model and some view pairs of its pictures."""

    run: Run
    settings: RunSettings
    model: Method
    part: Part
    pairs: ViewPairs
    device: torch.device
    own_data: bool
    images: int
    given: HealthSettings
    where: Where
    notes: list[str] = field(default_factory=list)


def health(
    subject: str | Path | Run, data: Any = None, *, labels: Any = None, quiet: bool = False, **given: Any
) -> Health:
    """Examine a run and return the findings; print a table and write eval/health.json, as `moco health` does.

    subject: a run (folder or `moco.Run`), or a checkpoint file in one. data: pictures, whatever `moco.pretrain` takes;
    by default those of the run (where they are not, keys are not checked for their age). given: fields of
    `HealthSettings`. quiet: print nothing. Nothing of the run changes, its queue included.

    Raises UserError for anything wrong with run, data or settings.
    """
    named = {"data": data, "labels": labels}
    settings = inspection(HealthSettings, given | {name: str(value) for name, value in named.items() if is_text(value)})
    where = locate(subject)
    if where.run is None:
        raise UserError(f"health is about a pre-training run: {where.name} is a timm model")
    patient = _admit(where, settings, data, labels)
    found = _examine(patient)
    folder = Path(settings.out).expanduser() if settings.out else where.run.path / "eval"
    name = "health" + (f"-{where.checkpoint.stem}" if where.checkpoint is not None else "")
    details = {
        "subject": where.name,
        "step": patient.model.step,
        "moco": __version__,
        "torch": torch.__version__,
        "settings": json.loads(settings.model_dump_json()),
        "verdict": judge.worst(found),
        "findings": [asdict(finding) for finding in found],
        "notes": patient.notes,
    }
    path = write_figures(folder, name, details, {})
    result = Health(judge.worst(found), tuple(found), tuple(patient.notes), path)
    if not quiet:
        show(result, Console(soft_wrap=True))
    return result


def _admit(where: Where, given: HealthSettings, data: Any, labels: Any) -> _Patient:
    """Load the run and draw view pairs from the pictures."""
    assert where.run is not None
    device = find_device(given.device)
    notes: list[str] = []
    state: dict[str, Any] = checkpoint_of(where, notes)
    settings = where.run.settings
    rows = settings.batch_size // settings.accumulate
    if settings.processes is not None:
        groups = 1 if settings.sync_bn else settings.processes * settings.bn_groups
        settings = settings.model_copy(update={"bn_groups": groups})
    elif settings.shuffle_bn and settings.bn_groups == 1:
        groups = max(rows // ASSUMED_GROUP, 2)
        notes.append(f"a run of several processes: taken as {groups} groups of batch norm")
        settings = settings.model_copy(update={"bn_groups": groups})
    opened, label_text = opened_data(where, given.data, data, given.label_source, labels)
    part = open_part(opened, label_text, needed=False, most=given.images, seed=given.seed)
    with torch.random.fork_rng(devices=[]):
        model = build_model(settings, state["images"])
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise UserError(f"{where.name} does not fit its settings: {str(error).splitlines()[0]}") from error
    model.to(device).to(memory_format=torch.channels_last).eval()
    if len(part) < 4:
        raise UserError(f"{part.name} has {counted(len(part), 'picture')}: four or more are needed")
    # Other pictures say nothing about which keys of the queue are of the same picture.
    own_data = (data is None and not given.data) or len(part.source) == state["images"]
    pairs = _view_pairs(part, settings, min(rows, len(part) // 2), given, device, own_data)
    return _Patient(where.run, settings, model, part, pairs, device, own_data, len(part.source), given, where, notes)


def _view_pairs(
    part: Part, settings: RunSettings, rows: int, given: HealthSettings, device: torch.device, own_data: bool
) -> ViewPairs:
    source = part.as_source()
    small = isinstance(source, ArraySource) and max(source.images.shape[1:3]) <= 96
    stream = ViewStream(
        source, query=settings.query_views, key=settings.key_views, size=settings.image_size,
        channels=settings.channels, batch_size=rows, seed=given.seed + 1, workers=given.workers,
        way="batch" if small else "image", device=device,
    )  # fmt: skip
    batches = [place(batch, torch.device("cpu")) for batch in stream.run(0, stream.steps_per_epoch)]
    # Numbers that no key of the run has, a different one for each picture.
    indices = torch.from_numpy(part.indices) if own_data else -2 - torch.arange(len(part))
    return ViewPairs(
        [batch.query for batch in batches],
        [batch.key for batch in batches],
        [indices[batch.ids] for batch in batches],
        settings.mean,
        settings.std,
    )


def _examine(patient: _Patient) -> list[Finding]:
    broken = [
        name
        for name, tensor in patient.model.state_dict().items()
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all()
    ]
    if broken:
        patient.notes.append("nothing else was looked at, since weights are no numbers")
        return [judge.finite_finding(broken)]
    encoded = _encoded(patient)
    return [
        *_contrast(patient, encoded),
        *_features(patient),
        *_stale(patient, encoded),
        _duplicates(patient),
        _augmentation(patient),
        *_records(patient),
    ]


def _encoded(patient: _Patient) -> Encoded | None:
    """Queries and keys of the view pairs; None for a method that has none of its own."""
    model, settings = patient.model, patient.settings
    if not isinstance(model, MomentumContrast):
        return None
    return encode_pairs(
        model, patient.pairs, groups=settings.bn_groups, shuffled=settings.shuffle_bn, seed=patient.given.seed
    )


def _contrast(patient: _Patient, encoded: Encoded | None) -> list[Finding]:
    """Loss, batch norm leak, negatives and temperature: queries against the keys that they meet."""
    model, settings = patient.model, patient.settings
    if encoded is None or not isinstance(model, MomentumContrast):
        patient.notes.append(f"loss, negatives and temperature are looked at for MoCo only, not for {settings.method}")
        return []
    count, dictionary = negative_count(model, encoded), model.dictionary
    random = int((dictionary.births < 0).sum()) if isinstance(dictionary, Queue) else 0
    if random:
        patient.notes.append(f"{random} of {count} keys in the queue are still the random ones it began with")
    # The bank's vectors of the pictures are what their queries meet in training.
    positives = encoded.as_trained
    if isinstance(dictionary, MemoryBank) and patient.own_data:
        positives = dictionary.vectors(encoded.ids).cpu()
    figures = compare(model, encoded, positives)
    loss, chance = float(figures.loss.mean()), math.log(count + 1)
    epochs = model.step * settings.batch_size / max(patient.images, 1)
    # Only a queue holds a picture more than once; elsewhere the one key of its own is the positive.
    own = float(figures.own.mean()) if isinstance(dictionary, Queue) else 0.0
    return [
        judge.loss_finding(loss, chance, epochs),
        _leak(patient, model, encoded, chance),
        judge.negatives_finding(float(figures.above.mean()), own, count, patient.images),
        judge.temperature_finding(float(figures.hardest.mean()), model.temperature),
    ]


def _leak(patient: _Patient, model: MomentumContrast, encoded: Encoded, chance: float) -> Finding:
    """What keys know of their batch, where anything that is normalised with it reaches them."""
    if isinstance(model.dictionary, MemoryBank):
        reason = "the keys are vectors of earlier steps, made with other pictures than their queries"
        return Finding("batch norm leak", "no keys of the same batch", "good", reason, "", {})
    if not normalises_batches(model):
        return Finding("batch norm leak", "no batch norm", "good", "nothing in the encoder sees the batch", "", {})
    shuffled, groups = patient.settings.shuffle_bn, patient.settings.bn_groups
    in_batch = isinstance(model.dictionary, InBatch)
    leak = batch_leak(model, encoded)
    return judge.leak_finding(leak, chance, shuffled=shuffled, groups=groups, in_batch=in_batch)


def _encode(patient: _Patient, network: nn.Module, views: list[Tensor] | Any) -> Tensor:
    return encode(
        network, views, mean=patient.settings.mean, std=patient.settings.std, device=patient.device,
        precision=patient.given.precision,
    )  # fmt: skip


def _features(patient: _Patient) -> list[Finding]:
    """Collapse, rank, alignment and uniformity, in eval mode."""
    backbone = _encode(patient, patient.model.backbone, patient.pairs.query)
    rank = judge.rank_finding(effective_rank(backbone), dead_dimensions(backbone), backbone.shape[1])
    if patient.settings.method == "cpc":
        patient.notes.append("spread and alignment are not looked at for cpc, whose head sees patches only")
        return [rank]
    first = _encode(patient, patient.model.query_encoder, patient.pairs.query)
    second = _encode(patient, patient.model.query_encoder, patient.pairs.key)
    return [
        judge.spread_finding(feature_spread(first), random_cosine(first)),
        rank,
        judge.alignment_finding(alignment(first, second), uniformity(first)),
    ]


def _stale(patient: _Patient, encoded: Encoded | None) -> list[Finding]:
    """Queued keys against their re-encodings; only where the pictures are those of the run."""
    settings, model = patient.settings, patient.model
    if encoded is None or not isinstance(model, MomentumContrast) or not isinstance(model.dictionary, Queue):
        return []
    if not patient.own_data or len(patient.part.source) < settings.batch_size:
        patient.notes.append("stale keys were not looked at: that needs the pictures that the run was trained on")
        return []
    if settings.views == "custom":
        patient.notes.append("stale keys were not looked at: the views of this run are made by a function of its own")
        return []
    way = settings.views if isinstance(patient.part.source, ArraySource) or settings.views != "batch" else "image"
    stream = build_stream(
        settings.model_copy(update={"workers": 0, "views": way}),
        patient.part.source,
        Processes(0, 1, patient.device),
    )
    drift = key_drift(
        model, lambda step: place(stream.batch(step), patient.device), mean=settings.mean, std=settings.std,
        accumulate=settings.accumulate,
    )  # fmt: skip
    explicit = bool(patient.given.data) or not settings.data
    if not drift or (explicit and min(drift, key=lambda step: step.age).similarity < OTHER_PICTURES):
        patient.notes.append("stale keys were not looked at: these are not the pictures that the run was trained on")
        return []
    real = int((model.dictionary.births >= 0).sum())
    hidden = age_gap(
        drift, encoded.query, encoded.as_trained, encoded.ids, temperature=model.temperature, keys=real
    )  # fmt: skip
    loss = float(compare(model, encoded, encoded.as_trained).loss.mean())
    gained = math.log(len(model.dictionary) + 1) - loss
    return [judge.stale_finding({step.age: step.similarity for step in drift}, settings.momentum, hidden, gained)]


def _duplicates(patient: _Patient) -> Finding:
    """Copies, exact and near, as `moco check` finds them: of an array, among more pictures than are looked at else."""
    part = patient.part
    if isinstance(part.source, ArraySource):
        chosen = np.random.default_rng(patient.given.seed).permutation(len(part.source))[:HASHED]
        part = replace(part, indices=chosen, labels=None)
    looked = examine(part.as_source(), range(len(part)))
    exact = exact_groups(looked.keys)
    repeated = np.concatenate([np.zeros(0, np.int64), *(group[1:] for group in exact)])
    near = near_groups(np.delete(looked.thumbnails, repeated, axis=0))
    count = max(len(looked.ids), 1)
    return judge.duplicates_finding(sum(map(len, exact)) / count, sum(map(len, near)) / count, len(looked.ids))


def _augmentation(patient: _Patient) -> Finding:
    """Does a network that has learned nothing find the other view?"""
    untrained = load_run(patient.where, patient.notes).untrained
    assert untrained is not None
    network = untrained(None).to(patient.device).to(memory_format=torch.channels_last)
    first, second = (
        _encode(patient, network, torch.cat(list(views))[:FOUND_AMONG].split(256))
        for views in (patient.pairs.query, patient.pairs.key)
    )
    return judge.augmentation_finding(retrieval(first, second), 1 / len(first))


def _records(patient: _Patient) -> list[Finding]:
    """What the run wrote down itself: waiting for data, gradient norms."""
    lines = patient.run.metrics()
    waits = [line["data_wait"] for line in lines[-50:] if "data_wait" in line]
    found = [judge.data_wait_finding(median(waits))] if waits else []
    last: dict[str, Any] = next((line for line in reversed(lines) if any("gradient_norm/" in key for key in line)), {})
    norms = {key.removeprefix("gradient_norm/"): float(value) for key, value in last.items() if "gradient_norm/" in key}
    return [*found, judge.gradient_finding(norms)] if norms else found


def show(found: Health, console: Console) -> None:
    """Print the findings, the worst first."""
    shown = Table(title=f"health: {found.verdict}")
    for column in ("figure", "value", "verdict", "why, and what to do"):
        shown.add_column(column, overflow="fold")
    order = list(STYLES)
    for finding in sorted(found.findings, key=lambda finding: -order.index(finding.verdict)):
        style = STYLES[finding.verdict]
        why = finding.reason + (f". Do: {finding.advice}" if finding.advice else "")
        shown.add_row(escape(finding.name), escape(finding.value), f"[{style}]{finding.verdict}[/{style}]", escape(why))
    console.print(shown)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if found.path is not None:
        console.print(f"figures: {found.path}", highlight=False, markup=False)
