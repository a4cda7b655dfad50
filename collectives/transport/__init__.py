"""Moving bytes between ranks: torch.distributed and MPI behind one small protocol."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from onebit.collectives.transport.protocol import CollectiveError, Done, LocalTransport, Transport, Work
from onebit.collectives.transport.torch import TorchTransport

__all__ = ["CollectiveError", "Done", "LocalTransport", "TorchTransport", "Transport", "Work", "transport_for"]


def transport_for(group: Any = None) -> Transport:
    """The transport of a process group, an mpi4py communicator, a transport, or None: torch's default group if
    there is one, else this process alone.
    """
    if group is None:
        return TorchTransport() if dist.is_available() and dist.is_initialized() else LocalTransport()
    if isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return TorchTransport(group)
    if all(hasattr(group, name) for name in ("all_to_all", "all_gather", "all_max")):
        return group
    if hasattr(group, "Ialltoall"):
        from onebit.collectives.transport.mpi import MpiTransport

        return MpiTransport(group)
    raise TypeError(
        f"can't communicate over a {type(group).__name__}: pass a torch.distributed process group (dist.new_group), "
        f"an mpi4py communicator, or None for the default group"
    )
