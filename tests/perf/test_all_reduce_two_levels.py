"""The benchmark of the all-reduce with several ranks a host: nodes are found, bytes over a host's link are its
interface's, and both figures of fp32 are told apart.
"""

import contextlib
import io
import json
import os
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist

from onebit.cli.progress import Progress
from onebit.collectives import CompressedAllReduce, all_reduce
from perf.all_reduce import benchmark, measure, report, two_levels
from perf.all_reduce.measure import DIRECT, KINDS, ONE_BIT, TWO_LEVELS, Row
from perf.command import WrongResult
from perf.ranks import Ranks
from tests.ranks import run_ranks_once

CPU = torch.device("cpu")
ELEMENTS = 2**20  # one level's replies are short enough to go straight to their receivers
GROUP = {"device": "Some CPU", "backend": "gloo", "ranks": 8, "threads": 1}


def silent(text):
    pass


def row(kind, seconds, nbytes, elements=2**22, rate="1gbit", **other):
    return Row(2, rate, elements, kind, seconds, (seconds,), nbytes, **{"chunks": 2, "each": 4, **other})


ROWS = [
    row(ONE_BIT, 0.07, 2.16e6),
    row(TWO_LEVELS, 0.14, 0.54e6),
    row("fp32", 0.27, 29.4e6),
    row("fp16", 0.14, 14.7e6),
    row("bf16", 0.14, 14.7e6),
]


@pytest.fixture(scope="module")
def measured(lab_available, tmp_path_factory):
    """One run in the lab, of two hosts of two ranks: its exit status, what it printed, its record and the path."""
    out = tmp_path_factory.mktemp("two_levels")
    arguments = ["--lab", "--each=2", "--rates=1gbit", f"--elements={ELEMENTS}", "--repeats=2", "--chunks=1"]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        status = benchmark.main([*arguments, "--phases", f"--out={out}"])
    (path,) = out.glob("*.json")
    return status, text.getvalue(), json.loads(path.read_text()), path


@pytest.mark.slow
@pytest.mark.netlab
@pytest.mark.timeout(1200)  # four ranks share the cores with other tests
def test_a_host_of_two_sends_half_of_what_its_ranks_would(measured):
    """Over a host's link: with one level 2 bits an element, of which half are replies; with two levels 1."""
    status, text, record, _ = measured
    assert status == 0, text
    sent = {r["kind"]: r["bytes"] for r in record["rows"]}
    assert sent[TWO_LEVELS] == pytest.approx(ELEMENTS / 8, rel=0.1)
    assert 1.85 < sent[ONE_BIT] / sent[TWO_LEVELS] < 2.15
    assert sent["fp32"] == pytest.approx(2 * 3 / 4 * 4 * ELEMENTS, rel=0.05)  # a ring of 4 ranks
    assert 4 * ELEMENTS / sent[TWO_LEVELS] > 28


@pytest.mark.slow
@pytest.mark.netlab
@pytest.mark.timeout(1200)  # four ranks share the cores with other tests
def test_a_run_writes_a_table_a_record_and_a_plot(measured):
    pytest.importorskip("matplotlib")
    _, text, record, path = measured
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert path.name.endswith(f"-2-ranks-a-host-rates-1gbit-elements-{ELEMENTS}-chunks-1.json")
    assert str(path) in text and " 2 x 2        1gbit  1,048,576   1, 1 |" in text
    assert record["ranks"] == 4 and record["lab"]
    assert [r["kind"] for r in record["rows"]] == [ONE_BIT, TWO_LEVELS, *KINDS]
    for r in record["rows"]:
        assert (r["hosts"], r["each"], r["rate"], r["elements"], len(r["calls"])) == (2, 2, "1gbit", ELEMENTS, 2)
    assert {"node mean", "spread"} <= record["rows"][1]["phases"].keys()
    assert not {"node mean", "spread"} & record["rows"][0]["phases"].keys()


