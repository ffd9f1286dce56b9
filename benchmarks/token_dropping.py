"""A vision transformer that sees part of its patches while it trains: speed of a step, and accuracy after a short run.

    python benchmarks/token_dropping.py [--keep 1 0.5 0.25] [--epochs 3] [--pictures 2000]

ViT-tiny with the rules of MoCo v3, its in-batch dictionary and AdamW, on packaged Fashion-MNIST pictures at 96 pixels
(36 patches and the class token). The rows run one after the other with the same seed; the speed is the median over the
lines of metrics.jsonl, the accuracy kNN on 2,000 other pictures with all patches seen.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

import torch

import moco
from moco.data import fashion
from moco.data.loader import evaluation_batches
from moco.data.sources import ArraySource
from moco.evaluate.features import encode
from moco.evaluate.knn import knn_accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=float, nargs="+", default=[1.0, 0.5, 0.25])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=2000)
    given = parser.parse_args()
    x, y, x_test, y_test = fashion.load()
    x, y = x[: given.pictures], y[: given.pictures]
    for keep in given.keep:
        with tempfile.TemporaryDirectory() as folder:
            run = moco.pretrain(
                x, out=Path(folder) / "run", recipe="v3", backbone="vit_tiny_patch16_224", image_size=96,
                keep_tokens=keep, head_width=512, batch_size=128, epochs=given.epochs, learning_rate=1e-3,
                crop_scale=(0.4, 1.0), monitor="none", tensorboard=False, quiet=True,
            )  # fmt: skip
            settings, backbone = run.settings, run.backbone()
            features = [
                encode(
                    backbone,
                    evaluation_batches(ArraySource(images), range(len(images)), size=96, channels=1, batch_size=128),
                    mean=settings.mean, std=settings.std, device="cpu", precision=settings.precision,
                )
                for images in (x, x_test)
            ]  # fmt: skip
            rate = median(line["images_per_second"] for line in run.metrics() if "images_per_second" in line)
        found = knn_accuracy(
            features[0], torch.from_numpy(y).long(), features[1], torch.from_numpy(y_test).long(), k=20
        )
        print(f"keep {keep:4.0%}: {rate:6.1f} images/s, kNN {found:.1%}", flush=True)


if __name__ == "__main__":
    main()
