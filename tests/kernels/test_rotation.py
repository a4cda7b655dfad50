"""norm="rotated": the rotation is one, it looks random, and what is left out is less where few elements are large."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebit.kernels.data import rotation
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format
from tests import oracle
from tests.kernels.cases import ON_BACKENDS, backend, device_of
from tests.kernels.test_passes_properties import FEW, Compressor, sent_values


def test_the_signs_that_are_turned_look_random() -> None:
    """No row of Hadamard's matrix, which is what a block of one value becomes, is near to them."""
    turned = np.array([oracle.turned(i) for i in range(16384)])
    assert np.array_equal(rotation.flips(), turned < 0)
    assert np.array_equal(rotation.packed_flips(), np.packbits(turned < 0, bitorder="little"))
    for length in (32, 256, 2048):
        for start in range(0, 16384, length):
            found = np.abs(oracle.rotation(length) @ (turned[:length] * turned[start : start + length])).max()
            assert found < np.sqrt(2 * length * np.log(2 * len(turned)))


@ON_BACKENDS
@given(st.integers(0, 2**32 - 1), st.integers(1, 100), st.integers(1, 8))
@FEW
def test_over_steps_what_was_sent_and_what_is_left_is_what_was_given(
    name: str, seed: int, numel: int, steps: int
) -> None:
    rng, compress = np.random.default_rng(seed), Compressor(name, numel, norm="rotated")
    given_, sent = np.zeros(numel), np.zeros(numel)
    for _ in range(steps):
        values = rng.normal(size=numel).astype(np.float32)
        sent += sent_values(compress(values))[:numel]
        given_ += values
    assert np.allclose(sent + compress.left(), given_, rtol=0, atol=2e-5 * steps)


@ON_BACKENDS
@given(st.integers(0, 2**32 - 1), st.integers(1, 100), st.sampled_from([1.0, 1e-12, 1e12]))
@FEW
def test_what_is_left_out_is_orthogonal_to_what_was_given(name: str, seed: int, numel: int, size: float) -> None:
    values = (size * np.random.default_rng(seed).standard_t(2, size=numel)).astype(np.float32)
    compress = Compressor(name, numel, norm="rotated")
    compress(values)
    left = compress.left().astype(np.float64)
    for start in range(0, numel, 32):
        block = values[start : start + 32].astype(np.float64)
        assert abs(block @ left[start : start + 32]) <= 1e-5 * (block @ block)


def compressed(name: str, values: np.ndarray, norm: str) -> np.ndarray:
    """What a message of blocks of 2,048 leaves out."""
    layout, device = Layout([len(values)]), torch.device(device_of(name))
    form = Format(layout, norm=norm)  # type: ignore[arg-type]
    residual, zeros = Residual.zeros(layout.all(), form, device), torch.zeros(1, dtype=torch.int32, device=device)
    grads = Pointers.to(layout, [torch.from_numpy(values).float().to(device)], "gradient")
    hyper = Compressor(name, 1).hyper
    backend(name).compress(layout.all(), grads, None, residual, hyper, zeros, form.empty(1, device))
    return residual.value.double().cpu().numpy()[: len(values)]


@ON_BACKENDS
@pytest.mark.parametrize("numel", [2048, 5120])
def test_few_large_elements_make_no_noise_in_all_others(name: str, numel: int) -> None:
    """A normally distributed block leaves pi / 2 - 1 of its squares out, and a rotated one is nearly that."""
    source = np.random.default_rng(0)
    values = source.normal(size=numel) * np.where(source.random(numel) < 0.02, 30.0, 1.0)
    share = {norm: (compressed(name, values, norm) ** 2).sum() / (values**2).sum() for norm in ("rotated", "unbiased")}
    assert 0.5 < share["rotated"] < 0.65 < 2 < share["unbiased"]


@ON_BACKENDS
def test_one_element_arrives_as_it_is_and_nothing_comes_of_nothing(name: str) -> None:
    """All of a block's rotated elements are as large as the one."""
    values = np.zeros(5000)
    values[3000] = 7.0
    left = compressed(name, values, "rotated")
    assert np.abs(left).max() < 1e-5
    assert not left[:2048].any() and not left[4096:].any()
