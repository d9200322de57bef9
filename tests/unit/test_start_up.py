"""What needs neither torch nor Ray loads neither."""

from __future__ import annotations

import subprocess
import sys

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
