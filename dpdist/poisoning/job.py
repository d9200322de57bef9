"""Train many models of one recipe in bulk and collect their votes, one training a chunk.

A worker trains one model by the recipe's own loop and asks it for its votes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save
from torch import nn

from dpdist import models
from dpdist.certification.inference import quiet_threads
from dpdist.certification.worker import Randomness
from dpdist.cluster import job_folder
from dpdist.cluster.resumable_job import Row, Task, Work
from dpdist.core.errors import UserError
from dpdist.core.files import private_folder
from dpdist.poisoning.certificates import COLUMNS, FILE, KEY, NONE, SCHEMA, TABLE, drawn
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import ESTIMATE, UnitSource, derive_key
from dpdist.randomness.noise_location import place_of
from dpdist.runs.recipe import Recipe
from dpdist.training.ensembles import ManyTrainings, plan_of_shard, shards_by_hash, trained_here
from dpdist.training.records import evaluation_data, source_of, training_data
from dpdist.training.worker import Diverged

# --- the worker -------------------------------------------------------------------------------


_BATCH = 1000


@dataclass(frozen=True)
class VoterSetup:
    """All that the models have in common. Each is a function of this and its number.

    plan: of each, but with partitions, where it follows from the shard. key: secret. partitions:
    each model is trained on its own shard of the records, on which alone it then depends; bag: on
    so many of them that its key draws; otherwise each on all of them, by keys of its own. sigma:
    of Gaussian noise on the input of a vote, one draw for each model and input; None: the model's
    own noise, if any. indices: of the test inputs that are voted on.
    """

    recipe: Recipe
    plan: PrivacyPlan
    key: bytes
    models: int
    partitions: bool
    sigma: float | None
    indices: range
    bag: int | None = None


class Voter:
    """Called with a model's number; returns its votes, by file."""

    def __init__(self, shared: VoterSetup) -> None:
        quiet_threads()
        self._shared = shared
        source = source_of(shared.recipe)
        self._records = training_data(shared.recipe, source)
        self._test = evaluation_data(shared.recipe, source)
        self._shards = None
        self._kept: dict[Any, Any] | None = {}  # of models on the same records; in memory alone
        if shared.partitions:  # by a public key: who poisons may know which shard a record is in
            self._shards = shards_by_hash(self._records.hashes, b"", shared.models)
        if shared.partitions or shared.bag is not None:
            self._kept = None

    def __call__(self, number: int) -> dict[str, bytes]:
        key = derive_key(self._shared.key, "voter", number)
        votes = np.full(len(self._shared.indices), NONE, np.int64)
        recipe, plan, members = self._training(number, key)
        if plan is not None:
            training = (recipe, plan, self._records, members, key)
            try:
                with trained_here(*training, kept=self._kept) as folder:
                    model = models.load(folder, trusted_factory=recipe.model.name)
                votes = self._votes(model, derive_key(key, "votes").hex())
            except Diverged:  # an answer of its own, which no class profits by
                pass
        return {FILE: save({"votes": votes})}

    def _training(self, number: int, key: bytes) -> tuple[Recipe, PrivacyPlan | None, np.ndarray]:
        recipe, records = self._shared.recipe, len(self._records)
        if self._shared.bag is not None:
            members = drawn(derive_key(key, "bag"), records, self._shared.bag)
            return *plan_of_shard(recipe, self._shared.bag), members
        if self._shards is None:
            every = np.ones(records, dtype=bool)
            return recipe, self._shared.plan, every
        members = self._shards == number
        if not members.any():
            return recipe, None, members
        return *plan_of_shard(recipe, int(members.sum())), members

    def _votes(self, model: nn.Module, seed: str) -> np.ndarray:
        shared, place = self._shared, place_of(model)
        if shared.sigma is not None:
            place = place.smoothed(shared.sigma)
        shape = place.normals_shape(model, tuple(self._test.input_shape))
        randomness = Randomness(UnitSource("vote", seed, "", "", "gaussian", 1.0))
        found = []
        for start in range(0, len(shared.indices), _BATCH):
            names = shared.indices[start : start + _BATCH]
            inputs = self._test.batch(np.array(names))
            normals: Any = None
            if shape is not None:
                normals = randomness.normals(names, ESTIMATE, 0, 1, shape)
            with torch.inference_mode():
                logits = place.logits(model, inputs, normals)
            found.append(models.predicted_classes(logits).numpy())
        return np.concatenate(found).astype(np.int64)


# --- the bulk job -----------------------------------------------------------------------------


class Voting(Work):
    """Of one recipe. wanted: see `dpdist.poisoning.evaluation`."""

    kind = job_folder.Kind("set of votes", "training voters", secret=True)
    file, key, schema, columns, order = TABLE, KEY, SCHEMA, COLUMNS, ("model", "index")

    def __init__(
        self,
        wanted: dict[str, Any],
        seed: str | None,
        share: Callable[[str], VoterSetup],
        labels: np.ndarray,
    ) -> None:
        """share: what workers share, given the seed."""
        self._wanted, self.seed, self._share = wanted, seed, share
        self._labels = labels

    def identity(self) -> dict[str, Any]:
        return self._wanted

    def begin(self, output: Path) -> dict[str, Any]:
        private_folder(output)  # wherever it was asked for
        indices = np.arange(*self._wanted["settings"]["inputs"])
        labels = job_folder.label_digest(indices, self._labels)
        return {"seed": self.seed or secrets.token_hex(32), job_folder.LABELS: labels}

    def open(self, about: dict[str, Any], output: Path) -> Task:
        return _Voters(self._share(about["seed"]), output / "models", self._labels)


class _Voters(ManyTrainings):
    witness = FILE

    def __init__(self, shared: VoterSetup, folder: Path, labels: np.ndarray) -> None:

        plan = shared.plan
        examples = plan.steps * plan.step(0).expected_batch if plan.steps else 0.0
        super().__init__(shared.models, Voter, shared, folder, examples)
        self._indices, self._labels = list(shared.indices), labels

    def found(self, raw: bytes, place: Path) -> dict[str, Any]:
        try:
            votes = load_tensors(raw)["votes"]
        except (SafetensorError, KeyError) as error:
            raise UserError(f"{place}: damaged: {error}") from error
        if votes.shape != (len(self._indices),) or votes.dtype != np.int64 or votes.min() < NONE:
            raise UserError(f"{place}: damaged: not one vote on each input")
        return {"votes": votes}

    def rows(self, item: Any, partial: Any) -> list[Row]:
        (whole,) = super().rows(item, partial)
        each = zip(self._indices, self._labels.tolist(), whole["votes"].tolist(), strict=True)
        return [
            {"model": whole["model"], "index": index, "label": label, "vote": vote}
            for index, label, vote in each
        ]
