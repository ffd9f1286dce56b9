"""Completion as a shell does it: the script is sourced, and its function asked."""

import shutil
import subprocess

import pytest

from moco.cli import main, make_parser
from moco.cli.completion import SHELLS, completion_script
from moco.recipes import RECIPES
from moco.settings import PretrainSettings

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is needed")

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_shtab_moco; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "moco.bash"
    path.write_text(completion_script(make_parser([])[0], "bash"))
    return path


@pytest.fixture
def complete(script, tmp_path):
    def ask(*words: str) -> set[str]:
        command = ["bash", "--norc", "-c", ASK, "bash", str(script), "moco", *words]
        found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
        return set(found.stdout.split())

    return ask


def test_verbs_and_verbs_of_verbs(complete):
    assert {"pretrain", "eval", "runs", "clean", "completion"} <= complete("")
    assert complete("re") == {"resume", "report"}
    assert complete("eval", "f") == {"fewshot", "finetune"}
    assert complete("completion", "") == set(SHELLS)


def test_flags_of_a_verb(complete):
    flags = complete("pretrain", "photos/", "--")
    for name in set(PretrainSettings.model_fields) - {"data"}:
        assert f"--{name.replace('_', '-')}" in flags
    assert "--protocol" in complete("eval", "linear", "--pro")
    assert "--protocol" not in complete("eval", "knn", "--pro")


def test_choices_of_a_flag(complete):
    assert complete("pretrain", "--precision", "") == {"auto", "fp32", "bf16", "fp16"}
    assert complete("pretrain", "--recipe", "") == set(RECIPES)
    assert complete("pretrain", "--momentum", "") == {"auto"}
    assert complete("export", "runs/x", "--to", "ti") == {"timm"}


def test_files_otherwise(complete, tmp_path):
    (tmp_path / "photos.npz").touch()
    (tmp_path / "photos-2").mkdir()
    assert complete("pretrain", "pho") == {"photos.npz", "photos-2"}
    assert complete("pretrain", "--out", "pho") == {"photos.npz", "photos-2"}
    assert complete("pretrain", "--epochs", "pho") == set()
    assert complete("eval", "knn", "pho") == {"photos.npz", "photos-2"}


def test_every_shell_gets_a_script(capsys):
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        assert "--keep-checkpoints" in capsys.readouterr().out
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err


@pytest.mark.parametrize(("shell", "words"), [("zsh", ["-n"]), ("fish", ["--no-execute"])])
def test_the_other_shells_can_read_theirs(shell, words, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    path = tmp_path / "script"
    path.write_text(completion_script(make_parser([])[0], shell))
    subprocess.run([shell, *words, path], check=True)
