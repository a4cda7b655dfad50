"""The cluster model against the papers' tables and the lab: transcription, fits, errors, page and record."""

import contextlib
import io
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from onebit.cli.plan.model import Cluster, compressed_all_reduce
from onebit.cli.plan.options import CLUSTER_OPTIONS, CLUSTERS
from perf import plots
from perf.all_reduce.measure import ONE_BIT, TWO_LEVELS, Row
from perf.cluster import comparison, delays, nodes, papers
from perf.cluster.papers import ADAM_TABLE, BAND, LAMB_TABLE, LARGE_ERROR, PROFILES, Compared, median_error
from perf.cluster.report import page
from perf.lab.rates import PAYLOAD
from perf.records import RESULTS

ROOT = Path(__file__).resolve().parents[2]
REDUCES, SPEED_UPS = papers.all_reduces(), papers.speed_ups()


def test_the_tables_are_copied_right():
    """They give the share of the all-reduce too, rounded or cut to a whole number."""
    assert [sum(row.source == source for row in PROFILES) for source in (ADAM_TABLE, LAMB_TABLE)] == [13, 18]
    for row in PROFILES:
        total = row.forward + row.all_reduce + row.backward + row.step
        assert abs(100 * row.all_reduce / total - row.percent) < 1, row
        on_node = {"Ethernet": 4, "InfiniBand": 8}[row.network]
        assert row.gpus == row.nodes * on_node
        assert row.batch % (row.gpus * row.accumulation) == 0


def test_presets_are_what_the_fitted_rows_give():
    fitted = papers.fitted_constants()
    assert set(fitted) == {"Ethernet intra", "InfiniBand intra", "InfiniBand network"}
    for name, value in fitted.items():
        network, constant = name.split()
        preset = CLUSTER_OPTIONS[constant].parse(CLUSTERS[f"{network.lower()}-v100"][constant])
        assert preset == pytest.approx(value, rel=0.002)
    used = [row for row in REDUCES if row.fitted]
    assert len(used) == 3 and all(abs(row.error) < 0.003 for row in used)


def test_the_papers_all_reduces_and_speed_ups_are_predicted():
    of_lamb = [row for row in REDUCES if row.what.startswith(LAMB_TABLE)]
    stage_2 = [row for row in SPEED_UPS if row.what.endswith("stage 2")]
    for rows in (REDUCES, of_lamb, papers.counted_once(REDUCES), stage_2):
        assert median_error(rows) <= BAND["papers"]
    for row in REDUCES:
        assert bool(row.note) == (abs(row.error) > LARGE_ERROR), row
    assert [row.measured for row in stage_2] == [5.48, 6.17, 4.5, 3.0]
    assert all(abs(row.error) <= BAND["papers"] for row in SPEED_UPS)
    assert papers.end_to_end(4.5, 1000 / 5993) == pytest.approx(2.8, abs=0.05)  # the paper's own arithmetic
    assert papers.end_to_end(3.0, papers.WARMUP_512) == pytest.approx(2.2, abs=0.05)


def test_fitted_rows_do_not_count_and_rows_of_one_cluster_count_once():
    rows = [Compared("a", 1, 1, fitted=True), Compared("b", 3, 2), Compared("c", 1, 2)]
    assert [row.error for row in rows] == [0, 0.5, -0.5] and median_error(rows) == 0.5
    (one,) = papers.counted_once([Compared(f"x, batch {i}", 10, found) for i, found in enumerate((8, 10, 20))])
    assert one.measured == 10 and one.error == 0


ABOUT = {"device": "Some CPU", "cpu_count": 1, "load_before": 0.1, "measured": "2026-01-01", "repeats": 2}


