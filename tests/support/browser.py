"""Pages in a real browser (Debian's chromium): what sticks out of them, colours, their script."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
WIDTHS = (320, 1200)

# Looks into every frame; then presses each heading of a table that sorts.
_LOOK = """<script>onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, wide = frame.clientWidth;
    const out = [...page.body.querySelectorAll("*")].filter(each =>
      !each.closest(".wide, pre, .skip") && each.getBoundingClientRect().right > wide + 1);
    for (const text of page.querySelectorAll("svg text"))
      if (text.getBoundingClientRect().right > text.closest("svg").getBoundingClientRect().right)
        out.push(text);
    const table = page.querySelector("table.sortable"), sorted = [];
    for (const button of table ? table.querySelectorAll("thead button") : []) {
      button.click();
      sorted.push([...table.tBodies[0].rows].map(row => row.cells[0].textContent));
    }
    const ground = frame.contentWindow.getComputedStyle(page.body).backgroundColor;
    return {wide, scrolls: page.documentElement.scrollWidth, ground, sorted,
            out: out.map(each => each.outerHTML.slice(0, 80))};
  });
  document.body.innerHTML = "<pre id=found></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
};</script>"""


def inspect_pages(place: Path, pages: Sequence[str], dark: bool) -> list[dict[str, Any]]:
    """What the browser makes of the pages, each at all `WIDTHS`."""
    frames = [
        f'<iframe width="{width}" height="800" style="border:0" srcdoc="{escape(page)}"></iframe>'
        for page in pages
        for width in WIDTHS
    ]
    harness = place / "frames.html"
    harness.write_text(f"<!doctype html><body>{''.join(frames)}{_LOOK}")
    assert BROWSER is not None
    options = ["--headless=new", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    options += [f"--user-data-dir={place / 'profile'}", "--window-size=1400,900"]
    options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    options += ["--no-sandbox"] * (os.geteuid() == 0)
    done = subprocess.run(
        [BROWSER, *options, harness.as_uri()], capture_output=True, text=True, timeout=200
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    return json.loads(unescape(found[1]))
