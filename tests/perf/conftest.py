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
    yield from _built(NetworkLab(hosts=3, rate="100mbit"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[NetworkLab]:
    """Two hosts of two ranks."""
    yield from _built(NetworkLab(hosts=2, rate="100mbit", each=2))


def _built(lab: NetworkLab) -> Iterator[NetworkLab]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lab)
        except LabUnavailable as why:
            pytest.skip(str(why))
        yield lab


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    def write(body: str) -> list[str]:
        path = tmp_path / "ranks.py"
        path.write_text(PREAMBLE + body)
        return [str(path)]

    return write
