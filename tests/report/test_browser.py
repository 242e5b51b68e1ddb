"""A report in a real browser without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from polyfed import report

pytest.importorskip("altair", reason="reports need the extra polyfed[report]")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine to show the page in")

ACTIONS = """<script>
const wait = setInterval(() => {
  if (document.body.dataset.ready !== "yes") return;
  clearInterval(wait);
  const bars = () => document.querySelectorAll("#figure-clients .mark-symbol path").length;
  const before = bars(), button = document.querySelector(".sortable button");
  document.querySelector("#shown input").click();
  for (let press = 0; press < 2; press++) button.click();
  setTimeout(() => {
    const first = document.querySelector(".sortable tbody tr").textContent;
    document.body.dataset.tried = [before, bars(), first, button.parentElement.getAttribute("aria-sort")].join("|");
  }, 500);
}, 50);
</script>"""


def shown(page: Path, folder: Path) -> tuple[str, str]:
    """The page as the browser has it after its scripts, and what the browser said."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9", "--virtual-time-budget=20000",
        "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout, done.stderr


def test_every_figure_is_drawn_and_can_be_used(four: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    report.write_report(report.read(*four), page)
    page.write_text(page.read_text().removesuffix("</body></html>\n") + ACTIONS + "</body></html>\n")
    found, said = shown(page, tmp_path / "profile")
    assert [line for line in said.splitlines() if "CONSOLE" in line] == []
    charts = re.split(r'<div class="chart', found.partition("<script>")[0])[1:]
    assert len(charts) == 12
    for chart in charts:
        drawn = chart.partition('<script type="application/json"')[0]
        assert 'data-drawn="yes"' in drawn and drawn.count("<path") > 5, drawn[:200]
    tried = re.search(r'data-tried="([^"]*)"', found)
    assert tried is not None
    before, after, first, order = tried.group(1).split("|")
    assert (int(before), int(after), order) == (2, 1, "descending") and first.startswith("standalone")
