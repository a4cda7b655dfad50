"""What is published: a wheel and a source archive that hold the package and nothing else, and the README's ten lines
run from them where nothing of this folder is.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.limits import HUNG

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("onebit", "kernels", "collectives", "pyproject.toml", "README.md", "LICENSE")
TRAIN = """
import torch
model = torch.nn.Linear(40, 30)
{ten_lines}
print(onebit.__file__)
for step in range(4):
    optimizer.zero_grad()
    loss = ddp(torch.randn(8, 40)).square().mean()
    loss.backward()
    optimizer.step()
assert optimizer.compressing and torch.isfinite(loss)
dist.destroy_process_group()
"""


def run(*command: object, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=HUNG, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel made of this folder's files, and the source archive."""
    folder = tmp_path_factory.mktemp("package")
    copy = folder / "copy"
    copy.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    for make in ("build_wheel", "build_sdist"):
        run(sys.executable, "-c", f"from setuptools.build_meta import *; {make}({str(folder)!r})", cwd=copy)
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, archive


def modules() -> set[str]:
    """As they install."""
    places = {"onebit": "onebit", "kernels": "onebit/kernels", "collectives": "onebit/collectives"}
    return {
        str(Path(to) / path.relative_to(ROOT / name))
        for name, to in places.items()
        for path in (ROOT / name).rglob("*.py")
    }


@pytest.mark.slow
def test_the_wheel_has_every_module_and_nothing_else(archives: tuple[Path, Path]) -> None:
    """A package that is not listed in pyproject.toml would be missing."""
    found = {name for name in zipfile.ZipFile(archives[0]).namelist() if ".dist-info/" not in name}
    assert found == modules() | {"onebit/py.typed"}


@pytest.mark.slow
def test_the_source_archive_makes_the_same_wheel(archives: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, archive = archives
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    run(sys.executable, "-c", f"from setuptools.build_meta import *; build_wheel({str(tmp_path)!r})", cwd=folder)
    (again,) = tmp_path.glob("*.whl")
    contents = ({name: z.read(name) for name in z.namelist()} for z in map(zipfile.ZipFile, (wheel, again)))
    first, second = contents
    assert first == second


@pytest.mark.slow
def test_the_ten_lines_run_from_the_wheel_in_a_fresh_environment(archives: tuple[Path, Path], tmp_path: Path) -> None:
    ten_lines = re.search(r"## Ten lines\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert ten_lines and "freeze_step=3000" in ten_lines[1]
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(ten_lines=ten_lines[1].replace("freeze_step=3000", "freeze_step=2")))
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--no-input", "-q", "-c", constraints, archives[0], cwd=tmp_path)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    printed = run(python, *ranks, cwd=tmp_path, OMP_NUM_THREADS="1", PYTHONPATH="")
    assert printed.count(str(tmp_path / "venv")) == 2
    assert "demo" in run(tmp_path / "venv" / "bin" / "onebit", "--help", cwd=tmp_path, PYTHONPATH="")
