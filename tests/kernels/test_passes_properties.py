"""What holds for any c: the residual is exactly what was left out, nothing is lost over steps, bits round-trip."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format, Messages
from tests import oracle
from tests.kernels.cases import BACKENDS, ON_BACKENDS, backend, device_of
from tests.wire import contents

VALUES = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=100).map(
    lambda values: np.array(values, np.float32)
)
SCALES = pytest.mark.parametrize("scale", ["block", "tensor"])
FEW = settings(max_examples=25)


class Compressor:
    """compress with beta1 = 0 and no momentum, so that c is the gradient and the residual alone."""

    def __init__(
        self, name: str, numel: int, scale: str = "block", hyper: Hyper | None = None, norm: str = "l1"
    ) -> None:
        self.passes, self.device = backend(name), torch.device(device_of(name))
        self.layout = Layout([numel], block_size=32)
        self.form = Format(self.layout, scale, norm)
        self.residual = Residual.zeros(self.layout.all(), self.form, self.device)
        self.hyper = hyper_table([hyper or Hyper()], self.device)
        self.flags = torch.zeros(1, dtype=torch.int32, device=self.device)

    def __call__(self, values: np.ndarray, live: torch.Tensor | None = None) -> Messages:
        out = self.form.empty(1, self.device)
        grads = Pointers.to(self.layout, [torch.from_numpy(values).to(self.device)], "gradient")
        live = None if live is None else live.to(self.device)
        self.passes.compress(self.layout.all(), grads, None, self.residual, self.hyper, self.flags, out, live=live)
        return out

    def left(self) -> np.ndarray:
        return self.residual.value.cpu().numpy()[: self.layout.numel[0]]


def decoded_fp32(messages: Messages, numel: int) -> np.ndarray:
    return sent_values(messages)[:numel].astype(np.float32)


def sent_values(messages: Messages) -> np.ndarray:
    """Of one message of everything."""
    return contents(messages, 0, messages.format.layout.lengths().tolist()).values


@ON_BACKENDS
@given(VALUES)
@FEW
def test_the_residual_is_c_minus_what_was_sent_in_one_fp32_subtraction(name, values):
    compress = Compressor(name, len(values))
    out = compress(values)
    assert np.array_equal(compress.left(), values - decoded_fp32(out, len(values)))


@ON_BACKENDS
@given(VALUES)
@FEW
def test_a_tensor_scale_leaves_the_same_residual_one_step_later(name, values):
    compress = Compressor(name, len(values), "tensor")
    out = compress(values)
    assert np.array_equal(compress.left(), values)
    compress(np.zeros_like(values))
    assert np.array_equal(compress.left(), values - decoded_fp32(out, len(values)))


@ON_BACKENDS
@SCALES
@given(st.integers(0, 2**32 - 1), st.integers(1, 100), st.integers(1, 8))
@FEW
def test_over_steps_what_was_sent_and_what_is_left_is_what_was_given(name, scale, seed, numel, steps):
    rng, compress = np.random.default_rng(seed), Compressor(name, numel, scale)
    given_, sent = np.zeros(numel), np.zeros(numel)
    for _ in range(steps):
        values = rng.normal(size=numel).astype(np.float32)
        out = compress(values)
        given_ += values
        sent += sent_values(out)[:numel]
    left = compress.left().astype(np.float64)
    if scale == "tensor":
        left -= oracle.sigma(left) * float(compress.residual.scale[0])
    assert np.allclose(sent + left, given_, rtol=0, atol=2e-6 * steps)


@ON_BACKENDS
@given(st.integers(0, 2**32 - 1), st.integers(1, 100), st.sampled_from([1.0, 1e-12, 1e12]))
@FEW
def test_what_an_unbiased_scale_leaves_out_is_orthogonal_to_what_was_given(name, seed, numel, size):
    values = (size * np.random.default_rng(seed).normal(size=numel)).astype(np.float32)
    compress = Compressor(name, numel, norm="unbiased")
    found = contents(compress(values), 0, compress.layout.lengths().tolist())
    for start, scale in zip(range(0, numel, 32), found.scales, strict=True):
        block = values[start : start + 32].astype(np.float64)
        if scale < 1.9 * np.sqrt((block**2).mean()):
            across = block @ compress.left()[start : start + 32].astype(np.float64)
            assert abs(across) <= 1e-5 * (block @ block)


@ON_BACKENDS
def test_an_unbiased_scale_is_bounded_where_few_elements_are_not_zero(name):
    """||c||_2^2 / ||c||_1 would be 3: what all 32 would be moved by. And nothing comes of nothing."""
    values = np.zeros(64, np.float32)
    values[5] = 3.0
    compress = Compressor(name, 64, norm="unbiased")
    scales = compress(values).scales(0, compress.layout.all()).tolist()
    assert scales == [pytest.approx(2 * 3 / np.sqrt(32)), 0.0]
    assert np.isfinite(compress.left()).all()


@ON_BACKENDS
def test_the_bound_of_an_unbiased_scale_is_of_what_takes_part(name):
    """Half of the block does not: the root mean square is that of the other half."""
    values, live = np.zeros(32, np.float32), np.arange(32) < 16
    values[[3, 20]] = 3.0, 100.0
    compress = Compressor(name, 32, norm="unbiased")
    scale = compress(values, torch.from_numpy(np.packbits(live, bitorder="little"))).scales(0, compress.layout.all())
    assert scale.tolist() == [pytest.approx(2 * 3 / np.sqrt(16))]


@pytest.mark.parametrize("writer", BACKENDS)
@pytest.mark.parametrize("reader", BACKENDS)
@given(VALUES)
@FEW
def test_what_one_backend_packs_every_other_unpacks(writer, reader, values):
    out = Compressor(writer, len(values))(values)
    layout, device = Layout([len(values)], block_size=32), torch.device(device_of(reader))
    assert out.bits(0, layout.all())[: -(-len(values) // 8)].tolist() == oracle.packed(values >= 0).tolist()
    read = torch.full((len(values),), float("nan"), device=device)
    moved = Messages(out.buffer.to(device), out.format)
    backend(reader).decode(layout.all(), moved, Pointers.to(layout, [read]))
    blocks = [values[i : i + 32].astype(np.float64) for i in range(0, len(values), 32)]
    scales = np.repeat([np.abs(block).mean() for block in blocks], 32)[: len(values)]
    assert np.array_equal(np.sign(read.cpu().numpy()), np.where(scales == 0, 0, oracle.sigma(values)))
    assert np.allclose(np.abs(read.cpu().numpy()), scales, rtol=1e-6, atol=1e-45)
