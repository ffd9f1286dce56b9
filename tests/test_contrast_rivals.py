"""SimCLR, BYOL, SwAV and CPC: losses against plain float64, who learns, and short trainings on real pictures."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from several import in_processes
from torch import nn

import moco
from moco.building import build_model
from moco.contrast import cpc
from moco.contrast.byol import BYOL
from moco.contrast.cpc import CPC
from moco.contrast.encoders import projection_head
from moco.contrast.method import cosine_momentum
from moco.contrast.simclr import SimCLR
from moco.contrast.swav import SwAV, sinkhorn
from moco.data import fashion
from moco.data.loader import ViewStream
from moco.data.sources import ArraySource
from moco.errors import UserError
from moco.evaluate.knn import knn_accuracy
from moco.health import health
from moco.recipes import METHODS, RECIPES, pretrain_settings
from moco.resolve import resolve
from moco.settings import ViewSettings
from moco.train.parallel import Processes

N, C = 6, 8


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU())


def head(outputs=C):
    return nn.Linear(16, outputs)


def views(n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 2, 2, generator=generator), torch.randn(n, 3, 2, 2, generator=generator)


def unit(rows):
    return F.normalize(rows.double(), dim=1)


def simclr(**options):
    return SimCLR(encoder(), head(), **({"batch_size": N} | options)).train()


def byol(**options):
    return BYOL(encoder(), head(), **({"predictor": nn.Linear(C, C), "momentum": 0.9} | options)).train()


def swav(**options):
    return SwAV(encoder(), head(), **({"prototypes": 10, "dim": C} | options)).train()


def patch_encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 12, 4), nn.Flatten())


def predicts(**options):
    given = {"width": 12, "dim": C, "patch_size": 4, "image_size": 12, "batch_size": 3} | options
    return CPC(patch_encoder(), nn.Linear(12, C), **given).train()


def learning(net, *batch):
    """Names of the parameters that get a gradient that is not zero everywhere."""
    net.zero_grad()
    net(*batch).loss.backward()
    return {name for name, p in net.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}


def of(net, *parts):
    """Names of the parameters in some parts of the network."""
    return {name for name, _ in net.named_parameters() if name.startswith(parts)}


# ---------------------------------------------------------------- SimCLR


def plain_nt_xent(first, second, temperature):
    rows = torch.cat([first, second])
    losses = []
    for i in range(2 * len(first)):
        j = (i + len(first)) % (2 * len(first))
        others = [k for k in range(2 * len(first)) if k != i]
        logits = rows[i] @ rows[others].T / temperature
        losses.append(F.cross_entropy(logits[None], torch.tensor([others.index(j)])))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_simclr_is_nt_xent_over_2n_minus_2_negatives(temperature):
    net, (a, b) = simclr(temperature=temperature), views()
    found = net(a, b).loss
    weights = list(net.query_encoder.parameters())
    wanted = plain_nt_xent(unit(net.query_encoder(a)), unit(net.query_encoder(b)), temperature)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    # Queries, positives and negatives all learn: the gradient is that of the whole expression.
    for one, other in zip(torch.autograd.grad(found, weights), torch.autograd.grad(wanted, weights), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert net.chance_loss == pytest.approx(math.log(2 * N - 1))
    assert learning(net, a, b) == of(net, "query_encoder")


def test_simclr_numbers_of_pictures_do_not_matter_as_long_as_they_differ():
    net, (a, b) = simclr(), views()
    assert net(a, b, torch.tensor([3, 9, 1, 0, 70, 5])).loss.item() == net(a, b).loss.item()
    with pytest.raises(ValueError, match="2 or more"):
        simclr(batch_size=1)
    with pytest.raises(ValueError, match="temperature"):
        simclr(temperature=0.0)


def test_simclr_of_random_features_is_at_its_chance_level():
    torch.manual_seed(1)
    net = SimCLR(nn.Identity(), None, batch_size=512, temperature=1.0)
    assert net(torch.randn(512, 256), torch.randn(512, 256)).loss.item() == pytest.approx(net.chance_loss, abs=0.02)


# ---------------------------------------------------------------- BYOL


def test_byol_is_the_distance_of_prediction_and_target_both_ways():
    net, (a, b) = byol(), views()
    with torch.no_grad():  # apart from each other, so that it matters who encodes what
        for parameter in net.key_encoder.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4))
    output = net(a, b)
    wanted = sum(
        (unit(net.predictor(net.query_encoder(one))) - unit(net.key_encoder(other))).square().sum(1).mean()
        for one, other in ((a, b), (b, a))
    )
    assert output.loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert output.metrics["positive_similarity"].item() == pytest.approx(1 - wanted.item() / 4, rel=1e-5)
    assert learning(net, a, b) == of(net, "query_encoder", "predictor")
    assert net.chance_loss is None


def test_byol_target_follows_with_a_momentum_that_rises_to_one():
    net = byol(momentum=0.9)
    both = net.key_encoder.parameters(), net.query_encoder.parameters()
    assert all(torch.equal(slow, fast) for slow, fast in zip(*both, strict=True))
    for progress in (0.0, 0.5, 0.99):
        with torch.no_grad():
            for parameter in net.query_encoder.parameters():
                parameter += 1
        slow = [p.clone() for p in net.key_encoder.parameters()]
        net.begin_step(progress)
        m = cosine_momentum(0.9, progress)
        for before, after, fast in zip(slow, net.key_encoder.parameters(), net.query_encoder.parameters(), strict=True):
            assert torch.allclose(after, m * before + (1 - m) * fast, atol=1e-6)
    assert BYOL(encoder(), head(), predictor=nn.Identity()).momentum == 0.996
    with pytest.raises(ValueError, match="momentum must be"):
        byol(momentum=1.0)
    with pytest.raises(ValueError, match="constant or cosine"):
        byol(momentum_schedule="linear")


# ---------------------------------------------------------------- SwAV


def plain_sinkhorn(scores, epsilon, iterations=3):
    """The algorithm as the paper has it: prototypes in rows, all of it sums to one."""
    q = (scores.double() / epsilon).exp().T
    q /= q.sum()
    clusters, samples = q.shape
    for _ in range(iterations):
        q /= q.sum(1, keepdim=True) * clusters
        q /= q.sum(0, keepdim=True) * samples
    return (q * samples).T


def test_sinkhorn_is_that_of_the_paper():
    scores = F.normalize(torch.randn(12, 5), dim=1)
    for epsilon in (0.05, 0.5):
        assert torch.allclose(sinkhorn(scores, epsilon), plain_sinkhorn(scores, epsilon).float(), atol=1e-5)
    codes = sinkhorn(scores, 0.5, iterations=100)
    assert torch.allclose(codes.sum(1), torch.ones(12), atol=1e-5)
    assert torch.allclose(codes.sum(0), torch.full((5,), 12 / 5), atol=1e-4)
    assert sinkhorn(scores, 0.001).isfinite().all()  # exp(1000) is no float32


def plain_swav(net, a, b, kept=None):
    prototypes = net.prototypes.weight.double()
    first, second = unit(net.query_encoder(a)), unit(net.query_encoder(b))
    with torch.no_grad():
        kept = [rows[:0] for rows in (first, second)] if kept is None else kept
        known = [torch.cat(pair) for pair in zip((first, second), kept, strict=True)]
        codes = [plain_sinkhorn(rows @ prototypes.T, 0.05)[: len(a)] for rows in known]
    terms = [
        -(code * (rows @ prototypes.T / 0.1).log_softmax(1)).sum(1).mean()
        for code, rows in zip(codes, (second, first), strict=True)
    ]
    return sum(terms) / 2


def test_swav_predicts_the_code_of_a_view_from_the_other():
    net, (a, b) = swav(), views()
    net.begin_step(0.5)
    assert torch.allclose(net.prototypes.weight.norm(dim=1), torch.ones(10))
    found, wanted = net(a, b).loss, plain_swav(net, a, b)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)
    weights = list(net.parameters())
    for one, other in zip(torch.autograd.grad(found, weights), torch.autograd.grad(wanted, weights), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert learning(net, a, b) == of(net, "query_encoder", "prototypes")
    assert net.chance_loss == pytest.approx(math.log(10))


class Averaging(nn.Module):
    """An encoder of pictures of any size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 16)

    def forward(self, pictures):
        return self.layer(pictures.mean((2, 3))).relu()


