"""What a measurement found, and what follows from it by arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from moco.settings import RunSettings

WORTH_SAYING = 0.1
"""A share of the time below this is not called a bottleneck."""


@dataclass(frozen=True)
class Figures:
    """What was measured. Rates are pictures per second, and a picture means two views of it.

    Attributes:
        settings: of the training, every value resolved. images: in the data. cores: that this process may use.
        device: what trains, by name. best_precision: the fastest arithmetic that it has.
        reading, reading_bytes: files and bytes per second, one after the other; None for arrays.
        decoding: by one core, in full size (training reduces JPEGs where its crops allow); None for arrays.
        side: median of the pictures' shorter sides in pixels.
        one_worker: reading, decoding and a worker's share of the views in one process; None where views are made a
            batch at a time.
        views: all workers, without a model.
        step: the model step alone. step_batch: pictures in a measured step, fewer than a batch where that is slow.
        memory, device_memory: peak during the steps and what there is, in bytes; None without CUDA.
        job: everything together. waiting: share of its time in which the device waits for pictures, 0 to 1.
        undisturbed: share of the time for which the process had a core, while it decoded or, on a CPU, trained, 0 to 1;
            the rest went to other programs.
    """

    settings: RunSettings
    images: int
    cores: int
    device: str
    best_precision: str
    reading: float | None
    reading_bytes: float | None
    decoding: float | None
    side: float | None
    one_worker: float | None
    views: float
    step: float
    step_batch: int
    memory: int | None
    device_memory: int | None
    job: float
    waiting: float
    undisturbed: float

    @property
    def on_cpu(self) -> bool:
        """Whether training and workers share the cores."""
        return self.settings.device == "cpu"

    @property
    def workers(self) -> int:
        """Processes that make views."""
        return 0 if self.settings.views == "batch" else self.settings.workers

    @property
    def lost(self) -> float:
        """Share of the time by which the job is slower than the step alone, 0 to 1."""
        return max(0.0, 1 - self.job / self.step)

    @property
    def aside(self) -> float:
        """Share of the time that does not go into the model step, 0 to 1."""
        # Where one process does both in turn, its waiting is all of it; else what the step is slowed down by.
        return self.waiting if self.on_cpu and self.workers == 0 else self.lost

    @property
    def each(self) -> float:
        """Pictures per second of one worker while all of them work."""
        together = self.views / max(self.workers, 1)
        return together if self.one_worker is None else min(self.one_worker, together)

    @property
    def needed_workers(self) -> int:
        """Workers that would keep up with the step alone."""
        return math.ceil(self.step / self.each)

    @property
    def limit(self) -> Literal["data", "views", "cores", "step"]:
        """What the job is slowed down by: waiting for workers, views made in this process, shared cores; or nothing."""
        if self.settings.views == "batch":
            return "views" if self.aside >= WORTH_SAYING else "step"
        if self.waiting >= WORTH_SAYING:
            return "data"
        return "cores" if self.aside >= WORTH_SAYING else "step"

    @property
    def images_per_epoch(self) -> int:
        """Pictures in whole batches; the rest of an epoch is left out."""
        return self.images // self.settings.batch_size * self.settings.batch_size

    @property
    def epoch_seconds(self) -> float:
        """Estimated time of an epoch, without checks and checkpoints."""
        return self.images_per_epoch / self.job

    @property
    def total_seconds(self) -> float:
        """Estimated time of all planned epochs."""
        return self.epoch_seconds * self.settings.epochs

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, by part; units are in the names, and None stands for a part that does not apply."""
        rate = "images_per_second"
        return {
            "images": self.images,
            "cores": self.cores,
            "device": self.device,
            "reading": self.reading and {rate: self.reading, "bytes_per_second": self.reading_bytes},
            "decoding": self.decoding and {rate: self.decoding, "median_shorter_side": self.side},
            "views": {f"{rate}_per_worker": self.one_worker, rate: self.views, "workers": self.workers},
            "step": {
                rate: self.step,
                "batch_size": self.step_batch,
                "peak_memory_bytes": self.memory,
                "device_memory_bytes": self.device_memory,
            },
            "job": {rate: self.job, "waiting_share": self.waiting, "limit": self.limit},
            "undisturbed_share": self.undisturbed,
            "estimate": {
                "images_per_epoch": self.images_per_epoch,
                "epoch_seconds": self.epoch_seconds,
                "epochs": self.settings.epochs,
                "total_seconds": self.total_seconds,
            },
            "settings": self.settings.model_dump(mode="json"),
        }
