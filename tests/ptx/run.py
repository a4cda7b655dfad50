"""A recorded launch, compiled for sm_90 and executed on the tensors that were passed."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from onebit.kernels.gpu import aot
from onebit.kernels.gpu.launch import Launch
from tests.ptx.machine import Machine
from tests.ptx.memory import Memory, Region
from tests.ptx.parse import Kernel, parse
from tests.ptx.races import Race

TARGET = "sm_90"


@dataclass(frozen=True)
class Compiled:
    """A kernel as it was compiled for a launch, and the shared memory that a program of it takes."""

    kernel: Kernel
    passed: tuple[str, ...]  # names of arguments
    shared_bytes: int
    ptx: str

    @classmethod
    def of(cls, launch: Launch) -> Compiled:
        compiled = aot.compile_launch(launch, TARGET)
        return cls(parse(compiled.asm["ptx"]), compiled.passed, compiled.shared, compiled.asm["ptx"])


@dataclass(frozen=True)
class Done:
    """What became of a launch."""

    instructions: int
    races: list[Race]


def execute(
    launch: Launch,
    pointed: Iterable[Tensor],
    *,
    compiled: Compiled | None = None,
    order: str = "forward",
    seed: int = 0,
    find_races: bool = True,
) -> Done:
    """Run a launch in place. `pointed`: the tensors that its tables of addresses point to."""
    compiled = compiled or Compiled.of(launch)
    machine = Machine(
        compiled.kernel,
        [bits_of(launch.arguments[name]) for name in compiled.passed],
        Memory(regions_of(launch, pointed)),
        programs=launch.programs,
        warps=launch.config.warps,
        shared_bytes=compiled.shared_bytes,
        order=order,
        seed=seed,
        find_races=find_races,
    )
    machine.run()
    races = machine.recorder.races([each.text for each in compiled.kernel.instructions]) if machine.recorder else []
    return Done(machine.executed, races)


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
