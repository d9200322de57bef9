"""The many trainings of an audit, in bulk: vectorized ones of small models, and shadow models.

Vectorized trainings run at once, by torch.func over parameters and keys. They share keys, Poisson
sampling, clip factors, noise and its grid, the fixed divisor and the optimizer with the real step.
They differ in the per-example gradients, which come from torch.func and are summed in one product,
while a run uses `dpdist.gradients.engine`, blocks and an all-reduce; there is no ledger. A test
compares one training with the loop's. The mechanism audit drives the loop's own code.

Shadow models are trained by the recipe's own loop, one chunk of work each, and score every record.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save
from torch import Tensor, nn

from dpdist import data, models
from dpdist.audits.membership_statistics import (
    COLUMNS,
    KEY,
    SCHEMA,
    TABLE,
    build_model_table,
    log_odds,
    top_probabilities,
)
from dpdist.audits.target import Target
from dpdist.certification.inference import use_single_thread
from dpdist.certification.worker import expected_log_scores
from dpdist.cluster import job_folder
from dpdist.cluster.resumable_job import Item, JobSpec, Row, WorkItems
from dpdist.config.sections import ManyRunsAudit
from dpdist.core.errors import UserError
from dpdist.core.files import ColumnSpec
from dpdist.gradients.clipping import make_clipping, rounding_slack, sum_slack
from dpdist.gradients.noise import add_noise
from dpdist.gradients.per_example import squared_row_norms
from dpdist.gradients.perturbations import Perturbation
from dpdist.gradients.sampling import poisson_sample
from dpdist.methods.base import MethodState
from dpdist.privacy.audit_bounds import log_likelihood_ratio
from dpdist.privacy.plan import PrivacyPlan, StepPlan
from dpdist.randomness.keys import derive_key
from dpdist.randomness.noise_location import find_noise_location
from dpdist.runs.recipe import Recipe
from dpdist.training.canaries import canary_coordinates
from dpdist.training.collectives import FlatOptimizer
from dpdist.training.ensembles import EnsembleJob, TrainingItems, read_files, train_in_process
from dpdist.training.model_setup import importance_weighted, initial_model, model_spec
from dpdist.training.records import data_source, load_test_records, records_with_canaries

if TYPE_CHECKING:
    from dpdist.audits.membership_statistics import Game


# --- vectorized trainings ---------------------------------------------------------------------


_BYTES = 1 << 28  # of per-example gradients at once
_HUGE = 1e300


@dataclass(frozen=True)
class TrainerSetup:
    """All that the trainings of an audit have in common.

    key: of the audit; each training derives its own. copies: of the canary, in every second
    training. gradient_canary: whether the canary is not a record but a gradient of the clip's norm
    on one coordinate, for an adversary that sees every noisy sum and knows the records' part of it.
    """

    recipe: Recipe
    plan: PrivacyPlan
    dataset: data.Dataset
    key: bytes
    copies: int
    gradient_canary: bool


class Trainer:
    """Called with the numbers of trainings; returns a row of each: odd ones have the canary."""

    def __init__(self, shared: TrainerSetup) -> None:
        use_single_thread()
        self._shared = shared
        self.trainings = VectorizedTrainings(shared.recipe, shared.plan, shared.dataset)
        self._canary = None if shared.gradient_canary else choose_canary(shared.dataset)
        self._coordinate = int(canary_coordinates(1, len(self.trainings.initial))[0])

    def __call__(self, numbers: range) -> list[dict[str, Any]]:
        shared, trainings = self._shared, self.trainings
        keys = [derive_key(shared.key, "training", number) for number in numbers]
        copies = [shared.copies * (number % 2) for number in numbers]
        if self._canary is None:
            scores = trainings.run(keys, "audit", copies, coordinate=self._coordinate)[1]
        else:
            flat, _ = trainings.run(keys, "audit", copies, canary=self._canary)
            scores = trainings.label_log_odds(flat, *self._canary)
        scores = np.nan_to_num(scores, nan=0.0, posinf=_HUGE, neginf=-_HUGE)  # of what diverged
        return [
            {"trial": number, "present": number % 2, "score": float(score)}
            for number, score in zip(numbers, scores, strict=True)
        ]


class VectorizedTrainings:
    """Trainings of one recipe on the same records.

    Raises UserError if a step of the recipe is more than clipped gradients of its loss plus noise.
    """

    def __init__(self, recipe: Recipe, plan: PrivacyPlan, dataset: data.Dataset) -> None:
        self._recipe, self._plan = recipe, plan
        model = initial_model(recipe, model_spec(recipe, dataset))
        losses = recipe.method.execution().task().loss_function
        self._model = model
        self._losses: Any = importance_weighted(losses, recipe, plan.records)
        self._named = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        self._sizes = [p.numel() for p in self._named.values()]
        self._clipping = make_clipping(recipe.privacy.clipping, recipe.privacy.clip_norm)
        rate = recipe.training.learning_rate
        draws = (
            recipe.method.execution().perturbation(plan.step(0), rate, MethodState(model))
            if plan.steps
            else None
        )
        own = (
            type(draws) is not Perturbation
            or recipe.training.has_augmentation
            or not recipe.method.capabilities.takes_gradient_steps
        )
        if own or recipe.privacy.clipping == "per-layer":
            raise UserError(
                f"{recipe.name}: many runs at once: method {recipe.method.name} with clipping "
                f"{recipe.privacy.clipping} draws noise, crops or flips, clips by layer, or takes "
                "no steps, which only the loop does; audit it by canaries in one run"
            )
        everything = slice(0, len(dataset))
        self._inputs, self._labels = dataset.batch(everything), dataset.targets(everything)
        self.initial = torch.cat([p.reshape(-1) for p in self._named.values()])

    def run(
        self,
        keys: list[bytes],
        attempt: str,
        copies: list[int],
        canary: tuple[Tensor, int] | None = None,
        coordinate: int | None = None,
    ) -> tuple[Tensor, np.ndarray]:
        """Return the parameters of a model trained for each key, (M, size), and evidence (M,).

        copies: (M,), of the canary, which come after the records. canary: an input with its label.
        coordinate: of a gradient canary. The evidence is how much all noisy sums indicate it, to an
        adversary that knows the records and which of them joined each step, and so subtracts their
        part: the guarantee is valid against it.
        """
        plan, flat = self._plan, self.initial.repeat(len(keys), 1)
        optimizer = FlatOptimizer(self._recipe.training, plan.steps, flat)
        inputs, labels = self._inputs, self._labels
        if canary is not None:
            inputs = torch.cat([inputs, canary[0][None]])
            labels = torch.cat([labels, torch.tensor([canary[1]])])
        evidence = np.zeros(len(keys))
        canary_class = None if canary is None else canary[1]
        for step in range(plan.steps):
            step_plan = plan.step(step)
            members = [
                self._members(k, attempt, step, step_plan, c, canary_class)
                for k, c in zip(keys, copies, strict=False)
            ]
            sums = self._clipped_sums(flat, inputs, labels, members, coordinate is None)
            known = None if coordinate is None else sums[:, coordinate].copy()
            for row, (key, chosen) in enumerate(zip(keys, members, strict=True)):
                if coordinate is not None:
                    count = int((chosen >= len(self._labels)).sum())
                    sums[row, coordinate] += step_plan.clip_norm * count
                noise_key = derive_key(key, "noise", attempt, step)
                sums[row] = add_noise(sums[row], noise_key, step_plan.noise_std)
            if known is not None:
                evidence += _evidence(sums[:, coordinate] - known, step_plan)
            gradient = torch.from_numpy(sums / step_plan.expected_batch).to(flat)
            optimizer.update(flat, gradient, step)
        return optimizer.published_parameters(flat), evidence

    def _members(
        self,
        key: bytes,
        attempt: str,
        step: int,
        step_plan: StepPlan,
        copies: int,
        canary_class: int | None,
    ) -> np.ndarray:
        records = len(self._labels) + copies
        # a canary without a class of its own is sampled most often
        own = step_plan.most_sampled_class if canary_class is None else canary_class
        classes = np.append(self._labels.numpy(), own) if step_plan.class_rates else np.arange(0)
        sample_key = derive_key(key, "sample", attempt, step)
        return poisson_sample(
            sample_key,
            0,
            records,
            step_plan.sample_rate,
            batch_cap=step_plan.batch_cap,
            records=records,
            class_rates=step_plan.rates_by_class,
            classes_of=lambda chosen: classes[np.minimum(chosen, len(classes) - 1)],
        )

    def _clipped_sums(
        self,
        flat: Tensor,
        inputs: Tensor,
        labels: Tensor,
        members: list[np.ndarray],
        canary_is_record: bool,
    ) -> np.ndarray:
        """Return clipped sums, float64 (M, size).

        canary_is_record: whether the canary has an input, which all its copies share.
        """
        last = len(self._labels)
        rows = [np.minimum(m, last) if canary_is_record else m[m < last] for m in members]
        widest = max(1, *map(len, rows))
        index = torch.zeros(len(rows), widest, dtype=torch.int64)
        real = torch.zeros(len(rows), widest)
        for place, chosen in enumerate(rows):
            index[place, : len(chosen)] = torch.from_numpy(chosen)
            real[place, : len(chosen)] = 1
        each = max(1, _BYTES // (4 * widest * flat.shape[1]))
        per_model = torch.func.vmap(self._clipped_sum_of_model)
        parts = [
            per_model(flat[some], inputs[index[some]], labels[index[some]], real[some])
            for some in torch.arange(len(rows)).split(each)
        ]
        return torch.cat(parts).numpy()

    def _clipped_sum_of_model(
        self, flat: Tensor, inputs: Tensor, labels: Tensor, real: Tensor
    ) -> Tensor:
        """Return the clipped sum of one model: float64 (size,).

        flat: (size,). inputs: (B, ...). labels, real: (B,).
        """
        gradients, _ = torch.func.vmap(
            torch.func.grad(self._loss, has_aux=True), in_dims=(None, 0, 0)
        )(flat, inputs, labels)
        squared = squared_row_norms(gradients)[None]
        slack = rounding_slack(torch.float32) + sum_slack(torch.float32)
        finite = squared.isfinite()
        factors = self._clipping.factors(torch.where(finite, squared, 0.0), slack)
        weights = ((factors * finite)[0] * real).to(gradients)
        result: Tensor = (weights @ gradients.nan_to_num(0.0, 0.0, 0.0)).double()
        return result

    def _loss(self, flat: Tensor, example: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self._forward(flat, example[None])
        return self._losses(outputs, label[None])[0], outputs

    def _forward(self, flat: Tensor, inputs: Tensor) -> Tensor:
        pieces = flat.split(self._sizes)
        values = {
            name: piece.view(p.shape)
            for (name, p), piece in zip(self._named.items(), pieces, strict=True)
        }
        result: Tensor = torch.func.functional_call(self._model, values, (inputs,))
        return result

    def label_log_odds(self, flat: Tensor, example: Tensor, label: int) -> np.ndarray:
        """Return every model's log-odds of an example's label: (M,)."""
        with torch.no_grad():
            logits = torch.cat([self._forward(one, example[None]) for one in flat])
        return log_odds(logits.double().numpy(), np.full(len(flat), label))


def _evidence(sums: np.ndarray, step_plan: StepPlan) -> np.ndarray:
    """Return the evidence of each noisy sum for a gradient of the clip's norm.

    Without noise it is the sum itself.
    """
    along = sums / step_plan.clip_norm if math.isfinite(step_plan.clip_norm) else sums
    if not step_plan.noise_multiplier:
        return along
    return log_likelihood_ratio(along, step_plan.noise_multiplier, step_plan.sample_rate)


def choose_canary(dataset: data.Dataset) -> tuple[Tensor, int]:
    """Return an input unlike all others, with the rarest label.

    It is the data's least singular direction, scaled to their mean norm (ClipBKD: Jagielski, Ullman
    and Oprea 2020, Section 4).
    """
    everything = slice(0, len(dataset))
    inputs = dataset.batch(everything).double()
    rows = inputs.flatten(1)
    direction = torch.linalg.eigh(rows.T @ rows)[1][:, 0]
    direction *= torch.sign(direction[direction.abs().argmax()])
    labels = np.bincount(np.asarray(dataset.labels), minlength=dataset.classes)
    scaled = direction * rows.norm(dim=1).mean()
    return scaled.view(inputs.shape[1:]).float(), int(labels.argmin())


# --- vectorized trainings as a bulk job -------------------------------------------------------


TRIAL_TABLE, TRIAL_KEY = "trainings.parquet", b"dpdist.many-runs"
_CHUNK = 50  # trainings at once
TRIAL_COLUMNS: dict[str, ColumnSpec] = {
    "trial": (int, 0),
    "present": (int, 0),
    "score": (float, None),
}
TRIAL_SCHEMA = job_folder.schema_of(TRIAL_COLUMNS)


class ManyRunsJob(JobSpec):
    """The trainings and the score of the canary in each; private, as the models are."""

    kind = job_folder.JobKind("audit of many runs", "auditing many runs", is_seed_secret=True)
    table_file, metadata_key, schema, columns = TRIAL_TABLE, TRIAL_KEY, TRIAL_SCHEMA, TRIAL_COLUMNS
    sort_columns = ("trial",)

    def __init__(self, options: ManyRunsAudit, target: Target) -> None:
        """Raise UserError for a recipe that `VectorizedTrainings` does not support."""
        if target.recipe.canary_audit is not None:
            raise UserError(
                f"{target.recipe.name}: audit.kind: canaries plants records in this training; "
                "audit many runs of a recipe without it"
            )
        if target.recipe.privacy.batch_cap is not None:
            raise UserError(
                f"{target.recipe.name}: privacy.batch_cap: the guarantee of a capped batch is for "
                "a fixed number of records, and many runs add one; audit it by canaries in one run"
            )
        self._options, self._target, self.seed = options, target, options.seed
        self._records = records_with_canaries(target.recipe, data_source(target.recipe))
        VectorizedTrainings(target.recipe, target.plan, self._records)  # raises UserError

    def identity(self) -> dict[str, Any]:
        asked = self._options.model_dump(mode="json", include={"trainings", "copies", "canary"})
        plan = self._target.plan.fingerprint()
        training = self._target.recipe.training.model_dump(mode="json")
        model = self._target.recipe.model.model_dump(mode="json")
        sees = self._options.adversary_view
        about = {"plan": plan, "data": self._records.fingerprint, "training": training}
        return {**about, "model": model, "sees": sees, "settings": asked}

    def initial_record(self, output: Path) -> dict[str, Any]:
        return {"seed": self._options.seed or secrets.token_hex(32)}

    def work_items(self, job_record: dict[str, Any], output: Path) -> WorkItems:
        options, target = self._options, self._target
        shared = TrainerSetup(
            target.recipe, target.plan, self._records, bytes.fromhex(job_record["seed"]),
            options.copies, options.sees_every_step,
        )  # fmt: skip
        items: dict[Item, range] = {
            f"trainings {first}": range(first, min(first + _CHUNK, options.trainings))
            for first in range(0, options.trainings, _CHUNK)
        }
        return WorkItems(items, Trainer, shared, stall_seconds=3600.0)


# --- a shadow model ---------------------------------------------------------------------------


_BATCH = 1000


@dataclass(frozen=True)
class ShadowSetup:
    """All that the trainings of a bank have in common. Each is a function of this and its number.

    recipes, plans: of the recipe's own models and of plain ones. passes: numbers of passes over
    which probabilities of a model with its own noise are averaged; each gives separate scores.
    population: number of test records that are scored too.
    """

    game: Game
    key: bytes
    recipes: tuple[Recipe, Recipe]
    plans: tuple[PrivacyPlan, PrivacyPlan]
    passes: tuple[int, ...]
    population: int


class ShadowTrainer:
    """Called with a model's number; returns its files, by name."""

    def __init__(self, shared: ShadowSetup) -> None:
        use_single_thread()
        self._shared, recipe = shared, shared.recipes[0]
        source = data_source(recipe)
        self._records = records_with_canaries(recipe, source)
        self._test = load_test_records(recipe, source)

    def __call__(self, number: int) -> dict[str, bytes]:
        shared, plain = self._shared, self._shared.game.is_plain(number)
        key = derive_key(shared.key, "shadow", number)
        recipe, plan = shared.recipes[plain], shared.plans[plain]
        members = shared.game.members(shared.key, number, len(self._records))
        with train_in_process(recipe, plan, self._records, members, key) as folder:
            model = models.load(folder, trusted_factory=recipe.model.name)
            files = read_files(folder)
        seed = derive_key(key, "scores").hex()
        return files | {"scores.safetensors": save(self._scores(model, number, seed))}

    def _scores(self, model: nn.Module, number: int, seed: str) -> dict[str, np.ndarray]:
        """Return the scores of a model, by name.

        member: (N,) uint8. For each number of passes, log-odds (N + Z,) and largest probabilities
        (N + Z, 3), the Z population points last.
        """
        shared, records = self._shared, len(self._records)
        members = shared.game.members(shared.key, number, records)
        found: dict[str, np.ndarray] = {"member": members.astype(np.uint8)}
        noisy = find_noise_location(model).is_random
        # Shadows of a target with its own noise have all passes; for plain ones all are the same.
        several = noisy or shared.recipes[0].method.capabilities.has_prediction_noise
        for passes in shared.passes if several else shared.passes[:1]:
            parts = [
                part
                for dataset in (self._records, self._test.first(shared.population))
                for part in _score_batches(model, dataset, passes if noisy else None, seed)
            ]
            found[f"phi/{passes}"] = np.concatenate([phi for phi, _ in parts])
            found[f"top/{passes}"] = np.concatenate([top for _, top in parts])
        return found


