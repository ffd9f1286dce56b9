"""Foreign weights in a backbone: the same features as in the network they come from."""

import pytest
import timm
import torch
import torchvision
from foreign import (
    WIDTH,
    Authors,
    AuthorsV3,
    Lightly,
    SoloLearn,
    Wrapped,
    authors_file,
    encoder,
    lightning_file,
    linear,
    lively,
)
from torch import nn

from moco.contrast.encoders import build_backbone
from moco.errors import UserError
from moco.interop.architecture import architecture_of
from moco.interop.layouts import encoder_weights, queue_in
from moco.interop.loading import backbone_weights, load_backbone
from moco.interop.reading import read_weights

PICTURES = torch.randn(3, 3, 40, 40, generator=torch.Generator().manual_seed(0))


def small():
    return build_backbone("resnet18", base_width=8, stem="imagenet")


def saved(tmp_path, content):
    torch.save(content, tmp_path / "file.pth")
    return tmp_path / "file.pth"


def features(network):
    """Of a network whose head is `fc`, or which has none."""
    network = network.eval()
    if hasattr(network, "fc"):
        network.fc = nn.Identity()
    with torch.no_grad():
        return network(PICTURES)


def same(backbone, expected):
    with torch.no_grad():
        return torch.allclose(backbone.eval()(PICTURES), expected, atol=1e-6)


@pytest.mark.parametrize("which", ["query", "key"])
def test_both_encoders_of_the_authors_checkpoints(tmp_path, which):
    model, _ = authors_file(tmp_path / "v2.pth.tar")
    expected = features(model.module.encoder_q if which == "query" else model.module.encoder_k)
    backbone = small()
    report = load_backbone(backbone, tmp_path / "v2.pth.tar", encoder=which)
    assert report.complete
    assert same(backbone, expected)
    assert not same(small(), expected)


def test_both_encoders_of_v3_with_the_head_left_out(tmp_path):
    model = lively(Wrapped(AuthorsV3()))
    found = read_weights(saved(tmp_path, {"state_dict": model.state_dict(), "arch": "resnet18", "epoch": 1}))
    for which, network in (("query", model.module.base_encoder), ("key", model.module.momentum_encoder)):
        backbone = small()
        load_backbone(backbone, found, encoder=which)
        assert same(backbone, features(network))


@pytest.mark.parametrize("which", ["query", "key"])
def test_lightly_numbers_become_names(tmp_path, which):
    model = lively(Lightly())
    lightning_file(tmp_path / "last.ckpt", model)
    backbone = small()
    load_backbone(backbone, tmp_path / "last.ckpt", encoder=which)
    network = (model.backbone if which == "query" else model.backbone_momentum).eval()
    with torch.no_grad():
        assert same(backbone, network(PICTURES).flatten(1))


def test_lightly_own_resnet_with_shortcut_and_split_batch_norm():
    """Its children are convolution, norm, four stages; a norm keeps the statistics of each of 8 parts."""
    torch.manual_seed(0)
    state = lively(small()).state_dict()
    number = {"conv1": 0, "bn1": 1, "layer1": 2, "layer2": 3, "layer3": 4, "layer4": 5}
    theirs = {}
    for name, value in state.items():
        first, _, rest = name.partition(".")
        value = value.repeat(8) if ".running_" in name else value
        theirs[f"backbone.{number[first]}.{rest}".replace(".downsample.", ".shortcut.")] = value
    found = encoder_weights(theirs, "lightly")
    assert set(found) == set(state)
    assert all(torch.allclose(found[name].float(), state[name].float()) for name in state)


def test_solo_learn_without_its_classifier(tmp_path):
    model = lively(SoloLearn())
    lightning_file(tmp_path / "last.ckpt", model)
    backbone = small()
    assert load_backbone(backbone, tmp_path / "last.ckpt").complete
    assert same(backbone, features(model.backbone))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_torchvision_resnets_with_and_without_module(tmp_path, prefix):
    network = lively(torchvision.models.resnet18(num_classes=7))
    file = saved(tmp_path, {prefix + name: value for name, value in network.state_dict().items()})
    backbone = timm.create_model("resnet18", num_classes=0)
    assert load_backbone(backbone, file).complete
    assert same(backbone, features(network))
    assert architecture_of(read_weights(file)).backbone == "resnet18"


def test_torchvision_transformers_become_timm_ones(tmp_path):
    network = torchvision.models.VisionTransformer(32, 16, 2, 3, 192, 384, num_classes=5).eval()
    for p in network.parameters():
        nn.init.normal_(p, std=0.05)
    file = saved(tmp_path, network.state_dict())
    backbone = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32, depth=2, mlp_ratio=2)
    load_backbone(backbone, file)
    network.heads = nn.Identity()
    pictures = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(backbone.eval()(pictures), network(pictures), atol=1e-5)


