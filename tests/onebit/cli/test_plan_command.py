"""`onebit plan`: its options, presets and files, what it prints, and its errors."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from onebit.cli import main as cli
from onebit.cli.plan.model import (
    Cluster,
    Model,
    end_to_end,
    sent_compressed,
    stage_2,
    state_bytes,
    uncompressed,
)
from onebit.cli.plan.options import CLUSTERS, MODELS, OPTIONS, number
from onebit.cli.plan.report import describe, plot

RECORD = Path(__file__).resolve().parents[3] / "perf/results/amd-epyc.json"
BERT = Model(340_000_000, 2, 0.036, 0.061, overlap="none")


PRESETS = ["plan", "--model=bert-large", "--cluster=ethernet-v100", "--gpus=64"]


def planned(capsys, *more):
    assert cli.main([*PRESETS, "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_prints_what_the_model_says(capsys):
    found = planned(capsys)
    assert found["cluster"]["nodes"] == 16 and found["model"]["elements"] == 340_000_000
    model, cluster = Model(**found["model"]), Cluster(**{k: v for k, v in found["cluster"].items() if k != "nodes"})
    two = stage_2(model, cluster)
    assert found["steps"]["stage 2"]["total"] == two.total
    speed_up = uncompressed(model, cluster, 2).total / two.total
    assert found["speed_up"]["stage 2"]["fp16"] == found["speed_up"]["stage 2"]["own dtype"] == speed_up
    assert found["speed_up"]["end to end"]["fp32"] == uncompressed(model, cluster, 4).total / end_to_end(model, cluster)
    assert cli.main(PRESETS) == 0
    text = capsys.readouterr().out
    for shown in (
        f"{1e3 * two.total:,.1f}",
        f"{speed_up:.2f} x fp16's",
        "15.13 %",
        "16 nodes of 4",
        "any network rate",
    ):
        assert shown in text
    assert "assumed: the project's target" in text and "Predicted, not measured" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def cells(text, title, row):
    """What stands in a row of the table with that title."""
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()
    (found,) = [line for line in lines if line.startswith(f"  {row} ")]
    return found.removeprefix(f"  {row}").split()


def test_both_levels_are_shown_and_the_faster_one_is_advised(capsys):
    found = planned(capsys)
    model, cluster = Model(**found["model"]), Cluster(**{k: v for k, v in found["cluster"].items() if k != "nodes"})
    assert model.levels == 2 and list(found["levels"]) == ["2", "1"]
    assert cli.main(PRESETS) == 0
    text = capsys.readouterr().out
    assert cells(text, "stage 2 by --levels", "milliseconds a step")[0] == f"{1e3 * stage_2(model, cluster).total:,.1f}"
    shown = {what: cells(text, "stage 2 by --levels", what) for what in ("milliseconds a step", "times fp16's speed")}
    sent = cells(text, "stage 2 by --levels", "MB a node sends to others")
    kept = cells(text, "stage 2 by --levels", "bytes of state an element")
    for place, levels in enumerate((2, 1)):
        other = replace(model, levels=levels)
        step = stage_2(other, cluster)
        assert shown["milliseconds a step"][place] == f"{1e3 * step.total:,.1f}"
        assert shown["times fp16's speed"][place] == f"{uncompressed(model, cluster, 2).total / step.total:.2f}"
        gpu, node = sent_compressed(other, cluster, step.chunks)
        assert sent[place] == f"{node / 1e6:,.1f}" and kept[place] == f"{state_bytes(other, cluster):.2f}"
        entry = {"total": step.total, "gpu": gpu, "node": node, "state": state_bytes(other, cluster)}
        assert found["levels"][str(levels)] == entry | {"fp16": uncompressed(model, cluster, 2).total / step.total}
    ratio = stage_2(replace(model, levels=1), cluster).total / stage_2(model, cluster).total
    assert f'Take two levels (node_group="auto", the default): {ratio:.2f} times as fast as one level' in text
    assert cli.main([*PRESETS, "--network=100gbit"]) == 0
    fast = replace(cluster, network=100e9)
    ratio = stage_2(model, fast).total / stage_2(replace(model, levels=1), fast).total
    assert f"Take one level (node_group=None): {ratio:.2f} times as fast as two levels" in capsys.readouterr().out


@pytest.mark.parametrize("levels, name", [(1, "one level"), (2, "two levels")])
def test_the_report_is_of_the_levels_asked_for(levels, name, capsys):
    found = planned(capsys, f"--levels={levels}", "--gpus=8")
    model, cluster = Model(**found["model"]), Cluster(**{k: v for k, v in found["cluster"].items() if k != "nodes"})
    assert found["model"]["levels"] == levels
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
    assert planned(capsys, *more)["levels"] == {}
    texts = []
    for levels in (1, 2):
        assert cli.main([*PRESETS, *more, f"--levels={levels}"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "stage 2 by --reply" in texts[0]
    assert "level" not in texts[0] and "Take" not in texts[0] and "state" not in texts[0]


def test_an_option_goes_before_the_file_and_the_file_before_the_preset(tmp_path, capsys):
    path = tmp_path / "constants.json"
    path.write_text(
        json.dumps({"network": "25gbit", "gpus-per-node": 2, "latency": 7, "warmup": 0.5, "dtype": "float32"})
    )
    found = planned(capsys, f"--constants={path}", "--gpus-per-node=8", "--intra", "100")
    assert found["cluster"]["network"] == 25e9 and found["cluster"]["latency"] == pytest.approx(7e-6)
    assert found["cluster"]["gpus_per_node"] == 8 and found["cluster"]["intra"] == 100e9
    assert found["cluster"]["memory"] == 900e9  # the preset's
    assert found["model"]["warmup"] == 0.5 and found["model"]["itemsize"] == 4


def test_rates_come_from_a_record_of_the_benchmark(capsys):
    measured = {row["name"]: row["gb_per_s"] for row in json.loads(RECORD.read_text())["passes"]}
    found = planned(capsys, f"--rates={RECORD}", "--cores=0.5")
    assert found["cluster"]["rates"]["compress"] == pytest.approx(1e9 * measured["compress"])
    assert found["steps"]["stage 2"]["local"] > 20 * planned(capsys)["steps"]["stage 2"]["local"]


def test_numbers_and_units():
    read = {name: OPTIONS[name].parse for name in OPTIONS}
    assert [read["elements"](text) for text in ("340e6", "340M", "340_000_000")] == [340_000_000] * 3
    assert [read["network"](text) for text in ("100gbit", "0.1Tbit", "100 Gbit/s", "800mbit")] == [1e11] * 3 + [8e8]
    assert read["latency"]("20") == pytest.approx(2e-5) and read["forward"]("36.5") == pytest.approx(0.0365)
    assert OPTIONS["intra"].show(read["intra"]("4.25")) == "4.25 GB/s"
    for preset in (*MODELS.values(), *CLUSTERS.values()):
        assert all(read[name](text) is not None for name, text in preset.items())


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["--elements=1b"], "--forward is missing: give it or a --model"),
        (["--model=bert-large", "--gpus=8"], "--network is missing: give it or a --cluster"),
        (["--model=bert-large", "--cluster=ethernet-v100"], "--gpus is missing"),
        ([*PRESETS[1:], "--gpus=63"], "63 GPUs do not fill nodes of 4"),
        ([*PRESETS[1:], "--warmup=1.5"], "warmup is 1.5: it is a share"),
        ([*PRESETS[1:], "--memory=0"], "memory is 0.0: it is a finite number above 0"),
        ([*PRESETS[1:], "--efficiency=2"], "both are shares"),
        ([*PRESETS[1:], "--constants=/nowhere.json"], "can't be read"),
        ([*PRESETS[1:], "--plot=plan.xyz"], "cannot be a 'xyz' file"),
    ],
)
def test_a_plan_that_cannot_be_made(arguments, part, capsys):
    assert cli.main(["plan", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("onebit plan: error: ") and part in message


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["--network=100"], "'100' is no rate"),
        (["--network=0gbit"], "is no rate"),
        (["--gpus=2.5"], "not a whole number above 0"),
        (["--gpus=0"], "not a whole number above 0"),
        (["--forward=-3"], "'-3' is not a number, 0 or from"),
        (["--latency=nan"], "'nan' is not a number"),
        (["--dtype=int8"], "none of float32"),
        (["--levels=3"], "'3' is none of 1, 2"),
        (["--levels=both"], "'both' is none of 1, 2"),
        (["--overlap=yes"], "none of none, uncompressed, both"),
        (["--rates=/nowhere.json"], "no record of perf.kernels"),
        (["--model=gpt-9"], "invalid choice"),
    ],
)
def test_a_wrong_option_is_named(arguments, part, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*PRESETS, *arguments])
    assert stop.value.code == 2 and part in capsys.readouterr().err


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


@pytest.mark.parametrize("more", [[], ["--gpus=4"], ["--gpus=3", "--network=1tbit", "--gpus-per-node=1"]])
def test_a_plot(more, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert cli.main([*PRESETS, *more, f"--plot={path}"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and str(path) in capsys.readouterr().out
    assert cli.main([*PRESETS, f"--plot={tmp_path / 'nowhere' / 'plan.png'}"]) == 2
    assert "choose another --plot" in capsys.readouterr().err


@pytest.mark.parametrize("levels, other", [(1, "two levels"), (2, "one level")])
def test_a_plot_shows_the_other_levels_too(levels, other, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    model, cluster = replace(BERT, levels=levels), Cluster(gpus=16, gpus_per_node=4, network=1e10)
    plot(model, cluster, tmp_path / "plan.png")
    time, scale, network = ({line.get_label(): line.get_ydata() for line in axes.lines} for axes in figures[0].axes)
    unlike, first = replace(model, levels=3 - levels), replace(cluster, gpus=8)
    assert time[f"1 bit, stage 2, {other}"][1] == 1e3 * stage_2(unlike, first).total
    assert scale[f"stage 2, {other}"][1] == uncompressed(model, first, 2).total / stage_2(unlike, first).total
    assert f"stage 2, {other}" in network
    plot(model, replace(cluster, gpus_per_node=1), tmp_path / "plan.png")
    assert not any("level" in str(line.get_label()) for axes in figures[1].axes for line in axes.lines)


def test_a_plot_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert cli.main([*PRESETS, f"--plot={tmp_path / 'plan.png'}"]) == 2
    captured = capsys.readouterr()
    assert "pip install matplotlib" in captured.err and not captured.out


@pytest.mark.parametrize("text", ["1e308", "2e15", "1e-16", "1e400"])
def test_numbers_of_no_cluster_are_refused(text):
    """Found by tests.fuzz: the plan's sums went beyond a float."""
    with pytest.raises(ValueError, match="from 1e-15 to 1e"):
        number(text)
    assert number("1e15") == 1e15 and number("0") == 0
