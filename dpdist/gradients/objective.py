"""Losses by name and custom losses: one value per record, never a mean over the batch.

A named loss compares the model's outputs with the targets. If a record has several outputs, its
loss is their mean, as with torch's `reduction="mean"` for a batch of one record.

    cross-entropy     logits (B, C), classes (B,); or (B, T, C), tokens (B, T)
    bce               logits (B,) or (B, 1), 0 or 1 (B,)
    multi-label-bce   logits (B, K), 0 or 1 (B, K)
    mse, huber        outputs of the targets' shape, (B,), (B, 1) or (B, K)

Huber's loss is d^2 / 2 where |d| <= 1, and |d| - 1/2 beyond (Huber, 1964; torch's `delta=1`).

`language_model_loss` is the loss of a language model of Hugging Face's `transformers`. A batch is
then the dict of a record's fields, as `dpdist.documents` returns them:

    input_ids        (B, T)  tokens
    attention_mask   (B, T)  1 for a token, 0 for padding; without it there is no padding
    labels           (B, T)  the token to learn, or -100; or a class (B,)

No kernel is chosen by a value: a causal model gets no mask, because its documents are first moved
to the left, so that no token sees the padding after it; any other model always gets a mask. So
attention may be fused (SDPA), and one more record changes no other record's bits.

`preference_loss` is the loss of direct preference optimization. A record is a pair of answers from
`dpdist.preferences`: one row of 2 T tokens, the chosen document and then the rejected one. A mask
by blocks, the same for every pair, and positions that restart at T keep the two documents apart.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpdist.core.errors import UserError
from dpdist.gradients.criterion import CriterionLoss
from dpdist.gradients.engine import cross_entropy
from dpdist.gradients.hooks import Inputs, Losses, Objective, OwnLoss, example_losses

if TYPE_CHECKING:
    from dpdist.gradients.engine import GradientEngine

LOSSES: dict[str, Losses] = {
    "cross-entropy": cross_entropy,
    "bce": CriterionLoss(nn.BCEWithLogitsLoss()).of_outputs,
    "multi-label-bce": CriterionLoss(nn.BCEWithLogitsLoss()).of_outputs,
    "mse": CriterionLoss(nn.MSELoss()).of_outputs,
    "huber": CriterionLoss(nn.HuberLoss()).of_outputs,
}
_FUNCTIONS = (
    (functional.cross_entropy, "cross-entropy"),
    (functional.binary_cross_entropy_with_logits, "bce"),
    (functional.mse_loss, "mse"),
    (functional.huber_loss, "huber"),
)


def objective_of(loss: Any) -> Objective:
    """Return the objective of a loss for a gradient engine.

    Args:
        loss: a name of `LOSSES`; a criterion object, such as
            `torch.nn.CrossEntropyLoss(label_smoothing=0.1)`, its class, or torch's function of one
            of the names (`dpdist.gradients.criterion`); or a function of the module and a batch
            that runs the forward passes and returns one value per record, shape (B,). The batch is
            `(inputs, targets)`, `(*inputs, targets)` where a record has several inputs, or a dict
            of its fields.

    Returns:
        An objective for `GradientEngine`, whose screening raises an error for a mean over the
        batch, and for a record's value that depends on a different record.

    Raises:
        UserError: no loss has that name.

    Example:
        >>> import torch
        >>> objective_of("mse")(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0]))
        tensor([1., 4.])
    """
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise UserError(
                f"loss: must be {', '.join(LOSSES)}, a criterion object such as "
                f"torch.nn.L1Loss() or a function of module and batch, got {loss!r}"
            )
        return LOSSES[loss]
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        loss = loss()
    for function, name in _FUNCTIONS:
        if loss is function:
            return LOSSES[name]
    if isinstance(loss, nn.Module):
        return OwnLoss(CriterionLoss(loss))
    if not callable(loss):
        raise UserError(
            "loss: must be a name, a criterion object or a function of module and batch, got a "
            f"{type(loss).__name__}"
        )
    return OwnLoss(loss)


def checked_losses(
    model: nn.Module, objective: Objective, inputs: Inputs, targets: Tensor
) -> Tensor:
    """Compute the losses (B,) of invented or public examples.

    Raises:
        UserError: a custom loss fails on them, with its error, or does not return one value per
            record.
    """
    try:
        return example_losses(model, objective, {}, inputs, targets)
    except UserError:
        raise
    except Exception as error:  # any error of a user's function
        said = " ".join(str(error).split())[:_SHOWN]
        if not isinstance(objective, OwnLoss):
            given = "several tensors" if not isinstance(inputs, Tensor) else _shape(inputs)
            raise UserError(
                f"loss: must fit outputs and targets, got targets {_shape(targets)} for inputs "
                f"{given}; it fails on invented records: {type(error).__name__}: {said}; "
                "cross-entropy needs one class per record, (B,)"
            ) from error
        batch = "(inputs, targets)"
        if isinstance(inputs, dict):
            batch = f"the dict of {', '.join(inputs)}"
        elif isinstance(inputs, tuple):
            batch = f"the {len(inputs)} inputs and the targets"
        raise UserError(
            "loss: must be a function of module and batch that returns one value per record, such "
            f"as {own_loss_example(model, inputs)}, got {_name_of(objective.function)}, which "
            f"fails on invented records (batch is {batch}): {type(error).__name__}: {said}"
        ) from error


def under_autocast(objective: Objective) -> OwnLoss:
    """Return an objective whose forward passes run under `torch.autocast` to bfloat16.

    Output gradients have the types of the forward pass. Inputs of layers are widened to float32
    before norms are computed, and sums are float64, as without autocast.
    """
    inner: Any = objective.function if isinstance(objective, OwnLoss) else objective

    @wraps(inner, assigned=("__module__", "__qualname__", "__name__"))
    def function(module: nn.Module, batch: Any) -> Tensor:
        device = next(module.parameters()).device.type
        with torch.autocast(device, dtype=torch.bfloat16):
            if isinstance(objective, OwnLoss):
                return objective.function(module, batch).float()
            if isinstance(batch, dict):
                return module(batch).float()  # type: ignore[no-any-return]
            inputs = batch[0] if len(batch) == 2 else batch[:-1]
            return module(inputs).float()  # type: ignore[no-any-return]

    if isinstance(objective, OwnLoss):
        return replace(objective, function=function)
    return OwnLoss(function, objective)


_EXAMPLE = (
    "lambda module, batch: torch.nn.functional.cross_entropy(module({}), batch[{}], "
    "reduction='none')"
)
_SHOWN = 300  # characters of an error


def own_loss_example(model: nn.Module, inputs: Inputs) -> str:
    """Return code of a custom loss that calls the model with the fields of these inputs.

    The fields of a dict with names of the model's arguments are its inputs, and a different field
    is the target; without such names it is the last one.
    """
    if not isinstance(inputs, dict):
        count = 1 if isinstance(inputs, Tensor) else len(inputs)
        call = ", ".join(f"batch[{place}]" for place in range(count))
        return _EXAMPLE.format(call, count)
    try:
        wanted = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        wanted = []
    names = [name for name in wanted if name in inputs]
    rest = [name for name in inputs if name not in names]
    if not names or not rest:
        names, rest = list(inputs)[:-1] or list(inputs), list(inputs)[-1:]
    call = ", ".join(f"batch[{name!r}]" for name in names)
    return _EXAMPLE.format(call, repr(rest[-1]))


def _name_of(loss: Any) -> str:
    return str(getattr(loss, "__qualname__", type(loss).__name__)).replace("<locals>.", "")


def _shape(tensor: Tensor) -> str:
    """Return a shape as text, with B for the size of the batch."""
    return "(" + ", ".join(["B", *map(str, tensor.shape[1:])]) + ")"


# --- consistency of noisy copies --------------------------------------------------------------


# Consistency (Jeong & Shin, NeurIPS 2020) adds weight * KL(mean || p_k) to the cross-entropy of
# each of a record's K noisy copies: the divergence of its prediction p_k from the mean of the K
# predictions, which is constant. The copies learn to agree, which is what randomized smoothing
# certifies. The mean is of the record's own copies, and gradients are clipped afterwards, so it
# costs no privacy. Up to a constant both terms are the cross-entropy against weighted classes,
# onehot(label) + weight * mean.


def weighted_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses (B,) of logits (B, C) and weights of classes (B, C), >= 0, of any sum."""
    return -(targets * outputs.log_softmax(1)).sum(1)


