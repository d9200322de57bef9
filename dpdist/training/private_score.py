"""Scores of a script's model on held-out PRIVATE records, with noise and at a price.

A score is a noisy sum: every held-out record adds a number in [0, 1] that depends on itself and the
model alone, so one record moves the sum by 1 at most. Where a group of records is the unit, a group
adds the mean of its records' numbers, and so moves the sum by 1 at most, too. No step trains on
these records, so a record (or group) pays for the steps or for the scores
(`dpdist.privacy.phases.ScoredTraining`). All scores are charged from the beginning; the ledger
counts each one before its noise is drawn.

Records are executed one at a time: with others in the batch, the last bit of a result (and so a
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

from dpdist import models
from dpdist.config.training import ScriptScore
from dpdist.core.errors import UserError
from dpdist.core.files import read_json, write_json
from dpdist.data.protocol import GroupedRecords, Records
from dpdist.gradients.hooks import Objective, OwnLoss, each_tensor, example_losses, take
from dpdist.gradients.noise import add_noise
from dpdist.privacy.calibration import score_noise_for
from dpdist.privacy.ledger import Ledger, QueriesExhausted
from dpdist.privacy.phases import GaussianScores
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import KEY_BYTES, derive_key
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.training import checkpoint
from dpdist.training.script_state import kept_buffers

Value = Callable[[nn.Module, Any], Tensor]  # of the module and a batch: one value a record, (B,)

# --- what is declared ---------------------------------------------------------------------------


ASSUMED = (
    "between two steps the script uses nothing of the held-out records but the scores that `step` "
    "returned",
)
ASSUMED_OF_VALUE = "a held-out record's value depends on that record and the model alone"
_UNITS = 2**20  # of a record's value: multiples of 1 / _UNITS add up without rounding


def declare(
    recipe: Recipe,
    plan: PrivacyPlan,
    records: int,
    value: Value | None,
    *,
    every: int,
    noise: float | None,
) -> ScriptScore:
    """Return the scores that a training declares, or that it was begun with.

    Args:
        recipe: of the training, with its scores where it was begun with some.
        plan: of the training.
        records: number of held-out records, public; of groups, where a group is the unit.
        value: of a record; None for accuracy.
        every: steps from one score to the next.
        noise: standard deviation on the sum; None: the least with which a held-out record pays no
            more than the training's epsilon.

    Raises:
        UserError: the training was begun with others, or cannot have any.
    """
    name = "accuracy" if value is None else f"{value.__module__}.{_qualified_name(value)}"
    kept = recipe.score
    if kept is not None:
        given = {"every": every, "noise": noise, "records": records, "value": name}
        for key, now in given.items():
            if now not in (before := getattr(kept, key), None):
                raise UserError(
                    f"score.{key}: must be {before}, as the run was begun, got {now}; give the "
                    "same, or another folder"
                )
        return kept
    if recipe.privacy.neighbours != "add-or-remove-one":
        raise UserError(
            "score: must be left out with privacy.neighbours: replace-one (a replaced record may "
            "change sides, and then pays for the steps and for the scores)"
        )
    if plan.nominal:
        raise UserError(
            "score: must be left out with privacy.nominal_records: the number of held-out records "
            "is public"
        )
    whole = isinstance(every, int) and not isinstance(every, bool)
    if not whole or not 1 <= every <= plan.steps:
        rule = f"must be a whole number from 1 to the {plan.steps:,} steps of the plan"
        raise UserError(f"score.every: {rule}, got {every}")
    if noise is None:
        noise = _least_noise(
            recipe, plan, GaussianScores(1.0, plan.steps // every, records=records)
        )
    return ScriptScore(every=every, noise=_checked_noise(noise), records=records, value=name)


def _qualified_name(value: Value) -> str:
    return getattr(value, "__qualname__", type(value).__qualname__).replace("<locals>.", "")


def _checked_noise(noise: float) -> float:
    low, high = 1e-2, 1e4
    number = isinstance(noise, int | float) and not isinstance(noise, bool)
    if not number or not low <= noise <= high:
        raise UserError(f"score.noise: must be a number between {low:g} and {high:g}, got {noise}")
    return float(noise)


def _least_noise(recipe: Recipe, plan: PrivacyPlan, scores: GaussianScores) -> float:
    """Return the least noise with which a held-out record pays no more than a training record."""
    target = recipe.privacy.epsilon or plan.guarantee().epsilon
    if not (math.isfinite(target) and target > 0):
        raise UserError("score.noise: must be given in a training that proves no epsilon, got None")
    return max(1e-2, score_noise_for(target, scores=scores, delta=plan.delta))


def with_score(recipe: Recipe, score: ScriptScore, own_value: bool) -> Recipe:
    """Return the recipe of a script's training with its scores, and what they assume."""
    script = recipe.by_script
    assert script is not None
    assumed = [*script.assumed, *ASSUMED, *([ASSUMED_OF_VALUE] if own_value else [])]
    scored = script.model_copy(update={"score": score, "assumed": assumed})
    return recipe.model_copy(update={"script": scored})


