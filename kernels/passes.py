"""Every pass: its arguments, its equation, and the bytes it moves.

A pass is a record of its arguments, which a backend runs over one span of blocks:

    backend(device).run(Scan(span, gradients, squares))

Adding a pass takes four places:

    kernels/passes.py       a subclass of Pass: name, bytes, equation, fields; and its line in PASSES
    tests/oracle/           the same in float64, and a test in tests/kernels/ that compares the CPU's with that
    kernels/cpu/            a loop over blocks, and its line in the file's PASSES
    kernels/gpu/            a kernel over blocks, and its line in the file's PASSES

A loop and a kernel take parameters by the names of fields: see `Pass.arguments`. The workload, the tuner, the
benchmark, profiles and the comparison of both backends find a pass through PASSES.

Notation, as in the papers: g' = grad_scale g; x a parameter; m, v the moments; e a rank's residual, E a server's;
sigma(c) = +1 where c >= 0 and -1 elsewhere; d = 1 / (sqrt(v_T) + eps) with v_T the variance at the freeze.

Fields that several passes have:

    span        the blocks to work on; state tensors given with it hold just its elements
    hyper       fp32 [groups, COLUMNS]: `hyper_table` of the param groups
    live        uint8 [elements / 8], packed as bits are in a message: an element without its bit takes no part
                and counts as padding does
    replies     m as messages: with `senders` the mean of a block over them; so is momentum that is kept as messages
    gamma       fp32 [parameters]: messages and momentum hold gamma_p times the momentum (1-bit LAMB, section 4.3)
    clip        fp32 [parameters], or None for 1: how far a step moves beside what it would (see onebit.optim.limit)

Bytes an element, in the docstrings, are those of fp32 parameters and gradients with momentum kept as messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, Literal

from torch import Tensor

from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.layout import Span
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.record import Record
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages

BIT = 1 / 8  # bytes


@dataclass(eq=False)
class Parameters(Record):
    """x"""

    param: Pointers
    master: Tensor | None  # fp32 copy of 16-bit parameters


@dataclass(eq=False)
class Gradients(Record):
    """g'"""

    grad: Pointers
    hyper: Tensor
    flags: Tensor  # int32 [1]: where it is not 0 a pass changes nothing but the headers of messages


@dataclass(eq=False)
class Floors(Record):
    """Floors of 0/1 Adam's root of the variance: u = max(sqrt(vhat), least_root_p), and root_at_zero_p where v is 0."""

    least_root: Tensor  # fp32 [parameters]
    root_at_zero: Tensor  # fp32 [parameters]


@dataclass(frozen=True)
class Storage:
    """What the bytes of a pass depend on.

    `itemsize` is that of parameters and gradients. `packed`: momentum is kept as messages, not in fp32. `masked`: the
    passes that take one get a live mask. `senders`: the messages of a block that momentum and replies have. `kept`:
    residuals are written as they were, too. `bits`: those of a code.
    """

    itemsize: int
    _: KW_ONLY
    master: bool
    packed: bool
    ranks: int
    masked: bool = False
    senders: int = 1
    kept: bool = False
    bits: int = 4

    @property
    def parameter(self) -> int:
        """Read and written."""
        return 4 + 4 + self.itemsize if self.master else 2 * self.itemsize

    @property
    def replies(self) -> float:
        return self.senders * BIT

    @property
    def momentum(self) -> float:
        return self.replies if self.packed else 4

    @property
    def live(self) -> float:
        return BIT if self.masked else 0

    @property
    def residual(self) -> int:
        """Read and written, and written as it was."""
        return 4 + 4 + (4 if self.kept else 0)

    @property
    def code(self) -> float:
        return self.bits * BIT

    @property
    def left_of_code(self) -> int:
        """A residual of 16 bits: read and written, and written as it was."""
        return 2 + 2 + (2 if self.kept else 0)


@dataclass(eq=False)
class Pass:
    """The arguments of one run of a pass."""

    name: ClassVar[str]
    moves: ClassVar[Callable[[Storage], float]]  # bytes an element, without scales (1/64 bit with blocks of 2048)
    adds_up: ClassVar[bool]  # whether a program adds up elements, in an order that tuning may not change
    span: Span

    def __init_subclass__(cls, name: str, moves: Callable[[Storage], float], adds_up: bool = False) -> None:
        cls.name, cls.moves, cls.adds_up = name, staticmethod(moves), adds_up

    @classmethod
    def kernels(cls) -> dict[str, bool]:
        """The Triton kernels that the pass launches, and whether each adds up elements."""
        return {f"{cls.name}_kernel": cls.adds_up}

    @classmethod
    def touches_tensors(cls) -> bool:
        """Return whether it reads or writes tensors of the parameters' dtype."""
        return not {"Parameters", "Gradients", "Pointers"}.isdisjoint(str(field.type) for field in fields(cls))

    def arguments(self) -> dict[str, Any]:
        """What kernels read of the fields, and of the span."""
        found = vars(self).copy()
        for name, value in vars(self).items():
            if isinstance(value, Record):
                found |= value.arguments(name)
        for each in found.values():
            if isinstance(each, Tensor):
                found.update(self.span.arguments(each.device))
                break
        return found


