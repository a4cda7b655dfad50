"""Ranks that die, never come, or mean something else: an error that names them on every other rank, never a hang."""

import os
import re
import signal
import time
from dataclasses import replace

import pytest
import torch

from onebit.collectives import CollectiveError
from onebit.collectives.agreement import agree, all_gather_json
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import Done, LocalTransport
from onebit.kernels.data.wire import MessageError
from tests.collectives import steps
from tests.collectives.steps import Case
from tests.collectives.work import Watched, error_of, ranks_of
from tests.ranks import group, run_ranks, run_ranks_once

TIMEOUT = {"dies": 60.0, "stays away": 4.0}  # of the group: a death is seen at once, an absence only then
CASE = Case((300,), chunks=2, steps=5)

COMPARING = "comparing the ranks' layouts (all-gather of facts)"
FINITE = "agreeing on finite values"
GATHER = "the gather phase (all-to-all of chunk 1)"
SCATTER = "the scatter phase (all-gather of chunk 0)"


def run_until_error(rank, size, phase, how):
    """The step and the error. Rank 1 dies or stays away at the second start of `phase`, the first of a comparison."""
    met = []

    def hook(name):
        met.append(phase in name)
        if rank == 1 and met[-1] and sum(met) == (1 if phase == COMPARING else 2):
            time.sleep(0.5)  # the others have finished what came before
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)

    all_reduce = CASE.all_reduce(Watched(transport_for(group()), hook=hook))
    for step in range(CASE.steps):
        try:
            all_reduce(CASE.inputs(rank, step))
        except CollectiveError as error:
            return step, str(error)
    return CASE.steps, ""


@pytest.mark.parametrize("phase, how", [
    (COMPARING, "stays away"), (FINITE, "dies"), (GATHER, "dies"), (GATHER, "stays away"), (SCATTER, "dies")
])  # fmt: skip
def test_the_others_name_the_phase_in_which_a_rank_is_missing(phase, how):
    answers = run_ranks_once(3, run_until_error, (phase, how), group_timeout=TIMEOUT[how], expect_dead=[1])
    for step, error in (answers[0], answers[2]):
        assert error.startswith(phase), error
        assert "a rank died, did not come within the group's timeout" in error
        assert step == (0 if phase == COMPARING else 1)


USUAL = Case((300, 63), 64, chunks=2, steps=2)
AUTO = Case((8_000,), 32, chunks="auto", steps=2)  # the ranks talk before the layout is known
OTHERS = [
    (USUAL, replace(USUAL, numels=(300, 64)), "elements", 364, 363),
    (USUAL, replace(USUAL, numels=(63, 300)), "checksum of sizes", None, None),
    (USUAL, replace(USUAL, numels=(363,)), "parameters", 1, 2),
    (USUAL, replace(USUAL, block_size=32), "block_size", 32, 64),
    (USUAL, replace(USUAL, scale="tensor"), "scale", "tensor", "block"),
    (USUAL, replace(USUAL, norm="l2"), "norm", "l2", "l1"),
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


def disagree(rank, size, cases):
    """Ranks in `cases` want something else than the rest (-1). Their errors, and whether tensors were left alone."""
    case, ranks = cases.get(rank, cases[-1]), ranks_of(cases[-1], size)
    tensors, errors = case.inputs(rank, 0), []
    kept = [t.clone() for t in tensors]
    with error_of(errors):
        case.all_reduce(ranks)(tensors)
    if errors:
        steps.record(replace(cases[-1], chunks=2), rank, ranks)
    return "".join(errors), all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


def disagree_in_everything(rank, size, who, nodes):
    return [disagree(rank, size, {-1: replace(usual, nodes=nodes), who: other}) for usual, other, *_ in OTHERS]


@pytest.mark.parametrize("size, who, nodes", [(3, 0, 0), (3, 2, 0), (4, 0, 2)])
def test_a_rank_that_means_something_else_is_named_on_every_rank(size, who, nodes):
    others = sorted({*range(size)} - {who})
    for answers in run_ranks(size, disagree_in_everything, who, nodes):
        for (error, untouched), (*_, fact, theirs, usual) in zip(answers, OTHERS, strict=True):
            assert error.startswith("ValueError: the ranks do not agree: "), error
            pattern = rf"rank {who} has {fact} {theirs!r} where rank {others[0]} has {usual!r}[;.]"
            assert re.search(pattern.replace("None", r"\d+"), error), error
            assert not any(f"rank {rank} has {fact}" in error for rank in others for fact in FACTS), error
            assert untouched


def test_two_ranks_that_differ_are_both_named():
    cases = {-1: USUAL, 1: replace(USUAL, scale="tensor"), 3: replace(USUAL, norm="l2")}
    for error, _ in run_ranks(4, disagree, cases):
        assert "rank 1 has scale 'tensor' where rank 0 has 'block'" in error
        assert "rank 3 has norm 'l2' where rank 0 has 'l1'" in error


CPU = torch.device("cpu")
VALUES = [None, "", "é\n ", 0, [1, 2.5, {"a": None}], {"text": 5000 * "x"}, 100_000 * "\u2603", True]


def gathered(rank, size):
    """Each rank gives another one of the values, every one in turn."""
    turns, transport = [VALUES[(rank + turn) % len(VALUES)] for turn in range(len(VALUES))], transport_for(group())
    return [all_gather_json(transport, CPU, value, "a phase") for value in turns]


def test_json_of_every_rank():
    turns = range(len(VALUES))
    assert run_ranks(3, gathered) == [[[VALUES[(rank + t) % len(VALUES)] for rank in range(3)] for t in turns]] * 3


def agreed(rank, size, everyone):
    errors = []
    with error_of(errors):
        agree(transport_for(group()), CPU, everyone[rank])
    return "".join(errors)


def test_facts_of_any_length():
    """A run of many parameters has more of them than 2,048 bytes. Their order means nothing."""
    facts = {f"option {i}": i / 7 for i in range(500)}
    assert run_ranks(3, agreed, [facts, dict(reversed(facts.items())), facts]) == ["", "", ""]
    other = {**facts, "option 77": "eleven", "only here": 1}
    for error in run_ranks(3, agreed, [facts, other, facts]):
        start = "ValueError: the ranks do not agree: rank 1 has only here 1 where rank 0 has None; rank 1 has option"
        assert error.startswith(start)
        assert "rank 1 has option 77 'eleven' where rank 0 has 11.0" in error


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
