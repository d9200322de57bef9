"""One of each method of the registry, with the options that it cannot do without."""

from __future__ import annotations

from dpdist.methods.base import Method
from dpdist.methods.registry import METHODS

_REQUIRED = {
    "input-noise": {"sigma": 0.5},
    "noisy-records": {"input_norm": 1.0, "label_epsilon": 1.0},
    "pate": {"teachers": 2, "public": {"data": "digits"}, "queries": 2, "answers": 2},
    "private-prediction": {"teachers": 2, "logit_bound": 1.0, "queries": 2},
    "residual": {"gamma": 0.5},
}


def every_method() -> list[Method]:
    """Return one of each, in the registry's order."""
    return [kind(**_REQUIRED.get(kind.model_fields["name"].default, {})) for kind in METHODS]
