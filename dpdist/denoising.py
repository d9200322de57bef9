"""A trained denoiser before another classifier: post-processing, so it costs no privacy."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import dpdist.data
from cluster.storage import write_json
from dpdist import models
from dpdist.errors import UserError
from dpdist.recipe import parse
from dpdist.runfolder import RunFolder
from dpdist.training.job import source_of
from dpdist.training.provenance import check_classifier, classifier_spec


def put_before(
    folder: RunFolder, classifier: Path, target: RunFolder, *, saw: str | None = None
) -> RunFolder:
    """A new run folder `target`: this run's denoiser before the classifier in `classifier`.

    The denoiser, its key and its ledger are the old run's: one release under two names, charged
    once to a budget. saw: what the classifier was trained on, if its folder does not say. Raises
    UserError when the run has no denoiser, the target exists, the classifier does not fit or was
    trained on the run's private records.
    """
    folder.require_trained()
    if folder.asked.exists():
        raise UserError(f"{folder.path}: a private search; its denoiser cannot be moved")
    if target.path.exists():
        raise UserError(f"{target.path}: exists already; choose another --name")
    recipe = folder.read_recipe()
    if recipe.model.classifier is None:
        raise UserError(f"{folder.path}: its model is no denoiser before a classifier")
    raw = recipe.model_dump(mode="json")
    place = str(classifier.expanduser().resolve())
    raw |= {"name": target.name, "public": None}
    raw["model"]["classifier"] = {"folder": place, "saw": saw}
    new = parse(raw, str(target.path))
    private = dpdist.data.load(source_of(new), "train").part(new.data.public, 1.0)
    about = check_classifier(new, private, str(target.path))
    spec = dataclasses.replace(
        models.read_spec(folder.model), classifier=classifier_spec(new, private)
    )
    behind = models.load(classifier.expanduser(), trusted_factory=new.model.name).state_dict()
    old = models.load(folder.model, trusted_factory=recipe.model.name).state_dict()
    begin = f"{models.CLASSIFIER}."
    tensors = {name: value for name, value in old.items() if not name.startswith(begin)}
    tensors |= {begin + name: value for name, value in behind.items()}
    whole = models.build(spec)
    whole.load_state_dict(tensors)
    target.begin(new)
    for path in (folder.plan, folder.data, folder.ledger, folder.run_key, folder.fixed_key):
        if path.exists():
            shutil.copy2(path, target.private / path.name)
    write_json(target.classifier, about)
    models.save(whole, spec, target.model)
    shutil.copy2(folder.trained, target.trained)
    return target
