"""One of each method of the registry, with the options that it cannot do without; and a method that
waits for its test."""

from __future__ import annotations

from dpdist.methods.base import Method
from dpdist.methods.registry import installed_methods

_REQUIRED = {
    "input-noise": {"sigma": 0.5},
    "noisy-records": {"input_norm": 1.0, "label_epsilon": 1.0},
    "pate": {"teachers": 2, "public": {"data": "digits"}, "queries": 2, "answers": 2},
    "private-prediction": {"teachers": 2, "logit_bound": 1.0, "queries": 2},
    "residual": {"gamma": 0.5},
}


def every_method() -> list[Method]:
    """Return one of each, in the registry's order."""
    return [
        kind(**_REQUIRED.get(kind.model_fields["name"].default, {})) for kind in installed_methods()
    ]


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
