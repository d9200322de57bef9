"""Outputs of a model: device, classes of logits, and the average over views of an image.

The argmax of a row with NaN is a constant, and of two infinities the first: such a row would be
certified as a class with the largest radius. So a row of logits that is not finite has no class;
counting, scoring and voting treat that as a separate outcome, which is never selected.

The views of an image are the image moved by a few pixels and the mirror images. With noise on the
input their average is a function of the noisy image, so certificates apply to it. It takes one pass
per view; with `denoised_shifts` the views are of the denoiser's output, so the denoiser runs once.
"""

from __future__ import annotations

import copyreg
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.core.fields import PADDING, list_shifts
from dpdist.models.spec import CLASSIFIER, DENOISER, ModelSpec
from dpdist.models.transformers import read_tokens

# --- device -----------------------------------------------------------------------------------


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter or buffer; the CPU without any."""
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


# --- a callable as a module -------------------------------------------------------------------


class Answers(nn.Module):
    """A module of any callable from inputs (B, ...) to logits (B, classes)."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.function(x))


def may_hold_script(model: nn.Module) -> bool:
    """Return whether a model may run TorchScript: one of its modules does, or is a callable."""
    return any(isinstance(each, Answers | torch.jit.ScriptModule) for each in model.modules())


def _reduce_script(module: Any) -> tuple[Callable[..., Any], tuple[bytes]]:
    return _load_script, (module.save_to_buffer(),)


def _load_script(archive: bytes) -> Any:
    return torch.jit.load(io.BytesIO(archive), map_location="cpu")


# Workers receive models by pickle, which torch does not support for TorchScript: use the archive of
# `torch.jit.save`. A worker that unpickles one imports this file.
for _kind in (torch.jit._script.RecursiveScriptModule, torch.jit._trace.TopLevelTracedModule):
    copyreg.pickle(_kind, _reduce_script)


# --- language models ---------------------------------------------------------------------------


def is_causal(model: nn.Module) -> bool:
    """Return whether a model of `transformers` predicts next tokens."""
    names = [kind.__name__ for kind in type(model).__mro__]
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


class NextTokenLogits(nn.Module):
    """Tokens (B, T), negative after a document's end, to logits (B, T, tokens).

    network: a causal model of `transformers`, with or without adapters of peft. It gets no mask,
    since no token attends to padding at the end.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        tokens, _ = read_tokens(x)
        logits: Tensor = self.network(input_ids=tokens, use_cache=False).logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @classmethod
    def around(cls, network: nn.Module) -> NextTokenLogits | None:
        """Return the wrapped model; None unless it is a causal model of `transformers`."""
        inner: Any = network
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        return cls(network) if is_causal(inner) else None

    @staticmethod
    def rows(fields: Any, most: int) -> Tensor | None:
        """Return the first tokens of documents as rows, or None if the fields are not documents."""
        if not isinstance(fields, dict) or "input_ids" not in fields:
            return None
        tokens: Tensor = fields["input_ids"][:, :most].float()
        there = fields.get("attention_mask")
        return tokens if there is None else tokens.where(there[:, :most] != 0, float(PADDING))


# --- classes of logits ------------------------------------------------------------------------


NO_CLASS = -1


def softmax_scores(logits: Tensor) -> Tensor:
    """Return the softmax of each row, or zeros for a row with a logit that is not finite.

    logits: (..., classes). The scores have the same shape and add up to at most 1.
    """
    finite = logits.isfinite().all(-1, keepdim=True)
    return torch.softmax(logits, -1).masked_fill(~finite, 0.0)


def predicted_classes(logits: Tensor) -> Tensor:
    """Return the class with the largest logit of each row, NO_CLASS if a logit is not finite.

    Args:
        logits: (..., classes), of any floating-point format.

    Returns:
        A tensor int64 (...), the first class of equal largest logits.

    Example:
        >>> predicted_classes(torch.tensor([[0.0, 2.0], [0.0, float("nan")]])).tolist()
        [1, -1]
    """
    return logits.argmax(-1).masked_fill(~logits.isfinite().all(-1), NO_CLASS)


# --- average over views -----------------------------------------------------------------------


def check_views(spec: ModelSpec) -> None:
    """Raise UserError for inputs without such views."""
    shape, key = tuple(spec.input_shape), "shifts" if spec.shifts else "mirrored"
    if spec.averages_views and len(shape) != 3:
        raise UserError(f"model.{key}: needs images, got inputs of shape {shape}; leave it out")
    if spec.shifts and spec.shifts >= min(shape[1:]):
        raise UserError(
            f"model.shifts: must be below the image's sides, got {spec.shifts} for {shape[1:]}"
        )


class ViewAverage(nn.Module):
    """Mean log-probability of each class over `list_shifts(max_shift)` of an image (B, C, H, W).

    mirrored: also over the mirror image of each. denoised: of the output of the network's denoiser.

    Pixels that leave the image on one side enter on the other, so that a moved image has noise of
    the same distribution, without an edge that shows the move.
    """

    def __init__(
        self, network: nn.Module, max_shift: int, denoised: bool = False, mirrored: bool = False
    ) -> None:
        super().__init__()
        self.network, self._denoised = network, denoised
        self._shifts, self._mirrored = list_shifts(max_shift), mirrored

    def forward(self, x: Tensor) -> Tensor:
        network = self.network
        if self._denoised:
            x = network.get_submodule(DENOISER)(x)
            network = network.get_submodule(CLASSIFIER)
        total, views = network(x).log_softmax(1), 1
        for view in self._other_views(x):
            total, views = total + network(view).log_softmax(1), views + 1
        mean: Tensor = total / views
        return mean

    def _other_views(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the views except x itself, one at a time, to save memory."""
        for shift in self._shifts[1:]:
            yield x.roll(shift, (2, 3))
        for shift in self._shifts if self._mirrored else []:
            yield x.roll(shift, (2, 3)).flip(3)
