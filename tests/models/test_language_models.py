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
from torch.utils._python_dispatch import TorchDispatchMode

import dpdist
from dpdist import data, models
from dpdist.core.errors import UserError
from dpdist.core.fields import PADDING, PROMPT
from dpdist.data.text import next_tokens
from dpdist.evaluation import _base_perplexity, evaluate_stage
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.gradients.hooks import OwnLoss
from dpdist.gradients.objective import language_model_loss
from dpdist.models import ModelSpec
from dpdist.models.factory_code import code_digest_of
from dpdist.models.transformers import read_tokens
from dpdist.publishing import write_release
from dpdist.release import generation
from dpdist.release.files import CHECKSUMS, compute_checksums
from dpdist.release.verify import verify_release
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.job import prepare
from dpdist.training.model_setup import initial_model, model_spec

needs_hf(whole_file=True)

from dpdist.integrations import transformers as integration  # noqa: E402

CLIP = 0.5
LORA = {"kind": "lora", "r": 3, "target_modules": "all-linear"}
NONE = torch.zeros(6, dtype=torch.int64)
BOTH = ("llama", "gpt2", "bert")  # the others are long: they are made of the same parts


def cases(*families: str) -> list:
    return [
        pytest.param(family, marks=[] if family in BOTH else [pytest.mark.slow])
        for family in families
    ]


CASES = cases(*lm.FAMILIES)


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
@pytest.mark.parametrize("trained", ["adapters", "all"])
@pytest.mark.parametrize("family", CASES)
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
        assert all("lora_" in name for name in engine._named)
    else:
        assert len(engine._shared) == int(family in ("gemma", "gpt2", "opt", "bert"))


class _Roundings(TorchDispatchMode):
    """Counts the operations whose results are rounded to bfloat16."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        outputs = found if isinstance(found, tuple | list) else [found]
        self.count += any(isinstance(t, Tensor) and t.dtype == torch.bfloat16 for t in outputs)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_a_base_in_bfloat16(family):
    """Held against float64 on the same weights.

    Each of n rounded operations adds a relative error of u = 2^-9 at most, of either sign. By the
    rule of thumb of Higham's Accuracy and Stability (section 2.8) they make up sqrt(n) u, taken
    four times, in a vector that is clipped: so much of the clip for each document.
    """
    model = lm.stirred(lm.with_lora(lm.make(family).to(torch.bfloat16)))
    kinds = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert kinds == {(False, torch.bfloat16), (True, torch.float32)}
    fields, counter = lm.batch(), _Roundings()
    with counter:
        language_model_loss(model, lm.row_of(fields, 0))[0].backward()
    assert 50 < counter.count < 1000
    bound = 6 * 4 * math.sqrt(counter.count) * 2.0**-9 * CLIP
    found, alone = clipped(model, fields), defined(model, fields)
    exact = defined(model.double(), fields)
    assert float((found - exact).norm()) <= bound
    assert float((found - alone).norm()) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_the_own_head_of_a_recipe_s_model(family):
    """Rows as a data set has them, prompts among them, and SDPA's kernels."""
    causal = family != "bert"
    rows = torch.full((6, 9), float(PADDING))
    fields = lm.batch()
    for row in range(6):
        size = int(fields["attention_mask"][row].sum())
        tokens = fields["input_ids"][row, :size]
        learned = fields["labels"][row, :size] >= 0
        rows[row, :size] = torch.where(learned, tokens, PROMPT - tokens).float()
    options = {"config": {"model_type": family, **lm.FAMILIES[family]}, "adapter": LORA}
    classes = 40 if causal else 3
    spec = ModelSpec("transformer", (9,), classes, {**options, "head": "own"}, following=causal)
    model = models.initialize(spec, 1)
    models.check_outputs(model, spec)
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    assert model.base.config._attn_implementation == "sdpa"
    model, rows = lm.stirred(model).double(), rows.double()
    targets = torch.from_numpy(next_tokens(rows.numpy())) if causal else torch.arange(6) % 3
    if causal:
        wanted = fields["labels"][:, 1:].clamp(min=PADDING)
        torch.testing.assert_close(targets[:, :-1], wanted, rtol=0, atol=0)
    engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(CLIP), micro_batch=4)

    def alone(row: int) -> Tensor:
        size = int((rows[row] != PADDING).sum())
        wanted = targets[row : row + 1]
        wanted = wanted[:, :size] if causal else wanted
        return cross_entropy(model(rows[row : row + 1, :size]), wanted)[0]

    expected = lm.one_at_a_time(model, alone, 6, CLIP)
    assert float((engine.clipped_sum(rows, targets).flat - expected).norm()) <= 1e-9 * CLIP


