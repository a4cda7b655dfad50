"""The network lab keeps its word: rates, counters, cables, refusals, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perf.lab import namespaces as lab_namespaces
from perf.lab import network as network_lab
from perf.lab.network import LabUnavailable, NetworkLab, RankFailed, parse_rate, sweep_stale

ROOT = Path(__file__).parents[2]

PREAMBLE = """
import os, socket, sys, threading, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
others = [k for k in range(size) if k != rank]
def connect(k):
    end = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((f"10.77.0.{k + 1}", 7000), timeout=10)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
def send_for(k, seconds):
    with connect(k) as s:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            s.sendall(bytes(65536))
def listen():
    return socket.create_server(("", 7000))
def count(server, senders):  # bytes, when the first came and when the last, of all senders together
    total, first, threads = [0], [], []
    def read(s):
        while data := s.recv(1 << 20):
            first.append(time.monotonic())
            total[0] += len(data)
    for _ in range(senders):
        threads.append(threading.Thread(target=read, args=(server.accept()[0],)))
        threads[-1].start()
    [t.join() for t in threads]
    return total[0], min(first), max(first)
"""
FAN_IN = """
if rank:
    send_for(0, 1.0)
else:
    print(*count(listen(), size - 1))
"""
FAN_OUT = """
if rank:
    print(*count(listen(), 1))
else:
    threads = [threading.Thread(target=send_for, args=(k, 1.0)) for k in others]
    [t.start() for t in threads]
    [t.join() for t in threads]
"""
SLEEP = "print('ready', flush=True)\ntime.sleep(300)"


@pytest.fixture(scope="module")
def lab() -> Iterator[NetworkLab]:
    with contextlib.ExitStack() as stack:
        try:
            built = stack.enter_context(NetworkLab(hosts=3, rate="100mbit"))
        except LabUnavailable as why:
            pytest.skip(str(why))
        yield built


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    def write(body: str) -> list[str]:
        path = tmp_path / "ranks.py"
        path.write_text(PREAMBLE + body)
        return [str(path)]

    return write


def left_behind(pid: int) -> list[str]:
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if name.startswith(f"onebit-{pid}-")]


def pids_on(names: list[str]) -> list[int]:
    out = [subprocess.run(["ip", "netns", "pids", n], capture_output=True, text=True).stdout for n in names]
    return [int(pid) for pid in " ".join(out).split()]


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("rate", "bits"),
    [("100mbit", 10**8), ("1gbit", 10**9), ("2.5Gbit", 25 * 10**8), ("5000kbit", 5 * 10**6), (None, None)],
)
def test_rate_is_parsed(rate: str | None, bits: int | None) -> None:
    assert parse_rate(rate) == bits


@pytest.mark.parametrize("rate", ["", "100", "fast", "1 gbyte", "-1gbit", "0mbit", "999kbit", "200gbit", "1e3mbit"])
def test_bad_rate_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match=r"is not a link rate .* as \"100mbit\""):
        parse_rate(rate)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="2 to 64 hosts"):
        NetworkLab(hosts=1)
    with pytest.raises(ValueError, match="launcher is 'mpi'"):
        NetworkLab(hosts=2).start(["script.py"], launcher="mpi")
    with pytest.raises(ValueError, match="hosts are 0 to 1"):
        NetworkLab(hosts=2).link_down(2)


def refusal(lab: NetworkLab | None = None) -> str:
    with pytest.raises(LabUnavailable) as caught, lab or NetworkLab(hosts=2):
        pass
    return str(caught.value)


def test_refuses_without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_namespaces.sys, "platform", "darwin")
    assert "needs Linux, not darwin" in refusal()


def test_refuses_without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_namespaces.sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert "no ip and no tc on PATH: install iproute2" in refusal()


def test_refuses_without_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_namespaces.sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    lab = NetworkLab(hosts=2)
    monkeypatch.setattr(Path, "read_text", lambda path: "Name:\tpython\nCapEff:\t0000000000001000\n")
    assert "lacks CAP_SYS_ADMIN: run it as root" in refusal(lab)


def test_refuses_when_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(*argv: str, lines: object = ()) -> str:
        if "-batch" in argv:
            raise RuntimeError("`ip -batch -` failed: mount --make-shared /run/netns: Operation not permitted")
        return ""

    monkeypatch.setattr(network_lab, "check_available", lambda: None)
    for module in (lab_namespaces, network_lab):
        monkeypatch.setattr(module, "execute", execute)
    assert "Operation not permitted: run it as root, on a kernel with" in refusal()


def achieved(lab: NetworkLab, argv: list[str], least: float, most: float) -> bool:
    """Whether a link carries `least` Mbit/s and never `most`, from the first byte anywhere to the last. On a busy
    machine the senders themselves may be too slow: then they try again.
    """
    for _ in range(5):
        outputs = [rank.output.split() for rank in lab.run(argv, timeout=30, launcher="env") if rank.output]
        total, first, last = zip(*(map(float, output) for output in outputs), strict=True)
        found = sum(total) * 8e-6 / (max(last) - min(first))
        assert found < most
        if found > least:
            return True
    return False


@pytest.mark.netlab
@pytest.mark.parametrize("body", [FAN_IN, FAN_OUT], ids=["into a host", "out of a host"])
def test_both_directions_are_shaped(lab: NetworkLab, script: Callable[[str], list[str]], body: str) -> None:
    assert achieved(lab, script(body), 85, 102)


@pytest.mark.netlab
def test_rates_change_without_rebuilding(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    try:
        lab.set_rate("20mbit")
        assert achieved(lab, script(FAN_IN), 17, 21.5)
        lab.set_rate(None)
        assert achieved(lab, script(FAN_IN), 300, float("inf"))
    finally:
        lab.set_rate("100mbit")


@pytest.mark.netlab
def test_counters_count_what_was_sent(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    body = """
if rank == 1:
    connect(0).sendall(bytes(3_000_000))
