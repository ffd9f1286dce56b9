"""Where the keys come from that a query is compared with."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.contrast.collectives import gather_learning_rows, gather_rows, rank, world_size
from moco.contrast.hard import HardNegatives, Mixing
from moco.contrast.losses import Contrast, info_nce

FILLED_AT_ONCE = 65_536
"""Random vectors that are drawn in one go."""


class Queue(nn.Module):
    """A first-in-first-out ring of keys ([v1] section 3.2, "Dictionary as a queue").

    It starts as random unit vectors. Each key keeps the id of its sample (−1: none), so that a query never meets
    its own picture as a negative, and the step of its birth (−1: random vector), so that staleness can be measured.
    Everything is a buffer and so part of every checkpoint. Batches of any size fit, larger than the ring too.

    size: number of keys K. dim: length C of a key. dtype: float32, or bfloat16 for half the memory and faster
    products. hard: what is made of hard negatives. Raises ValueError for sizes that are not positive.
    """

    keys: Tensor
    ids: Tensor
    births: Tensor
    pointer: Tensor

    def __init__(
        self,
        size: int = 65_536,
        dim: int = 128,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        hard: HardNegatives | None = None,
    ) -> None:
        super().__init__()
        if size <= 0 or dim <= 0:
            raise ValueError(f"a queue needs a positive size and dim, not {size} and {dim}")
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("keys", F.normalize(torch.randn(size, dim, generator=generator), dim=1).to(dtype))
        self.register_buffer("ids", torch.full((size,), -1))
        self.register_buffer("births", torch.full((size,), -1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.hard = hard or HardNegatives()
        self._seed, self._generator = seed, torch.Generator()
        self.draw(0)

    def draw(self, step: int, progress: float = 0.0) -> None:
        """Begin the random choices of a step, which follow from seed, step and process. progress: as in `Method`."""
        self._generator.manual_seed(((self._seed * 1_000_003 + step) * 1_000_003 + rank()) % 2**63)
        self._hard_now = progress >= self.hard.start

    def __len__(self) -> int:
        return len(self.keys)

    def lookup(self, query: Tensor, key: Tensor, temperature: float, ids: Tensor | None = None) -> Contrast:
        """Compare queries (N, C) with their positives (N, C) and with all keys as they are now. Changes nothing."""
        # The ring changes in place before the backward pass of a later piece may have run; the loss keeps no key.
        mixing, sharpness = None, 0.0
        if self._hard_now:
            sharpness = self.hard.sharpness
            if self.hard.hardest:
                mixing = Mixing.draw(len(query), self.hard, len(self), self._generator).to(query.device)
        return info_nce(
            query, key, self.keys, temperature, ids=ids, key_ids=self.ids, mixing=mixing, sharpness=sharpness
        )

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


class InBatch(nn.Module):
    """The other keys of the same batch, those of all processes ([v3] algorithm 1; [v1] figure 2a, "end-to-end").

    Keys that learn get their gradient too, from every process. batch_size: keys of a step over all processes (of a
    piece, where gradients are accumulated: a query meets the keys of its own piece). Raises ValueError for fewer than
    two: there would be no negatives.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        if batch_size < 2:
            raise ValueError(f"keys of the same batch need a batch of 2 or more, not {batch_size}")
        self.batch_size = batch_size

    def __len__(self) -> int:
        """Negatives of a query."""
        return self.batch_size - 1

    def lookup(self, query: Tensor, key: Tensor, temperature: float, ids: Tensor | None = None) -> Contrast:
        """Compare queries (N, C) with their positives (N, C) and with the other keys of all processes."""
        own = torch.arange(len(key), device=key.device) + rank() * len(key) if ids is None else ids
        everybody = torch.arange(world_size() * len(key), device=key.device) if ids is None else gather_rows(ids)
        keys = gather_learning_rows(key) if key.requires_grad else gather_rows(key)
        return info_nce(query, key, keys, temperature, ids=own, key_ids=everybody)

    def enqueue(self, keys: Tensor, ids: Tensor | None = None, step: int = 0) -> None:
        """Nothing is kept."""


