"""The benchmark of the all-reduce: bytes by the interfaces' counters, figures, targets; none of a wrong result."""

import contextlib
import io
import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from onebit.cli.progress import Progress
from perf import plots
from perf.all_reduce import benchmark, measure
from perf.all_reduce.measure import DIRECT, KINDS, ONE_BIT, TWO_LEVELS, Row
from perf.all_reduce.plots import plot
from perf.all_reduce.report import LEVELS, STANDARD, table
from perf.all_reduce.targets import targets
from perf.lab import processes
from perf.ranks import Ranks
from perf.targets import targets_of
from tests import forked
from tests.ranks import run_ranks

CPU = torch.device("cpu")
GROUP = {"device": "Some CPU", "backend": "gloo", "ranks": 4, "threads": 1}


def silent(text):
    pass


def row(kind=ONE_BIT, seconds=1.0, nbytes=1e6, hosts=4, rate="1gbit", elements=25_000_000, **other):
    return Row(hosts, rate, elements, kind, seconds, (seconds,), nbytes, **other)


def node_row(kind, seconds, nbytes):
    """A row of 2 hosts of 4 ranks."""
    return row(kind, seconds, nbytes, hosts=2, elements=2**22, chunks=2, each=4)


FAST = [row(ONE_BIT, 0.1125, 5e6), row("fp32", 1.26, 150e6), row("fp16", 0.63, 75e6), row("bf16", 0.63, 75e6)]
NODES = [node_row(ONE_BIT, 0.07, 2.16e6), node_row(TWO_LEVELS, 0.14, 0.54e6), node_row("fp32", 0.27, 29.4e6)]
NODES += [node_row("fp16", 0.14, 14.7e6), node_row("bf16", 0.14, 14.7e6)]


@pytest.mark.netlab
@pytest.mark.timeout(1200)  # four ranks share the cores with other tests
def test_a_host_of_two_sends_half_of_what_its_ranks_would(lab_available, tmp_path, monkeypatch):
    """The interfaces' counters say so of a host's link: with one level 2 bits an element, of which half are replies;
    with two levels 1. A table and a record."""
    monkeypatch.setattr(processes, "subprocess", forked)
    n = 2**20  # one level's replies are short enough to go straight to their receivers
    options = ["--each=2", f"--elements={n}", "--chunks=1", "--rates=1gbit", "--repeats=2", f"--out={tmp_path / 'new'}"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = benchmark.main(["--lab", *options])
    text = printed.getvalue()
    assert status == 0, text
    (path,) = (tmp_path / "new").glob("*.json")
    record = json.loads(path.read_text())
    rows = {r["kind"]: r for r in record["rows"]}
    assert list(rows) == [ONE_BIT, TWO_LEVELS, "4 bits", "8 bits", *KINDS]
    sent = {kind: r["bytes"] for kind, r in rows.items()}
    assert sent[TWO_LEVELS] == pytest.approx(n / 8, rel=0.1)
    assert 1.85 < sent[ONE_BIT] / sent[TWO_LEVELS] < 2.15
    assert sent["fp32"] == pytest.approx(2 * 3 / 4 * 4 * n, rel=0.05)  # a ring of 4 ranks
    assert 4 * n / sent[TWO_LEVELS] > 28
    assert sent["8 bits"] / sent["4 bits"] == pytest.approx((8 + 1 / 8) / (4 + 1 / 8), rel=0.03)  # 1/8 for scales
    assert 3 < sent["4 bits"] / sent[ONE_BIT] < 4.2
    assert path.name.startswith("all_reduce-") and str(path) in text
    assert path.name.endswith(f"-2-ranks-a-host-rates-1gbit-elements-{n}-chunks-1.json")
    assert f" 2 x 2         1gbit   1,048,576      1 {TWO_LEVELS} |" in text
    assert record["backend"] == "gloo" and record["ranks"] == 4 and record["threads"] == 1 and record["lab"]
    assert record["versions"]["torch"] == torch.__version__ and record["cpu"] and "load_before" in record
    for r in rows.values():
        assert (r["hosts"], r["each"], r["rate"], r["elements"], len(r["calls"])) == (2, 2, "1gbit", n, 2)
        assert min(r["calls"]) <= r["seconds"] <= max(r["calls"])


@pytest.mark.netlab
def test_a_wrong_result_in_the_lab_gets_no_figure(lab_available, tmp_path, monkeypatch, capsys):
    """Ranks whose compressed all-reduce does nothing."""
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys\nfrom perf.all_reduce import benchmark, measure\n"
        "measure.CompressedAllReduce.__call__ = lambda self, x: None\nsys.exit(benchmark.main())\n"
    )
    monkeypatch.setattr(benchmark, "WORKER", (str(script),))
    out = tmp_path / "out"
    assert benchmark.main(["--lab", "--hosts=2", "--rates=unshaped", "--elements=5000", f"--out={out}"]) == 1
    captured = capsys.readouterr()
    assert "no figures, since a result is wrong: 2 hosts, unshaped: the ranks' results" in captured.err
    assert not captured.out and not any(out.iterdir())


