"""Streams and events: what the work of a GPU waits for. No other file names those of torch.

A launch, a copy or a collective goes into the current stream, and the host goes on. The work of a stream is done in its
order. The work of two streams has no order, except where `join` or `wait_for` gives one. Memory that is freed serves
the next tensor of the stream that it was made in: another stream that uses the memory has to `keep` it.

On a CPU work is done when its call returns: `has_streams` is False, and nobody asks for a stream or an event.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.futures import Future

Stream = torch.cuda.Stream
Event = torch.cuda.Event


def has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


def capturing(device: torch.device) -> bool:
    """Return whether what is launched now becomes part of a CUDA graph."""
    return has_streams(device) and torch.cuda.is_current_stream_capturing()


def current(device: torch.device) -> Stream:
    """The stream that work of this thread goes into."""
    return torch.cuda.current_stream(device)


def new(device: torch.device) -> Stream:
    return torch.cuda.Stream(device)


def within(stream: Stream | None) -> AbstractContextManager[None]:
    """A context in which `stream` is the current one; None changes nothing."""
    return torch.cuda.stream(stream)


def choose_device(stream: Stream) -> None:
    """Set the stream's device in a new thread: a thread starts on device 0, and would make a context there."""
    torch.cuda.set_device(stream.device)


def mark(device: torch.device, again: Event | None = None, timing: bool = False) -> Event:
    """An event that happens when the current stream has done what it has to do now. again: an event to use anew."""
    event = again or torch.cuda.Event(enable_timing=timing)
    event.record(current(device))
    return event


def wait_for(stream: Stream, event: Event) -> None:
    """What goes into `stream` from here on is done after `event`."""
    stream.wait_event(event)


def join(stream: Stream, other: Stream) -> None:
    """What goes into `stream` from here on is done after what `other` has to do now."""
    stream.wait_stream(other)


def wait_on_host(passed: Stream | Event) -> None:
    """The host waits for an event, or for what a stream has to do now."""
    passed.synchronize()


def keep(tensor: Tensor, stream: Stream) -> None:
    """Keep the memory of `tensor`, when it is freed, until `stream` has done what it has to do by then."""
    tensor.record_stream(stream)


def future(device: torch.device) -> Future[Tensor]:
    """A stream that waits for its result waits for what was in the current stream when the result was set."""
    return Future(devices=[device] if has_streams(device) else None)


def pinned(like: Tensor) -> Tensor:
    """Host memory of the shape of `like`, which copies can read and write while the host goes on."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
