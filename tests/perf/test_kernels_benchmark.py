"""Benchmarks on one device, of the passes and of a whole step: right figures and records."""

import json

import pytest
import torch

from onebit import OneBitAdam, OneBitLamb
from onebit.cli.progress import Progress
from onebit.kernels.passes import PASSES
from perf import optimizer_step as whole_step
from perf.kernels import benchmark, local_step, step_bytes
from perf.optimizer_step import FOREACH, FUSED, LOCAL, STAGE_1, STAGE_2, Row
from perf.targets import targets_of
from tests.test_structure import ROOT


def test_a_run_writes_a_table_and_a_record(tmp_path, capsys):
    assert benchmark.main(["--device=cpu", "--elements=5000", "--repeats=2", f"--out={tmp_path / 'new'}"]) == 0
    text = capsys.readouterr().out
    (record_path,) = (tmp_path / "new").glob("*.json")
    assert str(record_path) in text
    record = json.loads(record_path.read_text())
    assert [row["name"] for row in record["passes"]] == list(PASSES)
    assert all(name in text for name in PASSES)
    assert record["threads"] == 1 and record["elements"] == 5000
    assert record["versions"]["torch"] == torch.__version__
    assert record["device"] and record["cpu"] and record["copy_gb_per_s"] > 0
    nbytes = {row["name"]: row["bytes"] for row in record["passes"]}
    assert nbytes["compress"] == 12.25 * 5000
    assert nbytes["average"] == 9.125 * 2 * 2048  # the first of 8 shards of 20 blocks, of 8 times as many elements
    assert nbytes["average_codes"] == 8.5 * 2 * 2048
    for row in record["passes"]:
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["percent_of_copy"] == pytest.approx(100 * row["gb_per_s"] / record["copy_gb_per_s"])
        assert row["target_percent"] is None  # targets count at full size only
    assert targets_of(record) == []


def test_targets_are_the_standard_runs(monkeypatch):
    setting = benchmark.Setting(torch.device("cpu"), 4096, repeats=1)
    monkeypatch.setattr(benchmark, "_standard_elements", lambda device: 4096)
    _, rows = benchmark.measure(setting, Progress())
    assert [target.needed for target in benchmark.targets(rows)] == [0.65, 0.4, 0.8, 0.65, 0.75]
    row = benchmark.Row("compress", 1, 1.0, 1.0, 64.0, 65.0)
    assert [(t.reached, t.met) for t in benchmark.targets([row])] == [(0.64, False)]
    assert benchmark.TARGETS["cuda"] == dict.fromkeys(PASSES, 90)
    step = {"milliseconds": {"onebit": 2.0, "adamw_fused": 3.0, "eager": 15.0}}
    assert [(t.reached, t.met) for t in local_step.targets(step)] == [(1.5, True), (7.5, False)]


def test_records_of_other_settings_have_other_names():
    cpu = torch.device("cpu")
    settings = [benchmark.Setting(cpu, *of) for of in ((2**24,), (2**20,), (2**24, torch.bfloat16))]
    names = [benchmark.record_name(each) for each in settings]
    assert len(set(names)) == len(names)
    assert all(name.startswith(names[0]) and name.replace("-", "").isalnum() for name in names)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_eager_step_is_1_bit_adam(ranks):
    """It follows Algorithm 1 with one scale (l2) a message; every rank sends what this one does."""
    numels = local_step.bert_large()
    assert (len(numels), sum(numels)) == (302, 336_226_108)
    torch.manual_seed(0)
    params = [torch.randn(n, requires_grad=True) for n in (5, 40, 100)]
    for p in params:
        p.grad = torch.randn_like(p)
    eager = local_step.EagerOneBitAdam(params, ranks)
    size = len(eager.exp_avg)
    m, e, server = torch.zeros(size), torch.zeros(size), torch.zeros(size // ranks)
    x = torch.cat([p.detach().clone() for p in params])
    g = torch.nn.functional.pad(torch.cat([p.grad for p in params]), (0, eager.padding))

    def one_bit(values):
        return values.square().mean().sqrt() * torch.where(values >= 0, 1.0, -1.0)

    for _ in range(3):
        c = 0.9 * m + 0.1 * g + e
        e = c - one_bit(c)
        reply = one_bit(one_bit(c).view(ranks, -1).mean(0) + server)
        server = one_bit(c).view(ranks, -1).mean(0) + server - reply
        m = reply.repeat(ranks)
        x = x - 1e-3 * (m[: len(x)] / (1 + 1e-8) + 0.01 * x)
        eager.step()
    torch.testing.assert_close(torch.cat([p.detach() for p in params]), x)
    torch.testing.assert_close(eager.exp_avg, m)
    torch.testing.assert_close(eager.residual, e)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_local_step_on_a_gpu():
    step = local_step.measure(torch.device("cuda", 0), repeats=2, numels=[5, 3000, 100_000])
    assert step["parameters"] == 3 and all(ms > 0 for ms in step["milliseconds"].values())
    assert "adamw" in local_step.table(step)


def test_the_bytes_of_a_step_are_on_the_page():
    """1-bit Adam's stage 2, by hand: scan 4, compress 12.25, update 12.125, on an eighth E 8, 8 messages, the reply."""
    table = step_bytes.table()
    assert table in (ROOT / "docs/performance.md").read_text()
    plain = 4 + 12.25 + 12.125 + (8 + 8 / 8 + 1 / 8) / 8
    assert f"| 1-bit Adam, stage 2, with DDP or without | {plain:.1f} |" in table


SMALL = {"large": ("a few elements", [3000, 5]), "many": ("some tensors", [20] * 10)}
CPU = torch.device("cpu")


def test_a_run_of_whole_steps_writes_a_table_and_a_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(whole_step, "MODELS", SMALL)
    assert whole_step.main(["--device=cpu", "--rounds", "2", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    record, text = json.loads(path.read_text()), capsys.readouterr().out
    assert "a few elements" in text
    names = [FUSED, FOREACH, *(f"1-bit {o}, {s}" for o in ("Adam", "LAMB") for s in (STAGE_1, STAGE_2, LOCAL))]
    assert [(r["model"], r["step"]) for r in record["rows"]] == [(m, n) for m in SMALL for n in names]
    assert all(row["seconds"] > 0 for row in record["rows"]) and len(record["targets"]) == 4


def test_each_step_is_of_the_stage_that_it_is_named_after():
    steps = whole_step.steps([300, 7], CPU)
    for name, kind in {"1-bit Adam": OneBitAdam, "1-bit LAMB": OneBitLamb}.items():
        for stage, compressing in ((STAGE_1, False), (STAGE_2, True)):
            optimizer = steps[f"{name}, {stage}"].__self__
            optimizer.step()
            assert type(optimizer) is kind and optimizer.compressing is compressing


def test_targets_are_ratios_of_times():
    """A model's steps take 1, 2, 3, ... times as long as the first of them."""
    names = [FUSED, FOREACH, *(f"1-bit Adam, {stage}" for stage in (STAGE_1, STAGE_2, LOCAL))]
    rows = [Row(model, step, float(i)) for model in whole_step.SHOWN["cpu"] for i, step in enumerate(names, 1)]
    found = whole_step.targets(rows)
    assert [target.reached for target in found] == pytest.approx([1 / 3, 1 / 5, 2 / 3, 2 / 4])
    assert [1 / target.needed for target in found] == pytest.approx([1.2, 1.7, 1.2, 1.2])
