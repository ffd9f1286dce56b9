"""The linear probe as the paper does it: SGD on random crops and flips, the backbone frozen ([v1] section 4.1).

Rate 30, no weight decay, 100 epochs, divided by 10 at 60 and 80, batch 256; backbone in eval mode. A rate of 30 fits
features of ImageNet's scale; elsewhere it has to be searched for (`find_rate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.data.loader import ViewStream, small_in_memory
from moco.data.views import normalize
from moco.errors import TrainingError, UserError
from moco.evaluate.cache import weights_fingerprint
from moco.evaluate.features import AUTOCAST, Precision, checked_features, checked_labels, encode, evaluating
from moco.evaluate.linear import stratified_parts
from moco.evaluate.pictures import Part
from moco.settings import ViewSettings

RATES = (100.0, 30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
SEARCH_EPOCHS = 15
MILESTONES = (0.6, 0.8)
CROPS_AND_FLIPS = ViewSettings(
    crop_scale=(0.08, 1.0), jitter_probability=0, grayscale_probability=0, blur_probability=0
)


@dataclass(frozen=True)
class PaperProbe:
    """What the probe came to.

    accuracy: share of the test rows, 0 to 1. found: (M,) their classes. learning_rate: the one used. losses: mean
    training loss of each epoch. warning: one line where the rate was unstable, else empty.
    """

    accuracy: float
    found: Tensor
    learning_rate: float
    losses: tuple[float, ...]
    warning: str


def paper_probe(
    backbone: nn.Module,
    train: Part,
    test: Tensor,
    test_labels: Tensor,
    *,
    size: int,
    channels: int,
    mean: Sequence[float],
    std: Sequence[float],
    classes: int,
    learning_rate: float = 30.0,
    epochs: int = 100,
    batch_size: int = 256,
    seed: int = 0,
    device: torch.device | str = "cpu",
    precision: Precision = "fp32",
    workers: int = 0,
    say: Callable[[float], object] = lambda share: None,
) -> PaperProbe:
    """Train a linear classifier on the frozen backbone's features of random views; try it on `test` features.

    backbone: (n, channels, size, size) → (n, D), on `device`. train: labelled pictures. test: (M, D) features of the
    test pictures as they are, test_labels: (M,). mean, std: as the backbone was trained. say: told the share done.

    Raises UserError for labels and features that do not fit, and TrainingError if any weight or buffer of the
    backbone is not afterwards what it was, to the bit.
    """
    test = checked_features(test, "the test features").to(device)
    test_labels = checked_labels(test_labels, len(test), "the test labels").to(device)
    labels = train.known().to(device)
    before = weights_fingerprint(backbone)
    stream = _stream(train, size, channels, min(batch_size, len(train)), seed, workers, torch.device(device))
    steps = stream.steps_per_epoch

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        autocast = torch.autocast(test.device.type, dtype=AUTOCAST.get(precision), enabled=precision != "fp32")
        for batch in stream.run(epoch * steps, (epoch + 1) * steps):
            pictures = normalize(batch.query.to(device), mean, std).contiguous(memory_format=torch.channels_last)
            with torch.no_grad(), autocast:
                features = backbone(pictures).float()
            yield features, labels[batch.ids.to(device)]
        say((epoch + 1) / epochs)

    with evaluating(backbone):
        classifier, losses = _sgd(batches, test.shape[1], classes, learning_rate, epochs, seed, test.device)
    if weights_fingerprint(backbone) != before:
        raise TrainingError("the probe changed the weights of the backbone, which must stay frozen: do not trust it")
    with torch.no_grad():
        found = classifier(test).argmax(dim=1)
    accuracy = float((found == test_labels).double().mean())
    return PaperProbe(accuracy, found.cpu(), learning_rate, losses, _stability(losses, learning_rate, classes))


def encode_views(
    backbone: nn.Module,
    train: Part,
    *,
    size: int,
    channels: int,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int = 256,
    seed: int = 0,
    device: torch.device | str = "cpu",
    precision: Precision = "fp32",
    workers: int = 0,
) -> tuple[Tensor, Tensor]:
    """Features of one random view of each training picture: (M, D) on the CPU, and their rows in `train`: (M,).

    M is the number of pictures in whole batches. What `find_rate` searches on; the arguments are those of the probe.
    """
    stream = _stream(train, size, channels, min(batch_size, len(train)), seed, workers, torch.device(device))
    rows: list[Tensor] = []

    def views() -> Iterator[Tensor]:
        for batch in stream.run(0, stream.steps_per_epoch):
            rows.append(batch.ids.cpu())
            yield batch.query

    features = encode(backbone, views(), mean=mean, std=std, device=device, precision=precision)
    return features, torch.cat(rows)


def find_rate(
    views: Tensor, rows: Tensor, features: Tensor, labels: Tensor, *, classes: int, batch_size: int = 256, seed: int = 0
) -> tuple[float, dict[float, float]]:
    """The best of `RATES` on a fifth of the rows, held out, and the accuracy of each there (0 for one that blew up).

    views: (M, D) features of random views, of the rows (M,) of the training pictures; features: (N, D) of the training
    pictures as they are, on which the held-out rows are tried; labels: (N,). Takes seconds. Raises UserError where no
    rate is stable.
    """
    features = checked_features(features, "the training features")
    labels = checked_labels(labels, len(features), "the training labels").to(features.device)
    held = stratified_parts(labels, 5, seed) == 0
    kept = ~held[rows]
    shown, shown_labels = checked_features(views, "the features of views")[kept], labels[rows][kept]
    size = min(batch_size, len(shown))
    scores: dict[float, float] = {}

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(shown), generator=torch.Generator().manual_seed(seed + epoch))
        for start in range(0, len(shown) - size + 1, size):
            chosen = order[start : start + size]
            yield shown[chosen], shown_labels[chosen]

    for rate in RATES:
        classifier, losses = _sgd(batches, features.shape[1], classes, rate, SEARCH_EPOCHS, seed, features.device)
        with torch.no_grad():
            right = classifier(features[held]).argmax(dim=1) == labels[held]
        scores[rate] = 0.0 if _stability(losses, rate, classes) else float(right.double().mean())
    best = max(scores, key=lambda rate: scores[rate])
    if scores[best] == 0:
        raise UserError(f"no learning rate from {RATES[-1]:g} to {RATES[0]:g} trains a linear classifier on these")
    return best, scores


def _sgd(
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]],
    width: int,
    classes: int,
    rate: float,
    epochs: int,
    seed: int,
    device: torch.device,
) -> tuple[nn.Linear, tuple[float, ...]]:
    """A linear classifier, and the mean loss of each epoch."""
    classifier = nn.Linear(width, classes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # as in the authors' code
        classifier.weight.normal_(0, 0.01, generator=generator)
        classifier.bias.zero_()
    classifier.to(device)
    solver = torch.optim.SGD(classifier.parameters(), lr=rate, momentum=0.9, weight_decay=0)
    losses = []
    for epoch in range(epochs):
        for group in solver.param_groups:
            group["lr"] = rate * 0.1 ** sum(epoch >= share * epochs for share in MILESTONES)
        parts = []
        for features, labels in batches(epoch):
            loss = F.cross_entropy(classifier(features), labels)
            solver.zero_grad()
            loss.backward()
            solver.step()
            parts.append(loss.detach())
        losses.append(float(torch.stack(parts).mean()))
    return classifier, tuple(losses)


def _stability(losses: Sequence[float], rate: float, classes: int) -> str:
    """A warning where a rate was too high: no number, or above chance when it had its last full-size step."""
    if not all(map(math.isfinite, losses)):
        return f"learning rate {rate:g} is unstable: the loss was no number; try --lr auto"
    last = losses[max(math.ceil(MILESTONES[0] * len(losses)) - 1, 0)]
    chance = math.log(classes)
    if last > chance:
        return f"learning rate {rate:g} is unstable: a loss of {last:.3g}, above chance ({chance:.3g}); try --lr auto"
    return ""


def _stream(
    train: Part, size: int, channels: int, batch_size: int, seed: int, workers: int, device: torch.device
) -> ViewStream:
    source = train.as_source()
    return ViewStream(
        source,
        query=CROPS_AND_FLIPS,
        key=CROPS_AND_FLIPS,
        size=size,
        channels=channels,
        batch_size=batch_size,
        seed=seed,
        workers=workers,
        way="batch" if small_in_memory(source) else "image",
        device=device,
    )
