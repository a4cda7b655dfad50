"""Synthetic arguments: what a run moves, and that running does not spoil them."""

import pytest
import torch

from onebit.kernels import cpu
from onebit.kernels.passes import PASSES, Storage, bytes_per_element
from onebit.kernels.tuning.workload import MADE, Workload
from tests.kernels.compare import frozen_bits, tensors_of

# TARGETS, "Bytes moved per element", and the modules' docstrings.
FP32 = {
    "scan": 4, "compress": 12.25, "average": 8 / 8 + 8.125, "decode": 4.125,
    "quantize": 8.5, "average_codes": 8 / 2 + 4.5, "dequantize": 4.5, "adam_warmup": 28, "adam_update": 12.125,
    "lamb_warmup": 40, "lamb_statistics": 12.25, "lamb_update": 12.125, "zero_one_full": 28.25,
    "zero_one_inverses": 4, "zero_one_update": 12.125, "zero_one_length": 12, "zero_one_local": 32,
    "zero_one_sync": 20.125,
}  # fmt: skip


# Of 16-bit parameters with a master copy: an update writes 2 more; the gradient is 2 shorter.
FP16 = [
    ("scan", {}, 2), ("compress", {}, 10.25), ("compress", {"packed": False}, 2 + 4 + 4 + 4 + 1 / 8),
    ("adam_update", {}, 14.125), ("adam_update", {"master": False}, 1 / 8 + 4 + 2 + 2), ("adam_warmup", {}, 28),
    ("lamb_warmup", {}, 40), ("lamb_statistics", {"packed": False}, 1 / 8 + 4 + 12), ("decode", {}, 2.125),
    ("zero_one_full", {}, 28.25), ("zero_one_full", {"packed": False}, 2 + 4 + 8 + 8 + 1 / 8 + 8 + 2),
    ("zero_one_local", {}, 2 + 4 + 8 + 8 + 8 + 2), ("zero_one_local", {"master": False}, 2 + 8 + 8 + 8),
    ("zero_one_sync", {}, 1 / 8 + 4 + 8 + 4 + 4 + 2), ("zero_one_sync", {"master": False}, 1 / 8 + 8 + 4 + 4 + 2),
    ("compress", {"masked": True}, 10.25 + 1 / 8), ("average", {"masked": True}, 8 / 8 + 8.125 + 1 / 8),
    ("quantize", {"bits": 8}, 2 + 4 + 1), ("quantize", {"kept": True}, 2 + 6 + 1 / 2),
    ("average_codes", {"bits": 8}, 8 + 5), ("dequantize", {"bits": 8, "senders": 2}, 2 + 2),
    ("lamb_statistics", {"masked": True}, 12.25 + 1 / 8), ("adam_update", {"masked": True}, 14.125),
]  # fmt: skip


def test_bytes_are_those_of_the_targets_of_valid_elements_and_of_average_those_of_a_shard():
    fp32 = Workload(1).storage
    assert {n: bytes_per_element(n, fp32) for n in PASSES} == FP32
    for name, options, nbytes in FP16:
        usual = {"master": True, "packed": True, "ranks": 8}
        assert bytes_per_element(name, Storage(2, **{**usual, **options})) == nbytes, (name, options)
    with pytest.raises(ValueError, match="no pass"):
        bytes_per_element("adam", fp32)
    workload = Workload([1, 2049, 5000], ranks=2, block_size=1024)
    passes = workload.passes(cpu)
    assert list(passes) == list(PASSES)
    assert passes["compress"].bytes == round(12.25 * 7050)
    # Blocks: 1, 3, 5 and one of padding. The first shard holds the first five of them.
    assert workload.shard.count == 5
    assert passes["average"].bytes == round((2 / 8 + 8.125) * (1 + 2049 + 1024))


@pytest.mark.parametrize("dtype, scale, packed", [(torch.float32, "block", True), (torch.bfloat16, "tensor", False)])
def test_values_stay_of_their_size(dtype, scale, packed):
    """Nothing overflows, and nothing decays to zeros or denormals."""
    workload = Workload([7, 3000], dtype=dtype, scale=scale, packed=packed, ranks=2)
    for work in workload.passes(cpu).values():
        for _ in range(100):
            work.run()
    for name, tensor in tensors_of(workload).items():
        if tensor.is_floating_point():
            size = tensor.float().abs()
            assert size.isfinite().all(), name
            assert size.max() < (2 * 2048 if name in ("squares", "sums", "counts") else 100), name
            assert size.mean() > 1e-3, name


def test_two_workloads_are_equal_and_random():
    """Two backends can be compared so; the order in which the buffers are made does not matter."""
    one, other = Workload([5, 4100], ranks=2), Workload([5, 4100], ranks=2)
    names = sorted(MADE)
    for workload, order in ((one, names), (other, reversed(names))):
        assert [getattr(workload, name) for name in order]
    assert all(frozen_bits(one.buffers[name]) == frozen_bits(other.buffers[name]) for name in names)
    assert not torch.equal(one.params.tensors[1], one.grads.tensors[1])
