"""`moco embed`, `moco search`, `moco cluster`: features of pictures in a file, and what can be found with them.

encoder   the network            pictures  batches, and which pictures could not be read
parts     what is done so far    writing, reading  embedding files
searching, clustering            sheet  contact sheets
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from moco import __version__
from moco.data.loader import cores
from moco.data.sources import ArraySource, PackedNames, Source, open_source
from moco.data.sources.folder import FileSource
from moco.data.sources.objects import ObjectSource
from moco.embedding.encoder import Encoder, open_encoder
from moco.embedding.parts import Part, Parts
from moco.embedding.pictures import BATCH, PictureBatch, picture_batches, row_labels, source_identity
from moco.embedding.progress import EncodingProgress
from moco.embedding.reading import FORMAT, Embeddings, open_embeddings
from moco.embedding.writing import SUFFIXES, Rows, arrow, write_npy, write_parquet, write_skipped
from moco.embedding_settings import EmbedSettings
from moco.errors import Interrupted, UserError, counted
from moco.evaluate.features import checked_features, encode
from moco.evaluate.subject import locate
from moco.evaluation import is_text, opened_data
from moco.evaluation_settings import inspection
from moco.pretraining import named
from moco.resolve import absolute
from moco.train.parallel import find_device
from moco.train.run import Run

Array = np.ndarray[Any, Any]

FEW = 4 * BATCH
"""Pictures for which no processes are started."""


def embed(
    run: str | Path | Run,
    data: Any = None,
    *,
    out: str | Path = "",
    labels: Any = None,
    quiet: bool = False,
    **given: Any,
) -> Array:
    """The features of pictures, (N, D), one row for each.

    run: a run (folder or `moco.Run`), a checkpoint file in one, or the name of a timm model. data: pictures, whatever
    `moco.pretrain` takes; by default those of the run. given: fields of `EmbedSettings`. quiet: print nothing.

    Without `out`: float32 in memory, or float16 with dtype="float16"; a picture that cannot be read is a row of NaN,
    and a warning says so. With `out`, FILE.parquet or FILE.npy: what `write_embeddings` writes, where pictures that
    cannot be read have no row (the column `index` says which picture a row is); of a .npy file the array is mapped.

    >>> features = moco.embed("runs/first", images)       # uint8 (N, H, W, C) → float32 (N, D)

    Raises UserError for anything wrong with run, data or settings.
    """
    if str(out):
        return write_embeddings(run, data, out=out, labels=labels, quiet=quiet, **given).features()
    job = _prepare(run, data, labels, given)
    made: list[Array] = []
    missing: list[tuple[str, str]] = []
    with EncodingProgress(_terminal(quiet), len(job.indices)) as progress:
        for batch, features in job.encoded(0):
            rows = job.numbers(features)
            rows[list(batch.unreadable)] = np.nan
            made.append(rows)
            progress.batch(len(batch.names), len(batch.unreadable))
            missing += [(batch.names[row], reason) for row, reason in batch.unreadable.items()]
    if missing:
        first = "{}: {}".format(*missing[0])
        warnings.warn(f"{len(missing):,} unreadable, with rows of NaN; the first: {first}", stacklevel=2)
    return np.concatenate(made)


def write_embeddings(
    run: str | Path | Run,
    data: Any = None,
    *,
    out: str | Path,
    labels: Any = None,
    quiet: bool = False,
    **given: Any,
) -> Embeddings:
    """Write the features of pictures into a file, as `moco embed` does, and return what reads it.

    out: FILE.parquet with the columns index, path, label, class_name and feature; or FILE.npy with the features, and
    FILE.csv with the other columns and FILE.json beside it. Finished parts wait in OUT.parts: after a crash the same
    call goes on behind the last one, and on one machine the file comes out the same, byte for byte. Pictures that
    cannot be read are left out and listed in OUT.skipped.csv. In memory are at most `part` pictures' features.

    Raises UserError for anything wrong with run, data, settings or files, and Interrupted after Ctrl-C.
    """
    path = _new_file(Path(out).expanduser())
    notes: list[str] = []
    job = _prepare(run, data, labels, given, notes)
    if job.part != job.settings.part < len(job.indices):
        notes.append(f"--part {job.settings.part} is rounded up to {job.part:,}: whole batches of {BATCH} pictures")
    console = None if quiet else Console(soft_wrap=True)
    if console is not None:
        for notice in [*job.source.notices, *(f"note: {note}" for note in notes)]:
            console.print(notice, highlight=False, markup=False)
    with Parts(path, job.identity()).opened() as parts:
        if console is not None and parts.done:
            console.print(f"going on behind {parts.done:,} pictures that are done", highlight=False)
        try:
            _encode_rest(job, parts, console)
            rows, skipped = _finish(job, parts, path)
        except KeyboardInterrupt as stop:
            done = f"{parts.done:,} of {len(job.indices):,} pictures are kept"
            raise Interrupted(f"stopped; {done}: the same command goes on behind them") from stop
        except OSError as error:
            raise UserError(
                f"cannot write {error.filename or path}: {error.strerror}; what is done is kept: the same command goes "
                "on behind it"
            ) from error
        parts.remove()
    found = open_embeddings(path)
    if console is not None:
        text = f"{path}: {counted(rows, 'row')} of {found.dimensions} numbers, {found.about['dtype']}"
        pictures = counted(skipped, "picture")
        left_out = f"; {pictures} could not be read: {_skipped_file(path)}" if skipped else ""
        console.print(text + left_out, highlight=False, markup=False)
    return found


@dataclass
class _Job:
    """Pictures, the network they go through, and how."""

    source: Source
    indices: Array
    encoder: Encoder
    settings: EmbedSettings
    device: torch.device
    data: list[str]

    def encoded(self, first: int) -> Iterator[tuple[PictureBatch, Tensor]]:
        """Batches of pictures from batch number `first` on, and their features (n, D) float32."""
        encoder, settings = self.encoder, self.settings
        batches = picture_batches(
            self.source,
            self.indices,
            size=encoder.size,
            channels=encoder.channels,
            workers=self._workers(),
            first=first,
        )
        for batch in batches:
            features = encode(
                encoder.network,
                [batch.pictures],
                mean=encoder.mean,
                std=encoder.std,
                device=self.device,
                precision=settings.precision,
            )
            checked_features(features, f"the features of {encoder.name}")
            yield batch, torch.nn.functional.normalize(features, dim=1) if settings.normalize else features

    @property
    def part(self) -> int:
        """Pictures between two savings: whole batches."""
        return -(-self.settings.part // BATCH) * BATCH

    def numbers(self, features: Tensor) -> Array:
        """Features in the type of the file. Raises UserError for some that it cannot hold."""
        if self.settings.dtype == "float16" and float(features.abs().max()) > torch.finfo(torch.float16).max:
            raise UserError("features are too large for float16: use --dtype float32, or --normalize")
        return features.numpy().astype(self.settings.dtype)

    def _workers(self) -> int:
        if self.settings.workers != "auto":
            return int(self.settings.workers)
        files = not isinstance(self.source, (ArraySource, ObjectSource)) and len(self.indices) > FEW
        return cores() if files else 0

    def identity(self) -> dict[str, Any]:
        """All that the features and the other columns depend on, by what a message calls it."""
        settings, source, encoder = self.settings, self.source, self.encoder
        labels = row_labels(source, self.indices)
        return {
            "weights": encoder.weights,
            "pictures": source_identity(source),
            "choice of pictures": hashlib.sha256(self.indices.tobytes()).hexdigest(),
            "labels": hashlib.sha256(labels.tobytes() + repr(source.classes).encode("utf-8", "replace")).hexdigest(),
            "preparation of pictures": encoder.preparation(),
            "settings": [settings.dtype, settings.head, settings.normalize, settings.precision, self.device.type],
            "versions": [__version__, torch.__version__],
        }

    def about(self, rows: int, skipped: int, dimensions: int) -> dict[str, Any]:
        """What the file says of itself."""
        settings, encoder = self.settings, self.encoder
        return {
            "format": FORMAT,
            "moco": __version__,
            "run": encoder.name,
            "step": encoder.step,
            "weights": encoder.weights,
            **encoder.preparation(),
            "head": settings.head,
            "normalized": settings.normalize,
            "pretrained": settings.pretrained,
            "seed": settings.seed,
            "dtype": settings.dtype,
            "precision": settings.precision,
            "rows": rows,
            "skipped": skipped,
            "dimensions": dimensions,
            "classes": self.source.classes,
            "data": self.data,
            "pictures": len(self.source),
            "files": isinstance(self.source, FileSource),
            "folder": os.getcwd(),
        }


def _prepare(
    run: str | Path | Run, data: Any, labels: Any, given: dict[str, Any], notes: list[str] | None = None
) -> _Job:
    """All that the encoding works with. notes: gets lines for the reader; without it they are warnings of Python."""
    texts = {name: str(value) for name, value in (("data", data), ("labels", labels)) if is_text(value)}
    settings = inspection(EmbedSettings, given | texts)
    where = locate(run)
    device = find_device(settings.device)
    opened, label_text = opened_data(where, settings.data, data, settings.label_source, labels)
    source = open_source(opened, label_text)
    indices = np.arange(len(source))
    if settings.images is not None and settings.images < len(indices):
        indices = np.sort(np.random.default_rng(settings.seed).permutation(indices)[: settings.images])
    encoder = open_encoder(
        where,
        head=settings.head,
        channels=source.channels,
        picture_side=max(source.images.shape[1:3]) if isinstance(source, ArraySource) else None,
        image_size=settings.image_size,
        pretrained=settings.pretrained,
        seed=settings.seed,
        notes=notes,
    )
    encoder.network.to(device).to(memory_format=torch.channels_last)
    found = absolute(named(data=opened).get("data", ()))
    return _Job(source, indices, encoder, settings, device, [found] if isinstance(found, str) else list(found))


def _new_file(path: Path) -> Path:
    """The file to make. Raises UserError where something is in its place or it cannot be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"--out {path}: name a .parquet file, or a .npy file (with a .csv beside it)")
    if path.suffix.lower() == ".parquet":
        arrow(path)
    begun = path.with_name(path.name + ".parts").is_dir()
    beside = [path.with_suffix(".csv"), path.with_suffix(".json")] if path.suffix.lower() == ".npy" else []
    for file in [path, *([] if begun else beside)]:
        if file.exists():
            raise UserError(f"{file} is there already: remove it, or choose another --out")
    return path


