"""`moco export`: other libraries load what was written, and find the features of the run."""

import json
import pickle
import runpy

import numpy as np
import pytest
import safetensors.torch
import timm
import timm.data
import torch
import torchvision
from foreign import lively
from PIL import Image
from torch import nn

from moco.building import build_model
from moco.cli import main
from moco.contrast.encoders import build_backbone
from moco.data.loader import evaluation_batches
from moco.data.sources import open_source
from moco.data.views import normalize
from moco.errors import UserError
from moco.interop import exporting, graphs
from moco.interop.detectron import detectron2_name, timm_name
from moco.interop.exporting import export_run
from moco.interop.importing import import_run
from moco.interop.network import Network
from moco.recipes import pretrain_settings
from moco.settings import RunSettings
from moco.train.checkpoints import FORMAT
from moco.train.run import Run

FOUND = {
    "channels": 3, "mean": (0.3, 0.4, 0.5), "std": (0.2, 0.25, 0.3), "workers": 0, "views": "image", "stem": "imagenet",
    "queue_size": 8, "bn_groups": 1, "shuffle_bn": False, "precision": "fp32", "threads": 1, "monitor": "none",
    "head_width": 16, "momentum": 0.99, "warmup_epochs": 0,
}  # fmt: skip


def make_run(folder, **changed):
    chosen = {"recipe": "v2", "backbone": "resnet18", "image_size": 32, "feature_size": 16}
    own = {name: value for name, value in changed.items() if name not in FOUND}
    found = FOUND | {name: value for name, value in changed.items() if name in FOUND}
    settings = RunSettings(**(pretrain_settings(**(chosen | own)).model_dump() | found))
    run = Run.create(folder, settings)
    run.save({"format": FORMAT, "step": 5, "best": False, "model": lively(build_model(settings)).state_dict()}, 1)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "narrow", base_width=8, stem="small")


def pictures(run, count=2):
    settings = run.settings
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, settings.channels, settings.image_size, settings.image_size, generator=generator)


def close(found, expected):
    return found.shape == expected.shape and float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def features(run, count=2):
    with torch.no_grad():
        return run.backbone()(pictures(run, count))


def encoded(model, given):
    with torch.no_grad():
        return model(given)


def test_torchvision_loads_it_strictly(run, tmp_path):
    out = export_run(run, to="torchvision", out=tmp_path / "out", quiet=True)
    model = torchvision.models.resnet18()
    model.fc = nn.Identity()
    model.load_state_dict(torch.load(out / "backbone.pth", weights_only=True), strict=True)
    assert close(encoded(model.eval(), pictures(run)), features(run))


def test_timm_loads_it_strictly(run, tmp_path):
    out = export_run(run, to="timm", out=tmp_path / "out", quiet=True)
    model = timm.create_model("resnet18", num_classes=0)
    model.load_state_dict(safetensors.torch.load_file(out / "model.safetensors"), strict=True)
    assert close(encoded(model.eval(), pictures(run)), features(run))
    told = json.loads((out / "preprocessing.json").read_text())
    assert told["mean"] == [0.3, 0.4, 0.5]
    assert (told["colour_order"], told["channels"], told["image_size"], told["step"]) == ("RGB", 3, 32, 5)


def test_timm_and_transformers_open_the_folder_for_hugging_face(run, tmp_path):
    out = export_run(run, to="huggingface", out=tmp_path / "out", quiet=True)
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    assert close(encoded(model, pictures(run)), features(run))
    prepared = timm.data.resolve_model_data_config(model)
    assert (tuple(prepared["mean"]), tuple(prepared["std"])) == ((0.3, 0.4, 0.5), (0.2, 0.25, 0.3))
    assert (tuple(prepared["input_size"]), prepared["crop_pct"]) == ((3, 32, 32), 1.0)
    assert prepared["interpolation"] == "bilinear"
    import transformers

    wrapped = transformers.AutoModel.from_pretrained(out).eval()
    with torch.no_grad():
        assert close(wrapped(pixel_values=pictures(run)).pooler_output, features(run))


