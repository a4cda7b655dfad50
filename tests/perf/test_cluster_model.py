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
from perf.all_reduce.ranks import ONE_BIT, Row
from perf.cluster import comparison as cluster_model
from perf.cluster import papers as cluster_papers
from perf.cluster.papers import BAND, LARGE_ERROR, PROFILES, Compared, median_error
from perf.cluster.plots import plot_lab, plot_papers
from perf.cluster.report import page
from perf.lab.network import LabUnavailable, NetworkLab

ROOT = Path(__file__).resolve().parents[2]
REDUCES, SPEED_UPS = cluster_papers.all_reduces(), cluster_papers.speed_ups()


@pytest.mark.parametrize("row", PROFILES, ids=lambda row: f"{row.source}-{row.network}-{row.gpus}-{row.batch}")
def test_a_row_is_copied_right(row):
    """The tables give the share of the all-reduce too, rounded or cut to a whole number."""
    total = row.forward + row.all_reduce + row.backward + row.step
    assert abs(100 * row.all_reduce / total - row.percent) < 1
    on_node = {"Ethernet": 4, "InfiniBand": 8}[row.network]
    assert row.gpus == row.nodes * on_node
    assert row.batch % (row.gpus * row.accumulation) == 0


def test_both_tables_are_whole():
    assert [sum(row.source == source for row in PROFILES) for source in ("001, Table 1", "003, Table 5")] == [13, 18]


def test_presets_are_what_the_fitted_rows_give():
    fitted = cluster_papers.fitted_constants()
    assert set(fitted) == {"Ethernet intra", "InfiniBand intra", "InfiniBand network"}
    for name, value in fitted.items():
        network, constant = name.split()
        preset = CLUSTER_OPTIONS[constant].parse(CLUSTERS[f"{network.lower()}-v100"][constant])
        assert preset == pytest.approx(value, rel=0.002)
    used = [row for row in REDUCES if row.fitted]
    assert len(used) == 3 and all(abs(row.error) < 0.003 for row in used)


def test_the_papers_all_reduces_are_predicted():
    assert median_error(REDUCES) <= BAND["papers"]
    assert median_error([row for row in REDUCES if row.what.startswith("003")]) <= BAND["papers"]
    assert median_error(cluster_papers.counted_once(REDUCES)) <= BAND["papers"]
    for row in REDUCES:
        assert bool(row.note) == (abs(row.error) > LARGE_ERROR), row


def test_outliers_are_what_their_notes_say():
    times = {(row.source, row.network, row.nodes): row.all_reduce for row in PROFILES}
    for nodes in (4, 8, 16):
        ratio = times["003, Table 5", "Ethernet", nodes] / times["001, Table 1", "Ethernet", nodes]
        assert 1.5 <= round(ratio, 1) <= 1.6
    assert times["001, Table 1", "InfiniBand", 1] < 29 < 167 == times["003, Table 5", "InfiniBand", 1]


def test_the_papers_speed_ups_are_predicted():
    stage_2 = [row for row in SPEED_UPS if row.what.endswith("stage 2")]
    assert [row.measured for row in stage_2] == [5.48, 6.17, 4.5, 3.0]
    assert median_error(stage_2) <= BAND["papers"] and all(abs(row.error) <= BAND["papers"] for row in SPEED_UPS)
    assert cluster_papers.end_to_end(4.5, 1000 / 5993) == pytest.approx(2.8, abs=0.05)  # the paper's own arithmetic
    assert cluster_papers.end_to_end(3.0, cluster_papers.WARMUP_512) == pytest.approx(2.2, abs=0.05)


def test_fitted_rows_do_not_count():
    rows = [
        Compared("a", 1, 1, fitted=True),
        Compared("b", 3, 2),
        Compared("c", 1, 2),
        Compared("d", 2, 2, fitted=True),
    ]
    assert [row.error for row in rows] == [0, 0.5, -0.5, 0] and median_error(rows) == 0.5


def test_rows_of_one_cluster_count_once():
    rows = [Compared(f"x, batch {i}", 10, measured) for i, measured in enumerate((8, 10, 20))]
    (one,) = cluster_papers.counted_once(rows)
    assert one.measured == 10 and one.error == 0


