"""What a user may choose: one field = one flag = one YAML key. Frozen, validated, free of torch.

Values come in layers, the later ones win: defaults of the class, the recipe, the YAML file, the flags.
`auto` values stay `auto` here; `moco.pretrain` resolves them against the data and the machine and writes them down.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moco.errors import UserError

Auto = Literal["auto"]
Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Channels = Annotated[int, Field(gt=0, le=64)]
Strength = Annotated[float, Field(ge=0, le=1)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ViewSettings(_Settings):
    """How a random view of a picture is made"""

    crop_scale: tuple[float, float] = Field((0.2, 1.0), description="share of the picture's area that a crop takes")
    crop_ratio: tuple[float, float] = Field((3 / 4, 4 / 3), description="width : height of a crop")
    flip_probability: Probability = Field(0.5, description="chance of a left-right flip")
    jitter_probability: Probability = Field(0.8, description="chance that the colours are changed at all")
    brightness: Strength = Field(0.4, description="colour jitter: largest change of brightness")
    contrast: Strength = Field(0.4, description="colour jitter: largest change of contrast")
    saturation: Strength = Field(0.4, description="colour jitter: largest change of saturation")
    hue: Annotated[float, Field(ge=0, le=0.5)] = Field(0.1, description="colour jitter: largest turn of the hue circle")
    grayscale_probability: Probability = Field(0.2, description="chance that the colours are dropped")
    grayscale_first: bool = Field(False, description="drop colours before the jitter (v1) instead of after it (v2)")
    blur_probability: Probability = Field(0.5, description="chance of a Gaussian blur")
    blur_sigma: tuple[float, float] = Field((0.1, 2.0), description="standard deviation of the blur, in pixels")
    solarize_probability: Probability = Field(0.0, description="chance that bright pixels are inverted")
    gain: Strength = Field(
        0.0, description="largest change of each channel's intensity by itself, for pictures that are not photographs"
    )
    noise: Strength = Field(0.0, description="standard deviation of noise on every value, as a share of the full range")

    @model_validator(mode="after")
    def _ranges(self) -> ViewSettings:
        for name in ("crop_scale", "crop_ratio", "blur_sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} must be two numbers 0 < low ≤ high, not {low:g} {high:g}")
        if self.crop_scale[1] > 1:
            raise ValueError(f"crop_scale is a share of the area: at most 1, not {self.crop_scale[1]:g}")
        return self


class JobSettings(_Settings):
    """What, where to, and from where"""

    data: str | tuple[str, ...] = Field(
        "",
        description="folder of images at any depth; list of paths (.txt, .csv, .tsv); tar shards, such as "
        "data-{0000..0099}.tar or by URL; Parquet files; hf:NAME or a folder that save_to_disk wrote; .npz / .npy file "
        "of uint8 images; several of these are joined",
    )
    out: str = Field("", description="run folder to create (default: runs/RECIPE-DATA)")
    recipe: str = Field("v2", description="set of defaults to start from: v1, v2 or small (small images)")
    seed: int = Field(0, ge=0, lt=2**32, description="the one source of all random numbers")
    labels: str = Field(
        "auto",
        description="labels for the monitor, never for training: auto (those that come with the data, or the first "
        "folder level where the layout is clear), folder (the first level, or an error), none, or a .npy file",
    )
    cache: str = Field(
        "", description="folder for indices of tar shards and blocks of remote files (default: the user's cache folder)"
    )
    cache_gigabytes: Positive = Field(16.0, description="room for blocks of remote files in it")


class InputSettings(_Settings):
    """Pictures"""

    image_size: int = Field(224, gt=0, description="side of a view in pixels")
    channels: Auto | Channels = Field(
        "auto",
        description="channels of the encoder's input: 1, 3, 4 to keep transparency, or as many as the pictures have",
    )
    mean: Auto | tuple[float, ...] = Field(
        "auto",
        description="mean per channel of values 0 to 1; auto: measured on 1,000 of the pictures",
    )
    std: Auto | tuple[Positive, ...] = Field("auto", description="standard deviation per channel; auto as for mean")
    workers: Auto | Annotated[int, Field(ge=0)] = Field("auto", description="processes that decode and make views")
    views: Literal["auto", "image", "split", "batch"] = Field(
        "auto",
        description="where views are made. image: in the workers, one by one; split: crops in the workers, colours and "
        "blur a batch at a time on the training device; batch: all of it there (images held in memory as one array)",
    )
    max_bad: Probability = Field(
        0.01, description="share of the pictures that may be unreadable (10 at any rate) before the training stops"
    )
    key_view: Mapping[str, Any] | None = Field(
        None, description="view settings of the key where they differ from the query's, as {name: value}"
    )


class ModelSettings(_Settings):
    """Encoder and method"""

    backbone: str = Field("resnet50", description="encoder, any timm model name")
    base_width: int | None = Field(
        None,
        gt=0,
        description="channels of the first stage of a ResNet (64 in the usual ones); the others scale with it",
    )
    stem: Auto | Literal["imagenet", "small"] = Field(
        "auto", description="first layers of a ResNet: 7×7 stride 2 and pooling, or 3×3 stride 1 for small images"
    )
    head: Literal["linear", "mlp"] = Field("mlp", description="projection head: linear (v1) or two layers (v2)")
    feature_size: int = Field(128, gt=0, description="length of the vectors that are compared")
    queue_size: Auto | Annotated[int, Field(gt=0)] = Field("auto", description="keys in the dictionary (K)")
    queue_precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="how keys are kept; bf16 halves their memory and speeds large queues up"
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.999, description="how slowly the key encoder follows (m)")
    temperature: float = Field(0.2, gt=0, description="softmax temperature (τ)")
    symmetric: bool = Field(False, description="each view is query once and key once; both losses are averaged")
    bn_groups: Auto | Annotated[int, Field(gt=0)] = Field(
        "auto", description="parts in which a process's batch is normalised (split batch norm)"
    )
    shuffle_bn: Auto | bool = Field("auto", description="shuffle the keys across those parts, and across processes")


class TrainingSettings(_Settings):
    """Training"""

    epochs: int = Field(200, gt=0, description="passes over the data")
    batch_size: int = Field(256, gt=0, description="images per optimiser step, over all processes")
    accumulate: int = Field(1, gt=0, description="pieces in which a batch is computed, to save memory")
    learning_rate: float = Field(0.03, gt=0, description="at a batch of 256; scaled linearly with the batch size")
    sgd_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="momentum of the optimiser (SGD)")
    weight_decay: float = Field(1e-4, ge=0, description="L2 penalty")
    decay_norm_and_bias: bool = Field(True, description="weight decay on norm layers and biases too, as the authors do")
    schedule: Literal["cosine", "step"] = Field("cosine", description="how the learning rate falls")
    milestones: tuple[Probability, ...] = Field(
        (0.6, 0.8), description="step schedule: shares of the training after which the rate is divided by 10"
    )
    warmup_epochs: float = Field(0.0, ge=0, description="epochs of linearly rising learning rate")
    clip_gradient: float | None = Field(None, gt=0, description="largest norm of the gradient")


class MachineSettings(_Settings):
    """Machine, checks and records"""

    device: str = Field("auto", description="auto, cpu, mps, cuda or cuda:N")
    precision: Auto | Literal["fp32", "bf16", "fp16"] = Field(
        "auto", description="arithmetic of the encoders; the loss is always fp32"
    )
    threads: Auto | Annotated[int, Field(gt=0)] = Field("auto", description="CPU threads for training")
    compile: bool = Field(
        False, description="let torch.compile fuse the encoders: minutes of start-up, then faster steps on most GPUs"
    )
    monitor: Literal["auto", "knn", "retrieval", "none"] = Field(
        "auto",
        description="check after an epoch: knn (needs labels), retrieval (two views of an image find each other)",
    )
    monitor_every: int = Field(1, gt=0, description="epochs between two checks")
    monitor_images: int = Field(10_000, gt=1, description="pictures that a check encodes at most")
    log_every: int = Field(10, gt=0, description="steps between two lines of metrics.jsonl")
    log_gradient_norms: bool = Field(False, description="write the gradient norm of each layer with the metrics")
    checkpoint_every: int = Field(1, gt=0, description="epochs between two checkpoints")
    save_every: str = Field(
        "15min", description="checkpoints between those as well: after so many steps (500), minutes (15min), or none"
    )
    keep_checkpoints: int = Field(2, gt=0, description="checkpoints to keep; older ones are removed")
    on_nan: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="a loss or gradient that is no number: stop before it touches the weights, pass the step over, or "
        "go back to the last checkpoint and pass it over",
    )
    timeout: float = Field(10.0, gt=0, description="minutes that processes wait for each other before they give up")
    tensorboard: bool = Field(True, description="write the curves for TensorBoard as well")


class PretrainSettings(MachineSettings, TrainingSettings, ModelSettings, ViewSettings, InputSettings, JobSettings):
    """Everything `moco pretrain` can be told. The parts it is made of are the headings of its help."""

    @field_validator("save_every", mode="before")
    @classmethod
    def _save_every(cls, value: object) -> str:
        text = str(value)
        if not re.fullmatch(r"none|[1-9]\d*|\d+(\.\d+)?min", text):
            raise ValueError("must be a number of steps such as 500, of minutes such as 15min, or none")
        return text

    @property
    def save_steps(self) -> int | None:
        """Steps between two checkpoints, where they are counted so."""
        return int(self.save_every) if self.save_every.isdigit() else None

    @property
    def save_minutes(self) -> float | None:
        """Minutes between two checkpoints, where they are counted so."""
        return float(self.save_every.removesuffix("min")) if self.save_every.endswith("min") else None

    @field_validator("key_view")
    @classmethod
    def _key_view(cls, value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if value is not None:
            check_names(value, ViewSettings.model_fields, "view setting (in key_view)")
            try:
                ViewSettings(**value)
            except ValidationError as error:
                raise ValueError(explain(error)) from error
        return value

    @model_validator(mode="after")
    def _together(self) -> PretrainSettings:
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into accumulate {self.accumulate} equal pieces"
            )
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs:g} must be fewer than epochs {self.epochs}")
        return self

    @property
    def data_name(self) -> str:
        """What messages call the data."""
        return " + ".join([self.data] if isinstance(self.data, str) else self.data) or "the data"

    @property
    def query_views(self) -> ViewSettings:
        """The view settings of the query."""
        return ViewSettings(**{name: getattr(self, name) for name in ViewSettings.model_fields})

    @property
    def key_views(self) -> ViewSettings:
        """The view settings of the key: the query's, with `key_view` on top."""
        return ViewSettings(**(self.query_views.model_dump() | dict(self.key_view or {})))


