"""Networks without root: two hosts joined by paced sockets, and namespaces within a user namespace."""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import perf.ranks
from onebit.cli.paced_link import PAYLOAD
from perf import bench
from perf.all_reduce import benchmark as all_reduce
from perf.all_reduce.measure import Row
from perf.bench import NETWORK, Section
from perf.lab import namespaces, paced, processes
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
from perf.train_step import benchmark as train_step
from perf.train_step.report import record_name
from tests.limits import HUNG
from tests.onebit.cli.test_paced_link import connection, rate_of
from tests.test_structure import ROOT

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux paces sockets")


@linux
def test_an_all_reduce_has_the_rate_that_was_measured_beside_it(tmp_path, capsys):
    """A machine that is too busy to keep the link gives no figure, and says so."""
    arguments = ["--paced", "--rates=20mbit", "--elements=2**14", "--repeats=1", "--chunks=1", f"--out={tmp_path}"]
    status = all_reduce.main(arguments)
    printed = capsys.readouterr()
    if status == 2:
        rate = re.search(r"no figure: a link of 20 Mbit/s was asked for, and ([\d.]+) Mbit/s measured", printed.out)
        assert float(rate[1]) < 20  # a busy machine is slower, never faster
        assert "no link was what was asked for" in printed.err and not list(tmp_path.iterdir())
        return
    assert status == 0 and "paced links as measured, headers included: 20mbit" in printed.out
    (path,) = tmp_path.glob("*.json")
    rows = [Row.of(row) for row in read_record(path)["rows"]]
    assert {row.kind for row in rows} == {"1 bit", "4 bits", "8 bits", "fp32", "fp16", "bf16"}
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


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_a_signal_or_an_error_between_two_starts_leaves_no_rank(number, tmp_path, monkeypatch):
    script = tmp_path / "ranks.py"
    script.write_text("import time\ntime.sleep(3600)")
    started, start = [], processes.start_rank

    def second_fails(command, env):
        if started and number is None:
            raise OSError("no more processes")
        started.append(start(command, env))
        if number is not None:
            signal.raise_signal(number)
        return started[-1]

    monkeypatch.setattr(processes, "start_rank", second_fails)
    with pytest.raises((SystemExit, OSError)), PacedNetwork(2, "20mbit") as network:
        network.run([str(script)], timeout=HUNG)
    assert started and all(each.poll() is not None for each in started)


@linux
def test_what_a_rank_has_started_ends_with_it(tmp_path):
    (tmp_path / "ranks.py").write_text(
        "import subprocess, sys\nchild = subprocess.Popen(['sleep', '3600'])\nprint(child.pid, flush=True)\nsys.exit(1)"
    )
    pids = []
    with pytest.raises(RankFailed), PacedNetwork(2, "20mbit") as network:
        network.run([str(tmp_path / "ranks.py")], timeout=HUNG, on_line=lambda rank, line: pids.append(int(line)))
    assert pids
    for pid in pids:
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@linux
@pytest.mark.parametrize("found, passes", [([1e9, 1e9], True), ([5e8], False), ([1e9, 5e8], False)])
def test_a_link_is_paced_and_measured_before_and_after(found, passes, monkeypatch):
    left, paced_while = list(found), []

    def measured(bits, device):
        paced_while.append(rate_of(ends[0]))
        return left.pop(0)

    monkeypatch.setattr(perf.ranks, "measured_rate", measured)
    ranks = SimpleNamespace(device=torch.device("cpu"), progress=lambda text: None, link_rate=None)
    with connection() as (_, *ends):
        with contextlib.nullcontext() if passes else pytest.raises(WrongLink), perf.ranks.paced(ranks, "1gbit"):
            assert ranks.link_rate == 1e9
        assert not left and set(paced_while) == {round(PAYLOAD * 1e9 / 8)}
    with perf.ranks.paced(ranks, None), perf.ranks.paced(ranks, "unshaped"):
        pass


