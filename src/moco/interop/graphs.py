"""Exports that carry the network itself, for any batch size: ONNX and torch.export."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from moco.errors import UserError
from moco.interop.network import Network
from moco.interop.quiet import quiet

ONNX, PROGRAM = "model.onnx", "model.pt2"
TRACED = 2
"""Pictures in the batch that is traced; one would be taken for a constant."""


def write_onnx(network: Network, folder: Path) -> list[str]:
    """An ONNX file with input `pictures` and output `features`. Raises UserError where packages for it are missing."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"for ONNX, {', '.join(missing)} must be installed: pip install 'momentum-contrast[export]'")
    with quiet():
        torch.onnx.export(
            network.whole,
            (network.pictures(TRACED),),
            folder / ONNX,
            input_names=["pictures"],
            output_names=["features"],
            dynamic_shapes=({0: "batch"},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    return [
        "import onnxruntime",
        f'session = onnxruntime.InferenceSession(here / "{ONNX}", providers=["CPUExecutionProvider"])',
        "def model(x):  # (N, C, S, S), a tensor or an array → (N, D)",
        '    return torch.from_numpy(session.run(["features"], {"pictures": numpy.asarray(x)})[0])',
    ]


def write_torch_export(network: Network, folder: Path) -> list[str]:
    """A program of torch.export."""
    batch = torch.export.Dim("batch", min=1)
    with quiet():
        program = torch.export.export(network.whole, (network.pictures(TRACED),), dynamic_shapes=({0: batch},))
        torch.export.save(program, folder / PROGRAM)
    return [f'model = torch.export.load(here / "{PROGRAM}").module()']
