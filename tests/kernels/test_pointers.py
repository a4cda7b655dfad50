"""Tables of addresses: when they are rewritten, and what is refused with which words."""

import pytest
import torch

from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers

LAYOUT = Layout([6, 4, 3], block_size=32)


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor | None]:
    return [torch.zeros(2, 3, dtype=dtype), torch.zeros(4, dtype=dtype), torch.zeros(3, dtype=dtype)]


def replaced(index: int, tensor: torch.Tensor) -> list[torch.Tensor | None]:
    return [tensor if i == index else of for i, of in enumerate(tensors())]


class CountingTensor(torch.Tensor):
    """Counts how often it is written."""

    writes = 0

    def copy_(self, *args, **kwargs):
        self.writes += 1
        return super().copy_(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_addresses_are_those_of_the_tensors_and_zero_of_none(dtype):
    made = tensors(dtype)
    pointers = Pointers.to(LAYOUT, made)
    assert pointers.dtype == dtype and pointers.addresses.dtype == torch.int64
    assert pointers.addresses.tolist() == [t.data_ptr() for t in made]
    pointers.bind_tensors([None, *made[1:]])
    assert pointers.addresses.tolist() == [0, *(t.data_ptr() for t in made[1:])] and pointers.tensors[0] is None
    pointers.bind_tensors(made)
    assert pointers.addresses.tolist() == [t.data_ptr() for t in made]


def test_addresses_are_written_only_when_one_changed_and_a_refused_list_leaves_them():
    made = tensors()
    pointers = Pointers.to(LAYOUT, made)
    with pytest.raises(ValueError):
        pointers.bind_tensors(replaced(2, torch.zeros(9)))
    assert pointers.addresses.tolist() == [t.data_ptr() for t in made]
    assert [t.data_ptr() for t in pointers.tensors] == pointers.addresses.tolist()
    pointers.addresses = pointers.addresses.as_subclass(CountingTensor)
    pointers.bind_tensors(made)
    pointers.bind_tensors([t.view_as(t) for t in made])
    assert pointers.addresses.writes == 0
    pointers.bind_tensors([made[0], torch.zeros(4), made[2]])
    assert pointers.addresses.writes == 1


def test_views_gradients_that_are_not_contiguous_and_empty_tensors():
    """A view points to its own first element; what is not contiguous is copied in logical order."""
    bucket = torch.zeros(20)
    pointers = Pointers.to(LAYOUT, [bucket[1:7].view(2, 3), bucket[7:11], bucket[11:14].requires_grad_()], "parameter")
    assert [a - bucket.data_ptr() for a in pointers.addresses.tolist()] == [4, 28, 44]
    assert not any(t.requires_grad for t in pointers.tensors)
    gradient = torch.arange(6.0).view(3, 2).t()
    pointers = Pointers.to(LAYOUT, replaced(0, gradient), "gradient")
    copy = pointers.tensors[0]
    assert copy.is_contiguous() and copy.flatten().tolist() == [0, 2, 4, 1, 3, 5]
    assert pointers.addresses[0] == copy.data_ptr() != gradient.data_ptr()
    assert Pointers.to(Layout([0, 2], block_size=32), [torch.zeros(0), torch.zeros(2)]).tensors[0].numel() == 0


@pytest.mark.parametrize("what, made, error, words", [
    ("tensor", tensors(torch.float64), TypeError,
     ["torch.float64", "not supported", "torch.bfloat16", ".to(torch.float32)"]),
    ("gradient", tensors(torch.int32), TypeError, ["gradients of dtype torch.int32", "use one of"]),
    ("gradient", replaced(1, torch.zeros(4, dtype=torch.bfloat16)), TypeError,
     ["gradient 1", "torch.bfloat16", "torch.float32", "Cast it"]),
    ("parameter", replaced(2, torch.zeros(3, device="meta")), ValueError,
     ["parameter 2", "meta", "cpu", "move it with .to('cpu')"]),
    ("parameter", replaced(0, torch.zeros(3, 2).t()), ValueError,
     ["parameter 0", "not contiguous", "(2, 3)", "(1, 2)", "in place", "parameter.contiguous()"]),
    ("gradient", replaced(1, torch.zeros(4).to_sparse()), ValueError,
     ["gradient 1", "sparse", "every element", "sparse=False", "to_dense()"]),
    ("gradient", replaced(1, torch.zeros(5)), ValueError, ["gradient 1", "5 elements", "holds 4", "build a new one"]),
    ("gradient", tensors()[:2], ValueError, ["got 2 gradients", "3 parameters", "None where there is none"]),
    ("gradient", [*tensors(), None], ValueError, ["got 4 gradients", "3 parameters"]),
    ("gradient", [None, None, None], ValueError, ["no gradient", "got 3, none of them"]),
    ("gradient", [], ValueError, ["no gradient"]),
])  # fmt: skip
def test_a_wrong_tensor_says_what_and_what_to_do(what, made, error, words):
    with pytest.raises(error) as raised:
        Pointers.to(LAYOUT, made, what)
    assert type(raised.value) is error
    assert all(word in str(raised.value) for word in words), raised.value
