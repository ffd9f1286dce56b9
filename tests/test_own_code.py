"""A backbone and views of one's own: trained with, continued, evaluated; and never imported by name."""

import functools
import multiprocessing

import numpy as np
import pytest
import torch
from torch import nn

import moco
from moco.cli import main
from moco.contrast import own
from moco.contrast.encoders import build_backbone
from moco.data import fashion
from moco.data.own_views import check_own_view, make_own_views
from moco.data.sources import open_source
from moco.errors import UserError

TINY = {
    "recipe": "small", "epochs": 2, "batch_size": 64, "queue_size": 96, "precision": "fp32", "image_size": 8,
    "monitor": "retrieval", "tensorboard": False, "threads": 1, "log_every": 1,
}  # fmt: skip
NAME = f"custom: {__name__}.network"


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())


def corner(picture, generator):
    top, left = generator.integers(0, 21, 2)
    return picture[top : top + 8, left : left + 8] // 2 + generator.integers(0, 100, dtype=np.uint8)


@pytest.fixture
def x():
    return np.asarray(fashion.load()[0][:128])


@pytest.fixture
def pretrain(x, tmp_path, monkeypatch):
    monkeypatch.setattr("moco.pretraining.draw_curves", lambda run: "")

    def train(name="run", **given):
        return moco.pretrain(x, out=str(tmp_path / name), quiet=True, **(TINY | given))

    return train


@pytest.fixture
def another_process(monkeypatch):
    """Nothing was handed over here."""
    monkeypatch.setattr(own, "_KNOWN", {})


def same(one, other):
    one, other = one.load()["model"], other.load()["model"]
    return all(torch.equal(one[k], v) for k, v in other.items() if isinstance(v, torch.Tensor))


def test_a_backbone_is_trained_and_used_everywhere(pretrain, x):
    run = pretrain(backbone=network)
    assert run.settings.backbone == NAME
    weights = run.load()["model"]
    trained = moco.backbone(run.path)
    assert torch.equal(trained[1].weight, weights["query_encoder.backbone.1.weight"])
    assert not torch.equal(trained[1].weight, weights["key_encoder.backbone.1.weight"])
    features = moco.embed(run, x[:9], quiet=True)
    assert features.shape == (9, 16)
    assert same(run, pretrain("again", backbone=network)), "the weights come from the seed"


def test_another_process_must_be_handed_it(pretrain, x, monkeypatch, capsys):
    run = pretrain(backbone=network, epochs=1)
    whole = pretrain("whole", backbone=network)
    monkeypatch.setattr(own, "_KNOWN", {})
    for call in (lambda: moco.backbone(run.path), lambda: moco.resume(run.path, data=x), lambda: moco.embed(run, x)):
        with pytest.raises(UserError, match=r"network is code of its own: hand it over in Python first, moco\.resume"):
            call()
    assert main(["eval", "knn", str(run.path)]) == 2
    assert main(["pretrain", "x.npz", "--backbone", NAME]) == 2
    capsys.readouterr()
    with pytest.raises(UserError, match=f"was trained with backbone {NAME}, not"):
        moco.backbone(run.path, backbone=nn.Flatten())
    with pytest.raises(UserError, match=r"cannot resume .* with backbone resnet18"):
        moco.resume(run.path, data=x, backbone="resnet18")
    moco.resume(run.path, data=x, backbone=network, epochs=2, quiet=True)
    assert run.load()["step"] == whole.load()["step"] == 4
    assert moco.backbone(run.path).training is False
    assert main(["export", str(run.path), "--to", "timm"]) == 2
    assert "no other library knows" in capsys.readouterr().err


def test_nothing_is_imported_because_a_settings_file_names_it(another_process, tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="evil"):
        build_backbone("custom: evil.network")


def test_a_module_is_copied_with_its_weights():
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    name = own.know(module)
    with torch.no_grad():
        module[1].weight.zero_()
    one, two = own.build(name), own.build(name)
    assert torch.equal(one[1].weight, two[1].weight)
    assert one[1].weight.abs().sum() > 0
    assert one[1].weight is not two[1].weight
    assert own.know(functools.partial(network)) == NAME


def test_what_is_no_backbone():
    with pytest.raises(UserError, match="hand over a function"):
        moco.pretrain("photos/", backbone=7)
    with pytest.raises(UserError, match=r"made no nn\.Module but a int"):
        build_backbone(own.know(lambda: 7))
    own.know(network)
    with pytest.raises(UserError, match="change timm models, not custom"):
        build_backbone(NAME, base_width=8)


# Views ----------------------------------------------------------------------------------------------------------------


def test_views_are_those_of_the_function_and_of_the_step(x):
    source = open_source(x[:, :, :, None])
    ids = np.array([5, 0, 7])
    given = {"seed": 3, "step": 11, "size": 8, "channels": 1}
    views, used, skipped = make_own_views(source, ids, corner, first_row=4, **given)
    assert (views.shape, used.tolist(), skipped) == ((2, 3, 8, 8, 1), [5, 0, 7], [])
    for row, index in enumerate(ids):
        for which in range(2):
            sequence = np.random.SeedSequence(3, spawn_key=(0x6F776E76, 11, 4 + row, which))
            expected = corner(x[index][:, :, None], np.random.default_rng(sequence))
            assert np.array_equal(views[which, row], expected)
    # A process that has only the last row makes the same of it.
    assert np.array_equal(make_own_views(source, ids[2:], corner, first_row=6, **given)[0][:, 0], views[:, 2])


def test_a_run_with_own_views_is_resumed_to_the_same_bits_with_other_workers(pretrain, x):
    def stop(progress):
        if progress.step == 3:
            raise StopIteration

    whole = pretrain("whole", backbone=network, views=corner)
    assert whole.settings.views == "custom"
    run = pretrain(backbone=network, views=corner, on_step=stop, workers=1)
    with pytest.raises(UserError, match=r"made by a function: hand it over in Python, moco\.resume\(RUN, views"):
        moco.resume(run.path, data=x, backbone=network, quiet=True)
    moco.resume(run.path, data=x, backbone=network, views=corner, workers=0, quiet=True)
    assert run.load()["step"] == 4
    assert same(run, whole)
    assert not same(whole, pretrain("other", backbone=network))


def test_views_custom_without_a_function_writes_nothing(pretrain, tmp_path, capsys):
    with pytest.raises(UserError, match="hand it over in Python"):
        pretrain(backbone=network, views="custom")
    assert not (tmp_path / "run").exists()


def test_what_is_no_view(x):
    source, given = open_source(x), {"seed": 0, "step": 0, "first_row": 0, "size": 8, "channels": 1}
    for wrong, said in (
        (lambda picture, _: picture, r"uint8 \(8, 8, 1\), not uint8 \(28, 28, 1\)"),
        (lambda picture, _: picture[:8, :8] / 255, "not float64"),
        (lambda picture, _: None, "not a NoneType"),
    ):
        with pytest.raises(UserError, match=said):
            make_own_views(source, np.array([1]), wrong, **given)

    def spoil(picture, _):
        picture[:] = 0
        return picture[:8, :8, 0]

    before = x.copy()
    make_own_views(source, np.array([1]), spoil, **given)
    assert np.array_equal(x, before), "the function gets a copy"


def test_a_function_that_cannot_travel_is_refused_where_workers_need_it_to(monkeypatch):
    check_own_view(lambda p, g: p, 0)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "spawn")
    check_own_view(corner, 2)
    with pytest.raises(UserError, match="define it at the top of a module, or set workers to 0"):
        check_own_view(lambda p, g: p, 2)
