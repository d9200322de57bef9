"""`PrivateTraining.score`: noisy scores on held-out private records, at a price."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.own_loops import PRIVATE, WIDTH, begin, net, rows
from torch import nn

import dpdist
from dpdist import PrivateTraining, UserError
from dpdist.core.files import read_json
from dpdist.data.protocol import UserRecords, Users
from dpdist.gradients import noise as gaussian_noise
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianReleases, GaussianScores, GaussianSteps, ScoredTraining
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key, stream_words
from dpdist.training import checkpoint, private_score

FRESH = {"noise_multiplier": 1.0, "delta": 1e-3}


pytestmark = pytest.mark.filterwarnings("ignore:.*run_key")

STEPS = 6
TRAINED, SCORED = rows(), rows(40, 2)


def scores(t: PrivateTraining, steps: int = STEPS) -> list[float | None]:
    found = []
    while t.remaining_steps and len(found) < steps:
        found.append(t.step().score)
    return found


def by_group(data: tuple[torch.Tensor, torch.Tensor], whom: Any) -> dpdist.Records:
    return dpdist.as_records(data, unit=list(whom))


SINGLE = by_group(TRAINED, range(7, 87))
GROUPED = {
    "data": by_group(TRAINED, [100 + place // 2 for place in range(80)]),
    "batch_size": 8,
    "privacy": {**PRIVATE, "unit": "user", "max_records_per_user": 3},
}
WHOM = [0, 1, 1, 2, 2, 2, 3] + [4] * 9 + [place % 5 + 5 for place in range(40 - 16)]

# --- the mechanism


def normal_of(t: PrivateTraining, step: int, model: bytes, total: float) -> float:
    """The standard normal number of a step's score, from the keys of its run."""
    trained = read_json(t.run.data_fingerprint)["train"]
    key = derive_key(t.run.read_run_key(), "score", t.plan.fingerprint(), trained)
    key = derive_key(key, "held out", read_json(t.run.score_fingerprint)["held out"])
    query = derive_key(key, "asked", step, model).hex()
    uniform, turn = stream_words(derive_key(key, "noise", query, total.hex()), 0, 2).tolist()
    length = math.sqrt(-2 * math.log(2.0**-64 + uniform * 2.0**-64))
    return length * math.cos(2 * math.pi * (turn >> 11) * 2.0**-53)


def test_a_score_is_the_noisy_sum_worked_out_by_hand(tmp_path):
    """In float64, one record at a time, with the keys of this run: nothing of the code is used."""
    t, sums, models = begin(tmp_path / "own"), [], []
    t.score(SCORED, every=2, noise=3.0)
    found = []
    while t.remaining_steps:
        found.append(t.step().score)
        weights = {name: w.double().numpy() for name, w in t.model.state_dict().items()}
        total = 0
        for x, y in zip(*SCORED, strict=True):
            hidden = np.tanh(weights["0.weight"] @ x.double().numpy() + weights["0.bias"])
            logits = weights["2.weight"] @ hidden + weights["2.bias"]
            total += int(int(logits.argmax()) == int(y))
        sums.append(float(total))
        models.append(checkpoint.tensors_digest(t.model.state_dict()))
    assert [score is not None for score in found] == [False, True] * 3
    for step in (1, 3, 5):
        noisy = sums[step] + 3.0 * normal_of(t, step, models[step], sums[step])
        assert found[step] * 40 == pytest.approx(noisy, abs=1e-5)
    assert len(set(sums)) > 1, "a model that never changes would prove little"


def ruled(module: nn.Module, batch: Any) -> torch.Tensor:
    """A value that is out of range, no number, or fails, by the record."""
    inputs, _ = batch
    assert len(inputs) == 1, "records are executed one at a time"
    kind = int(inputs[0, 0] * 5)
    if kind == 4:
        raise RuntimeError("of this record")
    return inputs.new_tensor([[5.0, -3.0, math.nan, 0.625][kind]])


RULED = torch.tensor([1.0, 0.0, 0.0, 0.625, 0.0]).double()


def sum_of(records: Any, value: Any, model: nn.Module, key: bytes = bytes(32)) -> float:
    """Return the sum that a score of these records adds noise to."""
    terms = private_score.ScriptScore(every=1, noise=1.0, records=len(records), value="v")
    score = private_score.PrivateScore(records, terms, value, torch.device("cpu"), {})
    score._key = key
    return score.private_units(model, key) / 2**20


