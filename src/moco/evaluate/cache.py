"""Features that were computed once, kept in the run folder under a fingerprint of all that they depend on."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moco.train.checkpoints import write_atomically

KEPT_BYTES = 2 * 2**30
"""Features that stay in a folder; beyond that, those not used for longest go."""


def weights_fingerprint(model: nn.Module) -> str:
    """SHA-256 over all parameters and buffers: names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            held = tensor.detach().cpu().contiguous()
            found.update(f"{name}\0{held.dtype}\0{tuple(held.shape)}\0".encode())
            found.update(held.flatten().view(torch.uint8).numpy().data)
        else:
            found.update(f"{name}\0{tensor!r}\0".encode())
    return found.hexdigest()


class FeatureCache:
    """Feature tables in a folder, one file each; nothing is kept where `folder` is None.

    The name of a file is a hash of everything that its features depend on, so that none can be stale: what changed
    is looked for under another name. A damaged file counts as absent.
    """

    def __init__(self, folder: Path | None, limit: int = KEPT_BYTES) -> None:
        self.folder, self.limit = folder, limit

    def _path(self, depends: Mapping[str, Any]) -> Path | None:
        if self.folder is None or any(value is None for value in depends.values()):
            return None
        text = json.dumps(dict(depends), sort_keys=True, default=str)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.pt"

    def get(self, depends: Mapping[str, Any], rows: int) -> Tensor | None:
        """The features (rows, D) that depend on just this, or None. A value of None: not known, so nothing is."""
        path = self._path(depends)
        if path is None or not path.is_file():
            return None
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
            os.utime(path)  # used again
        except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError):
            return None
        right = isinstance(found, Tensor) and found.ndim == 2 and len(found) == rows and found.dtype == torch.float32
        return found if right else None

    def put(self, depends: Mapping[str, Any], features: Tensor) -> None:
        """Keep features; a folder that cannot be written to keeps nothing."""
        path = self._path(depends)
        if path is None or features.nbytes > self.limit:
            return
        written = io.BytesIO()
        torch.save(features.contiguous(), written)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, written.getvalue())
            self._trim()
        except OSError:
            path.with_name(path.name + ".partial").unlink(missing_ok=True)

    def _trim(self) -> None:
        assert self.folder is not None
        held = [(path.stat().st_mtime_ns, path.stat().st_size, path) for path in self.folder.glob("*.pt")]
        total = sum(size for _, size, _ in held)
        for _, size, path in sorted(held):
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= size