@pytest.mark.slow
def test_a_classifier_of_documents():
    model = lm.make("bert", "BertForSequenceClassification", num_labels=3)
    model = lm.stirred(lm.with_lora(model)).double()
    fields = {**lm.batch(), "labels": torch.arange(6) % 3}
    assert float((clipped(model, fields) - defined(model, fields)).norm()) <= 1e-9 * CLIP
    causal = lm.make("llama", "LlamaForSequenceClassification", pad_token_id=0)
    with pytest.raises(UserError, match="LlamaForSequenceClassification"):
        language_model_loss(causal, fields)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_isolated_documents(family):
    model = lm.stirred(lm.with_lora(lm.make(family))).double()
    fields = lm.batch()
    found = clipped(model, fields, vmap=True)
    assert float((found - defined(model, fields)).norm()) <= 1e-9 * CLIP


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["adapters", "all"])
def test_checkpoints_of_activations_change_nothing(trained):
    model = lm.make("llama")
    model = lm.stirred(lm.with_lora(model) if trained == "adapters" else model).double().train()
    fields, engine = lm.batch(), engine_of(model)
    without = engine.clipped_sum(fields, NONE).flat
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert torch.equal(engine.clipped_sum(fields, NONE).flat, without)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if trained == "adapters":  # what is frozen before them gives no gradient to start from
        model.enable_input_require_grads()
        with pytest.raises(UserError, match="use_reentrant"):
            engine.clipped_sum(fields, NONE)


# --- records stay apart


@pytest.mark.parametrize("family", cases("llama", "mistral", "opt", "bert"))
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


@pytest.mark.parametrize("family", cases("llama", "gpt2", "opt", "bert"))
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


@pytest.mark.slow
def test_eval_mode_keeps_nothing_off(tmp_path):
    """`from_pretrained` gives eval mode, which peft's wrapper hides: opacus #820, opake #1121."""
    library = lm.transformers()
    folder = lm.save_model(tmp_path / "base")
    sums = []
    for train in (False, True):
        base = library.AutoModelForCausalLM.from_pretrained(folder)
        assert not base.training
        torch.manual_seed(1)
        model = lm.with_lora(base)
        sums.append(clipped(model.train(train), lm.batch()))
    assert bool(sums[0].any()) and torch.equal(*sums)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["scaled by 0", "switched off", "frozen"])
def test_adapters_that_would_learn_nothing_are_refused(why):
    model = lm.with_lora(lm.make("llama"))
    if why == "scaled by 0":
        for layer in model.modules():
            if isinstance(getattr(layer, "scaling", None), dict):
                layer.scaling = {"default": 0.0}
    elif why == "switched off":
        model.base_model.disable_adapter_layers()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    else:
        model.requires_grad_(False)
    with pytest.raises(UserError):
        clipped(model, lm.batch())


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


def test_an_encoder_does_not_learn_to_repeat_what_it_sees():
    fields = {name: torch.randint(40, (2, 6)) for name in ("input_ids", "labels")}
    for kind in ("BertLMHeadModel", "RobertaForCausalLM"):
        with pytest.raises(UserError, match=kind):
            language_model_loss(lm.make("bert", kind), fields)
    decoder = lm.make("bert", "BertLMHeadModel", is_decoder=True)
    assert language_model_loss(decoder, fields).shape == (2,)


def test_router_losses_and_other_models_are_refused():
    library = lm.transformers()
    config = library.MixtralConfig(
        **{**lm.WIDTHS, "num_key_value_heads": 1}, num_local_experts=2, output_router_logits=True
    )
    with pytest.raises(UserError, match="output_router_logits"):
        engine_of(lm.with_lora(library.MixtralForCausalLM(config), target_modules=["q_proj"]))
    with pytest.raises(UserError, match=r"\.\.\.ForCausalLM.*got Linear"):
        language_model_loss(nn.Linear(2, 2), lm.batch())
    with pytest.raises(UserError, match="must have the fields input_ids and labels"):
        language_model_loss(nn.Linear(2, 2), {"x": torch.zeros(2)})


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
    cut = dpdist.documents(rows, tokenizer, length=5, bos_eos=True)
    assert told(cut, tokenizer) == ("all o",) * 2
    tokenizer.bos_token = "<|im_start|>"
    both = dpdist.documents(rows, tokenizer, length=16, bos_eos=True)
    assert told(both, tokenizer) == ("<|im_start|>all of it<|end|>",) * 2
    plain = dpdist.documents(rows, tokenizer, length=16)
    assert told(plain, tokenizer)[0] == "all of it" and "bos_eos" not in plain.tokenization
    with pytest.raises(UserError, match=r"record 0: .* bos_eos"):
        dpdist.documents([{"messages": CHAT}], lm.chat_tokenizer(), length=16, bos_eos=True)
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(UserError, match="record 0: bos_eos: "):
        dpdist.documents(rows, tokenizer, length=16, bos_eos=True)


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
    return peft.get_peft_model(base, peft.LoraConfig(r={rank}, target_modules="all-linear"))
