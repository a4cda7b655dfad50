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
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from typing_extensions import Unpack

from onebit.checkpoint import restore, schema
from onebit.collectives.agreement import all_gather_json
from onebit.collectives.waits import counted
from onebit.kernels.streams import capturing
from onebit.optim import masks, param_groups
from onebit.optim.algorithm import Algorithm
from onebit.optim.eager import eager
from onebit.optim.grad_scaler import report_to_scaler
from onebit.optim.gradients import Gradients
from onebit.optim.options import (
    MASK,
    OptionArguments,
    Options,
    check_groups,
    check_last_group,
    options_named,
    refuse_attribute,
    with_python_numbers,
)
from onebit.optim.param_groups import COMPRESS, PROGRESS
from onebit.optim.setup import RankFinder, Setup
from onebit.optim.snapshot import Snapshot
from onebit.optim.steps import STEPS, Step, kind_of_step
from onebit.optimizers.progress import Progress
from onebit.optimizers.shown_state import ShownState
from onebit.parallel.overlap import Overlap
from onebit.parallel.start_checks import start
from onebit.parallel.watch import Watch
from onebit.report.pay_off import PayOff
from onebit.report.skips import warnings_of_skips
from onebit.warning import warn

_ENDING = "comparing how many steps ranks have taken (all-gather)"
_NOT_MERGED = (
    "state_dict: what compression has left out is another on every rank, and not in this state: a run that loads it "
    "loses that. Call optimizer.synchronize() on every rank first, or save with onebit.save. This is said once"
)


class StepListener(Protocol):
    def paused(self) -> AbstractContextManager[None]:
        """To the messages of a step."""

    def step_ended(self, step: Step, flags: Tensor) -> None:
        """Its gradients are still there."""

    def parameters_changed(self) -> None:
        """Between two steps."""

    def end(self, those_without_state: bool = False) -> None:
        """Ranks change."""


class RunFollower(Protocol):
    @property
    def follows(self) -> bool:
        """Whether steps still come."""

    @property
    def why_not(self) -> str:
        """Why `end` has no state."""

    def end(self) -> Any:
        """The run's state, a `Shared` of onebit.elastic, or None. Ranks change."""


