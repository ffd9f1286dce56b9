import io

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from sklearn.metrics import confusion_matrix as reference
from sklearn.metrics import recall_score

from moco.evaluate.confusion import confusion_matrix, draw_confusion, per_class


def test_matrix_and_per_class_accuracy_are_those_of_scikit_learn():
    generator = np.random.default_rng(0)
    labels, found = generator.integers(0, 4, 200), generator.integers(0, 5, 200)
    matrix = confusion_matrix(torch.from_numpy(labels), torch.from_numpy(found), 6)
    assert (matrix.numpy() == reference(labels, found, labels=range(6))).all()
    shares = per_class(matrix)
    assert shares[4] is None  # nothing of these classes was there to be found
    assert shares[5] is None
    assert np.allclose(shares[:4], recall_score(labels, found, labels=range(4), average=None))


def test_the_picture_is_a_png_whatever_the_classes_are_called():
    matrix = torch.tensor([[3, 1], [0, 4]])
    png = draw_confusion(matrix, ["$x_{", "<b>dogs</b>"], "kNN")
    picture = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    assert png.startswith(b"\x89PNG")
    assert picture.std() > 10


def test_cells_and_colours_are_in_percent(monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw_confusion(torch.tensor([[3, 1], [0, 4]]), ["a", "b"], "kNN")
    cells, colours = drawn[0].axes
    assert sorted(text.get_text() for text in cells.texts) == ["100", "25", "75"]
    assert cells.images[0].get_array().tolist() == [[75, 25], [0, 100]]
    assert colours.get_ylim() == (0, 100)
    assert colours.get_ylabel() == "% of the true class"
