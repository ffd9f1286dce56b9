"""`moco tune`: search rate, temperature, momentum and crops; trials that fall behind are ended early."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from moco.comparing.folder import take_folder
from moco.comparing.plan import SEARCHED, idle
from moco.errors import Interrupted, TrainingError, UserError, check_names
from moco.pretraining import named, pretrain, resume
from moco.recipes import pretrain_settings
from moco.resolve import absolute
from moco.settings import PretrainSettings
from moco.settings_file import read_yaml
from moco.train.callbacks import Progress
from moco.train.checkpoints import write_atomically
from moco.train.run import SETTINGS

if TYPE_CHECKING:
    import optuna

JOURNAL = "trials.log"
BEST = "best.yaml"
FIGURES = ("knn_accuracy", "retrieval")
"""What a check after an epoch gives: the first with labels, the second without."""
USUAL = ("learning_rate", "temperature", "momentum", "crop_scale")
"""What is searched where nothing is named, as far as the method knows it."""
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
    """What a search found. best: the values that were searched for. trials: all, by number.

    file: YAML with these values and all other settings of the search, for `--config`.
    """

    best: Mapping[str, Any]
    file: Path
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class _Plan:
    """folder: of the search. base: settings of every training. over: what is searched. trials: how many. seed."""

    folder: Path
    base: Mapping[str, Any]
    over: tuple[str, ...]
    trials: int
    seed: int


def tune(
    data: Any,
    *,
    over: tuple[str, ...] | None = None,
    trials: int = 20,
    quiet: bool = False,
    config: str | Path | None = None,
    **given: Any,
) -> Search:
    """Search settings by successive halving (arXiv 1810.05934) with Optuna's sampler, and write the best as YAML.

    data: pictures, whatever `moco.pretrain` names. over: names of `moco.comparing.plan.SEARCHED`; by default those of
    the first four that the method knows. trials: trainings in all; those whose check after 1, 3, 9, … epochs is not
    among the best third so far end there. The figure is kNN where there are labels, else retrieval (do two views of a
    picture find each other). given, config: settings of every training; `out` is the folder of the search. The same
    call goes on where an earlier one was interrupted, in the middle of a trial as well.

    Raises UserError for anything wrong with settings, data or folder, and where Optuna is missing; Interrupted where a
    trial was stopped.
    """
    open_study = _optuna()
    if trials < 1:
        raise UserError(f"--trials {trials}: a search takes one trial or more")
    base = (read_yaml(config) if config else {}) | given | named(data=data)
    if "data" not in base:
        raise UserError("name the pictures: a folder, list or file that each training can open")
    settings = pretrain_settings(**(base | {"monitor_every": 1}))
    if settings.monitor == "none":
        raise UserError("a search goes by the checks after the epochs: leave --monitor none away")
    over = _searched(over, settings)
    folder = Path(settings.out or "runs/tune").expanduser()
    found = absolute(settings.data)
    base |= {"data": found if isinstance(found, str) else list(found)}
    take_folder(folder, {"base": base, "over": over})
    console = None if quiet else Console(soft_wrap=True)
    study, plan = open_study(folder), _Plan(folder, base, over, trials, settings.seed)
    _search(study, plan, console)
    return _result(study, plan, console)


def _searched(over: tuple[str, ...] | None, settings: PretrainSettings) -> tuple[str, ...]:
    """What is searched, each of which has an effect. Raises UserError for any other."""
    if over is None:
        return tuple(name for name in USUAL if idle(name, settings) is None)
    check_names(over, SEARCHED, "setting to search")
    if len(set(over)) < len(over):
        raise UserError(f"--over {' '.join(over)}: each name once")
    for name in over:
        why = idle(name, settings)
        if why is not None:
            raise UserError(f"--over {name} changes nothing here: {why}")
    return over


def _search(study: optuna.Study, plan: _Plan, console: Console | None) -> None:
    """Carry out what is missing: first the trial that an earlier call did not bring to its end, then new ones."""
    import optuna

    def finished() -> int:
        return sum(trial.state.is_finished() for trial in study.trials)

    begun = [trial for trial in study.trials if not trial.state.is_finished()]
    while finished() < plan.trials:
        # A seed for each trial: those after an interruption would else repeat the values of the first ones.
        number = begun[0].number if begun else len(study.trials)
        own_seed = int(np.random.SeedSequence((plan.seed, number)).generate_state(1)[0])
        study.sampler = optuna.samplers.TPESampler(seed=own_seed, n_startup_trials=5)
        # The same trial, not a new one of the same values: what it has reported must not count twice in the halving.
        trial = optuna.Trial(study, begun.pop(0)._trial_id) if begun else study.ask()
        chosen = {name: SEARCHED[name].suggested(trial) for name in plan.over}
        state, figure = _outcome(trial, plan, chosen, console)
        study.tell(trial, figure, state)


def _outcome(
    trial: optuna.Trial, plan: _Plan, chosen: Mapping[str, Any], console: Console | None
) -> tuple[optuna.trial.TrialState, float | None]:
    """Train a trial, and say what came out. Returns how it ended, and its figure where it came to its end."""
    import optuna

    shown = ", ".join(f"{name} {_shown(value)}" for name, value in chosen.items())
    state, figure, text = optuna.trial.TrialState.COMPLETE, None, ""
    try:
        figure = _trained(trial, plan, chosen)
        text = f"{figure:.1%}"
    except optuna.TrialPruned:
        state, text = optuna.trial.TrialState.PRUNED, "fell behind"
    except TrainingError as error:
        state, text = optuna.trial.TrialState.FAIL, f"failed ({error})"
    except KeyboardInterrupt as stop:  # the trial stays open, for the next call
        raise Interrupted(
            f"stopped in trial {trial.number} of {plan.folder}; the same command goes on",
            stop.status if isinstance(stop, Interrupted) else 130,
        ) from stop
    if console is not None:
        console.print(f"trial {trial.number}: {text} with {shown}", highlight=False, markup=False)
    return state, figure


def _trained(trial: optuna.Trial, plan: _Plan, chosen: Mapping[str, Any]) -> float:
    """Train a trial, as long as it keeps up, or go on with its training. Returns its best check."""
    import optuna

    known = dict(trial.study.trials[trial.number].intermediate_values)
    pruned = False

    def after_epoch(progress: Progress) -> None:
        nonlocal pruned
        figure = next((progress.metrics[name] for name in FIGURES if name in progress.metrics), None)
        epoch = round(progress.epoch)
        if figure is None or epoch in known:
            return
        known[epoch] = figure
        trial.report(figure, epoch)
        if trial.should_prune():
            pruned = True
            raise StopIteration

    folder = plan.folder / f"trial-{trial.number:03d}"
    if (folder / SETTINGS).is_file():  # an earlier call was interrupted in it
        resume(folder, quiet=True, on_epoch=after_epoch)
    else:
        values = {**plan.base, **chosen, "out": str(folder), "monitor_every": 1}
        pretrain(**values, quiet=True, on_epoch=after_epoch)
    if pruned:
        raise optuna.TrialPruned
    return max(known.values())


def _optuna() -> Callable[[Path], optuna.Study]:
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise UserError("a search needs Optuna: pip install 'momentum-contrast[tune]'") from None

    def open_study(folder: Path) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            study_name="moco",
            storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
            load_if_exists=True,
            direction="maximize",
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION),
        )

    return open_study


def _result(study: optuna.Study, plan: _Plan, console: Console | None) -> Search:
    trials, folder, over = [], plan.folder, plan.over
    for held in study.trials:
        figures = [value for value in held.intermediate_values.values() if not math.isnan(value)]
        chosen = {name: SEARCHED[name].setting(held.params) for name in over if held.params}
        trials.append(Trial(held.number, chosen, max(figures, default=None), len(figures)))
    complete = [trial for trial in study.trials if trial.value is not None and trial.state.name == "COMPLETE"]
    if not complete:
        raise TrainingError(f"no trial came to its end; see the run folders in {folder}")
    best = {name: SEARCHED[name].setting(study.best_trial.params) for name in over}
    whole = {name: value for name, value in {**plan.base, **best}.items() if name not in ("data", "out")}
    plain = json.loads(json.dumps(whole, default=str))  # tuples are lists in YAML, paths are text
    write_atomically(folder / BEST, yaml.safe_dump(plain, allow_unicode=True).encode())
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
