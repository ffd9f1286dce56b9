"""`moco compare` and `moco ablate` from the first to the last: plan, cells, table, one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from moco.bench import measure
from moco.comparing.cells import Result, Work, carry_out, done_before, untrained
from moco.comparing.folder import plan_of, take_folder
from moco.comparing.plan import Cell, Row, ablated, compared
from moco.comparing.table import Line, lines, markdown, picture, table
from moco.data.loader import cores
from moco.data.sources import Source
from moco.errors import UserError, counted
from moco.pretraining import named, open_data
from moco.recipes import ONLY_FOR, pretrain_settings
from moco.reporting import report
from moco.resolve import absolute
from moco.settings import PretrainSettings
from moco.settings_file import read_yaml
from moco.train.checkpoints import write_atomically

FIGURES = ("knn", "linear")
SECONDS_TO_MEASURE = 20.0


@dataclass(frozen=True)
class Comparison:
    """What came out. lines: a row each, over its seeds, and one of the untrained network where there are labels.

    results: cell by cell. folder: where everything is.
    """

    lines: tuple[Line, ...]
    results: tuple[Result, ...]
    folder: Path


def compare(data: Any, methods: Sequence[str] = ("moco", "simclr", "byol"), **options: Any) -> Comparison:
    """Train the same backbone on the same pictures by several methods, evaluate and show them side by side.

    data: pictures, whatever `moco.pretrain` names (paths). methods: moco (what the settings describe) or names of
    `moco.recipes.METHODS`: v1, v2, v3, end-to-end, memory-bank, simclr, byol, swav, cpc. options: see `side_by_side`.
    """
    return side_by_side(data, compared(methods), "comparison of methods", **options)


def ablate(data: Any, over: str | Sequence[str], *, values: Sequence[Any] = (), **options: Any) -> Comparison:
    """Train with one setting varied as in the papers, everything else the same, and show the results side by side.

    over: names of `moco.comparing.plan.ABLATIONS`. values: others than the papers', for momentum, queue, temperature.
    options: see `side_by_side`.
    """
    over = [over] if isinstance(over, str) else list(over)
    return side_by_side(data, ablated(over, values), f"ablation over {', '.join(over)}", **options)


def side_by_side(
    data: Any,
    rows: Sequence[Row],
    title: str,
    *,
    seeds: int = 1,
    minutes: float | None = None,
    images_seen: int | None = None,
    test: str | Path | None = None,
    parallel: int = 1,
    quiet: bool = False,
    config: str | Path | None = None,
    **given: Any,
) -> Comparison:
    """Carry out every row with every seed, and write table, picture and page into the folder `out`.

    seeds: trainings of each row, from `seed` on. Budget of each: epochs, or `images_seen` pictures, or about `minutes`
    (as many epochs as the first row makes in that time, the same number for all). test: labelled pictures to test on;
    by default a part of the data is set aside. parallel: trainings at a time, which share the cores. given, config:
    settings of every training. The same call goes on where an earlier one was interrupted.

    Raises UserError for anything wrong with settings, data or folder, and Interrupted where a training was stopped.
    """
    if seeds < 1 or parallel < 1:
        raise UserError("--seeds and --parallel must be 1 or more")
    base = (read_yaml(config) if config else {}) | given | named(data=data)
    if "data" not in base:
        raise UserError("name the pictures: a folder, list or file that each training can open")
    settings = _checked(base, rows)
    source = open_data(settings, None)
    folder = Path(settings.out or f"runs/{title.split()[0]}").expanduser()
    console = None if quiet else Console(soft_wrap=True)
    threads = max(cores() // parallel, 1) if parallel > 1 else None
    before = plan_of(folder)
    if minutes is not None and before.get("minutes") == minutes:
        base |= {"epochs": before["base"]["epochs"]}  # a second measurement would come to another number
    else:
        base |= _budget(settings, source, minutes, images_seen)
    base |= {"data": _plain_paths(settings.data)}
    plan = {"title": title, "rows": [asdict(row) for row in rows], "base": base, "minutes": minutes}
    take_folder(folder, plan | {"test": None if test is None else absolute(str(test))})
    figures = FIGURES if _has_labels(source) else ()
    work = Work(folder, base, threads, figures, {"test": str(test)} if test is not None else {})
    cells = [Cell(row, settings.seed + number) for number in range(seeds) for row in rows]
    results = _carry_out_all(work, cells, parallel, console)
    # One for each seed: all rows begin with the same network.
    begun = {result.seed: result for result in reversed(results) if not result.failed}
    baseline = [untrained(work, begun[seed]) for seed in sorted(begun)] if figures else []
    found = Comparison(tuple(lines([*results, *baseline])), tuple(results), folder)
    _write(found, title, console)
    return found


def _checked(base: dict[str, Any], rows: Sequence[Row]) -> PretrainSettings:
    """The settings that all rows share; every row is looked at before hours go into the first."""
    for row in rows:
        values = {**base, **row.settings}
        method = str(values.get("method", "moco"))
        # What a method does not know is no mistake here: the other rows may.
        own = {name: value for name, value in values.items() if method in ONLY_FOR.get(name, (method,))}
        try:
            pretrain_settings(**own)
        except UserError as error:
            raise UserError(f"{row.name}: {error}") from error
    return pretrain_settings(**base)


def _plain_paths(data: str | tuple[str, ...]) -> str | list[str]:
    found = absolute(data)
    return found if isinstance(found, str) else list(found)


def _budget(
    settings: PretrainSettings, source: Source, minutes: float | None, images_seen: int | None
) -> dict[str, Any]:
    """The number of epochs, where it is asked for in another way."""
    if minutes is not None and images_seen is not None:
        raise UserError("--minutes and --images-seen are two budgets: choose one")
    if images_seen is not None:
        return {"epochs": max(round(images_seen / len(source)), 1)}
    if minutes is not None:
        found = measure(settings.data, seconds=SECONDS_TO_MEASURE, **settings.model_dump(exclude={"data"}))
        return {"epochs": max(round(minutes * 60 * found.job / len(source)), 1)}
    return {}


def _has_labels(source: Source) -> bool:
    return source.labels is not None and len(set(source.labels[source.labels >= 0].tolist())) > 1


def _carry_out_all(work: Work, cells: Sequence[Cell], parallel: int, console: Console | None) -> list[Result]:
    """The cells, `parallel` at a time, in their order."""

    def say(text: str) -> None:
        if console is not None:
            console.print(text, highlight=False, markup=False)

    epochs = counted(work.base["epochs"], "epoch") if "epochs" in work.base else "the usual epochs"
    say(f"{counted(len(cells), 'training')}, {epochs} each, in {work.out}")
    old = [cell.folder for cell in cells if done_before(work, cell) is not None]
    if old:
        say(f"{len(old)} of them are from an earlier call and are not repeated: {', '.join(old)}")
    done: list[Result] = []
    with ThreadPoolExecutor(parallel) as workers:
        try:
            for result in workers.map(lambda cell: carry_out(work, cell), cells):
                done.append(result)
                figures = ", ".join(f"{name} {value:.1%}" for name, value in result.figures.items())
                say(f"{len(done)}/{len(cells)} {result.folder}: {result.failed or figures}")
        except BaseException:
            workers.shutdown(wait=True, cancel_futures=True)
            raise
    return done


def _write(found: Comparison, title: str, console: Console | None) -> None:
    """The results as JSON, Markdown, picture and page; and on the screen."""
    folder = found.folder
    write_atomically(
        folder / "results.json", json.dumps([asdict(result) for result in found.results], indent=2).encode()
    )
    write_atomically(folder / "table.md", markdown(found.lines).encode())
    write_atomically(folder / "table.png", picture(title, found.lines))
    first = {result.row: folder / result.folder for result in reversed(found.results) if not result.failed}
    page = report(list(first.values()), out=str(folder / "comparison.html"), quiet=True) if len(first) > 1 else None
    if console is not None:
        console.print(table(title, found.lines))
        for line in found.lines:
            for text in line.failed:
                console.print(f"failed: {line.name}, {text}", highlight=False, markup=False)
        console.print(f"table: {folder / 'table.md'}, {folder / 'table.png'}", highlight=False, markup=False)
        if page is not None:
            console.print(f"page:  {page}", highlight=False, markup=False)