def consistency_targets(
    engine: GradientEngine,
    inputs: Tensor,
    labels: Tensor,
    draw_key: bytes,
    record_ids: Tensor,
    weight: float,
) -> Tensor:
    """Return class weights (B, C) for `weighted_cross_entropy`, from the noisy copies of a step."""

    def agreed(some: Tensor, ids: Tensor, key: bytes) -> Tensor:
        copies = [
            engine.outputs(engine.perturb_inputs(some, ids, key, k)).softmax(1)
            for k in range(engine.perturbation.count)
        ]
        return torch.stack(copies).mean(0)

    passes = list(engine.iter_passes(len(inputs), draw_key, record_ids))
    parts = []
    with torch.no_grad():
        for rows, real in passes or [(torch.arange(0), slice(0))]:
            parts.append(agreed(inputs[rows], record_ids[rows], draw_key)[real])
    mean = torch.cat(parts)
    if passes:
        order = torch.cat([rows[real] for rows, real in passes])
        mean = mean[order.argsort()]
    return functional.one_hot(labels, mean.shape[1]).to(mean) + weight * mean


# --- language models ---------------------------------------------------------------------------


_CAUSAL = ("ForCausalLM", "LMHeadModel")
_MASKED, _CLASSIFIER = ("ForMaskedLM",), ("ForSequenceClassification",)


