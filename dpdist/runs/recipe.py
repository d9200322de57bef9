"""Read the recipe, one YAML file that describes a run, and compute its privacy plan.

A recipe is validated field by field, without torch or Ray, and is written back into the run folder
complete with its defaults. Its plan depends only on the recipe and the number of records: training,
searches and dry runs all use the plan that is computed here.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError, field_validator, model_validator

from dpdist.config.sections import BaseRecipe, PretrainedRecipe
from dpdist.config.statistics import fill_bought_rules
from dpdist.config.training import ScriptRecipe, ScriptScore, ScriptTraining, Stage
from dpdist.core.errors import UserError, with_page
from dpdist.core.fields import (
    MAX_STEPS,
    Section,
    iter_condition_errors,
    iter_errors,
    iter_unused_options,
    key_error,
    validation_message,
)
from dpdist.core.files import (
    MissingFileError,
    exists_as_non_folder,
    parse_yaml,
    quoted,
    read_json,
    read_text,
    read_yaml,
    validate_path,
)
from dpdist.core.preprocessing import ColumnPreprocessing
from dpdist.methods.registry import DEFAULT, AnyMethod, find_method
from dpdist.privacy.calibration import calibrate_noise, counts_noise_for, score_noise_for
from dpdist.privacy.class_rates import ClassRates
from dpdist.privacy.guarantee import BEGAN_APART, CHOSEN_APART, Guarantee, kind_of
from dpdist.privacy.phases import GaussianCounts, GaussianSteps, Phase
from dpdist.privacy.plan import PrivacyPlan, UserUnit

# --- the recipe -------------------------------------------------------------------------------


RECIPES_FOLDER = Path(str(files("dpdist"))) / "recipes"
# Recipes that reproduce papers; only a checkout has this folder.
PAPERS_FOLDER = RECIPES_FOLDER.resolve().parents[1] / "papers"
_MAX_ERRORS = 20
_S = TypeVar("_S", bound=Section)

_MODEL_INDEPENDENT_KEYS: Any = {
    **dict.fromkeys(("name", "resources", "certify", "tune", "audit"), True),
    "data": {"names"},
}


class Recipe(BaseRecipe):
    """A checked recipe: one section per topic, with defaults.

    A recipe is immutable; `dpdist.run` executes it. Each section is an attribute with the section's
    keys, such as `recipe.privacy.epsilon`. `certify`, `tune`, `public` and `audit` are None if the
    recipe does not have them. Sections are `data`, `model`, `method`, `privacy`, `training`,
    `certify`, `tune`, `public`, `audit` and `resources`.

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

    @model_validator(mode="before")
    @classmethod
    def _infer_token_count(cls, value: Any) -> Any:
        """Set data.classes to the vocabulary size of the folder's own head, or of the tokenizer."""
        data = value.get("data") if isinstance(value, dict) else None
        if not isinstance(data, dict) or "classes" in data:
            return value
        text = data.get("text")
        if not isinstance(text, dict) or text.get("predict") != "next":
            return value
        if not isinstance(tokenizer := text.get("tokenizer"), str | Path):
            return value
        count = _tokens_of_own_head(value.get("model")) or _tokens_of(Path(tokenizer).expanduser())
        return value if count is None else {**value, "data": {**data, "classes": count}}

    @model_validator(mode="before")
    @classmethod
    def _fill_bought_constants(cls, value: Any) -> Any:
        """Give bought columns their constants; the widest range until these are known."""
        section = value.get("statistics") if isinstance(value, dict) else None
        data = None if section is None else value.get("data")
        columns = data.get("columns") if isinstance(data, dict) else None
        if not isinstance(columns, dict):
            return value
        rules = fill_bought_rules(section, columns.get("preprocessing", {}))
        filled = {**columns, "preprocessing": rules}
        return {**value, "data": {**data, "columns": filled}}  # type: ignore[dict-item]

    @model_validator(mode="after")
    def _check_method(self) -> Recipe:
        self.method.check(self)
        return self

    @model_validator(mode="after")
    def _check_function_score(self) -> Recipe:
        if self.tune and self.tune.score.function is not None and self.by_script is None:
            raise key_error(
                "tune.score.function",
                "must be left out: it belongs to a search over a function (dpdist.tune)",
            )
        return self

    @model_validator(mode="after")
    def _check_user_unit(self) -> Recipe:
        if self.privacy.unit == "record":
            return self
        if self.data.columns.user is None and self.by_script is None:
            raise key_error(
                "data.columns.user",
                "required with privacy.unit: user; name the column that identifies users",
                see="explanation/privacy.md#a-person-as-the-unit",
            )
        if not self.method.capabilities.plain_steps:
            raise ValueError(
                with_page(
                    f"privacy.unit: must be record with method {self.method.name} with these "
                    "options; user works with dp-sgd, dplis, and input-noise without consistency",
                    see="explanation/privacy.md#a-person-as-the-unit",
                )
            )
        if self.audit is not None and not self.audit.audits_users:
            raise ValueError(
                "audit.kind: must be mechanism with privacy.unit: user, or canaries with canary: "
                f"gradient, got {self.audit.kind}, which audits single records and not users"
            )
        return self

    @model_validator(mode="after")
    def _check_class_rates(self) -> Recipe:
        if not self.data.class_sampling:
            return self
        if (cap := self.privacy.batch_cap) is not None:
            line = (
                f"privacy.batch_cap: must be left out with data.class_sampling, got {cap}: capped "
                "batches can be accounted only if all records have the same rate"
            )
        elif self.privacy.unit == "user":
            line = (
                "privacy.unit: must be record with data.class_sampling, got user: a user's records "
                "can belong to several classes"
            )
        elif not self.method.capabilities.plain_steps:
            line = (
                f"data.class_sampling: must be left out with method {self.method.name} with these "
                f"options, got {len(self.data.class_sampling)} rates; they work with dp-sgd, "
                "dplis, and input-noise without consistency"
            )
        else:
            return self
        raise ValueError(with_page(line, see="explanation/privacy.md#rare-classes"))

    def class_rates(self, mean_rate: float) -> ClassRates | None:
        """Return the sampling rate of each class, a `ClassRates`; None without class sampling.

        Only public numbers of the recipe determine the rates.

        Args:
            mean_rate: expected batch divided by the number of records, both public.

        Returns:
            A `ClassRates`: `rates` (a tuple of floats in (0, 1], the probability that a record of
            each class joins a step) and `counts` (a tuple of ints, the public number of records of
            each class), both in the order of the class numbers.

        Raises:
            ValueError: rates in these proportions cannot give such a batch.
        """
        data = self.data
        if not data.class_sampling:
            return None
        weights = [data.class_sampling[name] for name in data.class_names]
        counts = [data.class_counts[name] for name in data.class_names]
        return ClassRates.for_batch(weights, counts, mean_rate)

    @property
    def user_unit(self) -> UserUnit | None:
        """Return the user that is the unit of privacy, a `UserUnit`; None if the unit is a record.

        A `UserUnit` has `column` (str, the field that names users) and `max_records` (int, the most
        records of one user that count in one step).
        """
        most = self.privacy.max_records_per_user
        if self.privacy.unit == "record" or most is None:
            return None
        return UserUnit(self.data.columns.user or "unit_id", most)

    @property
    def counted(self) -> str:
        """Return the name of the units of privacy, a str: "records" or "users"."""
        return "records" if self.user_unit is None else "users"

    @property
    def statistics_phases(self) -> tuple[Phase, ...]:
        """Return the phase of the bought column statistics, a tuple of one `Phase`; () without any.

        A `Phase` is one part of a `PrivacyPlan`. This one is a `GaussianCounts` with `deviation`
        (float, standard deviation of the noise on a count, in records) and `histograms` (int).
        """
        bought = self.statistics
        if bought is None:
            return ()
        noise = bought.noise_multiplier
        if noise is None:
            assert bought.epsilon is not None
            noise = counts_noise_for(bought.epsilon, self.privacy.delta, self.privacy.adjacency)
        return (GaussianCounts.of_columns(noise, len(bought.columns)),)

    def with_constants(self, constants: Mapping[str, ColumnPreprocessing]) -> Recipe:
        """Return a new `Recipe` whose preprocessing has the constants of bought statistics.

        Args:
            constants: dict from column name to `ColumnPreprocessing`, the column's rule with its
                bought constants.
        """
        assert self.statistics is not None
        columns = self.data.columns
        rules = {**columns.preprocessing, **constants}
        columns = columns.model_copy(update={"preprocessing": rules})
        return self.model_copy(
            update={
                "data": self.data.model_copy(update={"columns": columns}),
                "statistics": self.statistics.model_copy(update={"constants": dict(constants)}),
            }
        )

    def check_constants(self) -> None:
        """Raise UserError if the recipe's statistics have not been bought yet. Returns nothing.

        A recipe without a section `statistics` passes.
        """
        if self.statistics is not None and not self.statistics.constants:
            raise UserError(
                f"{self.name}: statistics: only `dpdist run`, `dpdist tune` and dpdist.run can buy "
                "them; train with one of these"
            )

    @property
    def stages(self) -> list[Stage]:
        """Return the runs and statistics that a script started with, a list of `Stage`; or empty.

        A `Stage` has `name` and `unit` (str), `guarantee` (a dict with "epsilon" and "delta"),
        `assumed` (a list of sentences) and `in_target` (bool: whether `privacy.epsilon` covers it
        too).
        """
        return [] if self.by_script is None else self.by_script.began_with

    def earlier_phases(self, plan: PrivacyPlan) -> tuple[Phase, ...]:
        """Return what the runs in `stages` released, a tuple of `Phase`, each a part of a plan.

        Empty if `stages` is empty, or if the clip norm is infinite, since nothing is then proved.
        Runs for which no joint epsilon can be stated are left out; `stage_assumptions` lists them.

        Args:
            plan: the plan of this run.
        """
        if math.isinf(plan.clip_norm):  # nothing is proved about this run anyway
            return ()
        found = (each.phases_within(plan, self.privacy_unit) for each in self.stages)
        return tuple(phase for phases in found for phase in phases or ())

    def phases_in_target(self, plan: PrivacyPlan) -> tuple[Phase, ...]:
        """Return the phases outside a plan that `privacy.epsilon` covers too, a tuple of `Phase`.

        They are the phases of the bought statistics in `stages`; the tuple is empty without any.

        Args:
            plan: the plan of this run.
        """
        found = (e.phases_within(plan, self.privacy_unit) for e in self.stages if e.in_target)
        return tuple(phase for phases in found for phase in phases or ())

    def stage_assumptions(self, plan: PrivacyPlan) -> tuple[str, ...]:
        """Return what a guarantee assumes about the runs in `stages`, a tuple of sentences (str).

        No sentence occurs twice. The tuple is empty if this run started from no other run.

        Args:
            plan: the plan of this run.
        """
        lines = [CHOSEN_APART] if self.stages else []
        for each in self.stages:
            if each.phases_within(plan, self.privacy_unit) is None:
                lines.append(f"{BEGAN_APART}{each.stated}")
            lines += each.assumed
        return tuple(dict.fromkeys(lines))

    def guarantee_of(
        self, plan: PrivacyPlan, phases: Sequence[Phase], assumed: Sequence[str] = ()
    ) -> Guarantee:
        """Return the `Guarantee` of a run of this recipe and of the runs that it started from.

        Args:
            plan: the plan of this run.
            phases: the phases that the run released, or will release.
            assumed: further assumptions (str), which determine only the kind.

        Returns:
            A `Guarantee`: `epsilon` (infinite if nothing is proved) at the `delta` of the plan. Its
            `kind` is "assumed: post-processing" if an assumption starts with these words, else
            "proved".
        """
        whole = replace(plan, phases=(*self.earlier_phases(plan), *phases))
        found = whole.guarantee_for_events(whole.path_events(whole.phases))
        lines = [each for each in self.stage_assumptions(plan) if each not in found.assumptions]
        fixed = [self.privacy.run_key is not None, *(each.fixed_key for each in self.stages)]
        kind, stated = kind_of((*lines, *assumed)), (*found.assumptions, *lines)
        return replace(found, kind=kind, fixed_key=any(fixed), assumptions=stated)

    @property
    def privacy_unit(self) -> str:
        """Return the unit that the guarantee protects in words, a str such as "one record".

        For users it names the column and the most records of a user that count in a step.
        """
        if self.by_script is not None and self.by_script.unit is not None:
            return self.by_script.unit
        return self.data.privacy_unit if self.user_unit is None else self.user_unit.description

    @field_validator("method", mode="before")
    @classmethod
    def _expand_method_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def to_yaml(self) -> str:
        """Return the recipe as YAML text, a str, with the defaults of its options.

        `training.loss` and `data.targets` are left out at their defaults. Reading the text back
        gives an equal recipe.
        """
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    @property
    def by_script(self) -> ScriptRecipe | None:
        """Return what a script gave to `PrivateTraining`, a `ScriptRecipe`; None for other runs.

        A `ScriptRecipe` has `model`, `optimizer` and `loss` (names, str), `score`, `began_with` (a
        list of `Stage`) and `assumed` (a list of sentences). Other runs are those that commands
        train.
        """
        return None

    @property
    def score(self) -> ScriptScore | None:
        """Return the settings of `PrivateTraining.score`, a `ScriptScore`; None without scores.

        It has `every` (int, steps between two scores), `noise` (float, standard deviation on the
        sum of the records' values), `records` (int, their public number) and `value` (str, name of
        a record's value).
        """
        return None if self.by_script is None else self.by_script.score

    @property
    def public_files(self) -> tuple[Path, ...]:
        """Return the public files and folders that a run reads, a tuple of `Path`; or empty.

        They are the public weights and the tokenizer that the recipe names.
        """
        parts = (self.model.initial, self.model.classifier, self.model.denoiser)
        found = [part.folder for part in parts if part is not None]
        text, weights = self.data.text, self.public and self.public.weights
        found += [text.tokenizer] if text is not None and text.tokenizer is not None else []
        found += [weights] if isinstance(weights, Path) else []
        return tuple(found)

    def differing_keys(self, other: Recipe) -> list[str]:
        """Return the dotted keys in which two recipes differ, a list of str; empty if they agree.

        `resources` is left out, since it may change when a run is continued.

        Args:
            other: the recipe to compare with.
        """
        mine, others = (r.model_dump(mode="json", exclude={"resources"}) for r in (self, other))
        return [name for name, _, _ in iter_differences(mine, others)]

    @property
    def experiment_settings(self) -> dict[str, Any]:
        """Return all settings that the model depends on, a dict from dotted key to JSON value.

        An example of a key is "training.batch_size".
        """
        return dict(flatten(self.model_dump(mode="json", exclude=_MODEL_INDEPENDENT_KEYS)))


