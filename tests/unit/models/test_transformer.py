"""Frozen transformers with adapters: gradients by example, padding, what is refused, whole runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import language_models as lm
from support.datasets import write_split
from support.optional_extras import needs_hf
from support.training import execute
from torch import Tensor, nn

from dpdist import data, models
from dpdist.core.errors import UserError
from dpdist.core.fields import BYTES, PADDING
from dpdist.evaluation import evaluate_stage
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.models import ModelSpec
from dpdist.publishing import write_release
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.job import prepare
from dpdist.training.model_setup import initial_model, model_spec
from dpdist.training.records import data_source

needs_hf(whole_file=True)

BASES = {
    **{family: lm.FAMILIES[family] for family in ("bert", "gpt2", "llama", "qwen2")},
    "roberta": lm.WIDTHS,
    "distilbert": {
        "vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24,
        "max_position_embeddings": 32,
    },
    "vit": {
        "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    },
}  # fmt: skip
LORA = {"kind": "lora", "r": 3, "lora_alpha": 6, "target_modules": "all-linear"}


def options(base: str, **more):
    return {"config": {"model_type": base, **BASES[base]}, "adapter": LORA, **more}


def make(base: str, length: int = 7, **more) -> nn.Module:
    shape = (1, 8, 8) if base == "vit" else (length,)
    return models.initialize(ModelSpec("transformer", shape, 3, options(base, **more)), 1)


def documents(length: int = 7) -> Tensor:
    """Of 1 to 7 tokens, none of which is padding, token 0 among them."""
    torch.manual_seed(3)
    rows = torch.full((6, length), float(PADDING))
    for row, size in enumerate((7, 1, 4, 7, 2, 5)):
        rows[row, :size] = torch.randint(0, 40, (size,)).float()
    rows[0, 0] = 0.0
    return rows


def inputs_of(base: str) -> Tensor:
    return torch.rand(6, 1, 8, 8, generator=torch.manual_seed(4)) if base == "vit" else documents()


def one_at_a_time(model: nn.Module, inputs: Tensor, targets: Tensor, clip: float) -> Tensor:
    return lm.one_at_a_time(
        model, lambda i: cross_entropy(model(inputs[i][None]), targets[i][None])[0], 6, clip
    )


def clipped(model: nn.Module, inputs: Tensor, targets: Tensor, clip: float, **more) -> Tensor:
    engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(clip), **more)
    return engine.clipped_sum(inputs, targets).flat


CASES = [*((base, "mean") for base in BASES), ("bert", "first"), ("gpt2", "last")]


@pytest.mark.slow
@pytest.mark.parametrize(("base", "pool"), CASES)
def test_clipped_sums_are_those_of_one_example_at_a_time(base, pool):
    model = lm.stirred(make(base, pool=pool)).double()
    inputs, targets = inputs_of(base).double(), torch.arange(6) % 3
    for clip in (1e6, 0.5) if base == "bert" else (0.5,):
        expected = one_at_a_time(model, inputs, targets, clip)
        found = clipped(model, inputs, targets, clip, micro_batch=4)
        assert float((found - expected).norm() / expected.norm()) < 1e-6
    assert all(".lora_" in n or n.startswith("head.") for n in trained_names(model))
    assert GradientEngine(model, cross_entropy, clipping=FlatClipping(1)).fallback_layers == []


def trained_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.slow
@pytest.mark.parametrize("base", ["roberta", "gpt2"])
def test_how_far_a_document_is_filled_up_says_nothing(base):
    short, long = (lm.stirred(make(base, length)).double() for length in (7, 12))
    found = [model(documents(n).double()) for model, n in ((short, 7), (long, 12))]
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-8)
    assert float((found[0][0] - found[0][3]).detach().abs().max()) > 1e-3  # documents differ


OTHERS = [("none", "bert"), ("ia3", "gpt2"), ("alone", "bert")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "base"), OTHERS)
def test_other_adapters(kind, base):
    adapter = {"none": None, "ia3": {"kind": "ia3"}, "alone": LORA}[kind]
    model = lm.stirred(make(base, adapter=adapter)).double()
    inputs, targets = documents().double(), torch.arange(6) % 3
    found = clipped(model, inputs, targets, 0.5, vmap=kind == "alone")
    expected = one_at_a_time(model, inputs, targets, 0.5)
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    layers = {name.rpartition(".")[0] for name in trained_names(model)}
    assert (layers == {"head"}) == (kind == "none")


# --- whole runs


def write_texts(root) -> None:
    """Complaints and thanks."""
    for split, first, count in (("train", 0, 80), ("test", 80, 20)):
        numbers = range(first, first + count)
        texts = [f"{('thank you', 'it broke')[n % 2]} {n}" + "!" * (n % 9) for n in numbers]
        write_split(root / "texts", split, text=texts, label=[n % 2 for n in numbers])


def tokenizer_in(folder):
    """Of six words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {"<unk>": 0, "thank": 1, "you": 2, "it": 3, "broke": 4, "!": 5}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def recipe_of(root, **sections):
    raw = {
        "name": "x",
        "data": {"name": "texts", "root": str(root), "classes": 2, "text": {"length": 24}},
        "model": {"name": "transformer", "options": options("bert")},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
        "training": {"batch_size": 16, "steps": 3, "learning_rate": 0.1},
    }
    raw["model"]["options"]["config"]["vocab_size"] = BYTES
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    return parse_recipe(raw, "test")


