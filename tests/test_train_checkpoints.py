"""Checkpoints: whole or not there, checked, in the background, patient with a full disk."""

import errno
import os
import threading

import pytest
import torch

from moco.errors import TrainingError, UserError
from moco.train import checkpoints
from moco.train.checkpoints import BackgroundSaver, Checkpoints, copied_to_cpu, read


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run" / "checkpoints"
    path.mkdir(parents=True)
    return Checkpoints(path)


def state(step):
    return {"step": step, "model": {"weight": torch.full((1000,), float(step))}}


def test_any_changed_byte_is_noticed(folder):
    path = folder.save(state(7), keep=2)
    whole = path.read_bytes()
    for place in range(0, len(whole), 97):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert read(path) is None, place
    path.write_bytes(whole)
    assert read(path)["step"] == 7


def test_without_its_checksum_file_a_checkpoint_is_still_read(folder):
    path = folder.save(state(7), keep=2)
    path.with_name(path.name + ".sha256").unlink()
    assert read(path)["step"] == 7
    path.write_bytes(path.read_bytes()[:-500])
    assert read(path) is None


def test_the_best_stays_whatever_becomes_of_the_others(folder):
    best = folder.save(state(1), keep=1)
    folder.mark_best(best)
    for step in (2, 3):
        folder.save(state(step), keep=1)
    assert [path.name for path in folder.paths()] == ["step-000000003.pt"]
    assert sorted(path.name for path in folder.folder.iterdir()) == [
        "best.pt", "best.pt.sha256", "step-000000003.pt", "step-000000003.pt.sha256",
    ]  # fmt: skip
    assert read(folder.folder / "best.pt")["step"] == 1
    assert folder.newest()["step"] == 3


def test_a_damaged_checkpoint_takes_nobodys_place(folder):
    """A run goes on from before it: what is written then must not be removed for its sake."""
    folder.save(state(6), keep=1)
    folder.save(state(9), keep=2).write_bytes(b"torn")
    path = folder.save(state(7), keep=1)
    assert path.exists()
    with pytest.warns(UserWarning, match=r"step-000000009\.pt is damaged and is passed over"):
        assert folder.newest()["step"] == 7
    folder.save(state(9), keep=1)
    assert folder.newest()["step"] == 9
    assert [found.name for found in folder.paths()] == ["step-000000009.pt"]


def test_what_a_killed_process_left_half_written_goes_with_the_next_checkpoint(folder):
    for name in ("step-000000003.partial", "step-000000003.pt.sha256.partial", "best.pt.partial"):
        (folder.folder / name).write_bytes(b"half")
    folder.save(state(7), keep=2)
    assert sorted(path.name for path in folder.folder.iterdir()) == ["step-000000007.pt", "step-000000007.pt.sha256"]


def test_a_checkpoint_of_a_later_version_says_so(folder):
    folder.save(state(1) | {"format": 99}, keep=1)
    with pytest.raises(UserError, match=r"later version of moco \(format 99"):
        folder.newest()


def test_what_is_saved_is_the_state_of_the_moment(folder):
    may_write = threading.Event()

    def write(value):
        may_write.wait(10)
        folder.save(value, keep=2)

    saver = BackgroundSaver(write, print)
    current = state(1)
    saver.save(current)
    current["model"]["weight"].fill_(-1)  # the training goes on
    may_write.set()
    saver.close()
    assert folder.newest()["model"]["weight"].tolist() == [1.0] * 1000


def test_what_goes_wrong_in_the_background_comes_out(folder):
    saver = BackgroundSaver(lambda value: folder.save(value, keep=2), print)
    folder.folder.rename(folder.folder.with_name("gone"))
    saver.save(state(1))
    with pytest.raises(TrainingError, match=r"cannot write .*step-000000001.partial: No such file"):
        saver.close()
    saver.close()  # said once


@pytest.fixture
def full_disk(monkeypatch):
    """A disk with room for nothing, until `free` is set."""
    free = threading.Event()
    real = torch.save

    def save(value, file):
        file.write(b"x" * 100)
        if not free.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.seek(0)
        real(value, file)

    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(checkpoints, "RETRY", 0.01)
    return free


def test_a_full_disk_is_waited_for(folder, full_disk):
    said = []

    def say(text):
        said.append(text)
        full_disk.set()

    saver = BackgroundSaver(lambda value: folder.save(value, keep=2), say)
    saver.save(state(5))
    saver.close()
    assert said == ["the disk is full: trying again for 10 minutes; free some room"]
    assert folder.newest()["step"] == 5


def test_a_disk_that_stays_full_ends_the_run_and_leaves_the_old_checkpoint(folder, full_disk, monkeypatch):
    full_disk.set()
    folder.save(state(5), keep=2)
    full_disk.clear()
    monkeypatch.setattr(checkpoints, "PATIENCE", 0.05)
    saver = BackgroundSaver(lambda value: folder.save(value, keep=2), lambda _: None)
    saver.save(state(6))
    with pytest.raises(TrainingError, match=r"No space left on device \(waited .* what was saved before is whole"):
        saver.close()
    assert folder.newest()["step"] == 5
    assert not list(folder.folder.glob("*.partial"))


def test_copies_share_no_memory():
    tree = {"a": torch.ones(3), "b": [torch.ones(2), (torch.ones(1), 5)], "c": "text"}
    copy = copied_to_cpu(tree)
    tree["a"].zero_()
    tree["b"][1][0].zero_()
    assert copy["a"].tolist() == [1, 1, 1]
    assert copy["b"][1] == (torch.ones(1), 5)
    assert copy["c"] == "text"