@dataclass(eq=False)
class Scan(Pass, name="scan", adds_up=True, moves=lambda of: of.itemsize):
    """flags[0] = 1 where any |g'| is NaN, inf or beyond LARGEST, else as it was;
    squares[b] = sum of g'^2 over block b.

    Bytes: reads g 4.
    """

    g: Gradients
    squares: Tensor | None = None


@dataclass(eq=False)
class Compress(
    Pass, name="compress", adds_up=True, moves=lambda of: of.itemsize + of.momentum + of.residual + BIT + of.live
):
    """c = beta1 m + gamma_p ((1 - beta1) g') + e;  bit = sigma(c);  scale = ||c||_1 / count, or as the norm of
    `out` says (`onebit.kernels.data.wire`);  e = c - scale bit.

    1-bit Adam (Tang et al. 2021), Algorithm 1, lines 6 and 7; 1-bit LAMB (Li et al. 2021), Algorithm 1, lines 6
    and 7. gamma_p = 1 without `gamma`. The span's k-th shard goes into message k of `out`. Where `live` has no bit,
    c, e and the bit are 0, and no scale sums or counts it. With `flags` set only the headers are written. Where the
    residual has `before`, the old e goes there, flag or not.

    Bytes: reads g 4, e 4, m 1/8; writes e 4, bits 1/8. 12.25, and 1/8 more with `live`, 4 with `before`.
    """

    g: Gradients
    momentum: Tensor | Messages | None
    residual: Residual
    out: Messages
    _: KW_ONLY
    live: Tensor | None = None
    gamma: Tensor | None = None


@dataclass(eq=False)
class Average(Pass, name="average", adds_up=True, moves=lambda of: of.ranks * BIT + of.residual + BIT + of.live):
    """C = mean_i decode(received_i) + E;  bit = sigma(C);  scale as in Compress;  E = C - scale bit.

    1-bit Adam (Tang et al. 2021), Algorithm 1, line 10; 1-bit LAMB (Li et al. 2021), Algorithm 1, line 10.
    `span` is this rank's shard, and `live` that shard's mask. If any message received carries a flag, so does
    `out`, and only its header is written. `before` of the residual is as in Compress.

    Bytes an element of the shard, with N ranks: reads bits N/8, E 4; writes E 4, bits 1/8. 8.125 + N/8, and 1/8
    more with `live`, 4 with `before`.
    """

    received: Messages
    residual: Residual
    out: Messages
    _: KW_ONLY
    live: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"inverse_ranks": 1 / self.received.rows}


@dataclass(eq=False)
class Decode(Pass, name="decode", moves=lambda of: of.replies + of.itemsize):
    """x = scale sigma, written to the tensors of `out`; NaN where the message carries a flag.

    Bytes: reads bits 1/8; writes x 4. 4.125.
    """

    replies: Messages
    out: Pointers


@dataclass(eq=False)
class Quantize(Pass, name="quantize", adds_up=True, moves=lambda of: of.itemsize + of.left_of_code + of.code):
    """c = g' + e;  scale = max |c| / L over every 256 elements of a block;  q = round(c / scale);  e = c - scale q.

    L is the largest code, 7 with 4 bits and 127 with 8. Ties round to the even code. Where max |c| is below LEAST, the
    scale and codes are 0. The residual is bf16. The rest is as in Compress.

    Bytes, with 4 bits: reads g 4, e 2; writes e 2, codes 1/2. 8.5, and 2 more with `before`.
    """

    g: Gradients
    residual: Residual
    out: Messages


@dataclass(eq=False)
class AverageCodes(
    Pass, name="average_codes", adds_up=True, moves=lambda of: of.ranks * of.code + of.left_of_code + of.code
):
    """C = mean_i decode(received_i) + E;  scale, q and E as in Quantize. The rest is as in Average.

    Bytes an element of the shard, with 4 bits and N ranks: reads codes N/2, E 2; writes E 2, codes 1/2. 4.5 + N/2, and
    2 more with `before`.
    """

    received: Messages
    residual: Residual
    out: Messages

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"inverse_ranks": 1 / self.received.rows}


