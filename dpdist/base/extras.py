"""The one door to libraries that an extra brings: what to install where one is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from dpdist.base import vision
from dpdist.base.errors import UserError


def library(name: str, extra: str, key: str) -> ModuleType:
    """The module `name`. key: of the recipe that needs it. Raises UserError when it is missing."""
    vision.install()  # what it imports may import torchvision
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{key}: needs {name} ({error}): pip install 'dpdist[{extra}]'") from error
