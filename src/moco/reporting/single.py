"""The page of one run: what its folder says and, where its pictures are, what its network makes of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moco.errors import UserError
from moco.evaluate.contrast_probe import ViewPairs
from moco.evaluate.pictures import Part, open_part
from moco.evaluate.subject import Where, checkpoint_of, load_run
from moco.evaluation import opened_data
from moco.evaluation_settings import ReportSettings
from moco.health import health
from moco.report.page import render
from moco.reporting import records, sections
from moco.reporting.pictures import VOTES, look, shown_pairs, view_pairs
from moco.reporting.similarities import over_time
from moco.train.parallel import find_device
from moco.train.run import Run

PAIRS = 512
"""View pairs whose similarities are looked at."""
SHOWN_PAIRS = 12
SKIPPED_SHOWN = 200
HEALTH_IMAGES = 2048


@dataclass
class Looked:
    """What was found with the pictures of a run at one of its checkpoints. parts: values for the template."""

    parts: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


class Reporter:
    """Makes the page of a run, as often as asked; pictures are looked at again only after a new checkpoint.

    run: the run. given: what was asked for. data, labels: pictures in memory, or None.
    """

    def __init__(self, run: Run, given: ReportSettings, data: Any = None, labels: Any = None) -> None:
        self.run, self.given, self.data, self.labels = run, given, data, labels
        self._looked: tuple[Path | None, Looked] | None = None

    @property
    def name(self) -> str:
        """What the page calls the run."""
        return self.run.path.resolve().name

    @property
    def _where(self) -> Where:
        return Where(str(self.run.path), run=self.run)

    def looked(self, *, pictures: bool = True) -> Looked:
        """What the newest checkpoint makes of the pictures; with pictures=False only whether it is healthy."""
        newest = next(reversed(self.run.checkpoints()), None)
        if self._looked is None or self._looked[0] != newest:
            self._looked = newest, self._look(pictures and newest is not None, newest)
        return self._looked[1]

    def page(self, refresh: int | None) -> bytes:
        """The whole page. refresh: seconds after which a browser loads it again, or None."""
        run, settings, lines = self.run, self.run.settings, self.run.metrics()
        looked = self.looked()
        charts = records.charts(lines, settings)
        alarms, skipped = records.warnings(run), run.skipped()
        findings = (looked.health or {}).get("findings", [])
        evaluations = [sections.evaluation(found) for found in records.evaluations(run)]
        values: dict[str, Any] = {
            "title": f"{self.name} · moco report",
            "name": self.name,
            "path": str(run.path.resolve()),
            "made": records.now(),
            "refresh": refresh,
            "progress": records.progress(run, settings, lines),
            "overall": overall(looked, alarms),
            "headline": headline(looked, alarms),
            "tiles": records.tiles(lines, settings),
            "alarms": alarms,
            "findings": {
                "noted": sorted(
                    (finding for finding in findings if finding["verdict"] != "good"),
                    key=lambda finding: -records.severity(finding["verdict"]),
                ),
                "good": [finding for finding in findings if finding["verdict"] == "good"],
            },
            "notes": looked.notes,
            "charts": charts,
            "evaluations": evaluations,
            "skipped": {"count": len(skipped), "rows": skipped[:SKIPPED_SHOWN]},
            "settings": records.setting_rows(settings),
            "recipe": settings.recipe,
            "commands": records.commands(run, settings),
            "versions": records.versions(),
            "votes": VOTES,
            **looked.parts,
        }
        values["data"] = {"charts": {chart.name: chart.points for chart in charts}, "map": looked.parts["map_data"]}
        values["sections"] = sections.links(values)
        return render("report.html.jinja", values)

    # ---------------------------------------------------------------- looking at pictures

    def _look(self, pictures: bool, newest: Path | None) -> Looked:
        found = Looked(dict.fromkeys(("histograms", "views", "map", "map_data", "gallery", "agreement", "groups")))
        if newest is None:
            found.notes.append("there is no checkpoint yet: pictures come with the first one")
            return found
        try:
            state: dict[str, Any] = checkpoint_of(self._where, found.notes)
        except UserError as error:
            found.notes.append(f"without pictures: {error}")
            return found
        self._add_health(found, state.get("step"))
        if not pictures:
            return found
        try:
            opened, label_text = opened_data(
                self._where,
                self.given.data,
                self.data,
                self.given.label_source,
                self.labels,
            )
            part = open_part(opened, label_text, needed=False, most=self.given.images, seed=self.given.seed)
        except UserError as error:
            if self.given.data or self.given.labels or self.data is not None or self.labels is not None:
                raise
            found.notes.append(f"without pictures: {error}; where they are now: --data")
            return found
        self._add_views(found, part, int(state["images"]))
        self._add_album(found, part)
        return found

    def _add_health(self, found: Looked, step: object) -> None:
        """What `moco health` says, made now unless it is there already for this step."""
        stored = records.stored_health(self.run)
        if stored is not None and stored.get("step") == step:
            found.health = stored
            return
        images = min(self.given.images, HEALTH_IMAGES)
        words = {"labels": self.given.labels} if self.given.labels else {}
        data = self.data if self.data is not None else self.given.data or None
        try:
            made = health(
                self.run, data, quiet=True, images=images, device=self.given.device, workers=self.given.workers,
                seed=self.given.seed, precision=self.given.precision, **words,
            )  # fmt: skip
        except UserError as error:
            found.health = stored
            found.notes.append(
                f"health was not looked at: {error}"
                + ("" if stored is None else f"; shown is that of step {stored.get('step')}")
            )
            return
        found.health = {"verdict": made.verdict, "findings": [asdict(finding) for finding in made.findings]}
        found.notes += [note for note in made.notes if note not in found.notes]

    def _add_views(self, found: Looked, part: Part, images: int) -> None:
        settings, device = self.run.settings, find_device(self.given.device)
        try:
            pairs = view_pairs(part, settings, most=PAIRS, device=device, seed=self.given.seed)
            found.parts["views"] = sections.views(shown_pairs(pairs, part, SHOWN_PAIRS))
            numbered = _numbered(pairs, part, own=self.data is None and not self.given.data)
            several = over_time(settings, self.run.checkpoints(), images, numbered, device, self.given.seed)
            found.parts["histograms"] = list(several)
        except UserError as error:
            found.notes.append(f"without views: {error}")

    def _add_album(self, found: Looked, part: Part) -> None:
        given = self.given
        try:
            subject = load_run(self._where, found.notes)
            album = look(
                subject, part, device=find_device(given.device), precision=given.precision, workers=given.workers,
                seed=given.seed,
            )  # fmt: skip
        except UserError as error:
            found.notes.append(f"without a map: {error}")
            return
        if album.unreadable:
            name, reason = album.unreadable[0]
            found.notes.append(f"left out, as they cannot be read: {len(album.unreadable)}, such as {name}: {reason}")
        if len(part) < len(part.source):
            found.notes.append(f"{len(part):,} of {len(part.source):,} pictures are looked at, drawn by chance")
        found.parts |= {
            "map": {"count": len(album)},
            "map_data": sections.map_section(album, given.seed),
            "gallery": sections.gallery(album, given.seed),
            "agreement": sections.agreement(album),
            "groups": sections.groups(album),
        }


def _numbered(pairs: ViewPairs, part: Part, *, own: bool) -> ViewPairs:
    """View pairs with the numbers that the run gave their pictures; other pictures get numbers of no picture there."""

    def numbers(rows: Tensor) -> Tensor:
        return torch.from_numpy(part.indices)[rows] if own else -2 - rows

    return ViewPairs(pairs.query, pairs.key, [numbers(rows) for rows in pairs.ids], pairs.mean, pairs.std)


def overall(looked: Looked, alarms: list[tuple[str, str]]) -> str:
    """The verdict on a run: that of its health, at least "watch" where there were warnings; empty where unknown."""
    verdict = str((looked.health or {}).get("verdict", ""))
    return "watch" if alarms and verdict in ("", "good") else verdict


def headline(looked: Looked, alarms: list[tuple[str, str]]) -> str:
    """The verdict in a sentence."""
    if looked.health is None:
        return "Not looked at yet." if not alarms else f"{len(alarms)} warnings during the training."
    findings = looked.health["findings"]
    counts = {word: [f["name"] for f in findings if f.get("verdict") == word] for word in ("bad", "watch")}
    if not counts["bad"] and not counts["watch"]:
        return f"All {len(findings)} figures are as they should be" + (", but there were warnings." if alarms else ".")
    words = {"bad": "bad", "watch": "to be watched"}
    parts = [f"{words[word]}: {', '.join(names)}" for word, names in counts.items() if names]
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "."
