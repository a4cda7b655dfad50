"""The network lab: rates, counters, cables, refusals."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perf.lab import namespaces, network
from perf.lab.namespaces import LabUnavailable
from perf.lab.network import NetworkLab
from perf.lab.processes import RankFailed
from perf.lab.rates import parse_rate
from tests.limits import HUNG
from tests.perf.hosts import incoming, outgoing, pids_on, sent_to_host_0, until


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
    for each in (0, 65):
        with pytest.raises(ValueError, match="1 to 64 ranks"):
            NetworkLab(hosts=2, each=each)
    with pytest.raises(ValueError, match="launcher is 'mpi'"):
        NetworkLab(hosts=2).start(["script.py"], launcher="mpi")
    with pytest.raises(ValueError, match="hosts are 0 to 1"):
        NetworkLab(hosts=2).link_down(2)


def refusal(lab: NetworkLab | None = None) -> str:
    with pytest.raises(LabUnavailable) as caught, lab or NetworkLab(hosts=2):
        pass
    return str(caught.value)


def test_refuses_without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert "needs Linux, not darwin" in refusal()


def test_refuses_without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert "no ip and no tc on PATH: install iproute2" in refusal()


def test_refuses_without_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    lab = NetworkLab(hosts=2)
    monkeypatch.setattr(Path, "read_text", lambda path: "Name:\tpython\nCapEff:\t0000000000001000\n")
    assert "lacks CAP_SYS_ADMIN: run it as root" in refusal(lab)


def test_refuses_when_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(*argv: str, lines: object = ()) -> str:
        if "-batch" in argv:
            raise RuntimeError("`ip -batch -` failed: mount --make-shared /run/netns: Operation not permitted")
        return ""

    monkeypatch.setattr(network, "check_available", lambda: None)
    for module in (namespaces, network):
        monkeypatch.setattr(module, "execute", execute)
    assert "Operation not permitted: run it as root, on a kernel with" in refusal()


FAN_IN = """
if rank:
    send(0, 3_000_000)
else:
    print(count(listen(), size - 1))
"""
FAN_OUT = """
if rank:
    print(count(listen(), 1))
else:
    threads = [threading.Thread(target=send, args=(k, 3_000_000)) for k in others]
    [t.start() for t in threads]
    [t.join() for t in threads]
"""


@pytest.mark.netlab
@pytest.mark.parametrize(("body", "shaper"), [(FAN_IN, incoming), (FAN_OUT, outgoing)], ids=["in", "out"])
def test_both_directions_are_shaped(
    lab: NetworkLab, script: Callable[[str], list[str]], body: str, shaper: Callable[..., dict[str, Any]]
) -> None:
    """All that two hosts exchange with a third passes one shaper, which holds packets back."""
    for host in range(3):
        for found in (incoming(lab, host), outgoing(lab, host)):
            assert (found["kind"], found["rate"]) == ("tbf", 100e6 / 8)
    for _ in range(5):  # a busy machine may send more slowly than the link
        before = shaper(lab, 0)
        received = sum(int(rank.output) for rank in lab.run(script(body), timeout=HUNG, launcher="env") if rank.output)
        after = shaper(lab, 0)
        assert received == 6_000_000 <= after["bytes"] - before["bytes"]
        if after["overlimits"] > before["overlimits"]:
            return
    raise AssertionError("the shaper has held nothing back")


@pytest.mark.netlab
def test_rates_change_without_rebuilding(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    try:
        for rate, kind, expected in (("20mbit", "tbf", 20e6 / 8), (None, "noqueue", None), ("2gbit", "tbf", 2e9 / 8)):
            lab.set_rate(rate)
            for host in range(3):
                for found in (incoming(lab, host), outgoing(lab, host)):
                    assert (found["kind"], found["rate"]) == (kind, expected)
            assert lab.run(script(FAN_IN), timeout=HUNG, launcher="env")[0].output == "6000000\n"
    finally:
        lab.set_rate("100mbit")


@pytest.mark.netlab
def test_counters_count_what_was_sent(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    sent = sent_to_host_0(lab, script, 3_000_000)
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


PLACE = """
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
with socket.create_server((f"10.77.0.{int(os.environ['GROUP_RANK']) + 1}", 0)):  # an address of this namespace alone
    os.write(1, f"place {' '.join(os.environ[name] for name in names)}\\n".encode())  # at once: agents mix lines
"""
PLACES = ["place 0 4 0 2 0", "place 1 4 1 2 0", "place 2 4 0 2 1", "place 3 4 1 2 1"]


@pytest.mark.netlab
def test_several_ranks_a_host_know_their_host(nodes: NetworkLab, script: Callable[[str], list[str]]) -> None:
    ranks = nodes.run(script(PLACE), timeout=HUNG, launcher="env")
    assert [rank.output for rank in ranks] == [f"{p}\n" for p in PLACES]


@pytest.mark.slow
@pytest.mark.netlab
def test_torchrun_starts_several_ranks_a_host(nodes: NetworkLab, script: Callable[[str], list[str]]) -> None:
    agents = nodes.run(script(PLACE), timeout=HUNG)
    places = [sorted(line.strip() for line in agent.lines if line.startswith("place")) for agent in agents]
    assert places == [PLACES[:2], PLACES[2:]]


@pytest.mark.netlab
def test_one_rank_a_host_is_a_host_of_its_own(lab: NetworkLab, script: Callable[[str], list[str]]) -> None:
    ranks = lab.run(script(PLACE), timeout=HUNG, launcher="env")
    assert [rank.output for rank in ranks] == [f"place {k} 3 0 1 {k}\n" for k in range(3)]


@pytest.mark.netlab
@pytest.mark.parametrize(("sender", "host"), [(1, 0), (3, 1)], ids=["within a host", "between hosts"])
def test_what_stays_in_a_host_is_not_counted(
    nodes: NetworkLab, script: Callable[[str], list[str]], sender: int, host: int
) -> None:
    """A megabyte to rank 0's address: rank 1 is on its host, rank 3 is not."""
    body = f"""
if rank == {sender}:
    send(0, 1_000_000)
elif rank == 0:
    print(count(listen(), 1))
"""
    before = nodes.bytes_sent()
    assert nodes.run(script(body), timeout=HUNG, launcher="env")[0].output == "1000000\n"
    sent = [after - first for after, first in zip(nodes.bytes_sent(), before, strict=True)]
    assert sum(sent) < 1000 if host == 0 else 1_000_000 < sent[host] < 1_050_000


@pytest.mark.netlab
@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_rank_of_several_is_named(nodes: NetworkLab, script: Callable[[str], list[str]], failing: int) -> None:
    body = f"if rank == {failing}:\n    raise ValueError('no such gradient')\ntime.sleep(3600)"
    with pytest.raises(RankFailed, match=rf"(?s)^rank {failing} failed with status 1.*no such gradient"):
        nodes.run(script(body), timeout=HUNG, launcher="env")
    assert not pids_on(nodes.namespaces)
