"""The table of certificates: one row per input, in one canonical file.

A `CertificateTable` is one finished certification. The class of its certificates defines its
columns (``dpdist.certification.certificate``). Nothing here loads pyarrow before a table is read or
written, because recipes are read through the registry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from dpdist.certification.noise import Gaussian, norm_equivalence_factor
from dpdist.core.errors import UserError
from dpdist.core.files import ColumnSpec, error_text

if TYPE_CHECKING:
    import pyarrow as pa

# --- the file ---------------------------------------------------------------------------------


ABSTAIN = -1  # as a prediction
HIDDEN_NOISE = "hidden-gaussian"  # the name of a model's own noise after its first layer
TABLE = "certificates.parquet"
KEY = b"dpdist.certification"
# Entries of a table's record: what was measured of its inputs before they were certified.
INPUT_SHAPE, INPUT_RANGE, CLEAN_WRONG = "input_shape", "input_range", "clean_wrong"
INPUT_STEP = "input_step"


# Type and least value of each column that every table has.
COLUMNS: dict[str, ColumnSpec] = {
    "index": (int, 0), "label": (int, 0), "prediction": (int, -1), "selected": (int, -1),
    "k": (int, 0), "n": (int, 0), "n0": (int, 0), "alpha": (float, 0), "p_lower": (float, 0),
    "radius": (float, 0), "norm": (str, None), "noise": (str, None), "sigma": (float, 0),
    "mode": (str, None), "cap": (int, 0), "looks": (int, 0), "target": (object, None),
    "spending": (str, None), "histogram": (object, None),
}  # fmt: skip


@cache
def base_schema() -> pa.Schema:
    """Return the schema of the columns that every table begins with."""
    import pyarrow as pa

    from dpdist.cluster import job_folder

    of_classes = pa.field("histogram", pa.list_(pa.int64()))
    return job_folder.schema_of(COLUMNS, pa.field("target", pa.float64()), of_classes)


def build(
    rows: list[dict[str, Any]], job_record: Mapping[str, Any], schema: pa.Schema | None = None
) -> pa.Table:
    """Return the rows sorted by index, with ``job_record`` (what was executed) as metadata.

    schema: None for that of the columns that every table has.
    """
    from dpdist.cluster import job_folder

    in_order = sorted(rows, key=lambda row: row["index"])
    return job_folder.build_table(
        in_order, base_schema() if schema is None else schema, job_record, KEY
    )


def read_job_record(table: pa.Table) -> dict[str, Any]:
    """Return the executed settings: seed, model, data and classifier included."""
    from dpdist.cluster import job_folder

    return job_folder.read_job_record(table, KEY)


def read(path: Path) -> pa.Table:
    """Return a table of certificates. Raises UserError if it is damaged."""
    from dpdist.cluster import job_folder

    return job_folder.read_table(path, COLUMNS, KEY)


def read_settings(kind: type[Any], job_record: Mapping[str, Any], context: object) -> Any:
    """Return the settings that a table states, of its kind of certificate. Raises UserError."""
    stated = {**job_record.get("settings", {}), "seed": job_record.get("seed")}
    given = {name: stated[name] for name in stated.keys() & kind.model_fields.keys()}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise UserError(f"{context}: damaged: settings: {error_text(error)}") from None


def write(table: pa.Table, path: Path) -> None:
    """Write the canonical file of a table atomically."""
    from dpdist.cluster import job_folder

    job_folder.write_table(table, path)


# --- a finished certification -----------------------------------------------------------------


@dataclass(frozen=True)
class CertifiedSizes:
    """The sizes of one certificate of a table, for every input.

    name, norm: of the certificate ("exact", "linf"). title: its description. prediction: int64
    (N,), the certified class, -1 if it abstains. size: float64 (N,), input units. short_title: its
    line in a summary. is_valid: whether the certificate is valid at all. predicts_by_vote: whether
    it applies to the class of most draws, not to that of the largest mean score.
    """

    name: str
    norm: str
    title: str
    prediction: np.ndarray
    size: np.ndarray

    short_title: str = ""
    is_valid: bool = True
    predicts_by_vote: bool = True

    def size_if_correct(self, labels: np.ndarray) -> np.ndarray:
        """Return each size, or -1 if the answer is not the label: float64 (N,)."""
        return np.where((self.prediction == labels) & (self.prediction != ABSTAIN), self.size, -1.0)


def attack_noise(noise: str, sigma: float) -> tuple[str, float | None] | None:
    """Return where an attack on a certified classifier puts its noise, and that noise's sigma.

    Attacks smooth by Gaussian noise only: None for other noise on the input. noise: its name in
    settings and tables.
    """
    if noise == HIDDEN_NOISE:
        return "hidden", None
    return ("input", sigma) if noise == Gaussian.name else None


@dataclass(frozen=True)
class CertificateTable:
    """One finished certification. Arrays of equal length, one entry for each certified input.

    certificate_class: the class of its settings, a subclass of `Certificate` such as `Cohen`.
    job_record: what was executed. alpha: the error of each certificate, of every row.
    """

    path: Path
    certificate_class: type[Any]
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
        """Return the name of the table's folder, a str such as "sigma-0.25-fixed-n-100"."""
        return self.path.parent.name

    @property
    def title(self) -> str:
        """Return a short name built from the table's settings, a str: "sigma-0.25-fixed-n-100".

        It does not depend on the folder. If the table states no settings, it is the folder's name.
        """
        try:
            name = str(self.read_settings().folder_name)
        except UserError:  # written by another version
            return self.name
        again = self.job_record.get("rebound_alpha")
        return name if again is None else f"{name}-alpha-{again:g}"

    def read_settings(self) -> Any:
        """Return the settings of the certification, their seed included.

        Returns:
            An instance of `certificate_class`, such as `dpdist.Cohen`, with attributes such as
            `sigma`, `n`, `alpha` and `seed`.

        Raises:
            UserError: the table's file is damaged: the settings are not valid for its kind.
        """
        return read_settings(self.certificate_class, self.job_record, self.path)

    @property
    def description(self) -> str:
        """Return a line about noise and draws, a str: "Smoothing by Gaussian noise 0.25, ..."."""
        words, usual = self.certificate_class.describe(self), self.certificate_class.model_fields
        return words if self.alpha == usual["alpha"].default else f"{words}, alpha {self.alpha:g}"

    @property
    def correct(self) -> np.ndarray:
        """Return bool (N,): whether each certified class is the label; False for an abstention."""
        result: np.ndarray = self.prediction == self.label
        return result

    @cached_property
    def sizes(self) -> tuple[CertifiedSizes, ...]:
        """Return the sizes of every certificate in the table, a tuple of `CertifiedSizes`.

        An entry is one certificate in one norm: `name`, `norm` and `title` (str), `prediction` and
        `size` (arrays (N,); sizes in input units), `is_valid` and `predicts_by_vote` (bool).
        """
        return tuple(self.certificate_class.read_sizes(self.table))

    @property
    def predicts_by_vote(self) -> bool:
        """Return whether the radii apply to the classifier by votes of draws, a bool.

        False: they apply to the classifier by mean scores.
        """
        return self.sizes[0].predicts_by_vote

    @property
    def attack_noise(self) -> tuple[str, float | None] | None:
        """Return where an attack on the same classifier puts noise, a pair; None if impossible.

        Returns:
            ("input", sigma in input units) for Gaussian noise on the input, ("hidden", None) for
            the model's own noise after its first layer, None for other noise on the input.
        """
        return attack_noise(self.noise, self.sigma)

    def sizes_in_norm(self, norm: str, dimension: int) -> list[CertifiedSizes]:
        """Return the certified sizes in a norm, a list of `CertifiedSizes`; it may be empty.

        Args:
            norm: the norm, such as "l2" or "linf".
            dimension: number of values in one input. In a norm that is not its own, a vote has the
                size of the largest ball inside the certified one.

        Returns:
            A list of `CertifiedSizes` with arrays (N,) `prediction` and `size` (input units); empty
            if the table has no certificate in that norm.
        """
        if not self.certificate_class.converts_norms:
            return [sizes for sizes in self.sizes if sizes.norm == norm]
        return [
            replace(
                sizes,
                norm=norm,
                size=sizes.size / norm_equivalence_factor(sizes.norm, norm, dimension),
            )
            for sizes in self.sizes
        ]

    def select_sizes(self, certificate: str, norm: str | None) -> CertifiedSizes:
        """Return the sizes of one certificate of the table, a `CertifiedSizes` with arrays (N,).

        Args:
            certificate: name of the certificate, such as "exact" or "cohen".
            norm: its norm, such as "l2".

        Returns:
            A `CertifiedSizes`: `prediction` (int64 (N,); -1 if it abstains) and `size` (float64
            (N,), in input units).

        Raises:
            UserError: the table has no such certificate; the message lists all that it has.
        """
        for sizes in self.sizes:
            if (sizes.name, sizes.norm) == (certificate, norm):
                return sizes
        there = ", ".join(f"{sizes.name}_{sizes.norm}" for sizes in self.sizes)
        raise UserError(
            f"{self.path}: no column {certificate}_{norm} in the table; there are {there}"
        )

    @property
    def input_range(self) -> tuple[float, float] | None:
        """Return the smallest and the largest value in the certified inputs, a pair of floats.

        With more than 1,000 inputs, it is that of 1,000 of them. None if the table does not state
        them. You need the inputs to check them.
        """
        stated = self.job_record.get(INPUT_RANGE)
        return None if stated is None else (stated[0], stated[1])

    @property
    def input_step(self) -> float | None:
        """Return the size of the smallest change of a category or count, a float in input units.

        It is that of most of 100 certified inputs. None if they are images, or continuous. You need
        the inputs to check it.
        """
        stated: float | None = self.job_record.get(INPUT_STEP)
        return stated

    @property
    def holds_images(self) -> bool:
        """Return whether the certified inputs have the shape of images, a bool."""
        return len(self.job_record.get(INPUT_SHAPE, ())) == 3

    @property
    def clean_accuracy(self) -> float | None:
        """Return the accuracy of the network itself on the certified inputs, a float in [0, 1].

        It is measured without smoothing noise; a network with noise of its own answers by its mean
        scores over 16 draws. None if the table does not state it. You need model and inputs to
        check it.
        """
        stated = self.job_record.get(CLEAN_WRONG)
        if stated is None:
            return None
        return float(1 - np.isin(self.index, [int(each) for each in stated.split()]).mean())

    @property
    def comparison_key(self) -> dict[str, Any]:
        """Return the settings that must agree to compare two tables, a dict of JSON values.

        Its keys are mode, noise, alpha, n0, n and those of the kind of certificate; tables are
        compared only if they agree. The scale of a model's own noise is not among them.
        """
        return {
            "mode": self.mode, "noise": self.noise, "alpha": self.alpha, "n0": self.n0, "n": self.n,
            **self.certificate_class.comparison_key(self),
        }  # fmt: skip

    def size_if_correct(
        self, certificate: str | None = None, norm: str | None = None
    ) -> np.ndarray:
        """Return each input's certified size, or -1 if its answer is incorrect.

        Args:
            certificate: name of one of several certificates in the table; None: the table's radius.
            norm: norm of that certificate.

        Returns:
            A float64 array (N,), in input units; also -1 if the classifier abstains.

        Raises:
            UserError: the table has no such certificate.
        """
        if certificate is None:
            return np.where(self.correct & (self.prediction != ABSTAIN), self.radius, -1.0)
        return self.select_sizes(certificate, norm).size_if_correct(self.label)

    def certified_accuracy(
        self, size: float, certificate: str | None = None, norm: str | None = None
    ) -> float:
        """Return the fraction of inputs correct and certified at a size, a float in [0, 1].

        Args:
            size: the size in input units; an input counts if its certified size is at least that.
            certificate: name of one of several certificates in the table; None: the table's radius.
            norm: norm of that certificate.

        Raises:
            UserError: the table has no such certificate.
        """
        return float(np.mean(self.size_if_correct(certificate, norm) >= size))

    def to_arrow(self) -> pa.Table:
        """Return all columns as a pyarrow Table, one row for each certified input.

        Among its columns are index, label, prediction, radius, k, n and p_lower. Its metadata holds
        the executed settings. docs/how-to/certification.md names all columns.
        """
        return self.table

    def to_pandas(self) -> Any:
        """Return all columns as a pandas DataFrame, one row for each certified input.

        The columns are those of `to_arrow`.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            return self.table.to_pandas()
        except ImportError as error:
            raise UserError(f"to_pandas: needs pandas ({error}): pip install pandas") from None

    @property
    def abstention_rate(self) -> float:
        """Return the fraction of inputs on which the classifier abstains, a float in [0, 1]."""
        return float(np.mean(self.prediction == ABSTAIN))

    @property
    def average_radius(self) -> float:
        """Return the mean of radius * 1[correct] over all inputs, a float in input units.

        Source: Zhai et al., ICLR 2020.
        """
        return float(np.mean(np.maximum(self.size_if_correct(), 0.0)))

    @property
    def radii(self) -> tuple[float, ...]:
        """Return the radii of the settings, a tuple of floats in input units; it may be empty."""
        return tuple(self.job_record.get("settings", {}).get("radii", ()))

    @property
    def reported_radii(self) -> tuple[float, ...]:
        """Return the radii that reports show, a tuple of floats in input units, ascending.

        They are 0 and `radii`, or, without `radii`, 0 and sigma times 0.5, 1 and 2. Every report
        shows the same radii, since bounds that are valid at all of them together have one error.
        """
        usual = tuple(round(self.sigma * times, 4) for times in (0.5, 1.0, 2.0))
        return tuple(sorted({0.0, *(self.radii or usual)}))


# --- columns of counts -------------------------------------------------------------------------


def list_columns(table: pa.Table, *names: str) -> list[np.ndarray] | None:
    """Return columns of lists with a whole number for each class: int64 (N, K) each.

    None if they have unequal lengths, or are empty.
    """
    found = [table[name].to_pylist() for name in names]
    sizes = {len(each or ()) for column in found for each in column}
    if len(sizes) != 1 or not max(sizes):
        return None
    return [np.asarray(column, dtype=np.int64) for column in found]


def consistent_histograms(table: pa.Table, histogram: np.ndarray) -> np.ndarray:
    """Return whether each row's histogram (N, K) fits its draws: bool (N,).

    It counts at most n draws (some may have had no class), n is its cap, and it has k for its
    selected class.
    """
    names = ("selected", "k", "n", "cap", "looks")
    selected, k, n, cap, looks = (table[name].to_numpy() for name in names)
    inside = (selected >= 0) & (selected < histogram.shape[1])
    hits = histogram[np.arange(len(k)), np.where(inside, selected, 0)]
    counts = (histogram >= 0).all(1) & (histogram.sum(1) <= n)
    valid: np.ndarray = inside & counts & (hits == k) & (n == cap) & (looks == 1)
    return valid


# --- the inputs --------------------------------------------------------------------------------


_MOST_LOOKED_AT = 1000


def input_range(dataset: Any, indices: Sequence[int]) -> tuple[float, float]:
    """Return the least and the largest number in up to 1,000 of the chosen inputs, spread out."""
    count = len(indices)
    places = np.unique(np.linspace(0, count - 1, min(count, _MOST_LOOKED_AT)).astype(np.int64))
    some = np.asarray(indices)[places]
    low, high = np.inf, -np.inf
    for start in range(0, len(some), 100):
        batch = dataset.batch(some[start : start + 100])
        low, high = min(low, float(batch.min())), max(high, float(batch.max()))
    return low, high


def input_step(dataset: Any, indices: Sequence[int]) -> float | None:
    """Return the size of a change by 1 of the categories or counts that inputs are, or None.

    It is 1 if half of the values that vary are whole numbers in up to 100 of the chosen inputs,
    spread out; and if most of these are whole multiples of a number each, as counts of norm 1 are,
    it is the median of these numbers.
    """
    places = np.linspace(0, len(indices) - 1, min(len(indices), 100)).astype(np.int64)
    inputs = dataset.batch(np.asarray(indices)[places]).flatten(1).numpy()
    values = inputs[:, np.ptp(inputs, axis=0) > 0]
    if np.mean((values == np.rint(values)).all(0) if values.size else False) >= 0.5:
        return 1.0
    unit = np.min(values, axis=1, where=values > 0, initial=np.inf)
    times = values / unit[:, None]
    counts = np.isclose(times, np.rint(times), rtol=0, atol=1e-4).all(1) & np.isfinite(unit)
    counts &= np.count_nonzero(values, axis=1) > 1  # one number is a multiple of itself
    return float(np.median(unit[counts])) if 2 * counts.sum() > len(counts) else None


def range_words(low: float, high: float, sigma: float | None) -> str:
    """Return the range of inputs, and sigma relative to it, in words."""
    words = f"inputs lie in {low:.4g} to {high:.4g}"
    if not sigma or high <= low:
        return words
    return f"{words}; sigma {sigma:g} is {100 * sigma / (high - low):.3g} % of that range"
