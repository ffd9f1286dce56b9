"""Detectors: features of the backbone, frozen means frozen, figures in closed form, continued with the same bits."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import moco
from moco.cli import main
from moco.contrast.encoders import build_backbone
from moco.detection import detect
from moco.detection.batches import BatchStream
from moco.detection.network import Plan, build_detector, pyramid_levels
from moco.detection.opening import open_marked
from moco.detection.scoring import average_precision
from moco.detection.starts import starts
from moco.detection.training import Course, Schedule, parameter_groups, train_detector
from moco.errors import TrainingError, UserError
from moco.evaluate.subject import load_run, locate
from moco.evaluation_settings import DetectSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from make_detection_data import make


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Garments on photographs: 6 pictures to learn from, 4 to test on, 40 without boxes."""
    folder = tmp_path_factory.mktemp("scenes")
    make(folder, train=6, val=4, unlabelled=40, side=64, seed=0)
    return folder


@pytest.fixture(scope="module")
def marked(scenes):
    return open_marked(f"coco:{scenes}/annotations/instances_train.json").to_learn(empty=False)


def backbone(stem="small", channels=3, seed=0):
    torch.manual_seed(seed)
    made = build_backbone("resnet18", channels=channels, stem=stem, base_width=8, image_size=64)
    for module in made.modules():  # statistics as after a training
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return made.eval()


def plan(norm="sync", masks=True, channels=3, classes=10):
    return Plan(classes, masks, norm, (0.5,) * channels, (0.25,) * channels, (48, 64), 107, rois=16)


def bits(network):
    return {name: held.clone() for name, held in network.state_dict().items()}


@pytest.mark.parametrize(("stem", "strides"), [("small", [2, 4, 8]), ("imagenet", [4, 8, 16, 32])])
@pytest.mark.parametrize("norm", ["sync", "frozen"])
def test_the_pyramid_stands_on_the_features_of_the_run(stem, strides, norm):
    network, pictures = backbone(stem, channels=5), torch.rand(2, 5, 64, 64)
    seen = {}
    for name in ("layer1", "layer2", "layer3", "layer4"):
        network.get_submodule(name).register_forward_hook(lambda _m, _i, out, name=name: seen.update({name: out}))
    with torch.no_grad():
        network(pictures)
    expected = list(seen.values())[-len(strides) :]
    assert [level.stride for level in pyramid_levels(network, 5)] == strides
    for name in seen:
        network.get_submodule(name)._forward_hooks.clear()
    detector = build_detector(network, plan(norm, channels=5), seed=0).eval()
    with torch.no_grad():
        found = list(detector.backbone.body(pictures).values())
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    anchors = detector.rpn.anchor_generator.sizes
    assert [side for (side,) in anchors] == [8 * stride for stride in [*strides, 2 * strides[-1]]]


def test_only_resnets_are_taken():
    with pytest.raises(UserError, match="ResNet"):
        pyramid_levels(build_backbone("vit_tiny_patch16_224", image_size=32), 3)


def train(network, data, folder, iterations=2, *, seed=0, schedule=None, **course):
    folder.mkdir(exist_ok=True)
    stream = BatchStream(data, channels=3, masks=True, batch_size=2, seed=seed)
    schedule = schedule or Schedule(iterations, 0.01, 1, (iterations - 1,))
    return train_detector(network, stream, Course(schedule, folder, torch.device("cpu"), **course))


@pytest.mark.parametrize("norm", ["sync", "frozen"])
def test_frozen_batch_norm_stays_and_the_other_learns(norm, marked, tmp_path):
    detector = build_detector(backbone(), plan(norm), seed=0)
    before = bits(detector)
    assert train(detector, marked, tmp_path / "a")
    changed = {name for name, held in bits(detector).items() if not torch.equal(held, before[name])}
    of_norm = {name for name in before if name.startswith("backbone.body.") and (".bn" in name or "running" in name)}
    assert of_norm
    assert all(f"backbone.body.{part}.weight" in changed for part in ("conv1", "layer4.1.conv2"))
    assert (of_norm <= changed) if norm == "sync" else not (of_norm & changed)
    assert any(name.startswith("backbone.fpn") and "running" in name for name in before) == (norm == "sync")


def test_continued_after_a_crash_it_ends_with_the_same_bits(marked, tmp_path):
    whole = build_detector(backbone(), plan(), seed=1)
    random_numbers = torch.get_rng_state()
    assert train(whole, marked, tmp_path / "whole", 4, seed=1)
    assert torch.equal(torch.get_rng_state(), random_numbers)  # of the caller, who has lost none

    class PowerCut(Exception):
        pass

    def until_third(count, done=[0]):  # noqa: B006
        done[0] += count
        if done[0] == 3:
            raise PowerCut

    with pytest.raises(PowerCut):
        train(build_detector(backbone(), plan(), seed=1), marked, tmp_path / "cut", 4, seed=1, save_every=2,
              say=until_third)  # fmt: skip
    assert [path.name for path in (tmp_path / "cut").glob("*.pt")] == ["step-000000002.pt"]
    torch.manual_seed(99)  # whatever else draws in the new process
    second = build_detector(backbone(seed=5), plan(), seed=7)  # all of it comes from the checkpoint
    counted = []
    assert train(second, marked, tmp_path / "cut", 4, seed=1, say=counted.append)
    assert counted == [2, 1, 1]
    for name, held in bits(whole).items():
        assert torch.equal(held, second.state_dict()[name]), name


