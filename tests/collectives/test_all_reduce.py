"""The compressed all-reduce over Gloo ranks against the float64 simulation of its three phases."""

import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebit.collectives import CompressedAllReduce
from onebit.collectives.exchange import Exchange
from onebit.collectives.transport.protocol import LocalTransport
from onebit.kernels.data.layout import Layout
from tests.collectives import steps, work
from tests.collectives.steps import Case
from tests.ranks import run_ranks

MANY = tuple(1 + i % 5 for i in range(300))
CASES = {
    "one": Case((1,), 2048),
    "one-tensor": Case((1,), chunks=2, scale="tensor", norm="l2"),
    "seven": Case((7,), 2048, scale="tensor"),
    "63": Case((63,), norm="l2"),
    "63-bf16": Case((63,), chunks=3, dtype="bfloat16"),
    "1000": Case((1000,), chunks=3, scale="tensor", norm="l2"),
    "1000-fp16": Case((1000,), 96, scale="tensor", dtype="float16"),
    "2049": Case((2049,), 2048, chunks=2),
    "2049-bf16": Case((2049,), 64, chunks=5, norm="l2", dtype="bfloat16"),
    "full-blocks": Case((2048, 4096), 2048),
    "list": Case((63, 1000, 1, 7), 96, chunks=2),
    "list-tensor": Case((500, 0, 129, 1), chunks=3, scale="tensor"),
    "list-fp16": Case((2049, 7), 64, norm="l2", dtype="float16"),
    "300-tensors": Case(MANY, chunks=2, steps=2),
}
LONG = {
    1: Case((1000,), 96, chunks=2, steps=200, norm="l2"),
    2: Case((63, 1, 400), chunks=3, steps=200),
    3: Case((1000, 7), 64, chunks=2, steps=200, scale="tensor"),
    4: Case((300, 63), steps=200, norm="l2"),
    8: Case((500, 7), steps=200),
}


@pytest.mark.parametrize("size", LONG)
def test_200_steps_equal_the_simulation(size):
    steps.check(LONG[size], run_ranks(size, work.recorded, LONG[size]))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_size_dtype_scale_and_norm(size):
    runs = run_ranks(size, work.recorded_many, list(CASES.values()))
    for case, recorded in zip(CASES.values(), zip(*runs, strict=True), strict=True):
        steps.check(case, list(recorded))


def test_groups_that_are_not_the_first_ranks():
    """Two at once, one of them not in the order of its ranks, and one rank in neither."""
    case, groups = Case((300, 63), chunks=2, steps=4), [[1, 4, 6], [7, 2, 0, 3]]
    recorded = run_ranks(8, work.in_subgroups, case, groups)
    for members in groups:
        steps.check(case, [recorded[rank] for rank in sorted(members)])
    assert recorded[5] is None
    assert recorded[1].result_bytes != recorded[7].result_bytes


def test_the_default_group():
    case = Case((300,), steps=2)
    steps.check(case, run_ranks(8, work.over_world, case))


def test_without_a_group_this_process_alone():
    case = Case((63, 1000), chunks=2, steps=4)
    recorded = steps.record(case, 0, None)
    steps.check(case, [recorded])
    assert recorded.states[-1]["wire_bytes"] == 0


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("size", [1, 3])
def test_chunks_change_no_bit_with_block_scales(size, norm):
    cases = [Case((1000, 63, 129), chunks=chunks, norm=norm) for chunks in (1, 2, 3, 5)]
    runs = run_ranks(size, work.recorded_many, cases)
    valid, results, residuals = cases[0].plan(size).valid, set(), set()
    for case, recorded in zip(cases, zip(*runs, strict=True), strict=True):
        used = case.plan(size).valid
        states = [r.states[-1] for r in recorded]
        kept = [steps.worker_residual(case, size, s) for s in states] + [steps.server_residual(case, size, states)]
        residuals.add(b"".join(e[used].tobytes() for e in kept))
        results.add(recorded[0].result_bytes)
        assert used.sum() == valid.sum()
    assert len(results) == len(residuals) == 1


