"""A recipe's training on one Ray Train worker, and the state that all workers share.

`restore` is all start-up, and `run_training` takes the plan's steps by the loop that all trainings
have (`dpdist.training.loop`): a recipe is one whose optimizer dpdist made. Sampling rate, clip,
noise and step count come from the plan and nowhere else.

Before a step is released, worker 0 asks the archive for permission through a file of the run
folder, so that a lost run folder cannot hide releases (`dpdist.runs.archive` explains it). The
replay fingerprint lists everything that can change a step's floating-point sum or its noise. It is
computed from the executed state, never from a file's text, and kept in the ledger: after any edit
of a run folder or a copy of it, a different sum starts a new attempt, under its own keys. Worker 0
computes the tensors that the run's method needs once, before the first step, and the others read
them, so that all workers and all restarts train under the same ones.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from dpdist import data
from dpdist.cluster.versions import PACKAGES, check_same_versions, code_digest, torch_settings
from dpdist.cluster.work import WorkerPlace
from dpdist.core.errors import ClusterError, UserError, is_disk_full
from dpdist.core.files import read_bytes, read_json, write_atomic, write_json
from dpdist.gradients.noise import check_device_noise
from dpdist.methods.base import MethodSetup, MethodState, WorkerInputs
from dpdist.models import ModelSpec
from dpdist.models.factory_code import require_current_sources, source_digests
from dpdist.privacy.ledger import JournalBusy, Ledger, LedgerError, ReplayConflict
from dpdist.privacy.plan import StepPlan
from dpdist.randomness.keys import derive_key, key_id, new_run_key
from dpdist.runs.archive import Permit, read_permit
from dpdist.runs.folder import RunFolder, verify_ledger
from dpdist.runs.recipe import Recipe
from dpdist.training import checkpoint, model_setup
from dpdist.training.canaries import build_canaries
from dpdist.training.collectives import FlatOptimizer, MissingRank, Reducer, flat_views
from dpdist.training.job import RESTORE_HINT, TrainJob
from dpdist.training.loop import Loop
from dpdist.training.model_setup import build_engine, initial_model, model_spec, public_probe
from dpdist.training.monitoring import InterruptionWatch, StepMetrics
from dpdist.training.private_step import PrivateStep, build_shards, check_clip
from dpdist.training.records import method_public_records

# --- permission of the archive ----------------------------------------------------------------


_AHEAD_SECONDS = 60.0
_AHEAD_STEPS = 50
_PERMIT_TIMEOUT = 1800.0  # seconds; the command itself gives up earlier, and says why
_POLL = 0.05


class PermitGate:
    """Let steps wait for the archive's permission; without an archived private state, never."""

    def __init__(self, folder: RunFolder, epoch: int | None, start: int, total: int) -> None:
        self._enabled = (
            folder.archive.exists() and read_json(folder.archive, {"private": bool})["private"]
        )
        self._folder, self._epoch, self._total = folder, epoch or 0, total
        self._granted = start  # the first step without permission
        self._next_request_step = start  # where to ask again
        self._last_request = (time.monotonic(), start)

    def wait(self, step: int) -> None:
        """Return once `step` may be released. Raises ClusterError after 30 minutes."""
        if not self._enabled:
            return
        if step >= self._next_request_step:
            self._ask(step)
        until = time.monotonic() + _PERMIT_TIMEOUT
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
        """Ask for the steps of the next minute, half a minute before they are needed."""
        now = time.monotonic()
        since, before = self._last_request
        pace = (step - before) / max(now - since, 1e-9)
        steps = min(step + max(_AHEAD_STEPS, int(_AHEAD_SECONDS * pace)), self._total)
        earlier = read_permit(self._folder.permit_request)
        if earlier is not None and earlier.epoch == self._epoch:
            steps = max(steps, earlier.steps)  # a granted permission stays granted
        wanted = Permit(epoch=self._epoch, step=step, steps=steps)
        write_json(self._folder.permit_request, wanted.model_dump())
        self._last_request = (now, step)
        self._next_request_step = steps if steps == self._total else (step + steps) // 2


# --- replay fingerprint -----------------------------------------------------------------------


