"""The codec at work on layers of very different scale: bytes, errors, and what error feedback is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onebit.kernels import backend
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format, Scale

TYPICAL = (1.0, 0.03, 0.001)
NUMEL = 2**18
STEPS = 50
SHOWN = (1, 2, 5, 10, 20, 50)


class Codec:
    """Compresses a list of tensors into one message and decodes it, as a rank does with its momentum."""

    def __init__(self, numels: Sequence[int], scale: Scale) -> None:
        self.device = torch.device("cpu")
        self.layout = Layout(numels)
        self.message = Format(self.layout, scale).empty(1)
        self.residual = Residual.zeros(self.layout.all(), self.message.format)

    @property
    def nbytes(self) -> int:
        return self.message.format.nbytes

    def __call__(self, values: Sequence[Tensor]) -> list[Tensor]:
        """What arrives of `values`. What is left out is kept, and added to the next ones."""
        run, span = backend(self.device), self.layout.all()
        source = Pointers.to(self.layout, values, "gradient")
        flags = torch.zeros(1, dtype=torch.int32)
        run.compress(
            span,
            source,
            momentum=None,
            residual=self.residual,
            hyper=hyper_table([Hyper()]),
            flags=flags,
            out=self.message,
        )
        arrived = [torch.empty_like(v) for v in values]
        run.decode(span, self.message, Pointers.to(self.layout, arrived))
        return arrived

    def forget(self) -> None:
        """Drop what was left out so far."""
        self.residual.value.zero_()
        if self.residual.scale is not None:
            self.residual.scale.zero_()


@dataclass(frozen=True)
class Findings:
    values: int
    message_bytes: int
    block_errors: list[float]  # one message, a layer each
    tensor_errors: list[float]
    with_feedback: list[float]  # the sum of the first t messages, against the sum of what went in
    without_feedback: list[float]


def measure() -> Findings:
    source = torch.Generator().manual_seed(0)
    signal = [torch.randn(NUMEL, generator=source) * size for size in TYPICAL]
    numels = [NUMEL] * len(TYPICAL)
    block, tensor = Codec(numels, "block"), Codec(numels, "tensor")
    once = [[_relative(a - x, x) for a, x in zip(codec(signal), signal, strict=True)] for codec in (block, tensor)]
    keeping, dropping = Codec(numels, "block"), Codec(numels, "block")
    sent, kept, dropped = (torch.zeros(NUMEL * len(TYPICAL)) for _ in range(3))
    with_feedback, without_feedback = [], []
    for _ in range(STEPS):
        values = [s + 2 * t * torch.randn(NUMEL, generator=source) for s, t in zip(signal, TYPICAL, strict=True)]
        dropping.forget()
        for total, part in ((sent, values), (kept, keeping(values)), (dropped, dropping(values))):
            total += torch.cat([p / t for p, t in zip(part, TYPICAL, strict=True)])  # every layer counts alike
        with_feedback.append(_relative(kept - sent, sent))
        without_feedback.append(_relative(dropped - sent, sent))
    return Findings(
        values=NUMEL * len(TYPICAL),
        message_bytes=block.nbytes,
        block_errors=once[0],
        tensor_errors=once[1],
        with_feedback=with_feedback,
        without_feedback=without_feedback,
    )


def describe(found: Findings) -> str:
    return "\n\n".join((_size(found), _errors(found), _feedback(found)))


def plot(found: Findings, path: Path) -> None:
    """Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    where = range(len(TYPICAL))
    left.bar([i - 0.2 for i in where], found.block_errors, 0.4, label="a scale a block (onebit)", color="#1f77b4")
    left.bar([i + 0.2 for i in where], found.tensor_errors, 0.4, label="one scale for all", color="#bbbbbb")
    left.set(
        yscale="log", ylim=(0.1, None), ylabel="relative error of one message", xlabel="typical value in the layer"
    )
    left.set_xticks(list(where), [f"{t:g}" for t in TYPICAL])
    left.legend()
    steps = range(1, len(found.with_feedback) + 1)
    right.loglog(steps, found.with_feedback, label="with error feedback (onebit)", color="#1f77b4")
    right.loglog(steps, found.without_feedback, label="without", color="#bbbbbb")
    right.set(xlabel="messages", ylabel="relative error of their sum")
    right.set_xticks(SHOWN, [str(t) for t in SHOWN])
    right.set_yticks((0.05, 0.1, 0.2, 0.5), ("0.05", "0.1", "0.2", "0.5"))
    right.minorticks_off()
    right.legend()
    ratio = 4 * found.values / found.message_bytes
    figure.suptitle(f"1 bit a value: {ratio:.1f} times less than float32 on the wire")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _size(found: Findings) -> str:
    full, half, ours = 4 * found.values, 2 * found.values, found.message_bytes
    return (
        f"{len(TYPICAL)} layers, {found.values:,} values. A message holds the sign of each value (1 bit),\n"
        f"and for every block of {Layout([1]).block_size} values one scale: their mean size.\n\n"
        f"  sent as     bytes\n"
        f"  float32     {full:>9,}\n"
        f"  float16     {half:>9,}\n"
        f"  1 bit       {ours:>9,}    {full / ours:.1f} times less than float32, {half / ours:.1f} than float16"
    )


def _errors(found: Findings) -> str:
    rows = "\n".join(
        f"  {t:<15g} {b:<18.3f} {s:.3f}"
        for t, b, s in zip(TYPICAL, found.block_errors, found.tensor_errors, strict=True)
    )
    return (
        "The error of one message, relative to the layer's own size:\n\n"
        "  typical value   a scale a block    one scale for all layers\n"
        f"{rows}\n\n"
        f"One scale for all suits the largest layer; in the smallest the error is {found.tensor_errors[-1]:,.0f} "
        "times what was sent.\nWith a scale a block every layer is treated alike."
    )


def _feedback(found: Findings) -> str:
    rows = "\n".join(
        f"  {t:<10} {found.with_feedback[t - 1]:<17.3f} {found.without_feedback[t - 1]:.3f}" for t in SHOWN
    )
    return (
        "One message is rough, but what it leaves out is added to the next one (error feedback), so that\n"
        "nothing is lost for good. The error of the sum of all messages so far:\n\n"
        f"  messages   with feedback     without\n{rows}"
    )


def _relative(error: Tensor, exact: Tensor) -> float:
    return float(error.norm() / exact.norm())
