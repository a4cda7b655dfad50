"""Tensors and what belongs to them, from one rank to one other: their description first, then each as its bytes.

Nothing that comes from another rank is unpickled: the description is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onebit.collectives.transport.protocol import Ranks, Sender
from onebit.kernels.data.wire import MessageError

_MOST_JSON = 2**28  # bytes


def send_tensors(
    ranks: Ranks | Sender, to: int, value: Any, tensors: Sequence[Tensor], at: torch.device, phase: str
) -> None:
    """value: what JSON can hold. at: a device that the ranks can send from, to which each tensor comes in its turn. It
    waits until all have left."""
    sender = _sender(ranks, phase)
    rows = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    text = torch.frombuffer(bytearray(json.dumps([value, rows]).encode()), dtype=torch.uint8).to(at)
    for each in (torch.tensor([len(text)], dtype=torch.int64, device=at), text, *tensors):
        if each.numel():
            sender.send(_bytes_of(each.to(at).contiguous()), to, phase).wait()


def receive_tensors(
    ranks: Ranks | Sender, source: int, device: torch.device, phase: str, kept: torch.device | None = None
) -> tuple[Any, list[Tensor]]:
    """What `send_tensors` sends. kept: where each tensor goes from `device`, by which ranks receive."""
    sender, length = _sender(ranks, phase), torch.zeros(1, dtype=torch.int64, device=device)
    sender.receive(_bytes_of(length), source, phase).wait()
    if not 0 < int(length) <= _MOST_JSON:
        raise MessageError(f"{phase}: rank {source} announces {int(length)} bytes: the message was damaged on the way")
    text = torch.zeros(int(length), dtype=torch.uint8, device=device)
    sender.receive(text, source, phase).wait()
    value, rows = json.loads(text.cpu().numpy().tobytes())
    found = []
    for dtype, shape in rows:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        if tensor.numel():
            sender.receive(_bytes_of(tensor), source, phase).wait()
        found.append(tensor.to(kept or device))
    return value, found


def _sender(ranks: Ranks | Sender, phase: str) -> Sender:
    if not isinstance(ranks, Sender):
        raise ValueError(
            f"{phase} is not possible over {ranks.name}, by which no rank can send to one other: use a process group "
            f"of torch.distributed"
        )
    return ranks


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
