"""What double sampling (DSRS; Li et al., ICML 2022) would add to Cohen's certificate on our models.

Beside p_a, the probability of the class under the noise P, DSRS uses its probability under a second
noise Q, here P cut to a ball, so that the worst classifier must have the right mass inside the ball
and outside. P is a Gaussian, or the generalised one of density |x|^(-2k) exp(-|x|^2 / 2 s^2), of
the same second moment, with d - 2k = 24 as the paper takes it for MNIST. By the Neyman-Pearson
lemma the worst classifier takes the points of smallest likelihood ratio inside and outside; masses
are integrated over length and angle.

    python benchmarks/dsrs.py [--mnist] [--quick]

Every draw is of P and counted inside and outside. "both": what n / 2 draws of each of P and Q with
these shares would certify at alpha 0.001, for several balls; "strata": the same from n draws of P
alone, of which those inside and outside are bounded apart. Columns are the balls.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _common import parse_arguments
from draws import ARCHITECTURE, EPOCHS, records
from scipy import special, stats
from torch import Tensor, nn

from dpdist import models
from dpdist.core.binomial import clopper_pearson_lower, clopper_pearson_upper

ALPHA, LEFT = 0.001, 24
BALLS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.97)  # shares of P inside


@dataclass(frozen=True)
class NormalNoise:
    """Of d numbers: |x|^2 / s^2 is chi-square with d - 2k degrees, the direction uniform."""

    sigma: float
    d: int
    k: int

    @property
    def scale(self) -> float:
        return self.sigma * math.sqrt(self.d / (self.d - 2 * self.k))

    def draw(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Noise (rows, d), and the share of P that is shorter (rows,)."""
        x = torch.randn(rows, self.d, generator=generator)
        if not self.k:
            share = stats.chi2.cdf((x.double() ** 2).sum(1).numpy(), self.d)
            return x * self.sigma, torch.from_numpy(share)
        share = torch.rand(rows, generator=generator, dtype=torch.float64)
        length = np.sqrt(stats.chi2.ppf(share.numpy(), self.d - 2 * self.k)) * self.scale
        unit = x / x.norm(dim=1, keepdim=True)
        return unit * torch.from_numpy(length).float()[:, None], share

    def moved(self, distance: float) -> Callable[[float, float, np.ndarray], np.ndarray]:
        """f(low, high, m): the least mass, after the move, of a set with mass m of P whose lengths
        lie between these shares of P."""
        # Cells between quantiles, finest in the tails.
        ends = special.expit(np.linspace(-22, 22, 301))
        edges = np.unique(np.concatenate([[0.0], ends, [*BALLS], [1.0]]))
        middle, mass = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
        length = np.sqrt(stats.chi2.ppf(middle, self.d - 2 * self.k)) * self.scale
        half = (self.d - 1) / 2
        sides = np.concatenate([[0.0], special.expit(np.linspace(-22, 22, 601)), [1.0]])
        cosine = 2 * special.betaincinv(half, half, (sides[1:] + sides[:-1]) / 2) - 1
        rho, u = length[:, None], cosine[None]
        after = rho**2 - 2 * rho * distance * u + distance**2
        ratio = -self.k * (np.log(after) - 2 * np.log(rho)) - (after - rho**2) / (2 * self.scale**2)
        weight = mass[:, None] * np.diff(sides)[None]
        kept: dict[tuple[float, float], tuple[np.ndarray, np.ndarray]] = {}

        def least(low: float, high: float, m: np.ndarray) -> np.ndarray:
            if (low, high) not in kept:
                rows = (middle > low) & (middle < high)
                order = np.argsort(ratio[rows], axis=None)
                before = weight[rows].ravel()[order]
                then = before * np.exp(ratio[rows].ravel()[order])
                kept[low, high] = tuple(np.concatenate([[0.0], a.cumsum()]) for a in (before, then))  # type: ignore[assignment]
            return np.interp(m, *kept[low, high])

        return least


