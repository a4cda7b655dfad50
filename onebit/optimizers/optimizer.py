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

from collections import OrderedDict, defaultdict
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
from onebit.optim import masks, merging, param_groups
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
from onebit.optim.run import Run
from onebit.optim.setup import RankFinder, Setup
from onebit.optim.state import State
from onebit.optim.steps import STEPS, Step
from onebit.optimizers.progress import Progress
from onebit.optimizers.shown_state import ShownState
from onebit.parallel.overlap import Overlap
from onebit.parallel.start_checks import start
from onebit.parallel.watch import Watch
from onebit.report.foreign_clip import ForeignClip
from onebit.report.pay_off import PayOff
from onebit.report.skips import warnings_of_skips
from onebit.report.untrained import Untrained
from onebit.warning import warn

_ENDING = "comparing how many steps ranks have taken (all-gather)"
_NOT_MERGED = (
    "state_dict: what compression has left out is another on every rank, and not in this state: a run that loads it "
    "loses that. Call optimizer.synchronize() on every rank first, or save with onebit.save. This is said once"
)


class StepListener(Protocol):
    def paused(self) -> AbstractContextManager[None]:
        """Give way to the messages of a step."""

    def step_ended(self, step: Step, flags: Tensor) -> None:
        """Note what a step has done. Its gradients are still there."""

    def parameters_changed(self) -> None:
        """Note that parameters were changed between two steps."""

    def end(self, those_without_state: bool = False) -> None:
        """End, since ranks change."""


class RunFollower(Protocol):
    @property
    def follows(self) -> bool:
        """Return whether steps still come."""

    @property
    def why_not(self) -> str:
        """Why `end` has no state."""

    def end(self) -> Any:
        """The run's state, a `Shared` of onebit.elastic, or None. Ranks change."""