def test_swav_small_views_predict_the_codes_of_both_large_ones():
    net = SwAV(Averaging(), head(), prototypes=10, dim=C).train()
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(N, 3, 4, 4, generator=generator) for _ in range(2))
    small = [torch.randn(N, 3, 2, 2, generator=generator) for _ in range(3)]
    net.begin_step(0.5)
    prototypes = net.prototypes.weight.double()
    rows = [unit(net.query_encoder(view)) for view in (a, b, *small)]
    with torch.no_grad():
        codes = [plain_sinkhorn(row @ prototypes.T, 0.05) for row in rows[:2]]
    wanted = torch.zeros((), dtype=torch.float64)
    for which, code in enumerate(codes):  # equation 6, averaged
        others = [row for number, row in enumerate(rows) if number != which]
        losses = [-(code * (row @ prototypes.T / 0.1).log_softmax(1)).sum(1).mean() for row in others]
        wanted = wanted + torch.stack(losses).mean() / 2
    found = net(a, b, None, small=small)
    assert found.loss.item() == pytest.approx(wanted.item(), rel=1e-4)
    weights = list(net.parameters())
    for one, other in zip(torch.autograd.grad(found.loss, weights), torch.autograd.grad(wanted, weights), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert abs(found.loss.item() - net(a, b).loss.item()) > 1e-3
    assert [len(rows) for pair in net._pending for rows in pair] == [N] * 4  # only large ones help to find codes


def test_swav_prototypes_stay_as_they_are_at_first():
    net, (a, b) = swav(frozen=0.25), views()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-3)
    before = F.normalize(net.prototypes.weight.detach().clone(), dim=1)
    for progress, same in ((0.0, True), (0.2, True), (0.25, False)):
        net.begin_step(progress)
        if same:
            assert learning(net, a, b) == of(net, "query_encoder")
            assert net.prototypes.weight.grad is not None  # of zeros: processes wait for every parameter's
        else:
            assert learning(net, a, b) == of(net, "query_encoder", "prototypes")
        optimizer.step()
        net.end_step()
        after = F.normalize(net.prototypes.weight.detach(), dim=1)
        assert torch.allclose(before, after, atol=1e-6) == same


