"""The steps measured by 1-bit Adam (Tang et al. 2021) and 1-bit LAMB (Li et al. 2021), and what the model predicts.

Clusters are the presets of `onebit plan`: of their constants `network` of Ethernet is the papers', latencies and the
memory are assumed, and `intra` of both and `network` of InfiniBand are fitted to three rows of 1-bit Adam's Table 1.
The other rows of Table 1 and all of 1-bit LAMB's are predictions. In the speed-ups the optimizer's own work in stage 2
is assumed to be what the tables give for stage 1 ("Step"), as the papers do not say; nothing is hidden or pipelined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from onebit.cli.plan.cluster import Cluster
from onebit.cli.plan.model import Model, stage_2, uncompressed
from onebit.cli.plan.options import CLUSTERS

ELEMENTS = 340_000_000  # BERT-Large: "340M params" in both papers
ITEMSIZE = 2  # 1-bit Adam, section 7.1: "for FP16 training"
ADAM_TABLE, LAMB_TABLE = "1-bit Adam, Table 1", "1-bit LAMB, Table 5"
ADAM_REDUCES, LAMB_REDUCES = f"{ADAM_TABLE}: all-reduces", f"{LAMB_TABLE}: all-reduces"
STAGE, RUN = "The papers: speed-ups of stage 2", "The papers: speed-ups of a run"
SOURCES = {"adam": ADAM_REDUCES, "lamb": LAMB_REDUCES, "stage": STAGE, "run": RUN}

# network, nodes, GPUs, batch a GPU, batch, accumulation, then ms: forward, backward all-reduce, backward everything
# else, step; and the all-reduce's percentage of all
TABLE_1 = """
Ethernet    16  64  1    64 1  36.65 2205.86  33.63 74.96 94
Ethernet    16  64 16  1024 1  35.71 2275.43  60.81 75.59 93
Ethernet    16  64 16  4096 4 137.80 2259.36 243.72 74.92 83
Ethernet     8  32 16   512 1  37.91 2173.35  60.71 75.63 93
Ethernet     4  16 16   256 1  36.94 2133.24  62.82 76.85 92
Ethernet     2   8 16   128 1  34.95 1897.21  61.23 75.26 92
Ethernet     1   4 16    64 1  35.99  239.76  59.95 74.21 58
InfiniBand   8  64  1    64 1  25.36  316.18  23.25 58.49 75
InfiniBand   8  64 16  1024 1  32.81  336.40  59.99 57.79 69
InfiniBand   8  64 16  4096 4 131.04  339.52 237.92 56.91 44
InfiniBand   4  32 16   512 1  33.45  297.28  56.81 57.98 67
InfiniBand   2  16 16   256 1  32.86  183.74  56.49 58.60 55
InfiniBand   1   8 16   128 1  32.74   28.18  59.73 57.29 16
"""
TABLE_5 = """
Ethernet    64 256 16  8K   2   55 3579  117 191 91
Ethernet    64 256 16 16K   4  111 3533  227 195 87
Ethernet    64 256 16 32K   8  224 3599  462 233 80
Ethernet    64 256 16 64K  16  445 3674  919 215 70
Ethernet    32 128 16  8K   4  112 3759  233 121 89
Ethernet    16  64 16  8K   8  223 3433  464 109 81
Ethernet     8  32 16  8K  16  445 3528  923  38 72
Ethernet     4  16 16  8K  32  881 3436 1827  33 56
Ethernet     2   8 16  8K  64 1773 2087 3696  31 28
Ethernet     1   4 16  8K 128 3532  234 7329  30  2
InfiniBand  16 128 64  8K   1   96  335  179  36 52
InfiniBand  16 128 64 16K   2  192  346  356  37 37
InfiniBand  16 128 64 32K   4  381  377  714  37 25
InfiniBand  16 128 64 64K   8  770  422 1422  32 16
InfiniBand   8  64 64  8K   2  192  332  352  34 36
InfiniBand   4  32 64  8K   4  384  339  711  31 23
InfiniBand   2  16 64  8K   8  768  270 1436  31 11
InfiniBand   1   8 64  8K  16 1534  167 2869  31  4
"""
FITTED = {("Ethernet", 4, 64), ("InfiniBand", 8, 128), ("InfiniBand", 64, 1024)}  # of Table 1: network, GPUs, batch
HIDDEN, SHORT, LONG = 1024, 128, 512
# Operations a token of a layer are 24 h^2 + 4 s h: hidden size h, sequence s.
LONGER = LONG / SHORT * (24 * HIDDEN + 4 * LONG) / (24 * HIDDEN + 4 * SHORT)
WARMUP, WARMUP_512 = 1000 / 5993, 107 / 555  # 1-bit LAMB, section 6


@dataclass(frozen=True)
class Profile:
    """A row of a table: milliseconds of the parts of a step."""

    source: str
    network: str
    nodes: int
    gpus: int
    batch: int
    accumulation: int
    forward: float
    all_reduce: float
    backward: float
    step: float
    percent: int

    @property
    def fitted(self) -> bool:
        return self.source == ADAM_TABLE and (self.network, self.gpus, self.batch) in FITTED


@dataclass(frozen=True)
class Compared:
    """A prediction beside what was measured."""

    source: str
    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def median_error(rows: Sequence[Compared]) -> float:
    """Of the errors' sizes."""
    return median(abs(row.error) for row in rows)


