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
Ethernet    64 256 16  8192   2   55 3579  117 191 91
Ethernet    64 256 16 16384   4  111 3533  227 195 87
Ethernet    64 256 16 32768   8  224 3599  462 233 80
Ethernet    64 256 16 65536  16  445 3674  919 215 70
Ethernet    32 128 16  8192   4  112 3759  233 121 89
Ethernet    16  64 16  8192   8  223 3433  464 109 81
Ethernet     8  32 16  8192  16  445 3528  923  38 72
Ethernet     4  16 16  8192  32  881 3436 1827  33 56
Ethernet     2   8 16  8192  64 1773 2087 3696  31 28
Ethernet     1   4 16  8192 128 3532  234 7329  30  2
InfiniBand  16 128 64  8192   1   96  335  179  36 52
InfiniBand  16 128 64 16384   2  192  346  356  37 37
InfiniBand  16 128 64 32768   4  381  377  714  37 25
InfiniBand  16 128 64 65536   8  770  422 1422  32 16
InfiniBand   8  64 64  8192   2  192  332  352  34 36
InfiniBand   4  32 64  8192   4  384  339  711  31 23
InfiniBand   2  16 64  8192   8  768  270 1436  31 11
InfiniBand   1   8 64  8192  16 1534  167 2869  31  4
"""
FITTED = [(ADAM_TABLE, *row) for row in (("Ethernet", 4, 64), ("InfiniBand", 8, 128), ("InfiniBand", 64, 1024))]
HIDDEN, SHORT, LONG = 1024, 128, 512
# Operations a token of a layer are 24 h^2 + 4 s h: hidden size h, sequence s.
LONGER = LONG / SHORT * (24 * HIDDEN + 4 * LONG) / (24 * HIDDEN + 4 * SHORT)
WARMUP, WARMUP_512 = 1000 / 5993, 107 / 555  # 1-bit LAMB, section 6


@dataclass(frozen=True)
class Profile:
    """A row of a table: milliseconds of the parts of a step."""

    source: str
    network: str
    nodes: float
    gpus: float
    micro_batch: float
    batch: float
    accumulation: float
    forward: float
    all_reduce: float
    backward: float
    step: float
    percent: float


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
    """The median of the errors' sizes."""
    return median(abs(row.error) for row in rows)


def rows_of(source: str, table: str) -> list[Profile]:
    rows = (line.split() for line in table.strip().splitlines())
    return [Profile(source, network, *map(float, numbers)) for network, *numbers in rows]


PROFILES = {
    (row.source, row.network, row.gpus, row.batch): row
    for row in (*rows_of(ADAM_TABLE, TABLE_1), *rows_of(LAMB_TABLE, TABLE_5))
}


def cluster_of(network: str, gpus: float) -> Cluster:
    return Cluster(gpus=int(gpus), **CLUSTERS[f"{network.lower()}-v100"])


def all_reduces(fitted: bool = False) -> list[Compared]:
    """Milliseconds of the rows that nothing was fitted to, or of the others."""
    return [
        Compared(
            ADAM_REDUCES if row.source == ADAM_TABLE else LAMB_REDUCES,
            f"{row.network}, {row.nodes:g} x {row.gpus / row.nodes:g} GPUs, batch {row.batch:,.0f}",
            1e3 * cluster_of(row.network, row.gpus).all_reduce(ELEMENTS * ITEMSIZE),
            row.all_reduce,
        )
        for key, row in PROFILES.items()
        if (key in FITTED) is fitted
    ]


def speed_up(row: Profile, longer: float = 1.0) -> float:
    """Predict the speed-up of stage 2, with forward and backward so many times as long."""
    forward, backward, local = longer * row.forward / 1e3, longer * row.backward / 1e3, row.step / 1e3
    model = Model(ELEMENTS, ITEMSIZE, forward, backward, overlap="none", levels=1)
    cluster = cluster_of(row.network, row.gpus)
    slow, fast = uncompressed(model, cluster), stage_2(model, cluster, chunks=1)
    return replace(slow, local=local).total / replace(fast, local=local).total


def end_to_end(stage_2_speed_up: float, warmup: float) -> float:
    """1-bit LAMB, section 6."""
    return 1 / (warmup + (1 - warmup) / stage_2_speed_up)


def speed_ups() -> list[Compared]:
    """Compare speed-ups of stage 2 and of whole runs on Ethernet: Figure 5 of 1-bit Adam, Figure 3 of 1-bit LAMB and
    their text, which name no number of GPUs: the tables' largest. Without a profile of SQuAD it is 3 x 384 tokens by
    Table 1 on 32 GPUs, and of longer sequences LONGER times Table 5's."""
    one, sixteen = (PROFILES[ADAM_TABLE, "Ethernet", 64, batch] for batch in (64, 1024))
    small, large = (PROFILES[LAMB_TABLE, "Ethernet", 256, batch] for batch in (8192, 65536))
    tokens = (3 * 384 / SHORT - 1) / 15  # from batch 1 to batch 16 of sequences of 128
    forward, backward = (
        a + tokens * (b - a) for a, b in ((one.forward, sixteen.forward), (one.backward, sixteen.backward))
    )
    bert, squad = speed_up(sixteen), speed_up(replace(sixteen, gpus=32, forward=forward, backward=backward))
    lamb, lamb_long, lamb_64k = speed_up(small), speed_up(small, LONGER), end_to_end(speed_up(large), WARMUP)
    return [
        Compared(STAGE, "1-bit Adam, BERT-Large", bert, 5.48),
        Compared(STAGE, "1-bit Adam, SQuAD", squad, 6.17),
        Compared(STAGE, "1-bit LAMB, sequence 128", lamb, 4.5),
        Compared(STAGE, "1-bit LAMB, sequence 512", lamb_long, 3.0),
        Compared(RUN, "1-bit Adam, BERT-Large", end_to_end(bert, 23 / 152), 3.3),
        Compared(RUN, "1-bit Adam, SQuAD", end_to_end(squad, 400 / 1848), 2.9),
        Compared(RUN, "1-bit LAMB, sequence 128", end_to_end(lamb, WARMUP), 2.8),
        Compared(RUN, "1-bit LAMB, batch 64K, by throughput", lamb_64k, 2.0),
        Compared(RUN, "1-bit LAMB, batch 64K, by the clock", lamb_64k, 2.2),
        Compared(RUN, "1-bit LAMB, sequence 512, batch 32K", end_to_end(speed_up(large, LONGER / 2), WARMUP_512), 1.5),
    ]
