"""README and docs: every command is accepted by the program, every example runs, every error message is there."""

import doctest
import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml
from torch import nn

import moco
from moco import cli
from moco.evaluation_settings import TASKS, HealthSettings, ReportSettings, inspection
from moco.recipes import pretrain_settings
from moco.settings import PretrainSettings

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "extensions"))
import docstrings  # noqa: E402
import generated  # noqa: E402
from messages import Message, messages  # noqa: E402

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
RUN_ELSEWHERE = {"library.md": "test_docs_library.py"}
EXAMPLES = [p for p in PAGES if "```python" in p.read_text(encoding="utf-8") and p.name not in RUN_ELSEWHERE]
BLOCK = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IDS = [path.name for path in PAGES]


@cache
def page(name: str) -> str:
    """A page of docs/ with its generated parts."""
    return generated.fill((ROOT / "docs" / name).read_text(encoding="utf-8"))


def blocks(path: Path):
    """Language and text of the fenced blocks of a page, its generated parts included."""
    return BLOCK.findall(page(path.name) if path.parent.name == "docs" else path.read_text(encoding="utf-8"))


# ---- commands


def commands(path: Path):
    """The command lines of a page that begin with `moco`, alone or behind torchrun or &&, without comments."""
    for language, text in blocks(path):
        if language in ("", "bash", "sh", "console"):
            text = text.replace("\\\n", " ")
            for line in text.splitlines():
                yield from _of_line(line)
    for code in re.findall(r"`(moco [a-z]+ [^`\n]*)`", BLOCK.sub("", path.read_text(encoding="utf-8"))):
        yield from _of_line(code)


def _of_line(line: str):
    for part in re.split(r" && | ; ", re.sub(r"(^|\s)#.*", "", line)):
        found = re.match(r"\s*(?:torchrun .*?-m (?:-- )?)?moco (\S.*)", part)
        # A synopsis, and a sentence about a command, are no command: [optional], a|b, …
        command = found[1].split(" > ")[0].strip() if found else ""
        if command and not re.search(r"[\[|…]|\.\.\.", command) and not re.fullmatch(r"eval [a-z]+", command):
            yield command


def given_by(command: str) -> dict:
    """What the real parser makes of a command. Raises UserError where it does not take it."""
    arguments = shlex.split(command)
    parser, _ = cli.make_parser(arguments)
    found, unknown = parser.parse_known_args(arguments)
    assert not unknown, f"moco {command}: {unknown}"
    assert "run_verb" in found, command
    return {name: value for name, value in vars(found).items() if name not in ("run_verb", "own_parser")}


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_the_program_takes_every_command_of_the_page(path):
    for command in commands(path):
        if command in ("--help", "--version") or command.endswith(" --help"):
            continue
        given = given_by(command)
        fields = PretrainSettings.model_fields
        if given["verb"] in ("pretrain", "bench", "compare", "ablate", "resume") and "resume" not in given:
            values = {name: "auto" if value == ["auto"] else value for name, value in given.items() if name in fields}
            if isinstance(values.get("data"), list):
                values["data"] = tuple(values["data"])
            pretrain_settings(**values)
        kind = {"health": HealthSettings, "report": ReportSettings}.get(given["verb"], TASKS.get(given.get("task")))
        if kind is not None:
            inspection(kind, {name: value for name, value in given.items() if name in kind.model_fields})


def test_there_are_commands_to_look_at():
    assert len({command for path in PAGES for command in commands(path)}) > 80
    with pytest.raises(moco.UserError):
        given_by("pretrain photos/ --nproc 0")
    with pytest.raises(AssertionError, match="no-such"):
        given_by("pretrain photos/ --no-such 1")


