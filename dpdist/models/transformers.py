"""Transformers of Hugging Face's `transformers`, with their own head or a new one, and adapters.

The base keeps its public initial weights, which are neither clipped nor noised. `peft`'s adapters
in the base, and a new head, are trained. Nothing is downloaded and no code of a folder is run: a
base is one of the families below, with random weights or those of a folder. Adapters are limited to
kinds and options with per-example gradients that start from random numbers: others read data or
weights, or import modules by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.core.fields import PADDING, PROMPT
from dpdist.core.optional_imports import import_extra

# --- adapters ---------------------------------------------------------------------------------


# kind: its class in peft, and the options that may be given.
ADAPTER_KINDS: dict[str, tuple[str, frozenset[str]]] = {
    "lora": (
        "LoraConfig",
        frozenset({
            "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "bias",
            "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
        }),
    ),
    "ia3": ("IA3Config", frozenset({"target_modules", "feedforward_modules", "exclude_modules"})),
}  # fmt: skip
_KEY = "model.options.adapter"


def inject_adapters(base: nn.Module, adapter: Mapping[str, Any]) -> None:
    """Add adapters to `base`, in place, as its only trained parameters, in float32.

    adapter: `kind`, lora or ia3, and options of peft's LoraConfig or IA3Config. Raises UserError
    for others.
    """
    kind = adapter.get("kind", "lora")
    if kind not in ADAPTER_KINDS:
        raise UserError(f"{_KEY}.kind: must be one of {', '.join(ADAPTER_KINDS)}, got {kind!r}")
    name, allowed = ADAPTER_KINDS[kind]
    options = {key: value for key, value in adapter.items() if key != "kind"}
    unknown = sorted(options.keys() - allowed)
    if unknown:
        raise UserError(
            f"{_KEY}.{unknown[0]}: must be one of {', '.join(sorted(allowed))} with kind {kind}"
        )
    with torch.device("cpu"):
        peft = import_extra("peft", "hf", _KEY)
    transposed = any(type(module).__name__ == "Conv1D" for module in base.modules())
    try:
        peft.inject_adapter_in_model(
            getattr(peft, name)(**options, fan_in_fan_out=transposed), base
        )
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{_KEY}: {' '.join(str(error).split())[:300]}") from error
    for parameter in base.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


# --- transformers -----------------------------------------------------------------------------


KEY = "model.name: transformer"


@dataclass(frozen=True)
class Family:
    """A family of bases.

    name: prefix of its classes in `transformers`. reads_images: it reads images (C, H, W), not
    tokens. causal: a position attends only to those before it.
    """

    name: str
    reads_images: bool = False
    causal: bool = False

    @property
    def with_own_head(self) -> str:
        """Return the class name of a base with its own head."""
        if not self.causal:
            return f"{self.name}ForSequenceClassification"
        return "GPT2LMHeadModel" if self.name == "GPT2" else f"{self.name}ForCausalLM"


FAMILIES = {
    "bert": Family("Bert"),
    "distilbert": Family("DistilBert"),
    "roberta": Family("Roberta"),
    "gpt2": Family("GPT2", causal=True),
    "llama": Family("Llama", causal=True),
    "qwen2": Family("Qwen2", causal=True),
    "qwen3": Family("Qwen3", causal=True),
    "mistral": Family("Mistral", causal=True),
    "gemma": Family("Gemma", causal=True),
    "opt": Family("OPT", causal=True),
    "vit": Family("ViT", reads_images=True),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_POOLS = ("mean", "first", "last", "each")
HEADS = ("new", "own")
# Keys of a configuration that do not describe the network.
_NON_ARCHITECTURE_SETTINGS = {
    "_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "id2label",
    "label2id", "use_cache", "model_type", "return_dict", "output_attentions",
    "output_hidden_states", "problem_type", "finetuning_task", "task_specific_params",
}  # fmt: skip


class Transformer(nn.Module):
    """Tokens (B, T), negative after a document's end, or images (B, C, H, W), to logits.

    The output does not depend on the padding: no position attends to it, and it is not pooled.
    Attention is "eager": the kernel depends only on shapes, never on the padding of other records.
    vocabulary: number of tokens of the base; None for images.
    """

    def __init__(self, base: nn.Module, family: Family, classes: int, pool: str) -> None:
        super().__init__()
        self.base, self.family, self.pool = base, family, pool
        config: Any = base.config
        self.head = nn.Linear(config.hidden_size, classes)
        self.vocabulary: int | None = None if family.reads_images else config.vocab_size

    def forward(self, x: Tensor) -> Tensor:
        dtype: Any = self.base.dtype
        if self.vocabulary is None:
            states = self.base(pixel_values=x.to(dtype)).last_hidden_state
            real = x.new_ones(states.shape[:2], dtype=torch.bool)
        else:
            tokens, real = read_tokens(x, self.vocabulary)
            states = self.base(
                input_ids=tokens, attention_mask=self._mask(real, dtype)
            ).last_hidden_state
        output: Tensor = self.head(_pool_states(states.to(self.head.weight.dtype), real, self.pool))
        return output

    def _mask(self, real: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the mask that is added to attention scores, (B, 1, T, T); None if causal.

        A causal base makes its own mask and never attends to padding at the end.
        """
        if self.family.causal:
            return None
        length = real.shape[1]
        keys = real[:, None, None, :].expand(-1, 1, length, length)
        return torch.zeros_like(keys, dtype=dtype).masked_fill(~keys, torch.finfo(dtype).min)


