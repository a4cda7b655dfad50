"""The shape of the house: no import circles, and nothing outside a class touches its underscored members."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"onebit": "onebit", "kernels": "onebit.kernels", "collectives": "onebit.collectives", "perf": "perf"}
INTERNALS = ROOT / "tests" / "internals.py"  # the one place where tests reach into classes
# Underscored names that are no class's of ours: NamedTuple's methods, and what torch and numba have no other name for.
OF_OTHERS = {
    "_fields", "_make", "_replace", "_asdict", "_version", "_get_backend", "_cache", "_reduce", "_per_optimizer_states",
    "_join_config", "_comm_hooks", "_ddp",
}  # fmt: skip


def module_name(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in (FOLDERS[folder], *rest) if part != "__init__")


def sources() -> dict[str, ast.Module]:
    """Every module of the package and of perf, by name."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def imported(tree: ast.Module, modules: set[str]) -> set[str]:
    """Modules of ours that a source imports anywhere: in functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else node.module)
    return found & modules


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Some modules that import each other in a circle, if there are any."""
    state: dict[str, int] = {}
    path: list[str] = []

    def visit(name: str) -> list[str]:
        state[name] = 1
        path.append(name)
        for other in sorted(graph[name]):
            if state.get(other) == 1:
                return [*path[path.index(other) :], other]
            if other not in state and (found := visit(other)):
                return found
        state[name] = 2
        path.pop()
        return []

    for name in sorted(graph):
        if name not in state and (found := visit(name)):
            return found
    return []


def test_no_module_imports_one_that_imports_it() -> None:
    found = sources()
    graph = {name: imported(tree, set(found)) - {name} for name, tree in found.items()}
    assert len(graph) > 80
    assert not circle(graph), " -> ".join(circle(graph))


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    tree = ast.parse("def f():\n    from onebit.optim import adam\nif TYPE_CHECKING:\n    import onebit.cli.main\n")
    modules = {"onebit", "onebit.optim", "onebit.optim.adam", "onebit.cli.main"}
    assert imported(tree, modules) == {"onebit.optim.adam", "onebit.cli.main"}


def touched(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every underscored member that is reached from outside its class, and of every underscored name
    that is imported from a module of ours."""
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            foreign |= names - {"onebit", "perf", "tests"}
        elif isinstance(node, ast.ImportFrom) and node.module:
            ours = node.module.split(".")[0] in ("onebit", "perf", "tests")
            if ours:
                yield from ((node.lineno, a.name) for a in node.names if is_private(a.name))
            else:
                foreign |= {alias.asname or alias.name for alias in node.names}
    yield from _touched_in(tree, foreign, set())


def _touched_in(node: ast.AST, foreign: set[str], own: set[str]) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.ClassDef):
        own = own | members(node)
    if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OF_OTHERS | own:
        base: ast.expr = node.value
        while isinstance(base, (ast.Attribute, ast.Call)):
            base = base.value if isinstance(base, ast.Attribute) else base.func
        name = base.id if isinstance(base, ast.Name) else ""
        if not (isinstance(node.value, ast.Name) and name in ("self", "cls")) and name not in foreign:
            yield node.lineno, node.attr
    for child in ast.iter_child_nodes(node):
        yield from _touched_in(child, foreign, own)


def members(node: ast.ClassDef) -> set[str]:
    """What a class defines or assigns on itself."""
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id in ("self", "cls"):
            found.add(child.attr)
        elif isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            found.add(child.name)
        elif isinstance(child, (ast.Assign, ast.AnnAssign)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


EVERY = sorted(path for folder in (*FOLDERS, "tests", "examples") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", EVERY, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_outside_a_class_touches_its_underscored_members(path: Path) -> None:
    if path != INTERNALS:
        found = list(touched(ast.parse(path.read_text(encoding="utf-8"))))
        assert not found, "\n".join(f"{path.relative_to(ROOT)}:{line} {name}" for line, name in found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("optimizer._states", ["_states"]),
        ("f(x)._states", ["_states"]),
        ("from onebit.optim.lamb import _debiased", ["_debiased"]),
        ("import onebit\nfrom onebit import optim\nx = optim.adam._nonzero", ["_nonzero"]),
        ("class A:\n    def f(self):\n        return self._x, other._y", ["_y"]),
        ("class A:\n    def f(self, other):\n        self._x = other._x", []),
        ("import torch\ntorch._foreach_add_(a, b)", []),
        ("hyper._replace(lr=1)", []),
        ("x.__dict__", []),
    ],
)
def test_a_reach_into_a_class_is_found(source: str, expected: list[str]) -> None:
    assert [name for _, name in touched(ast.parse(source))] == expected


def test_every_package_is_listed_and_installs() -> None:
    """pyproject.toml names each folder with an __init__.py, and each can be found under its name."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    names = {
        module_name(path) for folder in FOLDERS if folder != "perf" for path in (ROOT / folder).rglob("__init__.py")
    }
    for name in names:
        assert f'"{name}",' in text, f"{name} is not among pyproject.toml's packages"
        assert importlib.util.find_spec(name) is not None
