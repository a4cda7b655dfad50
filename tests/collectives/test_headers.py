"""What arrives and is no message of the exchange is an error at the rank that reads it."""

import pytest
import torch

from onebit import CompressedAllReduce
from onebit.collectives.transport.protocol import Done, LocalTransport
from onebit.kernels.data.wire import MessageError


class Flipping(LocalTransport):
    """Flips a bit of the header of the messages it carries."""

    def __init__(self, collective: str, bit: int) -> None:
        self.collective, self.bit = collective, bit

    def all_to_all(self, out, sent, phase, name="all_to_all"):
        out.copy_(sent)
        if name == self.collective and "comparing" not in phase:
            out[0, self.bit // 8] ^= 1 << self.bit % 8
        return Done()

    def all_gather(self, out, sent, phase):
        return self.all_to_all(out, sent, phase, "all_gather")


@pytest.mark.parametrize("bit", [0, 31, 33, 64, 100])
def test_a_bit_flipped_in_a_header_on_the_way_is_found_by_the_rank_that_reads_it(bit):
    for collective, phase in (("all_to_all", "gather"), ("all_gather", "scatter")):
        average = CompressedAllReduce(100, block_size=32, chunks=2, process_group=Flipping(collective, bit))
        with pytest.raises(MessageError, match=f"the {phase} phase: what came from rank 0"):
            average(torch.randn(100))
