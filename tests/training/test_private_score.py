"""`PrivateTraining.score`: noisy scores on held-out private records, at a price."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.key_recorder import NOISE, record_keys
from support.training import KEY
from torch import nn
from training.own_loops import PRIVATE, WIDTH, begin, net, rows

import dpdist
from dpdist import PrivateTraining, UserError
from dpdist.core.files import read_json
from dpdist.data.protocol import UserRecords, Users
from dpdist.gradients import noise as gaussian_noise
from dpdist.privacy.card import build_card
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianReleases, GaussianScores, GaussianSteps, ScoredTraining
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key, stream_words
from dpdist.reports.results import _score_rows
from dpdist.runs.folder import RunFolder
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


@pytest.mark.parametrize("value", [None, ruled])
def test_one_record_moves_a_sum_by_one_at_most(tmp_path, value):
    """Exact neighbor replay: each held-out record is taken away, and the sums are compared."""
    model = net()

    def sum_of(private_eval_data: tuple[torch.Tensor, torch.Tensor]) -> float:
        terms = private_score.ScriptScore(
            every=1, noise=1.0, records=len(private_eval_data[0]), value="v"
        )
        score = private_score.PrivateScore(
            dpdist.as_records(private_eval_data), terms, value, torch.device("cpu")
        )
        score._key = bytes(32)
        return score.private_units(model, bytes(32)) / 2**20

    whole = sum_of(SCORED)
    others = [
        sum_of(tuple(torch.cat([part[:i], part[i + 1 :]]) for part in SCORED)) for i in range(40)
    ]
    moved = [whole - other for other in others]
    if value is None:
        right = (model(SCORED[0]).argmax(1) == SCORED[1]).double()
        assert 0 < right.sum() < 40
    else:
        right = RULED[(SCORED[0][:, 0] * 5).long()]
    assert moved == right.tolist() and whole == float(right.sum())
    assert max(moved) == 1.0 and min(moved) == 0.0


@pytest.mark.parametrize("draw", [np.random.random, random.Random(0).random])
def test_a_record_s_draws_do_not_move_another_s(draw):
    """A value that draws once more for one record would give all behind it other numbers."""
    state = np.random.get_state()[1].copy()

    def drawing(module: nn.Module, batch: Any) -> torch.Tensor:
        found = [draw() for _ in range(2 if batch[0].max() > 100 else 1)]
        return batch[0].new_tensor([float((found[-1] < 0.5) == bool(batch[1]))])

    def sum_of(private_eval_data: torch.Tensor, key: int) -> float:
        records = dpdist.as_records((private_eval_data, SCORED[1]))
        values = private_score.RecordValues(records, drawing, torch.device("cpu"))
        return values.private_units(net(), bytes([key]) * 32) / 2**20

    other = SCORED[0].clone()
    other[0] = 1e3
    sums = [(sum_of(SCORED[0], key), sum_of(other, key)) for key in range(16)]
    assert max(abs(whole - moved) for whole, moved in sums) <= 1
    assert len({whole for whole, _ in sums}) > 1
    assert np.array_equal(np.random.get_state()[1], state)


def test_a_record_leaves_nothing_to_the_next_one(tmp_path):
    """A buffer that keeps what it saw would let one record move the values of all after it."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 2)
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if inputs.abs().max() > 100:  # of no invented example
                self.largest.copy_(torch.maximum(self.largest, inputs.max()))
            return self.layer(inputs) + 1e-6 * self.largest

    def seen(module: Any, batch: Any) -> torch.Tensor:
        module(batch[0])
        return module.largest.reshape(1) / 1e6

    model = Keeping()
    t = begin(tmp_path / "own", model)
    private_eval_data = SCORED[0] * 1e5, SCORED[1]
    t.score(private_eval_data, every=1, noise=1.0, value=seen)
    t._begin()
    wanted = torch.floor((private_eval_data[0].amax(1) / 1e6).double() * 2**20).sum() / 2**20
    assert t._scored.private_units(model, bytes(32)) / 2**20 == float(wanted)
    t._scored.records._inputs = private_eval_data[0].flip(0)
    assert (
        t._scored.private_units(model, bytes(32)) / 2**20 == float(wanted)
        and float(model.largest) == 0
    )


