"""Every backend has every pass, with one signature; no function of the kernels imports."""

import ast
import inspect
from pathlib import Path

import pytest

from onebit.kernels.passes import PASSES, Backend
from tests.kernels.cases import ON_BACKENDS, backend

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "kernels").rglob("*.py"))
METHODS = [*(name for name in PASSES if name != "lamb_update"), "restore"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_function_imports(path):
    functions = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.FunctionDef)]
    assert not [n.lineno for f in functions for n in ast.walk(f) if isinstance(n, (ast.Import, ast.ImportFrom))]


@ON_BACKENDS
@pytest.mark.parametrize("function", METHODS)
def test_every_backend_has_every_pass_with_its_signature(name, function):
    declared = inspect.signature(getattr(Backend, function))
    parameters = list(declared.parameters.values())[1:]  # without self
    assert inspect.signature(getattr(backend(name), function)) == declared.replace(parameters=parameters)


def test_the_passes_are_the_methods_of_the_protocol():
    found = {name for name in vars(Backend) if inspect.isfunction(getattr(Backend, name)) and name[0] != "_"}
    assert found == set(METHODS)
