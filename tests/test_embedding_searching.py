"""`moco search`: exact neighbours from a file, the weights it was made with and no others, a sheet that shows them."""

import json

import cv2
import numpy as np
import pytest
from PIL import Image

import moco
from moco.cli import main
from moco.data import fashion
from moco.embedding import reading, write_embeddings
from moco.embedding.searching import nearest_rows, search
from moco.embedding.sheet import GAP, HEADING, SIDE
from moco.errors import UserError

COUNT = 120
NETWORK = {"seed": 5, "image_size": 32}  # of a timm model with random weights


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Pictures in a folder, by class, and their embedding as .parquet and .npy."""
    folder = tmp_path_factory.mktemp("searching")
    x, y, _, _ = fashion.load()
    for number in range(COUNT):
        file = folder / "clothes" / f"c{y[number]}" / f"{number:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(file), cv2.resize(x[number], (56, 56), interpolation=cv2.INTER_NEAREST))
    for suffix in ("parquet", "npy"):
        write_embeddings(
            "test_resnet", folder / "clothes", out=folder / f"e.{suffix}", device="cpu", quiet=True, **NETWORK
        )
    return folder


def paths(folder):
    return sorted((folder / "clothes").rglob("*.png"))


@pytest.mark.parametrize("suffix", ["parquet", "npy"])
def test_a_picture_finds_itself_and_the_others_as_numpy_does(made, suffix, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 50)
    files = paths(made)
    found = search("test_resnet", files[17], made / f"e.{suffix}", top=COUNT, sheet="none", quiet=True, device="cpu")
    assert [one.query for one in found] == [str(files[17])]
    matches = found[0].matches
    assert matches[0].path == str(files[17])
    assert matches[0].similarity == pytest.approx(1, abs=1e-6)
    assert (matches[0].rank, matches[0].index, matches[0].class_name) == (1, 17, files[17].parent.name)
    assert [match.itself for match in matches] == [True] + [False] * (COUNT - 1)
    features = moco.embed("test_resnet", made / "clothes", device="cpu", **NETWORK).astype(np.float64)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    cosine = features @ features[17]
    np.testing.assert_allclose([match.similarity for match in matches], np.sort(cosine)[::-1], atol=2e-6)
    np.testing.assert_allclose([cosine[match.row] for match in matches], np.sort(cosine)[::-1], atol=2e-6)
    assert sorted(match.row for match in matches) == list(range(COUNT))


def test_a_copy_of_the_query_is_another_picture(made, tmp_path, monkeypatch, capsys):
    file = paths(made)[17]
    (tmp_path / "copy.png").write_bytes(file.read_bytes())
    (tmp_path / "link.png").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    queries = ["copy.png", "link.png"]
    copy, link = search("test_resnet", queries, made / "e.npy", top=1, sheet="none", device="cpu")
    assert copy.matches[0].row == link.matches[0].row == 17
    assert (copy.matches[0].itself, link.matches[0].itself) == (False, True)
    assert capsys.readouterr().out.count("(the picture itself)") == 1


def test_of_equals_the_first_row_comes_first_over_chunks(monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 3)

    class Rows(reading.Embeddings):
        def __init__(self, features):
            self.held, self.dimensions = features, features.shape[1]

        def chunks(self):
            yield from (self.held[start : start + 3] for start in range(0, len(self.held), 3))

        def entries(self):
            raise NotImplementedError

    features = np.array([[1, 0], [0, 2], [3, 3], [5, 0], [0, 0], [-1, 0], [0.5, 0]], np.float32)
    rows, similarities = nearest_rows(Rows(features), np.array([[7, 0], [0, -1]], np.float32), 4)
    assert rows.tolist() == [[0, 3, 6, 2], [0, 3, 4, 5]]
    np.testing.assert_allclose(similarities, [[1, 1, 1, 2**-0.5], [0, 0, 0, 0]], atol=1e-6)
    rows, _ = nearest_rows(Rows(features), np.array([[0, 1]], np.float32), 99)
    assert rows.shape == (1, 7)


def test_the_command_line_prints_writes_json_and_draws(made, tmp_path, monkeypatch, capsys):
    files = paths(made)
    sheet = tmp_path / "sheet.png"
    base = ["search", "test_resnet", str(files[3]), str(files[50]), "--in", str(made / "e.parquet"), "--top", "3"]
    assert main([*base, "--sheet", str(sheet), "--json", str(tmp_path / "found.json"), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"   1  1.0000  {files[3]}  {files[3].parent.name} (the picture itself)\n" in said
    assert said.count("itself") == 2  # once for each query
    written = json.loads((tmp_path / "found.json").read_text())
    assert [one["matches"][0]["path"] for one in written] == [str(files[3]), str(files[50])]
    drawn = np.asarray(Image.open(sheet))
    top, step = GAP + HEADING, SIDE + GAP
    for section, number in ((0, 3), (1, 50)):  # the query, and beside it the same picture found, by nearest neighbour
        shown = Image.fromarray(cv2.imread(str(files[number]))).resize((SIDE, SIDE), Image.Resampling.NEAREST)
        for column in (0, 1):
            left = GAP + column * step
            box = drawn[top : top + SIDE, left : left + SIDE]
            np.testing.assert_array_equal(box, np.asarray(shown), f"{section} {column}")
        top += SIDE + GAP + 3 * 14 + HEADING
    assert main([*base, "--json", "-", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == written
    assert (made / "e.search.jpg").read_bytes()[:3] == b"\xff\xd8\xff"
    (made / "e.search.jpg").unlink()


def test_pictures_that_are_gone_are_grey_and_those_of_an_array_are_found(made, tmp_path):
    x = fashion.load()[0][:40]
    np.savez(tmp_path / "data.npz", x=x)
    given = {"out": tmp_path / "e.npy", "device": "cpu", "quiet": True, **NETWORK}
    write_embeddings("test_resnet", tmp_path / "data.npz", **given)
    found = search("test_resnet", x[7:8], tmp_path / "e.npy", top=1, sheet=tmp_path / "s.png", quiet=True, device="cpu")
    assert found[0].matches[0].path == "data.npz[7]"
    box = slice(GAP + HEADING, GAP + HEADING + SIDE), slice(2 * GAP + SIDE, 2 * GAP + 2 * SIDE)
    drawn = np.asarray(Image.open(tmp_path / "s.png"))[box]
    shown = Image.fromarray(np.repeat(x[7][..., None], 3, 2)).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    np.testing.assert_array_equal(drawn, np.asarray(shown))
    (tmp_path / "data.npz").unlink()
    search("test_resnet", x[7:8], tmp_path / "e.npy", top=1, sheet=tmp_path / "s.png", quiet=True, device="cpu")
    assert (np.asarray(Image.open(tmp_path / "s.png"))[box] == 200).all()


def test_a_folder_as_query_names_what_it_cannot_read(made, tmp_path, capsys):
    (tmp_path / "queries").mkdir()
    (tmp_path / "queries" / "a.png").write_bytes(paths(made)[9].read_bytes())
    (tmp_path / "queries" / "b.png").write_bytes(b"no picture")
    found = search("test_resnet", tmp_path / "queries", made / "e.npy", top=1, sheet="none", device="cpu")
    assert [one.matches[0].row for one in found] == [9]
    assert "b.png cannot be read" in capsys.readouterr().out


def test_names_move_no_cursor(made, tmp_path, capsys):
    name = "red\x1b[31m\n{x}.png"
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / name).write_bytes(paths(made)[0].read_bytes())
    write_embeddings("test_resnet", tmp_path / "odd", out=tmp_path / "o.parquet", device="cpu", quiet=True, **NETWORK)
    found = search("test_resnet", paths(made)[0], tmp_path / "o.parquet", device="cpu")
    said = capsys.readouterr().out
    assert found[0].matches[0].path.endswith(name)
    assert "red\\x1b[31m\\n{x}.png" in said
    assert "\x1b" not in said


def changed(made, tmp_path, change):
    """The .npy embedding with another .json."""
    for suffix in ("npy", "csv", "json"):
        (tmp_path / f"c.{suffix}").write_bytes((made / f"e.{suffix}").read_bytes())
    about = json.loads((tmp_path / "c.json").read_text())
    change(about)
    (tmp_path / "c.json").write_text(json.dumps(about))
    return tmp_path / "c.npy"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about.update(weights="0" * 64), r"other weights \(test_resnet\) than those of test_resnet"),
        (lambda about: about.update(seed=6), "was made with other weights"),
        (lambda about: about.update(mean=[0.1]), r"was made with mean \[0\.1\], and test_resnet has"),
        (lambda about: about.update(format=99), "later version of moco"),
        (lambda about: about.update(rows=7), "is damaged"),
        (lambda about: about.pop("weights"), "does not say how it was made"),
    ],
)
def test_other_weights_and_preparation_are_refused(made, tmp_path, change, message):
    with pytest.raises(UserError, match=message) as caught:
        search("test_resnet", paths(made)[0], changed(made, tmp_path, change), quiet=True, device="cpu")
    assert "\n" not in str(caught.value)


def test_damaged_files_are_one_line(made, tmp_path):
    content = bytearray((made / "e.parquet").read_bytes())
    query = paths(made)[0]
    for name, damaged, message in (
        ("short.parquet", content[:-400], "not a readable Parquet file"),
        ("torn.parquet", content[: len(content) // 2] + b"\xff" * 8 + content[len(content) // 2 + 8 :], "is damaged"),
        ("not.parquet", b"x", "not a readable Parquet file"),
        ("other.txt", b"x", "is no embedding"),
        ("lonely.npy", (made / "e.npy").read_bytes(), r"needs lonely\.json beside it"),
    ):
        (tmp_path / name).write_bytes(bytes(damaged))
        with pytest.raises(UserError, match=message) as caught:
            search("test_resnet", query, tmp_path / name, sheet="none", quiet=True, device="cpu")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.png", "--in", "none.parquet"], "no embedding file none.parquet"),
        (["a.png"], "name the embedding: --in"),
        (["no.png", "--in", "E"], "no such picture or folder: no.png"),
        (["P", "--in", "E", "--sheet", "x.gif"], "name a .jpg or .png"),
        (["P", "--in", "E", "--sheet", "no/x.png"], "there is no folder no"),
        (["P", "--in", "E", "--top", "0"], "top"),
        (["bad.png", "--in", "E"], "the query bad.png cannot be read"),
    ],
)
def test_mistakes_are_one_line(made, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.png").write_bytes(b"no picture")
    names = {"E": str(made / "e.npy"), "P": str(paths(made)[0])}
    assert main(["search", "test_resnet", *(names.get(word, word) for word in arguments)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
