"""What ranks send each other to compare: JSON of any length, and errors that name the ranks that differ."""

import pytest
import torch

from onebit.collectives.agreement import agree, all_gather_json
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import Done, LocalTransport
from onebit.kernels.data.wire import MessageError
from tests.collectives.work import error_of
from tests.ranks import group, run_ranks

CPU = torch.device("cpu")
VALUES = [None, "", "é\n ", 0, [1, 2.5, {"a": None}], {"text": 5000 * "x"}, 100_000 * "\u2603", True]


def gathered(rank, size):
    """Each rank gives another one of the values, every one in turn."""
    transport = transport_for(group())
    turns = range(len(VALUES))
    return [all_gather_json(transport, CPU, VALUES[(rank + turn) % len(VALUES)], "a phase") for turn in turns]


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
    assert run_ranks(3, agreed, [facts] * 3) == ["", "", ""]
    other = {**facts, "option 77": "eleven", "only here": 1}
    for error in run_ranks(3, agreed, [facts, other, facts]):
        start = "ValueError: the ranks do not agree: rank 1 has only here 1 where rank 0 has None; rank 1 has option"
        assert error.startswith(start)
        assert "rank 1 has option 77 'eleven' where rank 0 has 11.0" in error
    assert run_ranks(2, agreed, [{"a": 1, "b": 2}, {"b": 2, "a": 1}]) == ["", ""]


class Damaging(LocalTransport):
    """Flips a bit of what arrives by one of the all-gathers: the first carries lengths, the second texts."""

    def __init__(self, number, bit):
        self.left, self.bit = number, bit

    def all_gather(self, out, sent, phase):
        work = super().all_gather(out, sent, phase)
        self.left -= 1
        if self.left == 0:
            out[0, self.bit // 8] ^= 1 << self.bit % 8
        return work


def test_damage_is_an_error_and_takes_no_memory():
    """Of a length, which comes first, and of a text."""
    length = 1, (*range(0, 64, 7), 63), "rank 0 announces"
    text = 2, (0, 3, 7), "what came from rank 0 is no JSON"
    for number, bits, says in (length, text):
        for bit in bits:
            with pytest.raises(MessageError, match=f"a phase: {says}"):
                all_gather_json(Damaging(number, bit), CPU, {"a": 1}, "a phase")


class Announcing(LocalTransport):
    """Two ranks, of which the other one announces a text of so many bytes."""

    size = 2

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def all_gather(self, out, sent, phase):
        out.copy_(sent.expand_as(out))
        if sent.shape[1] == 8:
            out[1].view(torch.int64)[0] = self.nbytes
        return Done()


@pytest.mark.parametrize("nbytes", [0, -1, 2**24 + 1])
def test_no_other_rank_can_announce_what_no_rank_sends(nbytes):
    with pytest.raises(MessageError, match=f"a phase: rank 1 announces {nbytes} bytes"):
        all_gather_json(Announcing(nbytes), CPU, {"a": 1}, "a phase")
