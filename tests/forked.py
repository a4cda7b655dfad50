"""A stand-in for `subprocess`: `python -m MODULE` without its imports, forked from what tests fork their ranks from."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, TimeoutExpired
from typing import Any
from unittest import mock

from tests import reach
from tests.ranks import FORKS, PRELOADED

__all__ = ["DEVNULL", "PIPE", "STDOUT", "Popen", "TimeoutExpired"]
CONTEXT = multiprocessing.get_context("forkserver")
SERVER = {"OMP_NUM_THREADS": "1", **FORKS, "ONEBIT_CACHE_DIR": os.environ["ONEBIT_CACHE_DIR"]}  # as it imports torch
NETWORK = 0x40000000  # CLONE_NEWNET of setns(2)
LOCK = threading.Lock()  # to start a process and to see its end changes what all threads share


class Popen:
    """What the product uses of subprocess's; errors go where the output goes, the session is that of the tests, and
    input is an open pipe. `ip netns exec NAME` may stand before `python -m MODULE`."""

    def __init__(self, command: Sequence[object], env: Mapping[str, str], cwd: str = ".", **_: Any) -> None:
        (its_in, self.stdin), (out, its_out) = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
        self._process = _started([*map(str, command)], dict(env), cwd, (its_in, its_out, its_out))
        its_in.close()
        its_out.close()
        self.pid, self.stdout = self._process.pid or 0, os.fdopen(os.dup(out.fileno()), errors="replace")
        self.terminate = self._process.terminate

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _started(command: list[str], env: dict[str, str], cwd: str, ends: Sequence[Any]) -> Any:
    CONTEXT.set_forkserver_preload(list(PRELOADED))
    with LOCK, mock.patch.dict(os.environ, SERVER):
        process = CONTEXT.Process(target=_run, args=(command, env, cwd, ends), daemon=True)
        process.start()
    return process


def _run(command: list[str], env: dict[str, str], cwd: str, ends: Sequence[Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if command[:3] == ["ip", "netns", "exec"]:
        with open(f"/run/netns/{command[3]}") as host:
            if ctypes.CDLL(None, use_errno=True).setns(host.fileno(), NETWORK):
                raise OSError(ctypes.get_errno(), f"no way to {command[3]}")
        command = command[4:]
    for descriptor, end in enumerate(ends):
        os.dup2(end.fileno(), descriptor)
    for end in set(ends):
        end.close()
    sys.stdin = os.fdopen(0)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
    os.chdir(cwd)
    os.environ.clear()
    os.environ |= env
    _, option, *sys.argv = command
    if option != "-m":
        raise ValueError(f"only python -m MODULE is forked, not {command}")
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with reach.recording(reach.this_test()):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


CLIENT = """#!{python} -SI
import json, os, signal, socket, sys
if sys.argv[1:2] != ["-m"] or "pytest" in sys.argv:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"!"], [0, 1, 2])
    server.sendall(json.dumps([sys.argv, dict(os.environ), os.getcwd()]).encode() + b"\\n")
    status = int(server.recv(99))
os.kill(os.getpid(), -status) if status < 0 else sys.exit(status)
"""


@contextlib.contextmanager
def python() -> Iterator[Path]:
    """A program that stands in for Python where another starts it, for `-m MODULE` but pytest. Its signals end the
    module by SIGKILL."""
    with tempfile.TemporaryDirectory(prefix="forked-") as folder, socket.socket(socket.AF_UNIX) as server:
        program, address = Path(folder) / "python", f"{folder}/forks"  # short: an address has 107 bytes at most
        program.write_text(CLIENT.format(python=sys.executable, address=address))
        program.chmod(0o755)
        server.bind(address)
        server.listen(99)
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        try:
            yield program
        finally:
            server.shutdown(socket.SHUT_RDWR)


def _serve(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # at the end
        while True:
            threading.Thread(target=_see_to, args=(server.accept()[0],), daemon=True).start()


def _see_to(client: socket.socket) -> None:
    with client:
        _, descriptors, *_ = socket.recv_fds(client, 1, 3)
        with client.makefile() as text:
            command, env, cwd = json.loads(text.readline())
        process = _started(command, env, cwd, [Connection(each) for each in descriptors])
        while not wait([client, process.sentinel], 60):
            pass
        with LOCK:
            if process.exitcode is None:  # the client has gone
                process.kill()
            process.join()
        client.sendall(str(process.exitcode).encode())
