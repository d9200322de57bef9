"""Smoothing of the inputs: what Cohen's certificate and its sequential forms have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from dpdist.base.errors import UserError
from dpdist.base.fields import Positive
from dpdist.base.reading import shown
from dpdist.base.rounding import exact, percent
from dpdist.certification.certificate import (
    Certificate,
    CertifiedSizes,
    lists,
    require,
    sample,
    selected_hits,
)
from dpdist.certification.noises import NOISES, Gaussian, Noise
from dpdist.certification.quadrature import certified_by, of_table
from dpdist.certification.radii import ball_factor
from dpdist.certification.verdict import ABSTAIN, Verdict

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn

    from dpdist.certification.certificate import CertificateTable, Counter, SampledPlace

_NEAR = 1e-6  # decided radii are tested at a probability a hair above their own


class Smoothing(Certificate):
    """Votes of a model under noise on its input.

    sigma: standard deviation of the noise, in input units. noise_bank: one noise stream for all
    inputs; each certificate stays valid, errors can coincide.
    """

    sigma: Positive
    noise: Literal["gaussian", "laplace", "uniform"] = "gaussian"
    noise_bank: bool = Field(
        default=False, description="one noise stream for all inputs; errors can then coincide"
    )

    mode: str
    belongs: ClassVar[str] = "with sigma, by smoothing the inputs"
    counted: ClassVar[str] = "{n:,} draws an input"
    keeps_blocks: ClassVar[bool] = True  # the first of a noise bank are asked for again and again

    @model_validator(mode="after")
    def _radii(self) -> Self:
        rising = all(a < b for a, b in zip(self.radii[:-1], self.radii[1:], strict=True))
        require(rising, "radii", "ascending")
        reachable = all(self.smoothing.probability_for_radius(r) < 1 - 1e-12 for r in self.radii)
        require(reachable, "radii", f"reachable with {self.noise} noise, sigma {self.sigma}")
        return self

    @classmethod
    def fits(cls, section: Mapping[str, Any]) -> bool:
        mode = section.get("mode") or "fixed"
        return section.get("sigma") is not None and mode == cls.mode_name()

    @property
    def smoothing(self) -> Noise:
        """The noise."""
        return NOISES[self.noise](self.sigma)

    def place(self, model: nn.Module, input_shape: tuple[int, ...]) -> SampledPlace:
        """Noise that the model has further inside is drawn too: behind an affine first layer it
        certifies with the input's, elsewhere it is post-processing."""
        from dpdist.certification.places import SmoothedPlace
        from dpdist.certification.quadrature import of_place
        from dpdist.randomness.places import place_of

        where = place_of(model).smoothed(self.sigma)
        if where.deeper and (self.noise != Gaussian.name or self.noise_bank):
            raise UserError(
                "the model has noise of its own behind its input: certify with noise gaussian and "
                "without noise bank"
            )
        both = of_place(where, model, input_shape, self.sigma)
        return SmoothedPlace(self.smoothing, self.noise_bank, self.keeps_blocks, where, both)

    def hypotheses(self, noise: Noise) -> tuple[float, ...]:
        """p0 of each radius under what certifies, a hair above the exact one so that rounding
        favours no radius."""
        exact = [noise.probability_for_radius(radius) for radius in self.radii]
        return tuple(p + (1 - p) * 1e-9 for p in exact)

    def counts(self, counter: Counter, x: Tensor, index: int, batch: int) -> np.ndarray:
        """Of the classes over all n draws, whatever the mode: int64 (classes,). Draws without a
        class are in none of them."""
        blocks = range(-(-self.n // batch))
        return np.sum([sample(counter, x, index, b, batch, self.n) for b in blocks], axis=0)

    def row(self, index: int, label: int, verdict: Verdict, place: SampledPlace) -> dict[str, Any]:
        return {
            "index": index,
            "label": label,
            **dataclasses.asdict(verdict),
            "n0": self.n0,
            "alpha": self.alpha,
            "norm": self.smoothing.norm,
            "noise": self.noise,
            "sigma": self.sigma,
            "mode": self.mode,
            "cap": self.n,
            "spending": self.spending,
        }

    @classmethod
    def constants(cls, table: pa.Table, settings: Mapping[str, Any]) -> dict[str, Any]:
        noise = table["noise"][0].as_py()
        if noise not in NOISES:
            raise UserError(
                f"the table: damaged: noise must be one of {', '.join(NOISES)}, got {shown(noise)}"
            )
        return {**super().constants(table, settings), "norm": NOISES[noise].norm}

    @classmethod
    def check(cls, table: pa.Table, where: str) -> None:
        """What is stated of noise behind the input must be what the radii were made with."""
        both = of_table(table)
        if both is not None:
            follow = Gaussian(both.both).radius(table["p_lower"].to_numpy())
            radii, near = table["radius"].to_numpy(), _NEAR * (follow + both.both)
            if not (abs(radii - follow) <= near).all():
                raise UserError(
                    f"{where}: damaged: its radii do not follow from the sigma, hidden noise and "
                    "sensitivity that it states"
                )
        super().check(table, where)

    @classmethod
    def sound_counts(cls, table: pa.Table) -> np.ndarray:
        """All draws that were asked for, with the counts of all classes."""
        found = lists(table, "histogram")
        return np.zeros(len(table), bool) if found is None else selected_hits(table, found[0])

    @classmethod
    def made(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        k, n, selected = (table[name].to_numpy() for name in ("k", "n", "selected"))
        lower = np.asarray(cls.bound(k, n, alpha))
        radius = np.asarray(certified_by(table).radius(lower))
        prediction = np.where(lower > 0.5, selected, ABSTAIN)
        return {"p_lower": lower, "radius": radius, "prediction": prediction}

    @classmethod
    def sizes(cls, table: pa.Table) -> tuple[CertifiedSizes, ...]:
        """The vote's, with its noise: other noise is another classifier. With noise behind the
        first layer too, what either alone certifies, and what DPAL's sum would."""
        first = table.slice(0, 1).to_pylist()[0]
        title = f"vote (Cohen), {first['noise']} {first['sigma']:g}"
        answer, size = table["prediction"].to_numpy(), table["radius"].to_numpy()
        both = of_table(table)
        if both is None:
            return (CertifiedSizes("cohen", first["norm"], title, answer, size, "--"),)
        share = size / both.both * (1 - 1e-12)
        found = [CertifiedSizes("cohen", "l2", f"{title} and hidden noise", answer, size, "--")]
        for name, of, worth, holds in (
            ("input", "its input noise alone", both.sigma, True),
            ("hidden", "its hidden noise alone", both.behind, True),
            ("as_printed", "kappa + phi (does not hold)", both.as_printed, False),
        ):
            words = f"vote, {of}"
            found.append(CertifiedSizes(name, "l2", words, answer, share * worth, holds=holds))
        return tuple(found)

    @classmethod
    def sizes_in(cls, table: pa.Table, norm: str, numbers: int) -> list[CertifiedSizes]:
        """In other norms: the largest ball inside the certified one."""
        return [
            dataclasses.replace(
                sizes, norm=norm, size=sizes.size / ball_factor(sizes.norm, norm, numbers)
            )
            for sizes in cls.sizes(table)
        ]

    @classmethod
    def bound(cls, hits: ArrayLike, draws: ArrayLike, alpha: float) -> Any:
        """The lower bound of the class's probability that counts allow at this error: float64, of
        the shape of the counts."""
        raise NotImplementedError

    @classmethod
    def rebound(cls, table: pa.Table, alpha: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        made = {name: column.tolist() for name, column in cls.made(table, alpha).items()}
        return [
            row | {name: column[place] for name, column in made.items()} | {"alpha": alpha}
            for place, row in enumerate(table.to_pylist())
        ], {}

    @classmethod
    def lines(cls, found: CertificateTable, at: Sequence[float]) -> list[tuple[str, str]]:
        name = f"certified at {found.norm.upper()} radius"
        lines = [(f"{name} {exact(r)}", f"{percent(found.certified_accuracy(r))} %") for r in at]
        for sizes in found.sizes[1:]:
            held = sizes.certified(found.label)
            shares = ", ".join(f"{percent(np.mean(held >= r))} % at {exact(r)}" for r in at)
            lines.append((sizes.title, shares))
        return lines

    @classmethod
    def words(cls, found: CertificateTable) -> str:
        hidden = "" if of_table(found.table) is None else " and hidden noise"
        noise = f"{found.noise.capitalize()} noise {found.sigma:g}{hidden}"
        return f"Smoothing by {noise}, {cls.counted.format(n=found.n)}"

    @classmethod
    def terms(cls, found: CertificateTable) -> dict[str, Any]:
        return {"sigma": found.sigma, "radii": () if "radii" in cls.free else found.radii}

    @classmethod
    def attacked_as(cls, noise: str, sigma: float) -> tuple[str, float | None] | None:
        """Attacks smooth by Gaussian noise only."""
        return ("input", sigma) if noise == Gaussian.name else None

    def fresh(self, seed: str) -> Certificate:
        return super().fresh(seed).model_copy(update={"noise_bank": False})

    def name_parts(self) -> list[str]:
        parts = [f"sigma-{self.sigma:g}", *self.mode_parts(), f"n-{self.n}"]
        return parts if self.noise == "gaussian" else [*parts, self.noise]

    def mode_parts(self) -> list[str]:
        """The mode, and what of it tells two tables apart."""
        return [self.mode]
