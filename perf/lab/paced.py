"""Two hosts without any privilege: two ranks of this machine, whose sockets TCP paces (onebit.cli.paced_link).

Ranks find the link's rate in their environment, pace what they connect, and measure what they got before they measure
anything else (perf.ranks.process_group). The link joins two ranks, without a delay; nobody counts its bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from onebit.cli.paced_link import is_kept, rate_title, refusal, why_not
from onebit.collectives.store import tcp_store
from perf.lab.delay import WrongLink
from perf.lab.namespaces import LabUnavailable, allows_network_namespaces, allows_user_namespaces
from perf.lab.network import NetworkLab
from perf.lab.processes import OnLine, Rank, Run, exit_on, held_signals, rank_variables, set_handlers
from perf.lab.rates import UNSHAPED, parse_link, rate_bits, rtt_seconds

PACED = "ONEBIT_PERF_PACED"  # a rank's link, as records have it
LOOPBACK = "127.0.0.1"
CHANNELS = ("MIN_NCHANNELS", "MAX_NCHANNELS", "MIN_P2P_NCHANNELS", "MAX_P2P_NCHANNELS")
BUFFER = 2**25  # bytes of NCCL's; with its usual 2**22 two ranks of one H200 sent 7.8 Gbit/s, with these 17.5
ONE_SOCKET = {f"NCCL_{name}": "1" for name in (*CHANNELS, "SOCKET_NTHREADS", "NSOCKS_PERTHREAD")}
"""NCCL has one connection each way between two ranks, as the link has one rate."""
ON_ONE_GPU = {"NCCL_BUFFSIZE": str(BUFFER)}
"""Ranks take turns on a GPU that they share, and NCCL sends a buffer at most in a turn."""


class PacedNetwork:
    """Has the face of a NetworkLab; a context manager, after which none of its processes runs."""

    each = 1

    def __init__(self, hosts: int = 2, link: str = UNSHAPED) -> None:
        if why := why_not():
            raise LabUnavailable(why)
        if hosts != 2:
            raise ValueError(f"hosts is {hosts}: a paced link joins two")
        self.hosts = hosts
        self._run: Run | None = None
        self.set_link(link)

    def __enter__(self) -> PacedNetwork:
        defaults = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
        self._former = set_handlers(dict.fromkeys(defaults, exit_on))
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._run is not None and self._run.running():
                self._run.stop()
        finally:
            set_handlers(self._former)

    def set_link(self, link: str) -> None:
        """Choose the link of the next run."""
        self.link = parse_link(link)
        if rtt_seconds(self.link) is not None:
            raise ValueError(f"{link!r} has a round trip, and pacing makes none: use --lab, or a rate alone")

    def run(
        self,
        argv: Sequence[str],
        timeout: float = 600,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
    ) -> list[Rank]:
        """`python argv` for each rank, as NetworkLab.run does."""
        store = tcp_store(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        place = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        link = {} if rate_bits(self.link) is None else {PACED: self.link}
        common, name = {**ONE_SOCKET, **ON_ONE_GPU, **place, **link, **(env or {})}, f"onebit-{os.getpid()}"
        variables = [{**rank_variables(rank, self.hosts, 1, "lo", name), **common} for rank in range(self.hosts)]
        with held_signals():  # until all are there to be ended
            self._run = Run([[sys.executable, *argv]] * self.hosts, variables, on_line, lambda: None, _signal_sessions)
        return self._run.wait(timeout, check)


def _signal_sessions(ranks: Sequence[Rank], number: int) -> None:
    """Signal ranks that have a session each, and what they have started."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, number)


Network = NetworkLab | PacedNetwork


def open_network(arguments: argparse.Namespace, hosts: int, each: int = 1) -> Network:
    """Make the network that a benchmark's options ask for (perf.command.add_ranks)."""
    return PacedNetwork(hosts) if arguments.paced else NetworkLab(hosts, each=each)


def best_network() -> tuple[str, str]:
    """Choose the option for the best network that this user may have here, and say how it is made."""
    if all(map(shutil.which, ("ip", "tc"))):
        if os.geteuid() == 0 and allows_network_namespaces():
            return "--lab", "network namespaces, as root"
        if os.geteuid() and allows_user_namespaces():
            return "--lab", "network namespaces within a user namespace, without root"
    return "--paced", "two hosts joined by paced sockets, without root or user namespaces; targets are of four hosts"


@contextlib.contextmanager
def skipping_refused_links(arguments: argparse.Namespace, forget: Callable[[], object]) -> Iterator[None]:
    """Say that a paced link gets no figure, `forget` what was found on it, and go on with the next."""
    try:
        yield
    except WrongLink as error:
        if not arguments.paced:
            raise
        forget()
        print(f"no figure: {error}", flush=True)


def check_kept(link: str, found: float) -> None:
    """Raise WrongLink where a paced link's measured rate is not what was asked for."""
    bits = rate_bits(link)
    if bits is not None and not is_kept(bits, found):
        raise WrongLink(refusal(bits, [found]))


def measured_links(rows: Sequence[Any]) -> str:
    """Write the rates that paced links had, of rows with `rate` and `measured`; nothing of other links."""
    found = {row.rate: row.measured for row in rows if row.measured is not None}
    links = ", ".join(f"{rate} {rate_title(measured)}" for rate, measured in found.items())
    return f"paced links as measured, headers included: {links}; the ranks share this machine\n" if links else ""
