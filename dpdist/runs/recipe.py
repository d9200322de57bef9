"""Read the recipe, one YAML file that describes a run, and make its privacy plan.

A recipe is validated field by field, without torch or Ray, and is written back into the run folder
complete with its defaults. Its plan depends on the recipe and the number of records alone:
training, searches, dry runs and previews all take the cost of a training from here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, field_validator, model_validator

from dpdist.config.sections import Sections
from dpdist.config.training import ScriptRecipe, ScriptTraining
from dpdist.core.errors import UserError
from dpdist.core.fields import MOST_STEPS, Section, complaints, each, rule_of, unused
from dpdist.core.files import NoSuchFile, is_file, parse_yaml, read_yaml, shown, usable_path
from dpdist.methods.registry import DEFAULT, AnyMethod
from dpdist.privacy.calibration import least_noise
from dpdist.privacy.phases import GaussianSteps
from dpdist.privacy.plan import PrivacyPlan

# --- the recipe -------------------------------------------------------------------------------


RECIPES = Path(str(files("dpdist"))) / "recipes"
_MOST_COMPLAINTS = 20

_NOT_IN_A_MODEL: Any = {
    **dict.fromkeys(("name", "resources", "certify", "tune", "audit"), True),
    "data": {"names"},
}


class Recipe(Sections):
    """The schema of a recipe: one section a topic, with defaults and checks.

    A recipe is never changed; `dpdist.run` executes it. Sections are `data`, `model`, `method`,
    `privacy`, `training`, `certify`, `tune`, `public`, `audit` and `resources`.

    Raises:
        pydantic.ValidationError: a key is unknown, or a value is out of range.

    Example:
        >>> import dpdist
        >>> recipe = dpdist.Recipe.model_validate({
        ...     "name": "tiny",
        ...     "data": {"name": "digits"},
        ...     "model": {"name": "linear"},
        ...     "privacy": {"epsilon": 3, "delta": 1e-4},
        ...     "training": {"batch_size": 50, "steps": 5, "learning_rate": 0.5},
        ... })
        >>> recipe.privacy.clip_norm, recipe.method.name
        (1.0, 'dp-sgd')
    """

    method: AnyMethod = DEFAULT

    @model_validator(mode="after")
    def _method_fits(self) -> Recipe:
        self.method.check(self)
        return self

    @field_validator("method", mode="before")
    @classmethod
    def _method_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def to_yaml(self) -> str:
        """Return the recipe as YAML with the defaults of its options.

        `training.loss` and `data.targets` are left out at their defaults.

        Reading it back gives an equal recipe.
        """
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    @property
    def by_script(self) -> ScriptRecipe | None:
        """Return the script's entries, where its own loop makes the run; None where commands do."""
        return None

    @property
    def public_files(self) -> tuple[Path, ...]:
        """Return the files and folders made by others that a run reads.

        They are public weights of its models, and a tokenizer.
        """
        parts = (self.model.initial, self.model.classifier, self.model.denoiser)
        found = [part.folder for part in parts if part is not None]
        text, weights = self.data.text, self.public and self.public.weights
        found += [text.tokenizer] if text is not None and text.tokenizer is not None else []
        found += [weights] if isinstance(weights, Path) else []
        return tuple(found)

    def same_experiment(self, other: Recipe) -> list[str]:
        """Return the dotted keys in which two recipes differ.

        Resources are left out, since they may change when a run is continued.
        """
        mine, others = (r.model_dump(mode="json", exclude={"resources"}) for r in (self, other))
        return [name for name, _, _ in differing(mine, others)]

    @property
    def of_model(self) -> dict[str, Any]:
        """Return all settings that a model trained by it depends on, by dotted key."""
        return dict(_dotted(self.model_dump(mode="json", exclude=_NOT_IN_A_MODEL)))


class ScriptedRecipe(Recipe):
    """A run by a script's own loop (`dpdist.PrivateTraining`).

    Commands read it, and none repeats its training.
    """

    training: ScriptTraining
    script: ScriptRecipe

    @property
    def by_script(self) -> ScriptRecipe | None:
        """Return what a script gave."""
        return self.script