def _tokens_of_own_head(model: Any) -> int | None:
    """Return the vocabulary size of a model folder's own head; None for a different head."""
    options, initial = (
        (model.get("options"), model.get("initial")) if isinstance(model, dict) else (None, None)
    )
    if not (isinstance(options, dict) and options.get("head") == "own"):
        return None
    config = options.get("config")
    folder = initial.get("folder") if isinstance(initial, dict) else None
    if isinstance(folder, str | Path):
        with suppress(UserError):
            config = read_json(Path(folder).expanduser() / "config.json")
    count = config.get("vocab_size") if isinstance(config, dict) else None
    return count if type(count) is int else None


_TOKENIZER_BYTES = 256 * 2**20


def _tokens_of(tokenizer: Path) -> int | None:
    """Return the vocabulary size of a tokenizer (file or folder); None if unreadable."""
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        found = json.loads(read_text(file, _TOKENIZER_BYTES))
        vocabulary = found["model"]["vocab"]
        numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return 1 + max(map(int, [*numbers, *(each["id"] for each in found["added_tokens"])]))
    except (UserError, ValueError, KeyError, TypeError):
        return None  # the error is raised where the tokenizer is read


class ScriptedRecipe(Recipe):
    """The recipe of a run by a script's custom loop (`dpdist.PrivateTraining`).

    Commands can read it, but cannot repeat its training.
    """

    training: ScriptTraining
    script: ScriptRecipe

    @property
    def by_script(self) -> ScriptRecipe | None:
        """Return the arguments that the script gave."""
        return self.script


