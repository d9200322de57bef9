"""The one reader of a table of certificates: every printed certified accuracy comes from here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from dpdist import bulk
from dpdist.base.errors import UserError
from dpdist.base.fields import MOST
from dpdist.base.reading import check_shape, reason
from dpdist.base.table_files import read_table
from dpdist.certification import table as tables
from dpdist.certification.catalogue import kind_of
from dpdist.certification.certificate import Certificate, CertifiedSizes
from dpdist.certification.verdict import ABSTAIN

# What one table states once: column, name among its settings.
_ONCE = {
    "alpha": "alpha", "sigma": "sigma", "mode": "mode", "noise": "noise", "norm": "norm",
    "n0": "n0", "cap": "n",
}  # fmt: skip


@dataclass(frozen=True)
class CertificateTable:
    """One finished certification. Arrays of equal length, one entry for each certified input.

    about: what was executed. alpha: the error of each certificate, of every row.
    """

    path: Path
    kind: type[Certificate]
    about: dict[str, Any]
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
        """What its settings say that tells it apart, wherever it lies; else the folder's name."""
        settings = self.about.get("settings", {})
        given = {key: settings[key] for key in settings.keys() & self.kind.model_fields.keys()}
        try:
            return self.kind.model_validate(given).folder_name
        except ValidationError:  # written by another version
            return self.name

    @property
    def words(self) -> str:
        """What was certified and how, as people say it."""
        return self.kind.words(self)

    @property
    def correct(self) -> np.ndarray:
        """Whether the certified answer is the label; an abstention is not."""
        return self.prediction == self.label

    @cached_property
    def sizes(self) -> tuple[CertifiedSizes, ...]:
        """All that the table states of its inputs."""
        return self.kind.sizes(self.table)

    @property
    def by_votes(self) -> bool:
        """Whether its radii are of the classifier by votes of draws, or by their mean scores."""
        return self.kind.by_votes(self.table)

    @property
    def attacked_as(self) -> tuple[str, float | None] | None:
        """The place and sigma of an attack on the same classifier; None where there is none."""
        return self.kind.attacked_as(self.noise, self.sigma)

    def sizes_of(self, certificate: str, norm: str | None) -> CertifiedSizes:
        """What one of its certificates states. Raises UserError where the table has none such."""
        for sizes in self.sizes:
            if (sizes.name, sizes.norm) == (certificate, norm):
                return sizes
        there = ", ".join(f"{sizes.name}_{sizes.norm}" for sizes in self.sizes)
        raise UserError(
            f"{self.path}: no column {certificate}_{norm} in the table; there are {there}"
        )

    @property
    def terms(self) -> dict[str, Any]:
        """On which its certificates were made: sizes on other terms are not compared with these.

        The scale of noise of a model's own, which its scores are certified under, is none of them.
        """
        return {
            "mode": self.mode, "noise": self.noise, "alpha": self.alpha, "n0": self.n0, "n": self.n,
            "noise_bank": bool(self.about.get("settings", {}).get("noise_bank")),
            **self.kind.terms(self),
        }  # fmt: skip

    def certified(self, certificate: str | None = None, norm: str | None = None) -> np.ndarray:
        """Certified size of every input with the right answer, -1 of all others: float64 (N,).

        certificate, norm: one of several that the table has; None: the table's radius. Raises as
        `sizes_of`.
        """
        if certificate is None:
            return np.where(self.correct & (self.prediction != ABSTAIN), self.radius, -1.0)
        return self.sizes_of(certificate, norm).certified(self.label)

    def certified_accuracy(
        self, size: float, certificate: str | None = None, norm: str | None = None
    ) -> float:
        """Share of all inputs that are right and certified at this size at least."""
        return float(np.mean(self.certified(certificate, norm) >= size))

    @property
    def abstained(self) -> float:
        return float(np.mean(self.prediction == ABSTAIN))

    @property
    def average_radius(self) -> float:
        """Mean over all inputs of radius * 1[correct] (Zhai et al. 2020)."""
        return float(np.mean(np.maximum(self.certified(), 0.0)))

    @property
    def radii(self) -> tuple[float, ...]:
        """The radii that were asked for."""
        radii = self.about.get("settings", {}).get("radii", ())
        if not isinstance(radii, list | tuple) or not all(
            type(radius) in (int, float) and radius >= 0 for radius in radii
        ):
            raise UserError(f"{self.path}: damaged: settings.radii must be numbers >= 0")
        return tuple(radii)

    @property
    def shown_radii(self) -> tuple[float, ...]:
        """Return the radii at which anything is printed of the table, ascending.

        0, and those that were asked for; where none were, multiples of sigma. Bounds that hold at
        all of them together share one error, so every place prints these.
        """
        usual = tuple(round(self.sigma * times, 4) for times in (0.5, 1.0, 2.0))
        return tuple(sorted({0.0, *(self.radii or usual)}))