def _device(device: torch.device) -> str:
    """Return the kind of a device, for CUDA with its name."""
    named = device.type == "cuda"
    return f"{device.type}/{torch.cuda.get_device_name(device)}" if named else device.type


def recipe_digest(recipe: Recipe) -> str:
    """Return a digest of everything in a recipe that its sums depend on.

    That includes the user's own code: the modules of the model's factory, the method's class and
    the loss, as `factory_code` covers them.
    """
    named = {name: source_digests(name) for name in _own_code(recipe)}
    return _digest([recipe.experiment_settings, named])


def require_current_code(recipe: Recipe, context: object) -> None:
    """Raise UserError if the user's own code was edited since this process imported it."""
    for name in _own_code(recipe):
        require_current_sources(name, context)


def _own_code(recipe: Recipe) -> list[str]:
    """Return the names in a recipe of the user's own code."""
    given = recipe.model.name, recipe.method.name, recipe.training.loss
    return [name for name in given if ":" in name]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def replay_fingerprint(
    job: TrainJob, reducer: Reducer, data_fingerprint: str, model_digest: str
) -> dict[str, str]:
    """Return what a sum depends on, by name; a change of any starts a new attempt, with new keys.

    data_fingerprint: fingerprint of the records. model_digest: digest of the model before its first
    step, public weights and frozen parts included. Raises UserError if workers would draw noise on
    devices of several kinds.
    """
    resources, kind = job.recipe.resources, _device(reducer.device)
    machine = f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}/{kind}"
    machines = reducer.all_gather_text(machine)
    if resources.noise == "device" and len(kinds := set(reducer.all_gather_text(kind))) > 1:
        raise UserError(
            f"resources.noise: must be host with workers on {' and '.join(sorted(kinds))}: two "
            "kinds of device may draw noise that differs in its last bits"
        )
    return {
        "key": key_id(job.folder.read_run_key()),
        **({"noise": "device"} if resources.noise == "device" else {}),
        # With canonical shards the sum does not depend on the number of workers.
        "world_size": "any" if job.recipe.training.reproducible else str(reducer.world_size),
        "micro_batch": str(resources.micro_batch),
        "rounding": resources.rounding,
        "threads": str(torch.get_num_threads()),
        "machines": ",".join(sorted(set(machines))),
        "code": code_digest(PACKAGES),
        "environment": _digest([torch.__config__.show(), *torch_settings()]),
        "recipe": recipe_digest(job.recipe),
        "data": data_fingerprint,
        "model": model_digest,
    }


# --- tensors that the method computes once ----------------------------------------------------


def ensure_method_state(job: TrainJob, spec: ModelSpec) -> bool:
    """Write the method's tensors unless they exist (worker 0), and return whether there are any."""
    recipe, path = job.recipe, job.folder.method_state
    if not path.exists():
        fixed = recipe.privacy.run_key is not None
        key = job.folder.read_run_key() if fixed else new_run_key()
        setup = MethodSetup(
            recipe,
            spec,
            partial(initial_model, recipe, spec),
            job.records_without_canaries(),
            method_public_records(recipe),
            key,
        )
        tensors = recipe.method.execution().prepare_state(setup)
        if tensors:
            ledger = job.folder.ledger
            if ledger.exists() and Ledger.read(ledger).attempts:  # workers have begun steps
                raise UserError(f"{path}: missing, and steps were taken with it; {RESTORE_HINT}")
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            write_atomic(path, save_tensors(contiguous))
    return path.exists()


def read_method_state(folder: RunFolder) -> dict[str, Tensor]:
    """Return the method's tensors, by name."""
    try:
        return load_tensors(read_bytes(folder.method_state))
    except SafetensorError as error:
        raise UserError(f"{folder.method_state}: cannot be read: {error}") from error


def method_state_digest(state: MethodState) -> str:
    """Return a digest of the method's tensors, which must not change within an attempt."""
    hashed = hashlib.blake2b(digest_size=8)
    for name in sorted(state.tensors):
        hashed.update(state.tensors[name].numpy().tobytes())
    return hashed.hexdigest()


# --- attempts ---------------------------------------------------------------------------------


