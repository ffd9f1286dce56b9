"""Foreign files: whose they are, what is read, and that nothing in them runs."""

import os
import subprocess
import zipfile

import pytest
import safetensors.torch
import torch
import torchvision
from foreign import Authors, AuthorsV3, Lightly, SoloLearn, authors_file, encoder, lightning_file, linear, mlp
from torch import nn

from moco.errors import UserError
from moco.interop.reading import read_weights


class Command:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function, *given):
        self.call = (function, given)

    def __reduce__(self):
        return self.call


def commands(mark):
    return {
        "os.system": Command(os.system, f"touch {mark}"),
        "subprocess": Command(subprocess.call, ["touch", str(mark)]),
        "eval": Command(eval, f"open({str(mark)!r}, 'w')"),
        "open": Command(open, str(mark), "w"),
    }


@pytest.mark.parametrize("kind", ["os.system", "subprocess", "eval", "open"])
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("place", ["beside", "within"])
def test_nothing_in_a_file_is_run(tmp_path, kind, legacy, place):
    mark, file = tmp_path / "ran", tmp_path / "file.pth"
    command = commands(mark)[kind]
    weights = {"conv1.weight": torch.zeros(4, 3, 3, 3)}
    content = (
        {"state_dict": weights, "args": command} if place == "beside" else {"state_dict": weights | {"x": command}}
    )
    torch.save(content, file, _use_new_zipfile_serialization=not legacy)
    if kind == "os.system":  # a module that PyTorch's reader will not even name
        with pytest.raises(UserError, match="--trust-pickle") as caught:
            read_weights(file)
        assert "\n" not in str(caught.value)
    else:
        found = read_weights(file)
        assert set(found.state) == {"conv1.weight"}
        assert found.left_out  # and it is said
    assert not mark.exists()
    if kind == "os.system":  # the test is one: trusted, the command does run
        read_weights(file, trust_pickle=True)
        assert mark.exists()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_namespace_is_left_out_and_the_rest_is_read(tmp_path, legacy):
    model, _ = authors_file(tmp_path / "v2.pth.tar", legacy=legacy)
    found = read_weights(tmp_path / "v2.pth.tar")
    assert found.left_out == ("argparse.Namespace",)
    assert found.meta["arch"] == "resnet18"
    assert found.meta["epoch"] == 2
    expected = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    assert list(found.state) == list(expected)
    assert all(torch.equal(found.state[name], value) for name, value in expected.items())
    assert found.optimizer is not None


def test_layouts_are_recognised_by_their_keys(tmp_path):
    def layout(content):
        torch.save(content, tmp_path / "file.pth")
        return read_weights(tmp_path / "file.pth").layout

    assert layout(Authors(linear).state_dict()) == "moco-v1"
    assert layout({"state_dict": Authors(mlp).state_dict()}) == "moco-v2"
    assert layout({"model": AuthorsV3().state_dict()}) == "moco-v3"
    assert layout({"state_dict": Lightly().state_dict()}) == "lightly"
    assert layout({"state_dict": SoloLearn().state_dict()}) == "solo-learn"
    classifier = encoder(linear(10)).state_dict()
    assert layout(classifier) == "plain"
    assert layout({"state_dict": {f"module.{name}": held for name, held in classifier.items()}}) == "plain"
    assert layout({"state_dict": classifier, "best_acc1": torch.tensor(60.6), "epoch": 100}) == "linear-probe"
    probe = {f"backbone.{name}": held for name, held in encoder(nn.Identity()).state_dict().items()}
    assert layout({"state_dict": probe | {"classifier.weight": torch.zeros(10, 64)}}) == "solo-learn-linear"


def test_lightning_files_with_objects_in_them(tmp_path):
    lightning_file(tmp_path / "last.ckpt", SoloLearn())
    found = read_weights(tmp_path / "last.ckpt")
    assert found.layout == "solo-learn"
    assert found.meta["epoch"] == 4


def test_a_whole_model_is_refused_with_the_reason_and_the_flag(tmp_path):
    model = torchvision.models.squeezenet1_1()
    for content in (model, {"epoch": 1, "model": model}):
        torch.save(content, tmp_path / "whole.pth")
        with pytest.raises(UserError, match=r"whole Python object \(torchvision.*SqueezeNet\).*--trust-pickle"):
            read_weights(tmp_path / "whole.pth")
        trusted = read_weights(tmp_path / "whole.pth", trust_pickle=True)
        assert set(trusted.state) == set(model.state_dict())


def test_safetensors_are_read_with_what_they_say(tmp_path):
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"conv1.weight": torch.ones(2, 3, 3, 3)}, file, metadata={"architecture": "resnet18"})
    found = read_weights(file)
    assert found.meta["architecture"] == "resnet18"
    assert torch.equal(found.state["conv1.weight"], torch.ones(2, 3, 3, 3))


def test_what_is_no_file_of_weights_is_one_clear_line(tmp_path):
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "empty.pth").write_bytes(b"")
    (tmp_path / "torn.pth").write_bytes(_torn(tmp_path))
    (tmp_path / "other.safetensors").write_bytes(b"12345678 nothing")
    with zipfile.ZipFile(tmp_path / "archive.pth", "w") as archive:
        archive.writestr("readme.txt", "hello")
    for name in ("text.pth", "empty.pth", "torn.pth", "archive.pth", "other.safetensors"):
        with pytest.raises(UserError, match=r"damaged, or no|no weights") as caught:
            read_weights(tmp_path / name)
        assert "\n" not in str(caught.value)
    torch.save({"epoch": 3}, tmp_path / "numbers.pth")
    with pytest.raises(UserError, match="holds no weights"):
        read_weights(tmp_path / "numbers.pth")
    with pytest.raises(UserError, match="there is no file"):
        read_weights(tmp_path / "absent.pth")
    with pytest.raises(UserError, match=r"is a folder: name the file of weights in it, such as .*safetensors"):
        read_weights(tmp_path)


def _torn(folder):
    torch.save({"conv1.weight": torch.zeros(64, 3, 7, 7)}, folder / "whole.pth")
    return (folder / "whole.pth").read_bytes()[:2000]
