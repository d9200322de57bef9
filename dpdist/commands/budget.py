"""``dpdist budget``: what every data set in a folder of budgets has cost so far."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpdist.base import console
from dpdist.base.errors import UserError
from dpdist.base.fields import Probability
from dpdist.commands.options import PrintJson, flag, option, path_option

if TYPE_CHECKING:
    from dpdist.privacy.budget import DataBudget
    from dpdist.privacy.guarantee import Neighbours

app = typer.Typer(
    invoke_without_command=True,
    help="Show what sets of records have cost so far: all runs and searches on them.",
)


@app.callback()
def show(
    folder: Annotated[Path, path_option("A recipe's budget folder.")] = Path("budgets"),
    delta: Annotated[
        float, option("Delta of a composed guarantee, and of each run alone.", Probability)
    ] = 1e-5,
    replace_one: Annotated[
        bool, flag("--replace-one", "Neighbours differ by one record's value.")
    ] = False,
    as_json: PrintJson = False,
) -> None:
    """Show what sets of records have cost so far: all runs and searches on them."""
    from dpdist.privacy.budgets import budgets_in
    from dpdist.privacy.journal import JournalError

    if not folder.is_dir():
        raise UserError(f"budget: {folder} is not a folder; name one with --folder")
    neighbours: Neighbours = "replace-one" if replace_one else "add-or-remove-one"
    answer: list[dict[str, Any]] = []
    try:
        for budget in budgets_in(folder):
            answer.append(_described(budget, delta, neighbours))
    except (JournalError, ValueError) as error:
        raise UserError(f"budget: {error}") from None
    if as_json:
        console.print_json(answer)
        return
    if not answer:
        typer.echo(f"no budgets in {folder}")
    for entry in answer:
        for line in _lines(entry):
            typer.echo(line)


def _described(budget: DataBudget, delta: float, neighbours: Neighbours) -> dict[str, Any]:
    from dpdist.privacy.budget import composed_guarantee

    total = budget.guarantee(delta, neighbours)
    return {
        "budget": budget.path.name,
        "name": budget.data_name,
        "records": len(budget.known),
        **total.facts(),
        "assumptions": list(total.assumptions),
        "spent": _spent(budget),
        "runs": [
            {
                "run": charge.run,
                "name": charge.name,
                "status": charge.status,
                "epsilon": composed_guarantee([charge], delta, neighbours).epsilon,
            }
            for charge in budget.charges
        ],
    }


def _lines(entry: dict[str, Any]) -> Iterator[str]:
    from dpdist.base.rounding import exact, percent
    from dpdist.privacy.guarantee import format_epsilon

    yield (
        f"{entry['name'] or entry['budget']}: epsilon {format_epsilon(entry['epsilon'])} at delta "
        f"{exact(entry['delta'])} ({entry['relation']}, {entry['accountant']})"
    )
    if entry["spent"] is not None:
        yield (
            f"  {percent(entry['spent']['of_ceiling'], up=True)} % of this ceiling is spent "
            f"(epsilon {format_epsilon(entry['spent']['epsilon'])}, no guarantee by itself)"
        )
    for line in entry["assumptions"]:
        yield f"  holds if {line}"
    for run in entry["runs"]:
        alone = format_epsilon(run["epsilon"])
        yield f"  {run['name']:<24} alone {alone:<8} {run['status']}  {run['run']}"


def _spent(budget: DataBudget) -> dict[str, Any] | None:
    """How far a ceiling is used up. Where runs were chosen by results, it promises nothing."""
    ceiling = budget.terms.ceiling
    if ceiling is None:
        return None
    spent = budget.spent
    return {
        "of_ceiling": spent / ceiling.share,
        "epsilon": ceiling.epsilon_of(spent),
        "guarantee": False,
    }
