"""The examples of docs/library.md, in order, with pictures and trainings made small."""

import re
from pathlib import Path

import cv2
import numpy as np
import pytest

import moco
import moco.pretraining
import moco.sklearn
from moco.data import fashion

PAGE = Path(__file__).parents[1] / "docs" / "library.md"
SMALL = {
    "batch_size": 32, "queue_size": 64, "threads": 1, "workers": 0, "precision": "fp32", "tensorboard": False,
    "quiet": True,
}  # fmt: skip


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Trainings of few steps, in a folder with photos/."""
    pretrain = moco.pretraining.pretrain

    def tiny(data, **given):
        width = {} if callable(given.get("backbone")) else {"base_width": 8}
        return pretrain(data, **(given | SMALL | width | {"epochs": 2}))

    monkeypatch.setattr(moco.pretraining, "draw_curves", lambda run: "")
    monkeypatch.setattr(moco.pretraining, "pretrain", tiny)
    monkeypatch.setattr(moco.sklearn, "pretrain", tiny)
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    x, y, *_ = fashion.load()
    np.savez("clothes.npz", x=x[:64], y=y[:64])
    for number, picture in enumerate(x[:64]):
        cv2.imwrite(f"photos/{number}.png", cv2.cvtColor(picture, cv2.COLOR_GRAY2BGR))


def test_every_example_runs(small, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 6
    names = {}
    for block in blocks:
        block = block.replace("epochs=40", "epochs=3, quiet=True")
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["features"].shape[0] == 64
    assert {str(one.path) for one in moco.runs()} == {f"runs/{name}" for name in ("first", "own", "second", "turned")}
    assert moco.Run("runs/turned").load()["step"] == 6
    assert len(names["best"]) == 2
    assert max(names["best"]) > 0, "the check is among the figures of an epoch"


def test_every_public_name_has_a_docstring_and_is_written_about():
    text = PAGE.read_text(encoding="utf-8") + (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    for name in moco.__all__:
        assert getattr(moco, name).__doc__, name
    for name in ("backbone", "embed", "pretrain", "resume", "runs", "MocoEncoder", "Progress", "UserError"):
        assert f"moco.{name}" in text, name
