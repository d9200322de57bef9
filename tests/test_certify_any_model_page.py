"""docs/how-to/certify-any-model.md: every snippet runs, in order, in an empty folder."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from support.local_execution import call

PAGE = Path(__file__).resolve().parents[1] / "docs/how-to/certify-any-model.md"
SNIPPETS = re.findall(r"^```([^\n]*)\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)


@pytest.mark.slow
def test_every_snippet_runs(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ran = 0
    for kind, text in SNIPPETS:
        if kind.startswith("python file="):
            (tmp_path / kind.partition("=")[2]).write_text(text)
            sys.modules.pop("nets", None)
            module = importlib.import_module("nets")
            torch.save(module.small().state_dict(), "net.pt")
        elif kind == "python":
            exec(compile(text, str(PAGE), "exec"), {})
        else:
            for line in text.splitlines():
                done = call(*shlex.split(line)[1:])
                assert done.exit_code == 0, (line, done.output, done.exception)
                ran += 1
    assert ran == 6
    (inline,) = re.findall(r"`dpdist (certify --model [^`]*)`", PAGE.read_text())
    done = call(*shlex.split(inline))
    assert done.exit_code == 0, (done.output, done.exception)
    report = (tmp_path / "runs/mine/report/index.html").read_text()
    assert "not trained by dpdist: no epsilon" in report.lower()
