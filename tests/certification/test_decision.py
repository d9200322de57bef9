"""`dpdist certify --decide`: errors by exact recursion, and whole decisions with a known truth."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy import stats

from dpdist import models
from dpdist.base.errors import UserError
from dpdist.bulk import job as bulk_job
from dpdist.certification.catalogue import settings_of
from dpdist.certification.cohen import Cohen
from dpdist.certification.decided import KEY, TABLE, Decided, caps, read_decision, replayed
from dpdist.certification.deciding import Deciding
from dpdist.certification.decision import Decision
from dpdist.certification.noises import Gaussian
from dpdist.certification.set_level import (
    FAILS,
    OPEN,
    PASSES,
    Judge,
    LabelTest,
    log_evidence,
    side,
)

# ---- the order: without replacement


def crossing(inputs: int, truly: int, most: int, limit: float) -> float:
    """Exact probability that the evidence against `most` is ever above the limit, if `truly` of
    the inputs are shown: by recursion over the order."""
    alive, crossed = {0: 1.0}, 0.0
    for seen in range(1, inputs + 1):
        after: dict[int, float] = {}
        for shown, chance in alive.items():
            more = (truly - shown) / (inputs - seen + 1)
            for now, share in ((shown + 1, more), (shown, 1 - more)):
                if share <= 0:
                    continue
                if log_evidence(inputs, most, seen, now) >= limit:
                    crossed += chance * share
                else:
                    after[now] = after.get(now, 0.0) + chance * share
        alive = after
    return crossed


def test_the_order_fools_no_more_often_than_allowed() -> None:
    for level in (0.05, 0.3):
        found = [crossing(24, truly, 18, -math.log(level)) for truly in (6, 15, 17, 18)]
        assert found == sorted(found) and level / 5 < found[-1] <= level
    assert crossing(24, 19, 18, -math.log(0.05)) == pytest.approx(
        1.0
    )  # when all are seen it is certain


def test_evidence_is_the_likelihood_ratio() -> None:
    def chance(there: int, seen: int, shown: int) -> float:
        return stats.hypergeom.pmf(shown, 20, there, seen)

    for seen, shown in itertools.product(range(21), range(13)):
        null = chance(12, seen, shown)
        if shown > seen or null == 0:
            continue
        others = np.mean([chance(there, seen, shown) for there in range(13, 21)])
        expected = math.log(others / null) if others else -math.inf
        assert log_evidence(20, 12, seen, shown) == pytest.approx(expected, abs=1e-9)
    assert log_evidence(20, 12, 15, 13) == math.inf and log_evidence(20, 12, 15, 2) == -math.inf


# ---- the inputs


def test_an_inputs_test_errs_no_more_often_than_allowed() -> None:
    """Exact, by recursion over the counts at looks of 50 draws, at the boundary itself."""
    for what, radius in itertools.product((PASSES, FAILS), (0.0, 0.25)):
        test = LabelTest(Gaussian(0.25), radius, {s: side(300, 270, 0.05) for s in (PASSES, FAILS)})
        p = float(stats.norm.cdf(radius / 0.25))
        alive, low, ever = np.ones(1), 0, 0.0
        for draws in range(50, 1501, 50):
            alive = np.convolve(alive, stats.binom.pmf(np.arange(51), 50, p))
            shown = np.array([test.outcome(low + k, draws) == what for k in range(len(alive))])
            ever += float(alive[shown].sum())
            alive[shown] = 0
        each = side(300, 270, 0.05).each
        assert each / 20 < ever <= each


def test_more_false_outcomes_than_allowed_for_are_unlikely() -> None:
    for inputs, truly in ((40, 30), (360, 323), (360, 36), (10_000, 8_999), (5, 0), (360, 359)):
        for error in (0.05, 0.001):
            found = side(inputs, truly, error)
            assert 0 < found.each <= 0.02
            others = inputs - truly
            assert stats.binom.sf(found.most - truly, others, found.each) <= 0.2 * error


def test_an_answer_needs_its_share() -> None:
    judge = Judge(360, Fraction("0.9"), 0.05)
    for _ in range(200):
        judge.first(PASSES)
        if judge.answer != OPEN:
            break
    assert judge.answer == PASSES and judge.seen < 100
    for share, outcomes, answer in (
        ("0.9", [PASSES] * 250 + [FAILS] * 110, FAILS),
        ("0.5", [PASSES] * 250 + [FAILS] * 110, PASSES),
        ("0.9", [PASSES] * 324 + [OPEN] * 36, OPEN),  # no room for one that is false
        ("0.9", [PASSES] * 300 + [OPEN] * 60, OPEN),
    ):
        judge = Judge(360, Fraction(share), 0.05)
        for outcome in np.random.default_rng(0).permutation(outcomes):
            judge.first(int(outcome))
        assert judge.answer == answer, share
    more = judge.sides[PASSES].most - 300
    for _ in range(more):
        assert judge.answer == OPEN
        judge.later(PASSES)
    assert judge.answer == OPEN  # as many as a set that lacks its share could show
    judge.later(PASSES)
    assert judge.answer == PASSES


@pytest.mark.slow
def test_whole_decisions_are_wrong_no_more_often_than_allowed() -> None:
    """A set one input short, whose others err as often as they may: 80 orders at error 0.2. More
    than 30 wrong answers have probability 1e-4."""
    rng, wrong = np.random.default_rng(4), 0
    for _ in range(80):
        judge = Judge(40, Fraction("0.8"), 0.2)
        shown = np.concatenate([np.ones(31), rng.random(9) < judge.sides[PASSES].each])
        for outcome in rng.permutation(shown):
            judge.first(PASSES if outcome else OPEN)
        wrong += judge.answer == PASSES
    assert 0 < wrong <= 30


# ---- whole decisions


class Line:
    """Inputs on a line, and a model that says class 1 above a half: probabilities are known."""

    classes, fingerprint, name = 2, "line", "line/test"

    def __init__(self, places: Any) -> None:
        self.labels = np.ones(len(places), dtype=np.int64)
        self._inputs = torch.tensor(places, dtype=torch.float32).reshape(-1, 1, 1, 1)

    def batch(self, indices: Any) -> torch.Tensor:
        return self._inputs[indices]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half")
    spec = models.ModelSpec("linear", (1, 1, 1), 2)
    model = models.build(spec)
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[0.0], [1.0]]))
        model[1].bias.copy_(torch.tensor([0.0, -0.5]))
    models.save(model, spec, folder)
    return folder


def asked(text: str = "accuracy>=0.8@0.25", **more: Any) -> Decision:
    section = {"sigma": 0.25, "n": 3200, "seed": "7", "form": "eager", **more}
    return Decision.asked(text, settings_of(section))


def decide(settings: Decision, half: Path, data: Line, output: Path, **more: Any) -> Any:
    bulk_job.run(Deciding(settings, half, data, None), output, **more)
    return read_decision(output / TABLE)


# 85 of 100 pass at 0.25 (they need a place above 0.75); of 60, none is near.
EASY = [1.2] * 85 + [0.6] * 15


def test_the_answer_is_right_and_cheap(here: None, half: Path, tmp_path: Path) -> None:
    more = {"n": 12_800}
    yes = decide(asked("accuracy>=0.7@0.25", **more), half, Line(EASY), tmp_path / "yes")
    no = decide(asked("accuracy>=0.95@0.25", **more), half, Line(EASY), tmp_path / "no")
    assert (yes.answer, no.answer) == (PASSES, FAILS)
    assert yes.seen < 70 and no.seen < 90 and yes.draws < 10_000
    assert yes.line[0] == "of all 100 inputs chosen, accuracy >= 0.7 at L2 0.25"
    assert yes.line[1].startswith("yes (probability 95 %; ") and "at least 70 %" in yes.stated
    assert no.line[1].startswith("no (") and "fewer than 95 %" in no.stated
    # An input that every draw gives the other class counts against the label.
    wrong = decide(asked(**more), half, Line([1.2] * 60 + [-0.2] * 40), tmp_path / "wrong")
    assert wrong.answer == FAILS
    # Where inputs lie on the boundary itself nothing can be said of them, whatever the draws.
    unclear = decide(asked(), half, Line([1.2] * 70 + [0.75] * 30), tmp_path / "open", actors=2)
    assert unclear.answer == OPEN and unclear.seen == 100 and "undecided" in unclear.line[1]
    rows = pa.parquet.read_table(tmp_path / "open" / TABLE).to_pylist()
    assert {row["draws"] for row in rows if row["outcome"] == OPEN} == {3200}
    assert [row["place"] for row in rows] == list(range(100))
    assert [row["index"] for row in rows] != sorted(row["index"] for row in rows)


def test_later_rounds_go_on_where_the_first_left_inputs_open(
    here: None, half: Path, tmp_path: Path
) -> None:
    # 30 of 100 pass, but need more draws than a first round gives: phi(1.25) = .894 against .841.
    data = Line([1.2] * 60 + [0.8125] * 30 + [0.2] * 10)
    found = decide(asked("accuracy>=0.8@0.25"), half, data, tmp_path / "x")
    assert found.answer == PASSES and found.seen == 100
    rows = pa.parquet.read_table(tmp_path / "x" / TABLE).to_pylist()
    drawn = np.array([row["draws"] for row in rows if 60 <= row["index"] < 90])
    assert (drawn > 100).sum() > 15 and (drawn == 100).any()  # and the answer came before the last


def test_the_table_is_the_same_on_any_workers_and_after_an_interruption(
    here: None, half: Path, tmp_path: Path
) -> None:
    data, settings = Line([1.2] * 60 + [0.8125] * 30 + [0.2] * 10), asked()
    decide(settings, half, data, tmp_path / "1", actors=1)
    whole = (tmp_path / "1" / TABLE).read_bytes()
    decide(settings, half, data, tmp_path / "5", actors=5)
    decide(settings, half, data, tmp_path / "0", here=True)
    assert (tmp_path / "5" / TABLE).read_bytes() == whole == (tmp_path / "0" / TABLE).read_bytes()
    journal = tmp_path / "1" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    # Interrupted, with some answers missing in the middle: they came late.
    journal.write_text("".join(lines[:9] + lines[14:40]))
    (tmp_path / "1" / TABLE).unlink()
    decide(settings, half, data, tmp_path / "1", actors=3)
    assert (tmp_path / "1" / TABLE).read_bytes() == whole
    with pytest.raises(UserError, match=r"share was '0\.8', now '0\.9'"):
        decide(asked("accuracy>=0.9@0.25"), half, data, tmp_path / "1")
    other = decide(replace(settings, certificate=settings.certificate.fresh("8")), half, data,
                   tmp_path / "other")  # fmt: skip
    assert other.answer == PASSES
    order = [pa.parquet.read_table(tmp_path / name / TABLE)["index"].to_pylist()
             for name in ("1", "other")]  # fmt: skip
    assert order[0] != order[1]


def test_another_question_is_asked_of_other_noise(half: Path) -> None:
    """By the same seed too: what one answer showed may have suggested it."""
    texts = ("accuracy>=0.8@0.25", "accuracy>=0.7@0.25", "accuracy>=0.8@0.2")
    questions = [*map(asked, texts), asked(n=6400), asked(start=1), replace(asked(), error=0.01)]
    keys = [
        {Deciding(each, half, Line(EASY), None)._assignment.source.key(9, stage, 0)
         for stage in ("estimate", "order")}
        for each in (*questions, asked())
    ]  # fmt: skip
    assert len(set.union(*keys)) == 2 * len(questions) and keys[0] == keys[-1]


def test_no_more_is_printed_than_was_decided() -> None:
    found = Decided(
        Path(), "", "0.9999999", 0.3333333, "l2", 1e-7, PASSES, 10**8, 10**8, 10**8, 0, 10**9
    )
    assert found.line[0].endswith("accuracy >= 0.9999999 at L2 0.3333333")
    assert "probability 99.99999 %" in found.line[1] and "least 99.99999 %" in found.stated


def test_a_changed_table_is_refused(here: None, half: Path, tmp_path: Path) -> None:
    decide(asked(), half, Line(EASY), tmp_path)
    table = pa.parquet.read_table(tmp_path / TABLE)
    rows = table.to_pylist()
    failed = next(i for i, row in enumerate(rows) if row["outcome"] == FAILS)
    for change in ({"outcome": PASSES}, {"place": 99}, {"index": rows[failed - 1]["index"]}):
        damaged = [row | (change if i == failed else {}) for i, row in enumerate(rows)]
        pa.parquet.write_table(pa.Table.from_pylist(damaged, schema=table.schema), tmp_path / TABLE)
        with pytest.raises(UserError, match="damaged"):
            read_decision(tmp_path / TABLE)
    about = json.loads(table.schema.metadata[KEY])
    assert about["settings"]["share"] == "0.8" and about["inputs"] == 100


def test_rounds_are_replayed_as_they_were() -> None:
    rounds = caps(1000, 30)
    assert rounds == (60, 270, 1000) and caps(20, 20) == (20,)
    rows = [{"draws": 30, "outcome": PASSES}, {"draws": 270, "outcome": FAILS},
            {"draws": 1000, "outcome": OPEN}]  # fmt: skip
    assert list(replayed(rows, rounds)) == [
        (True, PASSES), (True, OPEN), (True, OPEN), (False, FAILS), (False, OPEN), (False, OPEN)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "section", "complaint"),
    [
        ("accuracy>=1.5@0.25", {}, "give accuracy>=SHARE@RADIUS"),
        ("accuracy>=0@0.25", {}, "share above 0"),
        ("robust>=0.5@0.25", {}, "give accuracy"),
        ("accuracy>=0.5@9", {}, "out of reach"),
        ("accuracy>=0.5@0.1", {"sigma": None}, "give --sigma"),
        ("accuracy>=0.5@0.1", {"noise_bank": True}, "no noise bank"),
    ],
)
def test_what_cannot_be_asked_is_refused(text: str, section: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=f"--decide: .*{complaint}"):
        Decision.asked(text, settings_of({"sigma": 0.25, **section}))


def test_what_is_asked_takes_the_noise_and_inputs_of_the_certificate() -> None:
    like = settings_of({"sigma": 0.5, "mode": "target", "radii": (0.1,), "every": 3, "n": 500})
    found = Decision.asked("accuracy >= .90 @ 0.25", like)
    assert (found.share, found.radius, found.error) == ("0.9", 0.25, 0.05)
    wanted = Cohen(sigma=0.5, every=3, n=500, batch=100, radii=(0.25,))
    assert found.certificate == wanted
    assert found.folder_name.startswith("decision-0.9-at-0.25-sigma-0.5")
