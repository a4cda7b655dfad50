"""Benchmarks on one device, of the passes and of a whole step: right figures, records, none from a wrong result."""

import json
from types import ModuleType

import pytest
import torch

from onebit import OneBitAdam, OneBitLamb
from onebit.kernels import cpu, gpu
from onebit.kernels.passes import PASSES
from perf.command import WrongResult
from perf.kernels import benchmark, local_step, step_bytes
from perf.optimizer_step import benchmark as whole_step
from perf.optimizer_step.benchmark import FOREACH, FUSED, LOCAL, STAGE_1, STAGE_2, Row

CPU = torch.device("cpu")


def small(module=cpu, **other):
    return benchmark.Setting(CPU, module, 4096, repeats=2, **other)


def broken(name, spoil, skip=False):
    """The CPU's passes, of which one does a little more, or that alone."""
    module = ModuleType("broken")
    vars(module).update({k: v for k, v in vars(cpu).items() if not k.startswith("__")})
    right = getattr(cpu, name)

    def wrong(*args, **kwargs):
        if not skip:
            right(*args, **kwargs)
        spoil(*args)

    setattr(module, name, wrong)
    return module


def test_a_run_writes_a_table_a_record_and_a_plot(tmp_path, capsys):
    arguments = ["--device", "cpu", "--elements", "5000", "--repeats", "2", "--out", str(tmp_path / "new")]
    assert benchmark.main(arguments) == 0
    text = capsys.readouterr().out
    (record_path,) = (tmp_path / "new").glob("*.json")
    assert str(record_path) in text
    record = json.loads(record_path.read_text())
    assert [row["name"] for row in record["passes"]] == list(PASSES)
    assert all(name in text for name in PASSES)
    assert record["threads"] == 1 and record["elements"] == 5000 and record["backend"] == "cpu"
    assert record["versions"]["torch"] == torch.__version__
    assert record["device"] and record["cpu"] and record["copy_gb_per_s"] > 0
    nbytes = {row["name"]: row["bytes"] for row in record["passes"]}
    assert nbytes["compress"] == 12.25 * 5000
    assert nbytes["average"] == 9.125 * 2 * 2048  # the first of 8 shards of 20 blocks, of 8 times as many elements
    for row in record["passes"]:
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["percent_of_copy"] == pytest.approx(100 * row["gb_per_s"] / record["copy_gb_per_s"])
        assert row["target_percent"] is None  # targets count at full size only
    pytest.importorskip("matplotlib")
    assert record_path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_threads_are_set_for_the_run_and_put_back(monkeypatch):
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(benchmark, "run", lambda *_: seen.append(torch.get_num_threads()) or 0)
    try:
        torch.set_num_threads(3)
        for threads in ["--threads=2"], []:
            assert benchmark.main(["--device=cpu", *threads]) == 0
        assert (seen, torch.get_num_threads()) == ([2, 1], 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "scale", "norm"), [(torch.float32, "block", "l1"), (torch.float16, "tensor", "l2")])
def test_a_right_backend_passes_the_check(dtype, scale, norm):
    benchmark.check(small(gpu, dtype=dtype, scale=scale, norm=norm))


