"""What holds for any c: the residual is exactly what was left out, nothing is lost over steps, bits round-trip; and
norm="rotated" leaves less out where few elements are large."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebit.kernels.data import rotation
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.wire import Messages
from tests import oracle
from tests.kernels.cases import F32, ON_BACKENDS, Case
from tests.kernels.world import World
from tests.wire import contents

VALUES = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=100).map(
    lambda values: np.array(values, np.float32)
)
FEW = settings(max_examples=20)


class Compressor(World):
    """compress with beta1 = 0 and no momentum, so that c is the gradient and the residual alone."""

    def __init__(self, name: str, numel: int, scale: str = "block", norm: str = "l1", block_size: int = 32) -> None:
        super().__init__(Case((numel,), block_size, scale=scale, norm=norm, momentum="none"), name)
        self.e, self.scales64 = [np.zeros(numel)], np.zeros(1)

    def __call__(self, values: np.ndarray, live: torch.Tensor | None = None) -> Messages:
        grads, hyper, out = self.pointers([values], F32, "gradient"), hyper_table([Hyper()], self.device), self.fresh(1)
        live = None if live is None else live.to(self.device)
        self.run("compress", grads=grads, hyper=hyper, out=out, live=live)
        return out

    def left(self) -> np.ndarray:
        return self.residuals[0].value.cpu().numpy()[: self.case.numels[0]]

    def decoded(self, out: Messages) -> np.ndarray:
        return contents(out, 0, self.plan.lengths).values[: self.case.numels[0]]


@ON_BACKENDS
@given(VALUES)
@FEW
def test_the_residual_is_c_minus_what_was_sent_in_one_fp32_subtraction(name, values):
    """With a tensor scale one step later."""
    compress, tensor = Compressor(name, len(values)), Compressor(name, len(values), "tensor")
    out = compress(values)
    assert np.array_equal(compress.left(), values - compress.decoded(out).astype(np.float32))
    out = tensor(values)
    assert np.array_equal(tensor.left(), values)
    tensor(np.zeros_like(values))
    assert np.array_equal(tensor.left(), values - tensor.decoded(out).astype(np.float32))


@pytest.mark.parametrize("name, scale, norm", [
    ("cpu", "block", "l1"), ("cpu", "tensor", "l1"), ("cpu", "block", "rotated"), ("triton", "tensor", "l2"),
])  # fmt: skip
@given(st.integers(0, 2**32 - 1), st.integers(1, 100), st.integers(1, 8))
@FEW
def test_over_steps_what_was_sent_and_what_is_left_is_what_was_given(name, scale, norm, seed, numel, steps):
    rng, compress = np.random.default_rng(seed), Compressor(name, numel, scale, norm)
    given_, sent = np.zeros(numel), np.zeros(numel)
    for _ in range(steps):
        values = rng.normal(size=numel).astype(np.float32)
        sent += compress.decoded(compress(values))
        given_ += values
    left = compress.left_out()[0]
    assert np.allclose(sent + left, given_, rtol=0, atol=(2e-5 if norm == "rotated" else 2e-6) * steps)


@ON_BACKENDS
def test_an_unbiased_scale_is_bounded_where_few_elements_are_not_zero(name):
    """||c||_2^2 / ||c||_1 would be 3: what all 32 would be moved by. The bound is of what takes part: half a block."""
    values = np.zeros(64, np.float32)
    values[[5, 50]] = 3.0, 100.0
    live = torch.from_numpy(np.packbits(np.arange(64) < 48, bitorder="little"))
    for mask, second in ((None, 2 * 100 / np.sqrt(32)), (live, 0.0)):
        compress = Compressor(name, 64, norm="unbiased")
        scales = compress(values, mask).scales(0, compress.layout.all()).tolist()
        assert scales == [pytest.approx(2 * 3 / np.sqrt(32)), pytest.approx(second)]
        assert np.isfinite(compress.left()).all()
    values[33] = 3.0
    compress = Compressor(name, 64, norm="unbiased")
    assert compress(values, live).scales(0, compress.layout.all()).tolist()[1] == pytest.approx(2 * 3 / np.sqrt(16))


def test_the_signs_that_are_turned_look_random():
    """No row of Hadamard's matrix, which is what a block of one value becomes, is near to them."""
    turned = np.array([oracle.turned(i) for i in range(16384)])
    assert np.array_equal(rotation.flips(), turned < 0)
    assert np.array_equal(rotation.packed_flips(), np.packbits(turned < 0, bitorder="little"))
    for length in (32, 256, 2048):
        for start in range(0, 16384, length):
            found = np.abs(oracle.rotation(length) @ (turned[:length] * turned[start : start + length])).max()
            assert found < np.sqrt(2 * length * np.log(2 * len(turned)))


@ON_BACKENDS
def test_few_large_elements_make_no_noise_in_all_others(name):
    """A normally distributed block leaves pi / 2 - 1 of its squares out, and a rotated one is nearly that."""
    numel, source, share = 5120, np.random.default_rng(0), {}
    values = (source.normal(size=numel) * np.where(source.random(numel) < 0.02, 30.0, 1.0)).astype(np.float32)
    for norm in ("rotated", "unbiased"):
        compress = Compressor(name, numel, norm=norm, block_size=2048)
        compress(values)
        share[norm] = (compress.left().astype(np.float64) ** 2).sum() / (values.astype(np.float64) ** 2).sum()
    assert 0.5 < share["rotated"] < 0.65 < 2 < share["unbiased"]
