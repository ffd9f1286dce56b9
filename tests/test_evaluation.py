"""`moco eval` from end to end on a tiny run of real pictures: tables, files, baselines, and what it refuses."""

import functools
import json
import shutil

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.neighbors import KNeighborsClassifier

import moco
from moco.data import fashion
from moco.data.loader import evaluation_batches
from moco.data.sources import ArraySource
from moco.errors import UserError
from moco.evaluate.cache import FeatureCache, weights_fingerprint
from moco.evaluate.features import encode
from moco.evaluate.layers import at_layer
from moco.evaluate.linear import few_labels, linear_accuracy, linear_probe
from moco.evaluation import evaluate, table
from moco.evaluation.comparison import Comparison


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run on labelled pictures in a file, and the file."""
    folder = tmp_path_factory.mktemp("evaluation")
    x, y, _, _ = fashion.load()
    np.savez(folder / "data.npz", x=x[:400], y=y[:400])
    run = moco.pretrain(
        folder / "data.npz", recipe="small", base_width=4, image_size=16, epochs=2, batch_size=64, queue_size=128,
        out=str(folder / "run"), quiet=True, monitor="none", tensorboard=False, device="cpu", precision="fp32",
        threads=1,
    )  # fmt: skip
    return run, folder


@pytest.fixture
def run(made):
    return made[0]


@pytest.fixture
def encoded(monkeypatch):
    """Labels of the sides whose pictures were really encoded."""
    seen, shown = [], Comparison._shown

    def recorded(self, batches, count, label):
        seen.append(label)
        return shown(self, batches, count, label)

    monkeypatch.setattr(Comparison, "_shown", recorded)
    return seen


def read(run, name):
    return json.loads((run.path / "eval" / f"{name}.json").read_text())


def features(run, pictures):
    """What the run's backbone makes of pictures."""
    return encode(
        run.backbone(),
        evaluation_batches(ArraySource(pictures), range(len(pictures)), size=16, channels=1, batch_size=100),
        mean=run.settings.mean, std=run.settings.std, device="cpu",
    )  # fmt: skip


