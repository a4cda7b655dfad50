"""Every pass: its signature, its equation, the bytes it moves, and which backend a device gets.

A pass is one function that a backend runs over one span of blocks. Two backends have the same functions:

    cpu     Numba, for CPU tensors, in place
    gpu     Triton, for CUDA and ROCm tensors

Adding a pass `p` takes:

    kernels/passes.py                    a method of Backend, a line in PASSES, a case in bytes_per_element
    kernels/cpu/, gpu/                   the function, in the file it belongs to, re-exported in __init__.py
    kernels/tuning/workload.py           synthetic arguments to run it on: an entry in Workload.passes
    kernels/tuning/tuner.py              each Triton kernel it launches, named <what>_kernel: PASS_OF, and
                                         SUMMING_KERNELS where it sums, _FLOAT32_ONLY where it reads no 16 bits
    perf/kernels/benchmark.py            TARGETS, if it has one
    tests/oracle/, tests/kernels/        the float64 oracle; how it is run: world.py; that both backends agree:
                                         agreement.py, for test_backends.py and tests/ptx; what it writes:
                                         test_workload.py; how many arrays it reads and writes in wide accesses:
                                         test_aot.py

Notation, as in the papers: g' = grad_scale g; x a parameter; m, v the moments; e a rank's residual, E a server's;
sigma(c) = +1 where c >= 0 and -1 elsewhere; d = 1 / (sqrt(v_T) + eps) with v_T the variance at the freeze.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from onebit.kernels.data.kept import Kept
from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages

BackendName = Literal["cpu", "gpu"]


class Backend(Protocol):
    """The functions that each of onebit.kernels.cpu and .gpu has.

    Arguments that several passes share:

        span       the blocks to work on; state tensors given with it hold just its elements
        hyper      fp32 [groups, COLUMNS]: `hyper_table` of the param groups
        flags      int32 [1]: where it is not 0 a pass changes nothing but the headers of messages
        master     fp32 copy of 16-bit parameters, or None
        live       uint8 [elements / 8], packed as bits are in a message: a coordinate without its bit takes no part
                   and counts as padding does
        replies    m as messages: with `copies` the mean of a block over them; so is momentum that is kept as messages
        gamma      fp32 [parameters]: messages and momentum hold gamma_p times the momentum (1-bit LAMB, section 4.3)
        clip       fp32 [parameters], or None for 1: how far a step moves beside what it would (see onebit.optim.limit)

    Bytes an element are those of fp32 parameters and gradients with momentum kept as messages; `bytes_per_element`
    has the other cases.
    """

    def scan(self, span: Span, grads: Pointers, hyper: Tensor, flags: Tensor, squares: Tensor | None = None) -> None:
        """flags[0] = 1 where any |g'| is NaN, inf or beyond LARGEST, else as it was;
        squares[b] = sum of g'^2 over block b.

        Bytes: reads g 4.
        """

    def compress(
        self,
        span: Span,
        grads: Pointers,
        momentum: Tensor | Messages | None,
        residual: Residual,
        hyper: Tensor,
        flags: Tensor,
        out: Messages,
        *,
        live: Tensor | None = None,
        gamma: Tensor | None = None,
    ) -> None:
        """c = beta1 m + gamma_p ((1 - beta1) g') + e;  bit = sigma(c);  scale = ||c||_1 / count, or as the norm of
        `out` says (`onebit.kernels.data.wire`);  e = c - scale bit.

        1-bit Adam (Tang et al. 2021), Algorithm 1, lines 6 and 7; 1-bit LAMB (Li et al. 2021), Algorithm 1, lines 6
        and 7. gamma_p = 1 without `gamma`. The span's k-th shard goes into message k of `out`. Where `live` has no bit,
        c, e and the bit are 0, and no scale sums or counts it. With `flags` set only the headers are written. Where the
        residual has `before`, the old e goes there, flag or not.

        Bytes: reads g 4, e 4, m 1/8; writes e 4, bits 1/8. 12.25, and 1/8 more with `live`, 4 with `before`.
        """

    def average(
        self, span: Span, received: Messages, residual: Residual, out: Messages, *, live: Tensor | None = None
    ) -> None:
        """C = mean_i decode(received_i) + E;  bit = sigma(C);  scale as in compress;  E = C - scale bit.

        1-bit Adam (Tang et al. 2021), Algorithm 1, line 10; 1-bit LAMB (Li et al. 2021), Algorithm 1, line 10.
        `span` is this rank's shard, and `live` that shard's mask. If any message received carries a flag, so does
        `out`, and only its header is written. `before` of the residual is as in compress.

        Bytes an element of the shard, with N ranks: reads bits N/8, E 4; writes E 4, bits 1/8. 8.125 + N/8, and 1/8
        more with `live`, 4 with `before`.
        """

    def restore(self, kept: Kept, flags: Tensor) -> None:
        """Every tensor as its copy is, bit for bit, where flags[0] is not 0.

        Bytes: none; where the flag is set all copies are read, and all tensors written.
        """

    def step_squares(
        self, span: Span, values: Tensor, replies: Messages | None, weight: Tensor | None, out: Tensor
    ) -> None:
        """out_p = weight_p^2 (sum over the blocks of parameter p of s_b^2 values_b).

        The sum of u^2 over parameter p, where u is d times what `replies` stand for, and `values` the sums of d^2 over
        every block, fp32. s_b is the mean of the scales of a block's messages; 1 without replies. weight: fp32
        [parameters], None for 1. out: fp64 [parameters], the same bits of every backend. The span is the whole layout.

        Bytes: none an element, 8 a block.
        """

    def step_limit(
        self,
        squares: Tensor,
        numels: Tensor,
        replies: Messages | None,
        usual: Tensor,
        limit: float | None,
        out: Tensor,
        shortened: Tensor,
    ) -> None:
        """rms_p = sqrt(squares_p / n_p);  out_p = min(1, limit_p / rms_p);  shortened = sum of n_p where out_p < 1.

        See `onebit.optim.limit`. limit: of all parameters, a number that fp32 has, or None for max(LEAST, TIMES
        |usual_p|). Before, where `replies` are given and none carries a flag, usual_p becomes rms_p if it is 0, and
        min(-usual_p, rms_p) if it is negative and rms_p is not 0. squares: fp64 [parameters]; numels: n, int64; usual,
        out: fp32; shortened: int64 [1]. The same bits of every backend.

        Bytes: none an element, 28 a parameter.
        """

    def decode(self, span: Span, messages: Messages, out: Pointers) -> None:
        """x = scale sigma, written to the tensors of `out`; NaN where the message carries a flag.

        Bytes: reads bits 1/8; writes x 4. 4.125.
        """

    def adam_warmup(
        self,
        span: Span,
        params: Pointers,
        grads: Pointers,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        master: Tensor | None,
        hyper: Tensor,
        flags: Tensor,
        sums: Tensor | None = None,
    ) -> None:
        """m = beta1 m + (1 - beta1) g';  v = beta2 v + (1 - beta2) g'^2;
        x = x - lr (mhat / (sqrt(vhat) + eps) + wd x);  sums[b] = sum of v over block b.

        A step of stage 1: 1-bit Adam (Tang et al. 2021), equation 1, which is Adam.

        Bytes: reads g 4, m 4, v 4, x 4; writes m 4, v 4, x 4. 28.
        """

    def adam_update(
        self,
        span: Span,
        params: Pointers,
        d: Tensor,
        replies: Messages,
        master: Tensor | None,
        hyper: Tensor,
        coefficient: Tensor | None = None,
        clip: Tensor | None = None,
    ) -> None:
        """x = x - lr c_p (clip_p m d + wd x) with m = decode(replies).

        A step of stage 2: 1-bit Adam (Tang et al. 2021), Algorithm 1, line 13, with c_p = 1; and with `coefficient`,
        fp32 [parameters], 1-bit LAMB (Li et al. 2021), Algorithm 1, line 21. Measurements name the second
        lamb_update. A coordinate with d = 0 never moves. Blocks of a flagged reply stay as they are.

        Bytes: reads x 4, d 4, bits 1/8; writes x 4. 12.125.
        """

    def zero_one_full(
        self,
        span: Span,
        params: Pointers,
        grads: Pointers,
        exp_avg_sq: Tensor,
        replies: Messages,
        residual: Residual | None,
        master: Tensor | None,
        hyper: Tensor,
        flags: Tensor,
        least_root: Tensor,
        root_at_zero: Tensor,
        live: Tensor,
        sums: Tensor,
        counts: Tensor,
    ) -> None:
        """m = beta1 m + (1 - beta1) g' with m = decode(replies);  v = beta2 v + (1 - beta2) g'^2;
        x = x - lr (mhat / (u + eps) + wd x) with u = max(sqrt(vhat), least_root_p), root_at_zero_p where v is 0;
        e = e + beta1 m;  live = v != 0;  sums[b], counts[b]: the sum of v over block b, and how many are not 0.

        A full-precision step between compressed ones: 0/1 Adam (Lu et al. 2023), Algorithm 1, with m folded into the
        residual, as at the freeze. `replies` are read whether they carry a flag or not. `residual` is None where the
        span is another rank's slice. A coordinate that had v = 0 and has no root_at_zero had no m and no e; one with
        u = 0 does not move. `live`, uint8 [elements / 8], is written, as are sums and counts, fp32 [blocks].

        Bytes: reads g 4, m 1/8, v 4, e 4, x 4; writes v 4, e 4, x 4, live 1/8. 28.25.
        """

    def zero_one_update(
        self,
        span: Span,
        params: Pointers,
        exp_avg_sq: Tensor,
        replies: Messages,
        master: Tensor | None,
        hyper: Tensor,
        least_root: Tensor,
        root_at_zero: Tensor,
        clip: Tensor | None = None,
    ) -> None:
        """x = x - lr (clip_p mhat / (u + eps) + wd x) with m = decode(replies), and u as in zero_one_full.

        A compressed step: 0/1 Adam (Lu et al. 2023), Algorithm 1. A coordinate with u = 0 never moves. Blocks of a
        flagged reply stay as they are.

        Bytes: reads x 4, v 4, bits 1/8; writes x 4. 12.125.
        """

    def zero_one_inverses(
        self, span: Span, exp_avg_sq: Tensor, hyper: Tensor, least_root: Tensor, root_at_zero: Tensor, sums: Tensor
    ) -> None:
        """sums[b] = sum of 1 / (u + eps)^2 over block b, u as in zero_one_full, without coordinates with u = 0.

        After a full-precision step: what its variance makes of a momentum (see onebit.optim.limit).

        Bytes: reads v 4.
        """

    def zero_one_local(
        self,
        span: Span,
        params: Pointers,
        grads: Pointers,
        exp_avg_sq: Tensor,
        exp_avg: Tensor,
        residual: Residual | None,
        master: Tensor | None,
        hyper: Tensor,
        flags: Tensor,
        least_root: Tensor,
        root_at_zero: Tensor,
        clip: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> None:
        """m = beta1 m + (1 - beta1) g';  x = x - lr (clip_p mhat / (u + eps) + wd x) with u as in zero_one_full;
        e = e + lr mhat;  squares[b] = sum of (mhat / (u + eps))^2 over block b.

        A step without a message: 0/1 Adam (Lu et al. 2023), Algorithm 1. m is dense and this rank's own, fp32
        [elements]; v is only read. `residual` is None where nothing is to be sent. Nothing of a coordinate with u = 0
        changes. With a tensor scale `value` becomes e itself, 0 where u = 0, and the caller sets the scale to 0.

        Bytes: reads g 4, v 4, m 4, x 4, e 4; writes m 4, x 4, e 4. 32.
        """

    def zero_one_sync(
        self,
        span: Span,
        params: Pointers,
        exp_avg_sq: Tensor,
        exp_avg: Tensor,
        anchor: Tensor,
        replies: Messages,
        master: Tensor | None,
        hyper: Tensor,
        least_root: Tensor,
        root_at_zero: Tensor,
        decay: Tensor,
        factor: Tensor,
        clip: Tensor | None = None,
    ) -> None:
        """x = decay_p anchor - clip_p U / (u + eps) with U = decode(replies) and u as in zero_one_full;
        anchor = x as it was stored;  m = factor_p U.

        The end of some local steps: 0/1 Adam (Lu et al. 2023), Algorithm 1. `anchor`, fp32 [elements], is the x that
        they began with on every rank: the new one is x in fp32, or as a 16-bit parameter without a master copy holds
        it. `decay` and `factor` are fp32 [parameters]. m is one fp32 product of what `decode` gives, bit for bit. Where
        u = 0, x = anchor and m = 0. Blocks of a flagged reply stay as they are.

        Bytes: reads v 4, anchor 4, bits 1/8; writes x 4, anchor 4, m 4. 20.125.
        """

    def lamb_warmup(
        self,
        span: Span,
        params: Pointers,
        grads: Pointers,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        master: Tensor | None,
        hyper: Tensor,
        flags: Tensor,
        state: LambState,
        *,
        coeff_beta: float,
        min_coeff: float,
        max_coeff: float,
        between: Callable[[], None] | None = None,
    ) -> None:
        """m, v as in adam_warmup;  u = mhat / (sqrt(vhat) + eps) + wd x;
        c = clip(||x|| / ||u||, min_coeff, max_coeff), 1 where a norm is 0;
        x = x - lr c u;  c_avg = b3 c_avg + (1 - b3) c.

        1-bit LAMB (Li et al. 2021), equation 1 and Algorithm 1, line 2. The span is the whole layout, since a norm
        is a parameter's. `between` is called when c and c_avg are there, before x moves by c: where the span has a part
        of a parameter alone, it may put others there. It finds the sums of squares of every block in `state.partial`.

        Bytes: reads g 4, m 4, v 4, x 4 and writes m 4, v 4 for the norms; reads m 4, v 4, x 4 and writes x 4 for the
        update. 40.
        """

    def lamb_statistics(
        self,
        span: Span,
        replies: Messages,
        previous: Tensor | Messages,
        d: Tensor,
        exp_avg_sq: Tensor,
        hyper: Tensor,
        state: LambState,
        *,
        factor_min: float,
        factor_max: float,
        factor_threshold: float,
        ratio: Literal["variance", "denominator"] = "variance",
        live: Tensor | None = None,
        gamma: Tensor | None = None,
    ) -> None:
        """ghat = (m - beta1 m_prev) / (1 - beta1) / gamma_p;  v = beta2 v + (1 - beta2) ghat^2;
        r = max over a parameter of v_T / v, clipped to within factor_threshold of the last r, then to
        [factor_min, factor_max];  c = r c_avg.

        1-bit LAMB (Li et al. 2021), Algorithm 1, lines 15 to 20. With ratio="denominator" r is the maximum of
        (sqrt(v_T) + eps) / (sqrt(v) + eps). v_T is computed back from d = 1 / ((sqrt(v_T) + eps) gamma_p), so v has to
        be bias-corrected at the freeze as v_T is. m and m_prev both hold gamma_p times the momentum; m d needs no
        gamma. A coordinate that `live` leaves out does not count for the maximum, and its v means nothing. The span is
        the whole layout. Either every reply carries a flag or none does: a flag in one worker's message goes into the
        replies of all servers.

        Bytes: reads v 4, d 4, bits of m and m_prev 2/8; writes v 4. 12.25, and 1/8 more with `live`.
        """


# What is measured, in the order of a step. lamb_update is adam_update with LAMB's coefficients.
PASSES = (
    "scan", "compress", "average", "decode", "adam_warmup", "adam_update",
    "lamb_warmup", "lamb_statistics", "lamb_update",
    "zero_one_full", "zero_one_inverses", "zero_one_update", "zero_one_local", "zero_one_sync",
)  # fmt: skip
BIT = 1 / 8  # bytes


def bytes_per_element(
    name: str,
    itemsize: int,
    *,
    master: bool,
    packed: bool,
    ranks: int,
    masked: bool = False,
    copies: int = 1,
    kept: bool = False,
) -> float:
    """Bytes that the pass `name` of PASSES moves for one element; scales (1/64 bit with blocks of 2048) are left out.

    `itemsize` is that of parameters and gradients. `packed`: momentum is kept as messages, not in fp32. `masked`: the
    passes that take one get a live mask. `copies`: the messages of a block that momentum and replies have. `kept`:
    residuals are written as they were, too.
    """
    replies, before = copies * BIT, 4 if kept else 0
    momentum, live = replies if packed else 4, BIT if masked else 0
    parameter = 4 + 4 + itemsize if master else 2 * itemsize
    match name:
        case "compress":
            return itemsize + 4 + momentum + 4 + BIT + live + before
        case "average":
            return ranks * BIT + 4 + 4 + BIT + live + before
        case "decode":
            return replies + itemsize
        case "scan":
            return itemsize
        case "adam_warmup":
            return itemsize + 4 * 4 + parameter
        case "zero_one_full":
            return itemsize + replies + 4 * 4 + BIT + parameter
        case "adam_update" | "lamb_update" | "zero_one_update":
            return replies + 4 + parameter
        case "zero_one_inverses":
            return 4
        case "zero_one_local":
            return itemsize + 5 * 4 + parameter
        case "zero_one_sync":  # which writes x without reading it
            return replies + 4 * 4 + (4 + itemsize if master else itemsize)
        case "lamb_warmup":  # read for the norms, and again for the update
            return itemsize + 4 * 4 + (4 if master else itemsize) + 2 * 4 + parameter
        case "lamb_statistics":
            return replies + momentum + 3 * 4 + live
    raise ValueError(f"no pass is called {name!r}: the passes are {', '.join(PASSES)}")


class Passes:
    """A backend whose passes show up in profiles as `onebit.<name>`: in torch.profiler's, and as NVTX ranges by
    torch.autograd.profiler.emit_nvtx.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module, self.__name__ = module, module.__name__

    def __getattr__(self, name: str) -> Callable[..., Any]:
        run = getattr(self.module, name)

        @functools.wraps(run)
        def profiled(*args: Any, **options: Any) -> Any:
            with record_function(f"onebit.{name}"):
                return run(*args, **options)

        setattr(self, name, profiled)  # the next access finds it without __getattr__
        return profiled


@functools.cache
def load(name: BackendName) -> Backend:
    """A backend by name, imported on first use: the GPU's needs Triton, and the tuner, which launching a kernel needs,
    measures kernels itself.
    """
    return cast(Backend, Passes(import_module(f"onebit.kernels.{name}")))


@functools.cache
def backend(device: torch.device) -> Backend:
    """The passes for tensors on a device: Triton's for CUDA and ROCm, those of `cpu` for CPU tensors."""
    names: dict[str, BackendName] = {"cuda": "gpu", "cpu": "cpu"}
    if device.type not in names:
        raise ValueError(
            f"no kernels for tensors on {device}: onebit runs on CUDA, ROCm and CPU tensors. Move the parameters with "
            f".to('cuda') or .to('cpu')"
        )
    try:
        return load(names[device.type])
    except ImportError as error:
        if device.type == "cpu" and not (error.name or "").startswith("onebit"):
            raise ModuleNotFoundError(
                f"tensors on {device} need Numba, which cannot be imported ({error}): pip install numba", name="numba"
            ) from error
        if error.name != "triton":
            raise
        raise ModuleNotFoundError(
            f"tensors on {device} need Triton, which is not installed: pip install triton", name="triton"
        ) from error
