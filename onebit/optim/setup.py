"""What stays while an optimizer trains: its algorithm, options and ranks, and how its parameters are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit.collectives.chunking import Chunking, candidates, shards_of
from onebit.collectives.exchange import Exchange
from onebit.collectives.reply import exchange_for
from onebit.collectives.topology import Topology
from onebit.collectives.transport.protocol import LocalTransport
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.wire import Norm
from onebit.optim import param_groups
from onebit.optim.algorithm import Algorithm
from onebit.optim.flat_state import FlatState
from onebit.optim.freeze import StageRule
from onebit.optim.options import Options, check_sharded
from onebit.optim.sharding import shard_group
from onebit.warning import warn


@dataclass(frozen=True)
class Setup:
    """Shared by an optimizer and all that saves, loads, checks and reports on it."""

    name: str  # of the optimizer's class
    algorithm: Algorithm
    options: Options
    topology: Topology
    device: torch.device
    groups: Sequence[Mapping[str, Any]]  # the optimizer's own param groups
    names: dict[Tensor, str] = field(default_factory=dict)  # of parameters, as far as a model gave them
    fixed: dict[Tensor, Tensor] = field(default_factory=dict)  # of parameters with a mask: elements that never move

    def __post_init__(self) -> None:
        limit = self.options.update_limit
        if isinstance(limit, (int, float)) and self.algorithm.shortened_to is None:
            raise ValueError(
                f"update_limit={limit}: {type(self.algorithm).__name__} does not limit its steps "
                f"(Algorithm.shortened_to). Leave it out"
            )

    @property
    def exchange_class(self) -> type[Exchange]:
        """The class of the exchange of messages."""
        return exchange_for(self.options.reply, self.topology.replicas.size)

    @property
    def norm(self) -> Norm:
        """What a scale is made of."""
        if self.options.norm != "auto":
            return self.options.norm
        return "unbiased" if self.options.scale == "block" else "l1"

    @property
    def shards(self) -> int:
        """The number of shards of a chunk."""
        return shards_of(self.topology, self.exchange_class)

    def name_of(self, parameter: Tensor) -> str:
        return param_groups.name_of(parameter, self.groups, self.names)

    def hyper_rows(self, step: int, late: Sequence[tuple[int, int]] = ()) -> list[Hyper]:
        """Return every group's numbers at a step, then those of `late_rows`."""
        rows = [self.algorithm.hyper(group, step, self.options.bias_correction) for group in self.groups]
        for i, joined in late:
            own = max(1, step - joined)
            rows.append(self.algorithm.hyper(self.groups[i], own, self.options.bias_correction))
        return rows

    @property
    def window(self) -> int:
        """Steps between what the freeze rule compares."""
        return self.options.freeze_rule.window or round(1 / (1 - self.beta2))

    @property
    def beta2(self) -> float:
        return max(param_groups.betas_of(group)[1] for group in self.groups)

    def warn_if_early(self) -> None:
        """Warn of an early freeze without bias correction: the variance needs 1 / (1 - beta2) steps to grow to its
        size."""
        options, steps = self.options, round(1 / (1 - self.beta2))
        if not options.bias_correction and 0 < (options.fixed_freeze_step or 0) < steps:
            warn(
                f"freeze_step={options.freeze_step} without bias correction freezes a variance that is still growing "
                f"from zero: with beta2={self.beta2:g} it takes about {steps} steps to reach its size, and stage 2 "
                f"would take too large steps for good. Freeze later, or pass bias_correction=True"
            )

    def freeze_rule(self, states: Sequence[FlatState]) -> StageRule:
        return self.algorithm.freeze_rule(self.options, self.window, [s for s in states if s.compressed])

    def flat_states(self, chunks: Sequence[int] = (), joined: Mapping[Tensor, int] | None = None) -> list[FlatState]:
        """Make empty flat states for the parameters as they are now, with room for any number of chunks that may be
        chosen, and for `chunks`. joined: see `late_rows`."""
        found, late = [], {row: i for i, row in enumerate(self.late_rows(joined or {}), len(self.groups))}
        for compressed, params, groups in param_groups.by_flat_state(self.groups):
            topology, counts = self.topology, [*self._possible_chunks(sum(p.numel() for p in params)), *chunks]
            cut = {"ranks": self.shards, "slices": topology.slices, "slice_index": topology.slice_index}
            state = FlatState(
                params,
                groups,
                rows=[late.get((g, (joined or {}).get(p, 0)), g) for p, g in zip(params, groups, strict=True)],
                block_size=self.options.block_size,
                compressed=compressed,
                **(cut if compressed else {"ranks": 1}),
                chunk_counts=counts if compressed else (1,),
                master_weights=self.options.master_weights,
                parts=None if self.topology.shard is None else self.topology,
                fixed=self.fixed,
            )
            state.copy_parameters_to_master()
            found.append(state)
        apart = [state for state in found if not state.compressed]
        if apart and len(apart) == len(found):
            raise ValueError(
                "every param group that trains has compress=False: nothing would be compressed. Leave it out of some "
                "group, or take torch.optim.AdamW"
            )
        if apart:
            self.algorithm.check_uncompressed()
        return found

    def late_rows(self, joined: Mapping[Tensor, int]) -> list[tuple[int, int]]:
        """Return which numbers a step has beside those of each param group: a group's, as of so many steps before.

        joined: after which step a parameter was added, of those that were added after the first.
        """
        groups = enumerate(self.groups)
        return sorted({(i, joined[p]) for i, group in groups for p in group["params"] if joined.get(p, 0) > 0})

    def choose_chunks(self, state: FlatState) -> int:
        """A collective call where "auto" has to be measured. Under a tensor scale the number of chunks is in the
        numerics (one scale a message), so that nothing measured may choose it."""
        options, numel = self.options, sum(state.numels)
        if options.chunks != "auto":
            return options.chunks
        if options.scale == "tensor":
            return 1
        if options.overlap:  # what leaves early matters more than what a chunk costs
            return max(self._possible_chunks(numel))
        chunks = Chunking(
            self.topology, numel, self.device, options.scale, self.norm,
            block_size=options.block_size, exchange_class=self.exchange_class,
        ).choose()  # fmt: skip
        if self.topology.shard is None:
            return chunks
        fewest = torch.tensor([-chunks], dtype=torch.int32, device=self.device)  # a state has one number for all shards
        self.topology.everyone.all_max(fewest, "agreeing on the number of chunks (all-reduce of one number)")
        return -int(fewest)

    def _possible_chunks(self, numel: int) -> list[int]:
        if self.options.chunks != "auto":
            return [self.options.chunks]
        return candidates(numel, self.shards, self.options.block_size)


