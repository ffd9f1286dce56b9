"""`moco import`: a foreign checkpoint becomes a run folder, to evaluate, to export and, with all parts, to continue."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console
from torch import nn

from moco.building import build_model
from moco.contrast.batchnorm import has_batchnorm
from moco.contrast.encoders import feature_width
from moco.data.loader import cores
from moco.errors import UserError, counted
from moco.evaluate.subject import MEAN, STD
from moco.interop.architecture import Architecture, architecture_of
from moco.interop.continuing import Parts, fill, restore_momentum, training_parts
from moco.interop.layouts import DESCRIPTIONS
from moco.interop.loading import LoadReport, load_backbone
from moco.interop.network import PREPARATION
from moco.interop.reading import ForeignWeights, read_weights
from moco.interop.whole import whole_folder
from moco.recipes import pretrain_settings
from moco.resolve import WARMUP
from moco.settings import PretrainSettings, RunSettings, check_names, explain
from moco.settings_file import read_yaml
from moco.train.checkpoints import FORMAT
from moco.train.optim import make_optimizer
from moco.train.parallel import best_precision, find_device
from moco.train.run import QUERY_BACKBONE, Run, check_new


@dataclass(frozen=True)
class Import:
    """What an import came to.

    run: the new run. weights: which of the backbone's matched. continues: whether `moco resume` goes on from here.
    epochs: how many the file has behind it. notes: what one should know, a line each.
    """

    run: Run
    weights: LoadReport
    continues: bool
    epochs: int
    notes: tuple[str, ...]


def import_run(
    file: str | Path,
    *,
    out: str | Path,
    config: str | Path | None = None,
    allow_partial: bool = False,
    trust_pickle: bool = False,
    quiet: bool = False,
    **given: Any,
) -> Import:
    """Make a run folder `out` from a file of weights: see docs/interop.md for the layouts that are known.

    config, given: settings of a training, as for `moco.pretrain`; those that the file decides (the network, the head,
    the queue) cannot be others. allow_partial: take what fits where not all does. trust_pickle: see `read_weights`.
    Raises UserError, with nothing left behind, where the file cannot be read or does not fit.
    """
    check_new(out)
    found = read_weights(file, trust_pickle=trust_pickle)
    if found.layout == "moco":
        raise UserError(f"{file} is a checkpoint of this package: moco resume RUN, or moco pretrain DATA --init {file}")
    chosen = _prepared(found.path) | (read_yaml(config) if config else {}) | given
    check_names(chosen, PretrainSettings.model_fields, "setting")
    if "init" in chosen:
        raise UserError("--init goes with moco pretrain: an import has its weights from FILE")
    network = _network(found, chosen)
    backbone = network.build()
    report = load_backbone(backbone, found, allow_partial=allow_partial)
    parts = training_parts(found) if report.complete else "not all of its weights fitted"
    settings, notes = _settings(found, network, backbone, parts, chosen, str(out))
    model: nn.Module | None = None
    if isinstance(parts, Parts):
        model = build_model(settings)
        parts = fill(model, parts) or parts
    obstacle = parts if isinstance(parts, str) else None
    if obstacle is not None:
        width = "" if settings.base_width is None else f" --base-width {settings.base_width}"
        stem = " --stem small" if settings.stem == "small" else ""
        notes.append(
            f"it can be evaluated and exported, not continued ({obstacle}); to train on from its backbone: "
            f"moco pretrain DATA --backbone {settings.backbone}{stem}{width} --init {file}"
        )
    with whole_folder(Path(out)) as folder:
        state: dict[str, Any] = {"format": FORMAT, "step": 0, "images": None, "epochs": _epochs(found), "best": False}
        if model is None or isinstance(parts, str):
            state["model"] = {QUERY_BACKBONE + name: value for name, value in backbone.state_dict().items()}
        else:
            state |= _training_state(found, settings, model, parts, notes)
        Run.create(folder, settings).save(state, settings.keep_checkpoints)
        _verify(Run(folder), backbone)
    if found.left_out:
        notes.append(f"not read, and not needed: objects of {', '.join(found.left_out)}")
    result = Import(Run(out), report, obstacle is None, _epochs(found), tuple(notes))
    if not quiet:
        _show(result, found, settings)
    return result


def _prepared(file: Path) -> dict[str, Any]:
    """How pictures are prepared for weights that `moco export` wrote, from what it put beside them."""
    try:
        held = json.loads((file.parent / PREPARATION).read_text(encoding="utf-8"))
        return {"mean": tuple(held["mean"]), "std": tuple(held["std"]), "image_size": int(held["image_size"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _network(found: ForeignWeights, chosen: Mapping[str, Any]) -> Architecture:
    """The network in the file; a ResNet takes pictures of any size, so theirs may be chosen."""
    name = chosen.get("backbone")
    network = architecture_of(found, None if name is None else str(name))
    if "image_size" in chosen and not network.backbone.startswith("vit_"):
        network = replace(network, image_size=int(chosen["image_size"]))
    return network


def _settings(
    found: ForeignWeights,
    network: Architecture,
    backbone: nn.Module,
    parts: Parts | str,
    chosen: Mapping[str, Any],
    out: str,
) -> tuple[RunSettings, list[str]]:
    """The settings of the run, and notes about them. Raises UserError where what was chosen contradicts the file."""
    fixed = _fixed(network, parts)
    for name in set(chosen) & set(fixed):
        if chosen[name] != fixed[name]:
            raise UserError(f"{name} {chosen[name]} cannot be chosen: {found.path} has {fixed[name]}")
    settings = pretrain_settings(None, **({"recipe": _recipe(parts)} | dict(chosen) | fixed))
    notes = [f"what the file does not say about the training is as in recipe {settings.recipe}"]
    values = _resolved(settings, network, backbone) | {"out": out}
    if "epochs" not in chosen:
        values["epochs"] = max(settings.epochs, _epochs(found))
    if settings.mean == "auto":
        notes.append("mean and std are those of ImageNet; where the pictures were normalised otherwise: --mean, --std")
    if found.layout == "solo-learn" and network.stem == "small":
        notes.append("solo-learn pads the first layer of its small ResNets by 2 pixels, this package by 1")
    try:
        return RunSettings(**(settings.model_dump() | values)), notes
    except ValidationError as error:
        raise UserError(explain(error)) from error


def _fixed(network: Architecture, parts: Parts | str) -> dict[str, Any]:
    """The settings that the file decides."""
    values: dict[str, Any] = {
        "backbone": network.backbone,
        "channels": network.channels,
        "image_size": network.image_size,
    }
    if network.is_resnet:
        values |= {"stem": network.stem, "base_width": network.base_width}
    else:
        values |= {"vit_rules": network.vit_rules}
    if isinstance(parts, str):
        return values
    head, predictor = parts.head, parts.predictor
    values |= {"method": "moco", "head": head.kind, "feature_size": head.feature_size}
    if head.hidden is not None:
        values |= {"head_width": head.hidden, "head_layers": head.layers}
    if head.kind == "mlp-bn":
        values |= {"head_last_norm": head.last_norm}
    values |= {"predictor_layers": 0 if predictor is None else predictor.layers}
    if predictor is not None:
        values |= {"predictor_last_norm": predictor.last_norm}
    if parts.queue is not None:
        values |= {"dictionary": "queue", "queue_size": len(parts.queue[0])}
    return values


def _recipe(parts: Parts | str) -> str:
    if isinstance(parts, str):
        return "v2"
    if parts.predictor is not None:
        return "v3"
    return "v1" if parts.head.kind == "linear" else "v2"


def _resolved(settings: PretrainSettings, network: Architecture, backbone: nn.Module) -> dict[str, Any]:
    """What `auto` means where the pictures are not known: as in `moco.resolve`, for one process of this machine."""
    if network.channels != 3 and "auto" in (settings.mean, settings.std):
        raise UserError(
            f"these weights take {counted(network.channels, 'channel')}: name what their pictures were normalised "
            "with, --mean … --std … (one number per channel, of values 0 to 1)"
        )
    device, normalised = find_device(settings.device), has_batchnorm(backbone)
    on_cpu = device.type == "cpu"
    usual = max(1, min(8, settings.batch_size // settings.accumulate // 16)) if normalised else 1
    groups = usual if settings.bn_groups == "auto" else settings.bn_groups
    share, most = WARMUP[settings.optimizer]
    meaning: dict[str, Any] = {
        "mean": MEAN,
        "std": STD,
        "stem": network.stem,
        "workers": min(cores(), 2 if on_cpu else 16),
        "views": "image" if on_cpu else "split",
        "precision": best_precision(device),
        "threads": cores(),
        "monitor": "retrieval",
        "queue_size": 65_536,
        "momentum": 0.999,
        "warmup_epochs": min(round(share * settings.epochs, 2), most),
        "bn_groups": groups,
        "shuffle_bn": normalised and groups > 1,
        "head_width": feature_width(backbone, network.channels, network.image_size),
    }
    return {name: value for name, value in meaning.items() if getattr(settings, name) == "auto"}


def _training_state(
    found: ForeignWeights, settings: RunSettings, model: nn.Module, parts: Parts, notes: list[str]
) -> dict[str, Any]:
    """What a checkpoint holds beside the counts. Its pictures are not known: the training that goes on counts them."""
    optimizer = make_optimizer(model, settings)
    if not restore_momentum(optimizer, model, found):
        notes.append("the optimiser starts anew: the file has no state of it that fits")
    if settings.dictionary == "queue" and parts.queue is None:
        notes.append("the queue starts anew, with random vectors: the file has none, so the loss rises at first")
    scaler = torch.amp.GradScaler("cpu", enabled=settings.precision == "fp16")
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}


def _epochs(found: ForeignWeights) -> int:
    """Epochs that the file has behind it. The authors count them; Lightning numbers the last one from 0."""
    epoch = found.meta.get("epoch")
    if not isinstance(epoch, (int, float)) or not math.isfinite(epoch) or epoch < 0:
        return 0
    return int(epoch) + ("pytorch-lightning_version" in found.meta)


def _verify(run: Run, backbone: nn.Module) -> None:
    """Read the new run back: the same features, or AssertionError, which is a fault of this package."""
    settings = run.settings
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(2, settings.channels, settings.image_size, settings.image_size, generator=generator)
    with torch.no_grad():
        assert torch.equal(run.backbone()(pictures), backbone.eval()(pictures)), "the run differs from the file"


def _show(result: Import, found: ForeignWeights, settings: RunSettings) -> None:
    console = Console(soft_wrap=True)
    stem = f", stem {settings.stem}" if settings.stem == "small" else ""
    lines = [
        f"{found.path}: {DESCRIPTIONS[found.layout]}",
        f"{settings.backbone}, {counted(settings.channels, 'channel')}, {settings.image_size} pixels{stem}, "
        f"{counted(result.epochs, 'epoch')} behind it: {result.weights}",
        *result.notes,
        f"run folder: {result.run.path}",
    ]
    if result.continues:
        lines.append(f"go on with: moco resume {result.run.path} --data DATA --epochs {_more(result.epochs, settings)}")
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _more(epochs: int, settings: RunSettings) -> int:
    return settings.epochs if settings.epochs > epochs else epochs + 100
