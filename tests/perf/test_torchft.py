"""torchft's DiLoCo, where it is installed, takes the steps of the one that is trained here."""

import pytest
import torch

from onebit.collectives.transport import transport_for
from perf.train_step import torchft
from perf.train_step.diloco import DiLoCo
from perf.train_step.variants import VARIANTS
from tests.limits import HUNG
from tests.ranks import run_ranks_once

STEPS, EVERY = 12, 4


def side_by_side(rank, size):
    """The largest difference after every step, and what the steps were called."""
    options = {"every": EVERY, "lr": 1e-2, "weight_decay": 0.01}
    models = [torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)) for _ in range(2)]
    with torch.no_grad():
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            p.copy_(torch.linspace(-0.3, 0.3, p.numel()).view(p.shape))
            q.copy_(p)
    kinds = DiLoCo, torchft.TorchftDiLoCo
    optimizers = [kind(m.parameters(), transport_for(), **options) for kind, m in zip(kinds, models, strict=True)]
    found = []
    for step in range(STEPS):
        source = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(8, 20, generator=source), torch.randn(8, 3, generator=source)
        said = {optimizer.kind for optimizer in optimizers}
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            optimizer.step()
        pairs = zip(*(m.parameters() for m in models), strict=True)
        found.append((said, max(float((p - q).detach().abs().max()) for p, q in pairs)))
    optimizers[1].synchronize()
    optimizers[1].close()
    return found


@pytest.mark.skipif(torchft.missing() is not None, reason="needs torchft, which comes for Python 3.11 alone")
def test_its_steps_are_the_same_but_for_rounding():
    for found in run_ranks_once(2, side_by_side, timeout=HUNG):
        assert [said for said, _ in found] == [{"local" if step % EVERY else "sync"} for step in range(1, STEPS + 1)]
        assert all(difference < 1e-6 for _, difference in found)


def test_without_it_the_row_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torchft.importlib.util, "find_spec", lambda name: None)
    assert "pip install torchft" in VARIANTS["torchft-sync"].impossible
    assert VARIANTS["diloco-sync"].impossible is None
