"""The one place where tests reach into private members of classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onebit import OneBitState
from onebit.collectives.two_phases import TwoPhases


def join_flight(optimizer: Any) -> None:
    """Wait for the thread that exchanges messages while backward computes."""
    optimizer.overlap._flight._thread.join()


def break_scatter(exchange: TwoPhases, broken: Callable[..., Any]) -> None:
    """An exchange whose second phase is `broken`."""
    exchange._average_and_scatter = broken  # type: ignore[method-assign]


def forget_process_group(optimizer: Any) -> None:
    """As if it was built with process_group=None, before there was a default group."""
    optimizer.rank_finder._process_group = None


def parameter_names(state: OneBitState) -> list[str]:
    """What the DDP hook's state calls its model's parameters."""
    return list(state._names.values())
