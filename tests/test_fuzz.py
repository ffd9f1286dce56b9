"""Whatever bytes stand in the files that a run lives on: a message of one line, or the damaged part is passed over."""

import json
import math
import string

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moco.data import fashion
from moco.data.sources import ArraySource
from moco.errors import UserError
from moco.recipes import pretrain_settings
from moco.report.curves import draw_curves
from moco.resolve import resolve
from moco.settings import PretrainSettings
from moco.train.checkpoints import Checkpoints, read
from moco.train.parallel import Processes
from moco.train.run import METRICS, Run

QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
NAMES = st.sampled_from(sorted(PretrainSettings.model_fields)) | st.text(string.ascii_lowercase + "_- ", max_size=12)
TAGS = [
    "!!int",
    "!!float",
    "!!bool",
    "!!timestamp",
    "!!binary",
    "!!set",
    "!!omap",
    "!!null",
    "!!python/object:os.system",
]
PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates() | st.binary(max_size=4)
)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))
TAGGED = st.builds("{}: {} {}".format, NAMES, st.sampled_from(TAGS), st.text(string.printable, max_size=8))


def settings_or_one_line(path) -> None:
    message = ""
    try:
        assert isinstance(pretrain_settings(path), PretrainSettings)
    except UserError as error:
        message = str(error)
    assert "\n" not in message


@QUICK
@given(text=st.text(max_size=60) | st.text(":-[]{}&*!|>'\"#%@`\n 0e.x", max_size=30) | TAGGED)
@example(text="seed: 2001-99-99")
@example(text="seed: !!int x")
@example(text="seed: !!timestamp x")
@example(text="seed: !!bool x")
@example(text="seed: !!int ''")
@example(text="seed: " + "9" * 5000)
@example(text="key_view: " + "[" * 3000)
@example(text="? [a]\n: b")
@example(text="recipe: [small]")
@example(text="method: {a: b}")
def test_any_text_is_settings_or_one_line(tmp_path, text):
    path = tmp_path / "settings.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
    settings_or_one_line(path)


