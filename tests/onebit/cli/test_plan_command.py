"""`onebit plan`: its options, presets and files, what it prints and draws, whole runs, --map and --scale."""

import itertools
import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from onebit.cli import main as cli
from onebit.cli.plan.map import LOSS, RATES, ROUND_TRIPS, TABLE, WORTH, Map, first, middle, spaced
from onebit.cli.plan.model import (
    Cluster,
    Groups,
    Model,
    end_to_end,
    local_step,
    message_bytes,
    pass_seconds,
    rounds,
    sent_compressed,
    sent_uncompressed,
    stage_1,
    stage_2,
    state_bytes,
    uncompressed,
)
from onebit.cli.plan.options import CLUSTERS, MODELS, OPTIONS, number
from onebit.cli.plan.report import describe, plot, rates
from onebit.cli.plan.runs import Run, runs
from onebit.cli.plan.scale import ROUND_TRIPS as SCALE_ROUND_TRIPS
from onebit.cli.plan.scale import sizes
from onebit.collectives.two_phases import TwoPhases
from tests.oracle.zero_one import full_steps, sync_steps

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "perf/results/amd-epyc.json"
PRESETS = ["plan", "--model=bert-large", "--cluster=ethernet-v100", "--gpus=64"]
FLAT = ["--gpus=16", "--gpus-per-node=1", "--steps=1000"]
BERT = Model(340_000_000, 2, 0.036, 0.061, overlap="none", steps=1000)
LONG = replace(BERT, steps=3000, warmup=0.2)
SLOW = Cluster(gpus=16, gpus_per_node=4, network=8e9, latency=1e-3, intra=4e9, intra_latency=1e-4, memory=1e11)
CLUSTER = Cluster(gpus=16, gpus_per_node=1, network=1e9)