def test_stopping_saves_first_and_a_damaged_checkpoint_is_passed_over(marked, tmp_path):
    detector, said = build_detector(backbone(), plan(), seed=0), []
    assert not train(detector, marked, tmp_path / "a", 3, stopping=lambda: True)
    (path,) = (tmp_path / "a").glob("*.pt")
    assert path.name == "step-000000001.pt"
    path.write_bytes(path.read_bytes()[:-50])
    assert not train(detector, marked, tmp_path / "a", 3, stopping=lambda: True, tell=said.append)
    assert len(said) == 1
    assert "damaged" in said[0]


def test_a_loss_that_is_no_number_ends_the_training(marked, tmp_path):
    detector = build_detector(backbone(), plan(), seed=0)
    with torch.no_grad():
        detector.roi_heads.box_predictor.cls_score.bias[0] = float("nan")
    with pytest.raises(TrainingError, match="iteration 0"):
        train(detector, marked, tmp_path / "a")


def test_rates_rise_in_a_line_and_fall_in_steps():
    schedule = Schedule(100, 0.02, 10, (60, 90))
    assert schedule.rate(0) == pytest.approx(0.02 / 1000)
    assert schedule.rate(5) == pytest.approx(0.02 * 0.5005)
    assert [schedule.rate(step) for step in (10, 59, 60, 89, 90)] == pytest.approx([0.02, 0.02, 2e-3, 2e-3, 2e-4])


def test_batch_norm_has_no_weight_decay():
    detector = build_detector(backbone(), plan(), seed=0)
    decayed, bare = parameter_groups(detector, 0.1)
    norms = [module for module in detector.modules() if isinstance(module, torch.nn.SyncBatchNorm)]
    assert decayed["weight_decay"] == 0.1
    assert bare["weight_decay"] == 0
    assert len(bare["params"]) == 2 * len(norms)
    assert len(decayed["params"]) + len(bare["params"]) == len(list(detector.parameters()))


# ---------------------------------------------------------------- figures


