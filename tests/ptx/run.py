"""A recorded launch, compiled for sm_90 and executed on the tensors that were passed."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from onebit.kernels.gpu import aot
from onebit.kernels.gpu.launch import Launch
from tests.ptx.machine import Machine
from tests.ptx.memory import Fault, Memory, Region
from tests.ptx.parse import Kernel, parse
from tests.ptx.races import Conflict, Doubted

TARGET = "sm_90"


@dataclass(frozen=True)
class Compiled:
    """A kernel as it was compiled for a launch, and the shared memory that a program of it takes."""

    kernel: Kernel
    passed: tuple[str, ...]  # names of arguments
    shared_bytes: int
    ptx: str

    def with_text(self, ptx: str) -> Compiled:
        return replace(self, kernel=parse(ptx), ptx=ptx)

    @classmethod
    def of(cls, launch: Launch) -> Compiled:
        compiled = aot.compile_launch(launch, TARGET)
        return cls(parsed(compiled.asm["ptx"]), compiled.passed, compiled.shared, compiled.asm["ptx"])


parsed = functools.lru_cache(maxsize=64)(parse)


@dataclass(frozen=True)
class Done:
    """What became of a launch."""

    instructions: int
    races: list[str]
    unused: int = 0  # loads in races whose value nothing depends on


def execute(
    launch: Launch,
    pointed: Iterable[Tensor],
    compiled: Compiled,
    *,
    order: str = "forward",
    first_program: int = 0,
) -> Done:
    """Run a launch in place, its programs from one on. `pointed`: the tensors that its tables of addresses point to."""
    memory = Memory(regions_of(launch, pointed))

    def machine(doubted: Doubted | None = None) -> Machine:
        arguments = [bits_of(launch.arguments[name]) for name in compiled.passed]
        return Machine(
            compiled.kernel,
            arguments,
            memory,
            programs=launch.programs - first_program,
            warps=launch.config.warps,
            shared_bytes=compiled.shared_bytes,
            first_program=first_program,
            order=order,
            doubted=doubted,
        )

    first = machine()
    first.run()
    conflicts = first.recorder.conflicts()
    if conflicts and uses_none(conflicts, memory, machine):
        return Done(first.executed, [], len(conflicts))
    texts = [each.text for each in compiled.kernel.instructions]
    return Done(first.executed, list(dict.fromkeys(each.told(texts) for each in conflicts)))


def uses_none(conflicts: list[Conflict], memory: Memory, machine: Callable[[Doubted], Machine]) -> bool:
    """Return whether every conflict is a load's with a store, and with anything loaded there every byte is as it is
    now."""
    doubted: Doubted = {}
    for conflict in conflicts:
        if conflict.load is None or conflict.load.atomic:
            return False
        key = (conflict.load.segment, conflict.load.instruction, conflict.region)
        doubted[key] = np.union1d(doubted.get(key, conflict.places), conflict.places)
    first = memory.written()
    memory.undo()
    try:
        machine(doubted).run()
        same = all(each.holds() for each in first)
    except Fault:
        same = False
    second = memory.written()
    memory.undo()
    for each in first:
        each.redo()
    return same and all(each.holds() for each in second)


def regions_of(launch: Launch, pointed: Iterable[Tensor]) -> list[Region]:
    named = [(name, each) for name, each in launch.arguments.items() if isinstance(each, Tensor)]
    named += [(f"tensor {i}", each) for i, each in enumerate(pointed)]
    regions: dict[tuple[int, int], str] = {}
    for name, tensor in named:
        regions.setdefault((tensor.data_ptr(), tensor.numel() * tensor.element_size()), name)
    return [Region(name, start, size) for (start, size), name in regions.items()]


def bits_of(value: Tensor | float | int) -> int:
    """An argument as a kernel gets it."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return int.from_bytes(struct.pack("<f", value), "little") if isinstance(value, float) else value
