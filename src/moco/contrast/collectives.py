"""What the processes of one training job tell each other; with one process, each call is the identity."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this one is, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of all processes in rank order, without gradient: (N, …) → (world · N, …). N is equal on all."""
    if world_size() == 1:
        return rows.detach()
    parts = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(world_size())]
    dist.all_gather(parts, rows.detach().contiguous())
    return torch.cat(parts)


def own_rows(rows: Tensor) -> Tensor:
    """This process's share of rows that are in rank order: (world · N, …) → (N, …)."""
    return rows.chunk(world_size())[rank()]
