"""1-bit Adam (paper 001, Algorithm 1).

stage 1    m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  x = x - lr (mhat / (sqrt(vhat) + eps) + wd x)
stage 2    m = compressed_all_reduce(b1 m + (1-b1) g_i);  x = x - lr (m d + wd x)
"""

from __future__ import annotations

from torch import Tensor

from onebit.collectives.exchange import Chunk
from onebit.optim.flat_state import Space
from onebit.optim.freeze import VarianceRule
from onebit.optim.optimizer import OneBitOptimizer


class OneBitAdam(OneBitOptimizer):
    """AdamW that, once its variance has settled, averages momentum with 1 bit an element instead of gradients.

        optimizer = onebit.OneBitAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
        onebit.attach(ddp_model, optimizer)        # with DDP; without it the optimizer communicates alone

    freeze_step: the last step of stage 1, or "auto": when the variance is stable (freeze_threshold, freeze_window).
    bias_correction: as torch.optim.AdamW; False for the papers' BertAdam.
    dead: coordinates without a variance at the freeze use the mean of the others ("floor") or never move ("freeze").
    variance_floor: the least frozen variance of a coordinate, as a part of its parameter's mean; 0 as in the papers.
    scale, norm, block_size: how messages are encoded. chunks: pipeline stages, "auto" measures.
    master_weights: 16-bit parameters keep an fp32 copy.
    overlap: in stage 2 messages leave while backward still computes, if gradients are neither clipped nor scaled.
    check_every: steps between two checks that all ranks hold the same bits, 0 for none. on_divergence: where they do
        not, "raise" a DivergenceError on every rank, or "broadcast" what most ranks hold.
    gradient_dtype: what fp32 gradients are rounded to on the wire in stage 1: torch.bfloat16, torch.float16, or None.
    process_group: a torch.distributed group, an mpi4py communicator, or None for the default group, if there is one.
    """

    def _new_rule(self) -> VarianceRule:
        return VarianceRule(self._options.freeze_step, self._options.freeze_threshold, self._window)

    def _warmup(self, space: Space, hyper: Tensor, flags: Tensor) -> None:
        space.backend.adam_warmup(
            space.layout.all(), space.points, space.grads, space.exp_avg, space.exp_avg_sq, space.master, hyper, flags,
            space.sums,
        )  # fmt: skip

    def _compressed(self, space: Space, hyper: Tensor, flags: Tensor) -> None:
        def update(chunk: Chunk) -> None:
            d, master = chunk.span.of(space.d), space.master
            x = None if master is None else chunk.span.of(master)
            space.backend.adam_update(chunk.span, space.points, d, chunk.replies, x, hyper)

        self._overlap.all_reduce_momentum(space, hyper, flags, update)
