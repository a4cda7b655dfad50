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
from onebit.kernels.passes import SMALL, Storage, bytes_per_element
from onebit.kernels.tuning import cache, timing, tuner
from onebit.kernels.tuning.timing import Timing
from onebit.kernels.tuning.tuner import Config
from onebit.kernels.tuning.workload import Workload

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
ONE, TWO, THREE, BEST = (Config(blocks, tuner.DEFAULT.warps) for blocks in (1, 2, 3, 4))


class Gpu:
    """Stands in for a GPU, whose kernels take half as long with one configuration, and notes what is measured."""

    def __init__(self, room=2**62):
        self.measured, self.room, self.emptied = [], room, 0

    def empty_cache(self):
        self.emptied += 1

    def measure(self, kernel, device, dtype, elements):
        if elements > self.room:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        self.measured.append(kernel)
        return lambda config: Timing(1.0 if config.blocks_per_program == BEST.blocks_per_program else 2.0)


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
    made = Gpu()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(tuner, "device_name", lambda device: f"Test {device.type}")
    monkeypatch.setattr(tuner, "gpu_measure", made.measure)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.empty_cache)
    return made


def lookup(kernel="compress_kernel", device=GPU, dtype=torch.float32):
    return tuner.lookup(kernel, device, dtype)


def entries(folder):
    return json.loads((folder / "kernels.json").read_text())["choices"]


