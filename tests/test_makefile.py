"""What `make` leaves behind is ignored by git: a fresh clone stays clean."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.limits import HUNG

ROOT = Path(__file__).resolve().parent.parent


def test_the_demo_draws_into_an_ignored_folder():
    if shutil.which("make") is None:
        pytest.skip("needs make")
    recipe = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=HUNG).stdout
    (out,) = re.findall(r"onebit demo .*--out (\S+)", recipe)
    folder = f"{Path(out).parts[0]}/"
    assert folder in (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert f"mkdir -p {Path(out).parent}\n" in recipe
