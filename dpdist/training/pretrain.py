"""Training WITHOUT privacy on public records: initial weights, or a model's frozen part.

Ordinary minibatches of shuffled records on one process. The model folder says what was seen
(`dpdist.training.provenance`), so that a private run can make sure that none of it is private.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dpdist import data, models
from dpdist.base.errors import UserError
from dpdist.base.storage import built_aside
from dpdist.data.overlap import check_unseen, refuse_common
from dpdist.models import ModelSpec
from dpdist.runs.recipe import Recipe
from dpdist.sections.recipe import PublicRecipe
from dpdist.training.provenance import AMONG_PUBLIC, made_by, write_provenance
from dpdist.training.records import declared_public, named_public, private_data, source_of

Progress = Callable[[int, int, float], None]  # steps done, steps, per second


def pretrain(
    recipe: Recipe, where: str, progress: Progress = lambda done, steps, rate: None
) -> tuple[Path, float]:
    """Train the recipe's public part into its folder.

    Returns the folder and the accuracy on the test split; of a denoiser, the root mean squared
    error of a pixel there. Nothing is kept of an interrupted one: it begins again. Raises UserError
    when the recipe has no section public, the folder holds something else, or the records are
    private.
    """
    section, pretrained = recipe.public, recipe.model.pretrained
    if section is None or pretrained is None:
        raise UserError(f"{where}: no section public, which says what to train on public records")
    part, folder = pretrained[0], pretrained[1].folder
    network = recipe.model if section.model is None else section.model
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: exists already; remove it to train it again")
    source = source_of(recipe)
    test = data.load(source, "test")
    public = _public_records(recipe, section, source, where)
    refuse_common(private_data(recipe, source), public, f"{where}: public.data", AMONG_PUBLIC)
    models.check_name(network.name)
    from dpdist.training import public_training as training

    learned = ModelSpec(
        network.name,
        test.input_shape,
        public.classes,
        dict(network.options),
        tuple(network.mean),
        tuple(network.std),
        following=test.following,
    )
    if section.denoiser is not None:
        asked = section.denoiser
        if asked.name not in models.ZOO:
            raise UserError(
                f"{where}: public.denoiser.name: must be of the zoo, got {asked.name!r}"
            )
        before = ModelSpec(asked.name, test.input_shape, public.classes, dict(asked.options))
        learned = replace(learned, denoiser=before)
    model = models.initialise(learned, section.training.init_seed)
    if learned.denoiser is not None:  # learns first, and is frozen then
        first = model.get_submodule(models.DENOISER).requires_grad_(True)
        training.train_public(first, public, test.input_shape, section, models.DENOISER, progress)
        first.requires_grad_(False)
    check = models.check_denoiser if part == models.DENOISER else models.check_outputs
    check(model, learned)
    began = {}
    if section.weights is not None:
        began["began_with"] = training.begin_with(model, section, network)
    steps = training.train_public(model, public, test.input_shape, section, part, progress)
    facts = {"steps": steps, "batch_size": section.training.batch_size, "public": True, **began}
    facts["made_by"] = made_by(section)
    spec = replace(learned, classes=test.classes)
    if spec != learned:
        model = training.with_new_head(model, spec, section.training.init_seed)
    with built_aside(folder) as aside:
        models.save(model.eval(), spec, aside)
        write_provenance(aside, public, facts)
    if part == models.DENOISER:
        assert section.sigma is not None
        return folder, training.reconstruction_error(model, test, section.sigma)
    return folder, training.accuracy(model, test)


def _public_records(
    recipe: Recipe, section: PublicRecipe, source: data.Source, where: str
) -> data.Dataset:
    if section.data is None:
        if not recipe.data.public:
            raise UserError(
                f"{where}: data.public: must be > 0, the fraction of public records, or name "
                "another data set in public.data"
            )
        records = declared_public(recipe, source)
    else:
        found = named_public(section.data, recipe.data.root)
        if found.classes != recipe.data.told_apart and recipe.model.initial is None:
            raise UserError(
                f"{where}: public.data: {found.classes} classes, the private data have "
                f"{recipe.data.told_apart}"
            )
        if found.read != data.load(source, "test").read:
            raise UserError(f"{where}: public.data.text: must be data.text: tokens mean the same")
        records = found
    check_unseen(records, data.load(source, "test"), where, section.data is None)
    if section.training.batch_size > len(records):
        raise UserError(
            f"{where}: public.training.batch_size: must be <= the {len(records)} public records, "
            f"got {section.training.batch_size}"
        )
    return records
