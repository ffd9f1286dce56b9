"""The run folder: resolved settings, metrics, checkpoints. Everything else reads a run from here."""

from __future__ import annotations

import csv
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from torch import nn

from moco.contrast.encoders import build_backbone
from moco.errors import UserError
from moco.settings import RunSettings, explain
from moco.settings_file import read_yaml
from moco.train.checkpoints import Checkpoints, write_atomically

SETTINGS = "settings.yaml"
METRICS = "metrics.jsonl"
SKIPPED = "skipped.csv"
WARNINGS = "warnings.csv"
QUERY_BACKBONE = "query_encoder.backbone."


class Run:
    """One pre-training run on disk.

    settings.yaml (all values resolved), metrics.jsonl, checkpoints/step-N.pt and best.pt, tensorboard/, curves.png,
    skipped.csv (pictures that could not be read, with the reason), warnings.csv.

    >>> run = moco.Run("runs/first")
    >>> backbone = run.backbone()
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / SETTINGS).is_file():
            raise UserError(f"{self.path} is not a run folder: it has no {SETTINGS}")

    def __repr__(self) -> str:
        return f"moco.Run({str(self.path)!r})"

    @classmethod
    def create(cls, path: str | Path, settings: RunSettings) -> Run:
        """Make a new run folder. Raises UserError where there is something already."""
        check_new(path)
        try:
            (Path(path) / "checkpoints").mkdir(parents=True, exist_ok=True)
            _write_settings(Path(path), settings)
        except OSError as error:
            raise UserError(f"cannot create the run folder {path}: {error.strerror}") from error
        return cls(path)

    @property
    def settings(self) -> RunSettings:
        """The settings of the run, without any `auto`."""
        try:
            return RunSettings(**read_yaml(self.path / SETTINGS))
        except ValidationError as error:
            raise UserError(f"{self.path / SETTINGS}: {explain(error)}") from error

    def update(self, settings: RunSettings) -> None:
        """Replace the settings of the run, for a continuation that changes some."""
        _write_settings(self.path, settings)

    # ---------------------------------------------------------------- checkpoints

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints")

    def checkpoints(self) -> list[Path]:
        """All checkpoints, the oldest first."""
        return self._checkpoints.paths()

    def save(self, state: Mapping[str, Any], keep: int) -> Path:
        """Write a checkpoint atomically under its `step`, remove all but the newest `keep`, keep the best one."""
        path = self._checkpoints.save(state, keep)
        if state.get("best"):
            self._checkpoints.mark_best(path)
        return path

    def load(self) -> dict[str, Any]:
        """The newest checkpoint that is whole, on the CPU; damaged ones are named in a warning and passed over.

        Raises UserError where there is none yet, or none is whole.
        """
        return self._checkpoints.newest()

    def load_beside_damaged(self) -> tuple[dict[str, Any], list[Path]]:
        """The same without a warning: the checkpoint, and the damaged ones that it stands in for, the oldest first."""
        found = self.checkpoints()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).* is damaged and is passed over", UserWarning)
            state = self._checkpoints.newest()
        return state, [path for path in found if path.name > f"step-{state['step']:09d}.pt"]

    def new_backbone(self) -> nn.Module:
        """The network of the run as it was before training: a timm module with fresh random weights."""
        return backbone_of(self.settings)

    def backbone(self) -> nn.Module:
        """The pre-trained query backbone, a plain timm module in eval mode: (N, C, S, S) → (N, num_features)."""
        backbone = self.new_backbone()
        backbone.load_state_dict(query_backbone_weights(self.load()["model"]))
        return backbone.eval()

    # ---------------------------------------------------------------- metrics

    def log(self, values: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(values)) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl; half-written and damaged ones are left out."""
        return list(self._metric_lines())

    def _metric_lines(self) -> Iterator[dict[str, Any]]:
        path = self.path / METRICS
        if path.exists():
            for text in path.read_bytes().splitlines():
                line = _metrics(text)
                if line is not None:
                    yield line

    def is_best(self, checks: Mapping[str, float]) -> bool:
        """Whether a check is at least as good as every one written down: by kNN, or else by retrieval."""
        name = next((name for name in ("knn_accuracy", "retrieval") if name in checks), None)
        if name is None:
            return False
        return all(checks[name] >= line[name] for line in self._metric_lines() if name in line)

    def rewind(self, step: int) -> None:
        """Forget the metrics of steps after `step`: they will be made again."""
        kept = "".join(json.dumps(line) + "\n" for line in self._metric_lines() if line["step"] <= step)
        write_atomically(self.path / METRICS, kept.encode())

    def skip(self, name: str, reason: str) -> None:
        """Note a picture that could not be read."""
        self._note(SKIPPED, ("name", "reason"), (name, reason))

    def skipped(self) -> list[tuple[str, str]]:
        """The pictures that could not be read so far, with the reason."""
        try:
            with (self.path / SKIPPED).open(encoding="utf-8", newline="", errors="backslashreplace") as file:
                return [(row[0], row[1]) for row in csv.reader(file) if len(row) == 2][1:]
        except OSError:
            return []

    def warn(self, step: int, text: str) -> None:
        """Note a warning about the training."""
        self._note(WARNINGS, ("step", "warning"), (str(step), text))

    def _note(self, name: str, header: Sequence[str], values: Sequence[str]) -> None:
        path = self.path / name
        with path.open("a", encoding="utf-8", newline="", errors="backslashreplace") as file:
            if file.tell() == 0:
                file.write(",".join(header) + "\n")
            csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(values)


def _metrics(text: bytes) -> dict[str, Any] | None:
    """A line as `log` wrote it, names with numbers and the step among them, or None for anything else."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or "step" not in line:
        return None
    return (
        line if all(type(value) is float or (type(value) is int and value < 2**63) for value in line.values()) else None
    )


class NoRun(Run):
    """Stands in for a run folder where a training is only measured: nothing is written or read."""

    def __init__(self) -> None:
        self.path = Path(os.devnull)


def _write_settings(path: Path, settings: RunSettings) -> None:
    text = yaml.safe_dump(json.loads(settings.model_dump_json()), sort_keys=False, allow_unicode=True)
    write_atomically(path / SETTINGS, text.encode())


def backbone_of(settings: RunSettings) -> nn.Module:
    """The backbone that the settings describe, untrained."""
    return build_backbone(
        settings.backbone,
        channels=settings.channels,
        stem=settings.stem,
        base_width=settings.base_width,
        image_size=settings.image_size,
        vit_rules=settings.vit_rules,
        keep_tokens=settings.keep_tokens,
    )


def query_backbone_weights(model: Mapping[str, Any]) -> dict[str, Any]:
    """Of the weights of a whole model, those of the query backbone, under its own names."""
    return {name.removeprefix(QUERY_BACKBONE): held for name, held in model.items() if name.startswith(QUERY_BACKBONE)}


def check_new(path: str | Path) -> None:
    """Raise UserError unless `path` is free for a new run: absent, or an empty folder."""
    path = Path(path)
    if (path / SETTINGS).exists():
        raise UserError(f"{path} already holds a run: continue it with moco resume {path}, or choose another --out")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder: choose another --out")
