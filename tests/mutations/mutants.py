"""Small faults, put into the product's code one at a time.

A mutant is another text for one node of a source: an operator, a constant, a branch, a call left out (a collective, a
barrier, a check), a keyword left out (a mask, an asynchronous flag). Which ones are taken follows from the seed and
their own text alone, so that a change elsewhere in the code leaves most of a sample as it was.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = (
    "kernels/cpu", "kernels/gpu", "kernels/data", "kernels", "collectives", "onebit/optim", "onebit/checkpoint",
    "onebit/parallel", "onebit/cli", "onebit",
)  # fmt: skip
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPARED |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.BitAnd: "|"}
SAID = ("info", "debug", "warning", "warn", "print", "record_function", "super", "append_text")


@dataclass(frozen=True)
class Mutant:
    path: str  # in the repository
    function: str
    line: int
    start: int  # bytes of the source that `text` replaces
    stop: int
    old: str
    text: str
    number: int = 0  # of those in this function that replace the same by the same

    @property
    def change(self) -> str:
        return f"{self.function}: {self.old!r} -> {self.text!r}"

    @property
    def id(self) -> str:
        return f"{self.path}:{self.change} #{self.number}"

    @property
    def folder(self) -> str:
        return next(folder for folder in FOLDERS if self.path.startswith(folder + "/"))

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.stop :]


def mutants_of(root: Path, path: str) -> list[Mutant]:
    source = (root / path).read_bytes()
    found, seen = [], Counter[tuple[str, str, str]]()
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for function, node, text in _faults(ast.parse(source), "<module>"):
        first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        old = source[first:last].decode()
        key = (function, old, text := text.replace("{}", old))
        found.append(Mutant(path, function, node.lineno, first, last, old, text, seen[key]))
        seen[key] += 1
    return found


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    """`count` mutants, from each folder by how many there are, in an order that is not that of folders."""
    by_folder: dict[str, list[Mutant]] = {folder: [] for folder in FOLDERS}
    for top in ("kernels", "collectives", "onebit"):
        for file in sorted((root / top).rglob("*.py")):
            for mutant in mutants_of(root, file.relative_to(root).as_posix()):
                by_folder[mutant.folder].append(mutant)
    total = sum(map(len, by_folder.values()))
    chosen = []
    for found in by_folder.values():
        chosen += sorted(found, key=lambda each: _drawn(each, seed))[: round(count * len(found) / total)]
    return sorted(chosen, key=lambda each: _drawn(each, seed))


def _drawn(mutant: Mutant, seed: int) -> bytes:
    return hashlib.sha256(f"{seed} {mutant.id}".encode()).digest()


def _faults(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """(the function it is in, a node, the text to put in its place: {} stands for its own)."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = node.name if function == "<module>" else f"{function}.{node.name}"
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_said(child):
                continue
            yield from ((function, place, text) for place, text in _of(child))
            yield from _faults(child, function)


def _is_said(node: ast.AST) -> bool:
    """Texts, errors, imports, checks for type checkers: another text is no fault."""
    if isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Assert)):
        return True
    if isinstance(node, ast.keyword) and node.arg in ("strict", "help", "description"):
        return True
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return True
    if isinstance(node, ast.Expr):
        call = node.value
        return isinstance(call, ast.Constant) or (isinstance(call, ast.Call) and _called(call) in SAID)
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _of(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARED:
            yield node, f"({ast.unparse(left)} {COMPARED[type(op)]} {ast.unparse(right)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED and not isinstance(left, ast.JoinedStr):
            yield node, f"({ast.unparse(left)} {COMPUTED[type(op)]} {ast.unparse(right)})"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield node, "(" + word.join(f"({ast.unparse(value)})" for value in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
        case ast.Constant(value=float(value)):
            yield node, f"{2 * value + (value == 0)!r}".replace("True", "1.0")
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield test, "(({}) and False)"
            if not isinstance(node, ast.While):
                yield test, "(({}) or True)"
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield node, "pass"
        case ast.AugAssign():
            yield node, "pass"
        case ast.Call(keywords=[*keywords]) if any(keyword.arg in ("mask", "async_op") for keyword in keywords):
            rest = [keyword for keyword in keywords if keyword.arg not in ("mask", "other", "async_op")]
            yield node, ast.unparse(ast.Call(node.func, node.args, rest))
