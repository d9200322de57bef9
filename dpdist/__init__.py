"""Differentially private training, private tuning and certified robustness on Ray clusters.

import dpdist
folder = dpdist.run("digits")              # everything the recipe asks for
facts = dpdist.read_facts(folder)          # epsilon, accuracy, certificates
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "run": "dpdist.pipeline",
    "Recipe": "dpdist.runs.recipe",
    "PrivacyPlan": "dpdist.privacy.plan",
    "RunFolder": "dpdist.runs.folder",
    "read_facts": "dpdist.reports.facts",
    "settings_of": "dpdist.certification.catalogue",
    "certify": "dpdist.certification.job",
    "train": "dpdist.training.trainer",
    "connect": "dpdist.cluster.session",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    """Import on first use: the calculators start without torch and Ray."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dpdist' has no attribute {name!r}")
