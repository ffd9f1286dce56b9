"""What a user installs: the built wheel and sdist, and the package without its extras."""

import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "moco"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with wheel and sdist, built from a copy: the sdist from the tree, the wheel from the sdist."""
    tree, out = tmp_path_factory.mktemp("tree") / "moco", tmp_path_factory.mktemp("dist")
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "runs", "build", "dist", "_build", "__pycache__", "*.egg-info", ".*_cache"
    )
    shutil.copytree(ROOT, tree, ignore=left_out)
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", out, tree]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def in_source() -> set[str]:
    """Every file of the package, as a wheel names it."""
    files = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"moco/{path.relative_to(SOURCE).as_posix()}" for path in files}


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built):
    with zipfile.ZipFile(wheel(built)) as archive:
        names = set(archive.namelist())
        (entry,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "moco = moco.cli:main" in archive.read(entry).decode()
    own = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert own == in_source()
    assert {"moco/py.typed", "moco/data/fashion/fashion.npz", "moco/report/report.html.jinja"} <= own
    assert {"moco/report/page.css", "moco/report/page.js", "moco/data/fashion/LICENSE"} <= own
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_sdist_holds_what_is_needed_to_build_test_and_document(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ("pyproject.toml", "README.md", "LICENSE", "Makefile", "docs/conf.py", "docs/pictures/queue.svg")
    assert {*wanted, "tests/conftest.py", "tests/test_docs.py", "src/moco/data/fashion/fashion.npz"} <= names
    # What tests read or import, or CI runs.
    needed = ("benchmarks/make_detection_data.py", ".github/workflows/ci.yml", ".devcontainer/devcontainer.json")
    assert {*needed, "Dockerfile", ".ci/run", "examples/cluster/slurm.sbatch", "CITATION.cff"} <= names
    assert not any("__pycache__" in name or name.startswith((".git/", "docs/_build")) for name in names)


@pytest.mark.slow
def test_the_wheel_alone_works(built, tmp_path):
    with zipfile.ZipFile(wheel(built)) as archive:
        archive.extractall(tmp_path / "site")
    # The wheel before the checkout, which an editable install puts on the path.
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import moco, moco.cli\n"
        f"assert moco.__file__.startswith({str(tmp_path)!r}), moco.__file__\n"
        "from moco.data.fashion import load\n"
        "assert load()[0].shape[1:] == (28, 28)\n"
        "sys.exit(moco.cli.main(['--version']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("moco ")


def test_every_file_that_is_no_module_is_named_as_package_data():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    named = {path.relative_to(SOURCE).as_posix() for pattern in data["moco"] for path in SOURCE.glob(pattern)}
    others = {name.removeprefix("moco/") for name in in_source() if not name.endswith(".py")}
    assert others <= named


EXTRAS = (
    "pyarrow", "datasets", "s3fs", "gcsfs", "aiohttp", "onnx", "onnxscript", "onnxruntime", "transformers", "wandb",
    "mlflow", "optuna", "pycocotools", "torchmetrics", "pandas",
)  # fmt: skip


@pytest.mark.slow
def test_every_module_can_be_imported_without_the_extras():
    # Finders that do not find them: an exception would hit those who only ask whether they are there.
    script = (
        "import sys, pkgutil, importlib\n"
        f"gone = {EXTRAS!r}\n"
        "class Without:\n"
        "    def __init__(self, finder): self.finder = finder\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        return None if name.split('.')[0] in gone else self.finder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = map(Without, sys.meta_path)\n"
        "import moco\n"
        "for one in pkgutil.walk_packages(moco.__path__, 'moco.'):\n"
        "    if one.name != 'moco.__main__': importlib.import_module(one.name)\n"
        "for name in moco.__all__: getattr(moco, name)\n"
        "assert not set(gone) & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_extra_that_a_message_names_is_there():
    extras = PROJECT["optional-dependencies"]
    text = "".join(path.read_text(encoding="utf-8") for path in [*SOURCE.rglob("*.py"), *(ROOT / "docs").glob("*.md")])
    named = {part.split("]")[0] for part in text.split("momentum-contrast[")[1:]}
    assert named
    assert {name for name in named if "{" not in name} <= set(extras)
    assert {"wandb", "mlflow"} <= set(extras)  # named by a template


def test_the_ways_to_run_it_elsewhere_follow_the_two_commands():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["run"]
    assert job["steps"][-1]["run"] == ".ci/run"
    assert f">={job['strategy']['matrix']['python'][0]}" == PROJECT["requires-python"]
    told = {one.split(" :: ")[-1] for one in PROJECT["classifiers"] if "Python :: 3." in one}
    assert told == set(job["strategy"]["matrix"]["python"])
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("ARG BASE=") for line in lines)
    assert "FROM ${BASE}" in lines
    assert lines[-1] == 'CMD ["make", "demo"]'
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "$(VENV)/.installed-dev:" in rules
    assert container["postCreateCommand"] == "make .venv/.installed-dev"