class OneBitOptimizer(Progress):
    """The base class of optimizers: subclasses pass their algorithm.

    `run` is what stays while it trains (`run.setup`), and what changes (`run.state`).

    Args:
        params: as a torch.optim.Optimizer takes them.
        defaults: those of param groups: lr, betas, eps and weight_decay.
        algorithm: the update rule.
        options: those of every optimizer, as `OneBitAdam` has them.
    """

    _step_supports_amp_scaling = True  # GradScaler hands over its scale and what it found, and always calls step

    without_options: ClassVar[Mapping[str, str]] = {}
    """The `Options` that this optimizer does not take, and what to do."""

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
        self._untrained: Untrained | None = None  # once some steps have shown that all parameters train
        self._built, self._has_warned, self._fixed = False, False, dict[Tensor, Tensor]()
        self.begun = False  # whether the kind of the coming step is decided
        self.coming: Step | None = None  # that step, until it has ended
        super().__init__(params, {**defaults, COMPRESS: True})
        self.register_state_dict_post_hook(with_python_numbers)  # before the user's
        groups, device = self.param_groups, param_groups.device_of(self.param_groups)
        self.rank_finder = RankFinder(*ranks, groups, chosen, device)
        topology, name = self.rank_finder.topology, type(self).__name__
        setup = Setup(name, algorithm, chosen, topology, device, groups, fixed=self._fixed)
        setup.warn_if_early()
        self.gradients = Gradients(device)
        self.overlap = Overlap(self, chosen.overlap)
        self.averaged_in_backward = False  # in full-precision steps, if not left to `step`: see onebit.attach
        self.leave_out_buckets: Callable[[bool], None] = lambda buckets: None  # DDP's, of the coming pass
        self.after_step: list[Callable[[], None]] = []  # logs and warnings, due when a step's collectives are over
        self.foreign_clip: ForeignClip | None = ForeignClip()  # until some steps have shown that nobody else clips
        self.pay_off = PayOff(device)
        self.watch = Watch(chosen.check_every)
        self.reforms = 0  # how often the run has gone on with other ranks: see onebit.reform
        self.before_reform: dict[str, Any] = {}  # what this rank was in the group before the last one
        self.giver: StepListener | None = None  # for processes that will join: see onebit.Giver
        self.follower: RunFollower | None = None  # of a process that will join: see onebit.follow
        self._built_for, self._untrained = param_groups.identities(groups), Untrained(groups)
        self.install(Run(setup, State.of(setup)))
        self._built = True
        self._refused_attributes = options_named(type(self))  # type: ignore[arg-type]

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the stage that is due, the same on every rank, or none on any. A collective call.

        Args:
            closure: computes the loss and the gradients anew, as torch's optimizers take it.

        Returns:
            What `closure` returned; None without one.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        param_groups.check_gradients(self.param_groups, self.run.setup.names)
        if self._untrained is not None:
            self.after_step.extend(self._untrained.warnings(self.run.setup))
            self._untrained = None if self._untrained.is_over else self._untrained
        with counted(self.pay_off.waits), nullcontext() if self.giver is None else self.giver.paused():
            step = self.begin_step()
            run, gradients = self.run, self.gradients
            if not run.state.parts:  # no parameter trains
                while self.after_step:
                    self.after_step.pop(0)()
                return loss
            self.coming = step = self.overlap.sent(step)
            gradients.set_scale(getattr(self, "grad_scale", None), getattr(self, "found_inf", None), run)
            if self.foreign_clip is not None:
                self.after_step.extend(self.foreign_clip.warnings(run, gradients))
                self.foreign_clip = None if self.foreign_clip.is_over else self.foreign_clip
            flags = step.average_and_check()
            self.after_step.extend(warnings_of_skips(run, gradients.hyper))
            step.move(gradients.write_hyper(run), flags)
            report_to_scaler(self, flags)
            self.after_step.extend(self.pay_off.due(step.timed_as, run, self.averaged_in_backward))
            self.end_step(step, flags)
            self.leave_out_buckets(step.next_needs_no_mean)
            try:
                self.watch.check(run)
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
        if not self.compressing or (self.run.state.merged and self.synchronized):
            return
        own = int(self.run.state.stages.counts.sum())
        taken = all_gather_json(self.run.setup.topology.everyone, self.run.setup.device, own, _ENDING)
        if len(set(taken)) > 1:
            raise ValueError(
                f"synchronize: ranks have taken other numbers of steps ({taken}, by rank). Give every rank as many "
                f"batches as the others (drop_last=True, or the least of all ranks), and call it after the same step"
            )
        if not self.synchronized:
            self.end_local_steps()
        self.catch_up()
        self.begun = False  # the coming step finds another momentum
        merging.merge(self.run.setup, self.run.state)

    def check_synchronize(self) -> None:
        """A ValueError where this rank can't synchronize."""
        self.overlap.check_at_rest("synchronize")
        self.run.check_own_parameters("synchronize")
        self.run.check_whole("synchronize")

    def end_local_steps(self) -> None:
        """The exchange after local steps, of no step."""
        self.coming = None
        hyper = self.gradients.write_hyper(self.run)
        bound = self.gradients.were_checked(self.run.state.states)
        self.run.synchronize_local_steps(hyper, bound)
        if self.giver is not None:
            self.giver.parameters_changed()

    def at_last_sync(self) -> AbstractContextManager[None]:
        """Give the model the parameters that all ranks had after the last exchange: to evaluate or to write it.

        Returns:
            A context. Take no step in it. If ranks have the same parameters, it changes nothing.
        """
        return self.run.keep_last_sync()

    def begin_step(self) -> Step:
        """The coming step. The first call decides its kind, in `step` or with the first gradient of a backward pass:
        all ranks then have the same model and are in the same stage. Later calls look for what users have changed."""
        self.run.check_own_parameters("a step")
        if self.follower is not None:
            raise ValueError("a step on a process that follows a run (onebit.follow): call onebit.reform first")
        check_groups(self.param_groups, self.defaults.keys())
        self.catch_up()
        if self.run.state.under_way is None or not self.overlap.in_flight:
            self.run.check_whole("a step")
        self.find_ranks()
        if (device := self.new_device) is not None:
            raise ValueError(
                f"the parameters have moved to {device}, and the state is on {self.run.setup.device}: move it with "
                f"optimizer.load_state_dict(optimizer.state_dict())"
            )
        run, state = self.run, self.run.state
        if not state.ranks_agree:
            self.after_step.extend(start(run, averaged_in_backward=self.averaged_in_backward))
        if state.parts:
            run.check_captured()
        if state.parts and not self.begun and state.stages.freeze_is_due:
            self.after_step.extend(run.freeze())
            self.install(run)
        kind = run.kind()
        if state.momentum_at == "exp_avg" and not self.begun:
            merging.use_momentum(run.setup, state, kind)
        self.coming = step = STEPS[kind](run, self.gradients)
        if state.parts and not self.begun:
            self.overlap.prepare(step)
        self.begun = True
        return step

    def find_ranks(self) -> None:
        """Go on with the ranks and the parameters that there are now: see `RankFinder.find`. The first time, at the
        latest in the first step or load, a collective call."""
        self.move_with_parameters()
        others = self.rank_finder.find(self.run.state.stages.compressing)
        if others:
            self.change_setup(topology=self.rank_finder.topology)
        elif param_groups.identities(self.param_groups) != self._built_for:
            self.rank_finder.check_sharding(self.param_groups)
        else:
            return
        self.install(Run(self.run.setup, State.of(self.run.setup, self.run.state)))
        self._built_for = param_groups.identities(self.param_groups)

    @property
    def new_device(self) -> torch.device | None:
        """The device of the parameters, if the state is elsewhere."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    if p.device != self.run.setup.device:
                        device = param_groups.device_of(self.param_groups)
                        return None if device == self.run.setup.device else device
                    break
        return None

    def move_with_parameters(self) -> None:
        """Follow the parameters until a step was begun or a state loaded: trainers move or cast a model that has its
        optimizer."""
        state = self.run.state
        if state.ranks_agree or state.stages.steps or state.stages.compressing:
            return
        if (device := self.new_device) is not None:
            setup = self._setup_on(device)
            self._move_to(Run(setup, State.of(setup)))
        elif any(p.dtype != each.dtype for each in state.states for p in each.params):
            self.install(replace(self.run, state=State.of(self.run.setup)))

    def change_setup(self, **changes: Any) -> None:
        self.run = replace(self.run, setup=replace(self.run.setup, **changes))

    def _setup_on(self, device: torch.device) -> Setup:
        return replace(self.run.setup, device=device, fixed={p: mask.to(device) for p, mask in self._fixed.items()})

    def _move_to(self, run: Run) -> None:
        device, self._fixed = run.setup.device, run.setup.fixed
        self.rank_finder.device, self.gradients, self.pay_off = device, Gradients(device), PayOff(device)
        self.install(run)

    def install(self, run: Run) -> None:
        """Go on with `run`, and show its state in `optimizer.state`; with the key that a state has in the first param
        group, since tools look for what they find."""
        before, self.run = self.__dict__.get("run"), run
        if before is None or run.state is not before.state:
            self.begun, self.coming = False, None
            self.gradients.reset()
            self.leave_out_buckets(False)
        self.shown_state = ShownState(run)
        self.state = self.shown_state.state
        self.param_groups[0][PROGRESS] = ""

    def catch_up(self) -> None:
        """Take over what users have put into `optimizer.state`, and what the host has to know of the last step."""
        adopted = self.shown_state.adopted(self.run, self.state)
        if adopted is not self.run:
            self.overlap.check_at_rest("changing optimizer.state")
            self.install(adopted)
        if not capturing(self.run.setup.device):
            self.run.read_last_step()

    @eager
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of the coming step so that their norm is at most `max_norm`.

        The norm is that of the averaged gradient; where a step sends 1 bit an element, what full-precision steps and
        the root mean square over ranks of the local norms say of that norm. One coefficient for all ranks, applied as
        the step reads the gradients; `.grad` itself keeps its values. In a local step each rank goes by what its own
        norm says, and has a coefficient of its own.

        Args:
            max_norm: the largest norm that a step may have.

        Returns:
            The norm before, on the device.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm!r}: gradients are scaled down to this norm, it must be above 0")
        param_groups.check_gradients(self.param_groups, self.run.setup.names)
        step = self.begin_step()
        self.overlap.disable(
            "gradients are clipped by their norm, for which all of them have to be there before the first message "
            "leaves. Pass overlap=False, or don't clip"
        )
        squares = torch.zeros(1, dtype=torch.float64, device=self.run.setup.device)
        self.gradients.clip_begins(self.run.state.states)
        self.gradients.max_norm = max_norm
        with counted(self.pay_off.waits):
            step.average_and_check(squares)
        step.add_squares(squares)
        return self.gradients.clip(squares, step.of_mean(squares), max_norm)[0]

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients with overlap=True: around every backward pass but a step's last. DDP has its own.

        Returns:
            A context.
        """
        return self.overlap.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as torch does, a clipping coefficient that no step has used, and messages that left early.

        Args:
            set_to_none: None in place of zeros.
        """
        self.overlap.cancel_in_flight()
        self.gradients.reset()
        self.begun = False
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters as torch does, in stage 1 only: after the freeze they would have no variance.

        Args:
            param_group: a dict with the parameters under "params", and what differs from the defaults.
        """
        if self._built:
            self.run.check_stage_1("add_param_group")
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
        if name == "param_groups" and "run" in self.__dict__:
            self.change_setup(groups=value)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled: it holds a process group and its parameters' "
            f"addresses. Save state_dict(), build another with the same arguments, and load it"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without communication: after `synchronize()` it is the same on every rank.

        Without a `synchronize()` since the last compressed step it lacks what compression has left out, with a warning.
        One process alone needs none. Hooks that were registered to run before may call `synchronize()`, where every
        rank calls `state_dict()`.

        Returns:
            A dict as torch's optimizers have it. Any rank's will do.
        """
        self.overlap.check_at_rest("state_dict")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self.run.check_synchronized()
        self.catch_up()
        if self.compressing and not self.run.state.merged:
            if self.run.setup.topology.everyone.size == 1:
                self.synchronize()
            elif not self._has_warned:
                self._has_warned = True
                warn(_NOT_MERGED)
        shown, self.state = self.state, defaultdict(dict, schema.save(self.run))
        hooks, self._optimizer_state_dict_pre_hooks = self._optimizer_state_dict_pre_hooks, OrderedDict()  # have run
        self.param_groups[0][PROGRESS] = schema.as_text(schema.progress(self.run))
        try:
            return super().state_dict()
        finally:
            self.state, self.param_groups[0][PROGRESS] = shown, ""
            self._optimizer_state_dict_pre_hooks = hooks

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state: this class's or torch.optim.AdamW's. Load the same on every rank, of any number.

        The run continues bit for bit on as many ranks as there were when `synchronize()` was called before the save.

        Args:
            state_dict: what `state_dict()`, or that of a torch.optim.AdamW, returned.
        """
        self.prepare_load(state_dict)()

    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare_load(self, state_dict: dict[str, Any]) -> Callable[[], None]:
        """Check a saved state. Nothing changes until the result is called: it lets the present state go, whose memory
        the new one needs, then builds and installs that."""
        self.overlap.check_at_rest("load_state_dict")
        self.run.check_own_parameters("load_state_dict")
        self.find_ranks()
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"a state is a dict, as state_dict() returns it, not a {type(state_dict).__name__}")
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        setup = self.run.setup if (device := self.new_device) is None else self._setup_on(device)
        restoration = restore.from_state_dict(setup, state_dict)

        @torch.inference_mode(False)
        @torch.no_grad()
        def install() -> None:
            self.install(replace(self.run, state=self.run.state.let_go()))
            run = restoration.run()
            for group, new in zip(self.param_groups, restoration.options, strict=True):
                group.update(new)
            if setup.device == self.run.setup.device:
                self.install(run)
            else:
                self._move_to(run)
            for after in self._optimizer_load_state_dict_post_hooks.values():
                after(self)

        return install
