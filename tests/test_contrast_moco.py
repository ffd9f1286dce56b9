"""The paper's facts, on networks small enough to check by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moco
from moco.contrast.batchnorm import encode_in_groups
from moco.contrast.dictionary import InBatch
from moco.contrast.moco import MomentumContrast


def model(**options) -> MomentumContrast:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU())
    options = {"dictionary": moco.Queue(32, 8), "momentum": 0.9, "temperature": 0.2} | options
    return MomentumContrast(encoder, nn.Linear(16, 8), **options).train()


def views(n=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 2, 2, generator=generator), torch.randn(n, 3, 2, 2, generator=generator)


def optimiser_step(net, pieces=((0, 6),), rate=0.5):
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=rate)
    a, b = views()
    net.begin_step()
    losses = []
    for start, stop in pieces:
        output = net(a[start:stop], b[start:stop], torch.arange(start, stop))
        (output.loss / len(pieces)).backward()
        losses.append(output.loss.detach())
    optimizer.step()
    net.end_step()
    return torch.stack(losses).mean()


def test_both_encoders_are_equal_at_step_0_heads_included():
    net = model()
    slow, fast = net.key_encoder.state_dict(), net.query_encoder.state_dict()
    assert list(slow) == list(fast)
    assert all(torch.equal(slow[name], fast[name]) for name in fast)
    assert any("head" in name for name in slow)


def test_the_momentum_update_is_equation_2():
    net = model()
    with torch.no_grad():
        for parameter in net.query_encoder.parameters():
            parameter += torch.randn_like(parameter)
    expected = [
        0.9 * k + 0.1 * q for k, q in zip(net.key_encoder.parameters(), net.query_encoder.parameters(), strict=True)
    ]
    net.begin_step()
    for found, wanted in zip(net.key_encoder.parameters(), expected, strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)


def test_the_key_encoder_moves_once_per_optimiser_step_also_with_accumulation():
    whole, pieces = model(), model()
    for _ in range(3):
        one = optimiser_step(whole)
        several = optimiser_step(pieces, ((0, 2), (2, 4), (4, 6)))
        assert float(one) == pytest.approx(float(several), rel=1e-5)
    for name, value in whole.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.allclose(value.float(), pieces.state_dict()[name].float(), atol=1e-6), name
    assert pieces.step == 3


def test_the_key_encoder_keeps_its_own_batch_norm_statistics():
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8))
    net = MomentumContrast(encoder, dictionary=moco.Queue(32, 8), momentum=0.5).train()
    a, b = views()
    net.begin_step()
    net(a, b + 3)
    net.begin_step()
    assert not torch.allclose(net.query_encoder[0][2].running_mean, net.key_encoder[0][2].running_mean)


def test_the_positive_is_never_among_its_own_negatives():
    """The look-up is against the queue as it was: the step's own keys enter afterwards."""
    net = model()
    a, b = views()
    before = net.dictionary.keys.clone()
    net.begin_step()
    output = net(a, b, torch.arange(6))
    assert torch.equal(net.dictionary.keys, before)
    q = F.normalize(net.query_encoder(a), dim=1).double()
    k = F.normalize(net.key_encoder(b), dim=1).double()
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ before.double().T], 1) / 0.2
    assert output.loss.item() == pytest.approx(F.cross_entropy(logits, torch.zeros(6).long()).item(), rel=1e-5)
    net.end_step()
    assert torch.allclose(net.dictionary.keys[:6], k.float(), atol=1e-6)
    assert net.dictionary.ids[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert net.dictionary.births[:6].tolist() == [0] * 6
    # The next time around, the keys of the same pictures lie in the queue and are left out.
    own = net(a, b, torch.arange(6)).loss
    stranger = net(a, b, torch.arange(6) + 100).loss
    assert own < stranger


def test_symmetric_loss_computes_both_terms_before_any_key_enters():
    net, plain = model(symmetric=True), model()
    a, b = views()
    for each in (net, plain):
        each.begin_step()
    both = net(a, b, torch.arange(6)).loss
    expected = (plain(a, b, torch.arange(6)).loss + plain(b, a, torch.arange(6)).loss) / 2
    assert both.item() == pytest.approx(expected.item(), rel=1e-6)
    net.end_step()
    assert int(net.dictionary.pointer) == 12


def test_no_gradient_to_keys_or_queue():
    net = model()
    net.begin_step()
    net(*views()).loss.backward()
    assert all(p.grad is None for p in net.key_encoder.parameters())
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in net.query_encoder.parameters())
    assert not net.dictionary.keys.requires_grad