elif rank == 0:
    print(count(listen(), 1)[0])
"""
    before = lab.bytes_sent()
    assert lab.run(script(body), timeout=30, launcher="env")[0].output == "3000000\n"
    sent = [after - first for after, first in zip(lab.bytes_sent(), before, strict=True)]
    assert 3_000_000 < sent[1] < 3_150_000
    assert sent[0] < 200_000  # acknowledgements
    assert sent[2] < 500


@pytest.mark.netlab
def test_a_pulled_cable_cuts_traffic(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    body = """
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    if rank == 0:
        s.bind(("", 7001))
        while True:
            print(s.recv(10), flush=True)
    while rank == 1:
        s.sendto(b"x", ("10.77.0.1", 7001))
        time.sleep(0.01)
"""
    lines: list[str] = []
    run = lab.start(script(body), launcher="env", on_line=lambda rank, line: lines.append(line))
    until(lambda: len(lines) > 5)
    lab.link_down(1)
    time.sleep(0.2)
    cut = len(lines)
    time.sleep(0.5)
    assert len(lines) == cut
    lab.link_up(1)
    until(lambda: len(lines) > cut + 5)
    with pytest.raises(RuntimeError, match=r"call its wait\(\) or stop\(\) first"):
        lab.start(script(body))
    run.stop()
    assert not pids_on(lab.namespaces)


@pytest.mark.netlab
def test_a_failed_rank_ends_the_run(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    body = "if rank == 1:\n    raise ValueError('no such gradient')\n" + SLEEP
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)^rank 1 failed with status 1.*no such gradient") as caught:
        lab.run(script(body), timeout=60, launcher="env")
    assert "rank 0" not in str(caught.value)
    assert time.monotonic() - began < 10
    assert not pids_on(lab.namespaces)


@pytest.mark.netlab
def test_unchecked_survivors_go_on(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    lines: list[str] = []
    body = "print('ready', flush=True)\ntime.sleep(60 if rank == 1 else 1.5)\nprint('done')"
    run = lab.start(script(body), launcher="env", on_line=lambda rank, line: lines.append(line))
    until(lambda: len(lines) == 3)
    run.kill(1)
    ranks = run.wait(timeout=30, check=False)
    assert [rank.code for rank in ranks] == [0, -signal.SIGKILL, 0]
    assert [rank.output for rank in ranks] == ["ready\ndone\n", "ready\n", "ready\ndone\n"]


@pytest.mark.netlab
def test_a_hanging_rank_is_ended_and_named(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    with pytest.raises(TimeoutError, match=r"(?s)did not end in 1 s.*rank 2 was still running.*ready") as caught:
        lab.run(
            script("if rank == 2:\n    " + (stubborn + SLEEP).replace("\n", "\n    ")),
            timeout=1,
            launcher="env",
        )
    assert "rank 0" not in str(caught.value)
    assert not pids_on(lab.namespaces)


@pytest.mark.netlab
def test_torchrun_meets_across_hosts(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    body = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((1_000_000,), float(rank))
dist.all_reduce(total)
print(rank, total[0].item(), os.environ["OMP_NUM_THREADS"], flush=True)
dist.barrier()
if rank == 2:
    raise ValueError("no such gradient")
time.sleep(300)
"""
    before = lab.bytes_sent()
    lines: dict[int, list[str]] = {0: [], 1: [], 2: []}
    with pytest.raises(RankFailed, match=r"(?s)rank 2 failed.*no such gradient"):
        lab.run(script(body), timeout=90, on_line=lambda rank, line: lines[rank].append(line))
    for rank in range(3):
        assert f"{rank} 3.0 1" in lines[rank]
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
    output = process.communicate(timeout=30)[0]
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
    process.communicate(timeout=30)
    assert len(names) == 3 and len(ranks) == 2
    assert set(names) <= set(sweep_stale())
    assert not left_behind(process.pid)
    until(lambda: not [pid for pid in ranks if Path(f"/proc/{pid}").exists()])
    assert len(left_behind(os.getpid())) == 4  # ours lives on


@pytest.mark.netlab
def test_command_line_reports(lab: NetworkLab, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text("import sys; sys.exit('bad input' if sys.argv[1:] == ['--fail'] else 0)")
    shared = ["--hosts=2", "--launcher=env", "--", str(path)]
    assert network_lab.main(shared) == 0
    assert network_lab.main([*shared, "--fail"]) == 1
    captured = capfd.readouterr()
    assert "[rank 1] bad input" in captured.out
    assert "failed with status 1; its last lines:\n    bad input" in captured.err
