"""Check a training completely before it starts: recipe, plan, folder, records and budget.

The result contains everything that a training worker needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dpdist import data, models
from dpdist.cluster.versions import PACKAGES, package_fingerprints
from dpdist.config.training import CANONICAL_SHARDS
from dpdist.core.errors import UserError
from dpdist.core.files import read_json, write_atomic, write_json, write_secret_once
from dpdist.core.script_errors import warn
from dpdist.data import check_test_records_unseen, refuse_common_records
from dpdist.data.protocol import warn_if_standardized
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import key_id, new_run_key
from dpdist.runs.charging import check_charge
from dpdist.runs.folder import DifferentRecipeError, RunFolder, has_released, read_verified_ledger
from dpdist.runs.recipe import Recipe, check_against_data, field_error, resolve_plan
from dpdist.training.provenance import AMONG_PUBLIC_REASON, check_pretrained
from dpdist.training.records import (
    data_source,
    load_test_records,
    method_public_records,
    private_records,
    records_with_canaries,
    training_records,
)

# --- the checked training ---------------------------------------------------------------------


RESTORE_HINT = "restore what was there, or start a new run under another --name"


@dataclass(frozen=True)
class TrainJob:
    """Describe a training to its workers, without the run key, which is in the private folder.

    member_mask: bool (N,), the training records to train on; None: all of them.
    replacement_records: trained on instead of the records
        (`dpdist.methods.base.TrainingDriver.run_workers`).
    shared_cache: PRIVATE, shared by trainings in this process that differ only in their keys; None:
        there are no others.
    screened: `screening_digest` of the model that the driver screened; "" if it screened none.
    """

    recipe: Recipe
    plan: PrivacyPlan
    folder: RunFolder
    source: data.DataSource
    packages: dict[str, str]
    member_mask: np.ndarray | None = None
    replacement_records: Any = None
    shared_cache: dict[Any, Any] | None = None
    screened: str = ""

    def records(self) -> Any:
        """Return the training records followed by an audit's canaries."""
        if self.replacement_records is not None:
            return self.replacement_records
        if self.member_mask is None:
            return records_with_canaries(self.recipe, self.source)
        return self.records_without_canaries()

    def records_without_canaries(self) -> data.Dataset:
        """Return the training records."""
        records = training_records(self.recipe, self.source)
        return records if self.member_mask is None else records.select(self.member_mask)

    def public_records(self) -> data.Dataset | None:
        """Return the public records that the method reads; None if it reads none."""
        return method_public_records(self.recipe)


def check_records(recipe: Recipe, source: data.DataSource, context: str) -> dict[str, Any] | None:
    """Return kind and data of the model's public part (`check_pretrained`).

    Raises UserError if a private record is among the test records or any public ones, or if the
    method cannot learn from these.
    """
    test = load_test_records(recipe, source)
    private = private_records(recipe, source)
    pretrained = check_pretrained(recipe, private, context)
    named, public = recipe.method.public_records, method_public_records(recipe)
    if named is not None and public is not None:
        named.check(public, private, context)
        begin = f"{context}: {named.recipe_key}"
        if named.used_for_training:
            check_test_records_unseen(public, test, begin, public.folder == private.folder)
        if recipe.privacy.noise_multiplier != 0:  # else nothing is promised
            refuse_common_records(private, public, begin, AMONG_PUBLIC_REASON)
    return pretrained


def check_users(recipe: Recipe, dataset: data.Dataset, context: str) -> None:
    """Raise UserError if a user has several records, and the unit is one record."""
    largest = dataset.largest_user or 1
    if recipe.user_unit is None and largest > 1:
        rule = (
            f"must be user, for {dataset.name} has a user of {largest} records (or leave "
            "data.columns.user out, to protect single records)"
        )
        raise field_error(context, "privacy.unit", rule, recipe.privacy.unit)


