"""MoCo v3, the end-to-end dictionary and the memory bank: what agrees with the papers, and what learns by what."""

import math
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from several import in_processes
from torch import nn

import moco
from moco.contrast.dictionary import InBatch, MemoryBank
from moco.contrast.encoders import build_backbone, projection_head
from moco.contrast.method import cosine_momentum
from moco.contrast.moco import MomentumContrast
from moco.contrast.vit import few_patches, positions
from moco.errors import UserError


def model(dictionary, **options) -> MomentumContrast:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU())
    return MomentumContrast(encoder, nn.Linear(16, 8), dictionary=dictionary, temperature=0.2, **options).train()


def v3(batch=6, **options) -> MomentumContrast:
    torch.manual_seed(1)
    predictor = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return model(InBatch(batch), predictor=predictor, symmetric=True, scaled=True, **options)


def views(n=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 2, 2, generator=generator), torch.randn(n, 3, 2, 2, generator=generator)


def with_gradient(net) -> set[str]:
    return {name for name, p in net.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


def parts(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


# -------------------------------------------------------------------------------------------------- v3


def test_the_loss_of_v3_is_its_algorithm_1():
    net = v3()
    a, b = views()
    found = net(a, b, torch.arange(6)).loss

    def unit(x):
        return F.normalize(x.double(), dim=1)

    q1, q2 = (unit(net.predictor(net.query_encoder(view))) for view in (a, b))
    k1, k2 = (unit(net.key_encoder(view)) for view in (a, b))
    labels = torch.arange(6)
    expected = sum(2 * 0.2 * F.cross_entropy(q @ k.T / 0.2, labels) for q, k in ((q1, k2), (q2, k1)))
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert float(net(a, b).loss) == pytest.approx(float(expected), rel=1e-5)  # ids make no difference
    assert net.chance_loss == pytest.approx(4 * 0.2 * math.log(6))


def test_v3_teaches_encoder_head_and_predictor_and_nothing_else():
    net = v3()
    net(*views()).loss.backward()
    assert parts(with_gradient(net)) == {"query_encoder", "predictor"}
    assert not any(p.requires_grad for p in net.key_encoder.parameters())


def test_the_momentum_rises_to_1_by_half_a_cosine():
    assert [cosine_momentum(0.99, part) for part in (0, 0.5, 1)] == pytest.approx([0.99, 0.995, 1])
    net = v3(momentum=0.9, momentum_schedule="cosine")
    for progress, expected in ((0.0, 0.9), (0.5, 0.95), (1.0, 1.0)):
        with torch.no_grad():
            for parameter in net.query_encoder.parameters():
                parameter += 1
        before = [p.clone() for p in net.key_encoder.parameters()]
        net.begin_step(progress)
        for old, fast, slow in zip(before, net.query_encoder.parameters(), net.key_encoder.parameters(), strict=True):
            assert torch.allclose(slow, expected * old + (1 - expected) * fast, atol=1e-6)


def test_positions_are_the_formula():
    table = positions(2, 3, 8)
    assert table.shape == (6, 8)
    for row in range(2):
        for column in range(3):
            waves = [
                wave(place / 10_000 ** (i / 2))
                for place in (column, row)
                for wave in (math.sin, math.cos)
                for i in (0, 1)
            ]
            assert table[row * 3 + column].tolist() == pytest.approx(waves, abs=1e-6)
    with pytest.raises(UserError, match="4 divides"):
        positions(2, 2, 6)


def test_vision_transformers_follow_the_rules_of_v3():
    torch.manual_seed(0)
    net = build_backbone("vit_small_patch16_224", image_size=32, vit_rules="v3")
    assert net.blocks[0].attn.num_heads == 12
    frozen = {name for name, p in net.named_parameters() if not p.requires_grad}
    assert frozen == {"patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed"}
    assert torch.equal(net.pos_embed[0, 0], torch.zeros(384))
    assert torch.equal(net.pos_embed[0, 1:], positions(2, 2, 384))
    bound = math.sqrt(6 / (384 + 384))  # of a layer 384 → 384, not of one 384 → 1152
    weight = net.blocks[3].attn.qkv.weight.detach()
    assert weight.abs().max() <= bound
    assert weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert float(net.cls_token.detach().std()) < 1e-5
    # timm's own file format: the same names, another number of heads only
    timm.create_model("vit_small_patch16_224", img_size=32, num_classes=0, num_heads=12).load_state_dict(
        net.state_dict()
    )
    with pytest.raises(UserError, match="for vision transformers"):
        build_backbone("resnet18", vit_rules="v3")


def test_tokens_are_dropped_while_training_only():
    torch.manual_seed(0)
    net = build_backbone("vit_tiny_patch16_224", image_size=64, keep_tokens=0.5)
    seen = []
    net.blocks[0].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    pictures = torch.randn(2, 3, 64, 64)
    net.train()(pictures)
    net.eval()(pictures)
    assert seen == [1 + 8, 1 + 16]


@pytest.mark.parametrize(
    ("name", "size", "keep", "few"),
    [
        ("vit_tiny_patch16_224", 32, 1.0, "2 × 2 patches of 16: too few to learn from; set --image-size 128"),
        ("vit_tiny_patch16_224", 64, 1.0, None),
        ("vit_tiny_patch16_224", 64, 0.5, "4 × 4 patches of 16, of which 50% are kept"),
        ("resnet18", 32, 1.0, None),
    ],
)
def test_a_transformer_that_sees_next_to_nothing_is_pointed_out(name, size, keep, few):
    rules = {"stem": "auto", "base_width": None, "vit_rules": "timm", "keep_tokens": keep}
    said = few_patches(build_backbone(name, channels=3, image_size=size, **rules), name, size, keep)
    assert said is None if few is None else few in str(said)
    assert few_patches(nn.Linear(2, 2), "mine", 32) is None


def test_a_training_begins_with_that_line(garments, tmp_path, capsys):
    options = {"backbone": "vit_tiny_patch16_224", "batch_size": 4, "epochs": 1, "monitor": "none"}
    moco.pretrain(garments[:4], image_size=32, out=tmp_path / "run", tensorboard=False, **options)
    said = capsys.readouterr().out.splitlines()
    assert "too few to learn from" in said[0]
    assert said[1].startswith("pictures of 1 channel have no colours: saturation, hue, grayscale left out; --gain and")
    assert said[2].startswith("4 images · auto settings")


def test_heads_of_v3():
    head = projection_head("mlp-bn", 32, 8, layers=3, hidden=64)
    kinds = [type(part).__name__ for part in head]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d"]
    assert [tuple(p.shape) for p in head.parameters() if p.ndim == 2] == [(64, 32), (64, 64), (8, 64)]
    assert all(part.bias is None for part in head if isinstance(part, nn.Linear))
    assert not head[-1].affine
    assert head[1].affine
    assert isinstance(projection_head("mlp-bn", 32, 8, last_norm=False)[-1], nn.Linear)


# -------------------------------------------------------------------------------------- keys of the same batch


@pytest.mark.parametrize(
    ("kind", "taught"), [("learned", {"query_encoder", "key_encoder"}), ("shared", {"query_encoder"})]
)
def test_end_to_end_gradients_are_those_of_the_dense_loss(kind, taught):
    net = model(InBatch(6), key_encoder=kind)
    a, b = views()
    net.begin_step()
    output = net(a, b, torch.arange(6))
    output.loss.backward()
    assert parts(with_gradient(net)) == taught
    found = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    other = net.query_encoder if kind == "shared" else net.key_encoder
    q, k = F.normalize(net.query_encoder(a), dim=1), F.normalize(other(b), dim=1)
    dense = F.cross_entropy(q @ k.T / 0.2, torch.arange(6))
    dense.backward()
    assert float(output.loss) == pytest.approx(float(dense), rel=1e-5)
    for name, parameter in net.named_parameters():
        if name in found:
            assert torch.allclose(found[name], parameter.grad, atol=1e-6), name


def test_an_encoder_that_learns_does_not_follow():
    net = model(InBatch(6), key_encoder="learned", momentum=0.0)
    with torch.no_grad():
        for parameter in net.query_encoder.parameters():
            parameter += 1
    before = [p.clone() for p in net.key_encoder.parameters()]
    net.begin_step()
    assert all(torch.equal(x, y) for x, y in zip(before, net.key_encoder.parameters(), strict=True))


def test_keys_of_a_batch_need_a_batch():
    with pytest.raises(ValueError, match="2 or more"):
        InBatch(1)
    assert len(InBatch(6)) == 5


SEVERAL = """
import os, sys, torch, torch.distributed as dist
sys.path.insert(0, os.environ["TESTS"])
from test_contrast_v3 import gradients, views
dist.init_process_group("gloo")
found = gradients(os.environ["KIND"], [view.chunk(world)[rank] for view in views(8)], rank * (8 // world))
for gradient in found.values():
    dist.all_reduce(gradient)
    gradient /= world
if rank == 0:
    torch.save(found, os.environ["FOUND"])
dist.destroy_process_group()
"""


def gradients(kind: str, pair, first: int) -> dict[str, torch.Tensor]:
    net = v3(8) if kind == "v3" else model(InBatch(8), key_encoder=kind)
    net.begin_step()
    output = net(*pair, torch.arange(first, first + len(pair[0])))
    output.loss.backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None} | {"loss": output.loss.detach()}


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["v3", "learned", "shared"])
def test_two_processes_have_the_gradients_of_one_big_batch(kind, tmp_path):
    in_processes(SEVERAL, [2], TESTS=Path(__file__).parent, KIND=kind, FOUND=tmp_path / "found.pt")
    found, expected = torch.load(tmp_path / "found.pt"), gradients(kind, views(8), 0)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-6), name


