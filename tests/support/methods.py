"""A method that waits for its test."""

from __future__ import annotations

# A method of one's own, DP-SGD, that goes no further than the test lets it: after so many steps as
# the file says its workers wait until it says more. So a training does not end before a node has
# gone or come, which Ray notices up to twenty seconds later, however fast the machine is.
GATED = """
import json, time
from pathlib import Path
from dpdist.methods.dp_sgd import DPSGD, DPSGDExecution

LIMIT = Path(__file__).with_name("limit")
METRICS = Path(__file__).parent / "runs" / "small" / "private" / "metrics.jsonl"

def read(path, what):
    try:
        return what(path.read_text())
    except (OSError, ValueError, IndexError):
        return 0

def done(text):
    return json.loads(text.splitlines()[-1])["step"] + 1

class Gated(DPSGD):
    name: str = "gated:Gated"

    def execution(self):
        return GatedExecution(self)

class GatedExecution(DPSGDExecution):
    def project_parameters(self, model):
        seen = []

        def wait():  # once before the first step, then after each
            while seen and LIMIT.exists() and read(METRICS, done) >= read(LIMIT, int):
                time.sleep(0.01)
            seen.append(1)

        return wait
"""
