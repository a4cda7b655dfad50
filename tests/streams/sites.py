"""Every call of the product that makes something wait, keeps memory or chooses a device: without one of them a run has
a fault."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests.streams.device import ROOT, Site

ORDERING = ("choose_device", "mark", "wait_for", "join", "wait_on_host", "keep")
FOLDERS = ("onebit", "collectives", "kernels")


@dataclass(frozen=True)
class Call:
    site: Site
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.site.path[len(str(ROOT)) + 1 :]} {self.function}: {self.text}"


def calls() -> Iterator[Call]:
    for path in sorted(each for folder in FOLDERS for each in (ROOT / folder).rglob("*.py")):
        if path != ROOT / "kernels/streams.py":
            yield from _calls_in(ast.parse(path.read_text(encoding="utf-8")), str(path), "")


def _calls_in(node: ast.AST, path: str, function: str) -> Iterator[Call]:
    if isinstance(node, ast.FunctionDef):
        function = node.name
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _orders(node, node.func):
        yield Call(Site(path, node.lineno), function, ast.unparse(node))
    for child in ast.iter_child_nodes(node):
        yield from _calls_in(child, path, function)


def _orders(call: ast.Call, function: ast.Attribute) -> bool:
    """Marks for timing order nothing."""
    if isinstance(function.value, ast.Name) and function.value.id == "streams":
        return function.attr in ORDERING and not any(each.arg == "timing" for each in call.keywords)
    return function.attr in ("wait", "join", "mark") and not call.args
