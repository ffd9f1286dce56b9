"""What comes from data or from files of others never becomes code, a path outside, a shell word or a network call."""

import ast
import io
import os
import socket
import tarfile
from pathlib import Path

import cv2
import pytest

import moco
from moco.data import fashion

SOURCE = Path(__file__).parents[1] / "src" / "moco"
FILES = sorted(SOURCE.rglob("*.py"))

FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.execvp", "os.spawnv",
    "os.startfile", "pty.spawn", "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.dump",
    "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "joblib.load",
    "dill.load", "torch.hub.load", "webbrowser.open", "tempfile.mktemp", "pandas.read_pickle",
}  # fmt: skip
"""Calls that run what is in a file, or unpack it into objects of any kind."""
UNPACKING = {"extract", "extractall", "unpack_archive"}
NETWORK = {"socket", "urllib", "http", "requests", "aiohttp", "httpx", "ftplib", "smtplib", "huggingface_hub", "fsspec"}
ALLOWED = {
    # What stands here was looked at: file (or folder), what it does, why that is safe.
    ("data/sources", "fsspec"): "shards and tables by URL, where the user names one",
    ("train/lock.py", "socket"): "gethostname: who holds the run",
    ("train/heartbeat.py", "socket"): "gethostname: who is missing",
    ("train/memory.py", "ctypes"): "mallopt of the C library",
    ("evaluate/subject.py", "huggingface_hub"): "looks into the cache on this machine, and fetches nothing",
    ("interop/detectron.py", "pickle.load"): "reads back the file that it has just written",
    ("interop/reading.py", "torch.load without weights_only"): "where the user says --trust-pickle, and only there",
    ("report/charts.py", "HTML without escaping"): "SVG made of numbers; what is text is escaped one by one",
    ("report/histograms.py", "HTML without escaping"): "SVG made of numbers",
    ("cli/completion.py", "a shell"): "the name of the shell that a script is printed for",
    ("comparing/children.py", "subprocess"): "this program again, its arguments a list",
    ("report/page.py", "HTML without escaping"): "a span around the options of a text that was escaped before",
    ("data/sources/shards.py", "a format string that is no literal"): "of two that stand in the file",
}


def allowed(path: Path, what: str) -> bool:
    place = path.relative_to(SOURCE).as_posix()
    return any(what == name and (place == where or place.startswith(f"{where}/")) for where, name in ALLOWED)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def keyword(call: ast.Call, name: str) -> object:
    """The literal value of a keyword of a call, or None."""
    return next(
        (word.value.value for word in call.keywords if word.arg == name and isinstance(word.value, ast.Constant)), None
    )


def escapes(word: ast.keyword) -> bool:
    """Whether this is autoescape=True, or autoescape=select_autoescape(default=True, …)."""
    value = word.value
    chosen = isinstance(value, ast.Call) and dotted(value.func).endswith("select_autoescape")
    sure = keyword(value, "default") is True if chosen else isinstance(value, ast.Constant) and value.value is True
    return word.arg == "autoescape" and sure


