"""Shared by the tests of perf: the network lab, skipped where this machine cannot hold one."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perf.lab.namespaces import LabUnavailable
from perf.lab.network import NetworkLab
from tests.perf.hosts import PREAMBLE


@pytest.fixture(scope="session")
def lab_available() -> None:
    """Skips where no lab can be built."""
    try:
        with NetworkLab(2):
            pass
    except LabUnavailable as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def lab() -> Iterator[NetworkLab]:
    with contextlib.ExitStack() as stack:
        try:
            built = stack.enter_context(NetworkLab(hosts=3, rate="100mbit"))
        except LabUnavailable as why:
            pytest.skip(str(why))
        yield built


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    def write(body: str) -> list[str]:
        path = tmp_path / "ranks.py"
        path.write_text(PREAMBLE + body)
        return [str(path)]

    return write
