"""Images per second of the training step alone: moco against the step as it is usually written, sides in turns.

    python benchmarks/speed_step.py [--part resnet50 resnet18 groups] [--rounds 3] [--compile] [--json out.json]

The batch is in memory already; counted is all from there to updated weights and queue: momentum update, both encoders,
loss, backward, optimiser, enqueue. resnet50: 224 pixels, batch 32, K 65,536, MLP head, τ 0.2. resnet18: small-image
stem, full width, 32 pixels, batch 256, K 4,096. groups: three ways to normalise a batch in 8 parts, one encoder
forward and backward. --compile adds rows with the setting `compile`, which take minutes to prepare.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from measure import Elsewhere, in_turns, show, summary, write
from reference_recipe import BN_GROUPS, GroupedBatchNorm
from torch import Tensor, nn

from moco.building import build_model
from moco.contrast.batchnorm import encode_in_groups
from moco.contrast.dictionary import Queue
from moco.data.loader import Batch
from moco.data.sources import ArraySource
from moco.data.views import normalize
from moco.pretraining import build_stream
from moco.recipes import pretrain_settings
from moco.resolve import resolve
from moco.settings import RunSettings
from moco.train import job as jobs
from moco.train import loop
from moco.train.compiling import compile_encoders
from moco.train.parallel import Processes
from moco.train.run import NoRun

SETUPS: dict[str, dict[str, Any]] = {
    "resnet50": {"recipe": "v2", "batch_size": 32, "queue_size": 65_536},
    "resnet18": {"recipe": "small", "batch_size": 256, "queue_size": 4_096},
}
RATE = 1e-3  # on noise there is nothing to learn; the step costs the same
PLAIN = "plain step, fp32, NCHW"
OURS = "moco, as the recipe has it"


def resolved(part: str, **options: Any) -> RunSettings:
    """Settings of a part for noise pictures of the right size, every `auto` replaced."""
    asked = pretrain_settings(**(SETUPS[part] | {"device": "cpu", "monitor": "none"} | options))
    return resolve(asked, noise_source(asked.batch_size, asked.image_size), one_process())


def noise_source(count: int, size: int) -> ArraySource:
    return ArraySource(np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8))


def one_process() -> Processes:
    return Processes(0, 1, torch.device("cpu"))


def pictures(settings: RunSettings) -> tuple[Tensor, Tensor]:
    """Two views as the loader hands them over: uint8 (N, 3, S, S), channels last in memory."""
    shape = (2, settings.batch_size, settings.image_size, settings.image_size, 3)
    views = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    query, key = views.permute(0, 1, 4, 2, 3)
    return query, key


class PlainStep:
    """The step as tutorials write it: float32, a loop for the momentum update, all logits at once, a copied queue."""

    def __init__(self, settings: RunSettings) -> None:
        model = build_model(settings)
        self.query_encoder, self.key_encoder = model.query_encoder.train(), model.key_encoder.train()
        self.queue = F.normalize(torch.randn(settings.feature_size, settings.queue_size), dim=0)
        self.momentum, self.temperature, self.position = settings.momentum, settings.temperature, 0
        self.optimizer = torch.optim.SGD(
            self.query_encoder.parameters(), RATE, momentum=0.9, weight_decay=settings.weight_decay
        )
        self.view_q, self.view_k = (
            normalize(view, settings.mean, settings.std).contiguous() for view in pictures(settings)
        )

    def __call__(self) -> float:
        q = F.normalize(self.query_encoder(self.view_q), dim=1)
        with torch.no_grad():
            for key, query in zip(self.key_encoder.parameters(), self.query_encoder.parameters(), strict=True):
                key.mul_(self.momentum).add_(query, alpha=1 - self.momentum)
            k = F.normalize(self.key_encoder(self.view_k), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone())
        logits = torch.cat([positive, negative], dim=1) / self.temperature
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.queue[:, self.position : self.position + len(k)] = k.T
        self.position = (self.position + len(k)) % self.queue.shape[1]
        return loss.item()


def our_step(settings: RunSettings) -> Callable[[], object]:
    """One optimiser step of moco per call."""
    own = one_process()
    source = noise_source(settings.batch_size, settings.image_size)
    stream = build_stream(settings, source, own)
    job = jobs.Job(settings, build_model(settings), stream, NoRun(), own, None, None)
    job.model.train()
    if settings.compile and not compile_encoders(job.model, own.device, None):
        sys.exit("torch.compile does not work here: try without --compile")
    query, key = pictures(settings)
    steps = itertools.count()

    def step() -> object:
        number = next(steps)
        ids = torch.arange(len(query)) + number * len(query)  # no picture comes back while its key is in the queue
        return loop.optimise(job, job.model, Batch(query, key, ids, []), number, RATE)

    return step


def step_that_gives_back(settings: RunSettings) -> Callable[[], object]:
    """Our step in a process that gives freed memory back to the system, as processes do by themselves."""
    jobs.keep_freed_memory = lambda: False
    return our_step(settings)


def compare_steps(part: str, rounds: int, compiled: bool) -> dict[str, Any]:
    """Table of one set-up: the plain step, moco as it comes, and moco with one thing changed."""
    ours = resolved(part)
    variants: dict[str, dict[str, Any]] = {OURS: {}}
    variants |= {f"moco, bn_groups {n}": {"bn_groups": n} for n in (1, 8) if n != ours.bn_groups}
    variants["moco, fp32"] = {"precision": "fp32"}
    if part == "resnet50":
        variants["moco, K 4,096"] = {"queue_size": 4_096}
    if compiled:
        variants["moco, compile"] = {"compile": True}
        variants |= {"moco, compile, bn_groups 1": {"compile": True, "bn_groups": 1}} if ours.bn_groups > 1 else {}
    sides: dict[str, Callable[[], object]] = {PLAIN: Elsewhere(PlainStep, ours)}
    sides |= {name: our_step(resolved(part, **options)) for name, options in variants.items()}
    sides["moco, freed memory given back"] = Elsewhere(step_that_gives_back, ours)
    times = in_turns(sides, rounds, warm_up=1)
    rows = summary(times, ours.batch_size, PLAIN)
    show(
        f"{part} at {ours.image_size} pixels, batch {ours.batch_size}, K {ours.queue_size:,} "
        f"(moco: {ours.precision}, {ours.bn_groups} groups)",
        rows,
        "images",
    )
    found: dict[str, Any] = {"rows": rows, "seconds": times}
    if part == "resnet50":
        found["queue"] = cost_of_queue(times, ours, rounds)
    return found


def cost_of_queue(times: dict[str, list[float]], settings: RunSettings, rounds: int) -> dict[str, float]:
    """What 65,536 keys add to the step over 4,096: by the whole steps, and by look-up and enqueue timed alone."""
    pairs = zip(times[OURS], times["moco, K 4,096"], strict=True)
    whole = statistics.median(large / small for large, small in pairs) - 1
    alone = in_turns(
        {str(size): look_up(size, settings) for size in (4_096, settings.queue_size)}, max(5 * rounds, 15), warm_up=2
    )
    small, large = (statistics.median(alone[str(size)]) for size in (4_096, settings.queue_size))
    share = (large - small) / statistics.median(times["moco, K 4,096"])
    print(
        f"K 4,096 → {settings.queue_size:,}: the step takes {whole:+.1%}; look-up, backward and enqueue alone "
        f"{1000 * small:.1f} → {1000 * large:.1f} ms, {share:+.1%} of the step\n"
    )
    return {"step": whole, "alone": share, "alone_seconds_4096": small, "alone_seconds": large}


def look_up(size: int, settings: RunSettings) -> Callable[[], object]:
    """Loss, its gradient, and enqueue, without encoders."""
    queue = Queue(size, settings.feature_size)
    q, k = (F.normalize(torch.randn(settings.batch_size, settings.feature_size), dim=1) for _ in range(2))
    q.requires_grad_()
    steps = itertools.count()

    def once() -> None:
        ids = torch.arange(len(q)) + next(steps) * len(q)
        queue.lookup(q, k, settings.temperature, ids).loss.backward()
        queue.enqueue(k, ids)

    return once


class SlicedBatchNorm(nn.BatchNorm2d):
    """Batch norm by consecutive parts of the batch, one call for each part."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(SlicedBatchNorm, self).forward(part) for part in x.chunk(BN_GROUPS)])