@QUICK
@given(values=st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_values_are_settings_or_one_line(tmp_path, values):
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    settings_or_one_line(path)


@QUICK
@given(content=st.binary(max_size=40))
def test_any_bytes_are_settings_or_one_line(tmp_path, content):
    path = tmp_path / "settings.yaml"
    path.write_bytes(content)
    settings_or_one_line(path)


@pytest.mark.parametrize(
    "tag", ["object/apply:os.system ['echo > sprung']", "object/new:os.system ['echo > sprung']", "name:os.system ''"]
)
def test_settings_files_run_nothing(tmp_path, monkeypatch, tag):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "settings.yaml"
    path.write_text(f"seed: !!python/{tag}\n")
    with pytest.raises(UserError, match="not valid YAML"):
        pretrain_settings(path)
    assert not (tmp_path / "sprung").exists()


def test_settings_that_would_grow_beyond_memory_are_refused(tmp_path):
    path = tmp_path / "settings.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    path.write_text("\n".join([*lines, "recipe: *a11"]))
    with pytest.raises(UserError, match="uses aliases"):
        pretrain_settings(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    asked = pretrain_settings(recipe="small", base_width=8, batch_size=32, device="cpu", precision="fp32")
    found = resolve(asked, ArraySource(fashion.load()[0][:64]), Processes(0, 1, torch.device("cpu")))
    return Run.create(tmp_path_factory.mktemp("runs") / "run", found)


LINES = [
    {"step": step, "epoch": step / 8, "loss": 4.0 - step / 10, "chance_loss": 4.2, "contrast_accuracy": 0.1}
    for step in (2, 4, 6, 8)
] + [{"step": 8, "epoch": 1.0, "knn_accuracy": 0.5}]
WHOLE = "".join(json.dumps(line) + "\n" for line in LINES).encode()
ODD = st.sampled_from(
    [
        b"[1, 2]", b"3", b"null", b'"step"', b"{}", b'{"step": "x", "loss": 1}', b'{"loss": 1.5, "epoch": 1}',
        b'{"step": 2, "knn_accuracy": "high"}', b'{"step": 3, "loss": NaN, "epoch": 1}', b'{"step": null}', b"\xff\xfe",
        b'{"step": 5, "loss": Infinity, "epoch": 2}', b'{"step": 5, "loss": 1e308, "epoch": 2}', b"[" * 2000,
        b'{"step": ' + b"9" * 5000 + b"}", b'{"step": ' + b"9" * 400 + b', "loss": 1}', b'{"step": true, "loss": 1}',
        b'{"step": 4, "epoch": 1, "loss": {"a": 1}}', b'{"step": 4, "loss": 2}', b"\x85{", b"\x00" * 40,
    ]
) | st.binary(max_size=20)  # fmt: skip


def survives(run: Run, drawn: bool) -> None:
    for line in run.metrics():
        assert all(isinstance(value, (int, float)) for value in line.values())
        assert "step" in line
    assert run.is_best({"knn_accuracy": math.inf})
    assert not run.is_best({"effective_rank": 1.0})
    if drawn:
        assert draw_curves(run).read_bytes().startswith(b"\x89PNG")
    run.rewind(4)
    assert all(line["step"] <= 4 for line in run.metrics())
    (run.path / METRICS).read_bytes().decode("ascii")  # what was damaged is gone


@QUICK
@given(cut=st.integers(0, len(WHOLE)), odd=st.lists(ODD, max_size=3))
def test_metrics_cut_anywhere_and_with_odd_lines_are_read_as_far_as_they_are_whole(run, cut, odd):
    (run.path / METRICS).write_bytes(WHOLE[:cut] + b"\n" + b"\n".join(odd))
    whole = WHOLE[:cut].count(b"\n")
    assert run.metrics()[:whole] == LINES[:whole]
    survives(run, drawn=False)


@QUICK
@given(place=st.integers(0, len(WHOLE) - 1), value=st.integers(0, 255))
def test_metrics_with_any_byte_changed(run, place, value):
    (run.path / METRICS).write_bytes(WHOLE[:place] + bytes([value]) + WHOLE[place + 1 :])
    there = run.metrics()
    assert sum(line in there for line in LINES) >= len(LINES) - 2  # a changed end of line costs two
    survives(run, drawn=False)


def test_curves_are_drawn_whatever_the_lines(run):
    odd = [
        b'{"step": 3, "loss": NaN, "epoch": 1}',
        b'{"step": 5, "loss": Infinity, "epoch": 2}',
        b'{"step": 4, "loss": 2}',
    ]
    odd += [b'{"step": 5, "loss": 1e308, "epoch": 1e308}', b'{"step": 5, "knn_accuracy": -1e400, "epoch": 2}', b"\xff"]
    (run.path / METRICS).write_bytes(WHOLE + b"\n".join(odd))
    survives(run, drawn=True)


STATE = {"step": 7, "format": 1, "model": {"weight": torch.arange(50.0), "name": "x" * 30}, "list": [1, 2.5, None]}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    folder.mkdir()
    made = Checkpoints(folder)
    made.save(STATE | {"step": 3}, keep=2)
    made.save(STATE, keep=2)
    return made, made.paths()[1].read_bytes()


def same(found) -> bool:
    return str(found) == str(STATE)


@QUICK
@given(data=st.data())
def test_a_checkpoint_without_its_checksum_and_with_changed_bytes_is_what_it_was_or_is_passed_over(checkpoints, data):
    """The checksum tells any change; without it the reader must, or stumble in no other way."""
    made, whole = checkpoints
    damaged = bytearray(whole)
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=3)):
        damaged[place] = data.draw(st.integers(0, 255))
    path = made.folder / "trial.pt"
    path.write_bytes(damaged[: data.draw(st.integers(len(whole) - 200, len(whole)))])
    found = read(path)
    assert found is None or isinstance(found["step"], int)


@QUICK
@given(place=st.integers(0, 10**9), value=st.integers(1, 255))
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(checkpoints, place, value):
    made, whole = checkpoints
    newest = made.paths()[1]
    damaged = bytearray(whole)
    damaged[place % len(whole)] ^= value
    newest.write_bytes(damaged)
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged"):
        assert made.newest()["step"] == 3
    newest.write_bytes(whole)
    assert same(made.newest())


@pytest.mark.parametrize("content", [[1, 2], 5, "text", {"model": {}}, {"step": "7"}, None])
def test_what_is_no_checkpoint_is_passed_over(tmp_path, content):
    torch.save(content, tmp_path / "step-000000007.pt")
    assert read(tmp_path / "step-000000007.pt") is None
