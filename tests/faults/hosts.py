"""A host of a run that goes on through many faults: it trains, regroups with those that are left, and joins.

`tests.faults.many` starts hosts, strikes them, and says who is there when one joins. A host asks it by a pipe:

    here        at a meeting of those that are there and those that join      answer: a place in the new group, or "off"
    entered     whether its new group and its Heartbeat stand                 answer: "on", or "off": all meet again

Between meetings hosts need nobody: a death is known by the Heartbeat, which makes the group of those that are left.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onebit
from onebit.collectives import CollectiveError
from onebit.collectives.store import tcp_store
from tests.faults.learners import BATCH, HELD_OUT, SILENT, Task
from tests.faults.training import digest
from tests.limits import HUNG

HOSTS = 4  # at most
MINIMUM = 2  # fewer hosts do not go on
PATIENCE = HUNG / 2  # seconds for all that is waited for
PAUSE = 0.5  # seconds by which a step is longer while a fault waits for hosts that join
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Shown:
    """Memory of all processes."""

    progress: Any  # steps taken
    waits: Any  # whether the next fault waits until more hosts are there
    losses: Any  # of each step on each rank


class Host:
    def __init__(self, pipe: Connection, port: int, task: Task, shown: Shown) -> None:
        self.pipe, self.task, self.shown = pipe, task, shown
        patience = timedelta(seconds=PATIENCE)
        self.store: Any = tcp_store("127.0.0.1", port, is_master=False, timeout=patience)
        self.heart: onebit.Heartbeat | None = None
        self.invited = False
        self.model = task.model()
        self.learner = task.learner(list(self.model.parameters()))

    def train(self) -> None:
        changed = self.meet()
        while True:
            try:
                if changed:
                    self.go_on()
                    changed = False
                invited, waits = self.agreed()
                if invited:
                    changed = self.meet()
                elif self.learner.steps == self.task.steps:
                    self.end()
                    return
                else:
                    time.sleep(PAUSE if waits else 0)
                    self.step()
            except RuntimeError:
                self.regroup()
                changed = True

    def step(self) -> None:
        number, rank, size = self.learner.steps, dist.get_rank(), dist.get_world_size()
        x, y = self.task.samples(number, BATCH)
        for group in self.learner.optimizer.param_groups:
            group["lr"] = self.task.lr(number)
        self.learner.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x[rank::size]), y[rank::size])
        loss.backward()
        self.learner.step()
        self.shown.losses[number * HOSTS + rank] = loss.item()
        self.shown.progress.value = self.learner.steps

    def go_on(self) -> None:
        """Go on with other ranks: all have the same bits."""
        self.learner.reform()
        self.compare()
        self.tell("going", self.learner.address)

    def compare(self) -> str:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, digest([self.learner.steps, self.learner.shared]))
        assert len(set(everyone)) == 1, f"ranks differ after step {self.learner.steps}: {everyone}"
        return str(everyone[0])

    def end(self) -> None:
        """Nobody leaves before all have come to the end."""
        self.learner.end()
        self.compare()
        x, y = self.task.samples(-1, HELD_OUT)
        with torch.no_grad():
            loss = nn.functional.mse_loss(self.model(x), y).item()
        self.ask("done", loss)  # no answer comes: the run ends this process when all are done

    def regroup(self) -> None:
        self.tell("regrouping", None)
        stop = time.monotonic() + PATIENCE
        while True:
            assert self.heart is not None
            try:
                self.heart.regroup()
                return
            except CollectiveError:
                if time.monotonic() > stop:
                    raise

    def agreed(self) -> tuple[bool, bool]:
        """Return whether all are invited to a meeting with one that joins, and whether steps wait for others."""
        while self.pipe.poll():
            assert self.pipe.recv() == "invited"
            self.invited = True
        counts = torch.tensor([self.invited, self.shown.waits.value], dtype=torch.int32)
        dist.all_reduce(counts)
        invited, waits = counts.tolist()
        return invited == dist.get_world_size(), waits > 0

    def meet(self) -> bool:
        """Return whether there is a new group. If not, the old one goes on."""
        self.invited = False
        while True:
            place = self.ask("here", self.heart is not None)
            if place != "off":
                if self.ask("entered", self.enters(*place)) == "on":
                    return True
                self.stop_heart()
            elif self.heart is not None:
                return False

    def enters(self, meeting: int, rank: int, size: int) -> bool:
        """A group of those who met. Whether it stands: one may die meanwhile."""
        self.stop_heart()
        if dist.is_initialized():
            dist.destroy_process_group()
        store, timeout = dist.PrefixStore(f"meeting {meeting}", self.store), timedelta(seconds=3 * SILENT)
        try:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
            self.heart = onebit.Heartbeat(silent_after=SILENT, minimum=MINIMUM)
        except (RuntimeError, ValueError):
            return False
        return True

    def stop_heart(self) -> None:
        if self.heart is not None:
            self.heart.stop()
            self.heart = None

    def tell(self, what: str, value: Any) -> None:
        self.pipe.send((what, value))

    def ask(self, what: str, value: Any) -> Any:
        self.tell(what, value)
        while self.pipe.poll(PATIENCE):
            answer = self.pipe.recv()
            if answer != "invited":
                return answer
            self.invited = True
        raise TimeoutError(f"no answer to {what!r}")


def live(pipe: Connection, port: int, task: Task, shown: Shown, addresses: list[str]) -> None:
    """The life of a process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the one that started it, stopped or not
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        host = Host(pipe, port, task, shown)
        host.learner.follow(addresses)
        host.train()
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    os._exit(0)
