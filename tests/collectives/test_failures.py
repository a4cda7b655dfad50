"""Ranks that never come or mean something else: an error on every other rank, never a hang."""

import re
import socket
import time
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from onebit.collectives import agreement
from onebit.collectives.agreement import agree, all_gather_json, gathered, listed
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.grid import Grid
from onebit.collectives.transport.protocol import Done, LocalTransport
from onebit.kernels.data.wire import MessageError
from tests.collectives import steps
from tests.collectives.steps import Case
from tests.collectives.work import error_of, ranks_of
from tests.onebit.checkpoint.test_sharded import made
from tests.onebit.parallel.test_fsdp import mesh_of
from tests.onebit.runs import on_ranks
from tests.ranks import group, run_ranks_once


def never_comes(rank, size):
    if rank == 1:
        time.sleep(3600)
    errors, case = [], Case((300,))
    with error_of(errors):
        case.all_reduce(group())(case.inputs(rank, 0))
    return errors


def test_a_rank_that_never_comes_is_missed_where_the_others_compare():
    answers = run_ranks_once(3, never_comes, group_timeout=4.0, expect_dead=[1])
    for (error,) in (answers[0], answers[2]):
        assert error.startswith("CollectiveError: comparing the ranks' layouts (all-gather of facts)")
        assert "a rank died, did not come within the group's timeout" in error


USUAL = Case((300, 63), 64, chunks=2, steps=2)
AUTO = Case((8_000,), 32, chunks="auto", steps=2)  # the ranks talk before the layout is known
OTHERS = [
    (USUAL, replace(USUAL, numels=(300, 64)), "elements", 364, 363),
    (USUAL, replace(USUAL, numels=(63, 300)), "checksum of sizes", None, None),
    (USUAL, replace(USUAL, numels=(363,)), "parameters", 1, 2),
    (USUAL, replace(USUAL, block_size=32), "block_size", 32, 64),
    (USUAL, replace(USUAL, scale="tensor"), "scale", "tensor", "block"),
    (USUAL, replace(USUAL, norm="l2"), "norm", "l2", "l1"),
    (USUAL, replace(USUAL, bits=4), "bits", 4, 1),
    (replace(USUAL, bits=4), replace(USUAL, bits=8), "bits", 8, 4),
    (USUAL, replace(USUAL, chunks=1), "chunks", 1, 2),
    (USUAL, replace(USUAL, reply="direct"), "reply", "direct", "1"),
    (USUAL, replace(USUAL, dtype="bfloat16"), "dtype", "torch.bfloat16", "torch.float32"),
    (AUTO, replace(AUTO, numels=(20_000,)), "elements", 20_000, 8_000),
    (AUTO, replace(AUTO, scale="tensor"), "scale", "tensor", "block"),
    (AUTO, replace(AUTO, numels=(500,)), "elements", 500, 8_000),
    (AUTO, replace(AUTO, block_size=2048), "block_size", 2048, 32),
    (AUTO, replace(AUTO, chunks=2), "chunks", 2, "auto"),
]
FACTS = {fact for *_, fact, _, _ in OTHERS}


def refused(rank, size, case, usual):
    """What a rank is told that wants `case` where most want `usual`. Tensors are left alone, and the ranks go on."""
    ranks, tensors = ranks_of(usual, size), case.inputs(rank, 0)
    with pytest.raises(ValueError, match="the ranks do not agree: ") as caught:
        case.all_reduce(ranks)(tensors)
    assert all(map(torch.equal, tensors, case.inputs(rank, 0)))
    steps.record(replace(usual, chunks=2), rank, ranks)
    return str(caught.value)


@pytest.mark.parametrize("size, who, nodes", [(3, 0, 0), (3, 2, 0), (4, 0, 2)])
@on_ranks()
def test_a_rank_that_means_something_else_is_named_on_every_rank(rank, size, who, nodes):
    others = sorted({*range(size)} - {who})
    for usual, other, fact, its, theirs in OTHERS:
        error = refused(rank, size, other if rank == who else usual, replace(usual, nodes=nodes))
        pattern = rf"rank {who} has {fact} {its!r} where rank {others[0]} has {theirs!r}[;.]"
        assert re.search(pattern.replace("None", r"\d+"), error), error
        assert not any(f"rank {each} has {fact}" in error for each in others for fact in FACTS), error


@on_ranks(4)
def test_two_ranks_that_differ_are_both_named(rank):
    error = refused(rank, 4, {1: replace(USUAL, scale="tensor"), 3: replace(USUAL, norm="l2")}.get(rank, USUAL), USUAL)
    assert "rank 1 has scale 'tensor' where rank 0 has 'block'" in error
    assert "rank 3 has norm 'l2' where rank 0 has 'l1'" in error


