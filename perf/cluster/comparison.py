"""The cluster model of `onebit plan` against what was measured: the papers' tables, and the network lab.

    python -m perf.cluster            the papers; writes docs/cluster_model.md and its plot, a second or two
    python -m perf.cluster --lab      also measures in the lab (root on Linux), 4 or 5 minutes, and keeps a record

In the lab every rank is a host of its own. Nothing is fitted to the rows that are compared. The network's rate is that
of the links times 0.956, the share of it that is payload (perf.lab). The latency is that of all-reduces of 1024
elements, the rates of the passes are those of one process alone, before and after the ranks run. A rank has the
machine's cores divided by the ranks, at most one. The model is told how many chunks the ranks chose. Times, those of
passes too, are the least of several: what else the machine does is not what the model is of.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from onebit.cli import main as cli
from onebit.cli.plan import command as plan
from onebit.cli.plan import report as plan_report
from onebit.cli.plan.model import Cluster, compressed_all_reduce
from onebit.kernels import cpu
from onebit.kernels.passes import bytes_per_element
from onebit.kernels.tuning.machine import device_name, provenance
from onebit.kernels.tuning.workload import Workload
from perf.all_reduce import benchmark as all_reduce
from perf.all_reduce.ranks import KINDS, ONE_BIT, Row, WrongResult
from perf.cluster import papers as cluster_papers
from perf.cluster.papers import BAND, Compared, by_kind, median_error
from perf.cluster.plots import plot_lab, plot_papers
from perf.cluster.report import PLANNED, page
from perf.lab.network import LabUnavailable, RankFailed, parse_rate

PAYLOAD = 0.956  # perf.lab
SMALL = 1024  # elements of an all-reduce that is nothing but latency
PASSES, PASS_RUNS = ("scan", "compress", "average", "decode"), 30
STANDARD = {"hosts": [2, 3, 4], "rates": ["100mbit", "300mbit", "1gbit"], "elements": 2**23, "repeats": 5}
RESULTS, PAGE = Path("perf/results"), Path("docs/cluster_model.md")


def pass_rates(ranks: int, elements: int) -> dict[str, float]:
    """B/s of one process alone on one thread, the fastest of its runs."""
    threads, found = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        passes = Workload(elements, ranks=ranks).passes(cpu)
        for name in PASSES:
            each = bytes_per_element(name, 4, master=False, packed=True, ranks=ranks)
            share = elements / ranks if name == "average" else elements
            found[name] = share * each / min(_seconds(passes[name].run) for _ in range(PASS_RUNS))
    finally:
        torch.set_num_threads(threads)
    return found


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(arguments: argparse.Namespace, progress: cli.Progress) -> dict[str, Any]:
    """A record: rows of perf.all_reduce, the passes' rates and the latency, all of this run."""
    load = round(os.getloadavg()[0], 2)
    settings = {"elements": [SMALL, arguments.elements], "chunks": "auto", "phases": False, "timeout": 600}
    rates: dict[str, dict[str, float]] = {}
    rows: list[Row] = []
    group: dict[str, Any] = {}
    for hosts in arguments.hosts:
        progress.show(f"passes of one of {hosts} ranks")
        before = pass_rates(hosts, arguments.elements)
        wanted = argparse.Namespace(**{**vars(arguments), **settings, "hosts": [hosts]})
        found, group = all_reduce.run_lab(wanted, progress)
        rows += found
        after = pass_rates(hosts, arguments.elements)
        rates[str(hosts)] = {name: max(before[name], after[name]) for name in PASSES}
    return {
        **group,
        "cpu_count": os.cpu_count(),
        "load_before": load,
        "repeats": arguments.repeats,
        **provenance(),
        "pass_bytes_per_s": rates,
        "latency_s": latency(rows),
        "rows": [asdict(row) for row in rows if row.kind in ("fp32", "fp16", ONE_BIT)],
    }


def latency(rows: Sequence[Row]) -> float:
    """Seconds of a message: an all-reduce sends 2 (N - 1) of them one after the other."""
    small = [row for row in rows if row.elements == SMALL and row.kind in ("fp32", "fp16")]
    return statistics.median(min(row.calls) / (2 * (row.hosts - 1)) for row in small)


