"""Which ranks died, and which are silent: known without a collective, and before one has waited its whole timeout.

Every rank sends every other one a datagram some times a second. A process that ended refuses datagrams; a process that
is stopped, or whose cable is cut, sends none. Then this process's waits for messages end at once with an error: Gloo
gives up all connections of a group when one receive is late, so a receive that nobody answers is given a millisecond.
While nobody is gone a step waits for nothing and sends nothing more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from onebit.kernels.log import to_log

BEAT, BYE = b"onebit beat", b"onebit bye!"
BYES = 3  # datagrams may be lost
AT_ONCE = timedelta(milliseconds=1)
UNANSWERED = 0x6F6E65  # the tag of a receive that nobody answers

_watched: list[SignsOfLife] = []  # one at most


@dataclass
class Peer:
    """Another rank. The socket here sends to the one there alone, and hears that one alone."""

    rank: int
    socket: socket.socket
    heard: float
    fate: str = ""  # why it is gone
    spoke: bool = False
    said_bye: bool = False

    def beat(self, now: float, silent_after: float) -> None:
        try:
            self._listen(now)
            self.socket.send(BEAT)
        except ConnectionRefusedError:  # is told before what was sent earlier, a bye for one
            with contextlib.suppress(OSError):
                self._listen(now)
            self.fate = "" if self.said_bye else "its process has ended"
        except OSError:  # this host has no network for now: then the others are silent
            pass
        if not self.fate and not self.said_bye and now - self.heard > silent_after:
            self.fate = f"no sign of life for {now - self.heard:.1f} s"

    def close(self, bye: bool) -> None:
        with contextlib.suppress(OSError):
            for _ in range(BYES if bye else 0):
                self.socket.send(BYE)
        self.socket.close()

    def _listen(self, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                said = self.socket.recv(len(BEAT))
                self.heard, self.spoke, self.said_bye = now, True, self.said_bye or said == BYE


class SignsOfLife:
    """A thread that sends and hears them."""

    def __init__(self, peers: list[Peer], silent_after: float) -> None:
        self.silent_after, self.interval = silent_after, min(0.25, silent_after / 20)
        self._peers = peers
        self._heard, self._stopped = threading.Condition(), threading.Event()
        self._failed: Exception | None = None  # what ended the thread
        _watched.append(self)
        self._thread = threading.Thread(target=self._run, name="onebit signs of life", daemon=True)
        self._thread.start()

    def gone(self) -> dict[int, str]:
        """What is known of each rank that is gone. A RuntimeError where an error has ended the thread: the others will
        take this rank for gone."""
        if self._failed is not None:
            raise RuntimeError(
                f"an error has ended the watch for signs of life, restart from the last checkpoint: {self._failed!r}"
            ) from self._failed
        return {peer.rank: peer.fate for peer in self._peers if peer.fate}

    def departed(self) -> set[int]:
        """Those that have stopped in good order."""
        return {peer.rank for peer in self._peers if peer.said_bye}

    def unheard(self) -> list[int]:
        """Those that have sent nothing yet."""
        return [peer.rank for peer in self._peers if not peer.spoke]

    def wait_for_news(self, seconds: float) -> None:
        """Wait until a rank is gone, or until one has departed and all others have given a sign of life since."""
        sent_since = time.monotonic() + self.interval

        def known() -> bool:
            stayed = [peer for peer in self._peers if not peer.said_bye]
            return bool(self.gone()) or (
                len(stayed) < len(self._peers) and all(peer.heard > sent_since for peer in stayed)
            )

        with self._heard:
            self._heard.wait_for(known, seconds)

    def keep(self, ranks: Sequence[int]) -> None:
        """The others do not matter any more, and are refused; these have other numbers now, in this order. No wait is
        ended for one of the others from now on."""
        with self._heard:
            for peer in self._peers:
                if peer.rank not in ranks:
                    peer.close(bye=False)
            self._peers = [replace(p, rank=ranks.index(p.rank)) for p in self._peers if p.rank in ranks]

    def stop(self, bye: bool) -> None:
        """bye: in good order; the others do not take this process for dead."""
        self._stopped.set()
        self._thread.join()
        self.close(bye)

    def close(self, bye: bool = False) -> None:
        """Close the sockets. A forked child does it, too, without bye: while it held them, they would refuse nothing
        when its parent has ended."""
        for peer in self._peers:
            peer.close(bye)
        if self in _watched:
            _watched.remove(self)

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            self._failed = error
            to_log(logging.ERROR, "an error has ended the watch for signs of life", exc_info=True)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(self.interval):
            now = time.monotonic()
            if now - last > self.silent_after / 2:  # this process stood still, and may not have been sent to meanwhile
                for peer in self._peers:
                    peer.heard = now
            last = now
            for peer in self._peers:
                if not peer.fate and not peer.said_bye:
                    peer.beat(now, self.silent_after)
            with self._heard:
                self._heard.notify_all()
                if self.gone():  # again and again: a wait may begin, or a group be made, after the first time
                    end_all_waits()


def longest_silence() -> timedelta | None:
    """How long a rank may be silent; None where no Heartbeat watches."""
    return next((timedelta(seconds=signs.silent_after) for signs in _watched), None)


def who_is_gone() -> str:
    """Name the ranks that are gone, for an error. That a rank died is known a moment after its connections ended.
    Nobody is, where the watch has failed: its log and `gone` say that."""
    for signs in _watched:
        with contextlib.suppress(RuntimeError):
            signs.wait_for_news(3 * signs.interval)
            return ", ".join(f"rank {rank}: {fate}" for rank, fate in sorted(signs.gone().items()))
    return ""


def end_all_waits() -> None:
    """End all waits of this process, in every group: after a death none of them is of use."""
    for group in list(dist.distributed_c10d._world.pg_map):
        for rank in range(group.size()):
            with contextlib.suppress(RuntimeError):  # how it ends
                group.recv([torch.empty(1)], rank, UNANSWERED).wait(AT_ONCE)


def _close_all() -> None:
    for signs in list(_watched):
        signs.close()


os.register_at_fork(after_in_child=_close_all)
