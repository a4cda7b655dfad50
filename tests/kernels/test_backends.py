"""Triton's passes against the CPU's, which are held by a float64 oracle; both have every pass.

And the parts of Triton kernels that loop over more blocks than the passes' tests can afford to run.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from onebit.kernels.data.record import argument
from onebit.kernels.data.wire import NORMS
from onebit.kernels.gpu import tiles
from onebit.kernels.passes import PASSES, SMALL
from onebit.kernels.tuning.workload import Workload
from tests.kernels.agreement import COMPARED, check_messages, check_pass
from tests.kernels.cases import CASES, GPU, GRID, MASKED, ON_BACKENDS, Case, backend, device_of
from tests.kernels.compare import frozen_bits, tensors_of
from tests.kernels.world import World


@pytest.mark.parametrize("each", COMPARED)
@GRID
def test_triton_agrees_with_the_cpu(each, case):
    check_pass(each, case, "triton")


@MASKED
@GRID
def test_triton_compresses_as_the_cpu_does(case, masked):
    check_messages(case, "triton", masked=masked)


@pytest.mark.parametrize("bits", [4, 8])
@GRID
def test_triton_quantizes_as_the_cpu_does(case, bits):
    check_messages(case, "triton", bits=bits, zeros=case.missing == ())


def test_scales_of_blocks_that_are_no_power_of_two_long_lie_side_by_side():
    check_messages(Case((3000,), 768), "triton", bits=4)


def test_results_do_not_depend_on_how_many_blocks_a_program_takes(use_grain):
    for name in ("three-groups-tensor", "chunks"):
        found = []
        for grain in (1, 3, 64):
            world = World(replace(CASES[name], grain=grain), "triton")
            use_grain(world.case)
            for each in ("compress", "lamb_statistics", "lamb_warmup", "adam_update"):
                world.run(each)
            found.append(frozen_bits(*tensors_of(world).values()))
        assert found[0] == found[1] == found[2]


@ON_BACKENDS
def test_every_backend_has_every_pass(name):
    assert set(backend(name).PASSES) == {*PASSES.values(), *SMALL}


def test_a_kernel_gets_no_argument_that_no_record_has():
    found = {"residual": None, "flags": 1, "out": 2, "out_bytes": 3}
    assert [argument(found, name) for name in ("flags", "residual_scale", "out_bytes")] == [1, None, 3]
    for name in ("master", "out_scale"):
        with pytest.raises(AssertionError, match=name):
            argument(found, name)


BLOCKS = 2500  # three rounds of 1024


@triton.jit
def _reduce(partial, blocks, total, largest):
    tl.store(total, tiles.sum_partials(partial, blocks))
    tl.store(largest, tiles.max_partials(partial, blocks))


@triton.jit
def _finish_scale(scale, residual_scale, partial, counted, blocks, NORM: tl.constexpr):
    tiles.finish_scale(scale, residual_scale, partial, counted, blocks, NORM)


@pytest.mark.parametrize("blocks", [1, 1024, BLOCKS])
def test_partial_results_of_any_number_of_blocks_are_summed_compared_and_make_a_scale(blocks):
    """More elements than fp32 can count exactly, some blocks empty."""
    partial = torch.full((BLOCKS + 8,), float("nan"), device=GPU)
    partial[:blocks] = torch.rand(blocks, device=GPU)
    partial[blocks - 1] = 2.0
    total, largest, scale, copy = torch.zeros((4, 1), device=GPU)
    _reduce[(1,)](partial, blocks, total, largest)
    summed = partial[:blocks].double().sum().item()
    assert total.item() == pytest.approx(summed, rel=1e-6)
    assert largest.item() == 2.0
    counted = torch.randint(1, 16385, (BLOCKS + 8,), dtype=torch.int32, device=GPU)
    counted[5::7] = 0
    for norm in ("l1", "l2"):
        _finish_scale[(1,)](scale, copy, partial, counted, blocks, NORM=NORMS[norm])
        wanted = summed / counted[:blocks].sum().item()
        assert scale.item() == pytest.approx(np.sqrt(wanted) if norm == "l2" else wanted, rel=1e-6)
        assert copy.item() == scale.item()


def test_more_messages_than_eight_are_summed_in_their_order_too():
    """The residual with a tensor scale is c, bit for bit."""
    names = "triton", "cpu"
    ours, theirs = (Workload([5000], device_of(name), scale="tensor", ranks=11) for name in names)
    for work, name in zip((ours, theirs), names, strict=True):
        work.passes(backend(name))["average"].run()
    got, want = (work.server_residual.value for work in (ours, theirs))
    assert got.tolist() == want.tolist()