def test_swav_queue_takes_part_when_it_is_time_and_full():
    net, (a, b) = swav(queue_size=2 * N, queue_from=0.5), views()
    others = [views(seed=seed) for seed in (1, 2, 3)]
    with torch.no_grad():
        kept = [torch.cat([unit(net.query_encoder(pair[view])) for pair in others[1:]]) for view in (0, 1)]

    def at(progress):
        net.begin_step(progress)
        loss = net(a, b).loss.item()
        net._pending.clear()
        return loss

    alone, helped = plain_swav(net_at_unit(net), a, b).item(), plain_swav(net_at_unit(net), a, b, kept).item()
    assert abs(alone - helped) > 1e-3
    net.begin_step(0.6)
    net(*others[0])
    net.end_step()
    assert at(0.7) == pytest.approx(alone, rel=1e-4)  # half of it are still random vectors
    for pair in others[1:]:
        net.begin_step(0.7)
        net(*pair)
        net.end_step()
    assert net.step == 3
    assert at(0.4) == pytest.approx(alone, rel=1e-4)
    assert at(0.7) == pytest.approx(helped, rel=1e-4)
    assert torch.equal(net.queue_a.births, torch.tensor([2] * N + [1] * N))


def net_at_unit(net):
    net.begin_step(0.0)
    return net


