"""`moco cluster`: separate groups come out exactly, lists and sheets stay in their folder, figures agree."""

import csv
import json
import math

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics.cluster import contingency_matrix

from moco.cli import main
from moco.data import fashion
from moco.data.sources import PackedNames
from moco.embedding import clustering, reading
from moco.embedding.clustering import agreement, cluster, cluster_count
from moco.embedding.writing import write_npy, write_parquet
from moco.errors import UserError

SIZES = (90, 60, 40, 25, 10)


def embedding(path, features, labels, names=None, **about):
    """An embedding file as `moco embed` would write it."""
    count = len(features)
    names = PackedNames.of(names or [f"p{row}" for row in range(count)])
    told = {"format": 1, "rows": count, "dimensions": features.shape[1], "weights": "w", "dtype": "float32"}
    write = write_parquet if path.suffix == ".parquet" else write_npy
    rows = [
        (np.arange(start, min(start + 100, count)), PackedNames.of([*names][start : start + 100]),
         labels[start : start + 100], features[start : start + 100].astype(np.float32))
        for start in range(0, count, 100)
    ]  # fmt: skip
    write(path, told | {"classes": [f"class {n}" for n in range(9)]} | about, rows, [f"class {n}" for n in range(9)])
    return path


@pytest.fixture
def groups(tmp_path):
    """Five separate directions, of any length, one after the other as in a folder; and the group of each row."""
    generator = np.random.default_rng(0)
    of = np.repeat(np.arange(len(SIZES)), SIZES)
    centres = np.eye(16)[: len(SIZES)]
    features = (centres[of] + generator.normal(0, 0.05, (len(of), 16))) * generator.uniform(0.1, 50, (len(of), 1))
    return embedding(tmp_path / "e.parquet", features, of), features, of


def test_separate_groups_come_out_exactly_the_largest_first(groups, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reading, "CHUNK", 64)
    path, features, of = groups
    assert main(["cluster", "--in", str(path), "--clusters", "5", "--out", str(tmp_path / "out"), "--seed", "3"]) == 0
    lines = list(csv.DictReader((tmp_path / "out" / "clusters.csv").open()))
    assert [int(line["cluster"]) for line in lines] == of.tolist()
    assert [line["class_name"] for line in lines] == [f"class {group}" for group in of]
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    centres = np.stack([unit[of == group].mean(0) for group in range(5)])
    distances = np.linalg.norm(unit - centres[of], axis=1)
    np.testing.assert_allclose([float(line["distance"]) for line in lines], distances, atol=0.01)
    for group in range(5):
        listed = (tmp_path / "out" / f"cluster-{group:03}.txt").read_text().splitlines()
        assert sorted(listed) == sorted(f"p{row}" for row in np.flatnonzero(of == group))
        own = [float(lines[int(name[1:])]["distance"]) for name in listed]
        assert own == sorted(own)
        assert Image.open(tmp_path / "out" / f"cluster-{group:03}.jpg").width > 500
    figures = json.loads((tmp_path / "out" / "clusters.json").read_text())
    assert figures["sizes"] == list(SIZES)
    assert (figures["purity"], figures["nmi"]) == (1, pytest.approx(1))
    assert "purity 1.000, normalised mutual information 1.000" in capsys.readouterr().out
    assert not (tmp_path / "out.partial").exists()


def test_centres_from_a_drawn_part_of_a_large_embedding(groups, tmp_path, monkeypatch):
    monkeypatch.setattr(clustering, "LEARNED_BYTES", 100 * 16 * 4)
    path, _, of = groups
    learned = []
    drawn = clustering._drawn_rows
    monkeypatch.setattr(clustering, "_drawn_rows", lambda *given: learned.append(drawn(*given)) or learned[-1])
    found = cluster(path, tmp_path / "out", clusters=5, sheets=False, quiet=True)
    assert learned[0].shape == (100, 16)
    assert found.clusters.tolist() == of.tolist()


def test_purity_and_information_agree_with_the_definition():
    generator = np.random.default_rng(1)
    clusters, labels = generator.integers(0, 6, 300), generator.integers(-1, 4, 300)
    purity, nmi = agreement(clusters, labels)
    known = labels >= 0
    table = contingency_matrix(labels[known], clusters[known])
    assert purity == pytest.approx(table.max(0).sum() / table.sum())
    joint = table / table.sum()
    rows, columns = joint.sum(1), joint.sum(0)
    information = sum(
        joint[i, j] * math.log(joint[i, j] / rows[i] / columns[j])
        for i in range(joint.shape[0])
        for j in range(joint.shape[1])
        if joint[i, j]
    )
    entropies = [-(share[share > 0] * np.log(share[share > 0])).sum() for share in (rows, columns)]
    assert nmi == pytest.approx(information / np.mean(entropies))
    assert agreement(clusters, None) == agreement(clusters, np.full(300, -1)) == (None, None)


