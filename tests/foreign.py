"""Checkpoints as other code lays them out: names only, made by small modules of the same structure."""

import argparse
import copy
import itertools

import torch
from torch import nn

from moco.contrast.encoders import build_backbone

WIDTH = 64  # features of the small ResNet below


def encoder(head, channels=3):
    """A small ResNet with torchvision's names, its head where the classifier was."""
    network = build_backbone("resnet18", base_width=8, stem="imagenet", channels=channels)
    del network.fc  # timm's placeholder
    network.add_module("fc", head)
    return network


def linear(dim=16):
    return nn.Linear(WIDTH, dim)


def mlp(dim=16):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, dim))


def mlp_bn(widths, *, last=True):
    parts = []
    for number, (a, b) in enumerate(itertools.pairwise(widths), 1):
        parts.append(nn.Linear(a, b, bias=False))
        if number < len(widths) - 1:
            parts += [nn.BatchNorm1d(b), nn.ReLU()]
        elif last:
            parts.append(nn.BatchNorm1d(b, affine=False))
    return nn.Sequential(*parts)


class Authors(nn.Module):
    """The authors' v1 and v2: encoder_q, encoder_k, queue (C × K), queue_ptr."""

    def __init__(self, head=mlp, dim=16, keys=32, channels=3):
        super().__init__()
        self.encoder_q = encoder(head(dim), channels)
        self.encoder_k = encoder(head(dim), channels)
        for p in self.encoder_k.parameters():
            p.requires_grad = False
        self.register_buffer("queue", nn.functional.normalize(torch.randn(dim, keys), dim=0))
        self.register_buffer("queue_ptr", torch.tensor([keys // 4]))


class AuthorsV3(nn.Module):
    """The authors' v3: base_encoder, momentum_encoder, predictor."""

    def __init__(self):
        super().__init__()
        self.base_encoder = encoder(mlp_bn([WIDTH, 24, 16]))
        self.momentum_encoder = encoder(mlp_bn([WIDTH, 24, 16]))
        self.predictor = mlp_bn([16, 24, 16], last=False)


class Wrapped(nn.Module):
    """As DistributedDataParallel: everything is called module.*."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def lively(module):
    """Running statistics and weights as after some training, so that nothing is equal by chance."""
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(std=0.1)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    return module


def authors_file(path, head=mlp, *, epoch=2, channels=3, namespace=True, legacy=False):
    """A checkpoint of v1 (head=linear) or v2 after one step of SGD. Returns the wrapped model and its optimiser."""
    torch.manual_seed(1)
    model = lively(Wrapped(Authors(head, channels=channels)))
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    for p in model.module.encoder_q.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    content = {
        "epoch": epoch,
        "arch": "resnet18",
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    if namespace:
        content["args"] = argparse.Namespace(lr=0.03, nested=argparse.Namespace(arch="resnet18"))
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return model, optimizer


class Lightly(nn.Module):
    """lightly's example: the backbone is an nn.Sequential of a ResNet's children; the queue is not kept."""

    def __init__(self):
        super().__init__()
        network = encoder(linear())
        children = [child for name, child in network.named_children() if name not in ("global_pool", "fc")]
        self.backbone = nn.Sequential(*children, nn.AdaptiveAvgPool2d(1))
        self.projection_head = nn.Module()
        self.projection_head.layers = mlp()
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)

    def features(self, pictures):
        return self.backbone(pictures).flatten(1)


class SoloLearn(nn.Module):
    """solo-learn's MoCo v2+: two queues, an online classifier."""

    def __init__(self):
        super().__init__()
        self.backbone, self.projector, self.classifier = encoder(nn.Identity()), mlp(), nn.Linear(WIDTH, 10)
        self.momentum_backbone, self.momentum_projector = encoder(nn.Identity()), mlp()
        self.register_buffer("queue", nn.functional.normalize(torch.randn(2, 16, 32), dim=1))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))


def lightning_file(path, model):
    """As Lightning saves it; the epoch is that of the last one, from 0."""
    content = {
        "epoch": 4, "global_step": 100, "pytorch-lightning_version": "2.2.0", "state_dict": model.state_dict(),
        "hyper_parameters": argparse.Namespace(lr=1), "callbacks": {}, "optimizer_states": [], "loops": {},
    }  # fmt: skip
    torch.save(content, path)
