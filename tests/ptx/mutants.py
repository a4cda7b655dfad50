"""Faults in the text of a kernel, one at a time, and whether the emulator finds them.

barrier     a barrier of a program or of a warp is deleted
order       an atomic orders nothing: .acq_rel becomes .relaxed
mask        an access under a predicate is made by every lane
clamp       a minimum or maximum of two places is the first of them

Barriers and orders are all tried; of masks and clamps SOME a kernel, which their text alone decides.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from onebit.cli.progress import Progress
from tests.kernels.agreement import COMPARED, NOT_FINITE
from tests.kernels.cases import F16, Case
from tests.ptx.cases import MESSAGES, Variant, run_pass
from tests.ptx.jobs import in_turn
from tests.ptx.run import Compiled

BARRIER = re.compile(r"bar\.(?:sync\s+0|warp\.sync\s+-1);")
ORDER = re.compile(r"atom\.global\.gpu\.acq_rel")
MASK = re.compile(r"@!?%p\d+\s+(?=(ld|st)\.global)")
CLAMP = re.compile(r"(?<![.\w])(?:min|max)\.[su](32|64)(\s+%\w+, %\w+), [-%\w]+;")
SOME = 5
KINDS = ("barrier", "order", "mask", "clamp")
ORDERS = ("forward", "random")
# Several programs, a whole block, tails that leave few threads idle and many, padding; messages of one scale and of one
# a block. One warp.
MUTATED = {
    "one scale": Variant(Case((1900, 5), 1024, scale="tensor", momentum="packed"), passes=(*MESSAGES, *COMPARED)),
    "a scale a block": Variant(
        Case((1100,), 992, 3, norm="unbiased", param=F16, grad=F16, momentum="packed", senders=3, unaligned=True),
        passes=(*MESSAGES, *COMPARED, NOT_FINITE),
    ),
    "one warp": Variant(Case((200,), 96, 2, norm="unbiased", momentum="packed"), passes=(*MESSAGES, *COMPARED)),
}


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


def kernels_of(each: str, variant: Variant) -> dict[str, Compiled]:
    """What a pass launches, by its text."""
    found: dict[str, Compiled] = {}

    def note(compiled: Compiled) -> Compiled:
        return found.setdefault(compiled.ptx, compiled)

    run_pass(each, variant, ORDERS[0], note)
    return found


@dataclass(frozen=True)
class Trial:
    """A mutant, and the pass of a variant that is to find it."""

    mutant: Mutant
    compiled: Compiled
    each: str
    variant: Variant
    of: str

    def finds(self) -> bool:
        """Return whether the emulator says anything of it in any order."""
        ptx = self.compiled.ptx
        mutated = self.compiled.with_text(self.mutant.applied(ptx))
        outcomes = (
            run_pass(self.each, self.variant, order, lambda other: mutated if other.ptx == ptx else other)
            for order in ORDERS
        )
        return any(outcome.problems or outcome.unused for outcome in outcomes)


def trials() -> Iterator[Trial]:
    seen = set[str]()
    for name, variant in MUTATED.items():
        for each in variant.passes:
            for ptx, compiled in kernels_of(each, variant).items():
                for mutant in mutants_of(ptx) if ptx not in seen else ():
                    of = f"{compiled.kernel.name}, {each}, {name}: {mutant.line(ptx)}"
                    yield Trial(mutant, compiled, each, variant, of)
                seen.add(ptx)


def report(jobs: int) -> int:
    """A row for each kind of fault, and below them what was not found."""
    progress, tried = Progress(), list(trials())
    found = list(in_turn(Trial.finds, tried, jobs, progress))
    progress.clear()
    for kind in KINDS:
        made = [each for trial, each in zip(tried, found, strict=True) if trial.mutant.kind == kind]
        print(f"{kind:8} {sum(made):4} of {len(made):4} found, {sum(made) / max(len(made), 1):.0%}")
    print("Not found:")
    for trial, each in zip(tried, found, strict=True):
        if not each:
            print(f"    {trial.mutant.kind}: {trial.of}")
    return 0
