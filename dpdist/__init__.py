"""Differentially private training, private tuning and certified robustness on Ray clusters.

import dpdist
folder = dpdist.run("digits")              # everything the recipe asks for
facts = dpdist.load_results(folder)          # epsilon, accuracy, certificates
dpdist.write_release(folder)               # the publishable files; also `dpdist release`
release = dpdist.load("runs/x/release")    # here or elsewhere
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpdist.core.optional_imports import install_torchvision_hook
from dpdist.core.script_errors import install_error_hooks
from dpdist.core.version import __version__

install_torchvision_hook()  # for what is imported after dpdist
install_error_hooks()

if TYPE_CHECKING:
    from dpdist.attacks.attacking import attack as attack
    from dpdist.certification.cohen import Cohen as Cohen
    from dpdist.certification.expected_scores import ExpectedScores as ExpectedScores
    from dpdist.certification.registry import settings_of as settings_of
    from dpdist.certification.sequential import Anytime as Anytime
    from dpdist.certification.sequential import TargetRadius as TargetRadius
    from dpdist.certification.statistics import population_bounds as population_bounds
    from dpdist.certification.variants import HoeffdingVotes as HoeffdingVotes
    from dpdist.certification.variants import TwoClass as TwoClass
    from dpdist.certifying import CertificateTable as CertificateTable
    from dpdist.certifying import certify as certify
    from dpdist.checking import CheckResult as CheckResult
    from dpdist.checking import check as check
    from dpdist.cluster.session import connect as connect
    from dpdist.config.sections import Privacy as Privacy
    from dpdist.core.errors import ClusterError as ClusterError
    from dpdist.core.errors import UserError as UserError
    from dpdist.data.adapters import as_records as as_records
    from dpdist.data.documents import documents as documents
    from dpdist.data.preprocessing import Preprocessing as Preprocessing
    from dpdist.data.protocol import Records as Records
    from dpdist.gradients.clipping import AutomaticClipping as AutomaticClipping
    from dpdist.gradients.clipping import FlatClipping as FlatClipping
    from dpdist.gradients.clipping import PerLayerClipping as PerLayerClipping
    from dpdist.gradients.engine import GradientEngine as GradientEngine
    from dpdist.gradients.objective import language_model_loss as language_model_loss
    from dpdist.gradients.objective import preference_loss as preference_loss
    from dpdist.models.prepare import prepare as prepare
    from dpdist.pipeline import run as run
    from dpdist.privacy.calibration import calibrate_noise as calibrate_noise
    from dpdist.privacy.guarantee import Guarantee as Guarantee
    from dpdist.privacy.plan import PrivacyPlan as PrivacyPlan
    from dpdist.private_training import PrivateTraining as PrivateTraining
    from dpdist.private_training import fit as fit
    from dpdist.publishing import write_release as write_release
    from dpdist.release.bundle import Release as Release
    from dpdist.release.bundle import load as load
    from dpdist.reports.results import RunResults as RunResults
    from dpdist.reports.results import load_results as load_results
    from dpdist.runs.folder import RunFolder as RunFolder
    from dpdist.runs.recipe import Recipe as Recipe
    from dpdist.searching import SearchResult as SearchResult
    from dpdist.searching import trainable as trainable
    from dpdist.searching import tune as tune
    from dpdist.training.estimate import Estimate as Estimate
    from dpdist.training.estimate import estimate as estimate
    from dpdist.training.preference_pairs import preferences as preferences
    from dpdist.training.private_step import PrivateStep as PrivateStep
    from dpdist.training.record_scores import balanced_accuracy as balanced_accuracy
    from dpdist.training.record_scores import bounded_score as bounded_score
    from dpdist.training.record_scores import brier_score as brier_score
    from dpdist.training.record_scores import log_loss_score as log_loss_score
    from dpdist.training.script_history import StepReport as StepReport
    from dpdist.training.statistics import Statistics as Statistics
    from dpdist.training.statistics import statistics as statistics
    from dpdist.training.trainer import train as train

_LAZY = {
    "run": "dpdist.pipeline",
    "Recipe": "dpdist.runs.recipe",
    "PrivacyPlan": "dpdist.privacy.plan",
    "Guarantee": "dpdist.privacy.guarantee",
    "calibrate_noise": "dpdist.privacy.calibration",
    "RunFolder": "dpdist.runs.folder",
    "RunResults": "dpdist.reports.results",
    "load_results": "dpdist.reports.results",
    "settings_of": "dpdist.certification.registry",
    "certify": "dpdist.certifying",
    "attack": "dpdist.attacks.attacking",
    "CertificateTable": "dpdist.certifying",
    "Cohen": "dpdist.certification.cohen",
    "HoeffdingVotes": "dpdist.certification.variants",
    "TwoClass": "dpdist.certification.variants",
    "TargetRadius": "dpdist.certification.sequential",
    "Anytime": "dpdist.certification.sequential",
    "ExpectedScores": "dpdist.certification.expected_scores",
    "population_bounds": "dpdist.certification.statistics",
    "train": "dpdist.training.trainer",
    "statistics": "dpdist.training.statistics",
    "Statistics": "dpdist.training.statistics",
    "PrivateStep": "dpdist.training.private_step",
    "GradientEngine": "dpdist.gradients.engine",
    "FlatClipping": "dpdist.gradients.clipping",
    "PerLayerClipping": "dpdist.gradients.clipping",
    "AutomaticClipping": "dpdist.gradients.clipping",
    "PrivateTraining": "dpdist.private_training",
    "StepReport": "dpdist.training.script_history",
    "fit": "dpdist.private_training",
    "check": "dpdist.checking",
    "CheckResult": "dpdist.checking",
    "prepare": "dpdist.models.prepare",
    "estimate": "dpdist.training.estimate",
    "Estimate": "dpdist.training.estimate",
    "tune": "dpdist.searching",
    "SearchResult": "dpdist.searching",
    "trainable": "dpdist.searching",
    "balanced_accuracy": "dpdist.training.record_scores",
    "bounded_score": "dpdist.training.record_scores",
    "brier_score": "dpdist.training.record_scores",
    "log_loss_score": "dpdist.training.record_scores",
    "Privacy": "dpdist.config.sections",
    "connect": "dpdist.cluster.session",
    "Records": "dpdist.data.protocol",
    "as_records": "dpdist.data.adapters",
    "documents": "dpdist.data.documents",
    "Preprocessing": "dpdist.data.preprocessing",
    "language_model_loss": "dpdist.gradients.objective",
    "preferences": "dpdist.training.preference_pairs",
    "preference_loss": "dpdist.gradients.objective",
    "write_release": "dpdist.publishing",
    "load": "dpdist.release.bundle",
    "Release": "dpdist.release.bundle",
    "UserError": "dpdist.core.errors",
    "ClusterError": "dpdist.core.errors",
}
__all__ = ["__version__", *_LAZY]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import on first use: the calculators start without torch and Ray."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dpdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