@pytest.mark.slow
def test_noise_has_its_scale(tmp_path, monkeypatch):
    """False failure: 1e-6 for each of the two quantiles of chi-square (400 draws)."""
    t = begin(tmp_path / "own", privacy=FRESH, steps=400, batch_size=1)
    t.score(SCORED, every=1, noise=7.0, value=lambda module, batch: torch.ones(1))
    drawn = np.array(list(scores(t, 400))) * 40 - 40
    assert 291 < float(np.sum((drawn / 7.0) ** 2)) < 545
    assert len({*drawn.tolist()}) == 400


def test_scores_have_keys_of_their_own(tmp_path, monkeypatch):
    t = begin(tmp_path / "own")
    t.score(SCORED, every=2, noise=3.0)
    seen = record_keys(monkeypatch)
    scores(t)
    keys = seen.keys_opened_by(NOISE)
    own = [key for key in keys if "asked" not in seen.labels(key) and "score" in seen.labels(key)]
    steps = [key for key in keys if key not in own]
    assert len(own) == 3 and len(steps) == STEPS
    assert all(seen.labels(key) >= {"score", "held out", "noise"} for key in own)
    assert all("score" not in seen.labels(key) for key in steps)
    run_key = t.run.read_run_key()
    assert all(run_key in seen.ancestors(key) for key in keys)


# --- the ledger


def test_a_score_is_on_the_ledger_before_its_noise(tmp_path, monkeypatch):
    t, counts = begin(tmp_path / "own", privacy=FRESH), []
    t.score(SCORED, every=2, noise=3.0)

    def noisy(*given: Any) -> Any:
        counts.append(Ledger.read(t.run.ledger).num_queries)  # from the disk
        return gaussian_noise.add_noise(*given)

    monkeypatch.setattr(private_score, "add_noise", noisy)
    scores(t)
    assert counts == [1, 2, 3]


class Killed(BaseException):
    """As a signal ends a process."""


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [PRIVATE, FRESH])
@pytest.mark.parametrize("lost", [False, True])
def test_a_score_is_taken_again_as_it_was(tmp_path, monkeypatch, privacy, lost):
    """lost: the process ends when the noise of the second one is drawn, and before it is kept."""
    t = begin(tmp_path / "own", privacy=privacy)
    t.score(SCORED, every=2, noise=3.0)
    drawn = []

    def noisy(*given: Any) -> Any:
        drawn.append(float(gaussian_noise.add_noise(*given)[0]) / 40)
        if lost and len(drawn) == 2:
            raise Killed
        return gaussian_noise.add_noise(*given)

    monkeypatch.setattr(private_score, "add_noise", noisy)
    if lost:
        with pytest.raises(Killed):
            scores(t)
    else:
        scores(t, 4)
    monkeypatch.undo()
    t.close()
    assert Ledger.read(t.run.ledger).num_queries == 2
    again = begin(tmp_path / "own", privacy=privacy)  # from the checkpoint before the first step
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


def test_equal_sums_of_other_models_get_other_noise(tmp_path):
    """The same answer again would tell that two sums are equal, which no noise covers."""
    terms = {"every": 1, "noise": 3.0, "value": lambda module, batch: torch.ones(1)}
    t = begin(tmp_path / "own", privacy=FRESH)
    t.score(SCORED, **terms)
    first = scores(t, 3)
    t.close()
    other = {"resources": {"checkpoint_seconds": 1e6, "micro_batch": 3}}
    again = begin(tmp_path / "own", privacy=FRESH, **other)
    again.score(SCORED, **terms)
    second = scores(again, 3)
    assert len({*first, *second}) == 6 and Ledger.read(t.run.ledger).num_queries == 6


def test_another_sum_of_the_same_model_gets_other_noise(tmp_path, monkeypatch):
    """A value that cannot be repeated, in a process that ended before the first one was kept."""
    changing = [0.25]

    def value(module: nn.Module, batch: Any) -> torch.Tensor:
        return torch.tensor(changing)

    drawn = []
    for given in (0.25, 0.75):
        changing[0] = given
        t = begin(tmp_path / "own", privacy=FRESH)
        t.score(SCORED, every=1, noise=3.0, value=value)
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "record_answer", lambda *_: 1 / 0)
            patch.setattr(
                private_score, "add_noise",
                lambda *it: drawn.append(gaussian_noise.add_noise(*it)[0]) or np.array([0.0]),
            )  # fmt: skip
            with pytest.raises(ZeroDivisionError):
                t.step()
        t.close()
    assert Ledger.read(t.run.ledger).num_queries == 1
    assert drawn[1] - drawn[0] != pytest.approx(0.5 * 40, abs=1e-3)


