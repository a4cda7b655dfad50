"""`onebit demo` as a user runs it: a command that starts ranks, and ends with all of them whatever happens."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from onebit.cli import main as cli
from onebit.cli.demo import report as demo_report
from onebit.cli.demo.model import LENGTH, Text, Transformer, loss_of
from onebit.cli.demo.ranks import Process
from onebit.cli.demo.train import MARK, End, Settings, Start, Step, parse_line
from tests.limits import HUNG

COMMAND = [sys.executable, "-m", "onebit", "demo"]
PNG = b"\x89PNG"


def run(*options, timeout=HUNG):
    return subprocess.run(
        [*COMMAND, *options], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
    )


def table(text):
    """What stands in the table: a row's numbers."""
    rows = re.findall(r"^  +(\S.*?)((?: {2,}[\d.]+(?: MB| ms)?(?=  |$))+)(?:  .*)?$", text, re.MULTILINE)
    return {name: tuple(map(float, re.findall(r"[\d.]+", cells))) for name, cells in rows}


@pytest.mark.slow
def test_adam_and_its_twin(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "plot.png"
    result = run("--steps", "32", "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert out.read_bytes().startswith(PNG)
    assert "starting 2 ranks" in result.stderr and "\033" not in result.stderr
    found = table(result.stdout)
    assert len(found["validation loss"]) == 3 and all(2 < loss < 3.4 for loss in found["validation loss"])  # first 4.6
    elements = int(re.search(r"([\d,]+) parameters", result.stdout)[1].replace(",", ""))
    ring = 2 * (2 - 1) / 2 * 4 * elements / 1e6
    dense, packed, zero_one = found["sent by each rank"]
    assert dense == pytest.approx(32 * ring, abs=0.06)
    assert zero_one == pytest.approx(13 * ring + 19 / 31.5 * ring, rel=0.02)  # 1 to 5, 7, 9, 11, 13, 17, 21, 25, 29
    dense2, packed2, _ = found["of it in stage 2"]
    assert dense2 == pytest.approx(24 * ring, abs=0.06)
    assert packed - packed2 == pytest.approx(8 * ring, abs=0.11)
    assert 30 < dense2 / packed2 < 32
    assert "1-bit Adam, optimizer.report():" in result.stdout and "0/1 Adam, optimizer.report():" in result.stdout
    assert "uncompressed        8 steps" in result.stdout and "uncompressed       13 steps" in result.stdout
    assert "from step 9 on" in result.stdout and f"Plot: {out}" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 110


@pytest.mark.slow
def test_lamb_and_its_twin(tmp_path):
    pytest.importorskip("matplotlib")
    command = [*COMMAND, "--optimizer", "lamb", "--steps", "20", "--seed", "3", "--out", str(tmp_path / "plot.png")]
    background = ["sh", "-c", '"$@" <&- & wait $!', "sh"] if os.name == "posix" else []  # and with stdin closed
    result = subprocess.run([*background, *command], capture_output=True, text=True, timeout=HUNG)
    assert result.returncode == 0, result.stderr
    assert "1-bit LAMB" in result.stdout and "from step 7 on" in result.stdout
    found = table(result.stdout)
    assert max(found["validation loss"]) < 4
    assert "31.5 times less" in result.stdout


class Demo:
    """One under way; `ranks` are the ids of its processes, once step 1 is done."""

    def __init__(self, out):
        command = [*COMMAND, "--steps", "2000", "--out", str(out)]
        self.process = subprocess.Popen(command, stdin=None, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if re.match(r"\d+/2000 stage 1", line):
                break
        self.ranks = children(self.process.pid)

    def ended(self, seconds=15):
        """Status, output and errors."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


def children(parent):
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


def alive(ids):
    deadline = time.monotonic() + HUNG
    while left := [i for i in ids if Path(f"/proc/{i}").exists()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


@pytest.fixture
def under_way(tmp_path):
    if not Path("/proc/self/stat").exists():
        pytest.skip("finds processes in /proc")
    running = Demo(tmp_path / "plot.png")
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()
    for stream in (running.process.stdout, running.process.stderr):
        stream.close()


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run(under_way):
    assert sorted(under_way.ranks) == [0, 1]
    os.kill(under_way.ranks[1], signal.SIGKILL)
    code, _, err = under_way.ended()
    assert code == 1
    assert "error: rank 1 was ended by SIGKILL" in err and "Traceback" not in err
    assert not alive(under_way.ranks.values())


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_end_from_outside_leaves_no_rank(under_way, number, status, tmp_path):
    under_way.process.send_signal(number)
    code, out, err = under_way.ended()
    assert (code, out) == (status, "") and "Traceback" not in err
    assert not alive(under_way.ranks.values())
    assert not list(tmp_path.iterdir())


def test_a_failing_process_is_reported_with_its_last_lines(tmp_path):
    (tmp_path / "failing.py").write_text("print('a line'); raise SystemExit('out of luck')")
    lines = queue.Queue()
    process = Process("rank 5", ["failing"], {"PYTHONPATH": str(tmp_path)}, lines)
    try:
        assert lines.get(timeout=HUNG) == "a line"
        assert process.running.wait(HUNG) == 1
        assert process.report() == "rank 5 failed with status 1; its last lines:\n    out of luck"
    finally:
        process.end(time.monotonic())


def test_a_process_that_does_not_end_is_killed(tmp_path):
    (tmp_path / "stubborn.py").write_text(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(99)"
    )
    lines = queue.Queue()
    process = Process("rank 0", ["stubborn"], {"PYTHONPATH": str(tmp_path)}, lines)
    assert lines.get(timeout=HUNG) == "here"
    process.running.terminate()
    process.end(time.monotonic() + 0.2)
    assert process.running.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "options, message",
    [
        (["--ranks", "0"], "from 2 to 64"),
        (["--ranks", "1"], "from 2 to 64"),
        (["--steps", "0"], "from 10 to"),
        (["--steps", "many"], "'many' is not a whole number"),
        (["--seed", "-1"], "seed"),
        (["--optimizer", "sgd"], "'adam'"),
    ],
)
def test_a_wrong_option_is_named(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("out", ["missing/plot.png", "plot.unknown", "plot", ".", "/proc/plot.png"])
def test_a_plot_that_cannot_be_written_is_an_error_before_the_work(out, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert cli.main(["demo", "--out", str(tmp_path / out)]) == 2
    captured = capsys.readouterr()
    assert "--out" in captured.err and "starting" not in captured.err


def record():
    """Six steps, the last four of them in stage 2."""
    made = demo_report.Record(Settings(steps=6, bandwidth="1gbit"))
    made.add(Start("cpu", "gloo", 1000))
    for i in range(1, 7):
        sent = [4_000_000 * i, 4_000_000 * min(i, 2) + 100_000 * max(0, i - 2)]
        sent.append(2_000_000 * i)
        losses, seconds = [5.0 - i / 2, 5.5 - i / 2, 6 - i / 2], [0.5, 0.25 if i > 2 else 0.5, 0.4]
        made.add(Step(i, i > 2, losses, seconds, sent=sent, counted=[b + 1_000_000 for b in sent]))
    made.add(End([1.5, 1.25, 1.0], ["it pays\nlittle", "it pays"]))
    return made


def test_the_table_has_the_numbers():
    found = table(demo_report.describe(record()))
    assert found == {
        "validation loss": (1.5, 1.25, 1.0),
        "sent by each rank": (24.0, 8.4, 12.0),
        "of it in stage 2": (16.0, 0.4, 8.0),
        "by the link's counter": (16.0, 0.4, 8.0),
        "time a step, stage 2": (500, 250, 400),
    }
    text = demo_report.describe(record())
    assert "40.0 and 2.0 times less" in text and "2.0 and 1.2 times as fast" in text
    assert (
        "\n\n1-bit Adam, optimizer.report():\n  it pays\n  little\n\n0/1 Adam, optimizer.report():\n  it pays" in text
    )


def test_the_progress_line_has_every_loss_and_the_stage():
    line = demo_report.progress_line(record())
    assert line == "6/6 stage 2  Adam 3.250, 1-bit 3.750, 0/1 4.250  24, 8, 12 MB sent  0.8/s"


@pytest.mark.parametrize("prefix", ["", "[rank 0] "])
def test_what_rank_0_prints_is_what_is_read(prefix):
    assert parse_line(f"{prefix}warning: something") is None
    step = record().steps[0]
    assert parse_line(prefix + MARK + json.dumps({"Step": asdict(step)})) == step


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
