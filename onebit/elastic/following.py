"""A process that will join: it has the state of a run, and takes every step of the run's ranks, to the same bits.

It sends nothing and adds nothing. What it has is laid out as the giver's is, and takes the place of the optimizer's own
state, which is new again when ranks change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint import schema
from onebit.collectives.hand_over import receive_tensors
from onebit.collectives.link import Link, connect
from onebit.collectives.topology import Topology
from onebit.collectives.transport.protocol import CollectiveError, LocalTransport
from onebit.elastic.giving import PHASE
from onebit.elastic.members import NEW, is_new
from onebit.elastic.moving import Shared, put_group_values
from onebit.kernels import streams
from onebit.kernels.log import tell
from onebit.optim import facts, merging
from onebit.optim.gradients import Gradients
from onebit.optim.run import Run
from onebit.optim.state import State
from onebit.optim.steps import STEPS
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.unwrap import own_optimizer

PATIENCE = 10.0  # seconds without a byte after which a change of ranks goes on without what was to come


def follow(optimizer: torch.optim.Optimizer, address: str) -> None:
    """Get the state of a run from a `Giver`, and take its steps, until `onebit.reform`. The run goes on meanwhile.

        onebit.follow(optimizer, address)     # on a process that will join: returns when it has caught up
        onebit.reform(optimizer, group)       # with the ranks that are there

    The model and the optimizer are built with the arguments that the others have. Take no step and load nothing. If
    what has come is not the others' state, bit for bit, when `reform` begins, or the giver is gone, `reform` has the
    whole state sent: then the others wait for that.

    The state comes when the run's next step has ended. From then on the parameters change with every step of the run:
    do nothing with the model until `reform`.

    Args:
        optimizer: one of onebit, wrapped or not.
        address: the giver's `address`.
    """
    inner = own_optimizer(optimizer, "follow")
    if not is_new(inner):
        raise ValueError(f"follow: this process has taken steps or loaded a state. {NEW}")
    if inner.follower is not None and inner.follower.follows:
        raise ValueError("follow: this optimizer follows a run already. Call onebit.reform, or build a new one")
    inner.move_with_parameters()
    link, inner.follower = connect(address), None
    follower = Follower(inner, link)
    try:
        follower.catch_up()
    except BaseException:
        follower.close()
        raise
    inner.follower = follower


class Absent(LocalTransport):
    """The ranks of the run, of which this process is none."""

    name = "a run that this process follows"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Follower:
    """A thread that takes the run's steps."""

    def __init__(self, inner: OneBitOptimizer, link: Link) -> None:
        self._inner, self._link = inner, link
        self._gradients = Gradients(inner.setup.device)
        self._run: Run | None = None  # as far as this process has followed it
        self._groups: list[dict[str, Any]] | None = None  # of the run's param groups, once it has ended
        self._failed: Exception | None = None
        self._caught_up = threading.Event()
        for state in inner.run.state.states:
            for name in tuple(state.fields):
                state.remove(name)
        inner.install(inner.run)
        self._thread = threading.Thread(target=self._follow, name="onebit follower", daemon=True)
        self._thread.start()

    @property
    def follows(self) -> bool:
        return self._thread.is_alive()

    @property
    def why_not(self) -> str:
        """It has not followed to the end."""
        if self._failed is not None:
            return str(self._failed)
        return "" if self._groups is not None else f"nothing came for {PATIENCE:.0f} s"

    def catch_up(self) -> None:
        """Wait until no step is left to take."""
        start = time.monotonic()
        while not self._caught_up.wait(5):
            seconds = time.monotonic() - start
            tell("following: %.1f MB have come in %.0f s, the first with a step", self._link.received / 1e6, seconds)
        if self._failed is not None:
            raise self._failed
        if self._groups is not None and self._run is None:
            raise CollectiveError(f"{PHASE}: the run changed its ranks before the state was here. Follow it again")

    def end(self) -> Shared | None:
        """The run's state, if all of it is here. Ranks change: the giver sends no more."""
        begun = time.monotonic()
        while self._thread.is_alive() and time.monotonic() - max(begun, self._link.heard) < PATIENCE:
            self._thread.join(0.05)
        self.close()
        if self._run is None or self._groups is None:
            return None
        self._run.read_last_step()
        shared = Shared.of(self._inner, schema.save(self._run, residuals=False), schema.progress(self._run))
        return replace(shared, groups=self._groups)

    def close(self) -> None:
        """Follow no further. The optimizer has a state of its own again."""
        self._link.close()
        self._thread.join()
        self._inner.install(replace(self._inner.run, state=State.of(self._inner.setup)))

    @torch.no_grad()
    def _follow(self) -> None:
        device = self._inner.setup.device
        try:
            if streams.has_streams(device):
                streams.choose_device(streams.current(device))
            while self._groups is None:
                self._go_on()
        except Exception as error:
            self._failed = error
        finally:
            self._link.close()
            self._caught_up.set()

    def _go_on(self) -> None:
        value, tensors = receive_tensors(self._link, 0, self._inner.setup.device, PHASE)
        match value["kind"]:
            case "that is all":
                self._caught_up.set()
            case "end":
                self._groups = value["groups"]
            case "error":
                raise ValueError(f"follow: the run can't give its state: {value['why']}")
            case "state":
                self._begin(value, Shared.unpacked(value, tensors))
            case _:
                self._take(value, tensors)

    def _begin(self, value: Mapping[str, Any], shared: Shared) -> None:
        inner, self._run = self._inner, None
        own = {**facts.of_model(inner.setup), **facts.of_options(inner.setup)}
        if other := [name for name, each in own.items() if value["facts"].get(name) != each]:
            name = other[0]
            raise ValueError(
                f"follow: the run has {name} {value['facts'].get(name)}, this process {own[name]}. Build the model and "
                f"the optimizer with the arguments that the others have"
            )
        nodes, slices = value["nodes"], value["slices"]
        node = Absent(0, slices) if slices > 1 else None
        setup = replace(inner.setup, topology=Topology(Absent(1, nodes * slices), Absent(0, nodes), node))
        restoration = shared.restored(setup)
        run = restoration.run()
        shared.put_parameters(inner, restoration.options)
        self._run = run

    def _take(self, value: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        assert self._run is not None, "a state comes first"
        run, state = self._run, self._run.state
        put_group_values(self._inner, value["groups"])
        run.read_last_step()
        if value["compressing"] and not state.stages.compressing:
            run.freeze(value["chunks"])
        flags = torch.full((1,), int(value["skipped"]), dtype=torch.int32, device=run.setup.device)
        merging.use_momentum(run.setup, state, value["kind"])
        step = STEPS[value["kind"]](run, self._gradients)
        if not value["skipped"]:
            hyper, *shared = tensors
            step.follow(iter(shared), hyper, flags)
        step.count(flags)
        state.mean_norm.put(value["mean_norm"])
        for p in (p for each in state.states for p in each.params):
            p.grad = None
        if state.stages.counts.tolist() != value["counts"]:
            raise CollectiveError(f"{PHASE}: a step is missing")
