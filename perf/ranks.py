"""The ranks of a benchmark: their process group, barriers, clocks and counters."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit.cli.arguments import CommandError, pick_device
from onebit.cli.paced_link import PacedLink, measured_rate
from onebit.collectives.transport.lent import lent
from onebit.kernels.tuning.machine import device_name
from perf.command import WrongResult
from perf.lab.paced import PACED, check_kept
from perf.lab.rates import rate_bits

Show = Callable[[str], None]  # a line of progress
LONGEST = 3600  # seconds for one network of the lab, or for a collective
ONE_CLOCK = "ONEBIT_PERF_ONE_CLOCK"  # set in the environment of ranks that are on one machine, with links of a delay


class Ranks:
    """One rank's view of the group: barriers, clocks and counters. `each` ranks share a host and its interface.

    one_clock: ranks are on one machine and read the same clock, so that a barrier can end everywhere at one time. What
    a barrier sends leaves ranks up to a round trip apart.
    """

    def __init__(self, device: torch.device, show: Show, each: int = 1, one_clock: bool = False) -> None:
        self.device, self.each, self._show, self._shown = device, each, show, 0.0
        self.one_clock = one_clock
        self.link_rate: float | None = None  # bits a second as measured, where sockets are paced
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def progress(self, text: str) -> None:
        """Show progress on rank 0, at most every two seconds."""
        if self.rank == 0 and time.monotonic() - self._shown > 2:
            self._shown = time.monotonic()
            self._show(text)

    def barrier(self) -> None:
        began = time.perf_counter()
        self.maximum(torch.zeros(1))
        self.synchronize()
        if self.one_clock:
            took = time.perf_counter() - began
            end = self.maximum(torch.tensor([time.perf_counter() + 2 * took], dtype=torch.float64))
            time.sleep(max(0.0, float(end) - time.perf_counter()))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def maximum(self, values: Tensor) -> Tensor:
        """Take the maximum over ranks, elementwise."""
        on_device = values.to(self.device)
        dist.all_reduce(lent(on_device), dist.ReduceOp.MAX)
        return on_device.cpu()

    def slowest(self, seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(self.maximum(torch.tensor(seconds, dtype=torch.float64)).tolist())

    def seconds(self, run: Callable[[], object]) -> float:
        """Time one call on this rank, after a barrier."""
        self.barrier()
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start

    def bytes_sent(self) -> float:
        """The counter of this host's interface; nan where other ranks than its `each` may use it, as on loopback."""
        names = (os.environ.get(f"{library}_SOCKET_IFNAME") for library in ("GLOO", "NCCL"))
        name = next((name for name in names if name), None)
        counters = Path("/proc/net/dev")
        if (
            name is None
            or name == "lo"
            or os.environ.get("LOCAL_WORLD_SIZE") != str(self.each)
            or not counters.exists()
        ):
            return math.nan
        line = re.search(rf"^\s*{re.escape(name)}:(.*)$", counters.read_text(encoding="ascii"), re.MULTILINE)
        return float(line[1].split()[8]) if line else math.nan

    def most_bytes(self, sent: float) -> float | None:
        """The bytes of the host that has sent most; None if hosts have no counter. A collective call."""
        (most,) = self.slowest([sent])
        return None if math.isnan(most) else most


def check_same(ranks: Ranks, x: Tensor, when: str) -> None:
    """WrongResult on every rank unless all have the same bits."""
    digest = hashlib.blake2b(x.cpu().view(torch.uint8).numpy().data, digest_size=7).digest()
    number = int.from_bytes(digest, "little")
    most = ranks.maximum(torch.tensor([number, -number]))
    if most[0] != -most[1]:
        raise WrongResult(f"the ranks' results of {x.numel():,} elements differ {when}")


def require_group() -> None:
    """CommandError where there is no process group and no launcher's environment to make one from."""
    if not dist.is_initialized() and "WORLD_SIZE" not in os.environ:
        raise CommandError("there is no group to measure on: start it with torchrun, or give it --lab or --paced")


@contextlib.contextmanager
def process_group(arguments: argparse.Namespace, show: Show, each: int = 1) -> Iterator[Ranks]:
    """The group that is there or, where there is none, a new one for a while; with `each` ranks a host."""
    own = not dist.is_initialized()
    device = pick_device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if own:
        backend = arguments.backend or ("nccl" if device.type == "cuda" else "gloo")
        dist.init_process_group(backend, timeout=timedelta(seconds=LONGEST))
    try:
        ranks = Ranks(device, show, each, one_clock=ONE_CLOCK in os.environ)
        if ranks.size == 1:
            raise CommandError("a group of one rank has nothing to send: start two or more")
        with paced(ranks, os.environ.get(PACED)):
            yield ranks
    finally:
        if own:
            dist.destroy_process_group()


@contextlib.contextmanager
def paced(ranks: Ranks, link: str | None) -> Iterator[None]:
    """Pace what this process sends, where `link` says how fast; WrongLink where that is not what is measured, before
    the figures or after them."""
    if link is None or (bits := rate_bits(link)) is None:
        yield
        return
    with PacedLink(bits):
        for measured in ("before", "after"):
            ranks.progress(f"measuring the link of {link}")
            ranks.link_rate = measured_rate(bits, ranks.device)
            check_kept(link, ranks.link_rate)
            if measured == "before":
                yield


def describe_group(ranks: Ranks) -> dict[str, Any]:
    """The group's part of a record."""
    return {
        "device": device_name(ranks.device),
        "backend": str(dist.get_backend()),
        "ranks": ranks.size,
        "threads": torch.get_num_threads(),
    }