class Forgets(CompressedAllReduce):
    """No error feedback."""

    def __call__(self, x):
        super().__call__(x)
        self.exchange.residual.value.zero_()


class NoNodeMean(CompressedAllReduce):
    """A rank's slice of its own tensor stands for its node's mean."""

    def __call__(self, x):
        right, all_reduce.average_slices = all_reduce.average_slices, lambda *_: None
        try:
            super().__call__(x)
        finally:
            all_reduce.average_slices = right


BROKEN = {None: CompressedAllReduce, "forgets": Forgets, "no node mean": NoNodeMean}


def checked(rank, size, each, reply, cases):
    """What `check` says of an all-reduce on hosts of `each` ranks that is broken in a way."""
    os.environ["GROUP_RANK"] = str(rank // each)
    said = []
    for broken, elements, chunks in cases:
        average = BROKEN[broken](elements, chunks=chunks, reply=reply, node_group="auto")
        ranks = Ranks(CPU, silent, each)
        measure.check_levels(ranks, average, TWO_LEVELS)
        try:
            measure.check(ranks, average, elements)
            said.append("")
        except WrongResult as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("reply", [1, pytest.param("direct", marks=pytest.mark.slow)])
def test_results_of_two_levels_are_checked(reply):
    cases = [(None, 1, 1), (None, 100_003, 2), ("forgets", 100_003, 2), ("no node mean", 100_003, 2)]
    for one, odd, *wrong in run_ranks_once(4, checked, (2, reply, cases)):
        assert (one, odd) == ("", "")
        assert all("sum of the results" in text for text in wrong)


def levels(rank, size, cases):
    """What `check_levels` says where ranks are on these hosts, and two were to be on each."""
    said = []
    for hosts, kind in cases:
        os.environ["GROUP_RANK"] = str(hosts[rank])
        average = CompressedAllReduce(1000, chunks=1, node_group="auto")
        try:
            measure.check_levels(Ranks(CPU, silent, 2), average, kind)
            said.append("")
        except WrongResult as error:
            said.append(str(error))
    return said


def test_other_nodes_than_the_hosts_get_no_figure():
    cases = [([0, 0, 1, 1], TWO_LEVELS), ([0, 0, 0, 0], TWO_LEVELS), ([0, 0, 1, 1], ONE_BIT)]
    says = [
        "",
        "1 bit, two levels: 4 nodes of 1 ranks were found where 2 of 2 are",
        "1 bit: 2 nodes of 2 ranks were found where 4 of 1 are",
    ]
    assert run_ranks_once(4, levels, (cases,)) == [says] * 4


@pytest.mark.parametrize(("each", "local", "counted"), [(1, "1", True), (2, "2", True), (1, "2", False)])
@pytest.mark.skipif(not os.path.exists("/proc/net/dev"), reason="needs Linux's counters")
def test_an_interface_is_counted_where_its_ranks_are_known(monkeypatch, each, local, counted):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    assert (Ranks(CPU, silent, each).bytes_sent() is not None) == counted


def test_fp32_is_measured_and_computed():
    (group,) = measure.by_kind(ROWS)
    assert two_levels.least_fp32(group[TWO_LEVELS]) == 4 * 2**22
    assert two_levels.least_fp32(replace(group[TWO_LEVELS], hosts=4)) == 6 * 2**22
    assert two_levels.fewer(group, ONE_BIT) == pytest.approx(4)
    assert two_levels.fewer_than_least(group) == pytest.approx(31.07, abs=0.01)
    head, line, *about = two_levels.table(ROWS).splitlines()[1:]
    assert len(head) == len(line) <= 140
    assert head.split("|")[2].split() == ["fp32", "least", "one", "two"]
    assert line.split("|")[0].split() == ["2", "x", "4", "1gbit", "4,194,304", "2,", "2"]
    assert line.split("|")[1].split() == ["270.0", "140.0", "140.0", "70.0", "140.0"]
    assert line.split("|")[2].split() == ["29.40", "16.78", "2.16", "0.54"]
    assert line.split("|")[3].split() == ["4.00", "31.1", "54.4"]
    assert "as measured" in about[1] and "computed" in about[2]


def test_targets_speak_of_what_was_measured():
    reached = two_levels.targets(ROWS)
    assert [(t.needed, t.met) for t in reached] == [(3.8, True), (28, True)]
    assert str(reached[0]).startswith(
        "4.0 times fewer bytes over a link than one level (2 hosts of 4 ranks, 1gbit, 4,1"
    )
    ring = [replace(r, bytes=1.55e6) if r.kind == ONE_BIT else r for r in ROWS]
    assert [t.met for t in two_levels.targets(ring)] == [False, True]
    many = [replace(r, bytes=0.6e6) if r.kind == TWO_LEVELS else r for r in ROWS]
    assert [t.met for t in two_levels.targets(many)] == [False, False]
    assert [t.needed for t in two_levels.targets([replace(r, each=2) for r in ROWS])] == [28]
    for other in ({"elements": 2**20}, {"bytes": None}):
        assert two_levels.targets([replace(r, **other) for r in ROWS]) == []


def test_the_plot_shows_one_level_two_levels_and_fp32_at_every_rate(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    shown = {}
    right = two_levels.plots.lines

    def lines(title, xlabel, ylabel, curves, **options):
        shown[title] = curves
        return right(title, xlabel, ylabel, curves, **options)

    monkeypatch.setattr(two_levels.plots, "lines", lines)
    rates = {"20mbit": 0.02, "100mbit": 0.1, "1gbit": 1.0}
    rows = [replace(r, rate=rate, elements=n) for n in (2**21, 2**22) for rate in rates for r in ROWS]
    path = two_levels.plot(rows, "title", tmp_path / "plot.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(shown) == [f"2 hosts of 4 ranks, {n} elements" for n in ("2,097,152", "4,194,304")]
    for curves in shown.values():
        assert curves["fp32"] == [(at, 270) for at in rates.values()]
        assert curves["1 bit, one level"] == [(at, pytest.approx(70)) for at in rates.values()]
        assert curves["1 bit, two levels"] == [(at, pytest.approx(140)) for at in rates.values()]
    unshaped = [replace(r, rate="unshaped") for r in ROWS]
    assert two_levels.plot(unshaped, "title", tmp_path / "unshaped.png").exists()


def test_a_run_has_its_own_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "run_lab", lambda *_: (ROWS, GROUP))
    assert benchmark.main(["--lab", "--each=4", f"--out={tmp_path}", "--check"]) == 0
    record = json.loads((tmp_path / "all_reduce-some-cpu-4-ranks-a-host.json").read_text())
    assert [Row.of(r) for r in record["rows"]] == ROWS
    assert [t["met"] for t in record["targets"]] == [True, True]
    assert "31.1" in capsys.readouterr().out
    assert benchmark.main(["--lab", "--each=4", "--hosts=3", f"--out={tmp_path}"]) == 0
    assert (tmp_path / "all_reduce-some-cpu-4-ranks-a-host-hosts-3.json").exists()


def test_rows_of_before_are_of_one_rank_a_host():
    fields = {name: value for name, value in asdict(ROWS[0]).items() if name != "each"}
    assert Row.of(fields).each == 1


def test_arguments_are_parsed():
    parsed = benchmark.parse_arguments(["--lab", "--each=4"])
    assert (parsed.each, parsed.hosts, parsed.elements) == (4, [2], two_levels.STANDARD["elements"])
    alone = benchmark.parse_arguments(["--lab"])
    assert (alone.each, alone.hosts, alone.elements) == (1, [4], report.STANDARD["elements"])
    assert alone.rates == report.STANDARD["rates"]
    for arguments, options in ((["--lab", "--each=4"], ["--each=4"]), (["--lab"], ["--each=1"])):
        assert set(options) <= set(handed_to_ranks(arguments))


def handed_to_ranks(arguments):
    """The command line of a rank of the lab; it reads what the benchmark was given."""
    found = []

    class Lab:
        def __init__(self, hosts, each):
            self.hosts, self.each = hosts, each

        def set_link(self, rate):
            pass

    def run_workers(lab, argv, network, timeout, progress, on_result):
        assert lab.each == parsed.each
        found[:] = argv
        on_result(json.dumps({"rows": [], "group": {}}))

    parsed = benchmark.parse_arguments(arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "NetworkLab", lambda hosts, each: contextlib.nullcontext(Lab(hosts, each)))
        patch.setattr(benchmark, "run_workers", run_workers)
        benchmark.run_lab(parsed, Progress())
    of_rank = benchmark.parse_arguments(found[2:])
    assert of_rank.worker and of_rank.elements == benchmark.parse_arguments(arguments).elements
    return found


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--each=2"], "--each: only with --lab"),
        (["--lab", "--each=2", "--direct"], "--direct: only with one rank a host"),
        (["--lab", "--each=0"], "'0' is not a positive number"),
        (["--lab", "--each=two"], "'two' is not a positive number"),
    ],
)
def test_wrong_arguments_are_refused(arguments, says, capsys):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_too_many_ranks_a_host_are_refused(tmp_path, capsys):
    assert benchmark.main(["--lab", "--each=65", f"--out={tmp_path}"]) == 2
    assert "1 to 64 ranks" in capsys.readouterr().err


