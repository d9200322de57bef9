"""Raise errors for layer types that void the guarantee, and invent examples of given shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dpdist.core.errors import UserError
from dpdist.gradients.hooks import Inputs, each_tensor, find_layers

NUM_EXAMPLES = 33  # of the screening


def normalizes_over_batch(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm that does not use stored statistics, as it does in
    evaluation mode."""
    if not isinstance(module, _NormBase) or isinstance(module, _InstanceNorm):
        return False
    return module.training or module.running_mean is None


def refuse_mixing_layers(model: nn.Module) -> None:
    """Raise UserError, naming the layer, for layer types known to mix examples."""
    for error in find_mixing_layers(model):
        raise error


def find_mixing_layers(model: nn.Module) -> Iterator[UserError]:
    """Yield an error for each layer whose type is known to mix examples."""
    for name, module in model.named_modules():
        where = f"layer {name or '(the model itself)'} ({type(module).__name__})"
        if normalizes_over_batch(module):
            yield UserError(
                f"{where} normalizes over the batch, so one record would change every record's "
                "gradient: use model = dpdist.prepare(model), which replaces it by a GroupNorm, or "
                "if its statistics are of public data, dpdist.prepare(model, batch_norm='eval'), "
                "which stays fixed also after model.train()",
                see="explanation/gradients.md#what-is-refused",
            )
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            yield UserError(
                f"{where} keeps running statistics of private data: use model = "
                "dpdist.prepare(model), or set track_running_stats=False",
                see="explanation/gradients.md#what-is-refused",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (
            module.scale_grad_by_freq or module.max_norm is not None
        ):
            yield UserError(
                f"{where}: scale_grad_by_freq counts tokens over the batch and max_norm rewrites "
                "weights in the forward pass: switch both off, as dpdist.prepare(model) does"
            )
        if isinstance(module, nn.RReLU) and module.training:
            yield UserError(
                f"{where} draws for negative numbers only, so one record would shift the random "
                "numbers of others: use model = dpdist.prepare(model), which replaces it by a "
                "LeakyReLU of its mean slope"
            )
        if any(
            isinstance(hook, WeightNorm | SpectralNorm)
            for hook in module._forward_pre_hooks.values()
        ):
            yield UserError(
                f"{where} has a weight norm or spectral norm by a hook of torch.nn.utils, which "
                "changes its weight in the forward pass: use model = dpdist.prepare(model), which "
                "replaces it by one of torch.nn.utils.parametrizations"
            )
        yield from _coupled_experts(where, getattr(module, "config", None))


def _coupled_experts(where: str, config: object) -> Iterator[UserError]:
    """Yield errors for a mixture of experts of `transformers` that couples a batch's records."""
    if getattr(config, "output_router_logits", False):
        yield UserError(
            f"{where}: config.output_router_logits must be False, got True: it adds the router's "
            "balance loss, which is computed over the batch, so one record would change every "
            "record's gradient"
        )
    for key in ("expert_capacity", "capacity_factor", "router_capacity_factor"):
        if (value := getattr(config, key, None)) is not None:
            yield UserError(
                f"{where}: config.{key} must be absent or None, got {value}: with a capacity, the "
                "tokens an expert takes depend on the other records of the batch; use a model "
                "whose experts take all of their tokens"
            )


def make_synthetic_examples(
    model: nn.Module, inputs: Inputs, targets: Tensor, count: int = NUM_EXAMPLES
) -> tuple[Inputs, Tensor]:
    """Return invented examples of the shapes and types of these, whose values are never read.

    Args:
        inputs: (B, ...), B >= 0, or several such tensors. Invented numbers are in [0, 1), for a
            quarter of the examples in [3, 13); tokens are below the model's vocabulary (its
            attribute of that name, or its smallest embedding).
        targets: (B, ...). Invented whole numbers are below the number of classes, which is the last
            dimension of the model's outputs (dimension 1 if targets have all others).

    Returns:
        Inputs (count, ...) and targets (count, ...), the same ones each time.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = _vocabulary(model)
    several = not isinstance(inputs, Tensor)

    def invent(like: Tensor) -> Tensor:
        shape = (count, *like.shape[1:])
        if not like.is_floating_point() or (tokens is not None and not several):
            # Of several whole numbers some may not be tokens: only 0 and 1 fit all of them.
            most = 2 if several else tokens or 2
            return torch.randint(most, shape, generator=generator).to(like)
        found = torch.rand(shape, generator=generator)
        far = count - count // 4
        found[far:] = 10 * found[far:] + 3
        return found.to(like)

    found = each_tensor(invent, inputs)
    shape = (count, *targets.shape[1:])
    if targets.is_floating_point():
        return found, torch.rand(shape, generator=generator).to(targets)
    known = 2 if several or targets.dtype == torch.bool else None
    classes = known or _classes(model, found[:2], targets)
    return found, torch.randint(classes, shape, generator=generator).to(targets)


def _vocabulary(model: nn.Module) -> int | None:
    """Return the size of a model's vocabulary; None if its inputs are not tokens."""
    known = [
        found
        for module in model.modules()
        if isinstance(found := getattr(module, "vocabulary", None), int)
    ]
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    return min(known or tables, default=None)


def _classes(model: nn.Module, inputs: Tensor, targets: Tensor) -> int:
    try:
        with torch.no_grad():
            outputs = model(inputs)
    except Exception:  # for example a model that only its custom loss can call
        return 2
    shape = outputs.shape if isinstance(outputs, Tensor) and outputs.dim() > 1 else (0, 2)
    last = targets.shape[1:] in (shape[1:-1], ())
    return max(1, shape[-1 if last else 1])


def refuse_failing_model(model: nn.Module, error: Exception) -> NoReturn:
    """Raise UserError for a model that fails on public or invented examples."""
    said = " ".join(" ".join([str(error)[:300], *getattr(error, "__notes__", ())]).split())
    raise UserError(
        f"the model cannot be run or differentiated: {type(error).__name__}: {said}"
        f"{_cure(model, error)}"
    ) from error


def _cure(model: nn.Module, error: Exception) -> str:
    """Return how to fix an error whose message lacks its cause; "" if unknown."""
    if isinstance(error, IndexError):
        return (
            "; it ran on invented examples: their numbers are in [0, 1), for a quarter of them in "
            "[3, 13), and whole numbers are 0 or 1. Declare public ranges, as in "
            "dpdist.as_records(data, ranges={'inputs': (0, 2)}), or clamp indices"
        )
    if "nested" in str(error).lower() and any(
        getattr(module, "enable_nested_tensor", False) for module in model.modules()
    ):
        return "; make the TransformerEncoder with enable_nested_tensor=False"
    return describe_layout(model)


def describe_layout(model: nn.Module) -> str:
    """Return the first layer with positions before records, and how to exchange them."""
    for name, module in model.named_modules():
        if getattr(module, "batch_first", True) is False:
            return (
                f"; {name or 'the top'} ({type(module).__name__}) takes positions before records: "
                "if its inputs are (B, T, ...), set batch_first=True"
            )
    return ""


def refuse_recurrent_layers(model: nn.Module) -> None:
    """Raise UserError for trained recurrent layers that cannot be replayed; torch.func cannot split
    their states into examples."""
    for layer in find_layers(model):
        module, kind = layer.module, type(layer.module)
        own = kind.forward not in (nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward)
        if isinstance(module, nn.RNNBase) and layer.fallback and not own:
            # cuDNN's dropout has its own state, which cannot be replayed.
            inside = "proj_size" if module.proj_size else "dropout"
            then = "Linear" if module.proj_size else "Dropout"
            raise UserError(
                f"layer {layer.name} ({kind.__name__}): {inside} must be 0, got "
                f"{getattr(module, inside)}: use one recurrent layer after another with "
                f"torch.nn.{then} between them"
            )


def refuse_complex_parameters(named: Mapping[str, nn.Parameter]) -> None:
    """Raise UserError for a complex trained parameter, whose imaginary part the sum would drop."""
    for name, parameter in named.items():
        if parameter.is_complex():
            raise UserError(
                f"parameter {name}: must be real, got {parameter.dtype}: store real and imaginary "
                "parts in one real parameter, and use torch.view_as_complex in forward"
            )


@contextmanager
def errors_of_isolated_models() -> Iterator[None]:
    """Raise UserError for errors of a user's module under torch.func.vmap."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(
            "the model must run on each record alone under torch.func.vmap (model.vmap), "
            "without branches on values: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