def test_knn_beside_its_baselines_with_classes_and_a_picture(run, capsys):
    before = {path: path.read_bytes() for path in (run.path / "checkpoints").iterdir()}
    found = evaluate("knn", run.path, k=10)
    assert list(found.rows) == ["pre-trained", "untrained", "raw pixels"]
    written = read(run, "knn")
    assert written["rows"] == found.rows
    assert written["pictures"]["to learn from"] + written["pictures"]["to test on"] == 400
    confusion = np.array(written["confusion"])
    accuracy = found.rows["pre-trained"]["kNN accuracy"]
    assert confusion.sum() == written["pictures"]["to test on"]
    assert confusion.trace() / confusion.sum() == pytest.approx(accuracy)
    assert written["per_class"] == {str(label): confusion[label, label] / confusion[label].sum() for label in range(10)}
    assert (run.path / "eval" / "knn-confusion.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert f"{accuracy * 100:.1f}" in shown
    assert "untrained" in shown
    assert {path: path.read_bytes() for path in (run.path / "checkpoints").iterdir()} == before


def test_raw_pixels_agree_with_scikit_learn(run):
    x, y, x_test, y_test = fashion.load()
    x_test, y_test = x_test[:200], y_test[:200]
    found = evaluate("knn", run, x[:400], labels=y[:400], test=x_test, test_labels=y_test, k=1, quiet=True)
    # The pictures are made smaller first, so the figure is not the same to the last picture.
    unit = [
        pixels.reshape(len(pixels), -1) / np.linalg.norm(pixels.astype(float).reshape(len(pixels), -1), axis=1)[:, None]
        for pixels in (x[:400], x_test)
    ]
    wanted = KNeighborsClassifier(1).fit(unit[0], y[:400]).score(unit[1], y_test)
    assert found.rows["raw pixels"]["kNN accuracy"] == pytest.approx(wanted, abs=0.05)


def test_features_are_kept_and_never_stale(made, encoded, monkeypatch, tmp_path):
    run, _ = made
    first = evaluate("knn", run.path, k=5, seed=7, quiet=True)
    encoded.clear()
    assert evaluate("knn", run.path, k=5, seed=7, quiet=True).rows == first.rows
    assert encoded == ["raw pixels"] * 2
    encoded.clear()
    evaluate("knn", run.path, k=5, seed=8, quiet=True)  # other pictures are set aside
    assert "pre-trained" in encoded
    x, y, _, _ = fashion.load()
    for change in ("pictures", "weights"):
        encoded.clear()
        if change == "pictures":
            pictures = x[:400].copy()
            pictures[3] = 255 - pictures[3]
            evaluate("knn", run.path, pictures, labels=y[:400], k=5, seed=7, quiet=True)
        else:
            state_path = run.checkpoints()[-1]
            state = torch.load(state_path, weights_only=True)
            state["model"]["query_encoder.backbone.conv1.weight"] *= 1.01
            changed = run.path / "checkpoints" / "changed.pt"
            torch.save(state, changed)
            found = evaluate("knn", changed, k=5, seed=7, quiet=True)
            changed.unlink()
            assert found.path.name == "knn-changed.json"
        assert encoded.count("pre-trained") == 2, change


def test_linear_fast_is_the_probe_on_the_same_features(run):
    x, y, x_test, y_test = fashion.load()
    found = evaluate(
        "linear", run, x[:400], labels=y[:400], test=x_test[:200], test_labels=y_test[:200], quiet=True, baseline=False
    )
    assert list(found.rows) == ["pre-trained"]
    bank, test = (features(run, pictures) for pictures in (x[:400], x_test[:200]))
    wanted = linear_accuracy(bank, torch.from_numpy(y[:400]), test, torch.from_numpy(y_test[:200]))
    assert found.rows["pre-trained"]["linear accuracy"] == pytest.approx(wanted, abs=0.011)


def test_linear_as_in_the_paper_warns_of_a_wild_rate(run):
    found = evaluate("linear", run, protocol="paper", epochs=3, lr=3000.0, batch_size=64, baseline=False, quiet=True)
    assert any("unstable" in note and "--lr auto" in note for note in found.notes)
    assert len(read(run, "linear-paper")["losses"]["pre-trained"]) == 3
    tamed = evaluate("linear", run, protocol="paper", epochs=3, lr="auto", batch_size=64, baseline=False, quiet=True)
    assert tamed.rows["pre-trained"]["learning rate"] < 3000
    assert "rates" in tamed.details


def test_few_labels_encode_what_is_drawn_and_no_more(run, monkeypatch):
    counts, shown = [], Comparison._shown
    monkeypatch.setattr(
        Comparison, "_shown",
        lambda self, batches, count, label: counts.append(count) or shown(self, batches, count, label),
    )  # fmt: skip
    x, y, x_test, y_test = fashion.load()
    x, y, x_test, y_test = x[:400], y[:400], x_test[:100], y_test[:100]
    found = evaluate(
        "fewshot", run, x, labels=y, test=x_test, test_labels=y_test, shots=[3], draws=2, seed=11, baseline=False,
        quiet=True,
    )  # fmt: skip
    labels = torch.from_numpy(y).long()
    draws = [few_labels(labels, 3, 11), few_labels(labels, 3, 12)]
    assert counts == [len(torch.cat(draws).unique()), 100]

    bank, test = (features(run, pictures) for pictures in (x, x_test))
    wanted = [
        linear_accuracy(bank[rows], labels[rows], test, torch.from_numpy(y_test).long(), seed=11 + number)
        for number, rows in enumerate(draws)
    ]
    assert found.details["draws"]["pre-trained, linear probe"]["3 per class"] == pytest.approx(wanted)


def test_few_labels_are_balanced_and_drawn_several_times(run):
    found = evaluate("fewshot", run, labels=["10%"], draws=2, scratch=True, scratch_steps=5, baseline=False, quiet=True)
    rows = found.rows
    assert list(rows) == ["pre-trained, linear probe", "supervised from scratch"]
    assert found.details["per_class_labels"] == {"10 %": 3}  # of the 320 that are left to learn from
    for label, row in rows.items():
        draws = found.details["draws"][label]["10 %"]
        assert len(draws) == 2
        assert row["10 %"] == pytest.approx(np.mean(draws))
        assert row["10 % ±"] == pytest.approx(np.std(draws, ddof=1))
    assert str(table(found).title).endswith("%; mean ± standard deviation of 2 draws of the labels")
    shots = evaluate("fewshot", run, shots=[1, 5], draws=2, baseline=False, quiet=True)
    assert list(shots.rows["pre-trained, linear probe"]) == [
        "1 per class",
        "1 per class ±",
        "5 per class",
        "5 per class ±",
    ]
    assert (
        shots.rows["pre-trained, linear probe"]["5 per class"] > shots.rows["pre-trained, linear probe"]["1 per class"]
    )
    with pytest.raises(UserError, match=r"class \d has only \d+ rows, 300 were asked for"):
        evaluate("fewshot", run, shots=[300], quiet=True)
    assert len(few_labels(torch.arange(10).repeat(4), 2)) == 20


@pytest.fixture
def quick_probe(monkeypatch):
    """One L2 penalty instead of a search, where the probe is not what is tested."""
    probe = functools.partial(linear_probe, strengths=(0.1,))
    monkeypatch.setattr("moco.evaluation.figures.linear_probe", probe)


def fine_tuned(run, **given):
    x, y, x_test, y_test = fashion.load()
    common = {"labels": y[:160], "test": x_test[:100], "test_labels": y_test[:100], "quiet": True, "seed": 1}
    amounts = {"draws": 1, "steps": 4, "epochs": 1, "batch_size": 40, "baseline": False}
    return evaluate("finetune", run, x[:160], **(common | amounts | given))


def test_fine_tuning_beside_scratch_and_probe_leaves_the_run_as_it_was(run, quick_probe, tmp_path):
    before = {path: path.read_bytes() for path in (run.path / "checkpoints").iterdir()}
    file = tmp_path / "tuned.safetensors"
    _, _, x_test, y_test = fashion.load()
    found = fine_tuned(run, draws=2, scratch=True, validation_share=0.35, save=file)
    rows, trainings = found.rows, found.details["trainings"]
    assert list(rows) == ["pre-trained, fine-tuned", "supervised from scratch", "pre-trained, linear probe"]
    for label in ("pre-trained, fine-tuned", "supervised from scratch"):
        draws = found.details["draws"][label]["all labels"]
        assert rows[label]["all labels"] == pytest.approx(np.mean(draws))
        assert rows[label]["all labels ±"] == pytest.approx(np.std(draws, ddof=1))
        assert [note["seed"] for note in trainings[label]] == [1, 2]
    assert {path: path.read_bytes() for path in (run.path / "checkpoints").iterdir()} == before
    assert read(run, "finetune")["weights"] == weights_fingerprint(run.backbone())

    # What was saved is the training with the best validation part, and gives its figure.
    notes = trainings["pre-trained, fine-tuned"]
    best = max(range(2), key=lambda number: notes[number]["validation accuracy"])
    with safe_open(file, "pt") as held:
        about = {name: json.loads(value) for name, value in held.metadata().items()}
    assert about["classes"] == [str(label) for label in range(10)]
    assert (about["image_size"], about["channels"], about["base_width"]) == (16, 1, 4)
    network = torch.nn.Sequential()
    network.add_module("backbone", run.new_backbone())
    network.add_module("classifier", torch.nn.Linear(32, 10))
    network.load_state_dict(load_file(file))
    logits = encode(
        network, evaluation_batches(ArraySource(x_test), range(100), size=16, channels=1, batch_size=100),
        mean=about["mean"], std=about["std"], device="cpu",
    )  # fmt: skip
    accuracy = float((logits.argmax(1) == torch.from_numpy(y_test[:100])).double().mean())
    assert accuracy == found.details["draws"]["pre-trained, fine-tuned"]["all labels"][best]
    confusion = np.array(found.details["confusion"])
    assert confusion.trace() / 100 == pytest.approx(accuracy)


def test_fine_tuning_on_few_labels_holds_nothing_back_and_says_so(run, quick_probe):
    found = fine_tuned(run, shots=[2, 6])
    assert list(found.rows["pre-trained, fine-tuned"]) == ["2 per class", "6 per class"]
    notes = found.details["trainings"]["pre-trained, fine-tuned"]
    assert [(note["labels"], note["validation accuracy"]) for note in notes] == [(20, None), (60, None)]
    assert any(note.startswith("20 labels are too few to hold some back") for note in found.notes)


def test_the_contrastive_loss_beside_the_labels(run, quick_probe):
    x = fashion.load()[0]
    plain, zero = fine_tuned(run), fine_tuned(run, contrastive_weight=0.0)
    for one in (plain, zero):
        one.details.pop("settings")
    assert plain.details == zero.details
    both = fine_tuned(run, contrastive_weight=0.5, unlabelled=x[400:500])
    label = "pre-trained, fine-tuned + 0.5 × contrast"
    (note,) = both.details["trainings"][label]
    (before,) = plain.details["trainings"]["pre-trained, fine-tuned"]
    assert note["losses"] != before["losses"]
    assert list(note["losses"]) == list(note["contrastive losses"]) == [4]
    assert 0 < note["contrastive losses"][4] < 2 * np.log(129)


def test_a_network_that_is_trained_from_scratch_in_few_shot_learns(run, quick_probe):
    found = evaluate("fewshot", run, shots=[10], draws=1, scratch=True, scratch_steps=40, baseline=False, quiet=True)
    assert found.rows["supervised from scratch"]["10 per class"] > 0.2


@pytest.mark.parametrize(
    ("task", "figure"), [("knn", "kNN accuracy"), ("linear", "linear accuracy"), ("retrieval", "mAP")]
)
def test_every_task_has_the_supervised_baseline_where_asked(run, quick_probe, task, figure):
    given = {"k": 20, "baseline": True} if task == "knn" else {"baseline": False}
    found = evaluate(task, run, scratch=True, scratch_steps=60, scratch_lr=0.1, images=160, quiet=True, **given)
    rows, baselines = found.rows, ["untrained", "raw pixels"] if task == "knn" else []
    assert list(rows) == ["pre-trained", *baselines, "supervised from scratch"]
    assert any("supervised from scratch: 60 steps of 64 pictures; its own classifier" in note for note in found.notes)
    # 128 labels, seen 30 times, teach more than weights that never saw one know by chance.
    assert rows["supervised from scratch"][figure] > 0.3
    if task == "knn":
        assert list(evaluate(task, run, images=160, quiet=True, **given).rows) == list(rows)[:-1]


def test_features_of_an_earlier_layer_in_parts(run, monkeypatch):
    tables = {}
    monkeypatch.setattr(FeatureCache, "put", lambda self, depends, held: tables.setdefault(len(held), held))
    monkeypatch.setattr(FeatureCache, "get", lambda self, depends, count: None)
    found = evaluate("knn", run, layer=2, grid=4, k=20, baseline=False, quiet=True)
    assert found.path.name == "knn-layer2-grid4.json"
    assert str(table(found).title).startswith("knn, k = 20, layer 2, 4 × 4 parts: 320 pictures, tested on 80 others")

    # The same by a hook on the stage itself.
    backbone, x = run.backbone().eval(), fashion.load()[0][:400]
    backbone.layer2.register_forward_hook(lambda module, given, made: maps.append(made))
    maps = []
    mean, std = run.settings.mean[0], run.settings.std[0]
    for batch in evaluation_batches(ArraySource(x), range(400), size=16, channels=1, batch_size=100):
        with torch.no_grad():
            backbone((batch.float() / 255 - mean) / std)
    whole = torch.cat(maps)
    wanted = whole.unflatten(2, (4, 2)).unflatten(4, (4, 2)).mean((3, 5)).flatten(1)
    assert whole.shape[1:] == (8, 8, 8)
    learned = tables[320]
    assert learned.shape == (320, 8 * 16)
    nearest = torch.cdist(learned.double(), wanted.double()).min(1)
    assert nearest.values.max() < 1e-4
    assert len(nearest.indices.unique()) == 320


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer": 5}, "--layer 5 is not there: ResNet has 5 layers, 0 to 4"),
        ({"layer": 4, "grid": 3}, "--grid 3 is finer than the map of that layer, which has 2 × 2 places"),
        ({"layer": -1}, "layer"),
        ({"grid": 0}, "grid"),
    ],
)
def test_layers_that_are_not_there(run, given, message):
    with pytest.raises(UserError, match=message):
        evaluate("knn", run, quiet=True, **given)


