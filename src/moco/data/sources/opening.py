"""The front door: whatever holds pictures becomes a source."""

from __future__ import annotations

import copy
import glob
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moco.data.sources.array import ArraySource, load_npy
from moco.data.sources.base import EXTENSIONS, Array, PackedNames, Pictures, Source, one_line
from moco.data.sources.cache import CACHE_BYTES, Cache, user_cache_folder
from moco.data.sources.folder import FolderSource, JoinedSource, NoImages, files_below
from moco.data.sources.huggingface import is_dataset, is_saved, open_hub, open_saved, source_of_dataset
from moco.data.sources.labels import by_first_folder, check_labels
from moco.data.sources.listing import LIST_SUFFIXES, ListSource, source_of_paths
from moco.data.sources.objects import ObjectSource
from moco.data.sources.ranges import filesystem
from moco.data.sources.shards import open_tars
from moco.data.sources.tables import open_parquet
from moco.errors import UserError, counted

COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tar.lz4")
MOST_SHARDS = 1_000_000
KINDS = "a folder of images, a list (.txt, .csv, .tsv), tar shards, Parquet files, a .npz or a .npy"


def open_source(
    data: str | Path | Array | torch.Tensor | Sequence[Any] | Any,
    labels: str | Path | Array | None = "auto",
    *,
    cache: str | Path | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> Source:
    """The pictures in whatever holds pictures.

    Args:
        data: a folder of images, at any depth; a .txt, .csv or .tsv that lists them; tar shards as WebDataset writes
            them (a file, `data-{0000..0099}.tar`, `shards/*.tar`, a folder of them; also by URL); Parquet files (a
            file, a pattern, a folder of them); `hf:NAME` or `hf:NAME:SPLIT`, or a folder that `save_to_disk` of
            Hugging Face wrote; a .npz with images in `x` or `images` (or its only 3- or 4-dimensional array) and
            labels in `y` or `labels`; a .npy; an array or tensor, uint8, N × H × W or N × H × W × C; a sequence or
            torch data set of images; or a list of several of the paths above, whose images come one after the other.
        labels: "auto" (those that come with the data; for folders, the first level if the layout is clear), "none" or
            None, "folder" (the first folder level, or an error), a .npy file, or an array.
        cache: folder for indices of shards and blocks of remote files; None for `moco` in the user's cache folder.
        cache_bytes: bound for the blocks of remote files.

    Raises UserError with one line for anything that cannot be used.
    """
    what = _description(data)
    try:
        given = user_cache_folder() if cache is None else Path(cache).expanduser()
        kept = Cache(given, cache_bytes)
        return _labelled(data, labels, what, kept)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot open {what}: {one_line(error)}") from error
    except Exception as error:  # of code that is not ours, such as a tensor of a kind that NumPy does not know
        raise UserError(f"cannot open {what}: {type(error).__name__}: {one_line(error)}") from error


def _description(data: Any) -> str:
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    return "the array" if isinstance(data, np.ndarray | torch.Tensor) else f"the {type(data).__name__}"


def _labelled(data: Any, labels: Any, what: str, cache: Cache) -> Source:
    """The source, with the labels that were asked for."""
    word = labels if isinstance(labels, str) else None
    several = _several_paths(data)
    if several:
        parts = [_by_path(text, cache) for text in several]
        if word == "folder":
            for part, text in zip(parts, several, strict=True):
                _label_by_folder(part, text)
        prefixes = [
            f"{text.rstrip('/')}/" if isinstance(part, FolderSource) else ""
            for part, text in zip(parts, several, strict=True)
        ]
        source: Source = JoinedSource(parts, prefixes) if len(parts) > 1 else parts[0]
    else:
        source = _open(data, cache)
        if word == "folder":
            _label_by_folder(source, what)
    if labels is None or word == "none":
        source.labels = source.classes = None
    elif word not in ("auto", "folder"):
        values = load_npy(Path(labels).expanduser()) if isinstance(labels, str | Path) else np.asarray(labels)
        source.labels, source.classes = check_labels(values, len(source), what), None
    return source


def _label_by_folder(source: Source, what: str) -> None:
    names = getattr(source, "names", None)
    if not isinstance(names, PackedNames):
        raise UserError(f"{what}: labels folder: its images have no folders; set labels to auto or none")
    found = by_first_folder(name.removeprefix("./") for name in names)
    if isinstance(found, str):
        raise UserError(
            f"{what}: labels folder: {found}; put each class into a folder of its own, or set labels to none"
        )
    source.labels, source.classes = found


def _several_paths(data: Any) -> list[str]:
    """The paths if `data` is a list of sources by path, and not of images by path."""
    if not isinstance(data, list | tuple) or not data or not isinstance(data[0], str | Path):
        return []
    if _is_image_path(data[0]) or not all(isinstance(item, str | Path) for item in data):
        return []
    return [str(item) for item in data]


def _is_image_path(item: str | Path) -> bool:
    return os.path.splitext(item)[1].lower() in EXTENSIONS and not os.path.isdir(item)


def _open(data: Any, cache: Cache) -> Source:
    if isinstance(data, str | os.PathLike):
        return _by_path(os.fspath(data), cache)
    if isinstance(data, torch.Tensor):
        return ArraySource(data.detach().cpu().numpy())
    if isinstance(data, np.ndarray):
        return (
            source_of_paths(data.tolist(), "the array")
            if data.dtype.kind == "U" and data.ndim == 1
            else ArraySource(data)
        )
    if is_dataset(data):
        return source_of_dataset(data)
    if isinstance(data, Source):
        return copy.copy(data)
    if isinstance(data, list | tuple) and data:
        if all(isinstance(item, str | Path) for item in data):
            return source_of_paths(data, "the list")
        if isinstance(data[0], list | int | float | np.ndarray) and (stacked := _stacked(data)) is not None:
            return ArraySource(stacked)
    return ObjectSource(data)


def _stacked(items: Sequence[Any]) -> Array | None:
    """The items as one array, if they are of one shape."""
    try:
        array = np.asarray(items)
    except ValueError:  # of different shapes
        return None
    return array if array.ndim in (3, 4) or array.dtype.kind in "iuf" else None


def _by_path(text: str, cache: Cache) -> Pictures:
    if not text:
        raise UserError(f"no data: name {KINDS}")
    if text.startswith("hf:") and not text.startswith("hf://"):
        return open_hub(text.removeprefix("hf:"))
    text = text.removeprefix("file://")
    if "://" in text:
        return open_tars(_remote_shards(text), cache)
    path = Path(text).expanduser()
    if path.is_dir():
        return _folder(path, cache)
    if path.exists():
        return _file(path, cache)
    if "{" in text or glob.has_magic(text):
        return _pattern(str(path), cache)
    raise UserError(f"no such file or folder: {path}")


def _file(path: Path, cache: Cache) -> Pictures:
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return ArraySource.map_file(path)
    if suffix == ".npz":
        return ArraySource.load_file(path)
    if suffix in LIST_SUFFIXES:
        return ListSource(path)
    if suffix == ".tar" or path.name.lower().endswith(COMPRESSED_TARS):
        return open_tars([str(path)], cache)
    if suffix == ".parquet":
        return open_parquet([path], cache)
    if suffix in EXTENSIONS:
        raise UserError(f"{path} is a single image: name its folder, or a list of images")
    raise UserError(f"{path} is neither {KINDS}")


def _folder(folder: Path, cache: Cache) -> Pictures:
    """A folder: of a saved data set; else its images; else its shards; else the Parquet files in it."""
    if is_saved(folder):
        return open_saved(folder)
    shards = sorted(str(path) for path in folder.iterdir() if path.name[:1] != "." and path.suffix.lower() == ".tar")
    try:
        source = FolderSource(folder)
    except NoImages:
        tables = [] if shards else [folder / name for name in files_below(folder, frozenset([".parquet"]))]
        packed = [str(path) for path in folder.iterdir() if path.name.lower().endswith(COMPRESSED_TARS)]
        if tables:
            return open_parquet(tables, cache)
        if shards or packed:
            return open_tars(shards or sorted(packed), cache)
        raise
    if shards:
        source.notices.append(f"{folder} holds {counted(len(shards), '.tar file')} beside images: not used")
    return source


def _pattern(text: str, cache: Cache) -> Pictures:
    """Local files by braces or wildcards."""
    found = [
        path for part in expand_braces(text) for path in (sorted(glob.glob(part)) if glob.has_magic(part) else [part])
    ]
    if not found:
        raise UserError(f"no file is called like {text}")
    missing = [path for path in found if not os.path.exists(path)]
    if missing:
        raise UserError(f"{text}: {len(missing)} of {len(found)} files do not exist, the first: {missing[0]}")
    suffixes = {Path(path).suffix.lower() for path in found}
    if suffixes == {".tar"}:
        return open_tars(found, cache)
    if suffixes == {".parquet"}:
        return open_parquet([Path(path) for path in found], cache)
    held = ", ".join(sorted(suffixes))
    raise UserError(
        f"{text}: a pattern must mean .tar or .parquet files, and these are {held}; name a folder or a list"
    )


def _remote_shards(url: str) -> list[str]:
    """URLs of the shards that a URL with braces or wildcards means."""
    if url.lower().partition("?")[0].endswith((*COMPRESSED_TARS, ".parquet", *LIST_SUFFIXES, ".npz", ".npy")):
        raise UserError(f"{url}: of remote files only uncompressed .tar shards can be read; copy it to disk")
    urls = []
    for part in expand_braces(url):
        part += "*.tar" if part.endswith("/") else ""
        scheme, _, rest = part.partition("://")
        if not glob.has_magic(rest) or scheme in ("http", "https"):
            urls.append(part)
            continue
        system, path = filesystem(part)
        try:
            found = sorted(system.glob(path))
        except Exception as error:  # every kind of file system has its own
            raise UserError(f"cannot list {part}: {one_line(error)}") from error
        if not found:
            raise UserError(f"no file is called like {part}")
        urls += [system.unstrip_protocol(name) for name in found]
    return urls


def expand_braces(text: str) -> list[str]:
    """The texts that `{first..last}` and `{a,b}` stand for: data-{08..11}.tar, {train,extra}-{0..9}.tar.

    Raises UserError for more than a million.
    """
    parts: list[Sequence[str]] = []
    count = 1
    while text:
        before, brace, rest = text.partition("{")
        inside, closed, after = rest.partition("}")
        if not brace or not closed:
            parts.append([text])
            break
        choices = _choices(inside)
        if choices is not None and not choices:
            raise UserError(f"{{{inside}}} stands for no file: the first number is larger than the last")
        count *= len(choices) if choices is not None else 1
        if count > MOST_SHARDS:
            raise UserError(f"{{{inside}}} stands for more than {MOST_SHARDS:,} files")
        parts += [[before], choices if choices is not None else [f"{{{inside}}}"]]
        text = after
    return ["".join(choice) for choice in product(*parts)]


def _choices(inside: str) -> Sequence[str] | None:
    """What stands between braces, or None if it is just text."""
    first, dots, last = inside.partition("..")
    if dots and first.isdecimal() and last.isdecimal() and first.isascii() and last.isascii():
        numbers = range(int(first[:18]), int(last[:18]) + 1)
        padded = any(len(number) > 1 and number.startswith("0") for number in (first, last))
        width = max(len(first), len(last)) if padded else 0
        if len(numbers) > MOST_SHARDS:
            raise UserError(f"{{{inside}}} stands for more than {MOST_SHARDS:,} files")
        return [f"{number:0{width}}" for number in numbers]
    return inside.split(",") if "," in inside else None
