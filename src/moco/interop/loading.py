"""Foreign weights into a backbone: all of them, or a clear word about what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from moco.errors import UserError
from moco.interop.layouts import DESCRIPTIONS, encoder_weights
from moco.interop.reading import ForeignWeights, read_weights

SHOWN = 3
"""Names of each kind in a message."""
SMALL_TRANSFORMER, HEADS_OF_V3 = 384, 12


@dataclass(frozen=True)
class LoadReport:
    """What became of the weights of a file. Names as in the backbone.

    matched: taken over. missing: the backbone has them, the file does not. unexpected: the other way round.
    shape_mismatch: in both, but of different shapes.
    """

    layout: str
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shape_mismatch: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether everything fitted."""
        return not (self.missing or self.unexpected or self.shape_mismatch)

    def __str__(self) -> str:
        parts = [f"{len(self.matched)} tensors matched"]
        for what, names in (
            ("missing in the file", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.shape_mismatch),
        ):
            if names:
                parts.append(f"{len(names)} {what} ({_some(names)})")
        return ", ".join(parts)


def backbone_weights(found: ForeignWeights, encoder: str = "query") -> dict[str, Tensor]:
    """The backbone in a file, under timm's names. encoder: query, or key. Raises UserError where it has none."""
    try:
        return encoder_weights(found.state, found.layout, encoder)
    except UserError as error:
        raise UserError(f"{found.path}: {error}") from error


def load_backbone(
    backbone: nn.Module,
    file: str | Path | ForeignWeights,
    *,
    encoder: str = "query",
    allow_partial: bool = False,
    trust_pickle: bool = False,
) -> LoadReport:
    """Put the weights of a file into a backbone (a timm module without classifier).

    allow_partial: take what fits where not all does. The counters of batch norm (num_batches_tracked), which old files
    lack, are not missed. Raises UserError, with the backbone unchanged, where nothing fits, or not all.
    """
    found = file if isinstance(file, ForeignWeights) else read_weights(file, trust_pickle=trust_pickle)
    given, own = backbone_weights(found, encoder), backbone.state_dict()
    _check_attention(found, backbone)
    matched = {name: value for name, value in given.items() if name in own and value.shape == own[name].shape}
    report = LoadReport(
        found.layout,
        tuple(matched),
        tuple(name for name in own if name not in given and not name.endswith("num_batches_tracked")),
        tuple(name for name in given if name not in own),
        tuple(
            f"{name} {_shape(given[name])} for {_shape(own[name])}" for name in given if name in set(own) - set(matched)
        ),
    )
    learned = [name for name in matched if not name.endswith("num_batches_tracked")]
    if not learned:
        raise UserError(
            f"{found.path} has nothing that fits this backbone ({DESCRIPTIONS[found.layout].partition(':')[0]}; its "
            f"names begin {_some(list(given) or list(found.state))}): name the backbone it was made for"
        )
    if not (report.complete or allow_partial):
        raise UserError(f"{found.path} fits this backbone only in part: {report}; --allow-partial takes what fits")
    with torch.no_grad():
        for name, value in matched.items():
            own[name].copy_(value)
    return report


def _check_attention(found: ForeignWeights, backbone: nn.Module) -> None:
    """The number of attention heads does not show in the weights: v3's small transformer has 12, timm's 6."""
    blocks = getattr(backbone, "blocks", None)
    attention = getattr(blocks[0], "attn", None) if isinstance(blocks, nn.Sequential) and len(blocks) else None
    small = getattr(backbone, "embed_dim", None) == SMALL_TRANSFORMER
    if found.layout == "moco-v3" and small and getattr(attention, "num_heads", HEADS_OF_V3) != HEADS_OF_V3:
        raise UserError(
            f"{found.path} is of v3, whose small transformer has {HEADS_OF_V3} attention heads; this one has "
            f"{getattr(attention, 'num_heads', 0)}: set --vit-rules v3"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"
