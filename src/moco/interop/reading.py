"""Files of weights that somebody else wrote, read without running anything that is in them.

PyTorch's restricted reader (`weights_only`) makes tensors and plain values. Objects of any other class, such as the
argparse.Namespace in many training checkpoints, become empty stand-ins that are left out; no code of theirs is looked
up, imported or run. A file whose weights themselves are such objects is refused.
"""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from moco.errors import UserError
from moco.interop.layouts import recognise, without_wrappers

STATES = ("state_dict", "model", "model_state_dict", "teacher", "net")
"""Where files keep their weights, the first that is there."""
LEGACY_PICKLES = 4
"""Of a file from before PyTorch 1.6: magic number, protocol, machine, and then the content."""


@dataclass(frozen=True)
class ForeignWeights:
    """What a file of weights holds.

    state: its tensors, without `module.` in front of every name. layout: whose names these are (see
    moco.interop.layouts). meta: plain values beside them, such as arch and epoch. optimizer: its state, if there.
    left_out: classes of objects that were not read.
    """

    path: Path
    layout: str
    state: Mapping[str, Tensor]
    meta: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    left_out: tuple[str, ...] = ()


class StandIn:
    """Stands in for an object of a class that is not read. It takes whatever it is given, and keeps nothing."""

    def __new__(cls, *given: object, **named: object) -> StandIn:
        """Make one, whatever the class would have wanted."""
        return super().__new__(cls)

    def __init__(self, *given: object, **named: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def read_weights(path: str | Path, *, trust_pickle: bool = False) -> ForeignWeights:
    """Read .pt, .pth, .pth.tar, .ckpt, .bin or .safetensors without running anything that is in it.

    trust_pickle: let Python make the objects in the file, which can run any program: for files of your own only.
    Raises UserError where it is no file of weights, is damaged, or would need objects that are not made.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the file of weights in it, such as {path / 'model.safetensors'}")
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    left_out: tuple[str, ...] = ()
    if path.suffix == ".safetensors":
        content: Any = _safetensors(path)
    elif trust_pickle:
        content = _trusted(path)
    else:
        content, left_out = _restricted(path)
    held = _weights_in(content)
    if isinstance(held, nn.Module):
        held = held.state_dict()
    if isinstance(held, StandIn):
        raise UserError(
            f"{path} holds a whole Python object ({type(held).__name__}) instead of its weights; making it can run any "
            "program: if you trust where the file comes from, --trust-pickle"
        )
    state = {str(name): value for name, value in held.items() if isinstance(value, Tensor)} if _is_map(held) else {}
    if not state:
        raise UserError(f"{path} holds no weights (named tensors)")
    state = without_wrappers(state)
    around = {str(name): value for name, value in content.items()} if content is not held and _is_map(content) else {}
    optimizer = around.get("optimizer")
    meta = {name: plain for name, value in around.items() if (plain := _plain(value)) is not None}
    return ForeignWeights(
        path, recognise(state, meta), state, meta, optimizer if _is_map(optimizer) else None, left_out
    )


def _is_map(value: object) -> bool:
    return isinstance(value, Mapping)


def _weights_in(content: Any) -> Any:
    """The part of a file that is its weights."""
    if not _is_map(content):
        return content
    return next(
        (content[name] for name in STATES if isinstance(content.get(name), (Mapping, StandIn, nn.Module))), content
    )


def _plain(value: object) -> str | int | float | bool | None:
    """A value that says something about the weights, or None."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return value if isinstance(value, (str, int, float, bool)) else None


def _safetensors(path: Path) -> dict[str, Any]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = file.metadata() or {}
        return {**about, "state_dict": safetensors.torch.load_file(path)}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged, or no safetensors file: {_line(error)}") from error


def _restricted(path: Path) -> tuple[Any, tuple[str, ...]]:
    """What a file of PyTorch holds, and the names of what was left out of it."""
    try:
        names = sorted(set(_globals(path)))
    except Exception as error:  # whatever arbitrary bytes make of a parser
        raise UserError(f"{path} is damaged, or no file of weights: {_line(error)}") from error
    stand_ins = {name: type(name, (StandIn,), {"__module__": __name__}) for name in names}
    # Those that PyTorch itself knows (tensors, OrderedDict, …) are made by it; the others by these.
    with torch.serialization.safe_globals([(kind, name) for name, kind in stand_ins.items()]):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UserError(
                f"{path} asks for more than weights while it is read ({_reason(error)}), which can run any program: "
                "if you trust where it comes from, --trust-pickle"
            ) from error
        except Exception as error:  # as above
            raise UserError(f"{path} is damaged, or no file of weights: {_line(error)}") from error
    return content, tuple(name for name in names if _is_foreign(name))


def _is_foreign(name: str) -> bool:
    return name.partition(".")[0] not in ("torch", "collections", "_codecs", "numpy")


def _trusted(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # whatever the objects in it raise
        raise UserError(f"{path} cannot be read, even when trusted: {_line(error)}") from error


def _globals(path: Path) -> Iterator[str]:
    """Names of the classes and functions that the pickles in a file ask for. Nothing is looked up."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
            for name in pickles:
                with archive.open(name) as file:
                    yield from _asked_for(file)
            if not pickles:
                raise ValueError("an archive without PyTorch's data.pkl")
        return
    with path.open("rb") as file:
        for _ in range(LEGACY_PICKLES):
            yield from _asked_for(file)


def _asked_for(file: IO[bytes]) -> Iterator[str]:
    for operation, argument, _ in pickletools.genops(file):
        if operation.name == "GLOBAL":  # the only way that PyTorch's reader knows
            module, _, name = str(argument).partition(" ")
            yield f"{'builtins' if module == '__builtin__' else module}.{name}"


def _reason(error: Exception) -> str:
    """What PyTorch's reader would not do, without its long advice."""
    inner = error.__context__
    return _line(inner if isinstance(inner, Exception) else error).partition(" Please ")[0][:160].rstrip(". ")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
