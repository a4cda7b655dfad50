"""Nested values, changed in a few places."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

Source = np.random.Generator
ERRORS = (ValueError, TypeError)  # that say what is wrong with an input

PLAIN: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 31, 32, 64, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.0, 0.5, 1.5,
    -1e-9, 1e-45, 1e38, 1e39, 1e300, "", "x", "block", "tensor", "auto", "0", "\0", "é" * 50, [], {}, [[]], [0], [1.0],
    {"a": 1}, [None], "OneBitAdam", "OneBitLamb", "float32", "../x",
)  # fmt: skip
NOT_JSON: tuple[Any, ...] = (float("nan"), float("inf"), -float("inf"), b"", b"\xff", (), (1, 2), 1j, set(), object)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64,
    torch.bool, torch.complex64,
)  # fmt: skip
STRANGE: tuple[Callable[[], Any], ...] = (
    lambda: torch.empty(3, device="meta"),
    lambda: torch.zeros(3, 4).to_sparse(),
    lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8),
    lambda: torch.zeros(1).expand(2**40),
    lambda: torch.zeros(()),
    lambda: torch.zeros(0),
    lambda: torch.full((1,), float("nan")),
    lambda: torch.tensor(-1.0),
    lambda: np.float64(0.5),
    lambda: np.zeros(3),
    lambda: np.int64(3),
)


def pick(source: Source, values: Any) -> Any:
    return values[int(source.integers(len(values)))]


def junk(source: Source, json: bool = False) -> Any:
    draw = source.random()
    if json or draw < 0.5:
        return deepcopy(pick(source, PLAIN))
    if draw < 0.65:
        return deepcopy(pick(source, NOT_JSON))
    if draw < 0.75:
        return pick(source, STRANGE)()
    shape = tuple(int(n) for n in source.integers(0, 5, size=int(source.integers(0, 4))))
    return torch.from_numpy(source.integers(-3, 200, size=shape)).to(pick(source, DTYPES))


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) in nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        places(inner, found)
    return found


def mutate(source: Source, value: Any, json: bool = False) -> None:
    """One to three places of a nested value, which is changed."""
    for _ in range(int(source.integers(1, 4))):
        there = places(value, [])
        if not there:
            return
        container, key = pick(source, there)
        kind = source.random()
        if kind < 0.15:
            del container[key]
        elif kind < 0.3:
            other, place = pick(source, there)
            container[key], other[place] = deepcopy(other[place]), deepcopy(container[key])
        elif kind < 0.4 and isinstance(container, dict):
            container[junk_key(source, json)] = deepcopy(container[key])
        elif isinstance(container[key], Tensor) and kind < 0.8:
            container[key] = mutated_tensor(source, container[key])
        elif isinstance(container[key], (int, float)) and not isinstance(container[key], bool) and kind < 0.7:
            container[key] = container[key] + pick(source, (1, -1, 2, 1000, 2**40)) * pick(source, (1, -1))
        else:
            container[key] = junk(source, json)


def junk_key(source: Source, json: bool) -> Any:
    fields = ("residual", "denominator", "master", "step", "exp_avg", "onebit")
    return pick(source, (*fields, "lr", "7", *(() if json else (0, 99, None, (1,)))))


def mutated_tensor(source: Source, tensor: Tensor) -> Tensor:
    kind = source.random()
    if tensor.numel() > 2**20 or tensor.is_quantized or tensor.is_meta or tensor.layout is not torch.strided:
        return tensor
    if kind < 0.35 and tensor.numel():
        changed = np.array(tensor.detach().contiguous().view(-1).view(torch.uint8))
        for _ in range(int(source.integers(1, 9))):
            changed[int(source.integers(len(changed)))] ^= 1 << int(source.integers(8))
        return torch.from_numpy(changed).view(tensor.dtype).view(tensor.shape)
    if kind < 0.55:
        return tensor.reshape(-1)[: int(source.integers(tensor.numel() + 1))].clone()
    if kind < 0.75:
        return tensor.to(pick(source, DTYPES))
    if kind < 0.85:
        return tensor.unsqueeze(0) if source.random() < 0.5 else tensor.reshape(-1)
    other = tensor.double().clone().reshape(-1)
    if len(other):
        other[int(source.integers(len(other)))] = pick(source, (float("nan"), float("inf"), -1.0, 1e39, 1e300))
    return other.view(tensor.shape)


def mutated_bytes(source: Source, content: bytes) -> bytes:
    """Bits flipped, cut, overwritten, moved, repeated; never what it was."""
    made = bytearray(content)
    for _ in range(int(source.integers(1, 5))):
        kind, at = source.random(), int(source.integers(len(made) + 1))
        if kind < 0.5 and made:
            made[min(at, len(made) - 1)] ^= 1 << int(source.integers(8))
        elif kind < 0.6:
            del made[at:]
        elif kind < 0.7:
            made += source.bytes(int(source.integers(1, 40)))
        elif kind < 0.85:
            few = source.bytes(int(source.integers(1, 9)))
            made[at : at + len(few)] = few
        else:
            made[at:at] = made[: int(source.integers(200))]
    return bytes(made) if bytes(made) != content else content + b"\0"
