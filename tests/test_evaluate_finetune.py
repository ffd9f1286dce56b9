"""The supervised loop and the contrastive loss beside it, against plain loops and closed forms, on real pictures."""

import copy
import math

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from moco.contrast.dictionary import InBatch, Queue
from moco.contrast.moco import MomentumContrast
from moco.data import fashion
from moco.errors import TrainingError
from moco.evaluate import finetune
from moco.evaluate.contrast_beside import ContrastBeside
from moco.evaluate.finetune import Course, Preparation, parameter_groups, predict, train_on_labels
from moco.evaluate.pictures import open_part
from moco.settings import ViewSettings

VIEWS = ViewSettings(jitter_probability=0, grayscale_probability=0, blur_probability=0)
PICTURES = Preparation(8, 1, (0.28,), (0.35,), torch.device("cpu"))


class Small(nn.Module):
    """A backbone of one convolution and a batch norm: (n, 1, 8, 8) → (n, 6)."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 6, 3, stride=2, bias=False), nn.BatchNorm2d(6)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x))).mean((2, 3))


@pytest.fixture(scope="module")
def part():
    x, y, _, _ = fashion.load()
    return open_part(x[:240], y[:240], needed=True)


@pytest.fixture
def backbone():
    torch.manual_seed(3)
    return Small()


def network_of(name, **given):
    backbone = timm.create_model(name, num_classes=0, **given)
    network = nn.Sequential()
    network.add_module("backbone", backbone)
    network.add_module("classifier", nn.Linear(4, 3))
    return network


def scale_and_decay(network, course, more=()):
    """Both figures by the name of the parameter; each parameter is in one group only."""
    found = {}
    for group in parameter_groups(network, course, more):
        for parameter in group["params"]:
            assert id(parameter) not in found
            found[id(parameter)] = group["lr_scale"], group["weight_decay"]
    return {name: found[id(parameter)] for name, parameter in network.named_parameters()}


def test_rates_fall_block_by_block_from_the_classifier_down():
    network = network_of("resnet18", channels=(4, 8, 16, 32))
    extra = nn.Linear(2, 2)
    course = Course(10, VIEWS, layer_decay=0.5, weight_decay=0.1)
    found = scale_and_decay(network, course, tuple(extra.parameters()))
    blocks = [f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)]
    for name, (scale, decay) in found.items():
        if name.startswith("classifier"):
            below = 0
        else:
            place = next((i for i, block in enumerate(blocks) if name.startswith(f"backbone.{block}.")), -1)
            below = len(blocks) - place  # the last block is one below the classifier, the stem below all blocks
        assert scale == pytest.approx(0.5**below), name
        assert decay == (0.1 if name.endswith("weight") and ".bn" not in name and "downsample.1" not in name else 0.0)
    assert {scale for scale, _ in scale_and_decay(network, Course(10, VIEWS)).values()} == {1.0}


def test_a_transformer_exempts_what_timm_exempts():
    network = network_of("vit_tiny_patch16_224", embed_dim=12, depth=2, num_heads=3, img_size=32)
    found = scale_and_decay(network, Course(10, VIEWS, layer_decay=0.5, weight_decay=0.1))
    assert found["backbone.blocks.1.attn.qkv.weight"] == (0.5, 0.1)
    assert found["backbone.blocks.0.attn.qkv.weight"] == (0.25, 0.1)
    assert found["backbone.pos_embed"] == (0.125, 0.0)


def test_the_rate_rises_in_line_and_falls_by_half_a_cosine():
    course = Course(100, VIEWS, learning_rate=2.0, warmup=0.1)
    assert [course.rate(step) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert course.rate(10) == pytest.approx(2.0)
    assert course.rate(55) == pytest.approx(1.0)
    assert course.rate(99) == pytest.approx(1 + math.cos(math.pi * 89 / 90))
    assert Course(1, VIEWS, learning_rate=2.0).rate(0) == 2.0


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_training_is_that_of_a_plain_loop(part, backbone, optimizer):
    plain, steps, rates = copy.deepcopy(backbone), 12, []
    course = Course(
        steps, VIEWS, batch_size=50, optimizer=optimizer, learning_rate=0.05, layer_decay=0.5, weight_decay=0.01
    )
    state = torch.get_rng_state()
    trained = train_on_labels(backbone, part, classes=10, course=course, pictures=PICTURES, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert trained.network[0] is backbone
    assert not trained.network.training
    assert (trained.steps, trained.best_step, trained.validation_accuracy) == (steps, steps, None)

    classifier = nn.Linear(6, 10)
    with torch.no_grad():
        classifier.weight.normal_(0, 0.01, generator=torch.Generator().manual_seed(5))
        classifier.bias.zero_()
    # All blocks of a network that timm does not know count as one, just below the classifier.
    groups = [
        {"params": [classifier.weight], "weight_decay": 0.01, "scale": 1.0},
        {"params": [classifier.bias], "weight_decay": 0.0, "scale": 1.0},
        {"params": [plain.conv.weight], "weight_decay": 0.01, "scale": 0.5},
        {"params": [*plain.norm.parameters()], "weight_decay": 0.0, "scale": 0.5},
    ]
    solver = torch.optim.SGD(groups, momentum=0.9) if optimizer == "sgd" else torch.optim.AdamW(groups)
    stream = PICTURES.stream(part, VIEWS, VIEWS, 50, 5)
    plain.train()
    for step in range(steps):
        batch = stream.batch(step)
        rates.append(course.rate(step))
        for group in solver.param_groups:
            group["lr"] = rates[-1] * group["scale"]
        logits = classifier(plain((batch.query - 0.28) / 0.35))
        solver.zero_grad()
        F.cross_entropy(logits, part.known()[batch.ids]).backward()
        solver.step()
    assert rates[0] == 0.05  # 5 % of 12 steps is one step
    for name, held in plain.state_dict().items():
        torch.testing.assert_close(backbone.state_dict()[name], held, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(trained.network[1].weight, classifier.weight, rtol=1e-4, atol=1e-5)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(part, backbone):
    def weights(seed):
        course = Course(6, VIEWS, batch_size=40)
        return train_on_labels(
            copy.deepcopy(backbone), part, classes=10, course=course, pictures=PICTURES, seed=seed
        ).network.state_dict()

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(held, again[name]) for name, held in first.items())
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])


def scripted(monkeypatch, accuracies):
    """Let looks at the validation part find these accuracies, and remember the weights at each look."""
    seen = []

    def looked(network, pictures, part):
        seen.append({name: held.clone() for name, held in network.state_dict().items()})
        labels = part.known()
        right = torch.arange(len(labels)) < round(accuracies[len(seen) - 1] * len(labels))
        return F.one_hot(torch.where(right, labels, (labels + 1) % 10), 10).float()

    monkeypatch.setattr(finetune, "predict", looked)
    return seen


def test_the_best_weights_are_kept_and_patience_ends(part, backbone, monkeypatch):
    seen = scripted(monkeypatch, [0.2, 0.7, 0.6, 0.5, 0.4, 0.9, 0.9])
    train, held = part.rows(np.arange(200)), part.rows(np.arange(200, 240))
    told = []
    course = Course(40, VIEWS, batch_size=50, patience=2)
    trained = train_on_labels(
        backbone, train, validation=held, classes=10, course=course, pictures=PICTURES, say=told.append
    )
    assert trained.validation == {4: 0.2, 8: 0.7, 12: 0.6, 16: 0.5, 20: 0.4}  # four steps a pass
    assert (trained.steps, trained.best_step, trained.validation_accuracy) == (20, 8, 0.7)
    assert list(trained.losses) == [4, 8, 12, 16, 20]
    assert sum(told) == 40  # the bar is full although it ended early
    for name, weights in trained.network.state_dict().items():
        assert torch.equal(weights, seen[1][name]), name
    assert not torch.equal(seen[1]["classifier.weight"], seen[4]["classifier.weight"])


def test_of_looks_that_are_equally_good_the_later_counts(part, backbone, monkeypatch):
    scripted(monkeypatch, [0.5, 0.5, 0.2])
    course = Course(12, VIEWS, batch_size=50)
    train, held = part.rows(np.arange(200)), part.rows(np.arange(200, 240))
    trained = train_on_labels(backbone, train, validation=held, classes=10, course=course, pictures=PICTURES)
    assert trained.best_step == 8


def test_a_wild_rate_is_said_to_be_one(part, backbone):
    with pytest.raises(TrainingError, match="no number by step 30: lower the learning rate"):
        train_on_labels(backbone, part, classes=10, course=Course(30, VIEWS, learning_rate=1e30), pictures=PICTURES)


# ---------------------------------------------------------------- the contrastive loss beside


def method_of(backbone, size=256):
    torch.manual_seed(4)
    queue = Queue(size, 5)
    queue.ids.copy_(torch.arange(size))  # as after a training on other pictures
    return MomentumContrast(backbone, nn.Linear(6, 5), dictionary=queue, momentum=0.9, temperature=0.2)


def test_the_second_loss_is_that_of_the_method_times_its_weight(part, backbone):
    model = method_of(backbone)
    other = copy.deepcopy(model)
    further = open_part(fashion.load()[0][240:340], "none", needed=False)
    beside = ContrastBeside(model, 0.3, part, VIEWS, VIEWS, PICTURES, further, seed=2)
    assert [tuple(p.shape) for p in beside.parameters()] == [(5, 6), (5,)]
    beside.start(4, 40)
    beside.begin_step(0.0)
    loss = beside.loss(torch.autocast("cpu", enabled=False))
    loss.backward()

    other.dictionary.ids.fill_(-1)
    other.begin_step()
    batches = [PICTURES.stream(pictures, VIEWS, VIEWS, 40, 2).batch(0) for pictures in (part, further)]
    views = [(torch.cat([getattr(batch, side) for batch in batches]) - 0.28) / 0.35 for side in ("query", "key")]
    wanted = other(*views, torch.cat([batches[0].ids, batches[1].ids + 240]))
    (0.3 * wanted.loss).backward()
    assert loss.item() == pytest.approx(0.3 * wanted.loss.item(), rel=1e-5)
    for own, expected in zip(model.query_encoder.parameters(), other.query_encoder.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-3, atol=1e-5)
        assert own.grad.abs().sum() > 0

    beside.end_step()
    queue = model.dictionary
    assert int(queue.pointer) == 80
    assert queue.ids[:40].tolist() == batches[0].ids.tolist()  # the pictures of the task, in its order
    assert set(queue.ids[40:80].tolist()) <= set(range(240, 340))
    assert set(queue.ids[80:].tolist()) == {-1}  # those of the run have other numbers


def test_both_losses_reach_the_backbone_and_the_keys_follow(part, backbone):
    model = method_of(copy.deepcopy(backbone))
    before = copy.deepcopy(model)
    beside = ContrastBeside(model, 1.0, part, VIEWS, VIEWS, PICTURES, seed=1)
    course = Course(8, VIEWS, batch_size=40)
    trained = train_on_labels(model.backbone, part, classes=10, course=course, pictures=PICTURES, beside=beside, seed=1)
    alone = train_on_labels(backbone, part, classes=10, course=course, pictures=PICTURES, seed=1)
    assert trained.network[0] is model.backbone
    assert not torch.equal(model.backbone.conv.weight, alone.network[0].conv.weight)
    for name in ("query_encoder.head.weight", "query_encoder.backbone.conv.weight", "key_encoder.backbone.conv.weight"):
        assert not torch.equal(model.state_dict()[name], before.state_dict()[name]), name
    assert model.step == before.step + 8
    assert int(model.dictionary.pointer) == 8 * 40 % 256
    losses = beside.mean_losses(trained.losses)
    assert list(losses) == [8]
    assert losses[8] == pytest.approx(float(torch.stack(beside.losses).mean()))


def test_a_key_encoder_that_learns_learns_here_too(part, backbone):
    torch.manual_seed(4)
    model = MomentumContrast(backbone, nn.Linear(6, 5), dictionary=InBatch(40), key_encoder="learned")
    before = model.key_encoder.backbone.conv.weight.clone()
    beside = ContrastBeside(model, 1.0, part, VIEWS, VIEWS, PICTURES)
    train_on_labels(
        backbone, part, classes=10, course=Course(2, VIEWS, batch_size=40), pictures=PICTURES, beside=beside
    )
    assert not torch.equal(model.key_encoder.backbone.conv.weight, before)


def test_predictions_are_those_of_the_network_in_eval_mode(part, backbone):
    trained = train_on_labels(backbone, part, classes=10, course=Course(8, VIEWS), pictures=PICTURES)
    found = predict(trained.network, PICTURES, part)
    batch = next(PICTURES.batches(part))
    with torch.no_grad():
        wanted = trained.network((batch / 255 - 0.28) / 0.35)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
