"""`moco cluster`: groups of pictures whose features point the same way, by mini-batch k-means."""

from __future__ import annotations

import csv
import json
import math
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from moco.embedding.reading import Embeddings, Entries, open_embeddings
from moco.embedding.sheet import Album, Tile, printable, save_sheet
from moco.embedding_settings import ClusterSettings
from moco.errors import UserError, counted
from moco.evaluation_settings import inspection

Array = np.ndarray[Any, Any]

LEARNED_BYTES = 2**29
"""Features in memory that centres are found from; of a larger embedding, rows drawn with the seed."""
MINI_BATCH = 4096
STARTS = 10
"""First centres that are tried; the best are gone on with."""
MOST_CLUSTERS = 256
CENTRAL, DRAWN = 24, 16
"""Pictures on the sheet of a cluster: the nearest to its centre, and some of the others."""
MOST_LISTED = 20


@dataclass(frozen=True)
class Clustering:
    """What was found.

    clusters: (N,) int64, of each row, from 0; the largest cluster is 0. distances: (N,) float32, from the row at length
    1 to the centre of its cluster. centres: (K, D). purity, nmi: agreement with the labels, 0 to 1, or None where there
    are none. out: the folder.
    """

    clusters: Array
    distances: Array
    centres: Array
    purity: float | None
    nmi: float | None
    out: Path


def cluster(embeddings: str | Path, out: str | Path, *, quiet: bool = False, **given: Any) -> Clustering:
    """Group the rows of an embedding file, and write what was found into a folder, as `moco cluster` does.

    Mini-batch k-means (scikit-learn) on rows of length 1, so that near means a small angle. The folder gets
    clusters.csv with a line for each row, cluster-NNN.txt with the paths of a cluster, the nearest to its centre first,
    cluster-NNN.jpg, and clusters.json with the figures. given: fields of `ClusterSettings`. quiet: print nothing.

    Raises UserError for anything wrong with the file, the folder or the settings.
    """
    settings = inspection(ClusterSettings, given | {"embeddings": str(embeddings), "out": str(out)})
    if not settings.embeddings:
        raise UserError("name the embedding: --in FILE.parquet, as moco embed wrote it")
    folder = _new_folder(settings.out)
    held = open_embeddings(settings.embeddings)
    count = cluster_count(settings.clusters, len(held))
    centres = find_centres(held, count, settings.seed)
    clusters, distances, centres = assign(held, centres)
    entries = held.entries()
    purity, nmi = agreement(clusters, entries.labels)
    found = Clustering(clusters, distances, centres, purity, nmi, folder)
    console = None if quiet else Console(soft_wrap=True)
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial, found, held, entries, settings, console)
        partial.rename(folder)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or folder}: {error.strerror}; choose another --out") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if console is not None:
        _show(found, settings, console)
    return found


def cluster_count(wanted: str | int, rows: int) -> int:
    """How many clusters: as wanted, or for "auto" √(rows / 2), 2 to 256. Raises UserError for more than rows."""
    count = min(max(round(math.sqrt(rows / 2)), 2), MOST_CLUSTERS) if wanted == "auto" else int(wanted)
    if count > rows:
        raise UserError(f"{rows} pictures cannot make {count} clusters: set --clusters to {rows} or fewer")
    return count


