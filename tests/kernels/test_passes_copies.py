"""Blocks that are in several messages, as with direct replies: every pass takes their mean, in the order of ranks."""

import numpy as np
import pytest
import torch

from onebit.kernels import cpu
from onebit.kernels.tuning.workload import Workload
from tests import oracle
from tests.kernels.cases import ON_FUSED, backend, device_of
from tests.wire import contents

NUMELS = [1, 7, 300, 63, 96]
READERS = ("compress", "decode", "adam_update", "lamb_statistics", "lamb_update")
VARIANTS = {
    "two": {"copies": 2},
    "four": {"copies": 4, "block_size": 96},
    "three, tensor": {"copies": 3, "scale": "tensor", "norm": "l2", "masked": True, "scaled": True},
    "two of two shards": {"copies": 2, "ranks": 2},
    "two, fp16": {"copies": 2, "dtype": torch.float16, "master": False},
}
EACH = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def workload(options, device="cpu"):
    return Workload(NUMELS, device, **{"ranks": 1, "block_size": 32, **options})


def outputs(work, passes):
    for name in READERS:
        work.passes(passes)[name].run()
    return work.outputs()


@ON_FUSED
@EACH
def test_readers_agree_with_the_cpu(name, options):
    ours, theirs = outputs(workload(options, device_of(name)), backend(name)), outputs(workload(options), cpu)
    assert_same(ours, theirs, half=options.get("dtype") == torch.float16)


def assert_same(ours, theirs, half):
    """Bits equal, values to rounding: that of fp16 where `half`."""
    for what, expected in theirs.items():
        got = ours[what].cpu()
        if expected.is_floating_point():
            close = {"rtol": 2e-3, "atol": 1e-3} if half else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(got, expected, **close, equal_nan=True, msg=lambda text, w=what: f"{w}: {text}")
        else:
            assert torch.equal(got, expected), what


@pytest.mark.parametrize("name", ["cpu", "triton"])
@EACH
def test_what_is_decoded_is_the_mean(name, options):
    work = workload(options, device_of(name))
    work.passes(backend(name))["decode"].run()
    plan = oracle.Layout(tuple(NUMELS), work.layout.block_size, work.layout.ranks)
    messages, parts = work.replies(), plan.shards()
    values = [contents(messages, row, plan.lengths_in(parts[row // messages.copies])).values
              for row in range(messages.rows)]  # fmt: skip
    shards = [values[k : k + messages.copies] for k in range(0, messages.rows, messages.copies)]
    mean = plan.unflatten(np.concatenate([np.mean(copies, axis=0) for copies in shards]))
    for expected, got in zip(mean, work.decoded().tensors, strict=True):
        np.testing.assert_allclose(got.cpu().double().numpy(), expected, rtol=1e-3 if got.itemsize == 2 else 1e-6)


@pytest.mark.parametrize("name", ["cpu", "triton"])
@pytest.mark.parametrize("flagged", [0, 1, 2])
def test_a_flag_in_any_copy_stops_every_reader(name, flagged):
    work = workload({"copies": 3}, device_of(name))
    work.replies().flags[flagged] = 1
    before = {what: tensor.clone() for what, tensor in work.outputs().items()}
    for each in ("adam_update", "lamb_statistics"):
        work.passes(backend(name))[each].run()
    for what, tensor in work.outputs().items():
        assert torch.equal(tensor.nan_to_num(7), before[what].nan_to_num(7)), what
    work.passes(backend(name))["decode"].run()
    assert all(bool(t.isnan().all()) for t in work.decoded().tensors)
