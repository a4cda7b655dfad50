"""The command line: `onebit tune`, what all commands share, and their errors."""

import argparse
import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch

from onebit.cli import main as cli
from onebit.cli import tune
from onebit.cli.arguments import CommandError, pick_device, whole_number, whole_number_from
from onebit.cli.plan.options import number
from onebit.cli.progress import Progress
from onebit.collectives.chunking import candidates
from onebit.kernels.data.layout import BLOCK_SIZE
from onebit.kernels.tuning import tuner
from onebit.kernels.tuning.tuner import Config
from tests import forked
from tests.limits import HUNG


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEBIT_CACHE_DIR", str(tmp_path / "cache"))
    tuner.forget()
    yield tmp_path / "cache"
    tuner.forget()


@pytest.fixture
def gpu(monkeypatch):
    """A function that has `onebit tune` find a GPU, on which tuning comes to this."""

    def stand_in(tune_kernel):
        monkeypatch.setattr(tuner, "tune", tune_kernel)
        namespace = argparse.Namespace(bytes=5_000_000)
        monkeypatch.setattr(tuner, "kernel_pass", lambda *_: namespace)  # the real one launches Triton
        monkeypatch.setattr(tune, "pick_device", lambda text: torch.device("cuda", 0))
        monkeypatch.setattr(tune, "device_name", lambda device: "Test GPU")

    return stand_in


def test_tune_on_the_cpu_has_nothing_to_choose(own_cache, capsys):
    assert cli.main(["tune", "--device", "cpu", "--elements", "2**14"]) == 0
    text = capsys.readouterr().out
    assert "nothing to choose" in text and "torchrun" in text
    assert not own_cache.exists()


def test_tune_goes_through_every_kernel_of_a_gpu(gpu, monkeypatch, capsys):
    tuned = []

    def tune_kernel(kernel, device, dtype, elements, trying):
        tuned.append((kernel, device, dtype, elements))
        trying(Config(4, 4))
        trying(Config(2, 8))
        return tuner.Choice(Config(2, 8), {Config(4, 4): torch.inf, Config(2, 8): 1e-3}, saved=True)

    gpu(tune_kernel)
    monkeypatch.setattr(tune, "Progress", lambda: Progress(plain_seconds=0))
    assert cli.main(["tune", "--dtype", "bfloat16", "--elements", "4096"]) == 0
    assert tuned == [(k, torch.device("cuda", 0), torch.bfloat16, 4096) for k in tuner.PASS_OF]
    captured = capsys.readouterr()
    assert captured.out.count("blocks 2, warps 8") == captured.out.count("5.0 GB/s   <- chosen") == len(tuned)
    assert captured.out.count("does not run here") == len(tuned)
    assert "Written to" in captured.out
    lines = captured.err.splitlines()  # not a terminal: a plain line each
    assert [re.search(r"candidate (\d)", line)[1] for line in lines] == ["1", "2"] * len(tuned)
    assert lines[0].startswith(f"[1/{len(tuned)}] scan_kernel: blocks 4, warps 4")
    assert "\033" not in captured.err + captured.out


def test_tune_says_when_nothing_is_written_or_runs(gpu, capsys):
    gpu(lambda *_, **__: tuner.Choice(Config(1, 8), {Config(1, 8): 1e-3}, saved=False))
    assert cli.main(["tune", "--elements", "4096"]) == 0
    assert "Not written to" in capsys.readouterr().out
    gpu(lambda *_, **__: tuner.Choice(Config(1, 8), {Config(1, 8): torch.inf}))
    assert cli.main(["tune", "--elements", "4096"]) == 2
    assert "smaller --elements" in capsys.readouterr().err


def test_under_torchrun_tune_measures_the_chunks(own_cache):
    """A table of candidates, and the fastest in the cache; on a CPU the kernels have nothing to choose."""
    with forked.python() as python:
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        command += [python, "-m", "onebit", "tune", "--device", "cpu", "--elements", "2**21"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG)
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"chunks (\d+) +([\d.]+) ms( +<- chosen)?", result.stdout)
    assert [int(row[0]) for row in rows] == candidates(2**21, 1, BLOCK_SIZE)
    (best,) = (row for row in rows if row[2])
    assert float(best[1]) == min(float(time) for _, time, _ in rows)
    choices = json.loads((own_cache / "kernels.json").read_text())["choices"]
    assert choices == {"gloo, 2 ranks, one host, cpu, 2^22 elements, reply direct, chunks": {"chunks": int(best[0])}}
    assert result.stdout.count("nothing to choose") == 1  # one rank of the machine says so
    assert f"Written to {own_cache / 'kernels.json'}" in result.stdout


