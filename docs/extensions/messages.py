"""Every error message of the program, read from its source: what troubleshooting.md is made of, and its test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

KINDS = {
    "UserError": "",
    "NoImages": "",
    "ValueError": "Python",
    "TrainingError": "status 1",
    "Interrupted": "status 130",
}
# Why a picture is passed over: which argument says it. What another library says there is not known before.
REASONS = {"DecodeError": 0, "DamagedTar": 0, "_Unusable": 0, "OSError": 1}
# Functions that put a message together, or warn: every sentence in them counts.
SPEAKERS = {
    "train/alarms.py": ("_collapse", "_saturation", "_idle"),
    "train/heartbeat.py": ("_missing", "_reasons", "_words"),
    "data/bad_files.py": ("_message",),
}
SENTENCE = 3  # words that a string must have to be a sentence
GAP = "…"


@dataclass(frozen=True)
class Message:
    """A message with ‹name› or … for what is filled in. module: path of its file under src/moco."""

    text: str
    kind: str
    module: str
    line: int

    @property
    def words(self) -> list[str]:
        """The fixed parts."""
        parts = self.text.replace("‹", GAP).replace("›", GAP).split(GAP)
        fixed = parts if "‹" not in self.text else _outside(self.text)
        return [part.strip() for part in fixed if part.strip()]


def _outside(text: str) -> list[str]:
    kept, inside = [""], False
    for character in text:
        if character in "‹›" + GAP:
            inside = character == "‹" or (inside and character == GAP)
            kept.append("")
        elif not inside:
            kept[-1] += character
    return kept


def messages(source: Path) -> list[Message]:
    """The messages of all files under `source`, in the order of files and lines, each text once per file.

    Raises ValueError for a message that cannot be read from the source: write it another way, or add its maker to
    SPEAKERS.
    """
    found: dict[tuple[str, str], Message] = {}
    for path in sorted(source.rglob("*.py")):
        module = path.relative_to(source).as_posix()
        for message in _File(ast.parse(path.read_text(encoding="utf-8")), module, source).messages():
            found.setdefault((module, message.text), message)
    return list(found.values())


class _File:
    def __init__(self, tree: ast.Module, module: str, source: Path) -> None:
        self.tree, self.module, self.source = tree, module, source

    def messages(self) -> Iterator[Message]:
        for function in [self.tree, *(n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef))]:
            if getattr(function, "name", None) in SPEAKERS.get(self.module, ()):
                for text in self._sentences(function):
                    yield Message(
                        text, "warning" if "alarms" in self.module else "status 1", self.module, function.lineno
                    )
            for call in _own(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                    yield from self._said_by(call, call.func.id, function)

    def _said_by(self, call: ast.Call, name: str, function: ast.AST) -> Iterator[Message]:
        place = REASONS.get(name, 0)
        if (name not in KINDS and name not in REASONS) or len(call.args) <= place:
            return
        try:
            texts = self._texts(call.args[place], function)
        except ValueError:
            if name in KINDS:
                raise
            return
        for text in texts:
            if text != GAP or name in KINDS:
                yield Message(text, KINDS.get(name, "reason"), self.module, call.lineno)

    def _sentences(self, function: ast.AST) -> Iterator[str]:
        inner = {id(part) for node in ast.walk(function) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        docstring = ast.get_docstring(function, clean=False) if isinstance(function, ast.FunctionDef) else None
        for node in ast.walk(function):
            whole = isinstance(node, ast.JoinedStr)
            part = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner
            if whole or part:
                text = "".join(self._texts(node, function))
                if len(text.split()) >= SENTENCE and text != docstring:
                    yield text

    def _texts(self, node: ast.AST, function: ast.AST) -> list[str]:
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.Constant(value=None):
                return []
            case ast.Constant(value=int() | float() as number):
                return [str(number)]
            case ast.JoinedStr(values=parts):
                return ["".join(self._part(part) for part in parts)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                ends = [text for text in self._texts(right, function) if text] or [""]
                return [start + end for start in self._texts(left, function) for end in ends]
            case ast.IfExp(body=body, orelse=other):
                return self._texts(body, function) + self._texts(other, function)
            case ast.Subscript(value=value):
                return self._texts(value, function)
            case ast.Name(id=name):
                return self._named(name, function)
            case ast.Call(func=ast.Name(id="explain")):
                return ["‹setting› = ‹value›: ‹what is allowed›"]
            case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id=name)]) if "error" in name:
                return [GAP]
            case ast.Call(func=ast.Attribute(attr=name)) if name in SPEAKERS.get(self.module, ()):
                return []
        raise ValueError(
            f"{self.module}:{getattr(node, 'lineno', '?')}: a message that cannot be read: {ast.unparse(node)}"
        )

    def _part(self, part: ast.AST) -> str:
        match part:
            case ast.Constant(value=text):
                return str(text)
            case ast.FormattedValue(value=ast.Name(id=name)) if name.isupper():
                return self._constant(name)
            case ast.FormattedValue(value=ast.Call(func=ast.Name(id="counted"), args=[number, *nouns])):
                *_, noun = [f"{ast.literal_eval(nouns[0])}s", *map(ast.literal_eval, nouns[1:])]
                return f"{self._part(ast.FormattedValue(value=number))} {noun}"
            case ast.FormattedValue(value=ast.Name(id=name) | ast.Attribute(attr=name)):
                return f"‹{name.strip('_').replace('_', ' ')}›"
        return GAP

    def _constant(self, name: str) -> str:
        try:
            return self._named(name, self.tree)[0]
        except ValueError:  # not a plain one: a tuple, or computed
            return f"‹{name.lower().replace('_', ' ')}›"

    def _named(self, name: str, function: ast.AST) -> list[str]:
        """What a name may hold: an assignment in the function, a constant, or what the function is called with."""
        for place in (function, self.tree, *_files(self.source)):
            values = [
                node.value
                for node in (ast.walk(place) if place is function else ast.iter_child_nodes(place))
                if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
            ]
            if values:
                return [text for value in values for text in self._texts(value, function)]
        if isinstance(function, ast.FunctionDef) and name in (names := [one.arg for one in function.args.args]):
            place = names.index(name)
            calls = [n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and _name(n.func) == function.name]
            given = [call.args[place] for call in calls if len(call.args) > place]
            given += [word.value for call in calls for word in call.keywords if word.arg == name]
            return [text for value in given for text in self._texts(value, self.tree)]
        raise ValueError(f"{self.module}:{getattr(function, 'lineno', 1)}: nothing is known of {name}")


@cache
def _files(source: Path) -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(source.rglob("*.py"))]


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from _own(child)


def _name(function: ast.AST) -> str:
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )
