"""Whose names are these? Layouts of foreign checkpoints, recognised by their keys, and timm's names for the backbone.

| layout | query encoder | key encoder | head |
|---|---|---|---|
| moco-v1, moco-v2 (the authors' code) | `encoder_q.*` | `encoder_k.*` | `fc`, `fc.0` and `fc.2` |
| moco-v3 (the authors' code) | `base_encoder.*` | `momentum_encoder.*` | `fc.*` or `head.*`, `predictor.*` |
| lightly | `backbone.*` | `backbone_momentum.*` | `projection_head.layers.*` |
| solo-learn | `backbone.*` | `momentum_backbone.*` | `projector.*` |
| moco (a run of this package) | `query_encoder.backbone.*` | `key_encoder.backbone.*` | `query_encoder.head.*` |
| plain (torchvision, timm), linear-probe | no prefix | – | classifier `fc`, `head`, … |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from moco.errors import UserError

WRAPPERS = ("module.", "_orig_mod.", "model.")
"""What DistributedDataParallel, torch.compile and Lightning modules put in front of every name."""

# Of each layout: prefixes of the query and the key backbone, and of the query and the key head, in order of preference.
ENCODERS: dict[str, tuple[tuple[str, str], ...]] = {
    "moco": (("query_encoder.backbone.", "key_encoder.backbone."),),
    "moco-v1": (("encoder_q.", "encoder_k."),),
    "moco-v2": (("encoder_q.", "encoder_k."),),
    "moco-v3": (("base_encoder.", "momentum_encoder."),),
    # In lightly's own benchmarks the encoder that follows has the plain name.
    "lightly": (
        ("query_backbone.", "backbone."),
        ("backbone.", "backbone_momentum."),
        ("backbone.", "momentum_backbone."),
    ),
    "solo-learn": (("backbone.", "momentum_backbone."), ("encoder.", "momentum_encoder.")),
    "solo-learn-linear": (("backbone.", ""), ("encoder.", "")),
    "plain": (("", ""),),
    "linear-probe": (("", ""),),
}
# The same for the projection heads; `layers.` is lightly's.
HEADS: dict[str, tuple[tuple[str, str], ...]] = {
    "moco-v1": (("encoder_q.fc.", "encoder_k.fc."),),
    "moco-v2": (("encoder_q.fc.", "encoder_k.fc."),),
    "moco-v3": (("base_encoder.fc.", "momentum_encoder.fc."), ("base_encoder.head.", "momentum_encoder.head.")),
    "lightly": (
        ("query_projection_head.layers.", "projection_head.layers."),
        ("projection_head.layers.", "projection_head_momentum.layers."),
        ("projection_head.layers.", "momentum_projection_head.layers."),
    ),
    "solo-learn": (("projector.", "momentum_projector."),),
}
QUEUES = ("queue", "criterion.memory_bank.bank", "criterion.bank", "memory_bank.bank")
POINTERS = ("queue_ptr", "criterion.memory_bank.bank_ptr", "criterion.bank_ptr", "memory_bank.bank_ptr")
DESCRIPTIONS = {
    "moco": "a checkpoint of this package",
    "moco-v1": "the authors' MoCo v1 checkpoint",
    "moco-v2": "the authors' MoCo v2 checkpoint",
    "moco-v3": "the authors' MoCo v3 checkpoint",
    "lightly": "a lightly checkpoint",
    "solo-learn": "a solo-learn checkpoint",
    "solo-learn-linear": "a linear probe of solo-learn: a pre-trained backbone, and a classifier, which is left out",
    "plain": "plain weights with torchvision's or timm's names",
    "linear-probe": "a linear probe, not a pre-training checkpoint: a pre-trained backbone that was frozen, and a "
    "classifier, which is left out",
}
CLASSIFIERS = ("fc.", "head.", "heads.", "classifier.", "linear.", "head_dist.", "online_classifier.")
"""Last layers that are no part of a backbone."""
SEQUENTIAL = re.compile(r"(\d+)\.(?:(\d+)\.)?(.+)")
VIT_OF_TORCHVISION = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(?:0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(?:3|linear_2)\.", ".mlp.fc2."),
)


def without_wrappers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, without what was put in front of every name."""
    wrapper = next((wrapper for wrapper in WRAPPERS if all(name.startswith(wrapper) for name in state)), None)
    if wrapper is None:
        return dict(state)
    return without_wrappers({name.removeprefix(wrapper): value for name, value in state.items()})