@st.composite
def telescopes(draw):
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    case = Case(
        numels=tuple(draw(st.lists(st.integers(0, 200), min_size=1, max_size=4).filter(sum))),
        block_size=draw(st.sampled_from([32, 96])),
        chunks=draw(st.sampled_from([1, 2, 3])),
        scale=draw(st.sampled_from(["block", "tensor"])),
        norm=draw(st.sampled_from(["l1", "l2"])),
        steps=draw(st.integers(1, 12)),
        seed=draw(st.integers(0, 2**31)),
    )
    return size, case


@settings(max_examples=40)
@given(telescopes())
def test_it_telescopes(drawn):
    """sum of results + mean over ranks of e_i + E = sum of mean inputs: nothing is ever lost."""
    size, case = drawn
    sums = run_ranks(size, work.summed, case)
    states = [s.state for s in sums]
    kept = np.mean([steps.worker_residual(case, size, state) for state in states], axis=0)
    kept += steps.server_residual(case, size, states)
    mean = np.mean([s.inputs for s in sums], axis=0)
    magnitude = case.steps * (np.abs(mean).max() + np.abs(sums[0].results).max() + np.abs(kept).max())
    np.testing.assert_allclose(sums[0].results + kept, mean, rtol=0, atol=1e-6 * magnitude)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "case",
    [
        Case((300, 63), chunks=2, steps=4),
        Case((300, 63), chunks=3, steps=4, scale="tensor", norm="l2"),
        Case((100,), steps=4, dtype="float16"),
        Case((100, 7), steps=4, dtype="bfloat16", scale="tensor"),
    ],
    ids=["block", "tensor", "fp16", "bf16-tensor"],
)
def test_what_is_not_finite_gives_nan_everywhere_and_leaves_residuals(case, value):
    """The steps around the bad one are those of a run that never met it."""
    bad = replace(case, bad=((2, 1, value),))
    recorded = run_ranks(3, work.recorded, bad)
    for run in recorded:
        assert all(np.isnan(a).all() for a in steps.values(case, run.results[2]))
        before, after = ({**s, "wire_bytes": 0} for s in run.states[2:4])
        assert steps.same_state(before, after)
    kept = [replace_steps(run, [0, 1, 3]) for run in recorded]
    skipping = run_ranks(3, work.recorded_but, case, 2)
    assert [run.result_bytes for run in kept] == [run.result_bytes for run in skipping]
    assert all(np.isfinite(a).all() for run in kept for arrays in run.results for a in steps.values(case, arrays))


def replace_steps(run, chosen):
    return replace(run, results=[run.results[step] for step in chosen])


@pytest.mark.parametrize("norm, value", [("l1", 3e38), ("l2", 1e25)])
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_huge_values_do_no_lasting_harm(scale, norm, value):
    """Every input is finite, the sum of a block is not."""
    all_reduce = CompressedAllReduce(1000, chunks=1, scale=scale, norm=norm)
    all_reduce(torch.full((1000,), value))
    last = torch.ones(1000)
    for _ in range(3):
        last = torch.ones(1000)
        all_reduce(last)
    assert last.isfinite().all()


@pytest.mark.parametrize("case", [Case((300, 63), chunks=2), Case((300, 63), scale="tensor", norm="l2")])
@pytest.mark.parametrize("auto", [False, True])
def test_a_loaded_state_goes_on_bit_for_bit(case, auto):
    for whole, rest in run_ranks(3, work.resumed, case, 3, auto):
        assert b"".join(a.tobytes() for arrays in whole.results[3:] for a in arrays) == rest.result_bytes
        assert all(map(steps.same_state, whole.states[3:], rest.states))
        assert any(np.any(value) for value in rest.states[0].values())