@pytest.fixture
def printed(capsys):
    """A function: what the command prints."""

    def run(*more):
        assert cli.main([*PRESETS, *more]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def planned(printed):
    """A function: what --json prints, and the model and cluster that it is of."""

    def run(*more):
        found = json.loads(printed("--json", *more))
        cluster = Cluster(**{name: value for name, value in found["cluster"].items() if name != "nodes"})
        return found, Model(**found["model"]), cluster

    return run


def cells(text, title, row):
    """What stands in a row of the table with that title."""
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()
    (found,) = [line for line in lines if line.startswith(f"  {row} ")]
    return found.removeprefix(f"  {row}").split()


def test_the_command_prints_what_the_model_says(planned, printed):
    found, model, cluster = planned()
    assert found["cluster"]["nodes"] == 16 and model.elements == 340_000_000
    two, fp16 = stage_2(model, cluster), uncompressed(model, cluster, 2).total
    assert found["steps"]["stage 2"]["total"] == two.total
    assert found["speed_up"]["stage 2"]["fp16"] == found["speed_up"]["stage 2"]["own dtype"] == fp16 / two.total
    assert found["speed_up"]["end to end"]["fp32"] == uncompressed(model, cluster, 4).total / end_to_end(model, cluster)
    text = printed()
    for shown in (f"{1e3 * two.total:,.1f}", f"{fp16 / two.total:.2f} x fp16's", "15.13 %", "16 nodes of 4"):
        assert shown in text
    assert "any network rate" in text and "assumed: the project's target" in text
    assert "Predicted, not measured" in text


def test_both_levels_are_shown_and_the_faster_one_is_advised(planned, printed):
    found, model, cluster = planned()
    assert model.levels == 2 and list(found["levels"]) == ["2", "1"]
    shown, fp16 = [], uncompressed(model, cluster, 2).total
    for levels in (2, 1):
        other = replace(model, levels=levels)
        step = stage_2(other, cluster)
        gpu, node = sent_compressed(other, cluster, step.chunks)
        state = state_bytes(other, cluster)
        entry = {"total": step.total, "gpu": gpu, "node": node, "state": state, "fp16": fp16 / step.total}
        assert found["levels"][str(levels)] == entry
        millis, sent = f"{1e3 * step.total:,.1f}", f"{node / 1e6:,.1f}"
        shown.append([millis, f"{fp16 / step.total:.2f}", sent, f"{state:.2f}"])
    text = printed()
    what = ("milliseconds a step", "times fp16's speed", "MB a node sends to others", "bytes of state an element")
    for row, *pair in zip(what, *shown, strict=True):
        assert cells(text, "stage 2 by --levels", row) == pair
    fast = replace(cluster, network=100e9)
    one, two = ([stage_2(replace(model, levels=n), there).total for there in (cluster, fast)] for n in (1, 2))
    asked = f'Take two levels (node_group="auto", the default): {one[0] / two[0]:.2f} times as fast as one level'
    assert asked in text
    asked = f"Take one level (node_group=None): {two[1] / one[1]:.2f} times as fast as two levels"
    assert asked in printed("--network=100gbit")


@pytest.mark.parametrize("levels, name", [(1, "one level"), (2, "two levels")])
def test_the_report_is_of_the_levels_asked_for(levels, name, planned):
    found, model, cluster = planned(f"--levels={levels}", "--gpus=8")
    assert model.levels == levels
    assert found["steps"]["stage 2"]["total"] == stage_2(model, cluster).total == found["levels"][str(levels)]["total"]
    assert found["bytes_sent"]["stage 2"]["node"] == found["levels"][str(levels)]["node"]
    for reply in (1, "direct"):
        assert found["replies"][str(reply)]["total"] == stage_2(replace(model, reply=reply), cluster).total
    text = describe(model, cluster)
    assert f"{name} by --reply" in text and f"{levels} (this)" in text and "stage 2 by --reply" not in text
    asked = "direct (this)" if levels == 2 else "1 (this)"  # two nodes exchange directly, eight ranks do not
    assert asked in text[text.index("by --reply") :].splitlines()[0]


def test_without_nodes_of_several_gpus_a_report_has_no_levels(planned, printed):
    for more in (["--gpus=4"], ["--gpus=8", "--gpus-per-node=1"], ["--gpus=1"]):
        assert planned(*more)[0]["levels"] == {}
        one, two = (printed(*more, f"--levels={levels}") for levels in (1, 2))
        assert one == two and "stage 2 by --reply" in one
        assert "level" not in one and "Take" not in one and "state" not in one


def test_an_option_goes_before_the_file_and_the_file_before_the_preset(tmp_path, planned):
    path = tmp_path / "constants.json"
    constants = {"network": "25gbit", "gpus-per-node": 2, "latency": 7, "warmup": 0.5, "dtype": "float32"}
    path.write_text(json.dumps(constants))
    _, model, cluster = planned(f"--constants={path}", "--gpus-per-node=8", "--intra", "100")
    assert (cluster.network, cluster.latency) == (25e9, pytest.approx(7e-6))
    assert (cluster.gpus_per_node, cluster.intra) == (8, 100e9)
    assert cluster.memory == 900e9  # the preset's
    assert (model.warmup, model.itemsize) == (0.5, 4)


def test_rates_come_from_a_record_of_the_benchmark(planned):
    measured = {row["name"]: row["gb_per_s"] for row in json.loads(RECORD.read_text())["passes"]}
    found, _, cluster = planned(f"--rates={RECORD}", "--cores=0.5")
    assert cluster.rates["compress"] == pytest.approx(1e9 * measured["compress"])
    assert found["steps"]["stage 2"]["local"] > 20 * planned()[0]["steps"]["stage 2"]["local"]


def test_numbers_and_units():
    read = {name: OPTIONS[name].parse for name in OPTIONS}
    assert [read["elements"](text) for text in ("340e6", "340M", "340_000_000")] == [340_000_000] * 3
    assert [read["network"](text) for text in ("100gbit", "0.1Tbit", "100 Gbit/s", "800mbit")] == [1e11] * 3 + [8e8]
    assert read["latency"]("20") == pytest.approx(2e-5) and read["forward"]("36.5") == pytest.approx(0.0365)
    assert OPTIONS["intra"].show(read["intra"]("4.25")) == "4.25 GB/s"
    assert number("1e15") == 1e15 and number("0") == 0
    for text in ("1e308", "2e15", "1e-16", "1e400"):  # found by tests.fuzz: the plan's sums went beyond a float
        with pytest.raises(ValueError, match="from 1e-15 to 1e"):
            number(text)
    for preset in (*MODELS.values(), *CLUSTERS.values()):
        assert all(read[name](text) is not None for name, text in preset.items())


def test_a_wrong_file_of_constants_is_named(tmp_path, capsys):
    path = tmp_path / "constants.json"
    for content, part in (
        ('{"netwrok": "1gbit"}', "there is no option 'netwrok'. The options are elements"),
        ('{"network": "fast"}', "network: 'fast' is no rate"),
        ("[1]", "is no JSON object"),
        ("{", "can't be read"),
    ):
        path.write_text(content)
        assert cli.main([*PRESETS, f"--constants={path}"]) == 2
        message = capsys.readouterr().err
        assert part in message and str(path) in message


def test_a_plot_shows_the_other_levels_too(tmp_path, monkeypatch, planned, printed):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures, path = [], tmp_path / "plan.png"
    monkeypatch.setattr(pyplot, "close", figures.append)
    monkeypatch.setattr("onebit.cli.plan.report.MOST_GPUS", 64)
    monkeypatch.setattr("onebit.cli.plan.report.rates", lambda here: [1e9, 1e10])
    assert str(path) in printed("--gpus=12", "--levels=1", f"--plot={path}")
    assert path.read_bytes().startswith(b"\x89PNG")
    _, model, cluster = planned("--gpus=8", "--levels=2")  # the plot's second number of GPUs
    time, scale, network = ({line.get_label(): line.get_ydata() for line in axes.lines} for axes in figures[0].axes)
    step, fp16 = stage_2(model, cluster).total, uncompressed(model, cluster, 2).total
    assert time["1 bit, stage 2, two levels"][1] == 1e3 * step
    assert scale["stage 2, two levels"][1] == fp16 / step
    assert "stage 2, two levels" in network and "stage 2, one level" not in network
    plot(model, replace(cluster, gpus=3, gpus_per_node=1), path)
    assert not any("level" in str(line.get_label()) for axes in figures[1].axes for line in axes.lines)


def test_a_plot_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert cli.main([*PRESETS, f"--plot={tmp_path / 'plan.png'}"]) == 2
    captured = capsys.readouterr()
    assert "pip install matplotlib" in captured.err and not captured.out


@pytest.mark.parametrize("levels", [1, 2])
def test_a_run_is_its_steps(levels):
    """Steps of each kind by the oracle's schedules, times what each takes."""
    model = replace(LONG, levels=levels)
    found, zero_one = runs(model, SLOW), replace(model, optimizer="zero_one")
    slow, fast, alone = (step(zero_one, SLOW) for step in (stage_1, stage_2, local_step))
    sent, packed = sent_uncompressed(model, SLOW)[1], sent_compressed(model, SLOW, fast.chunks)[1]
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


def test_a_local_step_sends_nothing_between_nodes():
    slower = replace(SLOW, network=1e6, latency=1.0, rtt=0.05)
    update = sum(pass_seconds(name, BERT.elements, SLOW, 2) for name in ("zero_one_local", "scan"))
    mean = 2 * 3 / 4 * 680e6 / 4e9 + 6 * 1e-4  # over a node
    for levels, added in ((1, 0.0), (2, mean)):
        model = replace(BERT, levels=levels)
        assert local_step(model, SLOW) == local_step(model, slower)
        assert local_step(model, SLOW).total == pytest.approx(0.036 + 0.061 + update + added)


def test_lamb_has_no_runs_and_no_map_with_local_steps():
    lamb = replace(BERT, optimizer="lamb")
    assert list(runs(lamb, SLOW)) == ["fp32", "fp16", "1-bit LAMB"]
    found = Map.of(lamb, CLUSTER, [1e8], [1e-3])
    assert list(found.places) == ["in step"] and found.places["in step"][0][0].first == "1-bit LAMB"


def test_the_command_shows_runs(printed, planned):
    asked = ["--steps=3000", "--var-update-scaler=2", "--local-step-clipper=4"]
    lines = printed(*asked).splitlines()
    start = lines.index(next(line for line in lines if line.startswith("a run of 3,000 steps")))
    assert lines[start].split()[5:] == ["fp32", "fp16", "1-bit", "Adam", "0/1", "Adam", "and", "local", "steps"]
    full = [str(len(full_steps(3000, 2, last))) for last in (None, 600)]
    assert lines[start + 1].split()[2:] == ["3,000", "3,000", "454", *full]
    assert lines[start + 6].split()[:5] == ["times", "fp16's", "speed", "0.51", "1.00"]
    assert planned(*asked)[0]["runs"]["0/1 Adam"]["uncompressed"] == int(full[0])


def run_of(seconds, local=0):
    return Run(uncompressed=1, compressed=1, local=local, seconds=seconds, sent=0)


def test_first_is_what_takes_the_least_time():
    for adam, zero_one, alone, in_step, local in (
        (10, 20, 5, ("1-bit Adam", 10), ("and local steps", 20)),
        (20, 10, 50, ("0/1 Adam", 10), ("0/1 Adam", 10)),
        (200, 125, 50, ("fp16", 0.8), ("and local steps", 2)),
        (99, 300, 99, ("fp16", 100 / 99), ("fp16", 100 / 99)),  # too little to tell
        (100 / WORTH, 300, 300, ("1-bit Adam", WORTH), ("1-bit Adam", WORTH)),
    ):
        found = {"fp32": run_of(150), "fp16": run_of(100), "1-bit Adam": run_of(adam), "0/1 Adam": run_of(zero_one)}
        found["and local steps"] = run_of(alone, local=3)
        for kind, (name, factor) in (("in step", in_step), ("local steps", local)):
            assert (first(found, kind).first, first(found, kind).factor) == (name, pytest.approx(factor))


def test_the_map_is_what_runs_say_at_each_rate_and_round_trip():
    found = Map.of(BERT, CLUSTER, [1e8, 1e11], [1e-3, 0.1])
    for (i, rtt), (j, rate) in itertools.product(enumerate((1e-3, 0.1)), enumerate((1e8, 1e11))):
        there = runs(BERT, replace(CLUSTER, network=rate, rtt=rtt))
        for kind in ("in step", "local steps"):
            assert found.places[kind][i][j] == first(there, kind)
    assert found.places["in step"][0][0].first == "0/1 Adam"
    assert found.places["in step"][1][1].first == "fp16" and found.places["in step"][1][1].factor < 1
    assert found.places["local steps"][0][0].first == "and local steps"


def test_the_command_prints_and_draws_the_map(tmp_path, monkeypatch, planned, printed):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    path, figures = tmp_path / "map.png", []
    monkeypatch.setattr(pyplot, "close", figures.append)
    monkeypatch.setattr("onebit.cli.plan.map.POINTS", (9, 8))
    text = printed(*FLAT, f"--map={path}", "--network=1gbit", "--rtt=10")
    assert path.read_bytes().startswith(b"\x89PNG") and text.endswith(f"Map: {path}\n")
    found = planned(*FLAT, f"--map={path}")[0]["map"]
    assert [found["rates_bit_per_s"], found["round_trips_s"]] == [list(each) for each in TABLE]
    lines = text[text.index("first to end 1,000 steps") :].splitlines()
    names = {"and local steps": "local steps"}
    for start, kind in ((1, "in step"), (7, "local steps")):
        assert "10 Mbit/s" in lines[start] and "100 Gbit/s" in lines[start]
        for line, rtt, row in zip(lines[start + 1 :], found["round_trips_s"], found["places"][kind], strict=False):
            shown = [f"{names.get(place['first'], place['first'])} {place['factor']:.2f}" for place in row]
            assert " ".join(line.split()) == " ".join([f"{1e3 * rtt:g} ms", *shown])
    assert "equal numbers of steps" in text and "is a bound" in " ".join(text.split())
    assert not {"map", "scale"} & planned(*FLAT)[0].keys()
    panels = figures[0].axes[:4]
    texts = [{text.get_text().replace("\n", " ") for text in axes.texts} for axes in panels]
    assert texts[0] == {"0/1 Adam", "don't use this library: uncompressed is first"}
    assert "0/1 Adam with local steps" in texts[2]
    assert "ranks in step" in panels[0].get_title() and "with local steps" in panels[3].get_title()
    star = panels[0].lines[0]
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (1.0, 10.0)


def test_names_stand_in_the_middle_of_their_region_and_points_are_equally_far_apart():
    which = [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert middle(which, 1) == (1, 3) and which[middle(which, 0)[0]][middle(which, 0)[1]] == 0
    found = spaced(ROUND_TRIPS, 4)
    assert found[0] == ROUND_TRIPS[0] and found[-1] == pytest.approx(ROUND_TRIPS[1])
    assert found[1] / found[0] == pytest.approx(found[3] / found[2])
    assert (min(TABLE[0]), max(TABLE[0])) == RATES and (min(TABLE[1]), max(TABLE[1])) == ROUND_TRIPS


def test_sizes_are_what_the_model_says(planned):
    model = replace(BERT, levels=2)
    found = sizes(model, CLUSTER)
    shapes = [(n, 1) for n in (8, 64, 512, 4096)] + [(n, 8) for n in (64, 512, 4096)]
    assert [(each.ranks, each.node) for each in found] == shapes
    for each in found:
        there = replace(CLUSTER, gpus=each.ranks, gpus_per_node=each.node)
        n = Groups.of(there, 2).replicas.gpus
        assert each.messages == 2 * (n - 1)
        assert each.message == message_bytes(340_000_000, n, 1, TwoPhases, each.node)[0] / each.node / n
        assert each.servers == min(n, int(340e6 / 8 / each.node / 2**16))
        assert each.state == pytest.approx(340e6 * state_bytes(model, there))
        assert each.direct == pytest.approx(340e6 * state_bytes(replace(model, reply="direct"), there))
        assert each.round_trips == rounds(model, there)
        for rtt, fp16, one_bit in zip(SCALE_ROUND_TRIPS, each.fp16, each.one_bit, strict=True):
            far = replace(there, rtt=rtt)
            assert (fp16, one_bit) == (uncompressed(model, far, 2).total, stage_2(model, far).total)
    assert found[0].share > found[3].share > 0
    shown, model, cluster = planned(*FLAT, "--scale")
    rows = json.loads(json.dumps([asdict(each) for each in sizes(model, cluster)]))
    assert shown["scale"] == {"round_trips_s": list(SCALE_ROUND_TRIPS), "sizes": rows}


def blocks_of(page):
    """Of a page: each command with --scale, and the lines that it is said to print."""
    for part in page.split("    onebit plan ")[1:]:
        command, _, rest = part.partition("\n\nprints, beneath the plan:\n\n")
        lines = itertools.takewhile(lambda line: line.startswith("    ") or not line, rest.splitlines())
        yield command.replace("\\\n", " ").split(), [line[4:] for line in lines]


def test_the_page_on_scale_has_what_the_commands_print(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    blocks = list(blocks_of((ROOT / "docs/scale.md").read_text(encoding="utf-8")))
    assert len(blocks) == 2
    for arguments, lines in blocks:
        assert cli.main(["plan", *arguments]) == 0
        assert capsys.readouterr().out.rstrip().endswith("\n".join(lines).strip()) and len(lines) > 18


def test_what_other_pages_have_of_the_plan():
    """Pictures behind the command that draws them; and how many comparisons are within a deviation."""
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    for name in ("plan_map-language-model.png", "plan_map-bert-large.png"):
        before, after = page.split(f"](../perf/results/{name})")
        command = before.rsplit("\n\n", 2)[1]
        assert command.startswith("    onebit plan ") and command.endswith("--map map.png") and name not in after
        assert (ROOT / "perf/results" / name).stat().st_size < 200_000
    page = (ROOT / "docs/convergence.md").read_text(encoding="utf-8")
    found = [re.search(r"in (\d+ of \d+) comparisons", " ".join(text.split())) for text in (page, LOSS)]
    assert found[0] and found[1] and found[0][1] == found[1][1]


def test_text_and_map_say_the_same_of_a_run_on_cpus(capsys):
    """Where no method of ours is first there is no gain of 5 % either; and numbers are ones that people read."""
    options = "--elements 10m --network 50mbit --transport gloo --gpus-per-node 1 --gpus 2 --forward 100 --backward 200"
    assert cli.main(["plan", *options.split(), "--dtype=float32"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"--memory +11.2 GB/s +a copy on one core", text) and "e+" not in text
    (below,) = re.findall(r"or more, below ([0-9.,]+) Gbit/s", text)
    rate, model = 1e9 * float(below.replace(",", "")), Model(10_000_000, 4, 0.1, 0.2)
    cluster = Cluster(gpus=2, gpus_per_node=1, network=rate, transport="gloo", memory=11.2e9, efficiency=1.0)
    (places,) = Map.of(model, cluster, [rate / 2, 2 * rate], [0.0]).places["in step"]
    assert [place.first in ("fp32", "fp16") for place in places] == [False, True]
    assert "1 of at most 1 GPU)" in describe(model, replace(cluster, gpus=1))
    assert rates(50e6)[0] < 50e6 < rates(50e6)[-1] and min(rates(10e9)) == 0.1e9
