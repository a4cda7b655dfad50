"""The one place where tests reach into private members of classes."""

from __future__ import annotations

from typing import Any


def join_flight(optimizer: Any) -> None:
    """Wait for the thread that exchanges messages while backward computes."""
    optimizer.overlap._flight._thread.join()


def forget_process_group(optimizer: Any) -> None:
    """As if it was built with process_group=None, before there was a default group."""
    optimizer.rank_finder._process_group = None
