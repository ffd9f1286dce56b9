"""What is exported: an encoder of a run, and the words that say how to make one like it elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.resnet import ResNet
from torch import Tensor, nn

from moco.contrast.encoders import feature_width, projection_head
from moco.errors import UserError
from moco.evaluate.subject import Where, checkpoint_of
from moco.settings import RunSettings
from moco.train.run import backbone_of

SMALL_VIEW = 96
"""Up to this side, evaluation shows the whole central square of a picture (moco.data.loader.central_box)."""
PREPARATION = "preprocessing.json"
"""What an export says about its pictures, and an import looks for."""
SELF_CONTAINED = "--to onnx and --to torch-export carry the network itself"


@dataclass(frozen=True)
class Network:
    """An encoder in eval mode on the CPU: pictures (N, C, S, S) → features. head: behind it, where asked for."""

    settings: RunSettings
    backbone: nn.Module
    head: nn.Module | None
    encoder: str
    step: int | None
    run: str

    @property
    def whole(self) -> nn.Module:
        """Backbone and head in one."""
        return (self.backbone if self.head is None else nn.Sequential(self.backbone, self.head)).eval()

    @property
    def name(self) -> str:
        """The timm name of the backbone, without a tag."""
        return self.settings.backbone.partition(".")[0]

    @property
    def is_resnet(self) -> bool:
        """Whether it is a ResNet, whose first layers may differ from timm's."""
        return isinstance(self.backbone, ResNet)

    def pictures(self, count: int) -> Tensor:
        """Random numbers in the place of prepared pictures: (count, C, S, S), always the same."""
        size, generator = self.settings.image_size, torch.Generator().manual_seed(count)
        return torch.randn(count, self.settings.channels, size, size, generator=generator)

    def preparation(self) -> dict[str, Any]:
        """How pictures become its input, as plain values."""
        settings = self.settings
        return {
            "image_size": settings.image_size,
            "crop_share": 1.0 if settings.image_size <= SMALL_VIEW else 224 / 256,
            "interpolation": "bilinear, antialiased",
            "channels": settings.channels,
            "colour_order": {1: "grey", 3: "RGB", 4: "RGBA"}.get(settings.channels, "as in the pictures of the run"),
            "scale": "0 to 1",
            "mean": list(settings.mean),
            "std": list(settings.std),
            "layout": "float32, N × channels × height × width",
        }

    def about(self) -> dict[str, Any]:
        """What it is and where it comes from, as plain values."""
        with torch.no_grad():
            width = int(self.whole(self.pictures(1)).shape[1])
        return {
            "architecture": self.name,
            "stem": self.settings.stem,
            "base_width": self.settings.base_width,
            "encoder": self.encoder,
            "head": self.head is not None,
            "feature_size": width,
            "run": self.run,
            "step": self.step,
        }

    def timm_arguments(self) -> dict[str, Any]:
        """What `timm.create_model` needs beside the name. Raises UserError where it cannot make such a network."""
        settings = self.settings
        if settings.base_width not in (None, 64):
            raise UserError(f"timm cannot make a ResNet of base_width {settings.base_width}: {SELF_CONTAINED}")
        arguments: dict[str, Any] = {"num_classes": 0, "in_chans": settings.channels}
        if getattr(getattr(self.backbone, "patch_embed", None), "img_size", None):
            arguments["img_size"] = settings.image_size
        if settings.vit_rules == "v3" and self.name.startswith("vit_small"):
            arguments["num_heads"] = 12
        return arguments


def load_network(where: Where, encoder: str, head: bool) -> Network:
    """An encoder of a run. Raises UserError where the run does not have it."""
    assert where.run is not None
    settings, state = where.run.settings, checkpoint_of(where)
    weights = state["model"]
    assert isinstance(weights, Mapping)
    backbone = backbone_of(settings)
    _fill(backbone, weights, f"{encoder}_encoder.backbone.", f"{where.name} has no {encoder} encoder")
    behind = None
    if head:
        width = feature_width(backbone, settings.channels, settings.image_size)
        behind = projection_head(
            settings.head, width, settings.feature_size, layers=settings.head_layers, hidden=settings.hidden_width,
            last_norm=settings.head_last_norm,
        ).eval()  # fmt: skip
        _fill(behind, weights, f"{encoder}_encoder.head.", f"{where.name} has no head of its {encoder} encoder")
    step = state.get("step")
    return Network(settings, backbone.eval(), behind, encoder, step if isinstance(step, int) else None, where.name)


def _fill(module: nn.Module, weights: Mapping[str, Tensor], prefix: str, otherwise: str) -> None:
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not own:
        raise UserError(otherwise)
    try:
        module.load_state_dict(own)
    except RuntimeError as error:
        raise UserError(f"the checkpoint does not fit the settings: {str(error).splitlines()[0]}") from error