# What other programs call so: those that moco is compared with, and the tools around it.
FOREIGN = {
    "--arch", "--aug-plus", "--cos", "--crop-min", "--dist-backend", "--dist-url", "--gpu", "--index-url", "--kills",
    "--lr", "--max-restarts", "--mlp", "--moco-dim", "--moco-k", "--moco-m", "--moco-m-cos", "--moco-mlp-dim",
    "--moco-t", "--multiprocessing-distributed", "--nnodes", "--print-freq", "--rank", "--rounds", "--standalone",
    "--start-epoch", "--stop-grad-conv", "--train", "--wd", "--world-size",
}  # fmt: skip


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_every_flag_that_a_page_names_exists(path):
    known = {flag for parser in generated.verbs().values() for flag in parser._option_string_actions} | {"--version"}
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    named = {flag for code in re.findall(r"`([^`\n]*--[^`\n]*)`", text) for flag in re.findall(r"--[a-z][a-z-]*", code)}
    wrong = {flag for flag in named - known - FOREIGN if not any(other.startswith(flag) for other in FOREIGN)}
    assert not wrong


# ---- examples in Python


@pytest.fixture(scope="session")
def workplace(tmp_path_factory, photographs):
    """A folder with what the examples speak of: photos/ and cat.jpg, and runs/first, trained for two steps."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "photos").mkdir()
    for number in range(16):
        top, left = 20 * (number % 8), 150 * (number // 8)
        picture = photographs[number % 2][top : top + 96, left : left + 96]
        cv2.imwrite(str(folder / "photos" / f"{number:02}.jpg"), picture)
    cv2.imwrite(str(folder / "cat.jpg"), photographs[0][:96, :96])
    tiny_run(str(folder / "photos"), out=str(folder / "runs" / "first"))
    return folder


TINY = {
    "backbone": "resnet18", "base_width": 8, "image_size": 32, "batch_size": 8, "queue_size": 16, "epochs": 1,
    "workers": 0, "threads": 1, "tensorboard": False, "save_every": "none", "precision": "fp32", "device": "cpu",
}  # fmt: skip
_pretrain = moco.pretrain


def tiny_run(data="", **given):
    """`moco.pretrain` after the settings of the example were found good, with settings that take a second."""
    callbacks = {name: given.pop(name) for name in ("on_step", "on_epoch", "views", "labels") if name in given}
    pretrain_settings(**{name: value for name, value in given.items() if name != "backbone" or isinstance(value, str)})
    kept = {name: value for name, value in given.items() if name not in TINY and name != "recipe"}
    return _pretrain(data, **TINY, **kept, **callbacks)


def words(folder: Path) -> dict:
    """What examples take for granted: as much of it as a page may use."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 32), nn.ReLU())
    head = nn.Linear(32, 128)
    views = [(torch.rand(4, 3, 8, 8), torch.rand(4, 3, 8, 8), torch.arange(4)) for _ in range(2)]
    model = moco.MomentumContrast(encoder, head, dictionary=moco.Queue(16, dim=128))
    q, k = (nn.functional.normalize(torch.randn(4, 128), dim=1).requires_grad_(one) for one in (True, False))
    return {
        "moco": moco, "info_nce": moco.info_nce, "torch": torch, "numpy": np, "np": np, "encoder": encoder,
        "head": head, "loader": views, "model": model,
        "optimizer": torch.optim.SGD(model.query_encoder.parameters(), lr=0.1), "view_a": views[0][0],
        "view_b": views[0][1], "ids": views[0][2], "q": q, "k": k, "queue": model.dictionary,
        "keys": model.dictionary.keys,
        "images": np.random.default_rng(0).integers(0, 256, (16, 32, 32, 3), dtype=np.uint8),
        "labels": np.arange(16) % 2,
    }  # fmt: skip


