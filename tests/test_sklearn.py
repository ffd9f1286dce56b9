"""`MocoEncoder` among scikit-learn's own: its checks, clones, pipelines, pickles."""

import pickle

import cv2
import joblib
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

import moco
from moco.data import fashion

SETTINGS = {"queue_size": 32, "threads": 1, "precision": "fp32"}


def network() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())


def encoder(**given) -> moco.MocoEncoder:
    usual = {
        "backbone": network,
        "epochs": 1,
        "image_size": 8,
        "random_state": 0,
        "settings": SETTINGS,
        "device": "cpu",
    }
    return moco.MocoEncoder(**(usual | given))


@pytest.fixture(autouse=True)
def no_pictures_of_curves(monkeypatch):
    monkeypatch.setattr("moco.pretraining.draw_curves", lambda run: "")


@pytest.fixture(scope="module")
def data():
    x, y, *_ = fashion.load()
    return np.asarray(x[:200]), np.asarray(y[:200])


class RowsAsPictures(moco.MocoEncoder):
    """scikit-learn's checks bring tables of numbers: here a row is a picture of one line."""

    def fit(self, X, y=None):
        return super().fit(self._pictures(X, reset=True))

    def transform(self, X):
        check_is_fitted(self)
        return super().transform(self._pictures(X, reset=False))

    def _pictures(self, X, *, reset):
        rows = validate_data(self, X, reset=reset, dtype=np.float64)
        return np.clip(rows * 20 + 128, 0, 255).astype(np.uint8)[:, None, :]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array, tags.input_tags.string = True, False, False
        return tags


def test_scikit_learns_own_checks():
    estimator = RowsAsPictures(network, epochs=1)
    estimator.set_params(**(encoder().get_params() | {"image_size": 4}))
    found = check_estimator(estimator, on_skip=None, on_fail="raise")
    assert sum(check["status"] == "passed" for check in found) > 40
    assert {check["check_name"] for check in found if check["status"] != "passed"} <= {"check_array_api_input"}


def test_features_are_those_of_the_run(data, tmp_path):
    x, _ = data
    made = encoder(out=tmp_path / "run").fit(x)
    assert np.array_equal(made.transform(x[:50]), moco.embed(tmp_path / "run", x[:50], quiet=True, device="cpu"))
    assert made.transform(x).dtype == np.float32
    assert made.run_ == str(tmp_path / "run")
    assert made.settings_.seed == moco.Run(tmp_path / "run").settings.seed
    assert made.settings_.batch_size == 200  # the recipe's 256 are more than there are
    assert list(made.get_feature_names_out()) == [f"mocoencoder{number}" for number in range(8)]


def test_the_random_state_decides(data):
    x, _ = data
    one, two, three = (encoder(random_state=seed).fit(x).transform(x[:20]) for seed in (0, 0, 1))
    assert np.array_equal(one, two)
    assert not np.allclose(one, three)
    assert not np.allclose(one, encoder(settings=SETTINGS | {"temperature": 0.5}).fit(x).transform(x[:20]))


@pytest.mark.parametrize("through", [pickle, joblib])
def test_a_fitted_one_travels_with_its_weights(data, tmp_path, through):
    x, _ = data
    made = encoder().fit(x)
    assert made.run_ is None
    with (tmp_path / "file").open("wb") as file:
        through.dump(made, file)
    with (tmp_path / "file").open("rb") as file:
        again = through.load(file)
    assert np.array_equal(again.transform(x[:20]), made.transform(x[:20]))


def test_pipelines_clones_and_searches(data):
    x, y = data
    model = make_pipeline(encoder(), LogisticRegression(max_iter=500))
    model.fit(x[:150], y[:150])
    assert model.predict(x[150:]).shape == (50,)
    copy = clone(model[0])
    assert copy.get_params() == model[0].get_params()
    with pytest.raises(NotFittedError):
        copy.transform(x)
    search = GridSearchCV(model, {"mocoencoder__epochs": [1, 2]}, cv=2, error_score="raise").fit(x, y)
    assert len(search.cv_results_["mean_test_score"]) == 2


def test_folders_and_lists_of_paths(tmp_path, data):
    folder = tmp_path / "clothes"
    folder.mkdir()
    for number, picture in enumerate(data[0][:70]):
        cv2.imwrite(str(folder / f"{number:03}.png"), picture)
    paths = [str(path) for path in sorted(folder.iterdir())]
    in_folder = encoder(settings=SETTINGS | {"channels": 1, "workers": 0}).fit(str(folder))
    listed = encoder(settings=SETTINGS | {"channels": 1, "workers": 0}).fit(paths)
    assert np.array_equal(in_folder.transform(paths), listed.transform(str(folder)))
    assert np.array_equal(in_folder.transform([folder / "003.png"]), in_folder.transform(paths[3:4]))
    (folder / "003.png").write_bytes(b"no picture")
    with pytest.warns(UserWarning, match=r"003\.png cannot be read"):
        rows = in_folder.transform(paths)
    assert np.isnan(rows[3]).all()
    assert np.isfinite(np.delete(rows, 3, axis=0)).all()


def test_mistakes_are_value_errors_of_one_line(data, tmp_path):
    x, _ = data
    for wrong, said in (
        ({"settings": {"epochs": 3}}, "epochs is a parameter"), ({"settings": {"temprature": 3}}, "mean temperature"),
        ({"recipe": "v9"}, "v9"), ({"epochs": 0}, "epochs"),
    ):  # fmt: skip
        with pytest.raises(moco.UserError, match=said):
            encoder(**wrong).fit(x)
    with pytest.raises(ValueError, match="n_samples = 1"):
        encoder().fit(x[:1])
    with pytest.raises(ValueError, match="uint8"):
        encoder().fit(x / 255)
