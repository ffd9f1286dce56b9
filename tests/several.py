"""Real processes that start at once: one interpreter imports what is heavy, and is forked for each of them.

Imports take a hundred times as long as a small training. The processes are as separate as any: they have their own
memory, are killed, stopped and sent signals like others, and keep nothing from one to the next.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SERVER = """
import gc, json, os, signal, sys
import cv2, numpy, timm, torch, moco, moco.cli, moco.pretraining
import matplotlib.backends.backend_agg, matplotlib.figure, torch.utils.tensorboard

def start(asked):
    child = os.fork()
    if child:
        running.add(child)
        return child
    answers.close()
    os.setsid()
    if asked["cores"]:
        os.sched_setaffinity(0, asked["cores"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(asked[name], os.O_WRONLY | os.O_APPEND), number)
    exec(asked["code"], {"__name__": "__main__", **asked["names"]})
    sys.exit()  # as any Python program ends

def status_of(child):
    found, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
    if not found:
        return "runs"
    if os.WIFSTOPPED(status):
        return "stopped"
    running.discard(child)
    return os.waitstatus_to_exitcode(status)

gc.collect()
gc.freeze()  # the children need not go through all that when they end
running = set()
answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps(status_of(asked) if isinstance(asked, int) else start(asked)), file=answers, flush=True)
for child in running:
    os.kill(child, signal.SIGKILL)
"""
_server: "subprocess.Popen[str] | None" = None


def _ask(what: object) -> Any:
    global _server
    if _server is None:
        _server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        atexit.register(_server.communicate)  # it ends with its input
    assert _server.stdin is not None
    assert _server.stdout is not None
    print(json.dumps(what), file=_server.stdin, flush=True)
    return json.loads(_server.stdout.readline())


class Started:
    """Python code in a process of its own, in a session of its own.

    names: the globals that the code finds. environment: added to os.environ. What it prints goes to files.
    """

    def __init__(self, code: str, names: dict[str, Any] | None = None, **environment: str) -> None:
        self._files = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._files.name) / name for name in ("out", "err"))
        self._out.touch()
        self._err.touch()
        self.returncode: int | None = None
        """The exit status, negative for a signal, once `poll` or `wait` has seen it end."""
        self.stopped = False
        self.pid: int = _ask(
            {
                "code": code, "names": names or {}, "out": str(self._out), "err": str(self._err),
                "environment": os.environ | {"OMP_NUM_THREADS": "1"} | environment,
                "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
            }
        )  # fmt: skip

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        if self.returncode is None:
            found = _ask(self.pid)
            self.stopped = self.stopped or found == "stopped"
            self.returncode = found if isinstance(found, int) else None
        return self.returncode

    def wait(self, timeout: float = 900) -> int | None:
        """The exit status, once it has ended; None where it has stopped (SIGSTOP)."""
        until, pause = time.monotonic() + timeout, 0.005
        while self.poll() is None and not self.stopped:
            if time.monotonic() > until:
                self.kill()
                raise AssertionError(f"still runs after {timeout:g} s: {self.said}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return self.returncode

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.stopped = False

    @property
    def printed(self) -> str:
        """What it printed."""
        return self._out.read_text()

    @property
    def said(self) -> str:
        """What it printed as errors."""
        return self._err.read_text()


def moco_process(*words: object) -> Started:
    """`moco WORDS`."""
    return Started("import moco.cli; raise SystemExit(moco.cli.main(words))", {"words": [str(word) for word in words]})


def in_processes(
    code: str, worlds: Sequence[int], *, statuses: Sequence[int | None] | None = None, port: int = 0, **more: object
) -> str:
    """Run `code` in as many processes as each of `worlds` says, one such group after the other; what they printed.

    The code finds its `rank`, `world` and `group` (the place in `worlds`) among its globals, and `more` in os.environ.
    statuses: with which the processes must end, by default all with 0; None is one that has stopped (SIGSTOP) and is
    killed when the others have ended. port: where they meet, by default one of which the first process keeps the store.
    """
    found: list[int | None] = []
    printed = said = ""
    for group, world in enumerate(worlds):
        meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
        children = [
            Started(
                code,
                {"rank": rank, "world": world, "group": group},
                **(meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}),
                **{name: str(value) for name, value in more.items()},
            )
            for rank in range(world)
        ]
        found += [child.wait() for child in children]
        for child in children:
            child.kill()
        printed += "".join(child.printed for child in children)
        said += "".join(child.said for child in children)
    assert found == ([0] * sum(worlds) if statuses is None else list(statuses)), printed[-2000:] + said[-6000:]
    return printed


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