def test_a_ledger_with_more_scores_than_planned_is_refused(tmp_path):
    t = begin(tmp_path / "own", privacy=FRESH)
    t.score(SCORED, every=6, noise=3.0)
    scores(t)
    with Ledger.open(t.run.ledger, t.plan.fingerprint()) as ledger:
        ledger._append({"kind": "asked", "id": "ab" * 32})
    with pytest.raises(UserError, match="more answers than"):
        dpdist.load_results(t.run)


SCRIPT = """
import os, signal, sys, torch, warnings
import dpdist

warnings.simplefilter("ignore")
left = [int(sys.argv[2])]


def value(module, batch):
    if not module.training:
        left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return (module(batch[0]).argmax(1) == batch[1]).double()


torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
inputs = torch.rand(120, 6, generator=generator)
labels = (inputs.sum(1) > 3).long()
model = torch.nn.Linear(6, 2).eval()
training = dpdist.PrivateTraining(
    model, torch.optim.SGD(model.parameters(), lr=0.5), (inputs[:80], labels[:80]),
    loss="cross-entropy", privacy={"noise_multiplier": 1.0, "delta": 1e-3, "run_key": sys.argv[3]},
    batch_size=16, steps=6, folder=sys.argv[1], resources={"checkpoint_seconds": 1e-6},
)
training.score((inputs[80:], labels[80:]), every=2, noise=2.0, value=value)
while training.remaining_steps:
    report = training.step()
    if report.score is not None:
        print(report.step, report.score.hex(), flush=True)
"""


@pytest.mark.e2e
def test_after_a_kill_scores_are_the_same_to_the_bit(tmp_path):
    """The process ends within a score, among its records, twice."""
    (tmp_path / "mine.py").write_text(SCRIPT)

    def run(name: str, kill: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "mine.py", str(tmp_path / name), str(kill), KEY], cwd=tmp_path,
            capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    whole = run("whole", -1)
    assert whole.returncode == 0 and whole.stdout.count("\n") == 3, whole.stderr
    said = ""
    for kill in (20, 60):
        ended = run("own", kill)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        said += ended.stdout
    said += run("own", -1).stdout
    assert dict.fromkeys(said.splitlines()) == dict.fromkeys(whole.stdout.splitlines())
    ledger = Ledger.read(RunFolder(tmp_path / "own").ledger)
    assert ledger.num_queries == 3 and ledger.num_superseded == 0


# --- the price


@pytest.mark.slow
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


def test_too_little_noise_is_refused_with_the_noise_that_fits(tmp_path):
    t = begin(tmp_path / "own", privacy={"epsilon": 3.0, "delta": 1e-3})
    with pytest.raises(UserError, match=r"score\.noise: must be >= ") as error:
        t.score(SCORED, every=2, noise=1.0)
    fitting = float(re.search(r">= ([\d.]+)", str(error.value))[1])
    with pytest.raises(UserError, match=r"score\.noise"):
        t.score(SCORED, every=2, noise=fitting - 2e-3)
    assert not (tmp_path / "own").exists() and t.plan.num_queries == 0
    t.score(SCORED, every=2, noise=fitting)
    scores(t)
    assert t.guarantee.epsilon <= 3.0


# --- what is refused


def once(**terms: Any) -> dict[str, Any]:
    return {"every": 2, "noise": 3.0, **terms}


def spoiling(module: nn.Module, batch: Any) -> torch.Tensor:
    next(module.parameters()).data.add_(1.0)
    return torch.ones(1)


