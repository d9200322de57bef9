"""Language models with their own head: gradients by document, masks, refusals, whole runs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import language_models as lm
from support.datasets import write_split
from support.optional_extras import needs_hf
from support.training import execute
from torch import Tensor, nn

import dpdist
from dpdist import data, models
from dpdist.core.errors import UserError
from dpdist.evaluation import evaluate_stage
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.hooks import OwnLoss
from dpdist.gradients.objective import language_model_loss
from dpdist.models.transformers import read_tokens
from dpdist.publishing import write_release
from dpdist.release import generation
from dpdist.release.files import CHECKSUMS, compute_checksums
from dpdist.release.verify import verify_release
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.job import prepare
from dpdist.training.model_setup import initial_model, model_spec

needs_hf(whole_file=True)

from dpdist.integrations import transformers as integration  # noqa: E402

CLIP = 0.5
LORA = {"kind": "lora", "r": 3, "target_modules": "all-linear"}
NONE = torch.zeros(6, dtype=torch.int64)


def engine_of(model: nn.Module, **more) -> GradientEngine:
    settings = {"clipping": FlatClipping(CLIP), "micro_batch": 4, **more}
    return GradientEngine(model, OwnLoss(language_model_loss), **settings)


def clipped(model: nn.Module, fields: dict[str, Tensor], **more) -> Tensor:
    return engine_of(model, **more).clipped_sum(fields, NONE).flat


def defined(model: nn.Module, fields: dict[str, Tensor], clip: float = CLIP) -> Tensor:
    """By autograd of each document alone, without what fills it up."""
    return lm.one_at_a_time(
        model, lambda row: language_model_loss(model, lm.row_of(fields, row))[0], 6, clip
    )


# --- gradients by document


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "trained"), [*((family, "adapters") for family in lm.FAMILIES), ("gpt2", "all")]
)
def test_clipped_sums_are_those_of_one_document_at_a_time(family, trained, monkeypatch):
    """Tied tables of tokens, positions and norms among what is trained."""
    if family == "gemma":  # its norms and their gradients are float32 in every model
        monkeypatch.setattr(Tensor, "float", lambda tensor: tensor)
    model = lm.make(family)
    model = lm.stirred(lm.with_lora(model) if trained == "adapters" else model).double()
    fields = lm.batch()
    engine = engine_of(model)
    found = engine.clipped_sum(fields, NONE).flat
    assert float((found - defined(model, fields)).norm()) <= 1e-9 * CLIP
    if trained == "adapters":
        assert engine.fallback_layers == []
        assert all("lora_" in name for name in engine._captured.trained)
    else:
        assert len(engine._captured.reused) == 1


def test_a_classifier_of_documents():
    model = lm.make("bert", "BertForSequenceClassification", num_labels=3)
    model = lm.stirred(lm.with_lora(model)).double()
    fields = {**lm.batch(), "labels": torch.arange(6) % 3}
    assert float((clipped(model, fields) - defined(model, fields)).norm()) <= 1e-9 * CLIP
    causal = lm.make("llama", "LlamaForSequenceClassification", pad_token_id=0)
    with pytest.raises(UserError):
        language_model_loss(causal, fields)


# --- records stay apart


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_no_kernel_is_chosen_by_another_document(family):
    """A document's bits do not depend on the padding of others, in float32 and with SDPA."""
    model = lm.stirred(lm.with_lora(lm.make(family)))
    engine, fields = engine_of(model), lm.batch()
    full = {name: each.clone() for name, each in fields.items()}
    for row in range(1, 6):
        full["input_ids"][row], full["attention_mask"][row] = 7, 1
        full["labels"][row] = 7
    empty = {name: each.clone() for name, each in fields.items()}
    empty["attention_mask"][1:, 1:], empty["labels"][1:] = 0, -100
    found = []
    for each in (fields, full, empty):
        gradients, _ = engine._per_example_gradients(each, NONE, b"", None, {})
        found.append([g.of_example(0) for g in gradients])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_where_a_document_is_filled_up_says_nothing(family):
    """At its end, before its beginning, or within: opacus #792 and #808 counted what fills up."""
    model = lm.stirred(lm.with_lora(lm.make(family))).double()
    fields = lm.batch()
    loss = language_model_loss(model, fields)
    assert float(loss[4].detach()) == 0.0  # nothing of it is learned
    careless = {**fields, "labels": fields["labels"].clone()}
    careless["labels"][fields["attention_mask"] == 0] = 5  # as labels = input_ids has it
    torch.testing.assert_close(language_model_loss(model, careless), loss, rtol=1e-12, atol=0)
    longer = {name: nn.functional.pad(each, (0, 5)) for name, each in fields.items()}
    torch.testing.assert_close(language_model_loss(model, longer), loss, rtol=1e-9, atol=1e-12)
    for row in range(6):
        one = lm.row_of(fields, row)
        torch.testing.assert_close(
            language_model_loss(model, one)[0], loss[row], rtol=1e-9, atol=1e-12
        )
        if family != "bert":  # whose positions are those in the row
            shift = {name: nn.functional.pad(each, (4, 0)) for name, each in one.items()}
            torch.testing.assert_close(
                language_model_loss(model, shift)[0], loss[row], rtol=1e-9, atol=1e-12
            )


