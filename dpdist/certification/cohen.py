"""Certified Adversarial Robustness via Randomized Smoothing (Cohen, Rosenfeld, Kolter, ICML 2019).

The smoothed classifier g says the class that f says most often under noise:

    g(x) = argmax_c  p_c,   p_c = Pr[f(x + e) = c],   e ~ N(0, sigma^2 I).

Theorem 1, with p_B = 1 - p_A: if p_A >= p_lower > 1/2 then g(x + d) = A for all d of L2 norm below
R = sigma Phi^-1(p_lower). CERTIFY and PREDICT (Section 3.2) estimate g and R from draws of f; each
errs with probability at most alpha. This is the code that `dpdist certify` and `predict` run;
other noises have their own radius in other norms (``dpdist.certification.noise``). Draws are made
in canonical blocks, so that a block can be counted anywhere and again: see
``dpdist.cluster.resumable_job``.

The certificate with the runner-up's own bound has R = sigma / 2 (Phi^-1(p_a) - Phi^-1(p_b)), for
p_a a lower bound of the class's probability and p_b an upper bound of every other's; CERTIFY takes
p_b = 1 - p_a. Where the rest is spread over several classes the runner-up has less, and the radius
is larger; a class may even be certified that has no majority. Nine tenths of alpha are for p_a, a
tenth for p_b, both by Clopper and Pearson, p_b from the largest count among the other classes.
Other tools share the error among these classes; none is needed.
*Proof.* The runner-up is one class b by the truth, whatever was drawn. Its own bound, at a tenth
of alpha, is wrong with that probability; the bound from the largest count is never smaller, and
beside a true p_a it makes the radius too large only if it is below b's probability. As p_b <= 1 -
p_a is taken where it is smaller, the radius is never below Cohen's at 0.9 alpha. A draw without a
class (its logits are not finite) counts as the runner-up's, whichever class that is: then its
count is never too small, and an answer that is no class is bounded with the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from dpdist.certification.certificate import (
    ABSTAIN,
    Certificate,
    CertifiedSizes,
    Partial,
    Verdict,
    certified_by,
    counted,
    lists,
    of_table,
    require,
    sample,
    select,
    selected_by,
    selected_hits,
    stated,
    totals,
)
from dpdist.certification.noise import (
    NOISES,
    Gaussian,
    Noise,
    ball_factor,
    gaussian_l2_radius_two_class,
)
from dpdist.core.binomial import (
    clopper_pearson_lower,
    clopper_pearson_upper,
    hoeffding_lower,
    two_sided_p_value,
)
from dpdist.core.console import exact, percent
from dpdist.core.errors import UserError
from dpdist.core.fields import Positive
from dpdist.core.files import shown

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn

    from dpdist.certification.certificate import CertificateTable, Counter, SampledPlace
    from dpdist.certification.worker import SmoothedPlace
    from dpdist.core.files import Column


# --- smoothing of the inputs ------------------------------------------------------------------


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
        from dpdist.certification.certificate import of_place
        from dpdist.certification.worker import SmoothedPlace
        from dpdist.randomness.noise_location import place_of

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
        """Return the counts of the classes over all n draws, whatever the mode: int64 (classes,).

        Draws without a class are in none of them.
        """
        blocks = range(-(-self.n // batch))
        result: np.ndarray = np.sum(
            [sample(counter, x, index, b, batch, self.n) for b in blocks], axis=0
        )
        return result

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
        """Check that the stated noise behind the input is that of the radii."""
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
        lower = np.asarray(cls.lower_bound(k, n, alpha))
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
        """Return the sizes in other norms: the largest ball inside the certified one."""
        return [
            dataclasses.replace(
                sizes, norm=norm, size=sizes.size / ball_factor(sizes.norm, norm, numbers)
            )
            for sizes in cls.sizes(table)
        ]

    @classmethod
    def lower_bound(cls, hits: ArrayLike, draws: ArrayLike, alpha: float) -> Any:
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


# --- CERTIFY and PREDICT ----------------------------------------------------------------------


class Cohen(Smoothing):
    """Certify by CERTIFY: n0 draws choose a class, exactly n others bound its probability below.

    Guarantee: for each input by itself, with probability at least 1 - `alpha` over the draws, the
    smoothed classifier answers the certified class everywhere within the certified radius, or the
    verdict abstains. With Gaussian noise the radius is sigma Phi^-1(p_lower), in L2; p_lower is the
    lower bound of Clopper and Pearson. The radius is never rounded up.

    Args:
        sigma: standard deviation of the noise, in input units, above 0.
        noise: "gaussian" certifies L2 balls; "laplace" and "uniform" certify L1 balls.
        noise_bank: use one noise stream for all inputs; errors of inputs can then coincide.
        n0: draws that choose the class, for each input.
        n: draws that bound its probability, for each input.
        alpha: error probability of each input's certificate, strictly between 0 and 1.
        radii: radii that summaries show, in input units, ascending; no result depends on them.
        start: index of the first input.
        every: certify every k-th input from there on.
        max_inputs: the most inputs to certify; None: no limit.
        batch: rows of the executed batch, which is also the block of draws; None: chosen for the
            input's size.
        seed: seed of the noise, a text; None: a secret seed, drawn at the start and stored with the
            results.
        form: inference form: "frozen", "compiled", "channels-last", "eager" or "bf16"; None: chosen
            by a probe.
        generator: "aes" or "philox"; None: aes on CPUs, philox on GPUs.

    Raises:
        pydantic.ValidationError: a value is out of range; `dpdist.settings_of` raises UserError
            instead.

    Source:
        Cohen, Rosenfeld and Kolter, ICML 2019: Theorem 1 and Section 3.2.

    Example:
        >>> import numpy as np, torch, dpdist
        >>> inputs, labels = np.eye(2, dtype=np.float32), np.array([0, 1])
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))  # answers the larger coordinate
        >>> settings = dpdist.Cohen(sigma=0.25, n=1000)
        >>> table = dpdist.certify(model, (inputs, labels), settings, here=True)
        >>> table.prediction.tolist(), bool((table.radius > 0.25).all())
        ([0, 1], True)
    """

    mode: Literal["fixed"] = "fixed"
    free: ClassVar[frozenset[str]] = frozenset({"radii"})  # only what is to be shown of the results
    usual_batch: ClassVar[int] = 1000
    device_batch: ClassVar[int] = 32768
    keeps_blocks: ClassVar[bool] = False
    drawn: ClassVar[frozenset[str]] = frozenset({"histogram"})

    def work(
        self,
        counter: Counter,
        x: Tensor,
        index: int,
        low: int,
        high: int,
        batch: int,
        place: SmoothedPlace,
    ) -> Partial:
        """SampleUnderNoise: blocks low..high-1 of the n draws; the first also chooses the class."""
        partial: Partial = {}
        if low == 0:
            partial["selected"] = select(counter, self.n0, x, index)
        blocks = [sample(counter, x, index, block, batch, self.n) for block in range(low, high)]
        return partial | counted(np.sum(blocks, axis=0), min(high * batch, self.n) - low * batch)

    def verdict(self, partials: Sequence[Partial], place: SmoothedPlace) -> Verdict:
        """The certificate, from the counts of all blocks."""
        counts = totals(partials, "histogram", self.n)
        return certify(
            selected_by(partials), counts, self.alpha, place.certified, self.n, self.lower_bound
        )

    def label(
        self, counter: Counter, x: Tensor, index: int, batch: int, place: SmoothedPlace
    ) -> int:
        """PREDICT, from n draws."""
        return predict(self.counts(counter, x, index, batch), self.alpha, self.n)

    def certify_other(
        self, counter: Counter, x: Tensor, index: int, than: int, batch: int, place: SmoothedPlace
    ) -> Verdict:
        """Only the selected class can be certified: where it is ``than``, no other is."""
        selected = select(counter, self.n0, x, index)
        if selected == than:
            return Verdict(ABSTAIN, selected, 0, 0, 0.0, 0.0)
        result: Verdict = super().certify_other(counter, x, index, than, batch, place)
        return result

    @classmethod
    def again(cls, found: CertificateTable, norm: str, batch: int) -> tuple[Cohen, SmoothedPlace]:
        from dpdist.certification.worker import SmoothedPlace

        settings = cls.model_validate(
            {"sigma": found.sigma, "n0": found.n0, "n": found.n, "alpha": found.alpha}
            | {"batch": batch, "noise": found.noise}
        )
        quadrature = stated(found.about, found.sigma)
        return settings, SmoothedPlace(settings.smoothing, quadrature=quadrature)

    @classmethod
    def lower_bound(cls, hits: ArrayLike, draws: ArrayLike, alpha: float) -> Any:
        """LowerConfBound: Clopper-Pearson, Pr[p < bound] <= alpha."""
        return clopper_pearson_lower(hits, draws, alpha)


def certify(
    selected: int,
    counts: np.ndarray,
    alpha: float,
    noise: Noise,
    draws: int | None = None,
    bound: Callable[..., Any] = clopper_pearson_lower,
) -> Verdict:
    """CERTIFY, given a class chosen by other draws and the counts of n draws: int (classes,).

    With probability at least 1 - alpha over the draws: the smoothed classifier says the prediction
    in the ball of the radius around the input, or the verdict abstains. draws: n, of which some may
    have had no class, and count against the selected one; None: all had one. bound: LowerConfBound.
    """
    k, n = int(counts[selected]), int(counts.sum()) if draws is None else draws
    p_lower = float(bound(k, n, alpha))
    certified = p_lower > 0.5
    return Verdict(
        prediction=selected if certified else ABSTAIN,
        selected=selected,
        k=k,
        n=n,
        p_lower=p_lower,
        radius=float(noise.radius(p_lower)),  # Gaussian: sigma Phi^-1(p_lower), rounded down
        histogram=tuple(int(count) for count in counts),
    )


def predict(counts: np.ndarray, alpha: float, draws: int | None = None) -> int:
    """PREDICT (Proposition 1): the most frequent class, or -1 unless it beats the second.

    Another class than the smoothed classifier's is returned with probability at most alpha. draws:
    how many were made; those without a class are an outcome beside the classes, which is never
    returned. None: all had one.
    """
    undefined = 0 if draws is None else draws - int(np.sum(counts))
    order = np.argsort(-np.asarray(counts), kind="stable")
    first, second = int(counts[order[0]]), int(counts[order[1]]) if len(order) > 1 else 0
    second = max(second, undefined)
    sure = first >= undefined and two_sided_p_value(first, first + second) <= alpha
    return int(order[0]) if sure else ABSTAIN


# --- Hoeffding's bound of votes ---------------------------------------------------------------


class HoeffdingVotes(Cohen):
    """Certify as `dpdist.Cohen`, with Hoeffding's bound in place of Clopper and Pearson's.

    Guarantee: that of `dpdist.Cohen`, at the same `alpha`. On the same draws no radius is larger.
    It is for comparison with certificates that were made so, such as PixelDP's (Lecuyer et al.,
    2019). A recipe asks for it by ``bound: hoeffding`` beside sigma.

    Args:
        sigma: standard deviation of the noise, in input units; all further fields are those of
            `dpdist.Cohen`.

    Raises:
        pydantic.ValidationError: as for `dpdist.Cohen`.

    Source:
        Hoeffding, Journal of the American Statistical Association 1963.

    Example:
        >>> import dpdist
        >>> by_hoeffding = dpdist.HoeffdingVotes(sigma=0.25).lower_bound(990, 1000, 0.001)
        >>> by_cohen = dpdist.Cohen(sigma=0.25).lower_bound(990, 1000, 0.001)
        >>> round(float(by_hoeffding), 3), round(float(by_cohen), 3)
        (0.931, 0.976)
    """

    mode: Literal["hoeffding"] = "hoeffding"  # type: ignore[assignment]
    bound: Literal["hoeffding"] = "hoeffding"
    belongs: ClassVar[str] = "with bound hoeffding, by smoothing the inputs"
    counted: ClassVar[str] = "{n:,} draws an input, bounded by Hoeffding's inequality"

    @classmethod
    def fits(cls, section: Mapping[str, Any]) -> bool:
        mode, bound = section.get("mode") or "fixed", section.get("bound")
        asked = bound == "hoeffding" and mode in ("fixed", "hoeffding")
        return section.get("sigma") is not None and (asked or (mode == "hoeffding" and not bound))

    @classmethod
    def lower_bound(cls, hits: ArrayLike, draws: ArrayLike, alpha: float) -> Any:
        """LowerConfBound: Hoeffding, Pr[p < bound] <= alpha."""
        return hoeffding_lower(hits, draws, alpha)


# --- the runner-up's own bound ----------------------------------------------------------------


_OF_RUNNER_UP = 0.1  # of the error


class TwoClass(Cohen):
    """Certify as `dpdist.Cohen`, with the runner-up bounded by its own count. Gaussian noise only.

    Guarantee: for each input by itself, with probability at least 1 - `alpha` over the draws, the
    smoothed classifier answers the certified class everywhere within the certified L2 radius, or
    the verdict abstains. The radius is sigma / 2 (Phi^-1(p_a) - Phi^-1(p_b)). Nine tenths of alpha
    are for the lower bound p_a of the class, a tenth for the upper bound p_b of every other class.
    The radius is never below that of `dpdist.Cohen` at 0.9 alpha. The module's text has the proof.

    Args:
        sigma: standard deviation of the noise, in input units; all further fields are those of
            `dpdist.Cohen`, with `noise` "gaussian".

    Raises:
        pydantic.ValidationError: as for `dpdist.Cohen`, or the noise is not Gaussian.

    Source:
        Cohen, Rosenfeld and Kolter, ICML 2019: Theorem 1, with both bounds.

    Example:
        >>> import numpy as np, torch, dpdist
        >>> inputs, labels = np.eye(2, dtype=np.float32), np.array([0, 1])
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))  # answers the larger coordinate
        >>> settings = dpdist.TwoClass(sigma=0.25, n=1000)
        >>> table = dpdist.certify(model, (inputs, labels), settings, here=True)
        >>> table.prediction.tolist(), bool((table.radius > 0.25).all())
        ([0, 1], True)
    """

    mode: Literal["two-class"] = "two-class"  # type: ignore[assignment]
    counted: ClassVar[str] = "{n:,} draws an input, the runner-up bounded by its own"

    @model_validator(mode="after")
    def _gaussian(self) -> Self:
        require(self.noise == Gaussian.name, "noise", "gaussian when mode is two-class")
        return self

    def verdict(self, partials: Sequence[Partial], place: SmoothedPlace) -> Verdict:
        counts = totals(partials, "histogram", self.n)
        return certify_against_runner_up(
            selected_by(partials), counts, self.alpha, place.certified, self.n
        )

    @classmethod
    def table_schema(cls) -> pa.Schema:
        import pyarrow as pa

        return super().table_schema().append(pa.field("p_upper", pa.float64(), nullable=False))

    @classmethod
    def columns(cls) -> Mapping[str, Column]:
        return {**super().columns(), "p_upper": (float, 0), "histogram": (object, None)}

    @classmethod
    def made(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        counts = np.asarray(table["histogram"].to_pylist(), dtype=np.int64)
        selected = table["selected"].to_numpy()
        lower, upper = runner_up_bounds(counts, selected, alpha, table["n"].to_numpy())
        sigma = certified_by(table).sigma
        radius = np.asarray(gaussian_l2_radius_two_class(lower, upper, sigma))
        prediction = np.where(radius > 0, selected, ABSTAIN)
        return {"p_lower": lower, "p_upper": upper, "radius": radius, "prediction": prediction}

    @classmethod
    def reach(cls, table: pa.Table, label: np.ndarray) -> np.ndarray:
        """Return the reach with the rest spread evenly over the other classes."""
        others = max(1, len(table["histogram"][0]) - 1)
        rest = (1 - label) / others
        radius = gaussian_l2_radius_two_class(label, rest, certified_by(table).sigma)
        return np.where(label > rest, radius, -1.0)


def runner_up_bounds(
    counts: np.ndarray, selected: np.ndarray, alpha: ArrayLike, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Below each selected class's probability and above every other's, each pair wrong with
    probability at most alpha. counts: int (N, classes); selected, alpha: of each row; draws (N,):
    how many were made, those without a class included."""
    others = counts.copy()
    others[np.arange(len(counts)), selected] = 0
    hits = counts.sum(1) - others.sum(1)
    runner_up = others.max(1) + draws - counts.sum(1)
    lower = np.asarray(clopper_pearson_lower(hits, draws, (1 - _OF_RUNNER_UP) * np.asarray(alpha)))
    upper = clopper_pearson_upper(runner_up, draws, _OF_RUNNER_UP * np.asarray(alpha))
    left = np.nextafter(1 - lower, 2)
    return lower, np.minimum(np.minimum(upper, left), 1.0)


def certify_against_runner_up(
    selected: int, counts: np.ndarray, alpha: float, noise: Noise, draws: int | None = None
) -> Verdict:
    """Certify as `dpdist.certification.cohen.certify`, by both bounds. counts: int (classes,)."""
    n = int(counts.sum()) if draws is None else draws
    (p_lower,), (p_upper,) = runner_up_bounds(
        counts[None], np.array([selected]), alpha, np.array([n])
    )
    radius = float(gaussian_l2_radius_two_class(p_lower, p_upper, noise.sigma))
    return Verdict(
        prediction=selected if radius > 0 else ABSTAIN,
        selected=selected,
        k=int(counts[selected]),
        n=n,
        p_lower=float(p_lower),
        radius=radius,
        histogram=tuple(int(count) for count in counts),
        p_upper=float(p_upper),
    )