# Parts of an attempt's identity on which noise depends that is drawn once.
_ONE_TIME_NOISE_INPUTS = ("data", "recipe")


@dataclass
class Attempt:
    """One process's part of a run, as the ledger records it.

    label: in all keys of its new steps. announced: the replayed steps, as (first step, end, label).
    ledger: worker 0's.
    """

    label: str
    announced: list[tuple[int, int, str]]
    ledger: Ledger | None

    @classmethod
    def open_ledger(
        cls, job: TrainJob, stack: ExitStack, identity: dict[str, str], newest: int
    ) -> Ledger:
        """Return the open ledger with this attempt on record.

        An attempt continues the last one if their identities are equal.

        Args:
            job: of the run.
            stack: closes the ledger.
            identity: everything that a sum depends on, by name (`replay_fingerprint`).
            newest: number of steps before the newest checkpoint.
        """
        ledger = stack.enter_context(Ledger.open(job.folder.ledger, job.plan.fingerprint()))
        verify_ledger(job.folder, job.plan, ledger)
        last = ledger.attempts[-1]["identity"] if ledger.attempts else {}
        if last.get("hidden noise") not in (None, identity["hidden noise"]):
            raise UserError(
                f"{job.folder.method_state}: is not what this run's steps were taken with; "
                f"{RESTORE_HINT}"
            )
        _check_ceiling(job, ledger, newest, identity)
        ledger.begin_attempt(identity)
        return ledger

    @classmethod
    def shared(cls, job: TrainJob, reducer: Reducer, ledger: Ledger | None, newest: int) -> Attempt:
        """Return the attempt of worker 0's ledger, on all workers."""
        told: tuple[str, list[tuple[int, int, str]]] = "", []
        if ledger is not None:
            replayed = ledger.announced_steps(newest)
            told = (
                _label(job, ledger, ledger.nonce),
                [(first, end, _label(job, ledger, nonce)) for first, end, nonce in replayed],
            )
        # No worker passes before worker 0 holds the ledger, so an older attempt cannot write.
        label, announced = json.loads(reducer.all_gather_text(json.dumps(told))[0])
        return cls(label, announced, ledger)

    def records_key(self, job: TrainJob, reducer: Reducer, key: bytes) -> bytes:
        """Return the key of noise that is drawn once for each record, in the first attempt.

        Raises UserError if that attempt had different records or a different recipe: the same noise
        would be added to different values.
        """
        label = ""
        if self.ledger is not None:
            first, now = self.ledger.attempts[0], self.ledger.attempts[-1]
            label = first["nonce"] if job.recipe.privacy.run_key is None else ""
            before, after = first["identity"], now["identity"]
            shaped = [
                name for name in _ONE_TIME_NOISE_INPUTS if before.get(name) != after.get(name)
            ]
            if (
                shaped
                and job.recipe.method.capabilities.steps_are_post_processing
                and job.replacement_records is None
            ):
                raise UserError(
                    f"{job.folder.path}: the {' and '.join(shaped)} changed since its records "
                    f"were released with noise; {RESTORE_HINT}"
                )
        label = reducer.all_gather_text(label)[0]
        return derive_key(key, "records", *([label] if label else []))


def _label(job: TrainJob, ledger: Ledger, nonce: str) -> str:
    """Return the current attempt's label in keys; without a nonce for a fixed key, as in tests."""
    return f"{ledger.epoch}/{nonce if job.recipe.privacy.run_key is None else ''}"


def _check_ceiling(job: TrainJob, ledger: Ledger, newest: int, mine: dict[str, str]) -> None:
    """Raise UserError if a budget's ceiling has no room for steps that would be released again.

    Room is reserved only for the plan. Nothing is on record yet.
    """
    again = ledger.count_repeated_steps(newest, mine)
    if again and job.recipe.privacy.budget_ceiling is not None:
        before = ledger.attempts[-1]["identity"]
        other = sorted(name for name in mine | before if before.get(name) != mine.get(name))
        why = f"with a different {', '.join(other)} than before " if other else ""
        raise UserError(
            f"{again} steps on record would be released again, {why}and privacy.budget_ceiling "
            "has no room reserved for it: continue with the workers and machines as they were, or "
            "start a new run under another --name",
            see="explanation/privacy.md#what-a-run-really-released",
        )


