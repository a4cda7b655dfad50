"""Ranks that save or load one checkpoint: what fails on one is an error on all, and none waits for ever.

What they exchange is JSON in uint8 tensors: nothing that comes from another rank is unpickled here.

Extra is what a run has beside model and optimizer: schedules, scalers, the place in the data, random states. Every rank
saves its own, one value a name, as bytes: any data that torch.load(weights_only=True) reads. On another number of
ranks, rank r reads what rank r mod (ranks that saved) has written.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from onebit.collectives.agreement import gathered
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import collective_errors
from onebit.collectives.transport.torch import TorchTransport
from onebit.kernels.data.checks import is_whole
from onebit.optim.setup import Setup
from onebit.warning import warn

T = TypeVar("T")
EXTRA = "extra"


class CheckpointRanks:
    """The ranks of an optimizer, as torch.distributed.checkpoint needs them."""

    def __init__(self, setup: Setup) -> None:
        transport = setup.topology.everyone
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
        self.rank, self.size, self._device = self._transport.rank, self._transport.size, setup.device

    def gathered(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` returns on every rank, which JSON can hold. Where it fails on any, an error on all."""
        phase = "saving or loading a checkpoint, which every rank does and not rank 0 alone (all-gather)"
        return gathered(self._transport, self._device, work, phase)

    def on_all(self, work: Callable[[], T], alike: Callable[[T], Any] = lambda _: None, otherwise: str = "") -> T:
        """What `work` returns here. Where it fails on any rank, an error on all; and a ValueError, which says
        `otherwise`, where what must be alike is another thing on some ranks than on rank 0."""
        own: list[T] = []

        def do() -> Any:
            own.append(work())
            return alike(own[0])

        answers = self.gathered(do)
        if others := [rank for rank, each in enumerate(answers) if each != answers[0]]:
            raise ValueError(f"ranks {others} {otherwise}")
        return own[0]

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around what torch.distributed.checkpoint does on all ranks: it raises on all of them what failed on one."""
        what = "saving a checkpoint"
        try:
            with collective_errors(what, self._transport.name):
                yield
        except CheckpointException as error:
            raise own_error(what, error, "rank {}: ") from None


def own_error(what: str, error: CheckpointException, of_rank: str = "") -> Exception:
    """What to raise in the place of an error of torch.distributed.checkpoint."""
    causes = {rank: cause for rank, (cause, _) in error.failures.items()}
    kind = OSError if any(isinstance(cause, OSError) for cause in causes.values()) else ValueError
    reasons = "; ".join(f"{of_rank.format(rank)}{type(e).__name__}: {e}" for rank, e in sorted(causes.items()))
    return kind(f"{what} failed ({reasons})")


def packed_extra(extra: Mapping[str, Any]) -> dict[str, Tensor]:
    """Pack what each of `extra` has for its state into bytes: of objects with a state_dict that, else the value
    itself."""
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) and name for name in extra):
        raise TypeError("extra is a dict, by names: extra={'schedule': schedule, 'epoch': 3}")
    values = {name: v.state_dict() if callable(getattr(v, "state_dict", None)) else v for name, v in extra.items()}
    packed = {name: saved_bytes(value, f"extra {name!r}") for name, value in values.items()}
    return {name: torch.from_numpy(np.frombuffer(each, dtype=np.uint8).copy()) for name, each in packed.items()}


def unpacked_extra(name: str, value: Tensor) -> Any:
    try:
        return torch.load(io.BytesIO(value.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"extra {name!r} of the checkpoint is damaged ({error!s:.200}). Load another") from error


def saved_bytes(value: Any, what: str) -> bytes:
    """What torch.save writes. A ValueError, which says `what` it is of, where it could not be loaded."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{what} ({type(value).__name__}) could be saved and not be loaded: onebit.load unpickles no objects. "
            f"Pass numbers, strings, tensors, and lists, tuples and dicts of these; for a NumPy array pass "
            f"torch.from_numpy(array), for a torch.Generator its get_state()"
        ) from error
    return file.getvalue()


def check_extra(extra: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """A ValueError or TypeError where an object can't be given what was saved under its name."""
    for name, value in extra.items():
        if not callable(getattr(value, "load_state_dict", None)):
            raise TypeError(
                f"extra {name!r} is a {type(value).__name__}, which has no load_state_dict: leave it out, and take it "
                f"from what onebit.load returns"
            )
        if name not in found:
            raise ValueError(
                f"the checkpoint has no extra {name!r}, it has {sorted(found) or 'none'}: load without it, or load "
                f"another checkpoint"
            )


def restore_extra(extra: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if name in found:
            value.load_state_dict(found[name])


def rank_to_read(rank: int, saved: Any, ranks: int) -> int:
    """Whose extra a rank of `ranks` reads, of `saved` ranks."""
    if not is_whole(saved, 1):
        raise ValueError(f"the checkpoint was saved by {saved!r:.80} ranks: it is damaged. Load another")
    if saved != ranks and rank == 0:
        warn(
            f"extra was saved by {saved} ranks, here are {ranks}: rank r has what rank r mod {saved} saved. Random "
            f"states and places in the data may be another's, or the same on several"
        )
    return rank % saved
