"""The faults that `python -m tests.mutations` puts in, and which tests it runs for one."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

from tests import reach
from tests.mutations.__main__ import finders
from tests.mutations.mutants import mutants_of, sample
from tests.mutations.reached import Reached

SOURCE = '''"""x"""
LIMIT: int = 3
def send(x, group, *, flag=True):
    """Doc."""
    if not flag and x < LIMIT:
        group.barrier()
    if x is None:
        raise ValueError(1 + 1)
    return x * 2.0
def load(ptr):
    return tl.load(ptr, mask=ptr > 0, other=0.0)
'''


def test_every_kind_of_fault_is_made_and_none_in_texts(tmp_path):
    (tmp_path / "f.py").write_text(SOURCE)
    found = mutants_of(tmp_path, "f.py")
    texts = {(mutant.old, mutant.text) for mutant in found}
    assert {
        ("3", "4"),
        ("x < LIMIT", "(x <= LIMIT)"),
        ("group.barrier()", "pass"),
        ("True", "False"),
        ("not flag", "(flag)"),
    } <= texts
    assert ("tl.load(ptr, mask=ptr > 0, other=0.0)", "tl.load(ptr)") in texts
    assert ("not flag and x < LIMIT", "((not flag) or (x < LIMIT))") in texts
    assert ("not flag and x < LIMIT", "((not flag and x < LIMIT) and False)") in texts
    assert not any("1 + 1" in old for old, _ in texts)
    source = (tmp_path / "f.py").read_bytes()
    for mutant in found:
        changed = mutant.applied(source)
        assert changed != source
        ast.parse(changed)


def test_the_test_that_found_most_mutants_of_a_file_is_named_first(tmp_path):
    (tmp_path / "f.py").write_text(SOURCE)
    mutants = mutants_of(tmp_path, "f.py")[:4]
    found = {m.id: {"by": by} for m, by in zip(mutants, ("t.py::one", "t.py::two", "t.py::two", ""), strict=True)}
    assert finders(mutants, found) == {"f.py": ["t.py::two", "t.py::one"]}


def test_who_imports_a_file_is_known(tmp_path):
    """The tests of compiled files are those of the files that import them."""
    own = {path.relative_to(reach.ROOT).as_posix() for path in (reach.ROOT / "kernels" / "cpu").glob("*.py")}
    imported = Reached(tmp_path).importers
    passes = {path for path in own if "PASSES" in (reach.ROOT / path).read_text()} - {"kernels/cpu/__init__.py"}
    assert passes <= imported["kernels/cpu/__init__.py"] and "kernels/cpu/zero_one.py" in passes
    assert {"kernels/cpu/zero_one.py", "kernels/cpu/tiles.py"} <= imported["kernels/cpu/local_steps.py"]


def test_a_sample_is_the_same_each_time_and_from_every_folder():
    one, again, other = sample(reach.ROOT, 60, 0), sample(reach.ROOT, 60, 0), sample(reach.ROOT, 60, 1)
    assert one == again
    assert {mutant.id for mutant in one} != {mutant.id for mutant in other}
    assert {"kernels/cpu", "collectives", "onebit/optim", "onebit/checkpoint"} <= {mutant.folder for mutant in one}


def test_what_a_test_reaches_is_recorded_in_the_processes_that_it_starts(tmp_path):
    code = (
        "from tests import reach\n"
        "with reach.recording('tests/t.py::test'):\n"
        "    from onebit.kernels.data.layout import Layout\n"
        "    with reach.recording('tests/t.py'):\n"
        "        Layout((5,))\n"
    )
    environment = {**os.environ, reach.FOLDER: str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=reach.ROOT, env=environment, check=True)
    found, _ = reach.read(tmp_path)
    layout = {function for function in found["tests/t.py"] if function[0] == "kernels/data/layout.py"}
    assert layout and layout <= found["tests/t.py::test"]


def test_the_cheap_and_narrow_tests_come_first_and_what_none_reaches_goes_by_imports(tmp_path):
    one, two = ["kernels/cpu/adam.py", "adam_update", 10], ["onebit/optim/adam.py", "step", 3]
    reached = {"t.py::wide": [one, two], "t.py::narrow": [one], "t.py::none": [], "u.py": [two], "u.py::a": []}
    seconds = {"t.py::wide": 1.0, "t.py::narrow": 1.0, "t.py::none": 0.0, "u.py::a": 5.0}
    (tmp_path / "tests.json").write_text(json.dumps({"seconds": seconds, "reached": reached}))
    found = Reached(tmp_path)
    assert found.tests_of("kernels/cpu/adam.py", "adam_update", 12, 9.0) == ["t.py::narrow", "t.py::wide"]
    assert found.tests_of("kernels/cpu/adam.py", "adam_update", 12, 1.5) == ["t.py::narrow"]
    assert found.tests_of("onebit/optim/adam.py", "Adam.step", 4, 9.0) == ["t.py::wide", "u.py::a"]
    assert found.tests_of("kernels/cpu/lanes.py", "where", 1, 9.0) == ["t.py::narrow", "t.py::wide"]
