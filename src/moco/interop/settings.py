"""What a user may choose in `moco export`: one field = one flag. Free of torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Target = Literal["safetensors", "timm", "torchvision", "huggingface", "onnx", "torch-export", "detectron2"]


class ExportSettings(BaseModel):
    """Export"""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    to: Target = Field(
        description="who is to load it. safetensors: tensors and nothing else; timm, torchvision: weights for their "
        "model; huggingface: a folder for timm's local-dir:, the Hub and transformers; onnx, torch-export: the whole "
        "network as a graph, any batch size; detectron2: weights for its ResNets",
    )
    encoder: Literal["query", "key"] = Field("query", description="the encoder that learned, or the one that followed")
    head: bool = Field(False, description="the projection head as well, which is usually thrown away")
    out: str = Field("", description="folder to create (default: RUN/export/TARGET)")
