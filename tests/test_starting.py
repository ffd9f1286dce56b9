"""--init: weights to start from."""

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import moco
from moco.building import build_model
from moco.data.sources import ArraySource
from moco.errors import UserError
from moco.evaluate.subject import MEAN, STD
from moco.recipes import pretrain_settings
from moco.resolve import resolve
from moco.starting import find_start, start_from
from moco.train.parallel import Processes

COMMON = {
    "recipe": "v2", "backbone": "resnet18", "stem": "imagenet", "image_size": 32, "batch_size": 8, "epochs": 1,
    "device": "cpu", "threads": 1, "precision": "fp32", "queue_size": 16, "monitor": "none", "tensorboard": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(7)
    return timm.create_model("resnet18", num_classes=0)


@pytest.fixture(scope="module")
def colours():
    return np.random.default_rng(0).integers(0, 255, (16, 32, 32, 3), np.uint8)


def started(source, **given):
    settings = pretrain_settings(**(COMMON | given))
    start = find_start(settings)
    assert start is not None
    found = resolve(
        settings, ArraySource(source), Processes(0, 1, torch.device("cpu")), prepared=(start.mean, start.std)
    )
    model = build_model(found, len(source))
    return start_from(model, start, settings), model, found


def test_a_file_reaches_both_encoders_and_its_normalisation_the_settings(network, colours, tmp_path):
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    report, model, found = started(colours, init=str(tmp_path / "weights.safetensors"))
    assert report.complete
    for encoder in (model.query_encoder, model.key_encoder):
        held = encoder.backbone.state_dict()
        assert all(torch.equal(held[name], value) for name, value in network.state_dict().items())
    assert (found.mean, found.std) == (MEAN, STD)
    asked = started(colours, init=str(tmp_path / "weights.safetensors"), mean=(0.1, 0.2, 0.3))[2]
    assert asked.mean == (0.1, 0.2, 0.3)


def test_a_run_trains_on_and_says_where_from(network, colours, tmp_path, capsys):
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    given = COMMON | {"learning_rate": 1e-12, "weight_decay": 0.0}
    first = moco.pretrain(colours, out=tmp_path / "first", init=tmp_path / "weights.safetensors", **given)
    assert "starting from" in capsys.readouterr().out
    weight = first.backbone().conv1.weight
    assert torch.allclose(weight, network.conv1.weight, atol=1e-6)
    second = moco.pretrain(colours, out=tmp_path / "second", init=tmp_path / "first", quiet=True, **given)
    assert torch.allclose(second.backbone().layer4[0].conv1.weight, network.layer4[0].conv1.weight, atol=1e-6)
    assert second.settings.mean == first.settings.mean == MEAN
    (tmp_path / "weights.safetensors").unlink()  # once begun, a run needs it no more
    assert moco.resume(first.path, data=colours, epochs=2, quiet=True).load()["step"] == 4


def test_what_does_not_fit_is_one_line_and_leaves_nothing(network, colours, tmp_path):
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    file = str(tmp_path / "weights.safetensors")
    for given, message in (
        ({"init": file, "stem": "small"}, "only in part: .*conv1.weight"),
        ({"init": file, "backbone": "vit_tiny_patch16_224", "stem": "auto"}, "nothing that fits"),
        ({"init": str(tmp_path / "absent.pt")}, "no file"),
        ({"init": "timm", "backbone": "resnet10t"}, "not on this machine"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            moco.pretrain(colours, out=tmp_path / "run", quiet=True, **(COMMON | given))
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()
    report, model, _ = started(colours, init=file, stem="small", allow_partial=True)
    assert not report.complete
    assert torch.equal(model.backbone.layer1[0].conv1.weight, network.layer1[0].conv1.weight)
