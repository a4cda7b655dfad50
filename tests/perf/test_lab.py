"""The network lab: links, counters and cables, who runs where, and that nothing stays behind whatever ends a run."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from perf.lab import namespaces, network
from perf.lab.command import main
from perf.lab.namespaces import LabUnavailable, sweep_stale
from perf.lab.network import NetworkLab
from perf.lab.processes import RankFailed
from perf.lab.rates import parse_link, rate_and_rtt, rate_bits, rtt_seconds
from tests.limits import HUNG
from tests.perf.hosts import SLEEP, incoming, left_behind, outgoing, pids_on, until

ROOT = Path(__file__).parents[2]


def test_links_of_options_and_records_are_parsed():
    for link, bits, rtt in (
        ("100mbit", 10**8, None),
        ("2.5Gbit", 25 * 10**8, None),
        ("5000kbit+100MS", 5 * 10**6, 0.1),
        ("1gbit+2.5ms", 10**9, 0.0025),
        ("unshaped", None, None),
        ("unshaped+1ms", None, 0.001),
    ):
        parsed = parse_link(link)
        assert parsed == link.lower() and (rate_bits(parsed), rtt_seconds(parsed)) == (bits, pytest.approx(rtt))
    assert rate_bits(None) is rtt_seconds(None) is None
    assert rate_and_rtt("100mbit+50ms") == ("100mbit", "50ms") and rate_and_rtt("unshaped+1ms") == (None, "1ms")
    rates = ("100", "fast", "1 gbyte", "-1gbit", "0mbit", "999kbit", "200gbit", "1e3mbit")
    rtts = ("", "50", "0.5ms", "101ms", "1s", "fast", "-1ms", "1e1ms")
    for link in (*rates, *(f"1gbit+{rtt}" for rtt in rtts)):
        with pytest.raises(ValueError, match="is no link: write a rate from 1mbit to 100gbit"):
            NetworkLab(2, link)
    for says, call in (
        ("2 to 64 hosts", partial(NetworkLab, hosts=1)),
        ("1 to 64 ranks", partial(NetworkLab, hosts=2, each=0)),
        ("1 to 64 ranks", partial(NetworkLab, hosts=2, each=65)),
        ("hosts are 0 to 1", partial(NetworkLab(hosts=2).link_down, 2)),
    ):
        with pytest.raises(ValueError, match=says):
            call()


def test_it_says_what_is_missing(monkeypatch):
    lab = NetworkLab(hosts=2)

    def refuses(says):
        with pytest.raises(LabUnavailable, match=says), lab:
            pass

    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    refuses("needs Linux, not darwin")
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    refuses("no ip and no tc on PATH: install iproute2")
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        refuses("makes network namespaces: run it as root")

    def execute(*argv, lines=()):
        if "-batch" in argv:
            raise RuntimeError("`ip -batch -` failed: mount --make-shared /run/netns: Operation not permitted")
        return ""

    monkeypatch.setattr(network, "check_available", lambda: None)
    for module in (namespaces, network):
        monkeypatch.setattr(module, "execute", execute)
    refuses("Operation not permitted: run it as root, on a kernel with")


FAN_IN = "if rank:\n    send(0, 3_000_000)\nelse:\n    print(count(listen(), size - 1))\n"
FAN_OUT = """
if rank:
    print(count(listen(), 1))
else:
    for k in others:
        threading.Thread(target=send, args=(k, 3_000_000)).start()
"""


@pytest.mark.netlab
def test_both_directions_are_shaped(lab, script):
    """All that two hosts exchange with a third passes one shaper, which holds packets back; rates change any time."""
    rates = (("20mbit", "tbf", 20e6), ("unshaped", "noqueue", None), ("2gbit", "tbf", 2e9), ("100mbit", "tbf", 100e6))
    for rate, kind, bits in rates:
        lab.set_link(rate)
        for host in range(3):
            for found in (incoming(lab, host), outgoing(lab, host)):
                assert (found["kind"], found["rate"]) == (kind, bits and bits / 8)
    for body, shaper in ((FAN_IN, incoming), (FAN_OUT, outgoing)):
        for _ in range(5):  # a busy machine may send more slowly than the link
            before = shaper(lab, 0)
            ranks = lab.run(script(body), timeout=HUNG)
            after = shaper(lab, 0)
            assert sum(int(rank.output) for rank in ranks if rank.output) == 6_000_000
            assert after["bytes"] - before["bytes"] >= 6_000_000
            if after["overlimits"] > before["overlimits"]:
                break
        else:
            pytest.fail("the shaper has held nothing back")


GROUP = """
import torch
import torch.distributed as dist
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
with socket.create_server((f"10.77.0.{int(os.environ['GROUP_RANK']) + 1}", 0)):  # an address of this namespace alone
    print("place", *(os.environ[name] for name in names), flush=True)
dist.init_process_group("gloo")
total = torch.full((1_000_000,), float(rank))
dist.all_reduce(total)
print("sum", total[0].item(), os.environ["OMP_NUM_THREADS"], os.environ["NCCL_HOSTID"], flush=True)
dist.barrier()
if rank == 2:
    raise ValueError("no such gradient")