def read(path: Path) -> CertificateTable:
    """A finished table. Raises UserError when it is none, or states no one alpha, sigma or mode."""
    table = tables.read(path)
    found = of(table, path)
    if columns := found.kind.columns():
        read_table(path, columns)
    try:
        found.kind.check(table, str(path))
    except (ValueError, ArithmeticError) as error:  # of what no certificate is computed
        raise UserError(
            f"{path}: damaged: its rows cannot be computed again: {reason(error)}"
        ) from error
    check_complete(found)
    return found


def check_complete(found: CertificateTable) -> None:
    """Check that a table has a row for every input that its settings choose, and no others.

    Where a table does not say how many inputs there were, those it has must be the first that its
    settings choose. One that names no settings says nothing of what it should hold.

    Raises:
        UserError: an input is missing, or is there though it was not chosen.
    """
    about, have = found.about, np.sort(found.index)
    settings = about.get("settings", {})
    if "seeds" in about and "shares" not in about:  # merged by a version that did not say of what
        return
    chosen = [
        found.kind.model_construct(start=start, every=every, max_inputs=most)
        for start, every, most in (
            _share(share, found.path) for share in about.get("shares", [settings])
        )
    ]
    inputs = about.get("inputs")
    if inputs is None:
        if len(chosen) > 1 or not settings:
            return
        inputs = int(have[-1]) + 1
    elif type(inputs) is not int or not 0 < inputs <= MOST:
        raise UserError(f"{found.path}: damaged: inputs must be a number of inputs")
    wanted = np.unique(np.concatenate([np.asarray(each.indices(inputs)) for each in chosen]))
    if np.array_equal(have, wanted):
        return
    missing, more = np.setdiff1d(wanted, have), np.setdiff1d(have, wanted)
    said = [f"lacks {len(missing):,} of the {len(wanted):,} inputs"] if len(missing) else []
    said += [f"holds {len(more):,} that were not chosen"] if len(more) else []
    first = int(min([*missing[:1], *more[:1]]))
    raise UserError(
        f"{found.path}: damaged: must have one row for each input that its settings choose, "
        f"{' and '.join(said)} (input {first}); certify again"
    )


def _share(share: Any, path: Path) -> tuple[int, int, int | None]:
    """Return the first input, the step and the most inputs of a share."""
    given = share if isinstance(share, dict) else {"start": share}
    start, every, most = given.get("start", 0), given.get("every", 1), given.get("max_inputs")
    numbers = (start, every, 1 if most is None else most)
    if not all(type(number) is int and number <= MOST for number in numbers) or not (
        start >= 0 and min(numbers[1:]) >= 1
    ):
        raise UserError(f"{path}: damaged: start, every and max_inputs must choose inputs")
    return start, every, most


def of(table: pa.Table, path: Path = Path("certificates/-")) -> CertificateTable:
    """What a table in memory states. Raises as `read`; path: for messages and its name."""
    if not table.num_rows:
        raise UserError(f"{path}: no certificates in the table")
    about = tables.about(table)
    check_shape({"settings": {}, "seed": "", **about}, str(path), {"settings": dict, "seed": str})
    once = {column: _once(table, about, column, path) for column in _ONCE}
    once["n"] = once.pop("cap")
    names = ("index", "label", "prediction", "radius")
    arrays = {name: table[name].to_numpy() for name in names}
    if len(np.unique(arrays["index"])) < table.num_rows:
        raise UserError(f"{path}: damaged: has more than one certificate of the same input")
    if not (np.diff(arrays["index"]) > 0).all():
        raise UserError(f"{path}: damaged: its rows must be in the order of their inputs")
    bulk.check_labels(about, arrays["index"], arrays["label"], path)
    kind = kind_of(table, path)
    return CertificateTable(path=path, kind=kind, about=about, table=table, **once, **arrays)


def _once(table: pa.Table, about: dict[str, Any], column: str, path: Path) -> Any:
    values = table[column].unique().to_pylist()
    if len(values) > 1:
        raise UserError(
            f"{path}: its rows differ in {column} ({', '.join(map(str, sorted(values)))}), so no "
            "one statement holds for all of them; merge or certify again"
        )
    stated = about.get("settings", {}).get(_ONCE[column], values[0])
    if column == "alpha":
        stated = about.get("rebound_alpha", stated)
    if stated != values[0]:
        raise UserError(
            f"{path}: damaged: its rows say {column} {values[0]}, its settings {stated}"
        )
    return values[0]
