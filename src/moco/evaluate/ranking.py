"""Retrieval: all pictures of a bank ranked for each query by cosine similarity, and how early the right ones come."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moco.errors import UserError
from moco.evaluate.features import checked_features, checked_labels

# Similarities that are sorted at once (32 MiB of float32, with their order about 100 MiB).
SORTED_AT_ONCE = 2**23


def ranking_figures(
    queries: Tensor,
    query_labels: Tensor,
    bank: Tensor,
    bank_labels: Tensor,
    *,
    recall_at: Sequence[int] = (1, 5, 10),
    exclude_self: bool = False,
) -> dict[str, float]:
    """Mean average precision and recall@k, 0 to 1, named "mAP" and "recall@K".

    queries: (N, D) and bank: (B, D), raw features. query_labels: (N,), bank_labels: (B,): a bank row is right for the
    queries of its label. Average precision of a query: the mean, over its right rows, of the share of right rows among
    those ranked up to there. recall@k: the share of queries with a right row among their k nearest. A query without
    any right row in the bank counts 0. exclude_self: query i is bank row i, and is not ranked for itself.

    For the other view of the same picture, give both views the labels 0 … N − 1: then mAP is the mean reciprocal rank.
    Raises UserError for shapes that do not fit, values that are not finite, and k < 1.
    """
    bank = checked_features(bank, "the bank's features")
    queries = checked_features(queries, "the queries' features").to(bank.device)
    bank_labels = checked_labels(bank_labels, len(bank), "the bank's labels").to(bank.device)
    query_labels = checked_labels(query_labels, len(queries), "the queries' labels").to(bank.device)
    if bank.shape[1] != queries.shape[1]:
        raise UserError(f"the bank has {bank.shape[1]} features per row, the queries have {queries.shape[1]}")
    if exclude_self and len(queries) != len(bank):
        raise UserError(f"leave-one-out needs the bank itself as queries: {len(bank)} rows, not {len(queries)}")
    if min(recall_at, default=1) < 1:
        raise UserError(f"recall@k needs k of 1 or more, not {min(recall_at)}")
    bank = F.normalize(bank, dim=1)
    chunk = max(1, SORTED_AT_ONCE // len(bank))
    places = torch.arange(1, len(bank) + 1, device=bank.device, dtype=torch.float64)
    precision, hits = 0.0, dict.fromkeys(recall_at, 0)
    for start in range(0, len(queries), chunk):
        similarity = F.normalize(queries[start : start + chunk], dim=1) @ bank.T
        right = query_labels[start : start + chunk, None] == bank_labels
        if exclude_self:
            rows = torch.arange(len(right), device=bank.device)
            similarity[rows, start + rows] = -torch.inf  # last of all, where it is wrong and so counts for nothing
            right[rows, start + rows] = False
        # Stable: rows that are equally near keep the order of the bank, on every machine.
        right = right.gather(1, similarity.argsort(dim=1, descending=True, stable=True))
        share = right.cumsum(1) / places
        precision += float(((share * right).sum(1) / right.sum(1).clamp(min=1)).sum())
        for k in hits:
            hits[k] += int(right[:, :k].any(1).sum())
    return {"mAP": precision / len(queries)} | {f"recall@{k}": hit / len(queries) for k, hit in hits.items()}
