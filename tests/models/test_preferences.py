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
from dpdist.publishing import write_release

needs_hf(whole_file=True)

CLIP, BETA = 0.005, 0.3
LOSS = partial(preference_loss, beta=BETA)
FAMILIES = [
    pytest.param(family, marks=[] if family in ("llama", "gpt2") else [pytest.mark.slow])
    for family in lm.FAMILIES
    if family not in ("bert", "mistral")
]


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


def clipped(model: nn.Module, fields: dict[str, Tensor], loss=LOSS) -> Tensor:
    engine = GradientEngine(model, OwnLoss(loss), clipping=FlatClipping(CLIP), micro_batch=4)
    return engine.clipped_sum(fields, torch.zeros(6, dtype=torch.int64)).flat


# --- gradients by pair


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_clipped_sums_are_those_of_one_pair_at_a_time(family):
    model = tiny(family)
    fields = fields_of(model)

    def by_definition(row: int) -> Tensor:
        margin = difference(model, row) - fields["reference"][row]
        return -functional.logsigmoid(BETA * margin)

    wanted = lm.one_at_a_time(model, by_definition, 6, CLIP)
    unclipped = lm.one_at_a_time(model, by_definition, 6, 1e9)
    assert (wanted - unclipped).norm() > CLIP / 2 and wanted.norm() > CLIP / 2
    assert float((clipped(model, fields) - wanted).norm()) <= 1e-9 * CLIP
    losses = preference_loss(model, fields, beta=BETA)
    assert losses.shape == (6,) and losses.std() > 1e-3


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
            with pytest.raises(UserError, match="answers"):
                make(rows_of(), reference=base)
        assert len(make(rows_of(), reference=base)) == 3


@pytest.mark.slow
def test_prompts_and_padding_do_not_count():
    model = tiny()
    fields = fields_of(model)
    real = torch.cat([each["attention_mask"] for each in halves()], 1) > 0
    filled = {**fields, "input_ids": fields["input_ids"].where(real, torch.tensor(7))}
    assert torch.equal(preference_loss(model, filled), preference_loss(model, fields))
    whole = {**fields, "labels": fields["input_ids"].where(real, torch.tensor(-100))}
    assert not torch.allclose(preference_loss(model, whole)[0], preference_loss(model, fields)[0])
    longer = {
        name: torch.cat([functional.pad(half, (0, 4), value=0 if name == "input_ids" else -100)
                         for half in each.chunk(2, 1)], 1) if name != "reference" else each
        for name, each in fields.items()
    }  # fmt: skip
    difference = clipped(model, longer) - clipped(model, fields)
    assert float(difference.norm()) <= 1e-9 * CLIP
    nothing = {**fields, "labels": torch.full_like(fields["labels"], -100)}
    nothing["reference"] = torch.zeros(6, dtype=torch.float64)
    assert torch.allclose(preference_loss(model, nothing), torch.tensor(2.0).double().log())
    assert clipped(model, nothing).norm() == 0


# --- records


CHAT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "b"}, {"role": "user", "content": "c?"}]  # fmt: skip
GOOD, BAD = ({"role": "assistant", "content": each} for each in ("yes", "no no"))


def rows_of() -> list[dict[str, str]]:
    return [{"prompt": f"is {n}", "chosen": f" in {n}", "rejected": f" out{n}"} for n in range(3)]


def make(rows, length=24, tokenizer=None, reference=None, pretraining_data="public texts", **more):
    cutter = lm.chat_tokenizer(None) if tokenizer is None else tokenizer
    model = lm.with_lora(lm.make("llama", vocab_size=262, max_position_embeddings=160))
    return dpdist.preferences(
        rows,
        cutter,
        length=length,
        reference=reference or model,
        pretraining_data=pretraining_data,
        **more,
    )


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
    with pytest.raises(UserError, match="merge_and_unload"):
        make(rows_of(), reference=lm.stirred(copy.deepcopy(model)))
    one = make(rows_of()[1:2], tokenizer=tokenizer, reference=model).batch([0])
    assert torch.equal(one["reference"][0], fields["reference"][1])  # whoever else is there
    key = bytes(32)
    macs = [list(each.input_macs(key)) for each in (records, make(rows_of()))]
    assert macs[0] == macs[1] and len(set(macs[0])) == 3  # a budget knows them again


