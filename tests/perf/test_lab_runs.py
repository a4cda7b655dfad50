"""Runs on the network lab: what ends them, and that they leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from perf.lab.command import main
from perf.lab.namespaces import sweep_stale
from perf.lab.network import NetworkLab
from perf.lab.processes import RankFailed
from tests.limits import HUNG
from tests.perf.hosts import SLEEP, left_behind, pids_on, until

ROOT = Path(__file__).parents[2]


@pytest.mark.netlab
def test_a_failed_rank_ends_the_run(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    body = "if rank == 1:\n    raise ValueError('no such gradient')\n" + SLEEP
    with pytest.raises(RankFailed, match=r"(?s)^rank 1 failed with status 1.*no such gradient") as caught:
        lab.run(script(body), timeout=3600, launcher="env")
    assert "rank 0" not in str(caught.value)
    assert not pids_on(lab.namespaces)


@pytest.mark.netlab
def test_unchecked_survivors_go_on(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    lines: list[str] = []
    body = "print('ready', flush=True)\ntime.sleep(3600 if rank == 1 else 1.5)\nprint('done')"
    run = lab.start(script(body), launcher="env", on_line=lambda rank, line: lines.append(line))
    until(lambda: len(lines) == 3)
    run.kill(1)
    ranks = run.wait(timeout=HUNG, check=False)
    assert [rank.code for rank in ranks] == [0, -signal.SIGKILL, 0]
    assert [rank.output for rank in ranks] == ["ready\ndone\n", "ready\n", "ready\ndone\n"]


@pytest.mark.netlab
def test_a_hanging_rank_is_ended_and_named(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    run = lab.start(script("if rank == 2:\n    " + (stubborn + SLEEP).replace("\n", "\n    ")), launcher="env")
    until(lambda: run.ranks[2].lines and all(rank.process.poll() is not None for rank in run.ranks[:2]))
    with pytest.raises(TimeoutError, match=r"(?s)did not end in 0\.2 s.*rank 2 was still running.*ready") as caught:
        run.wait(timeout=0.2)
    assert "rank 0" not in str(caught.value)
    assert not pids_on(lab.namespaces)


@pytest.mark.slow
@pytest.mark.netlab
def test_torchrun_starts_a_group_across_hosts(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    body = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((1_000_000,), float(rank))
dist.all_reduce(total)
print(rank, total[0].item(), os.environ["OMP_NUM_THREADS"], os.environ["NCCL_HOSTID"], flush=True)
dist.barrier()
if rank == 2:
    raise ValueError("no such gradient")
time.sleep(3600)
"""
    before = lab.bytes_sent()
    lines: dict[int, list[str]] = {0: [], 1: [], 2: []}
    with pytest.raises(RankFailed, match=r"(?s)rank 2 failed.*no such gradient"):
        lab.run(script(body), timeout=HUNG, on_line=lambda rank, line: lines[rank].append(line))
    for rank in range(3):
        assert f"{rank} 3.0 1 {lab.bridge}-{rank}" in lines[rank]
    for after, first in zip(lab.bytes_sent(), before, strict=True):
        assert 4e6 * 2 * 2 / 3 < after - first < 4e6 * 2 * 2 / 3 * 1.1
    assert not pids_on(lab.namespaces)  # torchrun's workers have sessions of their own


@pytest.mark.netlab
def test_an_exception_leaves_nothing(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(ZeroDivisionError), NetworkLab(hosts=2) as second:  # beside another lab
        lines: list[str] = []
        run = second.start(script(SLEEP), launcher="env", on_line=lambda rank, line: lines.append(line))
        until(lambda: len(lines) == 2)
        assert len(pids_on(second.namespaces)) == 2
        assert 1 / 0
    assert not run.running()
    assert sorted(left_behind(os.getpid())) == sorted([lab.bridge, *lab.namespaces])
    assert signal.signal(signal.SIGTERM, former) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def command_line(argv: list[str]) -> subprocess.Popen[str]:
    """The CLI with two sleeping ranks, once both are up."""
    options = ["--hosts=2", "--rate=1gbit", "--launcher=env", "--", *argv]
    process = subprocess.Popen(
        [sys.executable, "-m", "perf.lab", *options], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    late = threading.Timer(20, process.kill)
    late.start()
    seen: set[str] = set()
    while not seen >= {"[rank 0] ready\n", "[rank 1] ready\n"}:
        seen.add(process.stdout.readline())
        assert "" not in seen, "the command line ended early"
    late.cancel()
    return process


@pytest.mark.netlab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(lab: NetworkLab, script: Callable[[str], list[str]], number: int) -> None:
    process = command_line(script(SLEEP))
    assert len(left_behind(process.pid)) == 3
    ranks = pids_on(left_behind(process.pid))
    assert len(ranks) == 2
    process.send_signal(number)
    output = process.communicate(timeout=HUNG)[0]
    assert process.returncode == 128 + number
    assert "host 1 sent " in output
    assert not left_behind(process.pid)
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.netlab
def test_a_killed_lab_is_swept(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    process = command_line(script(SLEEP))
    names = left_behind(process.pid)
    ranks = pids_on(names)
    process.kill()
    process.communicate(timeout=HUNG)
    assert len(names) == 3 and len(ranks) == 2
    sweep_stale()
    until(lambda: not left_behind(process.pid))  # a lab of another test that starts now sweeps, too
    until(lambda: not [pid for pid in ranks if Path(f"/proc/{pid}").exists()])
    assert len(left_behind(os.getpid())) == 4  # ours lives on


@pytest.mark.netlab
def test_command_line_reports(lab: NetworkLab, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(
        "import os, sys\nsys.exit('bad input' if '--fail' in sys.argv and os.environ['RANK'] == '1' else 0)"
    )
    shared = ["--hosts=2", "--launcher=env", "--", str(path)]
    assert main(shared) == 0
    assert main([*shared, "--fail"]) == 1
    captured = capfd.readouterr()
    assert "[rank 1] bad input" in captured.out
    assert "rank 1 failed with status 1; its last lines:\n    bad input" in captured.err