def with_norm(encoder: nn.Module, kind: type[nn.BatchNorm2d]) -> nn.Module:
    """The encoder with every batch norm replaced by a fresh one of another kind."""
    for parent in list(encoder.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, kind(child.num_features))
    return encoder.train()


def compare_groups(part: str, rounds: int) -> dict[str, Any]:
    """Ways to normalise a batch in groups, in the layout and arithmetic of moco and of the plain step."""
    settings = resolved(part)
    found = {}
    for layout, dtype in ((torch.channels_last, torch.bfloat16), (torch.contiguous_format, torch.float32)):
        x = normalize(pictures(settings)[0], settings.mean, settings.std).contiguous(memory_format=layout)

        def encode(kind: type[nn.BatchNorm2d], groups: int = 1, x=x, layout=layout, dtype=dtype) -> Callable[[], None]:
            encoder = with_norm(build_model(settings).query_encoder, kind).to(memory_format=layout)

            def once() -> None:
                with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                    features = encode_in_groups(encoder, x, groups) if groups > 1 else encoder(x)
                features.float().square().mean().backward()
                encoder.zero_grad()

            return once

        whole = "whole batch, no groups"
        sides = {
            whole: encode(nn.BatchNorm2d),
            "groups through the whole encoder (moco)": encode(nn.BatchNorm2d, BN_GROUPS),
            "inside each layer, one pass by reshaping": encode(GroupedBatchNorm),
            "inside each layer, part by part": encode(SlicedBatchNorm),
        }
        times = in_turns(sides, rounds, warm_up=1)
        rows = summary(times, len(x), whole)
        name = f"{str(dtype).removeprefix('torch.')} {str(layout).removeprefix('torch.')}"
        show(f"{BN_GROUPS} groups: {part}, {name}, batch {len(x)}", rows, "images")
        found[name] = {"rows": rows, "seconds": times}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=["resnet50", "resnet18", "groups"], help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="also moco with the setting compile")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    given = parser.parse_args()
    torch.set_num_threads(torch.get_num_threads())
    parts = given.part or ["resnet50", "resnet18", "groups"]
    found: dict[str, Any] = {}
    for part in SETUPS:
        if part in parts:
            found[part] = compare_steps(part, given.rounds, given.compile)
    if "groups" in parts:
        found["groups"] = {part: compare_groups(part, given.rounds) for part in reversed(SETUPS)}
    write(given.json, found)


if __name__ == "__main__":
    main()
