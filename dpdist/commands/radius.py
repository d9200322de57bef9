"""``dpdist radius``: the certified radius of a count, without model, data, torch or Ray."""

from __future__ import annotations

from typing import Annotated

import typer

from dpdist.base import console
from dpdist.base.errors import UserError
from dpdist.base.fields import Count, CountOrZero, Positive, Probability
from dpdist.commands.options import flag, option

_Hits = Annotated[int, option("Noisy draws that returned the predicted class.", CountOrZero)]
_Draws = Annotated[int, option("Noisy draws in all, a number fixed in advance.", Count)]
_Sigma = Annotated[float, option("Standard deviation of the Gaussian input noise.", Positive)]
_Alpha = Annotated[float, option("Error probability of the certificate.", Probability)]
_Dimension = Annotated[
    int | None, option("Number of inputs (28x28: 784); adds the L-infinity radius.", Count)
]
_AsJson = Annotated[bool, flag("--json", "Print one JSON object.")]


def command(
    hits: _Hits,
    draws: _Draws,
    sigma: _Sigma,
    alpha: _Alpha = 0.001,
    dimension: _Dimension = None,
    as_json: _AsJson = False,
) -> None:
    """L2 radius of Cohen's certificate: sigma * Phi^-1(Clopper-Pearson lower bound at alpha).

    Counts of a run that stopped early certify less than this says: use it for fixed draws only.
    """
    from dpdist.base.binomial import clopper_pearson_lower
    from dpdist.certification.radii import format_radius, gaussian_l2_radius, linf_from_l2

    try:
        p_lower = float(clopper_pearson_lower(hits, draws, alpha))
        radius = float(gaussian_l2_radius(p_lower, sigma))
        answer: dict[str, object] = {
            "hits": hits,
            "draws": draws,
            "alpha": alpha,
            "sigma": sigma,
            "p_lower": p_lower,
            "radius": radius,
            "norm": "l2",
            "abstain": p_lower <= 0.5,
        }
        if dimension is not None:
            answer["radius_linf"] = float(linf_from_l2(radius, dimension))
    except ValueError as error:
        raise UserError(f"dpdist radius: {error}") from None
    if as_json:
        console.print_json(answer)
        return
    typer.echo(f"p_lower  {format_radius(p_lower, 6)}  (Clopper-Pearson, alpha = {alpha:g})")
    if answer["abstain"]:
        typer.echo("radius   ABSTAIN: the bound does not exceed 1/2")
        return
    typer.echo(f"radius   {format_radius(radius, 6)}  (L2, sigma = {sigma:g})")
    if "radius_linf" in answer:
        typer.echo(f"         {format_radius(float(str(answer['radius_linf'])), 6)}  (L-infinity)")
