"""A small real data set for detection: Fashion-MNIST garments on crops of photographs, with true boxes and masks.

    python benchmarks/make_detection_data.py OUT [--train 300 --val 100 --side 128 --photographs FOLDER]

Writes COCO: OUT/annotations/instances_train.json and instances_val.json, pictures in OUT/train and OUT/val, masks run
length encoded; and OUT/unlabelled.npz, pictures of one garment each without any box or label, to pre-train on. Training
and unlabelled pictures are made of the training garments of Fashion-MNIST and one part of the photographs, validation
pictures of its test garments and the other part. The photographs are the two of scikit-learn, or those in a folder.
The same seed gives the same files. Needs pycocotools.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from pycocotools import mask as rle
from sklearn.datasets import load_sample_images

from moco.data.decode import decode
from moco.data.fashion import CLASSES, load

Array = np.ndarray[Any, Any]

THRESHOLD = 24
"""Gray from which a pixel of a garment (0 is the ground) belongs to it."""
LEAST_SHOWN = 0.6
"""Part of a garment that must show; what the next ones cover up further is taken away again."""
TRAIN, VAL, UNLABELLED = 0, 1, 2


def silhouette(garment: Array) -> Array:
    """The garment's own shape: its largest connected part, holes filled. bool, as large as the picture."""
    outlines, _ = cv2.findContours((garment >= THRESHOLD).astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    filled = np.zeros_like(garment)
    if outlines:
        cv2.drawContours(filled, [max(outlines, key=cv2.contourArea)], -1, 1, thickness=cv2.FILLED)
    return filled.astype(bool)


def enlarged(garment: Array, side: int, draw: np.random.Generator) -> tuple[Array, Array]:
    """A garment in a colour, RGB, and its silhouette, both cut to the silhouette's box."""
    large = cv2.resize(garment, (side, side), interpolation=cv2.INTER_CUBIC)
    if draw.random() < 0.5:
        large = np.ascontiguousarray(large[:, ::-1])
    shape = silhouette(large)
    rows, columns = np.flatnonzero(shape.any(axis=1)), np.flatnonzero(shape.any(axis=0))
    window = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    tint = draw.uniform(0.35, 1.0, 3)
    return (large[window][..., None] * tint).astype(np.uint8), shape[window]


def ground(photographs: list[Array], side: int, draw: np.random.Generator) -> Array:
    """A square crop of a photograph, side × side × 3."""
    photograph = photographs[draw.integers(len(photographs))]
    height, width = photograph.shape[:2]
    cut = int(draw.uniform(0.5, 1.0) * min(height, width))
    y, x = draw.integers(height - cut + 1), draw.integers(width - cut + 1)
    return cv2.resize(photograph[y : y + cut, x : x + cut], (side, side), interpolation=cv2.INTER_AREA)


def scene(
    garments: Array, labels: Array, photographs: list[Array], side: int, most: int, draw: np.random.Generator
) -> tuple[Array, list[tuple[int, Array]]]:
    """A picture with 1 to `most` garments, and (class, mask of what shows of it) for each."""
    picture = ground(photographs, side, draw)
    marked: list[tuple[int, Array, int]] = []
    for _ in range(draw.integers(1, most + 1)):
        number = int(draw.integers(len(garments)))
        pixels, shape = enlarged(garments[number], int(side * draw.uniform(0.25, 0.5)), draw)
        height, width = shape.shape
        y, x = draw.integers(side - height + 1), draw.integers(side - width + 1)
        mask = np.zeros((side, side), dtype=bool)
        mask[y : y + height, x : x + width] = shape
        if any((old & ~mask).sum() < LEAST_SHOWN * whole for _, old, whole in marked):
            continue  # it would hide another one
        picture[y : y + height, x : x + width][shape] = pixels[shape]
        marked = [(label, old & ~mask, whole) for label, old, whole in marked]
        marked.append((int(labels[number]), mask, int(mask.sum())))
    return picture, [(label, mask) for label, mask, _ in marked]


def annotation(number: int, image: int, label: int, mask: Array) -> dict[str, Any]:
    """One object in COCO's words."""
    encoded = rle.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {
        "id": number,
        "image_id": image,
        "category_id": label + 1,
        "iscrowd": 0,
        "area": int(mask.sum()),
        "bbox": [float(value) for value in rle.toBbox(encoded)],
        "segmentation": {"size": list(map(int, encoded["size"])), "counts": encoded["counts"].decode()},
    }


def write_part(
    out: Path,
    name: str,
    count: int,
    garments: Array,
    labels: Array,
    photographs: list[Array],
    side: int,
    seed: list[int],
) -> None:
    """Pictures of one part, and their annotations."""
    (out / name).mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image in range(count):
        draw = np.random.default_rng([*seed, image])
        picture, marked = scene(garments, labels, photographs, side, 4, draw)
        file = f"{image:05}.png"
        cv2.imwrite(str(out / name / file), picture[:, :, ::-1])
        images.append({"id": image + 1, "file_name": file, "width": side, "height": side})
        annotations += [
            annotation(len(annotations) + place + 1, image + 1, label, mask)
            for place, (label, mask) in enumerate(marked)
        ]
    categories = [{"id": number + 1, "name": text} for number, text in enumerate(CLASSES)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (out / "annotations").mkdir(exist_ok=True)
    (out / "annotations" / f"instances_{name}.json").write_text(json.dumps(content), encoding="utf-8")
    print(f"{name}: {count} pictures of {side} × {side}, {len(annotations)} garments")


def halves(folder: str | None) -> tuple[list[Array], list[Array]]:
    """Photographs for training and others for validation; of the two of scikit-learn, the left and the right part."""
    if folder is None:
        whole = [np.ascontiguousarray(image) for image in load_sample_images().images]
        cut = [int(image.shape[1] * 0.6) for image in whole]
        return (
            [image[:, :at] for image, at in zip(whole, cut, strict=True)],
            [image[:, at:] for image, at in zip(whole, cut, strict=True)],
        )
    files = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    pictures = [decode(path.read_bytes(), 3) for path in files]
    if len(pictures) < 2:
        raise SystemExit(f"{folder} has {len(pictures)} photographs (.jpg, .png): at least 2 are needed")
    return pictures[::2], pictures[1::2]


def make(
    out: Path, *, train: int, val: int, unlabelled: int, side: int, seed: int, photographs: str | None = None
) -> None:
    """Write the whole data set."""
    x_train, y_train, x_test, y_test = load()
    ours, theirs = halves(photographs)
    write_part(out, "train", train, x_train, y_train, ours, side, [seed, TRAIN])
    write_part(out, "val", val, x_test, y_test, theirs, side, [seed, VAL])
    if unlabelled:
        small = side // 2
        pictures = np.empty((unlabelled, small, small, 3), np.uint8)
        for number in range(unlabelled):
            draw = np.random.default_rng([seed, UNLABELLED, number])
            picture = ground(ours, small, draw)
            pixels, shape = enlarged(x_train[draw.integers(len(x_train))], int(small * draw.uniform(0.6, 1.0)), draw)
            height, width = shape.shape
            y, x = draw.integers(small - height + 1), draw.integers(small - width + 1)
            picture[y : y + height, x : x + width][shape] = pixels[shape]
            pictures[number] = picture
        np.savez(out / "unlabelled.npz", x=pictures)
        print(f"unlabelled: {unlabelled} pictures of {small} × {small}, one garment each")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=300)
    parser.add_argument("--val", type=int, default=100)
    parser.add_argument("--unlabelled", type=int, default=6000)
    parser.add_argument("--side", type=int, default=128, help="of a picture, in pixels")
    parser.add_argument("--photographs", help="folder of photographs (default: the two of scikit-learn)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    make(
        given.out, train=given.train, val=given.val, unlabelled=given.unlabelled, side=given.side, seed=given.seed,
        photographs=given.photographs,
    )  # fmt: skip


if __name__ == "__main__":
    main()
