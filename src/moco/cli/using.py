"""The verbs that use what was learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VERBS: tuple[Callable[[Any, list[str]], None], ...] = ()
