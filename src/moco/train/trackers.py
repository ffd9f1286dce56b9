"""The curves for others to keep: Weights & Biases and MLflow, through their own clients, beside TensorBoard.

Where the client is told to work offline (WANDB_MODE=offline; for MLflow no MLFLOW_TRACKING_URI), it does. A tracker
that fails on the way is let go of with a warning: no training ends for the sake of a curve.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

from moco.errors import UserError
from moco.settings import PretrainSettings, RunSettings
from moco.train.checkpoints import write_atomically
from moco.train.job import Writer
from moco.train.run import Run

IDENTITIES = "trackers.json"
"""In the run folder: what the trackers call this run, so that a resume goes on with the same curves."""
PARAMETERS_AT_ONCE = 100
"""As many as MLflow takes in one call."""
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}


class Tracker(Protocol):
    """A client, opened for a run."""

    identity: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the figures of a step."""

    def close(self, finished: bool) -> None:
        """End it; finished: whether the training ended well."""


class Wandb:
    """A run of Weights & Biases. Its files are in RUN/wandb."""

    def __init__(self, project: str, run: Run, settings: RunSettings, identity: str | None) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=project, name=run.path.absolute().name, id=identity, resume="allow", dir=str(run.path),
            config=settings.model_dump(mode="json"), settings=wandb.Settings(silent=True),
        )  # fmt: skip
        self.identity = str(self._run.id)
        # Its own count of steps cannot go back, as a resume from a checkpoint may have to.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the figures of a step."""
        self._run.log({"step": step, **values})

    def close(self, finished: bool) -> None:
        """Upload what is left, or leave it on disk where it works offline."""
        self._run.finish(exit_code=0 if finished else 1)


class MLflow:
    """A run of MLflow: at MLFLOW_TRACKING_URI, or else in a store of files, RUN/mlflow."""

    def __init__(self, experiment: str, run: Run, settings: RunSettings, identity: str | None) -> None:
        # Its store of plain files is kept up but no longer extended, and has to be asked for.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        if not os.environ.get("MLFLOW_TRACKING_URI"):  # then nothing leaves this machine, figures of usage neither
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        where = os.environ.get("MLFLOW_TRACKING_URI") or (run.path / "mlflow").absolute().as_uri()
        self._client = MlflowClient(where)
        if identity is not None:
            self.identity = identity
            self._client.update_run(identity, "RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        self.identity = str(self._client.create_run(number, run_name=run.path.absolute().name).info.run_id)
        parameters = [Param(name, str(value)) for name, value in settings.model_dump(mode="json").items()]
        for start in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(self.identity, params=parameters[start : start + PARAMETERS_AT_ONCE])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the figures of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.identity, metrics=[Metric(name, v, now, step) for name, v in values.items()])

    def close(self, finished: bool) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self.identity, "FINISHED" if finished else "KILLED")


TRACKERS: dict[str, Callable[[str, Run, RunSettings, str | None], Tracker]] = {"wandb": Wandb, "mlflow": MLflow}


class TrackerWriter:
    """A tracker as the training writes to it (`job.Writer`): figures one by one, and all of a step at once to it."""

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self._tracker: Tracker | None = tracker
        self._values: dict[int, dict[str, float]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Add a point to a curve."""
        self._values.setdefault(step, {})[tag] = value

    def flush(self) -> None:
        """Hand the points over."""
        values, self._values = self._values, {}
        for step, figures in values.items():
            self._asked(lambda tracker, step=step, figures=figures: tracker.log(step, figures))  # type: ignore[misc]

    def close(self, finished: bool) -> None:
        """End the tracker's run."""
        self._asked(lambda tracker: tracker.close(finished))

    def _asked(self, what: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            what(self._tracker)
        except Exception as error:  # whatever a client, a network or a server may come up with
            self._tracker = None
            self._say(f"warning: {self._name} gave up ({_one_line(error)}): the training goes on without it")


class TensorBoard:
    """The curves in RUN/tensorboard, from the step after `first_step` on; let go of where the disk takes no more.

    Its own writer cannot be asked again once it has failed; metrics.jsonl has the same figures. say: told in one line.
    """

    def __init__(self, run: Run, first_step: int, say: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._say = say
        self._writer: Any = None
        try:
            self._writer = SummaryWriter(run.path / "tensorboard", purge_step=first_step + 1)
        except OSError as error:
            self._let_go(error)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Add a point to a curve."""
        self._ask("add_scalar", tag, value, step)

    def flush(self) -> None:
        """Write to disk."""
        self._ask("flush")

    def close(self) -> None:
        """Write what is left."""
        self._ask("close")

    def _ask(self, what: str, *arguments: object) -> None:
        if self._writer is None:
            return
        try:
            getattr(self._writer, what)(*arguments)
        except OSError as error:
            self._let_go(error)

    def _let_go(self, error: OSError) -> None:
        self._writer = None
        self._say(f"warning: TensorBoard gave up ({error.strerror or error}): the training goes on without its curves")


class Several:
    """Several writers as one."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = writers

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Add a point to a curve, in each."""
        for writer in self._writers:
            writer.add_scalar(tag, value, step)

    def flush(self) -> None:
        """Write to disk, each."""
        for writer in self._writers:
            writer.flush()


def wanted(settings: PretrainSettings) -> dict[str, str]:
    """The trackers that the settings ask for, with project or experiment. Raises UserError for a missing package."""
    found = {name: project for name, project in (("wandb", settings.wandb), ("mlflow", settings.mlflow)) if project}
    for name in found:
        package = find_spec(name)
        if package is None or package.origin is None:  # a folder of that name lies about where W&B has been at work
            raise UserError(f"--{name} needs the package {PACKAGES[name]}: pip install 'momentum-contrast[{name}]'")
    return found


@contextmanager
def open_trackers(run: Run, settings: RunSettings, say: Callable[[str], None]) -> Iterator[list[Writer]]:
    """Writers for the trackers that the settings ask for; those of a run that goes on add to the same curves.

    say: told in one line where one gives up. Raises UserError where one cannot be opened.
    """
    known, finished = _identities(run), False
    with ExitStack() as stack:
        writers: list[Writer] = []
        for name, project in wanted(settings).items():
            try:
                tracker = TRACKERS[name](project, run, settings, known.get(name))
            except Exception as error:
                raise UserError(
                    f"--{name} {project}: {_one_line(error)}; go on without it: moco resume {run.path} --{name} ''"
                ) from error
            writer = TrackerWriter(name, tracker, say)
            stack.callback(lambda writer=writer: writer.close(finished))  # type: ignore[misc]
            known[name] = tracker.identity
            write_atomically(run.path / IDENTITIES, json.dumps(known, indent=2).encode())
            writers.append(writer)
        yield writers
        finished = True


def _identities(run: Run) -> dict[str, str]:
    try:
        found = json.loads((run.path / IDENTITIES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
