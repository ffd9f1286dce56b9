"""Real pictures that ship with the package: a part of Fashion-MNIST (arXiv 1708.07747, MIT licence beside this file).

`fashion.npz` holds the first 10,000 training and the first 2,000 test pictures in their published order.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
from numpy.typing import NDArray

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

Bytes = NDArray[np.uint8]


def load() -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """The packaged pictures and their labels as (x_train, y_train, x_test, y_test), all uint8.

    Pictures: (10000, 28, 28) and (2000, 28, 28), gray, bright garment on black. Labels: (10000,) and (2000,),
    0 to 9, the positions in `CLASSES`. Every call reads the file anew, so the arrays may be changed freely.
    """
    with (
        resources.files(__name__).joinpath("fashion.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as held,
    ):
        return held["x_train"], held["y_train"], held["x_test"], held["y_test"]