def lab_record(slower=1.0):
    """Of two ranks that take just what the model says; the compressed ones `slower` times that."""
    rates = dict.fromkeys(cluster_model.PASSES, 4e9)
    cluster = Cluster(gpus=2, gpus_per_node=1, network=0.956e9, latency=1e-4, rates=rates, cores=0.5)
    compressed = slower * compressed_all_reduce(2**23, cluster, chunks=2)
    rows = [
        Row(2, "1gbit", 1024, "fp32", 3e-4, (3e-4, 2e-4)),
        Row(2, "1gbit", 1024, "fp16", 9e-4, (2e-4, 9e-4)),
        Row(2, "1gbit", 2**23, ONE_BIT, 9.0, (9.0, compressed), chunks=2),
        Row(2, "1gbit", 2**23, "fp32", 9.0, (cluster.all_reduce(2**25), 9.0)),
        Row(2, "1gbit", 2**23, "fp16", 9.0, (cluster.all_reduce(2**24), 9.0)),
    ]
    about = {"device": "Some CPU", "cpu_count": 1, "load_before": 0.1, "measured": "2026-01-01", "repeats": 2}
    found = {"pass_bytes_per_s": {"2": rates}, "latency_s": cluster_model.latency(rows)}
    return about | found | {"rows": [asdict(row) for row in rows]}


def test_the_lab_is_compared_with_the_least_of_its_calls():
    record = lab_record(slower=1.25)
    assert record["latency_s"] == pytest.approx(1e-4)  # two messages one after the other
    rows = cluster_model.compare(json.loads(json.dumps(record)))
    assert [row.what.partition(":")[0] for row in rows] == [ONE_BIT, "fp32", "fp16"]
    assert [row.error for row in rows] == pytest.approx([-0.2, 0, 0])
    more_cores = cluster_model.compare(record | {"cpu_count": 2})
    assert more_cores[0].predicted < rows[0].predicted and more_cores[1].predicted == rows[1].predicted


@pytest.mark.parametrize("slower, status, verdict", [(1.0, 0, "met"), (2.0, 1, "missed")])
def test_a_median_error_above_its_target_is_an_error_with_check(slower, status, verdict, tmp_path, capsys):
    (tmp_path / "cluster_model-lab-some-cpu.json").write_text(json.dumps(lab_record(slower)))
    arguments = [f"--out={tmp_path}", f"--page={tmp_path / 'docs' / 'page.md'}"]
    assert cluster_model.main(arguments) == 0
    assert cluster_model.main([*arguments, "--check"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in lines if "some-cpu.json, 1 bit" in line] == [verdict] * 2
    assert f"to be reached: {verdict}. From [cluster_model-lab" in (tmp_path / "docs" / "page.md").read_text()


def test_the_page_is_up_to_date():
    """docs/cluster_model.md is what the command writes from the model, the tables and the records as they are."""
    where, out = ROOT / cluster_model.PAGE, ROOT / cluster_model.RESULTS
    labs = {path: (record, cluster_model.compare(record)) for path, record in cluster_model.lab_records(out).items()}
    assert where.read_text() == page(REDUCES, SPEED_UPS, labs, where, out), "run python -m perf.cluster"


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    plot_papers(REDUCES, SPEED_UPS, tmp_path / "papers.png")
    plot_lab(cluster_model.compare(lab_record()), "Some CPU", tmp_path / "lab.png")
    for name in ("papers.png", "lab.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, says", [(["--rates=1gbyte"], "not a link rate"), (["--hosts=0"], "positive number")]
)
def test_wrong_arguments_are_refused(arguments, says, capsys):
    with pytest.raises(SystemExit) as stop:
        cluster_model.main(["--lab", *arguments])
    assert stop.value.code == 2 and says in capsys.readouterr().err


def test_passes_are_measured():
    rates = cluster_model.pass_rates(3, 2**16)
    assert set(rates) == set(cluster_model.PASSES) and all(1e6 < rate < 1e12 for rate in rates.values())


@pytest.mark.netlab
@pytest.mark.slow
def test_a_small_lab(tmp_path):
    try:
        with NetworkLab(2):
            pass
    except LabUnavailable as why:
        pytest.skip(str(why))
    arguments = ["--lab", "--hosts=2", "--rates=50mbit", "--elements=2**20", "--repeats=2", f"--out={tmp_path}"]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert cluster_model.main([*arguments, f"--page={tmp_path / 'page.md'}"]) == 0
    (path,) = tmp_path.glob("cluster_model-lab-*.json")
    record = json.loads(path.read_text())
    assert str(path) in text.getvalue() and path.name in (tmp_path / "page.md").read_text()
    assert record["cpu_count"] == os.cpu_count() and 0 < record["latency_s"] < 1
    rows = {row.what.partition(":")[0]: row for row in cluster_model.compare(record)}
    assert set(rows) == {ONE_BIT, "fp32", "fp16"}
    assert abs(rows["fp32"].error) < 0.2 and abs(rows["fp16"].error) < 0.2  # the network takes all of their time
