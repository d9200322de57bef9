"""The base class of certificates, its verdict, and two Gaussian noises certified together.

The settings of a certificate are the recipe's ``certify`` section. A subclass describes one kind:
how work on an input is cut (`units`), done (`work`) and judged (`verdict`, `row`), where the
randomness is (`place`), and what its table states (`table_schema`, `columns`, `sizes`, `rebound`,
`lines`). Reading a description needs no torch. ``dpdist.certification.registry`` lists the
classes.

Noise on the input and behind the first layer, in one pass: the network is rest(W x + W e + n), e ~
N(0, s^2 I), n ~ N(0, r^2 diag(Kr)), and all that is drawn is Gaussian before the first thing that
is not linear. A shift d of the input moves the mean of the rest's input by W d, under the
covariance S = s^2 W W^T + r^2 diag(Kr), and the rest is post-processing: it is randomised
smoothing at Mahalanobis length (d^T W^T S^-1 W d)^(1/2). With Delta the L2 norm of (Kr)^-1/2 W,

    d^T W^T S^-1 W d <= |d|^2 / (s^2 + (r / Delta)^2),

with equality for some d, so both noises certify what noise of s^2 + (r / Delta)^2 on the input
alone would: sizes add in quadrature. Proof in docs/how-to/certification.md. Where the second noise
is not Gaussian, or not behind an affine first layer, the larger of the two sizes holds and no
more; for a product of two passes with one noise each, the harmonic sum. kappa + phi, as DPAL's
Proposition 1 has it, holds for neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import BeforeValidator, Field, ValidationError

from dpdist.certification.noise import NOISES, Gaussian, Noise
from dpdist.core.errors import UserError
from dpdist.core.fields import (
    Count,
    CountOrZero,
    PositiveOrZero,
    Probability,
    Section,
    Text,
    key_error,
)
from dpdist.core.files import check_shape
from dpdist.randomness import keys
from dpdist.randomness.keys import Generator

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn

    from dpdist.core.files import ColumnSpec
    from dpdist.randomness.noise_location import NoiseLocation


# --- the verdict ------------------------------------------------------------------------------


ABSTAIN = -1


@dataclass(frozen=True)
class Verdict:
    """The certificate of one input. prediction is -1 and radius 0 when nothing is certified.

    k of n draws returned ``selected``. looks: how many times a decision could be made.
    target: the radius that a test decided on (the smallest one when it failed). histogram: counts
    of all classes, at fixed n. p_upper: of a bounded runner-up. hits: counts at each look.
    """

    prediction: int
    selected: int
    k: int
    n: int
    p_lower: float
    radius: float
    looks: int = 1
    target: float | None = None
    histogram: tuple[int, ...] | None = None
    p_upper: float | None = None
    hits: tuple[int, ...] | None = None


# --- two noises certified together ------------------------------------------------------------


_DOWN = 1 - 1e-12  # rounding of the quotient, the squares and the root


@dataclass(frozen=True)
class CombinedNoise:
    """sigma: s, on the input. hidden_std: r, root mean square behind the first layer. sensitivity:
    a bound of Delta, that layer's L2 norm over sqrt(Kr)."""

    sigma: float
    hidden_std: float
    sensitivity: float

    @property
    def hidden_as_input_sigma(self) -> float:
        """The noise on the input that the hidden noise alone is worth: r / Delta."""
        return self.hidden_std / self.sensitivity * _DOWN

    @property
    def combined_sigma(self) -> float:
        """The noise on the input that both together are worth; never rounded up."""
        return math.hypot(self.sigma, self.hidden_as_input_sigma) * _DOWN

    @property
    def sigma_as_printed(self) -> float:
        """Return the size that kappa + phi takes the noises for.

        It does not hold; for comparison only.
        """
        return self.sigma + self.hidden_as_input_sigma

    @property
    def job_record(self) -> dict[str, Any]:
        """Return the table's entries beside sigma, as JSON."""
        return {"hidden": self.hidden_std, "sensitivity": {"l2": self.sensitivity}}


