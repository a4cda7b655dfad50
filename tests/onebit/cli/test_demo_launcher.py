"""The demo's ranks started by a launcher: on hosts of their own, as the network lab does, or in any other way."""

import argparse
import queue
import re
import sys
from pathlib import Path

import pytest

from onebit.cli.demo import command as demo
from onebit.cli.demo import report as demo_report
from onebit.cli.demo.ranks import DemoError, Process, lines_of
from onebit.cli.demo.train import Settings
from onebit.cli.progress import Progress

ROOT = Path(__file__).parents[3]

# What a launcher runs: `ranks` processes of the module, with a prefix before every line of each.
STARTER = """
import os, socket, subprocess, sys, threading
ranks, *module = sys.argv[1:]
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
common = {"WORLD_SIZE": ranks, "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
started = []
for rank in range(int(ranks)):
    env = {**os.environ, **common, "RANK": str(rank)}
    env |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    started.append(subprocess.Popen([sys.executable, "-m", *module], env=env, stdout=subprocess.PIPE, text=True))
def forward(rank, lines):
    for line in lines:
        print(f"[rank {rank}] {line}", end="", flush=True)
readers = [threading.Thread(target=forward, args=(rank, each.stdout)) for rank, each in enumerate(started)]
for reader in readers:
    reader.start()
sys.exit(max(each.wait() for each in started))
"""


class Launcher:
    """Notes what it was called with."""

    def __init__(self, folder: Path, source: str = STARTER) -> None:
        (folder / "starter.py").write_text(source)
        self.folder, self.calls = folder, []

    def __call__(self, settings: Settings, command: list[str], lines: queue.Queue[str]) -> Process:
        self.calls.append((settings, command))
        module = ["starter", str(settings.ranks), *command]
        return Process("the launcher", module, {"PYTHONPATH": str(self.folder)}, lines)


@pytest.fixture
def arguments(tmp_path):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return lambda *given: parser.parse_args([*given, "--out", str(tmp_path / "plot.png")])


@pytest.mark.slow
def test_a_launcher_starts_the_ranks(tmp_path, arguments, capsys):
    launcher = Launcher(tmp_path)
    demo.run(arguments("--steps", "12"), Progress(), bandwidth="any rate", launcher=launcher)
    ((settings, command),) = launcher.calls
    assert settings == Settings(steps=12, bandwidth="any rate")
    assert command[0] == "onebit.cli.demo.train"
    text = capsys.readouterr().out
    assert "2 ranks, links of any rate" in text and "validation loss" in text
    assert demo_report.NOTE.strip() not in text
    if sys.platform == "linux":  # both ranks send over loopback, which counts both
        dense = re.search(r"by the link's counter +([\d.]+) MB", text)[1]
        assert float(dense) > 2 * 9 * 1.66


@pytest.mark.slow
def test_on_this_machine_no_counter_is_read_and_a_note_says_what_times_mean(arguments, capsys):
    demo.run(arguments("--steps", "10"), Progress())
    text = capsys.readouterr().out
    assert "counter" not in text and demo_report.NOTE.strip() in text


def test_a_launcher_that_fails_is_reported_with_its_last_lines(tmp_path):
    launcher = Launcher(tmp_path, "raise SystemExit('this machine has no hosts')")
    with pytest.raises(DemoError, match=r"the launcher failed with status 1; its last lines:\n    this machine has no"):
        list(lines_of(Settings(), launcher))


def in_the_lab(settings: Settings, command: list[str], lines: queue.Queue[str]) -> Process:
    lab = ["perf.lab", "--hosts", str(settings.ranks), "--rate", str(settings.bandwidth), "--launcher", "env"]
    return Process("the network lab", [*lab, "--", "-m", *command], {"PYTHONPATH": str(ROOT)}, lines)


@pytest.mark.slow
@pytest.mark.netlab
def test_shaped_links(arguments):
    settings = demo.settings_of(arguments("--steps", "16"), "50mbit")
    try:
        record = demo.train(settings, Progress(), in_the_lab)
    except DemoError as error:
        if "lab" in str(error):
            pytest.skip(str(error))
        raise
    (dense, dense2), (packed, packed2), _ = record.sent(counted=True)
    assert dense2 == pytest.approx(record.sent()[0][1], rel=0.05)
    assert 25 < dense2 / packed2 < 32 and dense > packed
    slow = sorted(s.seconds[0] for s in record.steps if s.compressing)
    assert slow[len(slow) // 2] > 0.25  # 1.66 MB at 50 Mbit/s are 265 ms, however fast the rest is