def test_onnx_takes_batches_of_any_size_and_the_head_with_it(narrow, tmp_path):
    import onnxruntime

    out = export_run(narrow, to="onnx", encoder="key", head=True, out=tmp_path / "out", quiet=True)
    session = onnxruntime.InferenceSession(out / "model.onnx")
    model = build_model(narrow.settings)
    model.load_state_dict(narrow.load()["model"])
    for count in (1, 7):
        given = pictures(narrow, count)
        found = torch.from_numpy(session.run(["features"], {"pictures": given.numpy()})[0])
        assert close(found, encoded(model.key_encoder.eval(), given))
        assert not close(found, encoded(model.query_encoder.eval(), given))


def test_a_program_of_torch_export_takes_batches_of_any_size(narrow, tmp_path):
    out = export_run(narrow, to="torch-export", out=tmp_path / "out", quiet=True)
    program = torch.export.load(out / "model.pt2").module()
    for count in (1, 7):
        assert close(encoded(program, pictures(narrow, count)), features(narrow, count))


def test_detectron2_has_its_own_names(run, tmp_path):
    out = export_run(run, to="detectron2", out=tmp_path / "out", quiet=True)
    with (out / "model.pkl").open("rb") as file:
        content = pickle.load(file)
    assert (content["__author__"], content["matching_heuristics"]) == ("MOCO", True)
    arrays = content["model"]
    backbone = run.backbone()
    for theirs, ours in (
        ("stem.conv1.weight", backbone.conv1.weight),
        ("stem.conv1.norm.running_mean", backbone.bn1.running_mean),
        ("res2.0.conv1.weight", backbone.layer1[0].conv1.weight),
        ("res3.0.shortcut.weight", backbone.layer2[0].downsample[0].weight),
        ("res3.0.shortcut.norm.bias", backbone.layer2[0].downsample[1].bias),
        ("res5.1.conv2.norm.weight", backbone.layer4[1].bn2.weight),
    ):
        assert isinstance(arrays[theirs], np.ndarray)
        assert np.array_equal(arrays[theirs], ours.detach().numpy())
    assert all(name.split(".")[0] in ("stem", "res2", "res3", "res4", "res5") for name in arrays)
    names = list(timm.create_model("resnet50", num_classes=0).state_dict())
    assert [timm_name(detectron2_name(name)) for name in names] == names
    assert len({detectron2_name(name) for name in names}) == len(names)
    assert "DEPTH, cfg.MODEL.RESNETS.STRIDE_IN_1X1 = 18, False" in (out / "load.py").read_text()


def test_small_and_grey_stems_say_what_the_loader_needs_or_refuse(tmp_path):
    run = make_run(tmp_path / "run", stem="small", image_size=12, channels=1, mean=(0.3,), std=(0.2,))
    for target in ("timm", "torchvision"):
        out = export_run(run, to=target, head=True, out=tmp_path / target, quiet=True)
        loaded = runpy.run_path(str(out / "load.py"))
        model = build_model(run.settings)
        model.load_state_dict(run.load()["model"])
        assert "moco" not in (out / "load.py").read_text()  # the target alone is enough
        assert close(encoded(loaded["model"], pictures(run)), encoded(model.query_encoder.eval(), pictures(run)))
    for target, reason in (("huggingface", "cannot describe the small stem"), ("detectron2", "usual first layers")):
        with pytest.raises(UserError, match=reason):
            export_run(run, to=target, out=tmp_path / target, quiet=True)
        assert not (tmp_path / target).exists()


def test_channels_go_into_the_config_for_hugging_face(tmp_path):
    run = make_run(tmp_path / "run", channels=5, mean=(0.3,) * 5, std=(0.2,) * 5)
    for target in ("huggingface", "torchvision"):
        out = export_run(run, to=target, out=tmp_path / target, quiet=True)
        assert close(encoded(runpy.run_path(str(out / "load.py"))["model"], pictures(run)), features(run))