# --- the loop ---------------------------------------------------------------------------------


def train_worker(config: dict[str, Any], place: WorkerPlace) -> None:
    """Train as one worker of a group.

    Args:
        config: "job", and "until", a step to pause at or None.
        place: rank, world size and device. In the driver's process errors are raised; elsewhere
            errors that a restart would only repeat are written to a file, and the driver stops.
    """
    job: TrainJob = config["job"]
    if place.in_process:
        torch.set_num_threads(max(1, int(job.recipe.resources.cpus_per_worker)))
        run_training(job, Reducer(0, 1, torch.device(place.device)), config.get("until"))
        return
    from dpdist.training.rendezvous import destroy_process_group, init_process_group

    rank = place.rank
    if job.folder.failure.exists():
        return
    try:
        check_same_versions(job.packages, PACKAGES, f"training worker {rank} on {platform.node()}")
        torch.set_num_threads(max(1, int(job.recipe.resources.cpus_per_worker)))
        reducer = Reducer(rank, place.world_size, torch.device(place.device))
        init_process_group(reducer)
        run_training(job, reducer, config.get("until"), place.host_leaves)
    except (ReplayConflict, JournalBusy):
        raise  # a restart fixes it: it takes the new epoch, or the old attempt has ended
    except (UserError, ClusterError, LedgerError, OSError) as error:
        if isinstance(error, OSError) and not is_disk_full(error):
            raise
        # A restart would only repeat it: the driver reads this file, and stops.
        try:
            told = {"worker": rank, "error": str(error), "full": is_disk_full(error)}
            write_json(job.folder.failure, told)
        except OSError:
            job.folder.failure.touch()  # a full disk has room for that
    finally:
        destroy_process_group()


def run_training(
    job: TrainJob,
    reducer: Reducer,
    stop_after: int | None = None,
    host_leaves: Callable[[], bool] | None = None,
) -> None:
    """Train to the end of the plan, from the newest checkpoint if there is one.

    Return after a checkpoint if a host is taken away or the driver asks for it; the file
    `interruption` then says so.

    Args:
        stop_after: number of steps after which to pause; the model so far is saved, and the next
            call continues.
        host_leaves: asks Ray (`dpdist.cluster.work.WorkerPlace`).
    """
    with ExitStack() as stack:
        loop, learner = restore(job, reducer, stack, stop_after)
        if loop.start == 0:
            learner.measure("before")
        watch = InterruptionWatch(job.folder, reducer, host_leaves)
        while loop.done < loop.last:
            if not _take_step(loop, learner, watch):
                return
        watch.close()
        loop.finish()


def _take_step(loop: Loop, learner: RecipeLearner, watch: InterruptionWatch) -> bool:
    """Take a step, write a checkpoint if one is due, and return whether the workers continue."""
    due = learner.is_due(loop)
    flag = loop.step.reducer.rank == 0 and (due or watch.is_due())
    _, flagged = loop.take(flag)
    save_now, end_now = watch.ask(due) if flagged else (False, False)
    last = loop.done == loop.last
    kept = loop.kept
    if save_now or end_now or last:
        loop.save()
    if end_now and not last:
        loop.pause()
        if loop.step.ledger is not None:
            saved = {"step": loop.done, "saved": loop.done - kept}  # steps that need no repetition
            write_json(loop.job.folder.interruption, saved)
        return False
    return True


