"""Who is missing, told from the signs of life that processes leave in their store."""

import json
import threading

import pytest

from moco.errors import TrainingError
from moco.train import heartbeat
from moco.train.heartbeat import Heartbeat, is_loss


class Memory:
    """A store in this process."""

    def __init__(self):
        self.held = {}

    def set(self, key, value):
        self.held[key] = value.encode()

    def get(self, key):
        return self.held[key]

    def check(self, keys):
        return all(key in self.held for key in keys)

    def compare_set(self, key, expected, desired):
        if self.held.get(key, b"").decode() == expected:
            self.held[key] = desired.encode()
        return self.held[key]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.01)
    monkeypatch.setattr(heartbeat, "PROOF", 0.3)
    monkeypatch.setattr(heartbeat, "ANSWER", 2.0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


@pytest.fixture
def start():
    """Starts processes of a group, here threads, and ends them."""
    running = []

    def start(store, rank, world=3, patience=1e9):
        made = Heartbeat(store, rank, world, patience)
        made.start()
        running.append(made)
        return made

    yield start
    for made in running:
        made.stop()


def silence(one: Heartbeat) -> None:
    """As SIGSTOP does: no more signs, and no goodbye."""
    one._end.set()
    one._thread.join()


def test_who_gives_no_sign_is_named_and_who_does_is_not(start, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    store = Memory()
    own, stopped, _ = (start(store, rank) for rank in range(3))
    stopped.at("in step 7")
    stopped._write()
    silence(stopped)
    error = own.error("somebody is gone", "go on with: moco resume runs/a")
    assert isinstance(error, TrainingError)
    text = str(error)
    assert text.startswith("process 1 of 3 (pid ")
    assert "gives no sign of life since" in text
    assert "in step 7" in text
    assert text.endswith("; go on with: moco resume runs/a")
    assert "process 2" not in text
    assert "\n" not in text


def test_who_lives_but_is_behind_is_named(start):
    store = Memory()
    own, other, late = (start(store, rank) for rank in range(3))
    late.at("waiting for the pictures of step 3")
    for one in (own, other):
        one.at("waiting for the pictures of step 3")
        one.at("in step 3")
    late._since -= 50
    own._since -= 60
    text = str(own.error("-", "-"))
    assert "process 2 of 3" in text
    assert "lives, but has been waiting for the pictures of step 3 for 50 s" in text
    assert "process 1" not in text


def test_who_is_behind_for_a_moment_only_is_not_named(start):
    store = Memory()
    own, _, _ = (start(store, rank) for rank in range(3))
    own.at("in step 1")
    own._since -= 60
    assert str(own.error("a process is gone", "resume")) == "a process is gone; resume"


def test_who_never_came_and_who_ended_by_itself(start):
    store = Memory()
    own, ended = start(store, 0, world=4), start(store, 2, world=4)
    start(store, 3, world=4)
    ended.at("in step 9")
    ended.stop()
    text = str(own.error("-", "-"))
    assert "process 1 of 4 never came" in text
    assert "ended in step 9: see its own message" in text
    assert "process 3" not in text


def test_the_first_to_find_out_decides_for_all(start):
    """A process that ends on account of another is not missing itself."""
    store = Memory()
    first, second, stopped = (start(store, rank) for rank in range(3))
    silence(stopped)
    said = str(first.error("-", "resume"))
    first.stop()
    assert str(second.error("-", "resume")) == said
    assert "process 2 of 3" in said
    assert "process 0" not in said


def test_one_process_of_a_machine_speaks(start, monkeypatch, capsys):
    """The command line prints for the first process; where that one is missing, the next one prints by itself."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    store = Memory()
    stopped, speaker, quiet = (start(store, rank) for rank in range(3))
    silence(stopped)
    speaker.error("-", "resume")
    assert capsys.readouterr().err.startswith("moco: process 0 of 3 (pid ")
    quiet.error("-", "resume")
    assert capsys.readouterr().err == ""


def test_a_store_that_is_gone_or_hangs_is_said(start, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    store = Memory()
    own = start(store, 1)

    def gone(_):
        raise RuntimeError("recvValue failed")

    monkeypatch.setattr(store, "check", gone)
    assert "the store of all processes does not answer: torchrun, which keeps it at node0:29500" in str(
        own.error("-", "-")
    )
    monkeypatch.setattr(heartbeat, "ANSWER", 0.05)
    release = threading.Event()
    monkeypatch.setattr(store, "check", lambda _: release.wait(10) and False)
    assert "does not answer" in str(own.error("-", "-"))
    release.set()


def test_a_wait_that_nothing_can_interrupt_ends_the_process(start, monkeypatch, capsys):
    """As under NCCL: the thread of the heartbeat says who is missing, and ends the process with status 1."""
    ended, status = threading.Event(), []

    def end(code):
        status.append(code)
        own._end.set()
        ended.set()

    monkeypatch.setattr(heartbeat.os, "_exit", end)
    store = Memory()
    stopped, own = start(store, 1, world=2), start(store, 0, world=2, patience=0.1)
    silence(stopped)
    own.at("in step 2")
    assert ended.wait(10)
    assert status == [1]
    assert capsys.readouterr().err.startswith("moco: process 1 of 2 (pid ")


def test_a_long_wait_with_nobody_missing_goes_on(start, monkeypatch):
    monkeypatch.setattr(heartbeat.os, "_exit", lambda code: pytest.fail("ended"))
    store = Memory()
    own, _ = start(store, 0, world=2, patience=0.02), start(store, 1, world=2, patience=0.02)
    beats = json.loads(store.get("0"))["beat"]
    own._since -= 100
    until = threading.Event()
    for _ in range(500):
        if json.loads(store.get("0"))["beat"] > beats + 10:
            break
        until.wait(0.01)
    assert own._thread.is_alive()
    assert not store.check(["verdict"])


def test_what_collective_calls_raise_is_told_from_other_errors():
    assert is_loss(RuntimeError("[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41337"))
    assert is_loss(RuntimeError("[/x/unbound_buffer.cc] Timed out waiting 3000ms for recv operation to complete"))
    assert not is_loss(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_loss(TrainingError("process 2 of 3 timed out"))
