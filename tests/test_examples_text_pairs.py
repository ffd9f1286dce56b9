"""The example of a sentence encoder: how many pairs it takes, and what it says to too few."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "examples" / "text_pairs.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("text_pairs", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_at_most_as_many_pairs_as_asked_for(example):
    assert len(example.pairs(3)) == 3


def test_too_few_pairs_are_refused_and_the_help_says_how_many(example, monkeypatch, capsys):
    for given, found, why in (
        (1127, 2000, "error: --pairs 1127: 1128 or more are needed, 1000 of them held out"),
        (5000, 500, "error: only 500 pairs in the packages installed here, 1128 are needed"),
    ):
        monkeypatch.setattr(example, "pairs", lambda most, found=found: [("a", "b")] * min(found, most))
        monkeypatch.setattr(sys, "argv", ["text_pairs.py", "--pairs", str(given)])
        with pytest.raises(SystemExit) as stop:
            example.main()
        assert stop.value.code == 2
        assert why in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["text_pairs.py", "--help"])
    with pytest.raises(SystemExit):
        example.main()
    assert "at most so many, 1128 or more" in capsys.readouterr().out
