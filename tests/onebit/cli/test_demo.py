"""`onebit demo`: what its runs come to, and a command that ends with all of its ranks whatever happens."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onebit.cli import main as cli
from onebit.cli import paced_link
from onebit.cli.arguments import CommandError
from onebit.cli.demo import command as demo
from onebit.cli.demo import ranks
from onebit.cli.demo.model import LENGTH, Text, Transformer, loss_of
from onebit.cli.demo.picture import plot
from onebit.cli.demo.ranks import DemoError, Process, lines_of
from onebit.cli.demo.record import Record
from onebit.cli.demo.report import UNPACED, describe, progress_line, verdict
from onebit.cli.demo.train import End, Settings, Start, Step, parse_line, print_line
from onebit.collectives.store import tcp_store
from tests import forked
from tests.limits import HUNG

COMMAND = [sys.executable, "-m", "onebit", "demo"]
PNG = b"\x89PNG"


def table(text):
    """What stands in the table: a row's numbers."""
    rows = re.findall(r"^  +(\S.*?)((?: {2,}[\d.]+(?: MB| ms| s)?(?=  |$))+)(?:  .*)?$", text, re.MULTILINE)
    return {name: tuple(map(float, re.findall(r"[\d.]+", cells))) for name, cells in rows}


def test_adam_and_its_twins(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(ranks, "subprocess", forked)
    out = tmp_path / "plot.png"
    assert cli.main(["demo", "--steps", "32", "--link", "none", "--out", str(out)]) == 0
    result = capsys.readouterr()
    assert out.read_bytes().startswith(PNG)
    assert "starting 2 ranks" in result.err and "\033" not in result.err
    found = table(result.out)
    assert len(found["validation loss"]) == 3 and all(2 < loss < 3.4 for loss in found["validation loss"])  # first 4.6
    elements = int(re.search(r"([\d,]+) parameters", result.out)[1].replace(",", ""))
    ring = 2 * (2 - 1) / 2 * 4 * elements / 1e6
    dense, packed, zero_one = found["sent by each rank"]
    assert dense == pytest.approx(32 * ring, abs=0.06)
    assert zero_one == pytest.approx(13 * ring + 19 / 31.5 * ring, rel=0.02)  # 1 to 5, 7, 9, 11, 13, 17, 21, 25, 29
    dense2, packed2, _ = found["of it in stage 2"]
    assert dense2 == pytest.approx(24 * ring, abs=0.06)
    assert packed - packed2 == pytest.approx(8 * ring, abs=0.11)
    assert 30 < dense2 / packed2 < 32
    assert "1-bit Adam, optimizer.report():" in result.out and "0/1 Adam, optimizer.report():" in result.out
    assert "uncompressed        8 steps" in result.out and "uncompressed       13 steps" in result.out
    assert "from step 9 on" in result.out and f"Plot: {out}" in result.out
    assert "no link between them" in result.out and result.out.endswith(f"\n{UNPACED}\n")


def test_a_link_is_paced_measured_and_judged(tmp_path, monkeypatch, capsys):
    """A busy machine may not keep it: then that is said, in place of seconds."""
    monkeypatch.setattr(ranks, "subprocess", forked)
    assert cli.main(["demo", "--steps", "10", "--out", str(tmp_path / "plot.png")]) == 0
    out = capsys.readouterr().out
    found = re.search(r"a link of 100 Mbit/s \(measured before and after: ([\d.]+) Mbit/s and ([\d.]+) Mbit/s\)", out)
    before, after = (float(rate) for rate in found.groups())
    assert max(before, after) <= 115  # a busy machine is slower, never faster
    kept = min(before, after) >= 85
    assert ("training" in table(out)) == kept
    assert ("Adam's last loss" if kept else "No verdict on time") in out.splitlines()[-1]


def test_lamb_and_its_twin_in_the_background(tmp_path):
    """Its standard input is closed."""
    command = [*COMMAND, "--optimizer=lamb", "--steps=20", "--seed=3", f"--out={tmp_path / 'plot.png'}", "--link=none"]
    background = ["sh", "-c", '"$@" <&- & wait $!', "sh"] if os.name == "posix" else []
    result = subprocess.run([*background, *command], capture_output=True, text=True, timeout=HUNG)
    assert result.returncode == 0, result.stderr
    assert "1-bit LAMB" in result.stdout and "from step 7 on" in result.stdout
    assert max(table(result.stdout)["validation loss"]) < 4 and "31.5 times less" in result.stdout


def children(parent):
    """Process ids by rank."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            environment = (stat.parent / "environ").read_bytes()
        except OSError:
            continue
        rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", environment)
        if int(fields[1]) == parent and rank:
            found[int(rank[1])] = int(stat.parent.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_no_rank_outlives_a_killed_demo(tmp_path):
    command = [*COMMAND, "--steps", "2000", "--out", str(tmp_path / "plot.png")]
    demo = forked.Popen(command, os.environ)
    try:
        assert any(re.match(r"\[\.{12}\] \d+/2000 ", line) for line in demo.stdout)
        of_demo = children(demo.pid)
        assert sorted(of_demo) == [0, 1]
    finally:
        demo.kill()
    assert demo.wait(HUNG) == -signal.SIGKILL and "Traceback" not in demo.stdout.read()
    wait_for_the_end_of(of_demo.values())
    assert not list(tmp_path.iterdir())


def wait_for_the_end_of(processes):
    deadline = time.monotonic() + HUNG
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("number, whom, status", [(signal.SIGINT, "getppid", 130), (signal.SIGKILL, "getpid", 1)])
def test_no_rank_outlives_another_or_ctrl_c(number, whom, status, tmp_path, monkeypatch, capsys):
    """Ranks that only say who they are; the second then sends a signal to the demo, or to itself."""
    (tmp_path / "light.py").write_text(
        f"import os, time\nos.mkdir('rank %s' % os.getpid())\nwhile len(os.listdir()) < 3: time.sleep(0.01)\n"
        f"time.sleep(0.5)\nif os.environ['RANK'] == '1': os.kill(os.{whom}(), {number:d})\ntime.sleep(60)"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ranks, "MODULE", "light")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert cli.main(["demo", "--out", str(tmp_path / "plot.png")]) == status
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    assert ("error: rank 1 was ended by SIGKILL" in printed.err) == (status == 1)
    (_, first), (_, second) = (path.name.split() for path in tmp_path.glob("rank *"))
    wait_for_the_end_of((first, second))
    assert not (tmp_path / "plot.png").exists()


def test_a_failing_rank_is_reported_and_a_stubborn_one_is_killed(tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text("print('a line', flush=True); raise SystemExit('out of luck')")
    (tmp_path / "stubborn.py").write_text(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(99)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ranks, "MODULE", "failing")
    found = []
    with pytest.raises(DemoError, match=r"^rank \d failed with status 1; its last lines:\n    out of luck$"):
        found.extend(lines_of(Settings()))
    assert set(found) == {"a line"}
    lines = queue.Queue()
    stubborn = Process("rank 0", ["stubborn"], {}, lines)
    assert lines.get(timeout=HUNG) == "here"
    stubborn.running.terminate()
    stubborn.end(time.monotonic() + 0.2)
    assert stubborn.running.returncode == -signal.SIGKILL


def test_a_rank_that_waits_for_a_partner_ends_with_the_demo():
    store = tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    rank = forked.Popen([sys.executable, "-m", ranks.MODULE, json.dumps(asdict(Settings()))], {**os.environ, **place})
    try:
        rank.stdin.close()
        assert rank.wait(HUNG / 4) == 1
    finally:
        rank.kill()


def test_of_ranks_that_ended_one_that_a_signal_has_ended_is_named(monkeypatch):
    """The other failed since it was gone."""

    def ended(name, *_):
        code = {"rank 0": 1, "rank 1": -9}[name]
        running = SimpleNamespace(poll=lambda: code, returncode=code)
        return SimpleNamespace(running=running, report=lambda: f"{name}: {code}", end=lambda deadline: None)

    monkeypatch.setattr(ranks, "Process", ended)
    with pytest.raises(DemoError, match=r"^rank 1: -9$"):
        list(lines_of(Settings()))


def record(link=None, rates=(None, None), last=1.0):
    """Six steps, the last four of them in stage 2."""
    made = Record(Settings(steps=6, link=link))
    made.add(Start("cpu", "gloo", 1000, rates[0]))
    for i in range(1, 7):
        sent = [4_000_000 * i, 4_000_000 * min(i, 2) + 100_000 * max(0, i - 2)]
        sent.append(2_000_000 * i)
        losses, seconds = [5.0 - i / 2, 5.5 - i / 2, 6 - i / 2], [0.5, 0.25 if i > 2 else 0.5, 0.4]
        held_out = {1: [5.0, 5.0, 5.0], 4: [2.5, 2.0, 1.75], 6: [1.5, 1.25, last]}.get(i)
        made.add(Step(i, i > 2, losses, seconds, sent, held_out))
    made.add(End(["it pays\nlittle", "it pays"], rates[1]))
    return made


def test_the_table_and_the_progress_line_have_the_numbers():
    text = describe(record())
    assert table(text) == {
        "validation loss": (1.5, 1.25, 1.0),
        "sent by each rank": (24.0, 8.4, 12.0),
        "of it in stage 2": (16.0, 0.4, 8.0),
        "training": (3.0, 2.0, 2.4),
        "a step in stage 2": (500, 250, 400),
    }
    assert "2.9 and 2.0 times less" in text and "40.0 and 2.0 times less" in text
    assert "1.5 and 1.2 times as fast" in text and "2.0 and 1.2 times as fast" in text
    assert "1-bit Adam, optimizer.report():\n  it pays\n  little\n\n0/1 Adam, optimizer.report():\n  it pays" in text
    made = record()
    made.settings = replace(made.settings, steps=16)  # of 1.4 and 1.15 s until now
    line = progress_line(made)
    for shown in ("[####........] 6/16", "Adam 3.250, 1-bit 3.750, 0/1 4.250", "12 s left"):
        assert shown in line
    made.settings = replace(made.settings, steps=6)
    made.steps = [replace(step, step=100 + step.step) for step in made.steps]
    made.settings = replace(made.settings, steps=1000)
    assert len(line) < 80 and len(progress_line(made)) <= 80


def test_the_verdict_is_of_a_link_that_is_kept_and_of_a_loss_that_is_reached():
    """0/1 Adam has Adam's last loss, 1.5, a third of the way from its second point, at 1.6 s, to its last, at 2.4 s."""
    kept = {"link": 1e8, "rates": (9e7, 1.1e8)}
    assert verdict(record(**kept)) == "0/1 Adam reaches Adam's last loss 1.6 times as soon"
    assert record().times_as_soon() == pytest.approx(3.0 / (1.6 + 0.8 / 3))
    assert record(last=1.5).times_as_soon() == pytest.approx(3.0 / 2.4)
    assert record(last=1.51).times_as_soon() is None
    dipped = record(last=2.0)  # below Adam's at its second point, and above in the end
    dipped.steps[3] = replace(dipped.steps[3], held_out=[2.5, 2.0, 1.25])
    assert dipped.times_as_soon() is None
    assert verdict(record(**kept, last=1.625)).endswith(
        "in these steps: they end with Adam at 1.500 and 0/1 Adam at 1.625"
    )
    assert verdict(record()) == UNPACED
    assert "sockets are not paced here" in verdict(record(link=1e8, rates=(6e9, 6e9)))
    for rates in ((8.4e7, 1e8), (1e8, 1.16e8)):
        busy = record(link=1e8, rates=rates)
        assert "No verdict on time: a link of 100 Mbit/s was asked for" in verdict(busy)
        assert "training" not in table(describe(busy)) and "100 Mbit/s" in describe(busy)


@pytest.mark.parametrize("rates", [(1e8, 1e8), (1e8, 8e7)])
def test_the_plot_has_seconds_only_of_a_link_that_is_kept(rates, tmp_path, monkeypatch):
    drawing = pytest.importorskip("matplotlib.figure")
    figures = []
    monkeypatch.setattr(drawing.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    plot(record(link=1e8, rates=rates), tmp_path / "plot.png")
    (figure,) = figures
    axes = {each.get_ylabel(): each for each in figure.axes}
    kept = rates[1] == 1e8
    assert ("held-out loss" in axes) == kept and {"training loss", "MB sent by each rank"} < {*axes, ""}
    assert "in the whole run 0/1 Adam sends 2.0 times less than Adam" in figure.get_suptitle()
    assert ("0/1 Adam reaches Adam's last loss 1.6 times as soon" in figure.get_suptitle()) == kept
    if kept:
        adam, twin, *_ = axes["held-out loss"].get_lines()[::2]
        assert (list(adam.get_xdata()), list(adam.get_ydata())) == ([0.5, 2.0, 3.0], [5.0, 2.5, 1.5])
        assert adam.get_linestyle() == "-" and twin.get_linestyle() == "--" and twin.zorder > adam.zorder


def test_links_that_cannot_be_are_errors(monkeypatch, capsys):
    assert demo.link_of(None, 2) == 1e8 and demo.link_of("none", 2) is None and demo.link_of(1e9, 2) == 1e9
    assert demo.link_of(None, 3) is None
    for rate in ("20kbit", "1tbit"):
        with pytest.raises(SystemExit):
            cli.main(["demo", "--link", rate])
        assert "is not from 1mbit to 100gbit" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(paced_link, "OPEN_FILES", Path("/nowhere"))
        assert demo.link_of(None, 2) is None
        with pytest.raises(CommandError, match="/nowhere is hidden here"):
            demo.link_of(1e9, 2)
    with pytest.raises(CommandError, match=r"--link 1 Gbit/s with 3 ranks can't be: a link joins two ranks\. Give"):
        demo.link_of(1e9, 3)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert demo.link_of(None, 2) is None
    with pytest.raises(CommandError, match="only Linux paces sockets, not darwin"):
        demo.link_of(1e9, 2)
    with pytest.raises(SystemExit):
        cli.main(["demo", "--link", "fast"])
    assert "'fast' is no rate: write a number and a unit" in capsys.readouterr().err


def test_what_rank_0_prints_is_what_is_read(capsys):
    """Other ranks print nothing."""
    step = record().steps[0]
    assert parse_line("warning: something") is None
    for rank in (0, 1, 2):
        print_line(rank, step)
    assert [parse_line(line) for line in capsys.readouterr().out.splitlines()] == [step]


def test_the_text_is_split_and_the_model_sees_no_future():
    text = Text()
    assert len(text.held) == (len(text.held) + len(text.train)) // 10
    windows = text.batch(3, torch.Generator().manual_seed(0))
    assert windows.shape == (3, LENGTH + 1) and int(windows.max()) < text.letters
    torch.testing.assert_close(text.held_out(5)[0], text.held[: LENGTH + 1])
    torch.testing.assert_close(text.held_out(5)[-1], text.held[-LENGTH - 1 :])
    torch.manual_seed(0)
    model = Transformer(text.letters)
    other = windows.clone()
    other[:, 40:] = 0
    before, after = (model(w[:, :-1]) for w in (windows, other))
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert (before[:, 40:] - after[:, 40:]).abs().max() > 1e-3
    assert loss_of(model, windows).item() == pytest.approx(torch.tensor(text.letters).log().item(), rel=0.1)


def test_demo_without_matplotlib_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(demo, "train", lambda *_: record())
    assert cli.main(["demo", "--out", str(tmp_path / "plot.png")]) == 0
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "plot.png").exists()
