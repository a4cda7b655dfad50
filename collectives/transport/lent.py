"""Tensors that threads of torch.distributed have for a while.

A thread of Gloo lets go of a collective's tensors a moment after whoever waits for it has gone on, and needs Python's
lock for that. Where Python has ended by then, the process aborts with all its work done, and torchrun takes the run
for failed. So the end of Python waits for those threads.
"""

from __future__ import annotations

import atexit
import os
import time
from weakref import ref

from torch import Tensor

LONGEST = 2.0  # seconds: a collective whose ranks are gone does not end
held: dict[int, ref[Tensor]] = {}


def lent(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own, for one collective: Python has it for as long as a thread does."""
    own = tensor.detach()
    key = id(own)
    held[key] = ref(own, lambda _: held.pop(key, None))
    return own


def wait_for_threads() -> None:
    end = time.monotonic() + LONGEST
    while held and time.monotonic() < end:
        time.sleep(1e-3)


atexit.register(wait_for_threads)
os.register_at_fork(after_in_child=held.clear)  # where those threads are not
