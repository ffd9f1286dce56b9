"""`moco import`: runs from foreign checkpoints, evaluated and continued."""

import numpy as np
import pytest
import torch
from foreign import (
    WIDTH,
    Authors,
    AuthorsV3,
    Lightly,
    SoloLearn,
    Wrapped,
    authors_file,
    encoder,
    lightning_file,
    linear,
    lively,
    mlp,
)
from torch import nn

import moco
from moco.building import build_model
from moco.cli import main
from moco.errors import UserError
from moco.interop.importing import import_run
from moco.train.optim import make_optimizer

SMALL = {
    "image_size": 32,
    "batch_size": 8,
    "workers": 0,
    "tensorboard": False,
    "precision": "fp32",
    "monitor": "none",
    "quiet": True,
}
DATA = np.random.default_rng(0).integers(0, 255, (20, 32, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def v2(tmp_path_factory):
    """A checkpoint of the authors' v2, its model and optimiser, and the run it becomes."""
    folder = tmp_path_factory.mktemp("v2")
    model, optimizer = authors_file(folder / "v2.pth.tar")
    return model.module, optimizer, import_run(folder / "v2.pth.tar", out=folder / "run", **SMALL)


def test_everything_of_v2_is_where_it_belongs(v2):
    theirs, _, found = v2
    assert found.continues
    assert found.epochs == 2
    settings = found.run.settings
    assert (settings.backbone, settings.base_width, settings.stem) == ("resnet18", 8, "imagenet")
    assert (settings.head, settings.feature_size, settings.queue_size) == ("mlp", 16, 32)
    assert (settings.recipe, settings.temperature, settings.momentum) == ("v2", 0.2, 0.999)
    assert settings.mean == (0.485, 0.456, 0.406)
    model = build_model(settings)
    model.load_state_dict(found.run.load()["model"])
    pictures = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        for ours, his in ((model.query_encoder, theirs.encoder_q), (model.key_encoder, theirs.encoder_k)):
            assert torch.allclose(ours.eval()(pictures), his.eval()(pictures), atol=1e-5)
        assert torch.equal(found.run.backbone()(pictures), model.backbone(pictures))
    assert torch.allclose(model.dictionary.keys, theirs.queue.T, atol=1e-6)
    assert int(model.dictionary.pointer) == 8
    assert set(model.dictionary.ids.tolist()) == set(model.dictionary.births.tolist()) == {-1}


def test_momentum_goes_on_as_in_the_authors_code(v2):
    """One more step of both, from the same gradients, ends at the same weights."""
    theirs, optimizer, found = v2
    settings, state = found.run.settings, found.run.load()
    model = build_model(settings)
    model.load_state_dict(state["model"])
    ours = make_optimizer(model, settings)
    ours.load_state_dict(state["optimizer"])
    before = {name: p.detach().clone() for name, p in theirs.encoder_q.named_parameters()}
    for name, p in theirs.encoder_q.named_parameters():
        generator = torch.Generator().manual_seed(p.numel())
        p.grad = torch.randn(p.shape, generator=generator)
        mine = name.replace("fc.", "head.", 1) if name.startswith("fc.") else f"backbone.{name}"
        model.query_encoder.get_parameter(mine).grad = p.grad.clone()
    optimizer.step()
    ours.step()
    for name, p in theirs.encoder_q.named_parameters():
        mine = name.replace("fc.", "head.", 1) if name.startswith("fc.") else f"backbone.{name}"
        assert torch.allclose(model.query_encoder.get_parameter(mine), p, atol=1e-6), name
    with torch.no_grad():  # for the other tests
        for name, p in theirs.encoder_q.named_parameters():
            p.copy_(before[name])


@pytest.mark.parametrize("head", [linear, mlp], ids=["v1", "v2"])
def test_training_goes_on_from_the_epoch_of_the_file(tmp_path, head):
    authors_file(tmp_path / "file.pth.tar", head, epoch=2, legacy=head is linear)
    found = import_run(tmp_path / "file.pth.tar", out=tmp_path / "run", **SMALL)
    assert found.run.settings.recipe == ("v1" if head is linear else "v2")
    queue = found.run.load()["model"]["dictionary.keys"]
    run = moco.resume(found.run.path, data=DATA, epochs=3, quiet=True)
    state = run.load()
    assert (state["step"], state["images"]) == (6, 20)  # two epochs of two steps lie behind it
    born = state["model"]["dictionary.births"]
    assert born[:8].tolist() + born[24:].tolist() == [-1] * 16  # written from the place of the oldest on
    assert born[8:24].tolist() == [4] * 8 + [5] * 8
    assert torch.equal(state["model"]["dictionary.keys"][:8], queue[:8])
    again = moco.resume(run.path, data=DATA, epochs=4, quiet=True)  # as any other run now
    assert again.load()["step"] == 8


def test_v3_goes_on_with_projector_and_predictor(tmp_path):
    torch.manual_seed(0)
    model = lively(Wrapped(AuthorsV3()))
    torch.save({"epoch": 1, "arch": "resnet50", "state_dict": model.state_dict()}, tmp_path / "v3.pth.tar")
    found = import_run(tmp_path / "v3.pth.tar", out=tmp_path / "run", warmup_epochs=0, **SMALL)
    settings = found.run.settings
    assert found.continues
    assert (settings.recipe, settings.dictionary, settings.head, settings.head_width) == (
        "v3",
        "in-batch",
        "mlp-bn",
        24,
    )
    assert (settings.predictor_layers, settings.predictor_last_norm, settings.head_last_norm) == (2, False, True)
    ours, theirs = build_model(settings), model.module
    ours.load_state_dict(found.run.load()["model"])
    pictures = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        expected = theirs.predictor.eval()(theirs.base_encoder.eval()(pictures))
        assert torch.allclose(ours.predictor.eval()(ours.query_encoder.eval()(pictures)), expected, atol=1e-5)
        expected = theirs.momentum_encoder.eval()(pictures)
        assert torch.allclose(ours.key_encoder.eval()(pictures), expected, atol=1e-5)
    assert any("optimiser starts anew" in note for note in found.notes)
    assert moco.resume(found.run.path, data=DATA, epochs=2, quiet=True).load()["step"] == 4


def test_lightly_and_solo_learn_go_on(tmp_path):
    lightning_file(tmp_path / "lightly.ckpt", lively(Lightly()))
    found = import_run(tmp_path / "lightly.ckpt", out=tmp_path / "lightly", queue_size=64, **SMALL)
    assert found.continues
    assert found.epochs == 5
    assert found.run.settings.queue_size == 64
    assert any("queue starts anew" in note for note in found.notes)
    solo = lively(SoloLearn())
    lightning_file(tmp_path / "solo.ckpt", solo)
    found = import_run(tmp_path / "solo.ckpt", out=tmp_path / "solo", **SMALL)
    assert found.continues
    assert not any("queue starts anew" in note for note in found.notes)
    assert torch.allclose(found.run.load()["model"]["dictionary.keys"], solo.queue[1].T, atol=1e-6)


def test_a_backbone_alone_is_evaluated_but_not_continued(tmp_path):
    network = lively(encoder(linear(7)))
    torch.save(network.state_dict(), tmp_path / "plain.pth")
    found = import_run(tmp_path / "plain.pth", out=tmp_path / "run", **SMALL)
    assert not found.continues
    assert any("no key encoder" in note and "--init" in note for note in found.notes)
    pictures = torch.randn(2, 3, 32, 32)
    network.fc = nn.Identity()
    with torch.no_grad():
        assert torch.allclose(found.run.backbone()(pictures), network.eval()(pictures), atol=1e-6)
    with pytest.raises(UserError, match=r"imported without the parts that training needs.*--init"):
        moco.resume(found.run.path, data=DATA, quiet=True)


def test_what_the_file_decides_cannot_be_chosen(tmp_path):
    torch.save(Authors().state_dict(), tmp_path / "file.pth")
    for name, value, there in (("queue_size", 64, 32), ("head", "linear", "mlp"), ("feature_size", 8, 16)):
        with pytest.raises(UserError, match=f"{name} {value} cannot be chosen: .* has {there}"):
            import_run(tmp_path / "file.pth", out=tmp_path / "run", **SMALL, **{name: value})
    (tmp_path / "run.yaml").write_text("stem: small\n")
    with pytest.raises(UserError, match="stem small cannot be chosen"):
        import_run(tmp_path / "file.pth", out=tmp_path / "run", config=tmp_path / "run.yaml", **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.pth", "run.yaml"]


def test_other_channels_need_their_statistics(tmp_path):
    torch.save(Authors(channels=2).state_dict(), tmp_path / "file.pth")
    with pytest.raises(UserError, match=r"2 channels: name what .*--mean"):
        import_run(tmp_path / "file.pth", out=tmp_path / "run", **SMALL)
    found = import_run(tmp_path / "file.pth", out=tmp_path / "run", mean=(0.3, 0.4), std=(0.2, 0.2), **SMALL)
    assert found.run.settings.channels == 2


def test_half_a_network_needs_to_be_allowed_and_leaves_nothing(tmp_path):
    state = encoder(linear()).state_dict()
    del state["layer3.0.conv1.weight"]
    torch.save(state, tmp_path / "half.pth")
    with pytest.raises(UserError, match=r"only in part: .*layer3\.0\.conv1\.weight.*--allow-partial"):
        import_run(tmp_path / "half.pth", out=tmp_path / "run", **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["half.pth"]
    found = import_run(tmp_path / "half.pth", out=tmp_path / "run", allow_partial=True, **SMALL)
    assert found.weights.missing == ("layer3.0.conv1.weight",)
    assert not found.continues


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    torch.save(encoder(linear()).state_dict(), tmp_path / "plain.pth")
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    with pytest.raises(AssertionError):
        import_run(tmp_path / "plain.pth", out=tmp_path / "run", **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["plain.pth"]


def test_the_command_line_says_what_was_found(tmp_path, capsys):
    content = {"state_dict": encoder(nn.Linear(WIDTH, 10)).state_dict(), "best_acc1": 60.6}
    torch.save(content, tmp_path / "probe.pth")
    flags = ["--image-size", "32", "--workers", "0"]
    assert main(["import", str(tmp_path / "probe.pth"), "--out", str(tmp_path / "run"), *flags]) == 0
    told = capsys.readouterr().out
    assert "a linear probe, not a pre-training checkpoint" in told
    assert "120 tensors matched" in told
    assert main(["import", str(tmp_path / "probe.pth"), "--out", str(tmp_path / "run"), *flags]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "probe.pth")]) == 2
    assert "--out RUN" in capsys.readouterr().err
    checkpoint = next((tmp_path / "run" / "checkpoints").glob("*.pt"))
    assert main(["import", str(checkpoint), "--out", str(tmp_path / "b")]) == 2
    assert "a checkpoint of this package" in capsys.readouterr().err
