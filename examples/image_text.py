"""Pictures and captions: an encoder of each kind, trained to find each other; then pictures are named.

    python examples/image_text.py [--steps 300]

The captions are made from the labels of the packaged Fashion-MNIST pictures. Pictures are queries, captions keys, and
the other way round (`symmetric`); pictures with the same caption are no negatives of each other, since captions are the
ids. No label is used at the end: a picture gets the class whose caption is nearest.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moco
from moco.contrast.dictionary import InBatch
from moco.contrast.encoders import build_backbone
from moco.data import fashion

NAMES = ("t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
FRAMES = ("a photograph of a {}", "one {} on black", "this is a {}", "a grey {}", "{}")
DIM, BATCH = 32, 128


def spelled(text: str) -> list[int]:
    """Letters as numbers from 1; 0 fills up to 40."""
    return [ord(letter) % 96 + 1 for letter in text][:40] + [0] * max(40 - len(text), 0)


class Captions(nn.Module):
    """(N, 40) letters → (N, DIM): triples of letters by a convolution, the strongest of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(97, 16, padding_idx=0)
        self.triples = nn.Conv1d(16, 64, 3, padding=1)
        self.last = nn.Linear(64, DIM)

    def forward(self, text: Tensor) -> Tensor:
        return self.last(F.relu(self.triples(self.letters(text).mT)).amax(2))


def prepared(images: Tensor) -> Tensor:
    return F.pad(images[:, None].float() / 255 - 0.3, (2, 2, 2, 2), value=-0.3)


@torch.no_grad()
def named(model: moco.MomentumContrast, images: Tensor, captions: Tensor) -> Tensor:
    """The class (N,) whose captions (classes, frames, 40) are nearest on average."""
    model.eval()
    texts = F.normalize(model.key_network(captions.flatten(0, 1)), dim=1).unflatten(0, captions.shape[:2])
    pictures = torch.cat([F.normalize(model.query_network(prepared(part)), dim=1) for part in images.split(500)])
    return (pictures @ texts.mean(1).T).argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    x, y, x_test, y_test = (torch.from_numpy(part) for part in fashion.load())
    captions = torch.tensor([[spelled(frame.format(name)) for frame in FRAMES] for name in NAMES])
    torch.manual_seed(0)
    model = moco.MomentumContrast(
        build_backbone("resnet18", channels=1, base_width=8, image_size=32),
        nn.Linear(64, DIM),
        key_encoder=Captions(),
        dictionary=InBatch(BATCH),
        temperature=0.1,
        symmetric=True,
    )
    before = float((named(model, x_test, captions) == y_test).float().mean())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    for step in range(given.steps):
        rows = torch.randint(len(x), (BATCH,))
        labels = y[rows].long()
        texts = captions[labels, torch.randint(len(FRAMES), (BATCH,))]
        model.begin_step(step / given.steps)
        output = model(prepared(x[rows]), texts, labels)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.end_step()
    after = float((named(model, x_test, captions) == y_test).float().mean())
    print(f"{given.steps} steps of {BATCH}: {after:.1%} of {len(x_test)} pictures get their name; before: {before:.1%}")


if __name__ == "__main__":
    main()
