"""Code in several gloo processes that start fast: one interpreter imports what is heavy, and then forks."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

_SERVER = """
import json, os, signal, sys, traceback
import cv2, numpy, timm, torch, moco, moco.pretraining

def start(code, rank, world, port):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ.pop("WORLD_SIZE", None)
        if world > 1:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }
        exec(code, {"__name__": "__main__", "rank": rank, "world": world})
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

def end_of(child):
    status = os.waitpid(child, os.WUNTRACED)[1]
    return None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)

statuses = []
for group in sys.argv[2:]:
    world, port = group.split(":")
    children = [start(sys.argv[1], rank, int(world), port) for rank in range(int(world))]
    ends = [end_of(child) for child in children]
    for child in [child for child, end in zip(children, ends) if end is None]:
        os.kill(child, signal.SIGKILL)
    statuses += ends
print(json.dumps(statuses), file=sys.stderr)
"""


def in_processes(
    code: str, worlds: Sequence[int], *, statuses: Sequence[int | None] | None = None, port: int = 0, **more: object
) -> str:
    """Run `code` in as many processes as each of `worlds` says, one such group after the other; what they printed.

    The code finds its `rank` and `world` among its globals, and `more` in os.environ. statuses: with which the
    processes must end, by default all with 0; None is one that has stopped (SIGSTOP) and is killed when the others
    have ended. port: where they meet, by default one of which the first process keeps the store.
    """
    groups = [f"{world}:{port or free_port()}" for world in worlds]
    done = subprocess.run(
        [sys.executable, "-c", _SERVER, code, *groups],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in more.items()},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    expected = [0] * sum(worlds) if statuses is None else list(statuses)
    assert done.stderr.rstrip().endswith(json.dumps(expected)), done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
