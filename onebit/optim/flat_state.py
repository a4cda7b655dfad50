"""The parameters of one dtype and the tensors of an algorithm's fields for them, in flat buffers.

    field per "element"      fp32 [elements]        a parameter's part starts with a block, and lies as it does
    field per "slice"        fp32                   of every chunk this rank's slice, one after the other
    field per "bit"          uint8 [elements / 8]   as numpy.packbits(..., bitorder="little")
    field per "parameter"    fp32 [parameters]

Parameters and gradients are not copied: passes reach them through a table of addresses.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor

from onebit.collectives.topology import Topology
from onebit.kernels.backends import backend
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.layout import Layout, Span, block_size_of
from onebit.kernels.data.pointers import Pointers, written_by_address
from onebit.kernels.data.wire import Messages
from onebit.kernels.passes import StepSquares
from onebit.optim.fields import MASTER, Field
from onebit.optim.memory_order import as_stored, flattened, in_shape, order_of
from onebit.optim.sharding import is_sharded, local

_GRAD = attrgetter("grad")


class FlatState:
    """Layout, addresses and fields of the parameters of one dtype that are compressed in stage 2, or of those that are
    not."""

    def __init__(
        self,
        params: Sequence[Tensor],
        groups: Sequence[int],
        *,
        rows: Sequence[int] | None = None,
        block_size: int,
        ranks: int,
        slices: int = 1,
        slice_index: int = 0,
        chunk_counts: Iterable[int] = (1,),
        master_weights: bool = True,
        parts: Topology | None = None,
        fixed: Mapping[Tensor, Tensor] | None = None,
        compressed: bool = True,
    ) -> None:
        """groups: the param group of each parameter. rows: in stage 1 which row of numbers a parameter has, where that
        is not its group's. ranks: into how many shards a chunk is cut. slices: of how many
        slices of a chunk this rank has the one numbered slice_index. chunk_counts: the pipelines that there must be
        room for. parts: what to ask where other ranks hold parts of these parameters. fixed: of parameters with a mask,
        in the shape of this rank's part, which elements never move. compressed: whether in stage 2; otherwise the
        parameters stay in stage 1."""
        self.compressed = compressed
        self.params, self.groups = list(params), list(groups)
        self.rows = list(groups if rows is None else rows)
        self.device, self.dtype = params[0].device, params[0].dtype
        self.backend = backend(self.device)
        self._sharded = any(map(is_sharded, self.params))
        self.shapes = [tuple(local(p).shape) for p in self.params]
        self.orders = [order_of(local(p)) for p in self.params]
        self._permuted = any(order is not None for order in self.orders)
        self.numels = [local(p).numel() for p in self.params]
        self.whole_numels = [p.numel() for p in self.params]
        self.parts = parts
        self.fixed = [(fixed or {}).get(p) for p in self.params]
        self.block_size, self.ranks = block_size, ranks
        self.slices, self.slice_index = slices, slice_index
        cuts = {chunks: self._cut(chunks) for chunks in {1, *chunk_counts}}
        self._capacity = max(cut.elements for cut in cuts.values())
        self._slice_capacity = max(_size(cut.parts(slice_index, slices)) for cut in cuts.values())
        self._use(cuts[1])
        self.parameters = Pointers(self.layout, self.device, self.dtype, "parameter")
        self.gradients = Pointers(self.layout, self.device, self.dtype, "gradient")
        self._after_step: list[tuple[int, int]] = []  # or a load, of every parameter its version, and where it lies
        self.fields: dict[str, Field] = {}
        self._tensors: dict[str, Tensor] = {}
        self.scratch: dict[str, Tensor] = {}  # what passes work in, made for the present layout
        self.master_is_current = False  # whether the master copy, and not the parameters, says where a run has come to
        if master_weights and self.dtype != torch.float32:
            self.add(MASTER)
            self._after_step = list(map(_place_of, self.values_now()))

    @cached_property
    def fixed_indices(self) -> dict[int, Tensor]:
        """int64, of the elements that never move, as they lie; by the place of a parameter with such."""
        masks = {i: fixed for i, fixed in enumerate(self.fixed) if fixed is not None}
        return {i: flattened(fixed, self.orders[i]).nonzero().view(-1) for i, fixed in masks.items()}

    @property
    def free(self) -> Tensor | None:
        """bool [elements], where an element may move; None where all may."""
        if not self.fixed_indices:
            return None
        found = torch.ones(self.layout.elements, dtype=torch.bool, device=self.device)
        for i, indices in self.fixed_indices.items():
            self.elements_of(found, i).index_fill_(0, indices, False)
        return found

    def set_chunks(self, chunks: int) -> None:
        """Cut the flat space for a pipeline of `chunks`. Parameters stay where they lie in it; padding changes."""
        layout = self._cut(chunks)
        if layout.elements > self._capacity:
            raise AssertionError(f"there is no room for {chunks} chunks")
        self._use(layout)

    def add(self, field: Field) -> Tensor:
        """A tensor for `field`, filled with its initial value."""
        dtype = torch.uint8 if field.per == "bit" else torch.float32
        size = self._slice_capacity if field.per == "slice" else self._length(field, self._capacity)
        self._tensors[field.name] = torch.full((size,), field.initial, dtype=dtype, device=self.device)
        self.fields[field.name] = field
        self._views.clear()
        return self[field.name]

    def remove(self, name: str) -> None:
        del self.fields[name], self._tensors[name]
        self._views.clear()

    def rename(self, name: str, field: Field) -> Tensor:
        """The buffer of `name` becomes that of `field`, at the same place in the order. A field of this rank's slice
        keeps the slice of it."""
        kept = self._tensors[name]
        if field.per == "slice" and self.slices > 1:
            kept = torch.cat([span.of(kept) for span in self.slice_spans])
        self.fields = {(field.name if k == name else k): (field if k == name else f) for k, f in self.fields.items()}
        del self._tensors[name]
        self._tensors[field.name] = kept
        self._views.clear()
        return self[field.name]

    @property
    def slice_spans(self) -> list[Span]:
        """The span that this rank compresses of every chunk; with one level all of it."""
        return self.layout.parts(self.slice_index, self.slices)

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def __getitem__(self, name: str) -> Tensor:
        """The whole field, as long as the layout is."""
        found = self._views.get(name)
        if found is None:
            field = self.fields[name]
            elements = self.layout.elements
            size = _size(self.slice_spans) if field.per == "slice" else self._length(field, elements)
            found = self._views[name] = self._tensors[name][:size]
        return found

    def get(self, name: str) -> Tensor | None:
        return self[name] if name in self.fields else None

    def part(self, name: str, span: Span) -> Tensor | None:
        """A span's part of a field with one number an element, if there is the field."""
        return span.of(self[name]) if name in self.fields else None

    def view(self, name: str, index: int) -> Tensor:
        """One parameter's part of a field: in the parameter's shape, one number, or packed bits."""
        per, tensor = self.fields[name].per, self._tensors[name]
        assert per != "slice" or self.slices == 1, f"{name} is not kept for whole parameters: see pieces"
        if per == "parameter":
            return tensor[index]
        start = int(self.layout.offset[index])
        if per == "bit":
            return tensor[start // 8 : start // 8 + -(-self.numels[index] // 8)]
        return self.cut(tensor, index)

    def cut(self, flat: Tensor, index: int) -> Tensor:
        """One parameter's part of a flat tensor with one number an element, in the parameter's shape."""
        return in_shape(self.elements_of(flat, index), self.shapes[index], self.orders[index])

    def elements_of(self, flat: Tensor, index: int) -> Tensor:
        """The same, one element after the other as they lie in memory."""
        start = int(self.layout.offset[index])
        return flat[start : start + self.numels[index]]

    def parts_of(self, name: str, index: int) -> list[tuple[slice, Tensor]]:
        """Which elements of a parameter, as they lie in memory, a field has on this rank, and their part of it."""
        if self.fields[name].per == "slice" and self.slices > 1:
            return pieces(self.slice_spans, self[name], index)
        return [(slice(0, self.numels[index]), self.elements_of(self[name], index))]

    def hyper_of(self, index: int, hyper: Tensor) -> Hyper:
        """The numbers of a parameter's group, each a tensor of one element on the device."""
        return Hyper(*hyper[self.rows[index]].unbind())  # type: ignore[arg-type]

    def gradient(self, index: int, hyper: Tensor) -> Tensor:
        """A parameter's gradient as the step is to see it: fp32, unscaled and clipped; zeros where there is none."""
        grad = self.gradients_now()[index]
        if grad is None:
            return torch.zeros(self.shapes[index], dtype=torch.float32, device=self.device)
        return grad.float() * self.hyper_of(index, hyper).grad_scale

    def value(self, index: int) -> Tensor:
        """What an update changes: the parameter, or its master copy. `store` is due afterwards."""
        return self.view(MASTER.name, index) if MASTER.name in self else local(self.params[index]).detach()

    def store(self, index: int) -> None:
        """The parameter becomes its master copy, where it has one."""
        if MASTER.name in self:
            local(self.params[index]).detach().copy_(self.view(MASTER.name, index))

    def copy_parameter_from(self, index: int, other: FlatState, index_there: int) -> None:
        """Go on with a parameter's fields from another flat state of the same stage."""
        if self.shapes[index] != other.shapes[index_there]:
            raise ValueError(
                f"a parameter had shape {other.shapes[index_there]} and has {self.shapes[index]} now: its state is of "
                f"no use. Build a new optimizer after changing the shape of a parameter"
            )
        for name in self.fields:
            if name in other:
                self.view(name, index).copy_(other.view(name, index_there))

    def of_parameters(self, values: Tensor, replies: Messages | None = None, weight: Tensor | None = None) -> Tensor:
        """fp64 [parameters]: numbers of every block, fp32, added up. See `StepSquares`."""
        found = torch.empty(len(self.params), dtype=torch.float64, device=self.device)
        self.backend.run(StepSquares(self.layout.all(), values, replies, weight, found))
        return found

    def add_parts(self, values: Tensor) -> Tensor:
        """What this rank has of its parts of the parameters, added up over all parts."""
        return values if self.parts is None else self.parts.add_parts(values)

    def values_now(self) -> list[Tensor]:
        """This rank's part of every parameter."""
        return [local(p) for p in self.params] if self._sharded else self.params

    def gradients_now(self) -> list[Tensor | None]:
        grads = list(map(_GRAD, self.params))
        return [None if g is None else local(g) for g in grads] if self._sharded else grads

    def stored(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """View one tensor a parameter so that it is contiguous if it lies as its parameter does."""
        if not self._permuted:
            return tensors
        return [None if t is None else as_stored(t, order) for t, order in zip(tensors, self.orders, strict=True)]

    def lay_out_gradients(self) -> list[Tensor]:
        """Each one as it lies. Zeros where there is none; one that lies otherwise than its parameter becomes a copy."""
        grads = []
        for i, grad in enumerate(self.fill_missing_gradients()):
            own = as_stored(grad, self.orders[i])
            if not own.is_contiguous():
                own = own.contiguous()
                self.params[i].grad = in_shape(own.view(-1), self.shapes[i], self.orders[i])
            grads.append(own)
        return grads

    def fill_missing_gradients(self) -> list[Tensor]:
        """Zeros where there is none: on other ranks it may be there."""
        for p in self.params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        return [local(p.grad) for p in self.params if p.grad is not None]

    def bind_tensors(self) -> None:
        """Point passes to the parameters and gradients as they lie now."""
        try:
            self.parameters.bind_tensors(self.stored(self.values_now()))
        except TypeError as error:
            raise TypeError(
                f"{error}. The model was cast (model.to(dtype), .half()) after the first step: cast the model before, "
                f"or go on with optimizer.load_state_dict(optimizer.state_dict())"
            ) from error
        self.take_over_writes()
        self.gradients.bind_tensors(self.stored(self.gradients_now()))

    def take_over_writes(self) -> None:
        """What was written to a 16-bit parameter since the last step or load (a mask, a clipped weight, other weights)
        goes into the master copy; other elements keep theirs. Before anything reads that copy."""
        if MASTER.name in self:
            for i, (p, before) in enumerate(zip(self.values_now(), self._after_step, strict=True)):
                master = self.view(MASTER.name, i)
                if _place_of(p) != before and (p.dtype, p.shape, p.is_meta) == (self.dtype, master.shape, False):
                    now = p.detach().to(self.device)
                    master.copy_(torch.where(master.to(self.dtype) == now, master, now.float()))

    def release_gradients(self) -> None:
        """Keep no gradient alive until the next step."""
        self.gradients.release()
        if MASTER.name in self:
            self._after_step = list(map(_place_of, self.values_now()))

    def parameters_were_written(self) -> None:
        """Note that the optimizer has written: autograd learns of it, and it counts as no change by the user."""
        written_by_address([*self.values_now(), *(self.params if self._sharded else ())])
        if self._after_step:
            self._after_step = [(version + 1, address) for version, address in self._after_step]

    def copy_parameters_to_master(self) -> None:
        if MASTER.name in self:
            for i, p in enumerate(self.values_now()):
                self.view(MASTER.name, i).copy_(p.detach())
        self.master_is_current = True

    def group_blocks(self, groups: int) -> list[tuple[int, int]]:
        """Blocks [first, stop) of each param group."""
        ends = [*self.layout.first.tolist(), self.layout.used_blocks]
        return [(ends[bisect_left(self.groups, g)], ends[bisect_right(self.groups, g)]) for g in range(groups)]

    def _length(self, field: Field, elements: int) -> int:
        return {"element": elements, "parameter": len(self.params), "bit": elements // 8}[field.per]

    def _cut(self, chunks: int) -> Layout:
        return Layout(
            self.numels,
            groups=self.rows,
            block_size=self.block_size,
            block_sizes=[block_size_of(shape, self.block_size) for shape in self.shapes],
            ranks=self.ranks,
            chunks=chunks,
        )

    def _use(self, layout: Layout) -> None:
        """Use a layout, and make its table now, in this stream: the first pass may run in another, whose memory it
        would be."""
        self.layout = layout
        self._views: dict[str, Tensor] = {}  # of fields, as long as the layout is
        layout.table(self.device)


def _place_of(parameter: Tensor) -> tuple[int, int]:
    """Its version and address, one of which is another when it was written to."""
    return parameter._version, parameter.data_ptr()


def _size(spans: Sequence[Span]) -> int:
    return sum(span.elements for span in spans)


def pieces(spans: Sequence[Span], flat: Tensor, index: int) -> list[tuple[slice, Tensor]]:
    """Find a parameter in a flat tensor that has some spans' elements one after the other: which elements, and
    where."""
    found, start = [], 0
    for span in spans:
        own = flat[start : start + span.elements]
        found += [(s, own[at : at + s.stop - s.start]) for s, at in span.of_parameter(index)]
        start += span.elements
    return found