time.sleep(3600)
"""


@pytest.mark.netlab
def test_ranks_know_their_host_and_are_a_group_until_one_fails(nodes, script):
    before, lines = nodes.bytes_sent(), {rank: [] for rank in range(4)}
    with pytest.raises(RankFailed, match=r"(?s)^rank 2 failed with status 1; .*no such gradient"):
        nodes.run(script(GROUP), timeout=HUNG, on_line=lambda rank, line: lines[rank].append(line))
    for rank, said in lines.items():
        assert said[0] == f"place {rank} 4 {rank % 2} 2 {rank // 2}"
        assert f"sum 6.0 1 {nodes.bridge}-{rank // 2}" in said
    for after, first in zip(nodes.bytes_sent(), before, strict=True):
        assert 4e6 * 2 * 3 / 4 < after - first < 4e6 * 2 * 3 / 4 * 1.1
    assert not pids_on(nodes.namespaces)


@pytest.mark.netlab
def test_unchecked_survivors_go_on(lab, script):
    lines = []
    body = "print('ready', flush=True)\ntime.sleep(3600 if rank == 1 else 1.5)\nprint('done')"
    run = lab.start(script(body), on_line=lambda rank, line: lines.append(line))
    until(lambda: len(lines) == 3)
    with pytest.raises(RuntimeError, match=r"call its wait\(\) or stop\(\) first"):
        lab.start(script(SLEEP))
    os.kill(pids_on(lab.namespaces[1:2])[0], signal.SIGKILL)
    ranks = run.wait(timeout=HUNG, check=False)
    assert [rank.code for rank in ranks] == [0, -signal.SIGKILL, 0]
    assert [rank.output for rank in ranks] == ["ready\ndone\n", "ready\n", "ready\ndone\n"]
    lab.start(script(SLEEP)).stop()
    assert not pids_on(lab.namespaces)


@pytest.mark.netlab
def test_a_hanging_rank_is_ended_and_named(lab, script):
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    run = lab.start(script("if rank == 2:\n    " + (stubborn + SLEEP).replace("\n", "\n    ")))
    until(lambda: run.ranks[2].lines and all(rank.process.poll() is not None for rank in run.ranks[:2]))
    with pytest.raises(TimeoutError, match=r"(?s)did not end in 0\.2 s.*rank 2 was still running.*ready") as caught:
        run.wait(timeout=0.2)
    assert "rank 0" not in str(caught.value)
    assert not pids_on(lab.namespaces)


@pytest.mark.netlab
def test_an_exception_leaves_nothing(lab, script):
    former, ours = signal.signal(signal.SIGTERM, signal.SIG_DFL), left_behind(os.getpid())
    with pytest.raises(ZeroDivisionError), NetworkLab(hosts=2) as second:  # beside another lab
        lines = []
        asked = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(print('asked to end', flush=True)))\n"
        run = second.start(script(asked + SLEEP), on_line=lambda rank, line: lines.append(line))
        until(lambda: len(lines) == 2)
        assert len(pids_on(second.namespaces)) == 2
        assert 1 / 0
    assert not run.running() and [rank.lines[-1] for rank in run.ranks] == ["asked to end\n"] * 2
    assert left_behind(os.getpid()) == ours and {lab.bridge, *lab.namespaces} <= set(ours)
    assert signal.signal(signal.SIGTERM, former) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.netlab
@pytest.mark.parametrize(("number", "rtt"), [(signal.SIGINT, ""), (signal.SIGTERM, "+20ms"), (signal.SIGKILL, "+20ms")])
def test_a_signal_leaves_nothing(lab, script, number, rtt, request):
    """What a killed lab leaves, the next one sweeps; its router ends by itself."""
    if rtt:
        request.getfixturevalue("delay_available")
    options = ["--hosts=2", f"--rate=100mbit{rtt}", "--", *script(SLEEP)]
    command = [sys.executable, "-m", "tests.perf.hosts", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        late = threading.Timer(HUNG, process.kill)
        late.start()
        seen = set()
        while not seen >= {"[rank 0] ready\n", "[rank 1] ready\n"}:
            seen.add(process.stdout.readline())
            assert "" not in seen, "the command line ended early"
        late.cancel()
        names, ours = left_behind(process.pid), left_behind(os.getpid())
        ranks = pids_on(names)
        routers = pids_on([name for name in names if name.endswith("bridge")])
        assert (len(names), len(ranks), len(routers)) == (3, 2 + bool(rtt), bool(rtt))
        assert f"links of 100mbit{rtt};" in "".join(seen)
        process.send_signal(number)
        output = process.communicate(timeout=HUNG)[0]
    if number == signal.SIGKILL:
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in routers))
        sweep_stale()
        until(lambda: not left_behind(process.pid))  # a lab of another test that starts now sweeps, too
    else:
        assert process.returncode == 128 + number and "host 1 sent " in output
    assert not left_behind(process.pid)
    until(lambda: not [pid for pid in ranks if Path(f"/proc/{pid}").exists()])
    assert left_behind(os.getpid()) == ours  # which live on


@pytest.mark.netlab
def test_the_command_line_reports_and_a_failed_rank_ends_the_run(lab, capfd, script):
    fails = "if '--fail' in sys.argv:\n    sys.exit('bad input') if rank == 1 else time.sleep(3600)\n"
    shared, ours = ["--hosts=2", "--", *script(fails)], left_behind(os.getpid())
    assert main(shared) == 0
    assert main([*shared, "--fail"]) == 1
    captured = capfd.readouterr()
    assert "[rank 1] bad input" in captured.out
    assert "rank 1 failed with status 1; its last lines:\n    bad input" in captured.err
    assert "rank 0" not in captured.err and left_behind(os.getpid()) == ours
