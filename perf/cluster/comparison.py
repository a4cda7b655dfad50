"""The cluster model of `onebit plan` against what was measured: the papers' tables, and the network lab.

    python -m perf.cluster            the papers; writes docs/cluster_model.md and its plot, a second or two
    python -m perf.cluster --lab      also measures in the lab (root on Linux), 4 or 5 minutes, and keeps a record
    python -m perf.cluster --nodes    the same of hosts with several ranks: see perf.cluster.nodes

The first of them compares the records of `python -m perf.all_reduce --rtt` too, of links with a delay, and of links
without one that were measured with the same transport: see perf.cluster.delays.

In the lab every rank is a host of its own. Nothing is fitted to the rows that are compared. The network's rate is that
of the links times 0.956, the share of it that is payload (perf.lab.rates). The latency is that of all-reduces of 1024
elements, the rates of the passes are those of one process alone, before and after the ranks run. A rank has the
machine's cores divided by the ranks, at most one. The number of chunks is what the ranks chose. Times, those of passes
too, are the least of several: the model knows nothing of what else the machine does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onebit.cli.arguments import whole_number
from onebit.cli.plan import command as plan
from onebit.cli.plan.report import plot as plot_plan
from onebit.cli.progress import Progress
from onebit.kernels.tuning.machine import provenance
from perf import plots
from perf.all_reduce.benchmark import parse_arguments as all_reduce_arguments
from perf.all_reduce.benchmark import run_lab
from perf.all_reduce.measure import ONE_BIT, Row
from perf.cluster import delays, nodes
from perf.cluster.calibration import PASSES, SMALL, latency, pass_rates
from perf.cluster.papers import BAND, Compared, all_reduces, by_kind, median_error, speed_ups
from perf.cluster.plots import plot_lab, plot_papers
from perf.cluster.report import PLANNED, Labs, page
from perf.command import add_out, exit_status, host_count, make_folder, shaped_rate
from perf.records import cpu_name, load_average, machine, read_record, slug, write_record

STANDARD = {"hosts": [2, 3, 4], "rates": ["100mbit", "300mbit", "1gbit"], "elements": 2**23, "repeats": 5}
PAGE = Path("docs/cluster_model.md")
LABS, NODES = "cluster_model-lab-", "cluster_model-nodes-"  # how the names of the lab's records begin


def measure(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A record: rows of perf.all_reduce, the passes' rates and the latency, all of this run."""
    load = load_average()
    defaults = all_reduce_arguments(["--lab", "--chunks=auto", "--timeout=600"])
    rates: dict[str, dict[str, float]] = {}
    rows: list[Row] = []
    group: dict[str, Any] = {}
    for hosts in arguments.hosts:
        progress.show(f"passes of one of {hosts} ranks")
        before = pass_rates(hosts, arguments.elements)
        ours = {**vars(arguments), "hosts": [hosts], "elements": [SMALL, arguments.elements]}
        wanted = argparse.Namespace(**{**vars(defaults), **ours})
        found, group = run_lab(wanted, progress)
        rows += found
        after = pass_rates(hosts, arguments.elements)
        rates[str(hosts)] = {name: max(before[name], after[name]) for name in PASSES}
    return {
        **group,
        "cpu_count": machine()["cpu_count"],
        "load_before": load,
        "repeats": arguments.repeats,
        **provenance(),
        "pass_bytes_per_s": rates,
        "latency_s": latency(rows),
        "rows": [asdict(row) for row in rows if row.kind in ("fp32", "fp16", ONE_BIT)],
    }


def compare(record: dict[str, Any]) -> list[Compared]:
    """Milliseconds of every row of a record but the small ones."""
    rows = [Row.of(each) for each in record["rows"]]
    measured = [row for row in rows if row.elements != SMALL and row.calls]
    return [delays.compared_row(row, record["cpu_count"], record) for row in measured]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1: no figures, or with --check a median error above the target. 2: this can't be measured here."""
    arguments = _parser().parse_args(argv)
    return exit_status("perf.cluster", lambda: run(arguments))


