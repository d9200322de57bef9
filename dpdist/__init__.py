"""Differentially private training, private tuning and certified robustness on Ray clusters.

import dpdist
folder = dpdist.run("digits")              # everything the recipe asks for
facts = dpdist.read_facts(folder)          # epsilon, accuracy, certificates
dpdist.write_release(folder)               # what may be published; also `dpdist release`
release = dpdist.load("runs/x/release")    # here or elsewhere
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpdist.base.errors import ClusterError as ClusterError
    from dpdist.base.errors import UserError as UserError
    from dpdist.certification.catalogue import settings_of as settings_of
    from dpdist.certification.job import certify as certify
    from dpdist.certification.population import population_bounds as population_bounds
    from dpdist.cluster.session import connect as connect
    from dpdist.commands.releasing import write_release as write_release
    from dpdist.pipeline import run as run
    from dpdist.privacy.guarantee import Guarantee as Guarantee
    from dpdist.privacy.plan import PrivacyPlan as PrivacyPlan
    from dpdist.release.reading import Release as Release
    from dpdist.release.reading import load as load
    from dpdist.reports.facts import Facts as Facts
    from dpdist.reports.facts import read_facts as read_facts
    from dpdist.runs.folder import RunFolder as RunFolder
    from dpdist.runs.recipe import Recipe as Recipe
    from dpdist.training.trainer import train as train

__version__ = "0.1.0"

_LAZY = {
    "run": "dpdist.pipeline",
    "Recipe": "dpdist.runs.recipe",
    "PrivacyPlan": "dpdist.privacy.plan",
    "Guarantee": "dpdist.privacy.guarantee",
    "RunFolder": "dpdist.runs.folder",
    "Facts": "dpdist.reports.facts",
    "read_facts": "dpdist.reports.facts",
    "settings_of": "dpdist.certification.catalogue",
    "certify": "dpdist.certification.job",
    "population_bounds": "dpdist.certification.population",
    "train": "dpdist.training.trainer",
    "connect": "dpdist.cluster.session",
    "write_release": "dpdist.commands.releasing",
    "load": "dpdist.release.reading",
    "Release": "dpdist.release.reading",
    "UserError": "dpdist.base.errors",
    "ClusterError": "dpdist.base.errors",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    """Import on first use: the calculators start without torch and Ray."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dpdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
