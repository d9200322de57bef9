"""Settings of attacks and of checks of certificates: everything that their results depend on."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from dpdist.attacks import table as reading
from dpdist.attacks.table import TABLE, AttackTable
from dpdist.certification.evaluation import EvaluatedModel, Evaluation
from dpdist.core.errors import UserError
from dpdist.core.fields import ATTACKS, NORMS, AttackName, Norm

if TYPE_CHECKING:
    from dpdist.attacks.job import AttackJob, CertificateCheckJob

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
class AttackSettings(Evaluation):
    """Accuracy of a model under attack.

    norm, sizes: "linf" or "l2", sizes in input units; None: ``DEFAULT_SIZES``. attacks: names out
    of "fgsm", "i-fgsm", "mim", "pgd". steps: of the last three. restarts, step_scale: of PGD
    (``evasion.attack``).
    sigma: attack the network smoothed by N(0, sigma^2) input noise; None: the model as it is,
    with noise of its own if it has some. draws: of the noise for each gradient (EOT).
    n, alpha: draws of each answer of a randomised classifier and the error of its two-sided test;
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
    draws: int = 16
    n: int = 1000
    alpha: float = 0.001
    labels: Labels = "true"
    start: int = 0
    every: int = 1
    max_inputs: int | None = None
    batch: int | None = None
    seed: str | None = None

    name: ClassVar[str] = "attack"
    file: ClassVar[str] = TABLE
    private: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._require(self.norm in NORMS, "norm", f"one of {', '.join(NORMS)}")
        sizes = DEFAULT_SIZES[self.norm] if self.sizes is None else self.sizes
        object.__setattr__(self, "sizes", tuple(sorted({float(size) for size in sizes})))
        object.__setattr__(self, "attacks", tuple(dict.fromkeys(self.attacks)))
        good_sizes = bool(self.sizes) and all(0 < size < math.inf for size in self.sizes or ())
        self._require(good_sizes, "sizes", "positive numbers")
        known = bool(self.attacks) and all(name in ATTACKS for name in self.attacks)
        self._require(known, "attacks", f"out of {', '.join(ATTACKS)}")
        for name in ("steps", "restarts", "draws", "n", "every"):
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

    @property
    def folder_name(self) -> str:
        """Return the default folder of the table."""
        parts: list[str] = [self.norm]
        if self.sigma is not None:
            parts.append(f"sigma-{self.sigma:g}")
        parts.append(f"steps-{self.steps}")
        if self.restarts > 1:
            parts.append(f"restarts-{self.restarts}")
        if self.every > 1:
            parts.append(f"every-{self.every}")
        if self.start:
            parts.append(f"from-{self.start}")
        if self.max_inputs is not None:
            parts.append(f"first-{self.max_inputs}")
        return "-".join(parts)

    def batch_size(self, numbers_per_input: int) -> int:
        """Inputs attacked at once."""
        if self.batch is not None:
            return self.batch
        return max(1, min(_BLOCK, _MAX_BLOCK_NUMBERS // (numbers_per_input * self.draws)))

    def indices(self, count: int) -> range:
        """Return the indices of the attacked inputs of a data set of ``count``."""
        chosen = range(self.start, count, self.every)
        return chosen if self.max_inputs is None else chosen[: self.max_inputs]

    def job_spec(self, subject: EvaluatedModel) -> AttackJob:
        from dpdist.attacks.job import AttackJob

        return AttackJob(subject.model_folder, subject.test_data, self, subject.trusted_factory)

    @classmethod
    def read(cls, path: Path) -> AttackTable:
        return reading.read_attack(path)

    @classmethod
    def summary_rows(cls, results: Sequence[AttackTable]) -> list[tuple[str, str]]:
        return [(f"under attack, {table.name}", reading.attack_line(table)) for table in results]


@dataclass(frozen=True)
class CheckSettings(Evaluation):
    """Certificates against attacks: no other class may be certified inside a certified radius.

    certificates: the table whose certificates are attacked, each within its radius. attack: how;
    ``start``, ``every`` and ``max_inputs`` choose rows of the table, and norm, sizes, sigma and the
    draws of an answer are the certificates' own. claim: a column of sizes in a table of expected
    scores ("as_printed_linf") that is attacked in place of its radius; at attacked points a valid
    certificate of the classifier that the column speaks of answers
    (`CertifiedSizes.predicts_by_vote`).
    """

    certificates: Path
    attack: AttackSettings
    claim: str | None = None

    name: ClassVar[str] = "check of certificates"
    file: ClassVar[str] = reading.VERDICT
    private: ClassVar[bool] = False

    @property
    def folder_name(self) -> str:
        return f"check-{self.certificates.parent.name}" + (f"-{self.claim}" if self.claim else "")

    def job_spec(self, subject: EvaluatedModel) -> CertificateCheckJob:
        """Raises UserError for certificates of another model, of other data, or in L1."""
        from dpdist.attacks.job import CertificateCheckJob

        return CertificateCheckJob(
            subject.model_folder, subject.test_data, self.certificates, self.attack, self.claim,
            subject.trusted_factory,
        )  # fmt: skip

    @classmethod
    def read(cls, path: Path) -> dict[str, Any]:
        return reading.read_check(path)

    @classmethod
    def summary_rows(cls, results: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
        return [
            (f"certificates attacked, {check['certificates']}", reading.check_line(check))
            for check in results
        ]
