"""Certified Adversarial Robustness via Randomized Smoothing (Cohen, Rosenfeld, Kolter, ICML 2019).

The smoothed classifier g answers the class that f answers most often under noise:

    g(x) = argmax_c  p_c,   p_c = Pr[f(x + e) = c],   e ~ N(0, sigma^2 I).

Theorem 1, with p_B = 1 - p_A: if p_A >= p_lower > 1/2 then g(x + d) = A for all d of L2 norm below
R = sigma Phi^-1(p_lower). CERTIFY and PREDICT (Section 3.2) estimate g and R from samples of f;
each errs with probability at most alpha. `dpdist certify` and `predict` run this code:

    CERTIFY(f, sigma, x, n0, n, alpha)                         here
      counts0 <- SampleUnderNoise(f, x, n0, sigma)             `Cohen.sample`, by `select_class`
      c_A <- top index in counts0                              `Cohen.sample`, by `select_class`
      counts <- SampleUnderNoise(f, x, n, sigma)               `sample_under_noise`
      p_A <- LowerConfBound(counts[c_A], n, 1 - alpha)         `Cohen.lower_bound`
      if p_A > 1/2: c_A and radius sigma Phi^-1(p_A)           `certify`
      else ABSTAIN                                             `certify`
    PREDICT(f, sigma, x, n, alpha)
      counts <- SampleUnderNoise(f, x, n, sigma)               `Smoothing.predict`
      c_A, c_B <- top two; n_A, n_B <- their counts            `predict`
      if BinomPValue(n_A, n_A + n_B, 1/2) <= alpha: c_A        `predict`
      else ABSTAIN                                             `predict`

Draws are made in canonical blocks, so that any worker counts a block alike
(``dpdist.cluster.resumable_job``). Other noises and their radii in other norms are in
``dpdist.certification.noise``, other bounds in ``dpdist.certification.variants``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, final

import numpy as np
from numpy.typing import ArrayLike
from pydantic import model_validator

from dpdist.certification.certificate import (
    Certificate,
    CombinedNoise,
    PartialCounts,
    Verdict,
    counts_to_json,
    read_combined_noise,
    require_ascending,
    require_setting,
    select_class,
    selected_class,
    total_counts,
)
from dpdist.certification.noise import NOISES, Gaussian, Noise
from dpdist.certification.table import (
    ABSTAIN,
    CertificateTable,
    CertifiedSizes,
    consistent_histograms,
    list_columns,
    read_job_record,
)
from dpdist.core.binomial import clopper_pearson_lower, two_sided_p_value
from dpdist.core.errors import UserError
from dpdist.core.fields import Positive
from dpdist.core.files import quoted
from dpdist.randomness import keys

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn

    from dpdist.certification.certificate import ClassCounter, NoiseSampler
    from dpdist.certification.worker import VoteSampler


def combined_noise_of_table(table: pa.Table) -> CombinedNoise | None:
    """Return the two noises that a table of votes states; None if it states input noise only."""
    return read_combined_noise(read_job_record(table), table["sigma"][0].as_py())


def equivalent_input_noise(table: pa.Table) -> Noise:
    """Return the input noise that certifies as all noise of a table of votes."""
    both = combined_noise_of_table(table)
    if both is not None:
        return Gaussian(both.combined_sigma)
    return NOISES[table["noise"][0].as_py()](table["sigma"][0].as_py())


def columns_of_bound(table: pa.Table, p_lower: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns that follow from lower bounds of the selected classes' probabilities."""
    radius = np.asarray(equivalent_input_noise(table).radius(p_lower))
    prediction = np.where(p_lower > 0.5, table["selected"].to_numpy(), ABSTAIN)
    return {"p_lower": p_lower, "radius": radius, "prediction": prediction}


# --- smoothing of the inputs ------------------------------------------------------------------


