"""`PrivateTrainer`: the Trainer of transformers takes dpdist's own steps, and none of its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import language_models as lm
from support.optional_extras import needs_hf
from support.training import KEY, release_ids

import dpdist
from dpdist import UserError
from dpdist.core.optional_imports import import_extra
from dpdist.publishing import write_release

needs_hf(whole_file=True)
integration = import_extra("dpdist.integrations.transformers", "hf", "tests")
peft = import_extra("peft", "hf", "tests")
transformers = import_extra("transformers", "hf", "tests")
ModelLoss, PrivateTrainer = integration.ModelLoss, integration.PrivateTrainer


WORDS, LENGTH, SIZE = lm.WIDTHS["vocab_size"], 7, 300
PRIVATE = {"noise_multiplier": 1.0, "delta": 1e-3, "run_key": KEY}


def llama() -> Any:
    return lm.make("llama", num_hidden_layers=1)


def lora() -> Any:
    return lm.stirred(lm.with_lora(llama(), target_modules=["q_proj", "v_proj"]))


def texts(count: int = 40, seed: int = 1) -> list[dict[str, Any]]:
    """Documents of three to nine tokens, the first two a prompt that does not count."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        size = int(torch.randint(3, 10, (1,), generator=draw))
        tokens = torch.randint(WORDS, (size,), generator=draw).tolist()
        found.append(
            {"input_ids": tokens, "labels": [-100, -100, *tokens[2:]], "source": "private"}
        )
    return found


def arguments(folder: Path, **given: Any) -> Any:
    options = {
        "per_device_train_batch_size": 8, "max_steps": 4, "learning_rate": 0.01, "use_cpu": True,
        "disable_tqdm": True, "logging_steps": 1, **given,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **options)


def trainer(folder: Path, model: Any = None, **given: Any) -> PrivateTrainer:
    args = given.pop("args", None) or arguments(folder)
    options = {"train_dataset": texts(), "privacy": PRIVATE, "max_length": LENGTH, **given}
    return PrivateTrainer(model or lora(), args, **options)


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


# --- the same training as the own loop


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids, labels = (
        torch.tensor([(row[name] + [fill] * LENGTH)[:LENGTH] for row in rows])
        for name, fill in (("input_ids", 0), ("labels", -100))
    )
    return {"input_ids": ids, "labels": labels}


def own_loss(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over a record's counted tokens, record by record."""
    logits = module(input_ids=batch["input_ids"]).logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    each = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", ignore_index=-100
    )
    return each.sum(1) / (labels != -100).sum(1).clamp(min=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PrivateTrainer:
    found = trainer(tmp_path_factory.mktemp("trained") / "run")
    found.output = found.train()
    return found


@pytest.mark.slow
def test_it_releases_the_bits_of_the_own_loop(tmp_path, trained):
    model, rows = lora(), padded(texts())
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": 0.0},
         {"params": [], "weight_decay": 0.0}], lr=0.01, fused=True, eps=1e-8,
    )  # fmt: skip
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, 4)
    training = dpdist.PrivateTraining(
        model, optimizer,
        dpdist.as_records(
            [{name: each[i] for name, each in rows.items()} for i in range(40)],
            ranges={"input_ids": WORDS, "labels": WORDS},
        ),
        loss=own_loss, privacy=PRIVATE, batch_size=8, steps=4, folder=tmp_path / "own",
        state=[schedule],
    )  # fmt: skip
    # The key of a run is made from the plan and from its records, which both call otherwise.
    training._records.keyed_fingerprint = trained._records.keyed_fingerprint
    while training.remaining_steps:
        training.step()
        schedule.step()
    assert training.plan == trained.training.plan
    assert release_ids(training.run) == release_ids(trained.training.run)
    assert len(release_ids(training.run)) == 4
    assert torch.equal(weights(model), weights(trained.model))


def test_what_is_logged_was_released(trained):
    training, history = trained.training, trained.state.log_history
    assert [each["step"] for each in history] == [1, 2, 3, 4]
    for each in history:
        assert each.keys() == {"step", "epoch", "learning_rate", "noisy_norm", "epsilon"}
    assert history[1]["epsilon"] == training.plan.guarantee(steps=2).epsilon
    assert history[3]["learning_rate"] == pytest.approx(0.01 / 4)
    metrics = trained.output.metrics
    assert (metrics["epsilon"], metrics["delta"]) == (training.guarantee.epsilon, 1e-3)
    assert training.guarantee.kind == "proved"


# --- after a stop


