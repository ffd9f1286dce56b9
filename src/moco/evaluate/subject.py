"""What is evaluated: the newest checkpoint of a run, one checkpoint file, or a timm model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from torch import nn

from moco.contrast.encoders import build_backbone
from moco.errors import UserError
from moco.settings import RunSettings, nearest
from moco.train.checkpoints import read
from moco.train.run import SETTINGS, Run, backbone_of, query_backbone_weights

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


@dataclass(frozen=True)
class Where:
    """A subject found but not loaded. name: as given. run, checkpoint: where it is; timm: or a model of that name."""

    name: str
    run: Run | None = None
    checkpoint: Path | None = None
    timm: str = ""


@dataclass(frozen=True)
class Subject:
    """A network to evaluate and how its pictures are prepared.

    label: what its row in a table is called. backbone: (N, channels, size, size) → (N, D), in eval mode. untrained:
    makes the same network from a seed (None: the one it was born from), or None where the subject itself is untrained.
    mean, std: per channel, on the scale 0 to 1. step: optimiser steps of its training, or None.
    """

    label: str
    backbone: nn.Module
    untrained: Callable[[int | None], nn.Module] | None
    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    settings: RunSettings | None
    step: int | None


def locate(name: str | Path | Run) -> Where:
    """Find a run folder, a checkpoint file in one, or a timm model. Raises UserError where it is none of them."""
    if isinstance(name, Run):
        return Where(str(name.path), run=name)
    path, text = Path(name).expanduser(), str(name)
    if path.is_dir():
        return Where(text, run=Run(path))
    if path.is_file():
        folder = next((folder for folder in path.absolute().parents[:2] if (folder / SETTINGS).is_file()), None)
        if folder is None:
            raise UserError(f"{path} is not in a run folder (RUN/checkpoints/): its {SETTINGS} says what network it is")
        return Where(text, run=Run(folder), checkpoint=path)
    known = timm.list_models()
    if text.partition(".")[0] in known:
        return Where(text, timm=text)
    if os.sep in text:  # no timm name looks like that
        raise UserError(f"{text} is no run folder, checkpoint file or timm model: there is no such file or folder")
    raise UserError(f"{text} is no run folder, checkpoint file or timm model{nearest(text, known)}")


def checkpoint_of(where: Where, notes: list[str] | None = None) -> dict[str, object]:
    """The checkpoint that is meant: the file, or the newest whole one of the run. Raises UserError.

    notes: gets a line, once, where newer ones are damaged; without it that is a warning of Python.
    """
    assert where.run is not None
    if where.checkpoint is None:
        if notes is None:
            return where.run.load()
        newest, damaged = where.run.load_beside_damaged()
        if damaged:
            names = " and ".join(path.name for path in damaged)
            note = f"{names} {'is' if len(damaged) == 1 else 'are'} damaged; the figures are of step {newest['step']}"
            if note not in notes:
                notes.append(note)
        return newest
    state = read(where.checkpoint)
    if state is None or "model" not in state:
        raise UserError(f"{where.checkpoint} is damaged, or no checkpoint of moco")
    return state


def load_run(where: Where, notes: list[str] | None = None) -> Subject:
    """The query backbone of a run, and how its pictures are prepared. notes: as for `checkpoint_of`."""
    assert where.run is not None
    settings = where.run.settings
    state = checkpoint_of(where, notes)
    weights = state["model"]
    assert isinstance(weights, dict)
    backbone = backbone_of(settings)
    try:
        backbone.load_state_dict(query_backbone_weights(weights))
    except RuntimeError as error:
        raise UserError(
            f"{where.name} does not fit the network in {SETTINGS}: {str(error).split(chr(10))[0]}"
        ) from error
    step = state.get("step")
    return Subject(
        "pre-trained",
        backbone.eval(),
        lambda seed: _born(lambda: backbone_of(settings), settings.seed if seed is None else seed),
        settings.image_size,
        settings.channels,
        settings.mean,
        settings.std,
        settings,
        step if isinstance(step, int) else None,
    )


def load_timm(
    where: Where,
    *,
    channels: int | None,
    picture_side: int | None,
    image_size: int | None,
    pretrained: bool,
    seed: int,
    notes: list[str],
) -> Subject:
    """A timm model, with random weights or with its published ones where they lie on this machine.

    channels, picture_side: of the pictures, where known. image_size: what was asked for; else that of the published
    weights, or for random ones the side of the pictures up to 224. notes: gets a line where weights are random.
    Raises UserError where weights are not here.
    """
    name = where.timm
    if pretrained:
        config = timm.models.get_pretrained_cfg(name)
        if config is None or not config.has_weights:
            raise UserError(f"timm has no published weights for {name}: leave --pretrained away")
        overlay = {"file": str(published_weights(name, config))}
        model = timm.create_model(name, pretrained=True, num_classes=0, pretrained_cfg_overlay=overlay)
        size = image_size or int(config.input_size[-1])

        def untrained(other: int | None) -> nn.Module:
            return _born(lambda: timm.create_model(name, num_classes=0), seed if other is None else other)

        return Subject(name, model.eval(), untrained, size, 3, tuple(config.mean), tuple(config.std), None, None)
    notes.append(f"{name} has random weights: --pretrained takes published ones, where they are on this machine")
    size = image_size or min(picture_side or 224, 224)
    channels = channels if channels in (1, 3) else 3
    name = name.partition(".")[0]
    model = _born(lambda: build_backbone(name, channels=channels, image_size=size), seed)
    mean, std = (MEAN, STD) if channels == 3 else ((0.5,), (0.25,))
    return Subject(f"{name}, untrained", model, None, size, channels, mean, std, None, None)


def _born(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network from the seed, in eval mode; the global random numbers go on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def published_weights(name: str, config: object) -> Path:
    """The published weights of a timm model on this machine: in the cache of Hugging Face or of torch.hub.

    config: timm's entry for it. Raises UserError where they are not here; nothing is fetched.
    """
    from huggingface_hub import try_to_load_from_cache

    repository, url = str(getattr(config, "hf_hub_id", None) or ""), getattr(config, "url", None)
    for file in ("model.safetensors", "pytorch_model.bin") if "/" in repository else ():
        found = try_to_load_from_cache(repository, file)
        if isinstance(found, str):
            return Path(found)
    if url:
        path = Path(torch.hub.get_dir()) / "checkpoints" / str(url).rsplit("/", 1)[-1]
        if path.is_file():
            return path
    raise UserError(
        f"the published weights of {name} are not on this machine: fetch them once with "
        f"timm.create_model({name!r}, pretrained=True), or start without them"
    )
