"""Parquet files and data sets of Hugging Face. The kinds of columns, labels and names; large row groups; refusals."""

import builtins
import io
import json
import pickle

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from moco.data.sources import open_source, tables
from moco.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moco"


@pytest.fixture(scope="module")
def files(garments) -> list[bytes]:
    found = []
    for image in garments[:12]:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "png")
        found.append(file.getvalue())
    return found


def structs(files):
    return [{"bytes": data, "path": f"{number}.png"} for number, data in enumerate(files)]


def images(source) -> list[bytes]:
    return [source[index].image for index in range(len(source))]


def described(**features) -> dict[bytes, bytes]:
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "column",
    [
        lambda files: pa.array(structs(files)),
        lambda files: pa.array(files),
        lambda files: pa.array(files, pa.large_binary()),
        lambda files: pa.array([{"path": None, "bytes": data} for data in files]),
    ],
)
def test_columns_of_images(files, tmp_path, monkeypatch, column, direct):
    monkeypatch.setattr(tables, "DIRECT_BYTES", 2**20 if direct else 0)
    table = pa.table({"n": range(12), "x": column(files), "text": ["t"] * 12})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    source = open_source(tmp_path / "a.parquet")
    assert images(source) == files
    assert source.labels is None
    assert source[7].name == "a.parquet[7]"
    assert len(source.notices) == (not direct)
    assert images(pickle.loads(pickle.dumps(source))) == files


@pytest.mark.parametrize(
    ("name", "values", "labels", "classes"),
    [
        ("label", [3, 1, None, 2] * 3, [3, 1, -1, 2] * 3, None),
        ("fine_label", np.array([3, 1, 0, 2] * 3, np.uint8), [3, 1, 0, 2] * 3, None),
        ("y", ["dog", "cat", None, "dog"] * 3, [1, 0, -1, 1] * 3, ["cat", "dog"]),
        ("label", [0.5] * 12, None, None),
        ("caption", ["x"] * 12, None, None),
        ("label", [[1, 2]] * 12, None, None),
    ],
)
def test_labels(files, tmp_path, name, values, labels, classes):
    for number in range(2):
        part = slice(number * 6, number * 6 + 6)
        table = pa.table({"image": files[part], name: values[part]})
        parquet.write_table(table, tmp_path / f"{number}.parquet")
    for place in (tmp_path, f"{tmp_path}/*.parquet", f"{tmp_path}/{{0..1}}.parquet"):
        source = open_source(place)
        assert images(source) == files
        assert (None if source.labels is None else source.labels.tolist()) == labels
        assert source.classes == classes
        assert source.notices == []  # small row groups are read where they are


def test_class_names_as_hugging_face_writes_them(files, tmp_path):
    kinds = described(
        image={"_type": "Image"}, thumbnail={"_type": "Value"}, label={"_type": "ClassLabel", "names": ["a", "b"]}
    )
    table = pa.table({"thumbnail": files[::-1], "image": structs(files), "label": [0, 1] * 6})
    parquet.write_table(table.replace_schema_metadata(kinds), tmp_path / "a.parquet")
    source = open_source(tmp_path)
    assert images(source) == files
    assert source.classes == ["a", "b"]
    assert source[1].label == 1


@pytest.mark.parametrize("metadata", [b"{", b"[]", b'{"info": 3}', b'{"info": {"features": [1]}}', b'{"info": {}}'])
def test_odd_metadata_does_not_matter(files, tmp_path, metadata):
    table = pa.table({"image": files}).replace_schema_metadata({b"huggingface": metadata})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert images(open_source(tmp_path)) == files


def test_copies_are_kept_and_made_anew_for_a_changed_file(files, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(tables, "DIRECT_BYTES", 0)
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"image": files}), path)
    assert images(open_source(path)) == files
    (blob,) = (cache / "parquet").glob("*.bin")
    state = blob.stat()
    source = open_source(path)
    assert blob.stat().st_mtime_ns == state.st_mtime_ns
    assert str(cache) in source.notices[0]
    with open(blob, "ab") as file:  # torn, or too long: not believed
        file.write(b"more")
    assert images(open_source(path)) == files
    assert blob.stat().st_size == state.st_size
    parquet.write_table(pa.table({"image": files[::-1]}), path)
    assert images(open_source(path)) == files[::-1]
    assert len(list((cache / "parquet").iterdir())) == 3  # copy, index, lock
    monkeypatch.setattr(tables.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    assert images(open_source(path)) == files[::-1]
    with pytest.raises(UserError, match=r"are needed, 0\.0 GB are free"):
        open_source(path, cache=tmp_path / "other")


def test_a_missing_cell_or_a_lost_file_is_an_unreadable_picture(files, tmp_path, monkeypatch):
    table = pa.table(
        {"image": pa.array([None, {"bytes": None, "path": "/etc/passwd"}, {"bytes": files[0], "path": None}])}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    for direct in (2**20, 0):
        monkeypatch.setattr(tables, "DIRECT_BYTES", direct)
        assert images(open_source(tmp_path)) == [b"", b"", files[0]]
    monkeypatch.setattr(tables, "DIRECT_BYTES", 2**20)
    source = open_source(tmp_path)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(OSError, match="No such file"):
        source[0]


def test_what_is_refused(files, tmp_path):
    cases = {
        "none": (pa.table({"n": [1], "t": ["x"]}), ["no column of images", "n (int64), t (string)"]),
        "two": (pa.table({"a": files, "b": files}), ["several columns", "a, b"]),
        "empty": (pa.table({"image": pa.array([], pa.binary())}), ["no rows"]),
    }
    for name, (table, words) in cases.items():
        parquet.write_table(table, tmp_path / f"{name}.parquet")
        with pytest.raises(UserError) as caught:
            open_source(tmp_path / f"{name}.parquet")
        for word in [name, *words]:
            assert word in str(caught.value)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"bad\.parquet is not a readable Parquet file") as caught:
        open_source(tmp_path / "bad.parquet")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("package", "data"), [("pyarrow", "a.parquet"), ("datasets", "saved"), ("datasets", "hf:x")])