def warnings_in(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def full(*_):
    raise OSError("no space left on device")


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
    monkeypatch.setattr(timing, "_host_seconds", lambda run, repeats: [5.0, 1.0, 2.0, 4.0, 3.0])
    assert timing.timing(lambda: None, CPU) == Timing(3.0, 1.0)
    assert timing.timing(lambda: None, CPU, repeats=1).spread == 0


def none(config):
    raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize("odd", [math.nan, math.inf, 0.0, -1.0])
def test_a_candidate_that_does_not_run_is_passed_over_and_where_none_does_the_default_stays(own_cache, odd):
    times = {TWO: Timing(odd), THREE: Timing(5.0)}
    choice = tuner.choose([ONE, TWO, THREE], lambda config: times.get(config) or none(config))
    assert choice.config == THREE
    assert choice.seconds[ONE] == choice.seconds[TWO] == math.inf
    choice = tuner.tune("compress_kernel", CPU, torch.float32, measure=none)
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
            assert {c.warps for c in tuner.candidates(kernel)} == {tuner.default(kernel).warps}, kernel


def test_first_use_measures_once_and_logs_and_later_ones_read_the_cache(gpu, own_cache, monkeypatch, caplog):
    """Device, kernel, dtype and version each make a key, but what touches no parameter has one for all dtypes."""
    with caplog.at_level(logging.INFO, logger="onebit"):
        assert [lookup() for _ in range(3)] == [BEST] * 3
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO"]
    (key,) = entries(own_cache)
    assert key.startswith("Test cuda, compress_kernel, float32, ")
    assert f"torch {torch.__version__}" in key and "triton " in key
    tuner.forget()  # as the next process
    assert lookup() == BEST
    assert gpu.measured == ["compress_kernel"]
    tuner.tune("average_kernel", GPU, torch.bfloat16)
    best = Config(BEST.blocks_per_program, tuner.default("average_kernel").warps)
    assert lookup("average_kernel") == best and gpu.measured[1:] == ["average_kernel"]
    assert any("average_kernel, float32" in each for each in entries(own_cache))
    for other in ({"dtype": torch.bfloat16}, {"kernel": "decode_kernel"}):
        lookup(**other)
    for name, another in (("versions", lambda: "torch 99"), ("device_name", lambda device: "Another")):
        tuner.forget()
        monkeypatch.setattr(tuner, name, another)
        lookup()
    assert len(gpu.measured) == gpu.emptied == 6 and len(entries(own_cache)) == 6


def test_where_nothing_is_measured_the_default_is_used(gpu, monkeypatch):
    """Switched off, interpreted, on a CPU; while a graph is captured or tuning suspended, after which it comes."""
    off, interpreted, compiled = ("ONEBIT_TUNE", "0"), ("TRITON_INTERPRET", "1"), ("TRITON_INTERPRET", "0")
    for setting, device in ((off, GPU), (("ONEBIT_TUNE", "off"), GPU), (interpreted, GPU), (compiled, CPU)):
        tuner.forget()
        with monkeypatch.context() as patch:
            patch.setenv(*setting)
            assert lookup(device=device) == tuner.DEFAULT, setting
    tuner.forget()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert lookup() == tuner.DEFAULT
    with tuner.suspended():
        assert lookup() == tuner.DEFAULT
    assert gpu.measured == []
    assert lookup() == BEST


@pytest.mark.parametrize("room", [0, 2**25])
def test_a_device_without_room_measures_fewer_elements_or_runs_with_defaults(gpu, own_cache, room):
    gpu.room = room
    assert lookup() == (BEST if room else tuner.DEFAULT)
    assert (own_cache / "kernels.json").exists() == bool(room)


def test_tuned_kernels_are_the_kernels_there_are_and_their_passes_launch_them_under_their_keys():
    gpu, launch = (pytest.importorskip(f"onebit.kernels.gpu{name}") for name in ("", ".launch"))
    modules = [import_module(f"onebit.kernels.gpu.{m.name}") for m in pkgutil.iter_modules(gpu.__path__)]
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    small = {"restore_kernel", *(kernel for each in SMALL for kernel in each.kernels())}  # no bytes an element
    assert set(tuner.PASS_OF) == kernels - small
    assert set(tuner.PASS_OF.values()) <= set(Workload(1).passes(cpu))
    for kernel in tuner.PASS_OF:
        asked = []
        with pytest.MonkeyPatch.context() as patch, launch.recorded() as launches:
            patch.setattr(tuner, "lookup", lambda *key, asked=asked: asked.append(key) or tuner.DEFAULT)
            work = tuner.kernel_pass(kernel, CPU, torch.bfloat16, elements=4096)
            work.run()
        assert work.bytes == 4096 * bytes_per_element(work.name, Storage(2, master=True, packed=True, ranks=8)), kernel
        assert (kernel, CPU, tuner.kernel_dtype(kernel, torch.bfloat16)) in asked
        assert kernel in [item.kernel.__name__ for item in launches]


CORRUPT = [
    b"", b'{"onebit": 1, "choices": {"a', b"\xff\xfe\x00\x80", b"[]", b'{"version": 3}',
    b'{"onebit": 2, "choices": {}}', b'{"onebit": 1, "choices": 7}', b"[" * 100_000,
]  # fmt: skip
NO_CANDIDATE = [
    {"blocks_per_program": 3, "warps": 8}, {"blocks_per_program": 4, "warps": 8, "stages": 2},
    {"blocks_per_program": "4", "warps": "8"}, [4, 8],
]  # fmt: skip


def test_a_corrupt_cache_costs_one_warning_and_an_entry_that_is_no_candidate_none(gpu, own_cache, monkeypatch, caplog):
    path, kernel = own_cache / "kernels.json", ("compress_kernel", GPU, torch.float32)
    monkeypatch.setenv("ONEBIT_TUNE", "0")
    for content in CORRUPT:
        path.write_bytes(content)
        tuner.forget()
        caplog.clear()
        assert all(lookup(each) == tuner.default(each) for each in tuner.PASS_OF)
        (warning,) = warnings_in(caplog)
        assert str(path) in warning and "ONEBIT_CACHE_DIR" in warning
        tuner.tune(*kernel)
        (key,) = entries(own_cache)  # written anew
        assert len(warnings_in(caplog)) == 1, content
    caplog.clear()
    for entry in NO_CANDIDATE:
        path.write_text(json.dumps({"onebit": 1, "choices": {key: entry}}))
        tuner.forget()
        assert lookup() == tuner.DEFAULT, entry
    assert not warnings_in(caplog)


def test_what_cannot_be_written_costs_one_warning_and_leaves_the_old_file_whole(gpu, own_cache, monkeypatch, caplog):
    lookup("scan_kernel")
    before = entries(own_cache)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert [lookup(kernel) for kernel in ("compress_kernel", "decode_kernel")] == [BEST] * 2
        assert not cache.shared().put("b", {"tile": 2})
    assert entries(own_cache) == before and len(warnings_in(caplog)) == 1
    assert {p.name for p in own_cache.iterdir()} <= {"kernels.json", "kernels.lock"}
    assert cache.shared().get("b") == {"tile": 2}  # for this process
    (own_cache / "file").write_text("")
    monkeypatch.setenv("ONEBIT_CACHE_DIR", str(own_cache / "file" / "folder"))
    assert [tuner.tune("scan_kernel", GPU, torch.float32).saved for _ in range(2)] == [False, False]
    assert len(warnings_in(caplog)) == 2


def _write_20(folder, rank):
    store = cache.Cache(folder / "kernels.json")
    return [store.put(f"rank {rank} entry {i}", {"tile": i}) for i in range(20)]


def test_ranks_that_write_at_once_lose_nothing(own_cache):
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with context.Pool(4) as pool:
        assert pool.starmap(_write_20, [(own_cache, r) for r in range(4)], chunksize=1) == [[True] * 20] * 4
    assert entries(own_cache) == {f"rank {r} entry {i}": {"tile": i} for r in range(4) for i in range(20)}


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the folders of other systems")
def test_the_cache_folder(monkeypatch):
    monkeypatch.setenv("ONEBIT_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/someone")
    for name, found in (
        ("ONEBIT_CACHE_DIR", "/somewhere"), ("XDG_CACHE_HOME", "/xdg/onebit"), ("HOME", "/home/someone/.cache/onebit"),
    ):  # fmt: skip
        assert str(cache.folder()) == found
        monkeypatch.delenv(name)


def test_backends_compare_the_same_numbers() -> None:
    """A generator of a GPU draws others than the CPU's."""
    assert Workload(2048, GPU).drawn_on == CPU
