"""`moco export`: an encoder for another library, loaded back by it at once and compared before it is there."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from moco.contrast.own import is_own
from moco.errors import UserError
from moco.evaluate.subject import locate
from moco.evaluation_settings import inspection
from moco.interop.detectron import read_back, write_detectron2
from moco.interop.graphs import write_onnx, write_torch_export
from moco.interop.network import PREPARATION, Network, load_network
from moco.interop.settings import ExportSettings
from moco.interop.weight_files import (
    opened_by_transformers,
    write_huggingface,
    write_safetensors,
    write_timm,
    write_torchvision,
)
from moco.interop.whole import check_free, whole_folder
from moco.train.checkpoints import write_atomically
from moco.train.run import Run, backbone_of

WRITERS: dict[str, Callable[[Network, Path], list[str]]] = {
    "safetensors": write_safetensors,
    "timm": write_timm,
    "torchvision": write_torchvision,
    "huggingface": write_huggingface,
    "onnx": write_onnx,
    "torch-export": write_torch_export,
    "detectron2": write_detectron2,
}
SCRIPT = "load.py"
BATCHES = (1, 7)
"""Batch sizes whose features are compared."""
TOLERANCE = 1e-4
"""Largest difference of a feature, as a share of the largest feature."""


def export_run(run: str | Path | Run, *, quiet: bool = False, **given: Any) -> Path:
    """Write the encoder of a run (a folder, or a checkpoint in one) for another library. Returns the folder.

    given: fields of `ExportSettings`. The folder has the weights, preprocessing.json (how pictures are prepared) and
    load.py, a script that loads the network. The script is run, and its features are compared with the run's for
    batches of 1 and 7. Raises UserError, and leaves nothing behind, where the target cannot hold this network, a
    package is missing, or the features differ.
    """
    if not given.get("to"):
        raise UserError(f"name who is to load it: --to {'|'.join(WRITERS)}")
    settings = inspection(ExportSettings, given)
    where = locate(run)
    if where.run is None:
        raise UserError(f"{run} is a model of timm, not a run: there is nothing to export")
    if is_own(where.run.settings.backbone):
        raise UserError(
            f"{where.name} has a backbone of its own, which no other library knows: moco.backbone(RUN, backbone=…) and "
            "torch.save in Python"
        )
    network = load_network(where, settings.encoder, settings.head)
    name = settings.to + ("-key" if settings.encoder == "key" else "") + ("-head" if settings.head else "")
    out = Path(settings.out) if settings.out else where.run.path / "export" / name
    check_free(out)
    with whole_folder(out) as folder:
        lines = WRITERS[settings.to](network, folder)
        write_atomically(folder / PREPARATION, _json(network))
        write_atomically(folder / SCRIPT, script(network, lines).encode())
        difference = _verify(settings.to, network, folder)
    if not quiet:
        how = "converted back" if settings.to == "detectron2" else f"loaded back from {SCRIPT}"
        Console(soft_wrap=True).print(
            f"{out}: {network.name} of {network.run}, {settings.encoder} encoder; {how}, features differ by "
            f"{difference:.1g} at most",
            highlight=False,
            markup=False,
        )
    return out


def script(network: Network, lines: list[str]) -> str:
    """load.py: `model`, which maps (N, C, S, S) to features, and `prepare`, which makes its input of a picture."""
    preparation = network.preparation()
    size, channels, share = preparation["image_size"], preparation["channels"], preparation["crop_share"]
    mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(channels)
    making = [
        "def prepare(picture):  # a picture of Pillow → (1, C, S, S)",
        f'    picture = picture.convert("{mode}")',
        f"    side = max(1, round(min(picture.size) * {share}))",
        "    left, top = (picture.width - side) // 2, (picture.height - side) // 2",
        "    picture = picture.crop((left, top, left + side, top + side))",
        f"    picture = picture.resize(({size}, {size}), Image.Resampling.BILINEAR)",
        f"    pixels = numpy.asarray(picture, numpy.float32).reshape({size}, {size}, {channels}) / 255",
    ]
    if mode is None:
        making = [
            f"def prepare(pixels):  # an array (S, S, {channels}) of uint8, already cut and resized → (1, C, S, S)",
            "    pixels = numpy.asarray(pixels, numpy.float32) / 255",
        ]
    return "\n".join(
        [
            f'"""{network.name}, pre-trained with Momentum Contrast: features = model(prepare(picture))."""',
            "",
            "from pathlib import Path",
            "import numpy, torch",
            *(["import safetensors.torch"] if any("safetensors.torch" in line for line in lines) else []),
            *(["from PIL import Image"] if mode is not None else []),
            *(line for line in lines if _is_import(line)),
            "",
            "here = Path(__file__).absolute().parent",
            *(line for line in lines if not _is_import(line)),
            "",
            *making,
            f"    pixels = (pixels - numpy.float32({preparation['mean']})) / numpy.float32({preparation['std']})",
            "    return torch.from_numpy(pixels.transpose(2, 0, 1)[None].astype(numpy.float32))",
            "",
        ]
    )


def _is_import(line: str) -> bool:
    return line.startswith(("import ", "from "))


def _json(network: Network) -> bytes:
    return (json.dumps(network.preparation() | network.about(), indent=2, ensure_ascii=False) + "\n").encode()


def _verify(target: str, network: Network, folder: Path) -> float:
    """The largest difference between the run's features and those of what was written, loaded by the target."""
    if target == "detectron2":  # which cannot be installed everywhere: the way back instead
        loaded: Any = network_again(network, read_back(folder))
    else:
        loaded = runpy.run_path(str(folder / SCRIPT))["model"]
    worst = 0.0
    with torch.no_grad():
        for count in BATCHES:
            pictures = network.pictures(count)
            expected: Tensor = network.whole(pictures)
            found = [loaded(pictures)]
            if target == "huggingface" and (other := opened_by_transformers(folder, pictures)) is not None:
                found.append(other)
            for features in found:
                worst = max(worst, _difference(features, expected))
    if not worst <= TOLERANCE:
        raise UserError(
            f"the export for {target} is not what the run is: features differ by {worst:.2g} (at most {TOLERANCE:g} "
            "is allowed), so nothing was written; please report this"
        )
    return worst


def _difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def network_again(network: Network, weights: dict[str, Tensor]) -> torch.nn.Module:
    """A new backbone like that of `network`, with these weights; counters of batch norm may be missing."""
    again = backbone_of(network.settings)
    kept = {name: value for name, value in again.state_dict().items() if name.endswith("num_batches_tracked")}
    again.load_state_dict(kept | weights, strict=True)
    return again.eval()
