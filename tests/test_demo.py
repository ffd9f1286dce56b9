"""The demonstration, cut short."""

import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from moco import demo
from moco.cli import main
from moco.data import fashion


def test_a_number_is_added_to_a_folder_that_is_taken(tmp_path):
    path = str(tmp_path / "demo")
    assert demo.free_folder(path) == path
    for folder in ("demo", "demo-2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "settings.yaml").write_text("")
    assert demo.free_folder(path) == f"{path}-3"


@pytest.mark.parametrize(("rate", "epochs"), [(20, 3), (300, 4), (700, 11), (2000, 16)])
def test_as_many_epochs_as_fit_into_a_demonstration(monkeypatch, capsys, rate, epochs):
    monkeypatch.setattr(demo, "measure", lambda *_, **__: SimpleNamespace(job=rate, images=10_000))
    assert demo.epochs_that_fit("pictures.npz", Console()) == epochs
    shown = capsys.readouterr().out
    assert (f"{epochs} epochs" in shown and "moco demo --epochs 16" in " ".join(shown.split())) == (epochs < 16)


@pytest.mark.slow
def test_the_demo_ends_with_a_table_the_folder_and_the_picture(tmp_path, monkeypatch, capsys):
    x, y, x_test, y_test = fashion.load()
    monkeypatch.setattr(demo, "BASE_WIDTH", 4)
    monkeypatch.setattr(demo.fashion, "load", lambda: (x[:1000], y[:1000], x_test[:300], y_test[:300]))
    path = tmp_path / "demo"
    assert main(["demo", "--epochs", "1", "--out", str(path)]) == 0
    shown = capsys.readouterr().out
    rows = json.loads((path / "demo.json").read_text())
    assert list(rows) == ["raw pixels", "untrained", "pre-trained"]
    for row in rows.values():
        assert tuple(row) == demo.COLUMNS
        assert all(0.2 < value < 1 for value in row.values())
    for text in ("epoch 1/1", "raw pixels", "pre-trained", "linear probe", str(path), "curves.png"):
        assert text in shown
    assert rows["raw pixels"]["kNN"] > rows["raw pixels"]["kNN, hand-held"]
    assert (path / "curves.png").stat().st_size > 10_000


def test_a_demonstration_of_no_epochs_is_refused(tmp_path, capsys):
    assert main(["demo", "--epochs", "0", "--out", str(tmp_path / "demo")]) == 2
    assert "epochs = 0: must be greater than 0" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()
