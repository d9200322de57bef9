"""Direct preference optimization: gradients by pair, halves that stay apart, refusals, a run."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from support import language_models as lm
from support.optional_extras import needs_hf
from torch import Tensor, nn
from torch.nn import functional

import dpdist
from dpdist.core.errors import UserError
from dpdist.gradients import objective
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.hooks import OwnLoss, take
from dpdist.gradients.objective import language_model_loss, preference_loss

needs_hf(whole_file=True)

CLIP, BETA = 0.005, 0.3
LOSS = partial(preference_loss, beta=BETA)


def halves() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Chosen and rejected documents of 2 to 9 tokens; some answers have prompts, one no token."""
    chosen = lm.batch()
    return chosen, {name: each.roll(1, 0) for name, each in chosen.items()}


def alone(model: nn.Module, side: dict[str, Tensor], row: int) -> Tensor:
    """The log-probability of one answer by an ordinary pass of its document alone."""
    one = lm.row_of(side, row)
    logits = model(input_ids=one["input_ids"]).logits[0, :-1]
    return -functional.cross_entropy(logits, one["labels"][0, 1:], reduction="sum",
                                     ignore_index=-100)  # fmt: skip


def difference(model: nn.Module, row: int) -> Tensor:
    chosen, rejected = halves()
    return alone(model, chosen, row) - alone(model, rejected, row)


def fields_of(model: nn.Module) -> dict[str, Tensor]:
    chosen, rejected = halves()
    with torch.no_grad(), model.disable_adapter():
        reference = torch.stack([difference(model, row) for row in range(6)])
    both = {name: torch.cat([chosen[name], rejected[name]], 1) for name in ("input_ids", "labels")}
    return {**both, "reference": reference}


def tiny(family: str = "llama", **more) -> nn.Module:
    return lm.stirred(lm.with_lora(lm.make(family, **more))).double()


# --- gradients by pair


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_clipped_sums_are_those_of_one_pair_at_a_time(family):
    model = tiny(family)
    fields = fields_of(model)

    def by_definition(row: int) -> Tensor:
        margin = difference(model, row) - fields["reference"][row]
        return -functional.logsigmoid(BETA * margin)

    wanted = lm.one_at_a_time(model, by_definition, 6, CLIP)
    unclipped = lm.one_at_a_time(model, by_definition, 6, 1e9)
    assert (wanted - unclipped).norm() > CLIP / 2 and wanted.norm() > CLIP / 2
    engine = GradientEngine(model, OwnLoss(LOSS), clipping=FlatClipping(CLIP), micro_batch=4)
    found = engine.clipped_sum(fields, torch.zeros(6, dtype=torch.int64)).flat
    assert float((found - wanted).norm()) <= 1e-9 * CLIP


def test_a_rejected_answer_that_sees_the_chosen_one_is_noticed(monkeypatch):
    model = tiny()
    fields = fields_of(model)
    right = preference_loss(model, fields)
    other = {**fields, "input_ids": fields["input_ids"].clone()}
    other["input_ids"][:, 0] = other["input_ids"][:, 0] % 39 + 1
    kept = {**fields, "labels": fields["labels"].clone()}
    kept["labels"][:, :9] = -100  # of rejected answers alone
    moved = {**kept, "input_ids": other["input_ids"]}
    assert torch.equal(preference_loss(model, moved), preference_loss(model, kept))
    assert not torch.equal(preference_loss(model, other), right)  # chosen ones do see it
    for family, lost in (("llama", "attention_mask"), ("gpt2", "position_ids")):
        model = tiny(family)
        fields, base = fields_of(model), lm.make(family, vocab_size=262)
        right, forward = preference_loss(model, fields), type(base).forward

        def careless(
            self, input_ids, attention_mask=None, position_ids=None, lost=lost, forward=forward, **k
        ):
            given = {"attention_mask": attention_mask, "position_ids": position_ids}
            every = torch.ones_like(input_ids)  # plainly causal, or positions that go on
            given[lost] = every if lost == "attention_mask" else every.cumsum(1) - 1
            return forward(self, input_ids=input_ids, **given, **k)

        with monkeypatch.context() as patch:
            patch.setattr(type(base), "forward", careless)
            wrong = preference_loss(model, fields)
            assert not torch.allclose(wrong, right, rtol=1e-6)
            with pytest.raises(UserError):
                make(rows_of(), reference=base)
        assert len(make(rows_of(), reference=base)) == 3


# --- records


CHAT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "b"}, {"role": "user", "content": "c?"}]  # fmt: skip
GOOD, BAD = ({"role": "assistant", "content": each} for each in ("yes", "no no"))