def test_windows_and_kernels_that_ignore_the_mask_are_refused():
    model = tiny("mistral")  # a window of 5 tokens
    with pytest.raises(UserError, match=r"length: .* sliding_window"):
        preference_loss(model, fields_of(model))
    rows = [{"prompt": "a", "chosen": "b", "rejected": "cd"}]
    small = partial(lm.make, "mistral", vocab_size=262)
    assert len(make(rows, length=5, reference=small())) == 1
    with pytest.raises(UserError, match="length: "):
        make(rows, length=6, reference=small())
    assert len(make(rows, length=24, reference=small(sliding_window=None))) == 1
    other = lm.make("llama")
    other.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="flash_attention"):
        make(rows, reference=other)


class Counting(nn.Module):
    """Answers otherwise from its fourth pass on, as what keeps a state might."""

    def __init__(self, inner: nn.Module, others: int = 3) -> None:
        super().__init__()
        self.inner, self.rows, self.others = inner, list[int](), others

    def forward(self, hidden: Tensor) -> Tensor:
        self.rows.append(len(hidden))
        return self.inner(hidden) * (1 + (len(self.rows) > self.others))


def test_a_reference_that_remembers_other_pairs_is_refused():
    model = lm.make("llama", vocab_size=262)
    assert len(make(rows_of(), reference=model)) == 3
    inner = model.lm_head
    model.lm_head = Counting(inner, 10)
    assert len(make(rows_of(), reference=model)) == 3
    assert model.lm_head.rows == [1, 2, 1, 1, 1, 1]  # halves, three pairs alone, the first again
    model.lm_head = Counting(inner)
    with pytest.raises(UserError, match="reference"):
        make(rows_of(), reference=model)
    cut = [{**rows_of()[0], "prompt": 40 * "a"}, *rows_of()]  # of the first one nothing is learned
    model.lm_head = Counting(inner, 4)
    with (
        pytest.warns(UserWarning, match="1 of 4"),
        pytest.raises(UserError, match="reference"),
    ):
        make(cut, reference=model)


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


@pytest.mark.slow
def test_a_loop_learns_what_is_preferred(tmp_path: Path):
    model = lm.with_lora(lm.make("llama", vocab_size=262))
    rows = [{**row, "prompt": f"{n} {row['prompt']}"} for n in range(8) for row in rows_of()]
    records = make(rows, reference=model, pretraining_data="random numbers")
    before = float(preference_loss(model, records.batch(slice(None))).mean().detach())
    assert before == pytest.approx(0.6931, abs=1e-4)  # adapters begin at zero
    start = partial(
        dpdist.PrivateTraining,
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2),
        loss=preference_loss,
        privacy=dpdist.Privacy(noise_multiplier=0.1, delta=1e-3, clip_norm=1.0),
        batch_size=16, steps=6,
    )  # fmt: skip
    for loss, data, said in (
        (language_model_loss, records, "must be dpdist.preference_loss for pairs"),
        ("cross-entropy", records, "under a named loss it gets one argument, a dict"),
        ("bce", dpdist.documents([{"text": "abc"}], lm.chat_tokenizer(None), length=8),
         "under a named loss it gets one argument, a dict"),
        (preference_loss, dpdist.documents([{"text": "abc"}], lm.chat_tokenizer(None), length=8),
         r"must have the fields input_ids, labels and reference .*dpdist.preferences\("),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            start(data=data, loss=loss, folder=tmp_path / "refused")
    twice = make([*rows, *rows], reference=model, unit="prompt")
    with pytest.raises(UserError, match=r"privacy\.unit:"):
        start(data=twice, folder=tmp_path / "refused")
    training = start(data=records, folder=tmp_path / "run")
    assert training.recipe.privacy_unit == "one pair of answers, a row of the data"
    training.run_all()
    after = float(preference_loss(model, records.batch(slice(None))).mean().detach())
    assert after < before - 0.01
    written = " ".join((tmp_path / "run" / "recipe.yaml").read_text().split())
    assert "no private pair is among what the reference and the first weights were" in written
    assert "random numbers: declared only" in written
    copied = copy.deepcopy(model).requires_grad_(False)
    del training, start
    for trained in (model, copied, copied.merge_and_unload()):
        with pytest.raises(
            UserError, match=r"reference must be public, got one that .*run trained"
        ):
            make(rows, reference=trained)
    again = partial(
        dpdist.PrivateTraining, model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        loss=preference_loss, batch_size=16, steps=1,
        privacy=dpdist.Privacy(noise_multiplier=1.0, delta=1e-3),
    )  # fmt: skip
    fields = records.batch(slice(None))
    for pairs in (records, [take(fields, n) for n in range(24)]):
        with pytest.raises(UserError, match=r"begin with public weights for pairs, got what .*ru"):
            again(pairs, folder=tmp_path / "second")
    own = lm.with_lora(lm.make("llama", vocab_size=262))
    made = dpdist.PrivateTraining(
        own, torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=0.1),
        [take(fields, n) for n in range(24)], loss=preference_loss, batch_size=16, steps=1,
        privacy=dpdist.Privacy(noise_multiplier=1.0, delta=1e-3), folder=tmp_path / "own",
    )  # fmt: skip
    assert made.recipe.privacy_unit == "one pair of answers, a row of the data"
    assert made._learner.spec.input_shape == (24,)  # of one answer with its prompt
    assert any("by which the user computed" in each for each in made.recipe.by_script.assumed)


