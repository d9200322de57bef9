"""What is counted of a model that looks at its batch is found out while it is counted."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import certificates
from support.batch_dependent import (
    CLASSES,
    MODELS,
    SHAPE,
    Experts,
    Honest,
    Inputs,
    save,
)
from torch import Tensor, nn

from dpdist import models
from dpdist.certification import job, reexecution, worker
from dpdist.certification.predict import Predictor
from dpdist.certification.reexecution import EXPECTED_ROWS, Reexecution, RowChoice
from dpdist.certification.registry import settings_of
from dpdist.core.errors import InvalidResultsError, UserError
from dpdist.models import batch_independence, find_batch_dependence
from dpdist.randomness.keys import ESTIMATE, SELECT

KEY = b"k" * 32
SETTINGS: dict[str, Any] = {
    "sigma": 0.1, "n0": 16, "n": 64, "batch": 16, "seed": "1", "backend": "eager"
}  # fmt: skip
LOOKS = sorted(set(MODELS) - {"Honest", "Experts", "Overflows", "Flickers"})


def batches() -> tuple[Tensor, Tensor]:
    """A check batch as a certification has it, and one of copies."""
    noise = 0.1 * torch.randn(16, *SHAPE, generator=torch.Generator().manual_seed(0))
    noise[:, :2] *= 0.1
    inputs = Inputs().batch(slice(0, 16))
    return inputs + noise, inputs[:1] + noise


def certify(kind: str, tmp_path: Path, name: str = "out", **more: Any) -> Path:
    spec = save(kind, tmp_path / "model")
    settings = settings_of(SETTINGS | more)
    data = Inputs(70, marked=True)
    certificates.certify(tmp_path / "model", data, settings, tmp_path / name, actors=2,
                trusted_factory=spec.name)  # fmt: skip
    return tmp_path / name


# ---- before anything is counted


@pytest.mark.parametrize("capacity", [None, 2])
def test_experts_are_never_full_for_different_inputs_but_for_copies(capacity: int | None) -> None:
    model, (batch, copies) = Experts(capacity).eval(), batches()
    allowed = torch.full((CLASSES,), 1e-4)
    assert (
        batch_independence._compare(model, batch, batch_independence._arrangements(batch), allowed)
        is None
    )
    assert "copies" in str(find_batch_dependence(model, batch, copies))
    # near copies, where nobody says which noise
    assert find_batch_dependence(model, batch) is not None
    assert find_batch_dependence(Honest().eval(), batch, copies) is None


def test_a_copy_without_a_number_has_no_answer_to_change() -> None:
    class Overflows(Honest):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x[:, :1] > 0.5, torch.inf, self.full(x))

    batch, copies = batches()
    batch[:, 0], copies[:, 0] = 0.0, torch.arange(16) / 16
    assert find_batch_dependence(Overflows().eval(), batch, copies) is None


def test_a_model_with_experts_is_not_certified(here: None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"looks at its batch.*copies"):
        certify("Experts", tmp_path, sigma=0.02)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["input", "hidden"])
def test_copies_have_the_noise_that_is_executed(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: str
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(worker, "find_batch_dependence", lambda *given, **_: seen.append(given))
    spec = models.ModelSpec("mlp", SHAPE, CLASSES, hidden_noise=noise == "hidden")
    model = models.initialize(models.ModelSpec("mlp", SHAPE, CLASSES), 0)
    section = {**SETTINGS, "batch": 64, "sigma": 0.2}
    first, std = nn.Identity(), 0.2
    if noise == "hidden":
        split = models.require_split(model)
        models.attach_noise(model, torch.full(split.hidden_shape(SHAPE), 0.5))
        section, first, std = {"n": 64, "batch": 64, "seed": "1"}, split.first, 0.5
    models.save(model, spec, tmp_path / "model")
    certificates.certify(
        tmp_path / "model", Inputs(70), settings_of(section), tmp_path / "out", actors=1
    )
    ((_, batch, copies),) = seen
    inputs = Inputs(70).batch(slice(0, 64))
    with torch.no_grad():
        for rows, at in ((batch, first(inputs)), (copies, first(inputs[:1]))):
            off = rows - at
            # 64 rows of 36 features at least: 5 standard deviations of their own.
            assert abs(float(off.std()) / std - 1) < 5 / (2 * off.numel()) ** 0.5
            assert len(rows) == 64


# ---- while it is counted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode"),
    [*((kind, "fixed") for kind in LOOKS), ("Merged", "target-radius"), ("EarlyExit", "anytime"),
     ("Cached", "two-class")],
)  # fmt: skip
def test_what_no_check_input_shows_stops_the_counting(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mode: str
) -> None:
    monkeypatch.setattr(reexecution, "EXPECTED_ROWS", 10**6)  # all rows: with what luck, see below
    radii = {"radii": (0.01, 0.05)} if mode in ("target-radius", "anytime") else {}
    with pytest.raises(InvalidResultsError, match=r"looks at its batch: a row of input 6\d is"):
        certify(kind, tmp_path, mode=mode, **radii)
    assert not (tmp_path / "out" / job.TABLE).exists()
    # What a job found out is not forgotten when it is called again.
    with pytest.raises(InvalidResultsError, match="the model looks at"):
        certify(kind, tmp_path, mode=mode, **radii)
    assert not (tmp_path / "out" / job.TABLE).exists()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "frozen", "bf16"])
def test_no_byte_depends_on_the_rows_that_are_executed_again(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    tables = [(certify("Honest", tmp_path, f"{i}", backend=backend) / job.TABLE) for i in range(2)]
    monkeypatch.setattr(worker.Assignment, "build_reexecution", lambda *_: None)
    tables.append(certify("Honest", tmp_path, "2", backend=backend) / job.TABLE)
    assert len({table.read_bytes() for table in tables}) == 1


@pytest.mark.parametrize("votes", [True, False])
def test_every_sampler_is_looked_at(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, votes: bool
) -> None:
    """Votes, and scores behind a model's own noise."""
    asked: list[tuple[int, ...]] = []
    scored: list[tuple[str, bool]] = []

    def look(
        self: Any, index: int, stage: str, block: int, rows: Tensor, logits: Tensor, draws: int,
        scores: bool = False,
    ) -> None:  # fmt: skip
        asked.append((index, len(rows), len(logits), draws, rows[0].numel()))
        scored.append((stage, scores))

    monkeypatch.setattr(Reexecution, "__call__", look)
    spec = models.ModelSpec("mlp", SHAPE, CLASSES)
    model = models.initialize(spec, 0)
    section = {**SETTINGS, "n": 40, "seed": "1"}
    if not votes:
        width = models.require_split(model).hidden_shape(SHAPE)
        models.attach_noise(model, torch.ones(width))
        spec = models.ModelSpec("mlp", SHAPE, CLASSES, hidden_noise=True)
        section = {"n0": 16, "n": 40, "batch": 16, "seed": "1", "backend": "eager"}
    models.save(model, spec, tmp_path / "model")
    certificates.certify(
        tmp_path / "model", Inputs(2), settings_of(section), tmp_path / "out", actors=1
    )
    hidden = {numbers for *_, numbers in asked}
    assert len(hidden) == 1 and (hidden == {36}) == votes
    for index in range(2):
        draws = sorted(counted for each, *_, counted, _ in asked if each == index)
        assert draws == [8, 16, 16, 16]
    # The draws that choose a class are votes in every certificate.
    assert set(scored) == {(SELECT, False), (ESTIMATE, not votes)}


