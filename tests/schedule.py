"""How long tests take, as recorded, and what follows: which fit a budget, who gets which file, what a change needs.

tests/seconds.json   {"files": seconds of each file of tests, "slow": seconds of each test of LONG or more}
tests/reached.json   for every file of the product what to run after a change of it: tests that have found faults in
                     it, those that found most first, then files of tests, the narrowest first
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

LONG = 0.3
NEW = 1.0  # what a test counts for whose file nobody has timed
FOCUS = 40.0  # seconds that the tests of a change may take
HERE = Path(__file__).parent
SECONDS, REACHED = HERE / "seconds.json", HERE / "reached.json"


@cache
def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def file_of(test: str) -> str:
    return test.partition("::")[0]


def seconds() -> dict[str, float]:
    """Seconds of each file of tests, as they were recorded."""
    return _read(SECONDS).get("files", {})


def over(budget: float) -> set[str]:
    """The tests to leave out so that the others take `budget` seconds: the longest."""
    left_out, total = set(), sum(seconds().values())
    for test, took in sorted(_read(SECONDS).get("slow", {}).items(), key=lambda each: (-each[1], each[0])):
        if total <= budget:
            break
        left_out.add(test)
        total -= took
    return left_out


def reached_by(product: str) -> list[str]:
    """What to run after a change of a file of the product: tests that have found faults in it, files that are named
    like it, and those that reach it, the narrowest first."""
    if product not in _read(REACHED):
        known = "\n  ".join(sorted(name for name in _read(REACHED) if Path(name).name == Path(product).name))
        raise ValueError(
            f"{product} is no file of the product that a test is known to reach. Name one by its path in the "
            f"repository, such as kernels/cpu/adam.py" + (f". Meant was perhaps:\n  {known}" if known else "")
        )
    found = _read(REACHED)[product]
    return list(dict.fromkeys([*(each for each in found if "::" in each), *named_like(product), *found]))


def named_like(product: str) -> list[str]:
    """Files of tests that have the name of a file of the product in theirs, where the tests of its folder are."""
    folder = next(path for path in (HERE / product).parents if path.is_dir())
    return sorted(path.relative_to(HERE.parent).as_posix() for path in folder.glob(f"test_*{Path(product).stem}*.py"))


def focus(product: str, tests: Collection[str]) -> set[str]:
    """Choose the tests for a change of a file of the product, as many as fit FOCUS: those that have found faults in it;
    all that take no time; then one case of each of the others before a second one, the shortest first."""
    slow, named, cases = _read(SECONDS).get("slow", {}), named_like(product), Counter[str]()
    place = {name: number for number, name in enumerate(reached_by(product))}
    quick, rest = Counter(file_of(test) for test in tests if test not in slow), dict(seconds())
    for test, took in slow.items():
        rest[file_of(test)] -= took
    order: list[tuple[tuple[float, ...], str, float]] = []
    for test in sorted(tests, key=lambda each: (slow.get(each, 0.0), each)):
        file, name = file_of(test), test.partition("[")[0]
        took = slow[test] if test in slow else rest[file] / quick[file] if file in rest else NEW
        if test in place:
            order.append(((0, place[test]), test, took))
        elif test not in slow:
            order.append(((1, place.get(file, len(place))), test, took))
        else:
            order.append(((2, cases[name], file not in named, took), test, took))
            cases[name] += 1
    chosen, total = set(), 0.0
    for _, test, took in sorted(order):
        if total + took <= FOCUS:
            chosen.add(test)
            total += took
    return chosen


def finders() -> dict[str, list[str]]:
    """Return the tests that have found faults in files of the product."""
    return {product: [each for each in tests if "::" in each] for product, tests in _read(REACHED).items()}


def put_first(finders: Mapping[str, list[str]]) -> None:
    """Write down the tests that have found faults in files of the product."""
    lines = dict(_read(REACHED))
    for product, tests in finders.items():
        lines[product] = list(dict.fromkeys([*tests, *lines.get(product, [])]))
    write_reached(lines)


def write_reached(lines: Mapping[str, list[str]]) -> None:
    text = ",\n".join(f" {json.dumps(product)}: {json.dumps(tests)}" for product, tests in sorted(lines.items()))
    REACHED.write_text("{\n" + text + "\n}\n", encoding="utf-8")
    _read.cache_clear()


def longest_first(scopes: Mapping[str, Any], left_out: set[str]) -> list[str]:
    """Files of tests in the order in which workers get them; a new one, of which nothing is known, first."""
    took = dict(seconds())
    for test in left_out:
        took[file_of(test)] -= _read(SECONDS)["slow"][test]
    return sorted(scopes, key=lambda scope: (-took.get(file_of(scope), float("inf")), scope))


def spread(found: Mapping[str, float], shared: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The seconds of each test, where what is made once for several tests counts in equal parts for each of them.

    shared: what each test shares by name, and the seconds that it took where it was made for this one
    """
    seconds = dict(found)
    users: dict[str, list[str]] = defaultdict(list)
    for test, made in shared.items():
        for name in made:
            users[name].append(test)
    for test, made in shared.items():
        for name, took in made.items():
            seconds[test] -= took
            for user in users[name]:
                seconds[user] += took / len(users[name])
    return seconds


def write(found: Mapping[str, float]) -> None:
    """Replace what is known of the files that have run."""
    files, slow = dict(seconds()), dict(_read(SECONDS).get("slow", {}))
    ran: dict[str, float] = defaultdict(float)
    for test, took in found.items():
        ran[file_of(test)] += took
    files = {name: took for name, took in (files | ran).items() if (HERE.parent / name).exists()}
    slow = {test: took for test, took in slow.items() if file_of(test) in files and file_of(test) not in ran}
    slow |= {test: took for test, took in found.items() if took >= LONG}
    rows = {
        "files": {name: round(took, 1) for name, took in sorted(files.items())},
        "slow": {test: round(took, 1) for test, took in sorted(slow.items())},
    }
    SECONDS.write_text(json.dumps(rows, indent=0) + "\n", encoding="utf-8")