def with_kept_score(recipe: Recipe, folder: RunFolder) -> Recipe:
    """Return a script's recipe with the scores that its run was begun with, if it was."""
    if not folder.recipe_file.exists():
        return recipe
    kept = folder.read_recipe()
    if kept.score is None:
        return recipe
    return with_score(recipe, kept.score, kept.score.value != "accuracy")


def check_apart(held_out: Records, others: Mapping[str, Records | None]) -> None:
    """Raise UserError where a held-out record is among others, by keyed hashes of their inputs.

    Args:
        held_out: private records to score on.
        others: by argument: the training's records, and public ones.
    """
    for name, given in others.items():
        if given is not None and (common := count_common(held_out, given)):
            raise UserError(
                f"score: held-out records must not be in {name}, got {common:,} in common; a "
                "record pays for the steps or for the scores"
            )


def count_common(some: Records, others: Records) -> int:
    """Return how many of some records are among others, by keyed hashes of their inputs."""
    key = secrets.token_bytes(KEY_BYTES)  # nothing is kept that could be tried out later
    found = {mac for macs in single_records(others).input_macs(key) for mac in macs}
    return sum(not found.isdisjoint(macs) for macs in single_records(some).input_macs(key))


def single_records(records: Records) -> Records:
    """Return the records themselves, where they are grouped."""
    return records.records if isinstance(records, GroupedRecords) else records


# --- the scores ---------------------------------------------------------------------------------


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1.0 for each record that is classified rightly: logits (B, C), classes (B,)."""
    return (models.predicted_classes(outputs) == targets).double()


class RecordValues:
    """Compute a model's value on each of some records, executed one at a time.

    Args:
        records: records that are valued; where they are grouped, a group has one value.
        value: of the module and a batch of one record to its value, (1,); None for accuracy.
        device: where the model lies.
    """

    def __init__(self, records: Records, value: Value | None, device: torch.device) -> None:
        self.records, self._device = records, device
        self._objective: Objective = accuracy if value is None else OwnLoss(value)

    def check(self, model: nn.Module) -> list[float]:
        """Return the values of three invented examples, which are had by looking alone.

        Raises:
            UserError: the value is no tensor (1,), draws random numbers or changes the model.
        """
        inputs, targets = self.records.examples(3)
        before, drawn = _tensors(model), torch.get_rng_state()
        values = []
        for row in range(3):
            one = slice(row, row + 1)
            try:
                values.append(self._value(model, take(inputs, one), targets[one]))
            except UserError as error:
                raise UserError(f"score.value: {error}") from None
            except Exception as error:
                raise UserError(
                    "score.value: must return one value a record, shape (1,) for a batch of one, "
                    f"raised {type(error).__name__}: {error}"
                ) from error
        if not torch.equal(drawn, torch.get_rng_state()):
            raise UserError(
                "score.value: must not draw random numbers: a score that is taken again after a "
                "crash must be the same"
            )
        after = _tensors(model)
        if before.keys() != after.keys() or not all(
            torch.equal(value, after[name]) for name, value in before.items()
        ):
            raise UserError("score.value: must leave the model as it is, changed its parameters")
        return values

    def public_mean(self, model: nn.Module) -> float:
        """Return the mean value of PUBLIC records, of any size. Raises whatever the value does."""
        rows = [np.array([row]) for row in range(len(self.records))]
        seen = [(self.records.batch(row), self.records.targets(row)) for row in rows]
        return math.fsum(self._value(model, *each) for each in seen) / len(seen)

    def private_sum(self, model: nn.Module, key: bytes) -> float:
        """Return the sum of all records' values, or of all groups' means, exactly: PRIVATE.

        Each is cut to [0, 1]. A record on which the value fails counts 0: whether a run stops must
        not depend on it.

        Args:
            model: as it is scored.
            key: 32 secret bytes, of random transforms of the records.
        """
        seen, total = self.records.for_step(key), 0
        for index in range(len(seen)):
            own = np.array([index])
            if isinstance(seen, GroupedRecords):
                own = seen.groups.records_of(index)
            values = [self._units_of(model, single_records(seen), row) for row in own.tolist()]
            total += sum(values) // len(values)  # a whole number of units, _UNITS at most
        return total / _UNITS

    def _units_of(self, model: nn.Module, records: Records, row: int) -> int:
        """Return a record's value in whole units, 0 to `_UNITS`."""
        one = np.array([row])
        try:
            value = self._value(model, records.batch(one), records.targets(one))
        except Exception:
            return 0
        return math.floor(bounded(value) * _UNITS)

    def _value(self, model: nn.Module, inputs: Any, targets: Tensor) -> float:
        """Return the value of a batch of one record; the pass leaves nothing behind."""
        with torch.no_grad(), kept_buffers(model):
            there = each_tensor(lambda each: each.to(self._device), inputs)
            wanted = targets.to(self._device)
            return float(example_losses(model, self._objective, {}, there, wanted))


