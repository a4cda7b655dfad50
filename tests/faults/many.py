"""A run of four hosts goes on through many faults, and ends where others end: python -m tests.faults.many

A host is a process, which is killed (SIGKILL), or stopped (SIGSTOP, and killed later), at a random moment of a random
step; the others go on, and a fresh host joins. Every step has the same samples, whoever is there. Beside that run: the
same without a fault, and torch's AdamW with the same faults, each over several seeds. The command fails where a host
fails otherwise, where ranks differ after any change of ranks, and where the mean loss with faults is further above one
of the two others than the seeds without faults are apart.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

from onebit.collectives.store import tcp_store
from tests.faults.hosts import HOSTS, MINIMUM, Shown, live
from tests.faults.learners import KINDS, SILENT, Task
from tests.limits import HUNG
from tests.ranks import GRACE, PRELOADED

LAST = 100  # steps whose mean loss is told
QUIET = 20  # steps at the end without a fault
MOMENT = 0.03  # seconds: longer than a step


@dataclass(frozen=True)
class Fault:
    step: int
    how: str  # kill or stop
    moment: float  # seconds after the step has begun
    choice: float  # which of the hosts
    there: int  # how many hosts must be there before it strikes


def plan_of(faults: int, steps: int, seed: int) -> list[Fault]:
    chance, found = random.Random(seed), []
    for _ in range(faults):
        step, how, there = chance.randrange(1, steps - QUIET), chance.choice(("kill", "stop")), chance.choice((3, 4, 4))
        found.append(Fault(step, how, MOMENT * chance.random(), chance.random(), there))
    return sorted(found, key=lambda fault: fault.step)


@dataclass(eq=False)
class Place:
    """A host, as the run sees it."""

    process: Any
    pipe: Connection
    says: str = ""  # what it has said last
    value: Any = None
    member: bool = False  # of the group that the last meeting made
    goes: bool = False  # whether it has the run's state
    struck: float = math.inf  # when


@dataclass(frozen=True)
class Outcome:
    held_out: float  # loss
    last: float  # mean loss of the last steps
    faults: int
    seconds: float
    lost: float  # seconds by a fault, with those until all are there again

    def __str__(self) -> str:
        losses = f"loss {self.held_out:.4f} held out, {self.last:.4f} in the last steps"
        return f"{self.faults:3} faults: {losses}; {self.seconds:.0f} s, {self.lost:.2f} s lost by a fault"


class Run:
    def __init__(self, task: Task, plan: list[Fault], hosts: int = HOSTS) -> None:
        self.task, self.plan, self.hosts = task, plan, hosts
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.store: Any = tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        losses = self.context.RawArray("d", [math.nan] * HOSTS * task.steps)
        self.shown = Shown(self.context.RawValue("l", 0), self.context.RawValue("l", 0), losses)
        self.places: list[Place] = []
        self.meetings = itertools.count()
        self.meeting: list[Place] = []  # those whose new group is being made
        self.invited, self.struck, self.failed = False, 0, math.inf
        self.began = self.moved = time.monotonic()
        self.moments: list[float] = []  # when each step had ended

    def run(self) -> Outcome:
        try:
            while not self.ended():
                self.hear()
                self.replace()
                self.strike()
                self.meet()
                self.watch()
            return self.outcome()
        finally:
            for place in self.places:
                place.process.kill()
                place.process.join(5)

    @property
    def steps(self) -> int:
        return int(self.shown.progress.value)

    def there(self) -> list[Place]:
        return [place for place in self.places if place.struck == math.inf]

    def ended(self) -> bool:
        members = [place for place in self.there() if place.goes]
        return bool(members) and all(place.says == "done" for place in members)

    def hear(self) -> None:
        said = {place.pipe: place for place in self.there() if place.says not in ("done", "failed")}
        for pipe in wait(list(said), 0.002):
            place = said[pipe]
            try:
                place.says, place.value = pipe.recv()
            except EOFError:
                place.says, place.value = "failed", "it has ended"
            place.goes |= place.says == "going"
            if place.says == "failed":
                self.failed = min(self.failed, time.monotonic())
        if time.monotonic() > self.failed + GRACE:
            whys = "\n".join(place.value for place in self.places if place.says == "failed")
            raise RuntimeError(f"hosts have failed after step {self.steps}:\n{whys}")

    def replace(self) -> None:
        """Whoever was struck."""
        for place in [place for place in self.places if time.monotonic() > place.struck + 3 * SILENT]:
            self.places.remove(place)
            place.process.kill()
            place.process.join()
            place.pipe.close()
        if self.steps < self.task.steps - QUIET:
            while len(self.there()) < self.hosts:
                addresses = [str(place.value) for place in self.there() if place.says == "going"]
                ours, theirs = self.context.Pipe()
                life = (theirs, self.store.port, self.task, self.shown, addresses)
                process = self.context.Process(target=live, args=life, daemon=True)
                with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
                    process.start()
                theirs.close()
                self.places.append(Place(process, ours))

    def strike(self) -> None:
        """The next fault, in its step, or when enough hosts have the run's state."""
        self.shown.waits.value = False
        if self.struck == len(self.plan) or self.steps < self.plan[self.struck].step - 1:
            return
        fault, there = self.plan[self.struck], self.there()
        self.shown.waits.value = sum(place.goes for place in there) < min(fault.there, self.hosts)
        if self.shown.waits.value or self.steps >= self.task.steps - QUIET // 2:
            return
        time.sleep(fault.moment)
        victim = there[int(fault.choice * len(there))]
        os.kill(victim.process.pid, signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)
        victim.struck = time.monotonic()
        self.struck += 1

    def meet(self) -> None:
        """A new group, when all are here: its members, and those that join. A member that regroups calls them off."""
        members = [place for place in self.there() if place.member]
        here = [place for place in self.there() if place.says == "here"]
        if self.meeting:
            self.end_meeting([place for place in self.there() if place in self.meeting])
        elif any(place.says == "regrouping" for place in members) and any(place.value for place in here):
            self.answer([place for place in here if place.value], "off")
            self.invited = False
        elif all(place in here for place in members) and len(here) >= (MINIMUM if members else self.hosts):
            self.meeting, number = here, next(self.meetings)
            for rank, place in enumerate(here):
                self.answer([place], (number, rank, len(here)))
        elif members and here and not self.invited and all(place.says == "going" for place in members):
            for place in members:
                place.pipe.send("invited")
            self.invited = True

    def end_meeting(self, met: list[Place]) -> None:
        """End a meeting when all have said whether the group stands. If it does not, they meet again."""
        if all(place.says == "entered" for place in met):
            stands = all(place.value for place in met)
            for place in met:
                place.member |= stands
            self.answer(met, "on" if stands else "off")
            self.meeting, self.invited = [], False

    def answer(self, places: list[Place], what: Any) -> None:
        for place in places:
            place.says = "answered"
            place.pipe.send(what)

    def watch(self) -> None:
        now = time.monotonic()
        if self.steps > len(self.moments):
            if self.steps // 100 > len(self.moments) // 100:
                print(f"    step {self.steps}, {self.struck} faults, {now - self.began:.0f} s", flush=True)
            self.moments += [now] * (self.steps - len(self.moments))
            self.moved = now
        if now - self.moved > HUNG:
            for place in self.there():
                os.kill(place.process.pid, signal.SIGUSR1)
            raise RuntimeError(f"no step in {HUNG:.0f} s; hosts say {[place.says for place in self.there()]}")

    def outcome(self) -> Outcome:
        seconds, steps = time.monotonic() - self.began, self.task.steps
        usual = statistics.median(b - a for a, b in itertools.pairwise(self.moments))
        last = [x for x in self.shown.losses[-min(LAST, steps) * HOSTS :] if not math.isnan(x)]
        ends = {place.value for place in self.there() if place.says == "done"}
        assert len(ends) == 1, f"hosts with the same bits have other losses: {ends}"
        longer = self.moments[-1] - self.moments[0] - usual * (steps - 1)
        lost = longer / self.struck if self.struck else 0.0
        return Outcome(ends.pop(), statistics.mean(last), self.struck, seconds, lost)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.many", description=__doc__.partition("\n")[0])
    parser.add_argument("--optimizer", default="ZeroOneAdam", choices=KINDS[:-1])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="of each kind of run (default: 3)")
    options = parser.parse_args()

    def loss(kind: str, faults: int, seed: int) -> float:
        outcome = Run(Task(kind, seed, options.steps), plan_of(faults, options.steps, seed)).run()
        print(f"{kind:12} seed {seed}, {outcome}", flush=True)
        return outcome.held_out

    seeds, faults = range(options.seeds), options.faults
    struck = [loss(options.optimizer, faults, seed) for seed in seeds]
    calm = [loss(options.optimizer, 0, seed) for seed in seeds]
    theirs = [loss("AdamW", faults, seed) for seed in seeds]
    apart = max(calm) - min(calm)
    over = {"without faults": calm, "AdamW's with them": theirs}
    above = {name: statistics.mean(struck) - statistics.mean(losses) for name, losses in over.items()}
    for name, more in above.items():
        print(f"with faults the mean loss is {more:+.4f} beside {name}; seeds without are up to {apart:.4f} apart")
    return int(max(above.values()) > apart)


if __name__ == "__main__":
    sys.exit(main())
