"""Pictures that are there twice: exactly, or nearly. In contrastive training each is a false negative of the other.

Near duplicates are found by a difference hash: 64 bits that say where a thumbnail gets brighter from left to right.
All pairs within a few bits are found without comparing all: the bits are cut into six bands, of which four wrong bits
leave two bands untouched, so that such pictures meet in at least one of fifteen sorted lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MOST_BITS = 4
"""Bits in which the hashes of near duplicates differ at most."""

MOST_GAP = 5.0
"""Mean difference of their thumbnails at most, in grey levels, after brightness is made equal."""

FLATTEST = 8
"""A thumbnail whose levels span less has no shape to compare."""

_BANDS = (11, 11, 11, 11, 10, 10)
_CHOSEN = len(_BANDS) - MOST_BITS
_MOST_NEIGHBOURS = 1000  # so many places apart in a sorted list; more only where thousands look alike by chance
_ONES = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


def exact_groups(keys: Array) -> list[Array]:
    """Numbers of the rows of (n, bytes) that are equal: one array of two or more, sorted, for each such set of rows."""
    if len(keys) == 0:
        return []
    rows = np.ascontiguousarray(keys).view(np.dtype((np.void, keys.shape[1])))[:, 0]
    return _groups(np.unique(rows, return_inverse=True)[1])


def difference_hash(thumbnails: Array) -> Array:
    """64 bits for each thumbnail, uint64 (n,). `thumbnails`: uint8 (n, 8, 9)."""
    # By two levels or more: in even areas, one is rounding, and would differ from copy to copy.
    brighter = thumbnails[:, :, 1:] > thumbnails[:, :, :-1].astype(np.int16) + 1
    packed = np.packbits(brighter.reshape(len(thumbnails), 64), axis=1)
    return np.ascontiguousarray(packed).view(np.uint64)[:, 0]


def near_groups(thumbnails: Array) -> list[Array]:
    """Numbers of pictures that look alike: one array of two or more, sorted, for each set that hangs together.

    thumbnails: uint8 (n, 8, 9). Flat pictures, which all look alike, belong to none.
    """
    count = len(thumbnails)
    flat = np.ptp(thumbnails, axis=(1, 2)) < FLATTEST
    shaped = np.flatnonzero(~flat)
    hashes, first, where = np.unique(difference_hash(thumbnails[shaped]), return_index=True, return_inverse=True)
    joined = _Joined(count)
    joined.add(thumbnails, shaped[first[where]], shaped)  # equal hashes: each with the first that has it
    for one, other in _candidates(hashes):
        few = _bits(hashes[one] ^ hashes[other]) <= MOST_BITS
        joined.add(thumbnails, shaped[first[one[few]]], shaped[first[other[few]]])
    return _groups(joined.members())


class _Joined:
    """Which of `count` pictures hang together."""

    def __init__(self, count: int) -> None:
        self._members = np.arange(count)
        self._pairs: list[Array] = []
        self._waiting = 0

    def add(self, thumbnails: Array, first: Array, second: Array) -> None:
        """Join the pairs (first[i], second[i]) whose thumbnails are alike."""
        alike = _gaps(thumbnails[first], thumbnails[second]) <= MOST_GAP
        self._pairs.append(np.stack([first[alike], second[alike]]))
        self._waiting += int(alike.sum())
        if self._waiting > 1_000_000:  # so that many of them never lie in memory
            self.members()

    def members(self) -> Array:
        """The same number for all pictures that hang together, (count,)."""
        pairs, members = np.concatenate([np.zeros((2, 0), np.int64), *self._pairs], axis=1), self._members
        self._pairs, self._waiting = [], 0
        while True:  # the larger number gives way to the smaller one, all pairs at once, until none differ
            ends = members[pairs]
            pairs, ends = pairs[:, differ := ends[0] != ends[1]], ends[:, differ]
            if ends.shape[1] == 0:
                return members
            np.minimum.at(members, ends.max(axis=0), ends.min(axis=0))
            while (further := members[members] != members).any():
                members[further] = members[members[further]]


def _candidates(hashes: Array) -> Iterator[tuple[Array, Array]]:
    """Pairs of places in `hashes` that share two bands, some at a time; the same pair may come again."""
    ends = np.cumsum(_BANDS)
    masks = [((1 << size) - 1) << int(end - size) for size, end in zip(_BANDS, ends, strict=True)]
    for bands in combinations(masks, _CHOSEN):
        shared = hashes & np.uint64(sum(bands))
        order = np.argsort(shared, kind="stable")
        keys = shared[order]
        places = np.arange(len(keys) - 1)
        for apart in range(1, min(len(keys), _MOST_NEIGHBOURS)):
            places = places[places + apart < len(keys)]
            places = places[keys[places] == keys[places + apart]]
            if len(places) == 0:
                break
            yield order[places], order[places + apart]


def _bits(words: Array) -> Array:
    """How many bits are set in each of some 64-bit words."""
    counts: Array = _ONES[np.ascontiguousarray(words).view(np.uint8).reshape(-1, 8)].sum(axis=1)
    return counts


def _gaps(first: Array, second: Array) -> Array:
    """Mean absolute difference of thumbnails, apart from their brightness, in grey levels."""
    difference = first.astype(np.float32) - second
    difference -= difference.mean(axis=(1, 2), keepdims=True)
    made: Array = np.abs(difference).mean(axis=(1, 2))
    return made


def _groups(members: Array) -> list[Array]:
    """For each number that occurs twice or more in `members`, its places, in the order of their first ones."""
    order = np.argsort(members, kind="stable")
    starts = np.flatnonzero(np.diff(members[order], prepend=-1))
    groups = [group for group in np.split(order, starts[1:]) if len(group) > 1]
    return sorted(groups, key=lambda group: int(group[0]))
