"""The table of attacked predictions, its only reader, and the lines printed of it.

One row per attack, size and input; one canonical file. Checks of certificates are read here as
well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpdist.certification.certificate import ABSTAIN
from dpdist.cluster import job_folder
from dpdist.core.console import format_exact, format_percent
from dpdist.core.errors import UserError
from dpdist.core.fields import MAX_COUNT
from dpdist.core.files import ColumnSpec, check_shape, quoted, read_json
from dpdist.randomness.noise_location import NOISE_LOCATIONS, NoiseLocation

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
    "settings.restarts": int, "settings.draws": int, "settings.n": int, "settings.alpha": float,
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
SUBMITTED, INDEPENDENT = "submitted", "independent"


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
    independent: bool = True,
    level: float = LEVEL,
) -> Plausibility:
    """Compare a count of contradictions with what the certificates' own error allows.

    inputs: submitted to certification, certified or not. points: attacked points certified again
    per input. independent: noise of its own for each input: the count is then at most binomial,
    stochastically; with a shared noise bank errors can coincide and only Markov's inequality holds.
    """
    from scipy import stats  # which a report without checks does not wait for

    error = min(1.0, (1 + points) * alpha)
    counts = np.arange(inputs + 1)
    if independent:
        tails = stats.binom.sf(counts - 1, inputs, error)
        method = f"exact tail of Binomial({inputs}, {error:g})"
    else:
        tails = np.minimum(1.0, inputs * error / np.maximum(counts, 1))
        tails[0] = 1.0
        method = "Markov's inequality (one noise bank for all inputs)"
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

    Only the last refutes anything: a randomised classifier that abstains has not decided between
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
    draws: int
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
        draws=settings["draws"],
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
    """Return one check.json, with the hash of its model, after it was made again from the points
    that were tried.

    Raises:
        UserError: it or the table beside it is missing or damaged, or it is not the verdict on
            these points.
    """
    stated = read_json(path, _CHECK)
    made, model = _recompute_verdict(path.with_name(CHECK_TABLE), stated)
    for name, value in made.items():
        same = stated[name] == value
        if isinstance(value, float):
            same = math.isclose(stated[name], value, rel_tol=1e-9, abs_tol=1e-300)
        if not same:
            raise UserError(
                f"{path}: damaged: {name} must be {value}, as {CHECK_TABLE} beside it says, got "
                f"{quoted(stated[name])}; remove the folder and check again"
            )
    return {**stated, "name": path.parent.name, "model": model, "path": path}


def _recompute_verdict(path: Path, stated: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return what the table of a check says of its certificates, and the model's hash. stated: what
    tables of early versions do not say."""
    table = job_folder.read_table(path, CHECK_COLUMNS, KEY)
    said = {SUBMITTED: stated["inputs"], INDEPENDENT: True, **read_job_record(table)}
    shape = {"model": str, "again.alpha": float, SUBMITTED: int, INDEPENDENT: bool}
    check_shape(said, str(path), shape)
    index, certified, prediction = (
        table[name].to_numpy() for name in ("index", "certified", "prediction")
    )
    attacks = sorted(set(table["attack"].to_pylist()))
    inputs, against = np.unique(index), (prediction != ABSTAIN) & (prediction != certified)
    whole = len(attacks) * len(inputs) == table.num_rows
    if not whole or table["contradiction"].to_pylist() != against.tolist():
        raise UserError(f"{path}: damaged: its rows are not one for each attack and input")
    if not len(inputs) <= said[SUBMITTED] <= MAX_COUNT or not 0 < said["again"]["alpha"] < 1:
        raise UserError(f"{path}: damaged: no such number of certificates, or no such alpha")
    verdict = assess_plausibility(
        len(np.unique(index[against])),
        said[SUBMITTED],
        said["again"]["alpha"],
        len(attacks),
        independent=said[INDEPENDENT],
    )
    found = {
        "plausible": verdict.plausible, "contradictions": verdict.contradictions,
        "certified": len(inputs), "inputs": verdict.inputs, "alpha": said["again"]["alpha"],
        "allowed": verdict.allowed, "p_value": verdict.p_value,
    }  # fmt: skip
    return found, said["model"]


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