def test_swav_evaluation_changes_nothing_and_a_skipped_step_leaves_nothing():
    net, (a, b) = swav(queue_size=8), views()
    before = net.queue_a.keys.clone()
    net.eval()
    net(a, b)
    net.end_step()
    assert torch.equal(net.queue_a.keys, before)
    assert net.step == 0
    net.train()
    net(a, b)
    net.skip_step(0)
    net.end_step()
    assert torch.equal(net.queue_a.keys, before)
    assert net.step == 1
    for wrong in ({"temperature": 0.0}, {"epsilon": -1.0}, {"prototypes": 1}, {"dim": 0}):
        with pytest.raises(ValueError, match="must be"):
            swav(**wrong)


# ---------------------------------------------------------------- CPC


def test_patches_overlap_by_half():
    pictures = torch.arange(2 * 1 * 6 * 6.0).view(2, 1, 6, 6)
    grid = cpc.patches(pictures, 2)
    assert grid.shape == (2, 5, 5, 1, 2, 2)
    assert torch.equal(grid[1, 3, 2], pictures[1, :, 3:5, 2:4])


def test_the_context_knows_nothing_of_rows_below():
    net = predicts(image_size=14)  # 6 rows
    grid = torch.randn(1, 12, 6, 6, generator=torch.Generator().manual_seed(0))
    changed = grid.clone()
    changed[:, :, 3] += 1
    one, other = net.context(grid), net.context(changed)
    assert torch.equal(one[:, :, :3], other[:, :, :3])
    assert not torch.allclose(one[:, :, 3:], other[:, :, 3:])
    # It sees rows above, and neighbours to both sides.
    assert (one != other)[0].any(0)[3:].all()


