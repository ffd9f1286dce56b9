"""The processes of a job and the device of each: torchrun's environment, or one process on its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from moco.errors import TrainingError, UserError
from moco.train.heartbeat import Heartbeat, is_loss

GRACE = 60.0
"""Seconds beyond the time-out after which what could not end a vain wait is ended by other means."""


@dataclass(frozen=True)
class Processes:
    """This process among those that train together."""

    rank: int
    world: int
    device: torch.device
    heartbeat: Heartbeat | None = None

    def at(self, doing: str) -> None:
        """Say where this process has come to, for the others to tell who is missing. Costs nothing."""
        if self.heartbeat is not None:
            self.heartbeat.at(doing)

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0


@contextmanager
def processes(device: str, timeout: float = 10.0) -> Iterator[Processes]:
    """Join the other processes that torchrun started (gloo on CPU, NCCL on CUDA), and leave them at the end.

    timeout: minutes that one of them waits for the others. Raises UserError for a device that is not there, and
    TrainingError where the processes do not find each other.
    """
    local = int(os.environ.get("LOCAL_RANK", 0))
    found = find_device(device, local)
    if "WORLD_SIZE" not in os.environ:
        yield Processes(0, 1, found)
        return
    if found.type == "cuda":
        torch.cuda.set_device(found)
    limit = timedelta(minutes=timeout)
    group, watched = _patience("nccl" if found.type == "cuda" else "gloo", limit.total_seconds())
    try:
        store, rank, world = next(rendezvous("env://", timeout=limit))
    except RuntimeError as error:
        raise TrainingError(f"the processes did not all come within {timeout:g} minutes: {_short(error)}") from error
    heartbeat = Heartbeat(_own_store(limit), rank, world, watched)
    heartbeat.start()
    try:
        dist.init_process_group(
            "nccl" if found.type == "cuda" else "gloo",
            store=_of_this_attempt(store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=group),
        )
        yield Processes(rank, world, found, heartbeat)
    except RuntimeError as error:  # outside of the loop, which says more
        if not (is_loss(error) or not dist.is_initialized()):
            raise
        otherwise = f"another process is gone, or has not answered for {timeout:g} minutes ({_short(error)})"
        raise heartbeat.error(otherwise, "start again, or go on with moco resume") from error
    finally:
        heartbeat.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


def _patience(backend: str, seconds: float) -> tuple[float, float]:
    """After how many seconds the group gives a vain wait up, and after how many the heartbeat ends the process.

    Gloo raises an exception in the waiting thread. NCCL does not: there the heartbeat is to come first.
    """
    return (seconds + GRACE, seconds) if backend == "nccl" else (seconds, seconds + GRACE)


def _own_store(limit: timedelta) -> Store:
    """A second connection to the store at which the processes met: the first may be busy waiting."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    return PrefixStore("signs", _of_this_attempt(store))


def _of_this_attempt(store: Store) -> Store:
    # After a restart the store may be the old one, with the addresses of processes that are gone.
    return PrefixStore(f"moco-attempt-{_restarts()}", store)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]


def restarted() -> bool:
    """Whether torchrun brought the processes back after one of them died."""
    return _restarts() > 0


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that `name` means here: auto takes CUDA, then an Apple GPU, then the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not index.isdigit()):
        raise UserError(f"unknown device {name!r}: use auto, cpu, mps, cuda or cuda:N")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise UserError("device cuda: no CUDA device is available here; use --device cpu or --device auto")
        place = int(index) if index else local_rank
        if place >= torch.cuda.device_count():
            raise UserError(f"device cuda:{place}: there are {torch.cuda.device_count()} CUDA devices here")
        return torch.device("cuda", place)
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("device mps: no Apple GPU is available here; use --device cpu or --device auto")
    return torch.device(kind)


def best_precision(device: torch.device) -> str:
    """The fastest arithmetic that the processor has in hardware: bf16, fp16 (older CUDA cards) or fp32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"
    if device.type == "cpu":
        # oneDNN also offers bf16 where it is only emulated and slow; ask for the instructions themselves. The names
        # are PyTorch's own and may go: then fp32 it is.
        asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return "bf16" if any(getattr(torch.cpu, name, bool)() for name in asks) else "fp32"
    return "fp32"
