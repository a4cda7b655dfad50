"""Shared by the tests of perf: the network lab, skipped where this machine cannot hold one."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perf.lab.delay import WrongLink
from perf.lab.namespaces import LabUnavailable
from perf.lab.network import NetworkLab
from tests.perf.hosts import PREAMBLE, links_of_a_busy_machine


@contextlib.contextmanager
def built(hosts: int, **options: Any) -> Iterator[NetworkLab]:
    """Skips where none can be built; a lab whose links are wrong is a failure."""
    with contextlib.ExitStack() as stack:
        try:
            lab = stack.enter_context(NetworkLab(hosts, **options))
        except WrongLink:
            raise
        except LabUnavailable as why:
            pytest.skip(str(why))
        yield lab


@pytest.fixture(scope="session", autouse=True)
def links() -> Iterator[None]:
    with links_of_a_busy_machine():
        yield


@pytest.fixture(scope="session")
def lab_available() -> None:
    with built(2):
        pass


@pytest.fixture(scope="session")
def delay_available(lab_available: None) -> None:
    with built(2, link="unshaped+20ms"):
        pass


@pytest.fixture(scope="module")
def lab() -> Iterator[NetworkLab]:
    with built(hosts=3, link="100mbit") as made:
        yield made


@pytest.fixture(scope="module")
def nodes() -> Iterator[NetworkLab]:
    """Two hosts of two ranks."""
    with built(hosts=2, link="100mbit", each=2) as made:
        yield made


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    def write(body: str) -> list[str]:
        path = tmp_path / "ranks.py"
        path.write_text(PREAMBLE + body)
        return [str(path)]

    return write
