"""The same training without privacy, beside a run: what privacy costs, on the same test inputs.

The figures of such a run are computed from the training records and nothing protects them. So they
are shown only where somebody named it, on a page of its own in private/, which says so; the report,
which may leave, is the same with and without.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass

from dpdist.base.errors import UserError
from dpdist.base.fields import check_run_name
from dpdist.base.reading import NoSuchFile, read_json
from dpdist.base.storage import write_json
from dpdist.privacy.guarantee import format_epsilon
from dpdist.reports import differences
from dpdist.reports.compare import SIZES
from dpdist.reports.facts import Facts, read_facts
from dpdist.runs.folder import RunFolder

# What makes the training of a recipe one without privacy.
OPEN = {"privacy.epsilon": "null", "privacy.noise_multiplier": "0", "privacy.clipping": "none",
        "privacy.budget": "null", "privacy.budget_ceiling": "null", "tune": "null"}  # fmt: skip
_OWN = (*OPEN, "name", "certify.seed")  # of the keys in which two such recipes may differ


@dataclass(frozen=True)
class Baseline:
    """rows: of `differences.grid`, the run less the baseline, the header first; empty where nothing
    is comparable. notes: why. changed: what is different in the recipes beside privacy."""

    name: str
    rows: list[list[str]]
    notes: list[str]
    changed: list[str]


def link(folder: RunFolder, other: RunFolder) -> None:
    """Name the baseline of a run, for this report and later ones: a run beside it.

    Raises UserError for a run elsewhere, one that is private, or one of other data.
    """
    if other.path.resolve().parent != folder.path.resolve().parent or other.name == folder.name:
        raise UserError(f"--baseline: must be another run beside {folder.name}, got {other.path}")
    _compared(read_facts(folder), read_facts(other))
    write_json(folder.baseline, {"run": other.name})


def making(folder: RunFolder) -> str:
    """The command that trains a baseline of this run."""
    said = folder.read_recipe().model_dump(mode="json")
    said |= {f"privacy.{key}": value for key, value in said["privacy"].items()}
    needed = (key for key, value in OPEN.items() if value != "null" or said[key] is not None)
    changes = (word for key in needed for word in ("--set", f"{key}={OPEN[key]}"))
    recipe = str(folder.path / "recipe.yaml")
    return shlex.join(["dpdist", "run", recipe, "--name", f"{folder.name}-open", *changes])


def beside(facts: Facts) -> Baseline | None:
    """The baseline that was named for a run, None where none was; one that is gone, or that is no
    baseline any more, with the reason in its notes."""
    try:
        name = str(read_json(facts.folder.baseline, {"run": str})["run"])
    except NoSuchFile:
        return None
    try:
        check_run_name(name)
        return _compared(facts, read_facts(RunFolder(facts.folder.path.parent / name)))
    except (UserError, ValueError) as error:
        return Baseline(name, [], [f"{str(error).splitlines()[0]}."], [])


def _compared(facts: Facts, other: Facts) -> Baseline:
    if not math.isinf(other.guarantee.epsilon):
        raise UserError(
            f"{other.folder.name}: is private (epsilon {format_epsilon(other.guarantee.epsilon)}), "
            "so it is no baseline; `dpdist compare` puts any two runs side by side"
        )
    rows, notes = differences.differences([other, facts], _sizes(facts))
    changed = [
        key for key in other.recipe.same_experiment(facts.recipe)
        if not any(key == own or key.startswith(f"{own}.") for own in _OWN)
    ]  # fmt: skip
    found = differences.grid(other.folder.name, rows) if rows else []
    return Baseline(other.folder.name, found, notes, changed)


def _sizes(facts: Facts) -> dict[str, tuple[float, ...]]:
    """The radii that the report shows anyway; in a norm of which it shows none, the usual ones."""
    shown = {
        norm: {r for table in facts.tables if table.norm == norm for r in table.shown_radii if r}
        for norm in SIZES
    }
    return {norm: tuple(sorted(radii)) or SIZES[norm] for norm, radii in shown.items()}
