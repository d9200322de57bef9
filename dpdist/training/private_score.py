"""Scores of a script's model on held-out PRIVATE records, with noise and a privacy cost.

A score is a noisy sum: every held-out record adds a number in [0, 1] that depends only on itself
and the model, so one record moves the sum by at most 1. If a user is the unit, a user adds the mean
of its records' numbers, and also moves the sum by at most 1. No step trains on these records, so a
record (or user) is used by the steps or by the scores (`dpdist.privacy.phases.ScoredTraining`). The
plan counts all scores from the beginning; the ledger counts each one before its noise is drawn.

Records are evaluated one at a time: with others in the batch, the last bit of a result (and so a
class) could depend on them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.config.training import ScriptScore
from dpdist.core.errors import UserError
from dpdist.core.files import read_json, write_json
from dpdist.data.protocol import (
    UNITS,
    Records,
    UserRecords,
    count_common,
    find_generators,
    have_one_class_each,
    kept_generators,
    mean_units,
    seed_generators,
    seed_of,
    single_records,
)
from dpdist.gradients.hooks import OwnLoss, each_tensor, example_losses, take
from dpdist.gradients.noise import add_noise
from dpdist.privacy.calibration import score_noise_for
from dpdist.privacy.ledger import Ledger, QueriesExhausted
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import KEY_BYTES, derive_key
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_section
from dpdist.training import checkpoint
from dpdist.training.collectives import Workers
from dpdist.training.record_scores import ACCURACY, RecordScore
from dpdist.training.script_state import evaluation_mode, kept_buffers, outputs_of

# A function of module and batch to one value per record, (B,); or a score of the outputs.
Value = Callable[[nn.Module, Any], Tensor] | RecordScore

# --- what is declared ---------------------------------------------------------------------------


ASSUMED = (
    "between two steps the script uses nothing of the held-out records but the scores that `step` "
    "returned",
)
ASSUMED_OF_VALUE = "a held-out record's value depends on that record and the model alone"


def declare(
    recipe: Recipe,
    plan: PrivacyPlan,
    records: int,
    value: Value | None,
    *,
    every: int,
    noise: float | None,
) -> ScriptScore:
    """Return the scores that a training declares, or that it was started with.

    Args:
        recipe: of the training, with its scores if it was started with some.
        plan: of the training.
        records: number of held-out records, public; of users if a user is the unit.
        value: of a record; None for accuracy.
        every: number of steps from one score to the next.
        noise: standard deviation on the sum; None: the least noise for which the scores' epsilon is
            at most the training's.

    Raises:
        UserError: the training was started with others, or cannot have any.
    """
    given = {"every": every, "noise": noise, "records": records, "value": value_name(value)}
    kept = recipe.score
    if kept is not None:
        for key, now in given.items():
            if now not in (before := getattr(kept, key), None):
                raise UserError(
                    f"score.{key}: must be {before}, as the run was begun, got {now}; give the "
                    "same, or another folder"
                )
        return kept
    if recipe.privacy.adjacency != "add-or-remove-one":
        raise UserError(
            "score: must be left out with privacy.adjacency: replace-one (a replaced record may "
            "change sides, and is then used by the steps and by the scores)",
            see="how-to/own-loop.md#looking-at-private-records-at-a-price",
        )
    if plan.nominal:
        raise UserError(
            "score: must be left out with privacy.nominal_records: the number of held-out records "
            "is public"
        )
    # Without noise, 1 until the least is known.
    terms = parse_section(ScriptScore, given | {"noise": 1.0 if noise is None else noise}, "score")
    if every > plan.steps:
        raise UserError(
            f"score: every: must be <= the {plan.steps:,} steps of the plan, got {every:,}"
        )
    if noise is None:
        target = recipe.privacy.epsilon or plan.guarantee().epsilon
        if not (math.isfinite(target) and target > 0):
            raise UserError(
                "score.noise: must be given in a training without a proved epsilon, got None"
            )
        scores = terms.scores(plan.steps)
        least = max(1e-2, score_noise_for(target, scores=scores, delta=plan.delta))
        return terms.model_copy(update={"noise": least})
    return terms


def check_scored_targets(records: Records, value: Value | None, key: str = "score") -> None:
    """Raise UserError for accuracy, the score without a value, of records without one class."""
    if value is None and not have_one_class_each(records):
        raise UserError(
            f"{key}.value: must be a function of module and batch if the records have no classes, "
            "got None; or name these: (X, y), or dpdist.as_records(data, target=FIELD)"
        )


def value_name(value: Value | None, key: str = "score.value") -> str:
    """Return the name of a record's value in the run; None is accuracy.

    Raises UserError if it is not a function. key: names it in the message.
    """
    if value is None:
        return "accuracy"
    if isinstance(value, RecordScore):
        return value.name
    if not callable(value):
        raise UserError(
            f"{key}: must be a function of model and batch to one value per record, got "
            f"{type(value).__name__}"
        )
    own = getattr(value, "__qualname__", type(value).__qualname__).replace("<locals>.", "")
    return f"{value.__module__}.{own}"


def with_score(recipe: Recipe, score: ScriptScore, own_value: bool) -> Recipe:
    """Return the recipe of a script's training with its scores and their assumptions."""
    script = recipe.by_script
    assert script is not None
    assumed = [*script.assumed, *ASSUMED, *([ASSUMED_OF_VALUE] if own_value else [])]
    scored = script.model_copy(update={"score": score, "assumed": assumed})
    return recipe.model_copy(update={"script": scored})


