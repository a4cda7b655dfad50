"""The benchmark of the all-reduce: bytes by the interfaces' counters, a record, a plot, and no figure from a wrong
result.
"""

import contextlib
import io
import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from onebit.collectives import CompressedAllReduce
from perf.all_reduce import benchmark, measure, report
from perf.all_reduce.measure import KINDS, ONE_BIT, Row
from perf.command import WrongResult
from perf.lab import network
from perf.lab.namespaces import LabUnavailable
from perf.ranks import Ranks
from tests.ranks import run_ranks, run_ranks_once

CPU = torch.device("cpu")
ELEMENTS = 2**21


def silent(text):
    pass


def row(kind=ONE_BIT, seconds=1.0, nbytes=1e6, hosts=4, rate="1gbit", elements=25_000_000, **other):
    return Row(hosts, rate, elements, kind, seconds, (seconds,), nbytes, **other)


FAST = [row(ONE_BIT, 0.1125, 5e6), row("fp32", 1.26, 150e6), row("fp16", 0.63, 75e6), row("bf16", 0.63, 75e6)]
SMALL = [replace(r, elements=2**16) for r in FAST]


@pytest.fixture(scope="module")
def measured(lab_available, tmp_path_factory):
    """One run in the lab: its exit status, what it printed, its record and the path of that."""
    out = tmp_path_factory.mktemp("all_reduce") / "new"
    arguments = ["--lab", "--rates=1gbit", f"--elements={ELEMENTS}", "--repeats=2", "--phases", "--check"]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        status = benchmark.main([*arguments, f"--out={out}"])
    (path,) = out.glob("*.json")
    return status, text.getvalue(), json.loads(path.read_text()), path


@pytest.mark.slow
@pytest.mark.netlab
def test_bytes_on_the_wire_by_the_interfaces_counters(measured):
    status, text, record, _ = measured
    assert status == 0, text  # --check
    sent = {r["kind"]: r["bytes"] for r in record["rows"]}
    assert sent[ONE_BIT] <= sent["fp32"] / 28
    assert sent[ONE_BIT] <= sent["fp16"] / 14
    assert sent["fp32"] == pytest.approx(2 * 3 / 4 * 4 * ELEMENTS, rel=0.02)  # it is the counter of these calls
    assert [t["needed"] for t in record["targets"]] == [28, 14]
    assert all(t["met"] and t["reached"] >= t["needed"] for t in record["targets"])


@pytest.mark.netlab
@pytest.mark.slow
def test_a_run_writes_a_table_a_record_and_a_plot(measured):
    pytest.importorskip("matplotlib")
    _, text, record, path = measured
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert path.name.startswith("all_reduce-") and path.name.endswith(f"-rates-1gbit-elements-{ELEMENTS}.json")
    assert str(path) in text and f"{ELEMENTS:,}" in text and "met" in text and "compress" in text
    assert record["backend"] == "gloo" and record["ranks"] == 4 and record["threads"] == 1 and record["lab"]
    assert record["versions"]["torch"] == torch.__version__
    assert record["cpu"] and record["cpu_count"] and "load_before" in record
    assert [r["kind"] for r in record["rows"]] == [ONE_BIT, *KINDS]
    for r in record["rows"]:
        assert (r["hosts"], r["rate"], r["elements"], len(r["calls"])) == (4, "1gbit", ELEMENTS, 2)
        assert min(r["calls"]) <= r["seconds"] <= max(r["calls"]) and r["error"] is None
    compressed = record["rows"][0]
    assert compressed["chunks"] in (1, 2, 4, 8)
    assert {"scan", "compress", "all-to-all", "average", "all-gather", "decode"} <= compressed["phases"].keys()


@pytest.mark.slow
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
    arguments = ["--lab", "--hosts=2", "--rates=unshaped", "--elements=5000", f"--out={out}"]
    assert benchmark.main(arguments) == 1
    captured = capsys.readouterr()
    assert "no figures, since a result is wrong: 2 hosts, unshaped: the ranks' results" in captured.err
    assert not captured.out and not any(out.iterdir())


