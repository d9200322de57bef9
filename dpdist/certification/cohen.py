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
    PartialCounts,
    Verdict,
    combined_noise_of_table,
    consistent_histograms,
    counts_to_json,
    equivalent_input_noise,
    list_columns,
    read_combined_noise,
    require_setting,
    sample_under_noise,
    select_class,
    selected_class,
    total_counts,
)
from dpdist.certification.noise import (
    NOISES,
    Gaussian,
    Noise,
    gaussian_l2_radius_two_class,
    norm_equivalence_factor,
)
from dpdist.core.binomial import (
    clopper_pearson_lower,
    clopper_pearson_upper,
    hoeffding_lower,
    two_sided_p_value,
)
from dpdist.core.console import format_exact, format_percent
from dpdist.core.errors import UserError
from dpdist.core.fields import Positive
from dpdist.core.files import quoted

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn

    from dpdist.certification.certificate import CertificateTable, ClassCounter, NoiseSampler
    from dpdist.certification.worker import VoteSampler
    from dpdist.core.files import ColumnSpec


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
    wrong_key_hint: ClassVar[str] = "with sigma, by smoothing the inputs"
    draws_phrase: ClassVar[str] = "{n:,} draws an input"
    # the first of a noise bank are asked for again and again
    cache_first_blocks: ClassVar[bool] = True

    @model_validator(mode="after")
    def _validate_radii(self) -> Self:
        rising = all(a < b for a, b in zip(self.radii[:-1], self.radii[1:], strict=True))
        require_setting(rising, "radii", "ascending")
        reachable = all(
            self.smoothing_noise.probability_for_radius(r) < 1 - 1e-12 for r in self.radii
        )
        require_setting(
            reachable, "radii", f"reachable with {self.noise} noise, sigma {self.sigma}"
        )
        return self

    @classmethod
    def accepts_section(cls, section: Mapping[str, Any]) -> bool:
        mode = section.get("mode") or "fixed"
        return section.get("sigma") is not None and mode == cls.mode_name()

    @property
    def smoothing_noise(self) -> Noise:
        """The noise."""
        return NOISES[self.noise](self.sigma)

    def build_sampler(self, model: nn.Module, input_shape: tuple[int, ...]) -> NoiseSampler:
        """Noise that the model has further inside is drawn too: behind an affine first layer it
        certifies with the input's, elsewhere it is post-processing."""
        from dpdist.certification.certificate import combined_noise_of_model
        from dpdist.certification.worker import VoteSampler
        from dpdist.randomness.noise_location import find_noise_location

        where = find_noise_location(model).with_input_noise(self.sigma)
        if where.has_inner_noise and (self.noise != Gaussian.name or self.noise_bank):
            raise UserError(
                "the model has noise of its own behind its input: certify with noise gaussian and "
                "without noise bank"
            )
        both = combined_noise_of_model(where, model, input_shape, self.sigma)
        return VoteSampler(
            self.smoothing_noise, self.noise_bank, self.cache_first_blocks, where, both
        )

    def hypotheses(self, noise: Noise) -> tuple[float, ...]:
        """p0 of each radius under what certifies, a hair above the exact one so that rounding
        favours no radius."""
        exact = [noise.probability_for_radius(radius) for radius in self.radii]
        return tuple(p + (1 - p) * 1e-9 for p in exact)

    def sample_all_draws(
        self, counter: ClassCounter, x: Tensor, index: int, batch: int
    ) -> np.ndarray:
        """Return the counts of the classes over all n draws, whatever the mode: int64 (classes,).

        Draws without a class are in none of them.
        """
        blocks = range(-(-self.n // batch))
        result: np.ndarray = np.sum(
            [sample_under_noise(counter, x, index, b, batch, self.n) for b in blocks], axis=0
        )
        return result

    def row(
        self, index: int, label: int, verdict: Verdict, sampler: NoiseSampler
    ) -> dict[str, Any]:
        return {
            "index": index,
            "label": label,
            **dataclasses.asdict(verdict),
            "n0": self.n0,
            "alpha": self.alpha,
            "norm": self.smoothing_noise.norm,
            "noise": self.noise,
            "sigma": self.sigma,
            "mode": self.mode,
            "cap": self.n,
            "spending": self.spending,
        }

    @classmethod
    def constant_columns(cls, table: pa.Table, settings: Mapping[str, Any]) -> dict[str, Any]:
        noise = table["noise"][0].as_py()
        if noise not in NOISES:
            raise UserError(
                f"the table: damaged: noise must be one of {', '.join(NOISES)}, got {quoted(noise)}"
            )
        return {**super().constant_columns(table, settings), "norm": NOISES[noise].norm}

    @classmethod
    def check_table(cls, table: pa.Table, context: str) -> None:
        """Check that the stated noise behind the input is that of the radii."""
        both = combined_noise_of_table(table)
        if both is not None:
            follow = Gaussian(both.combined_sigma).radius(table["p_lower"].to_numpy())
            radii, near = table["radius"].to_numpy(), _NEAR * (follow + both.combined_sigma)
            if not (abs(radii - follow) <= near).all():
                raise UserError(
                    f"{context}: damaged: its radii do not follow from the sigma, hidden noise and "
                    "sensitivity that it states"
                )
        super().check_table(table, context)

    @classmethod
    def consistent_counts(cls, table: pa.Table) -> np.ndarray:
        """All draws that were asked for, with the counts of all classes."""
        found = list_columns(table, "histogram")
        return (
            np.zeros(len(table), bool) if found is None else consistent_histograms(table, found[0])
        )

    @classmethod
    def recompute_columns(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        k, n, selected = (table[name].to_numpy() for name in ("k", "n", "selected"))
        lower = np.asarray(cls.lower_bound(k, n, alpha))
        radius = np.asarray(equivalent_input_noise(table).radius(lower))
        prediction = np.where(lower > 0.5, selected, ABSTAIN)
        return {"p_lower": lower, "radius": radius, "prediction": prediction}

    @classmethod
    def read_sizes(cls, table: pa.Table) -> tuple[CertifiedSizes, ...]:
        """The vote's, with its noise: other noise is another classifier. With noise behind the
        first layer too, what either alone certifies, and what DPAL's sum would."""
        first = table.slice(0, 1).to_pylist()[0]
        title = f"vote (Cohen), {first['noise']} {first['sigma']:g}"
        answer, size = table["prediction"].to_numpy(), table["radius"].to_numpy()
        both = combined_noise_of_table(table)
        if both is None:
            return (CertifiedSizes("cohen", first["norm"], title, answer, size, "--"),)
        share = size / both.combined_sigma * (1 - 1e-12)
        found = [CertifiedSizes("cohen", "l2", f"{title} and hidden noise", answer, size, "--")]
        for name, of, worth, holds in (
            ("input", "its input noise alone", both.sigma, True),
            ("hidden", "its hidden noise alone", both.hidden_as_input_sigma, True),
            ("as_printed", "kappa + phi (does not hold)", both.sigma_as_printed, False),
        ):
            words = f"vote, {of}"
            found.append(CertifiedSizes(name, "l2", words, answer, share * worth, is_valid=holds))
        return tuple(found)

    @classmethod
    def sizes_in_norm(cls, table: pa.Table, norm: str, dimension: int) -> list[CertifiedSizes]:
        """Return the sizes in other norms: the largest ball inside the certified one."""
        return [
            dataclasses.replace(
                sizes,
                norm=norm,
                size=sizes.size / norm_equivalence_factor(sizes.norm, norm, dimension),
            )
            for sizes in cls.read_sizes(table)
        ]

    @classmethod
    def lower_bound(cls, hits: ArrayLike, draws: ArrayLike, alpha: float) -> Any:
        """The lower bound of the class's probability that counts allow at this error: float64, of
        the shape of the counts."""
        raise NotImplementedError

    @classmethod
    def recertify(
        cls, table: pa.Table, alpha: float
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        made = {
            name: column.tolist() for name, column in cls.recompute_columns(table, alpha).items()
        }
        return [
            row | {name: column[place] for name, column in made.items()} | {"alpha": alpha}
            for place, row in enumerate(table.to_pylist())
        ], {}

    @classmethod
    def summary_rows(
        cls, certificates: CertificateTable, radii: Sequence[float]
    ) -> list[tuple[str, str]]:
        name = f"certified at {certificates.norm.upper()} radius"
        lines = [
            (f"{name} {format_exact(r)}", f"{format_percent(certificates.certified_accuracy(r))} %")
            for r in radii
        ]
        for sizes in certificates.sizes[1:]:
            held = sizes.size_if_correct(certificates.label)
            shares = ", ".join(
                f"{format_percent(np.mean(held >= r))} % at {format_exact(r)}" for r in radii
            )
            lines.append((sizes.title, shares))
        return lines

    @classmethod
    def describe(cls, certificates: CertificateTable) -> str:
        hidden = "" if combined_noise_of_table(certificates.table) is None else " and hidden noise"
        noise = f"{certificates.noise.capitalize()} noise {certificates.sigma:g}{hidden}"
        return f"Smoothing by {noise}, {cls.draws_phrase.format(n=certificates.n)}"

    @classmethod
    def comparison_key(cls, certificates: CertificateTable) -> dict[str, Any]:
        return {
            "sigma": certificates.sigma,
            "radii": () if "radii" in cls.result_free_fields else certificates.radii,
        }

    @classmethod
    def attack_noise(cls, noise: str, sigma: float) -> tuple[str, float | None] | None:
        """Attacks smooth by Gaussian noise only."""
        return ("input", sigma) if noise == Gaussian.name else None

    def with_seed(self, seed: str) -> Certificate:
        return super().with_seed(seed).model_copy(update={"noise_bank": False})

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
        >>> table = dpdist.certify(model, (inputs, labels), settings, executor="local")
        >>> table.prediction.tolist(), bool((table.radius > 0.25).all())
        ([0, 1], True)
    """

    mode: Literal["fixed"] = "fixed"
    # only what is to be shown of the results
    result_free_fields: ClassVar[frozenset[str]] = frozenset({"radii"})
    default_batch: ClassVar[int] = 1000
    max_device_batch: ClassVar[int] = 32768
    cache_first_blocks: ClassVar[bool] = False
    sampled_columns: ClassVar[frozenset[str]] = frozenset({"histogram"})

    def sample(
        self,
        counter: ClassCounter,
        x: Tensor,
        index: int,
        low: int,
        high: int,
        batch: int,
        sampler: VoteSampler,
    ) -> PartialCounts:
        """SampleUnderNoise: blocks low..high-1 of the n draws; the first also chooses the class."""
        partial: PartialCounts = {}
        if low == 0:
            partial["selected"] = select_class(counter, self.n0, x, index)
        blocks = [
            sample_under_noise(counter, x, index, block, batch, self.n)
            for block in range(low, high)
        ]
        return partial | counts_to_json(
            np.sum(blocks, axis=0), min(high * batch, self.n) - low * batch
        )

    def decide(self, partials: Sequence[PartialCounts], sampler: VoteSampler) -> Verdict:
        """The certificate, from the counts of all blocks."""
        counts = total_counts(partials, "histogram", self.n)
        return certify(
            selected_class(partials),
            counts,
            self.alpha,
            sampler.equivalent_noise,
            self.n,
            self.lower_bound,
        )

    def predict(
        self, counter: ClassCounter, x: Tensor, index: int, batch: int, sampler: VoteSampler
    ) -> int:
        """PREDICT, from n draws."""
        return predict(self.sample_all_draws(counter, x, index, batch), self.alpha, self.n)

    def certify_other_class(
        self,
        counter: ClassCounter,
        x: Tensor,
        index: int,
        excluded_class: int,
        batch: int,
        sampler: VoteSampler,
    ) -> Verdict:
        """Only the selected class can be certified: where it is ``excluded_class``, no other is."""
        selected = select_class(counter, self.n0, x, index)
        if selected == excluded_class:
            return Verdict(ABSTAIN, selected, 0, 0, 0.0, 0.0)
        result: Verdict = super().certify_other_class(
            counter, x, index, excluded_class, batch, sampler
        )
        return result

    @classmethod
    def recreate(
        cls, certificates: CertificateTable, norm: str, batch: int
    ) -> tuple[Cohen, VoteSampler]:
        from dpdist.certification.worker import VoteSampler

        settings = cls.model_validate(
            {
                "sigma": certificates.sigma,
                "n0": certificates.n0,
                "n": certificates.n,
                "alpha": certificates.alpha,
            }
            | {"batch": batch, "noise": certificates.noise}
        )
        quadrature = read_combined_noise(certificates.job_record, certificates.sigma)
        return settings, VoteSampler(settings.smoothing_noise, combined_noise=quadrature)

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
    lower_confidence_bound: Callable[..., Any] = clopper_pearson_lower,
) -> Verdict:
    """CERTIFY, given a class chosen by other draws and the counts of n draws: int (classes,).

    With probability at least 1 - alpha over the draws: the smoothed classifier says the prediction
    in the ball of the radius around the input, or the verdict abstains. draws: n, of which some may
    have had no class, and count against the selected one; None: all had one.
    lower_confidence_bound: LowerConfBound.
    """
    k, n = int(counts[selected]), int(counts.sum()) if draws is None else draws
    p_lower = float(lower_confidence_bound(k, n, alpha))
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
    wrong_key_hint: ClassVar[str] = "with bound hoeffding, by smoothing the inputs"
    draws_phrase: ClassVar[str] = "{n:,} draws an input, bounded by Hoeffding's inequality"

    @classmethod
    def accepts_section(cls, section: Mapping[str, Any]) -> bool:
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
        >>> table = dpdist.certify(model, (inputs, labels), settings, executor="local")
        >>> table.prediction.tolist(), bool((table.radius > 0.25).all())
        ([0, 1], True)
    """

    mode: Literal["two-class"] = "two-class"  # type: ignore[assignment]
    draws_phrase: ClassVar[str] = "{n:,} draws an input, the runner-up bounded by its own"

    @model_validator(mode="after")
    def _require_gaussian(self) -> Self:
        require_setting(self.noise == Gaussian.name, "noise", "gaussian when mode is two-class")
        return self

    def decide(self, partials: Sequence[PartialCounts], sampler: VoteSampler) -> Verdict:
        counts = total_counts(partials, "histogram", self.n)
        return certify_against_runner_up(
            selected_class(partials), counts, self.alpha, sampler.equivalent_noise, self.n
        )

    @classmethod
    def table_schema(cls) -> pa.Schema:
        import pyarrow as pa

        return super().table_schema().append(pa.field("p_upper", pa.float64(), nullable=False))

    @classmethod
    def extra_columns(cls) -> Mapping[str, ColumnSpec]:
        return {**super().extra_columns(), "p_upper": (float, 0), "histogram": (object, None)}

    @classmethod
    def recompute_columns(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        counts = np.asarray(table["histogram"].to_pylist(), dtype=np.int64)
        selected = table["selected"].to_numpy()
        lower, upper = runner_up_bounds(counts, selected, alpha, table["n"].to_numpy())
        sigma = equivalent_input_noise(table).sigma
        radius = np.asarray(gaussian_l2_radius_two_class(lower, upper, sigma))
        prediction = np.where(radius > 0, selected, ABSTAIN)
        return {"p_lower": lower, "p_upper": upper, "radius": radius, "prediction": prediction}

    @classmethod
    def achievable_radius(cls, table: pa.Table, label_probability: np.ndarray) -> np.ndarray:
        """Return the reach with the rest spread evenly over the other classes."""
        others = max(1, len(table["histogram"][0]) - 1)
        rest = (1 - label_probability) / others
        radius = gaussian_l2_radius_two_class(
            label_probability, rest, equivalent_input_noise(table).sigma
        )
        return np.where(label_probability > rest, radius, -1.0)


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
