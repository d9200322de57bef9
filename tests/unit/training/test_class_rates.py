"""Rates by class in recipes, audits and loops of one's own: what is drawn, stated, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import binom
from support.datasets import write_split
from support.own_loops import begin, ended
from support.training import KEY, train

import dpdist
from dpdist import UserError
from dpdist.audits.membership import Membership
from dpdist.audits.trainings import VectorizedTrainings
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.gradients.hooks import OwnLoss, example_losses, weighted_by_class
from dpdist.gradients.sampling import poisson_sample
from dpdist.poisoning.evaluation import Poisoning
from dpdist.privacy.card import card_markdown
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, make_plan, parse_recipe, plan_with_noise
from dpdist.training import records as chosen
from dpdist.training.canaries import build_canaries
from dpdist.training.job import check_trainable
from dpdist.training.model_setup import build_engine, initial_model, model_spec
from dpdist.training.private_step import PrivateStep
from dpdist.tuning.search import check_search
from dpdist.tuning.space import TrialLimit, apply_values

pytestmark = pytest.mark.filterwarnings("ignore:privacy.run_key")

WELL, ILL = 180, 20
COUNTS = {"ill": ILL, "well": WELL}


def write(root: Path, split: str = "train", seed: int = 0) -> None:
    """Write records of two classes of unequal size into root/scans, in mixed order."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.repeat([0, 1], [WELL, ILL]))
    values = (generator.random((len(labels), 3)) + 0.3 * labels[:, None]).astype(np.float32)
    columns = {f"f{k}": values[:, k] for k in range(3)}
    write_split(root / "scans", split, **columns, label=labels)


@pytest.fixture
def root(tmp_path) -> Path:
    write(tmp_path / "data")
    write(tmp_path / "data", "test", 1)
    return tmp_path / "data"


def recipe_of(root: Path, **sections: Any) -> Recipe:
    raw: dict[str, Any] = {
        "name": "x",
        "data": {
            "name": "scans", "root": str(root), "names": ["well", "ill"],
            "columns": {"features": ["f*"]}, "class_sampling": {"ill": 4, "well": 1},
            "class_counts": dict(COUNTS),
        },
        "model": {"name": "linear"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "run_key": KEY},
        "training": {"batch_size": 26, "steps": 6, "learning_rate": 0.5},
        "resources": {"checkpoint_seconds": 1e-6},
    }  # fmt: skip
    for key, value in sections.items():
        section, _, field = key.partition("__")
        raw[section] = raw[section] | {field: value} if field else value
    return parse_recipe(raw, "test")


def test_rates_and_divisor_follow_from_the_public_counts_alone(root):
    recipe = recipe_of(root)
    plan = make_plan(recipe, WELL + ILL, "test")
    step = plan.step(0)
    assert step.rates_by_class == pytest.approx((0.1, 0.4))  # by number: well, ill
    assert step.sample_rate == max(step.rates_by_class) and step.expected_batch == 26
    assert pytest.approx(26) == 0.1 * WELL + 0.4 * ILL
    same = PrivacyPlan.dp_sgd(records=200, batch_size=80, noise_multiplier=1.0, steps=6, delta=1e-3)
    assert plan.guarantee().epsilon == pytest.approx(same.guarantee().epsilon, rel=1e-9)
    # Other private classes, the same plan: nobody counts them.
    labels = pq.read_table(root / "scans" / "train.parquet")
    other = labels.set_column(3, "label", pa.array(np.arange(200) % 2))
    pq.write_table(other, root / "scans" / "train.parquet")
    assert make_plan(recipe, len(check_trainable(recipe, "test")[0]), "test") == plan


def test_counts_that_are_not_those_of_the_records_are_refused(root):
    with pytest.raises(UserError, match="class_counts"):
        check_trainable(recipe_of(root, data__class_counts={"ill": 21, "well": 180}), "test")


def test_other_class_counts_than_those_of_the_run_are_refused(root):
    recipe = recipe_of(root)
    with pytest.raises(UserError, match=r"data\.class_sampling"):
        Poisoning().training_plan(recipe, 200)
    with pytest.raises(UserError, match=r"data\.class_sampling"):
        Membership().plan_shadows(recipe, 200)


