"""Choose the records that a run trains on, holds out, publishes scores on, and calls public.

Every record's side follows from a hash of its own input (`Dataset.select_by_hash`) and from public
numbers, so that adding or removing one record moves no other one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from dpdist import data
from dpdist.config.data import DataRecipe
from dpdist.core.errors import UserError
from dpdist.data import UserDataset, check_test_split
from dpdist.runs.recipe import Recipe


def data_source(recipe: Recipe) -> data.DataSource:
    """Return the source of the recipe's data."""
    return _source(recipe.data)


def _source(section: DataRecipe) -> data.DataSource:
    columns = data.Columns(
        section.columns.image,
        section.columns.label,
        tuple(section.columns.features),
        section.columns.user,
        _text(section),
        section.targets,
        tuple(section.columns.preprocessing.items()),
    )
    return data.DataSource(
        section.name, section.classes, section.root, section.train, section.test, columns,
        tuple(section.labels), tuple(section.names),
    )  # fmt: skip


def _text(section: DataRecipe) -> data.TextColumn | None:
    text = section.text
    if text is None:
        return None
    words = None
    if text.words is not None and section.root is not None:
        words = data.WordList(section.root / section.name / data.WORDS_FILE, text.words)
    return data.TextColumn(
        text.column, text.length, text.tokenizer_file, words, text.predicts_next_token,
        text.bos_eos, text.prompt, text.answer, text.messages,
    )  # fmt: skip


def data_source_under(section: DataRecipe, root: Path | None) -> data.DataSource:
    """Return the source under `root` of data that a release names."""
    return replace(_source(section), root=None if root is None else root.resolve())


def records_with_canaries(recipe: Recipe, source: data.DataSource) -> data.Dataset:
    """Return the training records followed by an audit's canaries.

    With privacy.unit: user they are users, and len counts users. Canaries take public inputs from
    data.public, without it from the test split.
    """
    records = by_unit(recipe, training_records(recipe, source))
    if recipe.canary_audit is None:
        return records
    from dpdist.training.canaries import DatasetWithCanaries, UsersWithCanaries

    if isinstance(records, UserDataset):
        return UsersWithCanaries.from_users(records, recipe.canary_audit)
    declared = recipe.data.public
    public = declared_public_records(recipe, source) if declared else data.load(source, "test")
    return DatasetWithCanaries.from_records(records, recipe.canary_audit, public)


def by_unit(recipe: Recipe, records: data.Dataset) -> data.Dataset:
    """Return private records by user if a user is the unit, else unchanged.

    Raises UserError if a record's user is not known.
    """
    unit = recipe.user_unit
    return records if unit is None else UserDataset.from_records(records, unit.max_records)


def training_records(recipe: Recipe, source: data.DataSource) -> data.Dataset:
    """Return the records that max_train, public, private_eval_fraction and fraction leave."""
    section = recipe.data
    end = section.private_eval_fraction + section.fraction * (1 - section.private_eval_fraction)
    return private_records_between(recipe, source, section.private_eval_fraction, end)


def private_records(recipe: Recipe, source: data.DataSource) -> data.Dataset:
    """Return all records of the training split that are not declared public.

    Raises UserError if the model was trained elsewhere, on unknown records.
    """
    _require_training(recipe)
    return _own_split(recipe, source).select_by_hash(recipe.data.public, 1.0)


def declared_public_records(recipe: Recipe, source: data.DataSource) -> data.Dataset:
    """Return the training split's records that data.public declares public."""
    split = _own_split(recipe, source)
    return split.select_by_hash(0.0, recipe.data.public * _used_fraction(recipe.data, split))


def load_test_records(recipe: Recipe, source: data.DataSource) -> data.Dataset:
    """Return the test split, whose scores and certificates are published.

    Raises UserError if private records are in it. Without the training split nothing is compared:
    it was compared when the run was trained.
    """
    test = data.load(source, "test")
    if recipe.method.capabilities.trained_elsewhere is None and data.split_exists(source, "train"):
        check_test_split(private_records(recipe, source), test, "data.test")
    return test


