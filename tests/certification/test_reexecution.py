"""What is counted of a model that looks at its batch is found out while it is counted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support import certificates
from support.batch_dependent import CLASSES, MODELS, SHAPE, Experts, Honest, Inputs, save
from support.networks import save_small_cnn
from torch import Tensor, nn

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


def test_a_model_with_experts_is_not_certified(here: None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="copies"):
        certify("Experts", tmp_path, sigma=0.02)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), [("Cached", "fixed"), ("EarlyExit", "anytime")])
def test_what_no_check_input_shows_stops_the_counting(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mode: str
) -> None:
    monkeypatch.setattr(reexecution, "EXPECTED_ROWS", 10**6)  # all rows: with what luck, see below
    radii = {"radii": (0.01, 0.05)} if mode == "anytime" else {}
    for _ in range(2):  # what a job found out is not forgotten when it is called again
        with pytest.raises(InvalidResultsError, match=r"input 6\d"):
            certify(kind, tmp_path, mode=mode, **radii)
        assert not (tmp_path / "out" / job.TABLE).exists()


@pytest.mark.slow
def test_no_byte_depends_on_the_rows_that_are_executed_again(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_them = (certify("Honest", tmp_path, "with") / job.TABLE).read_bytes()
    monkeypatch.setattr(worker.Assignment, "build_reexecution", lambda *_: None)
    assert (certify("Honest", tmp_path, "without") / job.TABLE).read_bytes() == with_them


@pytest.mark.parametrize("votes", [True, False])
def test_every_sampler_is_looked_at(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, votes: bool
) -> None:
    """Votes, and scores behind a model's own noise."""
    asked: list[tuple[int, int]] = []
    scored: set[tuple[str, bool]] = set()

    def look(
        self: Any, index: int, stage: str, block: int, rows: Tensor, logits: Tensor, draws: int,
        scores: bool = False,
    ) -> None:  # fmt: skip
        asked.append((index, draws))
        scored.add((stage, scores))

    monkeypatch.setattr(Reexecution, "__call__", look)
    section = {**SETTINGS, "n": 40}
    if not votes:
        del section["sigma"]
    save_small_cnn(tmp_path / "model", noise=None if votes else 0.3)
    certificates.certify(
        tmp_path / "model", certificates.Data(2), settings_of(section), tmp_path / "out", actors=1
    )
    for index in range(2):
        assert sorted(draws for each, draws in asked if each == index) == [8, 16, 16, 16]
    # The draws that choose a class are votes in every certificate.
    assert scored == {(SELECT, False), (ESTIMATE, not votes)}


def test_a_prediction_is_looked_at_and_so_are_all_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reexecution, "EXPECTED_ROWS", 10**6)
    image, quiet = (Inputs(70, marked=True).batch(slice(i, i + 1))[0] for i in (65, 3))
    for kind in ("EarlyExit", "Merged"):
        model = MODELS[kind]().eval()
        predictor = Predictor(model, settings_of({"sigma": 0.1, "n": 500}), CLASSES, SHAPE)
        for ask, x in (
            (predictor.certify, image),
            (predictor.predict, image),
            (predictor.certify, quiet),
        ):
            with pytest.raises(InvalidResultsError):
                ask(x)


def test_the_chosen_rows_follow_from_the_key_alone() -> None:
    names = list(itertools.product(range(20), (SELECT, ESTIMATE), range(5)))
    draws = 20 * 2 * 5 * 100
    choice = RowChoice(draws, 5, key=KEY)

    def chosen(choice: RowChoice, order: Any = names) -> list[Any]:
        return sorted((name, choice.choose_rows(*name, 100, 100).tolist()) for name in order)

    first = chosen(choice)
    assert first == chosen(RowChoice(draws, 5, key=KEY)) == chosen(choice, names[::-1])
    assert first != chosen(RowChoice(draws, 5)) != chosen(RowChoice(draws, 5))
    assert first != chosen(choice.for_purpose("answers")) != chosen(choice.for_purpose("others"))
    every = chosen(RowChoice(2 * EXPECTED_ROWS, 5, key=KEY))  # one row in two
    assert len({tuple(rows) for _, rows in every}) == len(names)


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
    compared(torch.tensor([[1.0, 1.0 + 1e-6, 0.0]] * 4), Constant(1.0, 1.0, 0.0))
    with pytest.raises(InvalidResultsError, match="input 3"):
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
    with pytest.raises(InvalidResultsError, match="no class"):
        compared(none, Constant(0.0, 1.0, 0.0))
    # no class ties with another
    with pytest.raises(InvalidResultsError):
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
    with pytest.raises(InvalidResultsError, match=r"1\.000000 .* 0\.665241"):
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