def test_timm_weights_as_they_are(tmp_path):
    network = timm.create_model("mobilenetv3_small_050", num_classes=4)
    file = saved(tmp_path, network.state_dict())
    backbone = build_backbone("mobilenetv3_small_050")
    assert load_backbone(backbone, file).complete
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in backbone.state_dict().items())


def test_zero_and_partial_matches_are_errors_and_change_nothing(tmp_path):
    file = saved(tmp_path, Authors().state_dict())
    with pytest.raises(UserError, match=r"nothing that fits this backbone .*authors' MoCo v2"):
        load_backbone(timm.create_model("mobilenetv3_small_050", num_classes=0), file)
    deeper = build_backbone("resnet34", base_width=8, stem="imagenet")
    before = {name: value.clone() for name, value in deeper.state_dict().items()}
    with pytest.raises(UserError, match=r"only in part: 120 tensors matched, 80 missing in the file .*--allow-partial"):
        load_backbone(deeper, file)
    assert all(torch.equal(value, before[name]) for name, value in deeper.state_dict().items())
    report = load_backbone(deeper, file, allow_partial=True)
    assert len(report.matched) == 120
    assert torch.equal(deeper.conv1.weight, torch.load(file)["encoder_q.conv1.weight"])
    # More in the file than in the backbone, too: a deeper network in a shallower one is another network.
    with pytest.raises(UserError, match=r"unexpected \(layer1\.2\."):
        load_backbone(small(), saved(tmp_path, deeper.state_dict()))
    grey = build_backbone("resnet18", base_width=8, stem="imagenet", channels=1)
    with pytest.raises(UserError, match=r"conv1\.weight 8×3×7×7 for 8×1×7×7"):
        load_backbone(grey, saved(tmp_path, Authors().state_dict()))


def test_files_from_before_batch_norm_counted_are_whole(tmp_path):
    state = {name: held for name, held in small().state_dict().items() if "num_batches_tracked" not in name}
    assert load_backbone(small(), saved(tmp_path, state)).complete


def test_a_linear_probe_is_named(tmp_path):
    content = {"state_dict": Wrapped(encoder(linear(10))).state_dict(), "best_acc1": 60.6, "arch": "resnet18"}
    assert load_backbone(small(), saved(tmp_path, content)).layout == "linear-probe"
    head = {"state_dict": {"fc.weight": torch.zeros(10, WIDTH), "fc.bias": torch.zeros(10)}, "best_acc1": 60.6}
    with pytest.raises(UserError, match="a linear probe, not a pre-training checkpoint"):
        load_backbone(small(), saved(tmp_path, head))


def test_a_file_without_a_key_encoder_says_so(tmp_path):
    with pytest.raises(UserError, match="no key encoder"):
        backbone_weights(read_weights(saved(tmp_path, small().state_dict())), "key")


def test_the_small_transformer_of_v3_is_not_put_into_timms(tmp_path):
    """Shapes are the same with 6 and 12 attention heads, features are not."""
    made = {"img_size": 32, "depth": 12, "num_classes": 0}
    network = timm.create_model("vit_small_patch16_224", num_heads=12, **made)
    state = {f"module.base_encoder.{name}": value for name, value in network.state_dict().items()}
    file = saved(tmp_path, {"state_dict": state | {"module.momentum_encoder.norm.bias": torch.zeros(384)}})
    with pytest.raises(UserError, match="12 attention heads; this one has 6"):
        load_backbone(timm.create_model("vit_small_patch16_224", **made), file)
    load_backbone(build_backbone("vit_small_patch16_224", image_size=32, vit_rules="v3"), file)
    found = architecture_of(read_weights(file))
    assert (found.backbone, found.image_size, found.vit_rules) == ("vit_small_patch16_224", 32, "v3")


def test_queues_of_all_layouts_become_rows():
    keys = torch.randn(32, 16)
    authors = queue_in({"queue": keys.T.contiguous(), "queue_ptr": torch.tensor([8])}, 16)
    assert torch.equal(authors[0], keys)
    assert authors[1] == 8
    solo = queue_in({"queue": torch.stack([keys.T * 0, keys.T])}, 16)
    assert torch.equal(solo[0], keys)
    for bank in (keys, keys.T):
        assert torch.equal(queue_in({"criterion.memory_bank.bank": bank}, 16)[0], keys)
    assert queue_in({"conv1.weight": keys}, 16) is None
    square = torch.randn(16, 16)  # as many keys as numbers in each
    assert torch.equal(queue_in({"queue": square.T.contiguous()}, 16)[0], square)
