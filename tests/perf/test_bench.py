"""`make bench`: every section is run, its record read, and each target printed as met or missed."""

import json
from pathlib import Path

import pytest

from perf import bench
from perf.bench import Section, of_kernels, of_targets
from perf.targets import Limit, Target, as_json

ROOT = Path(__file__).parents[2]
WRITES = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[-1].removeprefix("--out="))
(folder / "fresh.json").write_text(json.dumps({"targets": [
    {"what": "as fast", "needed": 4.0, "reached": 4.0}, {"what": "as small", "needed": 28.0, "reached": 27.9}]}))
"""


@pytest.fixture
def sections(monkeypatch, tmp_path):
    """A function that has `bench` run these scripts as its sections."""

    def use(**scripts):
        made = []
        for name, script in scripts.items():
            (tmp_path / f"{name}.py").write_text(script)
            made.append(Section(name, name.title(), (name,), 60, of_targets))
        monkeypatch.setattr(bench, "SECTIONS", tuple(made))

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return use


def test_targets_are_read_from_the_record_that_a_section_writes(sections, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.json").write_text('{"targets": [{"what": "old", "needed": 1, "reached": 0}]}')
    sections(network=WRITES)
    assert bench.main(["--out", str(out)]) == 0
    text = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in text.splitlines() if line.startswith("network ")]
    assert rows == ["network times as fast 4 4.0 met", "network times as small 28 27.9 missed"]
    record = json.loads((out / "bench.json").read_text())
    assert [(t["measured"], t["met"]) for t in record["targets"]] == [(4.0, True), (27.9, False)]
    assert record["missing"] == {}
    assert bench.main(["--out", str(out), "--check"]) == 1


def test_a_section_that_cannot_run_here_is_said_and_one_that_fails_is_an_error(sections, tmp_path, capsys, monkeypatch):
    sections(first="import sys; sys.exit(2)", second=WRITES)
    assert bench.main(["--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "first      not measured: it cannot run here" in text and "4.0  met" in text
    assert bench.main(["--out", str(tmp_path), "--check"]) == 1
    sections(first=WRITES, second="import sys; sys.exit(1)")
    assert bench.main(["--out", str(tmp_path)]) == 1
    assert "second     not measured: it failed (exit status 1)" in capsys.readouterr().out
    assert bench.main(["--out", str(tmp_path), "--only", "first"]) == 0
    sections(slow="import time; time.sleep(60)")
    monkeypatch.setattr(bench, "SECTIONS", (Section("slow", "Slow", ("slow",), 1, of_targets),))
    assert bench.main(["--out", str(tmp_path)]) == 1
    assert "stopped after 1 s" in capsys.readouterr().out


def test_sections_that_are_not_run_keep_their_targets_on_the_same_machine(sections, tmp_path, monkeypatch):
    def found():
        return [t["section"] for t in json.loads((tmp_path / "bench.json").read_text())["targets"]]

    sections(first=WRITES, second=WRITES)
    assert bench.main(["--out", str(tmp_path)]) == 0 and found() == ["first"] * 2 + ["second"] * 2
    assert bench.main(["--out", str(tmp_path), "--only", "second"]) == 0 and found() == ["second"] * 2 + ["first"] * 2
    monkeypatch.setattr(bench, "cpu_name", lambda: "another")
    assert bench.main(["--out", str(tmp_path), "--only", "second"]) == 0 and found() == ["second"] * 2


def test_each_section_reads_the_records_that_are_kept():
    kernels = json.loads((ROOT / "perf/results/amd-epyc.json").read_text())
    assert [target.needed for target in of_kernels(kernels)] == [25.0, 40.0, 40.0]
    step = {"times_faster_than_adamw_fused": 1.5, "times_faster_than_eager": 9.0}
    assert of_kernels({"passes": [], "bert_large_step": step}) == [
        Target("step of BERT-Large: times AdamW(fused)'s speed", reached=1.5, needed=1.0),
        Target("step of BERT-Large: times the eager operations' speed", reached=9.0, needed=8.0),
    ]
    network = json.loads((ROOT / "perf/results/all_reduce-amd-epyc.json").read_text())
    assert [target.needed for target in of_targets(network)] == [12.0, 4.0, 28.0, 14.0]


def test_make_bench_runs_it():
    recipe = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    assert "-m perf.bench $(BENCH_ARGS)" in recipe
    assert sum(section.seconds for section in bench.SECTIONS) <= 1260  # a quiet machine needs about half
    for section in bench.SECTIONS:
        assert (ROOT / section.command[0].replace(".", "/") / "__main__.py").exists()


@pytest.mark.parametrize("kind", [Target, Limit])
def test_a_row_of_the_table_says_what_its_section_says(kind):
    """On either side of every bound."""
    for reached in (1.04, 1.16):
        target = kind("as fast" if kind is Target else "times as long", reached, 1.1)
        (row,) = of_targets({"targets": as_json([target])})
        met = (reached > 1.1) == (kind is Target)
        assert row.met == target.met == met
        assert bench.table([("step", row)], {}).endswith("met" if met else "missed") and str(target).endswith(
            "met" if met else "missed"
        )
