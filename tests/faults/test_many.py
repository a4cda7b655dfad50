"""A run that goes on through faults while hosts leave and join. Long: `python -m tests.faults.many`."""

from __future__ import annotations

import sys

import pytest

from tests.faults.learners import Task
from tests.faults.many import Fault, Run

PLAN = [Fault(8, "kill", 0.0, 0.0, there=3), Fault(18, "stop", 0.002, 0.7, there=3)]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where a process ends with the one that started it")
@pytest.mark.parametrize("kind", ["ZeroOneAdam", "AdamW"])
def test_a_run_that_loses_hosts_ends_as_one_that_does_not(kind: str) -> None:
    """The difference is what a host's residual holds: AdamW has none, and ends alike to rounding."""
    task = Task(kind, seed=0, steps=40)
    struck, calm = Run(task, PLAN, hosts=3).run(), Run(task, [], hosts=3).run()
    assert (struck.faults, calm.faults) == (2, 0)
    assert struck.held_out == pytest.approx(calm.held_out, rel=1e-4 if kind == "AdamW" else 2e-2)
