"""The cluster model against the papers' tables and the lab: transcription, fits, errors, and the page."""

from pathlib import Path

import pytest

from onebit.cli.plan.options import CLUSTERS
from perf.cluster import papers, report
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
