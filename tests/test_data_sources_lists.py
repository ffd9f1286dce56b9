"""Lists of paths: how a line is read, where labels are, and what is refused."""

import csv
import io
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from moco.data.loader import readable
from moco.data.sources import open_source
from moco.errors import UserError


@pytest.fixture
def pictures(tmp_path, garments):
    """Four pictures in two folders; one has a blank and a comma in its name."""
    for number, name in enumerate(["cat/a.png", "cat/b b,c.png", "dog/c.png", "dog/d"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(garments[number]).save(tmp_path / name, "png")
    return tmp_path


def write(folder, name: str, text: str, encoding: str = "utf-8"):
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


def names(source) -> list[str]:
    return [source[index].name for index in range(len(source))]


PATHS = ["cat/a.png", "cat/b b,c.png", "dog/c.png"]


@pytest.mark.parametrize(
    ("name", "text", "labels", "classes"),
    [
        ("l.txt", "cat/a.png\ncat/b b,c.png\ndog/c.png\n", None, None),
        ("l.txt", "\n# one\ncat/a.png\r\n\r\ncat/b b,c.png \n#two\ndog/c.png", None, None),
        ("l.txt", "cat/a.png 4\ncat/b b,c.png 5\ndog/c.png 4", [4, 5, 4], None),
        ("l.txt", "cat/a.png\tx\ncat/b b,c.png\ty\ndog/c.png\tx", [0, 1, 0], ["x", "y"]),
        ("l.txt", 'path,label\ncat/a.png,4\n"cat/b b,c.png",5\ndog/c.png,4', [4, 5, 4], None),
        ("l.TXT", 'cat/a.png,4\n"cat/b b,c.png",5\ndog/c.png,4', [4, 5, 4], None),
        ("l.csv", 'cat/a.png\n"cat/b b,c.png"\ndog/c.png', None, None),
        ("l.csv", 'cat/a.png,dog\n"cat/b b,c.png",cat\ndog/c.png,dog', [1, 0, 1], ["cat", "dog"]),
        ("l.csv", 'cat/a.png,7\n"cat/b b,c.png",\ndog/c.png,-3', [7, -1, -3], None),
        ("l.csv", 'width,Class,FILE\n1,3,cat/a.png\n2,4,"cat/b b,c.png"\n3,3,dog/c.png', [3, 4, 3], None),
        ("l.csv", 'image,width,height\ncat/a.png,1,2\n"cat/b b,c.png",1,2\ndog/c.png,1,2', None, None),
        ("l.csv", 'photo,species\ncat/a.png,u\n"cat/b b,c.png",v\ndog/c.png,u', [0, 1, 0], ["u", "v"]),
        ("l.csv", "file;label\ncat/a.png;1\ncat/b b,c.png;2\ndog/c.png;1", [1, 2, 1], None),
        ("l.tsv", "\ufefffile\ty\ncat/a.png\t1\ncat/b b,c.png\t2\ndog/c.png\t1", [1, 2, 1], None),
        ("l.csv", 'label,path\n9,cat/a.png\n8,"cat/b b,c.png"\n9,dog/c.png', [9, 8, 9], None),
        ("l.txt", "\ufeffcat/a.png\ncat/b b,c.png\ndog/c.png", None, None),
        ("l.csv", 'label,path\n,cat/a.png\n8,"cat/b b,c.png"\n,dog/c.png', [-1, 8, -1], None),
        ("l.csv", 'y\ncat/a.png\n"cat/b b,c.png"\ndog/c.png', None, None),
        ("l.csv", 'cat/a.png,y\n"cat/b b,c.png",n\ndog/c.png,y', [1, 0, 1], ["n", "y"]),
        ("l.csv", ',,\ncat/a.png,,\n , \n"cat/b b,c.png",,\ndog/c.png,,', None, None),
    ],
)
def test_how_a_list_is_read(pictures, name, text, labels, classes):
    source = open_source(write(pictures, name, text))
    assert names(source) == PATHS
    assert (None if source.labels is None else source.labels.tolist()) == labels
    assert source.classes == classes
    assert source[1].image == (pictures / PATHS[1]).read_bytes()
    assert source[0].label == (None if labels is None else labels[0])


def test_paths_may_be_absolute_or_lie_elsewhere(pictures, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    source = open_source(write(other, "l.txt", f"{pictures}/cat/a.png\n../{pictures.name}/dog/d\n"))
    assert source[0].image == (pictures / "cat/a.png").read_bytes()
    assert source[1].image == (pictures / "dog/d").read_bytes()


def test_a_missing_file_is_left_to_the_loader(pictures):
    source = open_source(write(pictures, "l.txt", "cat/gone.png\nbad\0.png\n".replace("\0", "?") + "cat/a.png\n"))
    with pytest.raises(FileNotFoundError):
        source[0]
    _, number, skipped = readable(source, 0, 1)
    assert number == 2
    assert {reason for _, reason in skipped} == {"No such file or directory"}


def test_labels_by_folder(pictures):
    source = open_source(write(pictures, "l.txt", "dog/c.png\ncat/a.png\ndog/d"), labels="folder")
    assert (source.labels.tolist(), source.classes) == ([1, 0, 1], ["cat", "dog"])
    with pytest.raises(UserError, match="absolute"):
        open_source(write(pictures, "l.txt", f"{pictures}/dog/c.png\n"), labels="folder")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("l.txt", b"", ["names no images"]),
        ("l.csv", b"path,label\n", ["names no images"]),
        ("l.txt", b"# nothing\n\n", ["names no images"]),
        ("l.txt", b"x/1.png\nx/2.png\n", ["none of the 2 paths", "x/1.png"]),
        ("l.csv", b'cat/a.png,1\n"dog/c.png,2\ncat/a.png,3\n', ["line 2", "quotation mark"]),
        ("l.csv", b'#\n\ncat/a.png,1\n"dog/c.png,2\n' + b"cat/a.png,3\n" * 20_000, ["line 4"]),
        ("l.tsv", "cat/a.png\t1\n".encode("utf-16"), ["line 1", "UTF-8"]),
        ("l.txt", b"cat/a.png\nx\0y\n", ["line 2", "UTF-8"]),
    ],
)
def test_what_is_refused(pictures, name, content, words):
    (pictures / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        open_source(pictures / name)
    assert "\n" not in str(caught.value)
    for word in [name, *words]:
        assert word in str(caught.value)


def test_names_in_other_encodings_are_found(pictures):
    strange = os.fsdecode(b"caf\xe9.png")
    (pictures / "cat/a.png").rename(pictures / strange)
    (pictures / "l.txt").write_bytes(b"caf\xe9.png\ndog/c.png\n")
    assert open_source(pictures / "l.txt")[0].image == (pictures / strange).read_bytes()


CELL = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp")), max_size=12).map(str.strip)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=8), st.sampled_from([(".csv", ","), (".tsv", "\t")]))
def test_csv_round_trip(tmp_path_factory, rows, kind):
    """What Python's csv module writes is read back, whatever the cells hold."""
    folder = tmp_path_factory.mktemp("lists")
    (folder / "here.png").touch()
    rows = [(f"{path}/é.png", label) for path, label in rows] + [("here.png", "last")]
    text = io.StringIO()
    writer = csv.writer(text, delimiter=kind[1], quoting=csv.QUOTE_ALL)
    writer.writerows([("path", "label"), *rows])
    source = open_source(write(folder, f"l{kind[0]}", text.getvalue()))
    assert [*source.names] == [path for path, _ in rows]
    found = [source.classes[label] if label >= 0 else "" for label in source.labels]
    assert found == [label for _, label in rows]


def test_sequences_of_paths(pictures):
    for paths in ([pictures / path for path in PATHS], tuple(f"{pictures}/{path}" for path in PATHS)):
        source = open_source(paths)
        assert source[1].image == (pictures / PATHS[1]).read_bytes()
    assert len(open_source(np.array([f"{pictures}/{path}" for path in PATHS]))) == 3
    with pytest.raises(UserError, match=r"none of the 1 path in it exists; the first: nowhere\.png"):
        open_source(["nowhere.png"])
    with pytest.raises(UserError, match="none of the 1 path"):
        open_source(["a\0b.png"])
