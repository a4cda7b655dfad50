"""What every test needs: Triton's interpreter where there is no GPU, few threads, repeatable hypothesis runs.

    --budget=SECONDS     leaves out the longest tests, so that the others take so long by tests/seconds.json
    --focus=PATH         tests for a change of this file of the product, 40 seconds of them
    --write-seconds      writes how long tests take into tests/seconds.json

Workers get files of tests by their recorded seconds, the longest first.
"""

import gc
import importlib
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# A background job of a shell starts with Ctrl-C ignored, and so would what the tests start to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers share the machine; must stand before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Measured kernel shapes of this user neither help nor hinder a test. Compiled loops stay from run to run.
if "ONEBIT_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="onebit-tests-")
    os.environ["ONEBIT_CACHE_DIR"] = _cache.name
    _loops = Path(__file__).parent.parent / "build" / "loops"
    _loops.mkdir(mode=0o755, parents=True, exist_ok=True)
    (Path(_cache.name) / "loops").symlink_to(_loops)

import hypothesis
import pytest
import torch

from tests import reach, schedule

# Triton decides at the definition of a kernel whether it will be interpreted: must stand before triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

_made: dict[str, float] = {}  # the seconds of what is made once for several tests, until one has counted them

hypothesis.settings.register_profile("onebit", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("onebit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", type=float, default=float("inf"), help="seconds of tests, by tests/seconds.json")
    parser.addoption("--focus", default="", help="a file of the product that has changed")
    parser.addoption("--write-seconds", action="store_true", help="write how long tests take")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if (focus := config.getoption("--focus")) and collection_path.suffix == ".py":
        name = collection_path.relative_to(config.rootpath).as_posix()
        return collection_path.name.startswith("test_") and name not in map(schedule.file_of, _reached_by(focus))
    return None


def _reached_by(product: str) -> list[str]:
    try:
        return schedule.reached_by(product)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if focus := config.getoption("--focus"):
        tests = {item.nodeid for item in items}
        left_out = tests - schedule.focus(focus, tests)
    else:
        left_out = schedule.over(config.getoption("--budget"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the collector of garbage need not look at them again and again."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        importlib.import_module("torch._dynamo")  # which the first optimizer would bring, later
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    if config.getoption("dist") != "loadfile":
        return None  # pytest-xdist's own
    from xdist.scheduler import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):  # type: ignore[misc]
        """The first files that are asked for are those that take longest."""

        def _assign_work_unit(self, node: object) -> None:
            for scope in schedule.longest_first(self.workqueue, schedule.over(config.getoption("--budget"))):
                self.workqueue.move_to_end(scope)
            super()._assign_work_unit(node)

    return LongestFirst(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with reach.recording(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
    """What is set up once for a file counts for all of its tests."""
    if fixturedef.scope not in ("module", "session"):
        return (yield)
    file = schedule.file_of(reach.this_test() or "")
    start = time.monotonic()
    now = os.environ.get("PYTEST_CURRENT_TEST", "")
    os.environ["PYTEST_CURRENT_TEST"] = f"{file} (setup)"  # what other processes write down
    try:
        with reach.recording(file):
            return (yield)
    finally:
        os.environ["PYTEST_CURRENT_TEST"] = now
        _made[f"{file}::{fixturedef.argname}"] = time.monotonic() - start


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """Report, after a test's setup, what it shares with others, and the seconds of what was made for it."""
    report = yield
    if call.when == "setup":
        names = [f"{schedule.file_of(item.nodeid)}::{name}" for name in getattr(item, "fixturenames", ())]
        shared = {name: _made[name] for name in names if name in _made}
        _made.update(dict.fromkeys(shared, 0.0))
        report.user_properties.append(("shared", shared))
    return report


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seconds: Counter[str] = Counter()
    shared: dict[str, dict[str, float]] = {}
    for report in (each for of in terminalreporter.stats.values() for each in of if hasattr(each, "duration")):
        seconds[report.nodeid] += report.duration
        if "shared" in (properties := dict(report.user_properties)):
            shared[report.nodeid] = properties["shared"]
    files: Counter[str] = Counter()
    for test, took in seconds.items():
        files[schedule.file_of(test)] += took
    if len(files) > 10:
        terminalreporter.section("the ten slowest files")
        for name, took in files.most_common(10):
            terminalreporter.write_line(f"{took:7.1f} s  {name}")
        terminalreporter.write_line(f"{sum(files.values()):7.1f} s  of all {len(files)}")
    if config.getoption("--write-seconds"):
        schedule.write(schedule.spread(seconds, shared))