def find_centres(held: Embeddings, count: int, seed: int) -> Array:
    """Centres of `count` clusters of rows at length 1: (count, D) float32."""
    from sklearn.cluster import MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning

    rows = _drawn_rows(held, max(LEARNED_BYTES // (4 * held.dimensions), count), seed)
    found = MiniBatchKMeans(
        count, batch_size=MINI_BATCH, n_init=STARTS, init_size=max(3 * MINI_BATCH, 3 * count), random_state=seed
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different rows than clusters: some stay empty
        found.fit(rows)
    return np.asarray(found.cluster_centers_, np.float32)


def _drawn_rows(held: Embeddings, most: int, seed: int) -> Array:
    """All rows at length 1, or `most` of them drawn with the seed: (n, D), in the order of the file."""
    count = len(held)
    chosen = np.ones(count, bool)
    if count > most:
        chosen[np.random.default_rng(seed).permutation(count)[most:]] = False
    kept, start = [], 0
    for chunk in held.unit_chunks():
        kept.append(chunk[chosen[start : start + len(chunk)]])
        start += len(chunk)
    return np.concatenate(kept)


def assign(held: Embeddings, centres: Array) -> tuple[Array, Array, Array]:
    """The nearest centre of each row, (N,), how far it is, (N,), and the centres, the one with most rows first.

    Centres without rows are left out.
    """
    from sklearn.metrics import pairwise_distances_argmin_min

    found = [pairwise_distances_argmin_min(chunk, centres) for chunk in held.unit_chunks()]
    clusters = np.concatenate([own for own, _ in found])
    sizes = np.bincount(clusters, minlength=len(centres))
    order = np.argsort(-sizes, kind="stable")
    order = order[sizes[order] > 0]
    place = np.zeros(len(centres), np.int64)
    place[order] = np.arange(len(order))
    return place[clusters], np.concatenate([far for _, far in found]).astype(np.float32), centres[order]


def agreement(clusters: Array, labels: Array | None) -> tuple[float | None, float | None]:
    """Purity (share of pictures whose label is the commonest of their cluster) and normalised mutual information.

    Over the pictures that have a label (not −1); None where none has.
    """
    known = np.zeros(0, bool) if labels is None else labels >= 0
    if labels is None or not known.any():
        return None, None
    from sklearn.metrics import normalized_mutual_info_score

    own, given = clusters[known], labels[known]
    pairs, counts = np.unique(np.stack([own, given]), axis=1, return_counts=True)
    commonest = np.zeros(int(own.max()) + 1, np.int64)
    np.maximum.at(commonest, pairs[0], counts)
    return float(commonest.sum() / len(own)), float(normalized_mutual_info_score(given, own))


def _new_folder(text: str) -> Path:
    if not text:
        raise UserError("name a folder for the clusters: --out FOLDER")
    folder = Path(text).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: choose another --out")
    return folder


def _write(
    folder: Path,
    found: Clustering,
    held: Embeddings,
    entries: Entries,
    settings: ClusterSettings,
    console: Console | None,
) -> None:
    """Put table, lists, sheets and figures into the folder. Raises OSError."""
    album = Album(held, entries)
    with (folder / "clusters.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("index", "path", "label", "class_name", "cluster", "distance"))
        for row, path in enumerate(entries.paths):
            label, name = entries.label(row), entries.class_name(row)
            distance = f"{found.distances[row]:.6f}"
            writer.writerow((entries.index[row], path, label, name, found.clusters[row], distance))
    hidden = console is None or not console.is_terminal
    members = _members(found)
    shown = track(members, "writing", len(found.centres), console=console, transient=True, disable=hidden)
    for number, rows in enumerate(shown):
        name = f"cluster-{number:03}"
        with (folder / f"{name}.txt").open("w", encoding="utf-8") as file:
            file.writelines(printable(album.path(int(row))) + "\n" for row in rows)
        if settings.sheets:
            save_sheet(folder / f"{name}.jpg", _sections(name, rows, found, album, entries, settings.seed + number))
    figures = {
        "embedding": str(held.path),
        "weights": held.about["weights"],
        "settings": settings.model_dump(),
        "clusters": len(found.centres),
        "sizes": np.bincount(found.clusters).tolist(),
        "purity": found.purity,
        "nmi": found.nmi,
    }
    (folder / "clusters.json").write_text(json.dumps(figures, indent=2), encoding="utf-8")


def _members(found: Clustering) -> Iterator[Array]:
    """The rows of each cluster in turn, the nearest to its centre first."""
    order = np.lexsort((found.distances, found.clusters))
    ends = np.cumsum(np.bincount(found.clusters))
    return iter(np.split(order, ends[:-1]))


def _sections(
    name: str, rows: Array, found: Clustering, album: Album, entries: Entries, seed: int
) -> list[tuple[str, list[Tile]]]:
    """What is on the sheet of a cluster: its most central pictures, and some of the others."""

    def tiles(chosen: Array) -> list[Tile]:
        return [
            Tile(album.picture(row), (f"{found.distances[row]:.3f} · {_called(entries, row)}", entries.paths[row]))
            for row in chosen.tolist()
        ]

    sections = [(f"{name}: {counted(len(rows), 'picture')}, the nearest to the centre", tiles(rows[:CENTRAL]))]
    others = rows[CENTRAL:]
    if len(others):
        drawn = np.sort(np.random.default_rng(seed).permutation(len(others))[:DRAWN])
        sections.append((f"{len(drawn)} of the others, drawn at random, the nearest first", tiles(others[drawn])))
    return sections


def _called(entries: Entries, row: int) -> str:
    label = entries.label(row)
    return entries.class_name(row) or ("" if label is None else str(label))


def _show(found: Clustering, settings: ClusterSettings, console: Console) -> None:
    sizes = np.bincount(found.clusters).tolist()
    rule = " (auto: √(rows / 2), 2 to 256)" if settings.clusters == "auto" else ""
    lines = [f"{counted(len(found.clusters), 'picture')} in {counted(len(sizes), 'cluster')}{rule}"]
    if settings.clusters != "auto" and len(sizes) < settings.clusters:
        lines.append(f"note: {settings.clusters - len(sizes)} clusters have no picture of their own and are left out")
    lines += [f"  cluster-{number:03}  {counted(size, 'picture')}" for number, size in enumerate(sizes[:MOST_LISTED])]
    if len(sizes) > MOST_LISTED:
        lines.append(f"  and {len(sizes) - MOST_LISTED} smaller ones")
    if found.purity is not None and found.nmi is not None:
        lines.append(f"against the labels: purity {found.purity:.3f}, normalised mutual information {found.nmi:.3f}")
    lines.append(f"table, lists and sheets: {found.out}")
    for line in lines:
        console.print(line, highlight=False, markup=False)