@dataclass(eq=False)
class Dequantize(Pass, name="dequantize", moves=lambda of: of.senders * of.code + of.itemsize):
    """x = scale q, the mean over senders, written to the tensors of `out`; NaN where the message carries a flag.

    Bytes, with 4 bits: reads codes 1/2; writes x 4. 4.5.
    """

    replies: Messages
    out: Pointers


@dataclass(eq=False)
class AdamWarmup(Pass, name="adam_warmup", adds_up=True, moves=lambda of: of.itemsize + 4 * 4 + of.parameter):
    """m = beta1 m + (1 - beta1) g';  v = beta2 v + (1 - beta2) g'^2;
    x = x - lr (mhat / (sqrt(vhat) + eps) + wd x);  sums[b] = sum of v over block b.

    A step of stage 1: 1-bit Adam (Tang et al. 2021), equation 1, which is Adam.

    Bytes: reads g 4, m 4, v 4, x 4; writes m 4, v 4, x 4. 28.
    """

    x: Parameters
    g: Gradients
    exp_avg: Tensor
    exp_avg_sq: Tensor
    sums: Tensor | None = None


@dataclass(eq=False)
class AdamUpdate(Pass, name="adam_update", moves=lambda of: of.replies + 4 + of.parameter):
    """x = x - lr c_p (clip_p m d + wd x) with m = decode(replies).

    A step of stage 2: 1-bit Adam (Tang et al. 2021), Algorithm 1, line 13, with c_p = 1; and with `coefficient`,
    fp32 [parameters], 1-bit LAMB (Li et al. 2021), Algorithm 1, line 21. Measurements name the second
    lamb_update. An element with d = 0 never moves. Blocks of a flagged reply stay as they are.

    Bytes: reads x 4, d 4, bits 1/8; writes x 4. 12.125.
    """

    x: Parameters
    d: Tensor
    replies: Messages
    hyper: Tensor
    coefficient: Tensor | None = None
    clip: Tensor | None = None


@dataclass(eq=False)
class ZeroOneFull(
    Pass, name="zero_one_full", adds_up=True, moves=lambda of: of.itemsize + of.momentum + 4 * 4 + BIT + of.parameter
):
    """m = beta1 m + (1 - beta1) g' with m = decode(momentum), or `momentum` itself;  v = beta2 v + (1 - beta2) g'^2;
    x = x - lr (mhat / (u + eps) + wd x) with u as in Floors;
    e = e + beta1 m;  live = v != 0;  sums[b], counts[b]: the sum of v over block b, and how many are not 0.

    A full-precision step between compressed ones: 0/1 Adam (Lu et al. 2023), Algorithm 1, with m folded into the
    residual, as at the freeze. `momentum` is only read: messages, whether they carry a flag or not, or fp32
    [elements]. `residual` is None where the span is another rank's slice. An element that had v = 0 and has no
    root_at_zero had no m and no e; one with u = 0 does not move. `live`, uint8 [elements / 8], is written, as are
    sums and counts, fp32 [blocks].

    Bytes: reads g 4, m 1/8, v 4, e 4, x 4; writes v 4, e 4, x 4, live 1/8. 28.25. A dense m is 4: 32.125.
    """

    x: Parameters
    g: Gradients
    exp_avg_sq: Tensor
    momentum: Tensor | Messages
    residual: Residual | None
    floors: Floors
    live: Tensor
    sums: Tensor
    counts: Tensor


@dataclass(eq=False)
class ZeroOneUpdate(Pass, name="zero_one_update", moves=lambda of: of.replies + 4 + of.parameter):
    """x = x - lr (clip_p mhat / (u + eps) + wd x) with m = decode(replies), and u as in Floors.

    A compressed step: 0/1 Adam (Lu et al. 2023), Algorithm 1. An element with u = 0 never moves. Blocks of a
    flagged reply stay as they are.

    Bytes: reads x 4, v 4, bits 1/8; writes x 4. 12.125.
    """

    x: Parameters
    exp_avg_sq: Tensor
    replies: Messages
    hyper: Tensor
    floors: Floors
    clip: Tensor | None = None


@dataclass(eq=False)
class ZeroOneInverses(Pass, name="zero_one_inverses", adds_up=True, moves=lambda of: 4):
    """sums[b] = sum of 1 / (u + eps)^2 over block b, u as in Floors, without elements with u = 0.

    After a full-precision step: what its variance makes of a momentum (see onebit.optim.limit).

    Bytes: reads v 4.
    """

    exp_avg_sq: Tensor
    hyper: Tensor
    floors: Floors
    sums: Tensor


