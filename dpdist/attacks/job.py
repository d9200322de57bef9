"""A test set under attack, on a Ray cluster: resumable, the same table however it was computed."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import ray

from cluster.journal import Journal
from dpdist import bulk, models
from dpdist.attacks import table as tables
from dpdist.attacks.blocks import Rows, run_blocks
from dpdist.attacks.counting import Counted, fix_form, require_logits
from dpdist.attacks.randomised import InferenceNoise, InputNoise
from dpdist.attacks.settings import AttackSettings
from dpdist.attacks.worker import Assignment, Block, Worker
from dpdist.bulk import Progress
from dpdist.certification import job as certification
from dpdist.certification.classifier import ClassifierSpec
from dpdist.certification.units import UnitSource
from dpdist.errors import UserError

KIND = bulk.Kind("attack", "attacking")
_SLOW = 1000.0  # forward passes per second of an honest worker


class Data(certification.Data, Protocol):
    """What is needed of a data set: ``dpdist.data.Dataset`` has it."""

    @property
    def name(self) -> str: ...


def attack_model(
    model_folder: Path,
    dataset: Data,
    settings: AttackSettings,
    output: Path,
    *,
    actors: int | None = None,
    progress: Progress | None = None,
    trusted_factory: str | None = None,
) -> pa.Table:
    """Attack the inputs that ``settings`` names at every size; return the table.

    ``output`` receives attacks.parquet (written last), settings.json (what was executed, with the
    seed) and journal.jsonl. Called again it computes what is missing: after an interruption, or
    when more attacks or sizes are asked for; the table holds all that the folder has.

    Ray must be initialised. Raises UserError when ``output`` holds an attack on another model, data
    set or setting, ClusterError when the cluster cannot do it.
    """
    labels = np.asarray(dataset.labels)
    indices = np.asarray(settings.indices(len(labels)), dtype=np.int64)
    if not len(indices):
        raise UserError(f"attack: no inputs chosen out of {len(labels)}")
    with bulk.held(output, KIND) as journal:
        assignment, about = assign(
            model_folder, dataset, settings, journal, indices, labels[indices], trusted_factory
        )
        rows = settings.block(assignment.inputs[0].size)
        starts = range(0, len(indices), rows)
        blocks = {}
        for attack, size in settings.pairs:
            for low in starts:
                high = min(low + rows, len(indices))
                key = f"{attack} {size!r} rows {low}"
                blocks[key] = Block(attack, low, high, np.full(high - low, size))
        silence = patience(assignment, rows, settings.n)
        found = run_blocks(
            journal, Worker, assignment, blocks, actors=actors, silence=silence, progress=progress
        )
    done = _complete(found, len(starts))
    return tables.write(done, tables.SCHEMA, about, output / tables.TABLE)


def assign(
    model_folder: Path,
    dataset: Data,
    settings: AttackSettings,
    journal: Journal,
    indices: np.ndarray,
    targets: np.ndarray,
    trusted_factory: str | None,
    *,
    like: ClassifierSpec | None = None,
    more: dict[str, Any] | None = None,
) -> tuple[Assignment, dict[str, Any]]:
    """What workers share, pinned in the journal's folder; more: what else results depend on."""
    model = models.load(model_folder, trusted_factory=trusted_factory)
    noise: InferenceNoise = models.hidden_noise(model)
    if settings.sigma is not None:
        noise = InputNoise(settings.sigma)
    inputs = np.ascontiguousarray(dataset.batch(indices).numpy())
    counted = Counted(model, noise, dataset.classes, inputs[:64])
    require_logits(counted)
    model_hash = models.model_hash(model_folder)
    wanted = {
        "model": model_hash,
        "data": dataset.fingerprint,
        "dataset": dataset.name,
        "classes": dataset.classes,
        "input_shape": list(inputs.shape[1:]),
        "noise": describe(noise),
        "settings": settings.identity,
        **(more or {}),
    }
    purpose = "attack" if more is None else "check certificates"
    sigma = settings.sigma or 0.0

    def source(seed: str) -> UnitSource:
        return UnitSource(
            purpose, seed, model_hash, dataset.fingerprint, str(wanted["noise"]), sigma
        )

    def begin() -> dict[str, Any]:
        seed = settings.seed or secrets.token_hex(16)
        if noise is None:
            return {"seed": seed, "classifier": None}
        form = asdict(_form(counted, source(seed), like))
        del form["rate"]  # a measured time, different each time
        return {"seed": seed, "classifier": form}

    about = bulk.pin(journal, KIND, wanted, settings.seed, begin)
    form = about["classifier"]
    spec = ClassifierSpec(**{**form, "notes": (*form["notes"],)}, rate=0.0) if form else None
    assignment = Assignment(
        replace(counted, spec=spec),
        settings,
        source(about["seed"]),
        inputs,
        indices,
        targets.astype(np.int64),
    )
    return assignment, about


def describe(noise: InferenceNoise) -> dict[str, Any]:
    """The noise as JSON; a tensor of deviations by its scale and digest."""
    if noise is None:
        return {"kind": "none"}
    if isinstance(noise, InputNoise):
        return {"kind": "input", "sigma": noise.sigma}
    raw = noise.std.detach().float().contiguous().numpy().tobytes()
    digest = hashlib.blake2b(raw, digest_size=8).hexdigest()
    return {"kind": "hidden", "module": noise.module, "std": noise.scale, "digest": digest}


def patience(assignment: Assignment, rows: int, answers: int) -> float:
    """Seconds after which a silent worker must be hanging: ten times the longest honest block."""
    settings = assignment.settings
    draws = 1 if assignment.counted.noise is None else settings.draws
    passes = 3 * settings.steps * settings.restarts * draws + answers
    return max(120.0, 10 * rows * passes / _SLOW)


def _form(counted: Counted, source: UnitSource, like: ClassifierSpec | None) -> ClassifierSpec:
    """Chosen on the kind of machine that will execute it."""
    return ray.get(ray.remote(fix_form).options(num_cpus=1).remote(counted, source, like))


def _complete(found: dict[str, Rows], blocks: int) -> Rows:
    """The rows of each attack and size of which every block is there."""
    by_pair: dict[str, list[Rows]] = {}
    for key, rows in found.items():
        by_pair.setdefault(key.rsplit(" rows ", 1)[0], []).append(rows)
    whole = [some for some in by_pair.values() if len(some) == blocks]
    return [row for some in whole for rows in some for row in rows]
