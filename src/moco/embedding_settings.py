"""What a user may choose in `moco embed`, `moco search` and `moco cluster`: one field = one flag. Free of torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from moco.evaluation_settings import LabelSettings

Auto = Literal["auto"]
Count = Annotated[int, Field(gt=0)]
DEVICE = "auto, cpu, mps, cuda or cuda:N"


class _Chosen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EmbedSettings(LabelSettings):
    """What is written"""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    data: str = Field("", description="pictures, whatever moco pretrain takes (default: those of the run)")
    out: str = Field("", description="FILE.parquet, or FILE.npy with FILE.csv and FILE.json beside it")
    dtype: Literal["float32", "float16"] = Field("float32", description="numbers in the file")
    head: bool = Field(False, description="features behind the projection head of the run, not those of the backbone")
    normalize: bool = Field(False, description="scale each row of features to length 1")
    images: Count | None = Field(
        None, description="use at most so many of the pictures, drawn with the seed (default: all)"
    )
    part: Count = Field(
        10_240,
        description="pictures between two savings, rounded up to whole batches of 256: what a crash can cost, and what "
        "is held in memory",
    )
    pretrained: bool = Field(
        False, description="for a timm name: its published weights, where they are on this machine already"
    )
    image_size: Count | None = Field(
        None,
        description="for a timm name: side of a picture in pixels (default: that of the published weights; of random "
        "ones 224, or that of smaller pictures in an array)",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="of drawn pictures, and of a timm model without --pretrained")
    device: str = Field("auto", description=DEVICE)
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="arithmetic of the network")
    workers: Auto | Annotated[int, Field(ge=0)] = Field(
        "auto", description="processes that decode pictures; auto: one for each core where pictures are files"
    )


class SearchSettings(_Chosen):
    """What is shown"""

    embeddings: str = Field("", description="what moco embed wrote: FILE.parquet or FILE.npy")
    top: Count = Field(10, description="pictures that are shown for each query")
    sheet: str = Field("auto", description="contact sheet, .jpg or .png; auto: beside the embedding file; or none")
    device: str = Field("auto", description=DEVICE)


class ClusterSettings(_Chosen):
    """Clusters"""

    embeddings: str = Field("", description="what moco embed wrote: FILE.parquet or FILE.npy")
    out: str = Field("", description="folder for the clusters, absent or empty")
    clusters: Auto | Annotated[int, Field(ge=2)] = Field(
        "auto", description="how many; auto: √(rows / 2), at least 2 and at most 256"
    )
    sheets: bool = Field(True, description="draw a contact sheet for each cluster")
    seed: int = Field(0, ge=0, lt=2**32, description="of the first centres, and of what is drawn for the sheets")
