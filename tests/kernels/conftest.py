"""Memory that nobody has written yet holds NaN in every test of the kernels."""

from pathlib import Path

import pytest
import torch

from tests.kernels.cases import Case


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes Triton's interpreter seconds is slow: 300 parameters, and several steps on 3 ranks."""
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        case, here = given.get("case"), item.path.parent == Path(__file__).parent
        if here and given.get("name") == "triton" and isinstance(case, Case):
            several_steps = item.path.stem == "test_passes_together"
            if len(case.numels) >= 300 or (several_steps and case.ranks >= 3):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """torch.empty fills what it returns: scratch that is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