class OneBitOptimizer(Progress):
    """Subclasses pass their algorithm, the defaults of their param groups, and the options of every optimizer.

    setup: all that stays the same during training. current: all that training changes.
    """

    _step_supports_amp_scaling = True  # GradScaler hands over its scale and what it found, and always calls step

    without_options: ClassVar[Mapping[str, str]] = {}
    """Of `Options`, those that this optimizer does not take, and what to do."""

    @torch.inference_mode(False)  # what is built under it could not be written to outside
    def __init__(
        self,
        params: Iterable[Any],
        defaults: Mapping[str, Any],
        algorithm: Algorithm,
        **options: Unpack[OptionArguments],
    ) -> None:
        ranks = options.pop("process_group", None), options.pop("node_group", "auto")
        chosen = Options.of(options, self.without_options)
        self._built, self._has_warned, self._fixed = False, False, dict[Tensor, Tensor]()
        self.begun = False  # whether the kind of the coming step is decided
        self.coming: Step | None = None  # that step, until it has ended
        super().__init__(params, {**defaults, COMPRESS: True})
        self.register_state_dict_post_hook(with_python_numbers)  # before the user's
        groups, device = self.param_groups, param_groups.device_of(self.param_groups)
        self.rank_finder = RankFinder(*ranks, groups, chosen, device)
        topology, name = self.rank_finder.topology, type(self).__name__
        self.setup = Setup(name, algorithm, chosen, topology, device, groups, fixed=self._fixed)
        self.setup.warn_if_early()
        self.gradients = Gradients(device)
        self.overlap = Overlap(self, chosen.overlap)
        self.averaged_in_backward = False  # in full-precision steps, if not left to `step`: see onebit.attach
        self.leave_out_buckets: Callable[[bool], None] = lambda buckets: None  # DDP's, of the coming pass
        self.after_step: list[Callable[[], None]] = []  # logs and warnings, due when a step's collectives are over
        self.pay_off = PayOff(device)
        self.watch = Watch(chosen.check_every)
        self.reforms = 0  # how often the run has gone on with other ranks: see onebit.reform
        self.before_reform: dict[str, Any] = {}  # what this rank was in the group before the last one
        self.giver: StepListener | None = None  # for processes that will join: see onebit.Giver
        self.follower: RunFollower | None = None  # of a process that will join: see onebit.follow
        self._built_for = param_groups.identities(groups)
        self.install(Snapshot.of(self.setup))
        self._built = True
        self._refused_attributes = options_named(type(self))  # type: ignore[arg-type]

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the stage that is due, the same on every rank, or none on any."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        param_groups.check_gradients(self.param_groups, self.setup.names)
        with counted(self.pay_off.waits), nullcontext() if self.giver is None else self.giver.paused():
            step = self.begin_step()
            setup, current, gradients = self.setup, self.current, self.gradients
            if not current.parts:
                return loss  # no parameter trains
            self.coming = step = self.overlap.sent(step)
            gradients.set_scale(getattr(self, "grad_scale", None), getattr(self, "found_inf", None), setup, current)
            flags = step.average_and_check()
            self.after_step.extend(warnings_of_skips(setup, current, gradients.hyper))
            step.move(gradients.write_hyper(setup, current), flags)
            report_to_scaler(self, flags)
            self.after_step.extend(self.pay_off.due(step.timed_as, setup, current, self.averaged_in_backward))
            self.end_step(step, flags)
            self.leave_out_buckets(step.next_needs_no_mean)
            try:
                self.watch.check(setup, current)
            finally:
                while self.after_step:  # after the collectives: where warnings are errors, no other rank waits for ever
                    self.after_step.pop(0)()
        return loss

    def end_step(self, step: Step, flags: Tensor) -> None:
        if self.gradients.squares is not None:
            step.measure(self.gradients.squares, flags)
        self.after_step.extend(step.count(flags))
        if self.giver is not None:
            self.giver.step_ended(step, flags)
        self.gradients.reset()
        self.begun, self.coming = False, None

    @eager
    def synchronize(self) -> None:
        """Make one state of those of all ranks, and go on from it: before `state_dict()`, or at the end of a run.

        A collective call: every rank calls it after the same step. In stage 2 what compression has left out becomes its
        mean over ranks, 4 bytes an element each way (2 with a gradient_dtype of 16 bits); after local steps all ranks
        have the same parameters at once, and not only when the schedule says so. In stage 1 nothing happens.
        """
        self.check_synchronize()
        if not self.compressing or (self.current.merged and self.synchronized):
            return
        own = int(self.current.stages.counts.sum())
        taken = all_gather_json(self.setup.topology.everyone, self.setup.device, own, _ENDING)
        if len(set(taken)) > 1:
            raise ValueError(
                f"synchronize: ranks have taken other numbers of steps ({taken}, by rank). Give every rank as many "
                f"batches as the others (drop_last=True, or the least of all ranks), and call it after the same step"
            )
        if not self.synchronized:
            self.end_local_steps()
        self.catch_up()
        self.begun = False  # the coming step finds another momentum
        self.current.merge(self.setup)

    def check_synchronize(self) -> None:
        """A ValueError where this rank can't synchronize."""
        self.overlap.check_at_rest("synchronize")
        self.current.check_own_parameters("synchronize")
        self.current.check_whole("synchronize")

    def end_local_steps(self) -> None:
        """The exchange after local steps, of no step."""
        self.coming = None
        hyper = self.gradients.write_hyper(self.setup, self.current)
        bound = self.gradients.were_checked(self.current.states)
        self.current.synchronize(hyper, bound, keep=self.setup.options.elastic)
        if self.giver is not None:
            self.giver.parameters_changed()

    def at_last_sync(self) -> AbstractContextManager[None]:
        """A context in which the model has the parameters that all ranks had after the last exchange: to evaluate or to
        write the model. Take no step in the context. If ranks have the same parameters, nothing changes."""
        return self.current.keep_last_sync()

    def begin_step(self) -> Step:
        """The coming step. The first call decides its kind, in `step` or with the first gradient of a backward pass:
        all ranks then have the same model and are in the same stage. Later calls look for what users have changed."""
        self.current.check_own_parameters("a step")
        if self.follower is not None:
            raise ValueError("a step on a process that follows a run (onebit.follow): call onebit.reform first")
        check_groups(self.param_groups, self.defaults.keys())
        self.catch_up()
        self.current.check_whole("a step")
        self.find_ranks()
        if (device := self.new_device) is not None:
            raise ValueError(
                f"the parameters have moved to {device}, and the state is on {self.setup.device}: move it with "
                f"optimizer.load_state_dict(optimizer.state_dict())"
            )
        current = self.current
        if not current.ranks_agree:
            self.after_step.extend(start(self.setup, current, averaged_in_backward=self.averaged_in_backward))
        if current.parts:
            current.check_captured(self.setup)
        if current.parts and not self.begun and current.stages.freeze_is_due:
            self.after_step.extend(current.freeze(self.setup))
            self.install(current)
        kind = kind_of_step(self.setup, current)
        if current.momentum_is_dense and not self.begun:
            current.use_momentum(self.setup, kind)
        self.coming = step = STEPS[kind](self.setup, current, self.gradients)
        if current.parts and not self.begun:
            self.overlap.prepare(step)
        self.begun = True
        return step

    def find_ranks(self) -> None:
        """Go on with the ranks and the parameters that there are now: see `RankFinder.find`. The first time, at the
        latest in the first step or load, a collective call."""
        self.move_with_parameters()
        others = self.rank_finder.find(self.compressing)
        if others:
            self.setup = replace(self.setup, topology=self.rank_finder.topology)
        elif param_groups.identities(self.param_groups) != self._built_for:
            self.rank_finder.check_sharding(self.param_groups)
        else:
            return
        self.install(Snapshot.of(self.setup, self.current))
        self._built_for = param_groups.identities(self.param_groups)

    @property
    def new_device(self) -> torch.device | None:
        """Where the parameters are, if the state is elsewhere."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    if p.device != self.setup.device:
                        device = param_groups.device_of(self.param_groups)
                        return None if device == self.setup.device else device
                    break
        return None

    def move_with_parameters(self) -> None:
        """Until a step was begun or a state loaded: trainers move a model that has its optimizer."""
        current = self.current
        if current.ranks_agree or current.stages.steps or current.stages.compressing:
            return
        if (device := self.new_device) is not None:
            setup = self._setup_on(device)
            self._move_to(setup, Snapshot.of(setup))

    def _setup_on(self, device: torch.device) -> Setup:
        return replace(self.setup, device=device, fixed={p: mask.to(device) for p, mask in self._fixed.items()})

    def _move_to(self, setup: Setup, snapshot: Snapshot) -> None:
        self.rank_finder.device, self.setup, self._fixed = setup.device, setup, setup.fixed
        self.gradients, self.pay_off = Gradients(setup.device), PayOff(setup.device)
        self.install(snapshot)

    def install(self, snapshot: Snapshot) -> None:
        """Go on from `snapshot`, and show it in `optimizer.state`; with the key that a state has in the first param
        group, since tools look for what they find."""
        if snapshot is not self.__dict__.get("current"):
            self.current, self.begun, self.coming = snapshot, False, None
            self.gradients.reset()
            self.leave_out_buckets(False)
        self.shown_state = ShownState(self.setup, snapshot)
        self.state = self.shown_state.state
        self.param_groups[0][PROGRESS] = ""

    def catch_up(self) -> None:
        """Take over what users have put into `optimizer.state`, and what the host has to know of the last step."""
        adopted = self.shown_state.adopted(self.setup, self.current, self.state)
        if adopted is not self.current:
            self.overlap.check_at_rest("changing optimizer.state")
            self.install(adopted)
        if not capturing(self.setup.device):
            self.current.read_last_step(self.setup)

    @eager
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of the coming step so that their norm is at most `max_norm`. Returns the norm before.

        The norm is that of the averaged gradient; where a step sends 1 bit an element, what full-precision steps and
        the root mean square over ranks of the local norms say of that norm. One coefficient for all ranks, applied as
        the step reads the gradients; `.grad` itself keeps its values. In a local step each rank goes by what its own
        norm says, and has a coefficient of its own.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm!r}: gradients are scaled down to this norm, it must be above 0")
        param_groups.check_gradients(self.param_groups, self.setup.names)
        step = self.begin_step()
        self.overlap.disable(
            "gradients are clipped by their norm, for which all of them have to be there before the first message "
            "leaves. Pass overlap=False, or don't clip"
        )
        squares = torch.zeros(1, dtype=torch.float64, device=self.setup.device)
        self.gradients.max_norm = max_norm
        with counted(self.pay_off.waits):
            step.average_and_check(squares)
        step.add_squares(squares)
        return self.gradients.clip(squares, step.of_mean(squares), max_norm)[0]

    def no_sync(self) -> AbstractContextManager[None]:
        """With overlap=True: around every backward pass but a step's last. DDP has its own."""
        return self.overlap.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; drops a clipping coefficient that no step has used, and messages that left early."""
        self.overlap.cancel_in_flight()
        self.gradients.reset()
        self.begun = False
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, in stage 1 only: after the freeze new parameters would have no variance."""
        if self._built:
            self.current.check_stage_1("add_param_group")
            self.catch_up()
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError('add_param_group takes a dict with its parameters under "params"')
        mask = param_group.get(MASK)
        if MASK in param_group:  # it stays out of the group, which is saved
            param_group = {name: value for name, value in param_group.items() if name != MASK}
        super().add_param_group(param_group)
        try:
            if self._built:
                self.rank_finder.check_sharding(self.param_groups)
            check_last_group(self.param_groups, self.defaults.keys())
            if mask is not None:
                self._fixed |= masks.fixed_elements(self.param_groups[-1], mask)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_refused_attributes", ()):
            refuse_attribute(type(self), name, self.defaults)
        super().__setattr__(name, value)
        if name == "param_groups" and "setup" in self.__dict__:
            self.setup = replace(self.setup, groups=value)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled: it holds a process group and its parameters' "
            f"addresses. Save state_dict(), build another with the same arguments, and load it"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state, without communication: the same on every rank after `synchronize()`, of which any rank's will do.

        Without a `synchronize()` since the last compressed step it lacks what compression has left out, with a warning.
        One process alone needs none.
        """
        self.overlap.check_at_rest("state_dict")
        self.current.check_synchronized()
        self.catch_up()
        if self.compressing and not self.current.merged:
            if self.setup.topology.everyone.size == 1:
                self.synchronize()
            elif not self._has_warned:
                self._has_warned = True
                warn(_NOT_MERGED)
        shown, self.state = self.state, defaultdict(dict, schema.save(self.setup, self.current))
        self.param_groups[0][PROGRESS] = schema.as_text(schema.progress(self.setup, self.current))
        try:
            return super().state_dict()
        finally:
            self.state, self.param_groups[0][PROGRESS] = shown, ""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state: this class's or torch.optim.AdamW's. Load the same on every rank, of any number.

        The run continues bit for bit on as many ranks as there were when `synchronize()` was called before the save.
        """
        self.prepare_load(state_dict)()

    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare_load(self, state_dict: dict[str, Any]) -> Callable[[], None]:
        """Build and check a saved state. Nothing changes until the result is called: it installs the state."""
        self.overlap.check_at_rest("load_state_dict")
        self.current.check_own_parameters("load_state_dict")
        self.find_ranks()
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"a state is a dict, as state_dict() returns it, not a {type(state_dict).__name__}")
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        setup = self.setup if (device := self.new_device) is None else self._setup_on(device)
        groups, snapshot = restore.from_state_dict(setup, self.current, state_dict)

        @torch.inference_mode(False)
        @torch.no_grad()
        def install() -> None:
            for group, new in zip(self.param_groups, groups, strict=True):
                group.update(new)
            if setup.device == self.setup.device:
                self.install(snapshot)
            else:
                self._move_to(setup, snapshot)
            for after in self._optimizer_load_state_dict_post_hooks.values():
                after(self)

        return install
