"""`moco VERB`. Options are generated from the settings class; what is wrong is said in one line, exit status 2.

The parser is made here in a few lines rather than by a library, since layered settings (recipe < file < flags) need
to know which flags were really given, and a mistake should be one line with the nearest name.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from moco import __version__
from moco.errors import Interrupted, TrainingError, UserError
from moco.settings import RECIPES, PretrainSettings, nearest

EPILOGUE = """\
examples:
  moco pretrain photos/ --recipe v2 --backbone resnet50 --epochs 200 --out runs/first
  moco pretrain digits.npz --recipe small --out runs/digits
  moco resume runs/first
  moco pretrain photos/ --nproc 4 --out runs/first
  torchrun --nnodes=2 --nproc-per-node=8 --max-restarts=3 … -m moco pretrain photos/ --out runs/first
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


class _Help(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # or it would tear flags apart


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, 1 (training failed), 2 (bad input), 130 or 143 (stopped)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _dispatch(arguments)
    except UserError as error:
        return _complain(error, 2)
    except TrainingError as error:
        return _complain(error, 1)
    except Interrupted as stop:
        return _complain(stop, stop.status)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)


def _complain(what: object, status: int) -> int:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"moco: {what}", file=sys.stderr)
    return status


def _dispatch(arguments: list[str]) -> int:
    parser = _Parser(prog="moco", description="Self-supervised pre-training with Momentum Contrast", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"moco {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)
    _add_pretrain(verbs, arguments)
    _add_resume(verbs, arguments)
    _add_bench(verbs, arguments)
    demo = verbs.add_parser("demo", help="pre-train on the pictures in the package, evaluate, show", allow_abbrev=False)
    demo.add_argument(
        "--out", default="runs/demo", help="run folder; a number is added if it exists (default: %(default)s)"
    )
    if arguments and not arguments[0].startswith("-") and arguments[0] not in verbs.choices:
        raise UserError(f"unknown verb {arguments[0]!r}{nearest(arguments[0], verbs.choices)} (see moco --help)")
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = verbs.choices.get(found.verb, parser)._option_string_actions
        if not unknown[0].startswith("-"):
            raise UserError(f"unexpected argument {unknown[0]!r}: put DATA together, before the options")
        raise UserError(f"unknown option {unknown[0]}{nearest(unknown[0], flags)}")
    given: dict[str, Any] = {
        name: "auto" if value == ["auto"] else value
        for name, value in vars(found).items()
        if name != "verb" and value != []
    }
    if len(given.get("data", [])) == 1:
        given["data"] = given["data"][0]
    if given.pop("nproc", 1) > 1:
        return _launch(int(found.nproc), arguments)
    if found.verb == "pretrain":
        from moco.pretraining import pretrain, resume

        if "resume" in given:
            if "config" in given:
                raise UserError("--config does not go with --resume: the run has its settings")
            resume(given.pop("resume"), **given)
        else:
            pretrain(given.pop("data", ""), **given)
    elif found.verb == "resume":
        from moco.pretraining import resume

        resume(given.pop("run"), **given)
    elif found.verb == "bench":
        from moco.bench import benchmark

        benchmark(given.pop("data", ""), **given)
    elif found.verb == "demo":
        from moco.demo import demonstrate

        demonstrate(**given)
    else:
        parser.print_help()
    return 0


def _launch(processes: int, arguments: list[str]) -> int:
    """Run the same command in several processes of this machine, by torchrun. Returns the first bad exit status."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    rest = arguments.copy()
    place = next(i for i, word in enumerate(rest) if word.partition("=")[0] == "--nproc")
    del rest[place : place + (1 if "=" in rest[place] else 2)]
    try:
        launch = parse_args(["--standalone", f"--nproc-per-node={processes}", "-m", "moco"])
        launch.training_script_args = rest  # not through its parser, which would take --monitor for one of its own
        run(launch)
    except ChildFailedError as failed:  # the process has said why
        status = failed.get_first_failure()[1].exitcode
        return status if status > 0 else 1
    return 0


def _add_pretrain(verbs: Any, arguments: list[str]) -> None:
    parser = _add_verb(
        verbs,
        "pretrain",
        arguments,
        help="pre-train an encoder on images without labels",
        usage="moco pretrain DATA [--config FILE] [--SETTING VALUE ...]\n       moco pretrain --resume RUN",
        description="Pre-train an encoder on images without labels. Values: defaults < recipe < --config < flags.",
        epilog=EPILOGUE,
    )
    parser.add_argument("--resume", metavar="RUN", help="run folder to continue from its newest checkpoint")


def _add_resume(verbs: Any, arguments: list[str]) -> None:
    _add_verb(
        verbs,
        "resume",
        arguments,
        run=True,
        help="continue a run from its newest checkpoint",
        usage="moco resume RUN [--data DATA] [--SETTING VALUE ...]",
        description="Continue a run where its newest whole checkpoint was written. Settings that would make it\n"
        "another run are refused; more --epochs, other --workers, --device, --save-every and the like are taken.",
        epilog="examples:\n  moco resume runs/first\n  moco resume runs/first --epochs 400 --data /elsewhere/photos\n",
    )


def _add_bench(verbs: Any, arguments: list[str]) -> None:
    parser = _add_verb(
        verbs,
        "bench",
        arguments,
        help="measure where a training's time would go on this data and machine, and what to change",
        usage="moco bench DATA [--seconds X] [--json FILE] [--config FILE] [--SETTING VALUE ...]",
        description="Measure reading, decoding, views, the model step and the whole job; say what limits it, what to\n"
        "change, and how long the planned epochs would take. Takes the settings of moco pretrain, and writes\n"
        "nothing: those that concern only the run folder (--out and the like) change nothing.",
        epilog="example:\n  moco bench photos/ --backbone resnet50 --epochs 200 --workers 12\n",
    )
    parser.add_argument("--seconds", type=float, metavar="X", help="how long to measure, about (default: 60)")
    parser.add_argument(
        "--json", dest="json_file", metavar="FILE", help="write the figures there; - for standard output, and no table"
    )


def _add_verb(
    verbs: Any, name: str, arguments: list[str], *, run: bool = False, **texts: str
) -> argparse.ArgumentParser:
    """A verb that takes DATA and --config, or else a run, and all settings.

    `arguments` choose the recipe whose defaults are shown.
    """
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        formatter_class=_Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        **texts,
    )
    data = PretrainSettings.model_fields["data"].description
    if name != "bench":
        parser.add_argument("--nproc", type=_processes, metavar="N", help="processes on this machine (default: 1)")
    if run:
        parser.add_argument("run", metavar="RUN", help="run folder")
        parser.add_argument("--data", nargs="+", metavar="DATA", help="where the pictures are now, if they moved")
    else:
        parser.add_argument("data", nargs="*", metavar="DATA", help=data)
        parser.add_argument("--config", metavar="FILE", help="YAML file with settings, one `name: value` a line")
    words = [word for argument in arguments for word in argument.split("=", 1)]
    recipe = next((b for a, b in itertools.pairwise(words) if a == "--recipe"), "v2")
    defaults = RECIPES.get(recipe, {})
    for part in reversed(PretrainSettings.__bases__):
        group = parser.add_argument_group((part.__doc__ or "").lower())
        for setting in part.__annotations__:
            field = PretrainSettings.model_fields[setting]
            if setting != "data":
                add_option(group, setting, field, "" if run else defaults.get(setting, field.default))
    return parser


def add_option(group: argparse._ArgumentGroup, name: str, field: FieldInfo, default: Any) -> None:
    """Add the flag of one settings field: its name in kebab case, its description and default as help."""
    flag, text = "--" + name.replace("_", "-"), (field.description or name).replace("%", "%%")
    if default != "":
        text += f" (default: {_shown(default)})"
    if field.annotation is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif field.annotation is str:
        group.add_argument(flag, metavar="NAME", help=text)
    else:
        several = _is_tuple(field.annotation)
        read = _value_or_none if type(None) in get_args(field.annotation) else _value
        words = "|".join(dict.fromkeys(_words(field.annotation)))
        group.add_argument(flag, nargs="+" if several else None, type=read, metavar=words, help=text)


def _processes(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise UserError(f"--nproc {text}: must be a number of processes, 1 or more")
    return int(text)


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(f"{number:.4g}" for number in default)
    if isinstance(default, bool):
        return "yes" if default else "no"
    return "none" if default is None else str(default)


def _words(annotation: Any) -> Iterator[str]:
    """What a value of this type may look like, in the help: choices as they are, N for whole numbers, X for others."""
    plain = {int: "N", float: "X", bool: "true|false", type(None): "none"}
    if annotation in plain:
        yield plain[annotation]
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) is Mapping:
        yield "{name: value}"
    else:
        yield from itertools.chain.from_iterable(map(_words, get_args(annotation)))


def _is_tuple(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(map(_is_tuple, get_args(annotation)))


def _value(text: str) -> Any:
    """A flag's value as YAML would read it."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _value_or_none(text: str) -> Any:
    """The same for a setting that may be left empty: `none` stands for nothing."""
    return None if text.lower() == "none" else _value(text)
