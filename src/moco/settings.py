"""What a user may choose: one field = one flag = one YAML key. Frozen, validated, free of torch.

Values come in layers, the later ones win: defaults of the class, the recipe, the YAML file, the flags.
`auto` values stay `auto` here; `moco.pretrain` resolves them against the data and the machine and writes them down.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from moco.errors import check_names as check_names
from moco.errors import explain as explain
from moco.errors import nearest as nearest
from moco.view_settings import Probability, Settings
from moco.view_settings import ViewSettings as ViewSettings

Auto = Literal["auto"]
Positive = Annotated[float, Field(gt=0)]
Channels = Annotated[int, Field(gt=0, le=64)]


class JobSettings(Settings):
    """What, where to, and from where"""

    data: str | tuple[str, ...] = Field(
        "",
        description="folder of images at any depth; list of paths (.txt, .csv, .tsv); tar shards, such as "
        "data-{0000..0099}.tar or by URL; Parquet files; hf:NAME or a folder that save_to_disk wrote; .npz / .npy file "
        "of uint8 images; several of these are joined",
    )
    out: str = Field("", description="run folder to create (default: runs/RECIPE-DATA)")
    recipe: str = Field(
        "v2", description="set of defaults to start from: v1, v2, v3, small (small images), or a method by its name"
    )
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


class InputSettings(Settings):
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
    repeat: int = Field(
        1, gt=0, description="how often each picture occurs in an epoch, each time with other views: for small data"
    )
    workers: Auto | Annotated[int, Field(ge=0)] = Field("auto", description="processes that decode and make views")
    views: Literal["auto", "image", "split", "batch", "custom"] = Field(
        "auto",
        description="where views are made. image: in the workers, one by one; split: crops in the workers, colours and "
        "blur a batch at a time on the training device; batch: all of it there (images held in memory as one array); "
        "custom: by a function handed over in Python",
    )
    max_bad: Probability = Field(
        0.01, description="share of the pictures that may be unreadable (10 at any rate) before the training stops"
    )
    key_view: Mapping[str, Any] | None = Field(
        None, description="view settings of the key where they differ from the query's, as {name: value}"
    )


class ModelSettings(Settings):
    """Encoder and method"""

    method: Literal["moco", "simclr", "byol", "swav", "cpc"] = Field(
        "moco",
        description="what is learned from two views; brings its own head, temperature and the like (docs/methods.md)",
    )
    backbone: str = Field(
        "resnet50", description="encoder, any timm model name; in Python also a function that makes a module"
    )
    init: str = Field(
        "",
        description="weights that the backbone starts from: timm (the published ones, where they are on this machine), "
        "a run, or a file (.pt, .pth, .safetensors) of moco, the authors, lightly, solo-learn, torchvision or timm",
    )
    allow_partial: bool = Field(False, description="init: take what fits, where not all of the weights do")
    trust_pickle: bool = Field(
        False, description="init: let a file make Python objects, which can run any program: for files of your own only"
    )
    base_width: int | None = Field(
        None,
        gt=0,
        description="channels of the first stage of a ResNet (64 in the usual ones); the others scale with it",
    )
    stem: Auto | Literal["imagenet", "small"] = Field(
        "auto", description="first layers of a ResNet: 7×7 stride 2 and pooling, or 3×3 stride 1 for small images"
    )
    vit_rules: Literal["timm", "v3"] = Field(
        "timm",
        description="vision transformers: as timm makes them, or with the fixed positions, the frozen patch projection "
        "and the heads of v3",
    )
    keep_tokens: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="vision transformers: part of the patches that is seen while training; fewer are faster"
    )
    head: Literal["linear", "mlp", "mlp-bn"] = Field(
        "mlp", description="projection head: linear (v1), layers with ReLU (v2), or with batch norm as well (v3)"
    )
    head_layers: Annotated[int, Field(ge=2)] = Field(2, description="layers of a head that is not linear")
    head_width: Auto | Annotated[int, Field(gt=0)] = Field(
        "auto", description="width between the layers of head and predictor (auto: that of the backbone's features)"
    )
    head_last_norm: bool = Field(True, description="head mlp-bn: batch norm behind the last layer too")
    predictor_layers: int = Field(
        0, ge=0, description="moco, byol: layers of a predictor behind the head, for queries only (v3)"
    )
    predictor_last_norm: bool = Field(False, description="batch norm behind the last layer of the predictor too")
    feature_size: int = Field(128, gt=0, description="length of the vectors that are compared")
    dictionary: Literal["queue", "in-batch", "memory-bank"] = Field(
        "queue", description="moco: where the keys come from: older batches, the same batch, or one vector per picture"
    )
    key_encoder: Literal["momentum", "learned", "shared"] = Field(
        "momentum",
        description="moco: what encodes keys, an encoder that follows, one that learns as well, or the query encoder",
    )
    bank_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.5, description="memory bank: how slowly the vector of a picture changes"
    )
    bank_on_disk: bool = Field(False, description="memory bank: keep the vectors in a file of the run folder (CPU)")
    queue_size: Auto | Annotated[int, Field(gt=0)] = Field(
        "auto", description="keys in the dictionary (K); swav: features of earlier steps that help to find the clusters"
    )
    queue_precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="how keys are kept; bf16 halves their memory and speeds large queues up"
    )
    momentum: Auto | Annotated[float, Field(ge=0, lt=1)] = Field(
        "auto",
        description="moco, byol: how slowly the key encoder follows (m); auto: 0.999, less for under 5,000 steps of "
        "training (1 − 5 / steps), so that it can follow at all",
    )
    momentum_schedule: Literal["constant", "cosine"] = Field(
        "constant", description="whether m stays, or rises to 1 by half a cosine (v3)"
    )
    temperature: float = Field(0.2, gt=0, description="softmax temperature (τ)")
    scale_loss: bool = Field(False, description="each term of the loss times 2τ, the terms summed (v3)")
    symmetric: bool = Field(False, description="each view is query once and key once; both losses are averaged")
    bn_groups: Auto | Annotated[int, Field(gt=0)] = Field(
        "auto", description="moco: parts in which a process's batch is normalised (split batch norm)"
    )
    shuffle_bn: Auto | bool = Field("auto", description="moco: shuffle the keys across those parts, and processes")
    sync_bn: bool = Field(False, description="one batch norm over all CUDA devices, where there are several (v3)")


class MethodSettings(Settings):
    """Hard negatives (moco with a queue), swav and cpc"""

    hard_negatives: int = Field(0, ge=0, description="keys closest to a query that harder ones are mixed from (MoCHi)")
    mixed_pairs: int = Field(0, ge=0, description="negatives mixed from two of those keys, for each query")
    mixed_with_query: int = Field(0, ge=0, description="negatives mixed from one of them and the query itself")
    hard_weight: float = Field(0.0, ge=0, description="how much more the hard negatives count (β); 0: as the others")
    hard_from: float = Field(0.0, ge=0, description="epochs before any of these four begins")
    prototypes: int = Field(3000, gt=1, description="swav: clusters")
    sinkhorn_epsilon: Positive = Field(0.05, description="swav: how soft the assignment to clusters is (ε)")
    freeze_prototypes: float = Field(1.0, ge=0, description="swav: epochs in which the prototypes stay as they are")
    queue_from: float = Field(15.0, ge=0, description="swav: epochs before its queue takes part")
    small_crops: int = Field(
        0, ge=0, description="swav: further, smaller views of each picture, which only predict (multi-crop)"
    )
    small_crop_size: Auto | Annotated[int, Field(gt=0)] = Field(
        "auto", description="side of these in pixels (auto: 3/7 of image_size, as the paper's 96 of 224)"
    )
    small_crop_scale: tuple[float, float] = Field(
        (0.05, 0.14), description="share of the picture's area that they take; their colours are the query's"
    )
    patch_share: Annotated[float, Field(gt=0, le=0.5)] = Field(
        0.25, description="cpc: side of a patch as a part of the picture's; patches lie half of it apart"
    )


class TrainingSettings(Settings):
    """Training"""

    epochs: int = Field(200, gt=0, description="passes over the data")
    batch_size: int = Field(256, gt=0, description="images per optimiser step, over all processes")
    accumulate: int = Field(1, gt=0, description="pieces in which a batch is computed, to save memory")
    optimizer: Literal["sgd", "lars", "adamw"] = Field("sgd", description="how weights are changed by gradients")
    learning_rate: float = Field(0.03, gt=0, description="at a batch of 256; scaled linearly with the batch size")
    sgd_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="momentum of the optimiser (SGD, LARS)")
    weight_decay: float = Field(1e-4, ge=0, description="L2 penalty; with adamw, decay apart from the gradient")
    decay_norm_and_bias: bool = Field(True, description="weight decay on norm layers and biases too, as the authors do")
    schedule: Literal["cosine", "step"] = Field("cosine", description="how the learning rate falls")
    milestones: tuple[Probability, ...] = Field(
        (0.6, 0.8), description="step schedule: shares of the training after which the rate is divided by 10"
    )
    warmup_epochs: Auto | Annotated[float, Field(ge=0)] = Field(
        "auto",
        description="epochs of linearly rising learning rate; auto: none with sgd, a tenth of all but at most 10 with "
        "lars, 2 of 15 but at most 40 with adamw",
    )
    clip_gradient: float | None = Field(None, gt=0, description="largest norm of the gradient")


class MachineSettings(Settings):
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
    wandb: str = Field(
        "", description="project of Weights & Biases that gets the curves too; WANDB_MODE=offline keeps them in the run"
    )
    mlflow: str = Field(
        "",
        description="experiment of MLflow that gets the curves too, at MLFLOW_TRACKING_URI, else in RUN/mlflow",
    )


class PretrainSettings(
    MachineSettings, TrainingSettings, MethodSettings, ModelSettings, ViewSettings, InputSettings, JobSettings
):
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

    @field_validator("small_crop_scale")
    @classmethod
    def _small_crop_scale(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1] <= 1:
            raise ValueError("must be two numbers 0 < low ≤ high ≤ 1")
        return value

    @model_validator(mode="after")
    def _together(self) -> PretrainSettings:
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into accumulate {self.accumulate} equal pieces"
            )
        if self.key_encoder != "momentum" and self.dictionary != "in-batch":
            raise ValueError(
                f"key_encoder {self.key_encoder} goes with --dictionary in-batch: gradients cannot reach the keys of "
                f"a {self.dictionary}"
            )
        if (self.hard_negatives > 0) != (self.mixed_pairs + self.mixed_with_query > 0):
            raise ValueError(
                "hard_negatives go with mixed_pairs or mixed_with_query: keys to mix, and how many mixtures"
            )
        if (self.hard_negatives or self.hard_weight) and (self.method, self.dictionary) != ("moco", "queue"):
            raise ValueError("hard_negatives and hard_weight are for --method moco with --dictionary queue")
        if self.warmup_epochs != "auto" and self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs:g} must be fewer than epochs {self.epochs}")
        if self.small_crops and self.views == "custom":
            raise ValueError("small_crops are not made by a function of views: set small_crops to 0")
        return self

    @property
    def data_name(self) -> str:
        """What messages call the data."""
        return " + ".join([self.data] if isinstance(self.data, str) else self.data) or "the data"

    @property
    def hidden_width(self) -> int | None:
        """Width between the layers of the head, or None for that of the features (in the runs of version 0.1)."""
        return None if self.head_width == "auto" else self.head_width

    @property
    def query_views(self) -> ViewSettings:
        """The view settings of the query."""
        return ViewSettings(**{name: getattr(self, name) for name in ViewSettings.model_fields})

    @property
    def key_views(self) -> ViewSettings:
        """The view settings of the key: the query's, with `key_view` on top."""
        return ViewSettings(**(self.query_views.model_dump() | dict(self.key_view or {})))

    @property
    def small_views(self) -> tuple[ViewSettings, ...]:
        """The view settings of the small crops, one for each."""
        return self.small_crops * (self.query_views.model_copy(update={"crop_scale": self.small_crop_scale}),)

    @property
    def small_size(self) -> int:
        """Side of the small crops in pixels."""
        return max(round(self.image_size * 3 / 7), 1) if self.small_crop_size == "auto" else self.small_crop_size


class RunSettings(PretrainSettings):
    """The settings of a run: as chosen, with every `auto` replaced by what it came to."""

    channels: Channels
    mean: tuple[float, ...]
    std: tuple[float, ...]
    workers: Annotated[int, Field(ge=0)]
    views: Literal["image", "split", "batch", "custom"]
    stem: Literal["imagenet", "small"]
    queue_size: Annotated[int, Field(gt=0)]
    momentum: Annotated[float, Field(ge=0, lt=1)]
    warmup_epochs: Annotated[float, Field(ge=0)]
    bn_groups: Annotated[int, Field(gt=0)]
    shuffle_bn: bool
    precision: Literal["fp32", "bf16", "fp16"]
    threads: Annotated[int, Field(gt=0)]
    monitor: Literal["knn", "retrieval", "none"]
    # By how many processes it was last trained, to which bn_groups and shuffle_bn belong; not known of old runs.
    processes: Annotated[int, Field(gt=0)] | None = None
