"""The demonstration, cut short."""

import json

import pytest

from moco import demo
from moco.data import fashion


def test_a_number_is_added_to_a_folder_that_is_taken(tmp_path):
    path = str(tmp_path / "demo")
    assert demo.free_folder(path) == path
    for folder in ("demo", "demo-2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "settings.yaml").write_text("")
    assert demo.free_folder(path) == f"{path}-3"


@pytest.mark.slow
def test_the_demo_ends_with_a_table_the_folder_and_the_picture(tmp_path, monkeypatch, capsys):
    x, y, x_test, y_test = fashion.load()
    monkeypatch.setattr(demo, "EPOCHS", 1)
    monkeypatch.setattr(demo.fashion, "load", lambda: (x[:1000], y[:1000], x_test[:300], y_test[:300]))
    run = demo.demonstrate(str(tmp_path / "demo"))
    shown = capsys.readouterr().out
    rows = json.loads((run.path / "demo.json").read_text())
    assert list(rows) == ["raw pixels", "untrained", "pre-trained"]
    for row in rows.values():
        assert tuple(row) == demo.COLUMNS
        assert all(0.2 < value < 1 for value in row.values())
    for text in ("raw pixels", "pre-trained", "linear probe", str(run.path), "curves.png"):
        assert text in shown
    assert rows["raw pixels"]["kNN"] > rows["raw pixels"]["kNN, hand-held"]
    assert (run.path / "curves.png").stat().st_size > 10_000
