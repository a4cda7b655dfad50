"""Packed bits against numpy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onebit.kernels.data.bits import packed, unpacked


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (4097,), (3, 64), (2, 3, 13), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_bits_are_packed_as_numpy_packs_them_and_come_back(shape, dtype):
    bits = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    found = packed(bits.to(dtype))
    assert found.dtype == torch.uint8
    assert np.array_equal(found.numpy(), np.packbits(bits.numpy(), axis=-1, bitorder="little"))
    assert torch.equal(unpacked(found)[..., : shape[-1]], bits)
    assert not unpacked(found)[..., shape[-1] :].any()
