"""A sentence encoder from pairs of texts: a momentum queue beside in-batch negatives, with the same budget.

    python examples/text_pairs.py [--steps 1500]

The pairs are headline and body of the documentation strings in the Python packages that are installed here. The
encoder is small: hashed words and word pairs, their mean, two layers. For a headline, which of 1,000 bodies that it has
not seen is its own? The question is that of E5 (arXiv 2212.03533, table 8), where in-batch negatives won; the two ways
differ in nothing but where the negatives come from.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import sysconfig
import time
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moco
from moco.contrast.dictionary import InBatch

BUCKETS, LENGTH, WIDTH, DIM = 2**14, 64, 96, 64
BATCH, HELD_OUT = 128, 1000
FEWEST = HELD_OUT + BATCH
KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def pairs(most: int = 20_000) -> list[tuple[str, str]]:
    """Headline and body of documentation strings, each headline and each body once."""
    found: dict[str, str] = {}
    for file in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, KINDS) else None
            headline, _, body = (text or "").partition("\n\n")
            if len(headline.split()) >= 4 and len(body.split()) >= 8 and body not in found.values():
                found.setdefault(" ".join(headline.split()), body)
        if len(found) >= most:
            break
    return list(found.items())[:most]


def tokens(text: str) -> list[int]:
    """Words and pairs of neighbouring words as numbers from 1; 0 fills up."""
    words = re.findall(r"[a-z]+|[0-9]+", text.lower())[: LENGTH // 2]
    terms = [*words, *(f"{one} {two}" for one, two in itertools.pairwise(words))]
    numbers = [zlib.crc32(term.encode()) % (BUCKETS - 1) + 1 for term in terms]
    return numbers + [0] * (LENGTH - len(numbers))


class Sentences(nn.Module):
    """(N, LENGTH) numbers of words → (N, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(BUCKETS, WIDTH, mode="mean", padding_idx=0)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, numbers: Tensor) -> Tensor:
        return F.relu(self.layer(self.words(numbers)))


def train(model: moco.MomentumContrast, headlines: Tensor, bodies: Tensor, steps: int) -> float:
    """Train with Adam on batches drawn with a fixed seed. Returns the seconds it took."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    began = time.monotonic()
    for step in range(steps):
        ids = torch.randint(len(headlines), (BATCH,), generator=generator)
        model.begin_step(step / steps)
        model(headlines[ids], bodies[ids], ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.end_step()
    return time.monotonic() - began


@torch.no_grad()
def found(model: moco.MomentumContrast, headlines: Tensor, bodies: Tensor) -> float:
    """Share of headlines whose nearest body is their own."""
    model.eval()
    first, second = (F.normalize(model.query_encoder(texts), dim=1) for texts in (headlines, bodies))
    return float(((first @ second.T).argmax(1) == torch.arange(len(first))).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--pairs", type=int, default=20_000, help=f"at most so many, {FEWEST} or more")
    given = parser.parse_args()
    if given.pairs < FEWEST:
        parser.error(f"--pairs {given.pairs}: {FEWEST} or more are needed, {HELD_OUT} of them held out")
    texts = pairs(given.pairs)
    if len(texts) < FEWEST:
        parser.error(f"only {len(texts)} pairs in the packages installed here, {FEWEST} are needed: install some more")
    torch.manual_seed(0)
    order = torch.randperm(len(texts)).tolist()
    headlines, bodies = (torch.tensor([tokens(texts[row][side]) for row in order]) for side in (0, 1))
    known, held = slice(HELD_OUT, None), slice(HELD_OUT)
    print(f"{len(texts) - HELD_OUT} pairs to learn from, {HELD_OUT} held out, {given.steps} steps of {BATCH}")
    ways = {
        "momentum queue, 4,096 keys": {"dictionary": moco.Queue(4096, DIM), "momentum": 0.99},
        f"in-batch, {BATCH} keys": {"dictionary": InBatch(BATCH), "key_encoder": "shared"},
        "no training": None,
    }
    for name, options in ways.items():
        torch.manual_seed(1)
        chosen = options or {"dictionary": InBatch(BATCH), "key_encoder": "shared"}
        model = moco.MomentumContrast(Sentences(), nn.Linear(WIDTH, DIM), temperature=0.05, **chosen)
        seconds = train(model, headlines[known], bodies[known], given.steps) if options is not None else 0.0
        share = found(model, headlines[held], bodies[held])
        print(f"{name:28} {share:6.1%} of headlines find their body, {seconds:.0f} s")


if __name__ == "__main__":
    main()
