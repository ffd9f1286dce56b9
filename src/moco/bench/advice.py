"""Figures in a table, and in words: what limits the job, what to change, how long it will take. Pure functions."""

from __future__ import annotations

from rich.table import Table

from moco.bench.figures import Figures
from moco.errors import counted


def table(found: Figures) -> Table:
    """The figures, a row for each part that applies."""
    s = found.settings
    shown = Table(title="images per second (an image: two views of a picture)")
    shown.add_column("part")
    shown.add_column("images/s", justify="right")
    shown.add_column("")
    workers = counted(found.workers, "worker") if found.workers else "in this process"
    beyond = "" if s.views == "image" else " (colours on the training device)"
    for part, rate, note in (
        (
            "reading files",
            found.reading,
            f"{(found.reading_bytes or 0) / 1e6:,.0f} MB/s; the system caches what was read",
        ),
        ("decoding", found.decoding, f"one core, in full; shorter side {found.side or 0:.0f} pixels"),
        ("views, one worker", found.one_worker, f"with reading and decoding{beyond}"),
        ("views, all", found.views, f"{workers}, no training"),
        ("model step alone", found.step, _step_note(found)),
        ("whole job", found.job, f"{found.waiting:.0%} of the time waiting for data"),
    ):
        if rate is not None:
            shown.add_row(part, _number(rate), note)
    return shown


def _step_note(found: Figures) -> str:
    s = found.settings
    notes = [f"batch {s.batch_size}", s.precision]
    if found.step_batch < s.batch_size:
        notes[0] += f" ({s.batch_size / found.step:.0f} s), measured with {found.step_batch}"
    if found.memory is not None and found.device_memory is not None:
        notes.append(f"{found.memory / 1e9:.1f} of {found.device_memory / 1e9:.0f} GB GPU memory")
    return ", ".join(notes)


def words(found: Figures) -> list[str]:
    """What limits the job, what to change, and how long it will take: at most six lines."""
    changes = {"data": _feed, "cores": _share_cores, "views": _lighten_views, "step": _quicken_step}[found.limit](found)
    if found.undisturbed < 0.8:
        share = f"other programs took {1 - found.undisturbed:.0%} of the time on the cores"
        changes.insert(0, f"the measurement was disturbed, {share}: repeat it when they rest")
    return [_bottleneck(found), *changes[:4], _estimate(found)]


def _bottleneck(found: Figures) -> str:
    workers, shared = counted(found.workers, "worker"), ""
    if found.on_cpu and found.workers:
        shared = f"; {workers} and the training share {counted(found.cores, 'core')}"
    if found.limit == "views":
        return f"views: {found.aside:.0%} of the time goes into making them, a batch at a time, on {found.device}"
    if found.limit == "data":
        who = "the training" if found.on_cpu else "the GPU"
        what = f"{workers}" if found.workers else "the views, which the training process makes itself (no workers)"
        return f"data: {found.waiting:.0%} of the time {who} waits for {what}{shared}"
    if found.limit == "cores":
        slower = f"beside the workers a step takes {found.step / found.job - 1:.0%} longer than alone"
        return f"cores: {found.waiting:.0%} of the time waits for data, but {slower}{shared}"
    feed = f"data alone would come at {_number(found.views)} images/s, the step takes {_number(found.step)}"
    return f"the model step: {1 - found.aside:.0%} of the time is its own; {feed}{shared}"


def _feed(found: Figures) -> list[str]:
    """Data is the limit: more workers as far as there are cores, then less work for each."""
    s, needed, cores = found.settings, found.needed_workers, found.cores
    if found.on_cpu:
        return _share_cores(found)
    rates = f"the step takes {_number(found.step)} images/s, a worker makes {_number(found.each)}"
    if needed <= found.workers:
        enough = (
            f"the workers alone make {_number(found.views)} images/s, enough for the step; beside it they lack time"
        )
        return [f"{enough}: does something else need the {cores} cores?", *_quicken(found)]
    if needed <= cores:
        lines = [f"--workers {needed} (now {found.workers}): {rates}"]
    else:
        most = f"{needed} workers would be needed, but there are {cores} cores, good for about"
        asked = f"--workers {cores} (now {found.workers}): " if found.workers < cores else ""
        lines = [f"{asked}{rates}; {most} {_number(cores * found.each)} images/s", _lighter(found)]
        if s.views == "image":
            lines.append("--views split: colours and blur on the GPU instead of in the workers")
    if found.one_worker is not None and 1 < found.workers <= cores and found.each < 0.6 * found.one_worker:
        times = f"{found.workers} workers make only {found.views / found.one_worker:.1f} times what one makes"
        lines.append(f"{times}: the disk, the memory or other programs hold them back")
    return lines


