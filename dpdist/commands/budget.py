"""``dpdist budget``: what every data set in a folder of budgets has cost so far."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpdist.commands.options import file_path, kind
from dpdist.errors import UserError
from dpdist.fields import Probability

if TYPE_CHECKING:
    from dpdist.privacy.guarantee import Neighbours

app = typer.Typer(
    invoke_without_command=True,
    help="Show what each data set has cost so far: all runs and searches, composed.",
)


@app.callback()
def show(
    folder: Annotated[
        Path,
        typer.Option(callback=file_path(), help="A recipe's budget folder."),
    ] = Path("budgets"),
    delta: Annotated[
        float, typer.Option(callback=kind(Probability), help="Delta of the composed guarantee.")
    ] = 1e-5,
    replace_one: Annotated[
        bool, typer.Option("--replace-one", help="Neighbours differ by one record's value.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what each data set has cost so far: all runs and searches, composed."""
    from dpdist.privacy.budget import budgets_in, composed_guarantee
    from dpdist.privacy.guarantee import format_epsilon
    from dpdist.privacy.journal import JournalError

    if not folder.is_dir():
        raise UserError(f"budget: {folder} is not a folder; name one with --folder")
    neighbours: Neighbours = "replace-one" if replace_one else "add-or-remove-one"
    answer: list[dict[str, Any]] = []
    try:
        for budget in budgets_in(folder):
            runs = [
                {
                    "run": charge.run,
                    "name": charge.name,
                    "status": charge.status,
                    "epsilon": _number(composed_guarantee([charge], delta, neighbours).epsilon),
                }
                for charge in budget.charges
            ]
            total = budget.guarantee(delta, neighbours)
            answer.append(
                {
                    "data": budget.fingerprint,
                    "name": budget.data_name,
                    "epsilon": _number(total.epsilon),
                    "delta": delta,
                    "neighbours": neighbours,
                    "accountant": total.source,
                    "runs": runs,
                }
            )
    except (JournalError, ValueError) as error:
        raise UserError(f"budget: {error}") from None
    if as_json:
        typer.echo(json.dumps(answer))
        return
    if not answer:
        typer.echo(f"no budgets in {folder}")
    for entry in answer:
        spent = format_epsilon(entry["epsilon"])
        typer.echo(
            f"{entry['name'] or entry['data']}: epsilon {spent} at delta {delta:g} "
            f"({neighbours}, {entry['accountant']})"
        )
        for run in entry["runs"]:
            alone = format_epsilon(run["epsilon"])
            typer.echo(f"  {run['name']:<24} alone {alone:<8} {run['status']}  {run['run']}")


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"