@pytest.mark.parametrize(
    ("private_eval_data", "terms", "options", "key"),
    [
        (TRAINED, once(), {}, "in data, got 80"),
        (tuple(part[79:] for part in TRAINED), once(), {}, "in data, got 1 "),
        (SCORED, once(), {"eval_data": tuple(p[:3] for p in SCORED)}, "in eval_data, got 3"),
        (SCORED, once(every=7), {}, "score: every"),
        (SCORED, once(noise=0.0), {}, "score: noise"),
        (SCORED, {"every": 2}, {"privacy": {"noise_multiplier": 0, "delta": 1e-3}}, "score.noise"),
        (SCORED, once(value=lambda m, b: torch.rand(1)), {}, "random numbers"),
        (SCORED, once(value=spoiling), {}, "score.value"),
        (SCORED, once(), {"privacy": {**FRESH, "adjacency": "replace-one"}}, "replace-one"),
        (SCORED, once(), {"privacy": {**FRESH, "nominal_records": 80}}, "nominal_records"),
        (SCORED, once(), {"data": (TRAINED[0], TRAINED[1].float()), "loss": "mse",
                          "model": nn.Linear(WIDTH, 1)}, "score.value"),
        (SCORED, once(), {"data": by_group(TRAINED, range(7, 87))}, "score: .*unit="),
        (by_group(SCORED, range(86, 126)), once(), {"data": by_group(TRAINED, range(7, 87))},
         "privacy.unit"),
        (SCORED, once(), {"privacy": {**FRESH, "budget": "budget"}}, "privacy.budget"),
    ],
)  # fmt: skip
def test_refusals_leave_nothing(tmp_path, monkeypatch, private_eval_data, terms, options, key):
    monkeypatch.chdir(tmp_path)
    t = begin(tmp_path / "own", **options)
    with pytest.raises(UserError, match=key):
        t.score(private_eval_data, **terms)
    assert not (tmp_path / "own").exists() and t.plan.num_queries == 0


# --- a group as the unit


GROUPED = {**PRIVATE, "unit": "user", "max_records_per_user": 3}
WHOM = [0, 1, 1, 2, 2, 2, 3] + [4] * 9 + [place % 5 + 5 for place in range(40 - 16)]