def with_kept_score(recipe: Recipe, folder: RunFolder) -> Recipe:
    """Return a script's recipe with the scores that its run was started with, if any."""
    if not folder.recipe_file.exists():
        return recipe
    kept = folder.read_recipe()
    if kept.score is None:
        return recipe
    return with_score(recipe, kept.score, kept.score.value != "accuracy")


def check_apart(private_eval_data: Records, others: Mapping[str, Records | None]) -> None:
    """Raise UserError if a held-out record is among others, by keyed hashes of their inputs.

    Args:
        private_eval_data: private records to score on.
        others: by argument: the training's records, and public ones.
    """
    for name, given in others.items():
        if given is not None and (common := count_common(private_eval_data, given)):
            raise UserError(
                f"score: held-out records must not be in {name}, got {common:,} in common; a "
                "record is used by the steps or by the scores"
            )


# --- the scores ---------------------------------------------------------------------------------


class RecordValues:
    """Compute a model's value on each of some records, one at a time in evaluation mode.

    Args:
        records: the records; if they are grouped, a user has one value.
        value: function of the module and a batch of one record to its value, (1,); None for
            accuracy.
        device: of the model.
        signature: how the model is called with several fields (`ModelSpec.signature`), else empty.
    """

    def __init__(
        self,
        records: Records,
        value: Value | None,
        device: torch.device,
        signature: Mapping[str, Any],
    ) -> None:
        self.records, self._device, self._signature = records, device, signature
        by_outputs = ACCURACY if value is None else value
        self._objective: RecordScore | OwnLoss = (
            by_outputs if isinstance(by_outputs, RecordScore) else OwnLoss(by_outputs)
        )

    def check(self, model: nn.Module) -> list[float]:
        """Return the values of three invented examples.

        Raises:
            UserError: the value is not a tensor (1,), draws random numbers or changes the model.
        """
        inputs, targets = self.records.examples(3)
        before = checkpoint.tensors_digest(model.state_dict())
        drawn = torch.get_rng_state()
        values = []
        for row in range(3):
            one = slice(row, row + 1)
            try:
                with evaluation_mode(model):
                    values.append(self._value(model, take(inputs, one), targets[one]))
            except Exception as error:
                raise UserError(
                    "score.value: must return one value per record, shape (1,) for a batch of one, "
                    f"raised {type(error).__name__}: {error}"
                ) from error
        if not torch.equal(drawn, torch.get_rng_state()):
            raise UserError(
                "score.value: must not draw random numbers: a score that is computed again after a "
                "crash must be the same"
            )
        if checkpoint.tensors_digest(model.state_dict()) != before:
            raise UserError("score.value: must leave the model as it is, changed its parameters")
        return values

    def public_mean(self, model: nn.Module) -> float:
        """Return the mean value of PUBLIC records, a float. Raises any error of the value."""
        rows = [np.array([row]) for row in range(len(self.records))]
        seen = [(self.records.batch(row), self.records.targets(row)) for row in rows]
        with evaluation_mode(model):
            return math.fsum(self._value(model, *each) for each in seen) / len(seen)

    def private_units(self, model: nn.Module, key: bytes, worker: int = 0, workers: int = 1) -> int:
        """Return a worker's part of the sum of all values, in whole units of 1 / `UNITS`: PRIVATE.

        It is the sum of its records' values, each clipped to [0, 1], or of its users' means. A
        record on which the value fails counts 0: whether a run stops must not depend on it.

        Args:
            model: the scored model.
            key: 32 secret bytes for random transforms of the records.
            worker: number of the worker, from 0.
            workers: number of workers that divide the records.
        """
        seen, total = self.records.for_step(key), 0
        records, generators = single_records(seen), find_generators(self._objective)
        with kept_generators(generators), evaluation_mode(model):
            for index in range(worker, len(seen), workers):
                own = np.array([index])
                if isinstance(seen, UserRecords):
                    own = seen.users.records_of(index)
                values = []
                for row in own.tolist():
                    seed_generators(seed_of(key, row), generators)  # independent of other records
                    values.append(self._value_at(model, records, row))
                total += mean_units(values)
        return total

    def _value_at(self, model: nn.Module, records: Records, row: int) -> float:
        """Return the value of the record at a position; 0 if it fails."""
        one = np.array([row])
        try:
            return self._value(model, records.batch(one), records.targets(one))
        except Exception:
            return 0.0

    def _value(self, model: nn.Module, inputs: Any, targets: Tensor) -> float:
        """Return the value of a batch of one record, and restore the model's buffers."""
        with torch.no_grad(), kept_buffers(model):
            there = each_tensor(lambda each: each.to(self._device), inputs)
            wanted = targets.to(self._device)
            if isinstance(self._objective, RecordScore):
                return float(self._objective(outputs_of(model, there, self._signature), wanted))
            return float(example_losses(model, self._objective, {}, there, wanted))


