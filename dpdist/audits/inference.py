"""The membership attacks: from a bank's scores to one number for each record of a target.

A new one is a class here and its place in `ATTACKS`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dpdist.audits import scores
from dpdist.audits.bank import BankScores
from dpdist.audits.games import Game
from dpdist.base.errors import UserError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Inference:
    """An attack on a bank. least: models that it needs. thresholds: at which precision and recall
    are told, beside the median. quarters: whether it is played with a target and a shadow."""

    name: ClassVar[str]
    least: ClassVar[int]
    thresholds: ClassVar[tuple[float, ...]] = ()
    quarters: ClassVar[bool] = False

    def check(self, game: Game) -> None:
        """Raise UserError for a bank with too few models."""
        if game.models < self.least:
            raise UserError(
                f"membership: {self.name} needs at least {self.least} models, got {game.models}"
            )

    def score(self, bank: BankScores, target: int, judged: NDArray[np.bool_], seed: int) -> Array:
        """(N,), larger where a record is more likely a member of `target`. judged: of the shadow
        models' records, those that the adversary may learn from."""
        raise NotImplementedError


class Shadow(Inference):
    """The residual perturbation paper's: a network learns from the shadow's three largest class
    probabilities who was in it, and judges the target's (hidden layer of 64, Adam at rate .1, 50
    epochs; unprinted: ReLU, batches of 128, no weight decay)."""

    name, least, quarters = "shadow", 2, True
    thresholds = (0.4, 0.5, 0.55, 0.6)

    def score(self, bank: BankScores, target: int, judged: NDArray[np.bool_], seed: int) -> Array:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.neural_network import MLPClassifier

        shadow = 1 - target
        network = MLPClassifier(
            (64,), activation="relu", solver="adam", learning_rate_init=0.1, max_iter=50,
            batch_size=min(128, int(judged.sum())), alpha=0.0, tol=0.0, n_iter_no_change=50,
            random_state=seed,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # 50 epochs, as they say
            network.fit(bank.top[shadow][judged], bank.member[shadow][judged])
        return np.asarray(network.predict_proba(bank.top[target])[:, 1])


class Lira(Inference):
    """Likelihood ratios of Gaussians, with and without the record (Carlini et al. 2022)."""

    name, least, thresholds = "lira", 4, (0.0,)

    def score(self, bank: BankScores, target: int, judged: NDArray[np.bool_], seed: int) -> Array:
        return scores.lira_online(bank.phi, bank.member, target)


class LiraOffline(Inference):
    """How unusual for models without the record (Carlini et al. 2022, Section VI-C)."""

    name, least, thresholds = "lira-offline", 3, (0.5, 0.9, 0.99)

    def score(self, bank: BankScores, target: int, judged: NDArray[np.bool_], seed: int) -> Array:
        return scores.lira_offline(bank.phi, bank.member, target)


class Rmia(Inference):
    """Ratios against population points (Zarifzadeh et al. 2024), gamma 2."""

    name, least, thresholds = "rmia", 2, (0.4, 0.5, 0.55, 0.6)
    online: ClassVar[bool] = True

    def score(self, bank: BankScores, target: int, judged: NDArray[np.bool_], seed: int) -> Array:
        return scores.rmia(bank.phi, bank.member, target, bank.population, online=self.online)


class RmiaOffline(Rmia):
    """With references that never saw the record, a = .3."""

    name, online = "rmia-offline", False


ATTACKS: dict[str, type[Inference]] = {
    kind.name: kind for kind in (Shadow, Lira, LiraOffline, Rmia, RmiaOffline)
}
