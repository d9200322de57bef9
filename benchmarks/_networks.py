"""Networks that are measured and are in no zoo: vision transformers, GPT-2, a text classifier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpdist.core.optional_imports import import_extra


class Attention(nn.Module):
    """Self-attention of `heads` heads, as layers that every library knows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        parts = self.inward(x).view(rows, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.outward(seen.transpose(1, 2).reshape(rows, tokens, width))


class Layer(nn.Module):
    """A layer of a transformer, normalized before each half (Dosovitskiy et al., 2021)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.dense(self.second(x))


class VisionTransformer(nn.Module):
    """A vision transformer that averages over its tokens; its positions are an embedding."""

    def __init__(
        self, side: int, patch: int, width: int, depth: int, heads: int, classes: int
    ) -> None:
        super().__init__()
        self.patch, self.patches = patch, nn.Linear(3 * patch**2, width)
        self.positions = nn.Embedding((side // patch) ** 2, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows, size = len(x), self.patch
        squares = x.unflatten(3, (-1, size)).unflatten(2, (-1, size)).permute(0, 2, 4, 1, 3, 5)
        tokens = self.patches(squares.reshape(rows, self.positions.num_embeddings, -1))
        places = torch.arange(tokens.shape[1], device=x.device).expand(rows, -1)
        return self.head(self.norm(self.layers(tokens + self.positions(places))).mean(1))


def vit_tiny(quick: bool = False) -> VisionTransformer:
    """Return ViT-Ti for 32 x 32 pictures in patches of 4 x 4: 5.4 million parameters."""
    return VisionTransformer(32, 4, *((32, 1, 2) if quick else (192, 12, 3)), 10)


def vit_small(side: int = 224, classes: int = 1000, quick: bool = False) -> VisionTransformer:
    """Return ViT-S/16 (22 million parameters), in smaller patches for smaller pictures."""
    return VisionTransformer(side, side // 14, *((32, 1, 2) if quick else (384, 12, 6)), classes)


class TextClassifier(nn.Module):
    """An embedding, an LSTM and a linear layer on what the LSTM says last (IMDb in tutorials)."""

    def __init__(self, recurrent: type[nn.Module], quick: bool = False) -> None:
        super().__init__()
        words, width = (100, 8) if quick else (10_000, 100)
        self.words = words
        self.embedding = nn.Embedding(words, width)
        self.recurrent = recurrent(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0][:, -1])


def gpt2(layers: int, lora: bool, quick: bool = False) -> Any:
    """Return a GPT-2 of new weights in training mode, with LoRA of rank 16 or trained as a whole.

    Twelve layers are GPT-2 small (124 million parameters). Dropout is off: it is no part of a
    step's cost that libraries differ in. Raises UserError without the extra dpdist[hf].
    """
    library = import_extra("transformers", "hf", "benchmark")
    torch.manual_seed(0)
    size = {"n_embd": 32, "n_head": 2, "vocab_size": 100} if quick else {}
    config = library.GPT2Config(
        n_layer=1 if quick else layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, **size,
    )  # fmt: skip
    model = library.GPT2LMHeadModel(config)
    if not lora:
        return model.train()
    peft = import_extra("peft", "hf", "benchmark")
    asked = {"r": 16, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    return peft.get_peft_model(model, peft.LoraConfig(**asked)).train()