def complaints(tree: ast.AST):
    """What a file must not do, as (line, what)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, (node.module or "").split(".")[0]
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            yield node.lineno, name
            last = name.rpartition(".")[2]
            if last in UNPACKING:
                yield node.lineno, "unpacking to disk"
            if any(word.arg == "shell" and keyword(node, "shell") is not False for word in node.keywords):
                yield node.lineno, "a shell"
            if name == "torch.load" and keyword(node, "weights_only") is not True:
                yield node.lineno, "torch.load without weights_only"
            if any(word.arg == "allow_pickle" and keyword(node, "allow_pickle") is not False for word in node.keywords):
                yield node.lineno, "np.load with pickles"  # the default is without
            if last == "Environment" and not any(escapes(word) for word in node.keywords):
                yield node.lineno, "HTML without escaping"
            if last in ("Markup", "mark_safe"):
                yield node.lineno, "HTML without escaping"
            if last == "format" and isinstance(node.func, ast.Attribute):
                text = node.func.value
                if not (isinstance(text, ast.Constant) and isinstance(text.value, str)):
                    yield node.lineno, "a format string that is no literal"


BAD = FORBIDDEN | NETWORK | {
    "unpacking to disk", "a shell", "torch.load without weights_only", "np.load with pickles", "HTML without escaping",
    "a format string that is no literal", "subprocess", "marshal", "shelve", "ctypes",
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_runs_unpacks_or_fetches_what_it_should_not(path):
    found = {(line, what) for line, what in complaints(ast.parse(path.read_text(encoding="utf-8"))) if what in BAD}
    assert not {(line, what) for line, what in found if not allowed(path, what)}


def test_every_exception_is_still_needed():
    for where, what in ALLOWED:
        files = [path for path in FILES if path.relative_to(SOURCE).as_posix().startswith(where)]
        said = {word for path in files for _, word in complaints(ast.parse(path.read_text(encoding="utf-8")))}
        assert what in said, (where, what)


@pytest.mark.parametrize(
    "text",
    [
        "yaml.load(x)", "pickle.load(x)", "from pickle import loads", "torch.load(p)", "np.load(p, allow_pickle=True)",
        "torch.load(p, weights_only=False)", "archive.extractall(p)", "os.system(x)", "run(x, shell=True)", "eval(x)",
        "import subprocess", "name.format(1)", "import requests", "from urllib.request import urlopen", "Markup(x)",
        "import urllib.request", "jinja2.Environment()", "Environment(autoescape=select_autoescape())",
    ],
)  # fmt: skip
def test_the_scan_sees_what_it_is_for(text):
    assert {what for _, what in complaints(ast.parse(text))} & BAD


def test_templates_escape_what_they_are_given():
    for path in SOURCE.rglob("*.jinja"):
        text = path.read_text(encoding="utf-8")
        assert "autoescape false" not in text, path


HOSTILE = ["..%2f..%2fup", "$(touch sprung)", "; touch sprung", "{0.__class__}", "%s%n", "<script>alert(1)</script>"]


def everything(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def no_network(monkeypatch):
    def refuse(own, address):
        pytest.fail(f"somebody connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", lambda address, *_, **__: refuse(None, address))


GIVEN = {
    "recipe": "small", "base_width": 8, "epochs": 1, "batch_size": 6, "queue_size": 16, "precision": "fp32",
    "tensorboard": False, "threads": 1, "workers": 0, "device": "cpu", "image_size": 28, "quiet": True,
}  # fmt: skip


def test_names_of_files_and_classes_stay_names(tmp_path, monkeypatch, no_network):
    """Class and file names with shell words, formats and HTML: a run writes into its folder, and nowhere else."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(HOSTILE):
        folder = tmp_path / "data" / name.replace("/", "_")
        folder.mkdir(parents=True)
        for picture in fashion.load()[0][4 * number : 4 * number + 4]:
            (folder / f"{name.replace('/', '_')}-{len(os.listdir(folder))}.png").write_bytes(
                cv2.imencode(".png", picture)[1].tobytes()
            )
        (folder / f"broken {name.replace('/', '_')}.png").write_bytes(b"no picture")
    before = everything(tmp_path)
    run = moco.pretrain(tmp_path / "data", out="run", monitor="knn", labels="folder", **GIVEN)
    made = everything(tmp_path) - before
    assert all(path.is_relative_to(tmp_path / "run") for path in made), made
    assert len(run.skipped()) >= 1
    assert all("broken" in name for name, _ in run.skipped())


def test_members_of_an_archive_are_never_unpacked(tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(tmp_path)
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    shard = inside / "x.tar"
    with tarfile.open(shard, "w") as archive:
        for number, picture in enumerate(fashion.load()[0][:12]):
            names = [f"../../sprung-{number}.png", f"{tmp_path}/sprung-{number}.png", f"{number}.png"]
            content = cv2.imencode(".png", picture)[1].tobytes()
            member = tarfile.TarInfo(names[number % 3])
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    before = everything(tmp_path)
    moco.pretrain(shard, out="run", monitor="retrieval", cache=str(tmp_path / "cache"), **GIVEN)
    made = everything(tmp_path) - before
    assert all(path.is_relative_to(tmp_path / "run") or path.is_relative_to(tmp_path / "cache") for path in made), made
    assert not [path for path in made if path.suffix == ".png" and path.name != "curves.png"]
