"""The commands and files of the tutorials without notebooks work as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorials" / "first-private-model.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
FILES = {text.split()[1]: text for kind, text in BLOCKS if kind in ("yaml", "python")}
# What a command prints stands below it; None where the page shows nothing.
COMMANDS = [
    (text, after if kind_after == "text" else None)
    for (kind, text), (kind_after, after) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True)
    if kind == "bash"
]


def lines(printed: str) -> list[str]:
    """Return what was printed without rules and with one space between words."""
    kept = [" ".join(line.split()) for line in printed.splitlines()]
    return [line for line in kept if line.strip("-")]


def without_luck(line: str) -> str:
    """Return a line without the figures that the noise of a run and the machine decide."""
    if line.startswith(("epsilon", "Epsilon", "Privacy", "Release ", "Model")):
        return line
    line = re.sub(r"^(a \d): (?:\d|None),", r"\1: ?,", line)  # a class, or an abstention
    return re.sub(r"(?<![\w/.-])\d[\d,]*(\.\d+)?(?= %| s$|$|,?\d* draws)", "?", line)


@pytest.mark.timeout(900)
def test_every_command_does_what_is_printed(tmp_path):
    """In one shell with the environment's `dpdist` and `python`, in a new folder."""
    (tmp_path / "first-model").mkdir()
    for name, text in FILES.items():
        (tmp_path / "first-model" / name).write_text(text)
    environment = {**os.environ, "COLUMNS": "100"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    folder = tmp_path
    for command, printed in COMMANDS:
        done = subprocess.run(
            ["bash", "-eu", "-c", f"{command}\npwd > {tmp_path}/where"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}{done.stdout}{done.stderr}"
        folder = Path((tmp_path / "where").read_text().strip())
        if printed is not None:
            expected = [without_luck(line) for line in lines(printed)]
            assert [without_luck(line) for line in lines(done.stdout)][: len(expected)] == expected
    assert folder == tmp_path / "first-model"
    assert (folder / "runs/first/report/index.html").exists()


@pytest.mark.nightly
def test_the_prices_of_a_search_are_those_printed(dpdist, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    page = (PAGE.parent / "private-tuning.md").read_text()
    table = page.partition("```text\n")[2].partition("```")[0]
    done = dpdist("tune", "digits-search", "--plan")
    there = lines(done.out)
    for line in lines(table):
        assert any(each.startswith(line) for each in there), line