def find(name: str) -> Path:
    """Return the path of a recipe, given as a path or as the name of one that comes with dpdist."""
    path = usable_path(name)
    if path.suffix in (".yaml", ".yml") and is_file(path):
        return path
    built_in = RECIPES / f"{path.name.removesuffix('.yaml')}.yaml"
    if built_in.exists() and path.parent in (Path("."), Path("recipes")):
        return built_in
    raise UserError(
        f"{name}: no such recipe file; `dpdist recipes` lists those that come with dpdist"
    )


def load(path: Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Read and validate a recipe file; its name is the file's unless it says so.

    `changes` maps dotted keys to values (from the command line).

    Raises UserError with one line per wrong field: "recipes/x.yaml: privacy.delta: must be ...,
    got ...".
    """
    try:
        documents = read_yaml(path)
    except NoSuchFile:
        raise UserError(f"{path}: no such recipe file") from None
    if len(documents) > 1:
        raise UserError(f"{path}: a recipe is one document, this has {len(documents)} (---)")
    raw = documents[0] if documents else None
    if not isinstance(raw, dict):
        raise UserError(
            f"{path}: a recipe is a mapping of keys to values, got {type(raw).__name__}"
        )
    raw.setdefault("name", path.stem)
    return parse(_changed(raw, changes), str(path))


def resolve(
    recipe: Recipe | str | Path | Mapping[str, Any],
    *,
    changes: Mapping[str, Any] | None = None,
    name: str | None = None,
    data_root: str | Path | None = None,
    workers: int | None = None,
    archive: str | None = None,
    archive_private: bool = False,
) -> Recipe:
    """Return the recipe, by path, by name, as plain data or as it is, with changes.

    changes: by dotted key, validated as if the recipe said them. Raises UserError.
    """
    added = {
        "name": name,
        "data.root": None if data_root is None else str(data_root),
        "resources.workers": workers,
        "resources.archive": archive,
        "resources.archive_private": archive_private or None,
    }
    both = {**(changes or {}), **{key: value for key, value in added.items() if value is not None}}
    if isinstance(recipe, Recipe):
        return parse(_changed(recipe.model_dump(mode="json"), both), "recipe")
    if isinstance(recipe, Mapping):
        return parse(_changed(copy.deepcopy(dict(recipe)), both), "recipe")
    return load(find(str(recipe)), both)


def read_changes(given: Sequence[str] | None) -> dict[str, Any]:
    """Return the changes of `--set KEY=VALUE`, by dotted key; values are written as in a recipe.

    Raises UserError.
    """
    changes: dict[str, Any] = {}
    for one in given or ():
        key, equals, text = (part.strip() for part in one.partition("="))
        if not equals or not all(key.split(".")):
            raise UserError(
                f"--set: give KEY=VALUE, such as training.batch_size=512, got {shown(one)}"
            )
        if key in changes:
            raise UserError(f"--set {key}: is given twice; keep one")
        documents = parse_yaml(text, f"--set {key}")
        if len(documents) > 1:
            raise UserError(f"--set {key}: give one value, got {shown(text)}")
        changes[key] = documents[0] if documents else None
    return changes


def parse(raw: dict[str, Any], where: str) -> Recipe:
    """Validate a recipe given as plain data; `where` begins each complaint."""
    try:
        return (ScriptedRecipe if "script" in raw else Recipe).model_validate(raw)
    except ValidationError as error:
        said = [_complaint(where, item) for item in each(error)]
        if len(said) > _MOST_COMPLAINTS:
            said[_MOST_COMPLAINTS:] = [f"{where}: and {len(said) - _MOST_COMPLAINTS:,} more"]
        raise UserError("\n".join(said)) from None


def refuse_unused(recipe: Recipe, where: str) -> None:
    """Refuse options that nothing of a new run would use.

    Raises:
        UserError: one line for each.
    """
    found = [*unused(recipe), *complaints(recipe.method.needs, recipe)]
    if said := [f"{where}: {line}" for line in found]:
        raise UserError("\n".join(said))


def field_error(where: str, key: str, rule: str, got: object) -> UserError:
    """Return the complaint about one field that only the data can judge."""
    return UserError(f"{where}: {key}: {rule}, got {got}")


def check_against_data(recipe: Recipe, records: int, where: str) -> None:
    """Raise UserError for settings that the number of records forbids."""
    privacy, training = recipe.privacy, recipe.training
    if records < 2:
        raise UserError(
            f"{where}: data: public, hold_out, fraction and max_train leave {records} records to "
            "train on, must be at least 2"
        )
    if privacy.delta >= 1 / records and not privacy.allow_large_delta:
        rule = f"must be < 1/N = {_two_digits_down(1 / records)}"
        raise field_error(where, "privacy.delta", rule, privacy.delta)
    if training.batch_size > records:
        rule = f"must be <= the {records} training records"
        raise field_error(where, "training.batch_size", rule, training.batch_size)
    if privacy.batch_cap is not None and privacy.batch_cap < training.batch_size:
        rule = f"must be >= batch_size = {training.batch_size}"
        raise field_error(where, "privacy.batch_cap", rule, privacy.batch_cap)
    if privacy.batch_cap == training.batch_size == records:
        rule = "must be left out when every step takes all records"
        raise field_error(where, "privacy.batch_cap", rule, privacy.batch_cap)


def step_count(recipe: Recipe, records: int) -> int:
    """Return the integer number of steps."""
    training = recipe.training
    if training.steps is not None:
        return training.steps
    assert training.epochs is not None
    steps = max(1, training.epochs * records // training.batch_size)
    if steps > MOST_STEPS:
        raise UserError(
            f"training.epochs: must make at most {MOST_STEPS:,} steps, {training.epochs} epochs of "
            f"{records} records in batches of {training.batch_size} make {steps:,}"
        )
    return steps


def _two_digits_down(value: float) -> str:
    """Return two significant digits, rounded down: 1.7e-05 for 1/60000."""
    exponent = math.floor(math.log10(value))
    return f"{math.floor(value / 10**exponent * 10 + 0.5) / 10:g}e{exponent:+03d}"


def _changed(raw: dict[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    for key, value in (changes or {}).items():
        _set(raw, key, value)
    return raw


def _set(raw: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        nested = raw.get(parent)
        if isinstance(nested, str):
            nested = {"name": nested}
        # What is no section is replaced: the validation then says that it has no such key.
        raw[parent] = nested = nested if isinstance(nested, dict) else {}
        raw = nested
    raw[last] = value


def _complaint(where: str, item: Any) -> str:
    location = list(item["loc"])
    for union in (["method"], ["certify"], ["audit"], ["resources", "workers"]):
        if location[: len(union)] == union and len(location) > len(union):
            del location[len(union)]  # pydantic repeats the union's tag there
    if item["type"] == "of_key":
        location.append(item["ctx"]["key"])
    key = ".".join(str(part) for part in location)
    kind, rule = item["type"], rule_of(item)
    if kind == "union_tag_invalid":
        named = "kind" if location == ["audit"] else "name"
        return f"{where}: {key}.{named}: {rule}, got {shown(item['ctx']['tag'])}"
    prefix = f"{where}: {key}: " if key else f"{where}: "
    if kind in ("extra_forbidden", "missing") or isinstance(item["input"], dict):
        return prefix + rule
    return f"{prefix}{rule}, got {shown(item['input'])}"


def differing(mine: Any, other: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted key of each differing setting, and both values; None for a missing one."""
    if isinstance(mine, dict) and isinstance(other, dict):
        for key in sorted(mine.keys() | other.keys()):
            inner = f"{name}.{key}" if name else key
            yield from differing(mine.get(key), other.get(key), inner)
    elif mine != other:
        yield name, mine, other


def _dotted(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield prefix.rstrip("."), value
        return
    for key, inner in value.items():
        yield from _dotted(inner, f"{prefix}{key}.")


# --- the plan of a recipe ---------------------------------------------------------------------


def plan_at(recipe: Recipe, records: int, noise_multiplier: float) -> PrivacyPlan:
    """Return the plan of one training of the recipe with this noise.

    The recipe's own noise is ignored. Raises ValueError for settings that no plan allows.
    """
    privacy, batch_size = recipe.privacy, recipe.training.batch_size
    records = privacy.nominal_records or records
    if batch_size > records:
        raise ValueError(f"batch_size {batch_size} is larger than the {records} records")
    rate, cap = batch_size / records, privacy.batch_cap
    steps = GaussianSteps(step_count(recipe, records), noise_multiplier, rate, cap)
    return PrivacyPlan(
        records,
        recipe.method.cost(steps),
        privacy.delta,
        privacy.sensitivity,
        privacy.neighbours,
        privacy.nominal_records is not None,
    )


def make_plan(recipe: Recipe, records: int, where: str) -> PrivacyPlan:
    """Return the plan of a recipe on `records` records, as `settle` finds it."""
    return settle(recipe, records, where)[1]


def settle(recipe: Recipe, records: int, where: str) -> tuple[float, PrivacyPlan]:
    """Return the noise multiplier of a recipe on `records` records, and the plan with it.

    The noise is calibrated when epsilon is given. Only the method knows the noise of each step
    of the plan.

    With privacy.nominal_records nothing in it depends on `records`. Raises UserError when the
    recipe does not fit the data or the target cannot be reached.
    """
    privacy = recipe.privacy
    check_against_data(recipe, privacy.nominal_records or records, where)
    noise = privacy.noise_multiplier
    if noise is None:
        assert privacy.epsilon is not None

        def plan_with(noise: float) -> PrivacyPlan:
            return plan_at(recipe, records, noise)

        try:
            noise = least_noise(plan_with, privacy.epsilon)
        except ValueError as error:
            raise field_error(where, "privacy.epsilon", str(error), privacy.epsilon) from error
    try:
        return noise, plan_at(recipe, records, noise)
    except ValueError as error:
        raise UserError(f"{where}: privacy: {error}") from error


def check_plan(
    recipe: Recipe, plan: PrivacyPlan, noise_multiplier: float | None, where: str
) -> None:
    """Raise UserError unless the recipe makes this plan, on the plan's number of records.

    noise_multiplier: of its steps, as it was found for privacy.epsilon; not needed where the recipe
    gives it. None: it is found again.
    """
    given = recipe.privacy.noise_multiplier
    noise = noise_multiplier if given is None else given
    try:
        if noise is None:
            made = make_plan(recipe, plan.records, where)
        else:
            made = plan_at(recipe, plan.records, noise)
    except ValueError as error:
        raise UserError(f"{where}: no plan of this run's recipe: {error}") from error
    if made != plan:
        before, now = plan.to_dict(), made.to_dict()
        changed = sorted(key for key in before | now if before.get(key) != now.get(key))
        raise UserError(
            f"{where}: {', '.join(changed)}: must be what the run's recipe makes; put back "
            "plan and recipe as the run was begun with them, or begin a new run under another "
            "--name"
        )


def refuse_answers(plan: PrivacyPlan, where: str) -> None:
    """Raise UserError for a training that pays for answers: as one of many, nobody would ask it."""
    if plan.answers:
        raise UserError(
            f"{where}: each of many trainings would need teachers of its own; take another method"
        )


def training_alone(recipe: Recipe) -> Recipe:
    """Return the recipe of its training alone."""
    return parse(_raw(recipe), recipe.name)


def ordinary(recipe: Recipe, sections: Mapping[str, Section] | None = None) -> Recipe:
    """Return the recipe of the same training by ordinary SGD: without method, clip and noise.

    sections: in place of its own, by name.
    """
    raw = _raw(recipe)
    for name, section in (sections or {}).items():
        raw[name] = section.model_dump(mode="json")
    if sections:
        raw["public"] = None  # about the recipe's own model
    raw["method"] = DEFAULT.model_dump(mode="json")
    raw["privacy"] |= {
        "epsilon": None, "noise_multiplier": 0.0, "clipping": "none", "batch_cap": None
    }  # fmt: skip
    return parse(raw, recipe.name)


def _raw(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json") | dict.fromkeys(("certify", "tune", "audit"))