def test_a_prediction_is_looked_at_and_so_are_all_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reexecution, "EXPECTED_ROWS", 10**6)
    image, quiet = (Inputs(70, marked=True).batch(slice(i, i + 1))[0] for i in (65, 3))
    # What Cached kept first may be of the class that the image has: once in twenty it is no fault.
    for kind in sorted({*LOOKS} - {"Cached"}):
        model = MODELS[kind]().eval()
        predictor = Predictor(model, settings_of({"sigma": 0.1, "n": 500}), CLASSES, SHAPE)
        for ask, x in ((predictor.certify, image), (predictor.predict, image),
                       (predictor.certify, quiet)):  # fmt: skip
            with pytest.raises(InvalidResultsError, match="looks at its batch"):
                ask(x)


# ---- which rows


def test_the_chosen_rows_follow_from_the_key_alone_and_from_nothing_that_a_model_knows() -> None:
    names = list(itertools.product(range(20), (SELECT, ESTIMATE), range(5)))
    choice = RowChoice(20 * 2 * 5 * 100, 5, key=KEY)

    def chosen(choice: RowChoice) -> dict[Any, list[int]]:
        return {name: choice.choose_rows(*name, 100, 100).tolist() for name in names}

    first = chosen(choice)
    assert first == chosen(RowChoice(20 * 2 * 5 * 100, 5, key=KEY))
    every = RowChoice(2 * EXPECTED_ROWS, 5, key=KEY)  # one row in two
    parts = [every.choose_rows(*name, 100, 100).tolist() for name in names]
    assert len({tuple(part) for part in parts}) == len(names)
    assert first != chosen(RowChoice(20 * 2 * 5 * 100, 5)) != chosen(RowChoice(20_000, 5))
    assert first != chosen(choice.for_purpose("answers")) != chosen(choice.for_purpose("others"))
    assert [choice.choose_rows(*name, 100, 100).tolist() for name in reversed(names)] == list(
        reversed(first.values())
    )


