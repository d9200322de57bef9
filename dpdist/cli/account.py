"""``dpdist account`` and ``dpdist budget``: privacy arithmetic, and the budgets of data sets.

Both work without data, model, torch or Ray. A budget lists the cost so far of every data set in
its folder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpdist.cli.options import (
    FIGURE_PATH,
    GroupedCommands,
    PrintJson,
    flag,
    option,
    parse_numbers,
    path_option,
)
from dpdist.core import console, fields
from dpdist.core.console import format_bound, format_significant
from dpdist.core.errors import UserError
from dpdist.core.fields import (
    Count,
    NoiseMultiplier,
    Positive,
    Probability,
    TrialCount,
)
from dpdist.core.files import error_text, write_result

if TYPE_CHECKING:
    from dpdist.privacy.budget import DataBudget
    from dpdist.privacy.guarantee import Neighbours
    from dpdist.privacy.plan import PrivacyPlan


# --- dpdist account ---------------------------------------------------------------------------


account_app = typer.Typer(
    cls=GroupedCommands,
    no_args_is_help=True,
    help="Privacy arithmetic: epsilon of a plan, noise or steps for an epsilon, cost of a search, "
    "mechanisms side by side, published claims and what holds of them.",
)


class Relation(StrEnum):
    """Neighbouring data sets differ by one record more or less, or by one record's value."""

    add_remove = "add-or-remove-one"
    replace_one = "replace-one"


Records = Annotated[int, option("Number of training records N.", Count)]
BatchSize = Annotated[int, option("EXPECTED batch size L; the sampling rate is L / N.", Count)]
Noise = Annotated[float, option("Noise standard deviation / clip norm.", NoiseMultiplier)]
Steps = Annotated[int, option("Number of training steps.", fields.Steps)]
Delta = Annotated[float, option("Delta, below 1 / N.", Probability)]
TargetEpsilon = Annotated[float, option("Target epsilon; the answer never exceeds it.", Positive)]
Neighbouring = Annotated[Relation, option("Neighbouring relation.")]
Cap = Annotated[int | None, option("Hard cap on the physical batch.", Count)]


