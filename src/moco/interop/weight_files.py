"""Exports that are weights for a network that another library makes: safetensors, timm, torchvision, Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
import torchvision
from torch import Tensor, nn

from moco.errors import UserError
from moco.interop.network import SELF_CONTAINED, Network
from moco.interop.quiet import quiet

WEIGHTS, HEAD, STATE = "model.safetensors", "head.safetensors", "backbone.pth"


def write_safetensors(network: Network, folder: Path) -> list[str]:
    """Tensors and text, nothing else: timm's names, for timm's model or, where it cannot make it, this package's."""
    about = {"format": "pt", "architecture": network.name, "preparation": json.dumps(network.preparation())}
    safetensors.torch.save_file(_tensors(network.backbone), folder / WEIGHTS, metadata=about)
    try:
        making = _made_by_timm(network)
    except UserError:  # timm cannot make it
        settings = network.settings
        making = [
            "from moco.contrast.encoders import build_backbone",
            f"model = build_backbone({network.name!r}, channels={settings.channels}, stem={settings.stem!r}, "
            f"base_width={settings.base_width}, image_size={settings.image_size})",
        ]
    return [*making, _filled("model", WEIGHTS), *_head_lines(network, folder), "model.eval()"]


def write_timm(network: Network, folder: Path) -> list[str]:
    """Weights that timm.create_model's module takes with strict=True."""
    making = _made_by_timm(network)
    safetensors.torch.save_file(_tensors(network.backbone), folder / WEIGHTS)
    return [*making, _filled("model", WEIGHTS), *_head_lines(network, folder), "model.eval()"]


def write_torchvision(network: Network, folder: Path) -> list[str]:
    """A state_dict that torchvision's ResNet, without its classifier, takes with strict=True."""
    known = network.is_resnet and network.name in torchvision.models.list_models(torchvision.models)
    if network.settings.base_width not in (None, 64):
        raise UserError(
            f"torchvision cannot make a ResNet of base_width {network.settings.base_width}: {SELF_CONTAINED}"
        )
    if not known:
        raise UserError(
            f"torchvision has no {network.name} of this kind (its ResNets are resnet18 … resnet152, resnext… and "
            f"wide_resnet…): --to timm, or {SELF_CONTAINED}"
        )
    torch.save(_tensors(network.backbone), folder / STATE)
    return [
        "import torchvision",
        f"model = torchvision.models.{network.name}()",
        "model.fc = torch.nn.Identity()",
        *_stem_lines(network, always=network.settings.channels != 3),
        f'model.load_state_dict(torch.load(here / "{STATE}", weights_only=True), strict=True)',
        *_head_lines(network, folder),
        "model.eval()",
    ]


def write_huggingface(network: Network, folder: Path) -> list[str]:
    """A folder as timm keeps its models on the Hub: config.json and model.safetensors."""
    if network.head is not None:
        raise UserError("the folder of Hugging Face holds a backbone alone: leave --head away, or --to timm")
    if network.settings.stem == "small" and network.is_resnet:
        raise UserError(
            f"timm's config.json cannot describe the small stem: --to timm has it in its script, and {SELF_CONTAINED}"
        )
    arguments, preparation = network.timm_arguments(), network.preparation()
    del arguments["num_classes"]
    size, channels = network.settings.image_size, network.settings.channels
    config = {
        "architecture": network.name,
        "num_classes": 0,
        "num_features": int(getattr(network.backbone, "num_features", 0)),
        "model_args": arguments,
        "pretrained_cfg": {
            "tag": "moco",
            "custom_load": False,
            "input_size": [channels, size, size],
            "fixed_input_size": "img_size" in arguments,
            "interpolation": "bilinear",
            "crop_pct": preparation["crop_share"],
            "crop_mode": "center",
            "mean": preparation["mean"],
            "std": preparation["std"],
            "num_classes": 0,
            "first_conv": timm.models.get_pretrained_cfg_value(network.name, "first_conv"),
            "classifier": timm.models.get_pretrained_cfg_value(network.name, "classifier"),
        },
    }
    pooling = getattr(network.backbone, "global_pool", None)
    kind = pooling if isinstance(pooling, str) else getattr(pooling, "pool_type", None)
    if kind:
        config["global_pool"] = kind
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    safetensors.torch.save_file(_tensors(network.backbone), folder / WEIGHTS, metadata={"format": "pt"})
    return [
        "import timm",
        'model = timm.create_model(f"local-dir:{here}", pretrained=True)',
        "model.eval()",
        "# or: transformers.AutoModel.from_pretrained(here)(pixel_values=x).pooler_output",
        "# or, once uploaded: timm.create_model('hf-hub:NAME/MODEL', pretrained=True)",
    ]


def opened_by_transformers(folder: Path, pictures: Tensor) -> Tensor | None:
    """Features by transformers' TimmWrapper, or None where transformers is not installed."""
    try:
        from transformers import AutoModel
    except ImportError:
        return None
    with quiet(), torch.no_grad():
        output: Tensor = AutoModel.from_pretrained(folder).eval()(pixel_values=pictures).pooler_output
    return output


def _made_by_timm(network: Network) -> list[str]:
    arguments = ", ".join(f"{name}={value!r}" for name, value in network.timm_arguments().items())
    return ["import timm", f'model = timm.create_model("{network.name}", {arguments})', *_stem_lines(network)]


def _stem_lines(network: Network, *, always: bool = False) -> list[str]:
    """The first layers, where they are not those of the usual model."""
    first: Any = getattr(network.backbone, "conv1", None)
    small = network.is_resnet and network.settings.stem == "small"
    if not (small or always):
        return []
    new = f"torch.nn.Conv2d({first.in_channels}, {first.out_channels}, {first.kernel_size[0]}"
    stride = "" if first.stride == (1, 1) else f", stride={first.stride[0]}"
    lines = [f"model.conv1 = {new}{stride}, padding={first.padding[0]}, bias=False)"]
    return [*lines, "model.maxpool = torch.nn.Identity()"] if small else lines


def _head_lines(network: Network, folder: Path) -> list[str]:
    if network.head is None:
        return []
    safetensors.torch.save_file(_tensors(network.head), folder / HEAD)
    layers = network.head if isinstance(network.head, nn.Sequential) else [network.head]
    made = ", ".join(_source(layer) for layer in layers)
    made = f"torch.nn.Sequential({made})" if isinstance(network.head, nn.Sequential) else made
    return [f"head = {made}", _filled("head", HEAD), "model = torch.nn.Sequential(model, head)"]


def _source(layer: nn.Module) -> str:
    if isinstance(layer, nn.Linear):
        return f"torch.nn.Linear({layer.in_features}, {layer.out_features}, bias={layer.bias is not None})"
    if isinstance(layer, nn.BatchNorm1d):
        return f"torch.nn.BatchNorm1d({layer.num_features}, affine={layer.affine})"
    return "torch.nn.ReLU()"


def _filled(variable: str, file: str) -> str:
    return f'{variable}.load_state_dict(safetensors.torch.load_file(here / "{file}"), strict=True)'


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.contiguous() for name, value in module.state_dict().items()}
