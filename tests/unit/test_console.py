"""Progress lines on a terminal."""

from __future__ import annotations

import os
import re
import sys
import termios

from dpdist.core import console


def test_a_progress_line_leaves_nothing_behind(monkeypatch):
    shown, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 40))
    with open(terminal, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        with console.progress("training", "steps") as show:
            show(0, 100, 1.0)  # a longer line than the terminal is wide
            console.log("a note")
            show(7, 100, 1.0)  # too soon to be shown, except as the final state
        console.log("the next line")
        written = ""
        while not written.endswith("the next line\r\n"):  # a terminal passes its text on in parts
            written += os.read(shown, 10_000).decode()
    os.close(shown)
    erase = "\x1b[2K"
    assert max(map(len, re.split(re.escape(erase) + "|[\r\n]", written))) < 40
    rows = [row.rpartition(erase)[2].strip() for row in written.split("\n")]
    assert rows == ["a note", "training: 7 of 100 steps in 0:00", "the next line", ""]


def test_the_time_left_does_not_count_the_start_of_the_workers(monkeypatch, capsys) -> None:
    clock = iter([0.0, 0.0, 100.0, 110.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress("certifying", "inputs", "samples") as show:
        for done in (30, 31, 41):
            show(done, 61, 1.0)
    assert "0:20 left" in capsys.readouterr().err.splitlines()[-2]