DROP = "left out"


@pytest.mark.parametrize(
    "case", [Case((300, 63), chunks=2, steps=2), Case((300, 63), scale="tensor", steps=2)], ids=["block", "tensor"]
)
def test_a_wrong_state_is_refused_and_changes_nothing(case):
    plan = case.plan(3)
    residual, server = torch.ones(plan.size), torch.ones(plan.size // 3)
    scales = {"residual_scale": torch.ones(3), "server_residual_scale": torch.ones(1)}
    wrong = {
        "no residual": ({"residual": DROP}, "lacks residual"),
        "no server residual": ({"server_residual": DROP}, "lacks server_residual"),
        "no chunks": ({"chunks": DROP}, "lacks chunks"),
        "no bytes": ({"wire_bytes": DROP}, "lacks wire_bytes"),
        "something more": ({"momentum": residual}, "momentum"),
        "other scale": (
            scales if case.scale == "block" else dict.fromkeys(scales, DROP),
            "another scale",
        ),
        "other chunks": ({"chunks": case.chunks + 1}, f"chunks={case.chunks + 1}"),
        "longer residual": ({"residual": torch.ones(plan.size + case.block_size)}, "residual"),
        "longer server residual": ({"server_residual": torch.cat([server, server])}, "server_residual"),
        "server residual as a table": ({"server_residual": server[None]}, "server_residual"),
    }
    for outcomes in run_ranks(3, work.refused, case, {k: entries for k, (entries, _) in wrong.items()}, DROP):
        for name, (_, needle) in wrong.items():
            error, unchanged = outcomes[name]
            assert needle in error, f"{name}: {error!r}"
            assert unchanged, name
        assert outcomes["goes on"] == ("", True)


@pytest.mark.parametrize("damage", [{"residual": [0.0]}, {"chunks": None}, {"format": "1"}], ids=str)
def test_a_damaged_state_changes_nothing(damage):
    all_reduce = CompressedAllReduce(100, chunks=1)
    before = steps.state_of(all_reduce)
    state = {k: v + 1 if isinstance(v, torch.Tensor) else v for k, v in all_reduce.state_dict().items()}
    with pytest.raises(ValueError, match="damaged"):
        all_reduce.load_state_dict(state | damage)
    assert steps.same_state(before, steps.state_of(all_reduce))


def test_the_numbers_of_a_damaged_state_are_shown():
    all_reduce = CompressedAllReduce(100, chunks=1)
    state = all_reduce.state_dict() | {"format": "seven", "wire_bytes": True}
    with pytest.raises(ValueError, match=r"are numbers, not \[0, 1, 'seven', True\]"):
        all_reduce.load_state_dict(state)


def test_a_state_of_another_rank_is_refused():
    all_reduce = CompressedAllReduce(100, chunks=1)
    with pytest.raises(ValueError, match="saved by rank 1, this is rank 0"):
        all_reduce.load_state_dict(all_reduce.state_dict() | {"rank": 1})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"block_size": 33}, "multiple of 32"),
        ({"block_size": 2**20}, "at most 16384"),
        ({"scale": "blok"}, "scale must be one of"),
        ({"norm": "l3"}, "norm must be one of"),
        ({"numel": []}, "no parameters"),
        ({"device": "meta"}, "no kernels"),
        ({"chunks": 0}, "chunks must be"),
    ],
    ids=str,
)
def test_bad_options_are_refused_at_once(options, message):
    """Also with chunks="auto", before any rank waits for another."""
    with pytest.raises(ValueError, match=message):
        CompressedAllReduce(**{"numel": 10, **options})


def test_no_tensor_is_kept_alive():
    tensor = torch.ones(1000)
    alive = weakref.ref(tensor)
    all_reduce = CompressedAllReduce(np.int64(1000))
    all_reduce(tensor)
    del tensor
    assert alive() is None