@pytest.mark.parametrize("value", [None, ruled])
def test_one_record_moves_a_sum_by_one_at_most(value):
    """Exact neighbor replay: each held-out record is taken away, and the sums are compared."""
    model = net()
    whole = sum_of(dpdist.as_records(SCORED), value, model)
    neighbors = [tuple(torch.cat([part[:i], part[i + 1 :]]) for part in SCORED) for i in range(40)]
    moved = [whole - sum_of(dpdist.as_records(other), value, model) for other in neighbors]
    if value is None:
        right = (model(SCORED[0]).argmax(1) == SCORED[1]).double()
        assert 0 < right.sum() < 40
    else:
        right = RULED[(SCORED[0][:, 0] * 5).long()]
    assert moved == right.tolist() and whole == float(right.sum())
    assert max(moved) == 1.0 and min(moved) == 0.0


def test_a_record_s_draws_do_not_move_another_s():
    """A value that draws once more for one record would give all behind it other numbers."""

    def drawing(module: nn.Module, batch: Any) -> torch.Tensor:
        found = [np.random.random() for _ in range(2 if batch[0].max() > 100 else 1)]
        return batch[0].new_tensor([float((found[-1] < 0.5) == bool(batch[1]))])

    def of(inputs: torch.Tensor, key: int) -> float:
        return sum_of(dpdist.as_records((inputs, SCORED[1])), drawing, net(), bytes([key]) * 32)

    other = SCORED[0].clone()
    other[0] = 1e3
    sums = [(of(SCORED[0], key), of(other, key)) for key in range(16)]
    assert max(abs(whole - moved) for whole, moved in sums) <= 1
    assert len({whole for whole, _ in sums}) > 1


def test_a_record_leaves_nothing_to_the_next_one():
    """A buffer that keeps what it saw would let one record move the values of all after it."""

    class Keeping(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, 2)
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.largest.copy_(torch.maximum(self.largest, inputs.max()))
            return super().forward(inputs)

    def seen(module: Any, batch: Any) -> torch.Tensor:
        module(batch[0])
        return module.largest.reshape(1)

    model, (inputs, labels) = Keeping(), SCORED
    wanted = float(torch.floor(inputs.amax(1).double() * 2**20).sum()) / 2**20
    for data in ((inputs, labels), (inputs.flip(0), labels)):
        assert sum_of(dpdist.as_records(data), seen, model) == wanted
    assert float(model.largest) == 0


# --- the ledger


def test_a_score_is_taken_again_as_it_was(tmp_path, monkeypatch):
    """Where the process ends when the noise of the second one is drawn, and before it is kept."""
    t = begin(tmp_path / "own", privacy=FRESH)
    t.score(SCORED, every=2, noise=3.0)
    drawn = []

    def noisy(*given: Any) -> Any:
        drawn.append(float(gaussian_noise.add_noise(*given)[0]) / 40)
        assert Ledger.read(t.run.ledger).num_queries == len(drawn)  # before its noise, on the disk
        if len(drawn) == 2:
            raise KeyboardInterrupt
        return gaussian_noise.add_noise(*given)

    monkeypatch.setattr(private_score, "add_noise", noisy)
    with pytest.raises(KeyboardInterrupt):
        scores(t)
    monkeypatch.undo()
    t.close()
    assert Ledger.read(t.run.ledger).num_queries == 2
    again = begin(tmp_path / "own", privacy=FRESH)  # from the checkpoint before the first step
    again.score(SCORED, every=2, noise=3.0)
    found = scores(again)
    assert [found[1], found[3]] == drawn and found[5] not in drawn
    ledger = Ledger.read(t.run.ledger)
    assert ledger.num_queries == 3 and ledger.release_counts == dict.fromkeys(range(STEPS), 1)


