"""The compiled loops of the CPU: threads, forks, the cache of machine code. The passes' tests hold their results."""

import hashlib
import logging
import os
import pickle
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import numpy as np
import pytest
import torch

from onebit.kernels import cpu
from onebit.kernels.cpu import codec, compile, threads
from onebit.kernels.cpu.tiles import BF16, FP16, FP32, put, staged
from onebit.kernels.passes import Scan
from onebit.kernels.tuning.workload import Workload
from tests.kernels.compare import frozen_bits
from tests.limits import HUNG

VARIANTS = [
    {},
    {"scale": "tensor", "norm": "l2", "dtype": torch.bfloat16, "masked": True, "scaled": True},
    {"norm": "unbiased", "dtype": torch.float16, "master": False, "packed": False, "block_size": 96},
    {"ranks": 1, "senders": 2},
]
SCAN = import_module("onebit.kernels.cpu.scan")


def outputs(**options):
    """What all passes leave, in bytes. NaN is equal to NaN here."""
    workload = Workload([1, 7, 2048, 50_000, 63, 0, 4096], **{"ranks": 2, **options})
    for work in workload.passes(cpu).values():
        work.run()
    return frozen_bits(*workload.buffers.values())


def test_any_number_of_threads_gives_the_same_bits_also_to_python_threads_that_run_at_once(monkeypatch):
    """Every pass is cut into as many runs of blocks as there are threads; and decoded past the caches, or not."""
    monkeypatch.setattr(threads, "LEAST", 1)
    monkeypatch.setattr(codec, "LARGE", 2**40)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    wanted = [outputs(**options) for options in VARIANTS]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with ThreadPoolExecutor(8) as pool:
        for large in (2**40, 0):
            monkeypatch.setattr(codec, "LARGE", large)
            assert [*pool.map(lambda options: outputs(**options), 2 * VARIANTS)] == 2 * wanted


FORKS = """
import atexit, hashlib, os
import torch
torch.set_num_threads(1)  # torch's own threads do not survive a fork
torch.get_num_threads = lambda: 3
from onebit.kernels.cpu import codec, threads
threads.LEAST = 1
from tests.kernels.test_compiled import outputs

for when in ("before", "after"):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, hashlib.sha256(repr(outputs()).encode()).digest())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    wanted = outputs()
    assert os.read(read, 32) == hashlib.sha256(repr(wanted).encode()).digest()
atexit.register(lambda: print(outputs() == wanted))
"""


