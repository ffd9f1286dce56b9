"""The folder of a comparison or search, which knows its plan, so that the same command goes on in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moco.errors import UserError
from moco.train.checkpoints import write_atomically

PLAN = "plan.json"


def plan_of(folder: Path) -> dict[str, Any]:
    """The plan of a folder, empty where it has none that can be read."""
    try:
        found = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def take_folder(folder: Path, plan: Mapping[str, Any]) -> None:
    """Make the folder, or go on in one of the same plan. Raises UserError for any other."""
    text = json.dumps(dict(plan), indent=2, sort_keys=True)
    file = folder / PLAN
    if file.is_file():
        before, now = json.loads(file.read_text(encoding="utf-8")), json.loads(text)
        differing = [name for name in now if now[name] != before.get(name)]
        if differing:
            raise UserError(f"{folder} holds something else (its {', '.join(differing)} differ): choose another --out")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text.encode())
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another --out") from error
