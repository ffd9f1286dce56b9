"""One process per run folder."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from moco.errors import UserError
from moco.train.lock import SILENT, RunLock

HOLD = """
import sys, time
from pathlib import Path
from moco.train.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.take()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_and_a_dead_one_is_not_waited_for(tmp_path, holder):
    with pytest.raises(UserError, match=rf"is being trained by process {holder.pid} on {socket.gethostname()}"):
        RunLock(tmp_path).take()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = RunLock(tmp_path)
    lock.take()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    lock.release()
    assert (tmp_path / "run.lock").read_text() == ""


def test_worker_processes_do_not_keep_the_lock_of_a_dead_one(tmp_path):
    script = HOLD.replace("time.sleep(60)", "import os\nif os.fork() == 0:\n    time.sleep(30)\nos._exit(9)")
    process = subprocess.run([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.DEVNULL, check=False)
    assert process.returncode == 9  # its child is still there
    RunLock(tmp_path).take()


def test_another_machine_is_believed_while_it_shows_signs_of_life(tmp_path):
    path = tmp_path / "run.lock"
    path.write_text(json.dumps({"pid": 12, "host": "another-machine"}))
    with pytest.raises(UserError, match="process 12 on another-machine"):
        RunLock(tmp_path).take()
    long_ago = time.time() - SILENT - 1
    os.utime(path, (long_ago, long_ago))
    RunLock(tmp_path).take()


def test_signs_of_life(tmp_path, monkeypatch):
    lock = RunLock(tmp_path)
    lock.take()
    os.utime(lock.path, (0, 0))
    lock.beat()
    assert lock.path.stat().st_mtime == 0  # not at every step
    monkeypatch.setattr("moco.train.lock.HEARTBEAT", 0.0)
    lock.beat()
    assert time.time() - lock.path.stat().st_mtime < 5


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match=r"cannot write in the run folder .*gone: No such file"):
        RunLock(tmp_path / "gone").take()
