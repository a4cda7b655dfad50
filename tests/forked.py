"""In place of `subprocess`: `python -m MODULE` without its imports, forked from what tests fork their ranks from."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from subprocess import DEVNULL, PIPE, STDOUT, TimeoutExpired
from typing import Any
from unittest import mock

from tests import reach
from tests.ranks import FORKS, PRELOADED

__all__ = ["DEVNULL", "PIPE", "STDOUT", "Popen", "TimeoutExpired"]
NETWORK = 0x40000000  # CLONE_NEWNET of setns(2)


class Popen:
    """What the product uses of subprocess's; errors go where the output goes. `ip netns exec NAME` may stand before."""

    def __init__(self, command: Sequence[object], env: Mapping[str, str], **_: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        (its_in, self._in), (self._out, its_out) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        task = ([*map(str, command)], dict(env), its_in, its_out)
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", **FORKS}):  # read when the server imports torch
            self._process = context.Process(target=_run, args=task, daemon=True)
            self._process.start()
        its_in.close()
        its_out.close()
        self.pid = self._process.pid or 0
        self.stdin, self.stdout = self._in, os.fdopen(os.dup(self._out.fileno()), errors="replace")
        self.kill, self.terminate = self._process.kill, self._process.terminate

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


def _run(command: list[str], env: dict[str, str], its_in: Connection, its_out: Connection) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if command[:3] == ["ip", "netns", "exec"]:
        with open(f"/run/netns/{command[3]}") as host:
            if ctypes.CDLL(None, use_errno=True).setns(host.fileno(), NETWORK):
                raise OSError(ctypes.get_errno(), f"no way to {command[3]}")
        command = command[4:]
    for descriptor, end in enumerate((its_in, its_out, its_out)):
        os.dup2(end.fileno(), descriptor)
    sys.stdin = os.fdopen(0)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
    its_in.close()
    its_out.close()
    os.environ.clear()
    os.environ |= env
    _, _, *sys.argv = command
    with reach.recording(reach.this_test()):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
