"""An algorithm as a torch.optim.Optimizer: two stages, the step, and when not to take it.

    stage 1    gradients are averaged uncompressed; the optimizer moves as its uncompressed original
    freeze     what the algorithm keeps of its variance
    stage 2    momentum is averaged with 1 bit an element; gradients stay local

1-bit Adam (Tang et al. 2021), Algorithm 1; 1-bit LAMB (Li et al. 2021), Algorithm 1. A step with a gradient that is not
finite on any rank changes nothing on any rank; only between two exchanges of 0/1 Adam's local steps is it left out by
that rank alone. No step makes the host wait for the device: what the host has to know of a step (was it taken, how
large is the variance) it reads one step later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from onebit.checkpoint import restore, schema
from onebit.collectives.topology import Topology
from onebit.collectives.transport.protocol import LocalTransport
from onebit.collectives.undo import Undo
from onebit.collectives.waits import counted
from onebit.kernels.data.upload import capturing
from onebit.log import tell
from onebit.optim import held, param_groups
from onebit.optim.algorithm import Algorithm, Kind
from onebit.optim.eager import eager
from onebit.optim.flat_state import FlatState
from onebit.optim.freeze import report_freeze, warn_of_zeros
from onebit.optim.grad_scaler import report_to_scaler
from onebit.optim.gradients import Gradients, HyperTable, reciprocal
from onebit.optim.live_state import LiveState
from onebit.optim.options import (
    MASK,
    OptionArguments,
    Options,
    check_group,
    check_keys,
    check_numbers_of,
    check_sharded,
    options_named,
    warn_if_early,
)
from onebit.optim.param_groups import COMPRESS, PROGRESS
from onebit.optim.setup import Setup
from onebit.optim.sharding import shard_group
from onebit.optim.snapshot import Part, Snapshot
from onebit.optim.stages import Stages
from onebit.parallel.overlap import Overlap
from onebit.parallel.start_checks import agree_on_start
from onebit.parallel.watch import Watch
from onebit.report.diagnostics import diagnose
from onebit.report.pay_off import PayOff, Report, Timed, made_report
from onebit.report.skips import SHORTENED_FOR, WARNED_AFTER, warn_of_growth, warn_of_local_skips, warnings_of_skips

_TIMED_AS: dict[Kind, Timed] = {"full": "uncompressed", "1 bit": "1 bit", "local": "local", "sync": "1 bit"}


class OneBitOptimizer(torch.optim.Optimizer):
    """Subclasses hand over their algorithm, their param groups' defaults, and the options of every optimizer.

    setup: what stays while it trains. current: where the run has come to.
    """

    _step_supports_amp_scaling = True  # GradScaler hands over its scale and what it found, and always calls step

    without_options: ClassVar[frozenset[str]] = frozenset()
    """Of `Options`, those that this optimizer does not take."""

    setup: Setup
    current: Snapshot

    def __init__(
        self,
        params: Iterable[Any],
        defaults: Mapping[str, Any],
        algorithm: Algorithm,
        *,
        process_group: Any = None,
        node_group: Any = "auto",
        **options: Unpack[OptionArguments],
    ) -> None:
        """process_group: also a Topology, for several optimizers of the same ranks. node_group: see `Topology.of`. A
        group of a node is asked for of all ranks here, "auto" in `find_ranks`."""
        chosen = Options.of(options, self.without_options)
        if isinstance(chosen.update_limit, (int, float)) and not algorithm.limits_updates:
            raise ValueError(
                f"update_limit={chosen.update_limit}: {type(algorithm).__name__} does not limit its steps "
                f"(Algorithm.limits_updates). Leave it out"
            )
        self._built, self._at_last_sync = False, False
        self._room: tuple[dict[Tensor, dict[str, Tensor]], dict[str, Any]] | None = None
        self._held: dict[Tensor, Tensor] = {}
        super().__init__(params, {**defaults, COMPRESS: True})
        device = param_groups.device_of(self.param_groups)
        automatic = isinstance(node_group, str) and node_group == "auto"
        shards = shard_group(self.param_groups)
        known = isinstance(process_group, Topology)
        self._ranks_found = known or shards is not None or not automatic
        if shards is not None:
            check_sharded(chosen, automatic or node_group is None)
        if shards is None or known:
            topology = Topology.of(process_group, None if automatic else node_group, device)
        else:
            topology = Topology.of_shards(process_group, shards)
        if known and (shards is None) != (topology.shard is None):
            raise ValueError(
                "process_group is a Topology of sharded parameters, and these are whole, or the other way round: make "
                "one Topology for each kind (Topology.of, Topology.of_shards), or give the group itself"
            )
        name = type(self).__name__
        self.setup = Setup(name, algorithm, chosen, topology, device, self.param_groups, held=self._held)
        warn_if_early(chosen, self.setup.beta2)
        self.gradients = Gradients(device)
        self.overlap = Overlap(self, chosen.overlap)
        self.averaged_in_backward = False  # in full-precision steps, if not left to `step`: see onebit.attach
        self.leave_out_buckets: Callable[[bool], None] = _has_none  # DDP's, in the coming backward pass
        self.after_step: list[Callable[[], None]] = []  # logs and warnings, due when a step's collectives are over
        self.pay_off = PayOff(device)
        self.watch = Watch(chosen.check_every)
        self._process_group, self._node_group = process_group, node_group
        self._build()

    @property
    def compressing(self) -> bool:
        """Whether stage 2 has begun."""
        return self.current.stages.compressing

    @property
    def kind(self) -> Kind:
        """Of the coming step; those of stage 1 are "full". It is the same on all ranks, and known from `begin_step`
        on."""
        stages = self.current.stages
        return self.setup.algorithm.kind(stages.steps + 1) if stages.compressing else "full"

    @property
    def averages_gradients(self) -> bool:
        """Whether the coming step is one in full precision."""
        return self.kind == "full"

    @property
    def synchronized(self) -> bool:
        """Whether all ranks have the same parameters: always, but between two exchanges of 0/1 Adam's local steps."""
        return self.current.synchronized

    @property
    def skipped_steps(self) -> int:
        """Steps not taken since a gradient was not finite, and local ones that this rank left out in this process.
        Reading it waits for the device."""
        stages = self.current.stages
        return int(stages.counts[1] + stages.left_out)

    @property
    def steps(self) -> int:
        """Steps taken. Reading it waits for the device."""
        return int(self.current.stages.counts[0])

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank has sent in compressed messages."""
        return self.current.wire_bytes

    @property
    def freeze_ratio(self) -> float | None:
        """What the freeze rule compares, None while there is none. Adam: ||vhat||_1 over what it was a window
        earlier. LAMB: the share of elements whose coefficients were stable over a window."""
        return self.current.stages.rule.ratio

    def report(self) -> Report:
        """Does it pay: steps of each kind and how long they take, bytes, and a verdict; `print` it. Of this process,
        since it built the optimizer. Reading it waits for the device."""
        return self._report(self.skipped_steps)

    def diagnostics(self) -> dict[str, dict[str, float]]:
        """By parameter: norms of its variance and residuals, the mean scale of its messages; for LAMB also its
        coefficient and ratio. Cheap to call now and then; waits for the device."""
        self.overlap.check_at_rest("diagnostics")
        return diagnose(self.setup, self.current)

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the stage that is due, the same on every rank, or none on any."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        with counted(self.pay_off.waits):
            self._step()
        return loss

    def _step(self) -> None:
        param_groups.check_gradients(self.param_groups, self.setup.names)
        self.begin_step()
        if not self.current.parts:
            return  # no parameter trains
        kind = self.kind
        left_in_backward = kind == "1 bit" and self.overlap.on and self.overlap.wait_for_replies()
        flags = self._flags_of_replies() if left_in_backward else self._averaged_and_checked()
        self._warn_of_skips()
        hyper = self.write_hyper(self.gradients.factor(self._unscale()))
        algorithm, step = self.setup.algorithm, self.current.stages.steps + 1
        before = held.values(self.current.states)
        undo: list[Undo] = []
        if kind == "1 bit" and not left_in_backward:
            undo = self.current.exchange(hyper, flags, self.gradients.ranks_agreed)
        for part in self.current.parts:
            if part.reducer is None:
                algorithm.full_step(part.state, hyper, flags)
            elif kind == "full":
                algorithm.spaced_full_step(part.state, part.reducer, hyper, flags, self.setup.options)
            elif kind == "1 bit":
                algorithm.compressed_step(part.state, part.reducer, hyper, flags)
            else:
                part.local = part.local or algorithm.local_steps(part.state, part.reducer, hyper, step)
                part.local.move(hyper, flags)
                if kind == "sync":
                    part.local.synchronize(hyper)
        for exchange in self.overlap.undo if left_in_backward else undo:
            exchange.restore(flags)
        held.put_back(self.current.states, before)
        if hasattr(self, "found_inf"):
            report_to_scaler(self, flags)
        if kind == "full" and self.compressing:
            self._report_variance(step, flags)
        self._count(flags, kind)
        self.watch.check(self.setup, self.current)

    @eager
    @torch.no_grad()
    def synchronize(self) -> None:
        """After local steps, all ranks have the same parameters at once, and not only when the schedule says so: at the
        end of a run, or to save it. A collective call; nothing happens where they have."""
        self._check_own_parameters("synchronize")
        bound, before = self.gradients.were_checked(self.current.states), held.values(self.current.states)
        for part in self.current.parts if not self.synchronized else ():
            if not bound:
                part.state.bind_tensors()
            assert part.local is not None
            part.local.synchronize(self.write_hyper(None))
            part.state.parameters_were_written()
            if not bound:
                part.state.release_gradients()
        held.put_back(self.current.states, before)

    @contextmanager
    def at_last_sync(self) -> Iterator[None]:
        """Within it the model has the parameters that all ranks had after the last exchange: to evaluate them, or to
        write the model to a file. No steps are to be taken in it. Where ranks have the same ones, nothing changes."""
        self._check_own_parameters("at_last_sync")
        restore: list[Callable[[], object]] = []
        for part in self.current.parts:
            if part.local is not None and part.local.taken:
                for p, last in zip(part.state.values_now(), part.local.last_parameters(), strict=True):
                    value = p.data  # whose version is its own: it is no change by the user
                    restore.append(partial(value.copy_, value.clone()))
                    value.copy_(last)
                restore.append(part.state.parameters_were_written)
                part.state.parameters_were_written()
        self._at_last_sync = True
        try:
            yield
        finally:
            self._at_last_sync = False
            for put_back in restore:
                put_back()

    def begin_step(self) -> None:
        """Before anything of a step, or DDP's first bucket: all ranks have the same model and are in the same stage."""
        self._check_own_parameters("a step")
        if self._room is not None:
            raise ValueError(
                "a step after make_room, and before a load: load the state that it made room for, or build a new "
                "optimizer"
            )
        for group in self.param_groups:
            check_keys(group, self.defaults.keys())
            check_numbers_of(group)
        self.find_ranks()
        self._adopt_state()
        self._rebuild_if_changed()
        if not self.current.ranks_agree:
            self._start()
        if not self.current.parts:
            return
        captured = capturing(self.setup.device)
        if self._needs_step_number and captured:
            raise ValueError(
                f"a CUDA graph can't hold this step of {self.setup.name}: the host chooses what kind of step it is, "
                f"and a replay asks no host. Capture forward and backward alone, or steps of stage 2 of OneBitAdam or "
                f"OneBitLamb"
            )
        if not captured:
            self._read_last_step()
        if self.current.stages.freeze_is_due:
            self._freeze()
        if self.kind == "1 bit":
            self.overlap.prepare()
        elif self.kind != "full":
            self.overlap.pause()

    def claim_node_mean(self) -> bool:
        """By DDP's hook in stage 2, for each bucket: whether it is to average it over the node, which the step then
        leaves out. With overlap the exchange does it, chunk by chunk."""
        gradients = self.gradients
        gradients.node_mean = gradients.node_mean is not False and not (self.overlap.on and self.kind == "1 bit")
        return gradients.node_mean

    def write_hyper(self, factor: Tensor | None) -> Tensor:
        """Every group's numbers for the coming step, on the device. factor: what gradients are multiplied by."""
        step = self.current.stages.steps + 1 if self._needs_step_number else 1  # which no number of the step depends on
        return self._hyper.write(self.setup.hyper_rows(step), [group["lr"] for group in self.param_groups], factor)

    @eager
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of the coming step so that their norm is at most `max_norm`; the norm as it was.

        Stage 1: the norm of the averaged gradient. Stage 2: the root mean square over ranks of the local norms. One
        coefficient for all ranks, applied as the step reads the gradients; `.grad` itself keeps its values. Of a local
        step: this rank's own norm, and its own coefficient.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm!r}: gradients are scaled down to this norm, it must be above 0")
        param_groups.check_gradients(self.param_groups, self.setup.names)
        self.begin_step()
        self.overlap.disable(
            "gradients are clipped by their norm, for which all of them have to be there before the first message "
            "leaves. Pass overlap=False, or don't clip"
        )
        squares = torch.zeros(1, dtype=torch.float64, device=self.setup.device)
        with counted(self.pay_off.waits):
            self._average_and_check_gradients(squares)
        if self.kind == "1 bit":
            everyone = self.setup.topology.everyone
            everyone.all_sum(squares, "averaging gradient norms (all-reduce of one number)").wait()
            squares /= self.setup.topology.nodes
        else:
            self.setup.topology.add_parts(squares)
        return self.gradients.clip(squares.sqrt().float(), max_norm)[0]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """With overlap=True: around every backward pass but a step's last. DDP has its own."""
        before, self.overlap.accumulating = self.overlap.accumulating, True
        try:
            yield
        finally:
            self.overlap.accumulating = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ever; a clipping coefficient that no step has used goes with the gradients, and so do early messages."""
        self.overlap.cancel_in_flight()
        self.gradients.reset()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ever, in stage 1: after the freeze there is no variance to be had for new parameters."""
        if self._built:
            if self.compressing:
                raise ValueError(
                    "add_param_group: stage 2 has begun, and new parameters would have no frozen variance. Add all of "
                    "them before the freeze, or build a new optimizer"
                )
            self._read_last_step()
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError('add_param_group takes a dict with its parameters under "params"')
        mask = param_group.get(MASK)
        if MASK in param_group:  # it stays out of the group, which is saved
            param_group = {name: value for name, value in param_group.items() if name != MASK}
        super().add_param_group(param_group)
        try:
            self._check_sharding()
            check_keys(self.param_groups[-1], self.defaults.keys())
            check_group(self.param_groups[-1])
            param_groups.check_parameters(self.param_groups[-1]["params"])
            if any(group["params"] for group in self.param_groups):
                param_groups.device_of(self.param_groups)
            if mask is not None:
                self._held |= held.held_by(self.param_groups[-1], mask)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_built") and name in options_named(type(self)):  # type: ignore[arg-type]
            where = f"the groups: for group in optimizer.param_groups: group[{name!r}] = ..."
            instead = where if name in self.defaults else f"the constructor: {type(self).__name__}(..., {name}=...)"
            raise AttributeError(f"{name} set on the optimizer would change nothing. It belongs to {instead}")
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled: it holds a process group and its parameters' "
            f"addresses. Save state_dict(), build another with the same arguments, and load it"
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: what all ranks share and, in stage 2, this rank's residuals under names of its own.

        Save it on every rank (torch.save a file each, or torch.distributed.checkpoint).
        """
        self.overlap.check_at_rest("state_dict")
        if not self.synchronized:
            raise ValueError(
                "state_dict between two exchanges: ranks have taken local steps, each to parameters of its own. Save "
                "when optimizer.synchronized is True (optimizer.schedule.next_sync says after which step), or call "
                "optimizer.synchronize() on every rank first"
            )
        self._read_last_step()
        self._adopt_state()
        if self._room is None:
            saved, numbers = schema.save(self.setup, self.current), schema.progress(self.setup, self.current)
        else:
            saved, numbers = {p: dict(own) for p, own in self._room[0].items()}, deepcopy(self._room[1])
        shown, self.state = self.state, defaultdict(dict, saved)
        self.param_groups[0][PROGRESS] = numbers
        try:
            return super().state_dict()
        finally:
            self.state, self.param_groups[0][PROGRESS] = shown, {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state: this class's or torch.optim.AdamW's. Load on every rank.

        The same number of ranks continues bit for bit. With another number give the states of all ranks, put together
        by `onebit.merge_states`: the mean of their residuals is kept.
        """
        self.prepare_load(state_dict)()

    @torch.no_grad()
    def prepare_load(self, state_dict: dict[str, Any]) -> Callable[[], None]:
        """Build and check a saved state. Nothing changes until the result is called: it installs the state."""
        self.overlap.check_at_rest("load_state_dict")
        self._check_own_parameters("load_state_dict")
        self.find_ranks()
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"a state is a dict, as state_dict() returns it, not a {type(state_dict).__name__}")
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._rebuild_if_changed()
        groups, snapshot = restore.restored(self.setup, self.current, state_dict)

        @torch.no_grad()
        def install() -> None:
            for group, new in zip(self.param_groups, groups, strict=True):
                group.update(new)
            self._install(snapshot)
            for after in self._optimizer_load_state_dict_post_hooks.values():
                after(self)

        return install

    def show_room(self, state: dict[Tensor, dict[str, Tensor]], numbers: dict[str, Any]) -> None:
        """Until the next load, `optimizer.state` and `state_dict` are these: a tool fills and loads them. See
        `onebit.make_room`."""
        self.overlap.check_at_rest("make_room")
        self._rebuild_if_changed()
        self._room = (state, numbers)
        self._show_state()

    def find_ranks(self) -> None:
        """Use the default process group, where it was made only after the optimizer; with node_group="auto" find the
        ranks of every host. The first time, at the latest in the first step or load, a collective call."""
        alone = self._process_group is None and isinstance(self.setup.topology.everyone, LocalTransport)
        if not dist.is_initialized() if alone else self._ranks_found:
            return
        topology = Topology.of(self._process_group, self._node_group, self.setup.device)
        if topology.everyone.size == 1:
            self._process_group, self._ranks_found = topology.everyone, True
            return
        if alone and self.compressing:
            raise ValueError(
                f"a process group of {topology.everyone.size} ranks was made when this optimizer was in stage 2 "
                f"already, as one rank alone: call init_process_group before the first step and before "
                f"load_state_dict"
            )
        self._ranks_found = True
        if alone or topology.node is not None:
            self.setup = replace(self.setup, topology=topology)
            self._build()

    def _start(self) -> None:
        """The first step, or the first after a load."""
        current = self.current
        first = current.stages.steps == 0 and not self.compressing  # parameters may have been loaded or broadcast since
        for state in current.states:
            if first or not state.master_is_current:
                state.copy_parameters_to_master()
        self.after_step += agree_on_start(self.setup, current, averaged_in_backward=self.averaged_in_backward)
        current.ranks_agree = True
        if first and self.setup.topology.everyone.rank == 0:
            self.after_step.append(current.stages.warn_of_short_runs)
        for part in current.parts:
            part.fold_momentum_again = None

    def _check_own_parameters(self, what: str) -> None:
        if self._at_last_sync:
            raise ValueError(f"{what} within at_last_sync(): there the model is not this rank's. Leave the block first")

    def _flags_of_replies(self) -> Tensor:
        """int32 [1]: not 0 where a message that left in backward says that a gradient is not finite, on any rank, or
        where one of those is not that stay uncompressed."""
        self.gradients.flags.zero_()
        if apart := self.current.uncompressed:  # their means are the same on all ranks, and so is what is found
            self._average_and_check_gradients(agree=False, states=apart)
        self.current.read_flags(self.gradients.flags)
        self.gradients.ranks_agreed = True
        for state in self.current.states:
            state.bind_tensors()
        return self.gradients.flags

    def _averaged_and_checked(self) -> Tensor:
        """Average gradients where that is due. int32 [1]: not 0 where one of them is not finite on any rank, or on
        this one, as long as `gradients.ranks_agreed` is False."""
        if not self.gradients.were_checked(self.current.states):  # else clip_grad_norm_ was here
            self._average_and_check_gradients(agree=self.kind != "1 bit" or not self.current.flags_travel(self.setup))
        return self.gradients.flags

    def _average_and_check_gradients(
        self, squares: Tensor | None = None, agree: bool = True, states: Sequence[FlatState] | None = None
    ) -> None:
        """Average them, where nobody else does, and find out if all are finite. A full-precision step: over all ranks;
        a compressed one: over those of a node, of which each then has the mean of its slice, what is not compressed
        over all ranks, as what is finite; a local one: both over the ranks that move alike."""
        setup, kind = self.setup, self.kind
        states = self.current.states if states is None else states
        held.clear_gradients(states)
        unscale, found_inf = self._unscale(), getattr(self, "found_inf", None)
        wire, topology = setup.options.gradient_dtype, setup.topology
        if kind == "full":
            if not self.gradients.averaged_in_backward:
                self.gradients.average(states, topology.copies, unscale, wire)
        elif kind == "1 bit":
            self.gradients.average([s for s in states if not s.compressed], topology.copies, unscale, wire)
            if topology.node is not None:
                self.gradients.average_slices([s for s in states if s.compressed], topology.node, unscale, wire)
        elif topology.node is not None and not self.gradients.node_mean:
            self.gradients.average(states, topology.node, unscale, wire)
        alike = topology.everyone if kind in ("full", "1 bit") else topology.sender
        hyper = self.write_hyper(unscale)
        slices = topology.slices if kind == "1 bit" else 1
        self.gradients.check_finite(states, alike, hyper, found_inf, squares, slices=slices, agree=agree)

    def _unscale(self) -> Tensor | None:
        """1 / GradScaler's scale, unless gradients are as they should be. What backward has averaged over ranks whose
        scales differ, which `report_to_scaler` can't help with every scaler, is divided by the mean of them on all."""
        scale, copies = getattr(self, "grad_scale", None), self.setup.topology.copies
        if scale is not None and self.gradients.averaged_in_backward and self.compressing and self.averages_gradients:
            scale = scale.detach().to(self.setup.device, torch.float64).view(1) / copies.size
            copies.all_sum(scale, "averaging the scales of gradients (all-reduce of one number)").wait()
        return reciprocal(scale, self.setup.device)

    def _count(self, flags: Tensor, kind: Kind) -> None:
        """A step ends: counted on the device, with what the host will want to know of it."""
        current = self.current
        due = self.pay_off.step_ended("no overlap" if kind == "1 bit" and self.overlap.compares else _TIMED_AS[kind])
        current.compressed_steps += kind == "1 bit"
        if due and self.setup.topology.everyone.rank == 0:
            found = self._report(current.stages.skipped_as_known)
            self.after_step.append(partial(tell, "%s", found))
        alone = kind in ("local", "sync")
        shortened = None if kind == "full" else current.shortened
        current.stages.count(flags, current.compressed, len(self.param_groups), alone=alone, shortened=shortened)
        self.gradients.reset()
        self.leave_out_buckets(self._next_sends_momentum)
        for state in current.states:
            state.parameters_were_written()
            state.release_gradients()
        while self.after_step:  # after the collectives: where warnings are errors, no other rank waits for ever
            self.after_step.pop(0)()

    @property
    def _needs_step_number(self) -> bool:
        """Whether the coming step depends on how many were taken."""
        return self.setup.algorithm.uses_step_number or self.current.needs_step_number

    @property
    def _next_sends_momentum(self) -> bool:
        """Whether the step after this one has no use for averaged gradients, if this one was taken. If not, and it has,
        `step` averages them."""
        if not self.compressing or self.setup.topology.node is not None:
            return False
        return self.setup.algorithm.kind(self.current.stages.steps + 2) != "full"

    def _read_last_step(self) -> None:
        stages = self.current.stages
        corrected = self.setup.options.bias_correction
        beta2s = [param_groups.betas_of(group)[1] if corrected else 0.0 for group in self.param_groups]
        if stages.read_last_step(beta2s):
            if self.compressing:
                if self.current.drop_first_momentum():
                    self._show_state()
            elif self.setup.topology.everyone.rank == 0:
                stages.log_progress()

    def _report(self, skipped: int) -> Report:
        """skipped: so far, also before the state was saved that this run goes on from."""
        own = skipped - self.current.stages.skipped_before
        return made_report(self.pay_off, self.setup, self.current, not self.averaged_in_backward, own)

    def _warn_of_skips(self) -> None:
        """Of what is read one step late, with the gradients of this one: which rank it is shows in them."""
        stages = self.current.stages
        if capturing(self.setup.device):
            return
        if stages.skipped_in_a_row in WARNED_AFTER:
            self.after_step += warnings_of_skips(self.setup, self.current.states, stages.skipped_in_a_row)
        if stages.left_out_in_a_row in WARNED_AFTER:
            self.after_step.append(partial(warn_of_local_skips, stages.left_out_in_a_row))
        if stages.shortened_in_a_row == SHORTENED_FOR and self.setup.topology.everyone.rank == 0:
            self.after_step.append(warn_of_growth)

    def _freeze(self) -> None:
        zeros = self.current.freeze(self.setup)
        self._show_state()
        if self.setup.topology.everyone.rank == 0:
            zero_variance = self.setup.options.zero_variance
            stages = self.current.stages
            asked = stages.rule.freeze_step
            at_once = asked is not None and asked < stages.steps == stages.steps_before
            found = stages.steps, at_once, zeros, zero_variance, self.current.ddp_averages
            self.after_step.append(partial(report_freeze, *found))

    def _report_variance(self, step: int, flags: Tensor) -> None:
        zeros = self.current.without_variance(self.setup, step)
        if zeros and self.setup.topology.everyone.rank == 0 and not flags.any():
            when = f"after step {step}, the last one that updates it"
            self.after_step.append(partial(warn_of_zeros, when, zeros, self.setup.options.zero_variance))

    @torch.no_grad()
    def _adopt_state(self) -> None:
        """What users have put into `optimizer.state` holds, as in torch's optimizers: what was cleared starts anew."""
        self._use_groups()
        if self._room is not None or self._live.is_as_shown(self.state):
            return
        if not (changed := self._live.changed(self.state)):
            return
        self.overlap.check_at_rest("changing optimizer.state")
        if not any(self.state.values()):
            self._built = False  # as if no step had been taken
            self._build()
            return
        name = self.setup.name_of(changed[0])
        if self.compressing:
            raise ValueError(
                f"the state of parameter {name} in optimizer.state was changed after the freeze: what stage 2 keeps, "
                f"messages and every rank's residuals, goes together. Load a whole state (load_state_dict), clear all "
                f"of it (optimizer.state.clear(): stage 1 begins anew), or put back what was there"
            )
        if any(not self.state.get(p) and any(p is q for g in self.param_groups for q in g["params"]) for p in changed):
            raise ValueError(
                f"optimizer.state has nothing for parameter {name} any more, and others keep theirs: onebit counts the "
                f"same steps for all. Clear all of it (optimizer.state.clear()), or write zeros into its exp_avg and "
                f"exp_avg_sq"
            )
        self._install(restore.adopted(self.setup, self.current, self.state))

    def _use_groups(self) -> None:
        if self.setup.groups is not self.param_groups:
            self.setup = replace(self.setup, groups=self.param_groups)

    def _rebuild_if_changed(self) -> None:
        self._use_groups()
        if param_groups.identities(self.param_groups) == self._built_for:
            return
        self._check_sharding()
        if self.compressing:
            raise ValueError(
                "the parameters changed after the freeze (one was added or removed, or its requires_grad, its memory "
                "format or its group's compress was switched): stage 2 has no variance for others, and messages are in "
                "the order of the memory. Put them back, or build a new optimizer"
            )
        for group in self.param_groups:
            param_groups.check_parameters(group["params"])
        self._build()

    def _check_compressed(self, states: Sequence[FlatState]) -> None:
        apart = [state for state in states if not state.compressed]
        if apart and len(apart) == len(states):
            raise ValueError(
                "every param group that trains has compress=False: nothing would be compressed. Leave it out of some "
                "group, or take torch.optim.AdamW"
            )
        if apart:
            self.setup.algorithm.check_uncompressed()

    def _check_sharding(self) -> None:
        if self._built and (shard_group(self.param_groups) is None) != (self.setup.topology.shard is None):
            raise ValueError(
                "the parameters were sharded, or made whole, after the optimizer was built: call fully_shard first, "
                "then build the optimizer with model.parameters()"
            )

    def _build(self) -> None:
        """State for the parameters as they are now; that of parameters known before is kept."""
        states, before = self.setup.flat_states(), {}
        self._check_compressed(states)
        for state in states:
            self.setup.add_stage_1_fields(state)
        if self._built:
            before = {p: (old, i) for old in self.current.states for i, p in enumerate(old.params)}
        for state in states:
            for i, p in enumerate(state.params):
                if p in before:
                    state.copy_parameter_from(i, *before[p])
        stages = self.current.stages if self._built else Stages(self.setup.freeze_rule(states), self.setup.device)
        self._built_for = param_groups.identities(self.param_groups)
        self._hyper = HyperTable(len(self.param_groups), self.setup.device)
        self._built = True
        self._install(Snapshot([Part(state) for state in states], stages))

    def _install(self, snapshot: Snapshot) -> None:
        self.current, self._room = snapshot, None
        self.gradients.reset()
        self.leave_out_buckets(False)
        self._show_state()

    def _show_state(self) -> None:
        """`optimizer.state`, and the key that a state has in the first param group: tools look for what they find."""
        self.state = defaultdict(dict, schema.live(self.setup, self.current) if self._room is None else self._room[0])
        self.param_groups[0][PROGRESS] = {}
        self._live = LiveState(self.state)


def _has_none(buckets: bool) -> None:
    """Without DDP."""