def checked(rank, size, broken, elements, chunks):
    """What `check` says of an all-reduce, and of one that is broken in a way."""
    kind = {None: CompressedAllReduce, "zeros": Zeros, "forgets": Forgets, "differs": Differs, "nan": NotANumber}[
        broken
    ]
    average = kind(elements, chunks=chunks)
    try:
        measure.check(Ranks(CPU, silent), average, elements)
    except WrongResult as error:
        return str(error)
    return ""


class Zeros(CompressedAllReduce):
    def __call__(self, x):
        super().__call__(x)
        x.zero_()


class Forgets(CompressedAllReduce):
    """No error feedback."""

    def __call__(self, x):
        super().__call__(x)
        self.exchange.residual.value.zero_()


class Differs(CompressedAllReduce):
    def __call__(self, x):
        super().__call__(x)
        x[-1] += 1e-3 * self.transport.rank


class NotANumber(CompressedAllReduce):
    def __call__(self, x):
        super().__call__(x)
        x.fill_(math.nan)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("zeros", "sum of the results"),
        ("forgets", "sum of the results"),
        ("differs", "differ after call 1"),
        ("nan", "differs from the sum"),
    ],
)
def test_a_broken_all_reduce_is_found_on_every_rank(broken, says):
    found = run_ranks(8, checked, broken, 100_003, 2)
    assert len(set(found)) == 1
    assert says in found[0]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("elements", [1, 2049, 100_003])
def test_a_right_all_reduce_passes_the_check(elements, chunks):
    assert run_ranks(8, checked, None, elements, chunks) == [""] * 8


def main_on_a_group(rank, size, arguments):
    return benchmark.main(arguments)


def test_it_measures_on_the_group_it_finds(tmp_path):
    arguments = ["--device=cpu", "--elements=1000,50_000", "--repeats=2", "--chunks=2", f"--out={tmp_path}"]
    assert run_ranks_once(2, main_on_a_group, (arguments,)) == [0, 0]
    (path,) = tmp_path.glob("*.json")
    assert path.name.endswith("-gloo-2-ranks-elements-1000-50000-chunks-2.json")
    record = json.loads(path.read_text())
    assert not record["lab"] and record["ranks"] == 2 and record["targets"] == []
    assert [r["chunks"] for r in record["rows"] if r["kind"] == ONE_BIT] == [2, 2]
    for r in record["rows"]:
        assert r["seconds"] > 0 and r["rate"] is None
        assert r["bytes"] is None  # no interface of their own


def refusing(rank, size, arguments):
    right = measure.dist.all_reduce

    def refuse(tensor, *args, **kwargs):
        if tensor.dtype == torch.bfloat16:
            raise RuntimeError("Invalid scalar type")
        return right(tensor, *args, **kwargs)

    measure.dist.all_reduce = refuse
    return benchmark.main(arguments)


def test_a_type_that_the_backend_refuses_is_said_and_not_estimated(tmp_path):
    arguments = ["--device=cpu", "--elements=1000", "--repeats=1", "--chunks=1", f"--out={tmp_path}"]
    assert run_ranks_once(2, refusing, (arguments,)) == [0, 0]
    (path,) = tmp_path.glob("*.json")
    rows = {r["kind"]: r for r in json.loads(path.read_text())["rows"]}
    assert rows["bf16"]["seconds"] is None and rows["bf16"]["error"] == "Invalid scalar type"
    assert rows["fp16"]["seconds"] > 0
    assert "bf16 was not measured: Invalid scalar type" in report.table([Row(**r) for r in rows.values()])


def test_targets_speak_of_what_was_measured():
    met = report.targets(FAST)
    assert [(t.needed, t.met) for t in met] == [(11, True), (28, True), (14, True)]
    assert met[0].reached == pytest.approx(11.2)
    assert str(met[0]).startswith("11.2 times as fast as fp32 (4 hosts, 1gbit") and str(met[0]).endswith(
        "to reach 11: met"
    )
    slow = [replace(r, rate="100mbit") for r in FAST]
    assert next((t.needed, t.met) for t in report.targets(slow)) == (25, False)
    assert str(report.targets(slow)[0]).endswith("to reach 25: missed")
    latency = [replace(r, elements=2**18) for r in FAST]
    assert [t.needed for t in report.targets(latency)] == [1]
    for other in ({"hosts": 2}, {"rate": "2gbit"}, {"elements": 2**24}, {"rate": None}):
        assert [t.needed for t in report.targets([replace(r, **other) for r in FAST])] == [28, 14]
    assert report.targets(SMALL) == []
    assert report.targets([replace(r, seconds=None, bytes=None) for r in FAST]) == []


