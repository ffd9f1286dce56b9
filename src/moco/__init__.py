"""Momentum Contrast: self-supervised pre-training of image encoders.

>>> import moco
>>> run = moco.pretrain("photos/", recipe="v2", backbone="resnet18", epochs=100)
>>> backbone = run.backbone()                     # a plain timm module

or the algorithm alone, in a loop of your own: `moco.MomentumContrast`, `moco.Queue`, `moco.info_nce`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Imported when first used: `import moco` and `moco --help` must not wait for torch.
_HOME = {
    "Contrast": "moco.contrast.losses",
    "Interrupted": "moco.errors",
    "MomentumContrast": "moco.contrast.moco",
    "MocoEncoder": "moco.sklearn",
    "PretrainSettings": "moco.settings",
    "Progress": "moco.train.callbacks",
    "Queue": "moco.contrast.dictionary",
    "Run": "moco.train.run",
    "StepOutput": "moco.contrast.method",
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
    from moco.contrast.dictionary import Queue as Queue
    from moco.contrast.losses import Contrast as Contrast
    from moco.contrast.losses import info_nce as info_nce
    from moco.contrast.method import StepOutput as StepOutput
    from moco.contrast.moco import MomentumContrast as MomentumContrast
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