SPOILT = {
    "scan": lambda *args: args[3].fill_(1),
    "compress": lambda *args: args[-1].bits(0, args[-1].format.layout.shard(0, 0)).bitwise_xor_(1),
    "average": lambda *args: args[-1].buffer[0, 16:20].view(torch.float32).mul_(1.001),
    "decode": lambda *args: args[-1].tensors[3].mul_(1.001),
    "adam_warmup": lambda *args: args[3].mul_(1.001),
    "adam_update": lambda *args: args[1].tensors[0].add_(1e-3),
    "lamb_warmup": lambda *args: args[8].average.add_(1e-3),
    "lamb_statistics": lambda *args: args[6].ratio.mul_(1.001),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_wrong_pass_is_found(name):
    with pytest.raises(WrongResult, match=name):
        benchmark.check(small(broken(name, SPOILT[name])))
    if name == "average":  # one that does nothing, too
        with pytest.raises(WrongResult, match=name):
            benchmark.check(small(broken(name, lambda *_: None, skip=True)))


def test_a_wrong_result_gets_no_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "backend", lambda device: broken("compress", SPOILT["compress"]))
    assert benchmark.main(["--device", "cpu", "--elements", "4096", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "compress" in captured.err and captured.out == ""
    assert not list(tmp_path.iterdir())


def test_a_missed_target_shows():
    met, missed = (benchmark.Row("compress", 1, 1.0, 1.0, percent, 25.0) for percent in (25.0, 24.9))
    assert benchmark.table(4.0, [met, missed]).count("missed") == 1 and missed.missed and not met.missed
    assert benchmark.TARGETS["cpu"]["compress"] == 65 and benchmark.TARGETS["cpu"]["adam_update"] == 80
    assert benchmark.TARGETS["cuda"] == dict.fromkeys(PASSES, 90)


def test_records_of_other_settings_have_other_names():
    others = [{"elements": 2**20}, {"dtype": torch.bfloat16}, {"scale": "tensor"}]
    others += [{"norm": "l2"}, {"block_size": 1024}]
    settings = [benchmark.Setting(CPU, **{"module": cpu, "elements": 2**24, **other}) for other in ({}, *others)]
    names = [*(benchmark.record_name(each, 1) for each in settings), benchmark.record_name(settings[0], 2)]
    assert len(set(names)) == len(names)
    assert all(name.startswith(names[0]) and name.replace("-", "").isalnum() for name in names)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_eager_step_is_1_bit_adam(ranks):
    """Against Algorithm 1 with one scale (l2) a message; every rank sends what this one does."""
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
    assert "AdamW" in local_step.table(step)


def test_the_bytes_of_a_step_are_those_of_its_passes_and_what_lies_between():
    """By hand: scan 4, compress 12.25, update 12.125, and on an eighth E 8, 8 messages and the reply."""
    rows = dict(step_bytes.rows(8))
    plain = 4 + 12.25 + 12.125 + (8 + 8 / 8 + 1 / 8) / 8
    assert rows["1-bit Adam, stage 2, with DDP or without"] == pytest.approx(plain)
    assert rows["1-bit Adam, stage 2, `overlap=True`"] - plain == pytest.approx(4 + 4 / 8 + 2 * (1 / 64 + 1 / 8))
    assert rows["1-bit Adam, stage 1, without DDP"] == rows["1-bit Adam, stage 1, under DDP"] == 4 + 28 + 16
    direct = dict(step_bytes.rows(2, direct=True))
    assert direct["1-bit Adam, stage 2, with DDP or without"] == pytest.approx(4 + 8 + 4 + 1 / 8 + 2 / 8 + 12 + 2 / 8)


SMALL = {"large": ("a few elements", [3000, 5]), "many": ("some tensors", [20] * 10)}


def test_a_run_of_whole_steps_writes_a_table_a_record_and_a_plot(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(whole_step, "MODELS", SMALL)
    assert whole_step.main(["--rounds", "2", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    record, text = json.loads(path.read_text()), capsys.readouterr().out
    assert path.with_suffix(".png").exists() and "a few elements" in text
    names = [FUSED, FOREACH, *(f"1-bit {o}, {s}" for o in ("Adam", "LAMB") for s in (STAGE_1, STAGE_2, LOCAL))]
    assert [(r["model"], r["step"]) for r in record["rows"]] == [(m, n) for m in SMALL for n in names]
    assert all(row["seconds"] > 0 for row in record["rows"]) and len(record["targets"]) == 4


def test_each_step_is_of_the_stage_that_it_is_named_after():
    steps = whole_step.steps([300, 7])
    for name, kind in {"1-bit Adam": OneBitAdam, "1-bit LAMB": OneBitLamb}.items():
        for stage, compressing in ((STAGE_1, False), (STAGE_2, True)):
            optimizer = steps[f"{name}, {stage}"].__self__
            optimizer.step()
            assert type(optimizer) is kind and optimizer.compressing is compressing


def test_targets_are_ratios_of_times():
    seconds = {FUSED: 1.0, f"1-bit Adam, {STAGE_1}": 1.2, f"1-bit Adam, {LOCAL}": 1.8}
    rows = [Row("large", step, time) for step, time in seconds.items()]
    first, second = whole_step.targets(rows)
    assert first.met and first.reached == pytest.approx(1 / 1.2)
    assert not second.met and second.needed == pytest.approx(1 / 1.7)
