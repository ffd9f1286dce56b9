"""The report for the eye: a table, the lists that matter, and the verdict in words."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from moco.check.advice import FEW
from moco.check.report import Report
from moco.errors import counted

SHOWN = 10
SHOWN_IN_GROUP = 4
USUAL_SHARE = 0.01
_TOO_MANY = "too many: training would stop without --max-bad; --fix-list leaves them out where they are files"


def show(found: Report, console: Console) -> None:
    """Print a report."""
    console.print(_table(found))
    _show_pairs(console, "cannot be read", found.unreadable)
    _show_pairs(console, "not what the name says (but can be read)", found.misnamed)
    _show_groups(console, "equal pictures", found.exact)
    _show_groups(console, "nearly equal pictures", found.near)
    if found.suggestions:
        settings = Table("setting", "suggested", "why", box=None, pad_edge=False, title="suggested settings")
        for item in found.suggestions:
            settings.add_row(f"--{item.setting.replace('_', '-')}", str(item.value), item.reason)
        console.print(settings)
    for line in words(found):
        console.print(line, highlight=False, markup=False)


def words(found: Report) -> list[str]:
    """The verdict, a sentence a line."""
    lines = list(found.notices)
    bad, copies, near = len(found.unreadable), found.copies, found.near_copies
    if bad == 0:
        lines.append(f"all {found.images:,} images can be read" if found.images > 1 else "the image can be read")
    elif found.readable == 0:
        lines.append(f"none of the {counted(found.images, 'image')} can be read: there is nothing to train on")
    else:
        few = bad <= max(10, USUAL_SHARE * found.images)
        lines.append(
            f"{bad:,} of {counted(found.images, 'image')} cannot be read: "
            + ("training puts others in their place" if few else _TOO_MANY)
        )
    if copies:
        lines.append(
            f"{counted(copies, 'image repeats', 'images repeat')} another one exactly: each is a false negative; "
            "--fix-list leaves them out"
        )
    if near:
        lines.append(
            f"{counted(near, 'image nearly repeats', 'images nearly repeat')} another one "
            f"({counted(len(found.near), 'group')}): look whether they should"
        )
    if found.unusable:
        wanted = next(item.value for item in found.suggestions if item.setting == "channels")
        lines.append(f"{counted(found.unusable, 'image')} cannot be read with {counted(wanted, 'channel')}")
    if len(found.good) == 1:
        lines.append("one picture alone teaches nothing: there is no other to tell it from")
    elif 0 < len(found.good) < FEW:
        lines.append(f"{len(found.good):,} different images are few to learn from without labels: find more if you can")
    return lines


def shown(text: str) -> str:
    """A name that a terminal can show: unprintable characters are escaped."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _table(found: Report) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("images", f"{found.images:,} ({found.readable:,} readable), looked at in {found.seconds:.1f} s")
    table.add_row("formats", _listed(found.formats))
    table.add_row("modes", _listed(found.modes))
    table.add_row("bits", _listed(found.bits))
    if found.smallest and found.median and found.largest:
        smallest, median, largest = (f"{w:,} × {h:,}" for w, h in (found.smallest, found.median, found.largest))
        table.add_row("size", f"{smallest} … {largest}, median {median}")
        common = ", ".join(f"{width} × {height} ({count:,})" for (width, height), count in found.common_sizes)
        table.add_row("sizes", f"{found.sizes:,} different: {common}")
    table.add_row("labels", _labels(found))
    return table


def _labels(found: Report) -> str:
    if not found.labels:
        return "none"
    without = f", {counted(found.unlabelled, 'image')} without" if found.unlabelled else ""
    return f"{len(found.labels):,}{without}: {_listed(found.labels)}"


def _listed(counts: Mapping[str, int]) -> str:
    some = ", ".join(f"{shown(name)} {count:,}" for name, count in list(counts.items())[:SHOWN])
    return some + (f", and {len(counts) - SHOWN:,} more" if len(counts) > SHOWN else "")


def _show_pairs(console: Console, title: str, pairs: list[tuple[str, str]]) -> None:
    if not pairs:
        return
    console.print(f"{len(pairs):,} {title}:", markup=False, highlight=False)
    for name, reason in pairs[:SHOWN]:
        console.print(f"  {shown(name)}: {shown(reason)}", markup=False, highlight=False)
    _show_rest(console, len(pairs))


def _show_groups(console: Console, title: str, groups: list[list[str]]) -> None:
    if not groups:
        return
    console.print(f"{counted(len(groups), 'group')} of {title}:", markup=False, highlight=False)
    for group in sorted(groups, key=len, reverse=True)[:SHOWN]:
        more = f", and {len(group) - SHOWN_IN_GROUP:,} more" if len(group) > SHOWN_IN_GROUP else ""
        names = ", ".join(map(shown, group[:SHOWN_IN_GROUP]))
        console.print(f"  {names}{more}", markup=False, highlight=False)
    _show_rest(console, len(groups))


def _show_rest(console: Console, count: int) -> None:
    if count > SHOWN:
        console.print(f"  … and {count - SHOWN:,} more (--json lists all)", markup=False, highlight=False)
