"""The compressed all-reduce over Gloo ranks against the float64 simulation of its three phases."""

import math
import weakref
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from onebit.collectives import CompressedAllReduce
from tests.collectives import steps, work
from tests.collectives.steps import Case
from tests.onebit.runs import on_ranks, same
from tests.ranks import run_ranks

MANY = tuple(1 + i % 5 for i in range(300))
CASES = {
    "one": Case((1,), 2048),
    "one-tensor": Case((1,), chunks=2, scale="tensor", norm="l2"),
    "seven": Case((7,), 2048, scale="tensor"),
    "63": Case((63,), norm="l2"),
    "unbiased": Case((2049, 7), 64, chunks=2, norm="unbiased"),
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
    "4-bits": Case((2049, 63, 1, 700), 2048, chunks=3, bits=4),
    "8-bits": Case((2049, 7), 2048, bits=8),
    "4-bits-bf16": Case((600, 40), 96, chunks=2, bits=4, dtype="bfloat16"),
    "8-bits-fp16": Case((600, 40), 512, bits=8, dtype="float16"),
}
LONG = Case((63, 1, 400), chunks=3, steps=40)
LONG_RUNS = [LONG, replace(LONG, scale="tensor"), replace(LONG, norm="l2", reply="direct")]
REPLIES = (1, "direct")


def check_all(size, cases):
    runs = run_ranks(size, work.recorded_many, cases)
    for case, recorded in zip(cases, zip(*runs, strict=True), strict=True):
        steps.check(case, list(recorded))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_step_equals_the_simulation(size):
    """2, 3 and 4 ranks have every case, each with another reply, 3 many steps; one and eight have a third of them."""
    cases = list(CASES.values())[:: 1 if size in (2, 3, 4) else 3]
    cases = [replace(case, reply=REPLIES[(i + size) % 2]) for i, case in enumerate(cases)]
    check_all(size, cases + (LONG_RUNS if size == 3 else []))


@pytest.mark.parametrize(("size", "way"), [(1, 1), (2, "direct"), (3, 1)])
def test_auto_is_direct_where_that_sends_no_more(size, way):
    cases = [Case((300, 63), steps=2, reply=reply) for reply in ("auto", way)]
    for auto, chosen in run_ranks(size, work.recorded_many, cases):
        assert auto.result_bytes == chosen.result_bytes
        assert auto.states[-1]["wire_bytes"] == chosen.states[-1]["wire_bytes"]


def test_without_a_group_this_process_alone():
    case = Case((63, 1000), chunks=2, steps=4)
    steps.check(case, [recorded := steps.record(case, 0, None)])
    assert recorded.states[-1]["wire_bytes"] == 0


FORMS = [("block", norm) for norm in ("l1", "l2", "unbiased")] + [("tensor", "l1"), ("tensor", "l2")]
ODD = Case((300, 63), steps=4)
FLAGGED = [replace(ODD, **options) for options in (
    {"chunks": 2}, {"chunks": 3, "scale": "tensor", "norm": "l2"}, {"chunks": 2, "reply": "direct"},
    {"chunks": 3, "scale": "tensor", "reply": "direct"}, {"chunks": 2, "scale": "tensor"},
    {"numels": (100,), "dtype": "float16"}, {"numels": (100, 7), "dtype": "bfloat16", "scale": "tensor"},
    {"reply": "direct"}, {"scale": "tensor"},
)]  # fmt: skip
FLAGGED += [replace(ODD, chunks=chunks, bits=bits) for chunks, bits in ((2, 4), (1, 8))]
OF_NODES = [replace(ODD, chunks=2, nodes=2), replace(ODD, chunks=2, nodes=2, bits=4)]
BAD = [
    (3, math.nan, FLAGGED[::3]),
    (3, math.inf, FLAGGED[1::3]),
    (3, -math.inf, FLAGGED[2::3]),
    (4, math.inf, OF_NODES),
]


@pytest.mark.parametrize(("size", "value", "cases"), BAD)
@on_ranks()
def test_what_is_not_finite_gives_nan_everywhere_and_leaves_residuals(rank, size, value, cases):
    """The steps around the bad one are those of a run that never met it."""
    at = 2
    for case in cases:
        ranks = work.ranks_of(case, size)
        run = steps.record(replace(case, bad=((at, 1, value),)), rank, ranks)
        assert all(np.isnan(a).all() for a in steps.values(run.results.pop(at)))
        assert all(np.isfinite(a).all() for arrays in run.results for a in steps.values(arrays))
        before, after = ({**state, "wire_bytes": 0} for state in run.states[at : at + 2])
        assert same(before, after)
        skipping = case.all_reduce(ranks)
        first = steps.record(replace(case, steps=at), rank, None, all_reduce=skipping)
        rest = steps.record(case, rank, None, first=at + 1, all_reduce=skipping)
        assert run.result_bytes == first.result_bytes + rest.result_bytes