def target(boxes, labels, masks=None, **more):
    made = {"boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), "labels": torch.tensor(labels).long()}
    return made | {name: torch.tensor(value) for name, value in more.items()} | ({} if masks is None else masks)


def test_figures_of_perfect_shifted_and_no_predictions(marked):
    picture = marked.pictures[0]
    boxes, labels = picture.boxes.tolist(), (picture.labels + 1).tolist()
    masks = {"masks": torch.from_numpy(picture.masks()).bool()}
    there = target(boxes, labels, masks, iscrowd=[0] * len(labels))
    perfect = average_precision([(target(boxes, labels, masks, scores=[0.9] * len(labels)), there)], masks=True)
    assert perfect == pytest.approx(dict.fromkeys(("AP", "AP50", "AP75", "mask AP", "mask AP50", "mask AP75"), 1.0))
    none = {"masks": torch.zeros(0, *masks["masks"].shape[1:]).bool()}
    assert set(average_precision([(target([], [], none, scores=[]), there)], masks=True).values()) == {0.0}
    # A box of 10 × 10 moved by 2.1 overlaps by 79 / 121 = 0.653: right at 0.5, 0.55, 0.6 and 0.65 of ten bounds.
    moved = (target([[2.1, 0, 12.1, 10]], [1], scores=[0.5]), target([[0, 0, 10, 10]], [1], iscrowd=[0]))
    found = average_precision([moved], masks=False)
    assert found == pytest.approx({"AP": 0.4, "AP50": 1.0, "AP75": 0.0})


def test_what_is_found_in_a_crowd_is_neither_right_nor_wrong():
    found = target([[0, 0, 10, 10], [52, 52, 60, 60]], [1, 1], scores=[0.5, 0.9])
    crowd = target([[0, 0, 10, 10], [50, 50, 90, 90]], [1, 1], iscrowd=[0, 1])
    alone = target([[0, 0, 10, 10]], [1], iscrowd=[0])
    assert average_precision([(found, crowd)], masks=False)["AP"] == pytest.approx(1.0)
    assert average_precision([(found, alone)], masks=False)["AP"] == pytest.approx(0.5)


# ---------------------------------------------------------------- the whole


@pytest.fixture(scope="module")
def run(scenes):
    return moco.pretrain(
        scenes / "unlabelled.npz", recipe="small", base_width=8, image_size=32, epochs=1, batch_size=16, queue_size=32,
        out=str(scenes / "run"), quiet=True, monitor="none", tensorboard=False, device="cpu", precision="fp32",
        threads=1,
    )  # fmt: skip


def test_from_the_command_line_and_again(run, scenes, capsys, monkeypatch):
    before = {path: path.read_bytes() for path in (run.path / "checkpoints").iterdir()}
    arguments = [
        "eval", "detect", str(run.path), "--data", f"coco:{scenes}/annotations/instances_train.json", "--test",
        f"coco:{scenes}/annotations/instances_val.json", "--iterations", "1", "--batch-size", "2", "--rois", "16",
        "--seeds", "2", "--device", "cpu",
    ]  # fmt: skip
    assert main([*arguments, "--json", str(scenes / "copy.json")]) == 0
    shown = capsys.readouterr().out
    assert "Mask R-CNN" in shown
    assert "mask AP50" in shown
    assert "random initialisation" in shown
    written = json.loads((run.path / "eval" / "detect.json").read_text())
    assert json.loads((scenes / "copy.json").read_text())["rows"] == written["rows"]
    assert list(written["rows"]) == ["pre-trained", "random initialisation"]
    for label, row in written["rows"].items():
        values = [one["figures"]["AP50"] for one in written["trainings"][label]]
        assert row["AP50"] == np.mean(values)
        assert row["AP50 ±"] == pytest.approx(np.std(values, ddof=1))
    assert written["resolved"]["strides"] == [2, 4, 8]
    assert written["pictures"]["to test on"] == 4
    assert {path: path.read_bytes() for path in (run.path / "checkpoints").iterdir()} == before
    assert not list((run.path / "eval").rglob("step-*"))  # checkpoints have done their work
    monkeypatch.setattr("moco.detection.job.train_detector", lambda *_: pytest.fail("trained again"))
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("done before") == 4


def test_supervised_weights_and_frozen_statistics_begin_as_they_should(run, tmp_path):
    supervised = backbone(seed=3)
    safetensors.torch.save_file(supervised.state_dict(), tmp_path / "supervised.safetensors")
    settings = DetectSettings(supervised=str(tmp_path / "supervised.safetensors"), norm="frozen")
    subject = load_run(locate(run))
    found = {start.label: start for start in starts(settings, subject)}
    assert list(found) == ["pre-trained", "random initialisation", "supervised"]
    assert [start.norm for start in found.values()] == ["frozen", "sync", "frozen"]
    assert found["supervised"].mean == (0.485, 0.456, 0.406) != found["pre-trained"].mean == run.settings.mean
    made = found["supervised"].make(0)
    for name, held in supervised.state_dict().items():
        assert torch.equal(held, made.state_dict()[name]), name
    assert torch.equal(found["pre-trained"].make(0).conv1.weight, run.backbone().conv1.weight)
    random = [found["random initialisation"].make(seed).conv1.weight for seed in (0, 0, 1)]
    assert torch.equal(random[0], random[1])
    assert not torch.equal(random[0], random[2])
    detector = build_detector(made, plan("frozen"), seed=0)
    assert torch.equal(detector.backbone.body.bn1.running_var, supervised.bn1.running_var)


def test_what_is_wrong_is_one_line(run, scenes, capsys, monkeypatch):
    with pytest.raises(UserError, match=r"--data coco:FILE\.json"):
        detect(run, quiet=True)
    with pytest.raises(UserError, match="timm model"):
        detect("resnet18", data="coco:x.json", quiet=True)
    with pytest.raises(UserError, match="no file"):
        detect(run, data=f"coco:{scenes}/annotations/instances_train.json", supervised="nowhere.pth", quiet=True)
    with pytest.raises(UserError, match=r"not on this machine|fits"):
        detect(run, data=f"coco:{scenes}/annotations/instances_train.json", supervised="timm", quiet=True)
    monkeypatch.setattr("moco.detection.outlines.NEEDED", ("pycocotools", "no_such_library"))
    assert main(["eval", "detect", str(run.path), "--data", "coco:x.json"]) == 2
    assert "needs no_such_library: pip install 'momentum-contrast[detection]'" in capsys.readouterr().err


def test_the_made_data_is_true(scenes):
    """Every box is that of its mask, and the same seed gives the same garments."""
    content = json.loads((scenes / "annotations" / "instances_train.json").read_text())
    data = open_marked(f"coco:{scenes}/annotations/instances_train.json")
    assert data.objects() == len(content["annotations"]) >= len(data) == 6
    assert not data.notes
    for picture in data.pictures:
        masks = picture.masks()
        assert masks.sum(axis=0).max() <= 1  # what lies behind another one is cut away
        for box, mask in zip(picture.boxes, masks, strict=True):
            rows, columns = np.nonzero(mask)
            assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
