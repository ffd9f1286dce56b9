"""What a training needs besides the backbone, found in a foreign checkpoint: heads, key encoder, queue, momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moco.interop.architecture import Head, described_head
from moco.interop.layouts import ENCODERS, head_weights, part, prefix_of, queue_in
from moco.interop.loading import backbone_weights
from moco.interop.reading import ForeignWeights

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
PREDICTOR = "predictor."


@dataclass(frozen=True)
class Parts:
    """The parts of a training in a file.

    weights: under the names of `MomentumContrast`. head, predictor: in the words of the settings. queue: its keys
    (K, C) and the place of the oldest.
    """

    weights: Mapping[str, Tensor]
    head: Head
    predictor: Head | None
    queue: tuple[Tensor, int] | None


def training_parts(found: ForeignWeights) -> Parts | str:
    """All that training needs, under the names of `MomentumContrast`, or why it cannot go on from this file."""
    if prefix_of(found.state, ENCODERS[found.layout], "key") is None:
        return "it has no key encoder"
    weights: dict[str, Tensor] = {}
    for encoder in ("query", "key"):
        head = head_weights(found.state, found.layout, encoder)
        if not head:
            return f"it has no projection head of the {encoder} encoder"
        weights |= {
            f"{encoder}_encoder.backbone.{name}": value for name, value in backbone_weights(found, encoder).items()
        }
        weights |= {f"{encoder}_encoder.head.{name}": value for name, value in head.items()}
    described = described_head(head)
    if described is None:
        return "its projection head is of a kind that this package does not train"
    predictor = part(found.state, PREDICTOR)
    weights |= {PREDICTOR + name: value for name, value in predictor.items()}
    behind = described_head(predictor)
    if predictor and (behind is None or behind.hidden != described.hidden):
        return "its predictor is of a kind that this package does not train"
    return Parts(weights, described, behind, queue_in(found.state, described.feature_size))


def fill(model: nn.Module, parts: Parts) -> str | None:
    """Put the parts into a model of this package. Returns what does not fit, with the model unchanged, or None."""
    own = model.state_dict()
    asked = {name for name, held in own.items() if isinstance(held, Tensor) and not name.startswith("dictionary.")}
    missing = [name for name in asked - set(parts.weights) if not name.endswith("num_batches_tracked")]
    unknown = sorted(set(parts.weights) - asked)
    other = sorted(name for name in asked & set(parts.weights) if own[name].shape != parts.weights[name].shape)
    for what, names in (("lacks", sorted(missing)), ("has beside it", unknown), ("has in another shape", other)):
        if names:
            return f"it {what} {names[0]}"
    with torch.no_grad():
        for name in asked & set(parts.weights):
            own[name].copy_(parts.weights[name])
        if parts.queue is not None and "dictionary.keys" in own:
            keys, oldest = parts.queue
            own["dictionary.keys"].copy_(nn.functional.normalize(keys, dim=1))
            own["dictionary.pointer"].fill_(oldest)
    return None


def restore_momentum(optimizer: torch.optim.Optimizer, model: nn.Module, found: ForeignWeights) -> bool:
    """Put the momentum of the authors' SGD (v1, v2) into ours, where every buffer fits. Returns whether it did."""
    buffers = _momentum_buffers(found)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not isinstance(optimizer, torch.optim.SGD) or set(buffers) != set(parameters):
        return False
    if any(buffers[name].shape != p.shape for name, p in parameters.items()):
        return False
    for name, p in parameters.items():
        optimizer.state[p] = {"momentum_buffer": buffers[name].to(p).clone()}
    return True


def _momentum_buffers(found: ForeignWeights) -> dict[str, Tensor]:
    """By our names. The authors' optimiser has all parameters in order, of which those of the query encoder learn."""
    if found.layout not in ("moco-v1", "moco-v2") or found.optimizer is None:
        return {}
    groups: Any = found.optimizer.get("param_groups")
    state: Any = found.optimizer.get("state")
    if not (isinstance(groups, list) and len(groups) == 1 and isinstance(state, Mapping)):
        return {}
    names = [name for name in found.state if name.startswith("encoder_") and not name.endswith(BUFFERS)]
    buffers: dict[str, Tensor] = {}
    for number, name in zip(groups[0].get("params", ()), names, strict=False):
        held = state.get(number)
        buffer = held.get("momentum_buffer") if isinstance(held, Mapping) else None
        if isinstance(buffer, Tensor) and name.startswith("encoder_q."):
            buffers[_our_name(name.removeprefix("encoder_q."))] = buffer
    return buffers


def _our_name(name: str) -> str:
    head = name.startswith("fc.")
    return f"query_encoder.head.{name.removeprefix('fc.')}" if head else f"query_encoder.backbone.{name}"