def test_auto_is_the_stated_rule():
    assert [cluster_count("auto", rows) for rows in (2, 200, 40_000, 10**6)] == [2, 10, 141, 256]
    with pytest.raises(UserError, match="3 pictures cannot make 4 clusters"):
        cluster_count(4, 3)


def test_equal_rows_make_fewer_clusters(tmp_path, capsys):
    path = embedding(tmp_path / "e.npy", np.repeat(np.eye(3), 4, axis=0), np.full(12, -1))
    found = cluster(path, tmp_path / "out", clusters=6, sheets=False)
    assert len(found.centres) == len(np.unique(found.clusters)) <= 6
    assert {len(set(found.clusters[4 * k : 4 * k + 4].tolist())) for k in range(3)} == {1}
    assert found.purity is None
    assert "have no picture of their own" in capsys.readouterr().out


def test_names_stay_in_the_folder_and_are_no_format(tmp_path):
    names = ["../../escape", "/etc/passwd", "{0.__class__}%s%n", "a\nb\x1b[2J", "x" * 3000, "ok"]
    path = embedding(tmp_path / "e.parquet", np.eye(6), np.arange(6), names)
    before = set(tmp_path.rglob("*"))
    cluster(path, tmp_path / "out", clusters=2, quiet=True)
    new = {file.name for file in set(tmp_path.rglob("*")) - before}
    assert new == {"out", "clusters.csv", "clusters.json"} | {
        f"cluster-00{number}.{suffix}" for number in range(2) for suffix in ("txt", "jpg")
    }
    lists = (tmp_path / "out").glob("*.txt")
    lines = [line for file in lists for line in file.read_text().splitlines()]
    assert sorted(lines) == sorted([*names[:3], "a\\nb\\x1b[2J", *names[4:]])
    read = list(csv.DictReader((tmp_path / "out" / "clusters.csv").open(newline="")))
    assert [line["path"] for line in read] == names


def test_the_lists_open_as_data_and_sheets_show_the_pictures(tmp_path, monkeypatch):
    x = fashion.load()[0][:4]
    names = []
    (tmp_path / "pictures").mkdir()
    for number, picture in enumerate(x):
        names.append(f"pictures/{number}.png")
        Image.fromarray(picture).save(tmp_path / names[-1])
    features = np.eye(4)[[0, 0, 1, 1]]
    path = embedding(tmp_path / "e.npy", features, np.full(4, -1), names, files=True, folder=str(tmp_path))
    monkeypatch.chdir("/")
    cluster(path, tmp_path / "out", clusters=2, quiet=True)
    lines = [(tmp_path / "out" / f"cluster-00{number}.txt").read_text().split() for number in range(2)]
    assert sorted(lines) == [[str(tmp_path / name) for name in names[2 * k : 2 * k + 2]] for k in range(2)]
    from moco.data.sources import open_source

    assert len(open_source(tmp_path / "out" / "cluster-000.txt")) == 2
    drawn = np.asarray(Image.open(tmp_path / "out" / "cluster-000.jpg").convert("L")).astype(int)
    shown = np.asarray(Image.open(lines[0][0]).resize((128, 128), Image.Resampling.NEAREST)).astype(int)
    assert np.abs(drawn[34 : 34 + 128, 8 : 8 + 128] - shown).mean() < 6  # as JPEG


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "new"], "name the embedding: --in"),
        (["--in", "e.npy"], "name a folder for the clusters"),
        (["--in", "e.npy", "--out", "full"], "is not an empty folder"),
        (["--in", "no.npy", "--out", "new"], "no embedding file"),
        (["--in", "e.npy", "--out", "new", "--clusters", "many"], "clusters"),
        (["--in", "e.npy", "--out", "new", "--clusters", "1"], "clusters"),
        (["--in", "e.npy", "--out", "new", "--clusters", "99"], "12 pictures cannot make 99 clusters"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, arguments, message):
    embedding(tmp_path / "e.npy", np.eye(12), np.full(12, -1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["cluster", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "new").exists()