@dataclass(frozen=True)
class CheckedTraining:
    """Hold a training that passed all checks, and its plan. Nothing was written for it yet.

    fingerprint: of the records. noise_multiplier: of the plan's steps; None if it is not kept with
    the run. screened: as in `TrainJob`.
    """

    recipe: Recipe
    folder: RunFolder
    plan: PrivacyPlan
    fingerprint: str
    pretrained: dict[str, Any] | None
    noise_multiplier: float | None = None
    screened: str = ""

    def check_budget(self, context: str) -> None:
        """Raise UserError if the run's remaining releases do not fit its records' budget.

        Charge nothing.
        """
        recipe, folder = self.recipe, self.folder
        if recipe.privacy.budget is None or folder.training_summary.exists():
            return
        records = training_records(recipe, data_source(recipe))
        begun = folder if folder.ledger.exists() else None
        check_charge(recipe, self.plan, records, context, begun)

    def begin(self) -> TrainJob:
        """Write folder, plan and key of the run, unless they exist, and return its job."""
        recipe, folder = self.recipe, self.folder
        recipe.check_constants()
        folder.create_or_open(recipe)
        if not folder.plan.exists():
            if self.noise_multiplier is not None:
                folder.pin_recipe(recipe, self.noise_multiplier)
            write_json(folder.plan, self.plan.to_dict())
        if not folder.data_fingerprint.exists():
            write_json(folder.data_fingerprint, {"train": self.fingerprint})
        if recipe.canary_audit is not None and not folder.canary_settings.exists():
            write_json(folder.canary_settings, recipe.canary_audit.model_dump(mode="json"))
        if self.pretrained is not None and not folder.pretraining_record.exists():
            write_json(folder.pretraining_record, self.pretrained)
        ensure_run_key(folder, recipe.privacy.run_key)
        return self.job()

    def job(self) -> TrainJob:
        """Return the job of a run that is written, for a worker that writes nothing."""
        recipe, folder = self.recipe, RunFolder(self.folder.path.resolve())
        source, packages = data_source(recipe), package_fingerprints(PACKAGES)
        return TrainJob(recipe, self.plan, folder, source, packages, screened=self.screened)


def check_training(recipe: Recipe, folder: RunFolder, context: str) -> CheckedTraining:
    """Check everything that can be checked, and write nothing.

    A continued run reads its plan, so that it executes the same one. context: begins error
    messages. Raises UserError.
    """
    if folder.search_recipe_file.exists():
        raise DifferentRecipeError(
            f"{folder.path}: holds a private search; continue it with `dpdist tune`"
        )
    continued = folder.check_same_recipe(recipe)
    dataset, pretrained, screened = _checked(recipe, context)
    check_kept(recipe, folder, pretrained)
    check_same_data(folder, dataset.name, dataset.fingerprint)
    _check_same_pretrained(folder, pretrained)
    if continued and folder.plan.exists():
        noise, plan = None, folder.read_plan()
    else:
        noise, plan = resolve_plan(recipe, len(dataset), context)
    return CheckedTraining(recipe, folder, plan, dataset.fingerprint, pretrained, noise, screened)


def prepare(recipe: Recipe, folder: RunFolder, context: str) -> TrainJob:
    """Check as `check_training` does, then start the run. After a UserError nothing is written."""
    return check_training(recipe, folder, context).begin()


def check_trainable(recipe: Recipe, context: str) -> tuple[data.Dataset, dict[str, Any] | None]:
    """Return the records to train on, and kind and data of the model's public part.

    Raises UserError for records, a model or public parts that cannot be trained privately.
    """
    return _checked(recipe, context)[:2]


def _checked(recipe: Recipe, context: str) -> tuple[data.Dataset, dict[str, Any] | None, str]:
    """Return the result of `check_trainable`, and the digest of the screened model."""
    if recipe.by_script is not None:
        raise UserError(
            f"{context}: script: a script trains {recipe.by_script.model}, and no command can: run "
            "the script, which also continues the run"
        )
    source = data_source(recipe)
    dataset, pretrained = check_data(recipe, source, context)
    if recipe.training.reproducible and recipe.resources.max_workers > CANONICAL_SHARDS:
        rule = f"must be <= {CANONICAL_SHARDS} when training.reproducible is set"
        raise field_error(context, "resources.workers", rule, recipe.resources.worker_count_text)
    _check_resources(recipe, context)
    models.check_name(recipe.model.name)
    from dpdist.training.model_setup import check_model  # loads torch, so it comes last

    return dataset, pretrained, check_model(recipe, dataset)


def check_data(
    recipe: Recipe, source: data.DataSource, context: str
) -> tuple[data.Dataset, dict[str, Any] | None]:
    """Return the records to train on, and kind and data of the model's public part.

    `dpdist data check` and each training call it. Raises UserError for records that cannot be
    trained on privately.
    """
    dataset = records_with_canaries(recipe, source)
    pretrained = check_records(recipe, source, context)
    check_users(recipe, dataset, context)
    if len(dataset.input_shape) == 1:
        warn_if_standardized(dataset.inputs, dataset.name)
    check_against_data(recipe, recipe.privacy.nominal_records or len(dataset), context)
    _check_features(recipe, source)
    _check_answers(recipe, source)
    return dataset, pretrained


def _check_features(recipe: Recipe, source: data.DataSource) -> None:
    """Raise UserError for a feature that is the label, except for the names of its values."""
    section = recipe.data
    if not section.columns.features or section.targets != "class":
        return
    records = training_records(recipe, source)
    inputs, labels = records.inputs, np.asarray(records.labels)
    for place in range(inputs.shape[1]):
        if data.tells_answer(inputs[:, place], labels):
            rules = section.columns.feature_rules.items()
            names = [n for name, rule in rules for n in rule.names(name)]
            names = names or section.columns.features
            named = names[place] if len(names) == inputs.shape[1] else f"number {place} from 0"
            raise UserError(
                f"data.columns.features: must not contain the answer, got {named}, which is "
                f"{section.columns.label} except for the names of its values; remove it"
            )