@pytest.mark.parametrize(("scale", "norm"), FORMS)
def test_huge_values_do_no_lasting_harm(scale, norm):
    """Every input is finite, the sum of a block is not."""
    value = 3e38 if norm == "l1" else 1e25
    all_reduce = CompressedAllReduce(1000, chunks=1, scale=scale, norm=norm)
    all_reduce(torch.full((1000,), value))
    for _ in range(3):
        last = torch.ones(1000)
        all_reduce(last)
    assert last.isfinite().all()


@pytest.mark.parametrize(("options", "message"), [
    ({"block_size": 33}, "multiple of 32"),
    ({"block_size": 2**20}, "at most 8192"),
    ({"scale": "blok"}, "scale must be one of"),
    ({"norm": "max"}, "norm must be one of"),
    ({"bits": 2}, "bits=2: an element has 1, 4 or 8"),
    ({"bits": True}, "bits=True: an element has"),
    ({"bits": 4, "scale": "tensor"}, "are of messages of 1 bit"),
    ({"bits": 8, "norm": "l2"}, "are of messages of 1 bit"),
    ({"numel": []}, "no parameters"),
    ({"device": "meta"}, "no kernels"),
    *(({"reply": reply}, f"reply={reply!r}: it must be one of") for reply in (2, True, "both")),
    *(({"chunks": chunks}, r"chunks must be a positive number or .auto.") for chunks in (0, -1, 2.0, "2", None)),
], ids=str)  # fmt: skip
def test_bad_options_are_refused_at_once(options, message):
    """No rank waits for another before that, with chunks="auto" neither."""
    with pytest.raises(ValueError, match=message):
        CompressedAllReduce(**{"numel": 10, **options})


def test_no_tensor_is_kept_alive_and_one_object_takes_one_dtype_after_the_other():
    all_reduce = CompressedAllReduce(np.int64(1000), chunks=1)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        x = torch.full((1000,), 3.0, dtype=dtype)
        all_reduce(x)
        assert torch.equal(x, torch.full((1000,), 3.0, dtype=dtype))
    alive = weakref.ref(x)
    del x
    assert alive() is None


@pytest.mark.parametrize("tensors, error, needle", [
    ([torch.ones(100)], ValueError, "1 tensors for a layout of 2"),
    ([torch.ones(100), torch.ones(8)], ValueError, "tensor 1 has 8 elements where the layout holds 7"),
    ([torch.ones(100), torch.ones(7).half()], TypeError, "tensor 1 has dtype torch.float16"),
    ([torch.ones(100).double(), torch.ones(7).double()], TypeError, "float64"),
    ([torch.ones(100), torch.ones(14)[::2]], ValueError, "not contiguous"),
    ([torch.ones(100, device="meta"), torch.ones(7, device="meta")], ValueError, "built for cpu"),
])  # fmt: skip
def test_wrong_tensors_leave_everything_as_it_was(tensors, error, needle):
    all_reduce = CompressedAllReduce([100, 7], chunks=1)
    before = steps.state_of(all_reduce)
    with pytest.raises(error, match=needle):
        all_reduce(tensors)
    assert same(before, steps.state_of(all_reduce))
    assert all(t.device.type == "meta" or bool((t == 1).all()) for t in tensors)


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Mock(side_effect=LookupError("no GPU is needed for this"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr("onebit.collectives.all_reduce.kernels.backend", backend)
    with pytest.raises(LookupError):
        CompressedAllReduce(100, device="cuda")
    backend.assert_called_once_with(torch.device("cuda", 3))


@pytest.mark.parametrize("norm", ["l1", "l2", "unbiased"])
def test_chunks_change_no_bit_with_block_scales(norm):
    cases = [Case((1000, 63, 129), chunks=chunks, norm=norm) for chunks in (1, 2, 3, 5)]
    runs = run_ranks(3, work.recorded_many, cases)
    ends = set()
    for case, recorded in zip(cases, zip(*runs, strict=True), strict=True):
        used, states = case.plan(3).valid, [r.states[-1] for r in recorded]
        kept = [steps.worker_residual(case, 3, s) for s in states] + [steps.server_residual(case, 3, states)]
        ends.add((recorded[0].result_bytes, b"".join(e[used].tobytes() for e in kept)))
    assert len(ends) == 1