class RankFinder:
    """`topology` is who is known so far."""

    def __init__(
        self, process_group: Any, node_group: Any, groups: param_groups.Groups, options: Options, device: torch.device
    ) -> None:
        """process_group: also a Topology, for several optimizers of the same ranks. node_group: see `Topology.of`. A
        group of a node is asked for of all ranks here, "auto" in `find`."""
        self._process_group, self._node_group, self.device = process_group, node_group, device
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
        topology = Topology.of(self._process_group, self._node_group, self.device)
        if topology.everyone.size == 1:
            self._process_group, self._found = topology.everyone, True
            return False
        if alone and compressing:
            raise ValueError(
                f"a process group of {topology.everyone.size} ranks was made when this optimizer was in stage 2 "
                f"already, as one rank alone: call init_process_group before the first step and before "
                f"load_state_dict"
            )
        self._found, self.topology = True, topology
        return alone or topology.node is not None

    def how_nodes_are_found(self, process_group: Any) -> str:
        """Tell how another group finds its nodes: given with a Topology, "auto", or there are none."""
        if isinstance(process_group, Topology):
            return "given"
        if self._node_group not in (None, "auto"):
            raise ValueError(
                "the optimizer was built with a group of this rank's node, which belongs to the ranks that there were: "
                "give a Topology, onebit.collectives.topology.Topology.of(process_group, node_group, device)"
            )
        return self._node_group or "none"

    def topology_of(self, process_group: Any) -> Topology:
        """Make the topology of another group, nodes as they were asked for: a collective call of the group. A Topology
        stays what it is. Nothing changes."""
        return Topology.of(process_group, self._node_group, self.device)

    def go_on_with(self, topology: Topology) -> None:
        self._process_group, self._found, self.topology = topology, True, topology

    def check_sharding(self, groups: param_groups.Groups) -> None:
        """A ValueError where parameters were whole, and are not now, or the other way round."""
        if (shard_group(groups) is None) != (self.topology.shard is None):
            raise ValueError(
                "the parameters were sharded, or made whole, after the optimizer was built: call fully_shard first, "
                "then build the optimizer with model.parameters()"
            )
