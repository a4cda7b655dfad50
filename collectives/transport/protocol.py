"""Moving bytes between ranks: torch.distributed and MPI behind one small protocol.

Two collectives carry a chunk: an all-to-all (row k of what is sent goes to rank k) and an all-gather. They start when
called and end in `Work.wait`; on CUDA with NCCL, wait makes the current stream wait, not the host. Every rank must
start the same collectives in the same order, from one thread.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from onebit.collectives.signs_of_life import who_is_gone

FACTS = "(all-gather of facts)"
"""How a phase ends in which ranks find out that they are not in the same one: a rank with other options comes to one of
the others, and all read what it says."""


class CollectiveError(RuntimeError):
    """A collective did not end: a rank died, never came, or the network failed."""


class Work(Protocol):
    def wait(self) -> None: ...


class Ranks(Protocol):
    """Ranks that can compare and decide. Messages are contiguous uint8 tensors [size, nbytes]."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def name(self) -> str:
        """Names the kind of network for the tuner's cache: nccl, gloo, mpi."""
        ...

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        """out[i] = what rank i has as `sent` [1, nbytes]"""
        ...

    def all_max(self, values: Tensor, phase: str) -> None:
        """values = the elementwise maximum over ranks. Waits as `Work.wait` does."""
        ...

    def all_sum(self, values: Tensor, phase: str) -> Work:
        """values = the elementwise sum over ranks, the same bit for bit on each"""
        ...

    def of_hosts(self) -> Ranks:
        """The same ranks, for tensors of the CPU: a collective call."""
        ...

    def world_rank(self, rank: int) -> int:
        """Its number among all processes."""
        ...

    def host_of(self, rank: int) -> str | None:
        """The host it runs on, where that is known and another one than this rank's. Nobody is asked."""
        ...


class Transport(Ranks, Protocol):
    """A group of ranks that can also send each other messages."""

    def all_to_all(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        """out[i] = what rank i has as sent[rank]"""
        ...

    def duplicate(self) -> Transport:
        """The same ranks with an order of collectives of its own, for another thread: a collective call."""
        ...

    def split(self, color: int) -> Transport:
        """The ranks that gave the same color as a group: a collective call of all."""
        ...

    def ranks_in(self, of: Transport) -> list[int]:
        """Which ranks of another transport of the same kind these are, asking nobody."""
        ...


@runtime_checkable
class EarlyReceiver(Protocol):
    """A transport whose senders wait to hear that a message is expected."""

    def expect(self, out: Tensor, phase: str) -> None:
        """Say that `out` is free now, and the all-gather after the one expected before will be into it."""
        ...


@runtime_checkable
class Sender(Protocol):
    """A transport by which one rank sends to one other."""

    def send(self, values: Tensor, to: int, phase: str) -> Work:
        """values, contiguous, to rank `to`, which receives as many bytes. They stay as they are until `Work.wait`."""
        ...

    def receive(self, out: Tensor, source: int, phase: str) -> Work:
        """Fill `out`, contiguous, with what rank `source` sends."""
        ...


def all_gather_values(ranks: Ranks, values: Tensor, phase: str) -> Tensor:
    """`values`, a vector, of every rank: [size, len(values)]."""
    sent = values.view(torch.uint8)[None]
    everyone = torch.empty((ranks.size, sent.shape[1]), dtype=torch.uint8, device=values.device)
    ranks.all_gather(everyone, sent, phase).wait()
    return everyone.view(values.dtype)


class Done:
    """Work that is over."""

    def wait(self) -> None:
        return None


class LocalTransport:
    """One rank, no network."""

    rank, size, name = 0, 1, "local"

    def all_to_all(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        out.copy_(sent)
        return Done()

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        out.copy_(sent)
        return Done()

    def all_max(self, values: Tensor, phase: str) -> None:
        return None

    def all_sum(self, values: Tensor, phase: str) -> Work:
        return Done()

    def duplicate(self) -> Transport:
        return self

    def of_hosts(self) -> Transport:
        return self

    def world_rank(self, rank: int) -> int:
        return rank

    def host_of(self, rank: int) -> str | None:
        return None

    def split(self, color: int) -> Transport:
        return self

    def ranks_in(self, of: Transport) -> list[int]:
        return [of.rank]


class collective_errors:
    """Turns a backend's error into one that names the phase."""

    def __init__(self, phase: str, name: str) -> None:
        self._phase, self._name = phase, name

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, (CollectiveError, torch.OutOfMemoryError)):
            if "No backend type" in str(error):
                raise ValueError(
                    f"{self._phase} is not possible: the process group has no backend for these tensors' device "
                    f"({_first_line(error)}). Use device='cuda' with NCCL, or a group with Gloo for CPU tensors"
                ) from error
            if "Invalid scalar type" in str(error):
                raise ValueError(
                    f"{self._phase} is not possible: this PyTorch's {self._name} sends no tensors of this dtype "
                    f"({_first_line(error)}). Use fp32, or a PyTorch from PyPI, whose Gloo sends bf16 and fp16"
                ) from error
            gone = who_is_gone()
            why = f"gone: {gone}" if gone else (
                "a rank died, did not come within the group's timeout (did it get fewer batches, or leave out a call "
                "that every rank makes, such as onebit.save?), or the network failed"
            )  # fmt: skip
            raise CollectiveError(
                f"{self._phase} did not end: {why} ({self._name}: {_first_line(error)}). Restart all ranks from the "
                f"last checkpoint, or let an optimizer of onebit go on with those that are left (onebit.reform); this "
                f"group can't be used any more"
            ) from error


def _first_line(error: BaseException) -> str:
    """Return the first line of an error without the guesses that Gloo adds."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line.partition(" This is typically caused by")[0].rstrip(".")
