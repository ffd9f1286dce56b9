"""What every verb does with --json, --quiet, mistakes and pipes, whatever verbs there are."""

import argparse
import contextlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

import moco
from moco.cli import main, make_parser
from moco.cli.parsing import Output, plain
from moco.data import fashion

WITHOUT_RESULT = {"completion"}
TINY = {
    "recipe": "small", "base_width": 8, "epochs": 1, "batch_size": 64, "queue_size": 96, "precision": "fp32",
    "image_size": 16, "monitor": "none", "tensorboard": False, "threads": 1,
}  # fmt: skip


def leaves(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                found = list(leaves(below))
                yield from [([name, *words], leaf) for words, leaf in found] or [([name], below)]


VERBS = {" ".join(words): parser for words, parser in leaves(make_parser([])[0])}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run, its pictures in a file, and an embedding of them."""
    folder = tmp_path_factory.mktemp("place")
    x, y, *_ = fashion.load()
    np.savez(folder / "x.npz", x=x[:128], y=y[:128])
    moco.pretrain(folder / "x.npz", out=str(folder / "runs" / "run"), quiet=True, **TINY)
    return folder


def flag(name, value):
    word = f"--{name.replace('_', '-')}"
    return [f"--no-{word[2:]}"] if value is False else [word, str(value)]


def commands(place: Path, number: int) -> dict[str, list[str]]:
    """A short command for each verb that takes seconds at most. number: makes names of new files."""
    run, data, rows = str(place / "runs" / "run"), str(place / "x.npz"), str(place / "rows.npy")
    flags = [word for name, value in TINY.items() for word in flag(name, value)]
    own = {task: ["eval", task, run, "--device", "cpu", "--no-baseline"] for task in ("knn", "retrieval")}
    return {
        **{f"eval {task}": words for task, words in own.items()},
        "health": ["health", run, "--images", "100", "--device", "cpu"],
        "check": ["check", data, "--workers", "0"],
        "embed": ["embed", run, "--out", str(place / f"e{number}.npy"), "--workers", "0"],
        "search": ["search", run, str(place / "x.npz"), "--in", rows, "--sheet", "none"],
        "cluster": ["cluster", "--in", rows, "--out", str(place / f"c{number}"), "--no-sheets", "--clusters", "3"],
        "export": ["export", run, "--to", "safetensors", "--out", str(place / f"x{number}")],
        "runs": ["runs", str(place / "runs")],
        "clean": ["clean", run, "--dry-run"],
        "pretrain": ["pretrain", data, *flags, "--out", str(place / f"r{number}")],
        "resume": ["resume", run],
    }


@pytest.fixture(scope="module")
def embedding(place):
    moco.embed(place / "runs" / "run", out=place / "rows.npy", quiet=True, workers=0)


def test_every_verb_with_a_result_takes_json_and_every_verb_that_talks_takes_quiet():
    assert len(VERBS) >= 19
    for name, parser in VERBS.items():
        flags = parser._option_string_actions
        assert ("--json" in flags) == (name not in WITHOUT_RESULT), name
        assert ("--quiet" in flags) == (name != "completion"), name


@pytest.mark.parametrize("name", sorted(commands(Path(), 0)))
def test_json_on_standard_output_is_alone_there_and_quiet_is_quiet(name, place, embedding, capsys):
    assert main([*commands(place, 1)[name], "--json", "-"]) in (0, 1)  # health may be bad
    found = capsys.readouterr()
    result = json.loads(found.out)
    assert result
    assert found.err, "the words go to standard error"
    assert "\x1b" not in found.out + found.err, "no colours where there is no terminal"
    file = place / f"{name}.json"
    assert main([*commands(place, 2)[name], "--quiet", "--json", str(file)]) in (0, 1)
    assert capsys.readouterr().out == ""
    again = json.loads(file.read_text(encoding="utf-8"))
    assert type(again) is type(result)
    assert list(again) == list(result) if isinstance(result, dict) else len(again) == len(result)
    assert not list(place.glob("*.partial"))


def test_a_result_is_what_the_table_says(place, capsys):
    words = commands(place, 0)["eval knn"]
    assert main([*words, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    (share, *_) = json.loads(out)["rows"]["pre-trained"].values()
    assert f"{share * 100:.1f}" in err


@pytest.mark.parametrize("name", sorted(VERBS))
def test_mistakes_are_one_line_on_standard_error_and_status_2(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (["--no-such-flag"], ["--json", "no/such/folder/x.json"]):
        assert main([*name.split(), *words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("moco: ")
        assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_a_training_came_to(place, capsys):
    assert main([*commands(place, 3)["pretrain"], "--monitor", "retrieval", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    lines = moco.Run(place / "r3").metrics()
    assert found["run"] == str(place / "r3")
    assert (found["step"], found["epochs"]) == (2, 1)
    assert found["metrics"] == lines[0]
    assert found["checks"] == lines[1]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_several_processes_the_first_one_has_the_result(rank, place, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("moco.pretraining.resume", lambda run, **given: moco.Run(run))
    assert main([*commands(place, 0)["resume"], "--json", "-"]) == 0
    assert (capsys.readouterr().out == "") == (rank == "1")


def test_a_place_that_cannot_be_written_is_found_before_the_work(place, capsys, monkeypatch):
    monkeypatch.setattr("moco.evaluation.evaluate", lambda *a, **k: pytest.fail("hours of work"))
    for wrong in ("absent/x.json", str(place)):
        assert main(["eval", "knn", str(place / "runs" / "run"), "--json", wrong]) == 2
        assert "cannot write there" in capsys.readouterr().err


def test_nothing_is_written_where_the_verb_fails(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("before")
    with contextlib.suppress(KeyError), Output({"json_file": str(file)}) as output:
        output.result = {"half": 1}
        raise KeyError
    assert file.read_text() == "before"


def test_json_has_no_numbers_that_are_none():
    value = {"a": [math.nan, 1.5, -math.inf, True, None, 3], Path("p"): (np.float64(0.5), Path("q"))}
    assert plain(value) == {"a": [None, 1.5, None, True, None, 3], "p": [0.5, "q"]}
