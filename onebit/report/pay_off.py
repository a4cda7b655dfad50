"""Does it pay? How long steps of each kind take, what was sent, and what that comes to.

A step is timed from the end of the one before to its own: forward, backward, communication and update, and the loading
of data. Times are read a step later, so that the host never waits for the device. All is of this process, since it
built the optimizer.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from onebit.collectives.averaging import narrower
from onebit.collectives.topology import Topology
from onebit.collectives.waits import Waits
from onebit.kernels import streams
from onebit.kernels.data.wire import Bits
from onebit.kernels.log import tell
from onebit.kernels.streams import capturing
from onebit.optim.run import Run
from onebit.optim.state import State
from onebit.optim.steps import Timed

KEPT = 500  # steps of a kind whose times are kept
FEWEST = 3  # from so many on a median says something
REPORTED_AFTER = 50  # compressed steps
GAIN = 1.05  # times as fast: less is no gain
CALL_ATTACH = (
    "call onebit.attach(model, optimizer) before the first backward pass. HuggingFace's Trainer needs OneBitTrainer, "
    "Lightning's OneBitCallback, Accelerate onebit.integrations.accelerate.attach"
)
_NAMES: dict[torch.dtype | None, str] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Steps:
    """Those of one kind."""

    taken: int  # or skipped, since a gradient was not finite
    seconds: float | None  # the median; None where too few were timed
    waiting: float | None  # the share of it that this rank waits for messages; None where DDP does, in backward


@dataclass(frozen=True)
class Report:
    """`print` it, or read its fields. Bytes are those that this rank sends to others over the network."""

    uncompressed: Steps
    compressed: Steps
    local: Steps  # without any exchange
    skipped: int | None  # of all of them; read one step late where the report was not asked for. None: not known
    sent: float
    sent_by_fp32: float  # by all-reduces of as many steps
    sent_by_fp16: float
    processes: int
    wire: str | None = None  # what uncompressed gradients travel as, where that was chosen
    ddp_averages: bool = False  # whether DistributedDataParallel averages what was to be compressed
    left: int = 0  # ranks, since this process built the optimizer: see onebit.reform
    came: int = 0
    reforming: float = 0.0  # seconds in which no step was taken since ranks left and came
    bits: int = 1  # of an element in compressed steps

    @property
    def speed_up(self) -> float | None:
        """How many times as fast a compressed step is as an uncompressed one; None where DDP averages in both."""
        slow, fast = self.uncompressed.seconds, self.compressed.seconds
        return None if slow is None or fast is None or self.ddp_averages else slow / fast

    @property
    def run_speed_up(self) -> float | None:
        """The same of all steps so far."""
        if self.speed_up is None:
            return None
        slow, fast = self.uncompressed.seconds, self.compressed.seconds
        assert slow is not None and fast is not None
        local = fast if self.local.seconds is None else self.local.seconds
        took = self.uncompressed.taken * slow + self.compressed.taken * fast + self.local.taken * local
        return self._taken * slow / took

    @property
    def verdict(self) -> str:
        first = ""
        if self.skipped is not None and self.skipped >= 3 and 10 * self.skipped >= self._taken:
            why = "since gradients were not finite: look at that first"
            first = f"{self.skipped} of {self._taken} steps were skipped, {why}. "
        if self.ddp_averages:
            return f"{first}DistributedDataParallel averages all gradients uncompressed in every step: {CALL_ATTACH}"
        if self.processes == 1:
            return f"{first}one process alone sends nothing, and has nothing to gain"
        return first + self._gain

    def numbers(self) -> dict[str, float]:
        """Return what other logs can take, by name."""
        found: dict[str, float | None] = {
            "speed_up": self.speed_up, "run_speed_up": self.run_speed_up, "sent_bytes": self.sent,
            "sent_bytes_by_fp32": self.sent_by_fp32, "skipped_steps": self.skipped,
            "ranks_left": self.left, "ranks_came": self.came, "seconds_of_reforms": self.reforming,
        }  # fmt: skip
        return {f"onebit/{name}": float(value) for name, value in found.items() if value is not None}

    @property
    def _taken(self) -> int:
        return self.uncompressed.taken + self.compressed.taken + self.local.taken

    @property
    def _gain(self) -> str:
        if self.compressed.seconds is None:
            return "no verdict yet: too few compressed steps were timed"
        if self.speed_up is None:
            return "no verdict: too few uncompressed steps were timed in this process to compare with"
        if self.speed_up >= GAIN:
            slow, local = self.uncompressed.seconds, self.local.seconds
            alone = f", local steps {slow / local:.1f} times" if slow and local else ""
            run = f"{alone}; over this run so far {self.run_speed_up:.1f} times"
            return f"{self.bits}-bit steps are {self.speed_up:.1f} times as fast as uncompressed ones{run}"
        share = self.uncompressed.waiting
        why = "" if share is None else f": the network takes {share:.0%} of an uncompressed step"
        return f"no gain{why}; {self.bits}-bit steps take {1 / self.speed_up:.2f} times as long as uncompressed ones"

    def __str__(self) -> str:
        lines = [self.verdict]
        few_bits = "1 bit" if self.bits == 1 else f"{self.bits} bits"
        kinds = {"uncompressed": self.uncompressed, few_bits: self.compressed}
        if self.local.taken:
            kinds["local"] = self.local
        for name, steps in kinds.items():
            timed = "not timed" if steps.seconds is None else f"{1e3 * steps.seconds:.1f} ms each"
            share = "" if steps.waiting is None else f", {steps.waiting:.0%} of it waiting for messages"
            wire = f" in {self.wire}" if self.wire and name == "uncompressed" else ""
            lines.append(f"{name:13} {steps.taken:>7} steps{wire}, {timed}{share}")
        if self.skipped is not None:
            lines.append(f"{'skipped':13} {self.skipped:>7} of these")
        if self.left or self.came:
            lines.append(f"{'ranks':13} {self.left} left, {self.came} came, in {self.reforming:.2f} s without a step")
        if self.sent:
            others = f"{self.sent_by_fp32 / self.sent:.1f} and {self.sent_by_fp16 / self.sent:.1f} times as much"
            lines.append(f"{'sent':13} {_size(self.sent):>7}; fp32 and fp16 all-reduces send {others}")
        return "\n".join(lines)


class PayOff:
    """Counts and times the steps of an optimizer."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._now = device, now
        self.waits = Waits()  # of the step that has not ended
        self.taken: dict[Timed, int] = dict.fromkeys(get_args(Timed), 0)
        self._seconds: dict[Timed, deque[float]] = {kind: deque(maxlen=KEPT) for kind in self.taken}
        self._waited: dict[Timed, deque[float]] = {kind: deque(maxlen=KEPT) for kind in self.taken}
        self._ends: deque[tuple[Timed | None, Any, Waits]] = deque()  # of steps; the first has been read
        self._left, self._came, self._reforming = 0, 0, 0.0
        self._averaged_by_ddp = 0  # steps whose gradients DDP has averaged beside
        self._sent = 0  # in compressed messages to ranks that there were

    def step_ended(self, kind: Timed) -> bool:
        """Count a step. Returns whether it is time for a report: once. A CUDA graph holds no times: its replays count
        nowhere."""
        if capturing(self._device):
            self.waits = Waits()
            return False
        self.taken[kind] += 1
        self._ends.append((kind, self._mark(), self.waits))
        self.waits = Waits()
        self._read()
        return kind == "1 bit" and self.taken[kind] == REPORTED_AFTER

    def due(self, kind: Timed, run: Run, by_ddp: bool) -> list[Callable[[], None]]:
        """A step ends: the report, on rank 0, where it is time for it."""
        self._averaged_by_ddp += run.state.ddp_averages
        if not self.step_ended(kind) or run.setup.topology.everyone.rank > 0:
            return []
        found = self.report(run, by_ddp, run.state.stages.skipped_as_known)
        return [partial(tell, "%s", found)]

    def restart(self) -> None:
        """What there was since the last step, such as a validation, is not of the coming one."""
        self._ends.append((None, self._mark(), Waits()))

    def ranks_changed(self, before: State, left: int, came: int, seconds: float) -> None:
        """Count a reform. before: where the run had come to then."""
        self._sent += before.wire_bytes - before.bytes_before
        self._left, self._came, self._reforming = self._left + left, self._came + came, self._reforming + seconds
        self.restart()

    def steps(self, kind: Timed, *, waits_here: bool) -> Steps:
        """waits_here: whether all waits of such steps are in `waits`."""
        times, waited = self._seconds[kind], self._waited[kind]
        if len(times) < FEWEST:
            return Steps(self.taken[kind], None, None)
        seconds = statistics.median(times)
        share = min(1.0, statistics.median(waited) / seconds) if waits_here and seconds > 0 else None
        return Steps(self.taken[kind], seconds, share)

    def report(self, run: Run, by_ddp: bool, skipped: int) -> Report:
        """by_ddp: whether uncompressed gradients are averaged in backward, where nobody counts waits. skipped: so far,
        also before the state was saved that this run goes on from."""
        state, topology, wire = run.state, run.setup.topology, run.setup.options.gradient_dtype
        taken = self.taken
        ring = _ring(topology)
        elements = ring * sum(sum(each.numels) for each in state.states)
        uncompressed, apart = (
            ring * sum(sum(each.numels) * narrower(each.dtype, wire).itemsize for each in states)
            for states in (state.states, state.uncompressed)
        )
        return Report(
            uncompressed=self.steps("uncompressed", waits_here=not by_ddp),
            compressed=self.steps("1 bit", waits_here=True),
            local=self.steps("local", waits_here=True),
            skipped=skipped - state.stages.skipped_before,
            sent=self._sent
            + state.wire_bytes
            - state.bytes_before
            + taken["uncompressed"] * uncompressed
            + taken["1 bit"] * apart
            + self._averaged_by_ddp * uncompressed,
            sent_by_fp32=sum(taken.values()) * 4 * elements,
            sent_by_fp16=sum(taken.values()) * 2 * elements,
            processes=topology.everyone.size,
            wire=_NAMES.get(wire),
            ddp_averages=state.ddp_averages,
            left=self._left,
            came=self._came,
            reforming=self._reforming,
        )

    def report_on_gradients(self, gradients: Sequence[Tensor], topology: Topology, sent: int, bits: Bits) -> Report:
        """gradients: those that are averaged in every step, uncompressed at first. sent: bytes in messages."""
        ring, taken = _ring(topology), self.taken
        elements, nbytes = ring * sum(g.numel() for g in gradients), ring * sum(g.nbytes for g in gradients)
        return Report(
            uncompressed=self.steps("uncompressed", waits_here=False),
            compressed=self.steps("1 bit", waits_here=False),
            local=self.steps("local", waits_here=False),
            skipped=None,
            sent=sent + taken["uncompressed"] * nbytes,
            sent_by_fp32=sum(taken.values()) * 4 * elements,
            sent_by_fp16=sum(taken.values()) * 2 * elements,
            processes=topology.everyone.size,
            bits=bits,
        )

    def _mark(self) -> Any:
        """This moment: of the stream on a GPU, else of the host."""
        return streams.mark(self._device, timing=True) if streams.has_streams(self._device) else self._now()

    def _read(self) -> None:
        """Times of the steps that are over by now."""
        while len(self._ends) > 1:
            (_, before, _), (kind, end, waits) = self._ends[0], self._ends[1]
            if streams.has_streams(self._device):
                if not (end.query() and waits.passed):
                    return
                seconds = before.elapsed_time(end) / 1e3
            else:
                seconds = end - before
            self._ends.popleft()
            if kind is not None:
                self._seconds[kind].append(seconds)
                self._waited[kind].append(waits.total())


def _ring(topology: Topology) -> float:
    """The share of an all-reduce's bytes that a rank sends over the network."""
    return 2 * (topology.nodes - 1) / topology.nodes / topology.slices


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"
