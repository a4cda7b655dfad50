"""Progress of a command: one line rewritten in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time


class Progress:
    """Writes to standard error, unless it is silent."""

    def __init__(self, plain_seconds: float = 5.0, silent: bool = False) -> None:
        self._live = sys.stderr is not None and sys.stderr.isatty() and not silent
        self._silent, self._pause = silent, 0.1 if self._live else plain_seconds
        self._next = 0.0

    def show(self, text: str) -> None:
        if self._silent:
            return
        if self._live:
            text = text[: shutil.get_terminal_size().columns - 1]
        start, end = ("\r\033[K", "") if self._live else ("", "\n")
        print(start + text, end=end, file=sys.stderr, flush=True)
        self._next = time.monotonic() + self._pause

    def tick(self, text: str) -> None:
        """Show `text`, unless it is too early for another one."""
        if time.monotonic() >= self._next:
            self.show(text)

    def clear(self) -> None:
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
