"""Choosing kernel shapes: what is measured, when, and what is cached. No GPU is needed for any of it."""

import json
import logging
import math
import multiprocessing
import os
import pkgutil
import stat
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


def test_the_fastest_wins():
    times = {ONE: 3.0, TWO: 1.0, THREE: 2.0}
    choice = tuner.choose(list(times), lambda config: Timing(times[config]))
    assert choice.config == TWO
    assert choice.seconds == times


def test_of_equally_fast_ones_the_earliest_wins():
    times = {ONE: Timing(1.5), TWO: Timing(1.005), THREE: Timing(1.0)}
    assert tuner.choose(list(times), times.__getitem__).config == TWO
    assert tuner.choose(list(reversed(times)), times.__getitem__).config == THREE


@pytest.mark.parametrize(("one", "three"), [(0.06, 0.0), (0.0, 0.06)])
def test_times_within_the_spread_of_either_are_equally_fast(one, three):
    times = {ONE: Timing(1.05, one), TWO: Timing(1.07), THREE: Timing(1.0, three)}
    assert tuner.choose(list(times), times.__getitem__).config == ONE
    times = {ONE: Timing(1.05, 0.04), TWO: Timing(1.03, 0.02), THREE: Timing(1.0, 0.01)}
    assert tuner.choose(list(times), times.__getitem__).config == THREE


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


def test_candidates():
    found = tuner.candidates("adam_update_kernel")
    assert found[0] == tuner.DEFAULT
    assert set(found) == {Config(blocks, warps) for blocks in (1, 2, 4, 8) for warps in (4, 8, 16)}


@pytest.mark.parametrize(
    "kernel", ["compress_kernel", "average_kernel", "adam_warmup_kernel", "lamb_moments_kernel", "scan_kernel"]
)
def test_tuning_never_changes_the_order_of_a_sum(kernel):
    """A rank that tunes to another number of warps would add in another order."""
    assert {c.warps for c in tuner.candidates(kernel)} == {tuner.DEFAULT.warps}


def test_first_use_measures_once_and_logs(gpu, own_cache, caplog):
    with caplog.at_level(logging.INFO, logger="onebit"):
        found = [tuner.lookup("compress_kernel", GPU, torch.float32) for _ in range(3)]
    assert found == [Config(4, 8)] * 3
    assert gpu == ["compress_kernel"]
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO"]
    (key,) = entries(own_cache)
    assert key.startswith("Test cuda, compress_kernel, float32, ")
    assert f"torch {torch.__version__}" in key and "triton " in key


def test_the_next_process_reads_what_the_first_one_measured(gpu):
    tuner.lookup("compress_kernel", GPU, torch.float32)
    tuner.forget()
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


@pytest.mark.parametrize("setting", ["0", "off"])
def test_first_use_can_be_switched_off(gpu, monkeypatch, setting):
    monkeypatch.setenv("ONEBIT_TUNE", setting)
    assert tuner.lookup("compress_kernel", GPU, torch.float32) == tuner.DEFAULT
    assert gpu == []


def test_a_capture_gets_the_default_and_tuning_comes_later(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuner.lookup("compress_kernel", GPU, torch.float32) == tuner.DEFAULT
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tuner.lookup("compress_kernel", GPU, torch.float32) == Config(4, 8)


def test_suspended_means_no_measuring(gpu):
    with tuner.suspended():
        assert tuner.lookup("compress_kernel", GPU, torch.float32) == tuner.DEFAULT
    assert gpu == []
    assert tuner.lookup("compress_kernel", GPU, torch.float32) == Config(4, 8)


@pytest.mark.parametrize("device, interpreted", [(CPU, "0"), (CPU, "1"), (GPU, "1")])
def test_the_interpreter_is_never_tuned(gpu, monkeypatch, device, interpreted):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    assert tuner.lookup("compress_kernel", device, torch.float32) == tuner.DEFAULT
    assert gpu == []


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


def test_tuned_kernels_are_the_kernels_there_are():
    gpu = pytest.importorskip("onebit.kernels.gpu")
    modules = [import_module(f"onebit.kernels.gpu.{m.name}") for m in pkgutil.iter_modules(gpu.__path__)]
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert set(tuner.PASS_OF) == kernels - {"restore_kernel"}  # which nearly always has nothing to do
    assert set(tuner.PASS_OF.values()) <= set(Workload(1).passes(cpu))


@pytest.mark.parametrize("kernel", sorted(tuner.PASS_OF))
def test_the_pass_of_a_kernel_launches_it_under_the_key_it_is_tuned_under(kernel):
    launch = pytest.importorskip("onebit.kernels.gpu.launch")
    asked = []
    with pytest.MonkeyPatch.context() as patch, launch.recorded() as launches:
        patch.setattr(tuner, "lookup", lambda *key: asked.append(key) or tuner.DEFAULT)
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
        {"blocks_per_program": 4},
        {"blocks_per_program": 4, "warps": 8, "stages": 2},
        {"blocks_per_program": "4", "warps": "8"},
        [4, 8],
        None,
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


def test_a_folder_that_cannot_be_made_costs_one_warning(gpu, own_cache, monkeypatch, caplog):
    (own_cache / "file").write_text("")
    monkeypatch.setenv("ONEBIT_CACHE_DIR", str(own_cache / "file" / "folder"))
    for kernel in ("compress_kernel", "decode_kernel"):
        assert tuner.lookup(kernel, GPU, torch.float32) == Config(4, 8)
    assert tuner.tune("scan_kernel", GPU, torch.float32).saved is False
    assert len(warnings_in(caplog)) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_costs_one_warning(gpu, own_cache, caplog):
    own_cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert tuner.lookup("compress_kernel", GPU, torch.float32) == Config(4, 8)
        assert len(warnings_in(caplog)) == 1
    finally:
        own_cache.chmod(stat.S_IRWXU)


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
