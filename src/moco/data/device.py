"""Batches on their way to the training device, one ahead of the training."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch

from moco.data import batched
from moco.data.loader import Batch


def prefetch(batches: Iterator[Batch], device: torch.device) -> Generator[Batch, None, None]:
    """The batches on `device`, with nothing left to do to their views.

    On CUDA the copies, and the part of the views that is made there, run on a stream of their own beside the training
    step before; from page-locked memory, so that nobody waits for them.
    """
    if device.type != "cuda":
        for batch in batches:
            yield place(batch, device)
        return
    side, training = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    side.wait_stream(training)  # pictures held on the device are there before views are cut from them
    while True:
        # Asked for when the step before has been handed to the device, and so beside it.
        with torch.cuda.stream(side):
            found = next(batches, None)  # whole-batch views are made in here
            if found is None:
                return
            placed = place(found, device)
        training.wait_stream(side)
        for tensor in (*placed.views, placed.ids):
            tensor.record_stream(training)  # or its memory could be given away while the step still reads it
        yield placed


def place(batch: Batch, device: torch.device) -> Batch:
    """A batch on `device`, with what its `rest` asks for done to its views there."""
    views = [view.to(device, non_blocking=True) for view in batch.views]
    if batch.rest is not None:
        views = [batched.recolour(view, left) for view, left in zip(views, batch.rest, strict=True)]
    query, key, *small = views
    return Batch(query, key, batch.ids.to(device, non_blocking=True), batch.skipped, small=tuple(small))