def run_python(code, **environment):
    environment, command = {**os.environ, **environment}, [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_runs_passes_and_so_does_a_process_that_shuts_down():
    """A DataLoader's worker might, before and after the parent has used its threads."""
    result = run_python(FORKS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True"]


@pytest.fixture
def scan(monkeypatch, caplog, tmp_path):
    """What a process says that scans for the first time; the result is checked."""
    monkeypatch.setenv("ONEBIT_CACHE_DIR", str(tmp_path))

    def run():
        loop = compile.Loop(vars(SCAN)["_scan"].__wrapped__)
        monkeypatch.setitem(cpu.PASSES, Scan, threads.one_loop(loop, scratch_blocks=1))
        caplog.clear()
        work = Workload([5000])
        with caplog.at_level(logging.DEBUG, logger="onebit"):
            work.passes(cpu)["scan"].run()
        g = work.grads.tensors[0]
        torch.testing.assert_close(work.squares.nansum(), (g * g).sum())
        return caplog.text

    return run


@pytest.fixture
def filled(tmp_path, scan):
    """The file of a cache that has the machine code of one loop."""
    scan()
    (path,) = (tmp_path / "loops").iterdir()
    return path


def with_checksum(content):
    return hashlib.sha256(content).digest() + content


def test_a_damaged_file_is_compiled_anew_and_a_whole_one_is_read(filled, scan):
    content = filled.read_bytes()
    flipped = content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]
    no_loop, no_pickle = with_checksum(pickle.dumps([1, 2])), with_checksum(b"x" + content[32:])
    for damaged in (b"", content[: len(content) // 2], flipped, no_loop, no_pickle):
        filled.write_bytes(damaged)
        assert "is of no use" in scan()
        again = filled.read_bytes()
        assert again == with_checksum(again[32:])
        assert [path.name for path in filled.parent.iterdir()] == [filled.name]
    before = filled.stat().st_mtime_ns
    assert "Compiling" not in scan()
    assert filled.stat().st_mtime_ns == before


def test_machine_code_of_replaced_modules_or_in_a_folder_of_others_is_neither_read_nor_kept(filled, scan, monkeypatch):
    """A process compiles, after an upgrade while it runs, what is neither in the new files nor in the cache."""
    before = filled.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(compile, "version", lambda: "another")
        assert scan().count("onebit was changed") == 2
    assert [path.read_bytes() for path in filled.parent.iterdir()] == [before]
    if os.name == "posix":
        filled.parent.chmod(0o777)
        assert "others can write to it or to its folder" in scan()


def test_where_no_file_can_be_written_every_process_compiles(tmp_path, scan, monkeypatch):
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        assert "is not kept" in scan()
        tmp_path.chmod(stat.S_IRWXU)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONEBIT_CACHE_DIR", str(tmp_path / "file" / "folder"))
    compile.tell_once.cache_clear()
    said = scan()
    assert "is not kept" in said and "Compiling for this processor" in said
    assert "Not kept: " in said and "Kept in" not in said


def test_one_process_compiles_and_others_wait_for_its_file_but_not_for_ever(filled, scan, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    aside = filled.rename(filled.parent.with_name("aside"))
    written = aside.stat()
    with filled.parent.with_suffix(".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor() as pool:
            waits = pool.submit(scan)
            time.sleep(0.2)
            assert not filled.exists()
            aside.rename(filled)
            assert "Compiling" not in waits.result()
        assert filled.stat().st_ino == written.st_ino  # nobody compiled and wrote another
        filled.unlink()
        monkeypatch.setattr(compile, "PATIENCE", 0.1)
        scan()  # although another process holds the lock
    assert filled.stat().st_ino != written.st_ino or filled.stat().st_mtime_ns != written.st_mtime_ns
    monkeypatch.setattr(compile, "PATIENCE", 600.0)
    filled.unlink()
    scan()  # the lock is free, and nobody waits


PROCESS = """
import logging, sys
import onebit, onebit.kernels
assert "numba" not in sys.modules
logging.basicConfig()
logging.getLogger("onebit").setLevel(logging.DEBUG)
from onebit.kernels import cpu
from onebit.kernels.tuning.workload import Workload
work = Workload([5000])
work.passes(cpu)["scan"].run()
print(float(work.squares.nansum()))
"""


def test_processes_that_compile_at_once_all_run_and_the_next_one_compiles_nothing(tmp_path):
    """Importing onebit does not import Numba. One of the processes says what takes so long."""
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda _: run_python(PROCESS, ONEBIT_CACHE_DIR=str(tmp_path)), "ab"))
    found = {each.stdout for each in done}
    assert sum("Compiling for this processor" in each.stderr for each in done) == 1
    assert len(found) == 1 and len(list((tmp_path / "loops").iterdir())) == 1
    result = run_python(PROCESS, ONEBIT_CACHE_DIR=str(tmp_path))
    assert {result.stdout} == found and "Compiling" not in result.stderr


def test_without_numba_an_error_says_what_to_install():
    start = 'import sys; sys.modules["numba"] = None; from onebit.kernels import backend; import torch; '
    result = run_python(start + 'backend(torch.device("cpu"))')
    error = result.stderr.splitlines()[-1]
    assert error.startswith("ModuleNotFoundError: tensors on cpu need Numba, which cannot be imported"), error
    assert error.endswith(": pip install numba")


@pytest.mark.parametrize("dtype, kind", [(torch.float32, FP32), (torch.bfloat16, BF16), (torch.float16, FP16)])
@pytest.mark.parametrize("numel", [1, 15, 16, 33, 64])
def test_every_value_of_a_dtype_is_read_and_rounded_as_torch_does(dtype, kind, numel):
    """NaN, infinity, zeros of either sign, ties, numbers too small and too large for 16 bits."""
    odd = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 65504.0, 65520.0, 1e-8]
    values = torch.tensor((odd * 6)[:numel]) * torch.linspace(1, 3, numel).pow(3)
    scratch, room = torch.full((64,), 7.0), torch.full((64,), 7.0)
    source = values.to(dtype)
    address = staged(source.data_ptr(), kind, 0, numel, scratch.data_ptr())
    read = source if address == source.data_ptr() else scratch
    torch.testing.assert_close(read[:numel].float(), source.float(), rtol=0, atol=0, equal_nan=True)
    assert not scratch[numel : -(-numel // 16) * 16].any()
    target = torch.full((numel + 8,), -77.0, dtype=dtype)
    padded = torch.cat([values, torch.full((64,), 7.0)])
    put(padded.data_ptr(), target.data_ptr(), kind, 0, numel, room.data_ptr())
    torch.testing.assert_close(target[:numel], values.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert bool((target[numel:] == -77).all())
