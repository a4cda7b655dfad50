"""What the papers compare with, on the library's own pieces, and torch's optimizers on compressed gradients.

LambBasic1Bit    LAMB, then 1-bit momentum with variance and coefficients frozen (Li et al. 2021, section 3.4)
FrozenAdam       1-bit Adam's freeze without its compression ("1-bit Adam (32 bits)", Tang et al. 2021, section 7.1)
OnFewBits        an optimizer of torch on gradients of a few bits; Adam with 1 is the papers' naive compression, whose
                 variance goes on (Tang et al. 2021, section 3)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from onebit import OneBitLamb
from onebit.collectives import CompressedAllReduce
from onebit.collectives.averaging import average_
from onebit.collectives.reply import AskedReply
from onebit.collectives.transport import transport_for
from onebit.kernels.data.wire import Bits
from onebit.kernels.passes import AdamUpdate, Parameters
from onebit.optim.flat_state import FlatState
from onebit.optim.lamb import Lamb
from onebit.optim.reducer import MomentumReducer

FLOOR = 0.01  # 1-bit Adam's variance_floor


class BasicLamb(Lamb):
    """x = x - lr c_avg (m d + wd x): no fresh variance, no ratio."""

    def compressed_step(self, state: FlatState, reducer: MomentumReducer, hyper: Tensor, flags: Tensor) -> None:
        x, c_avg = Parameters(state.parameters, state.get("master")), state["coefficient_average"]
        update = AdamUpdate(state.layout.all(), x, state["denominator"], reducer.replies, hyper, c_avg)
        state.backend.run(update)


class LambBasic1Bit(OneBitLamb):
    algorithm = BasicLamb


class FrozenAdam(torch.optim.AdamW):
    """AdamW; after step `freeze` m = b1 m + (1-b1) g;  x = x - lr (m d + wd x), d as 1-bit Adam has it, in 32 bits."""

    def __init__(self, params: Iterable[Any], *, freeze: int, process_group: Any = None, **options: Any) -> None:
        super().__init__(params, **options)
        self.freeze, self.steps_done, self._transport = freeze, 0, transport_for(process_group)
        self.denominators: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        average_([p.grad for _, p in params], self._transport)
        self.steps_done += 1
        if self.steps_done <= self.freeze:
            return super().step()
        for group, p in params:
            (beta1, beta2), state = group["betas"], self.state[p]
            if p not in self.denominators:
                v = state["exp_avg_sq"] / (1 - beta2**self.freeze)
                mean = v.sum() / (v != 0).sum().clamp(min=1)  # of those that have one
                v = torch.where(v == 0, mean, v.clamp(min=FLOOR * mean))
                self.denominators[p] = torch.where(v == 0, 0.0, 1 / (v.sqrt() + group["eps"]))
            m = state["exp_avg"].lerp_(p.grad, 1 - beta1)
            p.sub_(m * self.denominators[p] + group["weight_decay"] * p, alpha=group["lr"])
        return None


class Muon(torch.optim.Optimizer):
    """torch's AdamW for the first group of parameters, its Muon for the second, with the same rate."""

    def __init__(self, params: Sequence[dict[str, Any]], **options: Any) -> None:
        super().__init__(params, options)
        rest, matrices = self.param_groups
        alike = {name: options[name] for name in ("lr", "weight_decay")}
        adam = torch.optim.AdamW([rest], **options)
        muon = torch.optim.Muon([matrices], **alike, adjust_lr_fn="match_rms_adamw")
        self.parts = adam, muon
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class OnFewBits(torch.optim.Optimizer):
    """It averages gradients with `bits` an element and error feedback, from step `warmup` + 1 on."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        bits: Bits,
        reply: AskedReply = "auto",
        warmup: int = 0,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self.warmup, self.steps_done = warmup, 0
        self._transport = transport_for(process_group)
        self._fixed = [p for group in self.param_groups for p in group["params"]]
        self.all_reduce = CompressedAllReduce(
            [p.numel() for p in self._fixed],
            device=self._fixed[0].device,
            bits=bits,
            reply=reply,
            chunks=1,
            process_group=process_group,
        )
        self.register_step_pre_hook(lambda *_: self._average())

    @property
    def wire_bytes(self) -> int:
        return self.all_reduce.wire_bytes

    @torch.no_grad()
    def _average(self) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._fixed]
        if self.steps_done < self.warmup:
            average_(grads, self._transport)
        else:
            self.all_reduce(grads)
        for p, g in zip(self._fixed, grads, strict=True):
            p.grad = g
        self.steps_done += 1


class AdamOnFewBits(OnFewBits, torch.optim.AdamW):
    pass


class SgdOnFewBits(OnFewBits, torch.optim.SGD):
    pass


class MuonOnFewBits(OnFewBits, Muon):
    pass
