"""What a run folder says without its pictures: how far it is, its curves, warnings, evaluations, settings."""

from __future__ import annotations

import csv
import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from moco import __version__
from moco.errors import UserError
from moco.recipes import RECIPES, recipe_values
from moco.report.charts import Chart, between, is_number, line_of
from moco.reporting.checks import described
from moco.settings import PretrainSettings, RunSettings
from moco.train.lock import is_held
from moco.train.run import SETTINGS, WARNINGS, Run

Records = list[dict[str, Any]]

PLAIN = ("step", "epoch", "loss", "chance_loss", "learning_rate", "images_per_second", "data_wait", "feature_spread")
SIMILARITIES = ("positive_similarity", "negative_similarity", "hardest_similarity")
VERSIONS = ("torch", "torchvision", "timm", "numpy", "opencv-python-headless", "pillow", "scikit-learn")


@dataclass(frozen=True)
class Progress:
    """How far a run is. state: finished, running, stopped or not begun. epoch: done, of epochs. step: as written."""

    state: str
    epoch: float
    epochs: int
    step: int


def progress(run: Run, settings: RunSettings, records: Records) -> Progress:
    """How far a run is, by its metrics and its lock."""
    epoch, step = (max((line.get(name, 0) for line in records), default=0) for name in ("epoch", "step"))
    if epoch >= settings.epochs - 1e-3:
        state = "finished"
    elif is_held(run.path):
        state = "running"
    else:
        state = "stopped" if records else "not begun"
    return Progress(state, float(epoch), settings.epochs, int(step))


def charts(records: Records, settings: RunSettings) -> list[Chart]:
    """The curves of a run; those whose figures it does not write down are left out."""
    training = [line for line in records if "loss" in line]
    found = [
        _chart(
            "loss", "Loss", "Falls below chance as views of a picture find each other. It rises at first, while real "
            "keys replace the random ones that a queue starts with.",
            line_of(training, "loss", "loss"), line_of(training, "chance_loss", "chance", tone=7, dashed=True),
            least=0,
        ),
        _chart(
            "contrast", "Contrast accuracy", "How often the other view of a picture is the nearest of all keys.",
            line_of(training, "contrast_accuracy", "found"), share=True, zero=True, least=0, most=1,
        ),
        _similarities(training),
        _chart(
            "spread", "Feature spread", "Of the queries of a batch in training: 1 when features fill the sphere, 0 "
            "when all pictures look the same to the network (collapse).", line_of(training, "feature_spread", "spread"),
            zero=True, least=0,
        ),
        *_checks([line for line in records if "loss" not in line]),
        _chart(
            "rate", "Learning rate", "The step width of the optimiser, as scheduled.",
            line_of(training, "learning_rate", "learning rate"), zero=True, least=0,
        ),
        _momentum(training, settings),
        _chart(
            "speed", "Pictures per second", "How fast the training went.",
            line_of(training, "images_per_second", "pictures per second"), zero=True, least=0,
        ),
        _chart(
            "wait", "Waiting for data", "Part of the time that steps waited for pictures: below 30 % is fine.",
            line_of(training, "data_wait", "waiting"), share=True, zero=True, least=0, most=1,
        ),
    ]  # fmt: skip
    return [chart for chart in found if chart is not None]


def _chart(name: str, title: str, explanation: str, *lines: Any, **kind: Any) -> Chart | None:
    there = tuple(line for line in lines if line is not None)
    return Chart(name, title, explanation, there, **kind) if there else None


def _similarities(training: Records) -> Chart | None:
    positive, negative, hardest = (
        line_of(training, name, label, tone=tone)
        for name, label, tone in zip(
            SIMILARITIES, ("positive", "negatives, mean", "nearest negative"), (0, 1, 2), strict=True
        )
    )
    if negative is not None and hardest is not None and list(negative.x) == list(hardest.x):
        negative = between(negative, negative.y, hardest.y)
    return _chart(
        "similarity", "Similarity", "Cosine of a query with its positive and with the negatives. The shaded part is "
        "where negatives lie: from their mean to the nearest one.", positive, negative, hardest, least=-1, most=1,
    )  # fmt: skip


