import pytest
import torch
from torch import nn

from moco.data import fashion
from moco.errors import UserError
from moco.evaluate.features import encode


class Flat(nn.Module):
    def forward(self, x):
        return x.mean(dim=(2, 3))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(8, 5, 3), Flat()
    )


def pictures(count=12, channels=3):
    x_train = torch.from_numpy(fashion.load()[0][:count])
    return x_train[:, None].expand(-1, channels, -1, -1)


def run(model, batches, **given):
    return encode(model, batches, **({"mean": (0.2, 0.3, 0.4), "std": (0.5, 0.6, 0.7), "device": "cpu"} | given))


def test_features_are_those_of_the_model_in_eval_mode():
    model, x = network(), pictures()
    for _ in range(3):
        model(x.float())  # gives the running statistics values of their own
    found = run(model, x.split(5))
    mean, std = torch.tensor([0.2, 0.3, 0.4]), torch.tensor([0.5, 0.6, 0.7])
    with torch.no_grad():
        wanted = model.eval()((x / 255 - mean[:, None, None]) / std[:, None, None])
    assert found.shape == (12, 5)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run(model, [x.float() / 255]), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_tensor_changes_and_every_module_gets_its_mode_back(precision):
    model = network().train()
    model[1].eval()  # a mixture that one .train() or .eval() at the end would lose
    modes = [module.training for module in model.modules()]
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    run(model, pictures().split(4), precision=precision)
    assert [module.training for module in model.modules()] == modes
    assert len(tensors) == 9  # two convolutions, and the norm with its three buffers
    for name, value in model.state_dict().items():
        assert value.numpy().tobytes() == tensors[name].numpy().tobytes(), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_modes_come_back_after_an_error_too():
    model = network().train()
    with pytest.raises(UserError, match=r"expected pictures \(n, 3, S, S\)"):
        run(model, [pictures(channels=2)])
    assert all(module.training for module in model.modules())


def test_features_do_not_depend_on_the_batches():
    model, x = network(), pictures()
    torch.testing.assert_close(run(model, x.split(1)), run(model, [x]), rtol=1e-5, atol=1e-6)


def test_bf16_is_near_and_comes_back_as_float32():
    model, x = network(), pictures()
    full, half = run(model, [x]), run(model, [x], precision="bf16")
    assert half.dtype == torch.float32
    assert not torch.equal(full, half)
    torch.testing.assert_close(half, full, rtol=0.05, atol=0.02)


def test_precision_reaches_the_backbone_only():
    def batches():
        ones = torch.full((4, 4), 1.001)  # bf16 has no number between 1 and 1.0078
        assert float((ones @ ones)[0, 0]) == pytest.approx(4 * 1.001**2, abs=1e-5)
        yield pictures()

    run(network(), batches(), precision="bf16")


def test_bad_input():
    with pytest.raises(UserError, match="no pictures"):
        run(network(), [])
    with pytest.raises(UserError, match="one vector per picture"):
        run(nn.Identity(), [pictures()])
    with pytest.raises(UserError, match="unknown precision 'int8'"):
        run(network(), [pictures()], precision="int8")
