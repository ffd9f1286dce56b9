"""Supervised training from scratch on few labels: what pre-training has to beat."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.contrast.encoders import feature_width
from moco.data.loader import ViewStream, small_in_memory
from moco.data.views import normalize
from moco.evaluate.features import AUTOCAST, Precision, encode
from moco.evaluate.pictures import Part
from moco.settings import ViewSettings

BATCH = 64
WEIGHT_DECAY = 5e-4


def scratch_accuracy(
    backbone: nn.Module,
    train: Part,
    test: Sequence[Tensor],
    test_labels: Tensor,
    *,
    size: int,
    channels: int,
    mean: Sequence[float],
    std: Sequence[float],
    classes: int,
    views: ViewSettings,
    steps: int = 1000,
    learning_rate: float = 0.05,
    seed: int = 0,
    device: torch.device | str = "cpu",
    precision: Precision = "fp32",
    workers: int = 0,
) -> float:
    """Train `backbone` and a linear layer on labelled pictures; the share (0 to 1) of test pictures it gets right.

    backbone: untrained, (n, channels, size, size) → (n, D), on `device`; it is trained in place. train: the labelled
    pictures. test: batches of test pictures as `evaluation_batches` gives them. views: augmentation of the training.
    SGD with momentum 0.9, weight decay 5e-4, cosine schedule, batches of up to 64, `steps` steps.
    """
    where = torch.device(device)
    torch_seed = torch.Generator().manual_seed(seed)
    classifier = nn.Linear(feature_width(backbone, channels, size), classes)
    with torch.no_grad():
        classifier.weight.normal_(0, 0.01, generator=torch_seed)
        classifier.bias.zero_()
    network = nn.Sequential(backbone, classifier).to(where).to(memory_format=torch.channels_last).train()
    labels = train.known()
    solver = torch.optim.SGD(network.parameters(), lr=learning_rate, momentum=0.9, weight_decay=WEIGHT_DECAY)
    source = train.as_source()
    stream = ViewStream(
        source, query=views, key=views, size=size, channels=channels, batch_size=min(BATCH, len(train)), seed=seed,
        workers=workers, way="batch" if small_in_memory(source) else "image", device=where,
    )  # fmt: skip
    autocast = torch.autocast(where.type, dtype=AUTOCAST.get(precision), enabled=precision != "fp32")
    for step, batch in enumerate(stream.run(0, steps)):
        for group in solver.param_groups:
            group["lr"] = learning_rate * (1 + math.cos(math.pi * step / steps)) / 2
        pictures = normalize(batch.query.to(where), mean, std).contiguous(memory_format=torch.channels_last)
        with autocast:
            logits = network(pictures)
        loss = F.cross_entropy(logits.float(), labels[batch.ids].to(where))
        solver.zero_grad()
        loss.backward()
        solver.step()
    logits = encode(network, test, mean=mean, std=std, device=where, precision=precision)
    return float((logits.argmax(dim=1) == test_labels.cpu()).double().mean())
