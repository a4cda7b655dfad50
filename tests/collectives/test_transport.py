"""The transports: which one a group gets, what its collectives do, and errors that name the phase."""

import gc
import os
import weakref
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from onebit.collectives import CollectiveError
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import LocalTransport, collective_errors
from onebit.collectives.transport.torch import SMALL, TorchTransport, TorchWork
from tests.collectives import work
from tests.onebit.runs import on_ranks
from tests.ranks import group

MEMBERS = [2, 3, 7]


@on_ranks(8)
def test_a_group_counts_its_own_ranks_and_a_rank_outside_is_told_so(rank):
    """Some have made more groups than others before all of them part in two halves."""

    def about(transport):
        return f"{type(transport).__name__} {transport.rank} of {transport.size} {transport.name}"

    made, default = dist.new_group(MEMBERS), transport_for()
    assert about(default) == f"TorchTransport {rank} of 8 gloo"
    for maker in (transport_for, TorchTransport):
        if rank in MEMBERS:
            assert about(maker(made)) == f"TorchTransport {MEMBERS.index(rank)} of 3 gloo"
        else:
            with pytest.raises(ValueError, match=r"this rank is not in the process group.*only the group's members"):
                maker(made)
    half = default.split(rank % 2)
    assert (half.rank, half.size) == (rank // 2, 4)


@pytest.mark.parametrize("backend", [None, "cpu:gloo,cuda:gloo"])
@on_ranks(2, once=True)
def test_groups_are_made_of_a_group_without_one_backend_of_its_own(rank, backend, tmp_path):
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
    transport = transport_for()
    assert transport.name == "gloo" or torch.cuda.is_available()
    for each, most in ((transport, 1), (transport.duplicate(), 1), (transport.split(0), 1), (transport.split(rank), 0)):
        values = torch.tensor([each.rank], dtype=torch.int64)
        each.all_max(values, "comparing")
        assert int(values) == most


@on_ranks(1, once=True)
def test_groups_that_nobody_uses_end_with_their_world(rank, tmp_path):
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    transport = TorchTransport().duplicate()
    group = weakref.ref(transport.group)
    transport.close()
    del transport
    dist.destroy_process_group()
    gc.collect()
    assert group() is None


@on_ranks(3, once=True)
def test_no_group_of_ours_splits_the_communicator_of_a_world_with_a_device_of_its_own(rank):
    """init_process_group(device_id=...) makes such a world. Ranks 0 and 1 alone make groups."""
    world, bound = dist.group.WORLD, torch.device("cuda", 0)
    some, seen, new_group = dist.new_group([0, 1]), [], dist.new_group

    def recording(*args, **kwargs):
        seen.append(world.bound_device_id)
        world.bound_device_id = None  # without a GPU nothing can be split
        return new_group(*args, **kwargs)

    world.bound_device_id = bound
    with patch.object(dist, "new_group", recording):
        if rank < 2:
            transport = transport_for(some)
            transport.duplicate()
            transport.split(rank)
    assert world.bound_device_id == bound and seen == [None] * len(seen)
    assert len(seen) >= 2 or rank == 2
    world.bound_device_id = None


def test_a_tensor_that_no_backend_sends_and_what_is_no_group_are_refused():
    with pytest.raises(ValueError, match=r"sends cuda tensors, by nccl, and this one is on cpu: call init_process"):
        work.bare_transport({"cuda": "nccl"}).all_max(torch.zeros(1), PHASE)
    for foreign in (3, "gloo", [0, 1]):
        says = rf"over a {type(foreign).__name__}: pass a torch.distributed process group"
        with pytest.raises(TypeError, match=says):
            transport_for(foreign)


def test_collectives_of_one_process():
    work.check_collectives(LocalTransport())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@on_ranks()
def test_collectives_of_gloo(rank, size):
    """Two all-gathers are announced, one of them twice, and one is not."""
    transport = transport_for(group())
    work.check_collectives(transport)
    outs = [torch.full((size, 5), 255, dtype=torch.uint8) for _ in range(4)]
    sent = [torch.full((1, 5), 10 * k + rank, dtype=torch.uint8) for k in range(4)]
    for out in (outs[0], outs[1], outs[1]) if size > 1 else ():
        transport.expect(out, "test")
    works = [transport.all_to_all(outs[3], sent[3].expand(size, 5).contiguous(), "test")]
    works += [transport.all_gather(out, own, "test") for out, own in zip(outs[:3], sent[:3], strict=True)]
    for one in works:
        one.wait()
    assert [out.tolist() for out in outs] == [[[10 * k + i] * 5 for i in range(size)] for k in range(4)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@on_ranks()
def test_small_messages_go_to_all_at_once_and_large_ones_in_a_ring_or_in_pairs(rank, size):
    """They go in pairs if torchrun says that each rank is on a host of its own."""
    for variables in ({}, dict.fromkeys(("WORLD_SIZE", "GROUP_WORLD_SIZE"), str(size))):
        for n in (SMALL, SMALL + 1):
            own = torch.zeros((1, n), dtype=torch.uint8)
            own[0, 0], own[0, -1] = (7 * rank + 250) % 256, n * rank % 256
            everyone = torch.full((size, n), 255, dtype=torch.uint8)
            with patch.dict(os.environ, variables), patch.object(dist, "isend", wraps=dist.isend) as in_pairs:
                transport_for(group()).all_gather(everyone, own, "gathering").wait()
            found = any(call.args[0].nbytes == n for call in in_pairs.call_args_list)
            assert found == (size > 1 and (size == 2 or n == SMALL or bool(variables)))
            assert everyone[:, [0, -1]].tolist() == [[(7 * i + 250) % 256, n * i % 256] for i in range(size)]


PHASE = "the gather phase (all-to-all of chunk 3)"


def test_an_error_of_the_backend_names_the_phase():
    x = torch.zeros(1, dtype=torch.uint8)
    guesses = ". This is typically caused by a remote worker crashing. GLHF!"
    error = RuntimeError(f"[gloo/pair.cc:534] Connection closed by peer{guesses}\nmore of it")
    with pytest.raises(CollectiveError) as caught:
        TorchWork([Mock(wait=Mock(side_effect=error))], PHASE, "gloo", x, x, x).wait()
    text = str(caught.value)
    with pytest.raises(CollectiveError, match="the gather phase"), collective_errors(PHASE, "gloo"):
        raise RuntimeError("")
    assert text.startswith(PHASE) and "(gloo: [gloo/pair.cc:534] Connection closed by peer)" in text
    assert "\n" not in text and "checkpoint" in text
    assert caught.value.__cause__ is error


@on_ranks(2)
def test_a_dtype_that_gloo_does_not_send_is_no_dead_rank(rank):
    with pytest.raises(ValueError, match=r"sends no tensors of this dtype \(Invalid scalar type"):
        transport_for(group()).all_sum(torch.zeros(2, dtype=torch.int16), PHASE).wait()


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
