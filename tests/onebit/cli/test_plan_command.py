"""`onebit plan`: its options and presets, whole runs, what it prints, and its map."""

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from onebit.cli import main as cli
from onebit.cli.plan import command
from onebit.cli.plan.cluster import Cluster
from onebit.cli.plan.model import (
    WORTH,
    Model,
    local_step,
    pays_below,
    sent_compressed,
    sent_uncompressed,
    stage_1,
    stage_2,
    uncompressed,
)
from onebit.cli.plan.pictures import LOSS, RATES, ROUND_TRIPS, TABLE, places, spaced
from onebit.cli.plan.report import describe
from onebit.cli.plan.runs import Run, first, runs
from tests.oracle.zero_one import full_steps, sync_steps

ROOT = Path(__file__).resolve().parents[3]
PRESETS = ["--model=bert-large", "--cluster=ethernet-v100", "--gpus=16", "--steps=3000"]
BERT = Model(340_000_000, 2, 0.036, 0.061, overlap="none", steps=3000, warmup=0.2)
SLOW = Cluster(gpus=16, gpus_per_node=4, network=8e9, latency=1e-3, intra=4e9, intra_latency=1e-4, memory=1e11)


def planned(*arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.planned(parser.parse_args(arguments))


def test_options_go_before_presets():
    rates = ROOT / "perf/results/amd-epyc.json"
    model, cluster = planned(*PRESETS, "--intra=100", "--latency=7", "--forward=3", "--levels=1", f"--rates={rates}")
    assert model == Model(340_000_000, 2, 3e-3, 60.81e-3, warmup=0.1513, steps=3000, overlap="none", levels=1)
    measured = {row["name"]: 1e9 * row["gb_per_s"] for row in json.loads(rates.read_text())["passes"]}
    constants = {"intra": 100e9, "latency": pytest.approx(7e-6), "memory": 810e9, "rates": measured}
    assert cluster == Cluster(gpus=16, network=4.1e9, gpus_per_node=4, **constants)
    own = ["--elements=340M", "--forward=1", "--backward=1", "--gpus=2", "--gpus-per-node=1", "--network=0.1Tbit/s"]
    model, cluster = planned(*own, "--transport=gloo", "--dtype=float32", "--steps=3k")
    assert (model.elements, model.itemsize, model.levels, model.steps) == (340_000_000, 4, 2, 3000)
    assert cluster == Cluster(gpus=2, gpus_per_node=1, network=1e11, transport="gloo", memory=11.2e9)
    assert planned(*own, "--transport=gloo", "--memory=15")[1].memory == 15e9


@pytest.mark.parametrize("levels", [1, 2])
def test_a_run_is_its_steps(levels):
    """Steps of each kind by the oracle's schedules, times what each takes."""
    model = replace(BERT, levels=levels)
    found, zero_one = runs(model, SLOW), replace(model, optimizer="zero_one")
    slow, fast, alone = (step(zero_one, SLOW) for step in (stage_1, stage_2, local_step))
    sent, packed = sent_uncompressed(model, SLOW), sent_compressed(model, SLOW, fast.chunks)
    syncs = [step for step in sync_steps(3000, 600, 200, 16) if step > 600]
    full, last = len(full_steps(3000, 4)), len(full_steps(3000, 4, 600))
    kinds = {"0/1 Adam": (full, 3000 - full, 0), "and local steps": (last, 600 - last + len(syncs), 2400 - len(syncs))}
    for name, counts in kinds.items():
        run = found[name]
        assert (run.uncompressed, run.compressed, run.local) == counts
        seconds = counts[0] * slow.total + counts[1] * fast.total + counts[2] * alone.total
        assert run.seconds == pytest.approx(seconds)
        assert run.sent == pytest.approx(counts[0] * sent + counts[1] * packed)
    run = found["1-bit Adam"]
    assert (run.uncompressed, run.compressed) == (600, 2400)
    assert run.seconds == pytest.approx(600 * stage_1(model, SLOW).total + 2400 * stage_2(model, SLOW).total)
    assert found["fp16"].seconds == pytest.approx(3000 * uncompressed(model, SLOW, 2).total)
    assert found["fp32"].sent == pytest.approx(2 * found["fp16"].sent)
    assert list(runs(replace(model, optimizer="lamb"), SLOW)) == ["fp32", "fp16", "1-bit LAMB"]


def test_first_is_what_takes_the_least_time():
    for adam, zero_one, alone, in_step, local in (
        (10, 20, 5, ("1-bit Adam", 10), ("and local steps", 20)),
        (20, 10, 50, ("0/1 Adam", 10), ("0/1 Adam", 10)),
        (200, 125, 50, ("fp16", 0.8), ("and local steps", 2)),
        (99, 300, 99, ("fp16", 100 / 99), ("fp16", 100 / 99)),  # too little to tell
        (100 / WORTH, 300, 300, ("1-bit Adam", WORTH), ("1-bit Adam", WORTH)),
    ):
        seconds = {"fp32": 150, "fp16": 100, "1-bit Adam": adam, "0/1 Adam": zero_one, "and local steps": alone}
        found = {name: Run(1, 1, 3 * (name == "and local steps"), each, 0) for name, each in seconds.items()}
        for with_local, (name, factor) in ((False, in_step), (True, local)):
            best = first(found, with_local)
            assert (best.name, best.factor) == (name, pytest.approx(factor))


def test_what_the_command_says_in_other_cases_than_that_of_the_page():
    """See test_what_other_pages_have_of_the_plan."""
    assert "any network rate" in describe(*planned(*PRESETS))
    hidden, fast = replace(BERT, overlap="uncompressed"), Cluster(gpus=64, network=1e12)
    below, said = pays_below(hidden, fast), describe(hidden, fast)
    assert f"below {below / 1e9:.3g} Gbit/s a node; here 1,000 Gbit/s" in said and "stay uncompressed (fp16)" in said
    assert "On one node (1 of at most 4 GPUs)" in describe(BERT, replace(SLOW, gpus=1))


def test_the_command_prints_and_draws_the_map(tmp_path, monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    path, figures = tmp_path / "map.png", []
    monkeypatch.setattr(pyplot, "close", figures.append)
    monkeypatch.setattr("onebit.cli.plan.pictures.POINTS", (9, 8))
    arguments = [*PRESETS, "--gpus-per-node=1", "--network=1gbit", "--rtt=10"]
    assert cli.main(["plan", *arguments, f"--map={path}"]) == 0
    text, (model, cluster) = capsys.readouterr().out, planned(*arguments)
    assert path.read_bytes().startswith(b"\x89PNG") and text.endswith(f"Map: {path}\n") and "is a bound" in text
    found, (rates, round_trips) = places(model, cluster, *TABLE), TABLE
    for i, rtt in enumerate(round_trips):
        for j, rate in enumerate(rates):
            there = runs(model, replace(cluster, network=rate, rtt=rtt))
            assert all(found[local][i][j] == first(there, local) for local in (False, True))
    lines = text[text.index("first to end 3,000 steps") :].splitlines()
    for start, local in ((2, False), (8, True)):
        for line, rtt, row in zip(lines[start:], round_trips, found[local], strict=False):
            shown = [f"{place.name.removeprefix('and ')} {place.factor:.2f}" for place in row]
            assert " ".join(line.split()) == " ".join([f"{1e3 * rtt:g} ms", *shown])
    panels = figures[0].axes[:4]
    texts = [{text.get_text().replace("\n", " ") for text in axes.texts} for axes in panels]
    assert texts[0] == {"0/1 Adam", "don't use this library: uncompressed is first"}
    assert "0/1 Adam with local steps" in texts[2]
    assert [list(line.get_xydata()[0]) for line in panels[0].lines] == [[1.0, 10.0]]  # as planned
    assert list(places(replace(model, optimizer="lamb"), cluster, [1e8], [1e-3])) == [False]
    assert spaced(ROUND_TRIPS, 3) == pytest.approx([ROUND_TRIPS[0], 5**0.5 * 1e-3, ROUND_TRIPS[1]])
    assert (min(rates), max(rates)) == RATES and (min(round_trips), max(round_trips)) == ROUND_TRIPS


def test_without_matplotlib_there_is_no_map(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert cli.main(["plan", *PRESETS, f"--map={tmp_path / 'map.png'}"]) == 2
    captured = capsys.readouterr()
    assert "pip install matplotlib" in captured.err and not captured.out


def test_what_other_pages_have_of_the_plan(capsys):
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    found = re.search(r"    onebit plan (.*)\n\nprints[^\n]*\n\n((?:    .*\n|\n)+)", page)
    assert cli.main(["plan", *found[1].split()]) == 0
    assert [line.strip() for line in found[2].strip().splitlines()] == [
        line.strip() for line in capsys.readouterr().out.strip().splitlines()
    ]
    for name in ("plan_map-language-model.png", "plan_map-bert-large.png"):
        before, after = page.split(f"](../perf/results/{name})")
        assert before.rsplit("\n\n", 2)[1].startswith("    onebit plan ") and name not in after
        assert before.rsplit("\n\n", 2)[1].endswith("--map map.png")
        assert (ROOT / "perf/results" / name).stat().st_size < 200_000
    page = (ROOT / "docs/convergence.md").read_text(encoding="utf-8")
    said = [re.search(r"in (\d+ of \d+) comparisons", " ".join(text.split())) for text in (page, LOSS)]
    assert said[0] and said[1] and said[0][1] == said[1][1]
