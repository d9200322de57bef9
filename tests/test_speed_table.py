"""`benchmarks/README.md` is what is made of the results; a row replaces its own line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.benchmarks import BENCHMARKS, load

ABOUT = {
    "commit": "0123abcd", "processor": "Some EPYC", "family": "AMD", "cores": 2,
    "versions": {"torch": "2.13"}, "date": "2026-11-26",
}  # fmt: skip


def line(row: str, threads: int = 1, **more: Any) -> dict[str, Any]:
    made = {"row": row, "threads": threads, **ABOUT, "figures": {}, "seconds": 1.0} | more
    return made | {"part": f"{row}/{threads}/{made['family']}"}


def test_the_page_is_what_its_generator_makes():
    speed = load("speed")
    assert speed.PAGE.read_text() == speed.page(), "python benchmarks/speed.py --write"


def test_a_line_replaces_that_of_its_row_threads_and_family(tmp_path):
    speed, results = load("speed"), tmp_path / "speed.jsonl"
    for number, made in enumerate([
        line("memory"), line("cnn", 2), line("cnn"), line("cnn", family="Intel"), line("cnn"),
    ]):  # fmt: skip
        speed.keep(results, made | {"number": number})
    kept = [json.loads(each) for each in results.read_text().splitlines()]
    assert [(each["part"], each["number"]) for each in kept] == [
        ("cnn/1/AMD", 4), ("cnn/2/AMD", 1), ("cnn/1/Intel", 3), ("memory/1/AMD", 0),
    ]  # fmt: skip


def test_goals_that_are_missed_are_marked(tmp_path):
    speed, results = load("speed"), tmp_path / "speed.jsonl"
    speed.keep(results, line("cnn", figures={"best of Opacus": 1.701, "ordinary": 1.1}))
    speed.keep(results, line("memory", figures={"memory": 1.16}, family="Intel"))
    page = speed.page(results, tmp_path / "none.jsonl")
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in page.splitlines()]
    found = {(row[0], row[1]): row[3:] for row in cells if len(row) == 7}
    missing = ["not measured"] * 3
    cnn = "TF-Privacy CNN, batch 256"
    assert found[cnn, "best of Opacus"] == ["**1.70 (missed)**", *missing]
    assert found[cnn, "ordinary"] == ["1.10", *missing]
    assert found[cnn, "channels-last"] == ["no peer", *missing]
    memory = "linear-heavy model, batch 512: peak / ordinary's"
    assert found[memory, "memory"] == ["not measured", "", "**1.16 (missed)**", ""]
    assert "| cnn (1), memory (1) | Some EPYC | 2 | 0123abcd | 2026-11-26 | torch 2.13 |" in page


def test_every_goal_is_on_the_page_and_every_row_can_be_asked_for():
    speed = load("speed")
    assert all(row.goals and row.threads in ((1,), (1, 2)) for row in speed.ROWS.values())
    goals = sum(len(row.goals) for row in speed.ROWS.values())
    assert speed.page().count("not measured") <= 4 * goals
    assert sum(row.name in speed.page() for row in speed.ROWS.values()) == len(speed.ROWS)


def test_what_was_measured_stays_and_what_failed_keeps_its_last_figure(
    tmp_path, monkeypatch, capsys
):
    speed, results = load("speed", monkeypatch), tmp_path / "speed.jsonl"
    monkeypatch.setattr(speed, "PAGE", tmp_path / "README.md")
    monkeypatch.setattr(speed, "describe_run", lambda: dict(ABOUT))
    speed.keep(results, line("memory", figures={"memory": 1.0}, commit="older"))
    asked: list[tuple[str, int]] = []

    def measured(name: str, threads: int, quick: bool, operations: bool) -> dict[str, Any]:
        asked.append((name, threads))
        if name == "memory":
            raise RuntimeError("no room")
        return {"best of Opacus": 2.5, "ordinary": 1.2, "channels-last": 0.8}

    monkeypatch.setattr(speed, "measured", measured)
    command = ["speed.py", "--only", "cnn", "memory", "--results", str(results)]
    for more, wanted in (
        ([], [("cnn", 1), ("cnn", 2), ("memory", 1)]),
        ([], [("memory", 1)]),
        (["--again"], [("cnn", 1), ("cnn", 2), ("memory", 1)]),
    ):
        asked.clear()
        monkeypatch.setattr(sys, "argv", [*command, *more])
        with pytest.raises(SystemExit, match="failed: memory/1"):
            speed.main()
        assert asked == wanted
    assert "memory, 1 threads: failed: no room" in capsys.readouterr().out
    kept = {each["part"]: each for each in map(json.loads, results.read_text().splitlines())}
    assert kept["memory/1/AMD"]["commit"] == "older" and len(kept) == 3
    assert speed.PAGE.read_text().count("| TF-Privacy CNN, batch 256 |") == 3


def test_operations_are_kept_beside_and_leave_the_page(tmp_path, monkeypatch, capsys):
    speed = load("speed", monkeypatch)
    kept, page = tmp_path / "operations.jsonl", tmp_path / "README.md"
    monkeypatch.setattr(speed, "PAGE", page)
    monkeypatch.setattr(speed, "OPERATIONS", kept)
    monkeypatch.setattr(speed, "describe_run", lambda: dict(ABOUT))
    found = {"ms": {"ours": {"in all": 3.0, "aten::mm": 2.0, "others": 0.5, "outside": 0.5}}}
    monkeypatch.setattr(speed, "measured", lambda *asked: found if asked[3] else None)
    monkeypatch.setattr(sys, "argv", ["speed.py", "--operations", "--only", "cnn", "memory"])
    speed.main()
    (made,) = map(json.loads, kept.read_text().splitlines())
    assert (made["row"], made["threads"], made["figures"]) == ("cnn", 1, found)
    assert '"aten::mm": 2.0' in capsys.readouterr().out and not page.exists()


def test_all_time_of_a_step_is_told_by_operation(monkeypatch):
    speed, factor = load("speed", monkeypatch), torch.rand(300, 300)
    told = speed.by_operation({"ours": lambda: factor @ factor, "opacus ew": lambda: 1 / 0})
    assert list(told["ms"]) == ["ours"]
    spent = told["ms"]["ours"]
    inside = spent.keys() - {"in all", "outside"}  # a busy machine spends more outside
    assert max(inside, key=spent.__getitem__) == "aten::mm"
    assert abs(sum(spent.values()) - 2 * spent["in all"]) < 0.2


@pytest.mark.whole
def test_it_says_something_at_once(tmp_path: Path):
    """Torch is loaded by the process of a row, not before the first line."""
    command = [sys.executable, str(BENCHMARKS / "speed.py"), "--only", "cnn"]
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, "--results", str(tmp_path / "speed.jsonl")], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said, seconds = process.stdout.readline(), time.monotonic() - began
    os.killpg(process.pid, signal.SIGKILL)  # the process of its row, too
    process.stdout.close()
    process.wait()
    assert said.startswith("2 measurements on ")
    assert seconds < 5  # a quarter of a second with nothing beside it
