"""`moco compare` and `moco ablate` from the first to the last: plan, cells, table, one page."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from moco.bench import measure
from moco.comparing.cells import Result, Work, carry_out, check_free, done_before, untrained
from moco.comparing.checks import check_budget, check_settings, check_test, check_trainings, check_varied, has_labels
from moco.comparing.children import Children
from moco.comparing.folder import plan_of, take_folder
from moco.comparing.plan import Cell, Row, ablated, compared
from moco.comparing.table import Line, lines, markdown, picture, table
from moco.data.loader import cores
from moco.data.sources import Source
from moco.errors import UserError, counted
from moco.pretraining import named, open_data
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
    rows = ablated(over, values)
    given = {name: value for name, value in options.items() if name in PretrainSettings.model_fields}
    check_varied((read_yaml(options["config"]) if options.get("config") else {}) | given, rows)
    return side_by_side(data, rows, f"ablation over {', '.join(over)}", **options)


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
    by default a part of the data is set aside. parallel: trainings at a time, which share the cores unless `threads`
    says how many each takes. given, config: settings of every training. The same call goes on where an earlier one was
    interrupted.

    Raises UserError for anything wrong with settings, data or folder, and Interrupted where a training was stopped.
    """
    if seeds < 1 or parallel < 1:
        raise UserError("--seeds and --parallel must be 1 or more")
    check_budget(given, minutes, images_seen)
    base = (read_yaml(config) if config else {}) | given | named(data=data)
    if "data" not in base:
        raise UserError("name the pictures: a folder, list or file that each training can open")
    settings = check_settings(base, rows)
    source = open_data(settings, None)
    folder = Path(settings.out or f"runs/{title.split()[0]}").expanduser()
    console = None if quiet else Console(soft_wrap=True)
    cells = [Cell(row, settings.seed + number) for number in range(seeds) for row in rows]
    if not all(done_before(folder, cell) for cell in cells):  # before hours go into the first
        if test is not None:
            check_test(str(test), source)
        check_trainings(base, rows, source)
    base |= _budget(settings, source, plan_of(folder), minutes, images_seen)
    check_settings(base, rows)  # another number of epochs may not go with the rest
    base |= {"data": _plain_paths(settings.data)}
    plan = {"title": title, "rows": [asdict(row) for row in rows], "base": base, "minutes": minutes}
    take_folder(folder, plan | {"test": None if test is None else absolute(str(test))})
    figures = FIGURES if has_labels(source) else ()
    threads = _threads(settings, parallel)
    work = Work(folder, base, threads, figures, {"test": str(test)} if test is not None else {})
    with Children() as children:
        results = _carry_out_all(work, cells, parallel, console, children)
        # One for each seed: all rows begin with the same network.
        begun = {result.seed: result for result in reversed(results) if not result.failed}
        baseline = [untrained(work, begun[seed]) for seed in sorted(begun)] if figures else []
        found = Comparison(tuple(lines([*results, *baseline])), tuple(results), folder)
        _write(found, title, console)
    return found


def _threads(settings: PretrainSettings, parallel: int) -> int | None:
    """Threads of each training, or None for what it takes by itself."""
    if parallel == 1:
        return None
    return max(cores() // parallel, 1) if settings.threads == "auto" else settings.threads


def _plain_paths(data: str | tuple[str, ...]) -> str | list[str]:
    found = absolute(data)
    return found if isinstance(found, str) else list(found)


def _budget(
    settings: PretrainSettings,
    source: Source,
    before: Mapping[str, Any],
    minutes: float | None,
    images_seen: int | None,
) -> dict[str, Any]:
    """The number of epochs, where it is asked for in another way. before: the plan of an earlier call."""
    pictures: float | None = images_seen
    if minutes is not None:
        if before.get("minutes") == minutes:  # a second measurement would come to another number
            return {"epochs": before["base"]["epochs"]}
        found = measure(settings.data, seconds=SECONDS_TO_MEASURE, **settings.model_dump(exclude={"data"}))
        pictures = minutes * 60 * found.job
    if pictures is None:
        return {}
    return {"epochs": max(round(pictures / (len(source) * settings.repeat)), 1)}


def _carry_out_all(
    work: Work, cells: Sequence[Cell], parallel: int, console: Console | None, children: Children
) -> list[Result]:
    """The cells, `parallel` at a time, in their order."""

    def say(text: str) -> None:
        if console is not None:
            console.print(text, highlight=False, markup=False)

    old = [cell.folder for cell in cells if done_before(work.out, cell) is not None]
    for cell in cells:
        if cell.folder not in old:
            check_free(work.out / cell.folder)
    epochs = counted(work.base["epochs"], "epoch") if "epochs" in work.base else "the usual epochs"
    say(f"{counted(len(cells), 'training')}, {epochs} each, in {work.out}")
    if old:
        say(f"{len(old)} of them are from an earlier call and are not repeated: {', '.join(old)}")
    done: list[Result] = []
    with contextlib.ExitStack() as stack:
        # One at a time in this thread, where a signal ends evaluations at once.
        each: Iterator[Result] = (carry_out(work, cell, children) for cell in cells)
        if parallel > 1:
            workers = ThreadPoolExecutor(parallel)
            stack.callback(workers.shutdown, wait=True, cancel_futures=True)
            each = workers.map(lambda cell: carry_out(work, cell, children), cells)
        for result in each:
            done.append(result)
            figures = ", ".join(f"{name} {value:.1%}" for name, value in result.figures.items())
            say(f"{len(done)}/{len(cells)} {result.folder}: {result.failed or figures}")
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
    runs = [first[line.name] for line in found.lines if line.name in first]  # in the order of the table
    page = report(runs, out=str(folder / "comparison.html"), quiet=True) if len(runs) > 1 else None
    if console is not None:
        console.print(table(title, found.lines))
        for line in found.lines:
            for text in line.failed:
                console.print(f"failed: {line.name}, {text}", highlight=False, markup=False)
        console.print(f"table: {folder / 'table.md'}, {folder / 'table.png'}", highlight=False, markup=False)
        if page is not None:
            console.print(f"page:  {page}", highlight=False, markup=False)
