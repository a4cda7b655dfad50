"""The one place where tests reach into private members of classes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def join_flight(optimizer: Any) -> None:
    """Wait for the thread that exchanges messages while backward computes."""
    optimizer.overlap._flight._thread.join()


def forget_process_group(optimizer: Any) -> None:
    """Make the optimizer as if it was built with process_group=None, before there was a default group."""
    optimizer.rank_finder._process_group = None


def let_groups_share_a_loop() -> None:
    """One thread for all groups of a process: each of Gloo's looks a hundred times a second whether a message came."""
    gloo: Any = dist.ProcessGroupGloo
    own, device = gloo.__init__, gloo.create_default_device()

    def with_device(self: Any, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
        options = gloo._Options()
        options._timeout, options._devices = timeout, [device]
        own(self, store, rank, size, options)

    gloo.__init__ = with_device