def plain_cpc(net, pictures, temperature=0.1):
    """A loop over pictures, rows, columns and offsets."""
    stride, side, rows = net.patch_size // 2, net.patch_size, net.rows
    cut = [
        [[picture[:, r * stride :, c * stride :][:, :side, :side] for c in range(rows)] for r in range(rows)]
        for picture in pictures
    ]
    features = torch.stack([torch.stack([net.backbone(torch.stack(row)) for row in rows]) for rows in cut])
    targets = F.normalize(net.query_encoder.head(features).double(), dim=3)
    context = net.context(features.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    everything = targets.flatten(0, 2)
    of_offsets = []
    for offset, predictor in zip(net.offsets, net.predictors, strict=True):
        losses = []
        for n in range(len(pictures)):
            for r in range(rows - offset):
                for c in range(rows):
                    guess = F.linear(context[n, r, c], predictor.weight[:, :, 0, 0], predictor.bias).double()
                    logits = everything @ F.normalize(guess, dim=0) / temperature
                    losses.append(F.cross_entropy(logits[None], torch.tensor([(n * rows + r + offset) * rows + c])))
        of_offsets.append(torch.stack(losses).mean())
    return torch.stack(of_offsets).mean()


@pytest.mark.parametrize("image_size", [8, 12])
def test_cpc_finds_the_patch_below_among_all_patches(image_size):
    net = predicts(image_size=image_size)
    assert net.offsets == {8: [2], 12: [2, 3]}[image_size]
    pictures = torch.randn(3, 3, image_size, image_size, generator=torch.Generator().manual_seed(1))
    found, wanted = net(pictures, pictures).loss, plain_cpc(net, pictures)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)
    weights = list(net.parameters())
    for one, other in zip(torch.autograd.grad(found, weights), torch.autograd.grad(wanted, weights), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert learning(net, pictures, pictures) == of(net, "query_encoder", "context", "predictors")
    assert net.chance_loss == pytest.approx(math.log(3 * net.rows**2))
    with pytest.raises(ValueError, match="3 are needed"):
        predicts(image_size=6)
    with pytest.raises(ValueError, match="temperature"):
        predicts(temperature=-1.0)


# ---------------------------------------------------------------- several processes

TWO = """
import json, os, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from moco.contrast.byol import BYOL
from moco.contrast.cpc import CPC
from moco.contrast.simclr import SimCLR
from moco.contrast.swav import SwAV

if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
generator = torch.Generator().manual_seed(5)
batches = [torch.randn(2, 8, 3, 12, 12, generator=generator) for _ in range(3)]
plain = lambda width=432: nn.Sequential(nn.Flatten(), nn.Linear(width, 16), nn.ReLU())
made = {
    "simclr": lambda: SimCLR(plain(), nn.Linear(16, 8), batch_size=8),
    "byol": lambda: BYOL(plain(), nn.Linear(16, 8), predictor=nn.Linear(8, 8), momentum=0.9),
    "swav": lambda: SwAV(plain(), nn.Linear(16, 8), prototypes=5, dim=8, queue_size=16, queue_from=0.5, frozen=0.3),
    "cpc": lambda: CPC(nn.Sequential(nn.Conv2d(3, 12, 4), nn.Flatten()), nn.Linear(12, 8), width=12, dim=8,
                       patch_size=4, image_size=12, batch_size=8),
    "multi-crop": lambda: SwAV(nn.Sequential(nn.AdaptiveAvgPool2d(2), plain(12)), nn.Linear(16, 8),
                               prototypes=5, dim=8),
}
small = torch.randn(3, 2, 8, 3, 6, 6, generator=generator)
found = {}
for name, make in made.items():
    torch.manual_seed(1)
    net = make().train()
    forward = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for number, batch in enumerate(batches):
        a, b = (view.chunk(world)[rank] for view in batch)
        net.begin_step(number / 3)
        further = {"small": [view.chunk(world)[rank] for view in small[number]]} if name == "multi-crop" else {}
        forward(a, b, **further).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.end_step()
    found[name] = torch.cat([v.double().flatten() for v in net.state_dict().values() if isinstance(v, torch.Tensor)])
torch.save(found, os.path.join(os.environ["FOLDER"], f"{world}-{rank}.pt"))
"""


@pytest.mark.dist
def test_two_processes_train_what_one_would(tmp_path):
    in_processes(TWO, [1, 2], FOLDER=tmp_path)
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    for name, weights in one.items():
        assert torch.allclose(weights, first[name], atol=2e-5), name
        assert torch.allclose(first[name], second[name], atol=1e-12), name


# ---------------------------------------------------------------- real pictures

SIDE = 16


@pytest.fixture(scope="module")
def pictures():
    x, y, *_ = fashion.load()
    return x[:1024], torch.from_numpy(y[:1024].astype(np.int64))


def small_encoder():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64),
    )  # fmt: skip


def new(size=C * 4):
    return projection_head("mlp-bn", 64, size, hidden=64, last_norm=False)


def trained(net, pictures, steps=48, rate=0.2):
    """Train for some steps of 128; the last feature_spread, and kNN of the backbone's features."""
    images, labels = pictures
    view = ViewSettings(crop_scale=(0.5, 1.0), blur_probability=0.0)
    stream = ViewStream(
        ArraySource(images), query=view, key=view, size=SIDE, channels=1, batch_size=128, seed=0, workers=0,
        way="batch", device=torch.device("cpu"),
    )  # fmt: skip
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=rate, momentum=0.9)
    net.train()
    spread = torch.tensor(0.0)
    for step, batch in enumerate(stream.run(0, steps)):
        net.begin_step(step / steps)
        output = net((batch.query - 0.3) / 0.3, (batch.key - 0.3) / 0.3, batch.ids)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        net.end_step()
        spread = output.metrics["feature_spread"]
    return float(spread), knn(net, images, labels)