def language_model_loss(module: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss over each document's own tokens.

    Guarantee: a document's value depends only on its own row. Labels below 0 (-100: prompts) and
    padding never count, neither in the sum nor in the divisor; a document without a label has the
    loss 0.

    Args:
        module: a `...ForCausalLM` (also GPT-2's `LMHeadModel`), `...ForMaskedLM` or
            `...ForSequenceClassification` of an encoder, or one of these with adapters of peft; or
            a module around one of these and nothing else, such as a LightningModule.
        batch: dict of `input_ids`, `labels`, and `attention_mask` if documents are padded.

    Returns:
        A tensor (B,) of losses in nats, float32 or float64: one mean for each document. A causal
        model's output at t - 1 is compared with token t; labels are not moved beforehand.

    Raises:
        UserError: the module is a different one, or the batch lacks a field.

    Example:
        >>> import torch, types, dpdist
        >>> class UniformForCausalLM(torch.nn.Module):  # in place of one from transformers
        ...     def forward(self, input_ids, **other):
        ...         return types.SimpleNamespace(logits=torch.zeros(*input_ids.shape, 8))
        >>> tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
        >>> batch = {"input_ids": tokens, "labels": tokens}
        >>> dpdist.language_model_loss(UniformForCausalLM(), batch)  # log 8 for each document
        tensor([2.0794, 2.0794])
    """
    if not isinstance(batch, dict) or not {"input_ids", "labels"} <= batch.keys():
        got = ", ".join(batch) if isinstance(batch, dict) else f"a {type(batch).__name__}"
        raise UserError(
            f"data: must have the fields input_ids and labels for language_model_loss, got {got}: "
            "make the records with dpdist.documents(rows, tokenizer, length=...)"
        )
    if _REFERENCE in batch:
        raise UserError("loss: must be dpdist.preference_loss for pairs, got language_model_loss")
    inner = without_wrapper(module)
    tokens, labels, there = batch["input_ids"], batch["labels"], batch.get("attention_mask")
    real = torch.ones_like(tokens, dtype=torch.bool) if there is None else there != 0
    if _is_a(inner, _CAUSAL):
        if looks_ahead(inner):
            raise UserError(
                f"model: must not see the tokens that follow, got a {type(inner).__name__} that "
                "does and would learn to repeat them: load it with config.is_decoder=True"
            )
        tokens, labels, real = _moved_to_the_left(tokens, labels, real)
        logits = inner(input_ids=tokens, use_cache=False).logits
        return _mean_loss(logits[:, :-1], labels[:, 1:], real[:, 1:])
    if _is_a(inner, _MASKED):
        logits = inner(input_ids=tokens, attention_mask=additive_mask(real, inner.dtype)).logits
        return _mean_loss(logits, labels, real)
    if _is_a(inner, _CLASSIFIER) and hasattr(inner, "classifier"):
        logits = inner(input_ids=tokens, attention_mask=additive_mask(real, inner.dtype)).logits
        labels = labels[:, None]
        return _mean_loss(logits[:, None], labels, torch.ones_like(labels) > 0)
    then = "give a function of module and batch that returns one value per record as the loss"
    named = [name for name, each in inner.named_children() if _is_known(without_wrapper(each))]
    if len(named) == 1:
        then = f"give lambda module, batch: dpdist.language_model_loss(module.{named[0]}, batch)"
    raise UserError(
        f"model: must be a ...ForCausalLM, ...LMHeadModel, ...ForMaskedLM or an encoder's "
        f"...ForSequenceClassification for language_model_loss, got {type(inner).__name__}: {then}"
    )


def preference_loss(module: nn.Module, batch: Any, *, beta: float = 0.1) -> Tensor:
    """Return the loss of direct preference optimization (DPO) of each pair of answers.

    Guarantee: a pair's value depends only on its own row. Log-probabilities are sums over the
    answer's own tokens: prompts (labels below 0) and padding never count.

    Args:
        module: a causal language model of `transformers`, with adapters of peft or without, or a
            module around one and nothing else. Its attention must be SDPA or eager.
        batch: dict of `input_ids` and `labels`, int64 (B, 2 T), chosen then rejected, and
            `reference` (B,), the reference's log-probability of the chosen answer minus that of the
            rejected one.
        beta: weight of the reference, > 0. For a different value, give
            `functools.partial(dpdist.preference_loss, beta=0.3)` as the loss.

    Returns:
        A tensor (B,) of -log sigmoid(beta * (chosen - rejected - reference)), where chosen and
        rejected are the module's log-probabilities in nats. A pair without labels has log 2.

    Raises:
        UserError: the module is a different one, the batch lacks a field, or beta is not above 0.

    Source:
        Rafailov et al., NeurIPS 2023, equation 7.

    Example:
        >>> import torch, types, dpdist
        >>> class UniformForCausalLM(torch.nn.Module):  # in place of one from transformers
        ...     dtype = torch.float32
        ...     def forward(self, input_ids, attention_mask, position_ids, use_cache):
        ...         return types.SimpleNamespace(logits=torch.zeros(*input_ids.shape, 8))
        >>> tokens = torch.tensor([[1, 2, 3, 1, 4, 5]])
        >>> batch = {"input_ids": tokens, "labels": tokens, "reference": torch.zeros(1)}
        >>> dpdist.preference_loss(UniformForCausalLM(), batch)  # log 2: no answer is preferred
        tensor([0.6931])
    """
    if not isinstance(batch, dict) or not {"input_ids", "labels", _REFERENCE} <= batch.keys():
        got = ", ".join(batch) if isinstance(batch, dict) else f"a {type(batch).__name__}"
        raise UserError(
            f"data: must have the fields input_ids, labels and {_REFERENCE} for preference_loss, "
            f"got {got}: make the records with dpdist.preferences(rows, tokenizer, ...)"
        )
    if not (isinstance(beta, int | float) and 0 < beta < math.inf):
        raise UserError(f"beta: must be a finite number > 0, got {beta!r}")
    chosen, rejected = pair_log_probabilities(module, batch["input_ids"], batch["labels"]).T
    margin = chosen - rejected - batch[_REFERENCE].to(chosen.dtype)
    return -functional.logsigmoid(beta * margin)


_REFERENCE = "reference"
_PLAIN_ATTENTION = ("sdpa", "eager", None)  # which add the mask that they are given


def pair_log_probabilities(module: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the summed log-probabilities (B, 2) of both documents' labels, in nats.

    tokens, labels: int64 (B, 2 T). Raises UserError for a model that does not take such rows.
    """
    inner = without_wrapper(module)
    length = tokens.shape[1] // 2
    check_takes_pairs(inner, length)
    logits = pair_logits(inner, tokens)[:, :, :-1]
    wanted = labels.reshape(len(labels), 2, length)[:, :, 1:]
    return torch.where(wanted >= 0, _log_probabilities(logits, wanted), 0.0).sum(2)


def pair_logits(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits (B, 2, T, vocabulary) of rows (B, 2 T) of two documents each."""
    count, width = tokens.shape
    places, dtype = torch.arange(width, device=tokens.device), model.dtype
    half, position = places // (width // 2), places % (width // 2)
    seen = (half[:, None] == half) & (places[:, None] >= places)
    mask = torch.zeros(width, width, dtype=dtype, device=tokens.device)
    mask = mask.masked_fill(~seen, torch.finfo(dtype).min).expand(count, 1, -1, -1)
    logits: Tensor = model(
        input_ids=tokens, attention_mask=mask, position_ids=position.expand(count, -1),
        use_cache=False,
    ).logits  # fmt: skip
    return logits.reshape(count, 2, width // 2, -1)


def check_takes_pairs(inner: Any, length: int) -> None:
    """Raise UserError for a model that may not treat two documents of a row separately."""
    kind = type(inner).__name__
    if not _is_a(inner, _CAUSAL) or looks_ahead(inner) or hasattr(inner, "get_base_model"):
        raise UserError(
            f"model: must be a causal ...ForCausalLM or ...LMHeadModel for preference_loss, got "
            f"{kind}: learned prompts and encoders are not supported"
        )
    if not {"attention_mask", "position_ids"} <= inspect.signature(inner.forward).parameters.keys():
        raise UserError(
            f"model: must take attention_mask and position_ids for preference_loss, got {kind}"
        )
    settings = getattr(inner, "config", None)
    how = getattr(settings, "_attn_implementation", None)
    if how not in _PLAIN_ATTENTION:
        raise UserError(
            f"model: must have attention sdpa or eager for preference_loss, got {how}: load it "
            "with attn_implementation='sdpa'"
        )
    limited = getattr(settings, "use_sliding_window", True)
    for name in ("sliding_window", "attention_chunk_size") if limited else ():
        window = getattr(settings, name, None)
        if window is not None and window < length:  # the mask by blocks replaces it
            raise UserError(
                f"length: must be at most {window:,} for preference_loss, the {name} of the model, "
                f"got {length:,}"
            )


def keeps_documents_apart(model: nn.Module, length: int, vocabulary: int) -> bool:
    """Return whether an invented row of two documents has the logits of each by itself.

    The tolerance is the square root of the precision, relative to the largest logit.
    """
    inner = without_wrapper(model)
    device = next(inner.parameters()).device
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(vocabulary, (1, 2 * length), generator=generator).to(device)
    found = pair_logits(inner, row)[0]
    alone = inner(input_ids=row.reshape(2, length), use_cache=False).logits
    return bool(
        (found - alone).abs().max() <= torch.finfo(alone.dtype).eps ** 0.5 * alone.abs().max()
    )


def looks_ahead(model: nn.Module) -> bool:
    """Return whether a causal language model sees the next tokens, as without `is_decoder`.

    Models without the attribute (MPT, XGLM) are causal.
    """
    known = [getattr(each, "is_causal", None) for each in model.modules()]
    return False in known and True not in known


def token_limits(model: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of tokens and of labels that a model knows; None if unknown."""
    inner = without_wrapper(model)
    tokens = getattr(getattr(inner, "get_input_embeddings", lambda: None)(), "num_embeddings", None)
    if tokens is None:
        return None
    labels = inner.config.num_labels if _is_a(inner, _CLASSIFIER) else inner.config.vocab_size
    return int(tokens), int(labels)


def without_wrapper(module: nn.Module) -> Any:
    """Return the model inside peft's wrapper, in which adapters are separate layers.

    A wrapper that does more (learned prompts) stays, and so does a module around a language model
    with other layers or parameters.
    """
    inner = getattr(module, "get_base_model", None)
    prompts = getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False)
    if inner is not None and not prompts:
        return inner()
    parts, own = [*module.children()], [*module.parameters(False), *module.buffers(False)]
    if not _is_known(module) and len(parts) == 1 and not own:
        within = without_wrapper(parts[0])
        return within if _is_known(within) else module
    return module


def _is_known(module: nn.Module) -> bool:
    """Return whether a model is of a class that `language_model_loss` takes."""
    classifies = _is_a(module, _CLASSIFIER) and hasattr(module, "classifier")
    return classifies or _is_a(module, _CAUSAL + _MASKED)


def _is_a(module: nn.Module, endings: tuple[str, ...]) -> bool:
    return any(kind.__name__.endswith(endings) for kind in type(module).__mro__)


def _moved_to_the_left(tokens: Tensor, labels: Tensor, real: Tensor) -> tuple[Tensor, ...]:
    """Move the tokens of each row before its padding, in order."""
    order = (~real).to(torch.int64).argsort(dim=1, stable=True)
    return tokens.gather(1, order), labels.gather(1, order), real.gather(1, order)


def additive_mask(real: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to attention scores, (B, 1, T, T).

    real: bool (B, T), True for a token. dtype: type of the scores.
    """
    length = real.shape[1]
    keys = real[:, None, None, :].expand(-1, 1, length, length)
    return torch.zeros_like(keys, dtype=dtype).masked_fill(~keys, torch.finfo(dtype).min)


def _mean_loss(logits: Tensor, labels: Tensor, real: Tensor) -> Tensor:
    """Return the mean cross-entropy over the positions with a label, (B,); 0 without a label.

    logits: (B, T, classes). labels: int64 (B, T), < 0 for no label. real: bool (B, T), False for
    padding.
    """
    counted = (labels >= 0) & real
    losses = -_log_probabilities(logits, labels)
    return torch.where(counted, losses, 0.0).sum(1) / counted.sum(1).clamp(min=1)


def _log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label, in at least float32; of a label < 0, any value."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