@dataclass(eq=False)
class ZeroOneLength(Pass, name="zero_one_length", adds_up=True, moves=lambda of: of.itemsize + 2 * 4):
    """squares[b] = sum of (mhat / (u + eps))^2 over block b with m = beta1 m + (1 - beta1) g' and u as in Floors.

    How far the coming ZeroOneLocal would move without a clip. m is only read. With `flags` set squares stay.

    Bytes: reads g 4, v 4, m 4. 12.
    """

    g: Gradients
    exp_avg_sq: Tensor
    exp_avg: Tensor
    floors: Floors
    squares: Tensor


@dataclass(eq=False)
class ZeroOneLocal(Pass, name="zero_one_local", moves=lambda of: of.itemsize + 5 * 4 + of.parameter):
    """m = beta1 m + (1 - beta1) g';  x = x - lr (clip_p mhat / (u + eps) + wd x) with u as in Floors;
    e = e + lr mhat.

    A step without a message: 0/1 Adam (Lu et al. 2023), Algorithm 1. m is dense and this rank's own, fp32
    [elements]; v is only read. `residual` is None where nothing is to be sent. Nothing of an element with u = 0
    changes. With a tensor scale `value` becomes e itself, 0 where u = 0, and the caller sets the scale to 0.

    Bytes: reads g 4, v 4, m 4, x 4, e 4; writes m 4, x 4, e 4. 32.
    """

    x: Parameters
    g: Gradients
    exp_avg_sq: Tensor
    exp_avg: Tensor
    residual: Residual | None
    floors: Floors
    clip: Tensor | None = None


@dataclass(eq=False)
class ZeroOneSync(
    Pass, name="zero_one_sync", moves=lambda of: of.replies + 4 * 4 + (4 + of.itemsize if of.master else of.itemsize)
):
    """x = decay_p anchor - clip_p U / (u + eps) with U = decode(replies) and u as in Floors;
    anchor = x as it was stored;  m = factor_p U.

    The end of some local steps: 0/1 Adam (Lu et al. 2023), Algorithm 1. `anchor`, fp32 [elements], is the x that
    they began with on every rank: the new one is x in fp32, or as a 16-bit parameter without a master copy holds
    it. `decay` and `factor` are fp32 [parameters]. m is one fp32 product of what Decode gives, bit for bit. Where
    u = 0, x = anchor and m = 0. Blocks of a flagged reply stay as they are.

    Bytes: reads v 4, anchor 4, bits 1/8; writes x 4, anchor 4, m 4. 20.125.
    """

    x: Parameters
    exp_avg_sq: Tensor
    exp_avg: Tensor
    anchor: Tensor
    replies: Messages
    hyper: Tensor
    floors: Floors
    decay: Tensor
    factor: Tensor
    clip: Tensor | None = None


@dataclass(eq=False)
class LambWarmup(
    Pass,
    name="lamb_warmup",
    moves=lambda of: of.itemsize + 4 * 4 + (4 if of.master else of.itemsize) + 2 * 4 + of.parameter,
):
    """m, v as in AdamWarmup;  u = mhat / (sqrt(vhat) + eps) + wd x;
    c = clip(||x|| / ||u||, min_coeff, max_coeff), 1 where a norm is 0;
    x = x - lr c u;  c_avg = b3 c_avg + (1 - b3) c.

    1-bit LAMB (Li et al. 2021), equation 1 and Algorithm 1, line 2. The span is the whole layout, since a norm
    is a parameter's. `between` is called when c and c_avg are there, before x moves by c: where the span has a part
    of a parameter alone, it may put others there. It finds the sums of squares of every block in `state.partial`.

    Bytes: reads g 4, m 4, v 4, x 4 and writes m 4, v 4 for the norms; reads m 4, v 4, x 4 and writes x 4 for the
    update. 40.
    """

    x: Parameters
    g: Gradients
    exp_avg: Tensor
    exp_avg_sq: Tensor
    state: LambState
    _: KW_ONLY
    coeff_beta: float
    min_coeff: float
    max_coeff: float
    between: Callable[[], None] | None = None

    @classmethod
    def kernels(cls) -> dict[str, bool]:
        return {"lamb_moments_kernel": True, "lamb_apply_kernel": False}

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"one_minus_coeff_beta": 1 - self.coeff_beta}


