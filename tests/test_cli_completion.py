"""Completion as shells do it: the shell reads the script, and is asked what Tab would offer."""

import os
import shutil
import subprocess

import pytest

from moco.cli import main, make_parser
from moco.cli.completion import SHELLS, completion_script
from moco.recipes import RECIPES
from moco.settings import PretrainSettings

# Each takes the script and a line, and prints what could stand at its end.
BASH = """
source "$1"; IFS=' ' read -ra COMP_WORDS <<< "$2"; [[ $2 == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE=$2; COMP_POINT=${#COMP_LINE}
_shtab_moco; printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = r'source $argv[1]; complete -C "$argv[2]" | string split -f 1 \t | string trim -r -c /'
# zsh completes only where somebody types: another zsh, behind a terminal, writes down what it would show.
ZSH = """
zmodload zsh/zpty; export SCRIPT=$1 FOUND=$PWD/.found; : > $FOUND
zpty shell 'zsh -d -i'
until_it_says() { until [[ $(<$FOUND) == *$1* ]]; do sleep 0.02; zpty -r -t shell shown; done }
until_it_says READY
zpty -w -n shell $2$'\\t\\C-x'
until_it_says DONE
zpty -d shell; grep -vxE 'READY|DONE' $FOUND
"""
ZSHRC = """
autoload -Uz compinit; compinit -u -D
source $SCRIPT
compadd() {
  local -a found
  # Other calls fill arrays and show nothing.
  [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\\ * ]] || { builtin compadd -A found "$@"; print -rl -- $found >> $FOUND }
  builtin compadd "$@"
}
finish() { print DONE >> $FOUND }; zle -N finish; bindkey '^I' list-choices '^X' finish
ready() { print READY >> $FOUND }; precmd_functions=(ready)
"""
ASK = {"bash": ["--norc", "-c", BASH, "bash"], "zsh": ["-f", "-c", ZSH, "zsh"], "fish": ["--no-config", "-c", FISH]}


@pytest.fixture(scope="module", params=SHELLS)
def shell(request):
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not here")
    return request.param


@pytest.fixture(scope="module")
def script(shell, tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(completion_script(make_parser([])[0], shell))
    (path.parent / ".zshrc").write_text(ZSHRC)
    return path


@pytest.fixture
def complete(shell, script, tmp_path):
    environment = os.environ | {"HOME": str(script.parent), "ZDOTDIR": str(script.parent), "TERM": "dumb"}

    def ask(*words: str) -> set[str]:
        command = [shell, *ASK[shell], str(script), " ".join(["moco", *words])]
        found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
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
    assert complete("pretrain", "photos.npz", "pho") == {"photos.npz", "photos-2"}  # DATA may be several
    assert complete("pretrain", "--out", "pho") == {"photos.npz", "photos-2"}
    assert complete("pretrain", "--epochs", "pho") == set()
    assert complete("eval", "knn", "pho") == {"photos.npz", "photos-2"}


def test_every_shell_gets_a_script(capsys):
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        assert "--keep-checkpoints" in capsys.readouterr().out
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err
