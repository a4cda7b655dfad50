"""What is published: a wheel and a source archive that hold the package and nothing else, and the README's ten lines
run from them where nothing of this folder is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import forked
from tests.limits import HUNG

ROOT = Path(__file__).resolve().parent.parent
PLACES = {"onebit": "onebit", "kernels": "onebit/kernels", "collectives": "onebit/collectives"}  # as they install
TRAIN = """
import sys
import torch
model = torch.nn.Linear(40, 30)
{ten_lines}
print(onebit.__file__, "ranks:", dist.get_world_size(), flush=True)
for step in range(7):
    optimizer.zero_grad()
    loss = ddp(torch.randn(8, 40)).square().mean()
    loss.backward()
    optimizer.step()
assert optimizer.compressing and torch.isfinite(loss) and "numba" in sys.modules
dist.destroy_process_group()
"""


def ten_lines() -> str:
    found = re.search(r"## Ten lines\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert found
    return found[1]


def run(*command: object, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=HUNG, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def build(source: Path, to: Path, *makes: str) -> None:
    code = ["from setuptools.build_meta import *", *(f"{make}({str(to)!r})" for make in makes)]
    run(sys.executable, "-c", "\n".join(code), cwd=source)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel made of this folder's files, and the source archive."""
    folder = tmp_path_factory.mktemp("package")
    copy = folder / "copy"
    copy.mkdir()
    for name in PLACES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build(copy, folder, "build_wheel", "build_sdist")
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, archive


def test_both_archives_have_every_module_and_nothing_else(archives: tuple[Path, Path], tmp_path: Path) -> None:
    """A package that is not listed in pyproject.toml would be missing."""
    wheel, archive = archives
    modules = {str(Path(PLACES[f]) / p.relative_to(ROOT / f)) for f in PLACES for p in (ROOT / f).rglob("*.py")}
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    build(folder, tmp_path, "build_wheel")
    first, again = (
        {name: opened.read(name) for name in opened.namelist()}
        for opened in map(zipfile.ZipFile, (wheel, *tmp_path.glob("*.whl")))
    )
    assert {name for name in first if ".dist-info/" not in name} == modules | {"onebit/py.typed"}
    assert first == again


def link_what_is_required(site: Path) -> None:
    """Link this environment's packages that onebit, which is installed in `site`, asks for, and what they ask for."""
    (installed,) = metadata.distributions(path=[str(site)])
    wanted, linked = list(installed.requires or ()), set()
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name in linked or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        linked.add(requirement.name)
        found = metadata.distribution(requirement.name)
        assert requirement.specifier.contains(found.version, prereleases=True), requirement
        wanted += found.requires or ()
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(found.locate_file(name))))


def test_the_ten_lines_run_beside_a_clone_from_what_the_readme_installs(
    archives: tuple[Path, Path], tmp_path: Path
) -> None:
    assert "\n    pip install '.[perf]'" in (ROOT / "README.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(ten_lines=ten_lines()))
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python, onebit = (tmp_path / "venv" / "bin" / name for name in ("python", "onebit"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-input", "--no-index", "--no-deps"]
    run(*pip, archives[0], cwd=tmp_path)
    (site,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    link_what_is_required(site)
    (tmp_path / "onebit").symlink_to(ROOT)  # a clone by that name beside the script hides no package that is installed
    with forked.python() as torchs:
        torchrun = [torchs, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        printed = run(*torchrun, python, script, cwd=tmp_path, OMP_NUM_THREADS="1", PYTHONPATH="")
    assert printed.count(str(tmp_path / "venv")) == 2
    assert "demo" in run(onebit, "--help", cwd=tmp_path, PYTHONPATH="")


def test_two_checkouts_are_not_mixed(tmp_path: Path) -> None:
    """PYTHONPATH brings `onebit` of another checkout, and the editable install its kernels."""
    other, same = tmp_path / "other", tmp_path / "same"
    shutil.copytree(ROOT / "onebit", other / "onebit", ignore=shutil.ignore_patterns("__pycache__"))
    same.symlink_to(ROOT)
    command = [sys.executable, "-c", "import onebit"]
    environment = {**os.environ, "PYTHONPATH": str(other)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 1 and "two checkouts are mixed" in done.stderr and str(ROOT) in done.stderr
    run(*command, cwd=tmp_path, PYTHONPATH=str(same))


def test_a_clone_whose_install_is_not_editable_says_so() -> None:
    """`-S` hides what is installed, and with it the hook that finds kernels beside the package."""
    command = [sys.executable, "-S", "-c", "import onebit"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 1 and f"onebit from the clone {ROOT}" in done.stderr
    assert "pip install -e" in done.stderr and "circular" not in done.stderr
