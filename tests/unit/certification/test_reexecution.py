"""A model whose answers depend on the batch is noticed while its answers are counted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support import certificates
from support.batch_dependent import CLASSES, MODELS, SHAPE, Inputs, save
from support.networks import save_small_cnn
from torch import Tensor, nn

from dpdist.certification import job, reexecution, worker
from dpdist.certification.predict import Predictor
from dpdist.certification.reexecution import EXPECTED_ROWS, Reexecution, RowChoice
from dpdist.certification.registry import settings_of
from dpdist.core.errors import InvalidResultsError, UserError
from dpdist.randomness.keys import ESTIMATE, SELECT

KEY = b"k" * 32
SETTINGS: dict[str, Any] = {
    "sigma": 0.1, "n0": 16, "n": 64, "batch": 16, "seed": "1", "backend": "eager"
}  # fmt: skip


def certify(kind: str, tmp_path: Path, name: str = "out", **more: Any) -> Path:
    spec = save(kind, tmp_path / "model")
    settings = settings_of(SETTINGS | more)
    data = Inputs(70, marked=True)
    certificates.certify(tmp_path / "model", data, settings, tmp_path / name, actors=2,
                trusted_factory=spec.name)  # fmt: skip
    return tmp_path / name


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
    asked: list[tuple[int, int, str, bool]] = []

    def look(self: Any, index: int, stage: str, *given: Any, scores: bool = False) -> None:
        asked.append((index, given[3], stage, scores))

    monkeypatch.setattr(Reexecution, "__call__", look)
    save_small_cnn(tmp_path / "model", noise=None if votes else 0.3)
    settings = settings_of({**SETTINGS, "n": 40, "sigma": SETTINGS["sigma"] if votes else None})
    certificates.certify(
        tmp_path / "model", certificates.Data(2), settings, tmp_path / "out", actors=1
    )
    for index in range(2):
        assert sorted(draws for each, draws, *_ in asked if each == index) == [8, 16, 16, 16]
    # The draws that choose a class are votes in every certificate.
    assert {(stage, scores) for *_, stage, scores in asked} == {
        (SELECT, False), (ESTIMATE, not votes)
    }  # fmt: skip


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