@contextmanager
def _user_errors(command: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UserError(f"account {command}: {error}") from None


def _neighbours(relation: Relation) -> Neighbours:
    return "replace-one" if relation is Relation.replace_one else "add-or-remove-one"


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
        typer.echo(f"{'holds if':<17} {line}")


@account_app.command("epsilon")
def epsilon_command(
    records: Records,
    batch_size: BatchSize,
    noise_multiplier: Noise,
    steps: Steps,
    delta: Delta,
    neighbours: Neighbouring = Relation.add_remove,
    batch_cap: Cap = None,
    as_json: PrintJson = False,
) -> None:
    """What a DP-SGD run costs."""
    from dpdist.privacy.plan import PrivacyPlan

    with _user_errors("epsilon"):
        plan = PrivacyPlan.dp_sgd(
            records=records,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            steps=steps,
            delta=delta,
            neighbours=_neighbours(neighbours),
            batch_cap=batch_cap,
        )
        _print_plan(plan, as_json)


@account_app.command("noise")
def noise_command(
    epsilon: TargetEpsilon,
    records: Records,
    batch_size: BatchSize,
    steps: Steps,
    delta: Delta,
    neighbours: Neighbouring = Relation.add_remove,
    batch_cap: Cap = None,
    as_json: PrintJson = False,
) -> None:
    """The smallest noise multiplier for a target epsilon."""
    from dpdist.privacy.calibration import noise_multiplier_for
    from dpdist.privacy.plan import PrivacyPlan

    with _user_errors("noise"):
        setting: dict[str, Any] = {
            "records": records,
            "batch_size": batch_size,
            "steps": steps,
            "delta": delta,
            "neighbours": _neighbours(neighbours),
            "batch_cap": batch_cap,
        }
        noise = noise_multiplier_for(epsilon, **setting)
        _print_plan(PrivacyPlan.dp_sgd(noise_multiplier=noise, **setting), as_json)


@account_app.command("steps")
def steps_command(
    epsilon: TargetEpsilon,
    records: Records,
    batch_size: BatchSize,
    noise_multiplier: Noise,
    delta: Delta,
    neighbours: Neighbouring = Relation.add_remove,
    batch_cap: Cap = None,
    as_json: PrintJson = False,
) -> None:
    """The largest number of steps for a target epsilon."""
    from dpdist.privacy.calibration import steps_for
    from dpdist.privacy.plan import PrivacyPlan

    with _user_errors("steps"):
        setting: dict[str, Any] = {
            "records": records,
            "batch_size": batch_size,
            "noise_multiplier": noise_multiplier,
            "delta": delta,
            "neighbours": _neighbours(neighbours),
            "batch_cap": batch_cap,
        }
        steps = steps_for(epsilon, **setting)
        _print_plan(PrivacyPlan.dp_sgd(steps=steps, **setting), as_json)


@account_app.command("batch")
def batch_command(
    epsilon: TargetEpsilon,
    records: Records,
    noise_multiplier: Noise,
    steps: Steps,
    delta: Delta,
    neighbours: Neighbouring = Relation.add_remove,
    as_json: PrintJson = False,
) -> None:
    """The largest expected batch size for a target epsilon."""
    from dpdist.privacy.calibration import batch_size_for
    from dpdist.privacy.plan import PrivacyPlan

    with _user_errors("batch"):
        setting: dict[str, Any] = {
            "records": records,
            "noise_multiplier": noise_multiplier,
            "steps": steps,
            "delta": delta,
            "neighbours": _neighbours(neighbours),
        }
        size = batch_size_for(epsilon, **setting)
        _print_plan(PrivacyPlan.dp_sgd(batch_size=size, **setting), as_json)


@account_app.command("search")
def search_command(
    records: Records,
    batch_size: BatchSize,
    noise_multiplier: Noise,
    steps: Steps,
    delta: Delta,
    runs: Annotated[int, option("Mean number of runs, E[K].", TrialCount)] = 10,
    as_json: PrintJson = False,
) -> None:
    """What choosing the best of several runs costs, by the law of the number of runs: the smaller
    of two bounds, from the privacy loss distribution of one run and by Renyi DP.

    A random number must stay secret, and so must every run but the best one. A fixed number may be
    public, and all its runs may be shown.
    """
    from dpdist.privacy.calibration import fixed_runs_guarantee, search_guarantee
    from dpdist.privacy.guarantee import format_epsilon
    from dpdist.privacy.plan import PrivacyPlan
    from dpdist.privacy.selection import SelectionLaw

    with _user_errors("search"):
        one = PrivacyPlan.dp_sgd(
            records=records,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            steps=steps,
            delta=delta,
        )
        found = [("one run", one.guarantee(), 1)]
        for shape in (0.0, 0.5, 1.0, math.inf):
            law = SelectionLaw(float(runs), shape)
            cost = search_guarantee(one.phases, law, records=records, delta=delta)
            found.append((law.describe(), cost, law.quantile(0.95)))
        cost = fixed_runs_guarantee(one.phases, runs, records=records, delta=delta)
        found.append((f"fixed, {runs} runs", cost, runs))
    rows = [
        {"law": law, **cost.to_output_dict(), "runs_95_percent": most} for law, cost, most in found
    ]
    if as_json:
        console.print_json(rows)
        return
    header = ["number of runs", "epsilon", "95 % of K up to", "accountant"]
    cells = [
        [row["law"], format_epsilon(row["epsilon"]), str(row["runs_95_percent"]), row["accountant"]]
        for row in rows
    ]
    typer.echo(console.format_columns(header, cells))


@account_app.command("shuffling")
def shuffling_command(
    noise_multiplier: Noise,
    steps: Annotated[int, option("Batches per epoch; one epoch.", fields.Steps)],
    delta: Delta,
    as_json: PrintJson = False,
) -> None:
    """One epoch by Poisson sampling (proved) beside shuffled batches (at least; Chua et al.
    2024)."""
    from dpdist.privacy.guarantee import format_epsilon
    from dpdist.privacy.mechanisms import shuffled_epsilon_lower_bound
    from dpdist.privacy.phases import GaussianSteps
    from dpdist.privacy.plan import PrivacyPlan

    with _user_errors("shuffling"):
        plan = PrivacyPlan(steps, (GaussianSteps(steps, noise_multiplier, 1 / steps),), delta)
        poisson = plan.guarantee().epsilon
        shuffled = shuffled_epsilon_lower_bound(delta, noise_multiplier, steps)
    answer = {
        "delta": delta,
        "poisson_epsilon_at_most": poisson,
        "shuffled_epsilon_at_least": shuffled,
    }
    if as_json:
        console.print_json(answer)
        return
    typer.echo(f"Poisson sampling  epsilon at most  {format_epsilon(poisson)}")
    least = format_epsilon(shuffled, lower_bound=True)
    typer.echo(f"shuffled batches  epsilon at least {least}; no upper bound is proved")


def _mechanism_rows(delta: float, sensitivity: float) -> list[dict[str, Any]]:
    from dpdist.privacy import mechanisms as m

    return [
        {
            "epsilon": e,
            "analytic": float(m.analytic_gaussian_scale(e, delta, sensitivity)),
            "extended": float(m.extended_gaussian_scale(e, delta, sensitivity)),
            "classical": float(m.classical_gaussian_formula(e, delta, sensitivity)),
            "classical_true_delta": float(
                m.gaussian_delta(e, m.classical_gaussian_formula(e, delta))
            ),
            "classical_is_proved": e <= 1,
            "laplace": float(m.laplace_scale(e, sensitivity)),
        }
        for e in (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0)
    ]


def _read_table(file: Path, command: str) -> Any:
    """Return the numbers of a .csv or .npy file, float64 (rows, columns). Raises UserError."""
    import numpy as np

    try:
        if file.suffix == ".npy":
            read = np.load(file, allow_pickle=False)
        else:
            read = np.loadtxt(file, delimiter=",", ndmin=2)
    except OSError as error:
        raise UserError(f"account {command}: {file}: cannot be read: {error_text(error)}") from None
    except (ValueError, EOFError) as error:  # whose text may quote what stands in the file
        place = re.search(r"at row (\d+), column (\d+)", str(error))  # the first row is row 0
        where = (
            f", got another value in row {int(place[1]) + 1}, column {place[2]}" if place else ""
        )
        raise UserError(
            f"account {command}: {file}: must be a table of numbers, .csv or .npy{where}"
        ) from None
    if not (
        isinstance(read, np.ndarray) and read.dtype.kind in "iuf" and read.ndim == 2 and read.size
    ):
        raise UserError(f"account {command}: {file}: must be a table of numbers")
    return read.astype(np.float64)


def _mixed_rows(
    covariance: Any, bounds: Any, added: float, delta: float, steps: int
) -> list[dict[str, Any]]:
    """Return epsilon of N(0, covariance) + N(0, added^2 I), exact and by the published formula."""
    import numpy as np

    from dpdist.privacy import mechanisms as m

    weakest = float(np.linalg.eigvalsh(covariance)[0])
    norm = float(np.linalg.norm(bounds))

    def classical(variance: float) -> float:
        return (
            math.inf
            if variance <= 0
            else float(m.classical_gaussian_formula(1.0, delta, norm / math.sqrt(variance)))
        )

    reach = m.mahalanobis_sensitivity(covariance + added**2 * np.eye(len(covariance)), bounds)
    exact = math.inf if math.isinf(reach) else float(m.gaussian_epsilon(delta, 1.0, reach))
    published = classical(added**2 + weakest)
    rows = [
        {"formula": "exact, by Mahalanobis sensitivity", "epsilon": exact, "kind": "proved"},
        {
            "formula": "TransDenoiser, Theorem 2 without T",
            "epsilon": published,
            "kind": "proved" if published <= 1 else "claimed",
        },
    ]
    if steps > 1:
        credited = classical(added**2 + steps * weakest)
        name = f"TransDenoiser, Theorem 2 with T = {steps:,}"
        rows.append({"formula": name, "epsilon": credited, "kind": "claimed"})
    return rows


_Covariance = Annotated[
    Path | None,
    path_option(
        "In place of the table: epsilon of Gaussian noise with this covariance (.csv, .npy), fixed "
        "without private records.",
        metavar="FILE",
    ),
]
_Bounds = Annotated[
    str | None,
    option("Bounds of each component's change (default: --sensitivity of all).", metavar="B,B,..."),
]
_Added = Annotated[
    float | None, option("Deviation of equal noise that is added to it (MMGA).", Positive)
]
_Credited = Annotated[
    int | None, option("Show TransDenoiser's credit for so many steps, which has no ground.", Count)
]


def _draw_noise_scales(plot: Path, delta: float, sensitivity: float) -> None:
    from dpdist.reports.figures import plot_noise_scales

    try:
        write_result(plot, plot_noise_scales(delta, sensitivity, plot.suffix[1:]))
    except OSError as error:
        raise UserError(f"account mechanisms: cannot write {plot}: {error}") from None


@account_app.command("mechanisms")
def mechanisms_command(
    delta: Annotated[float, option("Delta.", Probability)] = 1e-5,
    sensitivity: Annotated[float, option("L2 sensitivity (Laplace: L1).", Positive)] = 1.0,
    plot: Annotated[
        Path | None,
        path_option(
            "Draw noise against epsilon (HGM, IJCAI 2019, Figure 1).", callback=FIGURE_PATH
        ),
    ] = None,
    covariance: _Covariance = None,
    bounds: _Bounds = None,
    added_noise: _Added = None,
    credit_steps: _Credited = None,
    as_json: PrintJson = False,
) -> None:
    """Noise scale of each mechanism against epsilon, and the true delta of the classical
    formula; or epsilon of noise with a given covariance."""
    if covariance is not None:
        if plot is not None:
            raise UserError("account mechanisms: --plot: must be left out beside --covariance")
        _show_mixed(covariance, bounds, sensitivity, added_noise, credit_steps, delta, as_json)
        return
    given = {"--bounds": bounds, "--added-noise": added_noise, "--credit-steps": credit_steps}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise UserError(f"account mechanisms: {wrong[0]}: needs --covariance")
    with _user_errors("mechanisms"):
        rows = _mechanism_rows(delta, sensitivity)
        if plot is not None:
            _draw_noise_scales(plot, delta, sensitivity)
    if as_json:
        console.print_json(rows)
        return
    header = ["epsilon", "analytic", "extended (HGM)", "classical", "its true delta", "Laplace b"]
    cells = []
    for row in rows:
        mark = "" if row["classical_is_proved"] else " *"
        cells.append(
            [
                f"{row['epsilon']:g}",
                format_bound(row["analytic"], 4, round_up=True),
                format_bound(row["extended"], 4, round_up=True),
                format_bound(row["classical"], 4, round_up=True) + mark,
                format_significant(row["classical_true_delta"], 2),
                format_bound(row["laplace"], 4, round_up=True),
            ]
        )
    typer.echo(console.format_columns(header, cells))
    typer.echo(f"delta {delta:g}; * beyond epsilon 1 the classical formula is not a theorem")


def _show_mixed(
    file: Path, bounds: str | None, sensitivity: float, added: float | None, steps: int | None,
    delta: float, as_json: bool,
) -> None:  # fmt: skip
    import numpy as np

    from dpdist.privacy.guarantee import format_epsilon

    each = parse_numbers(bounds, "--bounds", Positive)
    matrix = _read_table(file, "mechanisms")
    with _user_errors("mechanisms"):
        from dpdist.privacy.mechanisms import mahalanobis_sensitivity

        reach = sensitivity if each is None else np.array(each)
        mahalanobis_sensitivity(matrix, reach)  # what is no covariance ends here
        rows = _mixed_rows(matrix, reach, added or 0.0, delta, steps or 1)
    if as_json:
        console.print_json(rows)
        return
    cells = [[row["formula"], format_epsilon(row["epsilon"]), row["kind"]] for row in rows]
    typer.echo(console.format_columns(["formula", "epsilon", "kind"], cells))
    typer.echo(f"delta {delta:g}; none holds for a covariance computed from private records")


@account_app.command("claims")
def claims_command(as_json: PrintJson = False) -> None:
    """What each published system claims, what is proved, and why they differ."""
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


budget_app = typer.Typer(
    cls=GroupedCommands,
    invoke_without_command=True,
    help="Show what sets of records have cost so far: all runs and searches on them.",
)


@budget_app.callback()
def show_budgets(
    folder: Annotated[Path, path_option("A recipe's budget folder.")] = Path("budgets"),
    delta: Annotated[
        float | None,
        option(
            "Delta of a composed guarantee, and of each run alone (default: that of the ceiling; "
            "1e-05 without one).",
            Probability,
        ),
    ] = None,
    replace_one: Annotated[
        bool, flag("--replace-one", "Neighbours differ by one record's value.")
    ] = False,
    as_json: PrintJson = False,
) -> None:
    """Show what sets of records have cost so far: all runs and searches on them."""
    from dpdist.privacy.budget import read_budgets
    from dpdist.privacy.ledger import JournalError

    if not folder.is_dir():
        raise UserError(f"budget: {folder} is not a folder; name one with --folder")
    neighbours: Neighbours = "replace-one" if replace_one else "add-or-remove-one"
    answer: list[dict[str, Any]] = []
    try:
        for budget in read_budgets(folder):
            answer.append(_budget_record(budget, delta, neighbours))
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


def _budget_record(
    budget: DataBudget, delta: float | None, neighbours: Neighbours
) -> dict[str, Any]:
    from dpdist.privacy.budget import composed_guarantee

    if delta is None:  # a run alone beside its ceiling: at one delta, or they cannot be compared
        ceiling = budget.terms.ceiling
        delta = 1e-5 if ceiling is None else ceiling.delta
    total = budget.guarantee(delta, neighbours)
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
                "epsilon": composed_guarantee([charge], delta, neighbours).epsilon,
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
            f"is spent (epsilon {format_epsilon(record['spent']['epsilon'])}, no guarantee by "
            "itself)"
        )
    for line in record["assumptions"]:
        yield f"  holds if {line}"
    for run in record["runs"]:
        alone = format_epsilon(run["epsilon"])
        alone = f"alone {alone} at delta {format_exact(run['delta'])}"
        yield f"  {run['name']:<24} {alone:<28} {run['status']}  {run['run']}"


def _ceiling_usage(budget: DataBudget) -> dict[str, Any] | None:
    """How far a ceiling is used up. Where runs were chosen by results, it promises nothing."""
    ceiling = budget.terms.ceiling
    if ceiling is None:
        return None
    spent = budget.spent
    return {
        "of_ceiling": spent / ceiling.share,
        "epsilon": ceiling.epsilon_for_divergence(spent),
        "guarantee": False,
    }
