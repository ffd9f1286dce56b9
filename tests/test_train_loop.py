"""The loop on real pictures: figures, faults, resume, precision, accumulation."""

import errno
import math
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

import moco
from moco.data import fashion
from moco.errors import Interrupted, TrainingError, UserError
from moco.train.stopping import stop_on_signal

TINY = {
    "recipe": "small", "base_width": 8, "epochs": 2, "batch_size": 64, "queue_size": 96, "precision": "fp32",
    "monitor": "none", "tensorboard": False, "threads": 1, "log_every": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def pictures():
    return fashion.load()[0][:320]


def pretrain(pictures, folder, **given):
    return moco.pretrain(pictures, out=str(folder), quiet=True, **(TINY | given))


def weights(run):
    return run.load()["model"]


def same(one, other):
    one, other = weights(one), weights(other)
    assert list(one) == list(other)
    return all(torch.equal(one[k], other[k]) if isinstance(one[k], torch.Tensor) else one[k] == other[k] for k in one)


def test_what_a_run_leaves_behind(pictures, tmp_path):
    run = pretrain(pictures, tmp_path / "run", tensorboard=True, log_gradient_norms=True, clip_gradient=5.0)
    lines = run.metrics()
    assert [line["step"] for line in lines] == [2, 4, 5, 6, 8, 10]
    for line in lines:
        assert line["chance_loss"] == pytest.approx(math.log(97))
        assert 0 <= line["contrast_accuracy"] <= 1
        assert 0 < line["feature_spread"] < 1.2
        assert -1 <= line["negative_similarity"] <= line["hardest_similarity"] <= 1
        assert line["images_per_second"] > 0
        assert 0 <= line["data_wait"] <= 1
        assert line["gradient_norm"] > 0
        assert line["gradient_norm/backbone.conv1.weight"] > 0
    assert run.settings.channels == 1
    assert "auto" not in {value for value in run.settings.model_dump().values() if isinstance(value, str)} - {
        run.settings.labels
    }
    assert list((run.path / "tensorboard").iterdir())
    assert (run.path / "curves.png").read_bytes().startswith(b"\x89PNG")
    state = run.load()
    assert state["step"] == 10
    assert int(state["model"]["dictionary.pointer"]) == 10 * 64 % 96
    assert state["model"]["dictionary.births"].max() == 9
    backbone = moco.backbone(run.path)
    assert not backbone.training
    assert backbone(torch.zeros(2, 1, 32, 32)).shape == (2, 64)
    assert torch.equal(backbone.conv1.weight, state["model"]["query_encoder.backbone.conv1.weight"])


def test_the_same_seed_gives_the_same_run_and_another_seed_another(pictures, tmp_path):
    one, two, three = (
        pretrain(pictures, tmp_path / str(i), epochs=1, seed=seed, threads=2) for i, seed in enumerate((0, 0, 1))
    )
    assert same(one, two)
    assert not same(one, three)


def test_accumulation_equals_the_whole_batch_where_batch_norm_is_split_alike(pictures, tmp_path):
    # Two steps: equal to rounding. From the third on, training magnifies the rounding itself.
    given = {"epochs": 1, "shuffle_bn": False, "learning_rate": 0.03}
    whole = pretrain(pictures[:128], tmp_path / "whole", bn_groups=4, **given)
    pieces = pretrain(pictures[:128], tmp_path / "pieces", bn_groups=1, accumulate=4, **given)
    one, other = weights(whole), weights(pieces)
    assert int(one["dictionary.pointer"]) == int(other["dictionary.pointer"])
    for name, value in one.items():
        if isinstance(value, torch.Tensor) and "running" not in name and "tracked" not in name:
            assert torch.allclose(value.float(), other[name].float(), atol=2e-5), name


def curve(run, name):
    """The points of a curve as TensorBoard shows them: step and value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(name)]


def test_a_disk_that_takes_no_more_curves_does_not_stop_a_run(pictures, tmp_path, monkeypatch, capsys):
    from torch.utils.tensorboard import SummaryWriter

    add = SummaryWriter.add_scalar

    def full(writer, tag, value, step):
        if step > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(writer, tag, value, step)

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    run = moco.pretrain(pictures, out=str(tmp_path / "run"), **(TINY | {"tensorboard": True}))
    assert [line["step"] for line in run.metrics()] == [2, 4, 5, 6, 8, 10]
    assert run.load()["step"] == 10
    assert capsys.readouterr().out.count("TensorBoard gave up (No space left on device)") == 1
    monkeypatch.setattr(SummaryWriter, "__init__", lambda *_, **__: full(None, "", 0, 9))
    assert moco.resume(run.path, data=pictures, epochs=3, quiet=True).load()["step"] == 15


def test_resume_after_an_epoch_gives_the_undisturbed_run(pictures, tmp_path, monkeypatch):
    whole = pretrain(pictures, tmp_path / "whole", epochs=3, tensorboard=True)
    saved = moco.Run.save

    def save_then_die(run, state, keep):
        saved(run, state, keep)
        raise RuntimeError("power cut")

    monkeypatch.setattr(moco.Run, "save", save_then_die)
    with pytest.raises(RuntimeError, match="power cut"):
        pretrain(pictures, tmp_path / "cut", epochs=3, tensorboard=True)
    monkeypatch.undo()
    run = moco.resume(tmp_path / "cut", data=pictures, quiet=True)
    assert same(whole, run)
    points = curve(run, "loss")
    assert points == curve(whole, "loss")
    assert [step for step, _ in points] == [line["step"] for line in run.metrics()]

    def figures(run):
        return [
            {k: v for k, v in line.items() if k not in ("images_per_second", "data_wait")} for line in run.metrics()
        ]

    assert figures(whole) == figures(run)


def test_resume_refuses_another_run_and_takes_harmless_changes(pictures, tmp_path):
    run = pretrain(pictures, tmp_path / "run", epochs=1)
    with pytest.raises(UserError, match=r"cannot resume .* with temperature 0.5: the run has 0.1"):
        moco.resume(run.path, data=pictures, quiet=True, temperature=0.5)
    with pytest.raises(UserError, match="did you mean epochs"):
        moco.resume(run.path, data=pictures, quiet=True, epoch=3)
    longer = moco.resume(run.path, data=pictures, quiet=True, epochs=2, temperature=0.1)
    assert longer.load()["step"] == 10
    assert longer.settings.epochs == 2


def test_resume_refuses_other_data_and_fewer_epochs_and_leaves_the_run_as_it_was(pictures, tmp_path):
    run = pretrain(pictures, tmp_path / "run", epochs=2)
    before = (run.path / "settings.yaml").read_text(), (run.path / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="was trained on 320 images, but there are 300 now"):
        moco.resume(run.path, data=pictures[:300], quiet=True, epochs=3)
    with pytest.raises(UserError, match="has done 2 epochs already: set --epochs 2 or more"):
        moco.resume(run.path, data=pictures, quiet=True, epochs=1)
    with pytest.raises(UserError, match=r"trained on an array in memory: moco.resume\("):
        moco.resume(run.path, quiet=True)
    assert ((run.path / "settings.yaml").read_text(), (run.path / "metrics.jsonl").read_text()) == before


def test_a_torn_checkpoint_is_named_and_the_one_before_is_used(pictures, tmp_path):
    whole = pretrain(pictures, tmp_path / "whole", epochs=2)
    torn = pretrain(pictures, tmp_path / "torn", epochs=2)
    newest = torn.checkpoints()[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged"):
        assert same(whole, moco.resume(torn.path, data=pictures, quiet=True))
    for path in torn.checkpoints():
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(UserError, match="none of its 2 checkpoints"):
        torn.load()


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_resume(pictures, tmp_path):
    whole = pretrain(pictures, tmp_path / "whole", epochs=8)
    metrics = tmp_path / "cut" / "metrics.jsonl"

    def press_after_the_third_line():
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            time.sleep(0.002)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    finger = threading.Thread(target=press_after_the_third_line)
    finger.start()
    with pytest.raises(Interrupted, match=r"stopped after step \d+ of 40; continue with: moco resume .*cut"):
        pretrain(pictures, tmp_path / "cut", epochs=8)
    finger.join()
    cut = moco.Run(tmp_path / "cut")
    assert 5 <= cut.load()["step"] < 40
    assert same(whole, moco.resume(cut.path, data=pictures, quiet=True))


def test_the_second_ctrl_c_stops_at_once():
    with stop_on_signal() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_loss_that_is_no_number_stops_before_the_weights_are_touched(pictures, tmp_path, monkeypatch):
    seen = []
    original = moco.MomentumContrast.forward

    def poisoned(self, *arguments):
        output = original(self, *arguments)
        if self.step == 3:
            seen.append([p.detach().clone() for p in self.query_encoder.parameters()])
            seen.append(self)
            return moco.StepOutput(output.loss * float("nan"), output.metrics)
        return output

    monkeypatch.setattr(moco.MomentumContrast, "forward", poisoned)
    with pytest.raises(TrainingError, match=r"the loss or gradient is no finite number at step 4 \(learning rate"):
        pretrain(pictures, tmp_path / "run")
    before, model = seen
    assert all(torch.equal(b, p) for b, p in zip(before, model.query_encoder.parameters(), strict=True))


def test_bf16_trains_as_fp32_does(pictures, tmp_path):
    losses = {}
    for precision in ("fp32", "bf16"):
        run = pretrain(pictures, tmp_path / precision, precision=precision)
        losses[precision] = [line["loss"] for line in run.metrics()]
        assert all(value.dtype != torch.bfloat16 for value in weights(run).values() if isinstance(value, torch.Tensor))
    assert losses["bf16"] == pytest.approx(losses["fp32"], abs=0.1)


def test_a_key_view_of_its_own(pictures, tmp_path):
    plain = pretrain(pictures, tmp_path / "plain", epochs=1)
    own = pretrain(pictures, tmp_path / "own", epochs=1, key_view={"crop_scale": [1.0, 1.0], "crop_ratio": [1.0, 1.0]})
    assert not same(plain, own)
    assert own.settings.key_views.crop_scale == (1.0, 1.0)


def test_monitors_write_their_figures(pictures, tmp_path):
    labels = fashion.load()[1][:320]
    knn = pretrain(pictures, tmp_path / "knn", epochs=3, monitor="auto", monitor_every=2, labels=labels)
    checks = [line for line in knn.metrics() if "loss" not in line]
    assert [line["epoch"] for line in checks] == [2, 3]
    assert all(0.3 < line["knn_accuracy"] < 1 for line in checks)
    free = pretrain(pictures, tmp_path / "free", epochs=1, monitor="auto")
    (check,) = [line for line in free.metrics() if "loss" not in line]
    space = {"effective_rank", "dead_dimensions", "spread", "random_cosine"}
    probes = {"batch_leak", "batch_leak_error", "oldest_key_cosine", "oldest_key_age"}
    assert {*space, *probes} <= set(checks[-1])
    assert set(checks[0]) == set(checks[-1]) - probes - {
        "batch_leak_share"
    }  # an epoch of 5 steps is too short for those
    assert {"step", "epoch", "retrieval", "alignment", "uniformity", *space} <= set(check)
    assert free.settings.monitor == "retrieval"
    assert 0 < check["retrieval"] <= 1


def test_checking_does_not_change_the_training(pictures, tmp_path):
    labels = fashion.load()[1][:320]
    plain = pretrain(pictures, tmp_path / "plain")
    for monitor in ("knn", "retrieval"):
        assert same(plain, pretrain(pictures, tmp_path / monitor, monitor=monitor, labels=labels))


def test_unreadable_pictures_are_listed_and_do_not_stop_a_run(tmp_path):
    import cv2

    folder = tmp_path / "photos"
    folder.mkdir()
    for i, picture in enumerate(fashion.load()[0][:40]):
        cv2.imwrite(str(folder / f"{i:02}.png"), picture)
    (folder / "00.png").write_bytes(b"this is no picture")
    run = pretrain(folder, tmp_path / "run", batch_size=20, workers=1, epochs=2, image_size=28)
    skipped = (run.path / "skipped.csv").read_text().splitlines()
    assert len(skipped) == 2  # the header and one line, though it was met in both epochs
    assert skipped[1].startswith('"00.png",')
    assert run.load()["step"] == 4
    assert np.isfinite(run.metrics()[-1]["loss"])