class Smoothing(Certificate):
    """Votes of a model under noise on its input.

    Attributes:
        sigma: Standard deviation of the noise, in input units, above 0.
        noise: "gaussian" certifies L2 balls; "laplace" and "uniform" certify L1 balls.
    """

    sigma: Positive
    noise: Literal["gaussian", "laplace", "uniform"] = "gaussian"

    mode: str
    vote_title: ClassVar[str] = "vote (Cohen)"  # distinguishes tables with the same noise
    draws_words: ClassVar[str] = "{n:,} draws an input"

    @model_validator(mode="after")
    def _validate_radii(self) -> Self:
        require_ascending(self.radii)
        reachable = all(
            self.smoothing_noise.probability_for_radius(r) < 1 - 1e-12 for r in self.radii
        )
        require_setting(
            reachable, "radii", f"reachable with {self.noise} noise, sigma {self.sigma}"
        )
        return self

    @property
    @final
    def smoothing_noise(self) -> Noise:
        """Return the noise on the input: a `Gaussian`, `Laplace` or `Uniform` with `sigma`."""
        return NOISES[self.noise](self.sigma)

    @property
    @final
    def norm(self) -> str:
        """Return the norm of the radii, that of the noise: "l2" or "l1"."""
        return NOISES[self.noise].norm

    def build_sampler(self, model: nn.Module, input_shape: tuple[int, ...]) -> NoiseSampler:
        """Return the sampler of the noise on the input.

        The model's own inner noise is also drawn: after an affine first layer it certifies together
        with the input's, elsewhere it is post-processing.

        Returns:
            A `VoteSampler`, the argument `sampler` of `sample`, `predict` and `decide`.

        Raises:
            UserError: the model has inner noise, and this noise is not Gaussian.
        """
        from dpdist.certification.worker import VoteSampler, combined_noise_of_model
        from dpdist.randomness.noise_location import find_noise_location

        location = find_noise_location(model).with_input_noise(self.sigma)
        if location.has_inner_noise and self.noise != Gaussian.name:
            raise UserError(
                f"certify.noise: must be gaussian for a model with its own noise, got {self.noise}"
            )
        both = combined_noise_of_model(location, model, input_shape, self.sigma)
        return VoteSampler(self.smoothing_noise, location, both)

    def predict(
        self, counter: ClassCounter, x: Tensor, index: int, batch: int, sampler: VoteSampler
    ) -> int:
        """Return the class of one input by PREDICT, from n draws.

        Arguments are those of `sample`, without low and high.

        Returns:
            Index of the class, an int; -1 if the classifier abstains, at error `alpha`.
        """
        counts = sample_under_noise(counter, x, index, range(-(-self.n // batch)), batch, self.n)
        return predict(counts, self.alpha, self.n)

    def name_parts(self) -> list[str]:
        parts = [f"sigma-{self.sigma:g}", self.mode, f"n-{self.n}"]
        return parts if self.noise == "gaussian" else [*parts, self.noise]

    converts_norms: ClassVar[bool] = True

    @classmethod
    def constant_columns(cls, table: pa.Table, settings: Mapping[str, Any]) -> dict[str, Any]:
        noise = table["noise"][0].as_py()
        if noise not in NOISES:
            raise UserError(
                f"the table: damaged: noise must be one of {', '.join(NOISES)}, got {quoted(noise)}"
            )
        return {**super().constant_columns(table, settings), "norm": NOISES[noise].norm}

    @classmethod
    def read_sizes(cls, table: pa.Table) -> tuple[CertifiedSizes, ...]:
        """Return the vote's sizes in the norm of its noise, a tuple of `CertifiedSizes`.

        One entry, "cohen". With noise after the first layer too, four: also what each noise
        certifies by itself, and the sum that DPAL prints, which is not valid (`is_valid` False).
        """
        first = table.slice(0, 1).to_pylist()[0]
        title = f"{cls.vote_title}, {first['noise']} {first['sigma']:g}"
        answer, size = table["prediction"].to_numpy(), table["radius"].to_numpy()
        both = combined_noise_of_table(table)
        if both is None:
            return (CertifiedSizes("cohen", first["norm"], title, answer, size),)
        found = [CertifiedSizes("cohen", "l2", f"{title} and hidden noise", answer, size)]
        for name, of, sigma, is_valid in (
            ("input", "its input noise alone", both.sigma, True),
            ("hidden", "its hidden noise alone", both.hidden_as_input_sigma, True),
            ("as_printed", "kappa + phi (does not hold)", both.sigma_as_printed, False),
        ):
            own = size / both.combined_sigma * (1 - 1e-12) * sigma
            found.append(CertifiedSizes(name, "l2", f"vote, {of}", answer, own, is_valid=is_valid))
        return tuple(found)

    @classmethod
    def achievable_radius(cls, table: pa.Table, label_probability: np.ndarray) -> np.ndarray | None:
        """Return the radius at these probabilities, float64 (N,); -1 for those of at most 1/2."""
        return np.where(
            label_probability > 0.5, equivalent_input_noise(table).radius(label_probability), -1.0
        )

    @classmethod
    def describe(cls, certificates: CertificateTable) -> str:
        """Return a line about the noise and the draws, a str: "Smoothing by Gaussian noise ..."."""
        hidden = "" if combined_noise_of_table(certificates.table) is None else " and hidden noise"
        noise = f"{certificates.noise.capitalize()} noise {certificates.sigma:g}{hidden}"
        return f"Smoothing by {noise}, {cls.draws_words.format(n=certificates.n)}"

    @classmethod
    def comparison_key(cls, certificates: CertificateTable) -> dict[str, Any]:
        free = certificates.certificate_class.result_free_fields
        return {"sigma": certificates.sigma, "radii": () if "radii" in free else certificates.radii}


# --- CERTIFY and PREDICT ----------------------------------------------------------------------


class Cohen(Smoothing):
    """Settings of CERTIFY: n0 draws choose a class, exactly n others bound its probability.

    Guarantee: for each input by itself, with probability at least 1 - `alpha` over the draws, the
    smoothed classifier answers the certified class everywhere within the certified radius, or the
    verdict abstains. With Gaussian noise the radius is sigma Phi^-1(p_lower), in L2; p_lower is the
    lower bound of Clopper and Pearson. The radius is never rounded up.

    Each argument is an attribute of the same name. Pass an instance to `dpdist.certify`.

    Args:
        sigma: standard deviation of the noise, in input units, above 0.
        noise: "gaussian" certifies L2 balls; "laplace" and "uniform" certify L1 balls.
        n0: number of draws that choose the class, for each input.
        n: number of draws that bound its probability from below, for each input.
        alpha: error probability of each input's certificate, strictly between 0 and 1.
        radii: radii that summaries show, in input units, ascending; no result depends on them.
        start: index of the first input.
        every: certify every k-th input from there on.
        max_inputs: the most inputs to certify; None: no limit.
        batch: rows of the executed batch, which is also the block of draws; None: chosen for the
            input's size.
        seed: seed of the noise, a str; None: a secret seed, drawn at the start and stored with the
            results.
        backend: inference backend: "frozen", "compiled", "channels-last", "eager" or "bf16"; None:
            chosen by a probe.
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
    result_free_fields: ClassVar[frozenset[str]] = frozenset({"radii"})  # they are only shown
    default_batch: ClassVar[int] = 1000
    max_device_batch: ClassVar[int] = 32768

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
        """Draw blocks low..high-1 of one input, and return the counts of each class, a dict.

        Arguments are those of `Certificate.sample`.

        Returns:
            A dict of JSON values for `decide`: "histogram", the draws of each class, a list of int;
            if low is 0, "selected" (int), the class that n0 other draws chose; and if there are
            any, "undefined", a list of one int, the draws without a class.
        """
        partial: PartialCounts = {}
        if low == 0:
            partial["selected"] = select_class(counter, self.n0, x, index)
        counts = sample_under_noise(counter, x, index, range(low, high), batch, self.n)
        return partial | counts_to_json(counts, min(high * batch, self.n) - low * batch)

    def decide(self, partials: Sequence[PartialCounts], sampler: VoteSampler) -> Verdict:
        """Return the certificate of one input by CERTIFY, a `Verdict`, from all its counts.

        Args:
            partials: results of `sample` that together cover every block once.
            sampler: the result of `build_sampler(model, input_shape)`.

        Returns:
            A `Verdict`: `prediction` (int, the certified class; -1: abstains), `radius` (float, in
            input units, in L2 for Gaussian noise, else L1; 0 if it abstains), `p_lower` (float,
            lower bound of the class's probability), `selected` (int), `k` of `n` draws for it, and
            `histogram` (draws of each class).
        """
        counts = total_counts(partials, "histogram", self.n)
        return certify(
            selected_class(partials),
            counts,
            self.alpha,
            sampler.equivalent_noise,
            self.n,
            self.lower_bound,
        )

    def certify_other_class(
        self,
        counter: ClassCounter,
        x: Tensor,
        index: int,
        excluded_class: int,
        batch: int,
        sampler: VoteSampler,
    ) -> Verdict:
        """Return the certificate of one input for a class other than `excluded_class`, a `Verdict`.

        It stops early if `excluded_class` was selected: only the class that n0 draws select can be
        certified. `excluded_class` is the index of a class, an int. All other arguments are those
        of `sample`.

        Returns:
            A `Verdict` as `decide` returns it; with prediction -1 and radius 0 if `excluded_class`
            was selected.
        """
        selected = select_class(counter, self.n0, x, index)
        if selected == excluded_class:
            return Verdict(ABSTAIN, selected, 0, 0, 0.0, 0.0)
        result: Verdict = super().certify_other_class(
            counter, x, index, excluded_class, batch, sampler
        )
        return result

    @classmethod
    def lower_bound(cls, hits: ArrayLike, draws: ArrayLike, alpha: float) -> Any:
        """Return the lower confidence bound of Clopper and Pearson for a class's probability.

        Args:
            hits: draws that answered the class, 0 <= hits <= draws: an int, or an array of counts.
            draws: all draws, at least 1: an int, or an array that broadcasts with hits.
            alpha: probability, over the draws, with which a bound may exceed the true probability.

        Returns:
            A float64 in [0, 1]; for arrays, a float64 array of the broadcast shape of hits and
            draws.

        Raises:
            ValueError: a count or alpha is out of range.
        """
        return clopper_pearson_lower(hits, draws, alpha)

    @classmethod
    def consistent_counts(cls, table: pa.Table) -> np.ndarray:
        found = list_columns(table, "histogram")
        return (
            np.zeros(len(table), bool) if found is None else consistent_histograms(table, found[0])
        )

    @classmethod
    def recompute_columns(cls, table: pa.Table, alpha: float) -> dict[str, np.ndarray]:
        k, n = table["k"].to_numpy(), table["n"].to_numpy()
        return columns_of_bound(table, np.asarray(cls.lower_bound(k, n, alpha)))

    @classmethod
    def recreate(
        cls, certificates: CertificateTable, norm: str, batch: int
    ) -> tuple[Certificate, NoiseSampler]:
        """Return the settings and the sampler that a table was certified with.

        Args:
            certificates: the table.
            norm: ignored: the noise of the table determines the norm.
            batch: draws in a block.

        Returns:
            A pair (settings, sampler): an instance of this class with the table's draws and error,
            and the `VoteSampler` that adds the table's noise and counts the classes. Pass it to
            `settings.sample` and `settings.decide` as `sampler`.
        """
        from dpdist.certification.worker import VoteSampler

        names = ("sigma", "noise", "n0", "n", "alpha")
        stated = {name: getattr(certificates, name) for name in names}
        settings = cls.model_validate({**stated, "batch": batch})
        both = read_combined_noise(certificates.job_record, certificates.sigma)
        return settings, VoteSampler(settings.smoothing_noise, combined_noise=both)


def sample_under_noise(
    counter: ClassCounter,
    x: Tensor,
    index: int,
    blocks: range,
    batch: int,
    n: int,
    stage: str = keys.ESTIMATE,
) -> np.ndarray:
    """Return the counts of the classes over canonical blocks of the n draws: int (classes,).

    The last block may be counted in part. Draws without a class are not counted.
    """
    counts = [
        counter.histogram(x, index, stage, block, batch, min(batch, n - block * batch))
        for block in blocks
    ]
    result: np.ndarray = np.sum(counts, axis=0)
    return result


def certify(
    selected: int,
    counts: np.ndarray,
    alpha: float,
    noise: Noise,
    draws: int | None = None,
    lower_confidence_bound: Callable[..., Any] = clopper_pearson_lower,
) -> Verdict:
    """Return the verdict of CERTIFY from the counts of n draws, int (classes,).

    With probability at least 1 - alpha over the draws, the smoothed classifier answers the
    prediction in the ball of the radius around the input, or the verdict abstains. selected: the
    class chosen by other draws. draws: n; those without a class count against the selected one.
    None: all had a class. lower_confidence_bound: LowerConfBound.
    """
    n = int(counts.sum()) if draws is None else draws
    n_a = int(counts[selected])
    p_a = float(lower_confidence_bound(n_a, n, alpha))
    return Verdict(
        prediction=selected if p_a > 0.5 else ABSTAIN,
        selected=selected,
        k=n_a,
        n=n,
        p_lower=p_a,
        radius=float(noise.radius(p_a)),  # Gaussian: sigma Phi^-1(p_a), rounded down
        histogram=tuple(int(count) for count in counts),
    )


def predict(counts: np.ndarray, alpha: float, draws: int | None = None) -> int:
    """Return the class by PREDICT (Proposition 1): the most frequent one, or -1 if it is not sure.

    A class other than the smoothed classifier's is returned with probability at most alpha. draws:
    their number; those without a class are one more outcome, which is never returned. None: all had
    a class.
    """
    undefined = 0 if draws is None else draws - int(np.sum(counts))
    c_a, *others = np.argsort(-np.asarray(counts), kind="stable")
    n_a, n_b = int(counts[c_a]), max(undefined, int(counts[others[0]]) if others else 0)
    sure = n_a >= undefined and two_sided_p_value(n_a, n_a + n_b) <= alpha
    return int(c_a) if sure else ABSTAIN