_ANSWERS_AT_ONCE = 4096  # documents


def _check_answers(recipe: Recipe, source: data.DataSource) -> None:
    """Warn about documents whose answers are cut off, and raise UserError if all of them are.

    They would use budget, and the model would learn nothing from them.
    """
    if recipe.data.text is None or not recipe.data.text.has_prompts:
        return
    records = training_records(recipe, source)
    empty = 0
    for start in range(0, len(records), _ANSWERS_AT_ONCE):
        targets = records.targets(slice(start, start + _ANSWERS_AT_ONCE))
        empty += int((targets < 0).all(1).sum())
    key, length = "data.text.length", recipe.data.text.length
    if empty == len(records):
        raise UserError(
            f"{key}: must leave a token of an answer in some document, got {length}, which cuts "
            "off all answers; give a longer length"
        )
    if empty:
        warn(
            f"{key}: nothing is learned from {empty:,} of {len(records):,} training documents, "
            f"whose answers start after token {length}; give a longer length, or leave them out "
            "(the count is private)"
        )


def _check_resources(recipe: Recipe, context: str) -> None:
    """Raise UserError for noise on a device if no step of the training draws noise."""
    reason = ""
    if not recipe.method.capabilities.takes_gradient_steps:
        reason = "for a method without gradient steps"
    elif recipe.privacy.noise_multiplier == 0:
        reason = "in a run without noise"
    if reason and recipe.resources.noise != "host":
        rule = f"must be host {reason}"
        raise field_error(context, "resources.noise", rule, recipe.resources.noise)


def check_kept(recipe: Recipe, folder: RunFolder, about: dict[str, Any] | None) -> None:
    """Raise UserError if a run that may have released something lost a file that releases need.

    A new file would differ unnoticed. The run's key must be that of the ledger.
    """
    if not has_released(folder):
        return
    needed = [folder.plan, folder.data_fingerprint, folder.run_key, folder.start_record]
    needed += [folder.canary_settings] if recipe.canary_audit is not None else []
    needed += [folder.pretraining_record] if about is not None else []
    for path in needed:
        if not path.exists():
            raise UserError(
                f"{path}: missing, and this run has begun; {RESTORE_HINT}",
                see="explanation/privacy.md#what-a-run-really-released",
            )
    keys = {made["identity"].get("key") for made in read_verified_ledger(folder).ledger.attempts}
    if keys - {key_id(folder.read_run_key())}:
        raise UserError(
            f"{folder.run_key}: is not the key that this run's releases were drawn under; "
            f"{RESTORE_HINT}",
            see="explanation/privacy.md#what-a-run-really-released",
        )


def check_same_data(folder: RunFolder, name: str, fingerprint: str) -> None:
    """Raise UserError if the run was started on different records, which its plan counts."""
    if folder.data_fingerprint.exists():
        before = read_json(folder.data_fingerprint, {"train": str})["train"]
        if before != fingerprint:
            raise UserError(
                f"{folder.path}: {name} has changed since this run was begun; restore it, "
                "or choose another --name (in a custom loop: folder=)",
                see="explanation/privacy.md#what-a-run-really-released",
            )


def _check_same_pretrained(folder: RunFolder, pretrained: dict[str, Any] | None) -> None:
    """Raise UserError if the model's public part was replaced since the run was started."""
    if pretrained is None or not folder.pretraining_record.exists():
        return
    found = {key: value for key, value in pretrained.items() if key != "assumed"}  # it follows
    # The record may also have "joined".
    if not found.items() <= read_json(folder.pretraining_record).items():
        raise UserError(
            f"{folder.path}: model.{pretrained['part']} has changed since this run was begun; "
            "restore it, or choose another --name"
        )


def choose_run_key(recipe: Recipe, folder: RunFolder) -> bytes:
    """Return the run's key; for a new run the recipe's fixed key, or a new one."""
    if folder.run_key.exists():
        return folder.read_run_key()
    return bytes.fromhex(recipe.privacy.run_key) if recipe.privacy.run_key else new_run_key()


def ensure_run_key(folder: RunFolder, fixed: str | None, key: bytes | None = None) -> None:
    """Write the run key into the private folder, once.

    It comes from the operating system's generator, or is fixed (only for tests; the privacy card
    then states that the run is not private). key: chosen before (`choose_run_key`).
    """
    if fixed and not folder.run_key.exists():  # first: no crash leaves a fixed key unmarked
        write_atomic(folder.fixed_key_marker, "The run key was fixed in the recipe: not private.\n")
    write_secret_once(folder.run_key, fixed or (key or new_run_key()).hex())
