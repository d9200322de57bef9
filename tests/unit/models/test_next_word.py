"""Models of the next word: a document is one record, however many words it has."""

from __future__ import annotations

import json
import math

import pytest
import torch
from support import language_models as lm
from support.datasets import write_split
from support.optional_extras import needs_hf
from support.training import execute
from torch import Tensor, nn
from typer.testing import CliRunner

from dpdist import data, models
from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.data.text import next_tokens
from dpdist.evaluation import evaluate_stage
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.models import ModelSpec
from dpdist.pipeline import report_stage
from dpdist.publishing import write_release
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.job import prepare
from dpdist.training.pretraining import pretrain

LENGTH, TOKENS = 9, 14
GPT2 = {"model_type": "gpt2", "vocab_size": TOKENS, "n_embd": 8, "n_layer": 1, "n_head": 2,
        "n_positions": 32}  # fmt: skip
ADAPTER = {"kind": "lora", "r": 2, "target_modules": "all-linear"}
OPTIONS = {
    "next-word-mlp": {"context": 4, "embedding": 5, "hidden": [7, 6]},
    "next-word-lstm": {"embedding": 5, "units": 6},
    "transformer": {"config": GPT2, "pool": "each", "adapter": ADAPTER},
}
NAMES = list(OPTIONS)


def make(name: str, length: int = LENGTH) -> nn.Module:
    if name == "transformer":
        needs_hf()
    spec = ModelSpec(name, (length,), TOKENS, OPTIONS[name], following=True)
    model = lm.stirred(models.initialize(spec, 1))
    models.check_outputs(model, spec)
    return model.double()


def documents(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Of two to nine tokens; and what follows each of them."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.full((6, length), -1.0, dtype=torch.float64)
    for row, size in enumerate((9, 2, 5, 9, 3, 7)):
        rows[row, :size] = torch.randint(0, TOKENS, (size,), generator=generator).double()
    return rows, torch.from_numpy(next_tokens(rows.numpy()))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_document_s_mean_gradient_is_clipped_once(name):
    model, (inputs, targets) = make(name), documents()

    def loss_of(row: int) -> Tensor:
        words = targets[row] >= 0
        logits = model(inputs[row : row + 1])[0, words]
        return nn.functional.cross_entropy(logits, targets[row, words])

    for clip in (1e6, 0.5):
        expected = lm.one_at_a_time(model, loss_of, 6, clip)
        summing = GradientEngine(model, cross_entropy, clipping=FlatClipping(clip), micro_batch=4)
        found = summing.clipped_sum(inputs, targets).flat
        assert float((found - expected).norm() / expected.norm()) < 1e-6
        assert summing.fallback_layers == []


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_depends_on_nothing_that_comes_later(name):
    model, (inputs, _) = make(name), documents()
    changed = inputs.clone()
    changed[0, 5] = (changed[0, 5] + 1) % TOKENS
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[0, :5], after[0, :5], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(before[0, 5], after[0, 5])
    torch.testing.assert_close(before[1:], after[1:], rtol=1e-9, atol=1e-12)
    longer, (more, targets) = make(name, 12), documents(12)
    torch.testing.assert_close(longer(more)[:, :LENGTH], before, rtol=1e-9, atol=1e-12)
    assert (targets[:, LENGTH - 1 :] < 0).all()


def test_a_document_without_words_says_nothing():
    outputs = torch.zeros(2, 3, TOKENS, requires_grad=True)
    targets = torch.tensor([[-1, -1, -1], [4, -1, -1]])
    losses = cross_entropy(outputs, targets)
    assert losses.tolist() == pytest.approx([0.0, math.log(TOKENS)])


# --- whole runs

SAID = ["one two three two one", "three three two one", "two one two one two three", "one one"]


def write_texts(root) -> None:
    for split, count in (("train", 60), ("test", 12), ("public", 20)):
        texts = [f"{SAID[n % 4]} {split} {n}" for n in range(count)]
        write_split(root / "texts", split, text=texts)
    (root / "texts" / data.WORDS_FILE).write_text("one\ntwo\nthree\nfour\n")


def recipe_of(root, name="next-word-lstm", **sections):
    text = {"length": LENGTH, "words": 4, "predict": "next"}
    raw = {
        "name": "x",
        "data": {"name": "texts", "root": str(root), "text": text},
        "model": {"name": name, "options": OPTIONS[name]},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
        "training": {"batch_size": 16, "steps": 3, "learning_rate": 0.1},
    }
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    return parse_recipe(raw, "test")


@pytest.fixture
def root(tmp_path):
    write_texts(tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.slow
def test_a_run_from_public_weights_is_evaluated_by_perplexity(root, tmp_path):
    public = {
        "data": {
            "name": "texts", "train": "public",  # beside the private ones
            "text": {"length": LENGTH, "words": 4, "predict": "next"},
        },
        "training": {"batch_size": 4, "steps": 2, "learning_rate": 0.01},
    }  # fmt: skip
    initial = {"initial": str(tmp_path / "public")}
    dplis = {"name": "dplis", "radius": 4, "augmentations": 2}
    recipe = recipe_of(root, model=initial, public=public, method=dplis)
    _, right = pretrain(recipe, "test")
    folder = RunFolder(tmp_path / "run")
    job = prepare(recipe, folder, "test")
    execute(job, 2)
    evaluate_stage(recipe, folder)
    report_stage(folder)
    found = json.loads(folder.evaluation.read_text())
    model, test = models.load(folder.model_folder), data.load(job.source, "test")
    targets = test.targets(slice(None))
    logits = model(test.batch(slice(None)))[targets >= 0]
    wanted = nn.functional.cross_entropy(logits, targets[targets >= 0])
    assert found["inputs"] == 12 and found["next_tokens"] == int((targets >= 0).sum())
    assert found["perplexity"] == pytest.approx(math.exp(wanted.detach()), rel=1e-5)
    assert found["correct"] == int((logits.argmax(1) == targets[targets >= 0]).sum())
    assert 0 <= right <= 1 and "wrong" not in found
    assert load_results(folder).privacy_card()["unit"].startswith("one document")
    write_release(folder)
    shown = CliRunner().invoke(app, ["verify", str(folder.release_folder)])
    assert shown.exit_code == 0, shown.output


def test_a_base_that_sees_what_follows_does_not_say_it():
    needs_hf()
    config = {"model_type": "bert", "vocab_size": 14, "hidden_size": 8, "num_attention_heads": 2}
    options = {"config": config, "pool": "each"}
    with pytest.raises(UserError, match=r"model\.options\.pool"):
        models.build_model(ModelSpec("transformer", (4,), 14, options, following=True))
