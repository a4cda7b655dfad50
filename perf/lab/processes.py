"""The network lab's processes: the ranks, seen to their end, while signals wait where they must."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

OnLine = Callable[[int, str], None]  # rank, line of output
TAIL_LINES = 40


class RankFailed(RuntimeError):
    """A rank exited with a non-zero status; the message has every such rank, its status and last lines."""


def set_handlers(handlers: Mapping[int, Any]) -> dict[int, Any]:
    """Install signal handlers, return the former ones; only the main thread may, others change nothing."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) or signal.SIG_DFL for number, handler in handlers.items()}


@contextlib.contextmanager
def held_signals() -> Iterator[list[int]]:
    """Ctrl-C, SIGTERM and SIGHUP wait until the block ends; it gets the list of those that do."""
    pending: list[int] = []
    held = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = set_handlers(dict.fromkeys(held, lambda number, frame: pending.append(number)))
    try:
        yield pending
    finally:
        set_handlers(former)
        if pending:
            signal.raise_signal(pending[0])


def rank_variables(rank: int, hosts: int, each: int, interface: str, network: str) -> dict[str, str]:
    """What torchrun gives a rank, `each` of them a host, and that it uses this interface. network: its own name."""
    host, local = divmod(rank, each)
    own = {"RANK": rank, "WORLD_SIZE": hosts * each, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": each}
    own |= {"GROUP_RANK": host, "GROUP_WORLD_SIZE": hosts}  # the hosts have one name and one boot id
    common = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "ONEBIT_QUIET": "1", **os.environ}
    sockets = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    sockets |= {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
    sockets["NCCL_HOSTID"] = f"{network}-{host}"  # else NCCL refuses two ranks on one GPU
    return {**common, **sockets, **{name: str(n) for name, n in own.items()}}


def exit_on(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@dataclass
class Rank:
    """One rank: its output, and its exit status (negative: a signal) or None if it did not end by itself."""

    rank: int
    process: subprocess.Popen[str] = field(repr=False)
    lines: list[str] = field(default_factory=list, repr=False)
    code: int | None = None

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def read(self, on_line: OnLine | None, one_at_a_time: threading.Lock) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line)
            if on_line is not None:
                with one_at_a_time:
                    on_line(self.rank, line.rstrip("\n"))

    def report(self) -> str:
        state = "was still running" if self.code is None else f"failed with status {self.code}"
        tail = "".join(f"    {line.rstrip()}\n" for line in self.lines[-TAIL_LINES:])
        return f"rank {self.rank} {state}; its last lines:\n{tail or '    (none)'}"


class Run:
    """The processes of one start on a network; `wait` sees them to their end."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        variables: Sequence[dict[str, str]],
        on_line: OnLine | None,
        check_links: Callable[[], None],
        signal_all: Callable[[Sequence[Rank], int], None],
    ) -> None:
        """A command and its variables for each rank. `check_links` raises where the network is gone; `signal_all`
        reaches what ranks have started, too."""
        self.ranks: list[Rank] = []
        self._check_links, self._signal_all = check_links, signal_all
        self._readers: list[threading.Thread] = []
        one_at_a_time = threading.Lock()
        try:
            for rank, (command, env) in enumerate(zip(commands, variables, strict=True)):
                self._start(Rank(rank, start_rank(command, env)), on_line, one_at_a_time)
        except BaseException:
            self.stop()
            raise

    def _start(self, rank: Rank, on_line: OnLine | None, one_at_a_time: threading.Lock) -> None:
        self.ranks.append(rank)
        read = threading.Thread(target=rank.read, args=(on_line, one_at_a_time), daemon=True)
        self._readers.append(read)
        read.start()

    def wait(self, timeout: float = 600, check: bool = True) -> list[Rank]:
        """The ranks, once all have exited; none runs on, whatever happens.

        A failed rank ends the run with RankFailed; with check=False the others go on and nothing is raised.
        TimeoutError after `timeout` seconds.
        """
        end, grace_end = time.monotonic() + timeout, float("inf")
        with held_signals() as pending, contextlib.ExitStack() as last:  # an exception amid poll() spoils Popen
            last.callback(self.stop)
            while not self._poll() and not pending and time.monotonic() < min(end, grace_end):
                self._check_links()
                if check and any(rank.code for rank in self.ranks) and grace_end == float("inf"):
                    grace_end = time.monotonic() + 0.5  # who else fails by itself? One of them is the cause
                time.sleep(0.02)
        failed = [rank.report() for rank in self.ranks if rank.code]
        running = [rank.report() for rank in self.ranks if rank.code is None]
        if check and failed:
            raise RankFailed("\n".join(failed))
        if running:
            what = f"the run did not end in {timeout:g} s: raise `timeout`, or see why it hangs"
            raise TimeoutError("\n".join([what, *running]))
        return self.ranks

    def running(self) -> bool:
        return any(rank.process.poll() is None for rank in self.ranks)

    def stop(self) -> None:
        """End what still runs: SIGTERM, and 2 s later SIGKILL."""
        with held_signals():
            if self.running():
                self._signal(signal.SIGTERM)
            end = time.monotonic() + 2
            while self.running() and time.monotonic() < end:
                time.sleep(0.02)
            self._signal(signal.SIGKILL)  # also what a rank left behind
            for rank, reader in zip(self.ranks, self._readers, strict=True):
                rank.process.wait(10)
                reader.join(5)

    def _signal(self, number: int) -> None:
        for rank in self.ranks:
            rank.process.send_signal(number)  # it may not have entered its namespace yet
        self._signal_all(self.ranks, number)

    def _poll(self) -> bool:
        for rank in self.ranks:
            rank.code = rank.process.poll()
        return all(rank.code is not None for rank in self.ranks)


def start_rank(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
