"""What `moco health` finds with the whole model, in small, while a run trains: does batch norm leak, are keys stale?

One process does it, without a word to the others, on copies of the encoders. So that it takes a few hundredths of the
training at most, it is left out at some checks where an epoch is short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from moco.contrast.dictionary import MemoryBank
from moco.contrast.method import Method
from moco.contrast.moco import MomentumContrast
from moco.data.device import place
from moco.data.loader import ViewStream
from moco.evaluate.contrast_probe import ViewPairs, batch_leak, encode_pairs, negative_count, normalises_batches
from moco.evaluate.features import AUTOCAST
from moco.evaluate.staleness import key_drift
from moco.settings import RunSettings

PICTURES = 256
"""View pairs for the leak at least; where a batch is larger, two of them."""
MOST_PICTURES = 2048
"""Where two batches are more than these, the leak is not looked at."""
LEAST_GAIN = 0.05
"""Part of the chance loss that must be gained before a leak can be a share of the gain."""
SHARE = 0.03
"""Part of the work of an epoch that this may take."""
STEP_PASSES = 4
"""What a picture costs in training, in passes through an encoder: forward, backward (two) and the key."""


@dataclass(frozen=True)
class Probes:
    """How a model of MoCo is looked at. stream: the batches of the training, with the rows of all processes."""

    settings: RunSettings
    stream: ViewStream
    device: torch.device

    def figures(self, model: Method) -> dict[str, float]:
        """Names and values for a model on `device`; none where no look is due. Nothing of the model changes.

        batch_leak, batch_leak_error: in nats, as in `contrast_probe.Leak`; batch_leak_share: of what the loss has
        gained on chance, once that is 5 % of it. oldest_key_cosine, oldest_key_age: of the oldest step in the queue.
        """
        if not isinstance(model, MomentumContrast) or not self._due(model.step):
            return {}
        kind, dtype = self.device.type, AUTOCAST.get(self.settings.precision)
        numbers = torch.random.fork_rng(devices=[self.device] if kind == "cuda" else [])  # an encoder may draw some
        with numbers, torch.autocast(kind, dtype, enabled=dtype is not None):
            return self._leak(model) | self._oldest(model)

    def _due(self, step: int) -> bool:
        """Whether a multiple of `every` epochs was passed since the check before; and always at the end."""
        epoch, every = step // self.stream.steps_per_epoch, self.every
        return epoch // every > (epoch - self.settings.monitor_every) // every or epoch == self.settings.epochs

    @property
    def every(self) -> int:
        """Epochs from one look to the next, so that looks take SHARE of the work."""
        asked, stream = self.settings, self.stream
        waiting = stream.workers  # views are made by so many processes in training, and by this one alone here
        leak = self._batches * self._rows * ((3 + asked.shuffle_bn) / STEP_PASSES + waiting)
        oldest = asked.batch_size * (1 / STEP_PASSES + waiting)
        return max(1, math.ceil((leak + oldest) / (SHARE * stream.steps_per_epoch * stream.batch_size)))

    @property
    def _rows(self) -> int:
        """Pictures that are encoded at once, over all processes."""
        return self.settings.batch_size // self.settings.accumulate

    @property
    def _batches(self) -> int:
        """Of so many pictures, how many are looked at for the leak; 0 where they are too many."""
        count = max(2, -(-PICTURES // self._rows))
        return count if count * self._rows <= MOST_PICTURES else 0

    def _leak(self, model: MomentumContrast) -> dict[str, float]:
        if not self._batches or not normalises_batches(model) or isinstance(model.dictionary, MemoryBank):
            return {}
        asked = self.settings
        # Views that no step of the training sees, the same ones every time.
        first = asked.epochs * self.stream.steps_per_epoch
        batches = [
            place(self.stream.batch(first + number), self.device)
            for number in range(-(-self._batches // asked.accumulate))
        ]
        query, key, ids = (
            [piece for batch in batches for piece in getattr(batch, side).split(self._rows)][: self._batches]
            for side in ("query", "key", "ids")
        )
        encoded = encode_pairs(
            model, ViewPairs(query, key, ids, asked.mean, asked.std), groups=asked.bn_groups * (asked.processes or 1),
            shuffled=asked.shuffle_bn, draws=1, running=False,
        )  # fmt: skip
        leak, chance = batch_leak(model, encoded), math.log(negative_count(model, encoded) + 1)
        found = {"batch_leak": leak.gap, "batch_leak_error": leak.error}
        if chance - leak.loss >= LEAST_GAIN * chance:
            found["batch_leak_share"] = leak.gap / (chance - leak.loss)
        return found

    def _oldest(self, model: MomentumContrast) -> dict[str, float]:
        asked = self.settings
        drift = key_drift(
            model, lambda step: place(self.stream.batch(step), self.device), mean=asked.mean, std=asked.std,
            accumulate=asked.accumulate, steps=1, world=asked.processes or 1,
        )  # fmt: skip
        return {"oldest_key_cosine": drift[0].similarity, "oldest_key_age": float(drift[0].age)} if drift else {}


def make_probes(model: nn.Module, settings: RunSettings, stream: ViewStream, device: torch.device) -> Probes | None:
    """The probes of a run, or None where there is nothing for them to find.

    stream: that of the training. Views made by a function of the user are left alone, since it may be slow and draw
    numbers of its own; and so are encoders that talk to other processes (SyncBatchNorm).
    """
    talks = any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())
    if not isinstance(model, MomentumContrast) or settings.views == "custom" or talks:
        return None
    return Probes(settings, stream.whole(), device)
