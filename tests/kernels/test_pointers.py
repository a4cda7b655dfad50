"""Tables of addresses: when they are rewritten, and what is refused with which words."""

import pytest
import torch

from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers

LAYOUT = Layout([6, 4, 3], block_size=32)


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor | None]:
    return [torch.zeros(2, 3, dtype=dtype), torch.zeros(4, dtype=dtype), torch.zeros(3, dtype=dtype)]


def replaced(index: int, tensor: torch.Tensor) -> list[torch.Tensor | None]:
    made = tensors()
    made[index] = tensor
    return made


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


def test_addresses_are_written_only_when_one_changed():
    made = tensors()
    pointers = Pointers.to(LAYOUT, made)
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


WRONG = {
    "dtype of the first": (
        lambda: Pointers.to(LAYOUT, tensors(torch.float64)),
        TypeError,
        ["torch.float64", "not supported", "torch.bfloat16", ".to(torch.float32)"],
    ),
    "integers": (
        lambda: Pointers(LAYOUT, torch.device("cpu"), torch.int32, "gradient"),
        TypeError,
        ["gradients of dtype torch.int32", "use one of"],
    ),
    "mixed dtypes": (
        lambda: Pointers.to(LAYOUT, replaced(1, torch.zeros(4, dtype=torch.bfloat16)), "gradient"),
        TypeError,
        ["gradient 1", "torch.bfloat16", "torch.float32", "Cast it"],
    ),
    "mixed devices": (
        lambda: Pointers.to(LAYOUT, replaced(2, torch.zeros(3, device="meta")), "parameter"),
        ValueError,
        ["parameter 2", "meta", "cpu", "move it with .to('cpu')"],
    ),
    "a parameter that is not contiguous": (
        lambda: Pointers.to(LAYOUT, replaced(0, torch.zeros(3, 2).t()), "parameter"),
        ValueError,
        ["parameter 0", "not contiguous", "(2, 3)", "(1, 2)", "in place", "parameter.contiguous()"],
    ),
    "a sparse gradient": (
        lambda: Pointers.to(LAYOUT, replaced(1, torch.zeros(4).to_sparse()), "gradient"),
        ValueError,
        ["gradient 1", "sparse", "every element", "sparse=False", "to_dense()"],
    ),
    "another number of elements": (
        lambda: Pointers.to(LAYOUT, replaced(1, torch.zeros(5)), "gradient"),
        ValueError,
        ["gradient 1", "5 elements", "holds 4", "build a new one"],
    ),
    "too few tensors": (
        lambda: Pointers.to(LAYOUT, tensors()[:2], "gradient"),
        ValueError,
        ["got 2 gradients", "3 parameters", "None where there is none"],
    ),
    "too many tensors": (
        lambda: Pointers.to(LAYOUT, [*tensors(), None], "gradient"),
        ValueError,
        ["got 4 gradients", "3 parameters"],
    ),
    "nothing but None": (
        lambda: Pointers.to(LAYOUT, [None, None, None], "gradient"),
        ValueError,
        ["no gradient", "got 3, none of them"],
    ),
    "an empty list": (
        lambda: Pointers.to(LAYOUT, [], "gradient"),
        ValueError,
        ["no gradient"],
    ),
}


@pytest.mark.parametrize("make, error, words", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_tensor_says_what_and_what_to_do(make, error, words):
    with pytest.raises(error) as raised:
        make()
    assert type(raised.value) is error
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_refused_list_leaves_the_table_as_it_was():
    made = tensors()
    pointers = Pointers.to(LAYOUT, made)
    with pytest.raises(ValueError):
        pointers.bind_tensors(replaced(2, torch.zeros(9)))
    assert pointers.addresses.tolist() == [t.data_ptr() for t in made]
    assert [t.data_ptr() for t in pointers.tensors] == pointers.addresses.tolist()
