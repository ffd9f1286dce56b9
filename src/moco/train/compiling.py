"""torch.compile for the encoders where the machine can, and a line and the plain way where it cannot."""

from __future__ import annotations

import torch
from rich.console import Console
from torch import Tensor

from moco.contrast.method import Method


def compile_encoders(model: Method, device: torch.device, console: Console | None) -> bool:
    """Have both encoders compiled at their first step. Returns False, and says why, where nothing can be compiled.

    State dictionaries and the encoders themselves stay what they are; only calls go through the compiled code.
    """
    try:
        torch.compile(_trial)(torch.ones(8, device=device))
    except Exception as error:  # whatever is missing: a compiler, Triton, support for this Python
        if console is not None:
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            console.print(f"compile: not possible here ({reason}); going on without", highlight=False, markup=False)
        return False
    # A part that does not compile later on runs as it is, with PyTorch's own warning.
    torch._dynamo.config.suppress_errors = True
    for name, encoder in model.named_children():
        if name.endswith("_encoder"):
            encoder.compile(dynamic=False)
    return True


def _trial(x: Tensor) -> Tensor:
    return (x * 2).sin().sum()