class MemoryBank(nn.Module):
    """One vector per picture of the data (InstDisc, arXiv 1805.01978; [v1] figure 2b).

    Positive and negatives are vectors of the bank, made when their pictures were last seen; no encoder follows. The
    momentum is on the vectors: v ← m·v + (1−m)·q, and back to unit norm. Negatives are drawn at random, the same ones
    for all queries of a step.

    images: pictures of the data, whose ids are 0 … images − 1. size: negatives K. dim: C. momentum: m (InstDisc: 0.5).
    folder: keep the vectors in a file there instead of in memory (CPU only; 4·C bytes per picture; it goes with the
    process). Raises ValueError for sizes that are not positive and a momentum outside [0, 1).
    """

    keys: Tensor
    births: Tensor
    drawn: Tensor

    def __init__(
        self,
        images: int,
        size: int,
        dim: int = 128,
        *,
        momentum: float = 0.5,
        seed: int = 0,
        folder: Path | None = None,
    ) -> None:
        super().__init__()
        if images <= 0 or size <= 0 or dim <= 0:
            raise ValueError(f"a memory bank needs positive sizes, not {images}, {size} and {dim}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {momentum}")
        self.momentum, self._seed = momentum, seed
        keys = torch.empty(images, dim) if folder is None else _mapped(folder, images, dim)
        generator = torch.Generator().manual_seed(seed)
        for part in keys.split(FILLED_AT_ONCE):
            part.copy_(F.normalize(torch.randn(part.shape, generator=generator), dim=1))
        self.register_buffer("keys", keys)
        self.register_buffer("births", torch.full((images,), -1))
        self.register_buffer("drawn", torch.zeros(min(size, images), dtype=torch.int64), persistent=False)
        self.draw(0)

    def __len__(self) -> int:
        """Negatives of a query."""
        return len(self.drawn)

    def draw(self, step: int) -> None:
        """Choose the negatives of a step: a pure function of seed and step, equal on all processes."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + step) % 2**63)
        self.drawn.copy_(torch.randint(len(self.keys), (len(self.drawn),), generator=generator))

    def vectors(self, ids: Tensor) -> Tensor:
        """What the bank holds for pictures: (N,) → (N, C). Raises ValueError for numbers of pictures it has not."""
        return self.keys[self._places(ids)]

    def _places(self, ids: Tensor) -> Tensor:
        # Looking at those of a GPU would wait for it.
        if ids.device.type == "cpu" and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self.keys):
            raise ValueError(f"ids must be in 0 … {len(self.keys) - 1}, not {int(ids.min())} … {int(ids.max())}")
        return ids.to(self.keys.device)

    def lookup(self, query: Tensor, key: Tensor, temperature: float, ids: Tensor | None = None) -> Contrast:
        """Compare queries (N, C) with their positives (N, C) and with the vectors drawn. Changes nothing."""
        return info_nce(query, key, self.keys[self.drawn], temperature, ids=ids, key_ids=self.drawn)

    @torch.no_grad()
    def enqueue(self, keys: Tensor, ids: Tensor | None = None, step: int = 0) -> None:
        """Move the vectors of the pictures `ids` (N,) towards `keys` (N, C), those of the queries of this step."""
        if ids is None:
            raise ValueError("a memory bank needs the ids of the pictures")
        places = self._places(ids)
        moved = self.momentum * self.keys[places] + (1 - self.momentum) * keys.float()
        self.keys[places] = F.normalize(moved, dim=1)
        self.births[places] = step


def _mapped(folder: Path, rows: int, dim: int) -> Tensor:
    """A float32 tensor (rows, dim) whose memory is a file of this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="bank-") as file:  # once mapped, it needs no name any more
        return torch.from_file(file.name, shared=True, size=rows * dim, dtype=torch.float32).view(rows, dim)


Dictionary = Queue | InBatch | MemoryBank
