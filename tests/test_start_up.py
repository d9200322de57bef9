"""What a command refuses, it refuses before torch or Ray is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = """
import contextlib, io, os, sys
from pathlib import Path
from support.refusals import CASES, prepare
from dpdist.cli.main import main

prepare(Path("."))
LIGHT = [
    "run nothing", "audit nothing", "predict nothing image.png", "report nothing",
    "compare nothing other",
]
NO_LAW = "audit small.yaml --set nothing=1"  # before others, which may load what it must not
for number, arguments in enumerate([*LIGHT, NO_LAW, *CASES]):
    sys.argv = ["dpdist", *arguments.split()]
    said, code = io.StringIO(), 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    heavy = ["torch", "ray"] + ["scipy.special", "pyarrow"] * (number < len(LIGHT))
    heavy += ["scipy.stats._stats_py", "dp_accounting.pld"] * (number <= len(LIGHT))
    loaded = set(heavy) & set(sys.modules)
    assert not loaded, (arguments, loaded)
    assert code == (0 if arguments == "--version" else 2), (arguments, code, said.getvalue())
    assert "Traceback" not in said.getvalue(), said.getvalue()
"""


@pytest.mark.e2e
def test_no_refusal_loads_torch_or_ray(tmp_path):
    """One after the other in one process: the first that loads them is named."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


LIGHT = (
    "dpdist.cli.main",
    "dpdist.runs.recipe",
    "dpdist.methods.registry",
    "dpdist.privacy.plan",
    "dpdist.privacy.ledger",
    "dpdist.certification.registry",
    "dpdist.certification.table_reader",
    "dpdist.release.bundle",
    "dpdist.audits.membership_findings",
    "dpdist.audits.registry",
    "dpdist.attacks.table",
    "dpdist.models",
    "dpdist.data",
    "dpdist.pipeline",
    "dpdist.training.pretraining",
    "dpdist.reports.html",
    "dpdist.publishing",
)


def test_light_modules_import_neither_torch_nor_ray():
    """One after the other in one process: the first that imports them is named."""
    lines = [
        f"import {name}; print('{name}', {{'torch', 'ray'}} & set(sys.modules))" for name in LIGHT
    ]
    code = "\n".join(["import sys", *lines])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if not line.endswith(" set()")] == []