def test_direct_replies_stand_beside_both(monkeypatch):
    none = torch.zeros(0)
    made = measure.TimedKind

    def compressed(ranks, kind, reply, *_):
        return made(kind, none, none, reply)

    monkeypatch.setattr(measure, "_compressed", compressed)
    monkeypatch.setattr(measure, "_uncompressed", lambda ranks, kind, *_: made(kind, none, none, None))
    monkeypatch.setattr(measure, "time_in_turn", lambda ranks, kinds, *_: [(kind.row, kind.run) for kind in kinds])
    how = benchmark.parse_arguments(["--lab", "--elements=8"])

    class OfHosts:
        rank, device = 0, CPU

    ranks = OfHosts()
    for each, direct, first in (
        (1, False, [(ONE_BIT, 1)]),
        (1, True, [(ONE_BIT, 1), (DIRECT, "direct")]),
        (4, False, [(ONE_BIT, 1), (TWO_LEVELS, "auto")]),
    ):
        ranks.each, how.direct = each, direct
        assert measure.measure(ranks, 8, how) == [*first, *((kind, None) for kind in KINDS)]


def test_kinds_take_turns_and_a_time_is_of_calls_in_a_row():
    """The first turn does not count, and a kind that the backend can't add stands where it was, with its error."""
    log = []

    class OfHosts:
        rank, each, device = 0, 1, CPU

        def progress(self, text):
            pass

        def barrier(self):
            log.append("barrier")

        def bytes_sent(self):
            return 1000 * sum(name in ("a", "b") for name in log)

        def seconds(self, run):
            run()
            return 6.0

        def slowest(self, values):
            return tuple(values)

    def kind(name):
        return measure.TimedKind(Row(2, None, 8, name), torch.ones(8), torch.zeros(8), lambda: log.append(name))

    rows = measure.time_in_turn(OfHosts(), [kind("a"), kind("b")], repeats=2, in_a_row=3, what="")
    assert [name for name in log if name != "barrier"] == 3 * (["a"] * 3 + ["b"] * 3)
    assert [(row.kind, row.seconds, row.calls, row.bytes) for row in rows] == [
        ("a", 2.0, (2.0, 2.0), 1000.0),
        ("b", 2.0, (2.0, 2.0), 1000.0),
    ]
