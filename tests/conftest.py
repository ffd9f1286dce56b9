"""Real pictures that come with the packages: two photographs of scikit-learn, and Fashion-MNIST."""

import os
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_sample_images

from moco.data.fashion import load

if hasattr(os, "sched_setaffinity") and "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker has a core of its own: trainings in it then use one thread, and do not wait for each other's.
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(os.environ["PYTEST_XDIST_WORKER"][2:]) % len(_cores)]})


@pytest.fixture(scope="session")
def photographs() -> list[np.ndarray[Any, Any]]:
    """Two photographs, uint8 427 × 640 × 3."""
    return [np.ascontiguousarray(image) for image in load_sample_images().images]


@pytest.fixture(scope="session")
def garments() -> np.ndarray[Any, Any]:
    """400 Fashion-MNIST pictures, uint8 400 × 28 × 28."""
    return np.asarray(load()[0][:400])