def test_a_probe_on_an_earlier_layer_leaves_the_weights_alone(run, quick_probe):
    paper = evaluate("linear", run, protocol="paper", lr=0.3, epochs=40, layer=3, grid=2, baseline=False, quiet=True)
    few = evaluate("fewshot", run, shots=[5], draws=1, layer=3, grid=2, baseline=False, quiet=True)
    for found in (paper, few):
        assert found.details["weights"] == weights_fingerprint(run.backbone())
        assert next(iter(next(iter(found.rows.values())).values())) > 0.2


def test_a_network_that_shows_no_layers_says_so():
    with pytest.raises(UserError, match="--layer and --grid need a timm model that shows its layers, which Flatten"):
        at_layer(torch.nn.Flatten(), None, 2, channels=1, size=8)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0).eval()
    found = at_layer(vit, 1, 2, channels=3, size=32)(torch.rand(2, 3, 32, 32))
    assert found.shape == (2, 4 * 192)
    assert at_layer(vit, None, 1, channels=3, size=32) is vit


def test_retrieval_by_label_and_by_view(run):
    by_label = evaluate("retrieval", run, recall=(1, 3), quiet=True)
    assert list(by_label.rows["pre-trained"]) == ["mAP", "recall@1", "recall@3"]
    assert 0.1 < by_label.rows["pre-trained"]["mAP"] < 1
    x = fashion.load()[0][:128]
    by_view = evaluate("retrieval", run, x, quiet=True)  # no labels: views
    assert by_view.details["by"] == "view"
    assert by_view.rows["pre-trained"]["recall@1"] > 2 / 128
    assert by_view.rows == evaluate("retrieval", run, x, quiet=True).rows