@pytest.mark.slow
def test_rows_are_chosen_alike_from_all_blocks_and_as_many_as_are_stated() -> None:
    # 100 keys: the mean of a sum of independent roundings, variance at most LEAST_ROWS; 5 standard
    # deviations are wrong with probability 6e-7. Each place: Poisson, 5 of its deviations, 1e-4 for
    # all 200 places and parts of 8 of them.
    keys, counts, places = 100, [], np.zeros(200)
    for number in range(keys):
        choice = RowChoice(30 * (200 + 2 * 1000), 2, key=number.to_bytes(32, "little"))
        found = [choice.choose_rows(i, SELECT, 0, 200, 200) for i in range(30)]
        found += [
            choice.choose_rows(i, ESTIMATE, b, 1000, 1000) for i in range(30) for b in range(2)
        ]
        counts.append(sum(map(len, found)))
        for each in found[:30]:
            places[each] += 1
        for each in found:
            assert len(set(each.tolist())) == len(each)
    assert abs(np.mean(counts) - EXPECTED_ROWS) < 5 * math.sqrt(EXPECTED_ROWS / keys)
    expected = keys * EXPECTED_ROWS * 30 / (30 * 2200)
    assert abs(places.sum() - 200 * expected) < 5 * math.sqrt(200 * expected)
    parts = places.reshape(25, 8).sum(1)
    assert (abs(parts - 8 * expected) < 5 * math.sqrt(8 * expected)).all()
    # Beyond what is counted for certain: one row in a hundred blocks.
    later = [len(choice.choose_rows(i, ESTIMATE, 7, 1000, 1000)) for i in range(20_000)]
    assert max(later) == 1 and abs(sum(later) - 200) < 5 * math.sqrt(200)
    assert choice.choose_rows(0, ESTIMATE, 0, 1000, 500).max(initial=0) < 500
    # Less than is to be looked at: all of it; and of later inputs the same as of later blocks.
    assert sorted(RowChoice(40, 1).choose_rows(0, ESTIMATE, 0, 40, 40)) == list(range(40))
    last = RowChoice(40, 1, last=1)
    assert sum(len(last.choose_rows(i, ESTIMATE, 0, 40, 40)) for i in range(2, 2002)) < 60


