"""Which functions of the product every test reaches, in all processes that the test starts.

    ONEBIT_REACH=FOLDER python -m pytest ...     each process writes a file of its own there
    read(FOLDER)                                 the functions that each test reached

A function is (path in the repository, name, first line). The interpreter tells of each call; what a test only imports,
and what Numba or Triton compile, is not seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

FOLDER = "ONEBIT_REACH"
ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("kernels", "collectives", "onebit", "perf")
Function = tuple[str, str, int]

_reached: set[CodeType] = set()


def _note(frame: FrameType, event: str, arg: object) -> None:
    _reached.add(frame.f_code)


@contextlib.contextmanager
def recording(test: str | None) -> Iterator[None]:
    """Write down what this process reaches within, for `test`, a test or a file of tests whose fixture is set up.
    Without ONEBIT_REACH nothing is done."""
    folder = os.environ.get(FOLDER)
    if not folder or not test:
        yield
        return
    outer = sys.gettrace() is _note and set(_reached)
    _reached.clear()
    threading.settrace(_note)
    sys.settrace(_note)
    try:
        yield
    finally:
        found = sorted({function for code in list(_reached) if (function := _of_product(code))})
        with Path(folder, f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps([test, found]) + "\n")
        if outer is False:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
        else:
            _reached.update(outer)


_paths: dict[str, str | None] = {}


def _of_product(code: CodeType) -> Function | None:
    name = code.co_filename
    if name not in _paths:
        path = Path(os.path.realpath(name))
        inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT
        _paths[name] = path.relative_to(ROOT).as_posix() if inside else None
    path = _paths[name]
    return None if path is None or code.co_name == "<module>" else (path, code.co_name, code.co_firstlineno)


def this_test() -> str | None:
    """The test that runs now, in this process or in the one that started this one."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0] or None


def read(folder: Path) -> tuple[dict[str, set[Function]], set[str]]:
    """What each test reached, and which ones had other processes."""
    reached: dict[str, set[Function]] = defaultdict(set)
    processes: dict[str, set[str]] = defaultdict(set)
    for path in folder.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            test, functions = json.loads(line)
            reached[test] |= {(path, name, line) for path, name, line in functions}
            processes[test].add(path.name)
    return dict(reached), {test for test, files in processes.items() if len(files) > 1}