def restore(
    job: TrainJob, reducer: Reducer, stack: ExitStack, until: int | None = None
) -> tuple[Loop, RecipeLearner]:
    """Return a training as it is after its newest checkpoint, ready for the next step.

    Build model and engine, check both on public examples, begin an attempt in the ledger, which
    stays open until `stack` closes, and load the checkpoint's state.

    Raises:
        UserError: the records are not the plan's, or the model cannot be trained on them.
        MissingRank: the workers would start from different states.
    """
    recipe, plan, folder = job.recipe, job.plan, job.folder
    execution = recipe.method.execution()
    records = job.records()
    if len(records) != plan.records and not plan.nominal:
        raise UserError(f"{records.name} has {len(records)} records, the plan says {plan.records}")
    run_key = folder.read_run_key()
    key = derive_key(run_key, "run", plan.fingerprint(), records.fingerprint, "trial", 0)
    spec = model_spec(recipe, records)
    model = initial_model(recipe, spec).to(reducer.device)
    screened = job.screened == model_setup.screening_digest(recipe, model)
    engine, task = build_engine(recipe, model, plan), execution.task()
    own = recipe.method.capabilities.takes_gradient_steps  # else the method bounds its sums itself
    check_clip(engine, plan.clip_norm, plan.max_expected_batch if own else 0.0)
    flat = flat_views(engine.parameters)
    made = reducer.rank == 0 and ensure_method_state(job, spec)
    exists = reducer.all_gather_text("made" if made else "")[0]
    tensors = read_method_state(folder) if exists else {}
    fixed = MethodState(model, tensors, derive_key(key, "hidden"))
    constrain = execution.project_parameters(model)
    constrain()
    on_device = recipe.resources.noise == "device"
    if on_device:
        check_device_noise(reducer.device)
    optimizer = FlatOptimizer(recipe.training, plan.steps, flat)
    slots = {name: tensor.to(reducer.device) for name, tensor in engine.written_buffers.items()}
    canaries = build_canaries(records, run_key, plan, engine.size)
    reproducible = recipe.training.reproducible
    shards = build_shards(len(records), plan.records, reducer, reproducible, nominal=plan.nominal)
    if own:  # before anything is on record
        rate = optimizer.learning_rate(0)
        engine.perturbation = execution.perturbation(plan.step(0), rate, fixed)
        model_setup.validate_on_public_examples(engine, task, job.source, screened)
    initial = checkpoint.tensors_digest(model.state_dict())
    identity = {
        **replay_fingerprint(job, reducer, records.fingerprint, initial),
        "hidden noise": method_state_digest(fixed),
    }
    newest = checkpoint.newest_step(folder.checkpoints)
    held = Attempt.open_ledger(job, stack, identity, newest) if reducer.rank == 0 else None
    attempt = Attempt.shared(job, reducer, held, newest)
    seen = execution.transform_records(records, plan, attempt.records_key(job, reducer, key))
    step = PrivateStep(
        engine, seen, key, attempt.label,
        task=task, reducer=reducer, shards=shards, noise_on_device=on_device,
        ledger=attempt.ledger, canaries=canaries, announced=attempt.announced,
    )  # fmt: skip
    inputs, _ = public_probe(data.load(job.source, "test"))
    given = WorkerInputs(
        recipe, plan, model, fixed, engine.parameters, seen, shards, canaries, reducer.rank,
        step.draw_key, partial(data.load, job.source, "test"), folder.private, job.shared_cache,
    )  # fmt: skip
    probe = inputs.to(reducer.device)
    learner = RecipeLearner(given, flat, optimizer, constrain, reducer, spec, probe, slots)
    start = learner.restore(folder)
    if attempt.ledger is not None:
        step.permit = PermitGate(folder, attempt.ledger.epoch, start, plan.steps).wait
    examples = partial(
        model_setup.public_examples_of_task, engine, task, job.source, model_setup.MEASURED
    )
    loop = Loop(job, step, learner, start=start, last=until, examples=examples if own else None)
    return loop, learner


_PROBED_STEPS = 25  # between two checks of the logits for public inputs


