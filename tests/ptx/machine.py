"""Programs of warps that run a kernel. A warp is 32 lanes, which run an instruction at once.

Warps run one at a time, each until it waits at a barrier or ends, in one of the ORDERS; at random also for a few
instructions. Lanes that a branch has parted run the part that is furthest behind first, so that they meet again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from tests.ptx.instructions import Step, steps_of
from tests.ptx.memory import Fault, Memory
from tests.ptx.opcodes import Lanes
from tests.ptx.parse import Kernel
from tests.ptx.races import Doubted, Recorder
from tests.ptx.warp import ALL, Launched, Program, Warp

ORDERS = ("forward", "backward", "odd", "random")
FEW = 40  # instructions that a warp runs at most before another one does, in random order
TOO_MANY = 500_000  # instructions of one warp: it does not end


class Machine:
    """One launch. `programs`: how many run, from `first_program` on. `doubted`: what loads give anything for."""

    def __init__(
        self,
        kernel: Kernel,
        arguments: Sequence[int],
        memory: Memory,
        *,
        programs: int,
        warps: int,
        shared_bytes: int = 0,
        first_program: int = 0,
        order: str = "forward",
        doubted: Doubted | None = None,
    ) -> None:
        missing = len(kernel.parameters) - len(arguments)  # Triton's own, which these kernels do not use
        named = dict(zip(kernel.parameters, [*arguments, *[0] * missing], strict=True))
        self.recorder = Recorder(programs, warps, doubted)
        launched = Launched(kernel, named, memory, self.recorder, warps, shared_bytes, first_program)
        self.programs = [Program(launched, number) for number in range(programs)]
        self.all = [warp for program in self.programs for warp in program.warps]
        self.steps, self.order, self.random = steps_of(kernel), order, random.Random(0)

    @property
    def executed(self) -> int:
        """Instructions of warps, all together."""
        return sum(warp.executed for warp in self.all)

    def run(self) -> None:
        """All programs, to the end; a Fault names the instruction."""
        with np.errstate(all="ignore"):
            while ready := [warp for warp in self.all if not warp.done and not warp.waits]:
                warp, most = self._next(ready)
                self._advance(warp, most)
                self._open_barrier(self.programs[warp.program].warps)

    def _next(self, ready: list[Warp]) -> tuple[Warp, int]:
        """The warp to run, and for how many instructions at most."""
        match self.order:
            case "forward":
                return ready[0], TOO_MANY
            case "backward":
                return ready[-1], TOO_MANY
            case "odd":
                return min(ready, key=lambda w: (w.program % 2 == 0, w.number % 2 == 0, w.index)), TOO_MANY
            case "random":
                return self.random.choice(ready), self.random.randint(1, FEW)
        raise ValueError(f"no order is called {self.order!r}: there are {', '.join(ORDERS)}")

    def _open_barrier(self, warps: list[Warp]) -> None:
        """Let the warps of a program go on if all have come to the barrier."""
        if not all(warp.waits or warp.done for warp in warps) or not any(warp.waits for warp in warps):
            return
        if any(warp.done for warp in warps):
            raise Fault("a warp has ended without the barrier that others of its program wait at")
        for warp in warps:
            warp.waits = False
        self.recorder.barrier([warp.index for warp in warps])

    def _advance(self, warp: Warp, most: int) -> None:
        """Run a warp until it waits, ends, or has run `most` instructions."""
        stop = warp.executed + most
        while warp.paths and not warp.waits and warp.executed < stop:
            place = min(warp.paths)
            lanes = warp.paths.pop(place)
            meets = min(warp.paths, default=len(self.steps))
            self._straight(warp, place, lanes, meets, stop)
        if warp.executed >= TOO_MANY:
            raise Fault(f"a warp does not end: it has run {warp.executed} instructions")

    def _straight(self, warp: Warp, place: int, lanes: Lanes, meets: int, stop: int) -> None:
        """Run from one instruction to the next branch, barrier, end, or place where other lanes are."""
        while place < meets and warp.executed < stop:
            step = self.steps[place]
            active = lanes
            warp.executed += 1
            if step.guard is not None:
                active = step.guard(warp)
                if lanes is not ALL:
                    active = active & lanes
                elif active.all():
                    active = ALL
            place += 1
            if step.run is not None:
                if active is ALL or active.any():
                    self._execute(step, warp, active)
            elif step.control == "branch":
                warp.goes_to(step.target, active)
                lanes = lanes & ~active
                warp.goes_to(place, lanes)
                return
            elif step.control == "end":
                warp.goes_to(place, lanes & ~active)
                return
            else:
                self._wait(step, warp, place, active)
                return
        if place < len(self.steps):
            warp.goes_to(place, lanes)

    def _execute(self, step: Step, warp: Warp, active: Lanes) -> None:
        try:
            step.run(warp, active)
        except Fault as fault:
            raise Fault(f"{fault}: {step.instruction.text}, program {warp.program}, warp {warp.number}") from None

    def _wait(self, step: Step, warp: Warp, place: int, active: Lanes) -> None:
        if warp.paths or not active.all():
            raise Fault(f"a barrier that a part of a warp has reached: {step.instruction.text}, warp {warp.number}")
        warp.paths, warp.waits = {place: ALL}, True