@pytest.mark.slow
def test_it_goes_on_after_a_stop(tmp_path, trained):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            control.should_training_stop = state.global_step == 2

    resources = {"resources": {"checkpoint_seconds": 1e-6}}
    begun = trainer(tmp_path / "run", callbacks=[Stop()], training_options=resources)
    assert begun.train().global_step == 2
    assert begun.guarantee.epsilon == begun.training.plan.guarantee(steps=2).epsilon
    begun.training.close()
    ended = trainer(tmp_path / "run")
    assert ended.train().global_step == 4
    assert [each["step"] for each in ended.state.log_history] == [2, 3, 4]
    again = trainer(tmp_path / "run")  # a finished run: nothing is trained, its weights are there
    assert again.train().global_step == 4 and again.state.log_history == []
    assert release_ids(again.training.run) == release_ids(trained.training.run)
    for each in (ended, again):
        assert torch.equal(weights(each.model), weights(trained.model))


# --- losses


def own_losses(model: Any, rows: list[dict[str, Any]]) -> list[float]:
    """The loss of transformers itself, one record at a time, without padding."""
    with torch.no_grad():
        return [
            float(model(**{n: torch.tensor([v]) for n, v in row.items() if n != "source"}).loss)
            for row in rows
        ]


def collated(model: Any, rows: list[dict[str, Any]], folder: Path, **given: Any) -> Any:
    args = arguments(folder, per_device_train_batch_size=2)
    t = trainer(folder, model, train_dataset=rows, max_length=12, args=args, **given)
    return t, t._records.batch(np.arange(len(rows)))


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_the_loss_of_a_causal_model_is_that_of_transformers_record_by_record(tmp_path, side):
    """Nor does padding of the user's own count."""
    model, rows, given = llama(), texts(6), []
    for row in rows:
        room = [0] * (12 - len(row["input_ids"]) if side != "none" else 0)
        filled = {"input_ids": [5 for _ in room], "labels": [-100 for _ in room],
                  "attention_mask": room}  # fmt: skip
        each = {**row, "attention_mask": [1] * len(row["input_ids"])}
        given.append({n: p + each[n] if side == "left" else each[n] + p for n, p in filled.items()})
    t, batch = collated(model, given, tmp_path / "run")
    with torch.no_grad():
        found = t._loss(model, batch)
    torch.testing.assert_close(found, torch.tensor(own_losses(model, rows)), rtol=1e-5, atol=1e-6)


BERT = {"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8, "max_position_embeddings": 16}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "label"),
    [
        ("SequenceClassification", {"num_labels": 3}, lambda n, size: [1.0, 0.0, n % 2.0]),
        ("MaskedLM", {}, lambda n, size: [-100] + [n % WORDS] * (size - 1)),
    ],
)
def test_losses_of_encoders_are_those_of_transformers(tmp_path, kind, settings, label):
    torch.manual_seed(5)
    model = getattr(transformers, f"BertFor{kind}")(
        transformers.BertConfig(**BERT, **settings)
    ).eval()
    rows = [
        {"input_ids": (size := row["input_ids"]), "labels": label(n, len(size))}
        for n, row in enumerate(texts(6))
    ]
    t, batch = collated(model, rows, tmp_path / "run")
    with torch.no_grad():
        found = t._loss(model, batch)
    torch.testing.assert_close(found, torch.tensor(own_losses(model, rows)), rtol=1e-4, atol=1e-5)


