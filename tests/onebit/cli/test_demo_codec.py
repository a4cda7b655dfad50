"""`onebit demo --codec`: its numbers, and what it prints and writes."""

import re
import sys

import pytest
import torch

from onebit.cli import main as cli
from onebit.cli.demo import codec


@pytest.fixture(autouse=True, scope="module")
def small_demo():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "NUMEL", 2**16)
        yield


@pytest.fixture(scope="module")
def found(small_demo):
    return codec.measure()


def test_demo_prints_and_plots(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "plot.png"
    assert cli.main(["demo", "--codec", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert str(out) in text
    assert re.search(r"Took [\d.]+ s", text)
    assert max(map(len, text.splitlines())) <= 110


def test_the_demos_numbers_are_right(found):
    n = 3 * codec.NUMEL
    assert found.values == n
    # Header, a scale a block, a bit a value.
    assert found.message_bytes == 16 + 4 * n // 2048 + n // 8
    # sqrt(1 - 2/pi) for normal values, whatever the layer's scale.
    assert found.block_errors == pytest.approx([0.6028] * 3, abs=0.005)
    # One scale s for all: the error relative to a layer of deviation d is sqrt(1 - 2 (s/d) sqrt(2/pi) + (s/d)^2).
    s = (2 / torch.pi) ** 0.5 * sum(codec.TYPICAL) / 3
    exact = [(1 - 2 * s / d * (2 / torch.pi) ** 0.5 + (s / d) ** 2) ** 0.5 for d in codec.TYPICAL]
    assert found.tensor_errors == pytest.approx(exact, rel=0.01)


def test_the_demo_shows_that_feedback_loses_nothing(found):
    assert len(found.with_feedback) == len(found.without_feedback) == codec.STEPS
    assert found.with_feedback[0] == pytest.approx(found.without_feedback[0])
    assert found.with_feedback[-1] < 0.1 < 0.3 < found.without_feedback[-1]
    assert found.with_feedback[49] < 0.7 * found.with_feedback[24]
    assert found.without_feedback[49] > 0.9 * found.without_feedback[24]


def test_what_the_demo_leaves_out_is_the_residual():
    one, values = codec.Codec([1000], "block"), torch.randn(30, 1000, generator=torch.Generator().manual_seed(1))
    arrived = sum(one([row])[0] for row in values)
    torch.testing.assert_close(values.sum(0) - arrived, one.residual.value[:1000], rtol=1e-4, atol=1e-4)
    one.forget()
    assert one.residual.value.abs().max() == 0


def test_the_demo_prints_the_numbers_it_found(found):
    text = codec.describe(found)
    for number in (found.message_bytes, 4 * found.values, 2 * found.values):
        assert f"{number:,}" in text
    for number in (*found.block_errors, *found.tensor_errors, *(found.with_feedback[t - 1] for t in codec.SHOWN)):
        assert f"{number:.3f}" in text


def test_demo_without_matplotlib_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["demo", "--codec", "--out", str(tmp_path / "plot.png")]) == 0
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "plot.png").exists()