class PrivateScore(RecordValues):
    """Release noisy scores of a model on held-out private records, each of which adds at most 1.

    Args:
        records: the held-out records, on which no step trains; if they are grouped, a whole user
            adds at most 1.
        terms: interval and noise of the scores.
        value: function of the module and a batch of one record to its value, (1,); None for
            accuracy.
        device: of the model.
        signature: how the model is called with several fields (`ModelSpec.signature`), else empty.
    """

    def __init__(
        self,
        records: Records,
        terms: ScriptScore,
        value: Value | None,
        device: torch.device,
        signature: Mapping[str, Any],
    ) -> None:
        super().__init__(records, value, device, signature)
        self.terms = terms
        self._key: bytes
        self._plan: PrivacyPlan
        self._workers: Workers

    def check_same(self, workers: Workers, code: str) -> None:
        """Raise UserError, on all workers, unless they score the same records in the same way.

        code: digest of the code of the value.
        """
        if workers.count == 1:
            return
        workers.check_same({"score settings": self.terms.model_dump_json(), "score.value": code})
        key = bytes.fromhex(workers.of_first(secrets.token_hex(KEY_BYTES)))
        workers.check_same({"held-out records": self.records.keyed_fingerprint(key)})

    def open(self, folder: RunFolder, plan: PrivacyPlan, workers: Workers) -> None:
        """Derive the key of a run's scores, and let worker 0 write their records' fingerprint.

        Raises:
            UserError: the run was started with other held-out records.
        """
        trained = read_json(folder.data_fingerprint, {"train": str})["train"]
        key = derive_key(folder.read_run_key(), "score", plan.fingerprint(), trained)
        told = self.records.keyed_fingerprint(derive_key(key, "fingerprint"))
        path = folder.score_fingerprint
        if path.exists():
            if read_json(path, {"held out": str})["held out"] != told:
                raise UserError(
                    f"score: held-out records must be those that {folder.path} was begun with, got "
                    "others; restore them, or give another folder"
                )
        elif folder.ledger.exists() and Ledger.read(folder.ledger).num_queries:
            raise UserError(f"{path}: missing, and scores were released; restore it")
        elif workers.first:
            write_json(path, {"held out": told})
        self._plan, self._workers = plan, workers
        self._key = derive_key(key, "held out", told)

    def is_due(self, step: int) -> bool:
        """Return whether the model is scored after this step, numbered from 0."""
        return (step + 1) % self.terms.every == 0

    def release(
        self, step: int, model: nn.Module, ledger: Ledger | None, fixed: bool
    ) -> float | None:
        """Return the model's noisy score after a step: the noisy sum divided by the record count.

        The ledger has it durably, as one of the planned scores, before its noise is drawn. The same
        model after the same step is the same release, also if it is repeated. All workers call it.
        They add up whole numbers, so their sum is that of one worker; worker 0 draws the noise,
        once, and sends the score to the others.

        Args:
            step: number of the step.
            model: after that step, the same on all workers.
            ledger: of the run, open, on worker 0; None on the others.
            fixed: whether the run key is fixed, as in tests; the noise is then the same again.

        Returns:
            The score, on all workers; None if no score is left, since other attempts used them.
        """
        workers = self._workers
        # By the model, which is released, not by the sum: whether two sums are equal is secret.
        made_of = checkpoint.tensors_digest(model.state_dict())
        query = derive_key(self._key, "asked", step, made_of).hex()
        with workers.sharing_errors():
            workers.check_same({"parameters": made_of})
            score, nonce = (None, None) if ledger is None else self._look_up(query, ledger)
            first = workers.agree(missing=nonce is not None, score=score)[0]
            if not first["missing"]:
                told: float | None = first["score"]
                return told
            data_key = derive_key(self._key, "data", step)
            units = self.private_units(model, data_key, workers.rank, workers.count)
            shares = workers.agree(units=units)
            if ledger is not None:
                total = sum(each["units"] for each in shares) / UNITS
                score = self._noisy(total, query, None if fixed else nonce)
                ledger.record_answer(query, [score])
            told = workers.agree(score=score)[0]["score"]
            return told

    def _look_up(self, query: str, ledger: Ledger) -> tuple[float | None, str | None]:
        """Return a score that was released before, or the nonce of a new one, then on record.

        Both are None if no score is left.
        """
        known = ledger.find_answer(query)
        if known is not None:
            return known[0], None
        try:
            return None, ledger.nonce_of_query(query, self._plan)
        except QueriesExhausted:
            return None, None

    def _noisy(self, total: float, query: str, nonce: str | None) -> float:
        """Return a noisy sum divided by the record count; two sums never get the same noise.

        nonce: of the process that put the score on record; None with a fixed run key.
        """
        labels = [total.hex(), *([] if nonce is None else [nonce])]
        key = derive_key(self._key, "noise", query, *labels)
        noisy = add_noise(np.array([total]), key, self.terms.noise)
        return float(noisy[0]) / len(self.records)
