"""Pre-training as a scikit-learn transformer: `moco.MocoEncoder().fit(images).transform(images)`."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted

from moco.data.sources import Source, open_source
from moco.embedding.pictures import picture_batches
from moco.errors import UserError
from moco.evaluate.features import checked_features, encode
from moco.pretraining import pretrain
from moco.recipes import pretrain_settings
from moco.train.parallel import find_device

Array = np.ndarray[Any, Any]

DECIDED = ("out", "seed", "data", "recipe", "backbone", "epochs", "batch_size", "image_size", "device")
"""Settings that are parameters of the encoder, and so not among its `settings`."""


class MocoEncoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Pictures → features, learned from the pictures alone.

    `fit` pre-trains an encoder by Momentum Contrast; `transform` gives its features, (N, D) float32. X is an array of
    pictures, uint8 (N, H, W) or (N, H, W, C), a list of paths, a folder, or whatever else `moco.pretrain` takes; y is
    not looked at. The weights are in the fitted object, which can be pickled and copied without its run folder.

    Args:
        recipe: set of defaults to start from, as in `moco pretrain --recipe`.
        backbone: any timm model name, or a function that makes a module.
        epochs, image_size: passes over the data, and side of a view in pixels; None takes those of the recipe.
        batch_size: None takes that of the recipe, or all pictures where there are fewer.
        device: auto, cpu, mps, cuda or cuda:N.
        random_state: seed, numpy RandomState or None.
        out: run folder to create and keep; None trains in a temporary one.
        settings: any other fields of `moco.PretrainSettings`, as {name: value}.
        verbose: show the progress of the training.

    Attributes:
        backbone_: the trained network, in eval mode on the CPU. settings_: all settings of the run.
        run_: path of the run folder, or None.

    >>> encoder = moco.MocoEncoder(epochs=20, random_state=0)
    >>> model = make_pipeline(encoder, LogisticRegression()).fit(images, labels)

    `fit` and `transform` raise `moco.UserError`, a ValueError, for pictures and settings that do not go.
    """

    def __init__(
        self,
        recipe: str = "small",
        backbone: Any = "resnet18",
        *,
        epochs: int | None = None,
        image_size: int | None = None,
        batch_size: int | None = None,
        device: str = "auto",
        random_state: int | np.random.RandomState | None = None,
        out: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        self.recipe = recipe
        self.backbone = backbone
        self.epochs = epochs
        self.image_size = image_size
        self.batch_size = batch_size
        self.device = device
        self.random_state = random_state
        self.out = out
        self.settings = settings
        self.verbose = verbose

    def fit(self, X: Any, y: object = None) -> Self:
        """Pre-train on pictures."""
        source = open_source(X, "none")
        if len(source) < 2:
            raise UserError("n_samples = 1: one picture has no others to be told from")
        given = self._given()
        if self.batch_size is None:
            usual = pretrain_settings(**{name: value for name, value in given.items() if not callable(value)})
            given["batch_size"] = min(usual.batch_size, len(source))
        with tempfile.TemporaryDirectory(prefix="moco-") as temporary:
            out = Path(temporary) / "run" if self.out is None else Path(self.out)
            run = pretrain(X, out=str(out), labels="none", quiet=not self.verbose, **given)
            self.backbone_ = run.backbone()
            self.settings_ = run.settings
        self.run_ = None if self.out is None else str(self.out)
        self._n_features_out = self._encoded(source, np.arange(1)).shape[1]
        return self

    def transform(self, X: Any) -> Array:
        """The features of pictures, (N, D) float32; a row of NaN, and a warning, for one that cannot be read."""
        check_is_fitted(self)
        source = open_source(X, "none")
        return self._encoded(source, np.arange(len(source)))

    def _given(self) -> dict[str, Any]:
        """What the parameters say, as settings of a training."""
        others = dict(self.settings or {})
        for name in DECIDED:
            if name in others:
                raise UserError(f"settings: {name} is a parameter of MocoEncoder itself (seed is random_state)")
        seed = int(check_random_state(self.random_state).randint(2**31))
        given = {"recipe": self.recipe, "backbone": self.backbone, "device": self.device, "seed": seed}
        chosen = {"epochs": self.epochs, "image_size": self.image_size, "batch_size": self.batch_size}
        given |= {name: value for name, value in chosen.items() if value is not None}
        return {"monitor": "none", "tensorboard": False} | others | given

    def _encoded(self, source: Source, indices: Array) -> Array:
        settings, device = self.settings_, find_device(self.device)
        rows = []
        network = self.backbone_.to(device)
        for batch in picture_batches(source, indices, size=settings.image_size, channels=settings.channels, workers=0):
            features = encode(network, [batch.pictures], mean=settings.mean, std=settings.std, device=device)
            rows.append(checked_features(features, "the features").numpy())
            rows[-1][list(batch.unreadable)] = np.nan
            for row, reason in batch.unreadable.items():
                warnings.warn(f"{batch.names[row]} cannot be read ({reason}): its row is NaN", stacklevel=3)
        self.backbone_.to("cpu")
        return np.concatenate(rows)

    def __sklearn_tags__(self) -> Tags:
        """Pictures have three or four dimensions, and are not rows of numbers."""
        tags: Tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        tags.transformer_tags.preserves_dtype = []
        tags.non_deterministic = self.random_state is None
        return tags
