"""The compiled loops of the CPU: threads, forks, the cache of machine code. The passes' tests hold their results."""

import hashlib
import os
import pickle
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from onebit.kernels import cpu
from onebit.kernels.cpu import codec, threads
from onebit.kernels.cpu.blocks import BF16, FP16, FP32, put, staged
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.tuning.workload import HYPER, Workload
from tests.limits import HUNG

NUMELS = [1, 7, 2048, 200_000, 63, 0, 4096]
VARIANTS = [
    {},
    {"scale": "tensor", "norm": "l2", "dtype": torch.bfloat16, "masked": True, "scaled": True},
    {"norm": "l2", "dtype": torch.float16, "master": False, "packed": False, "block_size": 96},
    {"norm": "unbiased", "masked": True},
    {"norm": "rotated", "ranks": 1, "copies": 2},
]


def outputs(**options):
    """What all passes leave, in bytes. NaN is equal to NaN here."""
    workload = Workload(NUMELS, **{"ranks": 2, **options})
    for work in workload.passes(cpu).values():
        work.run()
    return {name: t.detach().contiguous().view(torch.uint8).numpy().tobytes() for name, t in workload.outputs().items()}


def checksum():
    return hashlib.sha256(repr(outputs()).encode()).digest()


@pytest.fixture
def many_threads(monkeypatch):
    """Every pass is cut into as many runs of blocks as there are threads."""
    monkeypatch.setattr(threads, "LEAST", 1)
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("options", VARIANTS, ids=["plain", "bf16", "fp16", "unbiased", "rotated"])
def test_any_number_of_threads_gives_the_same_bits(options, many_threads):
    found = []
    for count in (1, 2, 4):
        many_threads(count)
        found.append(outputs(**options))
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize("options", VARIANTS, ids=["plain", "bf16", "fp16", "unbiased", "rotated"])
def test_what_is_decoded_past_the_caches_is_the_same(options, monkeypatch):
    found = []
    for large in (2**40, 0):
        monkeypatch.setattr(codec, "LARGE", large)
        workload = Workload(NUMELS, **{"ranks": 2, **options})
        workload.passes(cpu)["decode"].run()
        found.append([t.view(torch.uint8).tolist() for t in workload.decoded().tensors])
    assert found[0] == found[1]


def test_warmup_rounds_every_operation():
    """Against numpy: torch's sqrt may be off by a place."""
    workload = Workload([200_000])
    g, x = (p.tensors[0].numpy() for p in (workload.grads(), workload.params()))
    m, v = (state.numpy()[: g.size] for state in (workload.exp_avg(), workload.exp_avg_sq()))
    h = Hyper(*map(np.float32, HYPER))
    wanted_m = h.beta1 * m + h.one_minus_beta1 * g
    wanted_v = h.beta2 * v + h.one_minus_beta2 * (g * g)
    u = wanted_m * h.bias1 / (np.sqrt(wanted_v) * h.bias2 + h.eps) + h.weight_decay * x
    wanted_x = x - h.lr * u
    workload.passes(cpu)["adam_warmup"].run()
    assert np.array_equal(m, wanted_m) and np.array_equal(v, wanted_v) and np.array_equal(x, wanted_x)


def test_two_python_threads_run_passes_at_once(many_threads):
    many_threads(1)
    wanted = [outputs(**options) for options in VARIANTS]
    many_threads(3)
    found = {}

    def run(index):
        found[index] = [outputs(**VARIANTS[index % len(VARIANTS)]) for _ in range(3)]

    callers = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
    assert all(found[i] == [wanted[i % len(VARIANTS)]] * 3 for i in range(8))


FORKS = """
import os, sys
import torch
torch.set_num_threads(1)  # torch's own threads do not survive a fork
torch.get_num_threads = lambda: 3
from onebit.kernels.cpu import codec, threads
threads.LEAST = 1
from tests.kernels.test_compiled import checksum

if sys.argv[1] == "after":
    checksum()
read, write = os.pipe()
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        os.write(write, checksum())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.read(read, 32) == checksum()
"""


