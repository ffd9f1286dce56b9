"""The house: who may import whom, read from the source; and what an import may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "moco"

# A room may import from the rooms named here, and from itself.
LEAVES = {"errors", "settings", "settings_file", "view_settings"}
ALLOWED = {
    "errors": set(),
    "view_settings": set(),
    "settings": {"errors", "view_settings"},
    "settings_file": {"errors"},
    "recipes": LEAVES,
    "contrast": LEAVES,
    "data": LEAVES,
    "train": LEAVES | {"contrast", "data"},
    "evaluate": LEAVES | {"contrast", "data", "train"},
    "interop": LEAVES
    | {"recipes", "contrast", "data", "train", "evaluate", "resolve", "building", "evaluation_settings"},
    "report": LEAVES | {"contrast", "data", "train", "evaluate"},
    "resolve": LEAVES | {"contrast", "data", "train"},
    "building": LEAVES | {"contrast", "train"},
    "starting": LEAVES | {"contrast", "train", "evaluate", "interop"},
    "pretraining": LEAVES
    | {"recipes", "contrast", "data", "train", "evaluate", "report", "resolve", "starting", "building"},
    "bench": LEAVES | {"recipes", "building", "data", "train", "resolve", "pretraining"},
    "demo": LEAVES | {"contrast", "data", "train", "evaluate", "report", "pretraining", "bench"},
    "comparing": LEAVES
    | {"recipes", "data", "train", "resolve", "pretraining", "bench", "evaluation", "reporting", "__init__"},
    "evaluation_settings": LEAVES,
    "evaluation": LEAVES
    | {"contrast", "data", "train", "evaluate", "report", "building", "pretraining", "evaluation_settings", "__init__"},
    "detection": LEAVES
    | {"contrast", "data", "train", "evaluate", "interop", "evaluation_settings", "evaluation", "__init__"},
    "options": set(),
    "health": LEAVES
    | {
        "building",
        "check",
        "contrast",
        "data",
        "train",
        "evaluate",
        "report",
        "pretraining",
        "evaluation_settings",
        "evaluation",
        "__init__",
    },
    "embedding_settings": LEAVES | {"evaluation_settings"},
    "embedding": LEAVES
    | {
        "contrast",
        "data",
        "train",
        "evaluate",
        "report",
        "resolve",
        "building",
        "pretraining",
        "evaluation_settings",
        "evaluation",
        "embedding_settings",
        "__init__",
    },
    "reporting": LEAVES
    | {
        "recipes",
        "building",
        "contrast",
        "data",
        "train",
        "evaluate",
        "report",
        "evaluation_settings",
        "evaluation",
        "health",
        "__init__",
    },
    "check": LEAVES | {"data"},
    "run_folders": LEAVES | {"train"},
    "sklearn": LEAVES | {"recipes", "contrast", "data", "train", "evaluate", "pretraining", "embedding"},
    "cli": LEAVES
    | {
        "run_folders",
        "options",
        "recipes",
        "interop",
        "pretraining",
        "bench",
        "comparing",
        "evaluation_settings",
        "evaluation",
        "detection",
        "health",
        "reporting",
        "check",
        "demo",
        "embedding",
        "embedding_settings",
        "__init__",
    },
    "__main__": {"cli"},
    "__init__": LEAVES | {"run_folders", "sklearn", "contrast", "train", "pretraining", "embedding"},
}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module == "moco":
                yield from (f"moco.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_one_way(path):
    own = room(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "moco":
            other = parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "__init__"
            assert other == own or other in ALLOWED[own], f"{own} must not import {name}"


def test_settings_know_no_torch():
    for file in ("settings.py", "view_settings.py"):
        assert not {"torch", "timm", "numpy"} & {name.split(".")[0] for name in imports(SOURCE / file)}


def test_contrast_knows_only_torch_and_timm():
    for path in (SOURCE / "contrast").glob("*.py"):
        outside = {name.split(".")[0] for name in imports(path)} - {"moco", "torch", "timm"}
        assert outside <= set(sys.stdlib_module_names), path


@pytest.mark.parametrize("statement", ["import moco", "import moco.cli", "import moco; moco.PretrainSettings"])
def test_importing_does_not_wait_for_torch(statement):
    check = f"{statement}\nimport sys\nassert not {{'torch', 'timm', 'cv2'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_public_names_are_there_whatever_was_imported_before():
    check = (
        "import moco, moco.pretraining, moco.contrast.moco\n"
        "assert all(getattr(moco, name) is not None for name in moco.__all__)\n"
        "assert callable(moco.pretrain) and callable(moco.backbone)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_files_and_functions_stay_readable():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno - node.lineno < 70, f"{path}: {node.name}"
