"""The site of docs/ in Chromium, light and dark, on a telephone and a desktop: pictures go to build/site_pictures.

Skipped where `make docs` has not built the site or there is no Chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.limits import HUNG
from tests.test_structure import ROOT

SITE, PICTURES = ROOT / "build" / "site", ROOT / "build" / "site_pictures"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--allow-file-access-from-files",
    "--virtual-time-budget=4000",
)  # fmt: skip
FRAME = """<!doctype html>
<body style="margin: 0">
<iframe src="{page}" width="{width}" height="{height}" style="border: 0" onload="look(this.contentDocument)"></iframe>
<script>
function look(page) {{
    page.body.dataset.theme = "{theme}";
    const lacking = [...page.images].filter((image) => image.offsetParent && !image.naturalWidth);
    const shade = getComputedStyle(page.body).backgroundColor;
    document.title = [page.documentElement.scrollWidth, shade, lacking.length].join(";");
}}
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.skipif(not (SITE / "index.html").exists(), reason="make docs has not built the site")
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("page", ["index", "first_run"])
def test_pages_fit_and_have_their_pictures_in_light_and_dark(page: str, width: int, tmp_path: Path) -> None:
    PICTURES.mkdir(exist_ok=True)
    shades = set()
    for theme in ("light", "dark"):
        frame = tmp_path / f"{theme}.html"
        size = {"width": width, "height": 1600}
        frame.write_text(FRAME.format(page=(SITE / f"{page}.html").as_uri(), theme=theme, **size), encoding="utf-8")
        shared = [
            str(CHROMIUM),
            *OPTIONS,
            f"--user-data-dir={tmp_path / theme}",
            f"--window-size={max(width, 500)},1600",
        ]
        picture = PICTURES / f"{page}-{width}-{theme}.png"
        for action in ("--dump-dom", f"--screenshot={picture}"):
            done = subprocess.run([*shared, action, frame.as_uri()], capture_output=True, text=True, timeout=HUNG)
            if action == "--dump-dom":
                found = re.search(r"<title>(\d+);([^;]+);(\d+)</title>", done.stdout)
                assert found, done.stderr
        assert int(found[1]) <= width and found[3] == "0", found[0]
        shades.add(found[2])
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(shades) == 2
