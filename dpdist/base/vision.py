"""The one door to torchvision, which a CPU-only torch otherwise refuses to import.

torchvision's compiled operators do not load without CUDA; its import then fails on the missing
schemas of two of them. Defining those two schemas makes data sets, transforms and models work (its
image decoder stays away: we decode with Pillow).
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library = None  # torch.library definitions vanish with their object: keep it


def torchvision(submodule: str = "") -> ModuleType:
    """The module torchvision, or one of its submodules ("datasets", "models", ...)."""
    name = f"torchvision.{submodule}" if submodule else "torchvision"
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for half_imported in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
        del sys.modules[half_imported]
    _define_schemas()
    return importlib.import_module(name)


def _define_schemas() -> None:
    global _library
    if _library is None:
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                library.define(schema)
        _library = library


class _Mender(MetaPathFinder):
    """Whoever imports torchvision first (an unpickled model, a library) gets the mended one."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            torchvision()
            return sys.modules["torchvision"].__spec__
        return None


def install() -> None:
    """Worker process setup hook: costs nothing until torchvision is imported."""
    if "torchvision" not in sys.modules and not any(isinstance(f, _Mender) for f in sys.meta_path):
        sys.meta_path.insert(0, _Mender())