def rows_of(source: str, table: str) -> list[Profile]:
    found = []
    for line in table.strip().splitlines():
        network, nodes, gpus, _, batch, accumulation, *ms, percent = line.split()
        size = int(batch.removesuffix("K")) * (1024 if batch.endswith("K") else 1)
        numbers = (int(nodes), int(gpus), size, int(accumulation))
        forward, all_reduce, backward, step = map(float, ms)
        found.append(Profile(source, network, *numbers, forward, all_reduce, backward, step, int(percent)))
    return found


PROFILES = [*rows_of(ADAM_TABLE, TABLE_1), *rows_of(LAMB_TABLE, TABLE_5)]


def cluster_of(network: str, gpus: int) -> Cluster:
    return Cluster(gpus=gpus, **CLUSTERS[f"{network.lower()}-v100"])


def all_reduces(fitted: bool = False) -> list[Compared]:
    """Milliseconds of the rows that nothing was fitted to, or of the others."""
    return [
        Compared(
            ADAM_REDUCES if row.source == ADAM_TABLE else LAMB_REDUCES,
            f"{row.network}, {row.nodes} x {row.gpus // row.nodes} GPUs, batch {row.batch:,}",
            1e3 * cluster_of(row.network, row.gpus).all_reduce(ELEMENTS * ITEMSIZE),
            row.all_reduce,
        )
        for row in PROFILES
        if row.fitted is fitted
    ]


def _profile(source: str, gpus: int, batch: int) -> Profile:
    return next(
        row for row in PROFILES if (row.source, row.network, row.gpus, row.batch) == (source, "Ethernet", gpus, batch)
    )


def speed_up(forward: float, backward: float, step: float, gpus: int) -> float:
    """Of stage 2 on Ethernet; milliseconds a step."""
    model = Model(ELEMENTS, ITEMSIZE, forward / 1e3, backward / 1e3, overlap="none", levels=1)
    cluster = cluster_of("Ethernet", gpus)
    slow, fast = uncompressed(model, cluster), stage_2(model, cluster, chunks=1)
    return replace(slow, local=step / 1e3).total / replace(fast, local=step / 1e3).total


def end_to_end(stage_2_speed_up: float, warmup: float) -> float:
    """1-bit LAMB, section 6."""
    return 1 / (warmup + (1 - warmup) / stage_2_speed_up)


def speed_ups() -> list[Compared]:
    """Of stage 2 and of whole runs on Ethernet: Figure 5 of 1-bit Adam, Figure 3 of 1-bit LAMB and their text, which
    name no number of GPUs: the tables' largest. Without a profile of SQuAD it is 3 x 384 tokens by Table 1 on 32 GPUs,
    and of longer sequences LONGER times Table 5's."""
    one, sixteen = _profile(ADAM_TABLE, 64, 64), _profile(ADAM_TABLE, 64, 1024)
    small, large = _profile(LAMB_TABLE, 256, 8192), _profile(LAMB_TABLE, 256, 65536)
    tokens = (3 * 384 / SHORT - 1) / 15  # from batch 1 to batch 16 of sequences of 128
    squad = [a + tokens * (b - a) for a, b in ((one.forward, sixteen.forward), (one.backward, sixteen.backward))]
    bert = speed_up(sixteen.forward, sixteen.backward, sixteen.step, 64)
    tuned = speed_up(squad[0], squad[1], sixteen.step, 32)
    lamb = speed_up(small.forward, small.backward, small.step, 256)
    lamb_long = speed_up(LONGER * small.forward, LONGER * small.backward, small.step, 256)
    lamb_64k = end_to_end(speed_up(large.forward, large.backward, large.step, 256), WARMUP)
    lamb_32k = speed_up(LONGER * large.forward / 2, LONGER * large.backward / 2, large.step, 256)
    return [
        Compared(STAGE, "1-bit Adam, BERT-Large", bert, 5.48),
        Compared(STAGE, "1-bit Adam, SQuAD", tuned, 6.17),
        Compared(STAGE, "1-bit LAMB, sequence 128", lamb, 4.5),
        Compared(STAGE, "1-bit LAMB, sequence 512", lamb_long, 3.0),
        Compared(RUN, "1-bit Adam, BERT-Large", end_to_end(bert, 23 / 152), 3.3),
        Compared(RUN, "1-bit Adam, SQuAD", end_to_end(tuned, 400 / 1848), 2.9),
        Compared(RUN, "1-bit LAMB, sequence 128", end_to_end(lamb, WARMUP), 2.8),
        Compared(RUN, "1-bit LAMB, batch 64K, by throughput", lamb_64k, 2.0),
        Compared(RUN, "1-bit LAMB, batch 64K, by the clock", lamb_64k, 2.2),
        Compared(RUN, "1-bit LAMB, sequence 512, batch 32K", end_to_end(lamb_32k, WARMUP_512), 1.5),
    ]
