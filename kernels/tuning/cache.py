"""A JSON file of measured kernel shapes in the user's cache folder, shared by all of the user's processes.

    {"onebit": 1, "choices": {"<device>, <kernel>, <dtype>, <versions>": {"blocks_per_program": 1, "warps": 4}, ...}}

If the file cannot be read or written, or is another program's, one warning is logged and defaults are used.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onebit.kernels.log import to_log

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SCHEMA = 1
_LOCK_SECONDS = 2.0


def folder() -> Path:
    """$ONEBIT_CACHE_DIR, or `onebit` in the folder where this system keeps caches."""
    if chosen := os.environ.get("ONEBIT_CACHE_DIR"):
        return Path(chosen)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg, "onebit")
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local, "onebit", "cache")
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir(), "onebit")
    return home / "Library" / "Caches" / "onebit" if sys.platform == "darwin" else home / ".cache" / "onebit"


def shared() -> Cache:
    """The cache of this user's processes."""
    return _at(folder() / "kernels.json")


def forget() -> None:
    """Read the file again when it is next used."""
    _at.cache_clear()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step, so that no reader ever sees half of it."""
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


class Cache:
    """The choices in the file at `path`, read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._choices: dict[str, dict[str, int]] | None = None
        self._warned = False

    def get(self, key: str) -> Mapping[str, int]:
        """The choice made for `key`, empty if there is none."""
        if self._choices is None:
            self._choices = self._read()
        return self._choices.get(key, {})

    def put(self, key: str, choice: Mapping[str, int]) -> bool:
        """Write a choice, keeping those that other processes wrote meanwhile; True if it is in the file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                choices = {**self._read(), key: dict(choice)}
                text = json.dumps({"onebit": SCHEMA, "choices": choices}, indent=1, sort_keys=True) + "\n"
                replace_file(self.path, text.encode())
        except OSError as error:
            self._warn("cannot be written", error, "Choices last as long as this process")
            self._choices = {**(self._choices or {}), key: dict(choice)}
            return False
        self._choices = choices
        return True

    def _read(self) -> dict[str, dict[str, int]]:
        try:
            return _parsed(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._warn("is ignored", error, "Defaults are used until `onebit tune` or a first use rewrites it")
            return {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other writers out for as long as a write takes. Without a lock the file stays whole, but an entry
        of a rank that writes at the same moment may be lost; it is then measured again.
        """
        with open(self.path.with_suffix(".lock"), "a", encoding="utf-8") as file:
            stop = time.monotonic() + _LOCK_SECONDS
            while not _try_lock(file.fileno()) and time.monotonic() < stop:
                time.sleep(0.01)
            yield

    def _warn(self, what: str, error: Exception, so: str) -> None:
        if not self._warned:
            self._warned = True
            to_log(
                logging.WARNING,
                "The kernel cache %s %s: %s. %s; set ONEBIT_CACHE_DIR to keep the cache elsewhere.",
                self.path, what, error, so,
            )  # fmt: skip


def _try_lock(handle: int) -> bool:
    """False while another process holds the lock; True where the system or the file system has none."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _parsed(content: Any) -> dict[str, dict[str, int]]:
    if not isinstance(content, dict) or content.get("onebit") != SCHEMA:
        raise ValueError(f"it is not a kernel cache of schema {SCHEMA}")
    choices = content.get("choices")
    if not isinstance(choices, dict):
        raise ValueError("it holds no table of choices")
    return {key: value for key, value in choices.items() if isinstance(value, dict)}


@functools.cache
def _at(path: Path) -> Cache:
    return Cache(path)