class Changes(nn.Module):
    """Answers a twentieth of all rows otherwise where there are two rows or more."""

    def forward(self, x: Tensor) -> Tensor:
        score = x.flatten(1)[:, :1]
        score = torch.where((x.flatten(1)[:, 1:2] < 0.05) & (len(x) > 1), -score, score)
        return torch.cat([score, -score], 1)


@pytest.mark.slow
def test_a_model_that_changes_a_twentieth_of_its_answers_is_found_as_often_as_stated() -> None:
    # 300 jobs: stated 1 - exp(-3.3) = 0.963. Fewer than 270 are found with probability 5e-7.
    generator, found = torch.Generator().manual_seed(0), 0
    model = Changes().eval()
    others = torch.rand(100, 2, generator=generator)
    for number in range(300):
        choice = RowChoice(20 * 100, 20, key=number.to_bytes(32, "little"))
        again = Reexecution(choice, model, model, others)
        try:
            for block in range(20):
                rows = torch.rand(100, 2, generator=generator)
                again(0, ESTIMATE, block, rows, model(rows), 100)
        except InvalidResultsError:
            found += 1
    assert 270 <= found < 300


# ---- what is compared


def compared(counted: Tensor, network: nn.Module, **more: Any) -> None:
    rows = torch.arange(1.0, 1 + 2 * len(counted)).view(-1, 2)
    Reexecution(RowChoice(1, 1), network, network, rows.flip(0), **more)(
        3, ESTIMATE, 0, rows, counted, len(rows)
    )


class Constant(nn.Module):
    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.to(x.dtype).expand(len(x), -1)


def test_two_classes_that_tie_within_rounding_are_no_difference() -> None:
    for lead in (0.0, 1e-7, 1e-6):
        compared(torch.tensor([[1.0, 1.0 + lead, 0.0]] * 4), Constant(1.0, 1.0, 0.0))
    with pytest.raises(InvalidResultsError, match=r"input 3 is class 1 .* and class 0 alone"):
        compared(torch.tensor([[1.0, 1.001, 0.0]] * 4), Constant(1.0, 1.0, 0.0))
    with pytest.raises(InvalidResultsError):  # the counted ones tie, those alone do not
        compared(torch.tensor([[1.0, 1.0, 0.0]] * 4), Constant(0.0, 1.0, 0.0))
    # A large third class leaves no room for the others.
    with pytest.raises(InvalidResultsError):
        compared(torch.tensor([[1.0, 1.001, -1e6]] * 4), Constant(1.0, 1.0, -1e6))


def test_another_number_format_has_its_own_rounding() -> None:
    near = torch.tensor([[1.0, 1.01, 0.0]] * 4)
    compared(near, Constant(1.0, 1.0, 0.0), backend="bf16")
    with pytest.raises(InvalidResultsError):
        compared(near, Constant(1.0, 1.0, 0.0))
    with pytest.raises(InvalidResultsError):
        compared(torch.tensor([[1.0, 1.2, 0.0]] * 4), Constant(1.0, 1.0, 0.0), backend="bf16")


def test_no_class_is_an_answer_like_any_other() -> None:
    none = torch.tensor([[torch.nan, 0.0, 0.0]] * 4)
    compared(none, Constant(torch.inf, 0.0, 0.0))
    with pytest.raises(InvalidResultsError, match=r"is no class in the batch .* and class 1 alone"):
        compared(none, Constant(0.0, 1.0, 0.0))
    # no class ties with another
    with pytest.raises(InvalidResultsError, match="and class 1 alone"):
        compared(none, Constant(-1.0, 1.0, 1.0 - 1e-7))


