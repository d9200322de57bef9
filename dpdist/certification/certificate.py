"""The base class of certificates, its verdict, and two Gaussian noises certified together.

A kind of certificate is one class: its settings, which are the recipe's ``certify`` section; where
the randomness is (`build_sampler`), how draws of one input are counted (`sample`) and what the
counts certify (`decide`); the columns of its table, and the check of every row of a file against
its counts (`table_row`, `recompute_columns`); and its description in reports (`describe`).
``dpdist.certification.registry`` lists the classes. None of them needs torch to be read.

Noise on the input and after the first layer, in one pass: the network is rest(W x + W e + n), e ~
N(0, s^2 I), n ~ N(0, r^2 diag(Kr)), with Gaussian noise only before the first nonlinearity. A shift
d of the input moves the mean of the rest's input by W d, under the covariance S = s^2 W W^T + r^2
diag(Kr), and the rest is post-processing: it is randomized smoothing at Mahalanobis length (d^T W^T
S^-1 W d)^(1/2). With Delta the L2 norm of (Kr)^-1/2 W,

    d^T W^T S^-1 W d <= |d|^2 / (s^2 + (r / Delta)^2),

with equality for some d, so both noises certify what input noise of variance s^2 + (r / Delta)^2
would: sizes add in quadrature. Proof in docs/explanation/proofs.md. If the second noise is not
Gaussian, or not after an affine first layer, only the larger of the two sizes is valid; for a
product of two passes with one noise each, the harmonic sum. kappa + phi, as in DPAL's Proposition
1, is valid for neither.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, final

import numpy as np
from pydantic import BeforeValidator, Field

from dpdist.certification.table import (
    CertificateTable,
    CertifiedSizes,
    base_schema,
    read_job_record,
)
from dpdist.core.errors import UserError
from dpdist.core.fields import (
    MAX_COUNT,
    Count,
    FileShape,
    InputSelection,
    PositiveOrZero,
    Probability,
    Text,
    key_error,
)
from dpdist.core.files import ColumnSpec, check_shape
from dpdist.randomness import keys
from dpdist.randomness.keys import Generator

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn


# --- the verdict ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The certificate of one input. prediction is -1 and radius 0 if nothing is certified.

    k of n draws returned ``selected``. looks: how many times a decision could be made. target: the
    radius that a test decided on (the smallest one if it failed). histogram: counts of all classes,
    at fixed n. p_upper: upper bound of the runner-up's probability. hits: counts at each look.
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
    """Two Gaussian noises that certify together: on the input, and after the first layer.

    sigma: s, on the input. hidden_std: r, root mean square after the first layer. sensitivity: an
    upper bound of Delta, that layer's L2 norm over sqrt(Kr).
    """

    sigma: float
    hidden_std: float
    sensitivity: float

    @property
    def hidden_as_input_sigma(self) -> float:
        """Return sigma of the input noise that certifies as the hidden noise: r / Delta."""
        return self.hidden_std / self.sensitivity * _DOWN

    @property
    def combined_sigma(self) -> float:
        """Return sigma of the input noise that certifies as both together; never rounded up."""
        return math.hypot(self.sigma, self.hidden_as_input_sigma) * _DOWN

    @property
    def sigma_as_printed(self) -> float:
        """Return sigma by the formula kappa + phi, which is not valid; for comparison only."""
        return self.sigma + self.hidden_as_input_sigma

    @property
    def job_record(self) -> dict[str, Any]:
        """Return the table's entries in addition to sigma, as JSON."""
        return {"hidden": self.hidden_std, "sensitivity": {"l2": self.sensitivity}}


