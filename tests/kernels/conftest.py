"""Memory that nobody has written yet holds NaN in every test of the kernels, and passes are cut as a case says."""

from dataclasses import replace

import pytest
import torch

from onebit.kernels.cpu import threads
from onebit.kernels.tuning import tuner


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """torch.empty fills what it returns: scratch that is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def use_grain(monkeypatch):
    def use(case):
        """Have Triton programs take `grain` blocks, and cut CPU loops into runs of as many, on three threads."""

        def lookup(kernel, *_):
            return replace(tuner.default(kernel), blocks_per_program=case.grain)

        monkeypatch.setattr(tuner, "lookup", lookup)
        monkeypatch.setattr(threads, "LEAST", case.grain * case.block_size)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    return use


@pytest.fixture
def case(request, use_grain):
    """A case of GRID."""
    use_grain(request.param)
    return request.param