class TransformerWithOwnHead(Transformer):
    """Tokens (B, T), as of `Transformer`, to the logits of the base's own head.

    They are those of the next token, (B, T, vocabulary), or of the classes, (B, classes). Attention
    is torch's SDPA: a causal base gets no mask, since padding is at the end, and others always get
    one, so the kernel depends only on shapes.
    """

    def __init__(self, base: nn.Module, family: Family) -> None:
        nn.Module.__init__(self)
        self.base, self.family = base, family
        config: Any = base.config
        self.vocabulary = config.vocab_size

    def forward(self, x: Tensor) -> Tensor:
        assert self.vocabulary is not None
        dtype: Any = self.base.dtype
        tokens, real = read_tokens(x, self.vocabulary)
        found = self.base(input_ids=tokens, attention_mask=self._mask(real, dtype))
        logits: Tensor = found.logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def read_tokens(rows: Tensor, vocabulary: int | None = None) -> tuple[Tensor, Tensor]:
    """Return stored rows (B, T) as int64 input_ids and the mask of real tokens.

    Models read a recipe's documents only by this function: a token t of a prompt, which is not
    learned, is stored as -2 - t, and padding as -1. vocabulary: number of tokens of the model;
    larger tokens become its last one.
    """
    tokens = torch.where(rows < PADDING, PROMPT - rows, rows).long()
    most = None if vocabulary is None else vocabulary - 1
    return tokens.clamp(0, most), rows != PADDING


def _pool_states(states: Tensor, real: Tensor, pool: str) -> Tensor:
    """Return states (B, T, width) pooled to (B, width); as they are for pool each."""
    if pool == "each":
        return states
    if pool == "first":
        return states[:, 0]
    count = real.sum(1, keepdim=True)
    if pool == "last":
        place = (count - 1).clamp(min=0)[..., None].expand(-1, 1, states.shape[2])
        return states.gather(1, place)[:, 0]
    return (states * real[..., None]).sum(1) / count.clamp(min=1)


