"""`onebit plan`: its options, presets and files, what it prints and draws, and its errors."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from onebit.cli import main as cli
from onebit.cli.plan.model import Cluster, Model, end_to_end, sent_compressed, stage_2, state_bytes, uncompressed
from onebit.cli.plan.options import CLUSTERS, MODELS, OPTIONS, number
from onebit.cli.plan.report import describe, plot

RECORD = Path(__file__).resolve().parents[3] / "perf/results/amd-epyc.json"
PRESETS = ["plan", "--model=bert-large", "--cluster=ethernet-v100", "--gpus=64"]


def planned(capsys, *more):
    """What --json prints, and the model and cluster that it is of."""
    assert cli.main([*PRESETS, "--json", *more]) == 0
    found = json.loads(capsys.readouterr().out)
    cluster = Cluster(**{name: value for name, value in found["cluster"].items() if name != "nodes"})
    return found, Model(**found["model"]), cluster


def cells(text, title, row):
    """What stands in a row of the table with that title."""
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()
    (found,) = [line for line in lines if line.startswith(f"  {row} ")]
    return found.removeprefix(f"  {row}").split()


def test_the_command_prints_what_the_model_says(capsys):
    found, model, cluster = planned(capsys)
    assert found["cluster"]["nodes"] == 16 and model.elements == 340_000_000
    two, fp16 = stage_2(model, cluster), uncompressed(model, cluster, 2).total
    assert found["steps"]["stage 2"]["total"] == two.total
    assert found["speed_up"]["stage 2"]["fp16"] == found["speed_up"]["stage 2"]["own dtype"] == fp16 / two.total
    assert found["speed_up"]["end to end"]["fp32"] == uncompressed(model, cluster, 4).total / end_to_end(model, cluster)
    assert cli.main(PRESETS) == 0
    text = capsys.readouterr().out
    for shown in (f"{1e3 * two.total:,.1f}", f"{fp16 / two.total:.2f} x fp16's", "15.13 %", "16 nodes of 4"):
        assert shown in text
    assert "any network rate" in text
    assert "assumed: the project's target" in text and "Predicted, not measured" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_both_levels_are_shown_and_the_faster_one_is_advised(capsys):
    found, model, cluster = planned(capsys)
    assert model.levels == 2 and list(found["levels"]) == ["2", "1"]
    assert cli.main(PRESETS) == 0
    text = capsys.readouterr().out
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
    what = ("milliseconds a step", "times fp16's speed", "MB a node sends to others", "bytes of state an element")
    assert [cells(text, "stage 2 by --levels", row) for row in what] == [
        list(pair) for pair in zip(*shown, strict=True)
    ]
    ratio = stage_2(replace(model, levels=1), cluster).total / stage_2(model, cluster).total
    assert f'Take two levels (node_group="auto", the default): {ratio:.2f} times as fast as one level' in text
    assert cli.main([*PRESETS, "--network=100gbit"]) == 0
    fast = replace(cluster, network=100e9)
    ratio = stage_2(model, fast).total / stage_2(replace(model, levels=1), fast).total
    assert f"Take one level (node_group=None): {ratio:.2f} times as fast as two levels" in capsys.readouterr().out


@pytest.mark.parametrize("levels, name", [(1, "one level"), (2, "two levels")])
def test_the_report_is_of_the_levels_asked_for(levels, name, capsys):
    found, model, cluster = planned(capsys, f"--levels={levels}", "--gpus=8")
    assert model.levels == levels
    assert found["steps"]["stage 2"]["total"] == stage_2(model, cluster).total == found["levels"][str(levels)]["total"]
    assert found["bytes_sent"]["stage 2"]["node"] == found["levels"][str(levels)]["node"]
    for reply in (1, 2, "direct"):
        assert found["replies"][str(reply)]["total"] == stage_2(replace(model, reply=reply), cluster).total
    text = describe(model, cluster)
    assert f"{name} by --reply" in text and f"{levels} (this)" in text and "stage 2 by --reply" not in text
    asked = "direct (this)" if levels == 2 else "1 (this)"  # two nodes exchange directly, eight ranks do not
    assert asked in text[text.index("by --reply") :].splitlines()[0]


@pytest.mark.parametrize("more", [["--gpus=4"], ["--gpus=8", "--gpus-per-node=1"], ["--gpus=1"]])
def test_without_nodes_of_several_gpus_a_report_has_no_levels(more, capsys):
    assert planned(capsys, *more)[0]["levels"] == {}
    texts = []
    for levels in (1, 2):
        assert cli.main([*PRESETS, *more, f"--levels={levels}"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "stage 2 by --reply" in texts[0]
    assert "level" not in texts[0] and "Take" not in texts[0] and "state" not in texts[0]


def test_an_option_goes_before_the_file_and_the_file_before_the_preset(tmp_path, capsys):
    path = tmp_path / "constants.json"
    constants = {"network": "25gbit", "gpus-per-node": 2, "latency": 7, "warmup": 0.5, "dtype": "float32"}
    path.write_text(json.dumps(constants))
    _, model, cluster = planned(capsys, f"--constants={path}", "--gpus-per-node=8", "--intra", "100")
    assert (cluster.network, cluster.latency) == (25e9, pytest.approx(7e-6))
    assert (cluster.gpus_per_node, cluster.intra) == (8, 100e9)
    assert cluster.memory == 900e9  # the preset's
    assert (model.warmup, model.itemsize) == (0.5, 4)


def test_rates_come_from_a_record_of_the_benchmark(capsys):
    measured = {row["name"]: row["gb_per_s"] for row in json.loads(RECORD.read_text())["passes"]}
    found, _, cluster = planned(capsys, f"--rates={RECORD}", "--cores=0.5")
    assert cluster.rates["compress"] == pytest.approx(1e9 * measured["compress"])
    assert found["steps"]["stage 2"]["local"] > 20 * planned(capsys)[0]["steps"]["stage 2"]["local"]


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


@pytest.mark.parametrize(
    "content, part",
    [
        ('{"netwrok": "1gbit"}', "there is no option 'netwrok'. The options are elements"),
        ('{"network": "fast"}', "network: 'fast' is no rate"),
        ("[1]", "is no JSON object"),
        ("{", "can't be read"),
    ],
)
def test_a_wrong_file_of_constants_is_named(content, part, tmp_path, capsys):
    path = tmp_path / "constants.json"
    path.write_text(content)
    assert cli.main([*PRESETS, f"--constants={path}"]) == 2
    message = capsys.readouterr().err
    assert part in message and str(path) in message


def test_a_plot_shows_the_other_levels_too(tmp_path, monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures, path = [], tmp_path / "plan.png"
    monkeypatch.setattr(pyplot, "close", figures.append)
    monkeypatch.setattr("onebit.cli.plan.report.MOST_GPUS", 64)
    monkeypatch.setattr("onebit.cli.plan.report.rates", lambda: [1e9, 1e10])
    assert cli.main([*PRESETS, "--gpus=12", "--levels=1", f"--plot={path}"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and str(path) in capsys.readouterr().out
    _, model, cluster = planned(capsys, "--gpus=8", "--levels=2")  # the plot's second number of GPUs
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
