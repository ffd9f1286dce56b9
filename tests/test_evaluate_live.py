"""The probes of the whole model while a run trains: what they find, when they look, and that nothing changes."""

import pytest
import torch
from torch import nn

import moco
from moco.building import build_model
from moco.contrast.own import know
from moco.data import fashion
from moco.data.loader import ViewStream
from moco.data.sources import ArraySource
from moco.data.views import normalize
from moco.evaluate import live
from moco.evaluate.live import make_probes
from moco.evaluate.monitor import make_monitor
from moco.recipes import pretrain_settings
from moco.resolve import resolve
from moco.train.parallel import Processes


class Small(nn.Module):
    """A backbone with batch norm that draws random numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


CPU = torch.device("cpu")
SOURCE = ArraySource(*(array[:400] for array in fashion.load()[:2]))
GIVEN = {
    "recipe": "small", "backbone": know(Small), "batch_size": 32, "queue_size": 96, "image_size": 16, "device": "cpu",
    "precision": "fp32", "threads": 1, "epochs": 10, "bn_groups": 2, "shuffle_bn": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def at_every_check(monkeypatch):
    monkeypatch.setattr(live, "SHARE", 1e9)


def settings(**given):
    return resolve(pretrain_settings(**(GIVEN | given)), SOURCE, Processes(0, 1, CPU))


def stream_of(asked):
    return ViewStream(
        SOURCE, query=asked.query_views, key=asked.key_views, size=asked.image_size, channels=asked.channels,
        batch_size=asked.batch_size, seed=asked.seed, workers=0, way="batch", device=CPU,
    )  # fmt: skip


def trained(asked, steps):
    """A model after a few steps, as the loop makes them."""
    model, stream = build_model(asked, len(SOURCE)).train(), stream_of(asked)
    solver = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step in range(steps):
        batch = stream.batch(step)
        model.begin_step(step / 100)
        pieces = (rows.chunk(asked.accumulate) for rows in (batch.query, batch.key, batch.ids))
        for query, key, ids in zip(*pieces, strict=True):
            model(*(normalize(view, asked.mean, asked.std) for view in (query, key)), ids).loss.backward()
        solver.step()
        solver.zero_grad()
        model.end_step()
    return model


@pytest.mark.parametrize("kind", ["knn", "retrieval"])
@pytest.mark.parametrize("dropping", [False, True])
def test_a_check_leaves_every_byte_as_it_was(kind, dropping):
    asked = settings(monitor=kind, symmetric=dropping, accumulate=2, bn_groups=2)
    model = trained(asked, 12)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.2 * dropping
    model.query_encoder.head.eval()  # a part that somebody keeps frozen
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    modes, numbers, own = [m.training for m in model.modules()], torch.get_rng_state(), model._generator.get_state()
    figures = make_monitor(SOURCE, asked, CPU, stream_of(asked))(model)
    assert {"batch_leak", "oldest_key_cosine", "effective_rank"} <= set(figures)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert model.step == 12
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(numbers, torch.get_rng_state())
    assert torch.equal(own, model._generator.get_state())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_keys_of_the_last_step_are_made_just_as_they_were(symmetric, accumulate):
    asked = settings(symmetric=symmetric, accumulate=accumulate, queue_size=32 * (1 + symmetric))
    found = make_probes(model := trained(asked, 24), asked, stream_of(asked), CPU).figures(model)
    assert found["oldest_key_age"] == 1
    assert found["oldest_key_cosine"] == pytest.approx(1, abs=1e-5)
    older = settings(momentum=0.0, queue_size=320)
    found = make_probes(model := trained(older, 24), older, stream_of(older), CPU).figures(model)
    assert found["oldest_key_age"] == 10
    assert found["oldest_key_cosine"] < 0.99


def test_small_groups_leak_and_shuffling_them_less(monkeypatch):
    monkeypatch.setattr(live, "PICTURES", 380)
    leaks = {}
    for shuffled in (False, True):
        asked = settings(bn_groups=8, shuffle_bn=shuffled)
        model = trained(asked, 48)
        leaks[shuffled] = make_probes(model, asked, stream_of(asked), CPU).figures(model)
    assert leaks[False]["batch_leak"] > 6 * leaks[False]["batch_leak_error"]
    assert leaks[False]["batch_leak"] > 2 * leaks[True]["batch_leak"]
    assert leaks[False].get("batch_leak_share", 1) > 0.025


def test_looks_take_a_small_part_of_an_epoch(monkeypatch):
    monkeypatch.setattr(live, "SHARE", 0.03)
    short, long = settings(), settings()
    probes = make_probes(build_model(short), short, stream_of(short), CPU)
    # 256 pictures four times and 32 once, of which four are a step's: 264 pictures, of 384 in an epoch.
    assert probes.every == -(-264 * 100 // (3 * 384)) == 23
    due = [step for step in range(0, 12 * 11, 12) if probes._due(step)]
    assert due == [0, 12 * 10]  # before the first epoch nothing was looked at; the last one always is
    monitor = long.model_copy(update={"epochs": 100, "monitor_every": 5})
    probes = make_probes(build_model(short), monitor, stream_of(short), CPU)
    assert [epoch for epoch in range(5, 101, 5) if probes._due(12 * epoch)] == [25, 50, 70, 95, 100]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"dictionary": "in-batch", "shuffle_bn": False, "bn_groups": 1}, {"batch_leak", "batch_leak_error"}),
        ({"dictionary": "memory-bank", "shuffle_bn": False, "bn_groups": 1}, set()),
        ({"batch_size": 400, "queue_size": 400}, {"batch_leak", "batch_leak_error", "oldest"}),
    ],
)
def test_only_what_fits_the_run_is_looked_at(given, names, monkeypatch):
    asked = settings(**given)
    found = make_probes(model := trained(asked, 2), asked, stream_of(asked), CPU)
    found = {name.removesuffix("_key_cosine").removesuffix("_key_age") for name in found.figures(model)}
    assert found - {"batch_leak_share"} == names
    monkeypatch.setattr(live, "MOST_PICTURES", 63)
    probes = make_probes(model, asked, stream_of(asked), CPU)
    assert not {name for name in probes.figures(model) if "leak" in name}


@pytest.mark.parametrize("method", ["simclr", "byol", "swav", "cpc"])
def test_other_methods_get_the_figures_that_every_encoder_has(method):
    asked = settings(recipe=method, bn_groups="auto", shuffle_bn="auto", monitor="knn", queue_size="auto")
    model = build_model(asked, len(SOURCE)).train()
    assert make_probes(model, asked, stream_of(asked), CPU) is None
    figures = make_monitor(SOURCE, asked, CPU, stream_of(asked))(model)
    every = {"knn_accuracy", "effective_rank", "dead_dimensions"}
    assert set(figures) == (every if method == "cpc" else every | {"spread", "random_cosine"})


def test_views_of_the_user_and_encoders_that_talk_are_left_alone():
    asked = settings()
    model = build_model(asked)
    custom = asked.model_copy(update={"views": "custom"})
    assert make_probes(model, custom, stream_of(asked), CPU) is None
    talking = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert make_probes(talking, asked, stream_of(asked), CPU) is None


def test_a_training_is_the_same_with_and_without_looks(tmp_path):
    given = GIVEN | {"epochs": 3, "quiet": True, "tensorboard": False, "batch_size": 64, "log_every": 2}
    x, y = (array[:192] for array in fashion.load()[:2])
    plain = moco.pretrain(x, out=str(tmp_path / "plain"), monitor="none", **given)
    looked = moco.pretrain(x, labels=y, out=str(tmp_path / "looked"), monitor="knn", **given)
    assert sum("batch_leak" in line for line in looked.metrics()) == 3
    one, other = plain.load(), looked.load()
    for name, value in one["model"].items():
        found = other["model"][name]
        assert torch.equal(value, found) if isinstance(value, torch.Tensor) else value == found, name
