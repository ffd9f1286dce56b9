"""`moco search`: the pictures of an embedding that are nearest to a query, by cosine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from moco.data.reading import Unreadable, read_pixels
from moco.data.sources import EXTENSIONS, Source, open_source
from moco.data.sources.listing import source_of_paths
from moco.embedding.encoder import Encoder, open_encoder
from moco.embedding.pictures import picture_batches
from moco.embedding.reading import Embeddings, Entries, open_embeddings, unit
from moco.embedding.sheet import Album, Tile, check_sheet_name, printable, save_sheet
from moco.embedding_settings import SearchSettings
from moco.errors import UserError
from moco.evaluate.features import checked_features, encode
from moco.evaluate.subject import locate
from moco.evaluation_settings import inspection
from moco.train.parallel import find_device
from moco.train.run import Run

Array = np.ndarray[Any, Any]

ITSELF = "(the picture itself)"
MOST_SHOWN, MOST_MATCHES = 40, 63
"""Queries on a contact sheet, and matches of each: a JPEG has at most 65,535 rows of pixels."""


@dataclass(frozen=True)
class Match:
    """A picture that was found. rank: from 1. similarity: cosine, −1 to 1. index: its number in the data.

    itself: it is the very file of the query.
    """

    rank: int
    similarity: float
    path: str
    label: int | None
    class_name: str | None
    index: int
    row: int
    itself: bool = False


@dataclass(frozen=True)
class Found:
    """What was found for one query, the nearest first."""

    query: str
    matches: tuple[Match, ...]


def search(
    run: str | Path | Run,
    query: Any,
    embeddings: str | Path,
    *,
    quiet: bool = False,
    **given: Any,
) -> list[Found]:
    """Find the pictures of an embedding file that are nearest to each query, by exact cosine, as `moco search` does.

    run: what the embedding was made with. query: a picture file, several, a folder, or whatever else `open_source`
    takes. embeddings: FILE.parquet or FILE.npy of `moco embed`. given: fields of `SearchSettings`. quiet: print
    nothing.

    Raises UserError for other weights than those of the embedding, and for anything wrong with the query or files.
    """
    settings = inspection(SearchSettings, given | {"embeddings": str(embeddings)})
    if not settings.embeddings:
        raise UserError("name the embedding: --in FILE.parquet, as moco embed wrote it")
    held = open_embeddings(settings.embeddings)
    sheet = _sheet_file(settings, held)
    notes: list[str] = []
    encoder = _same_encoder(run, held, notes)
    names, features, pictures, missed = _queries(query, encoder, held, settings, with_pictures=sheet is not None)
    entries = held.entries()
    rows, similarities = nearest_rows(held, features, settings.top)
    album = Album(held, entries)
    found = [_found(*one, entries, album) for one in zip(names, rows, similarities, strict=True)]
    console = None if quiet else Console(soft_wrap=True)
    if console is not None:
        _show(found, console)
    if sheet is not None:
        _draw(sheet, found, pictures, album)
    if console is not None:
        for note in notes:
            console.print(f"note: {note}", highlight=False, markup=False)
        for name, reason in missed:
            console.print(f"note: {printable(name)} cannot be read: {reason}", highlight=False, markup=False)
        if sheet is not None:
            few = f" (the first {MOST_SHOWN} queries)" if len(found) > MOST_SHOWN else ""
            console.print(f"contact sheet: {sheet}{few}", highlight=False, markup=False)
    return found


def nearest_rows(embeddings: Embeddings, queries: Array, top: int) -> tuple[Array, Array]:
    """Rows of an embedding nearest to each of the queries (Q, D) by cosine, and how near: (Q, k) each.

    k is `top`, or the number of rows where there are fewer; the nearest first, of equals the one that comes first.
    """
    best = np.full((len(queries), 0), -np.inf, np.float32)
    rows = np.zeros((len(queries), 0), np.int64)
    start, unit_queries = 0, unit(np.asarray(queries, np.float32))
    for chunk in embeddings.unit_chunks():
        similarities = np.concatenate([best, unit_queries @ chunk.T], axis=1)
        own = np.broadcast_to(np.arange(start, start + len(chunk)), (len(queries), len(chunk)))
        numbers = np.concatenate([rows, own], axis=1)
        order = np.argsort(-similarities, axis=1, kind="stable")[:, :top]
        best, rows = np.take_along_axis(similarities, order, 1), np.take_along_axis(numbers, order, 1)
        start += len(chunk)
    return rows, best.clip(-1, 1)


def _same_encoder(run: str | Path | Run, held: Embeddings, notes: list[str]) -> Encoder:
    """The network of `run`, if it is the one that the embedding was made with; lines to `notes`. Raises UserError."""
    about, where = held.about, locate(run)
    of_timm = where.run is None
    encoder = open_encoder(
        where,
        head=bool(about.get("head")),
        channels=about.get("channels"),
        image_size=about.get("size") if of_timm else None,
        pretrained=bool(about.get("pretrained")) and of_timm,
        seed=int(about.get("seed", 0)),
        notes=notes,
    )
    if encoder.weights != about["weights"]:
        before = f"{about.get('run')}" + (f" at step {about['step']}" if about.get("step") else "")
        now = encoder.name + (f" at step {encoder.step}" if encoder.step else "")
        raise UserError(
            f"{held.path} was made with other weights ({before}) than those of {now}: name the checkpoint that it was "
            "made with, or embed the pictures anew"
        )
    for name, value in encoder.preparation().items():
        if about.get(name) != value:
            raise UserError(f"{held.path} was made with {name} {about.get(name)}, and {encoder.name} has {value}")
    if held.about["dimensions"] < 1 or not len(held):
        raise UserError(f"{held.path} has no rows")
    return encoder


def _queries(
    query: Any, encoder: Encoder, held: Embeddings, settings: SearchSettings, *, with_pictures: bool
) -> tuple[list[str], Array, list[Array | None], list[tuple[str, str]]]:
    """Names and features (Q, D) of the queries; pictures of the first; (name, reason) of those that cannot be read."""
    source, device = _open_query(query), find_device(settings.device)
    network = encoder.network.to(device)
    names: list[str] = []
    features, kept, missed, start = [], [], [], 0
    batches = picture_batches(source, np.arange(len(source)), size=encoder.size, channels=encoder.channels, workers=0)
    for batch in batches:
        good = [row for row in range(len(batch.names)) if row not in batch.unreadable]
        missed += [(batch.names[row], reason) for row, reason in batch.unreadable.items()]
        encoded = encode(
            network, [batch.pictures], mean=encoder.mean, std=encoder.std, device=device,
            precision=held.about.get("precision", "fp32"),
        )  # fmt: skip
        features.append(checked_features(encoded, f"the features of {encoder.name}")[torch.tensor(good).long()].numpy())
        names += [batch.names[row] for row in good]
        kept += [start + row for row in good]
        start += len(batch.names)
    if not names:
        name, reason = missed[0]
        raise UserError(f"the query {printable(name)} cannot be read: {reason}")
    shown = [_pixels(source, number) for number in kept[:MOST_SHOWN]] if with_pictures else []
    return names, np.concatenate(features), shown, missed


def _open_query(query: Any) -> Source:
    """The queries: picture files by path, a folder of them, or anything else that holds pictures."""
    texts = [query] if isinstance(query, (str, os.PathLike)) else query
    if isinstance(texts, (list, tuple)) and texts and all(isinstance(text, (str, os.PathLike)) for text in texts):
        paths = [os.fspath(text) for text in texts]
        missing = [path for path in paths if "://" not in path and not os.path.exists(os.path.expanduser(path))]
        if missing:
            raise UserError(f"no such picture or folder: {printable(missing[0])}")
        if all(os.path.isfile(os.path.expanduser(path)) for path in paths) and (
            len(paths) > 1 or os.path.splitext(paths[0])[1].lower() in EXTENSIONS
        ):
            return source_of_paths(paths, "the query")
        return open_source(paths if len(paths) > 1 else paths[0], "none")
    return open_source(query, "none")


def _pixels(source: Source, index: int) -> Array | None:
    try:
        return read_pixels(source, index, 3)
    except Unreadable:
        return None


def _found(query: str, rows: Array, similarities: Array, entries: Entries, album: Album) -> Found:
    matches = [
        Match(
            rank, round(float(similarity), 6), entries.paths[int(row)], entries.label(int(row)),
            entries.class_name(int(row)), int(entries.index[row]), int(row), _same_file(query, album.file(int(row))),
        )
        for rank, (row, similarity) in enumerate(zip(rows, similarities, strict=True), start=1)
    ]  # fmt: skip
    return Found(query, tuple(matches))


def _same_file(query: str, path: str | None) -> bool:
    """Whether a query is the file at `path`; a copy of it is another picture, and worth finding."""
    try:
        return path is not None and os.path.samefile(os.path.expanduser(query), path)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return False


def _called(match: Match) -> str:
    """What the label of a match is called, "" where it has none; and whether it is the query itself."""
    name = match.class_name or ("" if match.label is None else str(match.label))
    return f"{name} {ITSELF}".lstrip() if match.itself else name


def _show(found: Sequence[Found], console: Console) -> None:
    for one in found:
        console.print(printable(one.query), style="bold", highlight=False, markup=False)
        for match in one.matches:
            text = f"{match.rank:>4}  {match.similarity:.4f}  {printable(match.path)}  {printable(_called(match))}"
            console.print(text.rstrip(), highlight=False, markup=False)


def _sheet_file(settings: SearchSettings, held: Embeddings) -> Path | None:
    """Where the contact sheet goes, or None."""
    if settings.sheet == "none":
        return None
    path = Path(settings.sheet).expanduser()
    if settings.sheet == "auto":
        path = held.path.with_name(held.path.stem + ".search.jpg")
    check_sheet_name(path)
    return path


def _draw(path: Path, found: Sequence[Found], pictures: Sequence[Array | None], album: Album) -> None:
    """A section for each query: itself in a frame, then what was found."""
    sections = []
    for one, picture in zip(found, pictures, strict=False):
        tiles = [Tile(picture, ("query",), marked=True)]
        tiles += [
            Tile(album.picture(match.row), (f"{match.rank} · {match.similarity:.3f}", _called(match), match.path))
            for match in one.matches[:MOST_MATCHES]
        ]
        sections.append((one.query, tiles))
    try:
        save_sheet(path, sections)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file with --sheet") from error
