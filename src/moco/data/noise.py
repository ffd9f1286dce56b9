"""Gaussian noise that is a pure function of a key and a place, the same on every device and for any split of the work.

A generator with a state would have to run through a view in one order and one piece. Here each pair of values is hashed
from (key, number of the pair) and turned into two normal numbers (Box and Muller, 1958).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

# The two rounds of a well-mixing 32-bit hash (C. Wellons, "lowbias32").
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_SHIFTS = (16, 15, 16)
_LOW = 0xFFFFFFFF
_OTHER = 0x9E3779B9  # any number that is not 0


def gaussian(keys: Array, count: int, device: torch.device) -> torch.Tensor:
    """Standard normal numbers (n, count), float32 on `device`: row i follows from keys[i] alone.

    keys: (n,) int64, from 0 to 2⁵³ − 1. The first numbers of a row do not depend on `count`.
    """
    key = torch.from_numpy(np.ascontiguousarray(keys)).to(device)[:, None]
    first = _hash(key & _LOW)
    # Of the whole key, so that no two rows are the same numbers in another order.
    second = _hash((key >> 32) ^ first ^ _OTHER)
    pairs = -(-count // 2)
    place = torch.arange(2 * pairs, device=device, dtype=torch.int64)[None]
    word = _hash(_hash(place ^ first) ^ second)
    # (0, 1]: the logarithm needs a number above 0.
    radius = (word[:, 0::2].to(torch.float32) + 1).mul_(2.0**-32).clamp_(max=1).log_().mul_(-2).sqrt_()
    angle = word[:, 1::2].to(torch.float32).mul_(2 * np.pi * 2.0**-32)
    normal = torch.stack([radius * angle.cos(), radius * angle.sin_()], dim=2)
    return normal.flatten(1)[:, :count]


def _hash(word: torch.Tensor) -> torch.Tensor:
    """32 well-mixed bits for 32 bits, both in int64."""
    first, second, third = _SHIFTS
    word = ((word ^ (word >> first)) * _MULTIPLIERS[0]) & _LOW
    word = ((word ^ (word >> second)) * _MULTIPLIERS[1]) & _LOW
    return word ^ (word >> third)
