"""What the processes of one training job tell each other; with one process, each call is the identity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


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


def gather_shares(rows: Tensor) -> Tensor:
    """The rows of all processes in rank order, where each has its own number of them: (N, D) → (sum of all N, D).

    A process that has none, and may not know D, gives (0, 0). Raises ValueError on all where none has any.
    """
    if world_size() == 1:
        return rows.detach()
    shapes = gather_rows(torch.tensor([rows.shape], device=rows.device))
    longest, width = shapes.amax(dim=0).tolist()
    if longest == 0:
        raise ValueError("no process has any rows")
    padded = rows.new_zeros(longest, width)  # collectives want equal sizes
    padded[: len(rows)] = rows.detach() if len(rows) else 0
    parts = gather_rows(padded).split(longest)
    return torch.cat([part[:count] for part, count in zip(parts, shapes[:, 0].tolist(), strict=True)])


def own_share(count: int) -> range:
    """Which of `count` pieces of work are this process's: a run of neighbours; the first ones take one more each."""
    each, more = divmod(count, world_size())
    start = rank() * each + min(rank(), more)
    return range(start, start + each + (rank() < more))


@contextmanager
def buffers_of_the_first(module: nn.Module) -> Iterator[None]:
    """Inside, the buffers of `module` are those of the first process; afterwards all have their own again.

    The running statistics of batch norm are each process's own: without this, every one would encode differently.
    """
    if world_size() == 1:
        yield
        return
    buffers = list(module.buffers())
    own = [buffer.clone() for buffer in buffers]
    try:
        for buffer in buffers:
            dist.broadcast(buffer.data, 0)
        yield
    finally:
        for buffer, before in zip(buffers, own, strict=True):
            buffer.data.copy_(before)


def own_rows(rows: Tensor) -> Tensor:
    """This process's share of rows that are in rank order: (world · N, …) → (N, …)."""
    return rows.chunk(world_size())[rank()]


class _GatherRows(torch.autograd.Function):
    """`gather_rows` that hands gradients back: each row's is the sum of what the processes found for it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return gather_rows(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        return own_rows(total)


def gather_learning_rows(rows: Tensor) -> Tensor:
    """The same with gradient, for keys that learn: under DDP's average, that of the mean loss over all processes."""
    if world_size() == 1:
        return rows
    gathered: Tensor = _GatherRows.apply(rows)
    return gathered