@pytest.mark.parametrize("of", [all_reduce, train_step])
def test_a_benchmark_whose_links_are_all_refused_has_no_figure_and_leaves_the_record(of, tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise WrongLink("too slow")

    monkeypatch.setattr(of, "run_workers", refuse)
    arguments = ["--paced", "--rates=20mbit,1gbit", f"--out={tmp_path}", *(["--name=x"] if of is train_step else [])]
    name = f"{record_name(train_step.parse_arguments(arguments))}.json" if of is train_step else "old.json"
    (tmp_path / name).write_text(before := '{"rows": [], "runs": [], "old": 1}')
    assert of.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "no figure: too slow\n" * 2 and "no link was what was asked for" in printed.err
    assert json.loads((tmp_path / name).read_text()).items() >= json.loads(before).items()


def test_a_lab_without_root_starts_again_within_a_user_namespace(tmp_path, monkeypatch):
    class StartedAgainError(Exception):
        pass

    def again():
        raise StartedAgainError

    for of in (all_reduce, train_step):
        monkeypatch.setattr(of, "enter_user_namespace", again)
        with pytest.raises(StartedAgainError):
            of.main(["--lab", f"--out={tmp_path}"])


def test_what_pacing_cannot_make_is_refused(monkeypatch):
    for make, says in (
        (lambda: PacedNetwork(3), "hosts is 3: a paced link joins two"),
        (lambda: PacedNetwork(2, "1gbit+10ms"), "has a round trip, and pacing makes none: use --lab"),
    ):
        with pytest.raises(ValueError, match=says):
            make()
    with pytest.raises(WrongLink, match=r"of 1 Gbit/s was asked for, and 800 Mbit/s measured, .* is busy, or can't"):
        check_kept("1gbit", 8e8)
    with pytest.raises(WrongLink, match="sockets are not paced here"):
        check_kept("1gbit", 6e9)
    check_kept("1gbit", 9e8)
    check_kept("unshaped", 8e8)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabUnavailable, match="only Linux paces sockets, not darwin"):
        PacedNetwork(2)


def test_a_refused_link_ends_the_lab_but_not_the_other_paced_links(capsys):
    found = [1, 2]
    with skipping_refused_links(argparse.Namespace(paced=True), found.clear):
        raise WrongLink("too slow")
    assert capsys.readouterr().out == "no figure: too slow\n" and not found
    with pytest.raises(WrongLink), skipping_refused_links(argparse.Namespace(paced=False), found.clear):
        raise WrongLink("too slow")
    rows = [Row(2, "1gbit", 1, "fp32", measured=9.9e8), Row(2, "10gbit", 1, "fp32", measured=9.5e9)]
    assert measured_links(rows).startswith(
        "paced links as measured, headers included: 1gbit 990 Mbit/s, 10gbit 9.5 Gbit/s"
    )
    assert measured_links([Row(2, "1gbit", 1, "fp32")]) == ""
    assert isinstance(open_network(argparse.Namespace(paced=False), 2), paced.NetworkLab)


def test_bench_takes_the_best_network_there_is_and_says_which(monkeypatch, tmp_path, capfd):
    ways = []
    for tools, uid, allowed in ((1, 0, 1), (1, 1000, 1), (1, 1000, 0), (0, 0, 1), (1, 0, 0)):
        monkeypatch.setattr(shutil, "which", lambda name, there=tools: name if there else None)
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        for kind in ("user", "network"):
            monkeypatch.setattr(paced, f"allows_{kind}_namespaces", lambda allowed=allowed: allowed)
        ways.append(best_network())
    assert [option for option, _ in ways] == ["--lab", "--lab", "--paced", "--paced", "--paced"]
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
@pytest.mark.parametrize("link", ["20mbit", "20mbit+20ms"])
def test_the_lab_works_within_a_user_namespace(link, delay_available, tmp_path):
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
