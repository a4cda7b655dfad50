"""Who is who among the ranks.

Today every rank holds all parameters and talks to all others, so one group is enough. Two more kinds of groups belong
here once ranks share a node's network, or the parameters:

    node group    the ranks of one host. Gradients are averaged among them before anything is compressed, and each
                  compresses its own slice; `replicas` are then the ranks of the same place on every other host
    shard group   the ranks that hold the parts of one copy of the parameters (FSDP2); `replicas` are then the ranks
                  that hold the same part of every other copy

In both cases `everyone` is larger than `replicas`. What a step decides on all ranks (is it skipped, by what are
gradients clipped) is decided over `everyone`. That ranks hold the same parameters, options and bits is compared over
`replicas`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import Transport


@dataclass(frozen=True)
class Topology:
    """The groups of ranks that this rank belongs to."""

    replicas: Transport  # the ranks that hold the same parameters, and average over the network

    @classmethod
    def of(cls, process_group: Any = None) -> Topology:
        """Of a torch.distributed group, an mpi4py communicator, a transport, or None: torch's default group if there is
        one, else this process alone."""
        return cls(replicas=transport_for(process_group))

    @property
    def everyone(self) -> Transport:
        """The ranks that must agree on every step: whether it is skipped, and by what gradients are clipped."""
        return self.replicas
