"""Keeping the memory of a training step for the next one."""

from __future__ import annotations

import ctypes
import sys

# Parameters of glibc's mallopt(3); their numbers are part of its binary interface.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed, on Linux; returns whether it will.

    As it comes, glibc gives every large block back to the system when it is freed and fetches fresh pages, cleared by
    the system one by one, for the next one. A training step frees and takes the same hundreds of megabytes every time:
    on a CPU that costs a tenth to a sixth of the step (benchmarks/README.md). The peak of memory stays as it is.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none, or one that does nothing
    if mallopt is None:
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * 2**20))
    taken = [mallopt(name, value) == 1 for name, value in settings]
    return all(taken)
