"""Finding the ranks of an optimizer: those that it was given, or those that are there by its first step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from onebit.collectives.topology import Topology
from onebit.collectives.transport.protocol import LocalTransport
from onebit.optim.options import Options, check_sharded
from onebit.optim.param_groups import Groups
from onebit.optim.sharding import shard_group


class RankFinder:
    """`topology` is who is known so far."""

    def __init__(
        self, process_group: Any, node_group: Any, groups: Groups, options: Options, device: torch.device
    ) -> None:
        """process_group: also a Topology, for several optimizers of the same ranks. node_group: see `Topology.of`. A
        group of a node is asked for of all ranks here, "auto" in `find`."""
        self._process_group, self._node_group, self._device = process_group, node_group, device
        automatic = isinstance(node_group, str) and node_group == "auto"
        shards, known = shard_group(groups), isinstance(process_group, Topology)
        self._found = known or shards is not None or not automatic
        if shards is not None:
            check_sharded(options, automatic or node_group is None)
        if shards is None or known:
            self.topology = Topology.of(process_group, None if automatic else node_group, device)
        else:
            self.topology = Topology.of_shards(process_group, shards)
        if known and (shards is None) != (self.topology.shard is None):
            raise ValueError(
                "process_group is a Topology of sharded parameters, and these are whole, or the other way round: make "
                "one Topology for each kind (Topology.of, Topology.of_shards), or give the group itself"
            )

    def find(self, compressing: bool) -> bool:
        """Use the default process group, where it was made only after the optimizer; with node_group="auto" find the
        ranks of every host. Whether `topology` is another now. The first time a collective call."""
        alone = self._process_group is None and isinstance(self.topology.everyone, LocalTransport)
        if not dist.is_initialized() if alone else self._found:
            return False
        topology = Topology.of(self._process_group, self._node_group, self._device)
        if topology.everyone.size == 1:
            self._process_group, self._found = topology.everyone, True
            return False
        if alone and compressing:
            raise ValueError(
                f"a process group of {topology.everyone.size} ranks was made when this optimizer was in stage 2 "
                f"already, as one rank alone: call init_process_group before the first step and before "
                f"load_state_dict"
            )
        self._found = True
        if not alone and topology.node is None:
            return False
        self.topology = topology
        return True

    def check_sharding(self, groups: Groups) -> None:
        """A ValueError where parameters were whole, and are not now, or the other way round."""
        if (shard_group(groups) is None) != (self.topology.shard is None):
            raise ValueError(
                "the parameters were sharded, or made whole, after the optimizer was built: call fully_shard first, "
                "then build the optimizer with model.parameters()"
            )