def run(arguments: argparse.Namespace) -> int:
    make_folder(arguments.out)
    if arguments.lab:
        path = arguments.out / f"{LABS}{slug(cpu_name())}.json"
        wanted = argparse.Namespace(**{**vars(arguments), "rates": arguments.rates or STANDARD["rates"]})
        write_record(path, measure(wanted, Progress()))
        print(path)
    if arguments.nodes:
        path = arguments.out / f"{NODES}{slug(cpu_name())}.json"
        wanted = argparse.Namespace(**{**vars(arguments), "rates": arguments.rates or nodes.STANDARD["rates"]})
        write_record(path, nodes.measure(wanted, Progress()))
        print(path)
    return report(arguments)


def lab_records(out: Path) -> dict[Path, tuple[dict[str, Any], list[Compared]]]:
    """Every record of the lab, and its rows beside what the model says of them."""
    found = {}
    for begin, compared in ((LABS, compare), (NODES, nodes.compare)):
        for path in sorted(out.glob(f"{begin}*.json")):
            record = read_record(path)
            found[path] = record, compared(record)
    return found


def report(arguments: argparse.Namespace) -> int:
    """The page, the plots, and a line for each comparison."""
    reduces, speeds = all_reduces(), speed_ups()
    labs = lab_records(arguments.out)
    links = delays.compared(arguments.out)
    medians = {
        "the papers' all-reduces": (median_error(reduces), BAND["papers"]),
        "the papers' speed-ups": (median_error(speeds), BAND["papers"]),
        **{
            f"{path}, {kind}": (median_error(each), BAND["lab"])
            for path, (_, rows) in labs.items()
            for kind, each in by_kind(rows).items()
        },
        **{f"all-reduces {what}": (median_error(rows), BAND["lab"]) for what, rows in links.items()},
    }
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    arguments.page.write_text(page(reduces, speeds, labs, arguments.page, arguments.out, links), encoding="utf-8")
    print(arguments.page)
    plots.draw_if_possible(lambda: _plots(arguments.out, reduces, speeds, labs))
    for what, (error, most) in medians.items():
        verdict = "met" if error <= most else "missed"
        print(f"{what}: median error {100 * error:.1f} %, to reach {100 * most:.0f} %: {verdict}")
    return int(arguments.check and any(error > most for error, most in medians.values()))


def _plots(out: Path, reduces: Sequence[Compared], speeds: Sequence[Compared], labs: Labs) -> list[Path]:
    planned, parser = out / "cluster_model-plan.png", argparse.ArgumentParser()
    plan.add_arguments(parser)
    plot_plan(*plan.planned(parser.parse_args(PLANNED.split()[2:])), planned)
    return [
        plot_papers(reduces, speeds, out / "cluster_model-papers.png"),
        planned,
        *(plot_lab(rows, record["device"], path.with_suffix(".png")) for path, (record, rows) in labs.items()),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.cluster", description="The cluster model against the papers' tables and the lab."
    )
    parser.add_argument("--lab", action="store_true", help="measure in the network lab first: root on Linux")
    parser.add_argument("--nodes", action="store_true", help="measure hosts with several ranks in the lab first")
    parser.add_argument("--shapes", nargs="+", type=nodes.shape, default=nodes.STANDARD["shapes"], help="of --nodes")
    parser.add_argument("--hosts", nargs="+", type=host_count, default=STANDARD["hosts"], help="such as 2 4")
    parser.add_argument("--rates", nargs="+", type=shaped_rate, help="such as 100mbit 1gbit")
    parser.add_argument("--elements", type=whole_number, default=STANDARD["elements"])
    parser.add_argument("--repeats", type=whole_number, default=STANDARD["repeats"], help="calls of each kind")
    add_out(parser, "records and plots")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a median error is above its target")
    return parser