def lab_record(slower=1.0):
    """Of two ranks that take just what the model says; the compressed ones `slower` times that."""
    rates = dict.fromkeys(comparison.PASSES, 4e9)
    cluster = Cluster(gpus=2, gpus_per_node=1, network=0.956e9, latency=1e-4, rates=rates, cores=0.5, transport="gloo")
    compressed = slower * compressed_all_reduce(2**23, cluster, chunks=2, reply=1)
    rows = [
        Row(2, "1gbit", 1024, "fp32", 3e-4, (3e-4, 2e-4)),
        Row(2, "1gbit", 1024, "fp16", 9e-4, (2e-4, 9e-4)),
        Row(2, "1gbit", 2**23, ONE_BIT, 9.0, (9.0, compressed), chunks=2),
        Row(2, "1gbit", 2**23, "fp32", 9.0, (cluster.all_reduce(2**25), 9.0)),
        Row(2, "1gbit", 2**23, "fp16", 9.0, (cluster.all_reduce(2**24), 9.0)),
    ]
    found = {"pass_bytes_per_s": {"2": rates}, "latency_s": comparison.latency(rows)}
    return ABOUT | found | {"rows": [asdict(row) for row in rows]}


def test_the_lab_is_compared_with_the_least_of_its_calls():
    record = lab_record(slower=1.25)
    assert record["latency_s"] == pytest.approx(1e-4)  # two messages one after the other
    rows = comparison.compare(json.loads(json.dumps(record)))
    assert [row.what.partition(":")[0] for row in rows] == [ONE_BIT, "fp32", "fp16"]
    assert [row.error for row in rows] == pytest.approx([-0.2, 0, 0])
    more_cores = comparison.compare(record | {"cpu_count": 2})
    assert more_cores[0].predicted < rows[0].predicted and more_cores[1].predicted == rows[1].predicted


