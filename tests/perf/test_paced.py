"""Networks without root: two hosts joined by paced sockets, and namespaces within a user namespace."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perf import bench
from perf.all_reduce import benchmark as all_reduce
from perf.all_reduce.measure import Row
from perf.bench import NETWORK, Section
from perf.lab import namespaces, paced
from perf.lab.delay import WrongLink
from perf.lab.namespaces import AS_ROOT, LabUnavailable, allows_user_namespaces, enter_user_namespace
from perf.lab.paced import (
    PACED,
    PacedNetwork,
    best_network,
    check_kept,
    measured_links,
    open_network,
    skipping_refused_links,
)
from perf.lab.processes import RankFailed
from perf.records import read_record
from tests.limits import HUNG
from tests.test_structure import ROOT

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux paces sockets")


@linux
def test_an_all_reduce_has_the_rate_that_was_measured_beside_it(tmp_path, capsys):
    """A machine that is too busy to keep the link gives no figure, and says so."""
    arguments = ["--paced", "--rates=20mbit", "--elements=2**14", "--repeats=1", "--chunks=1", f"--out={tmp_path}"]
    status = all_reduce.main(arguments)
    printed = capsys.readouterr()
    if status == 2:
        assert "no figure: a link of 20 Mbit/s was asked for" in printed.out
        assert "no link was what was asked for" in printed.err and not list(tmp_path.iterdir())
        return
    assert status == 0 and "paced links as measured, headers included: 20mbit" in printed.out
    (path,) = tmp_path.glob("*.json")
    rows = [Row.of(row) for row in read_record(path)["rows"]]
    assert {row.kind for row in rows} == {"1 bit", "fp32", "fp16", "bf16"}
    for row in rows:
        check_kept("20mbit", row.measured)
        assert (row.hosts, row.rate, row.bytes) == (2, "20mbit", None)


@linux
def test_ranks_know_their_hosts_and_end_together(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, sys, time\n"
        f"names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'GROUP_RANK', 'NCCL_HOSTID', 'NCCL_MAX_NCHANNELS', '{PACED}')\n"
        "print(*(os.environ.get(name) for name in names), flush=True)\n"
        "time.sleep(0.2 if os.environ['RANK'] == '0' else 3600)\nsys.exit('out of luck')\n"
    )
    lines = []
    with PacedNetwork(2, "20mbit") as network:
        with pytest.raises(RankFailed, match=r"(?s)rank 0 failed with status 1; .*out of luck"):
            network.run([str(script)], timeout=HUNG, on_line=lambda rank, line: lines.append((rank, line)))
        name = f"onebit-{os.getpid()}"
        for rank in (0, 1):
            assert (rank, f"{rank} 2 0 {rank} {name}-{rank} 1 20mbit") in lines
        network.set_link("unshaped")
        script.write_text(f"import os\nprint(os.environ.get('{PACED}'))")
        assert [rank.output for rank in network.run([str(script)], timeout=HUNG)] == ["None\n"] * 2


def test_what_pacing_cannot_make_is_refused(monkeypatch):
    for make, says in (
        (lambda: PacedNetwork(3), "hosts is 3: a paced link joins two"),
        (lambda: PacedNetwork(2, "1gbit+10ms"), "has a round trip, and pacing makes none: use --lab"),
    ):
        with pytest.raises(ValueError, match=says):
            make()
    with pytest.raises(
        WrongLink, match=r"a link of 1 Gbit/s was asked for, and 800 Mbit/s measured, more than 15% away"
    ):
        check_kept("1gbit", 8e8)
    check_kept("1gbit", 9e8)
    check_kept("unshaped", 8e8)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabUnavailable, match="only Linux paces sockets, not darwin"):
        PacedNetwork(2)


def test_a_refused_link_ends_the_lab_but_not_the_other_paced_links(capsys):
    with skipping_refused_links(argparse.Namespace(paced=True)):
        raise WrongLink("too slow")
    assert capsys.readouterr().out == "no figure: too slow\n"
    with pytest.raises(WrongLink), skipping_refused_links(argparse.Namespace(paced=False)):
        raise WrongLink("too slow")
    rows = [Row(2, "1gbit", 1, "fp32", measured=9.9e8), Row(2, "10gbit", 1, "fp32", measured=9.5e9)]
    assert measured_links(rows).startswith(
        "paced links as measured, headers included: 1gbit 990 Mbit/s, 10gbit 9.5 Gbit/s"
    )
    assert measured_links([Row(2, "1gbit", 1, "fp32")]) == ""
    assert isinstance(open_network(argparse.Namespace(paced=False), 2), paced.NetworkLab)


def test_bench_takes_the_best_network_there_is_and_says_which(monkeypatch, tmp_path, capfd):
    ways = []
    for tools, uid, allowed in ((True, 0, False), (True, 1000, True), (True, 1000, False), (False, 0, True)):
        monkeypatch.setattr(shutil, "which", lambda name, there=tools: name if there else None)
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        monkeypatch.setattr(paced, "allows_user_namespaces", lambda allowed=allowed: allowed)
        ways.append(best_network())
    assert [option for option, _ in ways] == ["--lab", "--lab", "--paced", "--paced"]
    assert len({how for _, how in ways}) == 3
    monkeypatch.undo()
    (tmp_path / "shows.py").write_text("import sys\nprint('got', *sys.argv[1:])\nsys.exit(2)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(bench, "SECTIONS", (Section("shows", "Shows", ("shows", NETWORK, "--repeats=3"), 60),))
    monkeypatch.setattr(bench, "best_network", lambda: ("--paced", "two hosts"))
    assert bench.main(["--out", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert "The network: two hosts" in printed and "got --paced --repeats=3 --out=" in printed


def test_a_command_starts_again_within_a_user_namespace_where_it_must_and_may(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execvp", lambda file, argv: started.append((file, argv)))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "perf.lab", "--hosts", "2"])
    for uid, allowed, starts in ((0, True, False), (1000, False, False), (1000, True, True)):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        monkeypatch.setattr(namespaces, "allows_user_namespaces", lambda allowed=allowed: allowed)
        enter_user_namespace()
        assert bool(started) == starts
    ((file, argv),) = started
    assert file == "unshare" and argv[-5:] == [sys.executable, "-m", "perf.lab", "--hosts", "2"]


@pytest.mark.netlab
@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_the_lab_works_within_a_user_namespace(lab_available, tmp_path):
    if not allows_user_namespaces():
        pytest.skip("no user namespaces here")
    (tmp_path / "hello.py").write_text(
        "import os\nprint('host', os.environ['GROUP_RANK'], open('/proc/self/uid_map').read())"
    )
    command = [
        *AS_ROOT,
        "sh",
        sys.executable,
        "-m",
        "perf.lab",
        "--hosts=2",
        "--rate=20mbit",
        "--",
        tmp_path / "hello.py",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=HUNG)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"[rank {rank}] host {rank}  " in done.stdout
    assert (
        Path("/proc/self/uid_map").read_text().split()[-1] != "1" and done.stdout.count(" 1\n") == 2
    )  # one user of the machine, who is root there
