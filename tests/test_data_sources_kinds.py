"""The same pictures, whatever holds them, make the same batches: in this process, in forked and in spawned workers."""

import io
import json
import multiprocessing
import pickle
import tarfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from moco.data.loader import ViewStream
from moco.data.sources import Source, open_source
from moco.settings import ViewSettings

COUNT = 24
LABELS = [number * 7 % 3 for number in range(COUNT)]
KINDS = ["array", "npy", "folder", "list", "paths", "tar", "sequence", "dataset", "parquet", "copied", "saved"]


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


class Pairs(torch.utils.data.Dataset):
    """As a data set of torchvision gives them."""

    def __init__(self, images):
        self.images, self.targets = images, torch.tensor(LABELS)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return Image.fromarray(self.images[index]), LABELS[index]


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def make(kind: str, images: np.ndarray, root: Path):
    """What `open_source` takes, holding the images in this way."""
    files = [png(image) for image in images]
    match kind:
        case "array":
            return images
        case "npy":
            np.save(root / "x.npy", images)
            return root / "x.npy"
        case "folder" | "list" | "paths":
            for number, data in enumerate(files):
                (root / f"{number:03}.png").write_bytes(data)
            if kind == "folder":
                return root
            if kind == "paths":
                return [root / f"{number:03}.png" for number in range(COUNT)]
            lines = [f"{number:03}.png,{label}" for number, label in enumerate(LABELS)]
            (root / "list.csv").write_text("\n".join(["path,label", *lines]))
            return root / "list.csv"
        case "tar":
            members = []
            for number, data in enumerate(files):
                members += [(f"{number:03}.png", data), (f"{number:03}.cls", str(LABELS[number]).encode())]
            for shard in range(3):
                write_tar(root / f"data-{shard:04}.tar", members[shard * 16 : (shard + 1) * 16])
            return str(root / "data-{0000..0002}.tar")
        case "sequence":
            return list(zip(images, LABELS, strict=True))
        case "dataset":
            return Pairs(images)
        case "parquet" | "copied":
            table = pa.table({"image": [{"bytes": data, "path": "x.png"} for data in files], "label": LABELS})
            parquet.write_table(table, root / "part.parquet", row_group_size=7)
            return root / "part.parquet"
        case "saved":
            features = datasets.Features(
                {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
            )
            rows = {"image": [{"bytes": data, "path": None} for data in files], "label": LABELS}
            datasets.Dataset.from_dict(rows, features=features).save_to_disk(root / "saved")
            return root / "saved"
    raise AssertionError(kind)


@pytest.fixture
def source(request, garments, tmp_path, monkeypatch) -> Source:
    if request.param == "copied":
        monkeypatch.setattr("moco.data.sources.tables.DIRECT_BYTES", 100)
    root = tmp_path / "data"
    root.mkdir()
    return open_source(make(request.param, garments[:COUNT], root), cache=tmp_path / "cache")


def batches(source: Source, workers: int):
    stream = ViewStream(
        source,
        **{"query": ViewSettings(), "key": ViewSettings(), "size": 16, "channels": 3, "batch_size": 8, "seed": 5},
        **{"workers": workers, "way": "image", "device": torch.device("cpu")},
    )
    return list(stream.run(1, 5))


@pytest.fixture(scope="module")
def expected(garments):
    return batches(open_source(garments[:COUNT].copy()), 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", KINDS, indirect=True)
def test_same_batches(source, workers, expected):
    for made, wanted in zip(batches(source, workers), expected, strict=True):
        assert torch.equal(made.query, wanted.query)
        assert torch.equal(made.key, wanted.key)
        assert torch.equal(made.ids, wanted.ids)
        assert made.skipped == []


@pytest.mark.parametrize("source", KINDS, indirect=True)
def test_a_source_answers_as_all_do(source):
    assert isinstance(source, Source)
    assert len(source) == COUNT
    copy = pickle.loads(pickle.dumps(source))
    for other in (source, copy):
        for index in (0, COUNT - 1, np.int64(3)):
            sample = other[index]
            assert sample.name
            assert sample.label == (None if source.labels is None else LABELS[index])
        for index in (-1, COUNT):
            with pytest.raises(IndexError):
                other[index]
    if source.labels is not None:
        assert source.labels.dtype == np.int64
        assert source.labels.tolist() == LABELS
    assert all("\n" not in line for line in source.notices)
    assert source.classes in (None, ["a", "b", "c"])


def in_another_process(sources, folder: str) -> None:
    content = [[bytes(source[index].image).hex() for index in (5, 1, 23)] for source in sources]
    Path(folder, "seen.json").write_text(json.dumps(content))


def test_spawned_worker(garments, tmp_path, monkeypatch):
    sources = []
    for kind in ("npy", "folder", "list", "tar", "parquet"):
        (tmp_path / kind).mkdir()
        sources.append(open_source(make(kind, garments[:COUNT], tmp_path / kind), cache=tmp_path / "cache"))
    wanted = [[bytes(source[index].image).hex() for index in (5, 1, 23)] for source in sources]  # with files open
    worker = multiprocessing.get_context("spawn").Process(target=in_another_process, args=(sources, str(tmp_path)))
    worker.start()
    worker.join(60)
    assert json.loads((tmp_path / "seen.json").read_text()) == wanted