def test_the_loss_is_a_mean_over_the_own_tokens():
    """By hand: the length of the row does not divide, and prompts are no part of it."""
    model, fields = lm.make("llama").double(), lm.batch()
    found = language_model_loss(model, fields)
    logits = model(input_ids=fields["input_ids"][:1]).logits[0]
    wanted = [
        nn.functional.cross_entropy(logits[place - 1], fields["labels"][0, place])
        for place in range(1, 9)
        if fields["labels"][0, place] >= 0
    ]
    assert len(wanted) == 5
    assert float(found[0]) == pytest.approx(float(sum(wanted)) / 5, rel=1e-12)


# --- what is refused


@pytest.mark.parametrize(("field", "value"), [("input_ids", 40), ("input_ids", -1), ("labels", 40)])
def test_tokens_that_a_model_does_not_know_are_refused_without_their_value(tmp_path, field, value):
    ids = torch.randint(40, (30, 6), generator=torch.Generator().manual_seed(0))
    fields = {"input_ids": ids, "labels": ids.clone()}
    fields[field][17, 3] = value
    model = lm.make("llama")
    options = {
        "loss": language_model_loss, "batch_size": 10, "steps": 1, "folder": tmp_path / "run",
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=rf"^data: {field} must be 0 to 39, [^0-9]*$"):
        dpdist.PrivateTraining(
            model, optimizer, dpdist.as_records((fields, torch.zeros(30))), **options
        )
    assert not (tmp_path / "run" / "private").exists()


# --- documents in a script's own loop


CHAT = [
    {"role": "user", "content": "what is 1"},
    {"role": "assistant", "content": "it is 2"},
    {"role": "user", "content": "and 2?"},
    {"role": "assistant", "content": "3"},
]


def told(records, tokenizer, row: int = 0) -> tuple[str, str]:
    """Return the text of a document that is read, and the text that is learned."""
    fields = records.batch(slice(row, row + 1))
    ids, labels = fields["input_ids"][0], fields["labels"][0]
    assert bool((labels[labels >= 0] == ids[labels >= 0]).all())
    assert bool((labels[fields["attention_mask"][0] == 0] == -100).all())
    real = ids[fields["attention_mask"][0] == 1]
    return tokenizer.decode(real), tokenizer.decode(labels[labels >= 0])


def test_only_answers_are_learned():
    chats, plain = lm.chat_tokenizer(), lm.chat_tokenizer(template=None)
    records = dpdist.documents([{"messages": CHAT}], chats, length=128)
    begin, end = "<|im_start|>", "<|im_end|>"
    whole = "".join(f"{begin}{m['role']}\n{m['content']}{end}\n" for m in CHAT)
    assert told(records, chats) == (whole, f"it is 2{end}\n3{end}\n")
    pair = [{"prompt": "what is 1", "answer": "it is 2"}]
    asked = f"{begin}user\nwhat is 1{end}\n{begin}assistant\nit is 2{end}\n"
    assert told(dpdist.documents(pair, chats, length=64), chats) == (asked, f"it is 2{end}\n")
    shown = told(dpdist.documents(pair, plain, length=64), plain)
    assert shown == ("what is 1it is 2<|end|>", "it is 2<|end|>")
    assert told(dpdist.documents([{"text": "all of it"}], plain, length=64), plain) == (
        "all of it", "all of it",
    )  # fmt: skip
    cut = dpdist.documents(pair, plain, length=11)
    assert told(cut, plain) == ("what is 1it", "it")
    assert cut.batch(slice(0, 1))["input_ids"].shape == (1, 11)


def test_texts_have_a_begin_and_an_end_where_they_are_asked_for():
    tokenizer = lm.chat_tokenizer(template=None)  # names an end alone
    rows = [{"text": "all of it", "messages": None}]
    marked = dpdist.documents(rows, tokenizer, length=16, bos_eos=True)
    assert told(marked, tokenizer) == ("all of it<|end|>",) * 2
    assert marked.tokenization["bos_eos"] is True
    tokenizer.bos_token = "<|im_start|>"
    both = dpdist.documents(rows, tokenizer, length=16, bos_eos=True)
    assert told(both, tokenizer) == ("<|im_start|>all of it<|end|>",) * 2
    plain = dpdist.documents(rows, tokenizer, length=16)
    assert told(plain, tokenizer)[0] == "all of it" and "bos_eos" not in plain.tokenization


