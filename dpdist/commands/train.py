"""dpdist train: the training stage alone."""

from __future__ import annotations

from dpdist.commands.options import (
    RUNS,
    Archive,
    ArchivePrivate,
    DataRoot,
    Name,
    RecipeArgument,
    Runs,
    Workers,
)


def command(
    recipe: RecipeArgument,
    name: Name = None,
    runs: Runs = RUNS,
    data_root: DataRoot = None,
    workers: Workers = None,
    archive: Archive = None,
    archive_private: ArchivePrivate = False,
) -> None:
    """Train privately and evaluate on the test split. Continues an interrupted training."""
    from dpdist import console, pipeline
    from dpdist.runfolder import RunFolder
    from dpdist.training.job import prepare

    resolved = pipeline.resolve(
        recipe, name=name, data_root=data_root, workers=workers, archive=archive,
        archive_private=archive_private,
    )  # fmt: skip
    folder = RunFolder(runs / resolved.name)
    pipeline.Archive.check_free(folder, resolved.resources.archive)  # before anything is written
    pipeline.public_stage(resolved, recipe)
    job = prepare(resolved, folder, recipe)
    pipeline.begin_archive(resolved, folder)
    with pipeline.session(folder, resolved.resources.cpus) as ray_session:
        pipeline.train_stage(job, ray_session)
    pipeline.evaluate_stage(resolved, folder)
    pipeline.archive_stage(folder)
    print(console.table(pipeline.summary(folder), title=f"run {folder.name}"))
