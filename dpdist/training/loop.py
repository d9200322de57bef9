"""The training loop of one Ray Train worker.

Each step: Poisson-sample this worker's share of the records under the step's key; sum their
clipped gradients; one all-reduce; announce the release in the ledger; add the step's keyed noise;
divide by the expected batch size; update. Sampling rate, clip, noise and step count come from the
plan and nowhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.errors import ClusterError
from cluster.packages import check_same, code_digest
from cluster.storage import write_json
from dpdist import data, models
from dpdist.errors import UserError, no_room
from dpdist.gradients.blocks import Blocks
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.keys import derive_key, key_id
from dpdist.gradients.noise import add_noise
from dpdist.gradients.perturbations import Draws
from dpdist.gradients.sampling import poisson_sample, share
from dpdist.methods.compose import draws_for, task_for
from dpdist.methods.options import HiddenNoiseMethod
from dpdist.methods.sensitivity import keep_within
from dpdist.privacy.journal import JournalBusy
from dpdist.privacy.ledger import Ledger, LedgerError, ReplayConflict
from dpdist.privacy.plan import StepPlan
from dpdist.released import check_released
from dpdist.training import checkpoint
from dpdist.training.finite import Divergence, probe
from dpdist.training.hidden import digest, ensure_hidden_noise, read_hidden_noise
from dpdist.training.job import (
    CANONICAL_SHARDS,
    PACKAGES,
    TrainJob,
    build_engine,
    initial_model,
    model_spec,
    read_run_key,
)
from dpdist.training.monitor import Monitor
from dpdist.training.optimizer import FlatOptimizer
from dpdist.training.permit import PermitGate
from dpdist.training.records import training_data
from dpdist.training.reducer import MissingRank, Reducer


def train_worker(config: dict[str, Any]) -> None:
    """Entry point for Ray Train: rank and world size from its context, the rest from
    config["job"] and config["until"], a step to pause at."""
    import ray.train
    import ray.train.torch

    from dpdist.training.rendezvous import join, leave

    context = ray.train.get_context()
    job: TrainJob = config["job"]
    rank, world_size = context.get_world_rank(), context.get_world_size()
    if job.folder.failure.exists():
        return
    try:
        check_same(job.packages, PACKAGES, f"training worker {rank} on {platform.node()}")
        torch.set_num_threads(max(1, int(job.recipe.resources.cpus_per_worker)))
        device = ray.train.torch.get_device()
        join(rank, world_size, device)
        run(job, Reducer(rank, world_size, device), config.get("until"))
    except (ReplayConflict, JournalBusy):
        raise  # mended by a restart: it takes the new epoch, or finds the old attempt gone
    except (UserError, ClusterError, LedgerError, OSError) as error:
        if isinstance(error, OSError) and not no_room(error):
            raise
        # A restart would only repeat it: leave word for the driver, which stops.
        try:
            word = {"worker": rank, "error": str(error), "full": no_room(error)}
            write_json(job.folder.failure, word)
        except OSError:
            job.folder.failure.touch()  # a full disk has room for that
    finally:
        leave()


def run(job: TrainJob, reducer: Reducer, until: int | None = None) -> None:
    """Train to the end of the plan, from the newest checkpoint if there is one.

    until: pause after so many steps; the model so far is saved, and the next call goes on.
    """
    recipe, plan, folder = job.recipe, job.plan, job.folder
    first = reducer.rank == 0
    dataset = training_data(recipe, job.source)
    if len(dataset) != plan.records and not plan.nominal:
        raise UserError(f"{dataset.name} has {len(dataset)} records, the plan says {plan.records}")
    spec = model_spec(recipe, dataset)
    model = initial_model(recipe, spec).to(reducer.device)
    engine, task = build_engine(recipe, model, plan), task_for(recipe.method)
    if engine.clipping.sensitivity > plan.clip_norm * (1 + 1e-9):
        raise UserError("the clipping's sensitivity exceeds the plan's clip norm")
    flat = torch.cat([p.detach().reshape(-1) for p in engine.parameters])
    _point_into(engine, flat)
    if first:
        ensure_hidden_noise(job, spec, dataset)
    reducer.gather("")  # the others wait for it
    hidden = read_hidden_noise(job, model)
    constrain = _constraint(job, model)
    constrain()
    optimizer = FlatOptimizer(recipe.training, plan.steps, flat)

    with ExitStack() as stack:
        ledger = None
        attempt = ""
        identity = {**_identity(job, reducer), "hidden noise": digest(hidden)}
        if first:
            ledger = stack.enter_context(Ledger.open(folder.ledger, plan.fingerprint()))
            check_released(folder, plan, ledger)
            epoch = ledger.begin_attempt(identity)
            # A fixed key is for tests, which want the same run again: no nonce then.
            attempt = f"{epoch}/{ledger.nonce if recipe.privacy.run_key is None else ''}"
        # Nobody passes before worker 0 holds the ledger: an older attempt writes no more.
        attempt = reducer.gather(attempt)[0]

        state = checkpoint.latest(folder.checkpoints)
        start = 0
        if state is not None:
            start = state.step
            flat.copy_(state.flat)
            for name, slot in optimizer.slots.items():
                slot.copy_(state.slots[name])
        if reducer.from_first(start) != start or not reducer.same_everywhere(
            checkpoint.digest(flat)
        ):
            raise MissingRank(
                "the workers started from different checkpoints; is the storage shared?"
            )

        key = derive_key(
            read_run_key(folder), "run", plan.fingerprint(), dataset.fingerprint, "trial", 0
        )
        monitor = Monitor(job, plan.steps, start) if first else None
        permit = None if ledger is None else PermitGate(folder, ledger.epoch, start, plan.steps)
        shards = _shards(len(dataset), plan.records, reducer, recipe.training.reproducible)

        def draws(todo: StepPlan, rate: float) -> Draws:
            return draws_for(recipe.method, todo, rate, hidden, derive_key(key, "hidden"))

        engine.draws = draws(plan.step(0), optimizer.learning_rate(0))
        inputs, _ = probe(data.load(job.source, "test"))
        divergence = Divergence(model, inputs.to(reducer.device))
        saved = time.monotonic()
        last = plan.steps if until is None else min(until, plan.steps)
        for step in range(start, last):
            todo = plan.step(step)
            rate = optimizer.learning_rate(step)
            if recipe.training.schedule != "constant":
                engine.draws = draws(todo, rate)
            engine.blocks = Blocks.for_batches(shards.largest, todo.sample_rate, todo.batch_cap)
            sample_key = derive_key(key, "sample", attempt, step)
            draw_key = derive_key(key, "draw", attempt, step)
            rows = torch.zeros(shards.rows, engine.size, dtype=torch.float64, device=reducer.device)
            examples = nonfinite = 0
            loss_sum = 0.0
            details: Mapping[str, Any] = {}
            for row, begin, end in shards.mine:
                members = poisson_sample(
                    sample_key, begin, end, todo.sample_rate,
                    batch_cap=todo.batch_cap, records=len(dataset),
                )  # fmt: skip
                inputs = dataset.batch(members).to(reducer.device)
                labels = dataset.targets(members).to(reducer.device)
                ids = torch.from_numpy(members)
                targets = task.targets(engine, inputs, labels, draw_key, ids)
                clipped = engine.clipped_sum(inputs, targets, draw_key=draw_key, record_ids=ids)
                rows[row] = clipped.flat
                examples += clipped.examples
                nonfinite += clipped.nonfinite
                loss_sum += clipped.loss_sum
                details = clipped.details
            due = time.monotonic() - saved > recipe.resources.checkpoint_seconds
            total, save_now = reducer.sum(rows, first and due)

            summed = total.cpu().numpy()
            if ledger is not None and permit is not None:
                permit.wait(step)
                _announce(ledger, step, key, attempt, summed)
            noise_key = derive_key(key, "noise", attempt, step)
            noisy = add_noise(summed, noise_key, todo.noise_std)
            gradient = torch.from_numpy(noisy / todo.expected_batch).to(flat)
            optimizer.update(flat, gradient, step)
            constrain()
            divergence.check(flat, step, step + 1 == last)

            if monitor is not None:
                monitor.step(step, examples, nonfinite, loss_sum, details)
            if save_now or step + 1 == last:
                if not reducer.same_everywhere(checkpoint.digest(flat)):
                    raise MissingRank(f"the workers' parameters differ after step {step}")
                if ledger is not None:
                    state = checkpoint.TrainState(step + 1, flat, optimizer.slots)
                    checkpoint.save(folder.checkpoints, state, ledger.anchor)
                saved = time.monotonic()
        if first:
            assert monitor is not None and ledger is not None
            flat.copy_(optimizer.result(flat))
            if hidden is not None:
                models.attach_noise(model, hidden.std)
                spec = dataclasses.replace(spec, hidden_noise=True)
            models.save(model, spec, folder.model)
            if last == plan.steps:
                monitor.finish(engine.fallback_layers, ledger)
            else:
                monitor.pause(last)


def _point_into(engine: GradientEngine, flat: Tensor) -> None:
    """Make every trainable parameter a view of the flat vector."""
    pieces = flat.split([parameter.numel() for parameter in engine.parameters])
    for parameter, piece in zip(engine.parameters, pieces, strict=True):
        parameter.data = piece.view(parameter.shape)


def _constraint(job: TrainJob, model: torch.nn.Module) -> Callable[[], None]:
    """What is done to the parameters after every update, in place: post-processing."""
    method = job.recipe.method
    if not isinstance(method, HiddenNoiseMethod):
        return lambda: None
    split = models.require_split(model)
    return lambda: keep_within(split, method.sensitivity)


@dataclasses.dataclass(frozen=True)
class _Shards:
    """rows: length of the reduced stack. largest: records planned for any shard. mine: (row, first
    record, end) of this worker's shards."""

    rows: int
    largest: int
    mine: list[tuple[int, int, int]]


