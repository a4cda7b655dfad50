"""Compiling the loops: on first use, kept in the cache folder, and with rounding as written.

A file holds the machine code of one loop, after its checksum. Its name has a digest of all that the code depends on:
these modules, the versions, the processor. A file that is missing, damaged or from elsewhere is compiled anew; where
none can be written, every process compiles for itself, and so does one whose modules are no longer those on disk. Of
the processes that want a loop at once, as ranks do that start together, one compiles it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import os
import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import llvmlite
import numba
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.registry import CPUDispatcher

from onebit.kernels.log import tell, to_log
from onebit.kernels.tuning import cache

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

PATIENCE = 60.0  # seconds that a process waits for one that compiles
_OPTIONS: Any = {"nogil": True, "error_model": "numpy", "fastmath": False}


def tile(function: Callable[..., Any]) -> Any:
    """A function on one block's values: part of every loop that calls it."""
    return numba.njit(function, forceinline=True, **_OPTIONS)


def routine(function: Callable[..., Any]) -> Any:
    """A function that loops call."""
    return numba.njit(function, **_OPTIONS)


class Loop:
    """A function that runs over blocks, compiled when it is first called. A parameter is an int unless it is annotated:
    as a float, or as a tuple of ints with names."""

    def __init__(self, function: Callable[..., None]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        known = get_type_hints(function)
        self.parameters = {name: known.get(name, int) for name in inspect.signature(function).parameters}
        self._run: Callable[..., None] | None = None

    def __call__(self, *arguments: Any) -> None:
        (self._run or self._compiled())(*arguments)

    def _compiled(self) -> Callable[..., None]:
        with _lock:
            if self._run is None:
                dispatcher = _Dispatcher(self._function, targetoptions={"nopython": True, **_OPTIONS})
                dispatcher.enable_caching()
                signature = numba.types.void(*map(_type, self.parameters.values()))
                with dispatcher.only_process():
                    dispatcher.compile(signature)
                self._run = dispatcher.get_overload(signature)  # which spares a call the look at its arguments' types
        return self._run


class _Dispatcher(CPUDispatcher):
    """Numba's, with files of ours."""

    def enable_caching(self) -> None:
        module = self.py_func.__module__.rpartition(".")[2]  # another may have a loop of the same name
        self._cache = _Files(f"{module}{self.py_func.__name__}")

    @contextlib.contextmanager
    def only_process(self) -> Iterator[None]:
        """Nobody else compiles a loop meanwhile; where another process has begun, this one first waits for its file."""
        with contextlib.ExitStack() as held:
            compiles = True
            with contextlib.suppress(Exception):  # no lock is no harm
                context: Any = self.targetctx
                path = self._cache.path(context.codegen())
                if not path.exists():
                    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                    _wait_for(held.enter_context(path.parent.with_suffix(".lock").open("ab")).fileno(), path)
                compiles = not path.exists()
            if compiles:
                tell_once()
            yield


class _Files(NullCache):
    """Files of loops' machine code: numba looks for it there and leaves it there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            path = self.path(target_context.codegen())
            if path.exists() and not (of_this_user(path.parent) and of_this_user(path)):
                raise PermissionError("it is another user's, or others can write to it or to its folder")
            content = path.read_bytes()
            digest, code = content[:32], content[32:]
            if hashlib.sha256(code).digest() != digest:
                raise ValueError("its checksum is wrong")
            target_context.refresh()
            return CompileResult._rebuild(target_context, *pickle.loads(code))
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a damaged file or another numba makes of it
            to_log(logging.DEBUG, "Compiling %s: what the cache has is of no use (%s)", self._name, error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            code = numba.core.serialize.dumps(CompileResult._reduce(data))
            path = self.path(data.codegen)
            cache.replace_file(path, hashlib.sha256(code).digest() + code)
        except Exception as error:
            to_log(logging.DEBUG, "Compiling %s: the code is not kept (%s)", self._name, error)

    def path(self, codegen: Any) -> Path:
        if version() != IMPORTED:
            raise RuntimeError("onebit was changed after this process had imported it")
        digest = hashlib.sha256(repr((IMPORTED, codegen.magic_tuple())).encode()).hexdigest()
        return cache.folder() / "loops" / f"{self._name}-{digest[:32]}.bin"


def _wait_for(lock: int, path: Path) -> None:
    """Wait until the lock is this process's, or the file is there."""
    end = time.monotonic() + PATIENCE
    while not path.exists() and time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return


@functools.cache
def tell_once() -> None:
    kept = f"Kept in {cache.folder()}" if _can_write(cache.folder()) else f"Not kept: {cache.folder()} is read-only"
    tell("Compiling for this processor what steps run, in about a minute. %s", kept)


def _can_write(folder: Path) -> bool:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return os.access(there, os.W_OK | os.X_OK)


def of_this_user(path: Path) -> bool:
    """Return whether nobody else can write to a file or folder: machine code of others is not run."""
    if os.name != "posix":
        return True
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _type(kind: Any) -> Any:
    """An int is 64 bits wide, a float is a double."""
    if kind in (int, float):
        return numba.types.int64 if kind is int else numba.types.float64
    return numba.types.NamedUniTuple(numba.types.int64, len(kind._fields), kind)


def version() -> str:
    """What the machine code depends on besides the processor."""
    digest = hashlib.sha256(repr((numba.__version__, llvmlite.__version__, platform.python_version())).encode())
    for folder in (Path(__file__).parent, Path(cache.__file__).parent.parent / "data"):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


IMPORTED = version()  # what this process runs


_lock = threading.RLock()


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)  # a thread that the child has not may have held the old one
