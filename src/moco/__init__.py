"""Momentum Contrast: self-supervised pre-training of image encoders.

>>> import moco
>>> run = moco.pretrain("photos/", recipe="v2", backbone="resnet18", epochs=100)
>>> backbone = run.backbone()                     # a plain timm module

or the algorithm alone, in a loop of your own: `moco.MomentumContrast` with `moco.Queue`, `moco.InBatch` or
`moco.MemoryBank`, the rivals `moco.SimCLR`, `moco.BYOL`, `moco.SwAV`, `moco.CPC`, and `moco.info_nce`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Imported when first used: `import moco` and `moco --help` must not wait for torch.
_HOME = {
    "BYOL": "moco.contrast.byol",
    "CPC": "moco.contrast.cpc",
    "Contrast": "moco.contrast.losses",
    "InBatch": "moco.contrast.dictionary",
    "Interrupted": "moco.errors",
    "MemoryBank": "moco.contrast.dictionary",
    "MomentumContrast": "moco.contrast.moco",
    "MocoEncoder": "moco.sklearn",
    "PretrainSettings": "moco.settings",
    "Progress": "moco.train.callbacks",
    "Queue": "moco.contrast.dictionary",
    "Run": "moco.train.run",
    "SimCLR": "moco.contrast.simclr",
    "StepOutput": "moco.contrast.method",
    "SwAV": "moco.contrast.swav",
    "TrainingError": "moco.errors",
    "UserError": "moco.errors",
    "backbone": "moco.pretraining",
    "embed": "moco.embedding",
    "info_nce": "moco.contrast.losses",
    "pretrain": "moco.pretraining",
    "resume": "moco.pretraining",
    "runs": "moco.run_folders",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from moco.contrast.byol import BYOL as BYOL
    from moco.contrast.cpc import CPC as CPC
    from moco.contrast.dictionary import InBatch as InBatch
    from moco.contrast.dictionary import MemoryBank as MemoryBank
    from moco.contrast.dictionary import Queue as Queue
    from moco.contrast.losses import Contrast as Contrast
    from moco.contrast.losses import info_nce as info_nce
    from moco.contrast.method import StepOutput as StepOutput
    from moco.contrast.moco import MomentumContrast as MomentumContrast
    from moco.contrast.simclr import SimCLR as SimCLR
    from moco.contrast.swav import SwAV as SwAV
    from moco.embedding import embed as embed
    from moco.errors import Interrupted as Interrupted
    from moco.errors import TrainingError as TrainingError
    from moco.errors import UserError as UserError
    from moco.pretraining import backbone as backbone
    from moco.pretraining import pretrain as pretrain
    from moco.pretraining import resume as resume
    from moco.run_folders import runs as runs
    from moco.settings import PretrainSettings as PretrainSettings
    from moco.sklearn import MocoEncoder as MocoEncoder
    from moco.train.callbacks import Progress as Progress
    from moco.train.run import Run as Run


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'moco' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
