"""Choosing kernel shapes: what is measured, when, and what is cached. No GPU is needed for any of it."""

import json
import logging
import math
import multiprocessing
import os
import pkgutil
import sys
from importlib import import_module

import pytest
import torch

from onebit.kernels import cpu
from onebit.kernels.tuning import cache, timing, tuner
from onebit.kernels.tuning.timing import Timing
from onebit.kernels.tuning.tuner import Config
from onebit.kernels.tuning.workload import Workload

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
ONE, TWO, THREE = Config(1, 8), Config(2, 8), Config(3, 8)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, and no choice kept from before or for later."""
    monkeypatch.setenv("ONEBIT_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ONEBIT_TUNE", raising=False)
    tuner.forget()
    yield tmp_path
    tuner.forget()


@pytest.fixture
def gpu(monkeypatch):
    """Stands in for a GPU: its name, and what each configuration takes."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(tuner, "device_name", lambda device: f"Test {device.type}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    measured = []

    def measure(kernel, device, dtype, elements):
        measured.append(kernel)
        return lambda config: Timing(1.0 if config == Config(4, 8) else 2.0)

    monkeypatch.setattr(tuner, "gpu_measure", measure)
    return measured


def entries(folder):
    return json.loads((folder / "kernels.json").read_text())["choices"]