def _score_batches(model: nn.Module, dataset: data.Dataset, passes: int | None, seed: str) -> Any:
    """Yield log-odds and largest probabilities of each batch. passes: None without noise."""
    for start in range(0, len(dataset), _BATCH):
        rows = slice(start, start + _BATCH)
        inputs = dataset.batch(rows)
        with torch.inference_mode():
            if passes is None:
                logits = model(inputs)
            else:
                one = f"{seed}/{dataset.name}/{passes}"
                logits = expected_log_scores(model, inputs, passes, one, start)
        values = logits.double().numpy()
        yield log_odds(values, np.asarray(dataset.labels[rows])), top_probabilities(values)


# --- shadow models as a bulk job --------------------------------------------------------------


SCORES = "scores.safetensors"


class ShadowBankJob(EnsembleJob):
    """Shadow models of one recipe. identity, setup: see `dpdist.audits.membership`."""

    kind = job_folder.JobKind(
        "bank of shadow models", "training shadow models", is_seed_secret=True
    )
    table_file, metadata_key, schema, columns = TABLE, KEY, SCHEMA, COLUMNS

    def work_items(self, job_record: dict[str, Any], output: Path) -> WorkItems:
        shared = self.setup_of_seed(job_record["seed"])
        return _ShadowWorkItems(
            shared.game.models, ShadowTrainer, shared, output / "models", shared.plans[0]
        )

    def build_table(self, rows: list[Row], job_record: Mapping[str, Any]) -> pa.Table:
        ordered = sorted(rows, key=lambda row: row["model"])
        tables = [build_model_table(row["model"], row["scores"]) for row in ordered]
        whole = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
        return whole.replace_schema_metadata(job_folder.table_metadata(job_record, KEY))


class _ShadowWorkItems(TrainingItems):
    """Shadow models, each with its scores."""

    checked_file = SCORES

    def read_result(self, raw: bytes, folder: Path) -> dict[str, Any]:
        return {"scores": load_tensors(raw)}
