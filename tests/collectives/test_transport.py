"""The transports: which one a group gets, what its collectives do, and errors that name the phase."""

from unittest.mock import Mock

import pytest
import torch

from onebit.collectives import CollectiveError
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import LocalTransport, collective_errors
from onebit.collectives.transport.torch import SMALL, TorchWork
from tests.collectives import work
from tests.limits import HUNG
from tests.ranks import run_ranks, run_ranks_once


def test_a_group_counts_its_own_ranks_and_a_rank_outside_is_told_so():
    members = [2, 3, 7]
    for rank, (default, texts, half) in enumerate(run_ranks(8, work.transports, members)):
        assert (default, half, len(texts)) == (f"TorchTransport {rank} of 8 gloo", [rank // 2, 4], 2)
        inside = f"TorchTransport {members.index(rank)} of 3 gloo" if rank in members else ""
        for text in texts:
            assert text == inside or not inside
            assert inside or "ValueError: this rank is not in the process group" in text, text
            assert inside or "only the group's members" in text, text


@pytest.mark.parametrize("backend", [None, "cpu:gloo,cuda:gloo"])
def test_groups_are_made_of_a_group_without_one_backend_of_its_own(backend, tmp_path):
    arguments = (backend, str(tmp_path / "store"))
    answers = run_ranks_once(2, work.over_a_default_group_made_with, arguments, timeout=HUNG)
    assert [name for name, _ in answers] == ["gloo", "gloo"] or torch.cuda.is_available()
    assert [carried[:4] for _, carried in answers] == [[1, 1, 1, 0], [1, 1, 1, 0]]
    assert answers[0][1][4] == answers[1][1][4] != [1.0] * 70


def test_a_tensor_that_no_backend_sends_and_what_is_no_group_are_refused():
    with pytest.raises(ValueError, match=r"sends cuda tensors, by nccl, and this one is on cpu: call init_process"):
        work.bare_transport({"cuda": "nccl"}).all_max(torch.zeros(1), PHASE)
    for foreign in (3, "gloo", [0, 1]):
        says = rf"over a {type(foreign).__name__}: pass a torch.distributed process group"
        with pytest.raises(TypeError, match=says):
            transport_for(foreign)


def check_collectives(rank, size, answer):
    """Byte b of message k of rank i is i * 50 + k * 10 + b."""
    to_all, to_all_again, gathered, greatest, floats, sums = answer
    at = torch.arange(3)
    expected = torch.stack([i * 50 + rank * 10 + at for i in range(size)])
    assert to_all == expected.tolist()
    assert to_all_again == (expected + 1).tolist()
    assert gathered == torch.stack([i * 50 + at for i in range(size)]).tolist()
    assert greatest == [size - 1, 0, 7]
    assert floats == [0.25 * (size - 1)]
    total = size * (size - 1) / 2
    assert sums == [*[[total, 2.0 * size, -total, 0.5 * size]] * 4, [size * (1 + 2.0**-40)]]


def test_collectives_of_one_process():
    check_collectives(0, 1, work.collectives_over(LocalTransport()))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_of_gloo(size):
    """Waited for in another order; small messages go to all at once, large ones in a ring or pairs; two expected."""
    sizes = [SMALL, SMALL + 1]
    ends = [[[(7 * rank + 250) % 256, n * rank % 256] for rank in range(size)] for n in sizes]
    for rank, (answer, gathered, expected) in enumerate(run_ranks(size, work.collectives, sizes)):
        check_collectives(rank, size, answer)
        assert gathered == 2 * ends
        assert expected == [[[10 * k + rank] * 5 for rank in range(size)] for k in range(4)]


PHASE = "the gather phase (all-to-all of chunk 3)"


def test_an_error_of_the_backend_names_the_phase():
    x = torch.zeros(1, dtype=torch.uint8)
    error = RuntimeError("[gloo/pair.cc:534] Connection closed by peer\nmore of it")
    with pytest.raises(CollectiveError) as caught:
        TorchWork(Mock(wait=Mock(side_effect=error)), PHASE, "gloo", source=x, landing=x, out=x).wait()
    text = str(caught.value)
    with pytest.raises(CollectiveError, match="the gather phase"), collective_errors(PHASE, "gloo"):
        raise RuntimeError("")
    assert text.startswith(PHASE) and "(gloo: [gloo/pair.cc:534] Connection closed by peer)" in text
    assert "\n" not in text and "checkpoint" in text
    assert caught.value.__cause__ is error


def test_what_names_its_phase_or_is_not_of_the_backend_is_left_alone():
    for error in (CollectiveError("the scatter phase"), ValueError("wrong"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, collective_errors(PHASE, "gloo"):
            raise error
        assert caught.value is error


@pytest.mark.parametrize("what, tensors", [("all_to_all", 2), ("all_gather", 2), ("expect", 1), ("all_max", 1)])
def test_an_error_at_the_start_names_the_phase(monkeypatch, what, tensors):
    def fail(*_, **__):
        raise RuntimeError("no more sockets")

    collectives = ("all_to_all_single", "all_gather_single", "all_gather_into_tensor", "all_reduce")
    for name in (*collectives, "isend", "irecv"):
        monkeypatch.setattr(torch.distributed, name, fail, raising=False)
    transport = work.bare_transport({"cpu": "gloo"})
    x = torch.zeros((2, 4), dtype=torch.uint8)
    with pytest.raises(CollectiveError, match=r"the gather phase.*no more sockets"):
        getattr(transport, what)(*[x] * tensors, PHASE)
