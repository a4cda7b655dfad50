"""A plot that can't be drawn is known before the work, and finding out leaves no trace."""

import sys

import pytest

from onebit.cli.arguments import CommandError, check_picture


def test_trying_where_the_plot_goes_leaves_what_is_there(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "plot.png"
    assert check_picture(out, "--out") and not out.exists()
    out.write_bytes(b"before")
    assert check_picture(out, "--out") and out.read_bytes() == b"before"


@pytest.mark.parametrize("name", ["plot.exe", "plot", "missing/plot.png", "plot.png/plot.png", "a\0b.png"])
def test_a_plot_that_cannot_be_written(name, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "plot.png").write_bytes(b"before")
    with pytest.raises(CommandError, match="a plot cannot be"):
        check_picture(tmp_path / name, "--out")
    assert [each.name for each in tmp_path.iterdir()] == ["plot.png"]


@pytest.mark.parametrize("gone", [("matplotlib",), ("matplotlib", "matplotlib.backend_bases")])
def test_without_matplotlib(gone, tmp_path, monkeypatch):
    for name in gone:
        monkeypatch.setitem(sys.modules, name, None)
    assert check_picture(tmp_path / "plot.exe", "--out") is False


def test_a_matplotlib_that_is_broken_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("import a_module_that_it_needs\n")
    for name in [each for each in sys.modules if each.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_it_needs"):
        check_picture(tmp_path / "plot.png", "--out")
