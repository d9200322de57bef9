"""Compute privacy costs (``dpdist account``), and show budgets of data sets (``dpdist budget``).

Both work without data, model, torch or Ray.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpdist.cli.options import PrintJson, flag, option, path_option
from dpdist.core import console, fields
from dpdist.core.console import format_significant
from dpdist.core.errors import UserError
from dpdist.core.fields import (
    Count,
    CountOrZero,
    NoiseMultiplier,
    Positive,
    Probability,
    TrialCount,
)

if TYPE_CHECKING:
    from dpdist.privacy.budget import DataBudget
    from dpdist.privacy.guarantee import Neighbors
    from dpdist.privacy.plan import PrivacyPlan


# --- dpdist account ---------------------------------------------------------------------------


_Records = Annotated[int | None, option("Number of training records N.", Count)]
_Batch = Annotated[
    int | None, option("Expected batch size L; the sampling rate is L / N.", Count, "--batch-size")
]
_Noise = Annotated[
    float | None,
    option("Standard deviation of the noise divided by the clip norm.", NoiseMultiplier),
]
_Steps = Annotated[int | None, option("Number of training steps.", fields.Steps)]
_Epsilon = Annotated[
    float | None, option("Target epsilon, which the result never exceeds.", Positive)
]
_Delta = Annotated[float | None, option("Delta, below 1 / N.", Probability)]
_Replace = Annotated[
    bool,
    flag("--replace-one", "Neighboring data sets differ in one record's value, not by a record."),
]
_Cap = Annotated[int | None, option("Largest size of a sampled batch.", Count, "--batch-cap")]
_Trials = Annotated[
    int | None,
    option(
        "Also compute epsilon of choosing the best of K runs; this is the mean of K.", TrialCount
    ),
]
_Hits = Annotated[
    int | None, option("Noisy samples that returned the predicted class.", CountOrZero)
]
_Samples = Annotated[int | None, option("Number of noisy samples, fixed in advance.", Count)]
_Sigma = Annotated[float | None, option("Standard deviation of the input noise.", Positive)]
_Alpha = Annotated[float, option("Error probability of the certificate.", Probability)]
_Claims = Annotated[
    bool, flag("--claims", "List the guarantees that published systems claim, and proved ones.")
]


def account_command(
    records: _Records = None,
    batch_size: _Batch = None,
    noise_multiplier: _Noise = None,
    steps: _Steps = None,
    epsilon: _Epsilon = None,
    delta: _Delta = None,
    replace_one: _Replace = False,
    batch_cap: _Cap = None,
    trials: _Trials = None,
    hits: _Hits = None,
    samples: _Samples = None,
    sigma: _Sigma = None,
    alpha: _Alpha = 0.001,
    claims: _Claims = False,
    as_json: PrintJson = False,
) -> None:
    """Compute epsilon, noise, steps or batch size of a training; or a certified radius.

    Give --records, --delta and all but one of --epsilon, --noise-multiplier, --steps and
    --batch-size, and the command computes the one that you left out. With --trials it also prints
    epsilon of choosing the best of several runs. With --hits, --samples and --sigma it computes
    the L2 radius of Cohen's certificate.
    """
    counted = {"--hits": hits, "--samples": samples, "--sigma": sigma}
    planned = {
        "--records": records,
        "--batch-size": batch_size,
        "--noise-multiplier": noise_multiplier,
        "--steps": steps,
        "--epsilon": epsilon,
        "--delta": delta,
        "--batch-cap": batch_cap,
        "--trials": trials,
    }
    asked = [given for given in (counted, planned) if any(v is not None for v in given.values())]
    if len(asked) + claims != 1:
        raise UserError(
            "account: must be given the settings of a training, the counts of a certificate "
            "(--hits, --samples, --sigma), or --claims"
        )
    if claims:
        _print_claims(as_json)
    elif asked == [counted]:
        _print_radius(hits, samples, sigma, alpha, as_json)
    else:
        _print_training(
            {
                "records": records,
                "batch_size": batch_size,
                "steps": steps,
                "noise_multiplier": noise_multiplier,
                "delta": delta,
                "batch_cap": batch_cap,
                "adjacency": "replace-one" if replace_one else "add-or-remove-one",
            },
            epsilon,
            trials,
            as_json,
        )


def _print_training(
    setting: dict[str, Any], epsilon: float | None, trials: int | None, as_json: bool
) -> None:
    """Solve for the one setting of a training that is None, and print its plan."""
    from dpdist.privacy import calibration
    from dpdist.privacy.plan import PrivacyPlan

    solvers = {
        "noise_multiplier": calibration.noise_multiplier_for,
        "steps": calibration.steps_for,
        "batch_size": calibration.batch_size_for,
    }
    solved = {"epsilon": epsilon, **{name: setting[name] for name in solvers}}
    missing = [name for name, value in solved.items() if value is None]
    absent = [each for each in ("records", "delta") if setting[each] is None]
    if absent or len(missing) != 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in solved)
        raise UserError(
            f"account: must be given --records, --delta and all but one of {names}, which is "
            "computed"
        )
    try:
        if epsilon is not None:
            if missing[0] == "batch_size" and setting["batch_cap"] is not None:
                raise UserError("--batch-cap: must be left out to compute the batch size")
            kept = [n for n in setting if n != missing[0] and setting[n] is not None]
            solve: Any = solvers[missing[0]]
            found = solve(epsilon, **{name: setting[name] for name in kept})
            setting = {**setting, missing[0]: found}
            if missing[0] == "steps" and found == calibration.MAX_STEPS:
                console.log(f"steps: {found:,} are the most that are tried; more may be possible")
        plan = PrivacyPlan.dp_sgd(**setting)
        if trials is None:
            _print_plan(plan, as_json)
        else:
            _print_search(plan, trials, as_json)
    except ValueError as error:
        raise UserError(f"account: {error}") from None


def _print_plan(plan: PrivacyPlan, as_json: bool) -> None:
    from dpdist.privacy.guarantee import format_epsilon

    guarantee, step = plan.guarantee(), plan.step(0)
    answer: dict[str, Any] = {
        **guarantee.to_output_dict(),
        "noise_multiplier": step.noise_multiplier,
        "sample_rate": step.sample_rate,
        "steps": plan.steps,
        "records": plan.records,
        "batch_size": round(step.expected_batch),
        "batch_cap": step.batch_cap,
        "assumptions": list(guarantee.assumptions),
    }
    if as_json:
        console.print_json(answer)
        return
    if plan.delta >= 1 / plan.records:
        typer.echo(f"Warning: delta {plan.delta:g} is not below 1 / records.", err=True)
    answer["epsilon"] = format_epsilon(guarantee.epsilon, 6)
    for key, value in answer.items():
        if key != "assumptions" and value is not None:
            shown = format_significant(value, 6) if isinstance(value, float) else str(value)
            typer.echo(f"{key:<17} {shown}")
    for line in guarantee.assumptions:
        typer.echo(f"{'valid if':<17} {line}")


def _print_search(one: PrivacyPlan, trials: int, as_json: bool) -> None:
    """Print epsilon of choosing the best of several runs, by the distribution of their number.

    A random number must stay secret, and so must every run except the best one. A fixed number may
    be public, and all its runs may be shown.
    """
    from dpdist.privacy.calibration import search_guarantee
    from dpdist.privacy.guarantee import format_epsilon
    from dpdist.privacy.selection import TrialDistribution

    how: Any = {"records": one.records, "delta": one.delta}
    found = [("one run", one.guarantee(), 1)]
    for shape in (0.0, 0.5, 1.0, math.inf):
        distribution = TrialDistribution(float(trials), shape)
        cost = search_guarantee(one.phases, distribution, **how)
        found.append((distribution.describe(), cost, distribution.quantile(0.95)))
    cost = search_guarantee(one.phases, None, trials, **how)
    found.append((f"fixed, {trials} runs", cost, trials))
    rows = [
        {"num_trials": distribution, **cost.to_output_dict(), "runs_95_percent": most}
        for distribution, cost, most in found
    ]
    if as_json:
        console.print_json(rows)
        return
    header = ["number of runs", "epsilon", "95 % of K up to", "accountant"]
    cells = [
        [distribution, format_epsilon(cost.epsilon), str(most), row["accountant"]]
        for row, (distribution, cost, most) in zip(rows, found, strict=True)
    ]
    typer.echo(console.format_columns(header, cells))


def _print_radius(
    hits: int | None,
    draws: int | None,
    sigma: float | None,
    alpha: float,
    as_json: bool,
) -> None:
    """Print the L2 radius of Cohen's certificate: sigma times Phi^-1 of the lower bound.

    The counts must not come from a certification that stopped early, whose radius is smaller.
    """
    from dpdist.certification.noise import format_radius, gaussian_l2_radius
    from dpdist.core.binomial import clopper_pearson_lower

    if hits is None or draws is None or sigma is None:
        raise UserError("account: --hits, --samples and --sigma must be given together")
    try:
        p_lower = float(clopper_pearson_lower(hits, draws, alpha))
        radius = float(gaussian_l2_radius(p_lower, sigma))
        answer: dict[str, Any] = {
            "hits": hits,
            "draws": draws,
            "alpha": alpha,
            "sigma": sigma,
            "bound": "clopper-pearson",
            "p_lower": p_lower,
            "radius": radius,
            "norm": "l2",
            "abstain": p_lower <= 0.5,
        }
    except ValueError as error:
        raise UserError(f"account: {error}") from None
    if as_json:
        console.print_json(answer)
        return
    typer.echo(f"p_lower  {format_radius(p_lower, 6)}  (Clopper-Pearson, alpha = {alpha:g})")
    if p_lower <= 0.5:
        typer.echo("radius   ABSTAIN: the bound does not exceed 1/2")
    else:
        typer.echo(f"radius   {format_radius(radius, 6)}  (L2, sigma = {sigma:g})")


def _print_claims(as_json: bool) -> None:
    """Print the claimed and the proved guarantee of each published system, and their difference."""
    claims = [claim for found in entry_points(group="dpdist.claims") for claim in found.load()()]
    if as_json:
        console.print_json([claim.to_dict() for claim in claims])
        return
    header = ["system", "claimed", "proved", "verdict", "reason"]
    rows = [
        [claim.system, claim.claimed_text, claim.proved_text, claim.verdict, claim.reason]
        for claim in claims
    ]
    typer.echo(console.format_columns(header, rows))


# --- dpdist budget ----------------------------------------------------------------------------


def budget_command(
    folder: Annotated[Path, path_option("A recipe's budget folder.")] = Path("budgets"),
    delta: Annotated[
        float | None,
        option(
            "Delta of the composed guarantee and of each single run (default: that of the ceiling; "
            "1e-05 without a ceiling).",
            Probability,
        ),
    ] = None,
    replace_one: Annotated[
        bool, flag("--replace-one", "Neighboring data sets differ in one record's value.")
    ] = False,
    as_json: PrintJson = False,
) -> None:
    """Show the privacy cost so far of each data set: all runs and searches on its records."""
    from dpdist.privacy.budget import read_budgets
    from dpdist.privacy.ledger import JournalError

    if not folder.is_dir():
        raise UserError(f"--folder: must be a folder of budgets, got {folder}")
    adjacency: Neighbors = "replace-one" if replace_one else "add-or-remove-one"
    answer: list[dict[str, Any]] = []
    try:
        for budget in read_budgets(folder):
            answer.append(_budget_record(budget, delta, adjacency))
    except (JournalError, ValueError) as error:
        raise UserError(
            f"budget: {error}", see="explanation/privacy.md#what-a-run-really-released"
        ) from None
    if as_json:
        console.print_json(answer)
        return
    if not answer:
        typer.echo(f"no budgets in {folder}")
    for entry in answer:
        for line in _budget_lines(entry):
            typer.echo(line)


def _budget_record(budget: DataBudget, delta: float | None, adjacency: Neighbors) -> dict[str, Any]:
    from dpdist.privacy.budget import composed_guarantee

    if delta is None:  # the same delta, so that single runs can be compared with the ceiling
        ceiling = budget.ceiling
        delta = 1e-5 if ceiling is None else ceiling.delta
    total = budget.guarantee(delta, adjacency)
    return {
        "budget": budget.path.name,
        "name": budget.data_name,
        "records": len(budget.known),
        **total.to_output_dict(),
        "assumptions": list(total.assumptions),
        "spent": _ceiling_usage(budget),
        "runs": [
            {
                "run": charge.run,
                "name": charge.name,
                "status": charge.status,
                "epsilon": composed_guarantee([charge], delta, adjacency).epsilon,
                "delta": delta,
            }
            for charge in budget.charges
        ],
    }


def _budget_lines(record: dict[str, Any]) -> Iterator[str]:
    from dpdist.core.console import format_exact, format_percent
    from dpdist.privacy.guarantee import format_epsilon

    yield (
        f"{record['name'] or record['budget']}: epsilon {format_epsilon(record['epsilon'])} at "
        f"delta {format_exact(record['delta'])} ({record['relation']}, {record['accountant']})"
    )
    if record["spent"] is not None:
        yield (
            f"  {format_percent(record['spent']['of_ceiling'], round_up=True)} % of this ceiling "
            f"is used (epsilon {format_epsilon(record['spent']['epsilon'])}, not a guarantee)"
        )
    for line in record["assumptions"]:
        yield f"  valid if {line}"
    for run in record["runs"]:
        single = f"{format_epsilon(run['epsilon'])} at delta {format_exact(run['delta'])}"
        yield f"  {run['name']:<24} epsilon {single:<26} {run['status']}  {run['run']}"


def _ceiling_usage(budget: DataBudget) -> dict[str, Any] | None:
    """Return the used fraction of a ceiling; not a guarantee if runs were chosen by results."""
    ceiling = budget.ceiling
    if ceiling is None:
        return None
    spent = budget.spent
    return {
        "of_ceiling": spent / ceiling.share,
        "epsilon": ceiling.epsilon_for_divergence(spent),
        "guarantee": False,
    }