def _refuse_features(root: Path | None, name: str, key: str) -> None:
    """Raise UserError for features as public records: what their network saw would be lost."""
    if data.holds_features(root, name):
        raise UserError(
            f"{key}: must be the original records, got {name}, features of a network, which may "
            "have seen private records; use the records that they were computed from"
        )


def external_public_records(section: DataRecipe, default_root: Path | None) -> data.Dataset:
    """Return the training split of a different data set, all of which is public.

    default_root: of a data set that is not built in and has no root.
    """
    if section.root is None and section.name not in data.BUILT_IN:
        section = section.model_copy(update={"root": default_root})
    _refuse_features(section.root, section.name, "public.data")
    split = _split(section, _source(section))
    return split.select_by_hash(0.0, _used_fraction(section, split))


def private_records_between(
    recipe: Recipe, source: data.DataSource, low: float, high: float
) -> data.Dataset:
    """Return the records from `low` to `high`, fractions of the private ones within max_train."""
    _require_training(recipe)
    split, public = _own_split(recipe, source), recipe.data.public
    used = _used_fraction(recipe.data, split)
    start, end = (public + share * used * (1 - public) for share in (low, high))
    return split.select_by_hash(start, end)


def _require_training(recipe: Recipe) -> None:
    if (why := recipe.method.capabilities.trained_elsewhere) is not None:
        raise UserError(f"{recipe.name}: has no training records: {why}")


def _own_split(recipe: Recipe, source: data.DataSource) -> data.Dataset:
    """Return the run's training split; with privacy.unit: user its parts are of whole users."""
    split = _split(recipe.data, source)
    return split if recipe.user_unit is None else replace(split, by_user=True)


def _split(section: DataRecipe, source: data.DataSource) -> data.Dataset:
    split = data.load(source, "train")
    return (
        split.without_records_of(data.load(source, "test")) if section.drop_test_records else split
    )


def _used_fraction(section: DataRecipe, split: data.Dataset) -> float:
    """Return the fraction of public and of private records (or users) that data.max_train allows.

    It is rounded up to two digits: so one record more or fewer in the split moves the threshold
    only if the rounding does; N is public there as it is in the sampling rate.
    """
    if section.max_train is None:
        return 1.0
    count = split.num_groups if split.by_user else len(split)
    if section.max_train >= count:
        return 1.0
    share = section.max_train / count
    digits = 1 - math.floor(math.log10(share))
    result: float = min(1.0, math.ceil(share * 10**digits - 1e-9) / 10**digits)
    return result


def method_public_records(recipe: Recipe) -> data.Dataset | None:
    """Return the public records that a method reads (their training split); None if it reads none.

    Without a root they are next to the recipe's data; of the run's own data set they are those that
    data.public declares public. Raises UserError if they are missing, or their number of classes is
    not that of a frozen classifier.
    """
    named = recipe.method.public_records
    if named is None:
        return None
    root = None
    if named.dataset_name not in data.BUILT_IN or named.root is not None:
        root = named.root or recipe.data.root
    own = data_source(recipe)
    if recipe.data.public and (named.dataset_name, root) == (own.name, own.root):
        return declared_public_records(recipe, own)
    _refuse_features(root, named.dataset_name, named.recipe_key)
    try:
        found = data.load(data.DataSource(named.dataset_name, named.classes, root), "train")
    except UserError as error:
        raise UserError(f"{named.recipe_key}: {error}") from None
    if recipe.model.classifier is not None and found.classes != recipe.data.num_classes:
        raise UserError(
            f"{named.recipe_key}: {found.name} has {found.classes} classes, the frozen "
            f"classifier {recipe.data.num_classes}; use different public records, or source: paid"
        )
    return found