def warnings_in(caplog):
    return [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("one, two, three, winner", [
    (Timing(3.0), Timing(1.0), Timing(2.0), TWO),
    (Timing(1.5), Timing(1.005), Timing(1.0), TWO),  # of equally fast ones the earliest
    (Timing(1.05, 0.06), Timing(1.07), Timing(1.0), ONE),  # within the spread of either
    (Timing(1.05), Timing(1.07), Timing(1.0, 0.06), ONE),
    (Timing(1.05, 0.04), Timing(1.03, 0.02), Timing(1.0, 0.01), THREE),
])  # fmt: skip
def test_the_fastest_wins_or_the_earliest_that_is_as_fast(one, two, three, winner):
    times = {ONE: one, TWO: two, THREE: three}
    choice = tuner.choose(list(times), times.__getitem__)
    assert choice.config == winner
    assert choice.seconds == {config: of.seconds for config, of in times.items()}


def test_a_timing_is_a_median_and_half_the_distance_of_the_quartiles(monkeypatch):
    seconds = [5.0, 1.0, 2.0, 4.0, 3.0]
    monkeypatch.setattr(timing, "_host_seconds", lambda run, repeats: seconds)
    assert timing.timing(lambda: None, CPU) == Timing(3.0, 1.0)
    assert timing.timing(lambda: None, CPU, repeats=1).spread == 0
    assert timing.median_seconds(lambda: None, CPU) == 3.0


@pytest.mark.parametrize("odd", [math.nan, math.inf, 0.0, -1.0])
def test_a_candidate_that_does_not_run_is_passed_over(odd):
    def measure(config):
        if config == ONE:
            raise RuntimeError("out of resource: shared memory")
        return Timing(odd if config == TWO else 5.0)

    choice = tuner.choose([ONE, TWO, THREE], measure)
    assert choice.config == THREE
    assert choice.seconds[ONE] == choice.seconds[TWO] == math.inf


def test_where_nothing_runs_the_default_stays_and_is_not_written(own_cache):
    def measure(config):
        raise RuntimeError("no device")

    choice = tuner.tune("compress_kernel", CPU, torch.float32, measure=measure)
    assert choice.config == tuner.DEFAULT and not choice.saved
    assert not (own_cache / "kernels.json").exists()


def test_candidates_never_change_the_order_of_a_sum():
    """A rank that tunes to another number of warps would add in another order."""
    found = tuner.candidates("adam_update_kernel")
    assert found[0] == tuner.DEFAULT
    assert set(found) == {Config(blocks, warps) for blocks in (1, 2, 4, 8) for warps in (4, 8, 16)}
    summing = {"compress", "average", "adam_warmup", "lamb_moments", "scan", "zero_one_full"}
    for kernel in tuner.PASS_OF:
        if kernel.removesuffix("_kernel") in summing:
            assert {c.warps for c in tuner.candidates(kernel)} == {tuner.DEFAULT.warps}, kernel


def test_first_use_measures_once_and_logs_and_later_ones_read_the_cache(gpu, own_cache, caplog):
    with caplog.at_level(logging.INFO, logger="onebit"):
        found = [tuner.lookup("compress_kernel", GPU, torch.float32) for _ in range(3)]
    assert found == [Config(4, 8)] * 3
    assert gpu == ["compress_kernel"]
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO"]
    (key,) = entries(own_cache)
    assert key.startswith("Test cuda, compress_kernel, float32, ")
    assert f"torch {torch.__version__}" in key and "triton " in key
    tuner.forget()  # as the next process
    assert tuner.lookup("compress_kernel", GPU, torch.float32) == Config(4, 8)
    assert gpu == ["compress_kernel"]


def test_device_kernel_dtype_and_version_each_make_a_key(gpu, own_cache, monkeypatch):
    tuner.lookup("compress_kernel", GPU, torch.float32)
    tuner.lookup("compress_kernel", GPU, torch.bfloat16)
    tuner.lookup("decode_kernel", GPU, torch.float32)
    tuner.forget()
    monkeypatch.setattr(tuner, "versions", lambda: "torch 99")
    tuner.lookup("compress_kernel", GPU, torch.float32)
    tuner.forget()
    monkeypatch.setattr(tuner, "device_name", lambda device: "Another")
    tuner.lookup("compress_kernel", GPU, torch.float32)
    assert len(gpu) == 5 and len(entries(own_cache)) == 5


@pytest.mark.parametrize("setting, device", [
    (("ONEBIT_TUNE", "0"), GPU), (("ONEBIT_TUNE", "off"), GPU), (("TRITON_INTERPRET", "1"), GPU),
    (("TRITON_INTERPRET", "0"), CPU),
])  # fmt: skip
def test_where_nothing_is_measured_the_default_is_used(gpu, monkeypatch, setting, device):
    monkeypatch.setenv(*setting)
    assert tuner.lookup("compress_kernel", device, torch.float32) == tuner.DEFAULT
    assert gpu == []


def test_while_a_graph_is_captured_or_tuning_suspended_the_default_is_used_and_tuning_comes_later(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuner.lookup("compress_kernel", GPU, torch.float32) == tuner.DEFAULT
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with tuner.suspended():
        assert tuner.lookup("compress_kernel", GPU, torch.float32) == tuner.DEFAULT
    assert gpu == []
    assert tuner.lookup("compress_kernel", GPU, torch.float32) == Config(4, 8)


@pytest.mark.parametrize("room", [0, 2**25])
def test_a_device_without_room_measures_fewer_elements_or_runs_with_defaults(gpu, own_cache, monkeypatch, room):
    enough = tuner.gpu_measure

    def full(kernel, device, dtype, elements):
        if elements > room:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return enough(kernel, device, dtype, elements)

    monkeypatch.setattr(tuner, "gpu_measure", full)
    assert tuner.lookup("compress_kernel", GPU, torch.float32) == (Config(4, 8) if room else tuner.DEFAULT)
    assert (own_cache / "kernels.json").exists() == bool(room)


def test_what_touches_no_parameter_has_one_key(gpu, own_cache):
    tuner.tune("average_kernel", GPU, torch.bfloat16)
    assert tuner.lookup("average_kernel", GPU, torch.float32) == Config(4, 8)
    assert gpu == ["average_kernel"]
    assert "float32" in next(iter(entries(own_cache)))


def test_tuned_kernels_are_the_kernels_there_are_and_their_passes_launch_them_under_their_keys():
    gpu, launch = (pytest.importorskip(f"onebit.kernels.gpu{name}") for name in ("", ".launch"))
    modules = [import_module(f"onebit.kernels.gpu.{m.name}") for m in pkgutil.iter_modules(gpu.__path__)]
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert set(tuner.PASS_OF) == kernels - {"restore_kernel"}  # which nearly always has nothing to do
    assert set(tuner.PASS_OF.values()) <= set(Workload(1).passes(cpu))
    for kernel in tuner.PASS_OF:
        asked = []
        with pytest.MonkeyPatch.context() as patch, launch.recorded() as launches:
            patch.setattr(tuner, "lookup", lambda *key, asked=asked: asked.append(key) or tuner.DEFAULT)
            tuner.kernel_pass(kernel, CPU, torch.bfloat16, elements=4096).run()
        assert (kernel, CPU, tuner.kernel_dtype(kernel, torch.bfloat16)) in asked
        assert kernel in [item.kernel.__name__ for item in launches]


CORRUPT = {
    "empty": "",
    "half": '{"onebit": 1, "choices": {"a',
    "binary": b"\xff\xfe\x00\x80",
    "a list": "[]",
    "another program's": '{"version": 3}',
    "a later schema": '{"onebit": 2, "choices": {}}',
    "no table": '{"onebit": 1, "choices": 7}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_cache_costs_one_warning(gpu, own_cache, monkeypatch, caplog, content):
    path = own_cache / "kernels.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setenv("ONEBIT_TUNE", "0")
    for kernel in tuner.PASS_OF:
        assert tuner.lookup(kernel, GPU, torch.float32) == tuner.DEFAULT
    (record,) = warnings_in(caplog)
    assert str(path) in record.getMessage() and "ONEBIT_CACHE_DIR" in record.getMessage()
    tuner.tune("compress_kernel", GPU, torch.float32)
    assert len(entries(own_cache)) == 1  # written anew
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize(
    "entry",
    [
        {"blocks_per_program": 3, "warps": 8},
        {"blocks_per_program": 4, "warps": 8, "stages": 2},
        {"blocks_per_program": "4", "warps": "8"},
        [4, 8],
    ],
    ids=str,
)
def test_an_entry_that_is_no_candidate_is_ignored(gpu, own_cache, monkeypatch, caplog, entry):
    tuner.tune("compress_kernel", GPU, torch.float32)
    (key,) = entries(own_cache)
    (own_cache / "kernels.json").write_text(json.dumps({"onebit": 1, "choices": {key: entry}}))
    tuner.forget()
    monkeypatch.setenv("ONEBIT_TUNE", "0")
    assert tuner.lookup("compress_kernel", GPU, torch.float32) == tuner.DEFAULT
    assert not warnings_in(caplog)


def test_a_folder_that_cannot_be_written_costs_one_warning(gpu, own_cache, monkeypatch, caplog):
    (own_cache / "file").write_text("")
    monkeypatch.setenv("ONEBIT_CACHE_DIR", str(own_cache / "file" / "folder"))
    for kernel in ("compress_kernel", "decode_kernel"):
        assert tuner.lookup(kernel, GPU, torch.float32) == Config(4, 8)
    assert tuner.tune("scan_kernel", GPU, torch.float32).saved is False
    assert len(warnings_in(caplog)) == 1


def test_a_failed_write_leaves_the_old_file_whole(own_cache, monkeypatch, caplog):
    store = cache.Cache(own_cache / "kernels.json")
    assert store.put("a", {"tile": 1})

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not store.put("b", {"tile": 2})
    assert entries(own_cache) == {"a": {"tile": 1}}
    assert {p.name for p in own_cache.iterdir()} <= {"kernels.json", "kernels.lock"}
    assert store.get("b") == {"tile": 2}  # for this process
    assert len(warnings_in(caplog)) == 1


def _write_many(folder, rank, count):
    store = cache.Cache(folder / "kernels.json")
    for i in range(count):
        assert store.put(f"rank {rank} entry {i}", {"tile": i})


def test_ranks_that_write_at_once_lose_nothing(own_cache):
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    ranks = [context.Process(target=_write_many, args=(own_cache, r, 20)) for r in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert entries(own_cache) == {f"rank {r} entry {i}": {"tile": i} for r in range(4) for i in range(20)}


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the folders of other systems")
def test_the_cache_folder(monkeypatch):
    monkeypatch.setenv("ONEBIT_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/someone")
    found = [str(cache.folder())]
    for name in ("ONEBIT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
        found.append(str(cache.folder()))
    assert found == ["/somewhere", "/xdg/onebit", "/home/someone/.cache/onebit"]
