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

from moco.contrast.collectives import gather_rows, own_rows


def encode_in_groups(encoder: nn.Module, x: Tensor, groups: int) -> Tensor:
    """Encode `groups` parts of a batch one after the other, so that each is normalised by itself.

    x: (N, …) → (N, C). Parts are consecutive rows; their sizes differ by one where N does not divide. In effect this
    is `groups` devices with a small batch each, for batch norm of any class; and the smaller parts stay in the
    processor's cache, where splitting inside each layer would copy them. The running statistics move as much as by
    one batch, towards the mean of the groups' statistics.
    """
    found = [(layer, layer.momentum) for layer in encoder.modules() if isinstance(layer, _BatchNorm)]
    # Without a momentum, a layer's statistics are plain averages over all its batches: nothing to weigh.
    layers = [(layer, momentum) for layer, momentum in found if momentum is not None]
    features = []
    try:
        for group, part in enumerate(x.tensor_split(groups)):
            for layer, momentum in layers:
                # Each group weighs momentum / groups in the end, though the later updates shrink the earlier ones.
                layer.momentum = momentum / (groups - momentum * (groups - 1 - group))
            features.append(encoder(part))
    finally:
        for layer, momentum in layers:
            layer.momentum = momentum
    return torch.cat(features)


def has_batchnorm(module: nn.Module) -> bool:
    """Whether any layer of `module` normalises over the batch."""
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())


def shuffle(rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Shuffle the rows of all processes together; each takes as many as it gave.

    rows: (N, …). `generator` is a CPU generator in the same state on every process, so that all draw the same
    permutation. Returns the N shuffled rows and a function that brings rows computed from them back to the places
    of the originals.
    """
    everything = gather_rows(rows)
    order = torch.randperm(len(everything), generator=generator).to(rows.device)
    back = torch.argsort(order)
    return everything[own_rows(order)], lambda computed: gather_rows(computed)[own_rows(back)]
