"""Read the weights of an imported model, and separate an adapter from its base.

Weights are a PyTorch state dict or a safetensors file. Only numbers are unpickled: a file that
would run code raises an error with a command that converts it.

An adapter has the form of `peft`. A base is identified by a digest of its weights.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.core.files import check_regular_file, error_text
from dpdist.models.outputs import is_causal

# Keys under which checkpoints have the model's state dict.
_INSIDE = ("state_dict", "model_state_dict", "model", "net", "params", "weights")
_WRAPPED = ("module.", "_orig_mod.", "model.")  # of DataParallel, torch.compile, Lightning
_COUNTER = "num_batches_tracked"  # of BatchNorm: not used in evaluation


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
            warnings.simplefilter("ignore")  # about an archive that raises an error
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: must hold tensors only, and holds objects of other classes, whose loading "
            f"would run code ({_global(error)}). Where you trust the file, save its state dict: "
            f"python -c \"import torch; m = torch.load('{path}', weights_only=False); "
            "torch.save(m.state_dict(), 'weights.pt')\""
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path}: must be a state dict (torch.save(model.state_dict(), path)) or a "
            f".safetensors file, got another: {error_text(error)}"
        ) from None
    return _state_dict(found, path)


def _global(error: Exception) -> str:
    """Return the name of the class that a pickle needs."""
    words = str(error).split()
    after = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "GLOBAL"]
    return after[0].rstrip(".") if after else "a pickled object"


def _state_dict(found: Any, path: Path) -> dict[str, Tensor]:
    """Return the tensors by name, from a checkpoint that may have them under a key."""
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
    """Copy the weights of an imported model into a module of the same architecture.

    The prefix of a wrapper ("module.") is removed from names, and BatchNorm's counters of batches,
    which evaluation does not use, may be missing on either side.

    Raises:
        UserError: a tensor is missing, unexpected, of a different shape or not finite.
    """
    own = module.state_dict()
    given = _unwrapped(dict(tensors), own.keys())
    given = {n: each for n, each in given.items() if n in own or not n.endswith(_COUNTER)}
    given = {n: each for n, each in own.items() if n.endswith(_COUNTER)} | given
    bad = [n for n, each in given.items() if each.is_floating_point() and not each.isfinite().all()]
    if bad:
        raise UserError(
            f"{path}: {bad[0]} must be finite, got NaN or Inf; check that its training did not "
            "diverge"
        )
    try:
        module.load_state_dict(given)
    except RuntimeError as error:  # torch names the tensors
        raise UserError(
            f"{path}: must have the weights of the model: {error_text(error)}; name the factory "
            "and the options (--option) that the weights were trained with",
            see="how-to/certify-any-model.md#by-command",
        ) from None


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


# --- adapters ---------------------------------------------------------------------------------


# peft's names of the wrapped layers of a base, and of trained copies.
_WITHIN_ADAPTERS = ("base_layer", "original_module")
_TRAINED_COPIES = "modules_to_save"
_OF_PEFT = "base_model.model."  # prefix of names of tensors in peft's files
_ONE_ADAPTER = "default"


def _without_wrapper(model: nn.Module) -> Any:
    """Return the base with its adapters, without peft's wrapper."""
    holder: Any = _adapted(model) or model
    return holder.get_base_model() if hasattr(holder, "get_base_model") else holder


def _adapted(model: nn.Module) -> Any:
    """Return the module with peft's adapter; None if there is none, or several."""
    for each in model.modules():
        configs: Any = getattr(each, "peft_config", None)
        if configs:
            return each if list(configs) == [_ONE_ADAPTER] else None
    return None


def base_digest(model: nn.Module) -> str:
    """Return a digest, 32 hex digits, of the weights of a base, with or without adapters.

    It covers names, types, shapes and values of all tensors outside adapters.

    Args:
        model: a model of `transformers`, or a `peft` model of one.

    Example:
        >>> import torch
        >>> base_digest(torch.nn.Linear(2, 1)) == base_digest(torch.nn.Linear(2, 1))
        False
    """
    base = _without_wrapper(model)
    prefixes = {str(getattr(each, "prefix", "")) for each in model.modules()} | {"lora_", "ia3_"}
    marks = tuple(prefix for prefix in prefixes if prefix)
    digest = hashlib.blake2b(digest_size=16, person=b"dpdist.base")
    found: dict[str, Tensor] = {}
    for name, tensor in base.state_dict().items():
        parts = name.split(".")
        if _TRAINED_COPIES not in parts and not any(part.startswith(marks) for part in parts):
            found[".".join(part for part in parts if part not in _WITHIN_ADAPTERS)] = tensor
    for name, tensor in sorted(found.items()):
        plain = tensor.detach().cpu().contiguous()
        told = name, str(plain.dtype), tuple(plain.shape)
        digest.update(repr(told).encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def base_dtype(model: nn.Module) -> str:
    """Return the type of the numbers of a model's base, such as "float32"."""
    return str(getattr(_without_wrapper(model), "dtype", torch.float32)).removeprefix("torch.")


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model, as `peft.PeftModel.from_pretrained` reads it.

    config: peft's configuration. tensors: by their names in peft's files. outside: name of a
    trained tensor outside the adapter, or None.
    """

    config: Any
    tensors: dict[str, Tensor]
    outside: str | None

    @classmethod
    def of(cls, model: nn.Module) -> Adapter | None:
        """Return the adapter of a model by peft's wrapper or `inject_adapters`, or None."""
        holder = _adapted(model)
        if holder is None:
            return None
        import peft  # which made the holder

        kept = peft.get_peft_model_state_dict(holder, save_embedding_layers=False)
        places = {each.data_ptr() for each in kept.values()}
        trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
        config = copy.copy(holder.peft_config[_ONE_ADAPTER])
        config.inference_mode = True
        if not hasattr(holder, "get_base_model"):
            kept = {f"{_OF_PEFT}{name}": tensor for name, tensor in kept.items()}
            config.task_type = "CAUSAL_LM" if is_causal(holder) else None
        tensors = {name: t.detach().cpu().clone().contiguous() for name, t in kept.items()}
        return cls(
            config, tensors, next((n for n, p in trained if p.data_ptr() not in places), None)
        )


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch off a model's adapters inside the context.

    model: in evaluation mode, with adapters of `inject_adapters`; afterwards they are on, with
    gradients.
    """
    within = _WITHIN_ADAPTERS[0]  # an attribute of single layers, not of a whole model
    layers: list[Any] = [
        each
        for each in model.modules()
        if hasattr(each, within) and hasattr(each, "enable_adapters")
    ]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