def _share_cores(found: Figures) -> list[str]:
    """Workers and training need the same cores."""
    cores = found.cores
    if not found.on_cpu:
        crowded = found.workers > 1 and found.workers >= cores - 1
        fewer = min(found.needed_workers, found.workers - 1)
        line = f"--workers {fewer} (now {found.workers}) leaves more of the {cores} cores to the training process"
        return [*([line] if crowded else []), *_quicken(found)]
    # The step would use all cores, and so would the views: at best, each picture takes its time for both.
    best = 1 / (1 / found.step + 1 / (cores * found.each))
    # w workers feed what the other cores train: w · each = step · (cores − w) / cores.
    workers = max(1, round(cores * found.step / (cores * found.each + found.step)))
    possible = f"about {_number(best)} images/s"
    if found.job >= 0.9 * best:
        line = f"more than {possible} is not in {counted(cores, 'core')}: less work helps, or a GPU"
    elif workers == found.workers:
        line = f"{counted(cores, 'core')} should make {possible} with these settings: does something else run here?"
    else:
        threads = f" --threads {cores - workers}" if cores > 2 else ""
        line = (
            f"try --workers {workers}{threads} (now {found.workers}): well shared, {cores} cores would make {possible}"
        )
    lines = [line, _lighter(found)]
    return lines + _quicken(found, size="--image-size" not in lines[-1])


def _lighten_views(found: Figures) -> list[str]:
    """Views are made a batch at a time, between the steps."""
    try_workers = ["try --views image --workers 1: a worker makes them beside the training"] if found.cores > 1 else []
    return [*(try_workers if found.on_cpu else []), *_quicken(found)]


def _lighter(found: Figures) -> str:
    """How to make the work of a worker less, by what takes most of it."""
    s = found.settings
    shares = {"views": 1.0}
    if found.one_worker and found.reading and found.decoding:
        times = {"reading": 1 / found.reading, "decoding": 1 / found.decoding}
        # The first reading may have come from the disk, and the worker's from the cache.
        total = max(1 / found.one_worker, sum(times.values()))
        shares = {part: taken / total for part, taken in times.items()}
        shares["views"] = 1 - sum(shares.values())
    most = max(shares, key=lambda part: shares[part])
    if most == "reading":
        return f"reading takes {shares[most]:.0%} of a worker's time: put the files on a faster disk"
    if most == "decoding":
        line = f"decoding takes up to {shares[most]:.0%} of a worker's time: store the pictures"
        if found.side is not None and found.side > 2 * s.image_size:
            return f"{line} smaller, shorter side {1.5 * s.image_size:.0f} instead of {found.side:.0f} pixels"
        return f"{line}, if all have one size, as one .npy array"
    return f"the two views take {shares[most]:.0%} of a worker's time: a smaller --image-size (now {s.image_size})"


def _quicken_step(found: Figures) -> list[str]:
    lines = _quicken(found)
    if not found.on_cpu and found.workers and 2 * (found.needed_workers + 1) <= found.workers:
        lines.append(f"--workers {found.needed_workers + 1} would do (now {found.workers})")
    return lines


def _quicken(found: Figures, *, size: bool = True) -> list[str]:
    """How to make the step itself faster."""
    s, lines = found.settings, []
    if s.precision == "fp32" and found.best_precision != "fp32":
        lines.append(f"--precision {found.best_precision}: the fastest arithmetic of this device")
    if found.memory is not None and found.device_memory is not None and found.memory < 0.5 * found.device_memory:
        used = f"the GPU memory is used to {found.memory / found.device_memory:.0%}"
        lines.append(f"a larger --batch-size (now {s.batch_size}): {used}")
    if not s.compile:
        lines.append("try --compile: some minutes of start-up, then usually a faster step")
    if size:
        smaller = f"a smaller --image-size (now {s.image_size}) or --backbone (now {s.backbone})"
        lines.append(f"{smaller}: the work of a step grows with the area of a view")
    return lines


def _estimate(found: Figures) -> str:
    s = found.settings
    line = f"estimate: an epoch of {counted(found.images_per_epoch, 'image')} {_time(found.epoch_seconds)}, "
    line += f"{counted(s.epochs, 'epoch')} {_time(found.total_seconds)}, without checks and checkpoints"
    if found.limit == "step" or found.on_cpu:  # on a CPU, views always take their part of the cores
        return line
    return f"{line}; at the rate of the step alone {_time(found.total_seconds * (1 - found.lost))}"


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 9.95 else f"{rate:.1f}" if rate >= 0.1 else f"{rate:.1g}"


def _time(seconds: float) -> str:
    """Hours and minutes as h:mm; below an hour in words, since 0:05 could be anything."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    days = f" ({minutes / 1440:.1f} days)" if minutes >= 2880 else ""
    return f"{minutes // 60}:{minutes % 60:02} h{days}"
