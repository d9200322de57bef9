"""The training loop of one Ray Train worker, and the state that all workers share.

Each step: Poisson-sample this worker's share of the records under the step's key; sum their
clipped gradients; one all-reduce; announce the release in the ledger; add the step's keyed noise;
divide by the expected batch size; update. Sampling rate, clip, noise and step count come from the
plan and nowhere else.

Before a step is released, worker 0 asks the archive for permission through a file of the run
folder, so that a lost run folder cannot hide releases (`dpdist.runs.archive` explains it). The
replay fingerprint lists all that can change a step's floating-point sum, or its noise. It is made
of the executed state, never of a file's text, and kept in the ledger: after any edit of a run
folder or a copy of it, another sum begins a new attempt, under keys of its own. Tensors that the
run's method makes once, before the first step, are made by worker 0 and read by the others, so
that all workers and all restarts train under the same ones.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from dpdist import data, models
from dpdist.cluster.versions import check_same, code_digest
from dpdist.config.training import CANONICAL_SHARDS
from dpdist.core.errors import ClusterError, UserError, no_room
from dpdist.core.fields import SCREENED
from dpdist.core.files import read_bytes, read_json, write_atomic, write_json
from dpdist.gradients import noise
from dpdist.gradients.engine import GradientEngine, Task
from dpdist.gradients.noise import add_noise
from dpdist.gradients.sampling import Blocks, poisson_sample, share
from dpdist.methods.base import Fixed, Setup
from dpdist.models import ModelSpec
from dpdist.models.factory_code import digests
from dpdist.privacy.ledger import JournalBusy, Ledger, LedgerError, ReplayConflict
from dpdist.privacy.plan import StepPlan
from dpdist.randomness.keys import derive_key, key_id, new_run_key
from dpdist.runs.archive import Permit, read_permit
from dpdist.runs.folder import RunFolder, check_released
from dpdist.runs.recipe import Recipe
from dpdist.training import checkpoint, model_setup, monitoring
from dpdist.training.canaries import Canaries, plant
from dpdist.training.collectives import (
    RELEASES,
    FlatOptimizer,
    MissingRank,
    Reducer,
    Shards,
    Whole,
    release_id,
)
from dpdist.training.job import PACKAGES, PUT_BACK, TrainJob, read_run_key
from dpdist.training.model_setup import (
    Diverged,
    Divergence,
    build_engine,
    initial_model,
    model_spec,
    public_probe,
    wire_of,
)
from dpdist.training.monitoring import Monitor, Seen
from dpdist.training.records import public_data

# --- permission of the archive ----------------------------------------------------------------


_AHEAD_SECONDS = 60.0
_AHEAD_STEPS = 50
_PATIENCE = 1800.0  # seconds; the command itself gives up earlier, and says why
_POLL = 0.05


class PermitGate:
    """Passes at once in a run whose private state is not archived."""

    def __init__(self, folder: RunFolder, epoch: int | None, start: int, total: int) -> None:
        self._on = (
            folder.archive.exists() and read_json(folder.archive, {"private": bool})["private"]
        )
        self._folder, self._epoch, self._total = folder, epoch or 0, total
        self._granted = start  # the first step without leave
        self._next = start  # where to ask again
        self._asked = (time.monotonic(), start)

    def wait(self, step: int) -> None:
        """Return when `step` may be released. Raises ClusterError when no answer comes in 30
        minutes."""
        if not self._on:
            return
        if step >= self._next:
            self._ask(step)
        until = time.monotonic() + _PATIENCE
        while step >= self._granted:
            permit = read_permit(self._folder.permit)
            if permit is not None and permit.epoch == self._epoch:
                self._granted = permit.steps
            if step < self._granted:
                return
            if time.monotonic() > until:
                raise ClusterError(f"step {step}: the archive did not answer in 30 minutes")
            time.sleep(_POLL)

    def _ask(self, step: int) -> None:
        """For the steps of the next minute, half a minute before they are needed."""
        now = time.monotonic()
        since, before = self._asked
        pace = (step - before) / max(now - since, 1e-9)
        steps = min(step + max(_AHEAD_STEPS, int(_AHEAD_SECONDS * pace)), self._total)
        earlier = read_permit(self._folder.permit_asked)
        if earlier is not None and earlier.epoch == self._epoch:
            steps = max(steps, earlier.steps)  # leave that was given stays given
        write_json(self._folder.permit_asked, asdict(Permit(self._epoch, step, steps)))
        self._asked = (now, step)
        self._next = steps if steps == self._total else (step + steps) // 2


# --- replay fingerprint -----------------------------------------------------------------------


def _device(device: torch.device) -> str:
    """What kind of device it is."""
    named = device.type == "cuda"
    return f"{device.type}/{torch.cuda.get_device_name(device)}" if named else device.type


def recipe_digest(recipe: Recipe) -> str:
    """Return a digest of all in a recipe that its sums depend on, and of a user's own code in it:
    the modules of the model's factory, the method's class and the loss, as `factory_code` covers
    them."""
    given = recipe.model.name, recipe.method.name, recipe.training.loss
    named = (name for name in given if ":" in name)
    return _digest([recipe.of_model, {name: digests(name) for name in named}])


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _environment() -> str:
    """Return a digest of how torch was built, and of how it computes in this process."""
    settings = [
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32, torch.backends.mkldnn.enabled,
    ]  # fmt: skip
    return _digest([torch.__config__.show(), *settings])


def identity_of(job: TrainJob, reducer: Reducer, records: str, initial: str) -> dict[str, str]:
    """Return what a sum depends on, by name: a change of any starts a new attempt epoch, under keys
    of its own.

    records: fingerprint of the records. initial: digest of the model before its first step, public
    weights and frozen parts included. Raises UserError where workers would make the noise on
    devices of several kinds.
    """
    resources, kind = job.recipe.resources, _device(reducer.device)
    machine = f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}/{kind}"
    machines = reducer.gather(machine)
    if resources.noise == "device" and len(kinds := set(reducer.gather(kind))) > 1:
        raise UserError(
            f"resources.noise: must be host with workers on {' and '.join(sorted(kinds))}: two "
            "kinds of device may make noise that differs in its last bits"
        )
    return {
        "key": key_id(read_run_key(job.folder)),
        **({"noise": "device"} if resources.noise == "device" else {}),
        # With canonical shards the sum does not depend on the number of workers.
        "world_size": "any" if job.recipe.training.reproducible else str(reducer.world_size),
        "micro_batch": str(resources.micro_batch),
        "threads": str(torch.get_num_threads()),
        "machines": ",".join(sorted(set(machines))),
        "code": code_digest(PACKAGES),
        "environment": _environment(),
        "recipe": recipe_digest(job.recipe),
        "data": records,
        "model": initial,
    }


# --- tensors made once by the method ----------------------------------------------------------


def ensure_fixed(job: TrainJob, spec: ModelSpec) -> bool:
    """Make what the method makes once, unless it is there (worker 0). Whether there is any."""
    recipe, path = job.recipe, job.folder.fixed
    if not path.exists():
        fixed = recipe.privacy.run_key is not None
        key = read_run_key(job.folder) if fixed else new_run_key()

        def initial() -> nn.Module:
            return initial_model(recipe, spec)

        setup = Setup(recipe, spec, initial, job.own_records(), public_data(recipe), key)
        tensors = recipe.method.fix(setup)
        if tensors:
            if _taken(job.folder):
                raise UserError(f"{path}: missing, and steps were taken with it; {PUT_BACK}")
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            write_atomic(path, save_tensors(contiguous))
    return path.exists()


def _taken(folder: RunFolder) -> bool:
    """Whether workers have begun steps: these were taken with what is fixed."""
    return folder.ledger.exists() and bool(Ledger.read(folder.ledger).attempts)


def check_same_fixed(folder: RunFolder, ledger: Ledger, now: str) -> None:
    """Raise UserError where the last attempt was made with other tensors. now: their `digest`."""
    before = ledger.attempts[-1]["identity"].get("hidden noise") if ledger.attempts else None
    if before not in (None, now):
        raise UserError(f"{folder.fixed}: is not what this run's steps were taken with; {PUT_BACK}")


def read_fixed(folder: RunFolder) -> dict[str, Tensor]:
    """The tensors by name."""
    try:
        return load_tensors(read_bytes(folder.fixed))
    except (UserError, SafetensorError) as error:
        raise UserError(
            f"{folder.fixed}: cannot be read: {error}; is the storage shared?"
        ) from error


def method_state_digest(fixed: Fixed) -> str:
    """Names the tensors: part of what may not change under one attempt."""
    hashed = hashlib.blake2b(digest_size=8)
    for name in sorted(fixed.tensors):
        hashed.update(fixed.tensors[name].numpy().tobytes())
    return hashed.hexdigest()


# --- the loop ---------------------------------------------------------------------------------


_RECORDS = ("data", "recipe")  # of an attempt's identity: what shapes noise that is drawn once


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
        reducer = Reducer(rank, world_size, ray.train.torch.get_device())
        join(reducer)
        run(job, reducer, config.get("until"))
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
    with ExitStack() as stack:
        loop = Loop(job, reducer, stack, until)
        job.recipe.method.learn(loop)
        loop.finish()


class Mechanism:
    """What a step releases: sampling, clipped sums, one reduction, noise, division.

    Of a training (`Loop`), and of audits, which drive the same code on records of their own.
    ledger: worker 0's; every release is announced there first.
    """

    engine: GradientEngine
    task: Task
    dataset: Any
    reducer: Reducer
    shards: Shards
    sharing: Whole = Whole()
    noise_there = False  # drawn where the sums lie, in place of on the CPU
    key: bytes
    attempt: str
    ledger: Ledger | None = None
    permit: PermitGate | None = None
    canaries = Canaries()

    def attempt_of(self, step: int) -> str:
        """Return the label of the attempt in the keys of `step`."""
        return self.attempt

    def gradient(self, step: int, todo: StepPlan, flag: bool = False) -> tuple[Tensor, Seen, bool]:
        """This worker's part of the step's noisy gradient, float64; what it is made of, PRIVATE;
        and whether any worker's flag was up. The next step's is written over it."""
        rows, seen = self._clipped_sums(step, todo)
        noisy, flagged = self.release(step, rows, todo.noise_std, flag)
        self.canaries.watch(noisy, todo, self.reducer)
        # Not by a number, whose reciprocal a GPU multiplies by: the same bits wherever it lies.
        return noisy.div_(noisy.new_full((1,), todo.expected_batch)), seen, flagged

    def _clipped_sums(self, step: int, todo: StepPlan) -> tuple[Tensor, Seen]:
        """This worker's part of the step: float64 (rows, size), PRIVATE, and what it is made of."""
        engine, dataset, device = self.engine, self.dataset, self.reducer.device
        engine.blocks = Blocks.for_batches(self.shards.largest, todo.sample_rate, todo.batch_cap)
        sample_key = derive_key(self.key, "sample", self.attempt_of(step), step)
        draw_key = derive_key(self.key, "draw", self.attempt_of(step), step)
        rows = self.reducer.rows(self.shards.rows, engine.size)
        seen, joined = Seen(), []
        for row, begin, end in self.shards.mine:
            members = self.members(sample_key, begin, end, todo)
            joined.append((row, members))
            self.sharing.wire.check(len(members))
            members = self.canaries.fed(members)
            inputs = dataset.batch(members).to(device)
            labels = self.canaries.labelled(members, dataset.targets(members)).to(device)
            ids = torch.from_numpy(members)
            targets = self.task.targets(engine, inputs, labels, draw_key, ids)
            clipped = engine.clipped_sum(
                inputs, targets, draw_key=draw_key, record_ids=ids, out=rows[row]
            )
            seen.examples += clipped.examples
            seen.nonfinite += clipped.nonfinite
            seen.loss_sum += clipped.loss_sum
            seen.details = clipped.details
        self.canaries.join(rows, joined)
        return rows, seen

    def members(self, key: bytes, begin: int, end: int, todo: StepPlan) -> np.ndarray:
        """Positions in [begin, end) of the records that join."""
        return poisson_sample(
            key, begin, end, todo.sample_rate,
            batch_cap=todo.batch_cap, records=len(self.dataset),
        )  # fmt: skip

    def release(
        self, step: int, rows: Tensor, noise_std: float, flag: bool = False
    ) -> tuple[Tensor, bool]:
        """This worker's part of the sum of all workers' rows with Gaussian noise, the ledger's
        entry durable before worker 0's, float64, where the noise was drawn; and whether any
        worker's flag was up. rows: float64 (rows, size), bounded as the plan says; written over.
        """
        total, flagged = self.sharing.sum(self.reducer, rows, self.shards, flag)
        summed, size = total.cpu().numpy(), rows.shape[1]
        label = f"{key_id(self.key)}/{self.attempt_of(step)}/{step}"
        leaves = self.sharing.digests(self.reducer, label, summed, size)
        if self.ledger is not None and self.permit is not None:
            self.permit.wait(step)
            _announce(self.ledger, step, release_id(label, leaves))
        noise_key = derive_key(self.key, "noise", self.attempt_of(step), step)
        start = self.sharing.own(self.reducer, size).start
        if self.noise_there:
            return noise.add_noise_on(total, noise_key, noise_std, start), flagged
        noisy = add_noise(summed, noise_key, noise_std, start, summed)
        return torch.from_numpy(noisy), flagged


