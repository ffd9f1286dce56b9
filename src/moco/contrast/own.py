"""Backbones of the user: any network, handed over in Python. A run keeps only the name of what made it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from moco.errors import UserError

PREFIX = "custom: "
_KNOWN: dict[str, Callable[[], nn.Module]] = {}
"""Those that were handed over in this process. Nothing is imported by its name: a run folder may come from anybody."""


def is_own(name: str) -> bool:
    """Whether this is the name of a backbone of the user, as settings have it."""
    return name.startswith(PREFIX)


def know(backbone: Any) -> str:
    """Make a backbone of the user known in this process, and return the name for the settings.

    backbone: a function without arguments that makes an `nn.Module` (N, C, S, S) → (N, D), with new weights at each
    call; or such a module, of which copies are taken, weights included. Raises UserError for anything else.
    """
    if isinstance(backbone, nn.Module):
        kept = copy.deepcopy(backbone)
        name, make = _name(type(backbone)), lambda: copy.deepcopy(kept)
    elif callable(backbone):
        name, make = _name(backbone), backbone
    else:
        raise UserError(f"backbone {backbone!r}: name a timm model, or hand over a function that makes an nn.Module")
    _KNOWN[name] = make
    return name


def build(name: str) -> nn.Module:
    """The backbone of this name. Raises UserError where it was not handed over, or what made it made no module."""
    if name not in _KNOWN:
        raise UserError(
            f"the backbone {name.removeprefix(PREFIX)} is code of its own: hand it over in Python first, "
            "moco.resume(RUN, backbone=…) or moco.backbone(RUN, backbone=…)"
        )
    made = _KNOWN[name]()
    if not isinstance(made, nn.Module):
        raise UserError(f"backbone {name.removeprefix(PREFIX)} made no nn.Module but a {type(made).__name__}")
    return made


def _name(made_by: Any) -> str:
    inner = getattr(made_by, "func", made_by)  # of functools.partial
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{PREFIX}{getattr(inner, '__module__', '?')}.{name}"