def test_evaluation_changes_no_tensor():
    net = model()
    net.begin_step()
    net(*views(), torch.arange(6))
    net.end_step()
    net.eval()
    before = {name: value.clone() for name, value in net.state_dict().items() if isinstance(value, torch.Tensor)}
    net(*views(), torch.arange(6))
    net.end_step()
    assert net.step == 1
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())


def test_a_forgotten_end_step_is_made_up_for():
    net = model()
    for _ in range(2):
        net.begin_step()
        net(*views())
    assert int(net.dictionary.pointer) == 6
    net.end_step()
    assert int(net.dictionary.pointer) == 12
    assert net.step == 2


def test_the_whole_state_is_in_the_state_dict():
    net, other = model(), model(dictionary=moco.Queue(32, 8, seed=5))
    optimiser_step(net)
    other.load_state_dict(net.state_dict())
    assert other.step == 1
    assert float(optimiser_step(net)) == float(optimiser_step(other))


def test_loss_starts_at_chance_where_positives_mean_nothing():
    """With views that have nothing in common the loss is ln(K+1), up to the spread of similarities / τ."""
    net = model(dictionary=moco.Queue(4096, 8), temperature=50.0)
    assert net.chance_loss == pytest.approx(math.log(4097))
    assert float(net(*views(512)).loss) == pytest.approx(net.chance_loss, abs=0.05)


def test_feature_spread_is_one_for_scattered_features_and_zero_for_collapsed_ones():
    scattered = MomentumContrast(nn.Flatten(), dictionary=moco.Queue(8, 64))
    x = torch.randn(2000, 64)
    assert float(scattered(x, x).metrics["feature_spread"]) == pytest.approx(1, abs=0.02)
    assert float(scattered(torch.ones(9, 64), torch.ones(9, 64)).metrics["feature_spread"]) == pytest.approx(
        0, abs=1e-6
    )


def test_any_encoder_and_any_input():
    """Not pictures: sequences of numbers through a recurrent net."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.GRU(5, 16, batch_first=True)

        def forward(self, x):
            return self.cells(x)[1][0]

    net = MomentumContrast(Recurrent(), nn.Linear(16, 8), dictionary=moco.Queue(64, 8), momentum=0.9, temperature=0.2)
    optimizer = torch.optim.SGD(net.query_encoder.parameters(), lr=0.5, momentum=0.9)
    sequences = torch.randn(64, 7, 5)
    losses = []
    for _ in range(60):
        net.begin_step()
        a, b = (sequences + 0.3 * torch.randn_like(sequences) for _ in range(2))
        loss = net(a, b, torch.arange(64)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        net.end_step()
        losses.append(float(loss))
    assert min(losses[-5:]) < 0.75 * max(losses)


def batch_normalised(**options):
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU())
    torch.manual_seed(0)
    encoder[1].reset_parameters()
    return MomentumContrast(encoder, dictionary=moco.Queue(32, 16), momentum=0.9, **options).train()


def test_groups_and_shuffle_reach_the_encoders():
    a, b = views(8)
    whole, split, shuffled = (
        batch_normalised(),
        batch_normalised(bn_groups=2),
        batch_normalised(bn_groups=2, shuffle_bn=True),
    )
    losses = []
    for net in (whole, split, shuffled):
        net.begin_step()
        losses.append(net(a, b).loss.item())
    assert len(set(losses)) == 3
    x = a.tensor_split(2)[1]
    net = batch_normalised(bn_groups=2)
    assert torch.allclose(net._queries(a)[4:], F.normalize(net.query_encoder(x), dim=1), atol=1e-6)
    for net in (whole, split, shuffled):
        net.load_state_dict(whole.state_dict())
        net.eval()
    assert whole(a, b).loss == split(a, b).loss == shuffled(a, b).loss


def test_a_batch_that_is_no_tensor_has_no_groups():
    with pytest.raises(TypeError, match="must be a tensor, not a dict: use bn_groups=1"):
        encode_in_groups(nn.Linear(2, 2), {"words": torch.zeros(4, 2)}, 2)


def test_shuffling_a_batch_that_is_normalised_as_a_whole_is_refused():
    with pytest.raises(ValueError, match="changes nothing"):
        batch_normalised(shuffle_bn=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": -0.1}, "momentum"),
        ({"temperature": 0}, "temperature"),
        ({"shuffle_bn": True}, "no batch norm"),
        ({"momentum_schedule": "cosin"}, "constant or cosine, not 'cosin'"),
        ({"key_encoder": "shared"}, "no gradient reaches old keys"),
        ({"key_encoder": "learned"}, "no gradient reaches old keys"),
        (
            {
                "key_encoder": nn.Linear(3, 4),
                "dictionary": InBatch(8),
                "symmetric": True,
                "predictor": nn.Linear(4, 4),
            },
            "a predictor would be behind queries and keys",
        ),
    ],
)
def test_refuses_what_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        model(**options)
