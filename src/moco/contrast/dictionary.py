"""Where the keys come from that a query is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.contrast.losses import Contrast, info_nce


class Queue(nn.Module):
    """A first-in-first-out ring of keys ([v1] section 3.2, "Dictionary as a queue").

    It starts as random unit vectors. Each key keeps the id of its sample (−1: none), so that a query never meets
    its own picture as a negative, and the step of its birth (−1: random vector), so that staleness can be measured.
    Everything is a buffer and so part of every checkpoint. Batches of any size fit, larger than the ring too.

    size: number of keys K. dim: length C of a key. dtype: float32, or bfloat16 for half the memory and faster
    products. Raises ValueError for sizes that are not positive.
    """

    keys: Tensor
    ids: Tensor
    births: Tensor
    pointer: Tensor

    def __init__(
        self, size: int = 65_536, dim: int = 128, *, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        if size <= 0 or dim <= 0:
            raise ValueError(f"a queue needs a positive size and dim, not {size} and {dim}")
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("keys", F.normalize(torch.randn(size, dim, generator=generator), dim=1).to(dtype))
        self.register_buffer("ids", torch.full((size,), -1))
        self.register_buffer("births", torch.full((size,), -1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.keys)

    def lookup(self, query: Tensor, key: Tensor, temperature: float, ids: Tensor | None = None) -> Contrast:
        """Compare queries (N, C) with their positives (N, C) and with all keys as they are now. Changes nothing."""
        # The ring changes in place before the backward pass of a later piece may have run; the loss keeps no key.
        return info_nce(query, key, self.keys, temperature, ids=ids, key_ids=self.ids)

    @torch.no_grad()
    def enqueue(self, keys: Tensor, ids: Tensor | None = None, step: int = 0) -> None:
        """Write keys (N, C) over the oldest ones. ids: (N,) sample ids. step: the optimiser step of their birth."""
        size, count = len(self), len(keys)
        kept = min(count, size)  # of a batch larger than the ring only the newest survive
        places = (self.pointer + torch.arange(count - kept, count, device=self.keys.device)) % size
        self.keys[places] = F.normalize(keys[count - kept :].float(), dim=1).to(self.keys.dtype)
        self.ids[places] = -1 if ids is None else ids[count - kept :].to(self.ids.device)
        self.births[places] = step
        self.pointer.add_(count).remainder_(size)