def transformer(
    input_shape: Sequence[int],
    classes: int,
    config: Mapping[str, Any],
    adapter: Mapping[str, Any] | None = None,
    pool: str | None = None,
    dtype: str = "float32",
    head: str = "new",
) -> nn.Module:
    """Return a frozen base with trained adapters, and a trained linear head or its own head.

    Args:
        input_shape: (T,) tokens, or an image's (C, H, W).
        classes: number of logits per record, or per position.
        config: of the base, as in its config.json; model_type names one of the families.
        adapter: trained adapters of the base (`inject_adapters`); None: only a new head.
        pool: input of a new head: the mean over positions (default), the first, the last of the
            document, or each, for a causal base with data.text.predict: next.
        dtype: of the base and its own head; adapters and a new head are float32.
        head: "new" starts at random and is trained. "own" is the base's: of a causal base its
            lm_head, which may be tied to its embedding, of others the classifier. It is frozen,
            except for adapters that target_modules names.

    Raises:
        UserError: an option is invalid, or conflicts with others.
    """
    if head not in HEADS:
        raise UserError(f"model.options.head: must be one of {', '.join(HEADS)}, got {head!r}")
    if pool is not None and pool not in _POOLS:
        raise UserError(f"model.options.pool: must be one of {', '.join(_POOLS)}, got {pool!r}")
    if dtype not in _DTYPES:
        raise UserError(f"model.options.dtype: must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    family = _family(config.get("model_type"))
    _check_input(input_shape, family)
    if pool == "each" and not family.causal:
        causal = ", ".join(name for name, each in FAMILIES.items() if each.causal)
        raise UserError(
            f"model.options.pool: must not be each unless the base is causal ({causal}), got "
            f"{family.name}"
        )
    own = head == "own"
    if own:
        _check_own_head(family, classes, config, adapter, pool)
    base = _build_base(family, config, classes if own else None)
    base = base.to(_DTYPES[dtype]).requires_grad_(False)
    if adapter is not None:
        inject_adapters(base, adapter)
    if own:
        return TransformerWithOwnHead(base, family)
    return Transformer(base, family, classes, pool or "mean")


def _check_own_head(
    family: Family,
    classes: int,
    config: Mapping[str, Any],
    adapter: Mapping[str, Any] | None,
    pool: str | None,
) -> None:
    """Raise UserError if a base's own head conflicts with other options."""
    key = "model.options.head: own"
    if family.reads_images:
        raise UserError(f"{key}: must be of a base that reads tokens, got {family.name}; take new")
    if adapter is None:
        raise UserError(
            f"model.options.adapter: must be given with {key}, which is frozen, such as "
            "{kind: lora, target_modules: all-linear}"
        )
    if pool is not None:
        raise UserError(f"model.options.pool: must be left out with {key}")
    known = config.get("vocab_size", default_settings(config["model_type"])["vocab_size"])
    if family.causal and known != classes:
        raise UserError(
            f"data.classes: must be {known:,} with data.text.predict: next, the tokens of the "
            f"base's own head, got {classes:,}"
        )


def _check_input(shape: Sequence[int], family: Family) -> None:
    if len(shape) != (3 if family.reads_images else 1):
        what = "images (C, H, W)" if family.reads_images else "rows of tokens (see data.text)"
        raise UserError(f"{KEY}: {family.name} reads {what}, got records of shape {tuple(shape)}")


def _build_base(
    family: Family, values: Mapping[str, Any], own_head: int | None = None
) -> nn.Module:
    """Return a base with random weights, without dropout and without an unused pooling layer.

    own_head: number of classes of its own head; None: without a head.
    """
    transformers, known = _transformers(), default_settings(values["model_type"])
    given = {key: value for key, value in values.items() if key not in _NON_ARCHITECTURE_SETTINGS}
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        raise UserError(
            f"model.options.config: must be options of {family.name}, got {', '.join(unknown)}"
        )
    given |= {key: 0.0 for key, value in known.items() if "drop" in key and _is_rate(value)}
    bare = own_head is None
    if not bare and not family.causal:
        given["num_labels"] = own_head
    config = getattr(transformers, f"{family.name}Config")(
        **given, use_cache=False, attn_implementation="eager" if bare else "sdpa"
    )
    make = getattr(transformers, f"{family.name}Model" if bare else family.with_own_head)
    result: nn.Module = make(config, **base_arguments(make))
    return result


def base_arguments(base: type) -> dict[str, bool]:
    """Return the arguments of a base class that omit its pooling layer."""
    has = "add_pooling_layer" in inspect.signature(base.__init__).parameters  # type: ignore[misc]
    return {"add_pooling_layer": False} if has else {}


def default_settings(model_type: str) -> dict[str, Any]:
    """Return the settings of a family of bases, with their defaults."""
    made = getattr(_transformers(), f"{_family(model_type).name}Config")
    result: dict[str, Any] = (
        made().to_dict() | dict.fromkeys(made.attribute_map) | {"model_type": model_type}
    )
    return result


def _family(model_type: object) -> Family:
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise UserError(
            f"model.options.config.model_type: must be one of {', '.join(FAMILIES)}, got "
            f"{model_type!r}"
        )
    return family


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _transformers() -> ModuleType:
    with torch.device("cpu"):  # whatever device the factory runs under
        found = import_extra("transformers", "hf", KEY)
        logging = import_extra("transformers.utils.logging", "hf", KEY)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return found