def knn(net, images, labels):
    net.eval()
    with torch.no_grad():
        small = F.interpolate(torch.from_numpy(images)[:, None] / 255, size=SIDE, mode="area")
        features = F.normalize(net.backbone((small - 0.3) / 0.3), dim=1)
    return knn_accuracy(features, labels, features, labels, k=20, exclude_self=True)


def test_byol_does_not_collapse_but_does_without_a_predictor_and_a_slow_target(pictures):
    torch.manual_seed(1)
    predictor = projection_head("mlp-bn", 32, 32, hidden=64, last_norm=False)
    spread, accuracy = trained(BYOL(small_encoder(), new(), predictor=predictor, momentum=0.9), pictures)
    collapsed, worse = trained(Collapsing(small_encoder(), new(), predictor=nn.Identity(), momentum=0.0), pictures)
    assert spread > 0.4
    assert collapsed < spread / 4
    assert accuracy > worse


class Collapsing(BYOL):
    """Without stop-gradient: the target is the online network itself."""

    def forward(self, view_a, view_b, ids=None):
        self.key_encoder = self.query_encoder
        with torch.enable_grad():
            first, second = (F.normalize(self.query_encoder(view), dim=1) for view in (view_a, view_b))
        output = super().forward(view_a, view_b, ids)
        return type(output)(4 - 4 * (first * second).sum(1).mean(), output.metrics)

    def begin_step(self, progress=0.0):
        pass


def test_swav_does_not_collapse(pictures):
    net = SwAV(small_encoder(), new(), prototypes=60, dim=32, frozen=0.1, queue_size=512, queue_from=0.5)
    assert trained(net, pictures)[0] > 0.4


def test_simclr_beats_the_untrained_network(pictures):
    net = SimCLR(small_encoder(), new(), batch_size=128, temperature=0.2)
    before = knn(net, *pictures)
    spread, accuracy = trained(net, pictures, steps=96, rate=0.1)
    assert spread > 0.4
    assert accuracy > before + 0.02


# ---------------------------------------------------------------- as settings, and in the loop

TINY = {
    "recipe": "small", "base_width": 4, "image_size": 16, "epochs": 2, "batch_size": 32, "precision": "fp32",
    "monitor": "none", "tensorboard": False, "threads": 1, "log_every": 2,
}  # fmt: skip
CLASSES = {"simclr": SimCLR, "byol": BYOL, "swav": SwAV, "cpc": CPC}


def resolved(**given):
    pictures = np.random.default_rng(0).integers(0, 255, (600, 16, 16), np.uint8)
    given = {"recipe": "small", "base_width": 4, "image_size": 16, "batch_size": 64, "device": "cpu"} | given
    return resolve(pretrain_settings(**given), ArraySource(pictures, None), Processes(0, 1, torch.device("cpu")))


@pytest.mark.parametrize("method", CLASSES)
def test_a_method_is_asked_for_by_name_with_the_pictures_of_any_recipe(method):
    settings = resolved(method=method, accumulate=2)
    net = build_model(settings)
    assert type(net) is CLASSES[method]
    assert (settings.crop_scale, settings.learning_rate) == ((0.6, 1.0), 0.12)
    assert all(getattr(settings, name) == value for name, value in METHODS[method].items())
    assert (settings.bn_groups, settings.shuffle_bn) == (1, False)
    names = set(net.state_dict())
    assert "query_encoder.backbone.conv1.weight" in names
    assert any(name.startswith("query_encoder.head.") for name in names)
    assert any(name.startswith("key_encoder.") for name in names) == (method == "byol")
    assert net(torch.randn(8, 1, 16, 16), torch.randn(8, 1, 16, 16)).loss.isfinite()
    wanted = {"simclr": math.log(63), "byol": None, "swav": math.log(3000), "cpc": math.log(32 * 49)}[method]
    assert net.chance_loss == pytest.approx(wanted)


@pytest.mark.parametrize("method", CLASSES)
def test_the_recipe_of_a_method_is_its_own_and_can_be_overridden(method):
    assert pretrain_settings(recipe=method).method == method
    settings = pretrain_settings(recipe=method, method=method, feature_size=17)
    assert settings.feature_size == 17
    assert all(getattr(settings, name) == value for name, value in RECIPES[method].items() if name != "feature_size")


