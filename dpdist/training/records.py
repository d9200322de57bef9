"""Choose the records that a run trains on, holds out, publishes scores on, and calls public.

Every record's side follows from a hash of its own input (`Dataset.part`) and from public numbers,
so that adding or removing one record moves no other one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from dpdist import data
from dpdist.config.data import DataRecipe
from dpdist.core.errors import UserError
from dpdist.data.dataset import check_test
from dpdist.runs.recipe import Recipe


def source_of(recipe: Recipe) -> data.Source:
    """Return the source of the recipe's data."""
    return _source(recipe.data)


def _source(section: DataRecipe) -> data.Source:
    columns = data.Columns(
        section.columns.image,
        section.columns.label,
        tuple(section.columns.features),
        section.columns.group,
        _text(section),
        section.targets,
    )
    return data.Source(
        section.name, section.classes, section.root, section.train, section.test, columns,
        tuple(section.labels), tuple(section.names),
    )  # fmt: skip


def _text(section: DataRecipe) -> data.TextColumn | None:
    text = section.text
    if text is None:
        return None
    words = None
    if text.words is not None and section.root is not None:
        words = data.Words(section.root / section.name / data.WORDS, text.words)
    return data.TextColumn(text.column, text.length, text.tokenizer, words, text.following)


def source_at(section: DataRecipe, root: Path | None) -> data.Source:
    """Return the source here of data named elsewhere (by a release)."""
    return replace(_source(section), root=None if root is None else root.resolve())


def training_data(recipe: Recipe, source: data.Source) -> data.Dataset:
    """Return the training records, and behind them the canaries of an audit.

    Those take public inputs from data.public, without it from the test split.
    """
    records = training_records(recipe, source)
    if recipe.planted is None:
        return records
    from dpdist.training.canaries import WithCanaries

    public = declared_public(recipe, source) if recipe.data.public else data.load(source, "test")
    return WithCanaries.of(records, recipe.planted, public)


def training_records(recipe: Recipe, source: data.Source) -> data.Dataset:
    """The training records: what data.max_train, public, hold_out and fraction leave."""
    section = recipe.data
    end = section.hold_out + section.fraction * (1 - section.hold_out)
    return private_part(recipe, source, section.hold_out, end)


def private_data(recipe: Recipe, source: data.Source) -> data.Dataset:
    """All records of the training split that are not declared public, whether used or not. Raises
    UserError where the model was trained elsewhere, on records that nobody here knows."""
    _require_training(recipe)
    return _split(recipe.data, source).part(recipe.data.public, 1.0)


def declared_public(recipe: Recipe, source: data.Source) -> data.Dataset:
    """The training split's records that data.public declares public; no run trains on them."""
    split = _split(recipe.data, source)
    return split.part(0.0, recipe.data.public * _used(recipe.data, split))


def evaluation_data(recipe: Recipe, source: data.Source) -> data.Dataset:
    """The test split, whose scores and certificates are published.

    Raises UserError when private records are in it. (Where the training split does not lie, nothing
    can be compared; it did where the run was trained.)
    """
    test = data.load(source, "test")
    if recipe.method.trained_elsewhere is None and data.has(source, "train"):
        check_test(private_data(recipe, source), test, "data.test")
    return test


def named_public(section: DataRecipe, beside: Path | None) -> data.Dataset:
    """The training split of another data set, all of which is public. beside: the root of what is
    not built in and has none of its own."""
    if section.root is None and section.name not in data.BUILT_IN:
        section = section.model_copy(update={"root": beside})
    split = _split(section, _source(section))
    return split.part(0.0, _used(section, split))


def private_part(recipe: Recipe, source: data.Source, low: float, high: float) -> data.Dataset:
    """The records from `low` to `high` (fractions) of those that are neither public nor beyond
    data.max_train."""
    _require_training(recipe)
    split, public = _split(recipe.data, source), recipe.data.public
    used = _used(recipe.data, split)
    start, end = (public + share * used * (1 - public) for share in (low, high))
    return split.part(start, end)


def _require_training(recipe: Recipe) -> None:
    if (why := recipe.method.trained_elsewhere) is not None:
        raise UserError(f"{recipe.name}: has no training records: {why}")


def _split(section: DataRecipe, source: data.Source) -> data.Dataset:
    split = data.load(source, "train")
    return split.leaving_out(data.load(source, "test")) if section.drop_test_records else split


def _used(section: DataRecipe, split: data.Dataset) -> float:
    """The share of public and of private records that data.max_train lets in.

    In two digits, rounded up: so one record more or fewer in the split does not move the threshold,
    except where the rounding does; N is public there as it is in the sampling rate.
    """
    if section.max_train is None or section.max_train >= len(split):
        return 1.0
    share = section.max_train / len(split)
    digits = 1 - math.floor(math.log10(share))
    result: float = min(1.0, math.ceil(share * 10**digits - 1e-9) / 10**digits)
    return result


def public_data(recipe: Recipe) -> data.Dataset | None:
    """The public records a method reads (their training split), or None when it reads none.

    Without a root of their own they lie beside the recipe's data; of the run's own data set they
    are those that data.public declares public. Raises UserError when missing, or of other classes
    than a frozen classifier tells apart.
    """
    named = recipe.method.public_records
    if named is None:
        return None
    root = None
    if named.data not in data.BUILT_IN or named.root is not None:
        root = named.root or recipe.data.root
    own = source_of(recipe)
    if recipe.data.public and (named.data, root) == (own.name, own.root):
        return declared_public(recipe, own)
    try:
        found = data.load(data.Source(named.data, named.classes, root), "train")
    except UserError as error:
        raise UserError(f"{named.field}: {error}") from None
    if recipe.model.classifier is not None and found.classes != recipe.data.told_apart:
        raise UserError(
            f"{named.field}: {found.name} has {found.classes} classes, the frozen "
            f"classifier tells {recipe.data.told_apart}; take other public records, or source: paid"
        )
    return found