def test_dtypes_that_differ_are_named():
    for error in run_ranks(2, work.dtypes_differ):
        assert "rank 1 has dtype 'torch.bfloat16' where rank 0 has 'torch.float32'" in error


def test_a_state_in_another_dtype_is_refused():
    all_reduce = CompressedAllReduce(100, chunks=1)
    state = all_reduce.state_dict()
    with pytest.raises(ValueError, match=r"residual is torch\.float16"):
        all_reduce.load_state_dict(state | {"residual": state["residual"].half()})


def test_a_wrong_count_of_bytes_changes_nothing():
    all_reduce = CompressedAllReduce(100, chunks=1)
    before = steps.state_of(all_reduce)
    state = {k: v + 1 if isinstance(v, torch.Tensor) else v for k, v in all_reduce.state_dict().items()}
    with pytest.raises(ValueError):
        all_reduce.load_state_dict(state | {"wire_bytes": "many"})
    assert steps.same_state(before, steps.state_of(all_reduce))


@pytest.mark.parametrize(
    "other", [{"numel": [999]}, {"numel": [500, 500]}, {"numel": [1000], "block_size": 64}], ids=str
)
def test_a_state_of_other_tensors_is_refused(other):
    """Though it is as long with its padding."""
    saved = CompressedAllReduce(**{"block_size": 32, "chunks": 1, **other})
    with pytest.raises(ValueError):
        CompressedAllReduce([1000], block_size=32, chunks=1).load_state_dict(saved.state_dict())


def test_a_real_state_of_another_scale_is_told_from_one_of_other_tensors():
    block, tensor = (CompressedAllReduce(1000, chunks=1, scale=scale) for scale in ("block", "tensor"))
    with pytest.raises(ValueError, match=r"residual_scale.*another scale"):
        block.load_state_dict(tensor.state_dict())


def test_an_exchange_copies_all_of_a_state_or_nothing():
    exchange = Exchange(Layout([1000], block_size=32), LocalTransport(), torch.device("cpu"))
    state = {name: torch.ones_like(value) for name, value in exchange.state_dict().items()}
    with pytest.raises(ValueError, match="server_residual"):
        exchange.load_state_dict(state | {"server_residual": torch.ones(5)})
    assert not any(value.any() for value in exchange.state_dict().values())
    exchange.load_state_dict(state)
    assert all(value.all() for value in exchange.state_dict().values())


