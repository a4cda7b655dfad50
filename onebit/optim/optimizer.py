"""What 1-bit Adam and 1-bit LAMB share: two stages, the step, and when not to take it.

    stage 1    gradients are averaged uncompressed; the optimizer moves as its uncompressed original
    freeze     the variance is kept for good as d = 1 / (sqrt(vhat) + eps)
    stage 2    momentum is averaged with 1 bit an element; gradients stay local

(paper 001, Algorithm 1; paper 003, Algorithm 1.) A step with a gradient that is not finite on any rank changes nothing
on any rank. No step makes the host wait for the device: what the host has to know of a step (was it taken, how large
is the variance) it reads one step later.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from onebit.checkpoint import schema as states
from onebit.checkpoint.restore import prepared
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import LocalTransport
from onebit.kernels.data.layout import BLOCK_SIZE
from onebit.kernels.data.wire import Norm, Scale
from onebit.optim import param_groups as parameters
from onebit.optim.flat_state import Space
from onebit.optim.freeze import FreezeRule, Lagging, tell_of_freeze
from onebit.optim.gradients import Gradients, HyperTable, reciprocal
from onebit.optim.options import Dead, OnDivergence, Options, check_group, warn_if_early
from onebit.parallel.overlap import Overlap
from onebit.parallel.start_checks import agree_on_start
from onebit.parallel.watch import Watch
from onebit.report.diagnostics import diagnose


class OneBitOptimizer(torch.optim.Optimizer):
    """Subclasses give the two updates: `_warmup` and `_compressed`."""

    _step_supports_amp_scaling = True  # GradScaler hands over its scale and what it found, and always calls step

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int | Literal["auto"] = "auto",
        freeze_threshold: float = 0.96,
        freeze_window: int | None = None,
        bias_correction: bool = True,
        dead: Dead = "floor",
        variance_floor: float = 1e-2,
        scale: Scale = "block",
        norm: Norm = "l1",
        block_size: int = BLOCK_SIZE,
        chunks: int | Literal["auto"] = "auto",
        master_weights: bool = True,
        overlap: bool = False,
        check_every: int = 1000,
        on_divergence: OnDivergence = "raise",
        gradient_dtype: torch.dtype | None = None,
        process_group: Any = None,
    ) -> None:
        self._options = Options(
            freeze_step, freeze_threshold, freeze_window, bias_correction, dead, variance_floor, scale, norm,
            block_size, chunks, master_weights, overlap, check_every, on_divergence, gradient_dtype,
        )  # fmt: skip
        self._process_group, self._transport = process_group, transport_for(process_group)
        self._spaces: list[Space] = []
        self._names: dict[Tensor, str] = {}
        self._averaged_by_ddp = False
        self._compressing = False
        self._overlap = Overlap(self, overlap)
        self._to_tell: list[Callable[[], None]] = []
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        warn_if_early(self._options, self._beta2)
        self._device = parameters.device_of(self.param_groups)
        self._gradients = Gradients(self._device)
        self._counts = torch.zeros(2, dtype=torch.int64, device=self._device)  # steps taken, steps skipped
        self._one = torch.ones(1, dtype=torch.int64, device=self._device)
        self._lagging, self._watch = Lagging(), Watch()
        self._steps = 0  # taken, as far as the host has heard: all but the last one
        self._build()
        self._rule = self._new_rule()

    @property
    def compressing(self) -> bool:
        """Whether stage 2 has begun."""
        return self._compressing

    @property
    def skipped_steps(self) -> int:
        """Steps not taken since a gradient was not finite. Reading it waits for the device."""
        return int(self._counts[1])

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank has sent in compressed messages."""
        return self._sent_before + sum(s.exchange.wire_bytes for s in self._spaces if s.exchange is not None)

    @property
    def freeze_ratio(self) -> float | None:
        """What freeze_step="auto" looks at, None while there is none. Adam: ||vhat||_1 over what it was a window
        earlier. LAMB: the share of elements whose coefficients were stable over a window."""
        return self._rule.ratio

    @property
    def steps(self) -> int:
        """Steps taken. Reading it waits for the device."""
        return int(self._counts[0])

    def diagnostics(self) -> dict[str, dict[str, float]]:
        """By parameter: norms of its variance and residuals, the mean scale of its messages; for LAMB also its
        coefficient and ratio. Cheap to call now and then; waits for the device."""
        self._overlap.check_at_rest("diagnostics")
        return diagnose(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the stage that is due, the same on every rank, or none on any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters.check_gradients(self.param_groups, self._names)
        self._begin()
        self._overlap.stop_if_unfit()
        if self._overlap.on:
            self._overlap.finish(self._gradients.flags)
            for space in self._spaces:
                space.bind_tensors()
        elif not self._gradients.are_seen(self._spaces):  # else clip_grad_norm_ was here
            self._look_at_gradients()
        hyper = self._write_hyper(self._gradients.factor(self._unscale()))
        for space in self._spaces:
            if self._compressing:
                self._compressed(space, hyper, self._gradients.flags)
            else:
                self._warmup(space, hyper, self._gradients.flags)
        self._overlap.put_back(self._gradients.flags)
        self._finish()
        self._watch.look(self)
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of the coming step so that their norm is at most `max_norm`; the norm as it was.

        Stage 1: the norm of the averaged gradient. Stage 2: the root mean square over ranks of the local norms. One
        coefficient for all ranks, applied as the step reads the gradients; `.grad` itself keeps its values.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm!r}: gradients are scaled down to this norm, it must be above 0")
        parameters.check_gradients(self.param_groups, self._names)
        self._begin()
        self._overlap.stop(
            "gradients are clipped by their norm, for which all of them have to be there before the first message "
            "leaves. Pass overlap=False, or don't clip"
        )
        squares = torch.zeros(1, dtype=torch.float64, device=self._device)
        self._look_at_gradients(squares)
        if self._compressing:
            self._transport.all_sum(squares, "averaging gradient norms (all-reduce of one number)").wait()
            squares /= self._transport.size
        return self._gradients.clip(squares.sqrt().float(), max_norm)[0]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """With overlap=True: around every backward pass but a step's last. DDP has its own."""
        before, self._overlap.holding = self._overlap.holding, True
        try:
            yield
        finally:
            self._overlap.holding = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ever; a clipping coefficient that no step has used goes with the gradients, and so do early messages."""
        self._overlap.take_back()
        self._gradients.forget()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ever, in stage 1: after the freeze there is no variance to be had for new parameters."""
        if self._compressing:
            raise ValueError(
                "add_param_group: stage 2 has begun, and new parameters would have no frozen variance. Add all of them "
                "before the freeze, or build a new optimizer"
            )
        if self._spaces:
            self._settle()
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError('add_param_group takes a dict with its parameters under "params"')
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            parameters.check_parameters(self.param_groups[-1]["params"])
            parameters.device_of(self.param_groups)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled: it holds a process group and its parameters' "
            f"addresses. Save state_dict(), build another with the same arguments, and load it"
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: what all ranks share and, in stage 2, this rank's residuals under names of its own.

        Save it on every rank (torch.save a file each, or torch.distributed.checkpoint).
        """
        self._overlap.check_at_rest("state_dict")
        self._settle()
        shown, self.state = self.state, defaultdict(dict, states.save(self))
        self.param_groups[0][states.PROGRESS] = states.progress(self)
        try:
            return super().state_dict()
        finally:
            self.state = shown
            del self.param_groups[0][states.PROGRESS]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state: this class's or torch.optim.AdamW's. Load on every rank.

        The same number of ranks continues bit for bit. With another number give the states of all ranks, put together
        by `onebit.merge_states`: the mean of their residuals is kept.
        """
        self._prepared(state_dict)()

    @torch.no_grad()
    def _prepared(self, state_dict: dict[str, Any]) -> Callable[[], None]:
        """Build and check a saved state; nothing changes until the result is called."""
        self._overlap.check_at_rest("load_state_dict")
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"a state is a dict, as state_dict() returns it, not a {type(state_dict).__name__}")
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        install = prepared(self, state_dict)

        @torch.no_grad()
        def finish() -> None:
            install()
            for after in self._optimizer_load_state_dict_post_hooks.values():
                after(self)

        return finish

    _space_type: ClassVar[type[Space]] = Space

    @abstractmethod
    def _new_rule(self) -> FreezeRule:
        """When stage 1 ends."""

    @abstractmethod
    def _warmup(self, space: Space, hyper: Tensor, flags: Tensor) -> None:
        """Stage 1 on the averaged gradient."""

    @abstractmethod
    def _compressed(self, space: Space, hyper: Tensor, flags: Tensor) -> None:
        """Stage 2 on the local gradient."""

    def _save_more(self, space: Space) -> dict[str, list[Tensor]]:
        """A subclass's own state: under each name one tensor a parameter."""
        return {}

    def _load_more(self, space: Space, saved: Sequence[states.Saved]) -> None:
        """Put into a new space what `_save_more` saved, as far as it is there."""

    def _loaded(self, steps: int, saved: Sequence[states.Saved]) -> None:
        """A state of `steps` steps has been loaded."""

    def _diagnose_more(self, space: Space) -> dict[str, Tensor]:
        """A subclass's own diagnostics: fp32 [parameters] of each name."""
        return {}

    def _facts(self) -> Mapping[str, float | str]:
        """What ranks must have in common, beyond the options of all optimizers."""
        return {}

    def _begin(self) -> None:
        """Before anything of a step, or DDP's first bucket: all ranks mean the same model and the same stage."""
        self._join()
        self._rebuild_if_changed()
        if not self._agreed:
            self._start()
        if self._listens:
            self._settle()
        if not self._compressing and self._rule.due(self._steps):
            self._freeze()
        if self._compressing:
            self._overlap.begin()

    def _start(self) -> None:
        """The first step, or the first after a load."""
        first = self._steps == 0 and not self._compressing  # parameters may have been loaded or broadcast since
        for space in self._spaces:
            if first or not space.master_is_true:
                space.copy_parameters_to_master()
        self._to_tell += agree_on_start(self)
        self._agreed = True
        for space in self._spaces:
            space.fold_again = None

    def _join(self) -> None:
        """The default process group, where it was made only after the optimizer."""
        if self._process_group is None and isinstance(self._transport, LocalTransport) and dist.is_initialized():
            transport = transport_for(None)
            if transport.size == 1:
                self._process_group = transport
                return
            if self._compressing:
                raise ValueError(
                    f"a process group of {transport.size} ranks was made when this optimizer was in stage 2 already, "
                    f"as one rank alone: call init_process_group before the first step and before load_state_dict"
                )
            self._transport = transport
            self._build()

    def _look_at_gradients(self, squares: Tensor | None = None) -> None:
        """Average them in stage 1, where nobody else does, and find out on all ranks if all are finite."""
        unscale, found_inf = self._unscale(), getattr(self, "found_inf", None)
        if not self._compressing and not self._averaged_by_ddp:
            self._gradients.average(self._spaces, self._transport, unscale, self._options.gradient_dtype)
        self._gradients.look(self._spaces, self._transport, self._write_hyper(unscale), found_inf, squares)

    def _unscale(self) -> Tensor | None:
        """1 / GradScaler's scale, unless gradients are as they should be."""
        return reciprocal(getattr(self, "grad_scale", None), self._device)

    def _write_hyper(self, factor: Tensor | None) -> Tensor:
        """Every group's numbers for the coming step, on the device."""
        step = 1 if self._compressing else self._steps + 1  # nothing in stage 2 depends on it
        rows = parameters.rows(self.param_groups, step, self._options.bias_correction)
        return self._hyper.write(rows, [group["lr"] for group in self.param_groups], factor)

    def _finish(self) -> None:
        """Count the step on the device, and leave what the host will want to know of it."""
        self._counts.index_add_(0, self._gradients.flags, self._one)
        if self._listens:
            watches = self._rule.watches and not self._compressing
            numbers = self._rule.measure(self._spaces, len(self.param_groups)) if watches else []
            self._lagging.put(torch.cat([self._counts.double(), *numbers]))
        self._gradients.forget()
        for space in self._spaces:
            space.release()
        while self._to_tell:  # after the collectives: where warnings are errors, no other rank waits for ever
            self._to_tell.pop(0)()

    def _settle(self) -> None:
        """Hear of the last step, if that has not been done."""
        numbers = self._lagging.take()
        if numbers is None:
            return
        before, self._steps = self._steps, int(numbers[0])
        if self._steps > before:
            self._taken(numbers[2:])

    @property
    def _listens(self) -> bool:
        """Whether the host has to hear of every step."""
        return not self._compressing

    def _taken(self, numbers: Sequence[float]) -> None:
        """A step was taken, and left `numbers`."""
        if self._rule.watches:
            corrected = self._options.bias_correction
            beta2s = [group["betas"][1] if corrected else 0.0 for group in self.param_groups]
            self._rule.hear(self._steps, numbers, beta2s)
            if self._transport.rank == 0:
                self._rule.tell(self._steps)

    def _freeze(self) -> None:
        """Stage 2 begins with the coming step: a collective call where chunks="auto" has to be measured."""
        if not any(float(space.exp_avg_sq.max()) > 0 for space in self._spaces):
            raise ValueError(
                f"stage 2 is to begin after {self._steps} steps, and there is no variance to freeze: every second "
                f"moment is 0. Load the state of a prior run (load_state_dict takes torch.optim.AdamW's), or give "
                f"stage 1 some steps: freeze_step=1 or more"
            )
        rows = parameters.rows(self.param_groups, max(1, self._steps), self._options.bias_correction)
        without = [
            (self._name(space.params[i]), count, space.numels[i])
            for space in self._spaces
            for i, count in space.freeze(rows).items()
        ]
        self._compressing = True
        self._show_state()
        if self._transport.rank == 0:
            self._to_tell.append(partial(tell_of_freeze, self._steps, without, self._options.dead))

    def _rebuild_if_changed(self) -> None:
        if parameters.marks(self.param_groups) == self._built_for:
            return
        if self._compressing:
            raise ValueError(
                "the parameters changed after the freeze (one was added or removed, or its requires_grad was "
                "switched): stage 2 has no variance for others. Put them back, or build a new optimizer"
            )
        self._build()

    def _build(self) -> None:
        """State for the parameters as they are now; that of parameters known before is kept."""
        before = {p: (space, i) for space in self._spaces for i, p in enumerate(space.params)}
        self._spaces = [
            self._space_type(params, groups, self._options, self._transport)
            for params, groups in parameters.by_dtype(self.param_groups)
        ]
        for space in self._spaces:
            space.copy_parameters_to_master()
            for i, p in enumerate(space.params):
                if p in before:
                    space.take(i, *before[p])
        self._built_for = parameters.marks(self.param_groups)
        self._hyper = HyperTable(len(self.param_groups), self._device)
        self._agreed, self._residuals_missing, self._sent_before = False, False, 0
        self._gradients.forget()
        self._show_state()

    @property
    def _window(self) -> int:
        return self._options.freeze_window or round(1 / (1 - self._beta2))

    def _show_state(self) -> None:
        """`optimizer.state[p]`: views of each parameter's part."""
        self.state = defaultdict(dict)
        for space in self._spaces:
            for i, p in enumerate(space.params):
                self.state[p] = space.views(i)

    @property
    def _beta2(self) -> float:
        return max(group["betas"][1] for group in self.param_groups)

    def _name(self, parameter: Tensor) -> str:
        return parameters.name_of(parameter, self.param_groups, self._names)
