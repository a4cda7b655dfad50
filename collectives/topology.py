"""Who is who among the ranks.

everyone      all ranks. What a step decides (is it skipped, by what are gradients clipped) is decided over them
replicas      the ranks that average over the network: everyone, or with two levels the ranks of the same place on
              every node
data_parallel the ranks that hold the same parameters. Gradients of stage 1 are averaged over them, and that they
              hold the same options and bits is compared over them
node          with two levels, the ranks of this rank's node, which average in full precision first
shard         where parameters are sharded (FSDP2), the ranks that hold the parts of this rank's copy of them; its
              replicas are then those that hold the same parts

A process may be in all of them alone: then nothing is sent.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebit.collectives.agreement import NODES, all_gather_json, listed, raise_on_all
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.grid import Grid
from onebit.collectives.transport.protocol import FACTS, LocalTransport, Ranks, Transport
from onebit.collectives.transport.torch import TorchTransport
from onebit.kernels.log import to_log

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ASKING = f"finding the ranks of each node {FACTS}"


@dataclass(frozen=True)
class Topology:
    """The groups of ranks that this rank belongs to."""

    everyone: Ranks
    replicas: Transport
    node: Transport | None = None  # None: one level
    shard: Transport | None = None  # None: every rank has whole parameters

    @property
    def data_parallel(self) -> Ranks:
        """The ranks that hold the same parameters."""
        return self.everyone if self.shard is None else self.replicas

    @property
    def sender(self) -> Ranks:
        """The ranks that are one sender to the network: of a node, or of one copy's parts, or this one alone."""
        return next((ranks for ranks in (self.node, self.shard) if ranks is not None), LocalTransport())

    def add_parts(self, values: Tensor) -> Tensor:
        """What the ranks have that hold the parts of these parameters, added up; as it is where those are whole."""
        if self.shard is not None:
            self.shard.all_sum(values, "adding up what parts of parameters have (all-reduce)").wait()
        return values

    def max_parts(self, values: Tensor) -> Tensor:
        """The largest of what they have."""
        if self.shard is not None:
            self.shard.all_max(values, "comparing what parts of parameters have (all-reduce)")
        return values

    def raise_together(self, failed: Exception | None, device: torch.device, others: str) -> None:
        """Raise what was found by comparing over `data_parallel`, the same on all of them. Where parameters are sharded
        the ranks of the other parts raise too: a ValueError that says `others`, unless they have found something."""
        if self.shard is not None:
            raise_on_all(self.everyone, device, failed, others)
        elif failed is not None:
            raise failed

    @property
    def nodes(self) -> int:
        """How many senders to the network there are: with one level, ranks."""
        return self.replicas.size

    @property
    def slices(self) -> int:
        """The number of slices of a chunk: one a rank of the node."""
        return 1 if self.node is None else self.node.size

    @property
    def slice_index(self) -> int:
        """The index of this rank's slice."""
        return 0 if self.node is None else self.node.rank

    @property
    def shards(self) -> int:
        """The number of parts that a copy of the parameters is cut into."""
        return 1 if self.shard is None else self.shard.size

    @property
    def residual_index(self) -> int:
        """The index of this rank's residuals among those of all ranks: with one level its rank."""
        return self.replicas.rank * self.slices + self.slice_index

    @classmethod
    def of_shards(cls, process_group: Any, shard_group: Any) -> Topology:
        """Make the topology of ranks that hold parts of the parameters, from groups of torch.distributed of one part's
        replicas, and of one copy's parts. They have this rank alone in common, or it is a ValueError."""
        replicas, shard = transport_for(process_group), transport_for(shard_group)
        world = transport_for()
        if not isinstance(replicas, TorchTransport):
            raise ValueError(
                f"parameters of FSDP are averaged over a group of torch.distributed, not over {replicas.name}"
            )
        parts, same = set(shard.ranks_in(world)), set(replicas.ranks_in(world))
        if len(parts & same) > 1:
            why = f"process_group has {listed(sorted(parts & same))} in common with the ranks that hold the parts"
            if len(parts) == world.size:
                why = f"the parameters are sharded over all {world.size} ranks, so that no rank has the same part"
            elif parts == same:
                why = "process_group is the group that the parameters are sharded over"
            raise ValueError(
                f"{why}: 1 bit is for the replicas of a part. With mesh = init_device_mesh(device, (nodes, ranks a "
                f"node), mesh_dim_names=('replicate', 'shard')) call fully_shard(model, mesh=mesh['shard']) and pass "
                f"process_group=mesh.get_group('replicate')"
            )
        return cls(Grid(replicas, shard), replicas, shard=shard)

    @classmethod
    def of(cls, process_group: Any = None, node_group: Any = None, device: torch.device | None = None) -> Topology:
        """Make the topology of a torch.distributed group, an mpi4py communicator, a transport, or None: torch's default
        group if there is one, else this process alone. A Topology is given back as it is.

        node_group: the same kinds, of this rank's node; "auto" finds the ranks of a host; None for one level. With one
        this is a collective call of all ranks, which needs the `device` of the tensors that they send.
        """
        if isinstance(process_group, Topology):
            return process_group
        everyone = transport_for(process_group)
        if node_group is None or everyone.size == 1:
            return cls(everyone, everyone)
        at = device or torch.device("cpu")
        automatic = isinstance(node_group, str) and node_group == "auto"
        nodes = _found(everyone, at) if automatic else _given(everyone, node_group, at)
        if nodes is None:
            return cls(everyone, everyone)
        node = everyone.split(next(i for i, ranks in enumerate(nodes) if everyone.rank in ranks))
        replicas = everyone.split(node.rank)
        if everyone.rank == 0:
            to_log(
                logging.INFO,
                "%d nodes of %d ranks: averaged uncompressed inside a node, with 1 bit between nodes",
                len(nodes), node.size,
            )  # fmt: skip
        return cls(everyone, replicas, node)


