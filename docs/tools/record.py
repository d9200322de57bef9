"""Record a run that is killed and resumed, and render the terminal as an animated SVG.

    python docs/tools/record.py     # about half a minute; writes docs/pictures/resume.svg

The two commands printed everything in the picture, except "Killed", which is a shell's own word.
Waits of more than 0.3 seconds are cut to that.
"""

from __future__ import annotations

import fcntl
import html
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

PICTURE = Path(__file__).resolve().parent.parent / "pictures" / "resume.svg"
COMMAND = "dpdist run digits --name demo --until train --set resources.checkpoint_seconds=1"
COLUMNS, WIDTH, HEIGHT = 114, 8.45, 22  # columns of the terminal; pixels of a character
PAUSE, END = 0.3, 6.0  # seconds: the longest wait in the picture, and how long its end is shown


@dataclass(frozen=True)
class Shown:
    """A line of the terminal as it reads from a time on. row: counted from 0."""

    time: float
    row: int
    text: str


def output_of(folder: Path, kill_at: int | None = None) -> Iterator[tuple[float, str]]:
    """Run the command in a terminal, and yield what it prints, with the time.

    Args:
        folder: the working directory.
        kill_at: percentage of the training at which the process is killed; None: never.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    dpdist = str(Path(sys.executable).with_name("dpdist"))
    process = subprocess.Popen(
        [dpdist, *COMMAND.split()[1:]], cwd=folder, stdin=subprocess.DEVNULL, stdout=theirs,
        stderr=theirs, start_new_session=True, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    while True:
        try:
            text = os.read(ours, 65536).decode()
        except OSError:  # the other end is closed
            break
        if not text:
            break
        yield time.monotonic(), text
        done = re.findall(r"\((\d+)%\)", text)
        if kill_at is not None and done and int(done[-1]) >= kill_at:
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    os.close(ours)
    if code != (0 if kill_at is None else -signal.SIGKILL):
        raise SystemExit(f"the recorded command ended with {code}")


def record() -> list[Shown]:
    """Run, kill and resume. Returns every state of every line, in the order of time."""
    shown: list[Shown] = []
    lines = [""]
    now = 0.0

    def write(text: str) -> None:
        for part in re.findall(r"\r\n|\r|[^\r\n]+", text):
            if part == "\r\n":
                lines.append("")
            elif part == "\r":
                lines[-1] = "\0" + lines[-1]  # the next text is written over it
            else:
                old = lines[-1].removeprefix("\0") if lines[-1].startswith("\0") else ""
                before = "" if lines[-1].startswith("\0") else lines[-1]
                lines[-1] = before + part + old[len(part) :]
                shown.append(Shown(now, len(lines) - 1, lines[-1].rstrip()))

    with tempfile.TemporaryDirectory() as folder:
        for kill_at in (55, None):
            write(f"$ {COMMAND}")
            last = None
            for at, text in output_of(Path(folder), kill_at):
                now += PAUSE if last is None else min(PAUSE, at - last)
                last = at
                write("\r\n" + text if lines[-1].startswith("$") else text)
            if kill_at is not None:
                now += 0.5
                write("\r\nKilled\r\n\r\n")
                now += 1.5
    return shown


def render(shown: list[Shown]) -> str:
    """Return the SVG: each line is visible as long as it read so, over and over."""
    length = shown[-1].time + END
    rows = 1 + max(each.row for each in shown)
    parts, rules = [], []
    for row, states in groupby(sorted(shown, key=lambda each: each.row), lambda each: each.row):
        of_row = list(states)
        for state, following in zip(of_row, [*of_row[1:], None], strict=True):
            name = f"s{len(parts)}"
            first = 100 * state.time / length
            frames = f"0%{{opacity:0}}{first:.2f}%{{opacity:1}}" if first else "0%{opacity:1}"
            if following is not None:
                frames += f"{100 * following.time / length:.2f}%{{opacity:0}}"
            final = int(following is None)  # what stays, and is seen where nothing moves
            rules.append(f"@keyframes {name}{{{frames}100%{{opacity:{final}}}}}")
            motion = f"animation:{name} {length:.1f}s step-end infinite"
            rules.append(f"#{name}{{opacity:{final};{motion}}}")
            kind = {"$": "command", "K": "killed"}.get(state.text[:1], "")
            text = html.escape(state.text).replace(
                "ε = 2.999", '<tspan class="e">ε = 2.999</tspan>'
            )
            place = f'class="{kind}" x="16" y="{34 + HEIGHT * row}"'
            parts.append(f'<text id="{name}" {place}>{text}</text>')
    width, height = round(COLUMNS * WIDTH + 32), 34 + HEIGHT * rows
    style = ("text{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d5dae3;"
             "white-space:pre}.command{fill:#fff;font-weight:bold}.killed{fill:#ff8b81}"
             ".e{fill:#7ee2a8;font-weight:bold}"
             "@media (prefers-reduced-motion){text{animation:none!important}}")  # fmt: skip
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" role="img" '
            f'viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
            "<title>A private training is killed, and the same command resumes it</title>",
            f"<style>{style}{''.join(rules)}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#1b1f27"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(render(record()))
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")