# Examples with something that a test machine need not have.
NEEDS = {"pandas": "pandas", "pyarrow": "pyarrow", "read_parquet": "pandas", "transformers": "transformers"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_every_example_of_the_page_runs(path, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(moco, "pretrain", tiny_run, raising=False)
    places = words(workplace)
    places["images"] = torch.rand(2, 3, 32, 32) if path.name == "README.md" else places["images"]
    for language, text in blocks(path):
        if language != "python":
            continue
        for word, package in NEEDS.items():
            if word in text:
                places[package] = __import__(package)
        prepare(path, text, workplace)
        if ">>>" in text:
            failed = run_doctest(text, places, path.name)
            assert not failed, failed
        else:
            exec(compile(text, f"{path.name}: {text.splitlines()[0]}", "exec"), places)


def prepare(path: Path, text: str, folder: Path) -> None:
    """The files that an example reads."""
    if "runs/first/export/timm" in text and not (folder / "runs/first/export/timm").exists():
        from moco.interop.exporting import export_run

        # A narrow network is nothing that timm's name says: the example is about the folder, whatever is in it.
        export_run("runs/first", to="safetensors", out="runs/first/export/timm")
    if "photos.parquet" in text:
        from moco.embedding import write_embeddings

        write_embeddings("runs/first", "photos", out="photos.parquet")
    if '"runs/first"' in text and "out=" in text:
        import shutil

        shutil.rmtree(folder / "runs" / "first", ignore_errors=True)


def run_doctest(text: str, places: dict, name: str) -> str:
    """Run `>>>` lines; returns what went wrong, or nothing."""
    test = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    test.globs = places  # one example goes on where the one before it was
    said = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    runner.run(test, out=said.write, clear_globs=False)
    return said.getvalue()


@pytest.mark.parametrize(
    "name", ["MomentumContrast", "info_nce", "pretrain", "embed", "resume", "backbone", "Run", "runs"]
)
def test_the_examples_of_docstrings_run(name, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(moco, "pretrain", tiny_run, raising=False)
    lines = (getattr(moco, name).__doc__ or "").splitlines()
    examples = [line.strip() for line in lines if line.strip().startswith((">>>", "... "))]
    source = "\n".join(line[4:] for line in examples)
    exec(compile(source, name, "exec"), words(workplace))


# ---- error messages


def test_every_error_message_of_the_program_is_on_the_page():
    found = generated.all_messages()
    assert len(found) > 350
    assert {"the file is empty", "none of its pixels is a number", "it is cut off"} <= {one.text for one in found}
    for message in found:
        assert f"``{message.text.strip()}``" in page("troubleshooting.md"), message


def matches(line: str, found: list[Message]) -> bool:
    """Whether a message with fixed words of its own fits, or the line that all settings share."""
    own = [message for message in found if sum(map(len, message.words)) > 5]
    return any(pattern(message).fullmatch(line) for message in own) or bool(re.fullmatch(r"\w+ = .+: .+", line))


def pattern(message: Message) -> re.Pattern:
    text = re.sub(r"‹[^›]*›|…", "\0", message.text)
    return re.compile(".*".join(re.escape(part) for part in text.split("\0")), re.DOTALL)


@pytest.mark.parametrize(
    "command",
    [
        "pretrain nowhere/",
        "pretrain",
        "pretrain . --epochs 0",
        "pretrain . --recipe v9",
        "pretrian .",
        "pretrain . --no-such-flag 1",
        "resume nowhere",
        "eval knn nowhere .",
        "eval nothing nowhere",
        "embed nowhere .",
        "search nowhere cat.jpg --in nothing.parquet",
        "cluster --in nothing.parquet --out .",
        "import nothing.pth --out new",
        "report nowhere",
        "health resnet18",
        "check nowhere",
        "pretrain . --device cuda:99",
        "bench . --seconds 0.1",
        "pretrain . --warmup-epochs 300",
        "pretrain --config nothing.yaml",
    ],
)
def test_what_the_program_really_says_is_on_the_page(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = io.StringIO()
    with redirect_stderr(said):
        status = cli.main(shlex.split(command))
    assert status == 2
    line = said.getvalue().strip().removeprefix("moco: ")
    assert matches(line, generated.all_messages()), line


def test_advice_quotes_messages_that_there_are():
    texts = "\n".join(message.text for message in generated.all_messages())
    for quote in re.findall(r"^- \"([^\"]+)\"", page("troubleshooting.md"), re.MULTILINE):
        for part in filter(None, map(str.strip, quote.split("…"))):
            assert part in texts or part in everything(), f"{part!r} is said nowhere"


def everything() -> str:
    """The source, with strings over several lines put together."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src" / "moco").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_messages_are_read_from_the_source(tmp_path):
    (tmp_path / "room.py").write_text(
        'HINT = "look there"\n'
        "def f(a, why):\n"
        '    if a: raise UserError(f"bad {a}: {HINT}, " + ("twice" if a > 1 else "once") + f" {len(a)}")\n'
        "    raise TrainingError(why)\n"
        'f(1, "it broke")\n'
        "def g(n, box):\n"
        "    raise UserError(f\"{counted(n, 'box', 'boxes')} of {counted(len(box), 'lid')}\")\n"
        'def h(n): raise OSError(5, f"{n:,} bytes are missing", "a.tar") if n else DecodeError(words(n))\n'
    )
    found = {(one.text, one.kind) for one in messages(tmp_path)}
    assert found == {
        ("bad ‹a›: look there, twice …", ""),
        ("bad ‹a›: look there, once …", ""),
        ("it broke", "status 1"),
        ("‹n› boxes of … lids", ""),
        ("‹n› bytes are missing", "reason"),
    }
    (tmp_path / "room.py").write_text("raise UserError(make())\n")
    with pytest.raises(ValueError, match="cannot be read"):
        messages(tmp_path)


# ---- generated parts, links, Sphinx


def test_reference_pages_hold_everything():
    listed = page("settings.md")
    for name, field in PretrainSettings.model_fields.items():
        assert name == "data" or f"| `--{name.replace('_', '-')}` |" in listed
        assert generated._cell(field.description) in listed or name == "data"
    listed = page("commands.md")
    for verb, parser in generated.verbs().items():
        assert f"\n## {verb}\n" in listed
        for action in parser._actions:
            own = action.dest not in PretrainSettings.model_fields or verb.startswith(("moco eval", "moco embed"))
            assert not own or all(
                f"`{flag}`" in listed for flag in action.option_strings if flag not in ("-h", "--help")
            )
    listed = page("api.md")
    assert all(f":: moco.{name}\n" in listed for name in moco.__all__ if not name.startswith("_"))


def test_docstrings_become_restructured_text():
    markdown = ["Text with `code` and name_ of a | b.", "| a | b |", "|---|---|", "| `x` | |", "", ">>> f(`1`)"]
    assert docstrings.to_rst(markdown) == [
        "Text with ``code`` and name\\_ of a \\| b.",
        "",
        ".. list-table::", "   :header-rows: 1", "",
        "   * - a", "     - b", "   * - ``x``", "     - ",
        "",
        ">>> f(`1`)",
    ]  # fmt: skip


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_between_pages_lead_somewhere(path):
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target


def test_pictures_are_drawn_and_small():
    for name in re.findall(r"pictures/(\w+\.svg)", "".join(path.read_text(encoding="utf-8") for path in PAGES)):
        text = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
        assert text.rstrip().endswith("</svg>")
        assert len(text) < 150_000


@pytest.mark.slow
def test_pages_build_without_a_warning_and_their_links_lead_somewhere(tmp_path):
    options = shlex.split("-m sphinx -E -W --keep-going -q -b html -d")
    command = [sys.executable, *options, tmp_path / ".doctrees", ROOT / "docs", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    for name, text in pages.items():
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            if re.match(r"https?:|data:|mailto:|javascript:", target):
                continue
            file, _, anchor = target.split("?")[0].partition("#")
            assert (tmp_path / (file or name)).exists(), (name, target)
            other = pages.get(file or name)
            assert not anchor or other is None or f'id="{anchor}"' in other, (name, target)


def test_the_yaml_of_a_run_is_one_that_config_takes(workplace):
    written = yaml.safe_load((workplace / "runs" / "first" / "settings.yaml").read_text(encoding="utf-8"))
    assert set(written) - {"processes"} <= set(PretrainSettings.model_fields)
