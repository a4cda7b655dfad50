"""The threads of a host, and what each knows of the others: vector clocks."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

Clock = dict[str, int]


class Moment(NamedTuple):
    """A moment of a stream or of a thread of the host."""

    of: str
    number: int

    def within(self, clock: Clock) -> bool:
        return clock.get(self.of, 0) >= self.number


def take_over(clock: Clock, other: Clock) -> None:
    for of, number in other.items():
        clock[of] = max(clock.get(of, 0), number)


class Hosts:
    """A thread knows what another one did before it set an event that this one waited for, started it, or ended."""

    def __init__(self) -> None:
        self._clocks: dict[int, tuple[str, Clock]] = {}  # by thread
        self._begun = 0
        self._of_events: weakref.WeakKeyDictionary[threading.Event, Clock] = weakref.WeakKeyDictionary()
        self._of_threads: weakref.WeakKeyDictionary[threading.Thread, Clock] = weakref.WeakKeyDictionary()

    @property
    def clock(self) -> Clock:
        """What this thread knows."""
        return self._own()[1]

    def now(self) -> Moment:
        """A moment of this thread."""
        name, clock = self._own()
        clock[name] = clock.get(name, 0) + 1
        return Moment(name, clock[name])

    @contextlib.contextmanager
    def watched(self, counts: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """counts: asked at each wait, whether the thread learns something by it."""
        set_event, wait_event = threading.Event.set, threading.Event.wait
        start, join = threading.Thread.start, threading.Thread.join

        def set_and_tell(event: threading.Event) -> None:
            self.now()
            told = dict(self._of_events.get(event, {}))
            take_over(told, self.clock)
            self._of_events[event] = told
            set_event(event)

        def wait_and_learn(event: threading.Event, timeout: float | None = None) -> bool:
            came = wait_event(event, timeout)
            if came and counts():
                take_over(self.clock, self._of_events.get(event, {}))
            return came

        def start_and_tell(thread: threading.Thread) -> None:
            self.now()
            run, before = thread.run, dict(self.clock)

            def run_after() -> None:
                self._begin(before)
                try:
                    run()
                finally:
                    self.now()
                    self._of_threads[thread] = dict(self.clock)

            thread.run = run_after  # type: ignore[method-assign]
            start(thread)

        def join_and_learn(thread: threading.Thread, timeout: float | None = None) -> None:
            join(thread, timeout)
            if not thread.is_alive() and counts():
                take_over(self.clock, self._of_threads.get(thread, {}))

        with contextlib.ExitStack() as patches:
            for owner, name, value in (
                (threading.Event, "set", set_and_tell),
                (threading.Event, "wait", wait_and_learn),
                (threading.Thread, "start", start_and_tell),
                (threading.Thread, "join", join_and_learn),
            ):
                patches.enter_context(mock.patch.object(owner, name, value))
            yield

    def _own(self) -> tuple[str, Clock]:
        own = self._clocks.get(threading.get_ident())
        return self._begin({}) if own is None else own

    def _begin(self, before: Clock) -> tuple[str, Clock]:
        """This thread begins, and knows what `before` has. Threads that have ended may have had its number."""
        self._begun += 1
        own = self._clocks[threading.get_ident()] = f"host {self._begun}", dict(before)
        return own
