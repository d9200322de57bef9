"""Read the weights of a model from elsewhere: a PyTorch state dict or a safetensors file.

Nothing is unpickled but numbers: a file that would run code when it is loaded is refused with the
line that turns it into one that would not.
"""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.core.files import check_regular_file, error_text

# Under which keys training scripts keep the state dict of the model beside other things.
_INSIDE = ("state_dict", "model_state_dict", "model", "net", "params", "weights")
_WRAPPED = ("module.", "_orig_mod.", "model.")  # of DataParallel, torch.compile, Lightning
_COUNTER = "num_batches_tracked"  # of BatchNorm: not used in evaluation
_SHOWN = 3


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a state dict by name, on the CPU.

    Args:
        path: a .safetensors file, or one that `torch.save(model.state_dict(), path)` wrote; a
            checkpoint that holds the state dict under a key such as "state_dict" is one too.

    Raises:
        UserError: there is no such file, it is damaged, or it holds objects whose loading would
            run code.
    """
    check_regular_file(path)
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise UserError(f"{path}: must be a safetensors file: {error_text(error)}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an archive that is then refused
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: must hold tensors only, and holds objects of other classes, whose loading "
            f"would run code ({_global(error)}). Where you trust the file, save its state dict: "
            f"python -c \"import torch; m = torch.load('{path}', weights_only=False); "
            "torch.save(m.state_dict(), 'weights.pt')\""
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        what = "a TorchScript archive" if "TorchScript" in str(error) else "no PyTorch file"
        raise UserError(
            f"{path}: must be a state dict (torch.save(model.state_dict(), path)) or a "
            f".safetensors file, got {what}: {error_text(error)}"
        ) from None
    return _state_dict(found, path)


def _global(error: Exception) -> str:
    """The class that a pickle asked for, in few words."""
    words = str(error).split()
    after = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "GLOBAL"]
    return after[0].rstrip(".") if after else "a pickled object"


def _state_dict(found: Any, path: Path) -> dict[str, Tensor]:
    """The tensors by name, from a checkpoint that may hold them under a key."""
    if isinstance(found, Mapping):
        tensors = {str(name): each for name, each in found.items() if isinstance(each, Tensor)}
        if tensors and len(tensors) == len(found):
            return tensors
        for key in _INSIDE:
            if isinstance(found.get(key), Mapping):
                return _state_dict(found[key], path)
    keys = ", ".join(map(str, list(found)[:5])) if isinstance(found, Mapping) else "no names"
    raise UserError(
        f"{path}: must be a state dict, a name for each tensor, got {type(found).__name__} with "
        f"{keys}: save model.state_dict()"
    )


def load_foreign(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy weights from elsewhere into a module of the same architecture.

    Names that a wrapper put before all others ("module.") are taken off, and BatchNorm's counters
    of batches, which evaluation does not use, may be missing on either side.

    Raises:
        UserError: a tensor is missing, is left over, has another shape or is not finite.
    """
    own = module.state_dict()
    given = _unwrapped(dict(tensors), own.keys())
    missing = sorted(name for name in own.keys() - given.keys() if not name.endswith(_COUNTER))
    left = sorted(name for name in given.keys() - own.keys() if not name.endswith(_COUNTER))
    shapes = [
        f"{name} is {tuple(given[name].shape)}, not {tuple(own[name].shape)}"
        for name in sorted(own.keys() & given.keys()) if given[name].shape != own[name].shape
    ]  # fmt: skip
    problems = [
        f"{what} {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for what, names in (("lacks", missing), ("has besides", left), ("where", shapes))
        if names
    ]
    if problems:
        raise UserError(
            f"{path}: must hold the weights of the model; it {'; '.join(problems)}: name the "
            "factory and the options (--option) that the weights were trained with",
            see="how-to/certify-any-model.md#by-command",
        )
    bad = [n for n, each in given.items() if each.is_floating_point() and not each.isfinite().all()]
    if bad:
        raise UserError(f"{path}: {bad[0]} must be finite numbers; did its training diverge?")
    module.load_state_dict({**own, **{name: given[name] for name in own.keys() & given.keys()}})


def _unwrapped(tensors: dict[str, Tensor], own: Any) -> dict[str, Tensor]:
    while tensors and not set(tensors) & set(own):
        prefix = next((p for p in _WRAPPED if all(n.startswith(p) for n in tensors)), None)
        if prefix is None:
            break
        tensors = {name.removeprefix(prefix): each for name, each in tensors.items()}
    return tensors


def file_digest(path: Path) -> str:
    """Return the SHA-256 sum of a file, as `sha256sum` prints it."""
    with check_regular_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
