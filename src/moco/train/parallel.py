"""The processes of a job and the device of each: torchrun's environment, or one process on its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from moco.errors import UserError


@dataclass(frozen=True)
class Processes:
    """This process among those that train together."""

    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0


@contextmanager
def processes(device: str, timeout: float = 10.0) -> Iterator[Processes]:
    """Join the other processes that torchrun started (gloo on CPU, NCCL on CUDA), and leave them at the end.

    timeout: minutes that one of them waits for the others. Raises UserError for a device that is not there.
    """
    local = int(os.environ.get("LOCAL_RANK", 0))
    found = find_device(device, local)
    if "WORLD_SIZE" not in os.environ:
        yield Processes(0, 1, found)
        return
    if found.type == "cuda":
        torch.cuda.set_device(found)
    store, rank, world = next(rendezvous("env://", timeout=timedelta(minutes=timeout)))
    dist.init_process_group(
        "nccl" if found.type == "cuda" else "gloo",
        # After a restart the store may be the old one, with the addresses of processes that are gone.
        store=PrefixStore(f"moco-attempt-{_restarts()}", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=timeout),
    )
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), found)
    finally:
        dist.destroy_process_group()


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