"""


def check_released_by_factory(training, tmp_path: Path, monkeypatch) -> None:
    """A factory named at the release: texts are told and sampled, by tokens and template."""
    base, run = tmp_path / "base", training.run
    for rank in (3, 2):
        (tmp_path / f"rank{rank}.py").write_text(FACTORY.format(base=str(base), rank=rank))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="factory:"):
        write_release(run, factory="rank2:adapted")
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
    assert str(tmp_path) not in (run.release_folder / "README.md").read_text()
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
    shown = tokenizer.decode(column.tokenize_chat(prompts[1]))
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert {tokenizer.decode([each]) for each in column.ends} == {"<|im_end|>", "<|end|>"}
    with pytest.raises(UserError, match="line 1"):
        generation.parse_prompts('{"no": 1}', Path("p.jsonl"))
    with pytest.raises(UserError, match=r"p\.json"):
        generation.parse_prompts('["hi"]', Path("p.json"))


def test_code_of_ones_own_is_in_the_digest_of_a_library_s_model():
    model = lm.with_lora(lm.make("llama"))

    class Own(type(model)):
        def forward(self, **named):
            return super().forward(**named)

    before = code_digest_of(model)
    assert before == code_digest_of(model)
    model.__class__ = Own
    assert code_digest_of(model) != before


@pytest.mark.slow
def test_a_begin_and_an_end_of_documents_reach_the_release(tmp_path, monkeypatch):
    folder = lm.save_model(tmp_path / "base")
    (tmp_path / "marked.py").write_text(FACTORY.format(base=str(folder), rank=1))
    monkeypatch.syspath_prepend(str(tmp_path))
    import marked

    model, rows = marked.adapted(), [{"text": f"text {n}"} for n in range(20)]
    training = dpdist.PrivateTraining(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        dpdist.documents(rows, folder, length=16, bos_eos=True),
        loss=dpdist.language_model_loss,
        privacy=dpdist.Privacy(noise_multiplier=1.0, delta=1e-3),
        batch_size=8,
        steps=1,
        folder=tmp_path / "run",
    )
    training.run_all()
    write_release(training.run, factory="marked:adapted")
    release = dpdist.load(training.run.release_folder, trusted_factory="marked:adapted")
    assert release.description.text.bos_eos and release.text_answerer.column.bos_eos


# --- whole runs by a recipe


def write_chats(root: Path) -> None:
    for split, count in (("train", 40), ("test", 8)):
        says = [
            [{"role": "user", "content": f"what is {n}"},
             {"role": "assistant", "content": f"it is {split[:2]} {n + 1}"}]
            for n in range(count)
        ]  # fmt: skip
        asked, said = ([m[place]["content"] for m in says] for place in (0, 1))
        write_split(root / "chats", split, messages=says, asked=asked, said=said)


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
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_recipe_fine_tunes_a_folder_s_model_with_its_own_head(tmp_path, family):
    """Tied or not: adapters move, and nothing else; what is released says what was trained."""
    write_chats(tmp_path / "data")
    base = lm.save_model(tmp_path / "base", family)
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
    adapter = models.Adapter.of(before)
    adapter.config.bias = "all"  # trained in place, so that the base alone is there no more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.Adapter, "of", lambda _: adapter)
        assert _base_perplexity(test, before) == {}
    summary = dict(load_results(folder).summary())
    assert f"{of_base:.3g}"[:-1] in summary["perplexity"]
    assert str(measured["next_tokens"]) in summary["test accuracy"]
    write_release(folder)
    about = dpdist.load(folder.release_folder).description
    assert about.tested.base_perplexity == measured["base_perplexity"]
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
    rows = dict(verify_release(release))
    digest = integration.base_digest(loaded())
    assert digest in rows["adapter"]
    other = loaded()
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1.0
    changed = integration.base_digest(other)
    with pytest.raises(UserError, match=f"^base: .*{digest}.*{changed}"):
        integration.load_adapter(other, release)
    with pytest.raises(UserError, match=r"float32 .*bfloat16"):
        integration.load_adapter(loaded(dtype=torch.bfloat16), release)
    copy = shutil.copytree(release, aside / f"edited-{release.parent.name}")
    tensors = load_file(copy / "adapter_model.safetensors")
    save_file({n: t + 1 for n, t in tensors.items()}, copy / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: "):
        integration.load_adapter(loaded(), copy)
    (copy / CHECKSUMS).write_text(compute_checksums(copy))
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: "):
        verify_release(copy, trusted_factory="factories:adapted")
    for name in ("adapter_model.safetensors", "adapter_config.json", "base.json"):
        (copy / name).unlink()
    (copy / CHECKSUMS).write_text(compute_checksums(copy))
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        dpdist.load(copy)
    with pytest.raises(UserError, match="folder:"):
        integration.load_adapter(loaded(), copy)


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
    raw["data"]["classes"] = 400
    assert parse_recipe(raw, "test").data.classes == 400
