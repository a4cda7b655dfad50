"""Ranks that save or load one checkpoint: what fails on one is an error on all, and none waits for ever.

What they exchange is JSON in uint8 tensors: nothing that comes from another rank is unpickled here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from onebit.collectives.agreement import all_gather_json
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import Ranks, collective_errors
from onebit.collectives.transport.torch import TorchTransport

T = TypeVar("T")

_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "OSError": OSError}


class CheckpointRanks:
    """The ranks of an optimizer, as torch.distributed.checkpoint needs them."""

    def __init__(self, transport: Ranks, device: torch.device) -> None:
        if not dist.is_initialized() and transport.size > 1:
            raise ValueError(
                f"a checkpoint of {transport.size} ranks needs torch.distributed (init_process_group); over "
                f"{transport.name} alone save optimizer.state_dict() on every rank"
            )
        self.group = transport.group if isinstance(transport, TorchTransport) else None
        self._transport = transport if self.group is not None else transport_for(None)
        if self._transport.size != transport.size and dist.is_initialized():
            raise ValueError(
                f"a checkpoint of {transport.size} ranks whose parameters are sharded is written by all "
                f"{self._transport.size} of torch.distributed's default group: use no others in the run"
            )
        self.rank, self.size, self._device = self._transport.rank, self._transport.size, device

    def on_all(self, work: Callable[[], T]) -> T:
        """What `work` returns here. Where it fails on any rank, its error is raised on every rank."""
        own, failure = None, None
        try:
            own = work()
        except Exception as error:
            failure = error
        answers = self.all_gather(None if failure is None else [_kind(failure), str(failure)])
        failed = {rank: each for rank, each in enumerate(answers) if each is not None}
        if failed:
            kind, text = failed.get(self.rank) or failed[min(failed)]
            if len(failed) < self.size:
                text = f"rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed))} of {self.size}: {text}"
            raise _KINDS.get(kind, RuntimeError)(text) from failure
        return own  # type: ignore[return-value]

    def all_gather(self, value: Any) -> list[Any]:
        """`value`, which JSON can hold, of every rank. A collective call."""
        phase = "saving or loading a checkpoint, which every rank does and not rank 0 alone (all-gather)"
        return all_gather_json(self._transport, self._device, value, phase)

    @contextmanager
    def inside_dcp(self, what: str) -> Iterator[None]:
        """Around what torch.distributed.checkpoint does on all ranks: it raises on all of them what failed on one."""
        try:
            with collective_errors(what, self._transport.name):
                yield
        except CheckpointException as error:
            causes = {rank: cause for rank, (cause, _) in error.failures.items()}
            kind = OSError if any(isinstance(cause, OSError) for cause in causes.values()) else ValueError
            reasons = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, e in sorted(causes.items()))
            raise kind(f"{what} failed ({reasons})") from None


def _kind(error: Exception) -> str:
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind)), type(error).__name__)
