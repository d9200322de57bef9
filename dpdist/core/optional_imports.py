"""Import optional libraries: extras and torchvision; convert read-only arrays.

The error about a missing extra has the command that installs it. With a CPU-only torch the import
of torchvision fails, because the schemas of two compiled operators are missing; with these two
schemas its data sets, transforms and models work (Pillow decodes images). `import dpdist` installs
a hook that defines them, whichever library imports torchvision afterwards.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dpdist.core.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


# --- libraries of extras ----------------------------------------------------------------------


def import_extra(name: str, extra: str, key: str) -> ModuleType:
    """Return the module `name`.

    key: the recipe's key that needs it. Raises UserError when it is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{key}: needs {name} ({error}): pip install 'dpdist[{extra}]'") from error


# --- torchvision ------------------------------------------------------------------------------


_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_torch_library = None  # kept, as definitions vanish with this object


def import_torchvision(submodule: str = "") -> ModuleType:
    """Return the module torchvision, or one of its submodules ("datasets", "models", ...)."""
    install_torchvision_hook()
    return importlib.import_module(f"torchvision.{submodule}" if submodule else "torchvision")


def _define_schemas() -> None:
    global _torch_library  # noqa: PLW0603
    if _torch_library is None:
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                library.define(schema)
        _torch_library = library


class _TorchvisionPatcher(MetaPathFinder):
    """An import hook that defines torchvision's missing schemas when any library imports it.

    Checking whether torchvision is installed neither imports it nor fails.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        others = [each for each in sys.meta_path if each is not self]
        specs = (each.find_spec(name, path, target) for each in others)
        spec = next((each for each in specs if each is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            loader.exec_module = partial(_execute_mended, loader.exec_module)
        return spec


def _execute_mended(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute torchvision, and again with the schemas defined if they are missing."""
    try:
        execute(module)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for half_imported in [name for name in sys.modules if name.startswith("torchvision.")]:
            del sys.modules[half_imported]
        _define_schemas()
        execute(module)


def install_torchvision_hook() -> None:
    """Install the import hook, at no cost until torchvision is imported."""
    if not any(isinstance(each, _TorchvisionPatcher) for each in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionPatcher())


# --- tensors of foreign arrays ----------------------------------------------------------------


def array_to_tensor(array: np.ndarray) -> Tensor:
    """Return an array as a tensor on the same memory, or on a copy if the array is read-only.

    Arrays from Ray's object store or a mapped file are read-only, for which torch prints a warning.
    """
    import torch

    return torch.from_numpy(array if array.flags.writeable else array.copy())
