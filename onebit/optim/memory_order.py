"""How the elements of a dense tensor lie in memory, which is their order in the flat space.

An order has the dimensions from the one with the largest stride on: (0, 2, 3, 1) for channels_last. None is that of a
contiguous tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Order = tuple[int, ...] | None


def order_of(tensor: Tensor) -> Order:
    """Equal for tensors of one shape whose elements lie in the same order."""
    if tensor.is_contiguous():
        return None
    shape, stride = tensor.shape, tensor.stride()
    large = sorted((d for d in range(tensor.ndim) if shape[d] != 1), key=lambda d: -stride[d])
    return (*large, *(d for d in range(tensor.ndim) if shape[d] == 1))


def is_dense(tensor: Tensor) -> bool:
    """Return whether its elements fill their memory, each in a place of its own."""
    return as_stored(tensor.detach(), order_of(tensor)).is_contiguous()


def as_stored(tensor: Tensor, order: Order) -> Tensor:
    """A view of the same memory; contiguous, if the tensor lies in this order."""
    return tensor if order is None else tensor.permute(order)


def in_shape(flat: Tensor, shape: Sequence[int], order: Order) -> Tensor:
    """Elements that lie one after the other in this order, as a view of this shape."""
    if order is None:
        return flat.view(tuple(shape))
    back = [order.index(d) for d in range(len(order))]
    return flat.view([shape[d] for d in order]).permute(back)


def flattened(values: Tensor, order: Order) -> Tensor:
    """Elements one after the other in this order. Those of a vector are so already."""
    return (values if values.ndim < 2 else as_stored(values, order)).reshape(-1)