def test_records_of_each_class_join_at_their_own_rate(root):
    """Counted over 400 steps of the plan. False failures: 2e-9 for each of two classes."""
    recipe = recipe_of(root, training__steps=400)
    records, plan = check_trainable(recipe, "test")[0], make_plan(recipe, 200, "test")
    key = bytes.fromhex(KEY)
    engine = GradientEngine(torch.nn.Linear(3, 2), cross_entropy, clipping=FlatClipping(1.0))
    step = PrivateStep(engine, records, key)
    counts = np.zeros(2, np.int64)
    for t in range(plan.steps):
        drawn = derive_key(key, "sample", "", t)
        members = step.members(drawn, 0, 200, plan.step(t))
        counts += np.bincount(np.asarray(records.labels)[members], minlength=2)
        halves = [step.members(drawn, *each, plan.step(t)) for each in ((0, 77), (77, 200))]
        assert np.array_equal(np.concatenate(halves), members)  # whichever worker holds them
    for found, size, rate in zip(counts, (WELL, ILL), (0.1, 0.4), strict=True):
        low, high = binom.ppf([1e-9, 1 - 1e-9], size * plan.steps, rate)
        assert low <= found <= high
        wrong = binom.ppf([1e-9, 1 - 1e-9], size * plan.steps, 0.13)
        assert not wrong[0] <= found <= wrong[1]  # the mean rate would be noticed


def test_another_record_s_class_moves_nobody_else():
    labels = np.arange(400) % 2
    other = labels.copy()
    other[7] = 1 - other[7]
    for number in range(50):
        key = derive_key(bytes(32), "t", number)
        one, two = (
            poisson_sample(key, 0, 400, 0.5, class_rates=(0.1, 0.5), classes_of=own.__getitem__)
            for own in (labels, other)
        )
        assert set(one.tolist()) ^ set(two.tolist()) <= {7}
        assert set(one.tolist()) <= set(poisson_sample(key, 0, 400, 0.5).tolist())


def test_weights_stand_before_the_clip_so_that_no_record_adds_more(root):
    recipe = recipe_of(root, data__importance_weights=True, privacy__clip_norm=0.5)
    records = check_trainable(recipe, "test")[0]
    plan = make_plan(recipe, 200, "test")
    model = initial_model(recipe, model_spec(recipe, records))
    engine = build_engine(recipe, model, plan)
    for place in (int(np.argmax(records.labels)), int(np.argmin(records.labels))):
        inputs, target = (records.batch(np.array([place])), records.targets(np.array([place])))
        found = engine.clipped_sum(50 * inputs, target).flat
        assert 0.4 < float(found.norm()) <= 0.5  # whichever weight it has
    # Below the clip the weight is seen: 1.3 for the class of rate 0.1, 0.325 for that of 0.4.
    plain = build_engine(recipe_of(root, privacy__clip_norm=50.0), model, plan)
    weighted = build_engine(
        recipe_of(root, data__importance_weights=True, privacy__clip_norm=50.0), model, plan
    )
    for label, weight in ((0, 1.3), (1, 0.325)):
        place = np.flatnonzero(np.asarray(records.labels) == label)[:1]
        both = [
            engine.clipped_sum(records.batch(place), records.targets(place)).flat
            for engine in (weighted, plain)
        ]
        torch.testing.assert_close(both[0], weight * both[1], rtol=1e-5, atol=1e-7)


def test_a_loss_of_one_s_own_is_weighted_by_the_batch_s_targets():
    labels = torch.tensor([0, 1, 0])
    fields = {"x": torch.ones(3, 1), "label": labels}
    for loss, inputs in (
        (lambda module, batch: module(batch[0])[:, 0], fields["x"]),
        (lambda module, batch: module(batch[1])[:, 0], (torch.zeros(3, 1), fields["x"])),
        (lambda module, batch: module(batch["x"])[:, 0], fields),
    ):
        both = weighted_by_class(OwnLoss(loss), (2.0, 5.0))
        found = example_losses(torch.nn.Identity(), both, {}, inputs, labels)
        assert found.tolist() == [2.0, 5.0, 2.0]


def test_a_run_states_its_rates(root, tmp_path):
    recipe, folder = recipe_of(root), RunFolder(tmp_path / "run")
    train(recipe, folder)
    found, plan = load_results(folder), make_plan(recipe, 200, "test")
    assert found.plan == plan and folder.read_plan() == plan
    ledger = Ledger.read(folder.ledger)
    assert ledger.guarantee(plan).epsilon == plan.guarantee().epsilon
    assert "0: 0.1, 1: 0.4" in card_markdown(found.privacy_card())
    assert found.guarantee.epsilon == plan.guarantee().epsilon


