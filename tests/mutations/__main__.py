"""Are the tests sharp? Puts faults into the product, one at a time, and runs the tests that reach each.

    python -m tests.mutations                     records what tests reach, once; 300 mutants; goes on where it ended
    python -m tests.mutations --minutes 20        no longer than this
    python -m tests.mutations --only kernels/cpu  those of a folder or file
    python -m tests.mutations --record            records anew, and writes tests/reached.json anew

A mutant is killed when a test fails or does not end; tests/reached.json then names that test first. Copies of the
repository are in build/mutations; nothing else is touched. Survivors are equal programs, or show a missing test.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests import schedule
from tests.mutations.mutants import FOLDERS, Mutant, sample
from tests.mutations.reached import Reached
from tests.mutations.tree import Tree, import_all

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "build" / "mutations"
WORKERS = 2
TESTS = ["--budget=1000"]  # which are run: not the longest
MOST = 60.0  # seconds of tests for one mutant, as they were recorded
FAILED = re.compile(r"(FAILED|ERROR) tests/")
HUNG = 120.0  # seconds beyond them after which a mutant counts as one that hangs


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a path that mutants begin with")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--record", action="store_true", help="run all tests once, and write down what they reach")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    reached = Reached(OUT / "reached")
    if options.record or not reached.exists():
        print("Recording what each test reaches", flush=True)
        reached.record(ROOT, TESTS, WORKERS)
        found = schedule.finders()
        schedule.write_reached(reached.files_for())
        schedule.put_first({product: [*filter(reached.is_there, tests)] for product, tests in found.items()})
    results = OUT / "results.jsonl"
    mutants = [m for m in sample(ROOT, options.count, options.seed) if m.path.startswith(options.only)]
    run(mutants, reached, results, 60 * options.minutes)
    schedule.put_first(finders(mutants, known(results)))
    report(mutants, known(results))
    return 0


def known(results: Path) -> dict[str, dict[str, str]]:
    """Read what became of each mutant, and the test that found it."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return {each["mutant"]: each for each in map(json.loads, lines)}


def finders(mutants: list[Mutant], found: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Return the tests that have found mutants of each file, those that found most first."""
    by_file: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in mutants:
        if by := found.get(mutant.id, {}).get("by"):
            by_file[mutant.path][by] += 1
    return {path: [test for test, _ in counts.most_common()] for path, counts in by_file.items()}


def run(mutants: list[Mutant], reached: Reached, results: Path, seconds: float) -> None:
    """Each worker is a process with a tree of its own, and gets the next mutant when it is free."""
    done = known(results)
    left = [mutant for mutant in mutants if mutant.id not in done]
    total = len(left)
    import_all()
    context = multiprocessing.get_context("fork")
    todo, found = context.SimpleQueue(), context.SimpleQueue()
    stop, at_work = time.monotonic() + seconds, 0
    for number in range(min(WORKERS, total)):
        args = (OUT / f"tree-{number}", reached, todo, found)
        context.Process(target=_work, args=args).start()
        todo.put(left.pop(0))
        at_work += 1
    while at_work:
        mutant, outcome, by, seconds = found.get()
        if outcome == "stale":
            for _ in range(WORKERS):
                todo.put(None)
            sys.exit("tests have other names than were recorded: run this with --record")
        line = {"mutant": mutant.id, "folder": mutant.folder, "outcome": outcome, "by": by}
        with results.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        more = bool(left) and time.monotonic() < stop
        at_work += more - 1
        todo.put(left.pop(0) if more else None)
        place, at = f"{mutant.path}:{mutant.line}", total - len(left) - at_work
        print(f"{at:4}/{total} {outcome:9} {seconds:4.0f} s  {place} {mutant.change}", flush=True)


def _work(root: Path, reached: Reached, todo: Any, found: Any) -> None:
    tree = Tree(ROOT, root)
    while (mutant := todo.get()) is not None:
        began = time.monotonic()
        outcome, by = attempt(mutant, tree, reached)
        while outcome == "killed" and by and not reached.passes(by, lambda test: tested([test], tree)[0] == "survived"):
            outcome, by = attempt(mutant, tree, reached)
        found.put((mutant, outcome, by, time.monotonic() - began))


def attempt(mutant: Mutant, tree: Tree, reached: Reached) -> tuple[str, str]:
    """killed, hangs, survived or unreached; and by which test."""
    tests = reached.tests_of(mutant.path, mutant.function, mutant.line, MOST)
    if not tests:
        return "unreached", ""
    tests = list(dict.fromkeys([*filter(reached.is_there, schedule.finders().get(mutant.path, ())), *tests]))
    path = tree.root / mutant.path
    before = path.read_bytes()
    path.write_bytes(mutant.applied(before))
    try:
        return tested(tests, tree)
    finally:
        path.write_bytes(before)


def tested(tests: list[str], tree: Tree) -> tuple[str, str]:
    output, names = tree.root / "output.txt", tree.root / "tests.txt"
    names.write_text("\n".join(tests) + "\n", encoding="utf-8")
    status = tree.pytest(["-x", "--timeout=60", f"@{names}"], MOST + HUNG, output)
    if status is None:
        return "hangs", ""
    if status == pytest.ExitCode.OK:
        return "survived", ""
    said = output.read_text(encoding="utf-8", errors="replace").splitlines()
    if any("no match in any of" in line for line in said):
        return "stale", ""
    return "killed", next((line.partition(" ")[2].partition(" - ")[0] for line in said if FAILED.match(line)), "")


def report(mutants: list[Mutant], found: dict[str, dict[str, str]]) -> None:
    tried = [mutant for mutant in mutants if mutant.id in found]
    by_folder: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in tried:
        alive = found[mutant.id]["outcome"] in ("survived", "unreached")
        for folder in (mutant.folder, "all"):
            by_folder[folder].update(["alive" if alive else "killed"])
        if alive:
            print(f"{found[mutant.id]['outcome']}: {mutant.path}:{mutant.line} {mutant.id}")
    print(f"{'folder':20} killed   of  percent")
    for folder in (*FOLDERS, "all"):
        killed, of = by_folder[folder]["killed"], by_folder[folder].total()
        if of:
            print(f"{folder:20} {killed:6} {of:4} {100 * killed / of:7.1f}")
    if len(tried) < len(mutants):
        print(f"{len(mutants) - len(tried)} mutants are left: run it again")


if __name__ == "__main__":
    sys.exit(main())
