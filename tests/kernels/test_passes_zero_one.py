"""0/1 Adam's four passes of every backend against float64, and Triton against the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import NONFINITE
from onebit.kernels.tuning.workload import HYPER, Workload
from tests import oracle
from tests.kernels.cases import (
    F16,
    F32,
    GRID,
    ON_BACKENDS,
    ON_FUSED,
    SMALL_GRID,
    STEP,
    Case,
    World,
    assert_close,
    assert_guards,
    backend,
    device_of,
    frozen_bits,
    gathered,
    numpy,
    rounded,
    stored,
    use_grain,
)
from tests.kernels.test_passes_adam import AGREEMENT, ELEMENTWISE, check_parameters, updated
from tests.wire import values_of

# By parameter: every third holds what has no variance, the others give it that of the mean.
LEAST, AT_ZERO = (0.3, 2.0, 0.0), (0.0, 1.5, 0.7)
DECAY, FACTOR = (0.9, 1.0, 0.5), (0.7, 3.0, 0.1)


class Run:
    """The tensors of one run of a pass. Every fifth v is 0, and every third gradient of those too."""

    def __init__(self, case: Case, name: str = "cpu", residual: bool = True) -> None:
        self.world = world = World(case, name)
        self.v64 = [v.copy() for v in world.v]
        for v, g in zip(self.v64, world.g, strict=True):
            v[::5] = 0.0
            if g is not None:
                g[::15] = 0.0
        world.scaled_g = [None if g is None else s * g for g, s in zip(world.g, world.grad_scales, strict=True)]
        self.params, self.grads, self.master = world.params(), world.grads(), world.master()
        self.v, self.replies = world.flat(self.v64), world.all_messages()
        self.least64, self.at_zero64, self.decay64, self.factor64 = per_parameter = [
            rounded(np.resize(values, len(world.x)), F32) for values in (LEAST, AT_ZERO, DECAY, FACTOR)
        ]
        self.least, self.at_zero, self.decay, self.factor = map(world.per_parameter, per_parameter)
        self.anchor64 = [rounded(x + 0.3 * m, F32) for x, m in zip(world.x, world.m, strict=True)]
        self.m, self.anchor = world.flat(world.m), world.flat(self.anchor64)
        blocks = world.layout.blocks
        self.sums, self.counts = (torch.full((blocks,), float("nan"), device=world.device) for _ in range(2))
        self.live = torch.full((world.elements // 8,), 0xA5, dtype=torch.uint8, device=world.device)
        scales = np.linspace(0.1, 0.4, case.ranks)
        self.scales64 = rounded(scales, F32) if case.scale == "tensor" else np.zeros(case.ranks)
        self.residuals = [world.residual(span, world.e, self.scales64) if residual else None
                          for span, _ in world.spans()]  # fmt: skip

    def of_chunk(self, chunk: int) -> tuple[Any, slice, Any, torch.Tensor | None]:
        span, part = self.world.spans()[chunk]
        ranks = self.world.case.ranks
        replies = self.replies.slice(chunk * ranks, ranks)
        return span, part, replies, None if self.master is None else self.master[part]

    def full(self, chunk: int, flag: int = 0) -> None:
        span, part, replies, master = self.of_chunk(chunk)
        blocks = slice(span.first, span.first + span.count)
        self.world.passes.zero_one_full(
            span, self.params, self.grads, self.v[part], replies, self.residuals[chunk], master, self.world.hyper(),
            self.world.flags(flag), self.least, self.at_zero, self.live[part.start // 8 : part.stop // 8],
            self.sums[blocks], self.counts[blocks],
        )  # fmt: skip

    def update(self, chunk: int) -> None:
        span, part, replies, master = self.of_chunk(chunk)
        self.world.passes.zero_one_update(
            span, self.params, self.v[part], replies, master, self.world.hyper(), self.least, self.at_zero
        )

    def local(self, chunk: int, flag: int = 0) -> None:
        span, part, _, master = self.of_chunk(chunk)
        self.world.passes.zero_one_local(
            span, self.params, self.grads, self.v[part], self.m[part], self.residuals[chunk], master,
            self.world.hyper(), self.world.flags(flag), self.least, self.at_zero,
        )  # fmt: skip

    def sync(self, chunk: int) -> None:
        span, part, replies, master = self.of_chunk(chunk)
        self.world.passes.zero_one_sync(
            span, self.params, self.v[part], self.m[part], self.anchor[part], replies, master, self.world.hyper(),
            self.least, self.at_zero, self.decay, self.factor,
        )  # fmt: skip

    def all_bytes(self) -> list[bytes]:
        return frozen_bits(
            self.params, self.grads, self.v, self.m, self.anchor, self.master, self.sums, self.counts, self.live,
            self.replies, *self.residuals,
        )  # fmt: skip

    def u(self) -> oracle.Arrays:
        each = zip(self.v64, self.world.hypers, self.least64, self.at_zero64, strict=True)
        return [used_root(v, h, least, at_zero) for v, h, least, at_zero in each]

    def arrays(self, flat: torch.Tensor) -> oracle.Arrays:
        """A flat state by parameter, whose padding nobody wrote to."""
        assert np.isnan(numpy(flat)[~self.world.plan.valid]).all()
        return self.world.plan.unflatten(numpy(flat))

    def residual(self) -> torch.Tensor:
        return torch.cat([residual.value for residual in self.residuals if residual is not None])

    def x(self) -> oracle.Arrays:
        return updated(self.world, self.params, self.master)

    def e(self, had: bool = False) -> oracle.Arrays:
        """had: 0 where a coordinate took no part before."""
        parts = [numpy(residual.left_out()) for residual in self.residuals if residual is not None]
        found = self.world.plan.unflatten(np.concatenate(parts))
        pairs = zip(found, self.v64, self.at_zero64, strict=True)
        return [np.where((v == 0) & (z == 0), 0.0, e) for e, v, z in pairs] if had else found


def used_root(v: np.ndarray, h: Any, least: float, at_zero: float) -> np.ndarray:
    return np.where(v == 0, at_zero, np.maximum(np.sqrt(v / (1 - h.beta2**STEP)), least))


def moved(x: np.ndarray, m: np.ndarray, u: np.ndarray, h: Any) -> np.ndarray:
    mhat = m / (1 - h.beta1**STEP)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(u == 0, x, x - h.lr * (mhat / (u + h.eps) + h.weight_decay * x))


def expected(run: Run, full: bool) -> dict[str, list[np.ndarray]]:
    world, found = run.world, {"x": [], "v": [], "folded": [], "m": []}
    replies = world.plan.unflatten(values_of(run.replies, world.plan))
    for p, (x, v, m, h) in enumerate(zip(world.x, run.v64, replies, world.hypers, strict=True)):
        if full:
            g = oracle.gradient(world.scaled_g[p], x)
            m = h.beta1 * np.where((v == 0) & (run.at_zero64[p] == 0), 0.0, m) + (1 - h.beta1) * g
            v = h.beta2 * v + (1 - h.beta2) * g**2
        found["x"].append(moved(x, m, used_root(v, h, run.least64[p], run.at_zero64[p]), h))
        found["v"].append(v)
        found["m"].append(m)
        found["folded"].append(h.beta1 * m)
    return found


def sizes(run: Run, x: oracle.Arrays) -> oracle.Arrays:
    return [np.abs(a) + np.abs(b - a) + 10 * h.lr for a, b, h in zip(run.world.x, x, run.world.hypers, strict=True)]


@ON_BACKENDS
@GRID
def test_a_full_step_agrees_with_float64(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    run = Run(case, name)
    before = run.e(had=True)
    for chunk in range(case.chunks):
        run.full(chunk)
    want, world = expected(run, full=True), run.world
    check_parameters(world, run.params, run.master, want["x"], sizes(run, want["x"]))
    for got, v in zip(world.plan.unflatten(numpy(run.v)), want["v"], strict=True):
        assert_close(got, v, ELEMENTWISE)
    for got, e, folded in zip(run.e(), before, want["folded"], strict=True):
        # With a tensor scale e is computed from c, which a scale that is set to 0 afterwards ends.
        last = 0 if case.scale == "block" else 0.4
        assert np.all(np.abs(got - (e + folded)) <= 2e-6 * (np.abs(e) + np.abs(folded)) + 2.1 * last)
    values = world.plan.flatten(want["v"])
    of_blocks = world.plan.of_blocks(values)
    assert_close(numpy(run.sums), [block.sum() for block in of_blocks], 4e-6)
    assert numpy(run.counts).tolist() == [np.count_nonzero(block) for block in of_blocks]
    assert np.array_equal(np.unpackbits(run.live.cpu().numpy(), bitorder="little") != 0, values != 0)


@ON_BACKENDS
def test_what_a_tensor_scale_left_out_is_folded_into(name):
    """`value` becomes e + beta1 m, which is the residual once the scale is set to 0."""
    run = Run(Case((200, 40), ranks=2, scale="tensor", momentum="packed"), name)
    before = run.e(had=True)
    run.full(0)
    run.residuals[0].scale.zero_()
    want = expected(run, full=True)
    for got, e, folded in zip(run.e(), before, want["folded"], strict=True):
        assert_close(got, e + folded, 1e-6, 10)


@ON_BACKENDS
@GRID
def test_an_update_agrees_with_float64(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    run = Run(case, name)
    for chunk in range(case.chunks):
        run.update(chunk)
    want = expected(run, full=False)["x"]
    check_parameters(run.world, run.params, run.master, want, sizes(run, want))
    for p, (got, before, v) in enumerate(zip(run.x(), run.world.x, run.v64, strict=True)):
        if run.at_zero64[p] == 0:
            assert got[v == 0].tolist() == before[v == 0].tolist()


@ON_FUSED
@SMALL_GRID
def test_both_agree_with_the_cpu(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    for each in ("full", "update"):
        ours, theirs = Run(case, name), Run(case)
        for chunk in range(case.chunks):
            getattr(ours, each)(chunk)
            getattr(theirs, each)(chunk)
        for got, want, s in zip(ours.x(), theirs.x(), sizes(theirs, theirs.x()), strict=True):
            assert_close(got, want, AGREEMENT + 2 * theirs.world.half_place, s)
        if each == "full":
            assert torch.equal(ours.live.cpu(), theirs.live) and torch.equal(ours.counts.cpu(), theirs.counts)
            for got, want in zip(ours.e(), theirs.e(), strict=True):
                assert_close(got, want, AGREEMENT, 10)


@ON_BACKENDS
@pytest.mark.parametrize("master", [True, False])
def test_a_flag_stops_a_full_step(name, master):
    run = Run(Case((70, 5), param=F16, grad=F16, master=master), name)
    before = run.all_bytes()
    run.full(0, flag=NONFINITE)
    assert run.all_bytes() == before


@ON_BACKENDS
def test_a_full_step_reads_replies_that_carry_a_flag_and_an_update_does_not(name):
    """They hold the momentum of the last step that was taken."""
    case = Case((64, 64), ranks=2)
    flagged, plain = Run(case, name), Run(case, name)
    flagged.replies.flags[0] = NONFINITE
    flagged.full(0)
    plain.full(0)
    assert [x.tolist() for x in flagged.x()] == [x.tolist() for x in plain.x()]
    stopped = Run(case, name)
    stopped.replies.flags[0] = NONFINITE
    stopped.update(0)
    assert stopped.x()[0].tolist() == stopped.world.x[0].tolist()
    assert stopped.x()[1].tolist() != stopped.world.x[1].tolist()


@ON_BACKENDS
def test_a_slice_of_another_rank_has_no_residual(name):
    case = Case((130, 60), ranks=2, chunks=2)
    without, with_it = Run(case, name, residual=False), Run(case, name)
    for chunk in range(2):
        without.full(chunk)
        with_it.full(chunk)
    assert [x.tolist() for x in gathered(without.params)] == [x.tolist() for x in gathered(with_it.params)]
    assert torch.equal(without.live, with_it.live)


@ON_BACKENDS
@GRID
def test_a_local_step_agrees_with_float64(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    run = Run(case, name)
    world, before, v = run.world, run.e(), frozen_bits(run.v, run.grads)
    for chunk in range(case.chunks):
        run.local(chunk)
    assert frozen_bits(run.v, run.grads) == v
    for residual in run.residuals:
        if residual.scale is not None:  # as the caller does
            residual.scale.zero_()
    want, got_m, got_e = [], run.arrays(run.m), run.arrays(run.residual())
    for p, (x, m, h, u, e) in enumerate(zip(world.x, world.m, world.hypers, run.u(), before, strict=True)):
        g, lr = oracle.gradient(world.scaled_g[p], x), h.lr / (1 - h.beta1**STEP)
        new = np.where(u == 0, m, h.beta1 * m + (1 - h.beta1) * g)
        size = np.abs(h.beta1 * m) + np.abs((1 - h.beta1) * g)
        want.append(moved(x, new, u, h))
        assert_close(got_m[p], new, ELEMENTWISE, size)
        assert got_m[p][u == 0].tolist() == m[u == 0].tolist()
        held = e if case.scale == "block" else np.zeros_like(e)
        assert_close(got_e[p], np.where(u == 0, held, e + lr * new), ELEMENTWISE, np.abs(e) + lr * size)
        assert got_e[p][u == 0].tolist() == held[u == 0].tolist()
    check_parameters(world, run.params, run.master, want, sizes(run, want))
    for got, x, u in zip(run.x(), world.x, run.u(), strict=True):
        assert got[u == 0].tolist() == x[u == 0].tolist()


@ON_BACKENDS
@GRID
def test_a_sync_agrees_with_float64(name, case, monkeypatch):
    use_grain(monkeypatch, case)
    run = Run(case, name)
    world, v = run.world, frozen_bits(run.v)
    for chunk in range(case.chunks):
        run.sync(chunk)
    assert frozen_bits(run.v) == v
    want, moves, size = [], [], []
    replies = world.plan.unflatten(values_of(run.replies, world.plan))
    for p, (a, total, h, u) in enumerate(zip(run.anchor64, replies, world.hypers, run.u(), strict=True)):
        with np.errstate(divide="ignore", invalid="ignore"):
            move = np.where(u == 0, 0.0, total / (u + h.eps))
        want.append(np.where(u == 0, 1.0, run.decay64[p]) * a - move)
        moves.append(move)
        size.append(np.abs(a) + np.abs(move))
    check_parameters(world, run.params, run.master, want, size)
    for got, x, a, u in zip(run.arrays(run.anchor), run.x(), run.anchor64, run.u(), strict=True):
        assert got.tolist() == x.tolist()  # as it was stored
        kept = a if case.master else stored(a, case.param, name)
        assert x[u == 0].tolist() == kept[u == 0].tolist()


@ON_BACKENDS
@GRID
def test_a_sync_leaves_what_decode_gives_times_a_factor_as_momentum(name, case, monkeypatch):
    """To the last bit, so that others can compute it again."""
    use_grain(monkeypatch, case)
    run = Run(case, name)
    world = run.world
    values = [torch.full((n,), float("nan"), device=world.device) for n in case.numels]
    for chunk, (span, _) in enumerate(world.spans()):
        run.sync(chunk)
        world.passes.decode(span, run.of_chunk(chunk)[2], Pointers.to(world.layout, values))
    want = [numpy(total * factor) for total, factor in zip(values, run.factor, strict=True)]
    for got, m, u in zip(run.arrays(run.m), want, run.u(), strict=True):
        assert got.tobytes() == np.where(u == 0, 0.0, m).tobytes()


@ON_FUSED
@SMALL_GRID
def test_local_steps_and_syncs_agree_with_the_cpu(name, case, monkeypatch):
    """Where no root is taken, to the last bit; Triton has no -0 in what a scale of 0 stands for."""
    use_grain(monkeypatch, case)
    for each in ("local", "sync"):
        ours, theirs = Run(case, name), Run(case)
        for chunk in range(case.chunks):
            getattr(ours, each)(chunk)
            getattr(theirs, each)(chunk)
        for got, want in ((ours.m, theirs.m), (ours.residual(), theirs.residual())):
            assert np.array_equal(numpy(got), numpy(want), equal_nan=True)
        for got, want, s in zip(ours.x(), theirs.x(), sizes(theirs, theirs.x()), strict=True):
            assert_close(got, want, AGREEMENT + 2 * theirs.world.half_place, s)


@ON_BACKENDS
@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("master", [True, False])
def test_a_flag_stops_a_local_step(name, master, scale):
    run = Run(Case((70, 5), param=F16, grad=F16, master=master, scale=scale), name)
    before = run.all_bytes()
    run.local(0, flag=NONFINITE)
    assert run.all_bytes() == before


@ON_BACKENDS
@pytest.mark.parametrize("param, master", [(F32, False), (F16, True), (F16, False)])
def test_a_flagged_reply_leaves_its_blocks_alone_in_a_sync(name, param, master):
    stopped, plain = (Run(Case((64, 64), ranks=2, param=param, grad=param, master=master), name) for _ in range(2))
    stopped.replies.flags[0] = NONFINITE
    stopped.sync(0)
    plain.sync(0)
    before = stopped.world
    for got, whole, start in zip(
        (stopped.x(), stopped.arrays(stopped.anchor), stopped.arrays(stopped.m)),
        (plain.x(), plain.arrays(plain.anchor), plain.arrays(plain.m)),
        (before.x, stopped.anchor64, before.m),
        strict=True,
    ):
        assert got[0].tolist() == start[0].tolist()
        assert got[1].tolist() == whole[1].tolist()
    assert_guards(stopped.params)


@ON_BACKENDS
@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("each", ["local", "sync"])
def test_padding_stays_as_it_is(name, each, scale):
    run = Run(Case((70, 5), ranks=2, param=F16, grad=F16, master=True, scale=scale), name)
    states = [run.v, run.m, run.anchor, run.master, run.residuals[0].value]
    for state in states:
        state.nan_to_num_(nan=2.5)  # what a NaN is added to would not show
    getattr(run, each)(0)
    for state in states:
        assert (numpy(state)[~run.world.plan.valid] == 2.5).all()


@ON_BACKENDS
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_a_local_step_without_a_residual(name, scale):
    case = Case((130, 60), ranks=2, chunks=2, scale=scale, missing=(1,))
    without, with_it = Run(case, name, residual=False), Run(case, name)
    for chunk in range(2):
        without.local(chunk)
        with_it.local(chunk)
    assert frozen_bits(without.params, without.m) == frozen_bits(with_it.params, with_it.m)


REPLIES = {
    "one": {"ranks": 2},
    "tensor": {"ranks": 3, "scale": "tensor"},
    "2 bits": {"ranks": 2, "reply_bits": 2},
    "2 bits, fp16": {"ranks": 1, "reply_bits": 2, "block_size": 96, "dtype": F16, "master": False},
    "two copies": {"ranks": 1, "copies": 2},
    "four copies": {"ranks": 1, "copies": 4, "block_size": 96, "dtype": F16},
    "three copies, tensor": {"ranks": 2, "copies": 3, "scale": "tensor"},
}


@ON_BACKENDS
@pytest.mark.parametrize("options", REPLIES.values(), ids=REPLIES.keys())
def test_a_sync_reads_every_kind_of_reply(name, options):
    work = Workload([1, 7, 300, 63, 96], device_of(name), **{"block_size": 32, **options})
    work.exp_avg_sq()[::5] = 0.0
    work.root_at_zero()[1::2] = 0.0
    plan = oracle.Layout(work.layout.numel.tolist(), work.layout.block_size, work.layout.ranks)
    v, start = (plan.unflatten(numpy(t)) for t in (work.exp_avg_sq(), work.anchor()))
    values = Pointers.to(work.layout, [torch.zeros(n, device=work.device) for n in work.layout.numel.tolist()])
    backend(name).decode(work.span, work.replies(), values)
    work.passes(backend(name))["zero_one_sync"].run()
    got, m = (plan.unflatten(numpy(t)) for t in (work.anchor(), work.exp_avg()))
    half_place = 2.0**-11 if work.dtype == F16 and work.master() is None else 0.0
    for p, total in enumerate(values.tensors):
        root = np.maximum(np.sqrt(v[p]) * HYPER.bias2, 0.1)
        u = np.where(v[p] == 0, float(work.root_at_zero()[p]), root)
        move = np.where(u == 0, 0.0, numpy(total) / np.where(u == 0, 1.0, u + HYPER.eps))
        want = np.where(u == 0, 1.0, 0.9) * start[p] - move
        assert_close(got[p], want, ELEMENTWISE + half_place, np.abs(start[p]) + np.abs(move))
        assert m[p].tobytes() == np.where(u == 0, 0.0, numpy(total * work.factor()[p])).tobytes()


@ON_BACKENDS
@pytest.mark.parametrize("flagged", [0, 1, 2])
def test_a_flag_in_any_copy_stops_a_sync(name, flagged):
    work = Workload([1, 7, 300], device_of(name), ranks=1, copies=3, block_size=32)
    work.replies().flags[flagged] = NONFINITE
    before = frozen_bits(*work.outputs().values())
    work.passes(backend(name))["zero_one_sync"].run()
    assert frozen_bits(*work.outputs().values()) == before
