"""What a user may choose in `moco eval` and `moco health`: a class a verb, one field = one flag. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moco.errors import UserError
from moco.settings import check_names, explain

UNLABELLED_HINT = "--unlabelled is for the contrastive loss: set --contrastive-weight too, such as 0.3"

Auto = Literal["auto"]
Count = Annotated[int, Field(gt=0)]


class InspectSettings(BaseModel):
    """Pictures and machine"""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    data: str = Field("", description="pictures, whatever moco pretrain takes (default: those of the run)")
    images: Count | None = Field(
        None, description="use at most so many of the pictures, drawn with the seed (default: all)"
    )
    out: str = Field("", description="write the figures into this folder (default: RUN/eval; for a timm name none)")
    seed: int = Field(0, ge=0, lt=2**32, description="of splits, draws, views and probes")
    device: str = Field("auto", description="auto, cpu, mps, cuda or cuda:N")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="arithmetic of the backbone")
    workers: int = Field(0, ge=0, description="processes that decode pictures")


class EvaluationSettings(InspectSettings):
    """What is compared"""

    test: str = Field("", description="test pictures (default: a part of the data is set aside, drawn with the seed)")
    test_labels: str = Field("auto", description="labels of the test pictures, as for --labels")
    test_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="part of each class that is set aside where no test pictures are given"
    )
    baseline: bool = Field(True, description="show the untrained network, and raw pixels of small pictures, beside it")
    pretrained: bool = Field(
        False, description="for a timm name: its published weights, where they are on this machine already"
    )
    image_size: Count | None = Field(
        None,
        description="for a timm name: side of a picture in pixels (default: that of the published weights; of random "
        "ones 224, or that of smaller pictures in an array)",
    )
    layer: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="features of this layer instead of the last one, as timm counts them: of a ResNet 0 the stem, "
        "1 to 4 its stages; of a transformer its blocks from 0 (default: the last)",
    )
    grid: Count = Field(
        1, description="average the layer's map in grid × grid parts and join these; 1: over the whole picture"
    )


class LabelSettings(BaseModel):
    """Labels"""

    labels: str = Field(
        "",
        description="labels of the data: auto (those that come with it), folder (first folder level), none, or a .npy "
        "file (default: as in the run, else auto)",
    )

    @property
    def label_source(self) -> str:
        """Where the labels of the data come from; empty: as in the run."""
        return self.labels


class ScratchSettings(BaseModel):
    """Training from scratch, beside it"""

    scratch: bool = Field(False, description="train the same network from scratch on the same labels as well")
    scratch_steps: Count = Field(
        1000, description="optimiser steps of that training; 30 passes over the labelled pictures where that is more"
    )
    scratch_lr: float = Field(0.05, gt=0, description="learning rate of that training, at a batch of 64")


class KnnSettings(EvaluationSettings, LabelSettings, ScratchSettings):
    """Nearest neighbours"""

    k: Count = Field(200, description="neighbours that vote; never more than there are pictures")
    temperature: float = Field(0.07, gt=0, description="τ of the weights exp(similarity / τ)")


class LinearSettings(EvaluationSettings, LabelSettings, ScratchSettings):
    """Linear probe"""

    protocol: Literal["fast", "paper"] = Field(
        "fast",
        description="fast: features once, logistic regression, L2 penalty chosen by cross-validation; paper: SGD on "
        "random crops and flips with the backbone frozen",
    )
    lr: Auto | Annotated[float, Field(gt=0)] = Field(
        30.0, description="paper: learning rate; 30 suits features of ImageNet scale, auto searches on a held-out part"
    )
    epochs: Count = Field(100, description="paper: passes over the data; the rate is divided by 10 at 60 and 80 %")
    batch_size: Count = Field(256, description="paper: pictures per step")


class AmountSettings(BaseModel):
    """How many labels"""

    labels: tuple[str, ...] = Field(
        (),
        description="percentages of the labels to learn from, such as 1% 10%; and, where needed, where the labels "
        "come from, as for the other evaluations (auto, folder or a .npy file)",
    )
    shots: tuple[Count, ...] = Field((), description="labels per class to learn from, such as 1 5 10")

    @field_validator("labels", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)

    @property
    def shares(self) -> tuple[float, ...]:
        """Parts of the labels, above 0 and below 1."""
        return tuple(float(word[:-1]) / 100 for word in self.labels if word.endswith("%"))

    @property
    def label_source(self) -> str:
        """Where the labels of the data come from; empty: as in the run."""
        return next((word for word in self.labels if not word.endswith("%")), "")

    @model_validator(mode="after")
    def _amounts(self) -> Self:
        try:
            shares = self.shares
        except ValueError:
            raise ValueError(f"labels takes percentages such as 1% 10%, not {' '.join(self.labels)}") from None
        if len(self.labels) - len(shares) > 1:
            raise ValueError(f"labels takes percentages such as 1% 10%, not {' '.join(self.labels)}")
        if not all(0 < share < 1 for share in shares):
            raise ValueError(f"labels takes percentages above 0 and below 100, not {' '.join(self.labels)}")
        if shares and self.shots:
            raise ValueError("name how many labels: either --labels 1% 10% or --shots 1 5 10 (per class)")
        return self


class FewShotSettings(EvaluationSettings, AmountSettings, ScratchSettings):
    """Few labels"""

    draws: Count = Field(5, description="how often labels are drawn; mean and standard deviation are shown")

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.shares and not self.shots:
            raise ValueError("name how many labels: either --labels 1% 10% or --shots 1 5 10 (per class)")
        return self


class FineTuneSettings(EvaluationSettings, AmountSettings):
    """Fine-tuning"""

    draws: Count = Field(
        3, description="trainings, each with its own labels, validation part and order; mean and standard deviation"
    )
    scratch: bool = Field(False, description="train the same network from random weights as well, in the same way")
    epochs: Count = Field(30, description="passes over the labelled pictures")
    steps: Count = Field(1000, description="optimiser steps at least, however few pictures there are")
    batch_size: Count = Field(64, description="pictures per step")
    optimizer: Literal["auto", "sgd", "adamw"] = Field(
        "auto", description="how weights are changed: sgd where the network has batch norm, else adamw"
    )
    lr: Auto | Annotated[float, Field(gt=0)] = Field(
        "auto", description="learning rate of the classifier at a batch of 64: 0.05 (sgd) or 0.001 (adamw)"
    )
    scratch_lr: Auto | Annotated[float, Field(gt=0)] = Field(
        "auto", description="the same for the training from random weights"
    )
    layer_decay: float = Field(
        0.8, gt=0, le=1, description="rate of each block of the network, as a share of that of the block above it"
    )
    weight_decay: Auto | Annotated[float, Field(ge=0)] = Field(
        "auto", description="none on biases and norm layers; on weights 0.0005 (sgd) or 0.05 (adamw)"
    )
    validation_share: float = Field(
        0.1, ge=0, lt=1, description="part of the labelled pictures to choose the best epoch on; 0: the last one counts"
    )
    patience: Count = Field(10, description="looks at that part (20 in all) without a better one until it stops")
    contrastive_weight: float = Field(
        0.0, ge=0, description="λ: add λ × the contrastive loss of the run, on views of the same pictures"
    )
    unlabelled: str = Field("", description="further pictures for the contrastive loss, without labels")
    save: str = Field("", description="write the fine-tuned weights there (.safetensors)")

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.unlabelled and not self.contrastive_weight:
            raise ValueError(UNLABELLED_HINT)
        if self.save and not self.save.endswith(".safetensors"):
            raise ValueError(f"save = {self.save!r}: the name of the file must end in .safetensors")
        return self


class RetrievalSettings(EvaluationSettings, LabelSettings, ScratchSettings):
    """Retrieval"""

    by: Literal["auto", "label", "view"] = Field(
        "auto", description="what counts as found: pictures of the same label, or the other view of the same picture"
    )
    recall: tuple[Count, ...] = Field((1, 5, 10), description="recall at so many neighbours")


class HealthSettings(InspectSettings, LabelSettings):
    """Health"""

    images: Count | None = Field(2048, description="pictures that are looked at, drawn with the seed")


class ReportSettings(InspectSettings, LabelSettings):
    """Page"""

    images: Annotated[int, Field(ge=5, le=20_000)] = Field(
        2000, description="pictures on the map, drawn with the seed; their small copies take 4 MB at most"
    )
    out: str = Field("", description="the page, or a folder for it (default: RUN/report.html, or comparison.html)")
    watch: bool = Field(False, description="make the page again and again, until the run is finished or Ctrl-C")
    every: float = Field(60.0, gt=0, description="seconds between two times of --watch")


class DetectSettings(InspectSettings):
    """Detection"""

    data: str = Field(
        "",
        description="marked pictures to learn from: coco:FILE.json (pictures beside it, in images/, or in a folder of "
        "its name) or voc:FOLDER/PART, such as voc:VOC2007/trainval; several joined by a comma",
    )
    test: str = Field("", description="marked pictures to test on (default: a part of the data is set aside)")
    test_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="part of the pictures that is set aside where no test pictures are given"
    )
    empty: bool = Field(False, description="learn from pictures without any object, too")
    masks: Literal["auto", "yes", "no"] = Field(
        "auto", description="Mask R-CNN instead of Faster R-CNN; auto: where every object has a mask"
    )
    norm: Literal["sync", "frozen"] = Field(
        "sync", description="batch norm: it learns, in the pyramid too (as in MoCo v1); or the run's own, frozen"
    )
    iterations: Auto | Count = Field(
        "auto", description="optimiser steps; auto: 12 passes over the pictures (COCO's 1x), at least 1,000"
    )
    batch_size: Count = Field(16, description="pictures per step")
    lr: Auto | Annotated[float, Field(gt=0)] = Field(
        "auto", description="learning rate; auto: 0.02 at a batch of 16, in proportion for others"
    )
    warmup: Auto | Annotated[int, Field(ge=0)] = Field(
        "auto", description="steps in which the rate rises; auto: 1,000, and never more than a tenth of all"
    )
    drops: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (0.6667, 0.8889), description="parts of the training after which the rate is divided by 10"
    )
    weight_decay: float = Field(1e-4, ge=0, description="none on batch norm")
    rois: Count = Field(
        512, description="proposals of a picture that the heads learn from; 64 suits small pictures on a CPU"
    )
    size: Auto | Count = Field(
        "auto", description="shorter side of a picture in pixels; auto: 800, or that of the pictures below 320"
    )
    size_range: float = Field(
        0.8, gt=0, le=1, description="in training it is drawn from this part of it up to all of it"
    )
    baseline: bool = Field(True, description="train the same detector from random weights as well, in the same way")
    supervised: str = Field(
        "", description="and from supervised weights: a file, or timm for its published ones that are on this machine"
    )
    trust_pickle: bool = Field(
        False, description="let Python make the objects in that file, which can run any program: for files of your own"
    )
    seeds: Count = Field(3, description="trainings of each, with the seeds S, S + 1, …; mean and standard deviation")
    save_every: Count = Field(500, description="steps between checkpoints; the same command goes on there")


TASKS: dict[str, type[EvaluationSettings]] = {
    "knn": KnnSettings,
    "linear": LinearSettings,
    "fewshot": FewShotSettings,
    "finetune": FineTuneSettings,
    "retrieval": RetrievalSettings,
}


_Kind = TypeVar("_Kind", bound=BaseModel)


def inspection(kind: type[_Kind], given: Mapping[str, Any]) -> _Kind:
    """The settings of a verb from what was given. Raises UserError with one line for the first mistake."""
    check_names(given, kind.model_fields, "setting")
    try:
        return kind(**{name: str(value) if isinstance(value, PurePath) else value for name, value in given.items()})
    except ValidationError as error:
        raise UserError(explain(error)) from error
