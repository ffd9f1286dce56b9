"""InfoNCE streamed over the keys against the form that everybody writes, forward and backward, in turns.

    python benchmarks/speed_loss.py [--queries 256] [--keys 65536] [--dim 128] [--rounds 15] [--json out.json]

The usual form clones the queue (it changes before the backward pass), concatenates the positive to all N × K
similarities, divides by the temperature and takes the cross-entropy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import in_turns, show, summary, write
from torch import Tensor

from moco import info_nce

TEMPERATURE = 0.2


def dense(q: Tensor, k: Tensor, queue: Tensor) -> Tensor:
    """The usual form; queue: (C, K)."""
    positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
    negative = torch.einsum("nc,ck->nk", q, queue.clone().detach())
    logits = torch.cat([positive, negative], dim=1) / TEMPERATURE
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


def unit(rows: int, dim: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--keys", type=int, default=65_536)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    given = parser.parse_args()
    torch.set_num_threads(torch.get_num_threads())
    q, k = unit(given.queries, given.dim, 0).requires_grad_(), unit(given.queries, given.dim, 1)
    keys = unit(given.keys, given.dim, 2)
    queue, half = keys.T.contiguous(), keys.bfloat16()
    # As in training: most keys have an id, a few of them that of a query.
    ids, key_ids = torch.arange(given.queries), torch.arange(given.keys) % (given.keys // 2)
    sides = {
        "dense on a cloned queue": lambda: dense(q, k, queue).backward(),
        "moco, float32 keys": lambda: info_nce(q, k, keys, TEMPERATURE).loss.backward(),
        "moco, float32 keys, own keys left out": lambda: info_nce(
            q, k, keys, TEMPERATURE, ids=ids, key_ids=key_ids
        ).loss.backward(),
        "moco, bfloat16 keys": lambda: info_nce(q, k, half, TEMPERATURE).loss.backward(),
    }
    rows = summary(in_turns(sides, given.rounds, warm_up=3), given.queries, "dense on a cloned queue")
    show(f"InfoNCE, N {given.queries}, K {given.keys}, C {given.dim}", rows, "queries")
    write(given.json, {"loss": rows})


if __name__ == "__main__":
    main()