def combined_noise_of_model(
    location: NoiseLocation, model: nn.Module, input_shape: tuple[int, ...], sigma: float
) -> CombinedNoise | None:
    """Return the quadrature of a model with noise at ``location``, input noise sigma included.

    None where the input noise is all that certifies its inputs.
    """
    noise = location.first_affine_noise(model, input_shape)
    if noise is None:
        return None
    from dpdist.certification.operator_norms import l2_to_l2
    from dpdist.models import require_split

    layer = require_split(model).affine_layer(input_shape)
    return CombinedNoise(
        sigma, noise.rms_std, l2_to_l2(layer, input_shape, noise.relative_variances)
    )


def combined_noise_of_table(table: pa.Table) -> CombinedNoise | None:
    """Return the quadrature that a table of votes states.

    None where its input noise alone certifies.
    """
    from dpdist.certification.table import read_job_record

    return read_combined_noise(read_job_record(table), table["sigma"][0].as_py())


def equivalent_input_noise(table: pa.Table) -> Noise:
    """The noise on the input that all noise of a table of votes is worth."""
    both = combined_noise_of_table(table)
    if both is not None:
        return Gaussian(both.combined_sigma)
    return NOISES[table["noise"][0].as_py()](table["sigma"][0].as_py())


def read_combined_noise(job_record: Mapping[str, Any], sigma: float) -> CombinedNoise | None:
    """Return the quadrature that a table's description states, at its sigma.

    Raises UserError where it is damaged.
    """
    if "hidden" not in job_record:
        return None
    where, shape = "the table's description", {"hidden": float, "sensitivity.l2": float}
    found = check_shape(dict(job_record), where, shape)
    hidden, sensitivity = float(found["hidden"]), float(found["sensitivity"]["l2"])
    if not (0 < hidden < math.inf and 0 < sensitivity < math.inf):
        raise UserError(f"{where}: damaged: hidden and sensitivity.l2 must be > 0")
    return CombinedNoise(sigma, hidden, sensitivity)


# --- the base class ---------------------------------------------------------------------------


# How a network can be executed (`dpdist.certification.inference.FORMS`).
FormName = Literal["eager", "channels-last", "frozen", "compiled", "bf16"]
PartialCounts = dict[str, Any]  # JSON: what the first unit says once, then counts
_ONCE = ("selected",)
_NO_SPENDING = "none"
_UNDEFINED = "undefined"  # draws without a class, said where there are any
_NEAR = 1e-9  # what other machines may round otherwise

_MAX_BATCH_NUMBERS = 16 * 2**20  # larger inputs get smaller batches: one stays within 64 MiB


def _text(value: Any) -> Any:
    return value if value is None else str(value)


@dataclass(frozen=True)
class CertifiedSizes:
    """The sizes that one certificate of a table states of every input.

    name, norm: of the certificate ("exact", "linf"). title: what it is, in words. prediction: int64
    (N,), the certified class, -1 where none is. size: float64 (N,), input units. line_style: how
    pictures draw it, None: not. short_title: its line in a summary. is_valid: whether it is valid
    at all. votes: whether it speaks of the class that most draws say, or of the class of the
    largest mean score.
    """

    name: str
    norm: str
    title: str
    prediction: np.ndarray
    size: np.ndarray
    line_style: str | None = None
    short_title: str = ""
    is_valid: bool = True
    predicts_by_vote: bool = True

    def size_if_correct(self, labels: np.ndarray) -> np.ndarray:
        """The size where the answer is the label, -1 elsewhere: float64 (N,)."""
        return np.where((self.prediction == labels) & (self.prediction != ABSTAIN), self.size, -1.0)


class ClassCounter(Protocol):
    """Counts classes over one canonical block of noisy copies of an input."""

    def histogram(
        self, x: Tensor, index: int, stage: str, block: int, rows: int, draws: int
    ) -> np.ndarray:
        """int64 (classes,). A draw whose logits are not finite is in none of the counts, which then
        add up to less than ``draws``."""
        ...


