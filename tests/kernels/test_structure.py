"""The code of the kernels as text: every backend has every pass, imports form no circle, tests use public names."""

import ast
import inspect
from pathlib import Path

import pytest

from onebit.kernels.passes import PASSES, Backend
from tests.kernels.cases import ON_BACKENDS, backend

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "kernels").rglob("*.py"))
TESTS = sorted((ROOT / "tests" / "kernels").rglob("*.py"))
OF_OTHERS = {"_fields", "_replace", "_make", "_fused_adamw_"}  # public in spite of the underscore, or torch's


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("onebit", *(part for part in parts if part != "__init__")))


MODULES = {module_of(path): path for path in FILES}


def imported(tree: ast.Module) -> set[str]:
    """The modules of kernels that a file imports, wherever the statement stands."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {member if member in MODULES else node.module for member in members}
    return names & MODULES.keys()


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, one after the other and back; empty if there are none."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(graph[name]):
                if found := search(other, [*path, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in graph if (found := search(name, []))), [])


def test_no_module_imports_one_that_imports_it():
    assert not circle({name: imported(parsed(path)) for name, path in MODULES.items()})


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_function_imports(path):
    functions = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.FunctionDef)]
    inside = [n.lineno for f in functions for n in ast.walk(f) if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert not inside


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_underscored_members_are_used_in_their_own_class_alone(path):
    found = [
        f"line {n.lineno}: {ast.unparse(n)}"
        for n in ast.walk(parsed(path))
        if isinstance(n, ast.Attribute) and n.attr.startswith("_") and not n.attr.startswith("__")
        if not (isinstance(n.value, ast.Name) and n.value.id in ("self", "cls")) and n.attr not in OF_OTHERS
    ]
    assert not found


@ON_BACKENDS
@pytest.mark.parametrize("function", [name for name in PASSES if name != "lamb_update"])
def test_every_backend_has_every_pass_with_its_signature(name, function):
    declared = inspect.signature(getattr(Backend, function))
    parameters = list(declared.parameters.values())[1:]  # without self
    assert inspect.signature(getattr(backend(name), function)) == declared.replace(parameters=parameters)


def test_the_passes_are_the_methods_of_the_protocol():
    assert {name for name in vars(Backend) if inspect.isfunction(getattr(Backend, name)) and name[0] != "_"} == {
        name for name in PASSES if name != "lamb_update"
    }
