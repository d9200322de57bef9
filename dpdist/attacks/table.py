"""Options of attacks, the table of attacked predictions, its only reader, and its printed lines.

One row per attack, size and input; one canonical file. Checks of certificates are read here as
well.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from dpdist.certification.table import ABSTAIN
from dpdist.cluster import job_folder
from dpdist.core.console import format_exact, format_percent
from dpdist.core.errors import UserError
from dpdist.core.fields import ATTACKS, NORMS, AttackName, Norm
from dpdist.core.files import ColumnSpec, check_shape, quoted, read_json
from dpdist.randomness.noise_location import NOISE_LOCATIONS, NoiseLocation

# --- the options ------------------------------------------------------------------------------


Labels = Literal["true", "predicted"]
DEFAULT_SIZES: dict[Norm, tuple[float, ...]] = {
    "linf": (0.025, 0.05, 0.1, 0.2),
    "l2": (0.25, 0.5, 1.0, 1.5),
}
# Settings that only some attacks have; all others are of every attack.
_OF_ATTACKS: dict[str, tuple[AttackName, ...]] = {
    "steps": ("i-fgsm", "mim", "pgd"), "restarts": ("pgd",), "step_scale": ("pgd",)
}  # fmt: skip
_BLOCK = 100
_MAX_BLOCK_NUMBERS = 16 * 2**20


@dataclass(frozen=True)
class AttackOptions:
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

    Raises UserError for a value that cannot be used.
    """

    norm: Norm = "linf"
    sizes: tuple[float, ...] | None = None
    attacks: tuple[AttackName, ...] = ATTACKS
    steps: int = 10
    restarts: int = 1
    step_scale: float = 2.5
    sigma: float | None = None
    samples: int = 16
    n: int = 1000
    alpha: float = 0.001
    labels: Labels = "true"
    start: int = 0
    every: int = 1
    max_inputs: int | None = None
    batch: int | None = None
    seed: str | None = None

    def __post_init__(self) -> None:
        self._require(self.norm in NORMS, "norm", f"one of {', '.join(NORMS)}")
        sizes = DEFAULT_SIZES[self.norm] if self.sizes is None else self.sizes
        object.__setattr__(self, "sizes", tuple(sorted({float(size) for size in sizes})))
        object.__setattr__(self, "attacks", tuple(dict.fromkeys(self.attacks)))
        good_sizes = bool(self.sizes) and all(0 < size < math.inf for size in self.sizes or ())
        self._require(good_sizes, "sizes", "positive numbers")
        known = bool(self.attacks) and all(name in ATTACKS for name in self.attacks)
        self._require(known, "attacks", f"out of {', '.join(ATTACKS)}")
        for name in ("steps", "restarts", "samples", "n", "every"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        for name in ("max_inputs", "batch"):
            self._require(getattr(self, name) is None or getattr(self, name) >= 1, name, ">= 1")
        self._require(self.start >= 0, "start", "at least 0")
        self._require(0 < self.step_scale < math.inf, "step_scale", "a positive number")
        sigma = self.sigma
        self._require(sigma is None or 0 < sigma < math.inf, "sigma", "a positive number")
        self._require(0 < self.alpha < 1, "alpha", "between 0 and 1")
        self._require(self.labels in ("true", "predicted"), "labels", "true or predicted")

    def _require(self, condition: bool, name: str, right: str) -> None:
        if not condition:
            raise UserError(f"attack.{name}: must be {right}, got {getattr(self, name)!r}")

    def refuse_unused(self, given: Collection[str]) -> None:
        """Raise UserError for a setting that was given and that none of the attacks has.

        An attack of a user's own may have any.
        """
        own = set(self.attacks) - set(get_args(AttackName))
        for name, attacks in _OF_ATTACKS.items():
            if name in given and not own and not set(attacks) & set(self.attacks):
                raise UserError(
                    f"attack.{name}: must be left out with attacks {', '.join(self.attacks)}, got "
                    f"{getattr(self, name)!r}; it is a setting of {', '.join(attacks)}"
                )

    @property
    def attack_sizes(self) -> list[tuple[str, float]]:
        """(attack, size) of everything asked for; ("none", 0) is the unattacked input."""
        return [
            ("none", 0.0),
            *((name, size) for size in self.sizes or () for name in self.attacks),
        ]

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings that a result depends on beside its own attack and size.

        More attacks and sizes may be added.
        """
        kept = asdict(self)
        for name in ("attacks", "sizes", "seed"):
            del kept[name]
        return kept

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

SCHEMA = pa.schema(
    [
        pa.field("attack", pa.string(), nullable=False),
        pa.field("size", pa.float64(), nullable=False),
        pa.field("index", pa.int64(), nullable=False),
        pa.field("label", pa.int64(), nullable=False),
        pa.field("distance", pa.float64(), nullable=False),
        pa.field("prediction", pa.int64(), nullable=False),
        pa.field("hits", pa.int64(), nullable=False),
        pa.field("n", pa.int64(), nullable=False),
    ]
)
# What every reader relies on: the kind and the least of each column, and what was executed.
COLUMNS: dict[str, ColumnSpec] = {
    "attack": (str, None), "size": (float, 0), "index": (int, 0), "label": (int, 0),
    "prediction": (int, -1),
}  # fmt: skip
_ABOUT = {
    "settings.norm": str, "settings.sigma": float | None, "settings.steps": int,
    "settings.restarts": int, "settings.samples": int, "settings.n": int, "settings.alpha": float,
    "noise.kind": str, "model": str, "data": str, "input_shape": list,
}  # fmt: skip
CHECK_SCHEMA = pa.schema(
    [
        pa.field("attack", pa.string(), nullable=False),
        pa.field("index", pa.int64(), nullable=False),
        pa.field("certified", pa.int64(), nullable=False),
        pa.field("radius", pa.float64(), nullable=False),
        pa.field("distance", pa.float64(), nullable=False),
        pa.field("selected", pa.int64(), nullable=False),
        pa.field("prediction", pa.int64(), nullable=False),
        pa.field("k", pa.int64(), nullable=False),
        pa.field("n", pa.int64(), nullable=False),
        pa.field("p_lower", pa.float64(), nullable=False),
        pa.field("contradiction", pa.bool_(), nullable=False),
    ]
)
CHECK_COLUMNS: dict[str, ColumnSpec] = {
    "attack": (str, None), "index": (int, 0), "certified": (int, 0), "radius": (float, 0),
    "prediction": (int, -1), "contradiction": (object, None),
}  # fmt: skip
# What the table of a check says of the certificates: how many were submitted to certification, and
# whether each had noise of its own.
SUBMITTED = "submitted"


def read_job_record(table: pa.Table) -> dict[str, Any]:
    """Return the executed settings: seed, model, data and noise included."""
    return job_folder.read_job_record(table, KEY)


def read(path: Path) -> pa.Table:
    """A table of attacks. Raises UserError when it is none, or not of its settings."""
    table = job_folder.read_table(path, COLUMNS, KEY)
    check_shape(read_job_record(table), str(path), _ABOUT)
    return table


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
    *,
    level: float = LEVEL,
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
    allowed = int(counts[tails >= level].max())
    return Plausibility(
        contradictions, inputs, error, allowed, float(tails[contradictions]), level, method
    )


# --- the reader -------------------------------------------------------------------------------


NONE = "none"
VERDICT = "check.json"
_CHECK = {
    "plausible": bool, "contradictions": int, "certified": int, "inputs": int, "alpha": float,
    "allowed": int, "p_value": float, "certificates": str,
}  # fmt: skip


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
    columns = read(path)
    said = read_job_record(columns)
    settings, noise = said["settings"], {"sigma": None, **said["noise"]}
    check_shape(noise, str(path), {"sigma": float | None})
    if noise["kind"] not in NOISE_LOCATIONS:
        raise UserError(f"{path}: damaged: no such place of noise: {quoted(noise['kind'])}")
    table = AttackTable(
        path=path,
        norm=settings["norm"],
        noise_kind=noise["kind"],
        sigma=noise["sigma"],
        steps=settings["steps"],
        restarts=settings["restarts"],
        samples=settings["samples"],
        n=settings["n"],
        alpha=settings["alpha"],
        model=said["model"],
        data=said["data"],
        dimension=input_dimension(said["input_shape"], path),
        predicts_by_vote=said.get(ANSWERS, VOTES) == VOTES,
        attack=np.array(columns["attack"].to_pylist()),
        **{name: columns[name].to_numpy() for name in ("size", "index", "label", "prediction")},
    )
    job_folder.check_labels(said, table.index, table.label, path)
    if not table.has(NONE, 0.0):
        raise UserError(f"{path}: damaged: has no answers without an attack")
    return table


def input_dimension(shape: list[Any], context: Path) -> int:
    """Return the number of values of an input of this shape. Raises UserError for no shape."""
    if not shape or not all(type(size) is int and size >= 1 for size in shape):
        raise UserError(f"{context}: damaged: input_shape must be sizes >= 1, got {quoted(shape)}")
    return math.prod(shape)


def read_check(path: Path) -> dict[str, Any]:
    """Return one check.json, with the hash of its model. Raises UserError where it is damaged."""
    stated, table = read_json(path, _CHECK), path.with_name(CHECK_TABLE)
    about = read_job_record(job_folder.read_table(table, CHECK_COLUMNS, KEY))
    model = check_shape(about, str(table), {"model": str})["model"]
    return {**stated, "name": path.parent.name, "model": model, "path": path}


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
    return f"{right} % right{undecided}, {wrong} % wrong"


def check_line(check: dict[str, Any]) -> str:
    """A check of certificates in one line."""
    verdict = "plausible" if check["plausible"] else "IMPLAUSIBLE: these certificates do not hold"
    return (
        f"{check['contradictions']} of {check['certified']:,} certified inputs contradicted; "
        f"{check['inputs']:,} certificates at alpha = {check['alpha']:g} allow {check['allowed']} "
        f"(p = {check['p_value']:.3g}): {verdict}"
    )
