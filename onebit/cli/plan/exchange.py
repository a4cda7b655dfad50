"""How long an exchange of 1-bit messages takes: the schedule of `Exchange.run`, played through.

With one level (see `onebit.cli.plan.cluster` for the letters) every rank sends to every other. With two, where G > 1
and M > 1, a node is one rank to the network: a rank compresses its slice, 1/G of the mean over its node; the G slices
travel side by side and share R. s and r are of all slices, r of direct replies is M s:

    gather        (M-1)/M s/R                           + (M-1) a                all-to-all of slices
    scatter       (M-1)/M r / min(R, G B)               + (M-1) a                all-gather, or the direct exchange
    spread        (G-1)/G r/B                           + (G-1) b                all-gather of slices in the node

A chunk is spread over the node while the replies of the next one arrive. A pass takes elements x bytes an element /
memory: compress is of 1/G of the elements, average of 1/(G M). Models of `MOST_ELEMENTS` or fewer take one chunk and no
agreement: their one message has the flag.
"""

from __future__ import annotations

from collections.abc import Sequence

from onebit.cli.plan.cluster import Cluster, Groups
from onebit.collectives.direct import Direct
from onebit.collectives.exchange import Exchange
from onebit.collectives.flags import may_travel_in_messages
from onebit.kernels.data.layout import BLOCK_SIZE, WORD
from onebit.kernels.data.wire import bytes_of_message
from onebit.kernels.passes import Storage, bytes_per_element


def pass_seconds(
    name: str, elements: float, cluster: Cluster, itemsize: int, exchange_class: type[Exchange] | None = None
) -> float:
    """One pass of one rank on `elements`."""
    senders = 1 if exchange_class is None else cluster.gpus // exchange_class.shards(cluster.gpus)
    of = Storage(itemsize, master=itemsize < 4, packed=True, ranks=cluster.gpus, senders=senders)
    return elements * bytes_per_element(name, of) / cluster.rates.get(name, cluster.memory)


def message_bytes(
    elements: int, ranks: int, chunks: int, exchange_class: type[Exchange], slices: int = 1
) -> tuple[int, int]:
    """Bytes of all chunks and of all slices: what one rank compresses for servers, none where there are none, and what
    every rank then has of all; itself included."""
    parts = slices * exchange_class.shards(ranks) * chunks
    blocks = -(-elements // (BLOCK_SIZE * parts))
    longest = min(blocks * BLOCK_SIZE, -(-elements // WORD) * WORD)  # of one parameter: only its last block is short
    sent = slices * ranks * chunks * bytes_of_message(blocks, longest)
    return (0, sent) if exchange_class is Direct else (sent, sent)


def exchange(
    elements: int,
    groups: Groups,
    itemsize: int,
    chunks: int,
    exchange_class: type[Exchange],
    use: str | None = None,
    mean: float = 0.0,
) -> tuple[float, float]:
    """Seconds of `Exchange.run` with a pass `use` on the replies of each chunk, and those of its passes alone.

    mean: seconds for which the device waits before it compresses a chunk, for the chunk's mean over the node.
    """
    replicas, slices, part, n = groups.replicas, groups.slices, elements / chunks, groups.replicas.gpus
    gathered, replied = (size / chunks for size in message_bytes(elements, n, chunks, exchange_class, slices))
    compress = pass_seconds("compress", part / slices, replicas, itemsize, exchange_class)
    average = (
        pass_seconds("average", part / (slices * n), replicas, itemsize, exchange_class)
        if exchange_class is not Direct
        else 0.0
    )
    used = pass_seconds(use, part, replicas, itemsize, exchange_class) if use else 0.0
    spread = groups.node.all_gather(replied) if slices > 1 else None
    to_all = (
        replicas.all_gather(replied),
        replicas.all_gather_delay(replied / slices / n, expected=exchange_class is not Direct),
    )
    phases = [(mean + compress, *to_all)]
    if exchange_class is not Direct:
        phases = [(mean + compress, replicas.all_to_all(gathered), replicas.message), (average, *to_all)]
    if replicas.transport == "nccl":  # one collective at a time; over Gloo others leave while these are on their way
        phases = [(work, network + delay, 0.0) for work, network, delay in phases]
    return play(chunks, phases, used, spread), chunks * (compress + average + used)


def play(chunks: int, phases: Sequence[tuple[float, float, float]], use: float, spread: float | None = None) -> float:
    """Seconds of passes one after the other on the device, and collectives one after the other on the network.

    phases: of a chunk, the pass before a collective, how long it keeps the network, and until all is there, besides.
    spread: for which a chunk's replies go over the node, on a network of its own; None for one level.
    """
    device = network = node = 0.0
    arrived = [[0.0] * chunks for _ in range(len(phases) + 1)]
    spreading: float | None = None  # when what is spread will be there
    for j in range(chunks + len(phases)):
        for i, (work, on_network, delay) in enumerate(phases):
            if 0 <= j - i < chunks:
                device = max(device, arrived[i][j - i]) + work
                network = max(network, device) + on_network
                arrived[i + 1][j - i] = network + delay
        if j < len(phases):
            continue
        device = max(device, arrived[-1][j - len(phases)])
        if spread is None:
            device += use
            continue
        node = max(node, device) + spread
        if spreading is not None:
            device = max(device, spreading) + use
        spreading = node
    return device if spreading is None else max(device, spreading) + use


def agreement(elements: int, cluster: Cluster, chunks: int) -> float:
    """Seconds of asking all ranks for their flags: none where messages carry them."""
    return 0.0 if may_travel_in_messages(elements, chunks) else cluster.agreement()
