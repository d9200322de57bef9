"""Membership attacks on a bank of models, and their findings with the limits by guarantees.

An attack turns a bank's scores into one number for each record of a target; `ATTACKS` lists all.
Findings are numbers with intervals.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpdist.audits.membership import Membership
from dpdist.audits.membership_statistics import (
    ALPHA,
    BankScores,
    Ceiling,
    Estimate,
    Game,
    Roc,
    claimed_ceiling,
    format_guarantee,
    lira_offline,
    lira_online,
    proved_ceiling,
    rmia,
)
from dpdist.core.console import format_bound, format_confidence, format_exact
from dpdist.core.errors import UserError
from dpdist.core.files import finite_or_none, write_json
from dpdist.privacy.audit_bounds import OneRunGuesses, bonferroni_alpha
from dpdist.privacy.guarantee import Guarantee, format_epsilon
from dpdist.runs.recipe import Recipe

# --- attacks ----------------------------------------------------------------------------------


Array = NDArray[np.float64]


# From a bank, its target, the shadow models' records that the adversary may use, and a seed to
# (N,), larger if a record is more likely a member of the target.
Score = Callable[[BankScores, int, NDArray[np.bool_], int], Array]


@dataclass(frozen=True)
class MembershipAttack:
    """An attack on a bank.

    min_models: models that it needs. thresholds: at which precision and recall are reported, in
    addition to the median. needs_quarters_game: whether it is for a target and one shadow.
    """

    name: str
    min_models: int
    score: Score
    thresholds: tuple[float, ...]
    needs_quarters_game: bool = False

    def check_game(self, game: Game) -> None:
        """Raise UserError for a bank with too few models."""
        if game.models < self.min_models:
            raise UserError(
                f"membership: {self.name} needs at least {self.min_models} models, got "
                f"{game.models}"
            )


def shadow_scores(
    bank: BankScores, target: int, known_records: NDArray[np.bool_], seed: int
) -> Array:
    """Return the scores of the residual perturbation paper's attack: (N,).

    A network learns from the shadow's three largest class probabilities who was in it, and is
    applied to the target's (hidden layer of 64, Adam at rate .1, 50 epochs; not printed: ReLU,
    batches of 128, no weight decay).
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    shadow = 1 - target
    network = MLPClassifier(
        (64,), activation="relu", solver="adam", learning_rate_init=0.1, max_iter=50,
        batch_size=min(128, int(known_records.sum())), alpha=0.0, tol=0.0, n_iter_no_change=50,
        random_state=seed,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # 50 epochs, as they say
        network.fit(bank.top[shadow][known_records], bank.member[shadow][known_records])
    return np.asarray(network.predict_proba(bank.top[target])[:, 1])


_RATIOS = (0.4, 0.5, 0.55, 0.6)
ATTACKS = {
    attack.name: attack
    for attack in (
        MembershipAttack("shadow", 2, shadow_scores, _RATIOS, needs_quarters_game=True),
        # Likelihood ratios of Gaussians, with and without the record (Carlini et al. 2022).
        MembershipAttack(
            "lira", 4, lambda bank, at, *_: lira_online(bank.phi, bank.member, at), (0.0,)
        ),
        # How unusual a score is for models without the record (the same, Section VI-C).
        MembershipAttack(
            "lira-offline", 3, lambda bank, at, *_: lira_offline(bank.phi, bank.member, at),
            (0.5, 0.9, 0.99),
        ),
        # Ratios against population points (Zarifzadeh et al. 2024), gamma 2.
        MembershipAttack(
            "rmia", 2, lambda bank, at, *_: rmia(bank.phi, bank.member, at, bank.population),
            _RATIOS,
        ),
        # The same with references that never saw the record, a = .3.
        MembershipAttack(
            "rmia-offline", 2,
            lambda bank, at, *_: rmia(
                bank.phi, bank.member, at, bank.population, online=False
            ),
            _RATIOS,
        ),
    )
}  # fmt: skip


# --- findings ---------------------------------------------------------------------------------


FILE = "membership.json"
RATES = (0.01, 0.001)  # false positive rates at which a true positive rate is reported
_GUESSED = 0.02  # fraction of the records, in the one-run test: fixed in advance
_PICTURE = np.geomspace(1e-4, 1.0, 400)

Points = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Finding:
    """The result of one attack.

    roc: of the bank's first target, to which all intervals apply except those over models. aucs: of
    each target. one_run_test: of the first target, if membership is a secret fair coin.
    """

    attack: MembershipAttack
    passes: int
    roc: Roc
    aucs: tuple[float, ...]
    one_run_test: OneRunGuesses | None

    @property
    def title(self) -> str:
        return self.attack.name + (f", mean of {self.passes} passes" if self.passes > 1 else "")

    def epsilon_lower_bound(self, delta: float) -> float | None:
        """Return the epsilon up to which the one-run test rejects; None without a test."""
        return None if self.one_run_test is None else self.one_run_test.epsilon(delta)

    @property
    def thresholds(self) -> list[tuple[float, Estimate, Estimate]]:
        """Return (threshold, precision, recall) at the attack's own and at the median score."""
        chosen = (*self.attack.thresholds, self.roc.median)
        return [(at, *self.roc.precision_recall(at)) for at in chosen]

    def summary_rows(self, ceilings: Sequence[Ceiling], delta: float) -> list[tuple[str, str]]:
        """Return name and value of every result, for the terminal."""
        area = self.roc.auc
        rows = [("AUC", f"{area}, |AUC - 1/2| {abs(area.value - 0.5):.3f}")]
        if len(self.aucs) > 1:
            over = f"{Estimate.from_values(self.aucs)} of {len(self.aucs)} models"
            rows.append(("AUC, mean over models", over))
        for rate in RATES:
            true, false = self.roc.rates_at(rate)
            name = f"TPR at {format_exact(100 * rate)} % FPR"
            rows.append((name, f"{true}, realized FPR {false}"))
        rows.append(("advantage", f"{self.roc.advantage:.3f}"))
        for threshold, precision, recall in self.thresholds:
            rows.append((f"above {threshold:.4g}", f"precision {precision}, recall {recall}"))
        for ceiling in ceilings:
            exceeded = [format_exact(100 * rate) for rate in ceiling.exceeded_rates(self.roc)]
            words = f"AUC at most {format_bound(ceiling.auc, round_up=True)}"
            if exceeded:
                words += f"; this ROC is above the ceiling at {' %, '.join(exceeded)} % FPR"
            rows.append((f"ceiling, {ceiling.description}", words))
        if (test := self.one_run_test) is not None:
            words = (
                f"epsilon at least {format_epsilon(test.epsilon(delta), lower_bound=True)} at "
                f"delta {format_exact(delta)}, confidence {format_confidence(test.alpha)} % "
                f"({test.correct:,} of {test.guesses:,} guesses correct)"
            )
            rows.append(("one-run test", words))
        return rows

    def to_dict(self, ceilings: Sequence[Ceiling], delta: float) -> dict[str, Any]:
        return {
            "attack": self.attack.name,
            "passes": self.passes,
            "members": len(self.roc.members),
            "others": len(self.roc.others),
            "auc": _estimate_to_json(self.roc.auc),
            "aucs": list(self.aucs),
            "tpr_at": {
                f"{rate:g}": _estimate_to_json(self.roc.rates_at(rate)[0]) for rate in RATES
            },
            "advantage": self.roc.advantage,
            "thresholds": [
                {
                    "threshold": finite_or_none(at),
                    "precision": _estimate_to_json(p),
                    "recall": _estimate_to_json(r),
                }
                for at, p, r in self.thresholds
            ],
            "ceilings": [
                {"of": one.description, "auc": one.auc, "above_at": one.exceeded_rates(self.roc)}
                for one in ceilings
            ],
            "one_run_epsilon": self.epsilon_lower_bound(delta),
        }


@dataclass(frozen=True)
class MembershipFindings:
    """The results of all attacks on one bank.

    proved: guarantee of each of its models. ceilings: empty if no guarantee bounds the game.
    """

    game: Game
    proved: Guarantee
    ceilings: tuple[Ceiling, ...]
    attacks: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def within_guarantee(self) -> bool:
        """Return whether no one-run test exceeds the proved epsilon."""
        bounds = [one.epsilon_lower_bound(self.proved.delta) or 0.0 for one in self.attacks]
        return max(bounds, default=0.0) <= self.proved.epsilon

    def tables(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return title and rows of the results of each attack."""
        return [
            (
                f"{one.title}: {len(one.roc.members):,} members, {len(one.roc.others):,} others",
                one.summary_rows(self.ceilings, self.proved.delta),
            )
            for one in self.attacks
        ]

    @property
    def panel(self) -> tuple[str, dict[str, Points], dict[str, Points]]:
        """Return title, curves and ceilings of a figure."""
        return (
            self.game.name,
            {one.title: (_PICTURE, one.roc.interpolate(_PICTURE)) for one in self.attacks},
            {
                one.description: (_PICTURE, one.max_true_positive_rates(_PICTURE))
                for one in self.ceilings
            },
        )

    def write(self, folder: Path) -> None:
        """Write the findings as JSON into the folder of their bank, which is private."""
        delta = self.proved.delta
        found = [one.to_dict(self.ceilings, delta) for one in self.attacks]
        written = {"game": self.game.name, "proved": self.proved.to_dict(), "attacks": found}
        write_json(folder / FILE, written)


def run_attacks(
    settings: Membership, recipe: Recipe, path: Path, attacks: Sequence[MembershipAttack]
) -> MembershipFindings:
    """Return the findings of every attack on every target of the bank in `path`, and write them.

    Each attack is run at every number of passes. Raises UserError for too few models.
    """
    about, banks = settings.read(path)
    game, key = settings.game_rules, bytes.fromhex(about["seed"])
    _, plan = settings.plan_shadows(recipe, next(iter(banks.values())).member.shape[1])[0]
    guarantee = plan.guarantee()
    ceilings: tuple[Ceiling, ...] = ()
    notes = [f"{game.name}: {game.description}; intervals describe the first model attacked"]
    if settings.seed is None:
        claim = recipe.method.claim(plan, guarantee)
        both = (
            proved_ceiling(plan, game.relation, format_guarantee(guarantee)),
            claimed_ceiling(claim, game.relation),
        )
        ceilings = tuple(one for one in both if one is not None)
        if math.isinf(guarantee.epsilon):
            notes.append("no ceiling: nothing is proved about these trainings")
        else:
            notes.append(
                f"each model's training is proved {guarantee}; a ROC above a ceiling is not a "
                "refutation: the one-run test, or many models, can give one"
            )
    else:
        notes.append("no ceiling: the members of a model follow from the given seed")
    # Attacks of other calls are tests on the same coins, so all of them share alpha.
    others = sum(not one.needs_quarters_game for one in ATTACKS.values())
    tests = bonferroni_alpha(ALPHA, max(others, len(attacks)) * len(banks))
    coins = settings.seed is None and game.has_random_size
    found = tuple(
        _run_attack(attack, game, key, bank, passes, tests if coins else None)
        for attack in attacks
        for passes, bank in sorted(banks.items())
    )
    findings = MembershipFindings(game, guarantee, ceilings, found, tuple(notes))
    findings.write(path.parent)
    return findings


def _run_attack(
    attack: MembershipAttack,
    game: Game,
    key: bytes,
    bank: BankScores,
    passes: int,
    alpha: float | None,
) -> Finding:
    """Return the finding of one attack at one number of passes.

    alpha: of a one-run test of the first target; None: no such test is valid.
    """
    attack.check_game(game)
    records = bank.member.shape[1]
    learned = game.guessed_records(key, game.models - 1, records)
    rocs, test = [], None
    for target in game.targets:
        scored = attack.score(bank, target, learned, int.from_bytes(key[:4], "little"))
        judged = game.guessed_records(key, target, records)
        rocs.append(Roc.from_scores(scored[judged], bank.member[target][judged]))
        if alpha is not None and target == game.targets[0]:
            guesses = 2 * max(1, round(_GUESSED * records / 2))
            test = OneRunGuesses.from_scores(scored, bank.member[target], guesses, alpha)
    return Finding(attack, passes, rocs[0], tuple(roc.auc.value for roc in rocs), test)


def _estimate_to_json(estimate: Estimate) -> list[float | None]:
    return [finite_or_none(value) for value in (estimate.value, estimate.low, estimate.high)]
