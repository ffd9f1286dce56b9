"""Backbones and heads."""

import pytest
import timm
import torch
import torchvision

from moco.contrast.encoders import build_backbone, feature_width, projection_head
from moco.errors import UserError


@pytest.mark.parametrize(("name", "width"), [("resnet18", 128), ("resnet50", 512)])
def test_narrow_resnet_with_the_small_stem(name, width):
    net = build_backbone(name, channels=1, base_width=16, image_size=32)
    assert net(torch.randn(2, 1, 32, 32)).shape == (2, width) == (2, net.num_features)
    assert net.conv1.kernel_size == (3, 3)
    assert net.conv1.stride == (1, 1)
    assert net.forward_features(torch.randn(2, 1, 32, 32)).shape[-2:] == (4, 4)
    assert net.conv1.out_channels == 16


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_narrow_network_learns_without_writing_past_its_memory(name):
    # oneDNN on AVX2 does so in strided 1×1 convolutions (its issue 6035); with more luck, gradients are only wrong.
    model = build_backbone(name, channels=1, base_width=4, image_size=16).to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(0)
    strided = [part for part in model.modules() if getattr(part, "kernel_size", 0) == (1, 1) and part.stride == (2, 2)]
    assert [part.in_channels for part in strided] == ([4, 8, 16] if name == "resnet18" else [16, 32, 64])
    for part in strided:
        plain = torch.nn.Conv2d(part.in_channels, part.out_channels, 1, 2, bias=False).double()
        plain.weight.data.copy_(part.weight)
        for _ in range(10):
            x = torch.randn(64, part.in_channels, 16, 16, generator=generator)
            rows = x.contiguous(memory_format=torch.channels_last).requires_grad_()
            part.weight.grad = None
            part(rows).square().sum().backward()
        wanted = x.double().requires_grad_()
        plain.weight.grad = None
        plain(wanted).square().sum().backward()
        assert torch.allclose(part.weight.grad.double(), plain.weight.grad, rtol=1e-4, atol=1e-2)
        assert torch.allclose(rows.grad.double(), wanted.grad, rtol=1e-4, atol=1e-4)
    usual = timm.create_model(name, in_chans=1, num_classes=0, channels=(4, 8, 16, 32), zero_init_last=False)
    wanted_names = {key for key in usual.state_dict() if "layer1.0" not in key}
    assert {key for key in model.state_dict() if "layer1.0" not in key} == wanted_names


def test_the_usual_resnet_has_torchvisions_keys_shapes_and_start():
    ours = build_backbone("resnet18", image_size=224)
    theirs = torchvision.models.resnet18()
    expected = {k: v.shape for k, v in theirs.state_dict().items() if not k.startswith("fc.")}
    assert {k: v.shape for k, v in ours.state_dict().items()} == expected
    # torchvision, and so the authors' code, starts the last norm of a block at 1; timm's own default is 0.
    assert (ours.layer1[0].bn2.weight == 1).all()


def test_stem_auto_follows_the_image_size():
    assert build_backbone("resnet18", image_size=64).conv1.stride == (1, 1)
    assert build_backbone("resnet18", image_size=65).conv1.stride == (2, 2)
    assert build_backbone("resnet18", image_size=32, stem="imagenet").conv1.stride == (2, 2)


def test_other_models_and_sizes():
    net = build_backbone("vit_tiny_patch16_224", image_size=64, channels=1)
    assert net(torch.randn(2, 1, 64, 64)).shape == (2, 192)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "resnet5O"}, "did you mean resnet50"),
        ({"name": "mobilenetv3_small_050", "stem": "small"}, "for ResNets"),
        ({"name": "mobilenetv3_small_050", "base_width": 8}, "for ResNets"),
    ],
)
def test_refuses_in_one_line(options, message):
    with pytest.raises(UserError, match=message) as caught:
        build_backbone(**options)
    assert "\n" not in str(caught.value)


def test_feature_width_is_what_comes_out():
    for name in ("resnet18", "mobilenetv3_small_050", "vit_tiny_patch16_224"):
        net = build_backbone(name, image_size=64, channels=1).train()
        width = feature_width(net, 1, 64)
        assert net.training
        assert net(torch.randn(2, 1, 64, 64)).shape == (2, width)
    with pytest.raises(UserError, match="cannot take 8 pixels: ") as caught:
        feature_width(build_backbone("vit_tiny_patch16_224", image_size=8), 3, 8)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="one vector per picture"):
        feature_width(torch.nn.Conv2d(3, 3, 3), 3, 8)


def test_heads():
    assert sum(p.numel() for p in projection_head("linear", 32, 8).parameters()) == 32 * 8 + 8
    mlp = projection_head("mlp", 32, 8)
    assert [tuple(p.shape) for p in mlp.parameters()] == [(32, 32), (32,), (8, 32), (8,)]
    assert mlp(torch.randn(4, 32)).shape == (4, 8)
    with pytest.raises(UserError, match="linear, mlp or mlp-bn"):
        projection_head("cubic", 32, 8)


def test_every_first_layer_option_trains():
    for stem in ("small", "imagenet"):
        net = build_backbone("resnet18", base_width=8, stem=stem, image_size=32)
        net(torch.randn(4, 3, 32, 32)).sum().backward()
        assert all(p.grad is not None for p in net.parameters())