def test_other_sums_never_get_the_same_noise_and_are_charged(tmp_path):
    """Another attempt has other models: its scores count, and no more than planned are given."""
    t = begin(tmp_path / "own", privacy=FRESH)
    t.score(SCORED, every=2, noise=3.0)
    first = scores(t, 4)
    t.close()
    other = {"resources": {"checkpoint_seconds": 1e6, "micro_batch": 3}}
    again = begin(tmp_path / "own", privacy=FRESH, **other)
    again.score(SCORED, every=2, noise=3.0)
    second = scores(again)
    ledger = Ledger.read(t.run.ledger)
    assert ledger.num_superseded == 4 and ledger.num_queries == 3 == t.plan.num_queries
    assert [second[3], second[5]] == [None, None] and second[1] not in first
    assert len(ledger.recorded_answers) == 3
    assert dpdist.load_results(t.run).guarantee == ledger.guarantee(t.plan)


def test_a_ledger_with_more_scores_than_planned_is_refused(tmp_path):
    t = begin(tmp_path / "own", privacy=FRESH)
    t.score(SCORED, every=6, noise=3.0)
    scores(t)
    with Ledger.open(t.run.ledger, t.plan.fingerprint()) as ledger:
        ledger._append({"kind": "asked", "id": "ab" * 32})
    with pytest.raises(UserError):
        dpdist.load_results(t.run)


def test_other_records_are_not_scored_where_the_fingerprint_is_lost(tmp_path):
    """The plan counts each side for its own records."""
    t = begin(tmp_path / "own", privacy=FRESH)
    t.score(SCORED, every=2, noise=3.0)
    scores(t, 2)
    t.close()
    t.run.score_fingerprint.unlink()
    again = begin(tmp_path / "own", privacy=FRESH)
    with pytest.raises(UserError):
        again.score(rows(40, 9), every=2, noise=3.0)
    assert not t.run.score_fingerprint.exists()


# --- the price


@pytest.mark.parametrize("noise", [0.8, 40.0])
def test_the_guarantee_is_the_worse_of_both_sides(tmp_path, noise):
    t = begin(tmp_path / "own", privacy=FRESH)
    t.score(SCORED, every=2, noise=noise)
    steps = GaussianSteps(STEPS, 1.0, 16 / 80)
    alone = PrivacyPlan(80, (steps,), 1e-3).guarantee().epsilon
    looked = PrivacyPlan(40, (GaussianReleases(noise, 3),), 1e-3).guarantee().epsilon
    assert t.guarantee.epsilon == looked  # from the beginning, when nothing is released
    reports = []
    while t.remaining_steps:
        reports.append(t.step())
    assert t.guarantee.epsilon == reports[-1].epsilon == max(alone, looked)
    facts = dpdist.load_results(t.run)
    assert facts.guarantee.epsilon == max(alone, looked) and facts.guarantee.kind == "proved"
    assert PrivacyPlan.from_dict(read_json(t.run.plan)) == t.plan
    assert reports[0].epsilon == max(looked, PrivacyPlan(80, (steps,), 1e-3).guarantee(1).epsilon)


def test_the_steps_get_the_noise_that_they_get_without_scores(tmp_path):
    private = {"epsilon": 3.0, "delta": 1e-3}
    without = begin(tmp_path / "without", privacy=private)
    t = begin(tmp_path / "own", privacy=private)
    t.score(SCORED, every=1)
    assert t.plan.step(0) == without.plan.step(0)
    (phase,) = t.plan.phases
    assert isinstance(phase, ScoredTraining) and isinstance(phase.parts[1][0], GaussianScores)
    scores(t)
    assert 2.99 < t.guarantee.epsilon <= 3.0
    noise = phase.parts[1][0].noise_multiplier
    other = PrivacyPlan(40, (GaussianReleases(0.99 * noise, STEPS),), 1e-3)
    assert other.guarantee().epsilon > 3.0, "it is the least noise"


# --- what is refused


def once(**terms: Any) -> dict[str, Any]:
    return {"every": 2, "noise": 3.0, **terms}


def spoiling(module: nn.Module, batch: Any) -> torch.Tensor:
    next(module.parameters()).data.add_(1.0)
    return torch.ones(1)