def compare(record: dict[str, Any]) -> list[Compared]:
    """Milliseconds of every row of a record but the small ones."""
    found = []
    for row in (Row(**each) for each in record["rows"]):
        if row.elements == SMALL or not row.calls:
            continue
        cluster = Cluster(
            gpus=row.hosts,
            gpus_per_node=1,
            network=PAYLOAD * float(parse_rate(row.rate) or 0),
            latency=record["latency_s"],
            rates=record["pass_bytes_per_s"][str(row.hosts)],
            cores=min(1.0, record["cpu_count"] / row.hosts),
        )
        if row.kind == ONE_BIT:
            seconds = compressed_all_reduce(row.elements, cluster, chunks=row.chunks)
        else:
            seconds = cluster.all_reduce(row.elements * KINDS[row.kind].itemsize)
        what = f"{row.kind}: {row.hosts} hosts, {row.rate}, {row.elements:,} elements"
        found.append(Compared(what, 1e3 * seconds, 1e3 * min(row.calls)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: no figures, or with --check a median error above the target. 2: this can't be measured here."""
    arguments = _parser().parse_args(argv)
    progress = cli.Progress()
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        if arguments.lab:
            path = arguments.out / f"cluster_model-lab-{_slug(device_name(torch.device('cpu')))}.json"
            path.write_text(json.dumps(measure(arguments, progress), indent=1) + "\n", encoding="utf-8")
            print(path)
        return _report(arguments)
    except (LabUnavailable, OSError, ValueError) as error:
        print(f"perf.cluster: error: {error}", file=sys.stderr)
        return 2
    except (WrongResult, RankFailed, TimeoutError) as error:
        print(f"perf.cluster: no figures: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def lab_records(out: Path) -> dict[Path, dict[str, Any]]:
    return {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("cluster_model-lab-*.json"))}


def _report(arguments: argparse.Namespace) -> int:
    """The page, the plots, and a line for each comparison."""
    reduces, speed_ups = cluster_papers.all_reduces(), cluster_papers.speed_ups()
    labs = {path: (record, compare(record)) for path, record in lab_records(arguments.out).items()}
    medians = {
        "the papers' all-reduces": (median_error(reduces), BAND["papers"]),
        "the papers' speed-ups": (median_error(speed_ups), BAND["papers"]),
        **{
            f"{path}, {kind}": (median_error(each), BAND["lab"])
            for path, (_, rows) in labs.items()
            for kind, each in by_kind(rows).items()
        },
    }
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    arguments.page.write_text(page(reduces, speed_ups, labs, arguments.page, arguments.out), encoding="utf-8")
    print(arguments.page)
    try:
        plot_papers(reduces, speed_ups, arguments.out / "cluster_model-papers.png")
        parser = argparse.ArgumentParser()
        plan.add_arguments(parser)
        planned = plan.planned(parser.parse_args(PLANNED.split()[2:]))
        plan_report.plot(*planned, arguments.out / "cluster_model-plan.png")
        for path, (record, rows) in labs.items():
            plot_lab(rows, record["device"], path.with_suffix(".png"))
    except ModuleNotFoundError:
        print("No plots: matplotlib is not installed. For them: pip install matplotlib")
    for what, (error, most) in medians.items():
        verdict = "met" if error <= most else "missed"
        print(f"{what}: median error {100 * error:.1f} %, to reach {100 * most:.0f} %: {verdict}")
    return int(arguments.check and any(error > most for error, most in medians.values()))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _rate(text: str) -> str:
    try:
        parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.cluster", description="The cluster model against the papers' tables and the lab."
    )
    parser.add_argument("--lab", action="store_true", help="measure in the network lab first: root on Linux")
    parser.add_argument("--hosts", nargs="+", type=cli.whole_number, default=STANDARD["hosts"], help="such as 2 4")
    parser.add_argument("--rates", nargs="+", type=_rate, default=STANDARD["rates"], help="such as 100mbit 1gbit")
    parser.add_argument("--elements", type=cli.whole_number, default=STANDARD["elements"])
    parser.add_argument("--repeats", type=cli.whole_number, default=STANDARD["repeats"], help="calls of each kind")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of records and plots")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a median error is above its target")
    return parser