class Loop(Mechanism):
    """A training in the hands of one worker (`dpdist.methods.base.Worker`).

    Made, it holds model and parameters as they are after `start` steps. ledger: worker 0's.
    """

    def __init__(
        self, job: TrainJob, reducer: Reducer, stack: ExitStack, until: int | None = None
    ) -> None:
        recipe, plan, folder = job.recipe, job.plan, job.folder
        self.job, self.reducer, self.method = job, reducer, recipe.method
        self.dataset = job.records()
        if len(self.dataset) != plan.records and not plan.nominal:
            raise UserError(
                f"{self.dataset.name} has {len(self.dataset)} records, the plan says {plan.records}"
            )
        self.key = derive_key(
            read_run_key(folder), "run", plan.fingerprint(), self.dataset.fingerprint, "trial", 0
        )
        self.spec = model_spec(recipe, self.dataset)
        self.model = initial_model(recipe, self.spec).to(reducer.device)
        self.frozen = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        self.engine, self.task = build_engine(recipe, self.model, plan), self.method.task()
        wire = wire_of(recipe, plan)
        if self.engine.clipping.sensitivity * (1 + wire.room) > plan.clip_norm * (1 + 1e-9):
            raise UserError("the clipping's sensitivity exceeds the plan's clip norm")
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.engine.parameters])
        _point_into(self.engine, self.flat)
        made = ensure_fixed(job, self.spec) if reducer.rank == 0 else False
        tensors = read_fixed(folder) if reducer.gather("made" if made else "")[0] else {}
        self.fixed = Fixed(self.model, tensors, derive_key(self.key, "hidden"))
        self.constrain = self.method.constraint(self.model)
        self.constrain()
        self.sharing = RELEASES[recipe.resources.release](wire)
        self.noise_there = recipe.resources.noise == "device"
        if self.noise_there:
            noise.check_device_noise(reducer.device)
        self.own = self.sharing.own(reducer, len(self.flat))
        self.optimizer = FlatOptimizer(recipe.training, plan.steps, self.flat[self.own])
        self.slots = {n: t.to(reducer.device) for n, t in self.method.slots(self.model).items()}
        self.canaries = plant(self.dataset, read_run_key(folder), plan, self.engine.size)
        self.shards = shards_of(
            len(self.dataset), plan.records, reducer, recipe.training.reproducible
        )
        if self.method.stepwise:  # on nothing private, before anything is on record
            todo, rate = plan.step(0), self.optimizer.learning_rate(0)
            self.engine.draws = self.method.perturbation(todo, rate, self.fixed)
            model_setup.validate_on_public_examples(self.engine, self.task, job.source)
        self.attempt = self._begin_attempt(stack)
        self.dataset = self.method.seen(self.dataset, plan, self._records_key())
        self.start = self._newest_checkpoint()
        self.last = plan.steps if until is None else min(until, plan.steps)
        self.monitor: Monitor | None = None
        if self.ledger is not None:
            self.monitor = Monitor(job, plan.steps, self.start)
            monitoring.append_group(
                folder, monitoring.Group.of(reducer, self.ledger, self.start, self._independence())
            )
            self.permit = PermitGate(folder, self.ledger.epoch, self.start, plan.steps)
        inputs, _ = public_probe(data.load(job.source, "test"))
        self.divergence = Divergence(self.model, inputs.to(reducer.device))
        self.saved = time.monotonic()

    def _independence(self) -> str:
        """How this start's passes keep records apart; "" where no noisy step rests on it."""
        plan, source = self.job.plan, self.job.source
        if not plan.step(0).noise_multiplier:
            return ""
        if not self.method.stepwise:
            return SCREENED
        return model_setup.independence_on_public_examples(
            self.engine, self.task, source, plan, self.shards.largest
        )

    def _begin_attempt(self, stack: ExitStack) -> str:
        """The label of this attempt, in all its keys; worker 0 holds the ledger from here on."""
        job, attempt = self.job, ""
        initial = checkpoint.tensors_digest(self.model.state_dict())
        mine = {
            **identity_of(job, self.reducer, self.dataset.fingerprint, initial),
            **self.sharing.identity(self.reducer, job.recipe.training.reproducible),
            "hidden noise": method_state_digest(self.fixed),
        }
        if self.reducer.rank == 0:
            ledger = stack.enter_context(Ledger.open(job.folder.ledger, job.plan.fingerprint()))
            check_released(job.folder, job.plan, ledger)
            check_same_fixed(job.folder, ledger, mine["hidden noise"])
            mine |= job.folder.begun_identity | job.folder.search_identity
            self._check_ceiling(ledger, mine)
            ledger.begin_attempt(mine)
            attempt = self._label(ledger, ledger.nonce)
            self.ledger = ledger
        # Nobody passes before worker 0 holds the ledger: an older attempt writes no more.
        attempt = self.reducer.gather(attempt)[0]
        self.announced = self._announced(checkpoint.newest_step(job.folder.checkpoints))
        return attempt

    def _label(self, ledger: Ledger, nonce: str) -> str:
        """Return the current attempt's label in keys. A fixed key is for tests, which want the same
        run again: no nonce then."""
        return f"{ledger.epoch}/{nonce if self.job.recipe.privacy.run_key is None else ''}"

    def _records_key(self) -> bytes:
        """Return the key of noise that is drawn once for each record, in the first attempt.

        Raises UserError where that attempt saw other records, or another recipe: the same noise
        would be added to something else.
        """
        label = ""
        if self.ledger is not None:
            first, now = self.ledger.attempts[0], self.ledger.attempts[-1]
            label = first["nonce"] if self.job.recipe.privacy.run_key is None else ""
            before, after = first["identity"], now["identity"]
            shaped = [name for name in _RECORDS if before.get(name) != after.get(name)]
            if shaped and self.method.local and self.job.given is None:
                raise UserError(
                    f"{self.job.folder.path}: the {' and '.join(shaped)} changed since its records "
                    f"were released with noise; {PUT_BACK}"
                )
        label = self.reducer.gather(label)[0]
        return derive_key(self.key, "records", *([label] if label else []))

    def _announced(self, start: int) -> list[tuple[int, int, str]]:
        """Return worker 0's list of the steps from `start` on that are replayed: first step, end
        and label of each run of them."""
        found = []
        if self.ledger is not None:
            known = self.ledger.announced(start)
            found = [(first, end, self._label(self.ledger, n)) for first, end, n in known]
        count = self.reducer.from_first(len(found))
        told = []
        for at in range(count):
            said = " ".join(map(str, found[at])) if found else ""
            first, end, label = self.reducer.gather(said)[0].split(" ")
            told.append((int(first), int(end), label))
        return told

    def attempt_of(self, step: int) -> str:
        """Return the label in the keys of `step`: that of the process that announced it, if one
        did; this process's own for a new step."""
        replayed = (label for first, end, label in self.announced if first <= step < end)
        return next(replayed, self.attempt)

    def _check_ceiling(self, ledger: Ledger, mine: dict[str, str]) -> None:
        """Raise UserError, before anything is on record, where a budget's ceiling, which has room
        for the plan, has none reserved for what this attempt would release again."""
        again = ledger.repeats(checkpoint.newest_step(self.job.folder.checkpoints), mine)
        if again and self.job.recipe.privacy.budget_ceiling is not None:
            before = ledger.attempts[-1]["identity"]
            other = sorted(name for name in mine | before if before.get(name) != mine.get(name))
            why = f"with another {', '.join(other)} than before " if other else ""
            raise UserError(
                f"{again} steps on record would be released again, {why}and privacy.budget_ceiling "
                "has no room reserved for it: go on with the workers and machines as they were, or "
                "begin a new run under another --name"
            )

    @property
    def _slots(self) -> dict[str, Tensor]:
        """What a checkpoint keeps besides the parameters, of the optimizer's its own part."""
        return {**self.optimizer.slots, **self.slots, **self.canaries.slots}

    def _newest_checkpoint(self) -> int:
        """Take over the newest checkpoint: the steps taken before it."""
        state = checkpoint.latest(self.job.folder.checkpoints, self.own)
        start = 0
        if state is not None:
            start = state.step
            self.flat.copy_(state.flat)
            for name, slot in self._slots.items():
                found = state.slots[name]  # whole, where another kind of release kept it
                slot.copy_(found if found.shape == slot.shape else found[self.own])
        if self.reducer.from_first(start) != start or not self.reducer.same_everywhere(
            checkpoint.digest(self.flat)
        ):
            raise MissingRank(
                "the workers started from different checkpoints; is the storage shared?"
            )
        return start

    def steps(self) -> None:
        """Take the plan's steps that are left."""
        plan, training = self.job.plan, self.job.recipe.training
        for step in range(self.start, self.last):
            todo = plan.step(step)
            if step == self.start or training.schedule != "constant":
                rate = self.optimizer.learning_rate(step)
                self.engine.draws = self.method.perturbation(todo, rate, self.fixed)
            self._step(step, todo)

    def _step(self, step: int, todo: StepPlan) -> None:
        due = time.monotonic() - self.saved > self.job.recipe.resources.checkpoint_seconds
        noisy, seen, save_now = self.gradient(step, todo, self.reducer.rank == 0 and due)
        self.optimizer.update(self.flat[self.own], noisy, step)
        self.sharing.complete(self.reducer, self.flat)
        self.constrain()
        try:
            self.divergence.check(self.flat, step, step + 1 == self.last)
        except Diverged:
            self.reducer.gather("")  # nobody says so before worker 0 has the step on its ledger
            raise
        if self.monitor is not None:
            self.monitor.step(step, seen)
        if save_now or step + 1 == self.last:
            self.save(step + 1)

    def save(self, done: int) -> None:
        """A checkpoint after `done` steps, unless the workers' parameters differ."""
        if not self.reducer.same_everywhere(checkpoint.digest(self.flat)):
            raise MissingRank(f"the workers' parameters differ after step {done - 1}")
        folder, slots = self.job.folder.checkpoints, {**self.slots, **self.canaries.slots}
        kept, parts = self.sharing.kept(self.reducer, folder, done, self.optimizer.slots)
        if self.ledger is not None:
            state = checkpoint.TrainState(done, self.flat, {**kept, **slots})
            checkpoint.save(folder, state, self.ledger.anchor, parts)
        self.saved = time.monotonic()

    def finish(self) -> None:
        """Worker 0 saves the model, and sums the training up once it is whole."""
        self.flat[self.own] = self.optimizer.result(self.flat[self.own])
        self.sharing.complete(self.reducer, self.flat)
        if self.monitor is None or self.ledger is None:
            return
        spec = self.method.finish(self.spec, self.fixed)
        models.save(self.model, spec, self.job.folder.model)
        if self.last == self.job.plan.steps:
            self.monitor.finish(self.engine.fallback_layers, self.frozen, self.ledger)
        else:
            self.monitor.pause(self.last)


