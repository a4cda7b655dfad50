"""`onebit plan`: its options, presets and files, what it prints, and its errors."""

import json
import sys
from pathlib import Path

import pytest

from onebit.cli import main as cli
from onebit.cli.plan.model import (
    Cluster,
    Model,
    end_to_end,
    stage_2,
    uncompressed,
)
from onebit.cli.plan.options import CLUSTERS, MODELS, OPTIONS, number

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