# ------------------------------------------------------------------------------------------------ memory bank


def bank_model(**options) -> MomentumContrast:
    return model(MemoryBank(20, 5, 8, seed=3, **options))


def test_a_memory_bank_has_no_second_encoder_and_teaches_the_query_encoder_alone():
    net = bank_model()
    net.begin_step()
    net(*views(), torch.arange(6)).loss.backward()
    assert parts(with_gradient(net)) == {"query_encoder"}
    assert not any("key_encoder" in name for name in net.state_dict())


def test_only_the_vectors_of_seen_pictures_change_and_by_their_momentum():
    net = bank_model(momentum=0.75)
    bank = net.dictionary
    ids = torch.tensor([3, 17, 0, 9, 11, 4])
    before = bank.keys.clone()
    a, b = views()
    net.begin_step()
    net(a, b, ids)
    assert torch.equal(bank.keys, before)  # not before the step is over
    net.end_step()
    query = F.normalize(net.query_encoder(a), dim=1).detach()
    assert torch.allclose(bank.keys[ids], F.normalize(0.75 * before[ids] + 0.25 * query, dim=1), atol=1e-6)
    others = [i for i in range(20) if i not in ids.tolist()]
    assert torch.equal(bank.keys[others], before[others])
    assert bank.births[ids].tolist() == [0] * 6
    assert bank.births[others].tolist() == [-1] * 14


