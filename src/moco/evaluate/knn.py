"""Weighted nearest neighbours on features: what a representation knows without any training on top.

Source: InstDisc, arXiv 1805.01978, section 3.4: cosine similarity s, the k nearest vote with weight exp(s / τ).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moco.errors import UserError
from moco.evaluate.features import checked_features, checked_labels

# Similarities that are held at once (128 MiB of float32): 50,000 × 10,000 never exist together.
HELD_AT_ONCE = 2**25


def usable_k(k: int, bank_size: int, *, exclude_self: bool = False) -> int:
    """How many neighbours really vote: `k`, or all there are in a smaller bank. Raises UserError for k < 1."""
    if k < 1:
        raise UserError(f"k must be at least 1, not {k}")
    there = bank_size - exclude_self
    if there < 1:
        raise UserError("leaving one out of a bank of one leaves no neighbour")
    return min(k, there)


def knn_predict(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.07,
    classes: int | None = None,
    exclude_self: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """The class of each query by the weighted vote of its `k` nearest bank rows: (N,) int64, on the bank's device.

    bank: (B, D) and queries: (N, D), raw features; they are normalised here. bank_labels: (B,), 0 to classes − 1.
    k: neighbours, capped by the bank (`usable_k`). temperature: τ of the weights exp(s / τ).
    classes: number of classes, by default the highest label of the bank + 1. An even vote goes to the lower class.
    exclude_self: query i is bank row i and must not vote for itself (leave-one-out).
    chunk: queries looked up at once; by default as many as keep the similarities at 128 MiB.

    Raises UserError for shapes that do not fit, values that are not finite, k < 1 and temperature ≤ 0.
    """
    bank = checked_features(bank, "the bank's features")
    bank_labels = checked_labels(bank_labels, len(bank), "the bank's labels").to(bank.device)
    queries = checked_features(queries, "the queries' features").to(bank.device)
    k = usable_k(k, len(bank), exclude_self=exclude_self)
    highest = int(bank_labels.max())
    classes = highest + 1 if classes is None else classes
    if highest >= classes:
        raise UserError(f"the bank has label {highest}, but there are only {classes} classes (0 to {classes - 1})")
    if bank.shape[1] != queries.shape[1]:
        raise UserError(f"the bank has {bank.shape[1]} features per row, the queries have {queries.shape[1]}")
    if exclude_self and len(queries) != len(bank):
        raise UserError(f"leave-one-out needs the bank itself as queries: {len(bank)} rows, not {len(queries)}")
    if not temperature > 0:
        raise UserError(f"temperature must be above 0, not {temperature:g}")
    if chunk is not None and chunk < 1:
        raise UserError(f"chunk must be at least 1, not {chunk}")
    chunk = chunk or max(1, HELD_AT_ONCE // len(bank))

    bank = F.normalize(bank, dim=1)
    found = torch.empty(len(queries), dtype=torch.int64, device=bank.device)
    for start in range(0, len(queries), chunk):
        part = F.normalize(queries[start : start + chunk], dim=1)
        similarity = part @ bank.T
        if exclude_self:
            rows = torch.arange(len(part), device=bank.device)
            similarity[rows, start + rows] = -torch.inf
        near, row = similarity.topk(k, dim=1)  # nearest first
        # Relative to the nearest: the winner is the same, and no temperature is too small for float32.
        weight = ((near - near[:, :1]) / temperature).exp()
        votes = weight.new_zeros(len(part), classes).scatter_add_(1, bank_labels[row], weight)
        found[start : start + chunk] = votes.argmax(dim=1)
    return found


def knn_accuracy(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.07,
    classes: int | None = None,
    exclude_self: bool = False,
) -> float:
    """The share (0 to 1) of queries whose class `knn_predict` finds. query_labels: (N,); the rest as there.

    With `exclude_self` the queries are the bank itself, and each is classified by all the others.
    """
    query_labels = checked_labels(query_labels, len(queries), "the queries' labels")
    found = knn_predict(
        bank, bank_labels, queries, k=k, temperature=temperature, classes=classes, exclude_self=exclude_self
    )
    return float((found.cpu() == query_labels.cpu()).double().mean())