def _checks(checks: Records) -> list[Chart | None]:
    """The checks after epochs (kNN accuracy where there are labels), a chart each."""
    names = sorted({name for line in checks for name in line if name not in ("step", "epoch")})
    found = []
    for number, name in enumerate(names):
        known = described(name)
        line = line_of(checks, name, name.replace("_", " ").replace("knn", "kNN"))
        kind = {"share": known.share, "least": known.least, "most": known.most}
        found.append(_chart(f"check{number}", known.title, known.explanation, line, **kind))
    return found


def _momentum(training: Records, settings: RunSettings) -> Chart | None:
    """m as written down, or as set where it stays the same."""
    written = line_of(training, "momentum", "m")
    setting = getattr(settings, "momentum", None)
    constant = getattr(settings, "momentum_schedule", "constant") == "constant"
    if (
        written is None
        and constant
        and setting is not None
        and getattr(settings, "key_encoder", "momentum") == "momentum"
    ):
        written = line_of([line | {"momentum": setting} for line in training], "momentum", "m")
    return _chart(
        "momentum", "Momentum", "How slowly the key encoder follows the query encoder.", written, least=0, most=1
    )


def tiles(records: Records, settings: RunSettings) -> list[dict[str, str]]:
    """The most telling figures: name, value, what to hold it against."""
    found = []
    loss, chance, below = latest(records, "loss"), latest(records, "chance_loss"), below_chance(records)
    if loss is not None:
        note = "" if below is None else f"chance {chance:.2f}: {abs(below):.0%} {'below' if below >= 0 else 'above'}"
        found.append(("loss", f"{loss:.3f}", note))
    for name, text in (("knn_accuracy", "kNN accuracy"), ("retrieval", "retrieval")):
        values = [line[name] for line in records if is_number(line.get(name))]
        if values:
            found.append((text, _percent(values[-1]), f"best {_percent(max(values))}, first {_percent(values[0])}"))
    for name, text, meaning in (
        ("contrast_accuracy", "contrast accuracy", "other view found among all keys"),
        ("feature_spread", "feature spread", "1 is spread out, 0 collapsed"),
    ):
        value = latest(records, name)
        if value is not None:
            found.append((text, _percent(value) if "accuracy" in name else f"{value:.2f}", meaning))
    speeds = [line["images_per_second"] for line in records if is_number(line.get("images_per_second"))]
    if speeds:
        found.append(("pictures per second", f"{median(speeds):,.3g}", "median of the training"))
    found.append(("network", settings.backbone, f"{settings.image_size} × {settings.image_size} × {settings.channels}"))
    return [{"name": name, "value": value, "note": note} for name, value, note in found]


def below_chance(records: Records) -> float | None:
    """How far the last loss is below that of knowing nothing, as a share of it; None where there is no such level."""
    loss, chance = latest(records, "loss"), latest(records, "chance_loss")
    return None if loss is None or not chance else 1 - loss / chance


def _percent(share: float) -> str:
    return f"{share * 100:.1f}\N{NO-BREAK SPACE}%"


def latest(records: Records, name: str) -> float | None:
    """The last number written down under a name, or None."""
    return next((float(line[name]) for line in reversed(records) if is_number(line.get(name))), None)


def severity(verdict: object) -> int:
    """How bad a verdict is: 0 for good or unknown."""
    return {"watch": 1, "bad": 2}.get(str(verdict), 0)


def warnings(run: Run) -> list[tuple[str, str]]:
    """Step and text of what a run warned about."""
    try:
        with (run.path / WARNINGS).open(encoding="utf-8", newline="", errors="backslashreplace") as file:
            return [(row[0], row[1]) for row in csv.reader(file) if len(row) == 2][1:]
    except OSError:
        return []