def test_a_timm_name_writes_nothing_unless_told_where(tmp_path, monkeypatch):
    x, y, _, _ = fashion.load()
    given = {"labels": y[:60], "k": 3, "image_size": 16, "quiet": True}
    found = evaluate("knn", "resnet18", x[:60], **given)
    assert found.path is None
    assert list(found.rows) == ["resnet18, untrained", "raw pixels"]
    assert (
        "resnet18 has random weights: --pretrained takes published ones, where they are on this machine"
        in (found.details["notes"])
    )
    there = evaluate("knn", "resnet18", x[:60], out=tmp_path / "figures", **given)
    assert json.loads(there.path.read_text())["rows"] == found.rows

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"the published weights of test_resnet\.\w+ are not on this machine"):
        evaluate("knn", "test_resnet.r160_in1k", x[:60], pretrained=True, **given)


def test_published_weights_are_read_from_where_they_lie(tmp_path, monkeypatch):
    weights = timm.create_model("resnet18").state_dict()
    (tmp_path / "weights.pth").touch()
    torch.save(weights, tmp_path / "weights.pth")
    monkeypatch.setattr("moco.evaluate.subject.published_weights", lambda name, config: tmp_path / "weights.pth")
    x, y, _, _ = fashion.load()
    found = evaluate("knn", "resnet18", x[:40], labels=y[:40], k=3, image_size=32, pretrained=True, quiet=True)
    assert list(found.rows) == ["resnet18", "untrained", "raw pixels"]
    assert not [note for note in found.notes if "random weights" in note]