def test_scores_are_compared_where_scores_are_counted() -> None:
    rows = torch.arange(8.0).view(4, 2)
    network = Constant(1.0, 0.0, -1.0)
    sharper = torch.tensor([[30.0, 0.0, -30.0]] * 4)  # of the same class

    def look(counted: Tensor, **more: bool) -> None:
        again = Reexecution(RowChoice(1, 1), network, network, rows.flip(0))
        again(3, ESTIMATE, 0, rows, counted, len(rows), **more)

    look(sharper)  # votes alone
    look(network(rows) + 1e-7, scores=True)
    with pytest.raises(
        InvalidResultsError, match=r"score 1.000000 of class 0 .* score 0.665241 of"
    ):
        look(sharper, scores=True)


def test_a_score_lies_between_those_of_the_moved_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 4, generator=generator).double()
    allowed = torch.tensor([0.1, 0.0, 0.3, 1e-3]).double()
    least, most = reexecution.score_range(logits, allowed)
    for own in range(4):
        for ends, sign in ((least, -1), (most, 1)):
            moved = logits - sign * allowed
            moved[:, own] = logits[:, own] + sign * allowed[own]
            assert torch.allclose(ends[:, own], moved.softmax(1)[:, own], rtol=0, atol=2e-9)
    far = torch.tensor([[0.0, -1e9, 5.0, 800.0]]).double()
    for ends in reexecution.score_range(far, torch.tensor([0.0, 1e6, 0.0, 0.5]).double()):
        assert torch.allclose(ends, far.softmax(1), rtol=0, atol=2e-9)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    class Locked(Honest):
        def __deepcopy__(self, memo: Any) -> Locked:
            raise TypeError("cannot pickle '_thread.lock' object")

    with pytest.raises(UserError, match=r"copy.deepcopy copies, got TypeError"):
        batch_independence.fresh_copy(Locked())


def test_rows_stand_among_others_and_alone_as_they_were_executed() -> None:
    """At their own places, few in a batch, in batches of the executed size."""
    rows, seen = torch.rand(24, 2) + 5, []

    class Spy(Changes):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.clone())
            return torch.cat([x, -x], 1)

    others = torch.rand(10, 2)
    network = Spy().eval()
    again = Reexecution(RowChoice(1, 1, key=KEY), network, network, others)
    again(0, ESTIMATE, 0, rows, torch.cat([rows, -rows], 1), 24)
    alone, among = [x for x in seen if len(x) == 1], [x for x in seen if len(x) == 24]
    assert sorted(float(x[0, 0]) for x in alone) == sorted(rows[:, 0].tolist())
    assert len(among) == 8 and len(seen) == 32
    placed = set()
    for batch in among:
        own = (batch > 5).all(1).nonzero()[:, 0].tolist()
        assert len(own) == 3 and torch.equal(batch[own], rows[own])
        rest = [i for i in range(24) if i not in own]
        assert torch.equal(batch[rest], others[[i % 10 for i in rest]])
        placed |= set(own)
    assert placed == set(range(24))


def test_parameters_are_not_copied_for_a_row_and_kept_answers_are() -> None:
    class Remembers(Honest):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.held: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.held.append(len(x))
            assert self.calls == len(self.held) == 1  # as it came, for each row
            pointers.add(self.weight.data_ptr())
            return self.full(x)

    pointers: set[int] = set()
    network = Remembers().eval()
    rows = Inputs().batch(slice(0, 8))
    again = Reexecution(RowChoice(1, 1), network, Honest().full, rows)
    again(0, ESTIMATE, 0, rows, Honest().full(rows), 8)
    assert pointers == {network.weight.data_ptr()} and float(network.calls) == 0


@pytest.mark.slow
def test_without_it_each_of_them_is_certified(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative of the test above: nothing else would have noticed."""
    monkeypatch.setattr(worker.Assignment, "build_reexecution", lambda *_: None)
    for kind in LOOKS:
        assert (certify(kind, tmp_path / kind) / job.TABLE).exists()