def main_on_a_group(rank, size, arguments):
    return benchmark.main(arguments)


def test_it_measures_on_the_group_it_finds(tmp_path):
    arguments = ["--device=cpu", "--elements=1000,50_000", "--repeats=2", "--chunks=2", f"--out={tmp_path}"]
    assert run_ranks(8, main_on_a_group, arguments) == [0] * 8
    (path,) = tmp_path.glob("*.json")
    assert path.name.endswith("-gloo-8-ranks-elements-1000-50000-chunks-2.json")
    record = json.loads(path.read_text())
    assert not record["lab"] and record["ranks"] == 8 and record["targets"] == []
    assert [r["chunks"] for r in record["rows"] if r["kind"] == ONE_BIT] == [2, 2]
    assert all(r["rate"] is None and r["bytes"] is None for r in record["rows"])  # no interface of their own


@pytest.mark.skipif(not os.path.exists("/proc/net/dev"), reason="needs Linux's counters")
def test_an_interface_is_counted_where_its_ranks_are_known(monkeypatch, tmp_path):
    """Others than these ranks use loopback."""
    counters = tmp_path / "dev"
    counters.write_text("".join(f"{name}: 1 2 3 4 5 6 7 8 900 10\n" for name in ("lo", "eth7")), encoding="ascii")
    monkeypatch.setattr("perf.ranks.Path", lambda _: counters)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for name, each, local, counted in (
        ("eth7", 1, "1", True), ("eth7", 2, "2", True), ("eth7", 1, "2", False), ("lo", 1, "1", False),
    ):  # fmt: skip
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        sent = Ranks(CPU, silent, each).bytes_sent()
        assert sent == 900 if counted else math.isnan(sent)


def test_what_was_not_measured_has_no_target():
    """test_commands.py has the targets of what was."""
    for rows in (FAST, NODES):
        ours = (ONE_BIT, TWO_LEVELS)
        assert targets([replace(r, seconds=None, bytes=None) if r.kind in ours else r for r in rows]) == []


def test_the_table_has_a_line_for_each_kind():
    delayed = [replace(r, rate="100mbit+50ms", seconds=0.125, bytes=0.956e6) for r in FAST]
    lines = table([*FAST, *NODES, *delayed])
    shown = [" ".join(line.replace("|", "").split()) for line in lines.splitlines()[1:]]
    assert shown[0] == "4 1gbit 25,000,000 - 1 bit 112.50 11.20 5.000 30.00 - -"
    assert shown[5] == "2 x 4 1gbit 4,194,304 2 1 bit, two levels 140.00 1.93 0.540 54.44 - -"
    assert shown[9] == "4 100mbit+50ms 25,000,000 - 1 bit 125.00 1.00 0.956 1.00 2.5 0.9"


