"""How results are compared with float64, and with others bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebit.kernels.data.lamb_state import LambState
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Messages
from tests import oracle
from tests.kernels.cases import BF16, F32, GPU, GUARD, SENTINEL


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float64 values that `dtype` can hold."""
    return torch.from_numpy(np.asarray(values, np.float64)).to(dtype).to(torch.float64).numpy()


def stored(values: np.ndarray, dtype: torch.dtype, name: str) -> np.ndarray:
    """What a backend stores for fp32 values. Triton's interpreter cuts bf16 off; its compiler rounds to nearest."""
    if name == "triton" and GPU == "cpu" and dtype == BF16:
        words = torch.from_numpy(np.asarray(values, np.float64)).to(F32).view(torch.int32) & -65536
        return words.view(F32).to(torch.float64).numpy()
    return rounded(values, dtype)


def numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().to(torch.float64).numpy()


def frozen_bits(*things: object) -> list[bytes]:
    """Every byte of these, so that a test can say that nothing changed."""
    found = []
    for thing in things:
        match thing:
            case Tensor():
                found.append(thing.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            case Pointers():
                found += frozen_bits(*thing.tensors)
            case Messages():
                found += frozen_bits(thing.buffer)
            case Residual() | LambState():
                found += frozen_bits(*vars(thing).values())
            case list() | tuple():
                found += frozen_bits(*thing)
    return found


def tensors_of(workload: Any) -> dict[str, Tensor]:
    """What the passes of a workload, or a world, have had so far, by name, but for scratch; of messages the parts."""
    found: dict[str, Tensor] = {}
    for name, value in workload.buffers.items():
        match value:
            case Tensor():
                found[name] = value
            case list():
                for i, residual in enumerate(value):
                    found |= {f"{name}.{i}.value": residual.value}
            case Pointers():
                found |= {f"{name}.{i}": tensor for i, tensor in enumerate(value.tensors) if tensor is not None}
            case Messages():
                of_shard = ("reply", "received", "reply_codes", "received_codes")
                span = workload.shard if name in of_shard else workload.span
                parts = {"header": value.header, "bits": value.bits_of(span), "scales": value.scales_of(span)}
                found |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
            case Residual():
                parts = {"value": value.value, "scale": value.scale, "before": value.before}
                found |= {f"{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
            case LambState():
                found |= {f"{name}.{part}": getattr(value, part) for part in ("coefficient", "average", "ratio")}
    return found


def assert_close(actual: object, expected: object, tolerance: float, size: object = 0.0) -> None:
    """|actual - expected| <= tolerance * max(|expected|, size), everywhere; NaN fails."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    allowed = tolerance * np.maximum(np.abs(expected), size)
    wrong = ~(np.abs(actual - expected) <= allowed)
    where, values = np.argwhere(wrong)[:5].tolist(), f"{actual[wrong][:5]} for {expected[wrong][:5]}"
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} differ, first at {where}: {values}"


def assert_close_or_nan(actual: Tensor, expected: Tensor, tolerance: float, size: float = 0.0) -> None:
    """The same, of NaN in the same places."""
    got, want = numpy(actual), numpy(expected)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    assert_close(np.nan_to_num(got), np.nan_to_num(want), tolerance, size)


def assert_all_close(actual: oracle.Arrays, expected: oracle.Arrays, tolerance: float, sizes: object = 0.0) -> None:
    """The same of lists of arrays; sizes: one number, or one array a parameter."""
    for p, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert_close(got, want, tolerance, sizes[p] if isinstance(sizes, list) else sizes)


def assert_guards(pointers: Pointers) -> None:
    """Nothing was written beside the tensors."""
    for tensor in (t for t in pointers.tensors if t is not None):
        longer = tensor.as_strided((tensor.storage_offset() + tensor.numel() + GUARD,), (1,), 0)
        outside = [longer[: tensor.storage_offset()], longer[tensor.storage_offset() + tensor.numel() :]]
        assert all(bool((part == SENTINEL).all()) for part in outside)