@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_wire_bytes_are_what_the_transport_was_given(size, scale):
    """16 bytes of header, 4 a scale, 1 bit an element, rounded to 16; to every other rank, twice a chunk."""
    case = Case((20_000, 2049), 2048, chunks=2, scale=scale)
    plan = case.plan(size)
    blocks = plan.blocks // (size * case.chunks)
    scales = blocks if scale == "block" else 1
    message = 16 + -(-4 * scales // 16) * 16 + -(-blocks * 2048 // 8 // 16) * 16
    expected = 2 * (size - 1) * case.chunks * message
    for _, sent, counted, nbytes in run_ranks(size, work.watched, case, 3):
        assert nbytes == message
        assert sent == expected
        assert counted == 3 * expected


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_28th_of_the_bytes_of_a_ring_all_reduce_in_fp32(size):
    numel = 2_000_000
    case = Case((numel,), 2048, chunks=4)
    ring = 2 * (size - 1) / size * 4 * numel
    for _, sent, _, _ in run_ranks(size, work.watched, case, 1):
        assert 0 < sent <= ring / 28


@pytest.mark.parametrize("size", [1, 3])
def test_the_pipeline_in_one_order_on_all_ranks(size):
    """Chunk j + 1 is under way before anyone waits for chunk j; collectives start in the same order everywhere."""
    every = [events for events, *_ in run_ranks(size, work.watched, Case((1000,), chunks=3), 2)]
    assert all(events == every[0] for events in every)
    g, s = ([f"the {name} of chunk {j})" for j in range(3)] for name in GATHER_SCATTER)
    assert every[0] == [
        "all_max agreeing on finite values (all-reduce of one number)",
        f"start {g[0]}", f"start {g[1]}",
        f"wait {g[0]}", f"start {s[0]}", f"start {g[2]}",
        f"wait {g[1]}", f"start {s[1]}", f"wait {s[0]}",
        f"wait {g[2]}", f"start {s[2]}", f"wait {s[1]}",
        f"wait {s[2]}",
    ]  # fmt: skip


GATHER_SCATTER = ("gather phase (all-to-all", "scatter phase (all-gather")


def test_the_replies_are_kept_as_received():
    """What an optimizer reads after an exchange: every rank's shard of every chunk, in the order of the space."""
    for decoded, result in run_ranks(3, work.replies_of, Case((2000,), chunks=3)):
        assert decoded == result


@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_server_residuals_of_all_ranks_in_the_order_of_the_space(chunks, scale):
    case = Case((300, 63), chunks=chunks, scale=scale, steps=3)
    answers = run_ranks(3, work.gathered_server, case)
    expected = steps.server_residual(case, 3, [state for _, state in answers])
    assert np.any(expected)
    for gathered, _ in answers:
        valid = case.plan(3).valid  # with a tensor scale padding keeps what it is given
        np.testing.assert_allclose(np.frombuffer(gathered, np.float32)[valid], expected[valid], atol=1e-6)


def test_no_warnings():
    assert run_ranks(2, work.warned, Case((100,), chunks=2, steps=2)) == [[], []]


@pytest.mark.parametrize("chunks", [0, -1, 2.0, "2", None])
def test_a_wrong_number_of_chunks(chunks):
    with pytest.raises(ValueError, match=r"chunks must be a positive number or .auto."):
        CompressedAllReduce(100, chunks=chunks)


@pytest.mark.parametrize(
    "options, needle",
    [
        ({"scale": "row"}, "scale must be one of"),
        ({"norm": "max"}, "norm must be one of"),
        ({"block_size": 33}, "multiple of 32"),
    ],
)
def test_wrong_options(options, needle):
    with pytest.raises(ValueError, match=needle):
        CompressedAllReduce(100, chunks=1, **options)


@pytest.mark.parametrize(
    "tensors, error, needle",
    [
        ([torch.ones(100)], ValueError, "1 tensors for a layout of 2"),
        ([torch.ones(100), torch.ones(8)], ValueError, "tensor 1 has 8 elements where the layout holds 7"),
        ([torch.ones(100), torch.ones(7).half()], TypeError, "tensor 1 has dtype torch.float16"),
        ([torch.ones(100).double(), torch.ones(7).double()], TypeError, "float64"),
        ([torch.ones(100), torch.ones(14)[::2]], ValueError, "not contiguous"),
        ([torch.ones(100, device="meta"), torch.ones(7, device="meta")], ValueError, "built for cpu"),
    ],
)
def test_wrong_tensors_leave_everything_as_it_was(tensors, error, needle):
    all_reduce = CompressedAllReduce([100, 7], chunks=1)
    before, kept = steps.state_of(all_reduce), [t.clone() for t in tensors]
    with pytest.raises(error, match=needle):
        all_reduce(tensors)
    assert steps.same_state(before, steps.state_of(all_reduce))
    if tensors[0].device.type == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


def test_one_object_takes_one_dtype_after_the_other():
    all_reduce = CompressedAllReduce(100, chunks=1)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        x = torch.full((100,), 3.0, dtype=dtype)
        all_reduce(x)
        assert torch.equal(x, torch.full((100,), 3.0, dtype=dtype))


def test_an_exchange_wants_a_layout_for_its_group():
    with pytest.raises(ValueError, match="cut for 2 ranks, the group has 1"):
        Exchange(Layout([100], ranks=2), LocalTransport(), torch.device("cpu"))