def test_plots_show_every_rate_and_what_is_there(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    shown, right = {}, plots.lines

    def lines(title, xlabel, ylabel, curves, **options):
        shown[title] = curves
        return right(title, xlabel, ylabel, curves, **options)

    monkeypatch.setattr(plots, "lines", lines)
    rates, sizes = {"100mbit": 0.1, "1gbit": 1.0}, (2**21, 2**22)
    networks = [(hosts, rate, n) for hosts in (2, 4) for rate in (*rates, "unshaped") for n in sizes]
    many = [replace(r, hosts=hosts, rate=rate, elements=n) for r in FAST for hosts, rate, n in networks]
    assert plot(many, "all", tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert shown["Time, 4 ranks, 1gbit"]["fp32"] == [(n, pytest.approx(1260)) for n in sizes]
    faster = [(at, pytest.approx(5.6)) for at in rates.values()]
    assert shown["Speed-up, 4,194,304 elements"]["fp16, 2 hosts"] == faster
    plot([replace(r, bytes=None, rate=None) for r in FAST], "of a group", tmp_path / "group.png")


def test_a_record_has_its_name_and_its_targets(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "draw_if_possible", lambda draw: None)
    for rows, options, says, name in (
        (FAST, [], ": met", ""),
        ([replace(r, seconds=1.0) for r in FAST], [], "missed", ""),
        (FAST, ["--direct", "--in-a-row=20"], ": met", "-in-a-row-20-direct"),
        (NODES, ["--each=4"], "31.1", "-4-ranks-a-host"),
        (NODES, ["--each=4", "--hosts=3"], "31.1", "-4-ranks-a-host-hosts-3"),
    ):
        monkeypatch.setattr(benchmark, "run_lab", lambda *_, rows=rows: [GROUP, *rows])
        assert benchmark.main(["--lab", f"--out={tmp_path}", *options]) == 0
        assert says in capsys.readouterr().out
        record = json.loads((tmp_path / f"all_reduce-some-cpu{name}.json").read_text())
        assert [Row.of(r) for r in record["rows"]] == rows
        assert [t["met"] for t in record["targets"]] == [t.met for t in targets_of(record)] != []


def test_arguments_are_parsed_and_handed_to_ranks(monkeypatch):
    found = []

    def lab(arguments, hosts, each):
        return contextlib.nullcontext(SimpleNamespace(hosts=hosts, each=each, set_link=silent))

    monkeypatch.setattr(benchmark, "open_network", lab)
    monkeypatch.setattr(benchmark, "run_workers", lambda lab, argv, *_: found.append((lab.each, argv)))
    own = ["--elements=2**20,25_000_000", "--chunks=3", "--in-a-row=7", "--direct"]
    for options, each, standard in ([], 1, STANDARD), (["--each=4"], 4, LEVELS), (own, 1, STANDARD):
        parsed = benchmark.parse_arguments(["--lab", *options])
        assert (parsed.each, parsed.hosts, parsed.rates) == (each, standard["hosts"], standard["rates"])
        benchmark.run_lab(parsed, Progress())
        lab_each, argv = found[-1]
        of_rank = benchmark.parse_arguments(argv[2:])
        assert lab_each == of_rank.each == each and of_rank.worker and of_rank.device == "cpu"
        for name in ("elements", "chunks", "in_a_row", "direct", "repeats"):
            assert getattr(of_rank, name) == getattr(parsed, name)
    assert (parsed.elements, parsed.chunks, parsed.in_a_row, parsed.direct) == ([2**20, 25_000_000], 3, 7, True)


def test_direct_replies_and_two_levels_stand_beside_the_others(monkeypatch):
    monkeypatch.setattr(measure, "time_in_turn", lambda ranks, kinds, *_: [kind.row.kind for kind in kinds])
    monkeypatch.setattr(measure, "_compressed", lambda ranks, kind, *_: SimpleNamespace(row=SimpleNamespace(kind=kind)))
    how = benchmark.parse_arguments(["--lab", "--elements=8"])
    ranks = SimpleNamespace(rank=0, device=CPU, size=4, link_rate=None)
    for each, direct, more in (1, False, []), (1, True, [DIRECT]), (4, False, [TWO_LEVELS]):
        ranks.each, how.direct = each, direct
        assert measure.measure(ranks, 8, how) == [ONE_BIT, *more, "4 bits", "8 bits", *KINDS]


def test_kinds_take_turns_and_a_time_is_of_calls_in_a_row():
    """The first turn does not count, and bytes are the least of a turn's: TCP sent some again in the first of b."""
    log = []
    ranks = SimpleNamespace(
        progress=silent,
        barrier=lambda: log.append("barrier"),
        bytes_sent=lambda: 1000 * sum(name in ("a", "b") for name in log) + 500 * (log.count("b") > 3),
        seconds=lambda run: run() and 6.0,
        slowest=tuple,
        most_bytes=float,
    )

    def kind(name):
        return measure.TimedKind(Row(2, None, 8, name), torch.ones(8), torch.zeros(8), lambda: log.append(name))

    rows = measure.time_in_turn(ranks, [kind("a"), kind("b")], repeats=2, in_a_row=3, what="")
    assert [name for name in log if name != "barrier"] == 3 * (["a"] * 3 + ["b"] * 3)
    assert [(r.kind, r.seconds, r.calls, r.bytes) for r in rows] == [(of, 2.0, (2.0, 2.0), 1000.0) for of in "ab"]
