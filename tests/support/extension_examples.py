"""The examples of docs/how-to/extending.md, by the file name in their first line."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "extending.md"
EXAMPLES: dict[str, str] = {
    name: text
    for text, name in re.findall(r"```python\n(# (\S+)\n.*?)```", _PAGE.read_text(), re.S)
}

# The method, with steps of its own around the usual ones.
TOY = (
    EXAMPLES["varied.py"]
    + """
    def train(self, run):
        (run.job.folder.private / "teachers").write_text("made in bulk, before the workers")
        run.run_workers()

    def measure(self, given, stage):
        (given.private_folder / f"{stage}-{given.rank}").touch()
"""
)
