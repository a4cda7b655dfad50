"""Faults in the text of a kernel, one at a time, and whether the emulator finds them.

barrier     a barrier of a program is deleted
order       an atomic orders nothing: .acq_rel becomes .relaxed
mask        an access under a predicate is made by every lane
clamp       a minimum or maximum of two places is the first of them

Barriers and orders are all tried; of masks and clamps SOME a kernel, which their text alone decides.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onebit.cli.progress import Progress
from tests.ptx import cases
from tests.ptx.machine import ORDERS
from tests.ptx.parse import Malformed
from tests.ptx.run import Compiled

BARRIER = re.compile(r"^\s*bar\.sync\s+0;", re.MULTILINE)
ORDER = re.compile(r"atom\.global\.gpu\.acq_rel")
MASK = re.compile(r"@!?%p\d+\s+(?=(ld|st)\.global)")
CLAMP = re.compile(r"\b(?:min|max)\.[su](32|64)(\s+%\w+, %\w+), [-%\w]+;")
SOME = 8
KINDS = ("barrier", "order", "mask", "clamp")
# Several warps and several programs, whole blocks and tails, and each form of a message.
VARIANTS = ("fp16-master-2049", "fp32-unaligned", "4 blocks, 8 warps", "unbiased-bf16-chunks")


@dataclass(frozen=True)
class Mutant:
    kind: str
    start: int  # of the text that is replaced
    stop: int
    text: str

    def applied(self, ptx: str) -> str:
        return ptx[: self.start] + self.text + ptx[self.stop :]

    def line(self, ptx: str) -> str:
        """The instruction that is changed."""
        first = ptx.rfind("\n", 0, self.start + 1) + 1
        return " ".join(ptx[first : ptx.index("\n", self.stop)].split())


def mutants_of(ptx: str) -> Iterator[Mutant]:
    for kind, pattern, text in (
        ("barrier", BARRIER, ""),
        ("order", ORDER, "atom.global.gpu.relaxed"),
        ("mask", MASK, ""),
        ("clamp", CLAMP, r"mov.b\1\2;"),
    ):
        found = [Mutant(kind, each.start(), each.end(), each.expand(text)) for each in pattern.finditer(ptx)]
        if kind in ("mask", "clamp"):
            found = sorted(found, key=lambda each: zlib.crc32(f"{each.start} {each.line(ptx)}".encode()))[:SOME]
        yield from found


def kernels_of(each: str, variant: cases.Variant) -> dict[str, Compiled]:
    """What a pass launches, by its text."""
    found: dict[str, Compiled] = {}

    def note(compiled: Compiled) -> Compiled:
        return found.setdefault(compiled.ptx, compiled)

    cases.run_pass(each, variant, ORDERS[0], note)
    return found


def how_found(mutant: Mutant, ptx: str, each: str, variant: cases.Variant) -> str:
    """What the emulator says of a mutant in the first order in which it says anything; or nothing."""

    def change(compiled: Compiled) -> Compiled:
        return compiled.with_text(mutant.applied(ptx)) if compiled.ptx == ptx else compiled

    for order in ORDERS:
        try:
            problems = cases.run_pass(each, variant, order, change).problems
        except Malformed as wrong:
            raise AssertionError(f"this mutant is no kernel: {mutant.line(ptx)}") from wrong
        if problems:
            return by_what(next(iter(problems)))
    return ""


def by_what(problem: str) -> str:
    """A race, a bad access, a barrier, or a result."""
    for word, name in (
        ("race", "race"),
        ("bounds", "bad access"),
        ("misaligned", "bad access"),
        ("barrier", "barrier"),
    ):
        if word in problem:
            return name
    return "result"


def report(names: Sequence[str]) -> int:
    """A row for each kind of fault, and below it what was not found."""
    progress, seen = Progress(), set[str]()
    made, found, missed = Counter[str](), defaultdict[str, Counter[str]](Counter), dict[str, None]()
    for name in (name for name in VARIANTS if name in names):
        variant = cases.VARIANTS[name]
        for each in variant.passes:
            for ptx, compiled in kernels_of(each, variant).items():
                if ptx in seen:
                    continue
                seen.add(ptx)
                for mutant in mutants_of(ptx):
                    progress.tick(f"{made.total()} mutants, {len(missed)} not found; {name}: {each}")
                    how = how_found(mutant, ptx, each, variant)
                    made[mutant.kind] += 1
                    found[mutant.kind][how] += bool(how)
                    if not how:
                        missed[f"{mutant.kind}: {compiled.kernel.name}, {each}, {name}: {mutant.line(ptx)}"] = None
    progress.clear()
    for kind in KINDS:
        hits = found[kind].total()
        how = ", ".join(f"{name} {count}" for name, count in found[kind].most_common() if count)
        print(f"{kind:8} {hits:4} of {made[kind]:4} found, {hits / max(made[kind], 1):.0%}: {how}")
    print(f"{len(seen)} kernels, {made.total()} mutants, {sum(each.total() for each in found.values())} found")
    print("Not found:", *missed, sep="\n    ")
    return 0
