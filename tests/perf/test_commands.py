"""The commands of perf, `make bench` and perf/gpu.sh: what cannot be is one clear error before any work, and the
targets that sections reach.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from perf import bench
from perf.all_reduce import benchmark as all_reduce
from perf.all_reduce import targets
from perf.all_reduce.measure import Row
from perf.bench import Section
from perf.convergence import study
from perf.kernels import benchmark as kernels
from perf.lab import network
from perf.lab.namespaces import LabUnavailable
from perf.methods import command as methods
from perf.records import RESULTS, read_record
from perf.targets import Target, as_json, targets_of
from perf.train_step import benchmark as train_step
from perf.train_step import report
from perf.train_step.record import Record
from tests import forked
from tests.limits import HUNG
from tests.test_structure import ROOT

WRITES = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[-1].removeprefix("--out="))
(folder / "fresh.json").write_text(json.dumps({"targets": [
    {"what": "as fast", "needed": 4.0, "reached": 4.0}, {"what": "as small", "needed": 28.0, "reached": 27.9}]}))
"""


@pytest.mark.parametrize(
    ("main", "arguments", "says"),
    [
        (all_reduce.main, "--lab --hosts=1", "a network lab has 2 to 64 hosts"),
        (all_reduce.main, "--lab --rates=1gbyte", "'1gbyte' is no link: write a rate from 1mbit to 100gbit"),
        (all_reduce.main, "--elements=2**20,many", "'many' is not a whole number"),
        (all_reduce.main, "--chunks=0", "'0' is not a whole number from 1"),
        (all_reduce.main, "--hosts=2 --each=2", "--hosts and --each: only with --lab"),
        (all_reduce.main, "--lab --backend=gloo", "--backend: only without --lab and --paced"),
        (all_reduce.main, "--lab --paced", "not allowed with argument --lab"),
        (all_reduce.main, "--paced --hosts=4", "--hosts: only with --lab"),
        (all_reduce.main, "--rates=1gbit", "--rates: only with --lab or --paced"),
        (all_reduce.main, "--paced --rates=1gbit+10ms", "has a round trip, and pacing makes none"),
        (all_reduce.main, "--paced --each=2", "--each: only with --lab"),
        (train_step.main, "--paced --train --model=gpt2", "its tokens are random"),
        (all_reduce.main, "--lab --each=2 --direct", "--direct: only with one rank a host"),
        (all_reduce.main, "--lab --each=65", "1 to 64 ranks"),
        (all_reduce.main, "--device=cpu", "start it with torchrun, or give it --lab"),
        (train_step.main, "--lab --share=1", "'1' is no share: give a number below 1"),
        (train_step.main, "--lab --share=most", "is no share"),
        (train_step.main, "--variants=fp8", "'fp8' is no variant: choose among fp32, fp16"),
        (train_step.main, "--paced --rates=1gbit --share=0.9", "--share: only with --lab"),
        (train_step.main, "--lab --train --clip=-1", "--clip"),
        (train_step.main, "--lab --train --clip=nan", "--clip"),
        (train_step.main, "--device=cpu", "start it with torchrun, or give it --lab"),
        (kernels.main, "--device=toaster", "toaster"),
        (methods.main, "--report --out=.", "measure first"),
        (study.main, "--tasks=poems", "'poems' is no task: choose among"),
        (study.main, "--report --out=.", "there are no runs in '.': leave --report out"),
        (bench.main, "--only=kernel", "choose among kernels, optimizer, network"),
    ],
)
def test_what_cannot_be_done_is_one_error(main, arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    try:
        status = main(arguments.split())
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and says in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("of", [all_reduce, train_step])
def test_folders_labs_and_links_of_benchmarks_of_the_network(of, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()

    def unavailable():
        raise LabUnavailable("the network lab needs Linux, not darwin: run it there, as root")

    monkeypatch.setattr(network, "check_available", unavailable)
    for folder, says in ("file", "is no folder to write to"), (".", "error: the network lab needs Linux"):
        assert of.main(["--lab", f"--out={tmp_path / folder}"]) == 2
        assert says in capsys.readouterr().err
    links = ["100mbit", "2.5gbit+50ms", "unshaped"]
    assert of.parse_arguments(["--lab", f"--rates={','.join(links).upper()}"]).rates == links


@pytest.fixture
def sections(monkeypatch, tmp_path):
    """A function that has `bench` run these scripts as its sections."""

    def use(seconds=60, **scripts):
        made = []
        for name, script in scripts.items():
            (tmp_path / f"{name}.py").write_text(script)
            made.append(Section(name, name.title(), (name,), seconds))
        monkeypatch.setattr(bench, "SECTIONS", tuple(made))

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # what replaces a script within a second is read
    return use


def test_targets_are_read_from_the_record_that_a_section_writes(sections, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.json").write_text('{"targets": [{"what": "old", "needed": 1, "reached": 0}]}')
    sections(network=WRITES)
    assert bench.main(["--out", str(out)]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.startswith("network ")]
    assert rows == ["network times as fast 4 4.0 met", "network times as small 28 27.9 missed"]
    record = json.loads((out / "bench.json").read_text())
    assert [(t["measured"], t["met"]) for t in record["targets"]] == [(4.0, True), (27.9, False)]
    assert record["missing"] == {}


def test_a_section_that_cannot_run_here_is_said_and_one_that_fails_is_an_error(sections, tmp_path, capsys):
    for script, seconds, status, says in (
        ("import sys; sys.exit(2)", 60, 0, "it cannot run here"),
        ("import sys; sys.exit(1)", 60, 1, "it failed (exit status 1)"),
        ("import time; time.sleep(60)", 1, 1, "stopped after 1 s"),
    ):
        sections(seconds, first=script)
        assert bench.main(["--out", str(tmp_path)]) == status
        assert f"first      not measured: {says}" in capsys.readouterr().out
    sections(first="import sys; sys.exit(2)", second=WRITES)
    assert bench.main(["--out", str(tmp_path)]) == 0 and "4.0  met" in capsys.readouterr().out


def test_sections_that_are_not_run_keep_their_targets_on_the_same_machine(sections, tmp_path, monkeypatch):
    def found():
        return [t["section"] for t in json.loads((tmp_path / "bench.json").read_text())["targets"]]

    sections(first=WRITES, second=WRITES)
    assert bench.main(["--out", str(tmp_path)]) == 0 and found() == ["first"] * 2 + ["second"] * 2
    assert bench.main(["--out", str(tmp_path), "--only", "second"]) == 0 and found() == ["second"] * 2 + ["first"] * 2
    monkeypatch.setattr(bench, "cpu_name", lambda: "another")
    assert bench.main(["--out", str(tmp_path), "--only", "second"]) == 0 and found() == ["second"] * 2


def test_make_bench_runs_sections_that_are_there():
    recipe = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    assert "-m perf.bench $(BENCH_ARGS)" in recipe
    assert sum(section.seconds for section in bench.SECTIONS) <= 1260  # a quiet machine needs about half
    for section in bench.SECTIONS:
        assert importlib.util.find_spec(section.command[0]), section


def run(*arguments, python=sys.executable):
    command, environment = ["bash", str(ROOT / "perf" / "gpu.sh"), *map(str, arguments)], {"PYTHON": str(python)}
    return subprocess.run(command, capture_output=True, text=True, timeout=HUNG, env={**os.environ, **environment})


def test_stages_are_rehearsed_and_leave_their_records(tmp_path):
    with forked.python() as python:
        stages = ("link", "learn", "check", "kernels", "ranks", "step", "profile")
        done = run("--rehearse", "--out", tmp_path, *stages, python=python)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ended = (tmp_path / "gpu-stages.txt").read_text()
    assert ended.count("exit 0") == ended.count("\n") >= 5
    names = " ".join(path.name for path in tmp_path.rglob("*"))
    assert all(each in names for each in ("bf16", "train_step", "profile")), names


def test_checks_measure_no_kernel_and_a_wrong_stage_or_no_gpu_is_an_error(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "ran with ONEBIT_TUNE=$ONEBIT_TUNE: $*"\n')
    python.chmod(0o755)
    run("--out", tmp_path, "check", python=python)
    ran = [line for line in (tmp_path / "gpu-check.log").read_text().splitlines() if " pytest " in line]
    assert len(ran) == 1 and ran[0].startswith("ran with ONEBIT_TUNE=0: -m pytest")
    assert ran[0].count("tests/kernels/test_") > 5
    wrong = run("--rehearse", "--out", tmp_path, "nothing")
    assert wrong.returncode == 2 and "link, learn, check, sanitizer, kernels, ranks" in wrong.stderr
    if not torch.cuda.is_available():
        done = run("--out", tmp_path, "check")
        assert done.returncode == 2 and "no GPU" in done.stderr


def of_all_reduce(path):
    return targets.targets([Row.of(row) for row in read_record(path)["rows"]])


def of_train_step(path):
    record = Record(path)
    return report.targets(record.rows, record.runs)


@pytest.mark.parametrize("of, name, least", [(of_all_reduce, "all_reduce", 32), (of_train_step, "train_step", 19)])
def test_the_records_have_the_targets_of_their_rows(of, name, least):
    """They have those of every network that was measured that its rows speak of, and no other."""
    seen = 0
    for path in (ROOT / RESULTS).glob(f"{name}-*.json"):
        if not path.stem.endswith("-report"):  # of perf.profile
            found, there = of(path), targets_of(read_record(path))
            assert [(t.what, t.needed) for t in found] == [(t.what, t.needed) for t in there], path
            assert [t.reached for t in found] == pytest.approx([t.reached for t in there]), path
            seen += len(found)
    assert seen >= least


@pytest.mark.parametrize("at_most", [False, True])
def test_a_row_of_the_table_says_what_its_section_says(at_most):
    """It does on either side of every bound."""
    for reached in (1.04, 1.16):
        target = Target("as long", reached, 1.1, at_most)
        (row,) = targets_of({"targets": as_json([target])})
        assert row == target and row.met == ((reached > 1.1) != at_most)
        assert ("at most" if at_most else "to reach") in str(target)
        for text in (bench.table([("step", row)], {}), str(target)):
            assert text.endswith("met" if row.met else "missed") and ("times as long" in text) != at_most
            assert f"{reached}" in text