def test_other_widths_are_refused_where_the_target_cannot_make_them(narrow, tmp_path):
    for target in ("timm", "torchvision", "huggingface", "detectron2"):
        with pytest.raises(UserError, match="--to onnx and --to torch-export"):
            export_run(narrow, to=target, out=tmp_path / target, quiet=True)
    out = export_run(narrow, to="safetensors", out=tmp_path / "safetensors", quiet=True)
    assert "from moco" in (out / "load.py").read_text()
    assert close(encoded(runpy.run_path(str(out / "load.py"))["model"], pictures(narrow)), features(narrow))
    # What was written can be read again, as a run.
    values = {"image_size": 32, "mean": (0.3, 0.4, 0.5), "std": (0.2, 0.25, 0.3), "workers": 0}
    again = import_run(out / "model.safetensors", out=tmp_path / "again", quiet=True, **values)
    assert close(features(again.run), features(narrow))


def test_the_small_transformer_of_v3_keeps_its_heads(run):
    name = "vit_small_patch16_224"
    settings = run.settings.model_copy(update={"backbone": name, "vit_rules": "v3"})
    backbone = build_backbone(name, image_size=32, vit_rules="v3").eval()
    arguments = Network(settings, backbone, None, "query", 0, "run").timm_arguments()
    model = timm.create_model(name, **arguments)
    model.load_state_dict(backbone.state_dict(), strict=True)
    assert close(encoded(model.eval(), pictures(run)), encoded(backbone, pictures(run)))


@pytest.mark.parametrize("size", [32, 112])
def test_the_script_prepares_pictures_as_the_run_does(run, photographs, size):
    network = exporting.load_network(exporting.locate(run), "query", False)
    network = type(network)(**(vars(network) | {"settings": run.settings.model_copy(update={"image_size": size})}))
    text = exporting.script(network, [])
    names = {"__file__": "load.py"}
    exec(text, names)
    for photograph in photographs:
        batch = next(evaluation_batches(open_source(photograph[None]), [0], size=size, channels=3, batch_size=1))
        expected = normalize(batch, run.settings.mean, run.settings.std)
        found = names["prepare"](Image.fromarray(photograph))
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() < 1.5 / 255 / 0.2  # one grey level of 255, for rounding
        assert (found - expected).abs().mean() < 0.5 / 255 / 0.2


def test_what_cannot_be_verified_is_not_there(run, tmp_path, monkeypatch):
    def other_weights(network, folder):
        with torch.no_grad():
            network.backbone.conv1.weight += 0.001
        lines = exporting.write_timm(network, folder)
        with torch.no_grad():
            network.backbone.conv1.weight -= 0.001
        return lines

    monkeypatch.setitem(exporting.WRITERS, "timm", other_weights)
    with pytest.raises(UserError, match=r"features differ by .*nothing was written"):
        export_run(run, to="timm", out=tmp_path / "out", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_and_wrong_words_are_one_line(narrow, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(graphs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"onnxruntime must be installed: pip install 'momentum-contrast\[export\]'"):
        export_run(narrow, to="onnx", out=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert main(["export", str(narrow.path)]) == 2
    assert "--to safetensors|timm|torchvision" in capsys.readouterr().err
    assert main(["export", "resnet18", "--to", "timm"]) == 2
    assert "not a run" in capsys.readouterr().err
    assert main(["export", str(narrow.path), "--to", "safetensors"]) == 0
    assert "loaded back from load.py" in capsys.readouterr().out
    assert (narrow.path / "export" / "safetensors" / "model.safetensors").is_file()
    assert main(["export", str(narrow.path), "--to", "safetensors"]) == 2
    assert "choose another --out" in capsys.readouterr().err


def test_an_export_comes_back_by_an_import_with_its_preparation(tmp_path):
    gray = make_run(tmp_path / "gray", channels=1, mean=(0.3,), std=(0.2,), base_width=8, stem="small")
    folder = export_run(gray, to="safetensors", out=str(tmp_path / "export"), quiet=True)
    back = import_run(folder / "model.safetensors", out=tmp_path / "back", quiet=True).run
    assert (back.settings.mean, back.settings.std, back.settings.image_size) == ((0.3,), (0.2,), 32)
    assert close(features(back), features(gray))
