"""The cluster model against the papers' tables and the lab: transcription, fits, errors, and the page."""

import json
from pathlib import Path

import pytest

from onebit.cli.plan.cluster import Cluster
from onebit.cli.plan.exchange import compressed_all_reduce
from onebit.cli.plan.options import CLUSTERS
from perf.cluster import lab, papers, report
from perf.cluster.papers import ADAM_TABLE, LAMB_TABLE, PROFILES, Compared, median_error
from perf.records import RESULTS

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_are_copied_right():
    """They give the share of the all-reduce too, rounded or cut to a whole number."""
    assert [sum(row.source == source for row in PROFILES.values()) for source in (ADAM_TABLE, LAMB_TABLE)] == [13, 18]
    for row in PROFILES.values():
        total = row.forward + row.all_reduce + row.backward + row.step
        assert abs(100 * row.all_reduce / total - row.percent) < 1, row
        assert row.gpus == row.nodes * {"Ethernet": 4, "InfiniBand": 8}[row.network]
        assert row.batch % (row.gpus * row.accumulation) == 0


def test_presets_are_what_the_fitted_rows_give():
    """Bytes over what is left of the measured time; 239.76 and 28.18 ms within a node, 336.40 over eight."""
    fitted = papers.all_reduces(fitted=True)
    assert len(fitted) == 3 and all(abs(row.error) < 0.003 for row in fitted)
    ethernet, infiniband = CLUSTERS["ethernet-v100"], CLUSTERS["infiniband-v100"]
    assert ethernet["intra"] == pytest.approx(2 * 3 / 4 * 680e6 / (0.23976 - 6 * 5e-6), rel=0.002)
    assert infiniband["intra"] == pytest.approx(2 * 7 / 8 * 680e6 / (0.02818 - 14 * 5e-6), rel=0.002)
    between = 0.3364 - 0.02818 - 14 * 5e-6
    assert infiniband["network"] == pytest.approx(8 * 2 * 7 / 8 * 680e6 / between, rel=0.002)


def test_what_the_page_says_of_the_papers():
    assert all(median_error(rows) <= 0.25 for rows in (papers.all_reduces(), papers.speed_ups()))
    assert all(row.error < 0 for row in papers.speed_ups())  # "Every one is predicted too low"
    assert papers.end_to_end(4.5, 1000 / 5993) == pytest.approx(2.8, abs=0.05)  # the paper's own arithmetic
    assert papers.end_to_end(3.0, papers.WARMUP_512) == pytest.approx(2.2, abs=0.05)
    one, other = (row.all_reduce for row in PROFILES.values() if row.network == "InfiniBand" and row.nodes == 1)
    assert 5.5 < other / one < 6.5  # "6 times apart"
    assert median_error([Compared("", "", predicted, 2) for predicted in (3, 2, 1, 2.2, 1)]) == 0.5


def row_of(kind, seconds, elements=2**23, rate="1gbit", **more):
    of = {"hosts": 2, "rate": rate, "elements": elements, "kind": kind}
    return {**of, "seconds": 9.0, "calls": (9.0, seconds), **more}


def test_rows_of_the_lab_that_take_what_the_model_says_have_no_error(tmp_path):
    """Two ranks on one core; hosts of four ranks; a delay, with passes of another record."""
    half, rates, about = {"decode": 2e9}, {"decode": 4e9}, {"device": "Some CPU", "cpu_count": 1}
    alone = Cluster(2, 0.956e9, gpus_per_node=1, latency=1e-4, rates=half, transport="gloo")
    record = {**about, "pass_bytes_per_s": {"2": rates}, "latency_s": 1e-4}
    packed = 2 * compressed_all_reduce(2**23, alone, chunks=2, reply=1)
    rows = [row_of("fp32", 1.0, 1024), row_of("1 bit", packed, chunks=2), row_of("fp32", alone.all_reduce(2**25))]
    (tmp_path / lab.OTHER).write_text(json.dumps({**record, "rows": rows}))
    far = Cluster(2, 0.956e9, gpus_per_node=1, latency=1e-4, rates=half, transport="gloo", rtt=0.01)
    rows = [row_of("fp16", far.all_reduce(2**24), rate="1gbit+10ms")]
    (tmp_path / lab.LINKS.replace("*", "far")).write_text(json.dumps({**about, "rows": rows}))
    hop, intra = 5e-5, 2e9
    nodes = Cluster(8, 0.956e9, 4, 1e-4, intra, hop, rates={"decode": 0.5e9}, transport="gloo")
    took = {"1 bit": compressed_all_reduce(2**23, nodes, chunks=2, reply=1)}
    took["1 bit, two levels"] = compressed_all_reduce(2**23, nodes, chunks=2, levels=2)
    rows = [row_of(kind, seconds, chunks=2, each=4) for kind, seconds in took.items()]
    for elements, chunks, mean in ((1024, 1, 3 * hop), (2**21, 2, 2 * 3 * hop + 3 / 4 * 4 * 2**21 / intra)):
        rows.append(row_of("1 bit, two levels", 1.0, elements, chunks=chunks, phases={"node mean": mean}, each=4))
    shapes = {"2x4": {"pass_bytes_per_s": rates, "latency_s": 1e-4, "rows": rows}}
    (tmp_path / "cluster_model-nodes-cpu.json").write_text(json.dumps({**about, "shapes": shapes}))
    found = lab.compared(tmp_path)
    assert [row.source.partition(", ")[2] for row in found] == [
        "a rank a host: 1 bit", "a rank a host: uncompressed", "several ranks a host: 1 bit",
        "several ranks a host: 1 bit, two levels", "links of 10 ms: uncompressed",
    ]  # fmt: skip
    assert [row.error for row in found] == pytest.approx([-0.5, 0, 0, 0, 0])


def test_the_page_is_what_the_command_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    assert report.main() == 0
    written = (tmp_path / "page.md").read_text()
    assert (ROOT / "docs/cluster_model.md").read_text() == written, "run python -m perf.cluster"
    sources = report.by_source(ROOT / RESULTS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(1 + len(rows) for rows in sources.values()) + 1 and len(sources) == 14
    for rows in sources.values():
        assert f"| {len(rows)} | {100 * median_error(rows):.1f} % |" in written