def _found(everyone: Transport, device: torch.device) -> list[list[int]] | None:
    """The ranks of every host; None where that is no reason for two levels."""
    hosts = [each["host"] for each in _gathered(everyone, device, {NODES: "auto", "host": this_host()})]
    if isinstance(everyone, TorchTransport):
        everyone.one_rank_a_host = len(set(hosts)) == everyone.size  # launchers may tell ranks otherwise
    nodes = [[rank for rank, host in enumerate(hosts) if host == each] for each in dict.fromkeys(hosts)]
    sizes = {len(ranks) for ranks in nodes}
    if len(nodes) > 1 and len(sizes) > 1 and everyone.rank == 0:
        counts = ", ".join(str(len(ranks)) for ranks in nodes)
        to_log(
            logging.INFO, "The hosts have %s ranks, not equally many: every rank sends for itself (one level)", counts
        )
    return nodes if len(nodes) > 1 and len(sizes) == 1 and sizes != {1} else None


def _given(everyone: Transport, node_group: Any, device: torch.device) -> list[list[int]] | None:
    """The ranks of every node as they were given. What does not fit is a ValueError on all ranks."""
    try:
        own: dict[str, Any] = {"ranks": sorted(transport_for(node_group).ranks_in(everyone))}
    except (TypeError, ValueError) as error:
        own = {"problem": str(error)}
    found = _gathered(everyone, device, {NODES: "given", **own})
    for rank, each in enumerate(found):
        if "problem" in each:
            raise ValueError(f"node_group of rank {rank}: {each['problem']}")
    nodes = [each["ranks"] for each in found]
    if reason := _misfit(nodes):
        raise ValueError(
            f"node_group: {reason}. Give every rank the group of its own node, nodes of equally many ranks, or None "
            f"for one level"
        )
    distinct = [list(each) for each in dict.fromkeys(map(tuple, nodes))]
    return distinct if 1 < len(distinct) < everyone.size else None


def _gathered(everyone: Transport, device: torch.device, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather `own` of every rank. A ValueError on all of them if they were not given the same kind of node_group."""
    found = all_gather_json(everyone, device, own, _ASKING)
    kinds = [each.get(NODES) for each in found]
    if len(set(kinds)) > 1:
        other = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
        raise ValueError(
            f"the ranks do not agree: node_group is {kinds[0]} on rank 0 and {kinds[other]} on rank {other}. Give "
            f"every rank the same: None, a group, or 'auto'"
        )
    return found


def _misfit(nodes: Sequence[list[int]]) -> str:
    """Why what each rank calls its node can't be: empty if it can."""
    for rank, ranks in enumerate(nodes):
        if rank not in ranks or any(nodes[other] != ranks for other in ranks):
            return f"rank {rank} has the {listed(ranks)}, which have other groups"
    sizes = Counter(map(len, nodes))
    if len(sizes) > 1:
        odd = min(sizes, key=lambda size: sizes[size])
        rank = next(i for i, ranks in enumerate(nodes) if len(ranks) == odd)
        return f"rank {rank} has a node of {odd}, others have {max(sizes, key=lambda size: sizes[size])}"
    return ""


def this_host() -> str:
    """The same on all ranks of a host alone: its name and boot, and torchrun's number of the node. One host may have
    several nodes, and several torchruns have a node 0 each."""
    boot, node = _BOOT.read_text() if _BOOT.exists() else "", os.environ.get("GROUP_RANK", "")
    return hashlib.sha256(f"{socket.gethostname()} {boot} {node}".encode()).hexdigest()


def on_one_host(ranks: Ranks, device: torch.device) -> bool:
    """Return whether all of them are on the same host. A collective call."""
    name = zlib.crc32(this_host().encode()) & 0x7FFFFFFF
    least_and_most = torch.tensor([-name, name], dtype=torch.int32, device=device)
    ranks.all_max(least_and_most, "finding out whether all ranks are on one host (all-reduce of two numbers)")
    return bool(least_and_most[0] == -least_and_most[1])