def test_records_of_a_class_join_at_its_rate(tmp_path):
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))
    rows = [{"input_ids": row["input_ids"], "label": n % 4 // 3} for n, row in enumerate(texts())]
    given = {"class_sampling": {0: 1, 1: 4}, "class_counts": {0: 30, 1: 10}}
    t = trainer(tmp_path / "run", model, train_dataset=rows, training_options=given)
    assert t.train().global_step == 4
    step = t.training.plan.step(0)  # (30 a + 10 * 4a) / 40 = 0.2
    assert step.rates_by_class == pytest.approx((4 / 35, 16 / 35)) and step.expected_batch == 8


# --- evaluation


def test_public_records_are_evaluated_between_steps(tmp_path):
    public = texts(8, seed=9)
    args = arguments(tmp_path / "run", eval_strategy="steps", eval_steps=2, logging_steps=4,
                     per_device_eval_batch_size=1)  # fmt: skip
    t = trainer(tmp_path / "run", args=args, eval_dataset=public, public_eval=True)
    t.train()
    steps = [each["step"] for each in t.state.log_history if "eval_loss" in each]
    assert steps == [2, 4] and t.training.guarantee.kind == "proved"
    wanted = own_losses(
        t.model.eval(), [{k: v for k, v in r.items() if k != "source"} for r in public]
    )
    assert t.evaluate()["eval_loss"] == pytest.approx(sum(wanted) / 8, rel=1e-4)
    assumed = " ".join(dpdist.load_results(t.training.run).privacy_card()["assumptions"])
    assert "eval_dataset is public" in assumed


class _KeepsFirst(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.best = weights(kwargs["model"]).clone()


@pytest.mark.filterwarnings("ignore")
def test_the_best_model_of_public_evaluations_is_loaded_and_released(tmp_path):
    """The first step has the best metric, which a function of the script invents."""
    scores = iter([3.0, 1.0, 2.0, 0.5])
    watch = _KeepsFirst()
    args = arguments(
        tmp_path / "run", eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="made_up", greater_is_better=True,
        save_total_limit=1, per_device_eval_batch_size=1,
    )  # fmt: skip
    stop = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    t = trainer(
        tmp_path / "run", args=args, eval_dataset=texts(4, seed=9), public_eval=True,
        compute_metrics=lambda found: {"made_up": next(scores)}, callbacks=[watch, stop],
    )  # fmt: skip
    assert t.train().global_step == 3
    assert t.state.best_global_step == 1 and t.state.best_metric == 3.0
    assert torch.equal(weights(t.model), watch.best)
    assert t.training.guarantee == t.training.plan.guarantee()
    assert t.training.run.training_summary.exists()
    kept = t.save_adapter(tmp_path / "adapter", not_private=True)
    assert (kept / "adapter_model.safetensors").exists()  # the released one is the model's


@pytest.mark.filterwarnings("ignore")
def test_units_of_the_data_set_are_protected_whole(tmp_path):
    rows = [{**row, "customer_id": f"c{n // 2}"} for n, row in enumerate(texts())]
    args = arguments(tmp_path / "run", per_device_train_batch_size=4)
    t = trainer(
        tmp_path / "run", args=args, train_dataset=rows, unit="customer_id",
        privacy={**PRIVATE, "unit": "user", "max_records_per_user": 2},
    )  # fmt: skip
    assert len(t.training.records) == 20
    t.train()
    assert "customer_id" in json.dumps(dpdist.load_results(t.training.run).privacy_card())


def test_bf16_runs_the_passes_in_bfloat16(tmp_path):
    model, types = lora(), set()
    model.base_model.model.lm_head.register_forward_hook(
        lambda m, a, output: types.add(output.dtype)
    )
    t = trainer(tmp_path / "run", model, args=arguments(tmp_path / "run", bf16=True, max_steps=1))
    types.clear()
    t.train()
    assert torch.bfloat16 in types and weights(model).dtype == torch.float32


def test_a_merged_model_is_the_trained_one(tmp_path, trained):
    folder = trained.save_merged(tmp_path / "merged", not_private=True)
    merged = transformers.LlamaForCausalLM.from_pretrained(folder)
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        expected = trained.model.eval()(input_ids=tokens).logits
        found = merged.eval()(input_ids=tokens).logits
    trained.model.train()
    assert torch.allclose(found, expected, atol=1e-5)
    assert {"privacy_card.json", "privacy_card.md"} <= {path.name for path in folder.iterdir()}


def test_private_records_are_not_evaluated(tmp_path, trained):
    with pytest.raises(UserError):
        trainer(tmp_path / "run", eval_dataset=texts(4, seed=9))
    for call in (trained.evaluate, trained.predict):
        with pytest.raises(UserError):
            call(texts())
    relabeled = {**texts()[3], "labels": [-100] * len(texts()[3]["labels"])}
    t = trainer(tmp_path / "run", public_eval=True,
                args=arguments(tmp_path / "run", per_device_eval_batch_size=1))  # fmt: skip
    for call in (t.evaluate, t.predict):
        with pytest.raises(UserError):
            call([*texts(3, seed=9), relabeled])
    t.eval_dataset = {"a": texts(3, seed=9), "b": texts()}  # as a script may, later
    assert t.evaluate("a").keys() >= {"eval_loss"}
    for given in ("b", None, {"a": texts()}):
        with pytest.raises(UserError):
            t.evaluate(given)


@pytest.mark.slow
def test_scores_on_held_out_private_records_are_paid_for(tmp_path):
    t = trainer(tmp_path / "run")
    held = t._records_of(texts(20, seed=9), "held out")
    t.training.score(held, every=2, noise=5.0, value=lambda module, batch: -own_loss(module, batch))
    t.train()
    assert ["score" in each for each in t.state.log_history] == [False, True, False, True]


# --- what is refused


REFUSED = {
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "lr_scheduler_type": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_arguments_that_the_private_step_does_not_honor_are_refused(tmp_path, key):
    args = arguments(tmp_path / "run", **REFUSED[key])
    with pytest.raises(UserError, match=rf"^args\.{key}: "):
        trainer(tmp_path / "run", args=args)
    assert not (tmp_path / "run").exists()


def test_every_argument_is_read_or_refused():
    """A field that a later version adds is refused until somebody has read it."""
    fields = {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    assert fields >= integration._READ
    assert not integration._READ & integration._INSTEAD.keys()
    assert integration._INSTEAD.keys() <= fields
    assert "fp16" in integration._INSTEAD  # which no CPU takes: it is refused by the same lines


def test_causal_models_that_do_not_say_so_see_no_token_that_follows():
    torch.manual_seed(0)
    config = transformers.MptConfig(vocab_size=WORDS, d_model=8, n_heads=2, n_layers=1)
    model = transformers.MptForCausalLM(config).eval()
    loss, one = ModelLoss(model), torch.tensor([[3, 4, 5, 6]])
    batch = {"labels": torch.tensor([[-100, 4, -100, -100]]), "attention_mask": one * 0 + 1}
    found = [
        loss(model, {**batch, "input_ids": tokens}).item()
        for tokens in (one, torch.tensor([[3, 4, 7, 8]]))
    ]
    assert loss.causal and found[0] == pytest.approx(found[1], abs=1e-6)


# --- adapters


def test_an_adapter_is_loaded_by_peft_with_the_same_logits(tmp_path, trained):
    folder = trained.save_adapter(tmp_path / "adapter", base_name="tiny", not_private=True)
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "privacy_card.json", "privacy_card.md",
        "base.json", "README.md",
    }  # fmt: skip
    assert json.loads((folder / "base.json").read_text()) == {
        "name": "tiny", "digest": integration.base_digest(llama()), "dtype": "float32"
    }  # fmt: skip
    loaded = peft.PeftModel.from_pretrained(llama(), folder).eval()
    ids = padded(texts(5))["input_ids"]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trained.model.eval()(ids).logits)
        assert not torch.allclose(loaded(ids).logits, lora().eval()(ids).logits, atol=1e-4)
    trained.model.train()
    facts = dpdist.load_results(trained.training.run)
    assert json.loads((folder / "privacy_card.json").read_text()) == facts.privacy_card()
    everything = b"".join(path.read_bytes() for path in folder.iterdir())
    assert str(tmp_path).encode() not in everything and KEY.encode() not in everything


FACTORY = """
import torch
from support import language_models as lm


def adapted():
    return lm.with_lora(lm.make("llama", vocab_size={size}))
"""


@pytest.mark.slow
def test_a_run_is_released_with_its_tokenizer_and_answers(tmp_path, monkeypatch):
    tokenizer = lm.chat_tokenizer()
    t = trainer(
        tmp_path / "run", lm.with_lora(lm.make("llama", vocab_size=SIZE)),
        processing_class=tokenizer,
    )  # fmt: skip
    t.train()
    (tmp_path / "chats.py").write_text(FACTORY.format(size=SIZE))
    monkeypatch.syspath_prepend(str(tmp_path))
    write_release(t.training.run, factory="chats:adapted", not_private=True)
    again = transformers.AutoTokenizer.from_pretrained(t.training.run.release_folder)
    assert (again.chat_template, again.eos_token) == (lm.TEMPLATE, "<|end|>")
    release = dpdist.load(t.training.run.release_folder, trusted_factory="chats:adapted")
    likely = release.text_answerer("q 3").likely
    ids = torch.tensor([tokenizer("q 3")["input_ids"]])
    with torch.no_grad():
        wanted = t.model.eval()(ids).logits[0, -1].softmax(-1).topk(len(likely)).values
    torch.testing.assert_close(torch.tensor([each[1] for each in likely]), wanted)


@pytest.mark.slow
def test_activations_that_are_computed_again_change_no_bit(tmp_path, trained):
    passes, model = [], lora().train()
    layer = model.get_base_model().model.layers[0]
    original = layer.mlp.forward
    layer.mlp.forward = lambda hidden: (passes.append(1), original(hidden))[1]
    args = arguments(tmp_path / "run", activation_checkpointing=True)
    found = trainer(tmp_path / "run", model, args=args)
    found.train()
    assert layer.gradient_checkpointing and len(passes) > 8
    assert release_ids(found.training.run) == release_ids(trained.training.run)
    assert torch.equal(weights(model), weights(trained.model))


def test_rows_of_several_documents_are_refused(tmp_path):
    one = {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}
    kept = {**one, "position_ids": [1, 0, 1, 2], "attention_mask": [0, 1, 1, 1]}  # filled up
    for packed in ({"position_ids": [0, 1, 0, 1]}, {"seq_lengths": [2, 2]}):
        with pytest.raises(UserError):
            trainer(tmp_path / "run", train_dataset=[kept, {**one, **packed}] * 20)
    numbered = [{**one, "position_ids": [0, 1, 2, 3]}, kept] * 20
    assert trainer(tmp_path / "run", train_dataset=numbered).training.remaining_steps == 4