@pytest.mark.slow
def test_a_missed_target_is_an_error_only_with_check(tmp_path, monkeypatch, capsys):
    group = {"device": "Some CPU", "backend": "gloo", "ranks": 4, "threads": 1}
    slow = [replace(r, seconds=1.0) for r in FAST]
    for rows, status, says in ((FAST, 0, "met"), (slow, 1, "missed"), (SMALL, 1, "no target speaks")):
        monkeypatch.setattr(benchmark, "run_lab", lambda *_, rows=rows: (rows, group))
        assert benchmark.main(["--lab", f"--out={tmp_path}"]) == 0
        assert benchmark.main(["--lab", f"--out={tmp_path}", "--check"]) == status
        captured = capsys.readouterr()
        assert says in captured.out + captured.err
    assert (tmp_path / "all_reduce-some-cpu.json").exists()


def test_every_panel_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    many = [
        replace(r, hosts=hosts, rate=rate, elements=elements)
        for r in FAST
        for hosts in (2, 4)
        for rate in ("100mbit", "1gbit", "unshaped")
        for elements in (2**16, 25_000_000)
    ]
    without_bytes = [replace(r, bytes=None, rate=None) for r in FAST]
    for name, rows in (("all", many), ("one", FAST), ("group", without_bytes)):
        path = tmp_path / f"{name}.png"
        report.plot(rows, name, path)
        assert path.read_bytes().startswith(b"\x89PNG")
    assert len(report.table(many).splitlines()) == 2 + 2 * 3 * 2
    assert all(len(line) <= 140 for line in report.table(many).splitlines())


def test_rows_survive_json():
    before = row(phases={"scan": 0.1}, chunks=2)
    after = json.loads(json.dumps(asdict(before)))
    assert Row.of(after) == before


def test_arguments_are_parsed():
    parsed = benchmark.parse_arguments(
        ["--lab", "--hosts=2,8", "--rates=100mbit,2.5Gbit,unshaped", "--elements=2**20,25_000_000", "--chunks=3"]
    )
    assert parsed.hosts == [2, 8] and parsed.rates == ["100mbit", "2.5gbit", "unshaped"]
    assert parsed.elements == [2**20, 25_000_000] and parsed.chunks == 3
    assert benchmark.parse_arguments(["--lab"]).chunks == "auto"
    assert benchmark.parse_arguments(["--lab"]).hosts == [4]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lab", "--hosts=1"], "not a number of hosts: give 2 to 64"),
        (["--lab", "--hosts=two"], "not a number of hosts"),
        (["--lab", "--rates=1gbyte"], "no rate from 1mbit to 100gbit"),
        (["--elements=2**20,many"], "'many' is not a positive number"),
        (["--chunks=0"], "'0' is not a positive number"),
        (["--repeats=0"], "'0' is not a positive number"),
        (["--hosts=2"], "--hosts: only with --lab"),
        (["--lab", "--device=cpu", "--backend=gloo"], "--device and --backend: only without --lab"),
    ],
)
def test_wrong_arguments_are_refused(arguments, says, capsys):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_an_unwritable_folder_is_refused_before_measuring(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(benchmark, "run_lab", lambda *_: pytest.fail("it measured"))
    assert benchmark.main(["--lab", f"--out={tmp_path / 'file'}"]) == 2
    assert "is no folder to write to" in capsys.readouterr().err


def test_without_a_group_or_a_lab_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert benchmark.main(["--device=cpu", f"--out={tmp_path}"]) == 2
    assert "start it with torchrun, or give it --lab" in capsys.readouterr().err

    def unavailable():
        raise LabUnavailable("the network lab needs Linux, not darwin: run it there, as root")

    monkeypatch.setattr(network, "check_available", unavailable)
    assert benchmark.main(["--lab", f"--out={tmp_path}"]) == 2
    assert "perf.all_reduce: error: the network lab needs Linux" in capsys.readouterr().err