def test_what_is_worth_a_note(run):
    x, y, x_test, y_test = fashion.load()
    few = x[:400][y[:400] < 9], y[:400][y[:400] < 9]
    found = evaluate(
        "knn", run, few[0][:50], labels=few[1][:50], test=x_test[:100], test_labels=y_test[:100], k=200, quiet=True
    )
    assert "k is 50, not 200: there are no more pictures to vote" in found.notes
    count = int((y_test[:100] == 9).sum())
    assert f"class 9 has no pictures to learn from: its {count} test pictures count as wrong" in found.notes
    assert found.details["per_class"]["9"] == 0


@pytest.mark.parametrize(
    ("task", "subject", "data", "given", "message"),
    [
        ("knnn", None, None, {}, "unknown evaluation 'knnn'; did you mean knn"),
        ("knn", "no/such/run", None, {}, "is no run folder, checkpoint file or timm model: there is no such file"),
        ("knn", "resnet19", None, {}, "is no run folder, checkpoint file or timm model; did you mean resnet18"),
        ("knn", "resnet18", None, {}, "resnet18 is a timm model, so name the pictures too"),
        ("knn", None, None, {"image_size": 32}, "are for timm names"),
        ("knn", None, "pictures", {}, "the array has no labels"),
        (
            "knn",
            None,
            "pictures",
            {"labels": np.zeros(20, int)},
            "pictures of one class only, 0: two or more are needed",
        ),
        ("linear", None, "pictures", {"labels": np.arange(19)}, "19 labels for 20 images"),
        ("knn", None, "no/such.npz", {}, "no such file or folder"),
        (
            "finetune",
            "resnet18",
            "pictures",
            {"labels": np.arange(20) % 2, "contrastive_weight": 0.1},
            "--contrastive-weight is for runs: resnet18 is a timm model, without a projection head",
        ),
        (
            "finetune",
            None,
            "pictures",
            {"labels": np.arange(20) % 2, "unlabelled": np.zeros((4, 8, 8))},
            "set --contra",
        ),
        (
            "finetune",
            None,
            "pictures",
            {"labels": np.arange(20) % 2, "save": "no/such/w.safetensors"},
            "cannot save to",
        ),
        ("knn", None, "pictures", {"labels": np.arange(20) % 2, "unlabelled": np.zeros(4)}, "unknown setting"),
        ("fewshot", "resnet18", "pictures", {"labels": np.arange(20) % 2, "shots": [1], "scratch": True}, "untrained"),
        ("knn", "resnet18", "pictures", {"labels": np.arange(20) % 2, "scratch": True}, "this one is untrained"),
        (
            "retrieval",
            None,
            "pictures",
            {"scratch": True},
            "--scratch learns from labels, and these pictures have none",
        ),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(run, tmp_path, task, subject, data, given, message):
    data = fashion.load()[0][:20] if data == "pictures" else data
    with pytest.raises(UserError, match=message) as caught:
        evaluate(task, run if subject is None else subject, data, out=tmp_path / "out", quiet=True, **given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_none(run, tmp_path):
    (run.path / "checkpoints" / "torn.pt").write_bytes(b"PK")
    with pytest.raises(UserError, match="is damaged, or no checkpoint of moco"):
        evaluate("knn", run.path / "checkpoints" / "torn.pt", quiet=True)
    (run.path / "checkpoints" / "torn.pt").unlink()
    (tmp_path / "lonely.pt").touch()
    with pytest.raises(UserError, match="is not in a run folder"):
        evaluate("knn", tmp_path / "lonely.pt", quiet=True)


def test_a_damaged_newest_checkpoint_is_noted_and_not_warned_of(run, tmp_path, capsys, recwarn):
    shutil.copytree(run.path, tmp_path / "run")
    damaged = moco.Run(tmp_path / "run").checkpoints()
    damaged[-1].write_bytes(b"torn")
    found = evaluate("knn", tmp_path / "run", k=3, images=100)
    note = f"{damaged[-1].name} is damaged; the figures are of step {int(damaged[-2].stem[5:])}"
    assert found.notes.count(note) == found.details["notes"].count(note) == 1
    assert found.details["step"] == int(damaged[-2].stem[5:])
    assert f"note: {note}\n" in capsys.readouterr().out
    damaged[-1].unlink()
    assert note not in evaluate("knn", tmp_path / "run", k=3, images=100, quiet=True).notes
    assert not [one for one in recwarn if "damaged" in str(one.message)]


def test_figures_of_other_settings_are_not_replaced_silently(run, quick_probe, tmp_path):
    x, y, _, _ = fashion.load()
    given = {"labels": y[:60], "out": tmp_path, "quiet": True, "k": 3}

    def noted(data=x[:60], **other):
        return [note for note in evaluate("knn", run, data, **given | other).notes if "replaces" in note]

    assert noted() == noted() == noted(device="cpu") == []
    assert noted(k=5, baseline=False) == ["replaces knn.json, made with baseline yes, k 3; --out FOLDER keeps both"]
    assert noted(test=x[:30], test_labels=y[:30], k=5, baseline=False) == [
        "replaces knn.json, made with pictures to learn from 48, pictures to test on 12; --out FOLDER keeps both"
    ]
    (tmp_path / "knn.json").write_text('{"settings": 3}')
    assert noted() == []
    assert noted(out=tmp_path / "other", k=4) == []


def test_the_picture_has_the_name_of_its_figures(run, quick_probe, tmp_path):
    evaluate("linear", run, images=60, layer=3, grid=2, baseline=False, out=tmp_path, quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "linear-layer3-grid2-confusion.png", "linear-layer3-grid2.json"
    ]  # fmt: skip


def test_an_empty_folder_is_no_run_and_no_timm_name(tmp_path):
    with pytest.raises(UserError, match=r"is not a run folder: it has no settings\.yaml$"):
        evaluate("knn", tmp_path, quiet=True)
    with pytest.raises(UserError, match=r"there is no such file or folder$"):
        evaluate("knn", tmp_path / "resnet19", quiet=True)


def test_features_that_are_no_numbers_are_said_to_be(run):
    state_path = run.checkpoints()[-1]
    state = torch.load(state_path, weights_only=True)
    state["model"]["query_encoder.backbone.bn1.weight"][:] = torch.nan
    broken = run.path / "checkpoints" / "broken.pt"
    torch.save(state, broken)
    with pytest.raises(UserError, match="not finite"):
        evaluate("knn", broken, quiet=True)
    broken.unlink()