class RecipeLearner:
    """Train a recipe's model by dpdist's own optimizer: `dpdist.training.loop.Learner`.

    Args:
        given: the inputs of a method's own steps, among them the model.
        flat: all trained parameters, of which the model's are views.
        optimizer: changes them.
        constrain: the method's, called after every update.
        reducer: of this worker.
        spec: the description of the model, before the method finalizes it.
        probe: public inputs, whose logits are finite unless training diverges.
        slots: further tensors that a checkpoint keeps, besides those of optimizer and method.
    """

    def __init__(
        self,
        given: WorkerInputs,
        flat: Tensor,
        optimizer: FlatOptimizer,
        constrain: Callable[[], None],
        reducer: Reducer,
        spec: ModelSpec,
        probe: Tensor,
        slots: dict[str, Tensor],
    ) -> None:
        self.given, self.flat, self.optimizer, self.spec = given, flat, optimizer, spec
        self._constrain, self._reducer, self._probe = constrain, reducer, probe
        self._execution = given.recipe.method.execution()
        self._own = self._execution.own_steps(given)
        self._kept = {**slots, **({} if self._own is None else self._own.slots)}
        self._perturbed = False

    @property
    def model(self) -> nn.Module:
        """Return the module that is trained."""
        return self.given.model

    @property
    def _slots(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps besides the parameters, by name."""
        return {**self.optimizer.slots, **self._kept, **self.given.canaries.checkpoint_slots}

    def restore(self, folder: RunFolder) -> int:
        """Load the newest checkpoint, and return the number of steps before it."""
        state, start = checkpoint.load_latest(folder.checkpoints), 0
        if state is not None:
            start = state.step
            self.flat.copy_(state.parameters)
            for name, slot in self._slots.items():
                slot.copy_(state.slots[name])
        if not self._all_equal(start):
            raise MissingRank(
                "the workers started from different checkpoints; is the storage shared?"
            )
        return start

    def _all_equal(self, done: int) -> bool:
        """Return whether all workers have the same parameters after `done` steps."""
        if self._reducer.world_size == 1:
            return True
        told = f"{done} {checkpoint.tensors_digest({'parameters': self.flat})}"
        return len(set(self._reducer.all_gather_text(told))) == 1

    def is_due(self, loop: Loop) -> bool:
        """Return whether a checkpoint is due after the next step."""
        if self._own is None:
            return loop.is_due
        return bool((loop.done + 1) % self._own.save_every == 0)

    def measure(self, stage: str) -> None:
        """Let the method measure the model on public data."""
        self._execution.measure(self.given, stage)

    # --- what the loop asks for

    def release(
        self, step: PrivateStep, number: int, step_plan: StepPlan, flag: bool
    ) -> tuple[Tensor, StepMetrics | None, bool]:
        """Return the step's noisy gradient, or the method's noisy sum."""
        if self._own is not None:
            rows = self._own.sums(number)
            noisy, flagged = step.release(number, rows, step_plan.noise_std, flag)
            return noisy, None, flagged
        if not self._perturbed or self.given.recipe.training.schedule != "constant":
            rate = self.optimizer.learning_rate(number)
            made = self._execution.perturbation(step_plan, rate, self.given.state)
            step.engine.perturbation, self._perturbed = made, True
        return step.gradient(number, step_plan, flag)

    def update(self, released: Tensor, number: int) -> None:
        """Let the optimizer take its step, and the method constrain the parameters."""
        gradient = released if self._own is None else self._own.update(number, released)
        if gradient is None:  # the method set the parameters: those of worker 0 count
            buffer = self.flat.double()
            if self._reducer.rank != 0:
                buffer.zero_()
            self._reducer.all_reduce(buffer)
            self.flat.copy_(buffer)
        else:
            self.optimizer.update(self.flat, gradient, number)
            self._constrain()

    def not_finite(self, number: int, last: bool) -> str:
        """Return which numbers are not finite after a step, with a verb; "" if all are."""
        if not torch.stack(self.flat.aminmax()).isfinite().all():  # NaN is minimum and maximum
            return "the parameters are"
        if last or number % _PROBED_STEPS == 0:
            with torch.no_grad():
                if not torch.isfinite(self.model(self._probe)).all():
                    return "the logits for public test inputs are"
        return ""

    def check_same(self, done: int) -> None:
        """Raise MissingRank unless all workers have the same parameters."""
        if not self._all_equal(done):
            raise MissingRank(f"the workers' parameters differ after step {done - 1}")

    def state(self, done: int) -> checkpoint.TrainState:
        """Return the state that a checkpoint keeps."""
        return checkpoint.TrainState(done, self.flat, self._slots)

    def finished(self, whole: bool) -> ModelSpec:
        """Publish the average if there is one, and return the spec of the finalized model."""
        self.flat[:] = self.optimizer.published_parameters(self.flat)
        if whole:
            self.measure("after")
        spec: ModelSpec = self._execution.finalize(self.spec, self.given.state)
        return spec
