"""How many pictures may be unreadable before a training is not worth going on with."""

from __future__ import annotations

import math
from collections.abc import Iterable

from moco.errors import UserError, counted

SHOWN = 3
_SURE = 4  # of 16 bad ones or fewer nothing is sure
"""Standard deviations by which the share found so far must be above the limit, to stop before the limit is reached."""


class BadFiles:
    """The pictures that could not be read, each counted once, and the limit for them.

    Args:
        total: pictures in the source.
        share: of them that may be bad; least: so many may be bad at any rate, unless the share is 0.
        where: the file that lists them all.

    >>> bad = BadFiles(total=50_000)
    >>> for name, reason in bad.add(batch.skipped):  # those that are new
    ...     run.skip(name, reason)
    >>> bad.check(seen=(step + 1) * batch_size)
    """

    def __init__(self, total: int, share: float = 0.01, least: int = 10, where: str = "skipped.csv") -> None:
        self.total, self.share, self.where = total, share, where
        self.limit = max(least if share > 0 else 0, math.floor(share * total))
        self._by_share = share * total > least
        self._reasons: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    def add(self, skipped: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Count (name, reason) pairs, and return those that were not known yet."""
        new = []
        for name, reason in skipped:
            if name not in self._reasons:
                self._reasons[name] = reason
                new.append((name, reason))
        return new

    def check(self, seen: int) -> None:
        """Raise UserError if there are too many.

        seen: pictures that were read so far, by all processes whose bad ones were added; from the second epoch on it
        is no longer looked at. It is too many when the limit is passed; and earlier, within the first epoch, as soon
        as the share among the pictures seen (a random sample) leaves no doubt that it will be.
        """
        bad = len(self._reasons)
        sure = bad - _SURE * math.sqrt(bad) > self.share * max(seen, bad)
        if bad > self.limit or (self._by_share and seen < self.total and sure):
            raise UserError(self._message(seen))

    def _message(self, seen: int) -> str:
        bad = len(self._reasons)
        some = "; ".join(f"{name!r} ({reason})" for name, reason in list(self._reasons.items())[:SHOWN])
        if bad > self.limit:
            found = f"{bad:,} of {counted(self.total, 'image')} cannot be read, more than the {self.limit:,} allowed"
        else:
            found = f"{bad:,} of the first {seen:,} images cannot be read, more than {self.share:.3g} of them"
        more = f" and {bad - SHOWN:,} more" if bad > SHOWN else ""
        return f"{found}: {some}{more}; all with reasons in {self.where}; look with `moco check`, or raise max_bad"
