"""The main job as a user runs it: a folder of real pictures, the command line, and features that got better."""

import subprocess
import sys

import cv2
import numpy as np
import pytest
import torch

import moco
from moco.data import fashion
from moco.data.loader import evaluation_batches
from moco.data.sources import ArraySource
from moco.evaluate.features import encode
from moco.evaluate.knn import knn_accuracy

BANK, TEST = 2000, 1000


def knn(backbone, settings):
    x, y, x_test, y_test = fashion.load()

    def features(images):
        source, size = ArraySource(images), settings.image_size
        pictures = evaluation_batches(source, np.arange(len(images)), size=size, channels=1, batch_size=250)
        return encode(backbone, pictures, mean=settings.mean[:1], std=settings.std[:1], device="cpu")

    labels, test_labels = torch.from_numpy(y[:BANK]).long(), torch.from_numpy(y_test[:TEST]).long()
    return knn_accuracy(features(x[:BANK]), labels, features(x_test[:TEST]), test_labels, k=20)


@pytest.mark.slow
def test_pretrain_on_a_folder_then_knn_above_untrained(tmp_path):
    x, y, _, _ = fashion.load()
    for i, (picture, label) in enumerate(zip(x[:BANK], y[:BANK], strict=True)):
        path = tmp_path / "clothes" / fashion.CLASSES[label].replace("/", "-") / f"{i:05}.PNG"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), picture)
    command = [
        sys.executable, "-m", "moco", "pretrain", "clothes", "--recipe", "small", "--base-width", "8",
        "--channels", "1",
        "--image-size", "28", "--batch-size", "64", "--learning-rate", "0.2", "--epochs", "12", "--monitor-every", "6",
        "--out", "run",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2,000 images" in done.stdout
    assert done.stdout.count("kNN accuracy") == 2
    assert done.stdout.count("\nepoch ") == 12
    run = moco.Run(tmp_path / "run")
    torch.manual_seed(0)
    before, after = knn(run.new_backbone(), run.settings), knn(run.backbone(), run.settings)
    print(f"untrained {before:.3f}, pre-trained {after:.3f}")
    assert after > before + 0.015


@pytest.mark.slow
def test_without_momentum_training_on_real_pictures_is_worse(tmp_path):
    x = fashion.load()[0][:BANK]
    found = {}
    for momentum in (0.0, 0.99):
        run = moco.pretrain(
            x, recipe="small", base_width=8, image_size=28, batch_size=64, learning_rate=0.2, epochs=4, monitor="none",
            tensorboard=False, quiet=True, momentum=momentum, out=str(tmp_path / str(momentum)),
        )  # fmt: skip
        found[momentum] = knn(run.backbone(), run.settings)
    print(found)
    assert found[0.99] > found[0.0] + 0.02