@on_ranks(4, once=True)
def test_errors_name_a_rank_by_its_number_among_all_processes_and_the_host_of_one_that_runs_elsewhere(rank):
    """Two hosts of two ranks: HSDP's error where the options of rank 3 are others, and names in groups."""
    with patch.object(socket, "gethostname", lambda: f"node-{rank // 2}"):
        mesh = mesh_of(2, 2)
        net, optimizer = made(mesh, freeze_step=7 if rank == 3 else 8)
        with pytest.raises(ValueError) as caught:
            net(torch.ones(2, 16)).sum().backward()
            optimizer.step()
        replicas, shard = transport_for(mesh.get_group("replicate")), transport_for(mesh.get_group("shard"))
        of_grid, of_replicas = [listed([i], Grid(replicas, shard)) for i in range(4)], listed([0, 1], replicas)
    text = str(caught.value).replace(" (on node-1)", "")
    assert "rank 3 has freeze_step 7 where rank" in text or rank in (0, 2)
    other = 2 * (1 - rank // 2) + rank % 2  # the same place on the other host
    elsewhere = f"{other} (on node-{other // 2})"
    assert f"rank {elsewhere}" in of_grid and elsewhere in of_replicas
    assert [text.split(" (")[0] for text in of_grid] == [f"rank {i}" for i in range(4)]


CPU = torch.device("cpu")
VALUES = [None, "", "é\n ", 0, [1, 2.5, {"a": None}], {"text": 5000 * "x"}, 100_000 * "\u2603", True]


@on_ranks(3)
def test_json_of_every_rank(rank):
    """Each rank gives another one of the values, every one in turn."""
    transport, count = transport_for(group()), len(VALUES)
    for turn in range(count):
        found = all_gather_json(transport, CPU, VALUES[(rank + turn) % count], "a phase")
        assert found == [VALUES[(each + turn) % count] for each in range(3)]


@on_ranks(3)
def test_facts_of_any_length(rank):
    """A run of many parameters has more of them than 2,048 bytes. Their order means nothing."""
    transport, facts = transport_for(group()), {f"option {i}": i / 7 for i in range(500)}
    agree(transport, CPU, dict(reversed(facts.items())) if rank == 1 else facts)
    with pytest.raises(ValueError) as caught:
        agree(transport, CPU, {**facts, "option 77": "eleven", "only here": 1} if rank == 1 else facts)
    start = "the ranks do not agree: rank 1 has only here 1 where rank 0 has None; rank 1 has option"
    assert str(caught.value).startswith(start)
    assert "rank 1 has option 77 'eleven' where rank 0 has 11.0" in str(caught.value)


@pytest.mark.parametrize("count, last", [(5, "rank 4: error 4"), (6, "and 1 more errors"), (7, "and 2 more errors")])
def test_of_errors_that_differ_from_rank_to_rank_five_are_told(count, last):
    ranks, rows = LocalTransport(), [[None, ["OSError", f"error {rank}"]] for rank in range(count)]
    ranks.size = count
    with patch.object(agreement, "all_gather_json", lambda *_: rows), pytest.raises(OSError) as caught:
        gathered(ranks, CPU, lambda: None, "a phase")
    told = str(caught.value).split("; ")
    assert told[:5] == [f"rank {rank}: error {rank}" for rank in range(5)] and told[-1] == last


class Damaging(LocalTransport):
    """Two ranks, whose all-gather of lengths, which comes first, or of texts is damaged."""

    size = 2

    def __init__(self, number, damage):
        self.left, self.damage = number, damage

    def all_gather(self, out, sent, phase):
        out.copy_(sent.expand_as(out))
        self.left -= 1
        if self.left == 0:
            self.damage(out)
        return Done()


def announcing(nbytes):
    return lambda lengths: lengths[1].view(torch.int64).fill_(nbytes)


def flipping(bit):
    return lambda out: out[0, bit // 8].bitwise_xor_(1 << bit % 8)


@pytest.mark.parametrize("number, damage, says", [
    *((1, flipping(bit), "rank 0 announces") for bit in (*range(0, 64, 7), 63)),
    *((1, announcing(nbytes), f"rank 1 announces {nbytes} bytes") for nbytes in (0, -1, 2**24 + 1)),
    *((2, flipping(bit), "what came from rank 0 is no JSON") for bit in (0, 3, 7)),
])  # fmt: skip
def test_damage_or_a_length_that_no_rank_sends_is_an_error_and_takes_no_memory(number, damage, says):
    with pytest.raises(MessageError, match=f"a phase: {says}"):
        all_gather_json(Damaging(number, damage), CPU, {"a": 1}, "a phase")