def test_negatives_are_drawn_anew_for_each_step_and_the_same_ones_again():
    net, again = bank_model(), bank_model()
    seen = []
    for _ in range(3):
        for one in (net, again):
            one.begin_step()
            one(*views(), torch.arange(6))
            one.end_step()
        assert torch.equal(net.dictionary.drawn, again.dictionary.drawn)
        seen.append(net.dictionary.drawn.tolist())
    assert len({tuple(drawn) for drawn in seen}) == 3


def test_the_loss_of_a_memory_bank_is_the_dense_one():
    net = bank_model()
    ids = torch.arange(6)
    a, b = views()
    net.begin_step()
    found = net(a, b, ids).loss
    bank = net.dictionary
    query = F.normalize(net.query_encoder(a), dim=1)
    logits = query @ torch.cat([bank.keys[ids], bank.keys[bank.drawn]]).T / 0.2
    own = bank.drawn[None] == ids[:, None]
    losses = []
    for row in range(6):
        others = logits[row, 6:][~own[row]]
        losses.append(F.cross_entropy(torch.cat([logits[row, row : row + 1], others])[None], torch.tensor([0])))
    assert float(found) == pytest.approx(float(sum(losses) / 6), rel=1e-5)
    with pytest.raises(ValueError, match="ids of the pictures"):
        net(a, b)
    before = bank.keys.clone()
    for wrong in (-1, len(before)):
        with pytest.raises(ValueError, match=f"ids must be in 0 … {len(before) - 1}, not {wrong} … {wrong}"):
            bank.enqueue(query[:1].detach(), torch.tensor([wrong]))
    assert torch.equal(bank.keys, before)


def test_a_bank_may_live_in_a_file_that_goes_with_it(tmp_path):
    on_disk, in_memory = MemoryBank(1000, 10, 8, folder=tmp_path / "run"), MemoryBank(1000, 10, 8)
    assert torch.equal(on_disk.keys, in_memory.keys)
    for bank in (on_disk, in_memory):
        bank.enqueue(F.normalize(torch.ones(2, 8), dim=1), torch.tensor([5, 999]), 1)
    assert torch.equal(on_disk.keys, in_memory.keys)
    assert list((tmp_path / "run").iterdir()) == []
    if sys.platform == "linux":
        assert "bank-" in Path("/proc/self/maps").read_text()


WAYS = {
    "v3": {
        "dictionary": "in-batch", "symmetric": True, "scale_loss": True, "predictor_layers": 2, "head": "mlp-bn",
        "momentum_schedule": "cosine", "optimizer": "lars", "learning_rate": 0.6,
    },
    "v3, transformer": {
        "dictionary": "in-batch", "predictor_layers": 2, "optimizer": "adamw", "learning_rate": 1e-3,
        "base_width": None, "backbone": "vit_tiny_patch16_224", "vit_rules": "v3", "keep_tokens": 0.5,
    },
    "learned": {"dictionary": "in-batch", "key_encoder": "learned"},
    "bank on disk": {"dictionary": "memory-bank", "bank_on_disk": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_stopped_within_an_epoch_goes_on_to_the_same_bits(way, garments, tmp_path):
    common = {
        "recipe": "small", "base_width": 8, "epochs": 2, "batch_size": 32, "precision": "fp32", "threads": 1,
        "quiet": True, "tensorboard": False, "monitor": "none", "log_every": 1,
    }  # fmt: skip

    def stop(progress):
        if progress.step == 3:
            raise StopIteration

    whole = moco.pretrain(garments[:128], out=tmp_path / "whole", **(common | WAYS[way]))
    moco.pretrain(garments[:128], out=tmp_path / "cut", on_step=stop, **(common | WAYS[way]))
    cut = moco.resume(tmp_path / "cut", data=garments[:128], quiet=True)
    one, other = whole.load(), cut.load()
    assert one["step"] == other["step"] == 8
    for part in ("model", "optimizer"):
        left, right = (torch.utils._pytree.tree_leaves(state[part]) for state in (one, other))
        for x, y in zip(left, right, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
    assert [line["loss"] for line in whole.metrics()] == [line["loss"] for line in cut.metrics()]
    assert whole.metrics()[-1]["loss"] > 0
