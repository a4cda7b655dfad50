"""Memory that nobody has written yet holds NaN in every test of the kernels."""

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """torch.empty fills what it returns: scratch that is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
