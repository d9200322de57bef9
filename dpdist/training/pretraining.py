"""Pre-train WITHOUT privacy on public records, and join a finished denoiser and classifier.

Pre-training gives initial weights, or a model's frozen part, by ordinary minibatches of shuffled
records in one process. The model folder lists the records that were seen
(`dpdist.training.provenance`), so that a private run can check that none of them is private.

Denoised smoothing joins finished parts, a denoiser before a classifier, in a new run folder. One
of the two is a finished run's, the other was trained without that run's records. Joining them is
post-processing: it does not affect epsilon.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from dpdist import data, models
from dpdist.config.sections import PublicRecipe
from dpdist.core.errors import UserError
from dpdist.core.files import atomic_folder, validate_path, write_json
from dpdist.data import check_test_records_unseen, refuse_common_records
from dpdist.models import ModelSpec
from dpdist.randomness.noise_location import find_noise_location
from dpdist.runs.folder import RunFolder, read_verified_ledger
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training.provenance import (
    AMONG_PUBLIC_REASON,
    check_pretrained,
    load_frozen_weights,
    pretraining_settings,
    with_frozen_part,
    write_provenance,
)
from dpdist.training.records import (
    data_source,
    declared_public_records,
    external_public_records,
    private_records,
)

# --- public pre-training ----------------------------------------------------------------------


ProgressCallback = Callable[[int, int, float], None]  # steps done, steps, per second


def pretrain(
    recipe: Recipe, context: str, progress: ProgressCallback = lambda done, steps, rate: None
) -> tuple[Path, float]:
    """Train the recipe's public part into its folder.

    Returns the folder and the accuracy on the test split; of a denoiser, the root mean squared
    error of a pixel there. After an interruption it starts again. Raises UserError if the recipe
    has no section public, the folder contains something else, or the records are private.
    """
    section, pretrained = recipe.public, recipe.model.pretrained_part
    if section is None or pretrained is None:
        raise UserError(f"{context}: no section public, which says what to train on public records")
    part, folder = pretrained[0], pretrained[1].folder
    network = recipe.model if section.model is None else section.model
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: exists already; remove it to train it again")
    source = data_source(recipe)
    test = data.load(source, "test")
    public = _public_records(recipe, section, source, context)
    refuse_common_records(
        private_records(recipe, source), public, f"{context}: public.data", AMONG_PUBLIC_REASON
    )
    models.check_name(network.name)
    from dpdist.training import public_training as training

    learned = ModelSpec(
        network.name,
        test.input_shape,
        public.classes,
        dict(network.options),
        tuple(network.mean),
        tuple(network.std),
        following=test.predicts_next_token,
    )
    if section.denoiser is not None:
        asked = section.denoiser
        before = ModelSpec(asked.name, test.input_shape, public.classes, dict(asked.options))
        learned = replace(learned, denoiser=before)
    model = models.initialize(learned, section.training.init_seed)
    spec = replace(learned, classes=test.classes)
    if learned.denoiser is not None:  # learns first, and is then frozen
        first = model.get_submodule(models.DENOISER).requires_grad_(True)
        training.train_public(first, public, test.input_shape, section, models.DENOISER, progress)
        first.requires_grad_(False)
    check = models.check_denoiser if part == models.DENOISER else models.check_outputs
    check(model, learned)
    began = {}
    if section.weights is not None:
        began["began_with"] = training.load_public_weights(model, section, network)
    steps = training.train_public(model, public, test.input_shape, section, part, progress)
    training.whiten_features(model, public, test.input_shape, section)
    facts = {"steps": steps, "batch_size": section.training.batch_size, "public": True, **began}
    facts["made_by"] = pretraining_settings(section)
    if spec != learned:
        model = training.replace_head(model, spec, section.training.init_seed)
    with atomic_folder(folder) as aside:
        models.save(model.eval(), spec, aside)
        write_provenance(aside, public, facts)
    if part == models.DENOISER:
        assert section.sigma is not None
        return folder, training.reconstruction_error(model, test, section.sigma)
    return folder, training.accuracy(model, test)


def _public_records(
    recipe: Recipe, section: PublicRecipe, source: data.DataSource, context: str
) -> data.Dataset:
    if section.data is None:
        if not recipe.data.public:
            raise UserError(
                f"{context}: data.public: must be > 0, the fraction of public records, or name "
                "another data set in public.data"
            )
        records = declared_public_records(recipe, source)
    else:
        found = external_public_records(section.data, recipe.data.root)
        if found.classes != recipe.data.num_classes and recipe.model.initial is None:
            raise UserError(
                f"{context}: public.data: {found.classes} classes, the private data have "
                f"{recipe.data.num_classes}"
            )
        if found.text_encoding != data.load(source, "test").text_encoding:
            raise UserError(f"{context}: public.data.text: must be data.text: tokens mean the same")
        records = found
    check_test_records_unseen(records, data.load(source, "test"), context, section.data is None)
    return records


# --- denoised smoothing from finished parts ---------------------------------------------------


Part = Literal["classifier", "denoiser"]


def _read_joinable_recipe(folder: RunFolder, part: Part) -> Recipe:
    """Return the recipe of a run whose network can be joined with the part. Raises UserError."""
    read_verified_ledger(folder)
    if folder.search_recipe_file.exists():
        raise UserError(f"{folder.path}: a private search; its model cannot be moved")
    recipe = folder.read_recipe()
    if recipe.method.capabilities.not_releasable_reason is not None:
        raise UserError(f"{folder.path}: {recipe.method.capabilities.not_releasable_reason}")
    if part == "classifier" and recipe.model.classifier is None:
        raise UserError(f"{folder.path}: its model is not a denoiser before a classifier")
    if part == "denoiser" and recipe.model.classifier is not None:
        raise UserError(f"{folder.path}: its model is a denoiser already; give it a --classifier")
    return recipe


def join_parts(
    folder: RunFolder,
    part: Part,
    other: Path,
    target: RunFolder,
    *,
    pretraining_data: str | None = None,
    data_root: Path | None = None,
) -> RunFolder:
    """Join this run's trained network and the `part` in model folder `other` in a new run folder.

    part: "classifier": the run's denoiser goes before that classifier. "denoiser": that denoiser
    goes before the run's classifier. Plan, key and ledger are the old run's: one release under two
    names, charged once to a budget. pretraining_data: of the part, if its folder does not say.
    data_root: the folder of the run's data now, if they moved.

    Raises UserError if the run has no such network, the target exists, the part does not fit or was
    trained on the run's private records.
    """
    finished = folder.require_trained()
    recipe = _read_joinable_recipe(folder, part)
    if target.path.exists():
        raise UserError(f"{target.path}: exists already; choose another name")
    own: Part = "denoiser" if part == "classifier" else "classifier"
    raw = recipe.model_dump(mode="json")
    raw |= {"name": target.name, "public": None}
    if data_root is not None:
        raw["data"]["root"] = str(validate_path(data_root).resolve())
    raw["model"][part] = {
        "folder": str(validate_path(other).resolve()),
        "pretraining_data": pretraining_data,
    }
    new = parse_recipe(raw, str(target.path))
    private = private_records(new, data_source(new))
    about = check_pretrained(new, private, str(target.path))
    assert about is not None
    spec = with_frozen_part(models.read_spec(folder.model_folder), new, private)
    whole = models.build_model(spec)
    trained = models.load_network(folder.model_folder, trusted_factory=recipe.model.name)
    find_noise_location(trained).attach(whole)
    if recipe.model.frozen_part is not None:
        trained = trained.get_submodule(own)
    whole.get_submodule(own).load_state_dict(trained.state_dict())
    load_frozen_weights(whole, new)
    joined = f"after training, by `dpdist import` from run {folder.name}: the {own} was trained "
    joined += "before another classifier" if own == "denoiser" else "without this denoiser"
    with atomic_folder(target.path) as path:
        aside = RunFolder(path)
        aside.create_or_open(new)
        aside.pin_recipe(new, folder.start_noise_multiplier)
        for kept in (
            folder.plan,
            folder.data_fingerprint,
            folder.ledger,
            folder.anchor,
            folder.run_key,
            folder.fixed_key_marker,
        ):
            if kept.exists():
                shutil.copy2(kept, aside.private / kept.name)
        write_json(aside.pretraining_record, {**about, "joined": joined})
        models.save(whole, spec, aside.model_folder)
        write_json(
            aside.training_summary, {**finished, "model": models.model_hash(aside.model_folder)}
        )
    return target
