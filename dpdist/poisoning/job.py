"""Train many models of one recipe in bulk and collect their votes, one training a chunk.

A worker trains one model by the recipe's own loop and asks it for its votes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save
from torch import nn

from dpdist import models
from dpdist.certification.inference import use_single_thread
from dpdist.certification.worker import KeyedGenerator
from dpdist.cluster import job_folder
from dpdist.cluster.resumable_job import Row, WorkItems
from dpdist.poisoning.certificates import COLUMNS, FILE, KEY, NONE, SCHEMA, TABLE, draw_subset
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import ESTIMATE, StreamKeys, derive_key
from dpdist.randomness.noise_location import find_noise_location
from dpdist.runs.recipe import Recipe
from dpdist.training.ensembles import (
    EnsembleJob,
    TrainingItems,
    plan_of_shard,
    shards_by_hash,
    train_in_process,
)
from dpdist.training.loop import TrainingDiverged
from dpdist.training.records import data_source, load_test_records, records_with_canaries

# --- the worker -------------------------------------------------------------------------------


_BATCH = 1000


@dataclass(frozen=True)
class VoterSetup:
    """All that the models have in common. Each is a function of this and its number.

    plan: of each model; with partitions it follows from the shard. key: secret. partitions: whether
    each model is trained on its own shard of the records, and depends only on it. bag_size: number
    of records that each model's key draws; None without bags. If neither is set, each model is
    trained on all records. sigma: of Gaussian noise on the input of a vote, one sample for each
    model and input; None: the model's own noise, if any. indices: of the test inputs that are voted
    on.
    """

    recipe: Recipe
    plan: PrivacyPlan
    key: bytes
    models: int
    partitions: bool
    sigma: float | None
    indices: range
    bag_size: int | None = None


class Voter:
    """Called with a model's number; returns its votes, by file."""

    def __init__(self, shared: VoterSetup) -> None:
        use_single_thread()
        self._shared = shared
        source = data_source(shared.recipe)
        self._records = records_with_canaries(shared.recipe, source)
        self._test = load_test_records(shared.recipe, source)
        self._shards = None
        if shared.partitions:  # by a public key: an attacker may know the shard of a record
            self._shards = shards_by_hash(self._records.hashes, b"", shared.models)
        # Of models on the same records; only in memory.
        alike = not shared.partitions and shared.bag_size is None
        self._shared_state: dict[Any, Any] | None = {} if alike else None

    def __call__(self, number: int) -> dict[str, bytes]:
        key = derive_key(self._shared.key, "voter", number)
        votes = np.full(len(self._shared.indices), NONE, np.int64)
        recipe, plan, members = self._plan_training(number, key)
        if plan is not None:
            training = (recipe, plan, self._records, members, key)
            try:
                with train_in_process(*training, shared_cache=self._shared_state) as folder:
                    model = models.load(folder, trusted_factory=recipe.model.name)
                votes = self._votes(model, derive_key(key, "votes").hex())
            except TrainingDiverged:  # counts as an answer that is no class
                pass
        return {FILE: save({"votes": votes})}

    def _plan_training(
        self, number: int, key: bytes
    ) -> tuple[Recipe, PrivacyPlan | None, np.ndarray]:
        recipe, records = self._shared.recipe, len(self._records)
        if self._shared.bag_size is not None:
            members = draw_subset(derive_key(key, "bag"), records, self._shared.bag_size)
            return *plan_of_shard(recipe, self._shared.bag_size), members
        if self._shards is None:
            every = np.ones(records, dtype=bool)
            return recipe, self._shared.plan, every
        members = self._shards == number
        if not members.any():
            return recipe, None, members
        return *plan_of_shard(recipe, int(members.sum())), members

    def _votes(self, model: nn.Module, seed: str) -> np.ndarray:
        shared, place = self._shared, find_noise_location(model)
        if shared.sigma is not None:
            place = place.with_input_noise(shared.sigma)
        shape = place.normals_shape(model, tuple(self._test.input_shape))
        randomness = KeyedGenerator(StreamKeys("vote", seed, "", "", "gaussian", 1.0))
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


class VotingJob(EnsembleJob):
    """The votes on one recipe. identity, setup: see `dpdist.poisoning.evaluation`."""

    kind = job_folder.JobKind("set of votes", "training voters", is_seed_secret=True)
    table_file, metadata_key, schema, columns = TABLE, KEY, SCHEMA, COLUMNS
    sort_columns = ("model", "index")

    def __init__(
        self, identity: dict[str, Any], seed: str | None, setup: VoterSetup, labels: np.ndarray
    ) -> None:
        super().__init__(identity, seed, setup)
        self._labels = labels

    def initial_record(self, output: Path) -> dict[str, Any]:
        labels = job_folder.label_digest(np.asarray(self.setup.indices), self._labels)
        return super().initial_record(output) | {job_folder.LABEL_DIGEST_KEY: labels}

    def work_items(self, job_record: dict[str, Any], output: Path) -> WorkItems:
        shared = self.setup_of_seed(job_record["seed"])
        return _VoterWorkItems(shared, output / "models", self._labels)


class _VoterWorkItems(TrainingItems):
    checked_file = FILE

    def __init__(self, shared: VoterSetup, folder: Path, labels: np.ndarray) -> None:
        super().__init__(shared.models, Voter, shared, folder, shared.plan)
        self._indices, self._labels = list(shared.indices), labels

    def read_result(self, raw: bytes, folder: Path) -> dict[str, Any]:
        return {"votes": load_tensors(raw)["votes"]}

    def table_rows(self, item: Any, partial: Any) -> list[Row]:
        (whole,) = super().table_rows(item, partial)
        each = zip(self._indices, self._labels.tolist(), whole["votes"].tolist(), strict=True)
        return [
            {"model": whole["model"], "index": index, "label": label, "vote": vote}
            for index, label, vote in each
        ]