def trained(mnist: bool, noise: NormalNoise, epochs: int) -> nn.Module:
    x, y, _, _ = records(mnist)
    name, options = ARCHITECTURE[mnist]
    model = models.initialise(models.ModelSpec(name, tuple(x.shape[1:]), 10, options), 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(100):
            added, _ = noise.draw(len(rows), generator)
            loss = nn.functional.cross_entropy(model(x[rows] + added.view_as(x[rows])), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def counted(model: nn.Module, noise: NormalNoise, x: Tensor, y: Tensor, n: int) -> np.ndarray:
    """Draws that did not say the label: inside each ball, and all; int (N, len(BALLS) + 1)."""
    generator, found = torch.Generator().manual_seed(1), []
    with torch.inference_mode():
        for each, label in zip(x, y, strict=True):
            missed = torch.zeros(len(BALLS) + 1, dtype=torch.long)
            for rows in [1000] * (n // 1000):
                added, share = noise.draw(rows, generator)
                wrong = model(each + added.view(rows, *each.shape)).argmax(1) != label
                missed += torch.stack([(wrong & (share < b)).sum() for b in (*BALLS, 1.1)])
            found.append(missed.numpy())
    return np.array(found)


def certified(missed: np.ndarray, n: int, noise: NormalNoise, radii: list[float]) -> None:
    """Prints the share certified: by one noise, then for each ball by both."""
    for radius in radii:
        least = noise.moved(radius)

        def share(worst: np.ndarray) -> str:
            return f"{100 * np.mean(worst > 0.5):5.1f}"

        alone = share(
            least(0.0, 1.0, np.asarray(clopper_pearson_lower(n - missed[:, -1], n, ALPHA)))
        )
        known = share(least(0.0, 1.0, 1 - missed[:, -1] / n))
        sampled, strata, exact = [], [], []
        for place, ball in enumerate(BALLS):

            def both(
                inside: np.ndarray, outside: np.ndarray, ball: float = ball, least: Any = least
            ) -> np.ndarray:
                return least(0.0, ball, np.clip(inside, 0, ball)) + least(
                    ball, 1.0, np.clip(outside, 0, 1 - ball)
                )

            inside, outside = missed[:, place], missed[:, -1] - missed[:, place]
            exact.append(share(both(ball - inside / n, 1 - ball - outside / n)))
            # n / 2 draws of each noise, with these shares.
            k = n // 2 - np.rint(np.minimum(inside / n / ball, 1.0) * n / 2)
            low = clopper_pearson_lower(k, n // 2, ALPHA / 4)
            high = clopper_pearson_upper(k, n // 2, ALPHA / 4)
            p = clopper_pearson_lower(n // 2 - missed[:, -1] // 2, n // 2, ALPHA / 2)
            worst = np.full(len(p), np.inf)
            for part in np.linspace(0, 1, 21):
                m = np.clip(low + part * (high - low), 0, 1) * ball
                worst = np.minimum(worst, both(m, p - m))
            sampled.append(share(worst))
            # n draws of P; what is not the class inside, and outside, bounded from above.
            most = [clopper_pearson_upper(x, n, ALPHA / 2) for x in (inside, outside)]
            strata.append(share(both(ball - most[0], 1 - ball - most[1])))
        print(
            f"    r = {radius:<6g} one noise {alone}   both {' '.join(sampled)}   strata "
            f"{' '.join(strata)}   shares as probabilities {known}: "
            f"{' '.join(exact)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", action="store_true")
    parser.add_argument("--sigma", type=float, default=0.5)
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--inputs", type=int, default=120)
    parser.add_argument("--epochs", type=int, help="of training, by default 40, on MNIST 4")
    options = parse_arguments(parser, {"n": 1000, "inputs": 4, "epochs": 1})
    torch.set_num_threads(1)
    _, _, x, y = records(options.mnist)
    x, y = (each[:: len(x) // options.inputs][: options.inputs] for each in (x, y))
    d, sigma = x[0].numel(), options.sigma
    gaussian = NormalNoise(sigma, d, 0)
    for r in (0.5, 1.0):  # the integration, against the closed form
        found = gaussian.moved(r * sigma)(0.0, 1.0, np.array([0.7, 0.99, 0.9999]))
        exact = stats.norm.cdf(stats.norm.ppf([0.7, 0.99, 0.9999]) - r)
        assert np.abs(found - exact).max() < 2e-3, (found, exact)
    for noise in (gaussian, NormalNoise(sigma, d, (d - LEFT) // 2)):
        model = trained(options.mnist, noise, options.epochs or EPOCHS[options.mnist])
        missed = counted(model, noise, x, y, options.n)
        name = f"generalised, k = {noise.k}" if noise.k else "Gaussian"
        print(f"balls {BALLS}; d = {d}, {name}, sigma {sigma}, {len(x)} inputs, n = {options.n:,}")
        certified(
            missed, options.n, noise, [f * sigma for f in (1.0, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0)]
        )


if __name__ == "__main__":
    main()
