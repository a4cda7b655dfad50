"""A copy of the repository in which mutants live, and pytest in it, forked from a process that has imported torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NoReturn

FOLDERS = ("kernels", "collectives", "onebit", "perf", "tests", "examples", "docs")
IMPORTED = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "numba",
    "triton",
    "hypothesis",
    "pytest",
    "_pytest.pytester",
)


class Tree:
    """Its package is whole, with links to the folders that install into it, and comes first on the path."""

    def __init__(self, source: Path, root: Path) -> None:
        self.root = root
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for path in source.iterdir():
            if path.name in FOLDERS:
                shutil.copytree(path, root / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif path.is_file():
                shutil.copy(path, root / path.name)
        for name in ("kernels", "collectives"):
            (root / "onebit" / name).symlink_to(root / name)

    def pytest(self, options: Sequence[str], seconds: float, output: Path, **environment: str) -> int | None:
        """Its exit status; None where it did not end in time."""
        import_all()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._be_pytest(options, output, environment)
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _end(pid)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        _end(pid)
        os.waitpid(pid, 0)
        return None

    def _be_pytest(self, options: Sequence[str], output: Path, environment: dict[str, str]) -> NoReturn:
        status = 70
        try:
            os.setsid()
            os.chdir(self.root)
            with output.open("w") as out, open(os.devnull) as nothing:
                for descriptor, to in ((0, nothing), (1, out), (2, out)):
                    os.dup2(to.fileno(), descriptor)
            own = str(self.root)
            path = [own, *environment.pop("PYTHONPATH", "").split()]
            os.environ |= {
                "PYTHONPATH": os.pathsep.join(path),
                "ONEBIT_CACHE_DIR": str(self.root / "cache"),
                **environment,
            }
            for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "onebit")]:
                del sys.modules[name]
            sys.path[:] = [own] + [each for each in sys.path if each not in ("", os.getcwd())]
            sys.modules["__main__"] = ModuleType("__main__")  # ranks import what started them
            sys.dont_write_bytecode = True
            import pytest

            status = int(pytest.main(["-q", "-p", "no:cacheprovider", *options]))
            sys.stdout.flush()
        finally:
            os._exit(status)


def import_all() -> None:
    """What takes seconds, once, before any fork."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for name in IMPORTED:
        import_module(name)
    import_module("torch").set_num_threads(1)


def _end(leader: int) -> None:
    """All that is left of a session."""
    for _ in range(2):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        time.sleep(0.02)
