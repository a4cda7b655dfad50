"""perf/gpu.sh without a GPU: every stage rehearsed, and what is wrong said."""

import json
import os
import subprocess
import sys

import pytest
import torch

from perf.summary import summary
from tests.limits import HUNG
from tests.test_structure import ROOT

SCRIPT = ROOT / "perf" / "gpu.sh"


def run(*arguments, timeout=HUNG):
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip


def test_stages_are_rehearsed_and_leave_their_records(tmp_path):
    done = run("--rehearse", "--out", tmp_path, "check", "kernels", "ranks", "step", "profile", "summary")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ended = (tmp_path / "gpu-stages.txt").read_text()
    assert ended.count("exit 0") == ended.count("\n") >= 6
    names = " ".join(path.name for path in tmp_path.rglob("*"))
    assert all(each in names for each in ("bf16", "train_step", "profile", "trace")), names


def test_a_wrong_stage_is_a_failure_of_the_script(tmp_path):
    assert run("--rehearse", "--out", tmp_path, "nothing").returncode == 2
    assert "check, kernels, ranks" in run("nothing").stderr
    assert "--rehearse" in run().stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run("--out", tmp_path, "check")
    assert done.returncode == 2 and "no GPU" in done.stderr


def test_the_summary_has_what_was_missed(tmp_path):
    targets = [{"what": "as fast as x", "reached": r, "needed": 2.0, "met": r >= 2} for r in (1.5, 2.5)]
    (tmp_path / "a.json").write_text(json.dumps({"targets": targets}))
    (tmp_path / "b.json").write_text("[1]")
    (tmp_path / "c.json").write_text("{")
    assert summary(tmp_path) == "a.json: 1 of 2 met\n    1.50 times as fast as x, to reach 2: missed"
    assert "no record" in summary(tmp_path / "none")
