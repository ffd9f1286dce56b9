"""Hard negatives: mixed and re-weighted inside the streaming loss, against plain float64 with the same choices."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moco
from moco.contrast.dictionary import Queue
from moco.contrast.hard import Hardest, HardNegatives, Mixing
from moco.contrast.losses import info_nce
from moco.contrast.moco import MomentumContrast
from moco.errors import UserError
from moco.recipes import pretrain_settings

Q, K, C, T = 5, 37, 6, 0.2
MIXED = HardNegatives(hardest=7, pairs=9, with_query=4)


def vectors(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(rows, C, generator=generator, dtype=torch.float64) for rows in (Q, Q, K))
    return [F.normalize(rows, dim=1).to(dtype) for rows in made]


def choices(hard=MIXED, seed=1):
    return Mixing.draw(Q, hard, K, torch.Generator().manual_seed(seed))


def plain(q, k, keys, ids=None, key_ids=None, mixing=None, sharpness=0.0):
    """The loss of each query written out, one after the other."""
    losses = []
    for row in range(len(q)):
        allowed = [j for j in range(len(keys)) if ids is None or ids[row] != key_ids[j]]
        negatives = list(keys[allowed])
        if mixing is not None:
            order = sorted(allowed, key=lambda j: -float(q[row].detach() @ keys[j]))[: mixing.hardest]
            pairs = mixing.second.shape[1]
            for number in range(mixing.first.shape[1]):
                share = mixing.share[row, number].double()
                one = keys[order[mixing.first[row, number]]]
                other = q[row].detach() if number >= pairs else keys[order[mixing.second[row, number]]]
                made = (1 - share) * one + share * other
                negatives.append(made / made.norm())
        logits = torch.stack(negatives) @ q[row] / T
        weight = (sharpness * logits).exp()
        total = (weight / weight.mean() * logits.exp()).sum()
        losses.append(-torch.log((q[row] @ k[row] / T).exp() / ((q[row] @ k[row] / T).exp() + total)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("sharpness", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("chunk", [4, 10, 4096])
@pytest.mark.parametrize("named", [False, True])
def test_value_and_gradient_are_those_of_the_plain_loss(sharpness, mixed, chunk, named):
    q, k, keys = vectors()
    q, k = q.requires_grad_(), k.requires_grad_()
    names = {"ids": torch.arange(Q), "key_ids": torch.arange(K) % 11} if named else {}
    mixing = choices() if mixed else None
    found = info_nce(q, k, keys, T, **names, mixing=mixing, sharpness=sharpness, chunk=chunk)
    wanted = plain(q, k, keys, **names, mixing=mixing, sharpness=sharpness)
    assert found.loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    of_found = torch.autograd.grad(found.loss, (q, k))
    for one, other in zip(of_found, torch.autograd.grad(wanted, (q, k)), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    # The figures are of the keys as they are.
    ordinary = info_nce(q, k, keys, T, **names)
    for name in ("accuracy", "positive_similarity", "negative_similarity", "hardest_similarity"):
        assert torch.allclose(getattr(found, name), getattr(ordinary, name), rtol=1e-12), name


def test_mixtures_of_a_query_s_own_keys_do_not_count():
    """Seven keys to mix from where only five are negatives: places 5 and 6 among the closest are the query's own."""
    q, k, keys = (rows[:1] if len(rows) == Q else rows[:7] for rows in vectors())
    first, second = torch.tensor([[0, 5, 2, 1, 6]]), torch.tensor([[4, 1, 6]])
    mixing = Mixing(7, first, second, torch.tensor([[0.3, 0.6, 0.5, 0.2, 0.4]]))
    names = {"ids": torch.tensor([1]), "key_ids": torch.tensor([0, 1, 0, 0, 1, 0, 0])}
    kept = Mixing(7, first[:, [0, 3]], second[:, :1], mixing.share[:, [0, 3]])
    found = info_nce(q, k, keys, T, **names, mixing=mixing).loss
    assert found.item() == pytest.approx(plain(q, k, keys, **names, mixing=kept).item(), rel=1e-9)


def test_where_every_key_is_the_query_s_own_nothing_is_lost():
    q, k, keys = vectors()
    names = {"ids": torch.zeros(Q), "key_ids": torch.zeros(K)}
    q.requires_grad_()
    for options in ({"sharpness": 1.0}, {"mixing": choices()}, {"sharpness": 1.0, "mixing": choices()}):
        loss = info_nce(q, k, keys, T, **names, **options).loss
        assert loss.item() == 0
        assert torch.equal(torch.autograd.grad(loss, q)[0], torch.zeros(Q, C, dtype=torch.float64))


def test_keys_in_half_precision_give_nearly_the_same():
    q, k, keys = vectors(dtype=torch.float32)
    wanted = plain(*vectors(), mixing=choices(), sharpness=1.0).item()
    found = info_nce(q, k, keys.bfloat16(), T, mixing=choices(), sharpness=1.0, chunk=8).loss
    assert found.item() == pytest.approx(wanted, rel=0.02)