class RunSettings(PretrainSettings):
    """The settings of a run: as chosen, with every `auto` replaced by what it came to."""

    channels: Channels
    mean: tuple[float, ...]
    std: tuple[float, ...]
    workers: Annotated[int, Field(ge=0)]
    views: Literal["image", "split", "batch"]
    stem: Literal["imagenet", "small"]
    queue_size: Annotated[int, Field(gt=0)]
    bn_groups: Annotated[int, Field(gt=0)]
    shuffle_bn: bool
    precision: Literal["fp32", "bf16", "fp16"]
    threads: Annotated[int, Field(gt=0)]
    monitor: Literal["knn", "retrieval", "none"]


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known name closest to `name`, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def check_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise UserError for the first given name that is not known."""
    known = list(known)
    for name in given:
        if name not in known:
            raise UserError(f"unknown {what} {name!r}{nearest(name, known)}")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML settings file. Raises UserError where there is none."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the settings file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the settings file {path} is not UTF-8 text: save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold `name: value` lines")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def explain(error: ValidationError) -> str:
    """The first problem of a pydantic error as one line: which setting, what was given, what is wrong."""
    first, *rest = error.errors()
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    # A field of several types has one error for each of them.
    others = [other["msg"].removeprefix("Input should be ") for other in rest if other["loc"][0] == first["loc"][0]]
    if first["type"] == "missing":
        return f"{first['loc'][0]} needs another value: {message[:1].lower()}{message[1:]}"
    return f"{first['loc'][0]} = {first['input']!r}: {' or '.join([message[:1].lower() + message[1:], *others])}"