def test_missing_packages_are_one_clear_line(tmp_path, monkeypatch, package, data):
    importing = builtins.__import__

    def without(name, *rest, **more):
        if name.split(".")[0] == package:
            raise ImportError(f"No module named {name!r}")
        return importing(name, *rest, **more)

    (tmp_path / "a.parquet").touch()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").touch()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=rf"needs the package {package}: pip install 'momentum-contrast\[datasets\]'"):
        open_source(data if data.startswith("hf:") else tmp_path / data)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The package `datasets`, without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    return datasets


def labelled(datasets, files, **more):
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])} | more
    return datasets.Dataset.from_dict(
        {"image": structs(files), "label": [0, 1, 2] * (len(files) // 3)}, features=datasets.Features(features)
    )


def test_hugging_face_in_memory_and_saved(hub, files, tmp_path):
    data = labelled(hub, files)
    data.save_to_disk(tmp_path / "one")
    hub.DatasetDict({"train": data, "test": data.select([0, 1, 2])}).save_to_disk(tmp_path / "two")
    for place in (data, data.with_format("torch"), tmp_path / "one", tmp_path / "two" / "train"):
        source = open_source(place)
        assert images(source) == files
        assert source.labels.tolist() == [0, 1, 2] * 4
        assert source.classes == ["a", "b", "c"]
        assert source.notices == []
        assert images(pickle.loads(pickle.dumps(source))) == files
    source = open_source(tmp_path / "two")
    assert len(source) == 12
    assert "split train" in source.notices[0]
    assert "test" in source.notices[0]
    chosen = open_source(data.shuffle(seed=1).select([3, 1]))  # through its indices
    assert len(chosen) == 2
    order = data.shuffle(seed=1)["label"]
    assert chosen.labels.tolist() == [order[3], order[1]]


def test_hugging_face_by_name(hub, files, tmp_path):
    for split in ("train", "test"):
        part = files if split == "train" else files[:3]
        labelled(hub, part).to_parquet(tmp_path / "name" / f"{split}-00000.parquet")
    assert images(open_source(f"hf:{tmp_path}/name:train")) == files
    assert images(open_source(f"hf:{tmp_path}/name:test")) == files[:3]
    assert images(open_source(f"hf:{tmp_path}/name:train[:2]")) == files[:2]
    assert len(open_source(f"hf:{tmp_path}/name")) == 12
    for name, word in ((f"hf:{tmp_path}/name:nosplit", "nosplit"), ("hf:", "followed by"), ("hf:nobody/none", "none")):
        with pytest.raises(UserError, match=word) as caught:
            open_source(name)
        assert "\n" not in str(caught.value)


def test_a_data_set_may_not_name_files_elsewhere(hub, files, tmp_path):
    (tmp_path / "secret.png").write_bytes(files[0])
    rows = {"image": [{"bytes": None, "path": str(tmp_path / "secret.png")}]}
    data = hub.Dataset.from_dict(rows, features=hub.Features({"image": hub.Image()}))
    assert images(open_source(data)) == [files[0]]  # made by the user's own code
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(rows["image"], kind)}).replace_schema_metadata(
        described(image={"_type": "Image"})
    )
    (tmp_path / "name").mkdir()
    parquet.write_table(table, tmp_path / "name" / "train.parquet")
    with pytest.raises(OSError, match="outside of its own folders"):
        open_source(f"hf:{tmp_path}/name")[0]
    with pytest.raises(OSError, match="outside of its own folders"):
        open_source(f"hf:{tmp_path}/name/../name")[0]


def test_hugging_face_refusals(hub, files):
    with pytest.raises(UserError, match=r"no column of images or bytes; it holds t \(string\)"):
        open_source(hub.Dataset.from_dict({"t": ["x"]}))
    with pytest.raises(UserError, match="no rows"):
        open_source(labelled(hub, []))
    with pytest.raises(UserError, match="streaming"):
        open_source(labelled(hub, files).to_iterable_dataset())
    with pytest.raises(UserError, match="splits a, b"):
        open_source(hub.DatasetDict(a=labelled(hub, files), b=labelled(hub, files)))
