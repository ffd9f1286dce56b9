"""Keeping batch norm from leaking: split the batch into groups, and shuffle the keys between the groups.

A query and its positive key that were normalised with the same batch mates can recognise each other by the
statistics of the group instead of by the picture ([v1] section 3.3, "Shuffling BN"). Several processes are groups
of their own accord; one process splits its batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from moco.contrast.collectives import gather_learning_rows, gather_rows, own_rows


def encode_in_groups(encoder: nn.Module, x: Tensor, groups: int) -> Tensor:
    """Encode `groups` parts of a batch one after the other, so that each is normalised by itself.

    x: (N, …) → (N, C). Parts are consecutive rows; their sizes differ by one where N does not divide. In effect this
    is `groups` devices with a small batch each, for batch norm of any class, and no layer is replaced. The running
    statistics move as much as by one batch, towards the mean of the groups' statistics. Raises TypeError for batches
    that are no tensors: where to divide them is not known.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"a batch to encode in groups must be a tensor, not a {type(x).__name__}: use bn_groups=1")
    # Without a momentum, a layer's statistics are plain averages over all its batches: nothing to weigh.
    layers = [
        (layer, layer.momentum)
        for layer in encoder.modules()
        if isinstance(layer, _BatchNorm) and layer.momentum is not None and layer.running_mean is not None
    ]
    # By `.data`, as the layers themselves do: the backward pass does not read them, and must not mind the change.
    buffers = (buffer for layer, _ in layers for buffer in (layer.running_mean, layer.running_var))
    running = [buffer.data for buffer in buffers if buffer is not None]
    before, means = [statistic.clone() for statistic in running], [torch.zeros_like(statistic) for statistic in running]
    features = []
    try:
        for layer, _ in layers:
            layer.momentum = 1.0  # one group after the other, the statistics become just the group's
        for part in x.tensor_split(groups):
            features.append(encoder(part))
            if running:
                torch._foreach_add_(means, running, alpha=1 / groups)
        if running:
            weights = [momentum for _, momentum in layers for _ in range(2)]
            torch._foreach_mul_(means, weights)
            torch._foreach_mul_(before, [1 - weight for weight in weights])
            torch._foreach_add_(before, means)
    finally:
        for layer, momentum in layers:
            layer.momentum = momentum
        if running:  # after a fault, those from before
            torch._foreach_copy_(running, before)
    return torch.cat(features)


def has_batchnorm(module: nn.Module) -> bool:
    """Whether any layer of `module` normalises over the batch."""
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())


def synchronise(model: nn.Module, device: torch.device) -> bool:
    """Have every batch norm layer of `model` take its statistics over all processes ([v3]; not with a queue).

    Names of parameters stay as they are. False, with nothing changed, where the device is not CUDA: PyTorch's layer
    works there only.
    """
    if device.type != "cuda":
        return False
    for name, child in model.named_children():
        setattr(model, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))
    return True


def shuffle(rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Shuffle the rows of all processes together; each takes as many as it gave.

    rows: (N, …). `generator` is a CPU generator in the same state on every process, so that all draw the same
    permutation. Returns the N shuffled rows and a function that brings rows computed from them back to the places
    of the originals.
    """
    everything = gather_rows(rows)
    order = torch.randperm(len(everything), generator=generator).to(rows.device)
    back = torch.argsort(order)

    def restore(computed: Tensor) -> Tensor:
        gather = gather_learning_rows if computed.requires_grad else gather_rows
        return gather(computed)[own_rows(back)]

    return everything[own_rows(order)], restore
