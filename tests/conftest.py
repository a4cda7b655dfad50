"""What every test needs: Triton's interpreter where there is no GPU, few threads, repeatable hypothesis runs.

`make test` leaves out what is marked as slow, and what took long when `pytest --write-slow` last wrote slow.txt.
"""

import os
import signal
import tempfile
from collections import Counter
from pathlib import Path

# A background job of a shell starts with Ctrl-C ignored, and so would what the tests start to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers share the machine; must stand before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Measured kernel shapes of this user neither help nor hinder a test.
if "ONEBIT_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="onebit-tests-")
    os.environ["ONEBIT_CACHE_DIR"] = _cache.name

import hypothesis
import pytest
import torch

# Triton decides at the definition of a kernel whether it will be interpreted: must stand before triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

hypothesis.settings.register_profile("onebit", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("onebit")

SLOW = 2.0  # seconds
SLOW_LIST = Path(__file__).with_name("slow.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-slow", action="store_true", help=f"list the tests that take over {SLOW:g} s in slow.txt")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--write-slow"):
        slow = set(SLOW_LIST.read_text().splitlines())
        for item in items:
            if item.nodeid in slow:
                item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--write-slow"):
        seconds: Counter[str] = Counter()
        for report in (each for of in terminalreporter.stats.values() for each in of if hasattr(each, "duration")):
            seconds[report.nodeid] += report.duration
        others = set(SLOW_LIST.read_text().splitlines()) - seconds.keys()  # that did not run now
        lines = sorted(others | {test for test, took in seconds.items() if took >= SLOW})
        SLOW_LIST.write_text("".join(f"{line}\n" for line in lines))
        terminalreporter.write_line(
            f"{len(lines)} tests are slow, of those that ran and those listed before: {SLOW_LIST}"
        )
