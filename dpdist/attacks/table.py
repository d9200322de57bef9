"""Options of attacks, the table of attacked predictions, its only reader, and its printed lines.

One row per attack, size and input; one canonical file. Checks of certificates are read here as
well.
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
    CountOrZero,
    Norm,
    OneOrMore,
    Positive,
    Probability,
    Section,
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
Labels = Literal["true", "predicted"]
DEFAULT_SIZES: dict[Norm, tuple[float, ...]] = {
    "linf": (0.025, 0.05, 0.1, 0.2),
    "l2": (0.25, 0.5, 1.0, 1.5),
}
_BLOCK = 100
_MAX_BLOCK_NUMBERS = 16 * 2**20


class AttackOptions(Section):
    """Options of an attack: everything that its results depend on.

    norm, sizes: "linf" or "l2", sizes in input units; None: ``DEFAULT_SIZES``. attacks: names out
    of "fgsm", "i-fgsm", "mim", "pgd". steps: of the last three. restarts, step_scale: of PGD
    (``evasion.attack``).
    sigma: attack the network smoothed by N(0, sigma^2) input noise; None: the model as it is,
    with noise of its own if it has some. draws: of the noise for each gradient (EOT).
    n, alpha: draws of each answer of a randomized classifier and the error of its two-sided test;
    ABSTAIN where it does not decide.
    labels: what the attack leads away from: the "true" label, or the class "predicted" without an
    attack.
    start, every, max_inputs: as in a certification. batch: inputs attacked at once, which is also
    the canonical block. seed: None draws a secret one when the attack starts, and stores it.
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
    labels: Labels = "true"
    start: CountOrZero = 0
    every: Count = 1
    max_inputs: Count | None = None
    batch: Count | None = None
    seed: Text | None = None

    @property
    def attack_sizes(self) -> list[tuple[str, float]]:
        """(attack, size) of everything asked for; ("none", 0) is the unattacked input."""
        return [
            ("none", 0.0),
            *(
                (name, size)
                for size in sorted(set(self.sizes or DEFAULT_SIZES[self.norm]))
                for name in dict.fromkeys(self.attacks)
            ),
        ]

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings that a result depends on beside its own attack and size.

        More attacks and sizes may be added.
        """
        return self.model_dump(exclude={"attacks", "sizes", "seed"})

    def batch_size(self, numbers_per_input: int) -> int:
        """Inputs attacked at once."""
        if self.batch is not None:
            return self.batch
        return max(1, min(_BLOCK, _MAX_BLOCK_NUMBERS // (numbers_per_input * self.samples)))

    def indices(self, count: int) -> range:
        """Return the indices of the attacked inputs of a data set of ``count``."""
        chosen = range(self.start, count, self.every)
        return chosen if self.max_inputs is None else chosen[: self.max_inputs]


# --- the table --------------------------------------------------------------------------------


TABLE = "attacks.parquet"
CHECK_TABLE = "check.parquet"
KEY = b"dpdist.attacks"
# What a table says of how the attacked classifier answers; by votes where it says nothing.
ANSWERS, MEAN_SCORES, VOTES = "answers", "mean scores", "votes"

# The kind and the least of each column.
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
# What the table of a check says of the certificates: how many were submitted to certification, and
# whether each had noise of its own.
SUBMITTED = "submitted"


def read_job_record(table: pa.Table) -> dict[str, Any]:
    """Return the executed settings: seed, model, data and noise included."""
    return job_folder.read_job_record(table, KEY)


# --- can contradictions be chance? ------------------------------------------------------------


LEVEL = 0.001


@dataclass(frozen=True)
class Plausibility:
    """A test of whether so many contradictions can be chance.

    allowed: the largest count that is plausible. p_value: probability of so many or more among
    ``inputs`` if every certificate holds its alpha; ``error`` bounds the probability of each.
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
    contradictions: int,
    inputs: int,
    alpha: float,
    points: int,
) -> Plausibility:
    """Compare a count of contradictions with what the certificates' own error allows.

    inputs: submitted to certification, certified or not. points: attacked points certified again
    per input. Each input has noise of its own, so the count is at most binomial, stochastically.
    """
    from scipy import stats  # which a report without checks does not wait for

    error = min(1.0, (1 + points) * alpha)
    counts = np.arange(inputs + 1)
    tails = stats.binom.sf(counts - 1, inputs, error)
    method = f"exact tail of Binomial({inputs}, {error:g})"
    allowed = int(counts[tails >= LEVEL].max())
    return Plausibility(
        contradictions, inputs, error, allowed, float(tails[contradictions]), LEVEL, method
    )


# --- the reader -------------------------------------------------------------------------------


NONE = "none"
VERDICT = "check.json"