@pytest.mark.slow
def test_a_script_s_own_loop_trains_adapters_of_a_folder_s_model(tmp_path, monkeypatch):
    folder = lm.save_model(tmp_path / "base")
    model = lm.with_lora(lm.transformers().AutoModelForCausalLM.from_pretrained(folder))
    rows = [
        {"messages": [{"role": "user", "content": f"what is {n}"},
                      {"role": "assistant", "content": f"it is {n + 1}"}], "who": n // 2}
        for n in range(40)
    ]  # fmt: skip
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    training = dpdist.PrivateTraining(
        model,
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        dpdist.documents(rows, folder, length=64, unit="who"),
        loss=dpdist.language_model_loss,
        privacy=dpdist.Privacy(
            noise_multiplier=1.0, delta=1e-3, unit="user", max_records_per_user=2
        ),
        batch_size=8,
        steps=2,
        folder=tmp_path / "run",
    )
    training.run_all()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert moved == {name for name in before if "lora_" in name}
    check_released_by_factory(training, tmp_path, monkeypatch)


FACTORY = """
import peft, transformers


def adapted():
    base = transformers.AutoModelForCausalLM.from_pretrained({base!r})
    return peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules="all-linear"))
"""


def check_released_by_factory(training, tmp_path: Path, monkeypatch) -> None:
    """A factory named at the release: texts are told and sampled, by tokens and template."""
    base, run = tmp_path / "base", training.run
    (tmp_path / "rank3.py").write_text(FACTORY.format(base=str(base)))
    monkeypatch.syspath_prepend(str(tmp_path))
    write_release(run, factory="rank3:adapted")
    release = dpdist.load(run.release_folder, trusted_factory="rank3:adapted")
    row = torch.tensor([[5.0, 6.0, 7.0, -1.0]])
    padded = torch.nn.functional.pad(row, (0, 60), value=-1.0)
    with torch.no_grad():
        wanted = training.model.eval()(torch.tensor([[5, 6, 7]])).logits
        torch.testing.assert_close(release.model(padded)[:, :3], wanted)
    rows = dict(verify_release(run.release_folder, trusted_factory="rank3:adapted"))
    digest = integration.base_digest(lm.transformers().AutoModelForCausalLM.from_pretrained(base))
    assert digest in rows["adapter"] and "tokenizer.json" in rows["tokenizer"]
    assert len(release.text_answerer("what is 3").likely) == 5
    again = lm.transformers().AutoTokenizer.from_pretrained(run.release_folder)
    assert (again.chat_template, again.eos_token) == (lm.TEMPLATE, "<|end|>")
    (tmp_path / "prompts.jsonl").write_text('"what is 3"\n[{"role": "user", "content": "hi"}]\n')
    prompts = generation.parse_prompts((tmp_path / "prompts.jsonl").read_text(), Path("p.jsonl"))
    assert prompts == ["what is 3", [{"role": "user", "content": "hi"}]]
    sampling = generation.Sampling(count=2, max_tokens=5, temperature=1.0, seed=0)
    folder = generation.write_texts(release, prompts, sampling, tmp_path / "texts")
    lines = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [prompts[0]] * 2 + [prompts[1]] * 2
    column, tokenizer = release.text_answerer.column, lm.chat_tokenizer()
    assert {tokenizer.decode([each]) for each in column.ends} == {"<|im_end|>", "<|end|>"}


# --- whole runs by a recipe


def write_chats(root: Path) -> None:
    for split, count in (("train", 40), ("test", 8)):
        says = [
            [{"role": "user", "content": f"what is {n}"},
             {"role": "assistant", "content": f"it is {split[:2]} {n + 1}"}]
            for n in range(count)
        ]  # fmt: skip
        write_split(root / "chats", split, messages=says)


def recipe_of(tmp_path: Path, base: Path, **sections):
    raw = {
        "name": "x",
        "data": {
            "name": "chats", "root": str(tmp_path / "data"), "classes": 259,
            "text": {
                "length": 80, "predict": "next", "tokenizer": str(base), "messages": "messages",
            },
        },
        "model": {
            "name": "transformer",
            "options": {"head": "own", "adapter": LORA},
            "initial": {"folder": str(base), "pretraining_data": "nothing: random weights"},
        },
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
        "training": {"batch_size": 8, "steps": 2, "learning_rate": 0.1},
    }  # fmt: skip
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    return parse_recipe(raw, "test")


@pytest.mark.slow
def test_a_recipe_fine_tunes_a_folder_s_model_with_its_own_head(tmp_path):
    """Adapters move, and nothing else; what is released says what was trained."""
    write_chats(tmp_path / "data")
    base = lm.save_model(tmp_path / "base")
    recipe, folder = recipe_of(tmp_path, base), RunFolder(tmp_path / "run")
    job = prepare(recipe, folder, "test")
    records = job.records()
    shown = records.batch(slice(0, 1))[0]
    tokens, real = read_tokens(shown[None], 259)
    tokenizer, targets = lm.chat_tokenizer(), records.targets(slice(0, 1))[0]
    assert tokenizer.decode(tokens[real]).startswith("<|im_start|>user\nwhat is ")
    answer = tokenizer.decode(targets[targets >= 0])
    assert answer.startswith("it is tr ") and answer.endswith("<|im_end|>\n")
    before = initial_model(recipe, model_spec(recipe, records))
    theirs = lm.transformers().AutoModelForCausalLM.from_pretrained(base)
    expected = theirs(input_ids=tokens[:, : int(real.sum())]).logits
    found = before(shown[None])[:, : int(real.sum())]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    execute(job)
    after = load_file(folder.model_folder / "model.safetensors")
    moved = {n for n, value in before.state_dict().items() if not torch.equal(after[n], value)}
    assert moved and all("lora_" in name for name in moved)
    evaluate_stage(recipe, folder)
    measured = json.loads(folder.evaluation.read_text())
    test = data.load(job.source, "test")
    wanted = test.targets(slice(None))
    assert measured["next_tokens"] == int((wanted >= 0).sum())
    with torch.no_grad():
        logits = before(test.batch(slice(None)))[wanted >= 0]
    of_base = math.exp(float(nn.functional.cross_entropy(logits, wanted[wanted >= 0])))
    assert measured["base_perplexity"] == pytest.approx(of_base, rel=1e-5)
    assert measured["base_perplexity"] != measured["perplexity"]
    write_release(folder)
    released = models.load(folder.release_folder)
    assert torch.equal(released(shown[None]), models.load(folder.model_folder)(shown[None]))
    card = json.loads((folder.release_folder / "privacy_card.json").read_text())
    assert any("tokenizer" in line for line in card["assumptions"])
    check_adapter(folder.release_folder, base, released, shown, tmp_path)
    written = integration.save_adapter(None, folder, tmp_path / "adapter")
    assert json.loads((written / "base.json").read_text())["name"] == base.name
    for name in ("adapter_model.safetensors", "adapter_config.json", "base.json"):
        assert (written / name).read_bytes() == (folder.release_folder / name).read_bytes()


def check_adapter(release: Path, base: Path, whole: nn.Module, shown: Tensor, aside: Path) -> None:
    """peft loads the adapter of a release on its base: the same logits, and on no other base."""

    def loaded(**more):
        return lm.transformers().AutoModelForCausalLM.from_pretrained(base, **more).eval()

    tokens, real = read_tokens(shown[None], 259)
    tokens = tokens[:, : int(real.sum())]
    for model in (
        lm.peft().PeftModel.from_pretrained(loaded(), str(release)),
        integration.load_adapter(loaded(), release),
    ):
        with torch.no_grad():
            found, wanted = model(tokens).logits, whole(shown[None])[:, : tokens.shape[1]]
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
            assert not torch.allclose(found, loaded()(tokens).logits, atol=1e-4)
    other = loaded()
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1.0
    for base_of_others in (other, loaded(dtype=torch.bfloat16)):
        with pytest.raises(UserError, match="base: "):
            integration.load_adapter(base_of_others, release)
    copy = shutil.copytree(release, aside / "edited")
    tensors = load_file(copy / "adapter_model.safetensors")
    save_file({n: t + 1 for n, t in tensors.items()}, copy / "adapter_model.safetensors")
    with pytest.raises(UserError, match="adapter_model"):
        integration.load_adapter(loaded(), copy)
    (copy / CHECKSUMS).write_text(compute_checksums(copy))
    with pytest.raises(UserError, match="adapter_model"):
        verify_release(copy, trusted_factory="factories:adapted")


def test_the_number_of_tokens_follows_from_the_folder(tmp_path):
    """The own head may have more tokens than its tokenizer, which counts where there is no head."""
    base = lm.save_model(tmp_path / "base")
    raw = recipe_of(tmp_path, base).model_dump(mode="json")
    for name in ("classes", "columns"):
        del raw["data"][name]
    assert parse_recipe(raw, "test").data.classes == 259
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    assert parse_recipe(raw, "test").data.classes == 300
    raw["model"]["options"]["head"] = "new"
    assert parse_recipe(raw, "test").data.classes == 259 == len(lm.chat_tokenizer())
