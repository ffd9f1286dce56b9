"""The yardstick: the small-image recipe as it is usually written, one Pillow picture at a time, all in float32.

Settings are those of the MoCo authors' CIFAR-10 notebook (column "small images" of the recipe table), at batch 256 and
a quarter of the width. Written for this project from the description, on torch, torchvision and Pillow alone, so that
moco can be measured against it; moco itself only supplies the pictures and the figures at the end.

    python benchmarks/reference_recipe.py --epochs 15                                  # the packaged 10,000 pictures
    python benchmarks/reference_recipe.py --data train.npz --test test.npz --images 10000 --epochs 15

A .npz holds x: uint8 (N, H, W) or (N, H, W, 3) and y: (N,).
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from moco.data import fashion
from moco.evaluate.features import encode
from moco.evaluate.knn import knn_accuracy
from moco.evaluate.linear import linear_accuracy

SIZE = 32  # side of a view in pixels
BASE_WIDTH = 16  # channels of the stages: 16, 32, 64, 128
FEATURE_SIZE = 128
BATCH = 256
QUEUE = 4096
MOMENTUM = 0.99
TEMPERATURE = 0.1
LEARNING_RATE = 0.03 * BATCH / 256
WEIGHT_DECAY = 5e-4
BN_GROUPS = 8
WORKERS = 2


class GroupedBatchNorm(nn.BatchNorm2d):
    """Batch norm that acts as BN_GROUPS devices would: each normalises its own part of the batch.

    The groups are laid beside the channels by one view, so a single call normalises all of them.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        n, c, h, w = x.shape
        grouped = x.reshape(n // BN_GROUPS, BN_GROUPS * c, h, w)
        mean, variance = self.running_mean.repeat(BN_GROUPS), self.running_var.repeat(BN_GROUPS)
        weight, bias = self.weight.repeat(BN_GROUPS), self.bias.repeat(BN_GROUPS)
        y = F.batch_norm(grouped, mean, variance, weight, bias, True, self.momentum, self.eps)
        self.running_mean.copy_(mean.view(BN_GROUPS, c).mean(dim=0))
        self.running_var.copy_(variance.view(BN_GROUPS, c).mean(dim=0))
        return y.view(n, c, h, w)


class Block(nn.Module):
    """Two 3×3 convolutions and a way around them (ResNet's basic block)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = GroupedBatchNorm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = GroupedBatchNorm(after)
        self.around = nn.Sequential()
        if stride != 1 or before != after:
            self.around = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), GroupedBatchNorm(after))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


def make_backbone() -> nn.Sequential:
    """ResNet-18 for small images: 3×3 stem with stride 1 and no pooling. (N, 3, 32, 32) → (N, 128)."""
    layers: list[nn.Module] = [nn.Conv2d(3, BASE_WIDTH, 3, 1, 1, bias=False), GroupedBatchNorm(BASE_WIDTH), nn.ReLU()]
    before = BASE_WIDTH
    for stage in range(4):
        after = BASE_WIDTH * 2**stage
        layers += [Block(before, after, 1 if stage == 0 else 2), Block(after, after, 1)]
        before = after
    backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return backbone


class Moco(nn.Module):
    """Query encoder, key encoder and queue; one-sided loss, keys shuffled between the groups of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        width = BASE_WIDTH * 8
        self.query_encoder = nn.Sequential(make_backbone(), nn.Linear(width, FEATURE_SIZE))
        self.key_encoder = copy.deepcopy(self.query_encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(FEATURE_SIZE, QUEUE), dim=0))
        self.position = 0

    def forward(self, view_q: Tensor, view_k: Tensor) -> Tensor:
        q = F.normalize(self.query_encoder(view_q), dim=1)
        with torch.no_grad():
            for key, query in zip(self.key_encoder.parameters(), self.query_encoder.parameters(), strict=True):
                key.mul_(MOMENTUM).add_(query, alpha=1 - MOMENTUM)
            order = torch.randperm(len(view_k))
            k = F.normalize(self.key_encoder(view_k[order]), dim=1)[order.argsort()]
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone())
        logits = torch.cat([positive, negative], dim=1) / TEMPERATURE
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        self.queue[:, self.position : self.position + len(k)] = k.T
        self.position = (self.position + len(k)) % QUEUE
        return loss


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    """Two random views of each picture, made by Pillow one at a time."""

    def __init__(self, images: np.ndarray) -> None:
        self.images = images
        mean, std = pixel_statistics(images)
        self.view = transforms.Compose(
            [
                transforms.RandomResizedCrop(SIZE),
                transforms.RandomHorizontalFlip(0.5),
                transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
                transforms.RandomGrayscale(0.2),
                transforms.ToTensor(),
                transforms.Normalize(mean, std),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture = Image.fromarray(self.images[index]).convert("RGB")
        return self.view(picture), self.view(picture)


def pixel_statistics(images: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each of three channels, on the scale 0 to 1."""
    pixels = images.reshape(-1, 1 if images.ndim == 3 else 3) / np.float32(255)
    repeats = 3 // pixels.shape[1]  # a gray picture becomes three equal channels
    return pixels.mean(0).repeat(repeats).tolist(), pixels.std(0).repeat(repeats).tolist()


def steps(images: np.ndarray, epochs: int, seed: int = 0, model: Moco | None = None) -> Iterator[float]:
    """Train, one optimiser step per item: each `next` waits for a batch of 256, computes the step, gives its loss.

    Two worker processes run up to four batches ahead, also while nobody asks for the next step. To time this in turns
    with something else, let them fall idle first, and leave the first four steps of each turn out.
    """
    torch.manual_seed(seed)
    model = Moco() if model is None else model
    loader = DataLoader(
        TwoViews(images), BATCH, shuffle=True, drop_last=True, num_workers=WORKERS, persistent_workers=True
    )
    optimizer = torch.optim.SGD(
        model.query_encoder.parameters(), LEARNING_RATE, momentum=0.9, weight_decay=WEIGHT_DECAY
    )
    model.train()
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        for view_q, view_k in loader:
            loss = model(view_q, view_k)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield float(loss.detach())


def train(images: np.ndarray, epochs: int, seed: int = 0, report_every: int = 0) -> tuple[nn.Module, float]:
    """The trained query backbone and the images per second, over everything from the first batch to the last step."""
    torch.manual_seed(seed)
    model = Moco()
    start, done = time.perf_counter(), 0
    for done, loss in enumerate(steps(images, epochs, seed, model), 1):
        if report_every and done % report_every == 0:
            rate = done * BATCH / (time.perf_counter() - start)
            print(f"step {done}: loss {loss:.3f}, {rate:.0f} images/s", flush=True)
    seconds = time.perf_counter() - start
    return model.query_encoder[0], done * BATCH / seconds


def figures(
    backbone: nn.Module, train_set: tuple[np.ndarray, np.ndarray], test_set: tuple[np.ndarray, np.ndarray]
) -> dict[str, float]:
    """kNN and linear accuracy (0 to 1) of the backbone's features; `train_set` is the bank and trains the probe."""
    mean, std = pixel_statistics(train_set[0])
    features = [
        encode(backbone, whole(images), mean=mean, std=std, device="cpu") for images, _ in (train_set, test_set)
    ]
    labels = [torch.from_numpy(labels).long() for _, labels in (train_set, test_set)]
    arguments = (features[0], labels[0], features[1], labels[1])
    return {
        "kNN-200": knn_accuracy(*arguments, k=200),
        "kNN-20": knn_accuracy(*arguments, k=20),
        "linear": linear_accuracy(*arguments),
    }


def whole(images: np.ndarray) -> Iterator[Tensor]:
    """The pictures as they are, resized to the side of a view: uint8 batches (n, 3, 32, 32)."""
    for start in range(0, len(images), 500):
        batch = [
            np.asarray(Image.fromarray(image).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))
            for image in images[start : start + 500]
        ]
        yield torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the Pillow, float32 form of the small-image recipe.")
    parser.add_argument("--data", help="training pictures (.npz); default: the packaged ones")
    parser.add_argument("--test", help="test pictures (.npz); default: the packaged ones")
    parser.add_argument("--images", type=int, default=10_000, help="training pictures to use, from the first")
    parser.add_argument("--test-images", type=int, default=2_000, help="test pictures to use, from the first")
    parser.add_argument("--epochs", type=int, default=15, help="0 evaluates the untrained network")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    x_train, y_train, x_test, y_test = fashion.load()
    if given.data:
        with np.load(given.data) as held:
            x_train, y_train = held["x"], held["y"]
    if given.test:
        with np.load(given.test) as held:
            x_test, y_test = held["x"], held["y"]
    train_set = x_train[: given.images], y_train[: given.images]
    test_set = x_test[: given.test_images], y_test[: given.test_images]

    backbone, rate = train(train_set[0], given.epochs, given.seed, report_every=20)
    print(
        f"{len(train_set[0])} pictures, {given.epochs} epochs: {rate:.0f} images/s, {torch.get_num_threads()} threads"
    )
    for name, value in figures(backbone, train_set, test_set).items():
        print(f"{name} {100 * value:.1f} %")


if __name__ == "__main__":
    main()
