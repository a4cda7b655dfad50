"""The steps measured by 1-bit Adam (Tang et al. 2021) and 1-bit LAMB (Li et al. 2021), and what the model predicts.

Clusters are the presets of `onebit plan`: of their constants `network` of Ethernet is the papers', latencies and the
memory are assumed, and `intra` of both and `network` of InfiniBand are fitted to three rows of 1-bit Adam's Table 1.
The other rows of Table 1 and all of 1-bit LAMB's are predictions. In the speed-ups the optimizer's own work in stage 2
is assumed to be what the tables give for stage 1 ("Step"), as the papers do not say; nothing is hidden or pipelined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from onebit.cli.plan.model import Cluster, Model, stage_2, uncompressed
from onebit.cli.plan.options import CLUSTER_OPTIONS, CLUSTERS

ELEMENTS = 340_000_000  # BERT-Large: "340M params" in both papers
ITEMSIZE = 2  # 1-bit Adam, section 7.1: "for FP16 training"
ADAM_TABLE, LAMB_TABLE = "1-bit Adam, Table 1", "1-bit LAMB, Table 5"

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

    what: str
    predicted: float
    measured: float
    fitted: bool = False
    note: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


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
    preset = CLUSTERS[f"{network.lower()}-v100"]
    return Cluster(gpus=gpus, **{name: CLUSTER_OPTIONS[name].parse(text) for name, text in preset.items()})


# The reasons of larger errors.
OUTLIERS = {
    (LAMB_TABLE, "Ethernet"): "from 4 nodes on, 1.5 to 1.6 times Table 1's time with as many GPUs: a slower network",
    (LAMB_TABLE, "InfiniBand"): "one node of 8, where Table 1 has 28 ms: no constant fits both",
}
LARGE_ERROR = 0.25
BAND = {"papers": 0.25, "lab": 0.20}  # a median error at most


def all_reduces(seconds: Callable[[Cluster, float], float] = Cluster.all_reduce) -> list[Compared]:
    """Milliseconds of every row, by the model or by another."""
    found = []
    for row in PROFILES:
        what = f"{row.source}: {row.network}, {row.nodes} x {row.gpus // row.nodes} GPUs, batch {row.batch:,}"
        predicted = 1e3 * seconds(cluster_of(row.network, row.gpus), ELEMENTS * ITEMSIZE)
        one = Compared(what, predicted, row.all_reduce, row.fitted)
        large = abs(one.error) > LARGE_ERROR
        found.append(replace(one, note=OUTLIERS.get((row.source, row.network), "") if large else ""))
    return found


def flat_ring(cluster: Cluster, size: float) -> float:
    """One ring over all GPUs, which passes through each node once: the other way to all-reduce."""
    rate = cluster.intra if cluster.nodes == 1 else min(cluster.intra, cluster.network / 8)
    return 2 * (cluster.gpus - 1) / cluster.gpus * size / rate


def as_by_the_cable(cluster: Cluster, size: float) -> float:
    """The model with 1-bit Adam's words on InfiniBand, "close to theoretical peak": 100 Gbit/s."""
    return (replace(cluster, network=100e9) if cluster.gpus_per_node == 8 else cluster).all_reduce(size)


def _profile(source: str, gpus: int, batch: int) -> Profile:
    return next(
        row for row in PROFILES if (row.source, row.network, row.gpus, row.batch) == (source, "Ethernet", gpus, batch)
    )


def speed_up(forward: float, backward: float, step: float, gpus: int) -> float:
    """Of stage 2 on Ethernet; milliseconds a step."""
    model = Model(ELEMENTS, ITEMSIZE, forward / 1e3, backward / 1e3, overlap="none", local=step / 1e3)
    cluster = cluster_of("Ethernet", gpus)
    return uncompressed(model, cluster).total / stage_2(model, cluster, chunks=1).total


def end_to_end(stage_2_speed_up: float, warmup: float) -> float:
    """1-bit LAMB, section 6."""
    return 1 / (warmup + (1 - warmup) / stage_2_speed_up)


HIDDEN, SHORT, LONG = 1024, 128, 512
WARMUP_512 = 107 / 555  # 1-bit LAMB, section 6
# Operations a token of a layer are 24 h^2 + 4 s h: hidden size h, sequence s.
LONGER = LONG / SHORT * (24 * HIDDEN + 4 * LONG) / (24 * HIDDEN + 4 * SHORT)


