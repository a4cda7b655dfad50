"""The command line: what it prints, what it writes, and its errors."""

import argparse
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from onebit.cli import main as cli
from onebit.cli import tune
from onebit.cli.arguments import pick_device, whole_number, whole_number_from
from onebit.cli.progress import Progress
from onebit.collectives.chunking import candidates
from onebit.kernels.data.layout import BLOCK_SIZE
from onebit.kernels.tuning import tuner
from onebit.kernels.tuning.tuner import Config
from tests.limits import HUNG


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEBIT_CACHE_DIR", str(tmp_path / "cache"))
    tuner.forget()
    yield tmp_path / "cache"
    tuner.forget()


def test_tune_on_the_cpu_has_nothing_to_choose(own_cache, capsys):
    assert cli.main(["tune", "--device", "cpu", "--elements", "2**14"]) == 0
    text = capsys.readouterr().out
    assert "nothing to choose" in text and "torchrun" in text
    assert not own_cache.exists()


def test_tune_goes_through_every_kernel_of_a_gpu(monkeypatch, capsys):
    tuned = []

    def tune_kernel(kernel, device, dtype, elements, trying):
        tuned.append((kernel, device, dtype, elements))
        trying(Config(4, 4))
        trying(Config(2, 8))
        return tuner.Choice(Config(2, 8), {Config(4, 4): torch.inf, Config(2, 8): 1e-3}, saved=True)

    monkeypatch.setattr(tuner, "tune", tune_kernel)
    monkeypatch.setattr(cli, "Progress", lambda: Progress(plain_seconds=0))
    monkeypatch.setattr(
        tuner, "kernel_pass", lambda *_: argparse.Namespace(bytes=5_000_000)
    )  # the real one launches Triton
    monkeypatch.setattr(tune, "pick_device", lambda text: torch.device("cuda", 0))
    monkeypatch.setattr(tune, "device_name", lambda device: "Test GPU")
    assert cli.main(["tune", "--dtype", "bfloat16", "--elements", "4096"]) == 0
    assert tuned == [(k, torch.device("cuda", 0), torch.bfloat16, 4096) for k in tuner.PASS_OF]
    captured = capsys.readouterr()
    assert captured.out.count("blocks 2, warps 8") == captured.out.count("5.0 GB/s   <- chosen") == len(tuned)
    assert captured.out.count("does not run here") == len(tuned)
    lines = captured.err.splitlines()  # not a terminal: a plain line each
    assert [re.search(r"candidate (\d)", line)[1] for line in lines] == ["1", "2"] * len(tuned)
    assert lines[0].startswith(f"[1/{len(tuned)}] compress_kernel: blocks 4, warps 4")
    assert "\033" not in captured.err + captured.out


def stand_in_for_a_gpu(monkeypatch, choice):
    monkeypatch.setattr(tuner, "tune", lambda *_, **__: choice)
    monkeypatch.setattr(tuner, "kernel_pass", lambda *_: argparse.Namespace(bytes=5_000_000))
    monkeypatch.setattr(tune, "pick_device", lambda text: torch.device("cuda", 0))
    monkeypatch.setattr(tune, "device_name", lambda device: "Test GPU")


def test_tune_says_when_the_cache_cannot_be_written(monkeypatch, capsys):
    stand_in_for_a_gpu(monkeypatch, tuner.Choice(Config(1, 8), {Config(1, 8): 1e-3}, saved=False))
    assert cli.main(["tune", "--elements", "4096"]) == 0
    assert "Not written to" in capsys.readouterr().out


def test_tune_fails_where_nothing_runs(monkeypatch, capsys):
    stand_in_for_a_gpu(monkeypatch, tuner.Choice(Config(1, 8), {Config(1, 8): torch.inf}))
    assert cli.main(["tune", "--elements", "4096"]) == 2
    assert "smaller --elements" in capsys.readouterr().err


def test_progress_is_rewritten_in_place_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress()
    progress.show("one")
    progress.show("two")
    progress.clear()
    assert capsys.readouterr().err == "\r\033[Kone\r\033[Ktwo\r\033[K"


def test_auto_takes_a_gpu_where_there_is_one():
    there = torch.cuda.is_available()
    assert pick_device("auto") == (torch.device("cuda", torch.cuda.current_device()) if there else torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    assert cli.main(["tune", "--device", "cuda"]) == 2
    message = capsys.readouterr().err
    assert "sees no GPU" in message and "--device cpu" in message


@pytest.mark.parametrize("device", ["meta", "xpu:x", "toaster"])
def test_a_device_that_cannot_be_used(device, capsys):
    assert cli.main(["tune", "--device", device]) == 2
    assert device in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["tune", "--elements", "0"], ["tune", "--elements", "many"], ["tune", "--dtype", "int8"]]
)
def test_a_wrong_command_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "onebit" in capsys.readouterr().err


def test_numbers():
    assert [whole_number(t) for t in ("7", "2**24", "1_000", " 10**3 ")] == [7, 2**24, 1000, 1000]
    for text in ("-1", "0", "0**2", "2**", "2**2**2", "1.5", "2**999"):
        with pytest.raises(argparse.ArgumentTypeError):
            whole_number(text)


def test_numbers_between_limits():
    read = whole_number_from(0, 2**10)
    assert [read(text) for text in ("0", "7", "2**10", "1_000")] == [0, 7, 1024, 1000]
    for text in ("-1", "1025", "2**11", "1.5", "", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match="from 0 to 1,024"):
            read(text)


def test_the_installed_command():
    code = "import sys; from importlib.metadata import entry_points as e\n"
    code += "sys.exit(next(p for p in e(group='console_scripts') if p.name == 'onebit').load()(['--help']))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HUNG)
    assert result.returncode == 0, result.stderr
    assert "demo" in result.stdout and "tune" in result.stdout


def tune_under_torchrun(folder, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "onebit", "tune", "--device", "cpu", "--elements", "2**21", *arguments]
    environment = {**os.environ, "ONEBIT_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_under_torchrun_tune_measures_the_chunks(tmp_path):
    """A table of candidates, and the fastest in the cache; on a CPU the kernels have nothing to choose."""
    text = tune_under_torchrun(tmp_path)
    choices = json.loads((tmp_path / "kernels.json").read_text())["choices"]
    rows = re.findall(r"chunks (\d+) +([\d.]+) ms( +<- chosen)?", text)
    assert [int(row[0]) for row in rows] == candidates(2**21, 1, BLOCK_SIZE)
    (best,) = (row for row in rows if row[2])
    assert float(best[1]) == min(float(time) for _, time, _ in rows)
    assert choices == {"gloo, 2 ranks, one host, cpu, 2^22 elements, reply direct, chunks": {"chunks": int(best[0])}}
    assert text.count("nothing to choose") == 1  # one rank of the machine says so
    assert f"Written to {tmp_path / 'kernels.json'}" in text


@pytest.mark.slow
def test_chunks_alone_are_measured_on_a_group_alone(tmp_path, capsys):
    text = tune_under_torchrun(tmp_path, "--only", "chunks")
    assert "nothing to choose" not in text and "chunks 1 " in text
    assert cli.main(["tune", "--device", "cpu", "--only", "chunks"]) == 2
    assert "torchrun" in capsys.readouterr().err