def built_in_recipes() -> list[Path]:
    """Return the recipes that come with dpdist."""
    return sorted(RECIPES_FOLDER.glob("*.yaml"))


def paper_recipes() -> list[Path]:
    """Return the recipes in papers/ of a checkout; an empty list in an installed package."""
    return sorted(PAPERS_FOLDER.glob("*/recipes/*.yaml"))


def find_recipe(name: str) -> Path:
    """Return the path of a recipe, given as a path or by the name of a recipe of dpdist.

    In a checkout, recipes in papers/ can be given by name too.
    """
    path = validate_path(name)
    if path.suffix in (".yaml", ".yml") and exists_as_non_folder(path):
        return path
    if path.parent in (Path("."), Path("recipes")):
        known = {each.stem: each for each in (*paper_recipes(), *built_in_recipes())}
        if (found := known.get(path.name.removesuffix(".yaml"))) is not None:
            return found
    raise UserError(
        f"{name}: no such recipe file; `dpdist recipes` lists those that come with dpdist"
    )


def load_recipe(path: Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Read and validate a recipe file, whose default name is that of the file.

    Relative paths in the file are relative to its folder, so that the recipe names the same budget
    and data from any directory. In recipes of dpdist and of papers/, and in `changes`, they are
    relative to the current directory.

    Args:
        path: the file.
        changes: values by dotted key, from the command line.

    Raises:
        UserError: one line per wrong field: "recipes/x.yaml: privacy.delta: must be ..., got ...".
    """
    try:
        documents = read_yaml(path)
    except MissingFileError:
        raise UserError(f"{path}: no such recipe file") from None
    if len(documents) > 1:
        raise UserError(f"{path}: must be one YAML document, got {len(documents)} (---)")
    raw = documents[0] if documents else None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: must be a mapping of keys to values, got {type(raw).__name__}")
    raw.setdefault("name", path.stem)
    folder = path.absolute().parent
    own = folder.resolve()
    if own == RECIPES_FOLDER.resolve() or own.parent.parent == PAPERS_FOLDER:
        folder = Path.cwd()  # data is not kept next to the code
    if not {"privacy", "privacy.budget"} & (changes or {}).keys():
        _check_budget_place(raw, folder, path)
    found = _anchor_paths(raw, [Recipe, ScriptedRecipe], folder)
    return parse_recipe(_apply_changes(found, changes), str(path))


def _check_budget_place(raw: Mapping[str, Any], folder: Path, context: Path) -> None:
    """Raise UserError if the current directory has the budget, and the recipe's folder has not.

    A second budget would be created in the recipe's folder, and the first would not be charged.
    """
    privacy = raw.get("privacy")
    budget = privacy.get("budget") if isinstance(privacy, dict) else None
    if not isinstance(budget, str):
        return
    here, meant = (Path(_anchored(budget, place)) for place in (Path.cwd(), folder))
    if here.exists() and not (meant.exists() and here.samefile(meant)):
        raise UserError(
            f"{context}: privacy.budget: must be an absolute path, got {quoted(budget)}, which "
            f"means {meant}, while {here} is a different budget: a ceiling could start from zero"
        )


def _anchor_paths(
    value: Any, sections: Sequence[type[BaseModel]], folder: Path, where: str = ""
) -> Any:
    """Return a section's plain data with relative paths made absolute, relative to `folder`.

    Args:
        value: a section as it was read, or a list or mapping of sections.
        sections: the classes that the section may be.
        folder: the folder of the recipe's file.
        where: the section's dotted key; empty for the recipe.
    """
    if isinstance(value, list):
        return [_anchor_paths(each, sections, folder, where) for each in value]
    if not isinstance(value, dict) or not sections:
        return value
    found = {}
    for key, inner in value.items():
        kinds = [each.model_fields[key].annotation for each in sections if key in each.model_fields]
        dotted = f"{where}.{key}" if where else str(key)
        nested = [each for kind in kinds for each in _nested_sections(kind)]
        if dotted == "method" and isinstance(inner, dict):
            nested = _method_named(inner.get("name"))
        # A folder stands for its section, and a file of counts for the counts.
        short = key == "class_counts" or any(issubclass(each, PretrainedRecipe) for each in nested)
        if any(_takes_path(kind, inner) for kind in kinds) or (short and isinstance(inner, str)):
            found[key] = _anchored(inner, folder)
        else:
            found[key] = _anchor_paths(inner, nested, folder, dotted)
    return found


def _method_named(name: object) -> list[type[BaseModel]]:
    """Return the class of a method in a list; an empty list for an unknown name."""
    try:
        return [find_method(name)] if isinstance(name, str) else []
    except ValueError:
        return []  # validation reports it


def _takes_path(annotation: Any, value: object) -> bool:
    """Return whether a field takes this value as a path; `public.weights` also takes a name."""
    if get_origin(annotation) is Literal or not isinstance(value, str):
        return False
    parts = get_args(annotation)
    if any(get_origin(part) is Literal and value in get_args(part) for part in parts):
        return False
    return annotation is Path or any(_takes_path(part, value) for part in parts)


def _anchored(value: str, folder: Path) -> str:
    """Return a path relative to `folder` as an absolute one; an impossible path is unchanged."""
    try:
        return str(folder / validate_path(value))
    except UserError:  # raised again where the field is checked
        return value


def resolve_recipe(
    recipe: Recipe | str | Path | Mapping[str, Any],
    *,
    changes: Mapping[str, Any] | None = None,
    name: str | None = None,
    data_root: str | Path | None = None,
) -> Recipe:
    """Return a recipe that is given by path, by name, as plain data or validated, with changes.

    changes: values by dotted key, validated as part of the recipe. Raises UserError.
    """
    added = {"name": name, "data.root": None if data_root is None else str(data_root)}
    both = {**(changes or {}), **{key: value for key, value in added.items() if value is not None}}
    if isinstance(recipe, Recipe):
        return parse_recipe(_apply_changes(recipe.model_dump(mode="json"), both), "recipe")
    if isinstance(recipe, Mapping):
        return parse_recipe(_apply_changes(copy.deepcopy(dict(recipe)), both), "recipe")
    return load_recipe(find_recipe(str(recipe)), both)


def parse_changes(assignments: Sequence[str] | None) -> dict[str, Any]:
    """Return the changes of `--set KEY=VALUE` by dotted key, with values in YAML.

    Raises UserError.
    """
    changes: dict[str, Any] = {}
    for one in assignments or ():
        key, equals, text = (part.strip() for part in one.partition("="))
        if not equals or not all(key.split(".")):
            raise UserError(
                f"--set: must be KEY=VALUE, such as training.batch_size=512, got {quoted(one)}"
            )
        if key in changes:
            raise UserError(f"--set {key}: must be given once")
        documents = parse_yaml(text, f"--set {key}")
        if len(documents) > 1:
            raise UserError(f"--set {key}: must be one value, got {quoted(text)}")
        changes[key] = documents[0] if documents else None
    return changes


def parse_recipe(raw: dict[str, Any], context: str) -> Recipe:
    """Return the validated recipe of plain data; `context` begins each error line."""
    try:
        return (ScriptedRecipe if "script" in raw else Recipe).model_validate(raw)
    except ValidationError as error:
        lines = [_format_error(context, item) for item in iter_errors(error)]
        if len(lines) > _MAX_ERRORS:
            lines[_MAX_ERRORS:] = [f"{context}: and {len(lines) - _MAX_ERRORS:,} more"]
        raise UserError("\n".join(lines)) from None


def parse_section(kind: type[_S], raw: Mapping[str, Any], context: str) -> _S:
    """Return one validated section of plain data; `context` begins each error line."""
    try:
        return kind.model_validate(dict(raw))
    except ValidationError as error:
        lines = [_format_error(context, item) for item in iter_errors(error)]
        raise UserError("\n".join(lines)) from None


def refuse_unused(recipe: Recipe, context: str) -> None:
    """Raise UserError, with one line per option, for options that a new run would not use."""
    lines = [
        *iter_unused_options(recipe),
        *iter_condition_errors(recipe.method.recipe_conditions, recipe),
    ]
    if lines:
        raise UserError("\n".join(f"{context}: {line}" for line in lines))


def field_error(context: str, key: str, rule: str, got: object, see: str = "") -> UserError:
    """Return the error about one field whose limits depend on the data."""
    return UserError(f"{context}: {key}: {rule}, got {got}", see=see)


def check_against_data(recipe: Recipe, records: int, context: str) -> None:
    """Raise UserError for settings that do not fit the number of records."""
    privacy, training = recipe.privacy, recipe.training
    counted = recipe.counted
    if records < 2:
        raise UserError(
            f"{context}: data: public, private_eval_fraction, fraction and max_train must leave at "
            f"least 2 {counted} to train on, got {records}"
        )
    if privacy.delta >= 1 / records and not privacy.allow_large_delta:
        rule, page = f"must be < 1/N = {1 / records:.1e}", "cost-of-a-training-run"
        see = f"explanation/privacy.md#{page}"
        raise field_error(context, "privacy.delta", rule, privacy.delta, see)
    if training.batch_size > records:
        rule = f"must be <= the {records} training {counted}"
        raise field_error(context, "training.batch_size", rule, training.batch_size)
    _check_class_counts(recipe, records, context)
    if privacy.batch_cap is not None and privacy.batch_cap < training.batch_size:
        rule = f"must be >= batch_size = {training.batch_size}"
        raise field_error(context, "privacy.batch_cap", rule, privacy.batch_cap)
    if privacy.batch_cap == training.batch_size == records:
        rule = "must be left out if every step takes all records"
        raise field_error(context, "privacy.batch_cap", rule, privacy.batch_cap)


def _check_class_counts(recipe: Recipe, records: int, context: str) -> None:
    """Raise UserError if the declared class counts do not add up to the number of records.

    Only public numbers are compared: the classes of private records are never counted. If parts of
    the split are left out, the counts are those of the whole split.
    """
    if not recipe.data.class_sampling:
        return
    own = records - (0 if recipe.canary_audit is None else recipe.canary_audit.canaries)
    total, part = sum(recipe.data.class_counts.values()), recipe.data.content_filter_key
    if total == own or (part is not None and total > own):
        checked_class_rates(recipe, recipe.training.batch_size / records, context)
        return
    rule = f"must add up to the {own:,} records to train on"
    if part is not None:
        rule = f"must be that of the whole split, >= the {own:,} records that data.{part} leaves"
    raise field_error(context, "data.class_counts", rule, f"{total:,}")


def checked_class_rates(recipe: Recipe, mean_rate: float, context: str) -> ClassRates | None:
    """Return `Recipe.class_rates`. Raises UserError if a class would never be sampled."""
    try:
        return recipe.class_rates(mean_rate)
    except ValueError as error:
        rates = ", ".join(f"{name}: {rate:g}" for name, rate in recipe.data.class_sampling.items())
        rule = "must give each class a rate above 0 in batches of this size"
        raise field_error(context, "data.class_sampling", rule, rates) from error


def step_count(recipe: Recipe, records: int) -> int:
    """Return the integer number of steps."""
    training = recipe.training
    if training.steps is not None:
        return training.steps
    assert training.epochs is not None
    steps = max(1, training.epochs * records // training.batch_size)
    if steps > MAX_STEPS:
        raise UserError(
            f"training.epochs: must give at most {MAX_STEPS:,} steps, got {training.epochs} epochs "
            f"of {records} records in batches of {training.batch_size}, {steps:,} steps"
        )
    return steps


def _apply_changes(raw: dict[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    for key, value in (changes or {}).items():
        _set_key(raw, key, value)
    return raw


def _set_key(raw: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        nested = raw.get(parent)
        if isinstance(nested, str):
            nested = {"name": nested}
        # A value that is not a section is replaced; validation then reports the unknown key.
        raw[parent] = nested = nested if isinstance(nested, dict) else {}
        raw = nested
    raw[last] = value


def _nested_sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections in an annotation, each member of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _nested_sections(inner)


def _keys_of(sections: Iterable[type[BaseModel]], where: str = "") -> Iterator[str]:
    """Yield the dotted keys of sections and of the sections in them."""
    for section in sections:
        for name, field in section.model_fields.items():
            yield f"{where}{name}"
            yield from _keys_of(_nested_sections(field.annotation), f"{where}{name}.")


_MAIN_SECTIONS = ("data", "model", "privacy", "training", "certify", "resources")


def _did_you_mean(location: Sequence[Any]) -> str:
    """Return the known dotted key that is closest to an unknown one; "" if none is close."""
    *section, key = map(str, location)
    known = {each.rpartition(".")[::2] for each in _keys_of([Recipe])}
    around_it = ".".join(section)
    own = sorted(name for around, name in known if around == around_it and name != key)
    if near := difflib.get_close_matches(key, own, 1):
        return ".".join([*section, near[0]])
    elsewhere = [around for around in _MAIN_SECTIONS if (around, key) in known]
    return f"{elsewhere[0]}.{key}" if len(elsewhere) == 1 else ""


def _without_tags(location: Sequence[Any]) -> list[Any]:
    """Return a location without the tags of unions that pydantic adds."""
    keys = list(location)
    for union in (["method"], ["certify"], ["audit"], ["resources", "workers"]):
        if keys[: len(union)] == union:
            del keys[len(union) : len(union) + 1]
    return keys


def _format_error(context: str, item: Any) -> str:
    location = _without_tags(item["loc"])
    guess = _did_you_mean(location) if item["type"] == "extra_forbidden" else ""
    if item["type"] == "of_key":
        location.append(item["ctx"]["key"])
    key = ".".join(str(part) for part in location)
    kind, rule = item["type"], validation_message(item)
    if kind == "union_tag_invalid":
        named = "kind" if location == ["audit"] else "name"
        return f"{context}: {key}.{named}: {rule}, got {quoted(item['ctx']['tag'])}"
    prefix = f"{context}: {key}: " if key else f"{context}: "
    if kind in ("extra_forbidden", "missing") or isinstance(item["input"], dict):
        return prefix + rule + (f"; did you mean {guess}?" if guess else "")
    return f"{prefix}{rule}, got {quoted(item['input'])}"


def iter_differences(first: Any, second: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted key of each differing setting, and both values; None for a missing one."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted(first.keys() | second.keys()):
            inner = f"{prefix}.{key}" if prefix else key
            yield from iter_differences(first.get(key), second.get(key), inner)
    elif first != second:
        yield prefix, first, second


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of each setting of nested sections."""
    if not isinstance(value, dict) or not value:
        yield prefix.rstrip("."), value
        return
    for key, inner in value.items():
        yield from flatten(inner, f"{prefix}{key}.")


# --- the plan of a recipe ---------------------------------------------------------------------


def plan_with_noise(recipe: Recipe, records: int, noise_multiplier: float) -> PrivacyPlan:
    """Return the plan of one training with this noise multiplier, including private scores.

    The recipe's own noise is ignored. Raises ValueError for settings that no plan allows.
    """
    plan = _plan_without_scores(recipe, records, noise_multiplier)
    score = recipe.score
    return plan if score is None else replace(plan, phases=score.phases(plan.phases, plan.steps))


def _plan_without_scores(recipe: Recipe, records: int, noise_multiplier: float) -> PrivacyPlan:
    privacy, batch_size = recipe.privacy, recipe.training.batch_size
    records = privacy.nominal_records or records
    if batch_size > records:
        raise ValueError(f"batch_size {batch_size} is larger than the {records} records")
    rate, cap = batch_size / records, privacy.batch_cap
    classes = recipe.class_rates(rate)
    rate = rate if classes is None else classes.largest  # the rate that is accounted
    steps = GaussianSteps(step_count(recipe, records), noise_multiplier, rate, cap, classes)
    return PrivacyPlan(
        records,
        (*recipe.method.cost(steps), *recipe.statistics_phases),
        privacy.delta,
        privacy.sensitivity,
        privacy.adjacency,
        privacy.nominal_records is not None,
        recipe.user_unit,
    )


def make_plan(recipe: Recipe, records: int, context: str) -> PrivacyPlan:
    """Return the plan of a recipe on `records` records, as `resolve_plan` computes it."""
    return resolve_plan(recipe, records, context)[1]


def resolve_plan(recipe: Recipe, records: int, context: str) -> tuple[float, PrivacyPlan]:
    """Return the noise multiplier of a recipe on `records` records, and the plan with it.

    The noise is calibrated if epsilon is given. With privacy.nominal_records, neither value depends
    on `records`. Raises UserError if the recipe does not fit the data or epsilon cannot be reached.
    """
    privacy = recipe.privacy
    check_against_data(recipe, privacy.nominal_records or records, context)
    noise = privacy.noise_multiplier
    if noise is None:
        assert privacy.epsilon is not None

        def plan_with(noise: float) -> PrivacyPlan:
            # Scores are computed on other records, so they use no part of the steps' epsilon.
            plan = _plan_without_scores(recipe, records, noise)
            return replace(plan, phases=(*recipe.phases_in_target(plan), *plan.phases))

        try:
            noise = calibrate_noise(plan_with, privacy.epsilon)
        except ValueError as error:
            raise field_error(context, "privacy.epsilon", str(error), privacy.epsilon) from error
    try:
        plan = plan_with_noise(recipe, records, noise)
    except ValueError as error:
        raise UserError(f"{context}: privacy: {error}") from error
    _check_score_noise(recipe, plan, context)
    _check_stages(recipe, plan)
    return noise, plan


def _check_score_noise(recipe: Recipe, plan: PrivacyPlan, context: str) -> None:
    """Raise UserError if the scores on held-out private records exceed privacy.epsilon."""
    target, score = recipe.privacy.epsilon, recipe.score
    if score is None or target is None:
        return
    scores = score.scores(plan.steps)
    if PrivacyPlan(scores.records, (scores,), plan.delta).guarantee().epsilon <= target:
        return
    least = score_noise_for(target, scores=scores, delta=plan.delta)
    count = f"{scores.count} score{'s' * (scores.count > 1)}"
    rule = f"must be >= {math.ceil(least * 1e3) / 1e3:g} for {count} within epsilon {target:g}"
    raise field_error(context, "score.noise", rule, score.noise)


def _check_stages(recipe: Recipe, plan: PrivacyPlan) -> None:
    """Raise UserError for bought statistics that no joint epsilon with the training covers."""
    for each in recipe.stages:
        if not each.in_target:
            continue
        if recipe.privacy.budget is not None:
            raise UserError(
                "privacy.budget: must be left out with bought statistics: the budget does not know "
                "the records that they were computed from"
            )
        if each.phases_within(plan, recipe.privacy_unit) is None:
            raise UserError(
                f"began_with: {each.name}: must have the training's privacy.unit, "
                "max_records_per_user, adjacency and nominal_records, so that one epsilon covers "
                "both"
            )


def check_plan(
    recipe: Recipe, plan: PrivacyPlan, noise_multiplier: float | None, context: str
) -> None:
    """Raise UserError unless the recipe gives this plan on the plan's number of records.

    noise_multiplier: that of the steps, as calibrated; ignored if the recipe gives it. None
    calibrates it again.
    """
    given = recipe.privacy.noise_multiplier
    noise = noise_multiplier if given is None else given
    try:
        if noise is None:
            made = make_plan(recipe, plan.records, context)
        else:
            made = plan_with_noise(recipe, plan.records, noise)
    except ValueError as error:
        raise UserError(f"{context}: this run's recipe gives no plan: {error}") from error
    if made != plan:
        before, now = plan.to_dict(), made.to_dict()
        changed = sorted(key for key in before | now if before.get(key) != now.get(key))
        raise UserError(
            f"{context}: {', '.join(changed)}: must match the run's recipe; restore the plan and "
            "recipe that the run was started with, or start a new run under a different --name"
        )


def refuse_answers(plan: PrivacyPlan, context: str) -> None:
    """Raise UserError for a training that releases paid answers instead of a model."""
    if plan.num_queries:
        raise UserError(
            f"{context}: method.name: must be a method that releases its model: each of many "
            "trainings would need its own teachers"
        )


def training_only(recipe: Recipe) -> Recipe:
    """Return the recipe without its search, certification and audit."""
    return parse_recipe(_training_sections(recipe), recipe.name)


def without_privacy(recipe: Recipe, sections: Mapping[str, Section] | None = None) -> Recipe:
    """Return the recipe of the same training by ordinary SGD: without method, clip and noise.

    sections: by name; they replace the recipe's own.
    """
    raw = _training_sections(recipe)
    for name, section in (sections or {}).items():
        raw[name] = section.model_dump(mode="json")
    if sections:
        raw["public"] = None  # about the recipe's own model
    raw["method"] = DEFAULT.model_dump(mode="json")
    raw["statistics"] = None  # their constants stay
    plain = {"epsilon": None, "noise_multiplier": 0.0, "clipping": "none", "batch_cap": None}
    raw["privacy"] |= plain
    return parse_recipe(raw, recipe.name)


def _training_sections(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json") | dict.fromkeys(("certify", "tune", "audit"))
