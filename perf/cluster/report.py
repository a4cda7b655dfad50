"""The cluster model of `onebit plan` against what was measured: the papers' tables, and the network lab.

python -m perf.cluster            prints every row, and writes docs/cluster_model.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from perf.cluster import lab, papers
from perf.cluster.papers import Compared, median_error
from perf.command import exit_status
from perf.records import RESULTS
from perf.tables import markdown

PAGE = Path("docs/cluster_model.md")
TEXT = """# The cluster model

The error of `onebit plan`, as the median over the rows of each source:

* **The papers' all-reduces** on V100s: {adam} and {lamb}. That tells ten times as fast from twice as fast, but not 5 %
  from nothing. The largest error, {worst}, is of a node of 8 GPUs on which the two papers are 6 times apart.
* **The papers' speed-ups**: {stage} for stage 2 and {run} for whole runs. The plan predicts each too low, and so errs
  on the side of not compressing.
* **A network lab** of CPUs over Gloo, a rank a host: 1 bit {amd} and {intel}, uncompressed {plain} at most; several
  ranks a host with two levels: {levels}; 1 bit with a round trip of 50 ms: {far}.
* **Fast links** have the largest errors: from 1 Gbit/s on passes count for more than the network, and the lab's ranks
  share cores. The links of 0 ms have the passes of another run, up to three times as slow: {near}.
* **Not measured**: a GPU of ours, NCCL with a round trip, whole steps, thousands of ranks.

{table}

`python -m perf.cluster` writes this page and prints every row. An error is predicted / measured - 1. "4 x 1" is 4 hosts
of a rank each. The model is not fitted to these rows. Three numbers of the presets are fitted, each to a row of 1-bit
Adam's Table 1 that is not in the table above: the rate within a node of both clusters, and InfiniBand's 30.9 Gbit/s,
which stands for the way from GPU to GPU (the cable has 100).
"""


def by_source(out: Path) -> dict[str, list[Compared]]:
    """Every prediction. out: the folder of the lab's records."""
    found: dict[str, list[Compared]] = {}
    for row in (*papers.all_reduces(), *papers.speed_ups(), *lab.compared(out)):
        found.setdefault(row.source, []).append(row)
    return found


def page(found: Mapping[str, Sequence[Compared]]) -> str:
    worst = {source: max(rows, key=lambda row: abs(row.error)) for source, rows in found.items()}
    medians = {source: f"{100 * median_error(rows):.1f} %" for source, rows in found.items()}
    cells = [
        [source, str(len(rows)), medians[source], f"{100 * worst[source].error:+.0f} %", worst[source].what]
        for source, rows in found.items()
    ]
    plain = max(median_error(rows) for source, rows in found.items() if source.endswith("a rank a host: uncompressed"))
    return TEXT.format(
        table=markdown(["source", "rows", "median error", "largest", "of"], cells, numbers=(1, 2, 3)),
        plain=f"{100 * plain:.1f} %",
        worst=f"{100 * worst[papers.LAMB_REDUCES].error:+.0f} %",
        **{name: medians[source] for name, source in {**papers.SOURCES, **lab.SOURCES}.items()},
    )


def main() -> int:
    """Exit status 2: a record can't be read, or the page can't be written."""
    return exit_status("perf.cluster", write)


def write() -> None:
    found = by_source(RESULTS)
    PAGE.write_text(page(found), encoding="utf-8")
    for source, rows in found.items():
        print(f"{source}: median error {100 * median_error(rows):.1f} %")
        for row in rows:
            print(
                f"  {row.what}: predicted {row.predicted:,.2f}, measured {row.measured:,.2f}, {100 * row.error:+.0f} %"
            )
    print(PAGE)
