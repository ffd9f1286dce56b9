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


class SplitBatchNorm(_BatchNorm):
    """Mixed into a batch norm class: in training, each of `groups` parts of the batch is normalised by itself.

    The running statistics move towards the mean of the groups' statistics, once per batch. In evaluation nothing
    differs from the class it is mixed into.
    """

    groups: int

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, C, …) → the same shape. Groups are consecutive rows; sizes differ by one where N does not divide."""
        if not self.training or self.groups == 1:
            return super().forward(x)
        momentum, tracked = self.momentum, self.num_batches_tracked
        self.num_batches_tracked = None
        outputs = []
        for group, part in enumerate(x.tensor_split(self.groups)):
            if momentum is not None:
                # Each group must weigh momentum / groups in the end, though later updates shrink the earlier ones.
                self.momentum = momentum / (self.groups - momentum * (self.groups - 1 - group))
            outputs.append(super().forward(part))
        self.momentum, self.num_batches_tracked = momentum, tracked
        if tracked is not None:
            tracked.add_(1)
        return torch.cat(outputs)


def split_batchnorm(module: nn.Module, groups: int) -> nn.Module:
    """Let every batch norm layer inside `module` normalise `groups` parts of the batch separately. In place.

    Layers of any class derived from PyTorch's batch norm are handled (timm's fused ones too); parameters and
    buffers keep their names. SyncBatchNorm layers are left alone: they span processes on purpose.
    """
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
            if not isinstance(layer, SplitBatchNorm):
                plain = type(layer)
                layer.__class__ = type(f"Split{plain.__name__}", (SplitBatchNorm, plain), {})
            layer.__dict__["groups"] = groups
    return module


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