def _point_into(engine: GradientEngine, flat: Tensor) -> None:
    """Make every trainable parameter a view of the flat vector."""
    pieces = flat.split([parameter.numel() for parameter in engine.parameters])
    for parameter, piece in zip(engine.parameters, pieces, strict=True):
        parameter.data = piece.view(parameter.shape)


def shards_of(records: int, planned: int, reducer: Reducer, reproducible: bool) -> Shards:
    """Cut at the plan's number of records, which is another than theirs when it was declared: the
    last shard takes what is beyond it, and nothing else changes with their number."""
    count = CANONICAL_SHARDS if reproducible else reducer.world_size

    def bounds(shard: int) -> tuple[int, int]:
        begin, end = share(planned, shard, count)
        return min(begin, records), records if shard == count - 1 else min(end, records)

    largest = -(-planned // count)
    if not reproducible:
        return Shards(1, largest, [(0, *bounds(reducer.rank))], [1] * reducer.world_size)
    cuts = [share(count, rank, reducer.world_size) for rank in range(reducer.world_size)]
    mine = [(row, *bounds(row)) for row in range(*cuts[reducer.rank])]
    return Shards(count, largest, mine, [last - first for first, last in cuts])


def _announce(ledger: Ledger, step: int, release: str) -> None:
    """Put the release on record, durably, before its noise is added.

    The id covers the bits of the sum itself: an exact replay collapses into one entry, and the
    same noise can never be added to two different sums.
    """
    try:
        ledger.record(step, release)
    except ReplayConflict:
        ledger.new_epoch(f"step {step} could not be replayed exactly")
        raise