def _encode_rest(job: _Job, parts: Parts, console: Console | None) -> None:
    """Encode what no part covers yet, a part at a time."""
    total, size = len(job.indices), job.part
    with EncodingProgress(console, total, parts.done) as progress:
        waiting: list[tuple[PictureBatch, Array]] = []
        pictures = 0
        for batch, features in job.encoded(parts.done // BATCH):
            waiting.append((batch, job.numbers(features)))
            pictures += len(batch.names)
            progress.batch(len(batch.names), len(batch.unreadable))
            if pictures == size or parts.done + pictures == total:
                part = _part(job, parts.done, waiting)
                if parts.done == 0 and not len(part.index):
                    name, reason = part.skipped[0]
                    raise UserError(
                        f"none of the first {part.count:,} pictures can be read; the first: {name}: {reason}"
                    )
                parts.add(part)
                progress.saved()
                waiting, pictures = [], 0


def _part(job: _Job, first: int, batches: list[tuple[PictureBatch, Array]]) -> Part:
    """The part that some batches make: rows of the pictures that could be read, and the others by name."""
    names = [name for batch, _ in batches for name in batch.names]
    reasons: dict[int, str] = {}
    start = 0
    for batch, _ in batches:
        reasons |= {start + row: reason for row, reason in batch.unreadable.items()}
        start += len(batch.names)
    kept = np.array([row for row in range(len(names)) if row not in reasons], np.int64)
    features = np.concatenate([rows for _, rows in batches])[kept]
    index = job.indices[first : first + len(names)][kept]
    skipped = [(names[row], reason) for row, reason in reasons.items()]
    return Part(first, len(names), index, PackedNames.of(names[row] for row in kept), features, skipped)


def _finish(job: _Job, parts: Parts, path: Path) -> tuple[int, int]:
    """All parts into one file. Returns how many rows it has, and how many pictures were left out. Raises OSError."""
    rows = skipped = dimensions = 0
    for part in parts:
        rows, skipped = rows + len(part.index), skipped + len(part.skipped)
        dimensions = part.features.shape[1]
    write_skipped(_skipped_file(path), (pair for part in parts for pair in part.skipped))
    about = job.about(rows, skipped, dimensions)
    write = write_parquet if path.suffix.lower() == ".parquet" else write_npy
    write(path, about, _rows(job, parts), job.source.classes)
    return rows, skipped


def _rows(job: _Job, parts: Parts) -> Iterator[Rows]:
    for part in parts:
        yield part.index, part.names, row_labels(job.source, part.index), part.features


def _skipped_file(path: Path) -> Path:
    return path.with_name(path.name + ".skipped.csv")


def _terminal(quiet: bool) -> Console | None:
    """Where a bar may be shown, or None: what is not written down needs no lines."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal and not quiet else None
