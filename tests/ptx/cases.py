"""Which launches are run in the emulator, and what comes of them.

A variant is a case of `tests.kernels` with a shape of launch; its passes are compared with the CPU's as
`tests.kernels.agreement` says. What kernels are specialised by occurs in pairs, not in a product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from unittest import mock

from onebit.kernels.data.pointers import Pointers
from onebit.kernels.gpu.launch import recorded
from onebit.kernels.tuning import tuner
from onebit.kernels.tuning.tuner import Config
from onebit.kernels.tuning.workload import Workload
from tests.kernels.agreement import COMPARED, OTHERWISE, check_limit, check_messages, check_pass
from tests.kernels.cases import BF16, CASES, F16, Case
from tests.kernels.world import World
from tests.ptx import sparse, workloads
from tests.ptx.machine import ORDERS
from tests.ptx.memory import Fault
from tests.ptx.run import Compiled, execute
from tests.ptx.sparse import Giant

MESSAGES = ("compress and average", "compress and average, masked and scaled")
CODES = {f"quantize and average_codes, {bits} bits": bits for bits in (4, 8)}
Worlds = World | Workload | Giant
Change = Callable[[Compiled], Compiled]
ZEROS = "compress and average of zeros"
LIMIT = "step_squares and step_limit"
PASSES = (*MESSAGES, *CODES, LIMIT, *COMPARED, *OTHERWISE)
OF_MANY_BLOCKS = (MESSAGES[0], "lamb_warmup", "lamb_statistics", LIMIT)  # what adds up results of over 1,024 blocks


@dataclass(frozen=True)
class Variant:
    """`case`: of tests.kernels; or the name of a variant that is compiled ahead of time, or of `sparse`."""

    case: Case | str
    config: Config | None = None  # the kernel's own
    passes: tuple[str, ...] = PASSES


@dataclass
class Outcome:
    """What running a variant has shown so far."""

    kernels: int = 0
    instructions: int = 0
    unused: int = 0  # launches with races for loads whose value nothing depends on
    seconds: float = 0.0  # of a processor
    problems: dict[str, None] = field(default_factory=dict)  # each once, in the order in which they were found

    def add(self, other: Outcome) -> None:
        self.kernels += other.kernels
        self.instructions += other.instructions
        self.unused += other.unused
        self.seconds += other.seconds
        self.problems |= other.problems


VARIANTS = {name: Variant(case, Config(case.grain, 8)) for name, case in CASES.items()}
VARIANTS |= {
    "fp32-whole-blocks": Variant(Case((4096, 64), 2048, momentum="packed")),
    "fp32-unaligned": Variant(Case((2049, 100), 2048, 2, momentum="packed", unaligned=True)),
    "fp32-l2-tensor-1024": Variant(Case((2500, 3), 1024, 2, scale="tensor", norm="l2")),
    "fp32-l1-no-momentum-64": Variant(Case((100, 64), 64, 3, momentum="none", missing=(1,))),
    "fp32-block-8192": Variant(Case((8192, 40), 8192, momentum="packed")),
    "fp32-block-4096": Variant(Case((4100,), 4096, 2, norm="unbiased", momentum="packed")),
    "fp16-l1-512": Variant(Case((1000, 7), 512, param=F16, grad=F16, momentum="packed")),
    "fp16-unbiased-256": Variant(Case((600, 5), 256, 2, norm="unbiased", param=F16, grad=F16, master=True)),
    "fp16-tensor-unaligned-8192": Variant(
        Case((8200,), 8192, scale="tensor", param=F16, grad=F16, momentum="packed", unaligned=True)
    ),
    "bf16-l1-2048": Variant(Case((2048, 33), 2048, 2, param=BF16, grad=BF16, momentum="packed")),
    "bf16-tensor-l2-2048": Variant(Case((2049,), 2048, scale="tensor", norm="l2", param=BF16, grad=BF16, master=True)),
    "bf16-unbiased-32": Variant(Case((70, 32), 32, 2, norm="unbiased", param=BF16, grad=BF16, senders=3)),
    "2 blocks, 4 warps": Variant(Case((5000, 7), 1024, momentum="packed"), Config(2, 4)),
    "4 blocks, 8 warps": Variant(Case((5000, 7), 1024, 2, scale="tensor", momentum="packed", senders=2), Config(4, 8)),
    "8 blocks, 16 warps": Variant(Case((9000,), 1024, param=BF16, grad=BF16, master=True), Config(8, 16)),
    "16 blocks, 2 warps": Variant(Case((9000, 40), 512, 2, scale="tensor", norm="l2", missing=(1,)), Config(16, 2)),
    "33 ranks": Variant(Case((1200,), 32, 33, momentum="packed"), passes=MESSAGES),
    "33 ranks, one scale": Variant(Case((1200,), 32, 33, scale="tensor"), passes=MESSAGES),
    "33 senders": Variant(Case((70, 40), 32, 2, momentum="packed", senders=33)),
    "1,100 blocks, one scale": Variant(Case((35_200,), 32, scale="tensor"), Config(4, 8), OF_MANY_BLOCKS),
    "1,100 blocks": Variant(Case((35_200,), 32), Config(8, 8), OF_MANY_BLOCKS[1:]),
}
WITH_ZEROS = {
    "zeros and a flag": Case((200, 40), 96, 2, senders=33),
    "zeros and a flag, one scale": Case((300, 40), 256, 2, scale="tensor", senders=2),
    "zeros and a flag, bf16": Case((200, 40), 96, 2, norm="unbiased", param=BF16, grad=BF16),
}
VARIANTS |= {name: Variant(case, passes=(ZEROS, "adam_update, flagged")) for name, case in WITH_ZEROS.items()}
VARIANTS[sparse.NAME] = Variant(sparse.NAME, passes=sparse.PASSES)
VARIANTS |= {f"aot: {name}": Variant(name, passes=workloads.PASSES) for name in workloads.NAMES}
# What every run of the tests does: few blocks, and every kernel in each of its forms.
QUICK = ("three-groups-tensor", "fp16-master-2049", "senders-96", "fp32-unaligned", *WITH_ZEROS)


def run(variant: Variant, orders: tuple[str, ...] = ORDERS) -> Outcome:
    """Every pass of a variant in every order."""
    outcome = Outcome()
    for each in variant.passes:
        for order in orders:
            outcome.add(run_pass(each, variant, order))
    return outcome


def run_pass(each: str, variant: Variant, order: str, change: Change = lambda compiled: compiled) -> Outcome:
    """One pass in one order, each kernel as `change` makes it."""
    began, outcome = time.process_time(), Outcome()
    try:
        check(each, variant.case, lambda world: emulated(world, variant.config, order, change, outcome))
    except (Fault, AssertionError) as wrong:
        what = [*str(wrong).splitlines(), "another result than the CPU's"][0]
        outcome.problems[f"{type(wrong).__name__}: {what}"] = None
    outcome.problems = {f"{each}, {order}: {problem}": None for problem in outcome.problems}
    outcome.seconds = time.process_time() - began
    return outcome


def check(each: str, case: Case | str, around: Callable[[Worlds], AbstractContextManager[object]]) -> None:
    if case == sparse.NAME:
        sparse.check(each, around)
    elif isinstance(case, str):
        workloads.check(each, case, around)
    elif each == LIMIT:
        check_limit(case, "ptx", around)
    elif each in (*MESSAGES, ZEROS):
        check_messages(case, "ptx", masked=each == MESSAGES[1], zeros=each == ZEROS, around=around)
    elif each in CODES:
        check_messages(case, "ptx", bits=CODES[each], around=around)
    else:
        check_pass(each, case, "ptx", around)


@contextmanager
def emulated(world: Worlds, config: Config | None, order: str, change: Change, outcome: Outcome) -> Iterator[None]:
    """Passes of a world inside are recorded; they run when the context ends."""
    with mock.patch.object(tuner, "lookup", lambda kernel, *_: config or tuner.default(kernel)), recorded() as launches:
        yield
    pointed = [each for pointers in tables(world) for each in pointers.tensors if each is not None]
    for launch in launches:
        first = launch.programs - sparse.LAST if isinstance(world, Giant) else 0
        done = execute(launch, pointed, change(Compiled.of(launch)), order=order, first_program=first)
        outcome.kernels += 1
        outcome.instructions += done.instructions
        outcome.unused += done.unused > 0
        outcome.problems |= dict.fromkeys(done.races)


def tables(world: Worlds) -> list[Pointers]:
    """Whose tensors kernels find by their addresses."""
    match world:
        case World():
            return [world.params, world.grads]
        case Workload():
            return [world.params, world.grads, world.decoded]
    return world.tables