@dataclass(eq=False)
class LambStatistics(Pass, name="lamb_statistics", moves=lambda of: of.replies + of.momentum + 3 * 4 + of.live):
    """ghat = (m - beta1 m_prev) / (1 - beta1) / gamma_p;  v = beta2 v + (1 - beta2) ghat^2;
    r = max over a parameter of v_T / v, clipped to within factor_threshold of the last r, then to
    [factor_min, factor_max];  c = r c_avg.

    1-bit LAMB (Li et al. 2021), Algorithm 1, lines 15 to 20. With ratio="denominator" r is the maximum of
    (sqrt(v_T) + eps) / (sqrt(v) + eps). v_T is computed back from d = 1 / ((sqrt(v_T) + eps) gamma_p), so v has to
    be bias-corrected at the freeze as v_T is. m and m_prev both hold gamma_p times the momentum; m d needs no
    gamma. An element that `live` leaves out does not count for the maximum, and its v means nothing. The span is
    the whole layout. Either every reply carries a flag or none does: a flag in one worker's message goes into the
    replies of all servers.

    Bytes: reads v 4, d 4, bits of m and m_prev 2/8; writes v 4. 12.25, and 1/8 more with `live`.
    """

    replies: Messages
    previous: Tensor | Messages
    d: Tensor
    exp_avg_sq: Tensor
    hyper: Tensor
    state: LambState
    _: KW_ONLY
    factor_min: float
    factor_max: float
    factor_threshold: float
    ratio: Literal["variance", "denominator"] = "variance"
    live: Tensor | None = None
    gamma: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {
            "factor_low": 1 - self.factor_threshold,
            "factor_high": 1 + self.factor_threshold,
            "denominator": self.ratio == "denominator",
        }


@dataclass(eq=False)
class StepSquares(Pass, name="step_squares", adds_up=True, moves=lambda of: 0):
    """squares_p = weight_p^2 (sum over the blocks of parameter p of s_b^2 values_b).

    The sum of u^2 over parameter p, where u is d times what `replies` stand for, and `values` the sums of d^2 over
    every block, fp32. s_b is the mean of the scales of a block's messages; 1 without replies. weight: fp32
    [parameters], None for 1. squares: fp64 [parameters], the same bits of every backend. The span is the whole layout.

    Bytes: none an element, 8 a block.
    """

    values: Tensor
    replies: Messages | None
    weight: Tensor | None
    squares: Tensor


@dataclass(eq=False)
class StepLimit(Pass, name="step_limit", adds_up=True, moves=lambda of: 0):
    """rms_p = sqrt(squares_p / n_p);  factor_p = limit_p / rms_p where rms_p > trusted_p, else 1;  shortened = sum of
    n_p where factor_p < 1.

    limit_p = max(least, times |usual_p|), trusted_p = max(limit_p, trusted |usual_p|): see `onebit.optim.limit`. A
    number of 0 times infinity is 0 here. Before, where `replies` are given and none carries a flag, usual_p becomes
    rms_p if it is 0, and min(-usual_p, rms_p) if it is negative and rms_p is not 0. squares: fp64 [parameters]; numels:
    n, int64; usual, factor: fp32; shortened: int64 [1]. The same bits of every backend. The span is the whole layout.

    Bytes: none an element, 28 a parameter.
    """

    squares: Tensor
    numels: Tensor
    replies: Messages | None
    usual: Tensor
    least: float
    times: float
    trusted: float
    factor: Tensor
    shortened: Tensor


# What is measured, in the order of a step. lamb_update is an AdamUpdate with LAMB's coefficients.
PASSES: dict[str, type[Pass]] = {
    "scan": Scan, "compress": Compress, "average": Average, "decode": Decode,
    "quantize": Quantize, "average_codes": AverageCodes, "dequantize": Dequantize,
    "adam_warmup": AdamWarmup, "adam_update": AdamUpdate,
    "lamb_warmup": LambWarmup, "lamb_statistics": LambStatistics, "lamb_update": AdamUpdate,
    "zero_one_full": ZeroOneFull, "zero_one_inverses": ZeroOneInverses, "zero_one_update": ZeroOneUpdate,
    "zero_one_length": ZeroOneLength, "zero_one_local": ZeroOneLocal, "zero_one_sync": ZeroOneSync,
}  # fmt: skip
SMALL: tuple[type[Pass], ...] = (StepSquares, StepLimit)  # no bytes an element: they are not measured


def bytes_per_element(name: str, of: Storage) -> float:
    """Bytes that the pass `name` of PASSES moves for one element."""
    if name not in PASSES:
        raise ValueError(f"no pass is called {name!r}: the passes are {', '.join(PASSES)}")
    return PASSES[name].moves(of)