def rows_of() -> list[dict[str, str]]:
    return [{"prompt": f"is {n}", "chosen": f" in {n}", "rejected": f" out{n}"} for n in range(3)]


def make(rows, length=24, tokenizer=None, reference=None, pretraining_data="public texts", **more):
    cutter = lm.chat_tokenizer(None) if tokenizer is None else tokenizer
    model = lm.with_lora(lm.make("llama", vocab_size=262, max_position_embeddings=160))
    given = {"reference": reference or model, "pretraining_data": pretraining_data, **more}
    return dpdist.preferences(rows, cutter, length=length, **given)


def told(records, tokenizer, half: int, row: int = 0) -> tuple[str, str]:
    """Return the text of one answer's half of a row, and the part of it that is learned."""
    fields = records.batch([row])
    ids, labels = (fields[name][0].chunk(2)[half] for name in ("input_ids", "labels"))
    size = int((ids != 0).nonzero().max()) + 1
    return tokenizer.decode(ids[:size]), tokenizer.decode(ids[:size][labels[:size] >= 0])


def test_only_the_last_answers_are_learned():
    plain, chats = lm.chat_tokenizer(None), lm.chat_tokenizer()
    records = make(rows_of(), tokenizer=plain)
    assert told(records, plain, 0) == ("is 0 in 0<|end|>", " in 0<|end|>")
    assert told(records, plain, 1) == ("is 0 out0<|end|>", " out0<|end|>")
    begin, end = "<|im_start|>", "<|im_end|>"
    shown = "".join(f"{begin}{m['role']}\n{m['content']}{end}\n" for m in CHAT)
    for row in (
        {"prompt": CHAT, "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [*CHAT, GOOD], "rejected": [*CHAT, BAD]},
    ):
        records = make([row], 140, chats)
        for half, answer in enumerate(("yes", "no no")):
            learned = f"{answer}{end}\n"
            assert told(records, chats, half) == (f"{shown}{begin}assistant\n{learned}", learned)
        assert records.tokenization["chat"]


def test_the_reference_is_the_base_and_sees_one_pair_at_a_time():
    tokenizer = lm.chat_tokenizer(None)
    model = lm.with_lora(lm.make("llama", vocab_size=262)).double()
    model.train()
    frozen = next(p for name, p in model.named_parameters() if "lora_B" in name)
    frozen.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    records = make(rows_of(), reference=model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert all(module.training for module in model.modules())
    fields = records.batch(slice(None))
    assert fields["reference"].dtype == torch.float64
    with torch.no_grad(), model.disable_adapter():
        off = objective.pair_log_probabilities(model, fields["input_ids"], fields["labels"])
    assert torch.allclose(off[:, 0] - off[:, 1], fields["reference"])
    with pytest.raises(UserError):
        make(rows_of(), reference=lm.stirred(copy.deepcopy(model)))
    one = make(rows_of()[1:2], tokenizer=tokenizer, reference=model).batch([0])
    assert torch.equal(one["reference"][0], fields["reference"][1])  # whoever else is there
    key = bytes(32)
    macs = [list(each.input_macs(key)) for each in (records, make(rows_of()))]
    assert macs[0] == macs[1] and len(set(macs[0])) == 3  # a budget knows them again


def test_windows_and_kernels_that_ignore_the_mask_are_refused():
    model = tiny("mistral")  # a window of 5 tokens
    with pytest.raises(UserError, match="length: "):
        preference_loss(model, fields_of(model))
    rows = [{"prompt": "a", "chosen": "b", "rejected": "cd"}]
    small = partial(lm.make, "mistral", vocab_size=262)
    assert len(make(rows, length=5, reference=small())) == 1
    with pytest.raises(UserError, match="length: "):
        make(rows, length=6, reference=small())
    assert len(make(rows, length=24, reference=small(sliding_window=None))) == 1
    other = lm.make("llama")
    other.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError):
        make(rows, reference=other)


class Counting(nn.Module):
    """Answers otherwise from its fourth pass on, as what keeps a state might."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.passes = inner, 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.passes += 1
        return self.inner(hidden) * (1 + (self.passes > 3))


def test_a_reference_that_remembers_other_pairs_is_refused():
    model = lm.make("llama", vocab_size=262)
    assert len(make(rows_of(), reference=model)) == 3
    model.lm_head = Counting(model.lm_head)
    with pytest.raises(UserError, match="reference"):
        make(rows_of(), reference=model)


def test_a_reference_answers_without_dropout():
    model = lm.make("gpt2", vocab_size=262, resid_pdrop=0.5, embd_pdrop=0.5)
    right = make(rows_of(), reference=model.eval()).batch(slice(None))["reference"]
    model.train()
    assert torch.equal(make(rows_of(), reference=model).batch(slice(None))["reference"], right)
    assert all(module.training for module in model.modules())


def test_a_reference_that_is_known_to_be_trained_on_records_is_refused(tmp_path):
    rows = rows_of()
    (tmp_path / "release").mkdir()
    lm.save_model(tmp_path / "release" / "merged")
    loaded = lm.transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "release" / "merged")
    assert len(make(rows, reference=loaded)) == 3
    for name in ("release.json", "privacy_card.json"):
        (tmp_path / "release" / name).write_text("{}")
    with pytest.raises(UserError, match="reference"):
        make(rows, reference=loaded)
    marked = lm.make("llama", vocab_size=262)
    marked._dpdist_trained_by = "runs/sft/release"  # as `load_adapter` leaves it
    with pytest.raises(UserError, match="runs/sft/release"):
        make(rows, reference=marked)


# --- a run


def run_of(model: nn.Module, records, folder: Path, **given) -> dpdist.PrivateTraining:
    """A training that is not begun; adapters alone are trained."""
    privacy = dpdist.Privacy(noise_multiplier=1.0, delta=1e-3)
    settings = {"loss": preference_loss, "privacy": privacy, "batch_size": 2, "steps": 3, **given}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    return dpdist.PrivateTraining(model, optimizer, records, folder=folder, **settings)


@pytest.mark.slow
def test_a_loop_learns_what_is_preferred(tmp_path: Path):
    model = lm.with_lora(lm.make("llama", vocab_size=262))
    rows = [{**row, "prompt": f"{n} {row['prompt']}"} for n in range(8) for row in rows_of()]
    records = make(rows, reference=model, pretraining_data="random numbers")
    before = float(preference_loss(model, records.batch(slice(None))).mean().detach())
    assert before == pytest.approx(0.6931, abs=1e-4)  # adapters begin at zero
    privacy = dpdist.Privacy(noise_multiplier=0.1, delta=1e-3, clip_norm=1.0)
    start = partial(run_of, model, batch_size=16, steps=6, privacy=privacy)
    documents = dpdist.documents([{"text": "abc"}], lm.chat_tokenizer(None), length=8)
    twice = make([*rows, *rows], reference=model, unit="prompt")
    for loss, data in (
        (language_model_loss, records), ("cross-entropy", records), (preference_loss, documents),
        (preference_loss, twice),
    ):  # fmt: skip
        with pytest.raises(UserError):
            start(data, tmp_path / "refused", loss=loss)
    training = start(records, tmp_path / "run")
    assert training.recipe.privacy_unit == "one pair of answers, a row of the data"
    training.run_all()
    after = float(preference_loss(model, records.batch(slice(None))).mean().detach())
    assert after < before - 0.01
    copied = copy.deepcopy(model).requires_grad_(False)
    del training, start
    for trained in (model, copied, copied.merge_and_unload()):
        with pytest.raises(UserError, match="reference must be public"):
            make(rows, reference=trained)
    fields = records.batch(slice(None))
    for pairs in (records, [take(fields, n) for n in range(24)]):
        with pytest.raises(UserError):
            run_of(model, pairs, tmp_path / "second")
    own = lm.with_lora(lm.make("llama", vocab_size=262))
    made = run_of(own, [take(fields, n) for n in range(24)], tmp_path / "own")
    assert made.recipe.privacy_unit == "one pair of answers, a row of the data"
    assert made._learner.spec.input_shape == (24,)  # of one answer with its prompt


@pytest.mark.slow
def test_a_continued_run_marks_its_model_and_goes_on(tmp_path: Path):
    """A process that only restores a checkpoint has weights of private pairs, too."""
    begun = partial(run_of, folder=tmp_path / "run", resources={"checkpoint_seconds": 1e-3})
    model = lm.with_lora(lm.make("llama", vocab_size=262))
    records = make(rows_of(), reference=model)
    first = begun(model, records)
    assert len(make(rows_of(), reference=model)) == 3  # nothing was learned
    first.step()
    first.step()  # the first one is in a checkpoint now
    first.close()
    begun(model, records).close()  # the same run's own weights
    other = lm.with_lora(lm.make("llama", vocab_size=262))
    second = begun(other, records)
    assert second.remaining_steps < 3
    with pytest.raises(UserError, match="reference must be public"):
        make(rows_of(), reference=other)
    second.run_all()
