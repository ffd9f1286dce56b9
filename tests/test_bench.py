"""`moco bench`: every part is measured on real pictures, nothing is written, and the words fit the figures."""

import dataclasses
import itertools
import json
import math
import time

import cv2
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moco import bench, cli
from moco.bench import parts
from moco.bench.advice import _number, _time, table, words
from moco.bench.figures import Figures
from moco.data.sources import ArraySource
from moco.errors import TrainingError, UserError
from moco.recipes import pretrain_settings
from moco.resolve import resolve
from moco.train.guard import NotFinite
from moco.train.parallel import Processes

TINY = ["--recipe", "small", "--base-width", "8", "--batch-size", "8", "--queue-size", "32", "--seconds", "5",
        "--device", "cpu", "--threads", "1", "--epochs", "3"]  # fmt: skip


@pytest.fixture
def pictures(tmp_path, photographs):
    """20 crops of photographs as JPEG and PNG files."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(20):
        crop = photographs[i % 2][10 * i : 10 * i + 90, 20 * i : 20 * i + 120]
        cv2.imwrite(str(folder / f"{i}.{'jpg' if i % 3 else 'png'}"), crop)
    return folder


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def positive(part: dict, *names: str) -> bool:
    return all(0 < part[name] < math.inf for name in names)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")
def test_a_folder_is_measured_part_by_part_and_nothing_is_written(pictures, working_folder, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    assert cli.main(["bench", str(pictures), *TINY, "--workers", "2", "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert list(working_folder.iterdir()) == []
    found = json.loads(figures.read_text())
    assert found["images"] == 20
    assert positive(found["reading"], "images_per_second", "bytes_per_second")
    assert positive(found["decoding"], "images_per_second")
    assert found["decoding"]["median_shorter_side"] == 90
    assert positive(found["views"], "images_per_second_per_worker", "images_per_second")
    assert positive(found["step"], "images_per_second", "batch_size")
    assert positive(found["job"], "images_per_second")
    assert 0 <= found["job"]["waiting_share"] <= 1
    assert 0 < found["undisturbed_share"] <= 1
    assert positive(found["estimate"], "epoch_seconds", "total_seconds")
    assert found["estimate"]["images_per_epoch"] == 16
    assert found["settings"]["workers"] == 2
    assert found["settings"]["channels"] == 3
    for row in ("reading files", "decoding", "views, one worker", "views, all", "model step alone", "whole job"):
        assert row in out
    assert 2 <= len(found["words"]) <= 6
    assert all(line in out for line in found["words"])


def test_an_array_has_nothing_to_read_or_decode_and_json_can_have_standard_output(
    garments, working_folder, tmp_path, capsys
):
    np.savez(tmp_path / "garments.npz", x=garments)
    assert cli.main(["bench", str(tmp_path / "garments.npz"), *TINY, "--json", "-"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert list(working_folder.iterdir()) == []
    assert found["reading"] is None
    assert found["decoding"] is None
    assert found["settings"]["views"] == "batch"
    assert positive(found["views"], "images_per_second")
    assert positive(found["step"], "images_per_second")
    assert positive(found["job"], "images_per_second")
    assert "whole job" in captured.err
    assert "reading" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent/"], "no such file or folder"),
        (["pictures", *TINY, "--batch-size", "64"], "has 20 images, fewer than one batch of 64: set --batch-size 20"),
        (["pictures", *TINY, "--seconds", "1"], "seconds 1: a measurement takes from 5"),
        (["pictures", *TINY, "--seconds", "nan"], "seconds nan"),
        (["pictures", *TINY, "--seconds", "soon"], "invalid float value"),
        (["pictures", *TINY, "--json", "absent/figures.json"], "cannot write there"),
        (["pictures", *TINY, "--resume", "runs/first"], "unknown option --resume"),
        (["pictures", *TINY, "--backbone", "resnet19"], "did you mean resnet18"),
        (["pictures", *TINY, "--config", "absent.yaml"], "cannot read"),
        (["pictures", *TINY, "--precision", "fp16"], "fp16 needs a CUDA device"),
        (TINY, "no data"),
    ],
)
def test_bad_input_is_one_line_and_status_2_and_writes_nothing(pictures, monkeypatch, capsys, arguments, message):
    folder = pictures.parent
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("moco: ")
    assert err.count("\n") == 1
    assert message in err
    assert "did you mean --resume" not in err
    assert sorted(folder.rglob("*")) == before


def test_several_processes_are_refused(garments, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="run it without torchrun"):
        bench.measure(garments, recipe="small", batch_size=8)


def run_settings(**given):
    source = ArraySource(np.zeros((64, 8, 8), np.uint8))
    asked = pretrain_settings(**({"recipe": "small", "batch_size": 64, "device": "cpu"} | given))
    return resolve(asked, source, Processes(0, 1, torch.device("cpu")))


FOLDER = run_settings(views="image", epochs=200)


def figures(run=None, **given) -> Figures:
    """A folder of 10,000 pictures on a machine with 32 cores, unless told otherwise."""
    run = {"device": "cuda", "workers": 8, "precision": "bf16", "image_size": 224} | (run or {})
    found = Figures(
        settings=FOLDER.model_copy(update=run), images=10_000, cores=32, device="GPU", best_precision="bf16",
        reading=2000.0, reading_bytes=1e8, decoding=400.0, side=375.0, one_worker=100.0, views=800.0, step=1200.0,
        step_batch=64, memory=4 * 10**9, device_memory=10**10, job=450.0, waiting=0.62, undisturbed=1.0,
    )  # fmt: skip
    return dataclasses.replace(found, **given)


def test_a_gpu_that_waits_gets_as_many_workers_as_its_step_takes():
    first, second, *_, last = words(figures())
    assert first == "data: 62% of the time the GPU waits for 8 workers"
    assert second == "--workers 12 (now 8): the step takes 1,200 images/s, a worker makes 100"
    assert last == (  # 9,984 images are 156 whole batches
        "estimate: an epoch of 9,984 images 22 s, 200 epochs 1:14 h, without checks and checkpoints; "
        "at the rate of the step alone 28 min"
    )


def test_where_the_cores_do_not_suffice_the_work_of_a_worker_must_get_less():
    lines = "\n".join(words(figures(cores=10, decoding=130.0, side=1200.0)))
    assert "--workers 10 (now 8)" in lines
    assert "12 workers would be needed, but there are 10 cores, good for about 1,000 images/s" in lines
    assert (
        "decoding takes up to 77% of a worker's time: store the pictures smaller, shorter side 336 instead of 1200"
        in lines
    )
    assert "--views split" in lines
    lines = "\n".join(words(figures(cores=8, reading=150.0)))
    assert "--workers 8" not in lines
    assert "reading takes 67% of a worker's time: put the files on a faster disk" in lines
    assert "the two views take 70% of a worker's time" in "\n".join(words(figures(cores=8)))


def test_other_programs_that_spoil_the_measurement_are_named():
    assert words(figures(undisturbed=0.4))[1].startswith("the measurement was disturbed, other programs took 60%")
    assert "disturbed" not in "\n".join(words(figures(undisturbed=0.95)))


def test_the_share_of_a_core_is_told_from_waiting_for_others():
    shares = []
    with parts.core_share(shares):
        time.sleep(0.2)
    assert shares[0] < 0.3
    with parts.core_share(shares):
        began = time.thread_time()
        while time.thread_time() - began < 0.05:
            pass
    assert shares[0] < shares[1] <= 1


def test_workers_that_hold_each_other_back_are_named():
    found = figures(views=240.0)
    assert found.needed_workers == 40  # counted by what each makes while all work
    assert "8 workers make only 2.4 times what one makes" in "\n".join(words(found))


def test_a_gpu_that_is_busy_is_told_how_its_step_gets_faster():
    busy = figures(run={"precision": "fp32"}, step=300.0, job=295.0, waiting=0.01)
    first, *changes, last = words(busy)
    assert first.startswith("the model step: 98% of the time is its own; data alone would come at 800 images/s")
    for flag in ("--precision bf16", "--batch-size", "--compile", "--image-size"):
        assert any(flag in line for line in changes), flag
    assert "at the rate" not in last
    calm = "\n".join(words(figures(run={"compile": True}, step=90.0, job=88.0, waiting=0.0, memory=8 * 10**9)))
    assert "--workers 2 would do (now 8)" in calm
    assert not any(flag in calm for flag in ("--precision", "--batch-size", "--compile"))


def on_cpu(run=None, **given) -> Figures:
    plain = {"device": "cpu", "memory": None, "device_memory": None}
    return figures(run={"device": "cpu"} | (run or {}), **(plain | {"waiting": 0.02} | given))


def test_on_a_cpu_workers_and_training_share_the_cores_and_it_is_said():
    # 16 cores: alone 400 and 16 · 100 images/s; at best 320 together, with 3 workers: 13 / 16 of 400 are 325.
    competing = on_cpu(cores=16, step=400.0, job=200.0)
    first, second, *_ = words(competing)
    assert first.startswith("cores: 2% of the time waits for data, but beside the workers a step takes 100% longer")
    assert first.endswith("8 workers and the training share 16 cores")
    assert second == "try --workers 3 --threads 13 (now 8): well shared, 16 cores would make about 320 images/s"
    starving = on_cpu(run={"workers": 1}, cores=16, views=100.0, step=400.0, job=98.0, waiting=0.7)
    first, second, *_ = words(starving)
    assert first.startswith("data: 70% of the time the training waits for 1 worker; 1 worker and the training share")
    assert second.startswith("try --workers 3 --threads 13 (now 1)")
    alone = on_cpu(run={"workers": 3}, cores=16, views=300.0, step=400.0, job=200.0)
    assert words(alone)[1].startswith(
        "16 cores should make about 320 images/s with these settings: does something else"
    )
    as_good_as_it_gets = on_cpu(run={"workers": 1}, cores=2, views=100.0, step=50.0, job=39.0)
    assert words(as_good_as_it_gets)[1].startswith("more than about 40 images/s is not in 2 cores")
    assert words(on_cpu(step=400.0, job=392.0))[0].startswith("the model step: 98%")


def test_arrays_in_memory_whose_views_are_made_between_the_steps():
    run = {"views": "batch", "workers": 0}
    nothing = {"reading": None, "reading_bytes": None, "decoding": None, "side": None, "one_worker": None}
    found = on_cpu(run=run, **nothing, step=400.0, job=300.0, waiting=0.25)
    first, second, *_ = words(found)
    assert first == "views: 25% of the time goes into making them, a batch at a time, on cpu"
    assert second.startswith("try --views image")
    assert words(dataclasses.replace(found, job=395.0, waiting=0.01))[0].startswith("the model step: 99%")
    # One process does both in turn: what was not waited for is the step, whatever the step did alone.
    assert words(dataclasses.replace(found, job=300.0, waiting=0.01))[0].startswith("the model step: 99%")
    assert [str(cell) for cell in table(found).columns[0].cells] == ["views, all", "model step alone", "whole job"]


rates = st.floats(0.01, 1e6)


@settings(max_examples=200, deadline=None)
@given(
    device=st.sampled_from(["cpu", "cuda", "mps"]), views=st.sampled_from(["image", "split", "batch"]),
    workers=st.integers(0, 64), cores=st.integers(1, 128), all_rates=st.tuples(*[rates] * 6), share=st.floats(0, 1),
    decoded=st.booleans(), calm=st.floats(0, 1),
)  # fmt: skip
def test_any_figures_have_at_most_six_lines_of_words(device, views, workers, cores, all_rates, share, decoded, calm):
    reading, decoding, one_worker, together, step, job = all_rates
    found = figures(
        run={"device": device, "views": views, "workers": workers}, cores=cores, waiting=share, views=together,
        step=step, job=job, reading=reading if decoded else None, decoding=decoding if decoded else None,
        one_worker=None if views == "batch" else one_worker, memory=None, device_memory=None,
        undisturbed=calm,
    )  # fmt: skip
    lines = words(found)
    assert 2 <= len(lines) <= 6
    assert all("\n" not in line and line == line.strip() and "  " not in line for line in lines)
    assert len(set(lines)) == len(lines)
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (3569, "59 min"), (3599, "1:00 h"), (4440, "1:14 h"),
     (200_000, "55:33 h (2.3 days)")],
)  # fmt: skip
def test_times_are_hours_and_minutes(seconds, text):
    assert _time(seconds) == text


@pytest.mark.parametrize(("rate", "text"), [(1234.5, "1,234"), (9.96, "10"), (3.04, "3.0"), (0.034, "0.03")])
def test_rates_have_as_many_digits_as_they_are_good_for(rate, text):
    assert _number(rate) == text


@settings(max_examples=200, deadline=None)
@given(
    accumulate=st.integers(1, 4), groups=st.integers(1, 8), group=st.integers(2, 9), rest=st.integers(0, 3),
    images=st.integers(0, 400),
)  # fmt: skip
@example(accumulate=1, groups=4, group=2, rest=3, images=10)
def test_a_shortened_batch_keeps_pieces_and_groups(accumulate, groups, group, rest, images):
    piece = groups * group + rest
    run = FOLDER.model_copy(
        update={"batch_size": accumulate * piece, "accumulate": accumulate, "bn_groups": groups, "shuffle_bn": True}
    )
    short = parts.shortened(run, images)
    assert 2 <= short.batch_size <= run.batch_size
    assert short.bn_groups <= groups
    assert short.batch_size % short.accumulate == 0
    assert short.batch_size // short.accumulate >= 2 * short.bn_groups
    assert short.batch_size <= max(images, 2 if groups == 1 else piece // groups)
    assert not short.shuffle_bn or short.bn_groups > 1 or groups == 1
    if images >= run.batch_size:
        assert short == run


def test_a_rate_counts_whole_rounds_over_all_of_their_time(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(parts, "clock", lambda: next(now))
    asked = []

    def work():
        for turn in itertools.count(1):
            asked.append(turn)
            yield 10

    rate = parts._rate(work(), 0, least=4, whole=3)
    assert len(asked) == 6
    assert rate == 60 / 2  # the clock was read at the beginning, once in between, and at the end


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            UserError,
            "batch of 64 in one piece does not fit .* lower --batch",
        ),
        (RuntimeError("DataLoader worker (pid 7) is killed"), UserError, "a worker died.*--workers"),
        (NotFinite(3), TrainingError, "no finite number"),
        (RuntimeError("a mistake of ours"), RuntimeError, "a mistake of ours"),
    ],
)
def test_faults_of_the_machine_are_one_line_with_a_way_out(fault, kind, message):
    with pytest.raises(kind, match=message), parts.plain_faults(FOLDER, torch.device("cpu")):
        raise fault
