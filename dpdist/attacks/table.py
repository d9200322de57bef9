"""Options of attacks, the table of attacked predictions, its only reader, and its printed lines.

The table has one row per attack, size and input, in one canonical file. Checks of certificates are
read here as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import AfterValidator, Field

from dpdist.certification.table import ABSTAIN
from dpdist.cluster import job_folder
from dpdist.core.console import format_exact, format_percent
from dpdist.core.fields import (
    ATTACKS,
    Count,
    InputSelection,
    Norm,
    OneOrMore,
    Positive,
    Probability,
    Text,
)
from dpdist.core.files import ColumnSpec, read_json
from dpdist.randomness.noise_location import NOISE_LOCATIONS, NoiseLocation

# --- the options ------------------------------------------------------------------------------


def _check_attack(name: str) -> str:
    if name not in ATTACKS:
        raise ValueError(f"must be out of {', '.join(ATTACKS)}")
    return name


_KnownAttack = Annotated[str, AfterValidator(_check_attack)]
_DEFAULT_SIZES: dict[Norm, tuple[float, ...]] = {
    "linf": (0.025, 0.05, 0.1, 0.2),
    "l2": (0.25, 0.5, 1.0, 1.5),
}
_BLOCK = 100
_MAX_BLOCK_NUMBERS = 16 * 2**20
NONE = "none"  # as the name of an attack: the input itself


class AttackOptions(InputSelection):
    """Options of an attack: all settings that its results depend on.

    Attributes:
        norm: Norm of the attacks' sizes.
        sizes: Sizes of the attacks, in input units; None: the usual ones of the norm.
        attacks: Names of the attacks.
        steps: Gradient steps of all attacks but fgsm.
        restarts: Starting points of PGD, of which the best result counts.
        step_scale: Length of all steps of PGD together, in units of the size.
        sigma: Standard deviation of the input noise that smooths the attacked network; None: the
            model as it is, with its own noise if it has some.
        samples: Noise samples for each gradient (EOT).
        n: Noise samples for each answer of a randomized classifier.
        alpha: Error probability of each such answer; a classifier that is not sure abstains.
        labels: Whether attacks lead away from the true label or from the class that is predicted
            without an attack.
        batch: Inputs attacked at once, which is also the canonical block; None: by their size.
        seed: Seed of all random numbers; None: a secret seed, drawn at the start and stored with
            the results.
    """

    norm: Norm = "linf"
    sizes: Annotated[tuple[Positive, ...], OneOrMore, Field(min_length=1)] | None = None
    attacks: Annotated[tuple[_KnownAttack, ...], OneOrMore, Field(min_length=1)] = ATTACKS
    steps: Count = 10
    restarts: Count = 1
    step_scale: Positive = 2.5
    sigma: Positive | None = None
    samples: Count = 16
    n: Count = 1000
    alpha: Probability = 0.001
    labels: Literal["true", "predicted"] = "true"
    batch: Count | None = None
    seed: Text | None = None

    @property
    def attack_sizes(self) -> list[tuple[str, float]]:
        """Return each (attack, size) to make, after ("none", 0), which is the input itself."""
        sizes = sorted(set(self.sizes or _DEFAULT_SIZES[self.norm]))
        names = dict.fromkeys(self.attacks)
        return [(NONE, 0.0), *((name, size) for size in sizes for name in names)]

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings that a result depends on in addition to its own attack and size.

        A folder of results may be extended by more attacks and sizes.
        """
        return self.model_dump(exclude={"attacks", "sizes", "seed"})

    def batch_size(self, numbers_per_input: int) -> int:
        """Return the number of inputs that are attacked at once."""
        if self.batch is not None:
            return self.batch
        return max(1, min(_BLOCK, _MAX_BLOCK_NUMBERS // (numbers_per_input * self.samples)))


# --- the table --------------------------------------------------------------------------------


TABLE = "attacks.parquet"
CHECK_TABLE = "check.parquet"
KEY = b"dpdist.attacks"
# The entry of a table's record that states how the attacked classifier answers; default: by votes.
ANSWERS, MEAN_SCORES, VOTES = "answers", "mean scores", "votes"

# Type and least value of each column.
COLUMNS: dict[str, ColumnSpec] = {
    "attack": (str, None), "size": (float, 0), "index": (int, 0), "label": (int, 0),
    "distance": (float, 0), "prediction": (int, -1), "hits": (int, 0), "n": (int, 0),
}  # fmt: skip
SCHEMA = job_folder.schema_of(COLUMNS)
CHECK_COLUMNS: dict[str, ColumnSpec] = {
    "attack": (str, None), "index": (int, 0), "certified": (int, 0), "radius": (float, 0),
    "distance": (float, 0), "selected": (int, -1), "prediction": (int, -1), "k": (int, 0),
    "n": (int, 0), "p_lower": (float, 0), "contradiction": (bool, None),
}  # fmt: skip
CHECK_SCHEMA = job_folder.schema_of(CHECK_COLUMNS)


def read_job_record(table: pa.Table) -> dict[str, Any]:
    """Return the executed settings: seed, model, data and noise included."""
    return job_folder.read_job_record(table, KEY)


# --- can contradictions be chance? ------------------------------------------------------------


LEVEL = 0.001


@dataclass(frozen=True)
class Plausibility:
    """A test of whether a number of contradictions can be chance.

    allowed: the largest plausible count. p_value: probability of at least this count among
    ``inputs`` if every certificate's error is at most its alpha; ``error`` bounds the probability
    of each contradiction.
    """

    contradictions: int
    inputs: int
    error: float
    allowed: int
    p_value: float
    level: float
    method: str

    @property
    def plausible(self) -> bool:
        return self.p_value >= self.level


def assess_plausibility(
    contradictions: int, inputs: int, alpha: float, points: int
) -> Plausibility:
    """Return the comparison of a count of contradictions with what the certificates' error allows.

    inputs: number submitted to certification, certified or not. points: attacked points certified
    again per input. The noise of inputs is independent, so a binomial distribution bounds the
    count.
    """
    from scipy import stats  # a report without checks need not load it

    error = min(1.0, (1 + points) * alpha)
    counts = np.arange(inputs + 1)
    tails = stats.binom.sf(counts - 1, inputs, error)
    method = f"exact tail of Binomial({inputs}, {error:g})"
    allowed = int(counts[tails >= LEVEL].max())
    return Plausibility(
        contradictions, inputs, error, allowed, float(tails[contradictions]), LEVEL, method
    )


# --- the reader -------------------------------------------------------------------------------


VERDICT = "check.json"


@dataclass(frozen=True)
class OutcomeShares:
    """Fractions of the inputs with a correct answer, without an answer and with an incorrect one.

    Only an incorrect answer is a success of the attack: a randomized classifier that abstains has
    not decided between two classes, and its most likely one may be correct. So a model's accuracy
    under attack is at most correct + abstained, except for the error of each answer.
    """

    correct: float
    abstained: float
    wrong: float

    def percent(self) -> list[str]:
        return [format_percent(share) for share in (self.correct, self.abstained, self.wrong)]


@dataclass(frozen=True)
class AttackTable:
    """One evaluation under attack. Arrays of equal length, one entry per attack, size and input.

    noise_kind: where the attacked classifier is random; sigma: standard deviation of its input
    noise, or None. dimension: number of values in one input. model, data: hashes of both.
    predicts_by_vote: whether the classifier answered by votes of noise samples, not by their mean
    scores.
    """

    path: Path
    norm: str
    noise_kind: str
    sigma: float | None
    steps: int
    restarts: int
    samples: int
    n: int
    alpha: float
    model: str
    data: str
    dimension: int
    attack: np.ndarray
    size: np.ndarray
    index: np.ndarray
    label: np.ndarray
    prediction: np.ndarray
    predicts_by_vote: bool = True

    @property
    def name(self) -> str:
        return self.path.parent.name

    @property
    def attacks(self) -> list[str]:
        return [name for name in dict.fromkeys(self.attack.tolist()) if name != NONE]

    @property
    def sizes(self) -> list[float]:
        return sorted({float(size) for size in self.size[self.attack != NONE]})

    @property
    def inputs(self) -> int:
        return len(np.unique(self.index))

    def outcome_shares(self, attack: str, size: float) -> OutcomeShares:
        """Return the fractions of answers under one attack.

        Raises ValueError if the table does not have this attack and size.
        """
        here = (self.attack == attack) & (self.size == size)
        if not here.any():
            raise ValueError(f"{self.path}: no attack {attack} of size {size:g}")
        return self._outcome_shares(here)

    def worst(self, size: float) -> OutcomeShares:
        """Return the fractions under all attacks of a size: incorrect if any attack succeeds."""
        return self._outcome_shares((self.size == size) & (self.attack != NONE))

    def has(self, attack: str, size: float) -> bool:
        return bool(((self.attack == attack) & (self.size == size)).any())

    def _outcome_shares(self, here: np.ndarray) -> OutcomeShares:
        other = here & (self.prediction != self.label)
        wrong = set(self.index[other & (self.prediction != ABSTAIN)].tolist())
        abstained = set(self.index[other].tolist()) - wrong
        every = set(self.index[here].tolist())
        correct = every - wrong - abstained
        return OutcomeShares(*(len(some) / len(every) for some in (correct, abstained, wrong)))

    @property
    def description(self) -> str:
        """Return the attacked classifier in words."""
        words = self.location_class.describe_classifier(self.sigma)
        if not self.location_class.is_random:
            return words
        by = "" if self.predicts_by_vote else f" by their {MEAN_SCORES}"
        return f"{words}: {self.n:,} draws per answer{by}"

    @property
    def location_class(self) -> type[NoiseLocation]:
        return NOISE_LOCATIONS[self.noise_kind]

    @property
    def certificate_noise(self) -> tuple[str, float | None]:
        """Return the noise that a certificate of the same classifier has: its location, sigma."""
        return self.location_class.certified_kind, self.sigma


def read_attack(path: Path) -> AttackTable:
    """Return the table in one attacks.parquet. Raises UserError if it is damaged."""
    columns = job_folder.read_table(path, COLUMNS, KEY)
    record = read_job_record(columns)
    settings, noise = record["settings"], record["noise"]
    return AttackTable(
        path=path,
        noise_kind=noise["kind"],
        sigma=noise.get("sigma"),
        **{name: settings[name] for name in ("norm", "steps", "restarts", "samples", "n", "alpha")},
        model=record["model"],
        data=record["data"],
        dimension=math.prod(record["input_shape"]),
        predicts_by_vote=record.get(ANSWERS, VOTES) == VOTES,
        attack=np.array(columns["attack"].to_pylist()),
        **{name: columns[name].to_numpy() for name in ("size", "index", "label", "prediction")},
    )


def read_check(path: Path) -> dict[str, Any]:
    """Return one check.json and the hash of its model. Raises UserError if it is damaged."""
    table = job_folder.read_table(path.with_name(CHECK_TABLE), CHECK_COLUMNS, KEY)
    model = read_job_record(table)["model"]
    return {**read_json(path), "name": path.parent.name, "model": model, "path": path}


def attack_line(table: AttackTable) -> str:
    """Return the outcome at each size in one line."""
    parts = []
    for size in table.sizes:
        shares = table.worst(size)
        correct, abstained, incorrect = shares.percent()
        # A network without noise abstains if its logits are not finite.
        shown = table.location_class.is_random or shares.abstained
        undecided = f", {abstained} % abstained" if shown else ""
        at = format_exact(size)
        parts.append(f"{correct} % correct{undecided}, {incorrect} % incorrect at {at}")
    scope = f"{table.norm}, {', '.join(table.attacks)}, {table.inputs:,} inputs"
    return f"{'; '.join(parts)} ({scope}; {table.description})"


def check_line(check: dict[str, Any]) -> str:
    """Return a check of certificates in one line."""
    verdict = "plausible" if check["plausible"] else "IMPLAUSIBLE: these certificates do not hold"
    return (
        f"{check['contradictions']} of {check['certified']:,} certified inputs contradicted; "
        f"{check['inputs']:,} certificates at alpha = {check['alpha']:g} allow {check['allowed']} "
        f"(p = {check['p_value']:.3g}): {verdict}"
    )