def own_loop(folder: Path, **options: Any) -> dpdist.PrivateTraining:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(200) % 10 // 9  # one in ten
    inputs = torch.randn(200, 3, generator=generator) + labels[:, None]
    given = {
        "data": (inputs, labels), "batch_size": 26, "steps": 4, "class_sampling": {0: 1, 1: 4},
        "class_counts": {0: 180, 1: 20}, **options,
    }  # fmt: skip
    return begin(folder, torch.nn.Linear(3, 2), rate=0.5, **given)


def test_a_loop_of_one_s_own_samples_by_class_and_goes_on(tmp_path):
    first = own_loop(tmp_path / "one")
    assert first.plan.step(0).rates_by_class == pytest.approx((0.1, 0.4))
    first.step()
    first.checkpoint()
    first.close()
    again = ended(own_loop(tmp_path / "one"))
    whole = ended(own_loop(tmp_path / "two"))
    assert torch.equal(again.model.weight, whole.model.weight)
    equal = ended(own_loop(tmp_path / "three", class_sampling=None, class_counts=None))
    assert not torch.equal(equal.model.weight, whole.model.weight)
    weighted = ended(own_loop(tmp_path / "four", importance_weights=True))
    assert not torch.equal(weighted.model.weight, whole.model.weight)
    assert weighted.guarantee.epsilon == whole.guarantee.epsilon > equal.guarantee.epsilon
    with pytest.raises(UserError, match="class_sampling"):
        own_loop(tmp_path / "one", class_sampling={0: 1, 1: 2})


def test_gradient_canaries_join_at_the_largest_rate_and_records_at_their_own(root, tmp_path):
    audit = {"kind": "canaries", "canary": "gradient", "canaries": 20}
    recipe = recipe_of(root, audit=audit, model={"name": "mlp"})
    records = check_trainable(recipe, "test")[0]
    plan = make_plan(recipe, 220, "test")
    train(recipe, RunFolder(tmp_path / "run"))
    canaries = build_canaries(records, bytes(32), plan, 40)
    found = canaries.classes_for(np.array([0, 5, 200, 219]), records, plan.step(0))
    assert found.tolist() == [int(records.labels[0]), int(records.labels[5]), 1, 1]


def test_trainings_of_many_runs_draw_each_class_at_its_rate(root):
    """False failures: 1e-9 at each end for each of three."""
    recipe = recipe_of(root)
    plan, records = make_plan(recipe, 200, "test"), check_trainable(recipe, "test")[0]
    trainings = VectorizedTrainings(recipe, plan, records)
    counts, runs = np.zeros(3, np.int64), 300
    for number in range(runs):
        key = derive_key(bytes(32), "many", number)
        members = trainings._members(key, "a", 0, plan.step(0), 5, 0 if number % 2 else None)
        own = members[members < 200]
        counts[:2] += np.bincount(np.asarray(records.labels)[own], minlength=2)
        counts[2] += (members >= 200).sum() if not number % 2 else 0
    for found, size, rate in zip(
        counts, (180 * runs, 20 * runs, 5 * runs // 2), (0.1, 0.4, 0.4), strict=True
    ):
        low, high = binom.ppf([1e-9, 1 - 1e-9], size, rate)
        assert low <= found <= high


def test_a_search_is_priced_at_the_largest_rate_of_any_trial(root, tmp_path):
    tune = {
        "space": {"training.batch_size": {"choice": [13, 26]}},
        "num_trials": {"name": "fixed", "runs": 3}, "score": {"private_eval_fraction": 0.3,
        "noise": 2.0},
    }  # fmt: skip
    recipe = recipe_of(root, tune=tune)
    cost = check_search(recipe, RunFolder(tmp_path / "x"), "r.yaml").cost
    records = len(chosen.private_records_between(recipe, chosen.data_source(recipe), 0.3, 1.0))
    plans = {}
    for size in (13, 26):
        own = apply_values(recipe, {"training.batch_size": size}, "test")
        plans[size] = plan_with_noise(own, records, 1.0)
        assert cost.trial_limit.allows(plans[size])
    largest = plans[26].step(0).sample_rate
    assert largest == pytest.approx(4 * 26 * 200 / 260 / records)
    # Steps of which every record joins at the mean rate would be too cheap a base.
    cheap = PrivacyPlan.dp_sgd(
        records=records, batch_size=26, noise_multiplier=1.0, steps=6, delta=1e-3
    )
    assert not TrialLimit(cheap).allows(plans[26]) and TrialLimit(plans[26]).allows(cheap)
