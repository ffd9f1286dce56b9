"""`moco tune`: search rate, temperature, momentum and crops; trials that fall behind are ended early."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Table

from moco.comparing.folder import take_folder
from moco.comparing.plan import SEARCHED
from moco.errors import TrainingError, UserError, check_names
from moco.pretraining import named, pretrain
from moco.recipes import pretrain_settings
from moco.resolve import absolute
from moco.settings_file import read_yaml
from moco.train.callbacks import Progress
from moco.train.checkpoints import write_atomically

if TYPE_CHECKING:
    import optuna

JOURNAL = "trials.log"
BEST = "best.yaml"
FIGURES = ("knn_accuracy", "retrieval")
"""What a check after an epoch gives: the first with labels, the second without."""
REDUCTION = 3
"""Of the trials at a rung, one in so many goes on; the next rung is so many times as long."""


@dataclass(frozen=True)
class Trial:
    """One training of a search. figure: the best check, 0 to 1, or None where it failed. ended: the epoch it got to."""

    number: int
    settings: Mapping[str, float]
    figure: float | None
    ended: int


@dataclass(frozen=True)
class Search:
    """What a search found. best: settings to add to a training; file: the same as YAML. trials: all, by number."""

    best: Mapping[str, Any]
    file: Path
    trials: tuple[Trial, ...]


def tune(
    data: Any,
    *,
    over: tuple[str, ...] = ("learning_rate", "temperature", "momentum", "crop_scale"),
    trials: int = 20,
    quiet: bool = False,
    config: str | Path | None = None,
    **given: Any,
) -> Search:
    """Search settings by successive halving (arXiv 1810.05934) with Optuna's sampler, and write the best as YAML.

    data: pictures, whatever `moco.pretrain` names. over: names of `moco.comparing.plan.SEARCHED`. trials: trainings in
    all; those whose check after 1, 3, 9, … epochs is not among the best third so far end there. The figure is kNN where
    there are labels, else retrieval (do two views of a picture find each other). given, config: settings of every
    training; `out` is the folder of the search. The same call goes on where an earlier one was interrupted.

    Raises UserError for anything wrong with settings, data or folder, and where Optuna is missing.
    """
    study_of = _optuna()
    check_names(over, SEARCHED, "setting to search")
    base = (read_yaml(config) if config else {}) | given | named(data=data)
    if "data" not in base or trials < 1:
        raise UserError("name the pictures, and one trial or more")
    settings = pretrain_settings(**(base | {"monitor_every": 1}))
    if settings.monitor == "none":
        raise UserError("a search goes by the checks after the epochs: leave --monitor none away")
    folder = Path(settings.out or "runs/tune").expanduser()
    found = absolute(settings.data)
    base |= {"data": found if isinstance(found, str) else list(found)}
    take_folder(folder, {"base": base, "over": over})
    console = None if quiet else Console(soft_wrap=True)
    study = study_of(folder, settings.epochs, settings.seed)

    def work(trial: optuna.Trial) -> float:
        chosen = {name: SEARCHED[name].suggested(trial) for name in over}
        values = base | chosen | {"out": str(folder / f"trial-{trial.number:03d}"), "monitor_every": 1}
        figure = _trained(trial, values)
        if console is not None:
            shown = ", ".join(f"{name} {_shown(value)}" for name, value in chosen.items())
            console.print(f"trial {trial.number}: {figure:.1%} with {shown}", highlight=False, markup=False)
        return figure

    done = sum(trial.state.is_finished() for trial in study.trials)
    study.optimize(work, n_trials=max(trials - done, 0), catch=(TrainingError,))
    return _result(study, folder, over, console)


def _trained(trial: optuna.Trial, values: Mapping[str, Any]) -> float:
    """Train a trial, as long as it keeps up. Returns its best check."""
    import optuna

    seen: list[float] = []
    pruned = False

    def after_epoch(progress: Progress) -> None:
        nonlocal pruned
        figure = next((progress.metrics[name] for name in FIGURES if name in progress.metrics), None)
        if figure is None:
            return
        seen.append(figure)
        trial.report(figure, round(progress.epoch))
        if trial.should_prune():
            pruned = True
            raise StopIteration

    pretrain(**values, quiet=True, on_epoch=after_epoch)
    if pruned:
        raise optuna.TrialPruned
    return max(seen)


def _optuna() -> Callable[[Path, int, int], optuna.Study]:
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise UserError("a search needs Optuna: pip install 'momentum-contrast[tune]'") from None

    def study_of(folder: Path, epochs: int, seed: int) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            study_name="moco",
            storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
            load_if_exists=True,
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=5),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION),
        )

    return study_of


def _result(study: optuna.Study, folder: Path, over: tuple[str, ...], console: Console | None) -> Search:
    trials = []
    for held in study.trials:
        figures = [value for value in held.intermediate_values.values() if not math.isnan(value)]
        chosen = {name: SEARCHED[name].setting(held.params) for name in over if held.params}
        trials.append(Trial(held.number, chosen, max(figures, default=None), len(figures)))
    complete = [trial for trial in study.trials if trial.value is not None and trial.state.name == "COMPLETE"]
    if not complete:
        raise TrainingError(f"no trial came to its end; see the run folders in {folder}")
    best = {name: SEARCHED[name].setting(study.best_trial.params) for name in over}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in best.items()}
    write_atomically(folder / BEST, yaml.safe_dump(plain).encode())
    if console is not None:
        console.print(_table(trials, over))
        console.print(f"best: moco pretrain DATA --config {folder / BEST}", highlight=False, markup=False)
    return Search(best, folder / BEST, tuple(trials))


def _table(trials: list[Trial], over: tuple[str, ...]) -> Table:
    shown = Table(title="trials, the best first")
    for name in ("trial", *over, "check, %", "epochs"):
        shown.add_column(name, justify="right")
    for trial in sorted(trials, key=lambda trial: -(trial.figure or 0.0)):
        figure = "failed" if trial.figure is None else f"{trial.figure * 100:.1f}"
        values = (_shown(trial.settings[name]) if name in trial.settings else "–" for name in over)
        shown.add_row(str(trial.number), *values, figure, str(trial.ended))
    return shown


def _shown(value: Any) -> str:
    return " ".join(f"{part:.3g}" for part in value) if isinstance(value, tuple) else f"{value:.4g}"