def test_the_hardest_are_those_of_a_sort_whatever_the_chunks():
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    wanted, places = logits.sort(dim=0, descending=True)
    for chunk in (3, 7, 50):
        hardest = Hardest(11)
        for start in range(0, 50, chunk):
            hardest.see(logits[start : start + chunk], start)
        assert torch.equal(hardest.logits, wanted[:11].T)
        assert torch.equal(hardest.places, places[:11].T)


def test_the_query_never_has_more_than_half_of_a_mixture():
    mixing = Mixing.draw(400, HardNegatives(3, 5, 6), 100, torch.Generator().manual_seed(0))
    pairs, with_query = mixing.share[:, :5], mixing.share[:, 5:]
    assert with_query.max() < 0.5
    assert 0.24 < with_query.mean() < 0.26
    assert 0.97 < pairs.max() <= 1
    assert set(mixing.first.unique().tolist()) == {0, 1, 2}
    assert mixing.second.shape == (400, 5)
    assert Mixing.draw(4, HardNegatives(30, 5), 8, torch.Generator()).first.max() < 8  # no more than there are keys


def queue(hard=None, seed=3):
    made = Queue(K, C, seed=seed, hard=hard)
    made.enqueue(vectors(seed=5)[2], torch.arange(K) + 100)
    return made


def test_choices_of_the_queue_follow_from_seed_and_step():
    q, k, _ = vectors(dtype=torch.float32)

    def loss(step, again=False):
        made = queue(MIXED)
        made.draw(step)
        first = made.lookup(q, k, T).loss.item()
        return made.lookup(q, k, T).loss.item() if again else first

    assert loss(4) == loss(4)
    assert loss(4) != loss(5)
    assert loss(4) != loss(4, again=True)  # the next piece of the step has choices of its own
    assert loss(4) > queue().lookup(q, k, T).loss.item()


def test_off_by_default_and_until_it_is_time():
    q, k, _ = vectors(dtype=torch.float32)
    ordinary = info_nce(q, k, queue().keys, T).loss
    assert torch.equal(queue().lookup(q, k, T).loss, ordinary)
    late = queue(HardNegatives(7, 9, 4, 1.0, start=0.25))
    late.draw(0, 0.2)
    assert torch.equal(late.lookup(q, k, T).loss, ordinary)
    late.draw(1, 0.25)
    assert late.lookup(q, k, T).loss > ordinary


def test_moco_begins_the_choices_of_each_step_and_tells_how_far_it_is():
    torch.manual_seed(0)
    net = MomentumContrast(nn.Linear(C, C), dictionary=queue(HardNegatives(7, 9, start=0.5)), temperature=T)
    view = torch.randn(Q, C, generator=torch.Generator().manual_seed(2))
    net.train()
    losses = []
    for progress in (0.0, 0.4, 0.5, 0.5):
        net.begin_step(progress)
        losses.append(net(view, view.flip(1)).loss.item())
        net._pending.clear()
        net.step += 1
    assert losses[0] == losses[1] < min(losses[2:])
    assert losses[2] != losses[3]


def test_what_does_not_fit_is_refused():
    for wrong in ((-1, 0), (3, 0), (0, 3)):
        with pytest.raises(ValueError, match="hard negatives"):
            HardNegatives(*wrong)
    q, k, keys = vectors()
    with pytest.raises(ValueError, match="do not learn"):
        info_nce(q, k, keys.requires_grad_(), T, sharpness=1.0)
    with pytest.raises(UserError, match="go with mixed_pairs"):
        pretrain_settings(hard_negatives=4)
    with pytest.raises(UserError, match="moco with --dictionary queue"):
        pretrain_settings(hard_weight=1.0, method="simclr")
    with pytest.raises(UserError, match="moco with --dictionary queue"):
        pretrain_settings(hard_negatives=8, mixed_pairs=4, recipe="v3")


def test_a_training_takes_them_from_its_settings(garments, tmp_path):
    given = {
        "recipe": "small", "base_width": 4, "image_size": 16, "epochs": 2, "batch_size": 32, "precision": "fp32",
        "monitor": "none", "tensorboard": False, "queue_size": 48, "threads": 1, "log_every": 2,
    }  # fmt: skip
    hard = {"hard_negatives": 16, "mixed_pairs": 8, "mixed_with_query": 4, "hard_weight": 0.5, "hard_from": 1.0}
    plainly = moco.pretrain(garments[:64], out=str(tmp_path / "plain"), quiet=True, **given).metrics()
    harder = moco.pretrain(garments[:64], out=str(tmp_path / "hard"), quiet=True, **given, **hard).metrics()
    assert [line["loss"] for line in plainly[:1]] == [line["loss"] for line in harder[:1]]
    assert harder[1]["loss"] > plainly[1]["loss"] + 0.05
    assert all(math.isfinite(line["loss"]) for line in harder)
