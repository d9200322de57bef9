"""From what a recipe or a command line says to the settings of a certification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dpdist.certification.score_settings import ScoreSettings
from dpdist.certification.settings import CertifySettings
from dpdist.errors import UserError

# Of smoothing only, with the value that says nothing.
_SMOOTHING: dict[str, object] = {"mode": "fixed", "noise": "gaussian", "noise_bank": False}
_SCORES: dict[str, object] = {"bound": "hoeffding", "norm": "l2"}


def settings_of(section: Mapping[str, Any]) -> CertifySettings | ScoreSettings:
    """Smoothing of the inputs when ``sigma`` is given, else expected scores of the model's noise.

    Raises UserError for a value that cannot be used, or that belongs to the other kind.
    """
    given = dict(section)
    kind: type[CertifySettings | ScoreSettings]
    if given.get("sigma") is None:
        given.pop("sigma", None)
        kind, foreign, why = ScoreSettings, _SMOOTHING, "without sigma, by expected scores"
    else:
        kind, foreign, why = CertifySettings, _SCORES, "with sigma, by smoothing the inputs"
    for name, neutral in foreign.items():
        value = given.pop(name, None)
        if value not in (None, neutral):
            raise UserError(f"certify.{name}: must be left out {why}, got {value!r}")
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in given.items() if name in known})
