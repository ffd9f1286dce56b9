"""Real pictures that come with the packages: two photographs of scikit-learn, and Fashion-MNIST."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import numpy as np

# NumPy and PyTorch are imported below only: they count the cores when they are.
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if CORES and WORKER:
    # Each worker has a core of its own: threads of one would wait for those of the other.
    os.sched_setaffinity(0, {CORES[int(WORKER.removeprefix("gw")) % len(CORES)]})
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _several_processes_on_all_cores(request: pytest.FixtureRequest) -> Iterator[None]:
    if not (CORES and WORKER and request.node.get_closest_marker("dist")):
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    yield
    os.sched_setaffinity(0, own)


@pytest.fixture(scope="session")
def photographs() -> list[np.ndarray[Any, Any]]:
    """Two photographs, uint8 427 × 640 × 3."""
    import numpy as np
    from sklearn.datasets import load_sample_images

    return [np.ascontiguousarray(image) for image in load_sample_images().images]


@pytest.fixture(scope="session")
def garments() -> np.ndarray[Any, Any]:
    """400 Fashion-MNIST pictures, uint8 400 × 28 × 28."""
    import numpy as np

    from moco.data.fashion import load

    return np.asarray(load()[0][:400])
