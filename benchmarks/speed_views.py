"""Views per second on one core: moco against Pillow and torchvision's transforms, in turns.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/speed_views.py FOLDER [--rounds 7] [--json out.json]

FOLDER holds JPEGs, for instance of 500 × 375 pixels as ImageNet has them. From each picture two views are made: there
from the file to 224 pixels (decoding included), then from Fashion-MNIST in memory to 32 pixels, and from the JPEGs,
reduced to 32 × 32 and 96 × 96 and held in memory, to views of that size. The reference is the pipeline of the authors'
code: one Pillow decode, and twice the transforms on the Pillow picture, to a normalised tensor; it is not asked to make
batches.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import measure
import numpy as np
import torch
from PIL import Image, ImageFilter
from torchvision import transforms

from moco.data import fashion
from moco.data.loader import Batch, ViewStream
from moco.data.sources import ArraySource, FolderSource, Source
from moco.data.views import normalize
from moco.recipes import pretrain_settings
from moco.settings import ViewSettings

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class PillowBlur:
    """Gaussian blur as Pillow does it, with a random radius."""

    def __init__(self, sigma: tuple[float, float]) -> None:
        self.sigma = sigma

    def __call__(self, picture: Image.Image) -> Image.Image:
        return picture.filter(ImageFilter.GaussianBlur(radius=random.uniform(*self.sigma)))


def pillow_transform(views: ViewSettings, size: int, channels: int) -> Callable[[Image.Image], torch.Tensor]:
    """The transforms of the authors' code with these settings."""
    jitter = transforms.ColorJitter(views.brightness, views.contrast, views.saturation, views.hue)
    steps = [
        transforms.RandomResizedCrop(size, scale=views.crop_scale, ratio=views.crop_ratio),
        transforms.RandomApply([jitter], p=views.jitter_probability),
        transforms.RandomGrayscale(p=views.grayscale_probability),
        transforms.RandomApply([PillowBlur(views.blur_sigma)], p=views.blur_probability),
        transforms.RandomHorizontalFlip(views.flip_probability),
        transforms.ToTensor(),
        transforms.Normalize(MEAN[:channels], STD[:channels]),
    ]
    if channels == 1:
        steps.pop(2)  # nothing to drop
    return transforms.Compose(steps)


def in_rotation(items: Any, count: int) -> Iterator[list[Any]]:
    """`count` of the items at a time, over and over."""
    place = 0
    while True:
        yield [items[(place + number) % len(items)] for number in range(count)]
        place += count


def stream_of(source: Source, views: ViewSettings, way: Any, size: int, channels: int, batch: int) -> Iterator[Batch]:
    """Batches of moco, one after the other, made in this process."""
    stream = ViewStream(
        source, query=views, key=views, size=size, channels=channels, batch_size=batch, seed=0, workers=0, way=way,
        device=torch.device("cpu"),
    )  # fmt: skip
    return stream.run(0, 10**9)


def files(folder: Path, size: int, batch: int) -> dict[str, Callable[[], object]]:
    """From JPEG files to two views."""
    views = pretrain_settings(recipe="v2").query_views
    source = FolderSource(folder)
    transform = pillow_transform(views, size, 3)
    paths = in_rotation([folder / source.names[number] for number in range(len(source))], batch)

    def pillow() -> object:
        pairs = []
        for path in next(paths):
            with open(path, "rb") as file:
                picture = Image.open(file).convert("RGB")
            pairs.append((transform(picture), transform(picture)))
        return pairs

    image, normalised, split = (stream_of(source, views, way, size, 3, batch) for way in ("image", "image", "split"))
    return {
        "Pillow + torchvision": pillow,
        "moco, way image": lambda: next(image),
        "… normalised on this core too": lambda: _normalised(next(normalised), 3),
        "moco, way split: what its workers do": lambda: next(split),
    }


def arrays(images: np.ndarray[Any, Any], views: ViewSettings, size: int, batch: int) -> dict[str, Callable[[], object]]:
    """From pictures in memory, uint8 (N, H, W, C), to two views."""
    channels = images.shape[3]
    transform = pillow_transform(views, size, channels)
    pictures = in_rotation(images if channels == 3 else images[..., 0], batch)

    def pillow() -> object:
        pairs = []
        for pixels in next(pictures):
            picture = Image.fromarray(pixels)
            pairs.append((transform(picture), transform(picture)))
        return pairs

    plain, normalised = (stream_of(ArraySource(images), views, "batch", size, channels, batch) for _ in range(2))
    return {
        "Pillow + torchvision": pillow,
        "moco, way batch": lambda: next(plain),
        "… normalised on this core too": lambda: _normalised(next(normalised), channels),
    }


def _normalised(batch: Batch, channels: int) -> object:
    return [normalize(view, MEAN[:channels], STD[:channels]) for view in (batch.query, batch.key)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="JPEGs, for instance of 500 × 375 pixels")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--batch", type=int, default=64, help="files that a side handles in a round; in memory, 4 × that"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    v2, small = (pretrain_settings(recipe=recipe).query_views for recipe in ("v2", "small"))
    garments = fashion.load()[0][..., None]
    paths = [given.folder / name for name in itertools.islice(FolderSource(given.folder).names, 256)]
    pictures = [Image.open(path).convert("RGB") for path in paths]
    large, little = (np.stack([picture.resize((size, size)) for picture in pictures]) for size in (96, 32))
    found = {}
    for title, sides in {
        "JPEG files → 2 × 224 px, v2": files(given.folder, 224, given.batch),
        "28 px, gray, in memory → 2 × 32 px, v2": arrays(garments, v2, 32, 4 * given.batch),
        "28 px, gray, in memory → 2 × 32 px, small": arrays(garments, small, 32, 4 * given.batch),
        "32 px, colour, in memory → 2 × 32 px, v2": arrays(little, v2, 32, 4 * given.batch),
        "96 px, colour, in memory → 2 × 96 px, v2": arrays(large, v2, 96, 4 * given.batch),
    }.items():
        items = given.batch * (4 if "memory" in title else 1)
        found[title] = measure.summary(measure.in_turns(sides, given.rounds), items, next(iter(sides)))
        measure.show(title, found[title], "images")
    measure.write(given.json, {"rounds": given.rounds, **found})


if __name__ == "__main__":
    main()
