"""The cluster model: bytes counted message by message, the schedule of a real exchange, and what `onebit plan` says."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onebit.cli import main as cli
from onebit.cli.plan.model import (
    BUCKET,
    Cluster,
    Model,
    compressed_all_reduce,
    end_to_end,
    message_bytes,
    pays_below,
    pipelined,
    sent_compressed,
    sent_uncompressed,
    stage_1,
    stage_2,
    uncompressed,
)
from onebit.cli.plan.options import CLUSTERS, MODELS, OPTIONS, number
from onebit.collectives.chunking import candidates
from onebit.collectives.exchange import Exchange
from onebit.kernels.data.layout import BLOCK_SIZE, Layout
from onebit.kernels.data.wire import Format

CPU = torch.device("cpu")
RECORD = Path(__file__).resolve().parents[3] / "perf/results/amd-epyc.json"
SLOW = Cluster(gpus=16, gpus_per_node=4, network=8e9, latency=1e-3, intra=4e9, intra_latency=1e-4, memory=1e11)
BERT = Model(340_000_000, 2, 0.036, 0.061, overlap="none")
GROUPS = [(1, 8), (4, 4), (4, 1), (16, 4), (24, 8)]


def crossing(messages, on_node):
    """The most bytes that a node sends to others, and that a GPU sends within its node, of (from, to, bytes)."""
    between, within = {}, {}
    for source, target, size in messages:
        if source // on_node != target // on_node:
            between[source // on_node] = between.get(source // on_node, 0) + size
        elif source != target:
            within[source] = within.get(source, 0) + size
    return max(between.values(), default=0), max(within.values(), default=0)


@pytest.mark.parametrize("gpus, per_node", GROUPS)
def test_the_all_to_all_takes_what_its_messages_take(gpus, per_node):
    cluster = replace(SLOW, gpus=gpus, gpus_per_node=per_node, latency=0, intra_latency=0)
    messages = [(i, k, 1e9 / gpus) for i in range(gpus) for k in range(gpus)]
    between, within = crossing(messages, cluster.on_node)
    assert cluster.all_to_all(1e9) == pytest.approx(max(between / 1e9, within / 4e9))


@pytest.mark.parametrize("gpus, per_node", GROUPS)
def test_the_all_gather_takes_what_its_ring_takes(gpus, per_node):
    cluster = replace(SLOW, gpus=gpus, gpus_per_node=per_node, latency=0, intra_latency=0)
    ring = [(i, (i + 1) % gpus, 1e9 / gpus) for _ in range(gpus - 1) for i in range(gpus)]
    between, within = crossing(ring, cluster.on_node)
    assert cluster.all_gather(1e9) == pytest.approx(max(between / 1e9, within / 4e9))


@pytest.mark.parametrize("gpus, per_node", GROUPS)
def test_the_all_reduce_takes_what_its_rings_take(gpus, per_node):
    """Reduce-scatter within nodes, a ring of each local rank between nodes, all-gather within nodes."""
    cluster = replace(SLOW, gpus=gpus, gpus_per_node=per_node, latency=0, intra_latency=0)
    g, m = cluster.on_node, cluster.nodes
    inner = [
        (node * g + i, node * g + (i + 1) % g, 1e9 / g) for node in range(m) for _ in range(g - 1) for i in range(g)
    ]
    outer = [
        (node * g + i, (node + 1) % m * g + i, 1e9 / g / m)
        for i in range(g)
        for _ in range(2 * (m - 1))
        for node in range(m)
    ]
    _, within = crossing(inner, g)
    between, _ = crossing(outer, g)
    assert cluster.all_reduce(1e9) == pytest.approx(2 * within / 4e9 + between / 1e9)


def test_latencies_are_those_of_the_messages():
    assert SLOW.all_reduce(0) == pytest.approx(2 * 3 * 1e-3 + 2 * 3 * 1e-4)
    assert SLOW.all_to_all(0) == pytest.approx(12 * 1e-3 + 3 * 1e-4)
    assert SLOW.all_gather(0) == pytest.approx(3 * 1e-3 + 12 * 1e-4)
    assert SLOW.agreement() == pytest.approx(2 * 4 * 1e-3)
    assert replace(SLOW, gpus=4).agreement() == pytest.approx(2 * 2 * 1e-4)


class Clock:
    """A transport and passes that take time on paper: one device, one network."""

    rank, size, name = 0, 2, "clock"

    def __init__(self, compress, gather, average, scatter, use):
        self.device = self.network = 0.0
        self.took = SimpleNamespace(compress=compress, gather=gather, average=average, scatter=scatter, use=use)

    def send(self, seconds):
        self.network = end = max(self.network, self.device) + seconds

        def wait():
            self.device = max(self.device, end)

        return SimpleNamespace(wait=wait)

    def all_to_all(self, out, sent, phase):
        return self.send(self.took.gather)

    def all_gather(self, out, sent, phase):
        out.view(self.size, -1).copy_(sent.view(1, -1))
        return self.send(self.took.scatter)

    def all_max(self, values, phase):
        return None

    def all_sum(self, values, phase):
        return SimpleNamespace(wait=lambda: None)

    def work(self, seconds):
        self.device += seconds


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("times", [(1, 2, 3, 4, 5), (5, 4, 3, 2, 1), (1, 7, 1, 1, 0), (0, 1, 6, 5, 2)])
def test_the_schedule_is_that_of_an_exchange(chunks, times):
    clock = Clock(*times)
    exchange = Exchange(Layout([BLOCK_SIZE * 2 * chunks], ranks=2, chunks=chunks), clock, CPU)
    exchange.agree()
    for messages in (exchange.received, exchange.reply):
        messages.header.copy_(torch.tensor(exchange.format.header, dtype=torch.int32))
    clock.device = clock.network = 0.0
    exchange.backend = SimpleNamespace(average=lambda *_, **__: clock.work(clock.took.average))
    exchange.run(lambda chunk: clock.work(clock.took.compress), lambda chunk: clock.work(clock.took.use))
    assert pipelined(chunks, *times) == clock.device


@pytest.mark.parametrize("elements", [1, 2049, 340_000_000])
@pytest.mark.parametrize("ranks, chunks", [(1, 1), (3, 2), (64, 8)])
def test_messages_have_the_bytes_of_the_wire(elements, ranks, chunks):
    form = Format.of(Layout([elements], ranks=ranks, chunks=chunks))
    assert message_bytes(elements, ranks, chunks) == ranks * chunks * form.nbytes


def test_bytes_sent():
    gpu, node = sent_uncompressed(BERT, SLOW)
    assert gpu == pytest.approx(2 * 680e6 * 15 / 16) and node == pytest.approx(2 * 680e6 * 3 / 4)
    gpu, node = sent_compressed(BERT, SLOW)
    assert sent_uncompressed(BERT, SLOW, 4)[0] / gpu == pytest.approx(32 / (1 + 1 / 64), rel=1e-3)
    assert node == pytest.approx(message_bytes(340_000_000, 16) * (4 * 12 / 16 + 15 / 16))
    assert sent_compressed(BERT, replace(SLOW, gpus=4))[1] == 0


def test_a_step_is_its_parts():
    plain, two = uncompressed(BERT, SLOW), stage_2(BERT, SLOW, chunks=1)
    assert plain.total == pytest.approx(0.036 + 0.061 + SLOW.all_reduce(680e6) + 340e6 * (2 + 16 + 10) / 9e10)
    size = message_bytes(340_000_000, 16)
    assert two.communication == pytest.approx(SLOW.all_to_all(size) + SLOW.all_gather(size) + SLOW.agreement())
    passes = 2 + (2 + 4 + 1 / 8 + 4 + 1 / 8) + (16 / 8 + 8 + 1 / 8) / 16 + (1 / 8 + 4 + 10)  # TARGETS, 16 bits
    assert two.local == pytest.approx(340e6 * passes / 9e10)
    one = stage_1(BERT, SLOW)
    assert one.total - plain.total == pytest.approx(340e6 * 2 / 9e10 + SLOW.agreement())


def test_lamb_reads_its_statistics_too():
    lamb = replace(BERT, optimizer="lamb")
    more = stage_2(lamb, SLOW, 1).local - stage_2(BERT, SLOW, 1).local
    assert more == pytest.approx(340e6 * (1 / 8 + 1 / 8 + 12) / 9e10)
    assert stage_2(lamb, SLOW, 1).communication == pytest.approx(stage_2(BERT, SLOW, 1).communication)


def test_the_best_number_of_chunks_is_taken():
    options = candidates(BERT.elements, SLOW.gpus, BLOCK_SIZE)
    totals = {chunks: stage_2(BERT, SLOW, chunks).total for chunks in options}
    best = stage_2(BERT, SLOW)
    assert best.total == min(totals.values()) == totals[best.chunks] < totals[1]
    calls = [compressed_all_reduce(340_000_000, SLOW, chunks=chunks) for chunks in options]
    assert compressed_all_reduce(340_000_000, SLOW) == min(calls) < calls[0]


def test_overlap_hides_what_backward_is_long_enough_for():
    alone, hidden = uncompressed(BERT, SLOW), uncompressed(replace(BERT, overlap="uncompressed"), SLOW)
    assert alone.communication - hidden.communication == pytest.approx(BERT.backward)
    long = replace(BERT, overlap="uncompressed", backward=1e3)
    assert uncompressed(long, SLOW).communication == pytest.approx(alone.communication * BUCKET / 680e6)
    assert stage_2(replace(BERT, overlap="uncompressed"), SLOW, 1) == stage_2(BERT, SLOW, 1)
    both = stage_2(replace(BERT, overlap="both"), SLOW, 1)
    assert stage_2(BERT, SLOW, 1).communication - both.communication == pytest.approx(BERT.backward)
    many = uncompressed(replace(BERT, overlap="uncompressed", accumulation=3), SLOW)
    assert many.communication == hidden.communication and many.forward == pytest.approx(3 * 0.036)


def test_one_gpu_sends_nothing():
    alone = replace(SLOW, gpus=1)
    assert uncompressed(BERT, alone).communication == 0
    assert stage_2(BERT, alone).communication == pytest.approx(0, abs=1e-12)
    assert sent_compressed(BERT, alone) == (0, 0)


def test_a_given_time_stands_in_for_the_passes():
    given = replace(BERT, local=0.075)
    steps = [step(given, SLOW) for step in (uncompressed, stage_1, stage_2)]
    assert [step.local for step in steps] == [0.075] * 3


def test_measured_rates_stand_in_for_the_memory():
    rates = {"scan": 1e9, "compress": 2e9, "average": 3e9, "adam_update": 4e9}
    step = stage_2(BERT, replace(SLOW, rates=rates, cores=0.5), 1)
    seconds = 2 / 1e9 + 10.25 / 2e9 + 10.125 / 16 / 3e9 + 14.125 / 4e9
    assert step.local == pytest.approx(2 * 340e6 * seconds)


def test_compression_pays_below_the_rate_it_says():
    model, cluster = replace(BERT, overlap="uncompressed"), Cluster(gpus=64, network=100e9)
    rate = pays_below(model, cluster)
    assert 1e9 < rate < 1e12
    for factor, faster in ((0.01, True), (0.98, True), (1.03, False), (100, False)):
        there = replace(cluster, network=factor * rate)
        assert (stage_2(model, there).total < uncompressed(model, there).total) is faster
    assert pays_below(BERT, SLOW) == math.inf  # four GPUs a node that all-reduce at 4 GB/s
    assert pays_below(replace(model, elements=1000), replace(cluster, latency=1)) == 0


def test_a_run_is_a_share_of_each_stage():
    times = stage_1(BERT, SLOW).total, stage_2(BERT, SLOW).total
    for warmup, expected in ((0, times[1]), (1, times[0]), (0.25, 0.25 * times[0] + 0.75 * times[1])):
        assert end_to_end(replace(BERT, warmup=warmup), SLOW) == pytest.approx(expected)


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
    "arguments, says",
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
def test_a_plan_that_cannot_be_made(arguments, says, capsys):
    assert cli.main(["plan", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("onebit plan: error: ") and says in message


@pytest.mark.parametrize(
    "arguments, says",
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
def test_a_wrong_option_is_named(arguments, says, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*PRESETS, *arguments])
    assert stop.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, says",
    [
        ('{"netwrok": "1gbit"}', "there is no option 'netwrok'. The options are elements"),
        ('{"network": "fast"}', "network: 'fast' is no rate"),
        ("[1]", "is no JSON object"),
        ("{", "can't be read"),
    ],
)
def test_a_wrong_file_of_constants_is_named(content, says, tmp_path, capsys):
    path = tmp_path / "constants.json"
    path.write_text(content)
    assert cli.main([*PRESETS, f"--constants={path}"]) == 2
    message = capsys.readouterr().err
    assert says in message and str(path) in message


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