def run_python(code, *arguments, **environment):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=HUNG, cwd=Path.cwd()
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forked_child_runs_passes(when):
    """As a DataLoader's worker might, before or after the parent has used its threads."""
    result = run_python(FORKS, when)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_pass_runs_while_the_interpreter_shuts_down():
    code = """
import atexit, torch
torch.set_num_threads(2)
from onebit.kernels.cpu import codec, threads
threads.LEAST = 1
from tests.kernels.test_compiled import outputs
wanted = outputs()
class Last:
    def __del__(self):
        print(outputs() == wanted)
atexit.register(lambda: print(outputs() == wanted))
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True"]


SCAN = """
import logging
logging.basicConfig()
logging.getLogger("onebit").setLevel(logging.DEBUG)
import torch
from onebit.kernels import cpu
from onebit.kernels.tuning.workload import Workload
work = Workload([5000])
work.passes(cpu)["scan"].run()
g = work.grads().tensors[0]
torch.testing.assert_close(work.squares().nansum(), (g * g).sum())
print("right")
"""


def scan_with_cache(folder):
    result = run_python(SCAN, ONEBIT_CACHE_DIR=str(folder))
    assert result.returncode == 0, result.stderr
    assert "right" in result.stdout
    return result.stderr


@pytest.fixture(scope="module")
def filled_cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    scan_with_cache(folder)
    (path,) = (folder / "loops").iterdir()
    return folder, path


def damaged(content):
    code = content[32:]
    return {
        "empty": b"",
        "half": content[: len(content) // 2],
        "a flipped bit": content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
        "another pickle": hashlib.sha256(pickle.dumps([1, 2])).digest() + pickle.dumps([1, 2]),
        "no pickle": hashlib.sha256(b"x" + code).digest() + b"x" + code,
    }


@pytest.mark.slow
@pytest.mark.parametrize("what", ["empty", "half", "a flipped bit", "another pickle", "no pickle"])
def test_a_damaged_file_is_compiled_anew(filled_cache, what):
    folder, path = filled_cache
    whole = path.read_bytes()
    path.write_bytes(damaged(whole)[what])
    said = scan_with_cache(folder)
    assert "is of no use" in said
    again = path.read_bytes()
    assert hashlib.sha256(again[32:]).digest() == again[:32]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_next_process_compiles_nothing(filled_cache):
    folder, path = filled_cache
    before = path.stat().st_mtime_ns
    assert "Compiling" not in scan_with_cache(folder)
    assert path.stat().st_mtime_ns == before


@pytest.mark.slow
def test_processes_that_compile_at_once_all_run(tmp_path):
    command = [sys.executable, "-c", SCAN]
    environment = {**os.environ, "ONEBIT_CACHE_DIR": str(tmp_path)}
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert all("right" in process.communicate(timeout=HUNG)[0] for process in running)
    assert len(list((tmp_path / "loops").iterdir())) == 1


@pytest.mark.slow
def test_where_no_file_can_be_written_every_process_compiles(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is not kept" in scan_with_cache(tmp_path / "file" / "folder")


@pytest.mark.slow
def test_a_process_whose_modules_were_replaced_leaves_the_cache_alone(tmp_path, filled_cache):
    """An upgrade while it runs: what it compiles is not what the new files say, nor what the cache has for them."""
    replaced = "from onebit.kernels.cpu import compile\ncompile.version = lambda: 'another'\n"
    for folder in (tmp_path, filled_cache[0]):
        before = [path.read_bytes() for path in folder.rglob("*.bin")]
        result = run_python(replaced + SCAN, ONEBIT_CACHE_DIR=str(folder))
        assert result.returncode == 0 and "right" in result.stdout, result.stderr
        assert result.stderr.count("onebit was changed") == 2  # neither read nor kept
        assert [path.read_bytes() for path in folder.rglob("*.bin")] == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert "is not kept" in scan_with_cache(tmp_path)
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_importing_onebit_does_not_import_numba():
    result = run_python("import sys, onebit, onebit.kernels; print('numba' in sys.modules)")
    assert result.stdout.split() == ["False"], result.stderr


def test_without_numba_an_error_says_what_to_install():
    code = """
import sys
sys.modules["numba"] = None
import torch
from onebit.kernels import backend
try:
    backend(torch.device("cpu"))
except ModuleNotFoundError as error:
    print(error.name, error)
"""
    result = run_python(code)
    assert result.stdout.startswith("numba tensors on cpu need Numba, which cannot be imported"), result.stderr
    assert result.stdout.endswith(": pip install numba\n")


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
    target = torch.full((numel + 8,), -77.0, dtype=dtype)
    padded = torch.cat([values, torch.full((64,), 7.0)])
    put(padded.data_ptr(), target.data_ptr(), kind, 0, numel, room.data_ptr())
    torch.testing.assert_close(target[:numel], values.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert bool((target[numel:] == -77).all())


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="modes of posix")
def test_machine_code_in_a_folder_that_others_can_write_is_not_run(filled_cache):
    folder, path = filled_cache
    path.parent.chmod(0o777)
    try:
        assert "others can write to its folder" in scan_with_cache(folder)
    finally:
        path.parent.chmod(0o755)