def test_settings_that_mean_nothing_to_a_method_are_refused():
    for method, name, value in (
        ("simclr", "symmetric", True), ("byol", "temperature", 0.3), ("byol", "dictionary", "in-batch"),
        ("cpc", "momentum", 0.5), ("moco", "prototypes", 20), ("swav", "patch_share", 0.5),
    ):  # fmt: skip
        with pytest.raises(UserError, match=rf"{name} .* is for method .*, not for {method}"):
            pretrain_settings(method=method, **{name: value})
    assert pretrain_settings(method="simclr", temperature=0.3).temperature == 0.3
    with pytest.raises(UserError, match="shuffle_bn is for method moco"):
        resolved(method="simclr", shuffle_bn=True)
    with pytest.raises(UserError, match="bn_groups is for method moco"):
        resolved(method="byol", bn_groups=4)
    with pytest.raises(UserError, match="compile does nothing for method cpc"):
        resolved(method="cpc", compile=True)
    with pytest.raises(UserError, match="collapses without a predictor"):
        build_model(resolved(method="byol", predictor_layers=0))
    with pytest.raises(UserError, match="function of views: set small_crops to 0"):
        resolved(method="swav", small_crops=2, views="custom")
    with pytest.raises(UserError, match=r"small_crops: the backbone cannot take 7 pixels.*--small-crop-size"):
        resolved(method="swav", small_crops=2, backbone="vit_tiny_patch16_224", base_width=None)
    with pytest.raises(UserError, match=r"small_crop_scale = \(0.3, 0.2\): must be two numbers"):
        resolved(method="swav", small_crop_scale=(0.3, 0.2))
    with pytest.raises(UserError, match="patches of 4 pixels"):
        build_model(resolved(method="cpc", backbone="vit_tiny_patch16_224", base_width=None))


def test_the_settings_of_a_run_can_be_the_file_of_another(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(resolved(method="byol").model_dump_json())
    assert pretrain_settings(path).method == "byol"
    assert pretrain_settings(path).temperature == 0.1


@pytest.mark.parametrize("method", CLASSES)
def test_a_run_that_was_cut_ends_as_one_left_alone(method, garments, tmp_path, monkeypatch):
    own = {"queue_size": 64, "prototypes": 20, "queue_from": 1.0, "small_crops": 2, "accumulate": 2}
    settings = TINY | (own if method == "swav" else {})

    def run(name):
        return moco.pretrain(garments[:64], out=str(tmp_path / name), quiet=True, method=method, **settings)

    whole, saved = run("whole"), moco.Run.save

    def save_then_die(run, state, keep):
        saved(run, state, keep)
        raise RuntimeError("power cut")

    monkeypatch.setattr(moco.Run, "save", save_then_die)
    with pytest.raises(RuntimeError, match="power cut"):
        run("cut")
    monkeypatch.undo()
    again = moco.resume(tmp_path / "cut", data=garments[:64], quiet=True)
    one, other = whole.load()["model"], again.load()["model"]
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], name
    lines = whole.metrics()
    assert [line["loss"] for line in lines] == [line["loss"] for line in again.metrics()]
    assert all({"feature_spread", "positive_similarity", "gradient_norm"} <= set(line) for line in lines)
    assert ("contrast_accuracy" in lines[0]) == (method in ("simclr", "cpc"))
    assert moco.backbone(whole.path)(torch.zeros(2, 1, 16, 16)).shape == (2, 32)
    looked_at = {finding.name for finding in health(whole, garments[:64], quiet=True).findings}
    assert "rank" in looked_at
    assert not {"loss", "negatives", "temperature", "stale keys"} & looked_at  # those are MoCo's
    assert ("spread" in looked_at) == (method != "cpc")  # whose head never sees a whole picture