@pytest.mark.slow
def test_a_continued_run_marks_its_model_and_goes_on(tmp_path: Path):
    """A process that only restores a checkpoint has weights of private pairs, too."""

    def begun(model: nn.Module, records) -> dpdist.PrivateTraining:
        return dpdist.PrivateTraining(
            model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
            records, loss=preference_loss, batch_size=2, steps=3, folder=tmp_path / "run",
            resources={"checkpoint_seconds": 1e-3},
            privacy=dpdist.Privacy(noise_multiplier=1.0, delta=1e-3),
        )  # fmt: skip

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
    with pytest.raises(UserError, match=r"got one that .*run trained"):
        make(rows_of(), reference=other)
    second.run_all()


FACTORY = """
import peft, transformers


def adapted():
    base = transformers.AutoModelForCausalLM.from_pretrained({base!r})
    return peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules="all-linear"))
"""


@pytest.mark.slow
def test_a_run_is_released_and_is_no_first_model_or_reference(tmp_path, monkeypatch):
    folder = lm.save_model(tmp_path / "base")
    base = partial(lm.transformers().AutoModelForCausalLM.from_pretrained, folder)
    model = lm.with_lora(base())
    training = dpdist.PrivateTraining(
        model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        make(rows_of(), tokenizer=folder, reference=base()), loss=preference_loss,
        batch_size=2, steps=1, folder=tmp_path / "run",
        privacy=dpdist.Privacy(noise_multiplier=1.0, delta=1e-3),
    )  # fmt: skip
    training.run_all()
    (tmp_path / "of_pairs.py").write_text(FACTORY.format(base=str(folder)))
    monkeypatch.syspath_prepend(str(tmp_path))
    write_release(training.run, factory="of_pairs:adapted")
    release = dpdist.load(training.run.release_folder, trusted_factory="of_pairs:adapted")
    assert release.spec.input_shape == (24,)  # of one answer with its prompt
    assert len(release.text_answerer("2").likely) == 5
    for part in (release.model, release.model.network, copy.deepcopy(release.model.network)):
        with pytest.raises(UserError, match=r"reference must be public, got one that .*release"):
            make(rows_of(), tokenizer=folder, reference=part)


@pytest.mark.slow
def test_several_pairs_of_one_prompt_are_a_group(tmp_path: Path):
    model = lm.with_lora(lm.make("llama", vocab_size=262))
    rows = [{**row, "rejected": f"no{n}"} for n in range(2) for row in rows_of()]
    training = dpdist.PrivateTraining(
        model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        make(rows, reference=model, unit="prompt"), loss=LOSS,
        privacy=dpdist.Privacy(
            noise_multiplier=1.0, delta=1e-2, unit="user", max_records_per_user=2
        ),
        batch_size=2, steps=1, folder=tmp_path / "run",
    )  # fmt: skip
    assert len(training.records) == 3
    assert training.recipe.privacy_unit == (
        "a user (all pairs of answers of one value of prompt, of which at most 2 count in a step)"
    )
    training.run_all()
    assert training.remaining_steps == 0