class NoiseSampler(Protocol):
    """A sampler of the place where a model is random.

    sigma: of the noise, which names it in the keys of random units. assignment, spec: what all
    workers share, and the executed classifier (`dpdist.certification.worker`, `classifier`).
    """

    @property
    def sigma(self) -> float: ...

    @property
    def identity(self) -> dict[str, Any]:
        """Return the properties that results depend on beside settings and model, as JSON."""
        ...

    def with_pinned(self, job_record: dict[str, Any]) -> NoiseSampler:
        """Return the place with the values pinned when the certification began."""
        ...

    def check_batch(self, assignment: Any, *, copies: bool = False) -> tuple[nn.Module, Tensor]:
        """The executed network, and a batch for it under a random unit used for nothing else.

        copies: of one input, not of the check inputs in turn.
        """
        ...

    def build_counter(self, assignment: Any, spec: Any) -> tuple[ClassCounter, Tensor]:
        """Return the counter on the executed classifier, and its classes of the check batch."""
        ...


class Certificate(Section):
    """One certification of a data set: what its results depend on, and how it is made.

    n0, n: draws for choosing the class, and for estimating (sequential tests: at most). alpha:
    error probability of each input's certificate. radii: decided ones, or to be shown. start,
    every, max_inputs: the first input, each how-manieth from there, at most how many. batch: rows
    of the executed batch, which is also the canonical block of draws. seed: None draws a secret one
    when the certification starts, and stores it with the results. form: inference form of the
    executed classifier ("frozen", "compiled", "channels-last", "eager", "bf16"); None chooses by a
    probe. generator: of the noise; None: "aes" on CPUs, "philox" on GPUs.
    """

    n0: Count = 100
    n: Count = 100_000
    alpha: Probability = 0.001
    radii: Annotated[tuple[PositiveOrZero, ...], Field(max_length=100)] = Field(
        default=(), description="decided radii in target mode; shown ones otherwise"
    )
    start: CountOrZero = 0
    every: Count = Field(default=1, description="certify every how-manieth test input")
    max_inputs: Count | None = None
    batch: Count | None = None
    seed: Annotated[Text | None, BeforeValidator(_text)] = None
    form: FormName | None = None
    generator: Generator | None = Field(
        default=None, description="of the noise; default: aes on CPUs, philox on GPUs"
    )

    if TYPE_CHECKING:  # settings of some, constants of others

        @property
        def sigma(self) -> float | None:
            """Return sigma of the noise on the input; None where there is none."""

        @property
        def noise(self) -> str:
            """Its name in the keys of random units."""

        @property
        def noise_bank(self) -> bool:
            """One noise stream for all inputs."""

    spending: ClassVar[str] = _NO_SPENDING  # how the error is spent over the looks
    # settings on which no result depends
    result_free_fields: ClassVar[frozenset[str]] = frozenset()
    default_batch: ClassVar[int] = 500
    max_device_batch: ClassVar[int] = 4096  # at most, where it is chosen by a GPU's memory
    is_vote_based: ClassVar[bool] = True  # made of counts of votes, as a band over the whole set is
    # "with sigma, by ...": why a key of another certificate is refused
    wrong_key_hint: ClassVar[str]
    # Columns of its table of which other draws would say something else: the publisher's own word
    # until draws are made again. All others are computed from these and from the settings.
    sampled_columns: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def accepts_section(cls, section: Mapping[str, Any]) -> bool:
        """Return whether a section of a recipe asks for this certificate."""
        raise NotImplementedError

    @classmethod
    def mode_name(cls) -> str:
        """Return the name of the mode in tables and folders."""
        result: str = cls.model_fields["mode"].default if "mode" in cls.model_fields else cls.mode  # type: ignore[attr-defined]
        return result

    # ---- where the randomness is, and what is drawn

    def build_sampler(self, model: nn.Module, input_shape: tuple[int, ...]) -> NoiseSampler:
        """Return the place where the model is random under this certificate.

        Raises UserError where there is none.
        """
        raise NotImplementedError

    def num_units(self, batch: int) -> int:
        """Return the number of parts into which the work on one input can be cut."""
        return -(-self.n // batch)

    def sample(
        self, counter: Any, x: Tensor, index: int, low: int, high: int, batch: int, sampler: Any
    ) -> PartialCounts:
        """Units low..high-1 of one input: a pure function of its random units, as JSON."""
        raise NotImplementedError

    def decide(self, partials: Sequence[PartialCounts], sampler: Any) -> Any:
        """The certificate, from partial results that together cover every unit once."""
        raise NotImplementedError

    def row(self, index: int, label: int, verdict: Any, sampler: Any) -> dict[str, Any]:
        """The input's row of the table."""
        raise NotImplementedError

    def predict(self, counter: Any, x: Tensor, index: int, batch: int, sampler: Any) -> int:
        """The class alone, -1 where it is undecided; as sure as a certificate."""
        whole = self.sample(counter, x, index, 0, self.num_units(batch), batch, sampler)
        result: int = self.decide([whole], sampler).prediction
        return result

    def certify_other_class(
        self, counter: Any, x: Tensor, index: int, excluded_class: int, batch: int, sampler: Any
    ) -> Any:
        """A verdict that may stop where no class but ``excluded_class`` can be certified."""
        whole = self.sample(counter, x, index, 0, self.num_units(batch), batch, sampler)
        return self.decide([whole], sampler)

    def verdict_for_classifier(self, predicts_by_vote: bool, verdict: Any, sampler: Any) -> Any:
        """Return what the draws of a verdict certify of one classifier.

        predicts_by_vote: whether it is the classifier by votes, or that by mean scores.
        """
        return verdict

    # ---- its table

    @classmethod
    def table_schema(cls) -> pa.Schema:
        """Return the schema of its table."""
        from dpdist.certification.table import SCHEMA

        return SCHEMA

    @classmethod
    def extra_columns(cls) -> Mapping[str, ColumnSpec]:
        """Return the columns that readers rely on beside those of every table."""
        return {}

    @classmethod
    def constant_columns(cls, table: pa.Table, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return what every row of a table must say beside its counts, by column.

        settings: those that the table states.
        """
        if cls.spending == _NO_SPENDING:  # looked at once, when all was counted
            return {"spending": cls.spending, "looks": 1, "target": None}
        return {"spending": cls.spending, "histogram": None}

    @classmethod
    def consistent_counts(cls, table: pa.Table) -> np.ndarray:
        """Return whether each row holds counts of so many draws as it states: bool (N,)."""
        raise NotImplementedError

    @classmethod
    def recompute_columns(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        """Return what the counts of a table certify at an error, by column, (N,) each."""
        raise NotImplementedError

    @classmethod
    def check_table(cls, table: pa.Table, context: str) -> None:
        """Raise UserError unless every row is what its counts certify at the table's error, and
        says beside them what its settings say."""
        from dpdist.certification.table import read_job_record

        settings = read_job_record(table).get("settings", {})
        for name, value in cls.constant_columns(table, settings).items():
            for index, said in zip(
                table["index"].to_pylist(), table[name].to_pylist(), strict=True
            ):
                if said != value:
                    raise UserError(
                        f"{context}: damaged: {name} of input {index} must be {value!r}, as its "
                        f"settings say, got {said!r}"
                    )
        sound = cls.consistent_counts(table)
        if sound.all():
            for name, made in cls.recompute_columns(table, table["alpha"][0].as_py()).items():
                near = abs(table[name].to_numpy() - made) <= _NEAR * (1 + abs(made))
                sound &= near & np.isfinite(made)  # beside infinity all numbers are near
        if not sound.all():
            raise UserError(
                f"{context}: damaged: what it says of input {table['index'][int(sound.argmin())]} "
                "does not follow from its counts"
            )

    @classmethod
    def read_sizes(cls, table: pa.Table) -> tuple[CertifiedSizes, ...]:
        """All that a table states: the one reader of its certificates."""
        raise NotImplementedError

    @classmethod
    def table_predicts_by_vote(cls, table: pa.Table) -> bool:
        """Return whether a table's radii are of the classifier by votes of draws, or of that by
        their mean scores."""
        return cls.is_vote_based

    @classmethod
    def sizes_in_norm(cls, table: pa.Table, norm: str, dimension: int) -> list[CertifiedSizes]:
        """Return the certified sizes of a table in that norm, for inputs of so many numbers."""
        return [sizes for sizes in cls.read_sizes(table) if sizes.norm == norm]

    @classmethod
    def achievable_radius(cls, table: pa.Table, label_probability: np.ndarray) -> np.ndarray:
        """Return the radius that votes could certify with any number of draws, -1 where none.

        It is computed from probabilities of the labels, (N,).
        """

        return np.where(
            label_probability > 0.5, equivalent_input_noise(table).radius(label_probability), -1.0
        )

    @classmethod
    def recertify(
        cls, table: pa.Table, alpha: float
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Its rows at another error, and what is noted beside ``rebound_alpha``."""
        raise NotImplementedError

    @classmethod
    def summary_rows(
        cls, certificates: CertificateTable, radii: Sequence[float]
    ) -> list[tuple[str, str]]:
        """Name and value of what a summary of the table shows at these sizes."""
        raise NotImplementedError

    @classmethod
    def describe(cls, certificates: CertificateTable) -> str:
        """A table of it in the words of a reader: the noise, the draws, what is decided."""
        return certificates.title

    @classmethod
    def comparison_key(cls, certificates: CertificateTable) -> dict[str, Any]:
        """Return its own terms of the certificates: see `CertificateTable.comparison_key`."""
        raise NotImplementedError

    @classmethod
    def attack_noise(cls, noise: str, sigma: float) -> tuple[str, float | None] | None:
        """The place and sigma of an attack on the same classifier; None where there is none."""
        raise NotImplementedError

    @classmethod
    def recreate(
        cls, certificates: CertificateTable, norm: str, batch: int
    ) -> tuple[Certificate, NoiseSampler]:
        """Return certificate and place for an attacked point, in the manner of the table's."""
        raise NotImplementedError

    # ---- the job

    @property
    def identity(self) -> dict[str, Any]:
        """All that results depend on, as JSON."""
        unsaid = {"seed"} | ({"generator"} if self.generator is None else set())
        return {**self.model_dump(mode="json", exclude=unsaid), "mode": self.mode_name()}

    def with_seed(self, seed: str) -> Certificate:
        """The same with noise of its own, for inputs that come one by one."""
        return self.model_copy(update={"seed": seed, "generator": None})

    @property
    def folder_name(self) -> str:
        """Return the default folder of its table.

        The name tells two certifications of one model apart.
        """
        parts = self.name_parts()
        if self.generator is not None:
            parts.append(self.generator)
        if self.every > 1:
            parts.append(f"every-{self.every}")
        if self.start:
            parts.append(f"from-{self.start}")
        return "-".join(parts)

    def name_parts(self) -> list[str]:
        """The part of the folder's name that is of this certificate."""
        raise NotImplementedError

    def executed_batch_size(self, numbers: int) -> int:
        """Rows of the executed batch, for so many numbers in each row."""
        if self.batch is not None:
            return min(self.batch, self.n)
        return max(1, min(self.default_batch, self.n, _MAX_BATCH_NUMBERS // numbers))

    def indices(self, count: int) -> range:
        """Return the indices of the certified inputs of a data set of ``count``."""
        chosen = range(self.start, count, self.every)
        return chosen if self.max_inputs is None else chosen[: self.max_inputs]


@dataclass(frozen=True)
class CertificateTable:
    """One finished certification. Arrays of equal length, one entry for each certified input.

    about: what was executed. alpha: the error of each certificate, of every row.
    """

    path: Path
    certificate_class: type[Certificate]
    job_record: dict[str, Any]
    table: pa.Table
    sigma: float
    mode: str
    noise: str
    norm: str
    n0: int
    n: int
    alpha: float
    index: np.ndarray
    label: np.ndarray
    prediction: np.ndarray
    radius: np.ndarray

    @property
    def name(self) -> str:
        """The folder's name: sigma, mode and what else tells it apart."""
        return self.path.parent.name

    @property
    def title(self) -> str:
        """Return the settings that tell it apart, wherever it lies; else the folder's name."""
        settings = self.job_record.get("settings", {})
        given = {
            key: settings[key]
            for key in settings.keys() & self.certificate_class.model_fields.keys()
        }
        try:
            return self.certificate_class.model_validate(given).folder_name
        except ValidationError:  # written by another version
            return self.name

    @property
    def description(self) -> str:
        """Return the kind of certification, as people say it."""
        return self.certificate_class.describe(self)

    @property
    def correct(self) -> np.ndarray:
        """Whether the certified answer is the label; an abstention is not."""
        result: np.ndarray = self.prediction == self.label
        return result

    @cached_property
    def sizes(self) -> tuple[CertifiedSizes, ...]:
        """All that the table states of its inputs."""
        return self.certificate_class.read_sizes(self.table)

    @property
    def predicts_by_vote(self) -> bool:
        """Whether its radii are of the classifier by votes of draws, or by their mean scores."""
        return self.certificate_class.table_predicts_by_vote(self.table)

    @property
    def attack_noise(self) -> tuple[str, float | None] | None:
        """The place and sigma of an attack on the same classifier; None where there is none."""
        return self.certificate_class.attack_noise(self.noise, self.sigma)

    def select_sizes(self, certificate: str, norm: str | None) -> CertifiedSizes:
        """Return the sizes of one of its certificates. Raises UserError where it has none such."""
        for sizes in self.sizes:
            if (sizes.name, sizes.norm) == (certificate, norm):
                return sizes
        there = ", ".join(f"{sizes.name}_{sizes.norm}" for sizes in self.sizes)
        raise UserError(
            f"{self.path}: no column {certificate}_{norm} in the table; there are {there}"
        )

    @property
    def comparison_key(self) -> dict[str, Any]:
        """Return the terms of its certificates: sizes on other terms are not compared with these.

        The scale of noise of a model's own, which its scores are certified under, is none of them.
        """
        return {
            "mode": self.mode, "noise": self.noise, "alpha": self.alpha, "n0": self.n0, "n": self.n,
            "noise_bank": bool(self.job_record.get("settings", {}).get("noise_bank")),
            **self.certificate_class.comparison_key(self),
        }  # fmt: skip

    def size_if_correct(
        self, certificate: str | None = None, norm: str | None = None
    ) -> np.ndarray:
        """Certified size of every input with the right answer, -1 of all others: float64 (N,).

        certificate, norm: one of several that the table has; None: the table's radius. Raises as
        `select_sizes`.
        """
        if certificate is None:
            return np.where(self.correct & (self.prediction != ABSTAIN), self.radius, -1.0)
        return self.select_sizes(certificate, norm).size_if_correct(self.label)

    def certified_accuracy(
        self, size: float, certificate: str | None = None, norm: str | None = None
    ) -> float:
        """Share of all inputs that are right and certified at this size at least."""
        return float(np.mean(self.size_if_correct(certificate, norm) >= size))

    def to_arrow(self) -> pa.Table:
        """Return all columns, one row for each certified input, with what was executed as metadata.

        docs/how-to/certification.md names the columns.
        """
        return self.table

    def to_pandas(self) -> Any:
        """Return all columns as a pandas DataFrame. Raises UserError without pandas."""
        try:
            return self.table.to_pandas()
        except ImportError as error:
            raise UserError(f"to_pandas: needs pandas ({error}): pip install pandas") from None

    @property
    def abstention_rate(self) -> float:
        return float(np.mean(self.prediction == ABSTAIN))

    @property
    def average_radius(self) -> float:
        """Mean over all inputs of radius * 1[correct] (Zhai et al. 2020)."""
        return float(np.mean(np.maximum(self.size_if_correct(), 0.0)))

    @property
    def radii(self) -> tuple[float, ...]:
        """The radii that were asked for."""
        radii = self.job_record.get("settings", {}).get("radii", ())
        if not isinstance(radii, list | tuple) or not all(
            type(radius) in (int, float) and radius >= 0 for radius in radii
        ):
            raise UserError(f"{self.path}: damaged: settings.radii must be numbers >= 0")
        return tuple(radii)

    @property
    def reported_radii(self) -> tuple[float, ...]:
        """Return the radii at which anything is printed of the table, ascending.

        0, and those that were asked for; where none were, multiples of sigma. Bounds that hold at
        all of them together share one error, so every place prints these.
        """
        usual = tuple(round(self.sigma * times, 4) for times in (0.5, 1.0, 2.0))
        return tuple(sorted({0.0, *(self.radii or usual)}))


def select_class(counter: ClassCounter, n0: int, x: Tensor, index: int) -> int:
    """The class whose probability will be estimated, from n0 draws used for nothing else."""
    return int(counter.histogram(x, index, keys.SELECT, 0, n0, n0).argmax())


def sample_under_noise(
    counter: ClassCounter, x: Tensor, index: int, block: int, batch: int, n: int
) -> np.ndarray:
    """Histogram of one canonical block of the n draws; the last one may be counted in part."""
    draws = min(batch, n - block * batch)
    return counter.histogram(x, index, keys.ESTIMATE, block, batch, draws)


def selected_class(partials: Sequence[PartialCounts]) -> int:
    """The class that the first unit chose."""
    result: int = next(partial["selected"] for partial in partials if "selected" in partial)
    return result


def counts_to_json(histogram: np.ndarray, draws: int) -> PartialCounts:
    """Return the counts of so many draws, as JSON.

    histogram: int (classes,). A draw whose logits are not finite is in none of its counts; how many
    there are of these is said beside it, where there are any.
    """
    undefined = draws - int(histogram.sum())
    return {"histogram": histogram.tolist()} | ({_UNDEFINED: [undefined]} if undefined else {})


def total_counts(partials: Sequence[PartialCounts], name: str, n: int | None = None) -> np.ndarray:
    """The sum of a count over all units. Raises ValueError unless it is of n draws, those without
    a class included."""
    total: np.ndarray = np.sum([partial[name] for partial in partials], axis=0)
    if n is not None:
        draws = int(total.sum()) + sum(partial.get(_UNDEFINED, [0])[0] for partial in partials)
        if draws != n:
            raise ValueError(f"{draws} draws counted instead of {n}")
    return total


def list_columns(table: pa.Table, *names: str) -> list[np.ndarray] | None:
    """Return columns that hold a list of whole numbers for each class: int64 (N, K) each; None
    where they are of unequal lengths, or empty."""
    found = [table[name].to_pylist() for name in names]
    sizes = {len(each or ()) for column in found for each in column}
    if len(sizes) != 1 or not max(sizes):
        return None
    return [np.asarray(column, dtype=np.int64) for column in found]


def consistent_histograms(table: pa.Table, histogram: np.ndarray) -> np.ndarray:
    """Return whether each row's histogram (N, K) is of its n draws at most (some may have had no
    class), all of its cap, and has k for its selected class: bool (N,)."""
    names = ("selected", "k", "n", "cap", "looks")
    selected, k, n, cap, looks = (table[name].to_numpy() for name in names)
    inside = (selected >= 0) & (selected < histogram.shape[1])
    hits = histogram[np.arange(len(k)), np.where(inside, selected, 0)]
    counts = (histogram >= 0).all(1) & (histogram.sum(1) <= n)
    valid: np.ndarray = inside & counts & (hits == k) & (n == cap) & (looks == 1)
    return valid


def merge_partials(first: PartialCounts, second: PartialCounts) -> PartialCounts:
    """The partial result of two intervals of units: counts and integer sums add up exactly."""
    if _UNDEFINED in first or _UNDEFINED in second:
        first, second = {_UNDEFINED: [0]} | first, {_UNDEFINED: [0]} | second
    both: PartialCounts = {
        name: [a + b for a, b in zip(first[name], second[name], strict=True)]
        for name in first
        if name not in _ONCE
    }
    once = {name: part[name] for part in (first, second) for name in _ONCE if name in part}
    return both | once


def require_setting(condition: bool, name: str, rule: str) -> None:
    """Complain about a setting, from a validator of the whole section."""
    if not condition:
        raise key_error(name, f"must be {rule}")
