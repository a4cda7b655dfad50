"""The demo over the links of a network lab."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perf.lab import demo
from tests.limits import HUNG

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "perf.lab.demo", "--rate=50mbit"]


def megabytes(text: str, what: str) -> list[float]:
    """Of Adam and of 1-bit Adam."""
    row = re.search(rf"^ +{re.escape(what)} +([\d.]+) MB +([\d.]+) MB", text, re.MULTILINE)
    assert row is not None, text
    return [float(row[1]), float(row[2])]


@pytest.mark.slow
@pytest.mark.netlab
@pytest.mark.parametrize("hosts", [2, 3])
def test_bytes_are_those_of_the_links(
    lab_available: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], hosts: int
) -> None:
    out = tmp_path / "plot.png"
    status = demo.main(["--rate=200mbit", f"--hosts={hosts}", "--steps=16", f"--out={out}"])
    text, errors = capfd.readouterr()
    assert status == 0, errors
    assert f"{hosts} ranks, links of 200mbit" in text and "validation loss" in text
    dense, packed = megabytes(text, "by the link's counter")
    assert dense == pytest.approx(megabytes(text, "of it in stage 2")[0], rel=0.05)
    assert dense / packed > 25 and (dense - 0.05) / (packed + 0.05) < 32  # printed with one decimal
    if "No plot" not in text:
        assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the lab needs Linux")
def test_without_root_it_names_what_is_missing(tmp_path: Path) -> None:
    drop = "--bounding-set=-net_admin,-sys_admin", "--inh-caps=-net_admin,-sys_admin"
    unprivileged = ["setpriv", *drop] if os.geteuid() == 0 else []
    if unprivileged and shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, or not to be root")
    command = [*unprivileged, *COMMAND, f"--out={tmp_path / 'plot.png'}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HUNG)
    assert result.returncode == 1
    assert "perf.lab.demo: error: the network lab" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "--rate"),
        (["--rate=fast"], "'fast' is no rate from 1mbit to 100gbit"),
        (["--rate=unshaped"], "is no rate"),
        (["--rate=1gbit", "--hosts=1"], "not a number of hosts"),
        (["--rate=1gbit", "--codec"], "--codec needs no network"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(arguments)
    assert caught.value.code == 2 and error in capsys.readouterr().err
