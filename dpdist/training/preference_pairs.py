"""Records of pairs of answers for direct preference optimization (DPO), and their reference."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.data.documents import PreferenceRecords, preference_records
from dpdist.gradients.objective import (
    check_takes_pairs,
    keeps_documents_apart,
    pair_log_probabilities,
    token_limits,
    without_wrapper,
)
from dpdist.training.script_state import evaluation_mode
from dpdist.training.trained_weights import trained_by

_COMPARED_TOKENS = 16  # of invented documents, on which the reference is checked


def preferences(
    data: Any,
    tokenizer: Any,
    *,
    length: int,
    reference: nn.Module,
    pretraining_data: str,
    prompt: str = "prompt",
    chosen: str = "chosen",
    rejected: str = "rejected",
    unit: str | Sequence[Hashable] | np.ndarray | None = None,
    name: str = "preferences",
) -> PreferenceRecords:
    """Return records of pairs of answers for direct preference optimization (DPO).

    Guarantee: one pair is one record, and its tensors are computed only from one row and the
    reference: the reference sees one pair at a time, and the first one again at the end, for which
    it must return the same. Tokens of the prompt are read and not learned. An answer is cut once
    prompt and answer have `length` tokens; a pair with an answer that is cut away completely
    teaches nothing, and a note states the number of such pairs.

    Args:
        data: rows with named fields, as `dpdist.documents` takes them. The fields are texts, or
            lists of messages with a role and a content, as TRL has them. Without a prompt, chosen
            and rejected are whole conversations, and the part with which both start is the prompt.
        tokenizer: a fast tokenizer of `transformers`, or the folder of one, as `dpdist.documents`
            takes it. Its chat template renders texts and messages; if it has none, the answer
            follows the prompt.
        length: most tokens of a prompt with one answer; a record has twice as many.
        reference: the model as training starts with it, whose peft adapters are switched off; or
            its base. It must be public, as must the first weights.
        pretraining_data: what the reference and the first weights were trained on, such as "public
            texts". The run's card lists it: dpdist cannot check that it contains no private pair.
        prompt: name of the field of a prompt.
        chosen: name of the field of the answer that is preferred.
        rejected: name of the field of the other answer.
        unit: the user or other unit that each pair belongs to: a field's name, such as that of the
            prompt, or one value for each pair. Required if prompts are equal except for white space
            and compatible characters of Unicode; give `Privacy(unit="user", ...)`.
        name: name of the data in error messages and on cards.

    Returns:
        A `dpdist.Records` for `dpdist.PrivateTraining` with `loss=dpdist.preference_loss`. Its
        `batch(indices)` returns a dict: `input_ids` and `labels`, int64 (B, 2 * length), chosen
        then rejected, and `reference` (B,), the reference's log-probability of the chosen answer
        minus that of the rejected one.

    Raises:
        UserError: a row lacks its fields, prompts are equal without a unit, the tokenizer or the
            model does not fit, or the reference keeps a state or is known to be trained on private
            records, such as the model of a run. The message contains no row's text.

    Source:
        Rafailov et al., NeurIPS 2023 (DPO).

    Example:
        >>> import dpdist, tokenizers, transformers
        >>> words = {"?": 0, "2": 1, "+": 2, "=": 3, "4": 4, "5": 5, "end": 6}
        >>> cutter = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "?"))
        >>> cutter.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = transformers.PreTrainedTokenizerFast(
        ...     tokenizer_object=cutter, eos_token="end"
        ... )
        >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        ...     vocab_size=7, n_embd=8, n_layer=1, n_head=1, n_positions=8,
        ... ))
        >>> rows = [{"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}]
        >>> pairs = dpdist.preferences(
        ...     rows, tokenizer, length=6, reference=model,
        ...     pretraining_data="nothing: random weights"
        ... )
        >>> pairs.batch([0])["labels"].tolist()
        [[-100, -100, -100, -100, 4, 6, -100, -100, -100, -100, 5, 6]]
    """
    if not isinstance(pretraining_data, str) or not pretraining_data.strip():
        raise UserError(
            f"{name}: pretraining_data must say what the reference and the first weights were "
            f"trained on, got {pretraining_data!r}"
        )
    if found := [*trained_by(reference), *trained_by(without_wrapper(reference))]:
        raise UserError(
            f"{name}: reference must be public, got one that {found[0]} trained: its epsilon would "
            "not be composed with that of the new run; load the public base"
        )
    device = next(reference.parameters()).device

    def difference(pair: dict[str, Tensor]) -> Tensor:
        there = {field: each.to(device) for field, each in pair.items()}
        found = pair_log_probabilities(reference, there["input_ids"], there["labels"])
        return (found[:, 0] - found[:, 1]).cpu()

    few = max(1, min(length, _COMPARED_TOKENS)) if isinstance(length, int) else 1
    check_takes_pairs(without_wrapper(reference), few)
    limits = token_limits(reference)
    if limits is not None:
        _check_adapters_are_new(reference, few, limits[0], name)
    with _as_reference(reference):
        if limits is not None and not keeps_documents_apart(reference, few, limits[0]):
            raise UserError(
                f"{name}: reference must keep the two answers of a row apart, got a "
                f"{type(without_wrapper(reference)).__name__}, which ignores the mask or positions"
            )
        return preference_records(
            data,
            tokenizer,
            difference,
            length=length,
            pretraining_data=pretraining_data,
            prompt=prompt,
            chosen=chosen,
            rejected=rejected,
            unit=unit,
            name=name,
        )


def _check_adapters_are_new(reference: nn.Module, few: int, vocabulary: int, name: str) -> None:
    """Raise UserError for trained adapters: the reference is computed without them."""
    if not any(hasattr(module, "disable_adapter") for module in reference.modules()):
        return
    inner = without_wrapper(reference)
    device = next(inner.parameters()).device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (1, few), generator=generator).to(device)

    def said() -> list[Tensor]:
        look_up, every = inner.get_input_embeddings(), torch.arange(vocabulary, device=device)
        norms = torch.cat([look_up(some).float().norm(dim=-1) for some in every.split(4096)])
        return [inner(input_ids=tokens, use_cache=False).logits, norms]

    with evaluation_mode(reference), torch.no_grad():
        given = said()
    with _as_reference(reference):
        base = said()
    alike = partial(torch.allclose, rtol=1e-4, atol=1e-4, equal_nan=True)
    if not all(map(alike, given, base)):
        raise UserError(
            f"{name}: reference must have adapters that change nothing yet, since they are "
            "switched off, got ones that do: put public ones into the weights (merge_and_unload) "
            "first"
        )


@contextmanager
def _as_reference(model: nn.Module) -> Iterator[None]:
    """Switch off peft's adapters, dropout and gradients within the block."""

    def modules_with(*names: str) -> list[Any]:
        return [each for each in model.modules() if all(hasattr(each, name) for name in names)]

    learned = {parameter: parameter.requires_grad for parameter in model.parameters()}
    adapted = modules_with("disable_adapter", "peft_config")
    tuned = modules_with("active_adapters", "disable_adapters", "base_layer")
    if tuned and len(adapted) != 1:
        raise UserError(
            "reference: must have its adapters from peft.get_peft_model, which can be switched off"
        )
    try:
        with evaluation_mode(model), torch.no_grad(), ExitStack() as stack:
            for each in adapted[:1]:
                stack.enter_context(each.disable_adapter())
            yield
    finally:
        for parameter, learns in learned.items():  # peft unfreezes what it switches on again
            parameter.requires_grad_(learns)
