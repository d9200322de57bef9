"""Settings of certificates, as a recipe would say them."""

from __future__ import annotations

from typing import Any

from dpdist.certification.catalogue import settings_of
from dpdist.certification.certificate import Certificate


def changed(settings: Certificate, **changes: Any) -> Certificate:
    """The same settings but for these; another mode is another certificate."""
    return settings_of({**settings.model_dump(), **changes})
