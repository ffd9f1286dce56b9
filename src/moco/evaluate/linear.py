"""The linear probe on cached features: how much of the classes one linear layer can read out.

The features are standardised (a batch norm without parameters, which removes the search for a learning rate that
suits their scale, FACTS: evaluation protocols) and a multinomial logistic regression with an L2 penalty is solved by
L-BFGS. The penalty is chosen on rows of the training set only; the test set is looked at once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moco.errors import UserError
from moco.evaluate.features import checked_features, checked_labels

# Penalty per weight, relative to the mean loss: strong to weak, so that each solution is a start for the next.
STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
# A held-out tenth of fewer rows than this tells two strengths apart by luck; all rows take turns then.
FEWEST_HELD_OUT = 200


@dataclass(frozen=True)
class Probe:
    """What a linear probe found: accuracy (0 to 1) on the test rows, its L2 penalty, the class of each row (M,)."""

    accuracy: float
    strength: float
    found: Tensor


def linear_accuracy(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    *,
    seed: int = 0,
    strengths: tuple[float, ...] = STRENGTHS,
    iterations: int = 100,
) -> float:
    """The share (0 to 1) of test rows that a linear classifier puts into the right class; see `linear_probe`."""
    return linear_probe(
        train, train_labels, test, test_labels, seed=seed, strengths=strengths, iterations=iterations
    ).accuracy


def linear_probe(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    *,
    seed: int = 0,
    strengths: tuple[float, ...] = STRENGTHS,
    iterations: int = 100,
) -> Probe:
    """Fit a linear classifier to the training features and try it on the test features.

    train: (N, D) and test: (M, D), raw features; train_labels: (N,) and test_labels: (M,), classes from 0.
    seed: which rows are held out to choose among `strengths`, the L2 penalties: a tenth of each class, or with few
        rows (under 2,000) five parts in turn. The chosen one is then fitted to all rows.
    iterations: most L-BFGS steps of one fit.

    Raises UserError for shapes that do not fit, values that are not finite, and fewer than two classes.
    """
    train = checked_features(train, "the training features")
    train_labels = checked_labels(train_labels, len(train), "the training labels").to(train.device)
    test = checked_features(test, "the test features").to(train.device)
    test_labels = checked_labels(test_labels, len(test), "the test labels").to(train.device)
    if train.shape[1] != test.shape[1]:
        raise UserError(f"training rows have {train.shape[1]} features, test rows have {test.shape[1]}")
    if len(train_labels.unique()) < 2:
        raise UserError("a linear probe needs training rows of at least two classes")
    if not strengths or min(strengths) <= 0:
        raise UserError("strengths must be one or more L2 penalties above 0")

    # A class that only the test set has can never be found: its rows count as wrong.
    classes = 1 + int(torch.maximum(train_labels.max(), test_labels.max()))
    path = sorted(strengths, reverse=True)
    best = _choose(train, train_labels, classes, path, seed, iterations) if len(path) > 1 else path[0]
    accuracy, _, found = _scores(train, train_labels, test, test_labels, classes, [best], iterations)[0]
    return Probe(accuracy, best, found)


def few_labels(labels: Tensor, per_class: int, seed: int = 0) -> Tensor:
    """Positions of `per_class` rows of each class, drawn with `seed`: (classes · per_class,) int64, ascending.

    labels: (N,). Classes are the values that occur. Raises UserError where a class has fewer rows.
    """
    labels = checked_labels(labels, None).cpu()
    if per_class < 1:
        raise UserError(f"per_class must be at least 1, not {per_class}")
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero().flatten()
        if len(rows) < per_class:
            raise UserError(f"class {label} has only {len(rows)} rows, {per_class} were asked for")
        chosen.append(rows[torch.randperm(len(rows), generator=generator)[:per_class]])
    if not chosen:
        raise UserError("there are no labels to choose from")
    return torch.cat(chosen).sort().values


def _choose(features: Tensor, labels: Tensor, classes: int, path: list[float], seed: int, iterations: int) -> float:
    """The strength on `path` with the best accuracy on rows that were held out; lower loss decides a tie."""
    few = len(labels) < 10 * FEWEST_HELD_OUT
    part = stratified_parts(labels, 5 if few else 10, seed)
    turns = range(5) if few else range(1)
    totals = [[0.0, 0.0] for _ in path]
    for turn in turns:
        held = part == turn
        if not held.any() or held.all():
            continue
        shown = ~held
        scores = _scores(features[shown], labels[shown], features[held], labels[held], classes, path, iterations)
        for total, (accuracy, loss, _) in zip(totals, scores, strict=True):
            total[0] += accuracy * int(held.sum())
            total[1] -= loss * int(held.sum())
    return path[max(range(len(path)), key=lambda index: totals[index])]


def stratified_parts(labels: Tensor, parts: int, seed: int) -> Tensor:
    """A part number, 0 to parts − 1, for each row, so that every class is spread over the parts evenly: (N,)."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator).to(labels.device)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    part = torch.empty_like(labels)
    # Dealt out like cards, class after class: no class and no part is ahead by more than one.
    part[by_class] = torch.arange(len(labels), device=labels.device) % parts
    return part


def _scores(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    classes: int,
    path: list[float],
    iterations: int,
) -> list[tuple[float, float, Tensor]]:
    """Accuracy and mean loss on the test rows, and their classes, for each penalty of `path`, strongest first."""
    shift, scale = _standard(train)
    train, test = (train - shift) / scale, (test - shift) / scale
    weight = train.new_zeros(classes, train.shape[1])
    bias = train.new_zeros(classes)
    scores = []
    for strength in path:
        weight, bias = _fit(train, train_labels, weight, bias, strength, iterations)
        logits = F.linear(test, weight, bias)
        found = logits.argmax(dim=1)
        accuracy = float((found == test_labels).double().mean())
        scores.append((accuracy, float(F.cross_entropy(logits, test_labels)), found))
    return scores


def _standard(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and scale per dimension. The floor keeps a constant dimension at zero and stops rounding noise from
    being blown up into a feature."""
    variance, mean = torch.var_mean(features, dim=0, correction=0)
    floor = 1e-5 * variance.mean() + 1e-10 * mean.square().mean() + torch.finfo(features.dtype).tiny
    return mean, (variance + floor).sqrt()


def _fit(
    features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, strength: float, iterations: int
) -> tuple[Tensor, Tensor]:
    """Minimise mean cross-entropy + strength / 2 · ‖weight‖² from the given start."""
    weight, bias = weight.clone().requires_grad_(True), bias.clone().requires_grad_(True)
    solver = torch.optim.LBFGS(
        [weight, bias], max_iter=iterations, tolerance_grad=1e-5, tolerance_change=1e-8, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        solver.zero_grad()
        loss = F.cross_entropy(F.linear(features, weight, bias), labels) + strength / 2 * weight.square().sum()
        loss.backward()
        return float(loss.detach())

    solver.step(closure)
    return weight.detach(), bias.detach()
