"""The demo's processes, a rank each on this machine; none outlives the demo."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict
from types import FrameType
from typing import Any

from onebit.cli.arguments import CommandError
from onebit.cli.demo.train import Settings
from onebit.collectives.store import tcp_store
from onebit.kernels.log import QUIET

MODULE = "onebit.cli.demo.train"  # of a rank
TAIL_LINES = 50


class DemoError(CommandError):
    """Why there is no result."""

    code = 1


class Process:
    """Python that runs a module; its lines go to a queue, its errors are kept."""

    def __init__(self, name: str, module: list[str], env: Mapping[str, str], lines: queue.Queue[str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.running = subprocess.Popen(
            [sys.executable, "-m", *module],
            # with more threads, ranks that share cores are 50 times slower
            env={**os.environ, **env, "OMP_NUM_THREADS": "1", QUIET: "1"},
            stdin=subprocess.PIPE,  # a rank ends when it closes
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the demo alone
        )
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._reader.start()

    def _read(self, lines: queue.Queue[str]) -> None:
        for line in self.running.stdout or ():
            lines.put(line.rstrip("\n"))

    def report(self) -> str:
        """How it ended, and the last lines of its errors."""
        code = self.running.returncode
        self._errors.seek(0)
        last = [line.rstrip() for line in self._errors][-TAIL_LINES:]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with status {code}"
        return "\n    ".join([f"{self.name} {how}" + ("; its last lines:" if last else ""), *last])

    def drain(self) -> None:
        """Wait, once it has ended, until its last line is in the queue."""
        self._reader.join(5)

    def end(self, deadline: float) -> None:
        """Wait until `deadline`, then kill."""
        try:
            self.running.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.running.kill()
            self.running.wait()
        self.drain()
        for stream in (self.running.stdin, self.running.stdout, self._errors):
            if stream is not None:
                stream.close()


def lines_of(settings: Settings) -> Generator[str, None, None]:
    """What the ranks write, until all have ended. A DemoError where one fails; whatever happens, none runs on."""
    command = [MODULE, json.dumps(asdict(settings))]
    lines: queue.Queue[str] = queue.Queue()
    processes: list[Process] = []
    with handling({signal.SIGTERM: _exit, getattr(signal, "SIGHUP", signal.SIGTERM): _exit}):
        try:
            # The demo holds the store: its port is bound when it is chosen, and rank 0 may die like any other.
            store = tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for rank in range(settings.ranks):
                processes.append(
                    Process(f"rank {rank}", command, _environment(rank, settings.ranks, store.port), lines)
                )
            yield from _until_the_end(processes, lines)
        finally:
            _stop(processes)


def _until_the_end(processes: list[Process], lines: queue.Queue[str]) -> Iterator[str]:
    while True:
        codes = [process.running.poll() for process in processes]
        with contextlib.suppress(queue.Empty):
            yield lines.get(timeout=0.05)
            continue
        failed = [process for process, code in zip(processes, codes, strict=True) if code]
        if failed:
            raise DemoError(min(failed, key=lambda process: process.running.returncode).report())  # signals first
        if None not in codes:
            for process in processes:
                process.drain()
            while not lines.empty():
                yield lines.get()
            return


def _stop(processes: list[Process]) -> None:
    """SIGTERM, and SIGKILL to what does not heed it. A second Ctrl-C does not cut this short."""
    with handling({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
        for process in processes:
            if process.running.poll() is None:
                process.running.terminate()
        deadline = time.monotonic() + 10
        for process in processes:
            process.end(deadline)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Who a rank is, whatever launcher has started the demo; and that ranks talk over loopback, whatever this machine's
    name resolves to."""
    names = [name for _, name in socket.if_nameindex()] if os.name == "posix" else []
    loopback = [{"GLOO_SOCKET_IFNAME": name} for name in ("lo", "lo0") if name in names]
    own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": "1", "MASTER_PORT": str(port)}
    return {**own, **(loopback[0] if loopback else {})}


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def handling(handlers: Mapping[int, Any]) -> Iterator[None]:
    """These signal handlers for a while, where the signal is not ignored; in the main thread, others cannot."""
    main = threading.current_thread() is threading.main_thread()
    heeded = [number for number in handlers if main and signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, handlers[number]) for number in heeded}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler or signal.SIG_DFL)