def read_combined_noise(job_record: Mapping[str, Any], sigma: float) -> CombinedNoise | None:
    """Return the two noises that a table's description states, or None if it states one.

    Raises UserError if it is damaged.
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
BackendName = Literal["eager", "channels-last", "frozen", "compiled", "bf16"]


class ClassifierRecord(FileShape):
    """The classifier that was executed, as a table states it; AES and CPU are the defaults.

    Attributes:
        generator: Generator of the noise: aes or philox.
        backend: inference backend of the model.
        batch: Rows of the executed batch.
        device: Kind of device.
        torch_version: Version of torch.
        machine: The processor or GPU.
        notes: Remarks of the probe that chose the backend.
        check: Digest of its answers to the check batch.
    """

    generator: Generator = "aes"
    backend: BackendName
    batch: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    device: Literal["cpu", "cuda"] = "cpu"
    torch_version: str
    machine: str
    notes: list[Any] = []  # noqa: RUF012
    check: str = ""


NO_SPENDING = "none"
_NEAR = 1e-9  # relative: machines may round differently
PartialCounts = dict[str, Any]  # JSON: counts, and from the first unit the selected class
_SELECTED = "selected"
_UNDEFINED = "undefined"  # draws without a class, if there are any
_MAX_BATCH_NUMBERS = 16 * 2**20  # larger inputs get smaller batches: one stays within 64 MiB


def _text(value: Any) -> Any:
    return value if value is None else str(value)


class ClassCounter(Protocol):
    """Counts classes over one canonical block of noisy copies of an input."""

    def histogram(
        self, x: Tensor, index: int, stage: str, block: int, rows: int, draws: int
    ) -> np.ndarray:
        """Return the counts of the first ``draws`` of the block's ``rows``: int64 (classes,).

        A draw whose logits are not finite is not counted, so they may add up to less than
        ``draws``.
        """
        ...

    def for_purpose(self, purpose: str) -> ClassCounter:
        """Return the same counter with separate noise."""
        ...


class NoiseSampler(Protocol):
    """A sampler of the noise of a model, at its location.

    sigma: standard deviation, a part of each random unit's key. assignment, spec: what all workers
    share, and the executed classifier (`dpdist.certification.worker`, `inference`).
    """

    @property
    def sigma(self) -> float:
        """Return the standard deviation of the noise."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """Return the properties that results depend on besides settings and model, as JSON."""
        ...

    def with_pinned(self, job_record: dict[str, Any]) -> NoiseSampler:
        """Return the sampler with the values stored when the certification started."""
        ...

    def check_batch(self, assignment: Any, *, copies: bool = False) -> tuple[nn.Module, Tensor]:
        """Return the executed network, and a batch for it under separate noise.

        copies: of one input, not of the check inputs in turn.
        """
        ...

    def build_counter(self, assignment: Any, spec: Any) -> tuple[ClassCounter, Tensor]:
        """Return the counter on the executed classifier, and its classes of the check batch."""
        ...


class Certificate(InputSelection):
    """One certification of a data set: what its results depend on, and how it is computed.

    Attributes:
        n0: Draws that choose the class, for each input.
        n: Draws that bound its probability, for each input.
        alpha: Error probability of each input's certificate, strictly between 0 and 1.
        radii: Radii that summaries show, in input units, ascending; no result depends on them.
        batch: Rows of the executed batch, which is also the block of draws; None: chosen for the
            input's size.
        seed: Seed of the noise, a text; None: a secret seed, drawn at the start and stored with the
            results.
        backend: Inference backend: "frozen", "compiled", "channels-last", "eager" or "bf16"; None:
            chosen by a probe.
        generator: "aes" or "philox"; None: aes on CPUs, philox on GPUs.
    """

    n0: Count = 100
    n: Count = 100_000
    alpha: Probability = 0.001
    radii: Annotated[tuple[PositiveOrZero, ...], Field(max_length=100)] = ()
    batch: Count | None = None
    seed: Annotated[Text | None, BeforeValidator(_text)] = None
    backend: BackendName | None = None
    generator: Generator | None = None

    if TYPE_CHECKING:  # settings of some, constants of others

        @property
        def sigma(self) -> float | None:
            """Return sigma of the noise on the input; None without such noise."""

        @property
        def noise(self) -> str:
            """Return the name of the noise in the keys of random units."""

        @property
        def norm(self) -> str:
            """Return the norm of the radii."""

    # settings on which no result depends
    result_free_fields: ClassVar[frozenset[str]] = frozenset()
    default_batch: ClassVar[int] = 500
    max_device_batch: ClassVar[int] = 4096  # at most, where it is chosen by a GPU's memory

    @classmethod
    @final
    def mode_name(cls) -> str:
        """Return the name of the mode in tables and folders, a str such as "fixed"."""
        result: str = cls.model_fields["mode"].default if "mode" in cls.model_fields else cls.mode  # type: ignore[attr-defined]
        return result

    # ---- the algorithm: where the randomness is, what is drawn, and what the draws certify

    @abstractmethod
    def build_sampler(self, model: nn.Module, input_shape: tuple[int, ...]) -> NoiseSampler:
        """Return the sampler of the noise with which this certificate runs a model.

        Args:
            model: the classifier, float32 inputs (B, *input_shape) to logits (B, classes).
            input_shape: shape of one input.

        Returns:
            A `NoiseSampler`, the argument `sampler` of `sample`, `predict` and `decide`.

        Raises:
            UserError: the model has no noise where this certificate needs it, or has noise that
                this certificate cannot use.
        """

    def num_units(self, batch: int) -> int:
        """Return the number of units into which the work on one input is cut, an int >= 1.

        Args:
            batch: draws in a block; by default a unit is a block, and there are ceil(n / batch).
        """
        return -(-self.n // batch)

    @abstractmethod
    def sample(
        self, counter: Any, x: Tensor, index: int, low: int, high: int, batch: int, sampler: Any
    ) -> PartialCounts:
        """Draw units low..high-1 of one input and return the counts of their answers.

        The result depends only on the keys of these units, never on the order of the calls.

        Args:
            counter: runs the model on blocks of noisy copies of an input (`ClassCounter`).
            x: the input, float32 of the input's shape.
            index: position of the input in the data; it is in the keys of its noise.
            low: first unit.
            high: one after the last unit, at most `num_units(batch)`.
            batch: draws in a block.
            sampler: the result of `build_sampler`.

        Returns:
            A dict of JSON values for `decide`: integer counts by name, and from unit 0 "selected"
            (int), the class that n0 other draws chose.
        """

    @abstractmethod
    def decide(self, partials: Sequence[PartialCounts], sampler: Any) -> Any:
        """Return the certificate of one input from the counts of all its units.

        Args:
            partials: results of `sample` that together cover every unit once.
            sampler: the result of `build_sampler`.

        Returns:
            A `Verdict`, for `dpdist.ExpectedScores` a `ScoreVerdict`: an object with `prediction`
            (int, the certified class; -1: abstains), `radius` (float, input units; 0 if the verdict
            abstains), `p_lower` (float, lower bound of the class's probability or score) and the
            counts.
        """

    def predict(self, counter: Any, x: Tensor, index: int, batch: int, sampler: Any) -> int:
        """Return the class of one input, without a radius.

        Arguments are those of `sample`, which draws all units here.

        Returns:
            Index of the class, an int; -1 if the classifier abstains. It returns a class that is
            not the smoothed classifier's with probability at most `alpha`.
        """
        whole = self.sample(counter, x, index, 0, self.num_units(batch), batch, sampler)
        result: int = self.decide([whole], sampler).prediction
        return result

    def certify_other_class(
        self, counter: Any, x: Tensor, index: int, excluded_class: int, batch: int, sampler: Any
    ) -> Any:
        """Certify one input for any class except `excluded_class`, and stop early if none is left.

        Arguments are those of `sample`, which draws all units here.

        Returns:
            A verdict as `decide` returns it. It may have prediction -1 and radius 0 if only
            `excluded_class` could have been certified; otherwise its prediction may be any class.
        """
        whole = self.sample(counter, x, index, 0, self.num_units(batch), batch, sampler)
        return self.decide([whole], sampler)

    def verdict_for_classifier(self, predicts_by_vote: bool, verdict: Any, sampler: Any) -> Any:
        """Return the verdict that the same draws give for one of the two classifiers they define.

        Args:
            predicts_by_vote: True for the classifier that answers the class of most draws, False
                for the one that answers the class of the largest mean score.
            verdict: a result of `decide`.
            sampler: the result of `build_sampler`.

        Returns:
            A `Verdict` or `ScoreVerdict`; `verdict` itself if it is already of that classifier, or
            if this kind of certificate has only one.
        """
        return verdict

    # ---- its table

    spending: ClassVar[str] = NO_SPENDING  # how the error is spent over the looks
    converts_norms: ClassVar[bool] = False  # whether its balls stand for balls in other norms

    @classmethod
    def table_schema(cls) -> pa.Schema:
        """Return the schema of the table, a `pyarrow.Schema`.

        It has one row per input and the columns of every table (docs/reference/certificates.md),
        such as "index", "label" and "prediction" (int64; -1 if it abstains) and "radius" (float64),
        then those of `extra_columns`, of which "object" is a list of int64.
        """
        import pyarrow as pa

        from dpdist.cluster import job_folder

        more = cls.extra_columns()
        lists = [
            pa.field(name, pa.list_(pa.int64()), nullable=False)
            for name, (kind, _) in more.items()
            if kind is object
        ]
        return pa.schema([*base_schema(), *job_folder.schema_of(more, *lists)])

    # ---- checks: every row from its counts

    @classmethod
    def extra_columns(cls) -> Mapping[str, ColumnSpec]:
        """Return the columns that readers need in addition to those of every table.

        Returns:
            A dict from the column's name to a pair: the type of its values (int, float, str, bool
            or object), and their least value or None. Empty by default.
        """
        return {}

    @classmethod
    def constant_columns(cls, table: pa.Table, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that must be the same in every row of a table.

        Args:
            table: the table of certificates.
            settings: the settings that the table states.

        Returns:
            A dict from column to value, such as "spending", and "looks" and "target" (None) for a
            fixed number of draws.
        """
        if cls.spending == NO_SPENDING:  # looked at once, when all was counted
            return {"spending": cls.spending, "looks": 1, "target": None}
        return {"spending": cls.spending, "histogram": None}

    def table_row(self, index: int, label: int, verdict: Any, sampler: Any) -> dict[str, Any]:
        """Return the row of an input, a dict of values by column: its verdict and the settings.

        Args:
            index: position of the input in the data.
            label: its class.
            verdict: a result of `decide`.
            sampler: the result of `build_sampler`.
        """
        named = ("n0", "alpha", "norm", "noise", "spending")
        return {
            **asdict(verdict),
            **{name: getattr(self, name) for name in named},
            "index": index,
            "label": label,
            "sigma": sampler.sigma if self.sigma is None else self.sigma,
            "mode": self.mode_name(),
            "cap": self.n,
        }

    @classmethod
    @abstractmethod
    def consistent_counts(cls, table: pa.Table) -> np.ndarray:
        """Return whether each row has the counts of the draws that it states, bool (N,).

        Args:
            table: the table of certificates.
        """

    @classmethod
    @abstractmethod
    def recompute_columns(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        """Return the columns that follow from the counts of a table at an error probability.

        Args:
            table: the table of certificates.
            alpha: error probability of each certificate.

        Returns:
            A dict from column to array (N,), such as "p_lower", "radius" and "prediction" (-1:
            abstains).
        """

    @classmethod
    def check_table(cls, table: pa.Table, context: str) -> None:
        """Check that every row follows from its counts at the table's error. Returns nothing.

        Args:
            table: the table of certificates.
            context: first words of error messages.

        Raises:
            UserError: a row does not follow, or a column contradicts the settings.
        """
        settings = read_job_record(table).get("settings", {})
        for name, value in cls.constant_columns(table, settings).items():
            rows = zip(table["index"].to_pylist(), table[name].to_pylist(), strict=True)
            for index, stated in rows:
                if stated != value:
                    raise UserError(
                        f"{context}: damaged: {name} of input {index} must be {value!r}, as its "
                        f"settings say, got {stated!r}"
                    )
        sound = cls.consistent_counts(table)
        if sound.all():
            for name, made in cls.recompute_columns(table, table["alpha"][0].as_py()).items():
                near = abs(table[name].to_numpy() - made) <= _NEAR * (1 + abs(made))
                sound &= near & np.isfinite(made)  # all numbers are near infinity
        if not sound.all():
            raise UserError(
                f"{context}: damaged: input {table['index'][int(sound.argmin())]}: its row does "
                "not follow from its counts"
            )

    # ---- reading

    @classmethod
    @abstractmethod
    def read_sizes(cls, table: pa.Table) -> tuple[CertifiedSizes, ...]:
        """Return all sizes that a table states, a tuple of `CertifiedSizes`.

        Args:
            table: the table of certificates.

        Returns:
            An entry for each certificate in each norm: `name`, `norm`, `prediction` and `size`
            (arrays (N,); input units). The first applies to the classifier of the table's radius.
        """

    @classmethod
    def achievable_radius(cls, table: pa.Table, label_probability: np.ndarray) -> np.ndarray | None:
        """Return the radius that votes could certify with unlimited draws, float64 (N,).

        Args:
            table: the table of certificates.
            label_probability: (N,), probabilities of the labels.

        Returns:
            Radii in input units, -1 if there is none; None if the certificate does not use votes.
        """
        return None

    @classmethod
    def recertify(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        """Return the columns of a table at a different error probability, without new draws.

        Args:
            table: the table of certificates.
            alpha: the new error probability, chosen without the counts.

        Returns:
            A dict from column to array (N,), as `recompute_columns` returns it.
        """
        return cls.recompute_columns(table, alpha)

    @classmethod
    def recreate(
        cls, certificates: CertificateTable, norm: str, batch: int
    ) -> tuple[Certificate, NoiseSampler]:
        """Return settings and sampler with which an attacked point is certified like a table.

        Args:
            certificates: the table whose certificates are attacked.
            norm: norm of the attack, such as "l2".
            batch: draws in a block.

        Returns:
            A pair (settings, sampler): a `Certificate` with the table's draws and error, and the
            `NoiseSampler` that adds the table's noise. Pass it to the settings' `sample` and
            `decide` as `sampler`.

        Raises:
            UserError: certificates of this kind cannot be attacked.
        """
        raise UserError(
            f"{certificates.path}: certificates of mode {certificates.mode} cannot be attacked: "
            f"{cls.__name__} has no `recreate`"
        )

    # ---- its words

    @classmethod
    def describe(cls, certificates: CertificateTable) -> str:
        """Return a line about a table's noise, draws and decisions, a str; its title by default.

        Args:
            certificates: the table.
        """
        return certificates.title

    @classmethod
    @abstractmethod
    def comparison_key(cls, certificates: CertificateTable) -> dict[str, Any]:
        """Return this kind's entries of `CertificateTable.comparison_key`, a dict of JSON values.

        Args:
            certificates: the table.
        """

    # ---- the job

    @property
    @final
    def identity(self) -> dict[str, Any]:
        """Return the settings by name, a dict of JSON values: "mode" and all fields but the seed.

        "generator" is a key only if you set it.
        """
        unsaid = {"seed"} | ({"generator"} if self.generator is None else set())
        return {**self.model_dump(mode="json", exclude=unsaid), "mode": self.mode_name()}

    @final
    def with_seed(self, seed: str) -> Certificate:
        """Return a copy of these settings with a different seed, a `Certificate`.

        The device determines the generator of the copy.

        Use it for inputs that arrive one by one.
        """
        return self.model_copy(update={"seed": seed, "generator": None})

    @property
    @final
    def folder_name(self) -> str:
        """Return the default name of the table's folder, a str like "sigma-0.25-fixed-n-100".

        Two certifications of one model have different names.
        """
        parts = self.name_parts()
        if self.generator is not None:
            parts.append(self.generator)
        if self.every > 1:
            parts.append(f"every-{self.every}")
        if self.start:
            parts.append(f"from-{self.start}")
        return "-".join(parts)

    @abstractmethod
    def name_parts(self) -> list[str]:
        """Return the kind's parts of `folder_name`, a list of str: ["sigma-0.25", "fixed", ...]."""

    @final
    def executed_batch_size(self, numbers: int) -> int:
        """Return the number of rows in an executed batch, an int from 1 to n.

        Args:
            numbers: numbers in one row, which is one input.
        """
        if self.batch is not None:
            return min(self.batch, self.n)
        return max(1, min(self.default_batch, self.n, _MAX_BATCH_NUMBERS // numbers))


def select_class(counter: ClassCounter, n0: int, x: Tensor, index: int) -> int:
    """Return the class whose probability will be bounded, from n0 separate draws."""
    return int(counter.histogram(x, index, keys.SELECT, 0, n0, n0).argmax())


def selected_class(partials: Sequence[PartialCounts]) -> int:
    """Return the class that the first unit chose."""
    result: int = next(partial[_SELECTED] for partial in partials if _SELECTED in partial)
    return result


def counts_to_json(histogram: np.ndarray, draws: int) -> PartialCounts:
    """Return the counts of a number of draws, as JSON.

    histogram: int (classes,). A draw whose logits are not finite is not in it; the number of such
    draws is a second entry, if there are any.
    """
    undefined = draws - int(histogram.sum())
    return {"histogram": histogram.tolist()} | ({_UNDEFINED: [undefined]} if undefined else {})


def total_counts(partials: Sequence[PartialCounts], name: str, n: int | None = None) -> np.ndarray:
    """Return the sum of a count over all units.

    Raises ValueError unless it counts n draws, including those without a class.
    """
    total: np.ndarray = np.sum([partial[name] for partial in partials], axis=0)
    if n is not None:
        draws = int(total.sum()) + sum(partial.get(_UNDEFINED, [0])[0] for partial in partials)
        if draws != n:
            raise ValueError(f"{draws} draws counted instead of {n}")
    return total


def merge_partials(first: PartialCounts, second: PartialCounts) -> PartialCounts:
    """Return the partial result of two intervals of units: counts and integer sums add up."""
    if _UNDEFINED in first or _UNDEFINED in second:
        first, second = {_UNDEFINED: [0]} | first, {_UNDEFINED: [0]} | second
    both: PartialCounts = {
        name: [a + b for a, b in zip(first[name], second[name], strict=True)]
        for name in first
        if name != _SELECTED
    }
    for part in (first, second):
        if _SELECTED in part:
            both[_SELECTED] = part[_SELECTED]
    return both


def require_setting(condition: bool, name: str, rule: str) -> None:
    """Raise an error of one setting, in a validator of the whole section."""
    if not condition:
        raise key_error(name, f"must be {rule}")


def require_ascending(radii: Sequence[float]) -> None:
    """Raise an error of the setting `radii` unless they ascend."""
    require_setting(all(a < b for a, b in pairwise(radii)), "radii", "ascending")