@pytest.mark.parametrize(
    ("private_eval_data", "terms", "options", "key"),
    [
        (tuple(part[79:] for part in TRAINED), once(), {}, "in data, got 1 "),
        (SCORED, once(), {"eval_data": tuple(p[:3] for p in SCORED)}, "in eval_data, got 3"),
        (SCORED, once(noise=0.0), {}, "score: noise"),
        (SCORED[0], once(), {}, "score.value"),  # without classes
        (SCORED, once(value=lambda m, b: torch.rand(1)), {}, "random numbers"),
        (SCORED, once(value=spoiling), {}, "score.value"),
        (SCORED, once(), {"privacy": {**FRESH, "adjacency": "replace-one"}}, "replace-one"),
        (SCORED, once(), {"privacy": {**FRESH, "nominal_records": 80}}, "nominal_records"),
        (SCORED, once(), {"privacy": {**FRESH, "budget": "budget"}}, "privacy.budget"),
        (SCORED, once(noise=1.0), {"privacy": {"epsilon": 3.0, "delta": 1e-3}}, "score.noise"),
        (by_group(SCORED, range(86, 126)), once(), {"data": SINGLE}, "privacy.unit"),
        (SCORED, once(), GROUPED, "unit="),
        (by_group(SCORED, [100, *WHOM[1:]]), once(), GROUPED, "unit with data, got 1 "),
        (by_group(SCORED, map(str, WHOM)), once(), GROUPED, "units of the same kind"),
    ],
)
def test_refusals_leave_nothing(tmp_path, monkeypatch, private_eval_data, terms, options, key):
    monkeypatch.chdir(tmp_path)
    t = begin(tmp_path / "own", **options)
    with pytest.raises(UserError, match=key):
        t.score(private_eval_data, **terms)
    assert not (tmp_path / "own").exists() and t.plan.num_queries == 0


# --- a group as the unit


def test_a_group_s_score_is_the_mean_of_its_records_worked_out_by_hand(tmp_path):
    """One person counts once, whatever number of records is theirs."""
    t = begin(tmp_path / "own", **GROUPED)
    t.score(by_group(SCORED, WHOM), every=3, noise=2.0)
    groups = len(set(WHOM))
    scored = next(phase for phase in t.plan.phases if isinstance(phase, ScoredTraining))
    assert scored.parts[1] == (GaussianScores(2.0, 2, records=groups),)
    assert t.plan.records == 40
    found = [t.step().score for _ in range(3)][-1]
    right = (t.model(SCORED[0]).argmax(1) == SCORED[1]).double().numpy()
    whom = np.array(WHOM)
    total = sum(
        math.floor(float(right[whom == each].mean()) * 2**20 + 1e-6) / 2**20 for each in set(WHOM)
    )
    assert not total.is_integer(), "groups of equal answers would prove little"
    normal = normal_of(t, 2, checkpoint.tensors_digest(t.model.state_dict()), total)
    assert found * groups == pytest.approx(total + 2.0 * normal, abs=1e-5)


@pytest.mark.parametrize("value", [None, ruled])
def test_a_whole_group_moves_a_sum_by_one_at_most(value):
    """Exact neighbor replay: all records of each group are taken away."""
    model = net()

    def of(kept: list[int]) -> float:
        whom = [WHOM[place] for place in kept]
        data = by_group(tuple(part[kept] for part in SCORED), whom)
        return sum_of(UserRecords(data, Users.from_values(whom, 3)), value, model)

    every = list(range(40))
    moved = [
        of(every) - of([place for place in every if WHOM[place] != each]) for each in range(10)
    ]
    assert all(0 <= each <= 1 for each in moved) and len(set(moved)) > 3
    largest = of(every) - of([place for place in every if place != 8])
    assert abs(largest) <= 1 / 9  # a record of nine


def test_scores_are_declared_before_the_run(tmp_path):
    late = begin(tmp_path / "late", privacy=FRESH)
    late.step()
    with pytest.raises(UserError, match="score: "):
        late.score(SCORED, **once())


def test_a_run_goes_on_with_the_scores_it_was_begun_with(tmp_path):
    t = begin(tmp_path / "own", privacy=FRESH)
    t.score(SCORED, every=2)
    first = scores(t, 2)
    t.close()
    again = begin(tmp_path / "own", privacy=FRESH)
    assert again.plan == t.plan
    with pytest.raises(UserError, match="score"):
        again.step()
    for records, given, said in (
        (SCORED, once(every=3, noise=None), r"score\.every: must be 2"),
        (SCORED, once(noise=None, value=lambda m, b: torch.ones(1)), r"score\.value"),
        (rows(40, 9), {"every": 2}, "held-out records"),
    ):
        with pytest.raises(UserError, match=said):
            again.score(records, **given)
    again.score(SCORED, every=2)
    assert scores(again)[1] == first[1]
