"""What copies of a run's folder cost the records: whoever goes on, crashes, or is copied when, no
less is charged than all of them released, and no more than that once all have ended."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from dpdist.privacy import budget as budgets
from dpdist.privacy.budget import (
    BudgetExceeded,
    Charge,
    DataBudget,
    Lineage,
    RenyiFilter,
    charge_id,
    read_budgets,
)
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import (
    GaussianAnswers,
    GaussianReleases,
    GaussianSteps,
    NoisyVotes,
    Phase,
    RepeatAndSelect,
)
from dpdist.privacy.plan import PrivacyPlan

RECORDS = np.random.default_rng(0).random(100)
# Something that is drawn once, then steps with two noises: everything costs another price.
PLAN = PrivacyPlan(
    1000, (GaussianReleases(9.0), GaussianSteps(6, 2.0, 0.1), GaussianSteps(6, 5.0, 0.1)), 1e-4
)
FILTER = RenyiFilter.for_ceiling(30.0, 1e-4, "add-or-remove-one")


@dataclass
class Copy:
    """A folder with a ledger, and the process that goes on in it, if one does."""

    ledger: Path
    process: str | None = None
    plan: PrivacyPlan = PLAN
    worker: str | None = None  # nonce of the process's workers, which have the ledger open

    def open(self, nonce: str | None = None) -> Ledger:
        return Ledger.open(self.ledger, self.plan.fingerprint(), nonce=nonce)

    def charge(self, going_on: str | None = None) -> Charge:
        read, plan = Ledger.read(self.ledger), self.plan
        going_on = going_on or self.process
        lineage = Lineage.from_ledger(
            plan.phases,
            self.ledger,
            read.released_units(plan),
            going_on,
            read.remaining_units(plan),
        )
        return Charge.for_plan(charge_id("key", plan), "toy", plan, (), lineage)

    def begin(self, folder: Path, *, enforce: bool = False) -> None:
        """A process goes on: charged before it releases anything."""
        self.worker = None
        with self.open() as ledger:
            self.process = ledger.announce_process()
        budgets.reserve(folder, RECORDS, self.charge(), FILTER, PLAN.adjacency, enforce=enforce)

    def release(self, steps: int, *, again: bool = False) -> list[tuple[str, int]]:
        """Workers of that process take so many new steps: nonce and step of each."""
        with self.open(self.worker) as ledger:
            ledger.begin_attempt({"workers": "1"})
            if again:
                ledger.new_epoch("drawn again")
            first = max(ledger.release_counts, default=-1) + 1 - 2 * again
            taken = range(max(first, 0), min(max(first, 0) + steps, self.plan.steps))
            for step in taken:
                ledger.record(step, f"{random.getrandbits(256):064x}")
            self.worker = ledger.nonce
            return [(ledger.nonce, step) for step in taken]

    def end(self, folder: Path) -> None:
        """It ends, or a later one finds that it did: what was released is settled."""
        charge = self.charge()
        budgets.settle(folder, charge.run, charge.phases, charge.lineage)
        self.process = None

    def copied(self, ledger: Path) -> Copy:
        shutil.copytree(self.ledger.parent, ledger.parent)
        return Copy(ledger, plan=self.plan)


def only(folder: Path) -> DataBudget:
    (budget,) = read_budgets(folder)
    return budget


def spent(folder: Path) -> float:
    return only(folder).spent


@dataclass
class World:
    """All copies, and what was really released, by whoever did."""

    tmp: Path
    copies: list[Copy] = field(default_factory=list)
    released: set[tuple[str, int]] = field(default_factory=set)
    once: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.copies.append(Copy(self.tmp / "0" / "ledger.jsonl"))

    @property
    def cost(self) -> float:
        """The divergence of every release there was: none is counted by its ledger here."""
        counts = [len(self.once), 0, 0]
        for _, step in self.released:
            counts[1 + PLAN.training_phase_index(step)] += 1
        phases = [
            at
            for phase, n in zip(PLAN.phases, counts, strict=True)
            for at in phase.executed_units(n)
        ]
        return FILTER.cost(phases, PLAN.records)

    def take(self, copy: Copy, steps: int, again: bool = False) -> None:
        fresh = not Ledger.read(copy.ledger).attempts
        taken = copy.release(steps, again=again)
        self.released |= set(taken)
        if fresh:
            self.once.add(Ledger.read(copy.ledger).attempts[0]["nonce"])


@pytest.mark.parametrize("seed", range(4))
def test_whatever_copies_do_is_charged(tmp_path, seed):
    """Random histories: begin, release, release again, crash without a word, be copied at any
    moment, end. Charged is at least what was released at every moment, and exactly that when all
    have ended."""
    random.seed(seed)
    folder, world = tmp_path / "budgets", World(tmp_path)
    world.copies[0].begin(folder)
    for _ in range(30):
        copy = random.choice(world.copies)
        what = random.choice(["begin", "release", "release", "crash", "copy", "end"])
        if what == "begin" and copy.process is None:
            copy.begin(folder)
        elif what == "release" and copy.process is not None:
            world.take(copy, random.randint(1, 3), again=random.random() < 0.3)
        elif what == "crash":
            copy.process = None
        elif what == "copy" and len(world.copies) < 5:
            ledger = tmp_path / str(len(world.copies)) / "ledger.jsonl"
            world.copies.append(copy.copied(ledger))
        elif what == "end" and copy.process is not None:
            copy.end(folder)
        assert spent(folder) >= world.cost * (1 - 1e-12)
    for copy in world.copies:
        copy.begin(folder)
        world.take(copy, PLAN.steps)
        copy.end(folder)
    assert spent(folder) == pytest.approx(world.cost, rel=1e-9)
    before = spent(folder)
    for copy in reversed(world.copies):  # said again, in another order, by the ledgers alone
        copy.end(folder)
    assert spent(folder) == before
    assert [charge.status for charge in only(folder).charges] == ["settled"]


def test_a_ceiling_has_room_for_both_or_refuses_the_second(tmp_path):
    """Before it releases anything; and the first goes on as it may."""
    folder, one = tmp_path / "budgets", Copy(tmp_path / "0" / "ledger.jsonl")
    whole = FILTER.cost(PLAN.phases, PLAN.records)
    share = replace(FILTER, share=1.3 * whole)
    with one.open() as ledger:
        one.process = ledger.announce_process()
    budgets.reserve(folder, RECORDS, one.charge(), share, PLAN.adjacency)
    one.release(3)
    other = one.copied(tmp_path / "1" / "ledger.jsonl")
    with other.open() as ledger:
        other.process = ledger.announce_process()
    before = spent(folder)
    for records in (RECORDS, None):
        with pytest.raises(BudgetExceeded):
            budgets.reserve(folder, records, other.charge(), share, PLAN.adjacency)
    assert spent(folder) == before == pytest.approx(whole)
    with one.open() as ledger:  # a later process of the first: no more is charged
        one.process = ledger.announce_process()
    budgets.reserve(folder, RECORDS, one.charge(), share, PLAN.adjacency)
    assert spent(folder) == pytest.approx(whole)


def test_a_folder_that_was_moved_is_no_copy(tmp_path):
    """A killed process whose folder lies elsewhere now: its room is that of the next one."""
    folder, one = tmp_path / "budgets", Copy(tmp_path / "0" / "ledger.jsonl")
    one.begin(folder)
    one.release(3)
    before = spent(folder)
    shutil.move(tmp_path / "0", tmp_path / "moved")
    moved = Copy(tmp_path / "moved" / "ledger.jsonl")
    moved.begin(folder)
    assert spent(folder) == pytest.approx(before)
    copy = moved.copied(tmp_path / "2" / "ledger.jsonl")  # and this is one
    copy.begin(folder)
    left = (GaussianSteps(3, 2.0, 0.1), GaussianSteps(6, 5.0, 0.1))
    assert spent(folder) == pytest.approx(before + FILTER.cost(left, PLAN.records))


def test_a_copy_that_is_behind_takes_nothing_back(tmp_path):
    """Made between two steps of a process: its ledger has fewer of them than were released."""
    folder, one = tmp_path / "budgets", Copy(tmp_path / "0" / "ledger.jsonl")
    one.begin(folder)
    one.release(3)
    copy = one.copied(tmp_path / "1" / "ledger.jsonl")
    one.release(4)
    one.end(folder)
    before = spent(folder)
    copy.end(folder)
    assert spent(folder) == before


@pytest.mark.parametrize("phase", [GaussianAnswers(9.0, 5), NoisyVotes(9.0, 5, 5, 0.0, 4, 0.5)])
def test_answers_and_votes_are_charged_to_whoever_draws_them(tmp_path, phase: Phase):
    """Two copies that were made before: each draws its own. After the votes: they are common."""
    folder, plan = tmp_path / "budgets", PrivacyPlan(1000, (phase,), 1e-4)
    ask = "ab" * 32

    def twice(home: Path, first: int) -> float:
        one = Copy(home / "0" / "ledger.jsonl", plan=plan)
        one.begin(folder)
        with one.open() as ledger:
            for number in range(first):
                ledger.record_query(f"{number:064x}", plan)
        other = one.copied(home / "1" / "ledger.jsonl")
        for copy in (one, other):
            copy.begin(folder)
            with copy.open() as ledger:
                while ledger.num_queries < plan.num_queries:
                    ledger.record_query(ask, plan)
        for copy in (one, other):
            copy.end(folder)
        (charge,) = only(folder).charges
        shutil.rmtree(folder)
        return FILTER.cost(charge.phases, 1000) / FILTER.cost((phase,), 1000)

    several = phase.num_queries > 1
    assert twice(tmp_path / "before", 0) == pytest.approx(2)
    assert twice(tmp_path / "after", 1) == pytest.approx(9 / 5 if several else 1)


def test_copies_of_a_search_with_a_secret_number_of_trials_do_not_add_up(tmp_path):
    """Both have drawn the same number: what the two cost together is not known, and is not said."""
    folder = tmp_path / "budgets"
    search = RepeatAndSelect((GaussianSteps(5, 3.0, 0.1),), 3, 1.0)
    plan = PrivacyPlan(1000, (search,), 1e-4)

    def lineage(name: str, *processes: str, ended: bool = False) -> Charge:
        place = tmp_path / name
        place.touch()
        made = dict.fromkeys(processes, (0,))
        if ended:
            made[processes[-1]] = (1,)
        going_on = None if ended else processes[-1]
        found = Lineage.from_ledger(plan.phases, place, made, going_on, (1,), forbids_copies=True)
        return Charge.for_plan("search", "toy", plan, (), found)

    def reserve(charge: Charge) -> None:
        budgets.reserve(folder, RECORDS, charge, FILTER, plan.adjacency)

    reserve(lineage("one", "a"))
    once = spent(folder)
    assert once == pytest.approx(FILTER.cost((search,), 1000))
    with pytest.raises(BudgetExceeded):
        reserve(lineage("copy", "a", "b"))
    reserve(lineage("one", "a", "c"))  # the first one, after a crash
    settled = lineage("one", "a", "c", ended=True)
    assert budgets.settle(folder, "search", settled.phases, settled.lineage)
    assert spent(folder) == once
    with pytest.raises(BudgetExceeded):
        reserve(lineage("copy", "a", "b"))
    late = lineage("copy", "a", "b", ended=True)  # whatever came between: it was released
    assert budgets.settle(folder, "search", late.phases, late.lineage)
    assert spent(folder) == float("inf")


def test_a_charge_is_read_back_as_it_was(tmp_path):
    one = Copy(tmp_path / "0" / "ledger.jsonl")
    one.begin(tmp_path / "budgets")
    one.release(4)
    charge = one.charge()
    assert Charge.from_dict(charge.to_dict()) == charge
    plain = Charge.for_plan("x", "toy", PLAN, PLAN.phases)
    assert Charge.from_dict(plain.to_dict()) == plain and "lineage" not in plain.to_dict()
