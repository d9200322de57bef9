"""Budgets of records: the filter, whose records they are, and what a crash leaves."""

from __future__ import annotations

import json
import math
import shutil
import stat
from dataclasses import replace

import dp_accounting.rdp as rdp
import numpy as np
import pytest
from scipy.stats import norm
from typer.testing import CliRunner

from dpdist.cli.main import app
from dpdist.core.errors import UserError
from dpdist.privacy import budget as budgets
from dpdist.privacy.budget import (
    BudgetExceeded,
    Charge,
    DataBudget,
    RenyiFilter,
    composed_guarantee,
    read_budgets,
)
from dpdist.privacy.ledger import ChainedJournal, JournalError, anchor_path
from dpdist.privacy.phases import (
    GaussianReleases,
    GaussianSteps,
    NonPrivate,
    ParallelParts,
    RepeatAndSelect,
)
from dpdist.privacy.plan import PrivacyPlan
from dpdist.privacy.pld import UnsupportedMechanismError

PLAN = PrivacyPlan.dp_sgd(records=1000, batch_size=50, noise_multiplier=1.5, steps=40, delta=1e-4)
TWICE = PrivacyPlan(1000, PLAN.phases * 2, 1e-4)
RECORDS = np.random.default_rng(0).random(1000)
OTHERS = np.random.default_rng(1).random(500)
BOTH = "add-or-remove-one"
FOUR = RenyiFilter.for_ceiling(4.0, 1e-4, BOTH)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "budgets"


def reserve(folder, run, *, plan=PLAN, records=RECORDS, terms=FOUR, phases=None, **setting):
    charge = Charge.for_plan(run, f"name of {run}", plan, phases or plan.phases)
    budgets.reserve(folder, records, charge, terms, plan.adjacency, name="toy", **setting)


def only(folder) -> DataBudget:
    (budget,) = read_budgets(folder)
    return budget


def size(folder) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


# --- the relation


@pytest.mark.parametrize("terms", [FOUR, None], ids=["ceiling", "composed"])
def test_one_run_that_was_told_the_number_of_records_makes_it_public(folder, terms):
    nominal = replace(PLAN, nominal=True)
    reserve(folder, "nominal", plan=nominal, terms=terms)
    assert not only(folder).guarantee(1e-4).size_public
    reserve(folder, "told", terms=terms)
    assert only(folder).guarantee(1e-4).size_public


# --- the filter


def test_the_share_is_what_the_ceiling_allows_at_the_order():
    for epsilon, delta in ((0.1, 1e-6), (4.0, 1e-4), (30.0, 1e-5)):
        found = RenyiFilter.for_ceiling(epsilon, delta, BOTH)
        theirs, _ = rdp.compute_epsilon([found.order], [found.share], delta)
        assert theirs == pytest.approx(epsilon)
        assert found.epsilon_for_divergence(found.share) <= epsilon + 1e-9
        gaussian = found.share / found.order  # so many releases fit; no other order has more
        for order in range(2, 65):
            assert rdp.compute_epsilon([order], [order * gaussian], delta)[0] >= epsilon - 1e-9
    for epsilon in (math.inf, 1e-6):
        with pytest.raises(ValueError):
            RenyiFilter.for_ceiling(epsilon, 1e-5, BOTH)


def hockey_gaussian(at, shift):
    """Divergence of N(shift, 1) from N(0, 1) at any real epsilon."""
    return norm.sf(at / shift - shift / 2) - np.exp(at + norm.logsf(at / shift + shift / 2))


def hockey_sampled(at, rate, shift):
    """Divergence of (1 - rate) N(0, 1) + rate N(shift, 1) from N(0, 1) at any real epsilon."""
    inside = 1 + np.expm1(at) / rate
    with np.errstate(divide="ignore", invalid="ignore"):
        edge = np.where(inside > 0, (np.log(inside) + shift**2 / 2) / shift, -np.inf)
    over = (1 - rate) * norm.sf(edge) + rate * norm.sf(edge - shift)
    return over - np.exp(at) * norm.sf(edge)


def adaptive_delta(epsilon, first, gaussian, rate, shift):
    """What one chooser reaches at epsilon: after the first run (one Gaussian release), whichever of
    two runs does more harm at the loss that is left; exact up to the grid. With each alone."""
    loss = np.linspace(first**2 / 2 - 9 * first, first**2 / 2 + 9 * first, 20_001)
    weight = norm.pdf(loss, first**2 / 2, first)
    weight /= weight.sum()
    left = epsilon - loss
    one, two = hockey_gaussian(left, gaussian), hockey_sampled(left, rate, shift)
    return float(weight @ np.maximum(one, two)), float(weight @ one), float(weight @ two)