def speed_ups() -> list[Compared]:
    """Of stage 2 and of whole runs on Ethernet: Figure 5 of 1-bit Adam, Figure 3 of 1-bit LAMB and their text."""
    one, sixteen = _profile(ADAM_TABLE, 64, 64), _profile(ADAM_TABLE, 64, 1024)
    small, large = _profile(LAMB_TABLE, 256, 8192), _profile(LAMB_TABLE, 256, 65536)
    tokens = (3 * 384 / SHORT - 1) / 15  # from batch 1 to batch 16 of sequences of 128
    squad = [a + tokens * (b - a) for a, b in ((one.forward, sixteen.forward), (one.backward, sixteen.backward))]
    bert = speed_up(sixteen.forward, sixteen.backward, sixteen.step, 64)
    tuned = speed_up(squad[0], squad[1], sixteen.step, 32)
    lamb = speed_up(small.forward, small.backward, small.step, 256)
    lamb_long = speed_up(LONGER * small.forward, LONGER * small.backward, small.step, 256)
    lamb_64k = speed_up(large.forward, large.backward, large.step, 256)
    lamb_32k = speed_up(LONGER * large.forward / 2, LONGER * large.backward / 2, large.step, 256)
    as_8k = "Table 5's row of 256 GPUs, batch 8K"
    scaled = f"forward and backward times {LONGER:.2f} for the longer sequence, by operations: no profile of it"
    tokens_of = "no profile of SQuAD: 3 x 384 tokens (assumed) by Table 1"
    bert_run, tuned_run = end_to_end(bert, 23 / 152), end_to_end(tuned, 400 / 1848)
    lamb_run, lamb_64k_run = end_to_end(lamb, 1000 / 5993), end_to_end(lamb_64k, 1000 / 5993)
    adam_rows = [
        ("BERT-Large, stage 2", bert, 5.48, "64 GPUs, Table 1's largest; the text names none"),
        ("SQuAD, stage 2", tuned, 6.17, f"32 GPUs; {tokens_of}"),
        ("BERT-Large, run", bert_run, 3.3, "warmup 23K of 152K steps"),
        ("SQuAD, run", tuned_run, 2.9, "warmup 400 of 1848 steps"),
    ]
    lamb_rows = [
        ("sequence 128, stage 2", lamb, 4.5, as_8k),
        ("sequence 512, stage 2", lamb_long, 3.0, f"{as_8k}, {scaled}"),
        ("sequence 128, run", lamb_run, 2.8, "warmup 1000 of 5993 steps"),
        ("batch 64K, run", lamb_64k_run, 2.0, "Figure 3(d), by throughput"),
        ("batch 64K, run", lamb_64k_run, 2.2, "Table 4, by the clock"),
        ("sequence 512, batch 32K, run", end_to_end(lamb_32k, WARMUP_512), 1.5, "Figure 3(g), Table 4"),
    ]
    papers = {"1-bit Adam": adam_rows, "1-bit LAMB": lamb_rows}
    found = [
        Compared(f"{paper}: {what}", predicted, measured, note=note)
        for paper, rows in papers.items()
        for what, predicted, measured, note in rows
    ]
    return sorted(found, key=lambda row: row.what.endswith("run"))  # stage 2 first


def median_error(rows: Sequence[Compared], fitted: bool = False) -> float:
    """Of the sizes of errors, of rows that nothing was fitted to unless asked."""
    return median(abs(row.error) for row in rows if fitted or not row.fitted)


def by_kind(rows: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Of the lab: fp32, fp16 and 1 bit apart."""
    kinds: dict[str, list[Compared]] = {}
    for row in rows:
        kinds.setdefault(row.what.partition(":")[0], []).append(row)
    return kinds


def counted_once(rows: Sequence[Compared]) -> list[Compared]:
    """Rows of one paper, network and number of nodes, of unlike batches, as one: their median."""
    groups: dict[str, list[Compared]] = {}
    for row in rows:
        if not row.fitted:
            groups.setdefault(row.what.rpartition(", ")[0], []).append(row)
    return [replace(each[0], measured=median(row.measured for row in each)) for each in groups.values()]


def fitted_constants() -> dict[str, float]:
    """The constants that the three rows of Table 1 give: intra in B/s, network in bit/s."""
    rows = {(row.network, row.gpus): row for row in PROFILES if row.fitted}
    size, found = ELEMENTS * ITEMSIZE, {}
    for network, gpus in (("Ethernet", 4), ("InfiniBand", 8)):
        cluster = cluster_of(network, gpus)
        seconds = rows[network, gpus].all_reduce / 1e3 - 2 * (gpus - 1) * cluster.intra_latency
        found[f"{network} intra"] = 2 * (gpus - 1) / gpus * size / seconds
    cluster = cluster_of("InfiniBand", 64)
    within = 2 * 7 / 8 * size / found["InfiniBand intra"] + 2 * 7 * cluster.intra_latency
    seconds = rows["InfiniBand", 64].all_reduce / 1e3 - within - 2 * 7 * cluster.latency
    found["InfiniBand network"] = 8 * 2 * 7 / 8 * size / seconds
    return found
