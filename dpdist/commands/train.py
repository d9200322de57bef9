"""dpdist train: the training stage alone."""

from __future__ import annotations

from dpdist.commands.options import (
    RUNS,
    Archive,
    ArchivePrivate,
    Changes,
    DataRoot,
    Name,
    RecipeArgument,
    Runs,
    Workers,
)


def command(
    recipe: RecipeArgument,
    changes: Changes = None,
    name: Name = None,
    runs: Runs = RUNS,
    data_root: DataRoot = None,
    workers: Workers = None,
    archive: Archive = None,
    archive_private: ArchivePrivate = False,
) -> None:
    """Train privately and evaluate on the test split. Continues an interrupted training."""
    from dpdist.base import console
    from dpdist.runs.recipe import read_changes, resolve

    resolved = resolve(
        recipe, changes=read_changes(changes), name=name, data_root=data_root, workers=workers,
        archive=archive, archive_private=archive_private,
    )  # fmt: skip
    from dpdist import pipeline

    folder = pipeline.train_alone(resolved, runs=runs, where=recipe)
    print(console.table(pipeline.summary(folder), title=f"run {folder.name}"))