def test_under_torchrun_each_rank_tunes_on_a_gpu_of_its_own(monkeypatch):
    did = []

    def meet(backend):
        did.append(backend)
        raise CommandError

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(tune, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", did.append)
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", meet)
    assert cli.main(["tune", "--device", "cuda"]) == 2
    assert did == [torch.device("cuda", 1), "nccl"]


def test_progress_is_rewritten_in_place_on_a_terminal(monkeypatch, capsys):
    """A line never fills the terminal's last column."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "4")
    progress = Progress()
    progress.show("one")
    progress.show("two and more")
    progress.clear()
    assert capsys.readouterr().err == "\r\033[Kone\r\033[Ktwo\r\033[K"


def test_progress_elsewhere_is_a_line_every_so_many_seconds(monkeypatch, capsys):
    progress = Progress(plain_seconds=5)
    for now in range(8):
        monkeypatch.setattr("onebit.cli.progress.time", SimpleNamespace(monotonic=lambda now=now: now))
        progress.tick(f"at {now}")
    assert capsys.readouterr().err == "at 0\nat 5\n"


def test_auto_takes_a_gpu_where_there_is_one(capsys):
    if torch.cuda.is_available():
        assert pick_device("auto") == torch.device("cuda", torch.cuda.current_device())
    else:
        assert pick_device("auto") == torch.device("cpu")
        assert cli.main(["tune", "--device", "cuda"]) == 2
        message = capsys.readouterr().err
        assert "sees no GPU" in message and "--device cpu" in message


PLAN = "plan --model=bert-large --cluster=ethernet-v100 --gpus=64"


@pytest.mark.parametrize(
    "command, part",
    [
        ("", "onebit"),
        ("fly", "fly"),
        ("tune --elements=0", "'0' is not a whole number from 1 to 1,099"),
        ("tune --dtype=int8", "int8"),
        ("tune --device=meta", "meta"),
        ("tune --device=xpu:x", "xpu:x"),
        ("tune --device=toaster", "toaster"),
        ("demo --ranks=1", "from 2 to 64"),
        ("demo --steps=0", "from 10 to"),
        ("demo --steps=many", "'many' is not a whole number"),
        ("demo --seed=-1", "seed"),
        ("demo --optimizer=sgd", "'adam'"),
        ("demo --out=plot.unknown", "--out"),
        ("demo --out=/proc/plot.png", "--out"),
        ("plan --elements=1b", "--forward is missing: give it or a --model"),
        ("plan --model=bert-large --gpus=8", "--network is missing: give it or a --cluster"),
        ("plan --model=bert-large --cluster=ethernet-v100", "--gpus is missing"),
        (f"{PLAN} --gpus=63", "63 GPUs do not fill nodes of 4"),
        (f"{PLAN} --gpus=2.5", "not a whole number from 1 to 1,0"),
        (f"{PLAN} --gpus=0", "not a whole number from 1 to 1,0"),
        (f"{PLAN} --warmup=1.5", "'1.5' is no share"),
        (f"{PLAN} --memory=0", "give GB/s, above 0"),
        (f"{PLAN} --network=100", "'100' is no rate"),
        (f"{PLAN} --network=0gbit", "is no rate"),
        (f"{PLAN} --forward=-3", "'-3' is not a number, 0 or from"),
        (f"{PLAN} --rtt=5ms", "'5ms' is not a number"),
        (f"{PLAN} --forward=1e308", "from 1e-15 to 1e+15"),  # a plan's sums went beyond a float
        (f"{PLAN} --steps=2e7", "whole number from 1 to 10,000,000"),
        (f"{PLAN} --reply=3", "none of auto, direct, 1"),
        (f"{PLAN} --dtype=int8", "none of float32"),
        (f"{PLAN} --levels=3", "'3' is none of 1, 2"),
        (f"{PLAN} --model=gpt-9", "invalid choice"),
        (f"{PLAN} --rates=/nowhere.json", "no record of perf.kernels"),
        (f"{PLAN} --map=map.xyz", "cannot be a 'xyz' file: give it a name such as plot.png; choose another --map"),
        (f"{PLAN} --map=/nowhere/map.png", "choose another --map"),
        (f"{PLAN} --map=map.png --gpus=1", "there is one node: give more --gpus"),
    ],
)
def test_what_cannot_be_done_is_one_error_before_the_work(command, part, capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(command.split())
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "") and part in printed.err and "onebit" in printed.err
    assert "starting" not in printed.err and not list(tmp_path.iterdir())


def test_numbers():
    read = whole_number_from(0, 2**10)
    numbers = {"0": 0, "7": 7, "2**10": 1024, "1_000": 1000, " 10**2 ": 100, "1e3": 1000, "0.5k": 500, "2.01e-1k": 201}
    assert {text: read(text) for text in numbers} == numbers
    assert whole_number("1.07b") == 1_070_000_000
    for text in ("-1", "1025", "2**11", "2**", "2**2**2", "2**999", "1.5", "1.5b", "1e999", "", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match="from 0 to 1,024"):
            read(text)
    for text in ("_1", "1_", "1__0", "1_.5", "-1", "1e", "."):
        with pytest.raises(argparse.ArgumentTypeError, match=r"write 0[.]5, 340e6, 1[.]3b"):
            number(text)


def test_the_installed_command(capsys):
    (command,) = (point for point in entry_points(group="console_scripts") if point.name == "onebit")
    with pytest.raises(SystemExit) as stop:
        command.load()(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and all(name in text for name in ("demo", "tune", "plan"))