def _shards(records: int, planned: int, reducer: Reducer, reproducible: bool) -> _Shards:
    """Cut at the plan's number of records, which is another than theirs when it was declared: the
    last shard takes what is beyond it, and nothing else changes with their number."""
    count = CANONICAL_SHARDS if reproducible else reducer.world_size

    def bounds(shard: int) -> tuple[int, int]:
        begin, end = share(planned, shard, count)
        return min(begin, records), records if shard == count - 1 else min(end, records)

    largest = -(-planned // count)
    if not reproducible:
        return _Shards(1, largest, [(0, *bounds(reducer.rank))])
    first, last = share(CANONICAL_SHARDS, reducer.rank, reducer.world_size)
    return _Shards(count, largest, [(row, *bounds(row)) for row in range(first, last)])


def _identity(job: TrainJob, reducer: Reducer) -> dict[str, str]:
    """All that can change the floating-point sum; a change starts a new attempt epoch."""
    resources = job.recipe.resources
    machine = (
        f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}/{reducer.device.type}"
    )
    if reducer.device.type == "cuda":
        machine += f"/{torch.cuda.get_device_name(reducer.device)}"
    machines = reducer.gather(machine)
    return {
        # With canonical shards the sum does not depend on the number of workers.
        "world_size": "any" if job.recipe.training.reproducible else str(reducer.world_size),
        "micro_batch": str(resources.micro_batch),
        "threads": str(torch.get_num_threads()),
        "machines": ",".join(sorted(set(machines))),
        "code": code_digest(PACKAGES),
    }


def _announce(ledger: Ledger, step: int, key: bytes, attempt: str, summed: np.ndarray) -> None:
    """Put the release on record, durably, before its noise is added.

    The id covers the bits of the sum itself: an exact replay collapses into one entry, and the
    same noise can never be added to two different sums.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"dpdist.release")
    digest.update(f"{key_id(key)}/{attempt}/{step}".encode())
    digest.update(np.ascontiguousarray(summed).tobytes())
    try:
        ledger.record(step, digest.hexdigest())
    except ReplayConflict:
        ledger.new_epoch(f"step {step} could not be replayed exactly")
        raise
