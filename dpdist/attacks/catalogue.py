"""The kinds of evaluations; a new one is its class and a line here."""

from __future__ import annotations

from dpdist.attacks.settings import AttackSettings, CheckSettings
from dpdist.bulk.evaluation import Evaluation

EVALUATIONS: tuple[type[Evaluation], ...] = (AttackSettings, CheckSettings)
