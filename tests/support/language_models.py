"""Tiny language models of random weights, tokenizers of bytes, and gradients by definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpdist.core.optional_imports import import_extra

WIDTHS = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**WIDTHS, "num_key_value_heads": 1},
    "qwen2": {**WIDTHS, "num_key_value_heads": 1},
    "qwen3": {**WIDTHS, "num_key_value_heads": 1, "head_dim": 8},
    "mistral": {**WIDTHS, "num_key_value_heads": 1, "sliding_window": 5},
    "gemma": {**WIDTHS, "num_key_value_heads": 1, "head_dim": 8},
    "gpt2": {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
             "bos_token_id": 1, "eos_token_id": 2},
    "opt": {**{k: v for k, v in WIDTHS.items() if k != "intermediate_size"}, "ffn_dim": 24,
            "word_embed_proj_dim": 16},
    "bert": WIDTHS,
}  # fmt: skip
_CLASSES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM", "gemma": "GemmaForCausalLM", "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM", "bert": "BertForMaskedLM",
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|end|>"]


def transformers() -> Any:
    return import_extra("transformers", "hf", "tests")


def peft() -> Any:
    return import_extra("peft", "hf", "tests")


def make(family: str, kind: str = "", seed: int = 0, **more: Any) -> nn.Module:
    """A tiny model of random weights, in eval mode, as `from_pretrained` gives it.

    kind: its class, where it is not the family's usual one.
    """
    library, name = transformers(), kind or _CLASSES[family]
    config = getattr(library, f"{name.partition('For')[0].removesuffix('LMHeadModel')}Config")
    torch.manual_seed(seed)
    return getattr(library, name)(config(**{**FAMILIES[family], **more})).eval()


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    """In peft's own wrapper, adapters in all linear layers."""
    transposed = any(type(each).__name__ == "Conv1D" for each in model.modules())
    settings = {"r": 3, "target_modules": "all-linear", "fan_in_fan_out": transposed, **options}
    return peft().get_peft_model(model, peft().LoraConfig(**settings))


def stirred(model: nn.Module) -> nn.Module:
    """As after some steps: no adapter is zero."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def one_at_a_time(
    model: nn.Module, losses: Callable[[int], Tensor], count: int, clip: float
) -> Tensor:
    """The definition: each document's gradient by autograd alone, clipped, and added up."""
    total = torch.zeros(sum(p.numel() for p in trained(model)), dtype=torch.float64)
    for row in range(count):
        found = torch.autograd.grad(losses(row), trained(model), allow_unused=True)
        pairs = zip(found, trained(model), strict=True)
        flat = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])
        flat = flat.double()
        total += flat * min(1.0, clip / max(float(flat.norm()), 1e-300))
    return total


def batch(rows: int = 6, length: int = 9, vocabulary: int = 40) -> dict[str, Tensor]:
    """Documents of 2 to `length` tokens, some with a prompt; one has nothing to learn."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, vocabulary, (rows, length), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    for row, size in zip(range(rows), (length, 2, 5, length, 3, 7), strict=False):
        ids[row, size:], labels[row, size:], mask[row, size:] = 0, -100, 0
    labels[0, :4] = -100
    labels[4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def row_of(fields: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    """One document as it is: without what fills it up."""
    size = int(fields["attention_mask"][row].sum())
    cut = {name: each[row : row + 1] for name, each in fields.items()}
    return {name: each[:, :size] if each.dim() == 2 else each for name, each in cut.items()}


def chat_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A token for each byte, and ChatML's own; by `template` None it knows no chats."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    made = Tokenizer(BPE(vocab={sign: place for place, sign in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), Decoder()
    fast = transformers().PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[:2]})
    fast.chat_template = template
    return fast


def save_model(folder: Path, family: str = "llama", **more: Any) -> Path:
    """A folder as `save_pretrained` writes it, with a tokenizer of bytes."""
    tokenizer = chat_tokenizer()
    model = make(family, vocab_size=len(tokenizer), max_position_embeddings=128, **more)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