@pytest.fixture
def root(tmp_path):
    write_texts(tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.slow
def test_a_run_changes_adapters_and_head_and_nothing_else(root, tmp_path):
    text = {"length": 24, "tokenizer": str(tokenizer_in(tmp_path))}
    recipe, folder = recipe_of(root, data={"text": text}), RunFolder(tmp_path / "run")
    job = prepare(recipe, folder, "test")
    before = initial_model(recipe, model_spec(recipe, job.records()))
    execute(job, 2)
    after = load_file(folder.model_folder / "model.safetensors")
    moved = {n for n, value in before.state_dict().items() if not torch.equal(after[n], value)}
    assert moved == set(trained_names(before)) and len(moved) > 10
    evaluate_stage(recipe, folder)
    assert json.loads(folder.evaluation.read_text())["inputs"] == 20
    write_release(folder)
    card = json.loads((folder.release_folder / "privacy_card.json").read_text())
    frozen = sum(p.numel() for p in before.parameters() if not p.requires_grad)
    assert card["unit"].startswith("one document")
    assert any("tokenizer.json" in each for each in card["assumptions"])
    assert card["extra"]["frozen"].startswith(f"{frozen:,} ")
    inputs = data.load(job.source, "test").batch(slice(0, 4))
    assert torch.isfinite(models.load(folder.release_folder)(inputs)).all()


def test_weights_under_the_names_that_the_library_saves(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    made = ViTForImageClassification(ViTConfig(**BASES["vit"]))
    made.save_pretrained(tmp_path / "vit")  # not the names that its modules have today
    asked = models.with_base_config({"adapter": LORA}, tmp_path / "vit")
    model = models.initialize(ModelSpec("transformer", (1, 8, 8), 3, asked), 1)
    models.load_weights(model, tmp_path / "vit")
    inputs = inputs_of("vit")
    found, expected = (m.eval()(pixel_values=inputs) for m in (model.base, made.vit))
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state)


def test_a_tokenizer_of_ones_own(root, tmp_path):
    path = tokenizer_in(tmp_path)
    column = data.TextColumn(length=4, tokenizer=path)
    texts = ["thank you", "it broke 5 times again"]
    rows = np.concatenate([column.tokenize_one(text) for text in texts])
    assert rows.tolist() == [[1, 2, PADDING, PADDING], [3, 4, 0, 0]]
    text = {"length": 8, "tokenizer": str(path)}
    read = data.load(data_source(recipe_of(root, data={"text": text})), "train")
    assert read.input_shape == (8,) and read.inputs.max() == 5
    path.write_text("{}")
    with pytest.raises(UserError, match=r"data\.text\.tokenizer:"):
        _ = data.TextColumn(tokenizer=path).vocabulary_size
