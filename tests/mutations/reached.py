"""Which tests reach which function, and how long each takes: recorded once, by one run of all of them."""

from __future__ import annotations

import ast
import itertools
import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from tests import reach
from tests.mutations.tree import Tree

COMPILED = "kernels/cpu/"
MOST_TESTS = 400
NEAR = 6  # files of tests that are about a file of the product
RANKS = 2.0  # seconds that a test counts more for the processes that it works with


class Reached:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, bool] = {}  # whether a test passes where nothing is wrong

    def exists(self) -> bool:
        return (self.folder / "tests.json").exists()

    def record(self, source: Path, options: list[str], workers: int) -> None:
        tree = Tree(source, self.folder.parent / "tree-0")
        shutil.rmtree(self.folder, ignore_errors=True)
        raw = self.folder / "raw"
        raw.mkdir(parents=True)
        tree.pytest(
            ["-n", str(workers), "--dist", "loadfile", f"--junitxml={self.folder / 'run.xml'}", *options],
            3 * 3600, self.folder / "run.txt", PYTHONPATH=str(tree.root / "tests" / "mutations" / "site"),
            ONEBIT_REACH=str(raw), ONEBIT_REACH_ROOT=str(tree.root),
        )  # fmt: skip
        found, ranked = reach.read(raw)
        seconds = {
            test: took + RANKS * (test in ranked)
            for test, took in _seconds(self.folder / "run.xml").items()
            if test in found
        }
        tree.pytest(["--collect-only"], 600, self.folder / "names.txt")
        record = {
            "seconds": seconds,
            "reached": {test: sorted(functions) for test, functions in found.items()},
            "names": [line for line in (self.folder / "names.txt").read_text().splitlines() if "::" in line],
        }
        (self.folder / "tests.json").write_text(json.dumps(record))
        shutil.rmtree(raw)

    @cached_property
    def _record(self) -> dict[str, dict[str, object]]:
        return json.loads((self.folder / "tests.json").read_text(encoding="utf-8"))

    @cached_property
    def _names(self) -> set[str]:
        return set(self._record["names"])

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of the tests that pass."""
        return self._record["seconds"]

    @cached_property
    def functions(self) -> dict[str, set[reach.Function]]:
        """The functions that each test reaches. What the fixtures of a file reach counts for every test of it."""
        found = {
            name: {(path, function, line) for path, function, line in each}
            for name, each in self._record["reached"].items()
        }
        shared = {name: each for name, each in found.items() if "::" not in name}
        return {test: found.get(test, set()) | shared.get(test.partition("::")[0], set()) for test in self.seconds}

    def tests_of(self, path: str, function: str, line: int, most: float) -> list[str]:
        """Tests that reach a function, the cheap and the narrow first, as many as take `most` seconds; half of them of
        the files that are about its file. Where none does, which is so of what is compiled or runs at import: those
        that reach the file, or files that import it."""
        if path.startswith(COMPILED):
            return self._cheap(*self._reaching(self._users_of(path)), most)
        name = function.rpartition(".")[2]
        inner = {
            test
            for test, found in self.functions.items()
            if any(each[0] == path and each[1] == name and each[2] <= line for each in found)
        }
        return self._cheap(inner, {path}, most) if inner else self._cheap(*self._reaching({path}), most)

    def _users_of(self, path: str) -> set[str]:
        """A file that Numba compiles, and all of them that import it: which tests run what it has is not seen."""
        found, new = {path}, {path}
        while new := {name for name, its in self.importers.items() if its & new and name.startswith(COMPILED)} - found:
            found |= new
        return found

    def passes(self, test: str, run: Callable[[str], bool]) -> bool:
        """Return whether a test that found a mutant passes without it: one that does not finds nothing, and is left
        out."""
        if test not in self._known:
            self._known[test] = run(test)
        return self._known[test]

    def is_there(self, test: str) -> bool:
        """Return whether there is such a test, also one too long to be recorded, that is not known to fail where
        nothing is wrong."""
        return test in self._names and self._known.get(test, True)

    def _reaching(self, paths: set[str]) -> tuple[set[str], set[str]]:
        """The tests that reach some files or, where none does, files that import them; and which files these are."""
        seen: set[str] = set()
        while paths:
            found = {test for test, reached in self.functions.items() if any(each[0] in paths for each in reached)}
            if found:
                return found, paths
            seen |= paths
            paths = {path for path in self.importers if self.importers[path] & seen} - seen
        return set(), set()

    def _cheap(self, tests: set[str], paths: set[str], most: float) -> list[str]:
        """Choose the cheapest of each file, then the next of each, and so on: files see different faults."""
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda each: (self.seconds[each] + len(self.functions[each]) / 500, each)):
            if self._known.get(test, True):
                by_file[test.partition("::")[0]].append(test)
        near = [by_file[file] for file in self._nearest(set(by_file), paths)[:NEAR]]
        chosen: dict[str, float] = {}
        for files, within in ((near, most / 2), (by_file.values(), most)):
            rounds = itertools.zip_longest(*sorted(files, key=lambda each: self.seconds[each[0]]))
            for test in filter(None, itertools.chain.from_iterable(rounds)):
                if sum(chosen.values()) + self.seconds[test] <= within and len(chosen) < MOST_TESTS:
                    chosen[test] = self.seconds[test]
        return list(chosen)

    def _nearest(self, files: set[str], paths: set[str]) -> list[str]:
        """Files of tests, those first of which most of what they reach is in `paths`."""
        own = {file: sum(each[0] in paths for each in self._breadth[file]) for file in files}
        return sorted(files, key=lambda file: (-own[file] / (20 + len(self._breadth[file])), file))

    @cached_property
    def _breadth(self) -> dict[str, set[reach.Function]]:
        """What each file of tests reaches."""
        breadth: dict[str, set[reach.Function]] = defaultdict(set)
        for test, functions in self.functions.items():
            breadth[test.partition("::")[0]] |= functions
        return breadth

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """The files that each file of the product imports."""
        found = {}
        for top in reach.PRODUCT:
            for path in sorted((reach.ROOT / top).rglob("*.py")):
                nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                lines = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
                modules = {each.module for each in lines}
                modules |= {f"{each.module}.{name.name}" for each in lines for name in each.names}
                ours = {module for module in modules if module.split(".")[0] in ("onebit", "perf")}
                found[path.relative_to(reach.ROOT).as_posix()] = {_file(module) for module in ours}
        return found

    def files_for(self) -> dict[str, list[str]]:
        """Return the files of tests to run after a change of each file of the product: the narrowest first."""
        found = {}
        for product in self.importers:
            tests, paths = self._reaching({product})
            if order := self._nearest({test.partition("::")[0] for test in tests}, paths):
                found[product] = order[:NEAR]
        return found


def _file(module: str) -> str:
    parts = module.split(".")
    if parts[:2] in (["onebit", "kernels"], ["onebit", "collectives"]):
        parts = parts[1:]
    path = "/".join(parts)
    return f"{path}.py" if (reach.ROOT / f"{path}.py").exists() else f"{path}/__init__.py"


def _seconds(xml: Path) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(xml).iter("testcase"):
        if any(child.tag in ("failure", "error", "skipped") for child in case):
            continue
        name = case.get("classname", "").replace(".", "/") + ".py::" + case.get("name", "")
        found[name] += float(case.get("time", 0))
    return dict(found)