def test_runs_chosen_by_results_break_a_composed_epsilon_and_not_the_filter(folder):
    """After the first run either of two goes with it within (2, 1e-5); chosen by its result, they
    reach delta 1.9e-5. The filter's ceiling refuses both, and those it admits stay within it."""
    first = (GaussianReleases(1 / 0.4),)
    wide = (GaussianReleases(1 / 0.3025),)  # harms most when the first loss was large
    rare = (GaussianReleases(1 / 8.0, 1, 1.007e-5),)  # a record in 100,000, nearly shown
    broken, with_wide, with_rare = adaptive_delta(2.0, 0.4, 0.3025, 1.007e-5, 8.0)
    assert max(with_wide, with_rare) <= 1e-5 and broken > 1.9e-5
    plan = PrivacyPlan(1000, first, 1e-5)
    for chosen in (wide, rare):
        both = [
            Charge.for_plan(str(i), "", plan, phases) for i, phases in enumerate((first, chosen))
        ]
        composed = composed_guarantee(both, 1e-5)
        assert composed.epsilon <= 2.0  # what was stated, and proved for runs fixed beforehand
        assert "no run was chosen by looking at the results" in composed.assumptions[-1]

    terms = RenyiFilter.for_ceiling(2.0, 1e-5, BOTH)
    reserve(folder, "first", plan=plan, terms=terms)
    for chosen in (wide, rare):
        with pytest.raises(BudgetExceeded):
            reserve(folder, "second", plan=plan, phases=chosen, terms=terms)
    assert len(only(folder).charges) == 1

    # The largest of the same two kinds that still fit.
    share = terms.share - terms.cost(first, 1000)

    def most(kind, low, high):
        for _ in range(60):
            middle = math.sqrt(low * high)
            fits = terms.cost((kind(middle),), 1000) <= share
            low, high = (middle, high) if fits else (low, middle)
        return low

    gaussian = most(lambda shift: GaussianReleases(1 / shift), 1e-3, 1.0)
    rate = most(lambda q: GaussianReleases(1.0, 1, q), 1e-9, 0.5)
    assert 0.1 < gaussian < 0.3025 and rate > 1e-3
    assert 1e-9 < adaptive_delta(2.0, 0.4, gaussian, rate, 1.0)[0] <= 1e-5


def test_the_ceiling_is_stated_and_the_sum_is_kept(folder):
    reserve(folder, "one")
    budget = only(folder)
    stated = budget.guarantee(1e-9, "replace-one")  # the ceiling, whatever is asked
    assert (stated.epsilon, stated.delta, stated.adjacency) == (4.0, 1e-4, BOTH)
    assert stated.kind == "proved" and stated.source.startswith("Renyi filter of order")
    cost = FOUR.cost(PLAN.phases, 1000)
    assert budget.spent == cost > 0
    reserve(folder, "two")
    assert only(folder).spent == pytest.approx(2 * cost)
    assert only(folder).guarantee(1e-4) == stated


def test_a_ceiling_is_fixed_by_the_first_run(folder):
    reserve(folder, "one")
    before = size(folder)
    for terms in (None, RenyiFilter.for_ceiling(5.0, 1e-4, BOTH)):
        with pytest.raises(BudgetExceeded):
            reserve(folder, "two", terms=terms)
    replaced = PrivacyPlan(1000, (GaussianReleases(9.0),), 1e-4, adjacency="replace-one")
    with pytest.raises(BudgetExceeded):
        reserve(folder, "two", plan=replaced)
    assert size(folder) == before


def test_searches_and_parallel_parts_enter_by_their_renyi_curves(folder):
    search = RepeatAndSelect(PLAN.phases, 3, 1.0)
    reserve(folder, "search", phases=(search,))
    searched = only(folder).spent
    assert searched > FOUR.cost(PLAN.phases, 1000)
    parts = ParallelParts(((GaussianReleases(4.0),), (GaussianReleases(20.0),)))
    reserve(folder, "parts", phases=(parts,))
    worst = FOUR.cost((GaussianReleases(4.0),), 1000)  # a record lies in one of them
    assert only(folder).spent == pytest.approx(searched + worst)


def test_what_has_no_renyi_bound_is_refused(folder):
    for phase in (GaussianSteps(10, 1.5, 0.05, batch_cap=60), NonPrivate("statistics")):
        with pytest.raises(BudgetExceeded):
            reserve(folder, "run", phases=(phase,))
    assert read_budgets(folder) == []


# --- composition without a filter


def test_without_a_ceiling_the_composition_is_stated_with_its_assumption(folder):
    reserve(folder, "one", terms=None)
    assert only(folder).guarantee(1e-4).epsilon == PLAN.guarantee().epsilon
    reserve(folder, "two", terms=None)
    total = only(folder).guarantee(1e-4)
    assert total.epsilon == pytest.approx(TWICE.guarantee().epsilon)
    assert "no run was chosen by looking at the results of an earlier one" in total.assumptions
    with pytest.raises(BudgetExceeded):
        reserve(folder, "three", terms=None, limit=(total.epsilon + 0.01, 1e-4))
    assert len(only(folder).charges) == 2


# --- on record


def test_a_continued_run_is_charged_once(folder):
    reserve(folder, "one")
    before = size(folder)
    reserve(folder, "one")
    assert size(folder) == before
    budgets.settle(folder, "one", PLAN.phases)
    settled = size(folder)
    budgets.settle(folder, "one", PLAN.phases)
    reserve(folder, "one")
    assert size(folder) == settled > before


# --- whose records