@dataclass(frozen=True)
class OutcomeShares:
    """Shares of the inputs that are answered rightly, not answered, answered with another class.

    Together they are 1.

    Only the last refutes anything: a randomized classifier that abstains has not decided between
    two classes, and its most likely one may be the right one. So what a model withstands is at most
    right + abstained, but for the error of each answer.
    """

    correct: float
    abstained: float
    wrong: float

    def percent(self) -> list[str]:
        return [format_percent(share) for share in (self.correct, self.abstained, self.wrong)]


@dataclass(frozen=True)
class AttackTable:
    """One evaluation under attack. Arrays of equal length, one entry per attack, size and input.

    noise_kind: the kind of the place where the attacked classifier is random; sigma: of its input
    noise, or None. dimension: coordinates of one input. model, data: what names both.
    predicts_by_vote: whether the classifier answered by votes of draws, or by their mean scores.
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
        """Return the shares of answers under one attack.

        Raises ValueError where the attack was not made.
        """
        here = (self.attack == attack) & (self.size == size)
        if not here.any():
            raise ValueError(f"{self.path}: no attack {attack} of size {size:g}")
        return self._outcome_shares(here)

    def worst(self, size: float) -> OutcomeShares:
        """Under all attacks of this size: right under each, wrong under one at least."""
        return self._outcome_shares((self.size == size) & (self.attack != NONE))

    def has(self, attack: str, size: float) -> bool:
        return bool(((self.attack == attack) & (self.size == size)).any())

    def _outcome_shares(self, here: np.ndarray) -> OutcomeShares:
        other = here & (self.prediction != self.label)
        wrong = set(self.index[other & (self.prediction != ABSTAIN)].tolist())
        abstained = set(self.index[other].tolist()) - wrong
        every = set(self.index[here].tolist())
        right = every - wrong - abstained
        return OutcomeShares(*(len(some) / len(every) for some in (right, abstained, wrong)))

    @property
    def description(self) -> str:
        """Return the attacked classifier in words."""
        words = self.location_class.describe_classifier(self.sigma)
        by = "" if self.predicts_by_vote else f" by their {MEAN_SCORES}"
        return (
            f"{words}: {self.n:,} draws per answer{by}" if self.location_class.is_random else words
        )

    @property
    def location_class(self) -> type[NoiseLocation]:
        return NOISE_LOCATIONS[self.noise_kind]

    @property
    def certificate_noise(self) -> tuple[str, float | None]:
        """Return the noise that a certificate of the same classifier states."""
        return self.location_class.certified_kind, self.sigma


def read_attack(path: Path) -> AttackTable:
    """One attacks.parquet. Raises UserError when it is none, or not of its settings."""
    columns = job_folder.read_table(path, COLUMNS, KEY)
    said = read_job_record(columns)
    settings, noise = said["settings"], said["noise"]
    table = AttackTable(
        path=path,
        noise_kind=noise["kind"],
        sigma=noise.get("sigma"),
        **{name: settings[name] for name in ("norm", "steps", "restarts", "samples", "n", "alpha")},
        model=said["model"],
        data=said["data"],
        dimension=math.prod(said["input_shape"]),
        predicts_by_vote=said.get(ANSWERS, VOTES) == VOTES,
        attack=np.array(columns["attack"].to_pylist()),
        **{name: columns[name].to_numpy() for name in ("size", "index", "label", "prediction")},
    )
    return table


def read_check(path: Path) -> dict[str, Any]:
    """Return one check.json, with the hash of its model. Raises UserError where it is damaged."""
    table = job_folder.read_table(path.with_name(CHECK_TABLE), CHECK_COLUMNS, KEY)
    model = read_job_record(table)["model"]
    return {**read_json(path), "name": path.parent.name, "model": model, "path": path}


def attack_line(table: AttackTable) -> str:
    """Return the outcome at each size in one line."""
    at = "; ".join(
        f"{_worst_case_text(table, size)} at {format_exact(size)}" for size in table.sizes
    )
    scope = f"{table.norm}, {', '.join(table.attacks)}, {table.inputs:,} inputs"
    return f"{at} ({scope}; {table.description})"


def _worst_case_text(table: AttackTable, size: float) -> str:
    right, abstained, wrong = table.worst(size).percent()
    undecided = ""
    # the network itself: no finite logits
    if table.location_class.is_random or table.worst(size).abstained:
        undecided = f", {abstained} % abstained"
    return f"{right} % correct{undecided}, {wrong} % incorrect"


def check_line(check: dict[str, Any]) -> str:
    """A check of certificates in one line."""
    verdict = "plausible" if check["plausible"] else "IMPLAUSIBLE: these certificates do not hold"
    return (
        f"{check['contradictions']} of {check['certified']:,} certified inputs contradicted; "
        f"{check['inputs']:,} certificates at alpha = {check['alpha']:g} allow {check['allowed']} "
        f"(p = {check['p_value']:.3g}): {verdict}"
    )
