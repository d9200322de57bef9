"""Denoised smoothing from finished parts: a denoiser before a classifier, as a new run folder.

One of the two is a finished run's, the other was trained without that run's records. Putting them
together is post-processing: it costs no privacy.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from dpdist import models
from dpdist.base.errors import UserError
from dpdist.base.reading import usable_path
from dpdist.base.storage import built_aside, write_json
from dpdist.randomness.places import place_of
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse
from dpdist.runs.released import read_released
from dpdist.training.provenance import check_pretrained, load_frozen, with_frozen
from dpdist.training.records import private_data, source_of

Part = Literal["classifier", "denoiser"]


def _joinable(folder: RunFolder, part: Part) -> Recipe:
    """The recipe of a run whose network can go beside the part. Raises UserError otherwise."""
    read_released(folder)
    if folder.asked.exists():
        raise UserError(f"{folder.path}: a private search; its model cannot be moved")
    recipe = folder.read_recipe()
    if recipe.method.withheld is not None:
        raise UserError(f"{folder.path}: {recipe.method.withheld}")
    if part == "classifier" and recipe.model.classifier is None:
        raise UserError(f"{folder.path}: its model is no denoiser before a classifier")
    if part == "denoiser" and recipe.model.classifier is not None:
        raise UserError(f"{folder.path}: its model is a denoiser already; give it a --classifier")
    return recipe


def put_together(
    folder: RunFolder,
    part: Part,
    other: Path,
    target: RunFolder,
    *,
    saw: str | None = None,
    data_root: Path | None = None,
) -> RunFolder:
    """A new run folder `target`: this run's trained network and the `part` in model folder `other`.

    part: "classifier": the run's denoiser goes before that classifier. "denoiser": that denoiser
    goes before the run's classifier. Plan, key and ledger are the old run's: one release under two
    names, charged once to a budget. saw: what the part was trained on, if its folder does not say.
    data_root: where the run's data lie now, if elsewhere.

    Raises UserError when the run has no such network, the target exists, the part does not fit or
    was trained on the run's private records.
    """
    finished = folder.require_trained()
    recipe = _joinable(folder, part)
    if target.path.exists():
        raise UserError(f"{target.path}: exists already; choose another --name")
    own: Part = "denoiser" if part == "classifier" else "classifier"
    raw = recipe.model_dump(mode="json")
    raw |= {"name": target.name, "public": None}
    if data_root is not None:
        raw["data"]["root"] = str(usable_path(data_root).resolve())
    raw["model"][part] = {"folder": str(usable_path(other).resolve()), "saw": saw}
    new = parse(raw, str(target.path))
    private = private_data(new, source_of(new))
    about = check_pretrained(new, private, str(target.path))
    assert about is not None
    spec = with_frozen(models.read_spec(folder.model), new, private)
    whole = models.build(spec)
    trained = models.load_network(folder.model, trusted_factory=recipe.model.name)
    place_of(trained).attach(whole)
    if recipe.model.frozen is not None:
        trained = trained.get_submodule(own)
    whole.get_submodule(own).load_state_dict(trained.state_dict())
    load_frozen(whole, new)
    joined = f"after training, by `dpdist denoise` from run {folder.name}: the {own} was trained "
    joined += "before another classifier" if own == "denoiser" else "without this denoiser"
    with built_aside(target.path) as path:
        aside = RunFolder(path)
        aside.begin(new)
        aside.pin_recipe(new, folder.begun_noise, trained=folder)
        for kept in (
            folder.plan, folder.data, folder.ledger, folder.anchor, folder.run_key,
            folder.fixed_key,
        ):  # fmt: skip
            if kept.exists():
                shutil.copy2(kept, aside.private / kept.name)
        write_json(aside.pretrained, {**about, "joined": joined})
        models.save(whole, spec, aside.model)
        write_json(aside.trained, {**finished, "model": models.model_hash(aside.model)})
    return target
