"""What undoes a step: residuals kept as they were by compress and average, and restore, on every backend."""

import pytest
import torch

from onebit.kernels.tuning.workload import Workload
from tests.kernels.cases import ON_BACKENDS, backend, device_of

SIZES = [300, 7, 2049]


@ON_BACKENDS
@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("options", [{}, {"scale": "tensor"}, {"block_size": 96}, {"reply_bits": 2}])
def test_compress_and_average_keep_residuals_as_they_were(name, options, flagged):
    kept, plain = (Workload(SIZES, device_of(name), ranks=2, kept=k, **options) for k in (True, False))
    before = {r: getattr(kept, r)().value.clone() for r in ("residual", "server_residual")}
    for work in (kept, plain):
        if flagged:
            work.flags().fill_(1)
            work.received().flags[1] = 1
        passes = work.passes(backend(name))
        passes["compress"].run()
        passes["average"].run()
    for residual, was in before.items():
        written = getattr(kept, residual)()
        assert torch.equal(written.before, was)
        assert torch.equal(written.value, was) == flagged
        assert torch.equal(written.value, getattr(plain, residual)().value)
    assert torch.equal(kept.sent().buffer, plain.sent().buffer) and torch.equal(
        kept.reply().buffer, plain.reply().buffer
    )


@ON_BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("count", [4, 1000, 8192, 20_004])
def test_restore_copies_where_the_flag_is_set(name, count, dtype):
    guarded = torch.arange(count + 8, device=device_of(name)).to(dtype)
    now, kept = guarded[4:-4], torch.full((count,), 77, dtype=dtype, device=guarded.device)
    expected, flags = guarded.clone(), torch.zeros(1, dtype=torch.int32, device=guarded.device)
    backend(name).restore(now, kept, flags)
    assert torch.equal(guarded, expected)
    flags.fill_(1)
    backend(name).restore(now, kept, flags)
    expected[4:-4] = 77
    assert torch.equal(guarded, expected)


@ON_BACKENDS
def test_restore_copies_bits(name):
    """Also of what is not a number."""
    kept = torch.tensor([0x7FC01234, -1, 0x7F800000, 1], dtype=torch.int32, device=device_of(name)).view(torch.float32)
    now = torch.zeros_like(kept)
    backend(name).restore(now, kept, torch.ones(1, dtype=torch.int32, device=now.device))
    assert torch.equal(now.view(torch.int32), kept.view(torch.int32))