def recognise(state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    """The layout of names without wrappers: a key of ENCODERS. meta: plain values beside them in the file."""

    def has(*prefixes: str) -> bool:
        return all(any(name.startswith(prefix) for name in state) for prefix in prefixes)

    if has("query_encoder.backbone."):
        return "moco"
    if has("encoder_q."):
        return "moco-v2" if has("encoder_q.fc.0.") else "moco-v1"
    if has("base_encoder."):
        return "moco-v3"
    if has("projection_head.") or has("backbone_momentum.") or has("query_backbone."):
        return "lightly"
    if has("projector.") or has("momentum_backbone."):
        return "solo-learn"
    if has("backbone."):
        return "solo-learn-linear" if has("classifier.") else "lightly"
    if "best_acc1" in meta and has("fc.") | has("head."):
        return "linear-probe"
    return "plain"


def prefix_of(state: Mapping[str, Tensor], pairs: Sequence[tuple[str, str]], encoder: str = "query") -> str | None:
    """What stands in front of the names of a part of an encoder, or None where the file has no such part.

    pairs: how the part is called in the query and in the key encoder; of several ways, the first for which the file
    has this encoder's and the query's.
    """
    for query, key in pairs:
        mine = query if encoder == "query" else key
        if (mine or encoder == "query") and all(any(name.startswith(one) for name in state) for one in {query, mine}):
            return mine
    return None


def part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def names_for_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a backbone under timm's names, without a classifier or a head.

    torchvision's and the authors' ResNets and the authors' ViTs have timm's names already; those of an nn.Sequential
    of a ResNet's children (lightly) are numbers, and torchvision's ViTs have names of their own.
    """
    found = {name: value for name, value in state.items() if not name.startswith(CLASSIFIERS)}
    if found and all(SEQUENTIAL.fullmatch(name) for name in found):
        found = _numbered(found)
    if "conv_proj.weight" in found:
        for pattern, replacement in VIT_OF_TORCHVISION:
            found = {re.sub(pattern, replacement, name): value for name, value in found.items()}
    return found


def _numbered(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A ResNet that was made an nn.Sequential of its children: convolution, norm, (…), four stages."""
    parts = [match for name in state if (match := SEQUENTIAL.fullmatch(name))]
    stages = _numbers(match for match in parts if match[2] is not None)
    stem = _numbers(match for match in parts if match[2] is None)
    names = dict(zip(stem, ("conv1", "bn1"), strict=False)) | {
        number: f"layer{stage}" for stage, number in enumerate(stages, 1)
    }
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        number, _, rest = name.partition(".")
        known = names.get(int(number), number)
        found[f"{known}.{rest}".replace(".shortcut.", ".downsample.")] = value
    return {name: _of_all_splits(found, name) for name in found}


def _numbers(matches: Iterable[re.Match[str]]) -> list[int]:
    return sorted({int(match[1]) for match in matches})


def _of_all_splits(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Running statistics that lightly's split batch norm keeps once for each part of a batch: their mean."""
    value = state[name]
    weight = state.get(re.sub(r"running_(mean|var)$", "weight", name))
    if ".running_" not in name or weight is None or len(value) == len(weight) or len(value) % len(weight):
        return value
    return value.reshape(-1, len(weight)).mean(0)


def encoder_weights(state: Mapping[str, Tensor], layout: str, encoder: str = "query") -> dict[str, Tensor]:
    """An encoder's backbone in a file, under timm's names. Raises UserError where there is none."""
    prefix = prefix_of(state, ENCODERS[layout], encoder)
    if prefix is None:
        raise UserError(f"{DESCRIPTIONS[layout].partition(':')[0]} has no {encoder} encoder")
    return names_for_timm(part(state, prefix))


def head_weights(state: Mapping[str, Tensor], layout: str, encoder: str = "query") -> dict[str, Tensor]:
    """An encoder's projection head under this package's names (a Linear or a Sequential); empty where there is none."""
    prefix = prefix_of(state, HEADS.get(layout, ()), encoder)
    return {} if prefix is None else part(state, prefix)


def queue_in(state: Mapping[str, Tensor], feature_size: int) -> tuple[Tensor, int] | None:
    """The keys (K, C) of a queue and the place of the oldest one, or None where the file has none.

    The authors keep C × K; solo-learn 2 × C × K, one queue for the keys of each view: those of the second view are
    taken, which its queries of the first view met. lightly keeps K × C, or C × K in old versions.
    """
    keys = next((state[name] for name in QUEUES if name in state), None)
    if keys is None:
        return None
    if keys.ndim == 3:
        keys = keys[1]
    if keys.ndim != 2 or feature_size not in keys.shape:
        return None
    authors_way = "queue" in state or keys.shape[1] != feature_size
    keys = (keys.T if authors_way else keys).contiguous().float()
    pointer = next((int(state[name].item()) for name in POINTERS if name in state), 0)
    return keys, pointer % len(keys)
