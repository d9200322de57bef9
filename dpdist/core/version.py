"""The version of dpdist, in a module without imports of other modules."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).parent.parent  # the folder dpdist