class PrivateScore(RecordValues):
    """Noisy scores of a model on held-out private records, of which each adds at most 1 to a sum.

    Args:
        records: the held-out records, on which no step trains; where they are grouped, a whole
            group adds at most 1.
        terms: how often, with how much noise.
        value: of the module and a batch of one record to its value, (1,); None for accuracy.
        device: where the model lies.
    """

    def __init__(
        self, records: Records, terms: ScriptScore, value: Value | None, device: torch.device
    ) -> None:
        super().__init__(records, value, device)
        self.terms = terms
        self._key: bytes | None = None

    def open(self, folder: RunFolder, plan: PrivacyPlan) -> None:
        """Make the key of the scores of a run, whose held-out records stay what they are.

        Raises:
            UserError: the run was begun with other held-out records.
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
            raise UserError(f"{path}: missing, and scores were released; put it back")
        else:
            write_json(path, {"held out": told})
        self._key = derive_key(key, "held out", told)

    def is_due(self, step: int) -> bool:
        """Return whether the model is scored after this step, counted from 0."""
        return (step + 1) % self.terms.every == 0

    def release(
        self, step: int, model: nn.Module, ledger: Ledger, plan: PrivacyPlan, fixed: bool
    ) -> float | None:
        """Return the noisy score of the model after a step: the noisy sum by the number of records.

        The ledger has it durably, as one of those that the plan pays for, before its noise is
        drawn. The same model after the same step is the same release, however often it is made.

        Args:
            step: number of the step.
            model: as that step left it.
            ledger: of the run, open.
            plan: of the run.
            fixed: the run key is fixed, for tests, which want the same noise again.

        Returns:
            The score; None where no score is left, since other attempts took them.
        """
        assert self._key is not None
        # By the model, which is released, never by the sum: whether two sums are equal is a secret.
        made_of = checkpoint.tensors_digest(model.state_dict())
        query = derive_key(self._key, "asked", step, made_of).hex()
        known = ledger.find_answer(query)
        if known is not None:
            return known[0]
        nonce = ledger.find_query_nonce(query)
        if nonce is None:
            try:
                ledger.record_query(query, plan)
            except QueriesExhausted:
                return None
            nonce = ledger.nonce
        total = self._sum(model, step)
        labels = [total.hex(), *([] if fixed else [nonce])]  # no two sums ever get the same noise
        key = derive_key(self._key, "noise", query, *labels)
        noisy = add_noise(np.array([total]), key, self.terms.noise)
        score = float(noisy[0]) / len(self.records)
        ledger.record_answer(query, [score])
        return score

    def _sum(self, model: nn.Module, step: int) -> float:
        """Return the sum of all records' values after a step, exactly: PRIVATE."""
        assert self._key is not None
        return self.private_sum(model, derive_key(self._key, "data", step))


def bounded(value: float) -> float:
    """Return a value within [0, 1]; 0 for what is no number."""
    return 0.0 if math.isnan(value) else min(max(value, 0.0), 1.0)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
