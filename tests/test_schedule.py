"""Which tests run, and in what order, follows from recorded seconds."""

import json

import pytest

from tests import schedule

RECORDED = {
    "files": {"tests/a.py": 10.0, "tests/b.py": 6.0, "tests/c.py": 1.0},
    "slow": {"tests/a.py::x": 8.0, "tests/b.py::y": 5.0},
}
NARROW = {"kernels/cpu/adam.py": ["tests/c.py", "tests/a.py", "tests/b.py"], "onebit/optim/adam.py": ["tests/b.py"]}


@pytest.fixture(autouse=True)
def recorded(monkeypatch, tmp_path):
    for name, content in (("SECONDS", RECORDED), ("REACHED", NARROW)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(content))
        monkeypatch.setattr(schedule, name, path)


@pytest.mark.parametrize(
    ("budget", "left_out"),
    [(17, set()), (16.9, {"tests/a.py::x"}), (9, {"tests/a.py::x"}), (1, {"tests/a.py::x", "tests/b.py::y"})],
)
def test_the_longest_tests_are_left_out_until_the_rest_fits(budget, left_out):
    assert schedule.over(budget) == left_out


def test_workers_get_the_longest_files_first_without_what_is_left_out():
    scopes = dict.fromkeys(["tests/c.py", "tests/b.py", "tests/a.py", "tests/new.py"])
    assert schedule.longest_first(scopes, set()) == ["tests/new.py", "tests/a.py", "tests/b.py", "tests/c.py"]
    assert schedule.longest_first(scopes, {"tests/a.py::x"})[1:] == ["tests/b.py", "tests/a.py", "tests/c.py"]


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [(4.0, ["z", "quick"]), (8.0, ["z", "quick", "y[2]"]), (12.0, ["z", "quick", "y[2]", "x"])],
)
def test_a_change_runs_what_found_faults_then_the_quick_then_a_case_of_each(monkeypatch, budget, chosen):
    slow = {"tests/a.py::x": 5.0, "tests/b.py::y[1]": 3.0, "tests/b.py::y[2]": 2.0, "tests/b.py::z": 3.5}
    files = {"tests/a.py": 5.0, "tests/b.py": 8.5, "tests/c.py": 0.2}
    schedule.SECONDS.write_text(json.dumps({"files": files, "slow": slow}))
    schedule.put_first({"kernels/cpu/adam.py": ["tests/b.py::z"]})
    assert schedule.finders()["kernels/cpu/adam.py"] == ["tests/b.py::z"]
    monkeypatch.setattr(schedule, "FOCUS", budget)
    found = schedule.focus("kernels/cpu/adam.py", [*slow, "tests/c.py::quick"])
    assert {test.partition("::")[2] for test in found} == set(chosen)
    with pytest.raises(ValueError, match=r"Meant was perhaps:\n  kernels/cpu/adam\.py"):
        schedule.reached_by("adam.py")


def test_seconds_of_a_file_that_ran_again_replace_what_was_known(monkeypatch):
    monkeypatch.setattr(schedule, "HERE", schedule.SECONDS.parent)  # where none of the files is any more
    schedule.write({"SECONDS.json::z": 2.0, "SECONDS.json::fast": 0.25})
    written = json.loads(schedule.SECONDS.read_text())
    assert written["slow"] == {"SECONDS.json::z": 2.0}


def test_what_is_made_once_counts_in_equal_parts_for_all_that_use_it():
    shared = {"x": {"fixture": 9.0, "other": 0.0}, "y": {"fixture": 0.0}, "z": {"fixture": 0.0, "other": 2.0}}
    assert schedule.spread({"x": 10.0, "y": 1.0, "z": 3.0, "w": 5.0}, shared) == {
        "x": 5.0,
        "y": 4.0,
        "z": 5.0,
        "w": 5.0,
    }
