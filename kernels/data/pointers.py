"""Tables of addresses, through which kernels read and write parameters and gradients without a flat copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter, is_not, methodcaller
from typing import Any

import torch
from torch import Tensor

from onebit.kernels.data.layout import Layout
from onebit.kernels.data.record import Record
from onebit.kernels.data.upload import Upload

_ADDRESS = methodcaller("data_ptr")
_IS_THERE = partial(is_not, None)
_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def written_by_address(tensors: Sequence[Tensor]) -> None:
    """Autograd does not see what passes write: with this a graph that has kept a value says so in its backward pass."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # some are made in inference mode, and count nothing
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def are_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Return whether every one has its elements side by side. A sparse one says no, or refuses to say."""
    try:
        return all(map(Tensor.is_contiguous, tensors))
    except RuntimeError:
        return False


class Pointers(Record):
    """One tensor a parameter (None counts as zeros), and their addresses on the device.

    `bind_tensors` is called each step with the tensors of that step; the address table is rewritten only when an
    address changed.
    """

    def __init__(self, layout: Layout, device: torch.device, dtype: torch.dtype, what: str = "tensor") -> None:
        if dtype not in DTYPES:
            raise TypeError(
                f"{what}s of dtype {dtype} are not supported: use one of {', '.join(map(str, DTYPES))} "
                f"(for example with {what}.to(torch.float32))"
            )
        self.layout, self.dtype, self.what = layout, dtype, what
        self.tensors: list[Tensor | None] = [None] * layout.parameters
        self.addresses = torch.zeros(layout.parameters, dtype=torch.int64, device=device)
        self.device = self.addresses.device  # "cuda" is one of several
        self._upload = Upload()
        self._numels: list[int] = layout.numel.tolist()

    @classmethod
    def to(cls, layout: Layout, tensors: Sequence[Tensor | None], what: str = "tensor") -> Pointers:
        """A table for these tensors, whose device and dtype are those of the first that is not None."""
        first = next((t for t in tensors if t is not None), None)
        if first is None:
            raise ValueError(f"no {what} to point to: got {len(tensors)}, none of them a tensor. Pass at least one")
        pointers = cls(layout, first.device, first.dtype, what)
        pointers.bind_tensors(tensors)
        return pointers

    def arguments(self, name: str) -> dict[str, Any]:
        return {name: self.addresses, f"{name}_dtype": self.dtype}

    def bind_tensors(self, tensors: Sequence[Tensor | None]) -> None:
        """Point to `tensors`, one a parameter of the layout."""
        if len(tensors) != len(self._numels):
            raise ValueError(
                f"got {len(tensors)} {self.what}s for a layout of {self.layout.parameters} parameters: pass one "
                f"for each, None where there is none"
            )
        readable = self._are_readable(tensors)
        self.tensors = list(tensors) if readable else [self._readable(i, t) for i, t in enumerate(tensors)]
        try:
            addresses = list(map(_ADDRESS, filter(_IS_THERE, self.tensors)))
            if len(addresses) < len(self.tensors):
                addresses = [0 if t is None else t.data_ptr() for t in self.tensors]
        except RuntimeError:  # a layout without addresses, of which torch says that it is contiguous
            for i, t in enumerate(tensors):
                self._readable(i, t)
            raise
        self._upload.write(addresses, self.addresses)

    def release(self) -> None:
        """Keep no tensor alive; the addresses stay, and `bind_tensors` is due before the next use."""
        self.tensors = [None] * len(self._numels)

    def _are_readable(self, tensors: Sequence[Tensor | None]) -> bool:
        """Asked of hundreds of tensors in every step: of all at once, in a third of the time."""
        there: list[Tensor] = list(filter(_IS_THERE, tensors))  # type: ignore[arg-type]
        numels = self._numels
        if len(there) < len(tensors):
            numels = [n for n, t in zip(numels, tensors, strict=True) if t is not None]
        return (
            are_contiguous(there)
            and set(map(_DTYPE, there)) <= {self.dtype}
            and set(map(_DEVICE, there)) <= {self.device}
            and list(map(Tensor.numel, there)) == numels
        )

    def _readable(self, index: int, tensor: Tensor | None) -> Tensor | None:
        """One tensor; what is wrong is told where something is."""
        if tensor is None:
            return None
        name = f"{self.what} {index}"
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name} has layout {tensor.layout}: compression needs every element. Make it dense, for "
                f"example with nn.Embedding(..., sparse=False) or {self.what}.to_dense()"
            )
        if tensor.dtype != self.dtype:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}, and had {self.dtype} when the table of addresses was made: "
                f"kernels read one dtype. Cast it back, or make a new table"
            )
        if tensor.device != self.device:
            raise ValueError(
                f"{name} is on {tensor.device} where the others are on {self.device}: move it with "
                f".to({str(self.device)!r}) first"
            )
        if tensor.numel() != self._numels[index]:
            raise ValueError(
                f"{name} has {tensor.numel()} elements where the layout holds {self._numels[index]}: the "
                f"sizes are fixed when the layout is made; build a new one after changing a parameter"
            )
        return tensor if tensor.is_contiguous() else self._made_contiguous(name, tensor)

    def _made_contiguous(self, name: str, tensor: Tensor) -> Tensor:
        if self.what == "gradient":  # only read, so a copy will do
            return tensor.detach().contiguous()
        raise ValueError(
            f"{name} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}): kernels update it "
            f"in place by its address. Use {self.what}.contiguous(), and copy back where it is a view"
        )