def grouped_training(folder: Path, **given: Any) -> PrivateTraining:
    own = by_group(TRAINED, [100 + place // 2 for place in range(80)])
    return begin(folder, **{"data": own, "privacy": GROUPED, "batch_size": 8, **given})


def test_a_group_s_score_is_the_mean_of_its_records_worked_out_by_hand(tmp_path):
    """One person counts once, whatever number of records is theirs."""
    t = grouped_training(tmp_path / "own")
    t.score(by_group(SCORED, WHOM), every=3, noise=2.0)
    groups = len(set(WHOM))
    scored = next(phase for phase in t.plan.phases if isinstance(phase, ScoredTraining))
    assert scored.parts[1] == (GaussianScores(2.0, 2, records=groups),)
    assert t.plan.records == 40 and "held-out user adds at most 1" in str(t.plan.assumptions)
    found = [t.step().score for _ in range(3)][-1]
    right = (t.model(SCORED[0]).argmax(1) == SCORED[1]).double().numpy()
    whom = np.array(WHOM)
    total = sum(
        math.floor(float(right[whom == each].mean()) * 2**20 + 1e-6) / 2**20 for each in set(WHOM)
    )
    assert not total.is_integer(), "groups of equal answers would prove little"
    normal = normal_of(t, 2, checkpoint.tensors_digest(t.model.state_dict()), total)
    assert found * groups == pytest.approx(total + 2.0 * normal, abs=1e-5)
    t.run_all()
    facts = dpdist.load_results(t.run)
    assert facts.guarantee == t.guarantee and "a user" in facts.guarantee.relation
    assert f"on {groups} held-out users, noise 2" in str(_score_rows(facts))
    assert f"each of {groups} held-out users" in str(build_card(facts.plan)["mechanism"])


@pytest.mark.parametrize("value", [None, ruled])
def test_a_whole_group_moves_a_sum_by_one_at_most(value):
    """Exact neighbor replay: all records of each group are taken away."""
    model = net()

    def sum_of(kept: list[int]) -> float:
        data = tuple(part[kept] for part in SCORED)
        whom = [WHOM[place] for place in kept]
        records = UserRecords(by_group(data, whom), Users.from_values(whom, 3))
        terms = private_score.ScriptScore(every=1, noise=1.0, records=len(records), value="v")
        score = private_score.PrivateScore(records, terms, value, torch.device("cpu"))
        score._key = bytes(32)
        return score.private_units(model, bytes(32)) / 2**20

    every = list(range(40))
    moved = [
        sum_of(every) - sum_of([place for place in every if WHOM[place] != each])
        for each in range(10)
    ]
    assert all(0 <= each <= 1 for each in moved) and len(set(moved)) > 3
    largest = sum_of(every) - sum_of([place for place in every if place != 8])
    assert abs(largest) <= 1 / 9  # a record of nine


PUBLIC = by_group(rows(20, 5), range(19, -1, -1))


@pytest.mark.parametrize(
    ("private_eval_data", "options", "said"),
    [
        (SCORED, {}, "score: held-out records: .*unit="),
        (by_group(SCORED, [100, *WHOM[1:]]), {}, "unit with data, got 1 "),
        (by_group(SCORED, [f"{each}" for each in WHOM]), {}, "units of the same kind"),
        (by_group(SCORED, [*WHOM[:-1], "a"]), {}, "numbers or texts"),
        (by_group(TRAINED, range(200, 280)), {}, "in data, got 80"),
        (by_group(SCORED, WHOM), {"eval_data": PUBLIC}, "eval_data: .*got 10"),
    ],
)
def test_groups_that_cannot_be_scored_are_refused(tmp_path, private_eval_data, options, said):
    t = grouped_training(tmp_path / "own", **options)
    with pytest.raises(UserError, match=said):
        t.score(private_eval_data, **once())
    assert not (tmp_path / "own").exists() and t.plan.num_queries == 0


class Drawn(torch.utils.data.Dataset):
    """Pictures under a random transform, as torchvision has them."""

    def __init__(self, data: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.data, self.transform = data, lambda picture: picture + torch.rand(WIDTH)

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> Any:
        picture = self.data[0][index]
        return self.transform(picture) if self.transform else picture, int(self.data[1][index])


def test_records_under_random_transforms_are_known_by_what_they_are(tmp_path):
    t = begin(tmp_path / "own", data=Drawn(TRAINED))
    with pytest.raises(UserError, match="in data, got 1 "):
        t.score(Drawn(tuple(part[33:34] for part in TRAINED)), **once())
    t.score(Drawn(SCORED), **once())
    assert scores(t, 2)[1] is not None


def test_scores_are_declared_before_the_run(tmp_path):
    t = begin(tmp_path / "own", privacy=FRESH)
    t.score(SCORED, **once())
    with pytest.raises(UserError, match="score: "):
        t.score(SCORED, **once())
    t.step()
    t.close()
    late = begin(tmp_path / "late", privacy=FRESH)
    late.step()
    with pytest.raises(UserError, match="score: "):
        late.score(SCORED, **once())
    late.close()
    with pytest.raises(UserError, match="score: "):
        begin(tmp_path / "late", privacy=FRESH).score(SCORED, **once())


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
        (SCORED, once(noise=9.0), r"score\.noise"),
        (SCORED, once(noise=None, value=lambda m, b: torch.ones(1)), r"score\.value"),
        (tuple(part[1:] for part in SCORED), {"every": 2}, r"score\.records: must be 40"),
        (rows(40, 9), {"every": 2}, "held-out records must be those"),
    ):
        with pytest.raises(UserError, match=said):
            again.score(records, **given)
    again.score(SCORED, every=2)
    assert scores(again)[1] == first[1]
    with pytest.raises(UserError, match=r"training\.steps"):
        begin(tmp_path / "own", privacy=FRESH, steps=8)


# --- what is printed


def test_a_model_with_dropout_is_scored_without_it():
    records = dpdist.as_records((torch.rand(30, 4), torch.arange(30) % 2))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.9), nn.Linear(8, 2)).train()
    values = private_score.RecordValues(records, None, torch.device("cpu"))
    values.check(model)
    found = values.private_units(model, bytes(32))
    assert found == values.private_units(model, bytes(32)) and model[1].training
    inputs, targets = records.batch(np.arange(30)), records.targets(np.arange(30))
    with torch.no_grad():
        right = int((model.eval()(inputs).argmax(1) == targets).sum())
    assert found == right * private_score.UNITS