def test_a_median_error_above_its_target_is_an_error_with_check(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw_if_possible", lambda draw: None)
    arguments = [f"--out={tmp_path}", f"--page={tmp_path / 'docs' / 'page.md'}"]
    for slower, status, verdict in ((1.0, 0, "met"), (2.0, 1, "missed")):
        (tmp_path / "cluster_model-lab-some-cpu.json").write_text(json.dumps(lab_record(slower)))
        assert comparison.main(arguments) == 0
        assert comparison.main([*arguments, "--check"]) == status
        lines = capsys.readouterr().out.splitlines()
        assert [line.rpartition(": ")[2] for line in lines if "some-cpu.json, 1 bit" in line] == [verdict] * 2
        assert f"to be reached: {verdict}. From [cluster_model-lab" in (tmp_path / "docs" / "page.md").read_text()


def nodes_record(slower=1.0):
    """Of 2 hosts of 4 ranks that take just what the model says; two levels `slower` times that."""
    rates, hop, intra = dict.fromkeys(comparison.PASSES, 4e9), 5e-5, 2e9
    cluster = Cluster(
        gpus=8, gpus_per_node=4, network=0.956e8, latency=1e-4, intra=intra, intra_latency=hop, rates=rates, cores=0.25,
        transport="gloo",
    )  # fmt: skip
    took = {
        ONE_BIT: compressed_all_reduce(2**23, cluster, chunks=2, reply=1),
        TWO_LEVELS: slower * compressed_all_reduce(2**23, cluster, chunks=2, levels=2),
    }
    rows = [Row(2, "100mbit", 2**23, kind, 9.0, (9.0, seconds), chunks=2, each=4) for kind, seconds in took.items()]
    means = {1024: (1, 3 * hop), 2**21: (2, 2 * 3 * hop + 3 / 4 * 4 * 2**21 / intra)}
    rows += [
        Row(2, "100mbit", elements, TWO_LEVELS, 1.0, (1.0,), chunks=chunks, phases={"node mean": mean}, each=4)
        for elements, (chunks, mean) in means.items()
    ]
    shape = {"pass_bytes_per_s": rates, "latency_s": 1e-4, "rows": [asdict(row) for row in rows]}
    return ABOUT | {"cpu_count": 2, "shapes": {"2x4": shape}}


def test_hosts_of_several_ranks_are_compared_by_what_smaller_calls_say_of_a_host(tmp_path):
    rows = nodes.compare(json.loads(json.dumps(nodes_record(slower=1.25))))
    assert [row.what.partition(":")[0] for row in rows] == [ONE_BIT, TWO_LEVELS]
    assert [row.error for row in rows] == pytest.approx([0, -0.2])
    assert rows[1].predicted < rows[0].predicted
    (tmp_path / "cluster_model-nodes-some-cpu.json").write_text(json.dumps(nodes_record()))
    where = tmp_path / "page.md"
    assert comparison.main([f"--out={tmp_path}", f"--page={where}", "--check"]) == 0
    assert "| 1 bit, two levels: 2 x 4, 100mbit, 8,388,608 elements |" in where.read_text()
    pytest.importorskip("matplotlib")
    for name in ("papers", "plan", "nodes-some-cpu"):
        assert (tmp_path / f"cluster_model-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_is_up_to_date():
    """docs/cluster_model.md is what the command writes from the model, the tables and the records as they are."""
    where, out = ROOT / comparison.PAGE, ROOT / RESULTS
    made = page(REDUCES, SPEED_UPS, comparison.lab_records(out), where, out, delays.compared(out))
    assert where.read_text() == made, "run python -m perf.cluster"


def test_passes_are_measured():
    rates = comparison.pass_rates(3, 2**16)
    assert set(rates) == set(comparison.PASSES) and all(rate > 0 for rate in rates.values())


@pytest.mark.netlab
def test_a_small_lab(lab_available, tmp_path):
    arguments = ["--lab", "--hosts=2", "--rates=50mbit", "--elements=2**20", "--repeats=2", f"--out={tmp_path}"]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert comparison.main([*arguments, f"--page={tmp_path / 'page.md'}"]) == 0
    (path,) = tmp_path.glob("cluster_model-lab-*.json")
    record = json.loads(path.read_text())
    assert str(path) in text.getvalue() and path.name in (tmp_path / "page.md").read_text()
    assert record["cpu_count"] == os.cpu_count() and record["latency_s"] > 0
    rows = {row.what.partition(":")[0]: row for row in comparison.compare(record)}
    assert set(rows) == {ONE_BIT, "fp32", "fp16"}
    calls = {row["kind"]: row["calls"] for row in record["rows"] if row["elements"] == 2**20}
    cluster = Cluster(gpus=2, gpus_per_node=1, network=PAYLOAD * 50e6, latency=record["latency_s"], transport="gloo")
    for kind, size in (("fp32", 4), ("fp16", 2)):
        assert len(calls[kind]) == 2 and rows[kind].measured == 1e3 * min(calls[kind])
        assert rows[kind].predicted == pytest.approx(1e3 * cluster.all_reduce(2**20 * size))


def test_links_with_a_delay_are_predicted():
    """The committed records: 50 ms, and the same transport without a delay."""
    links = delays.compared(ROOT / RESULTS)
    far = {row.what: row for row in links[delays.WITH]}
    assert {what.partition(":")[0] for what in far} == {ONE_BIT, "fp32", "fp16"} and len(far) == 6
    assert all("+50ms, " in what and "4 hosts" in what for what in far)
    assert median_error(links[delays.WITH]) <= 0.05 and all(abs(row.error) <= 0.15 for row in far.values())
    assert len(links[delays.WITHOUT]) >= 27 and not any("ms, " in row.what for row in links[delays.WITHOUT])
    assert median_error(links[delays.WITHOUT]) <= BAND["lab"]


def test_errors_with_a_delay_are_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw_if_possible", lambda draw: None)
    record, lab = lab_record(), tmp_path / delays.LAB
    lab.write_text(json.dumps(record))
    far = [{**row, "rate": "1gbit+10ms"} for row in record["rows"]]
    (tmp_path / delays.ALL_REDUCES.replace("*", "far")).write_text(json.dumps({**record, "rows": far}))
    arguments = [f"--out={tmp_path}", f"--page={tmp_path / 'page.md'}"]
    assert comparison.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("all-reduces with a delay: median error ")]
    assert line.endswith("to reach 20 %: missed")  # 10 ms that these rows do not have
    assert comparison.main([*arguments, "--check"]) == 1
    assert "## Links with a delay" in (tmp_path / "page.md").read_text()
    lab.unlink()
    assert delays.compared(tmp_path) == {}