def evaluations(run: Run) -> list[dict[str, Any]]:
    """What `moco eval` wrote into the run folder, file by file; what cannot be read is passed over."""
    found = []
    for path in sorted((run.path / "eval").glob("*.json")):
        try:
            details = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(details, dict) and isinstance(details.get("rows"), dict):
            found.append({"name": path.stem} | details)
    return found


def stored_health(run: Run) -> dict[str, Any] | None:
    """What `moco health` wrote into the run folder last, or None."""
    try:
        details = json.loads((run.path / "eval" / "health.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return details if isinstance(details, dict) and isinstance(details.get("findings"), list) else None


# ---------------------------------------------------------------- settings


def setting_rows(settings: RunSettings) -> list[dict[str, Any]]:
    """Every setting: its name, value and meaning; chosen where it is not what the recipe would give."""
    usual = _usual(settings)
    return [
        {
            "name": name,
            "value": shown(value),
            "meaning": PretrainSettings.model_fields[name].description or "",
            "chosen": name in usual and not _same(usual[name], value),
        }
        for name, value in settings.model_dump().items()
        if name in PretrainSettings.model_fields
    ]


def _usual(settings: RunSettings) -> Mapping[str, Any]:
    """What the recipe of a run gives where nothing else is asked for; `auto` values are left out."""
    values = recipe_values(settings.recipe, settings.backbone) if settings.recipe in RECIPES else {}
    usual = PretrainSettings(**values).model_dump()
    return {name: value for name, value in usual.items() if value != "auto"}


def _same(first: Any, second: Any) -> bool:
    return json.dumps(first) == json.dumps(second)


def shown(value: Any) -> str:
    """A setting as text."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return yaml.safe_dump(dict(value), default_flow_style=True, allow_unicode=True).strip()
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def commands(run: Run, settings: RunSettings) -> dict[str, str]:
    """The command that repeats a run from its folder, and the one that needs nothing but the data."""
    again = ["--out", f"{run.path}-again"]
    processes = getattr(settings, "processes", None) or 1
    again = ["--nproc", str(processes), *again] if processes > 1 else again
    return {
        "With the settings that the run wrote down": shlex.join(
            ["moco", "pretrain", "--config", str(run.path / SETTINGS), *again]
        ),
        "With flags only": shlex.join(["moco", "pretrain", *_arguments(settings), *again]),
    }


def _arguments(settings: RunSettings) -> list[str]:
    """DATA and the flags that lead to these settings, exactly."""
    data = settings.data or "DATA"
    words = [data] if isinstance(data, str) else list(data)
    usual = _usual(settings)
    words += ["--recipe", settings.recipe] if settings.recipe in RECIPES else []
    for name, value in settings.model_dump().items():
        if name not in PretrainSettings.model_fields or name in ("data", "out", "recipe") or value == "auto":
            continue
        if name in usual and _same(usual[name], value):
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool) and PretrainSettings.model_fields[name].annotation is bool:
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value) if isinstance(value, (str, int, float)) else shown(value)]
    return words


def differing(several: Sequence[RunSettings]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs: name, and the value in each."""
    dumps = [settings.model_dump() for settings in several]
    names = dict.fromkeys(name for dump in dumps for name in dump if name != "out")
    rows = [(name, [shown(dump[name]) if name in dump else "–" for dump in dumps]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def versions() -> list[tuple[str, str]]:
    """What this report was made with."""
    found = [("moco", __version__), ("Python", platform.python_version())]
    for name in VERSIONS:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return [*found, ("system", f"{platform.system()} {platform.release()}, {platform.machine()}")]


def now() -> str:
    """The time of the report, to the minute, with its offset."""
    return datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")


def check_runs(names: Sequence[str]) -> None:
    """Raise UserError where a run is named twice."""
    if len({str(Path(name).resolve()) for name in names}) < len(names):
        raise UserError("a run is named twice: name different ones to compare")