def test_one_row_more_and_another_order_are_the_same_data(folder):
    reserve(folder, "one")
    spent = only(folder).spent
    rng = np.random.default_rng(2)
    for number, records in enumerate(
        (
            np.append(RECORDS, 0.123),
            rng.permutation(RECORDS),
            RECORDS[::7],
            np.append(OTHERS, 0.123),
        )
    ):
        reserve(folder, f"again {number}", records=records)
        assert only(folder).spent == pytest.approx((number + 2) * spent)
    assert len(only(folder).known) == 1001 + 500  # the last shared one row, and brought its own


def test_records_are_kept_under_a_private_key(folder):
    reserve(folder, "one")
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = folder.with_name("elsewhere")
    reserve(other, "one")
    assert not np.intersect1d(only(folder).known, only(other).known).size
    key = folder / "records.key"
    key.write_bytes(b"g" * 64)
    with pytest.raises(JournalError):
        reserve(folder, "two")
    key.unlink()
    with pytest.raises(JournalError):
        reserve(folder, "two")


@pytest.mark.parametrize("way", ["key", "budget"])
def test_what_comes_from_another_folder_is_noticed(folder, way):
    """Under another key no record would be recognized, and every run would begin anew."""
    other = folder.with_name("elsewhere")
    reserve(folder, "one")
    reserve(other, "one")
    if way == "key":
        (folder / "records.key").write_text((other / "records.key").read_text())
    else:
        for path in only(folder).path, anchor_path(only(folder).path):
            path.unlink()
        for path in only(other).path, anchor_path(only(other).path):
            shutil.copy(path, folder / path.name)
    with pytest.raises(JournalError):
        reserve(folder, "two")


def test_a_budget_that_is_gone_is_missed(folder):
    reserve(folder, "one")
    only(folder).path.unlink()
    with pytest.raises(JournalError):
        reserve(folder, "two")


def test_records_hashed_in_another_way_are_not_taken_for_others(folder):
    """Hashes of any type do, of one type only."""
    reserve(folder, "bytes", records=np.array([b"a" * 16, b"b" * 16]))
    reserve(folder, "again", records=np.array([b"b" * 16, b"c" * 15]))
    assert len(only(folder).known) == 3
    with pytest.raises(BudgetExceeded):
        reserve(folder, "numbers")


def test_a_budget_of_another_format_is_neither_read_nor_added_to(folder):
    path = folder / ("ab" * 16 + ".budget.jsonl")
    ChainedJournal.open(path, "budget", {"format": 9}).close()
    for opened in (lambda: only(folder), lambda: reserve(folder, "new")):
        with pytest.raises(JournalError):
            opened()


# --- the command


def test_the_command(folder):
    reserve(folder, "one")
    reserve(folder, "two")
    arguments = ["budget", "--folder", str(folder), "--delta", "1e-4"]
    shown = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    (entry,) = json.loads(shown.stdout)
    assert (entry["epsilon"], entry["delta"], entry["name"]) == (4.0, 1e-4, "toy")
    assert entry["records"] == 1000
    assert [run["epsilon"] for run in entry["runs"]] == [PLAN.guarantee().epsilon] * 2
    assert 0 < entry["spent"]["of_ceiling"] < 1 and entry["spent"]["guarantee"] is False
    text = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert "epsilon 4 at delta 0.0001" in text
    unsaid = CliRunner().invoke(app, arguments[:3], catch_exceptions=False).stdout
    assert unsaid == text  # beside a ceiling, by default at its own delta
    for wrong in ((str(folder) + "x", "1e-4"), (str(folder), "1")):
        with pytest.raises(UserError):
            asked = ["budget", "--folder", wrong[0], "--delta", wrong[1]]
            CliRunner().invoke(app, asked, catch_exceptions=False)


def test_a_relation_that_a_phase_refuses_is_never_stated(folder):
    """Whoever charged it under which: a replaced record may change parts, and then pays for both.
    By the worse of them alone the sum would be too small."""
    parts = (ParallelParts(((GaussianReleases(4.0),), (GaussianReleases(4.0),))),)
    reserve(folder, "search", phases=parts, terms=None)
    assert only(folder).guarantee(1e-4).epsilon == pytest.approx(
        PrivacyPlan(1000, parts, 1e-4).guarantee().epsilon
    )
    with pytest.raises(UnsupportedMechanismError):
        only(folder).guarantee(1e-4, "replace-one")
    replaced = PrivacyPlan(1000, (GaussianReleases(9.0),), 1e-4, adjacency="replace-one")
    before = size(folder)
    with pytest.raises(UnsupportedMechanismError):
        reserve(folder, "other", plan=replaced, terms=None, limit=(50.0, 1e-4))
    filtered = RenyiFilter.for_ceiling(50.0, 1e-4, "replace-one")
    with pytest.raises(BudgetExceeded):
        reserve(folder.with_name("new"), "one", plan=replaced, phases=parts, terms=filtered)
    assert size(folder) == before
    arguments = ["budget", "--folder", str(folder), "--delta", "1e-4", "--replace-one"]
    with pytest.raises(UserError):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
