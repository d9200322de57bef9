"""Sums over the training workers, and the optimizer of a recipe.

A missing worker is an error, never a smaller sum. Sums are exchanged in float64. Every worker
reduces, adds noise and updates everything, so all workers have the same parameters. The optimizers
(SGD with momentum and Adam) work on one flat vector, as post-processing of noisy gradients.

Under `torchrun`, or inside Ray Train's `TorchTrainer`, one script runs in several processes, its
workers (`Workers`). They communicate by the process group of `torch.distributed` that the script,
or Ray, created. Only worker 0 writes: run folder, ledger, checkpoints. A step is on the ledger
before any worker draws the noise, so no process has a noisy gradient that is not on record. If one
worker raises an error, all do, so that no worker waits for it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dpdist.config.training import CANONICAL_SHARDS, TrainingRecipe
from dpdist.core.errors import ClusterError, UserError
from dpdist.core.script_errors import install_error_hooks
from dpdist.privacy.ledger import ReplayConflict

# --- sums over the workers --------------------------------------------------------------------


_SHORT_TEXT = 508  # bytes


class MissingRank(RuntimeError):
    """Some worker did not take part in a step, which does not update the model."""


class Reducer:
    """Add up over the workers; with one worker, do nothing."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._buffer, self._rows = torch.zeros(0, dtype=torch.float64), torch.zeros(0)

    @property
    def backend(self) -> str:
        """Return the communication backend of workers on this kind of device."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def zero_rows(self, count: int, size: int) -> Tensor:
        """Return zeros (count, size), float64, for `sum_rows`, in the memory of the last ones.

        New memory would take longer than the work on it: the kernel clears it page by page.
        """
        if len(self._buffer) != count * size + 2:
            self._buffer = torch.empty(count * size + 2, dtype=torch.float64, device=self.device)
        self._rows = self._buffer.zero_()[:-2].view(count, size)
        return self._rows

    def sum_rows(self, rows: Tensor, flag: bool) -> tuple[Tensor, bool]:
        """Return the sum of float64 rows (S, size) over workers, in row order, and whether any
        worker's flag was True.

        Rows of `zero_rows` are summed in place. Every worker also adds a one: raises MissingRank
        unless all are counted.
        """
        tail = torch.tensor([1.0, float(flag)], dtype=torch.float64, device=self.device)
        if rows is self._rows:
            buffer = self._buffer
            buffer[-2:] = tail
        else:
            buffer = torch.cat([rows.reshape(-1), tail])
        self.all_reduce(buffer)
        present, flags = buffer[-2:].tolist()
        if present != self.world_size:
            raise MissingRank(f"{present:g} of {self.world_size} workers took part in the step")
        total = buffer[:-2].view_as(rows)
        result = total[0]
        for row in total[1:]:
            result += row
        return result, flags > 0

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum `buffer` over the workers, in place."""
        if self.world_size > 1:
            self._exchange(dist.all_reduce, buffer)

    def broadcast_int(self, value: int) -> int:
        """Return worker 0's integer on all workers."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        if self.world_size > 1:
            self._exchange(dist.broadcast, tensor, src=0)
        return int(tensor.item())

    def all_gather_text(self, text: str) -> list[str]:
        """Return one string of each worker, in order of rank; short ones take one exchange."""
        if self.world_size == 1:
            return [text]
        raw = text.encode()
        begun = self._all_gather_bytes(len(raw).to_bytes(4) + raw[:_SHORT_TEXT], _SHORT_TEXT + 4)
        lengths = [int.from_bytes(part[:4]) for part in begun]
        rest = [b""] * self.world_size
        if max(lengths) > _SHORT_TEXT:
            rest = self._all_gather_bytes(raw[_SHORT_TEXT:], max(lengths) - _SHORT_TEXT)
        whole = [part[4:] + more for part, more in zip(begun, rest, strict=True)]
        return [part[:length].decode() for part, length in zip(whole, lengths, strict=True)]

    def _all_gather_bytes(self, raw: bytes, size: int) -> list[bytes]:
        """Return at most `size` bytes of each worker, padded with zeros."""
        padded = bytearray(raw.ljust(size, b"\0"))
        tensor = torch.frombuffer(padded, dtype=torch.uint8).to(self.device)
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._exchange(dist.all_gather, parts, tensor)
        return [part.cpu().numpy().tobytes() for part in parts]

    def _exchange(self, collective: Callable[..., Any], *words: Any, **options: Any) -> None:
        """Execute a collective of `torch.distributed`, in which all workers take part."""
        collective(*words, **options)


# --- the flat optimizer -----------------------------------------------------------------------


_ADAM_BETA1, _ADAM_BETA2, _ADAM_EPSILON = 0.9, 0.999, 1e-8
LEAF = 2**16  # entries that are updated at once


def flat_views(parameters: Sequence[Tensor]) -> Tensor:
    """Return parameters as one vector (size,), and make them views of it."""
    flat = torch.cat([each.detach().reshape(-1) for each in parameters])
    pieces = flat.split([each.numel() for each in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data = piece.view(parameter.shape)
    return flat


class FlatOptimizer:
    """Update parameters (size,) in place from a gradient (size,).

    slots: state by name, saved with checkpoints. The learning rate of step t is learning_rate *
    schedule(t / steps).
    """

    def __init__(self, training: TrainingRecipe, steps: int, flat: Tensor) -> None:
        self.training, self.steps = training, steps
        names = ["momentum"] if training.momentum else []
        names = names if training.optimizer == "sgd" else ["mean", "square"]
        self.slots = {name: torch.zeros_like(flat) for name in names}
        if training.ema is not None:
            self.slots["ema"] = flat.clone()

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, 0 <= step < steps."""
        training = self.training
        done = step / self.steps
        factor = {
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "step": training.factor ** sum(done >= passed for passed in training.milestones),
        }
        return training.learning_rate * factor[training.schedule]

    def update(self, flat: Tensor, gradient: Tensor, step: int) -> None:
        """Take one step, with the same operations on every machine: no fused kernels.

        It works leaf by leaf, so that no temporary is as long as the vector. gradient: of any
        precision, rounded to that of `flat`.
        """
        if gradient.device != flat.device:
            gradient = gradient.to(flat)  # in one transfer
        for start in range(0, len(flat), LEAF):
            leaf = slice(start, start + LEAF)
            slots = {name: slot[leaf] for name, slot in self.slots.items()}
            self._update(flat[leaf], gradient[leaf].to(flat), slots, step)

    def _update(self, flat: Tensor, gradient: Tensor, slots: dict[str, Tensor], step: int) -> None:
        rate = self.learning_rate(step)
        if self.training.weight_decay:
            if self.training.optimizer == "adamw":
                flat.mul_(1 - rate * self.training.weight_decay)
            else:
                gradient = gradient.add(flat, alpha=self.training.weight_decay)
        if self.training.optimizer != "sgd":
            mean, square = slots["mean"], slots["square"]
            mean.mul_(_ADAM_BETA1).add_(gradient, alpha=1 - _ADAM_BETA1)
            square.mul_(_ADAM_BETA2).addcmul_(gradient, gradient, value=1 - _ADAM_BETA2)
            scale = rate / (1 - _ADAM_BETA1 ** (step + 1))
            root = (square / (1 - _ADAM_BETA2 ** (step + 1))).sqrt_().add_(_ADAM_EPSILON)
            flat.addcdiv_(mean, root, value=-scale)
        elif self.training.momentum:
            momentum = slots["momentum"].mul_(self.training.momentum).add_(gradient)
            flat.add_(momentum, alpha=-rate)
        else:
            flat.add_(gradient, alpha=-rate)
        if "ema" in slots and self.training.ema is not None:
            # Early on the average follows the mean of all steps so far: no bias to the start.
            decay = min(self.training.ema, (step + 1) / (step + 10))
            slots["ema"].lerp_(flat, 1 - decay)

    def published_parameters(self, flat: Tensor) -> Tensor:
        """Return the parameters to publish: the average if there is one."""
        return self.slots.get("ema", flat)


# --- releases -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shards:
    """Assign shards of the records to workers.

    num_rows: length of the reduced stack, first worker 0's rows, then worker 1's, ...
    largest_shard: largest planned number of records in a shard. local_shards: (row, first record,
    end) of this worker's shards. hashed: number of shards into which a step's records are hashed,
    if their number is protected; 0 if shards are ranges of positions.
    """

    num_rows: int
    largest_shard: int
    local_shards: list[tuple[int, int, int]]
    hashed: int = 0


def memory_bytes(size: int, slots: int, rows: int) -> int:
    """Return the bytes on each worker, during the whole training, that grow with the parameters.

    size: trained parameters. slots: vectors that the optimizer keeps. rows: of the reduced stack.
    """
    return size * (4 + 4 * slots + 8 * rows)


def release_id(label: str, summed: np.ndarray) -> str:
    """Return a digest of the bits of a sum, float64 (size,), with the sum's owner."""
    digest = hashlib.blake2b(label.encode(), digest_size=32, person=b"dpdist.release")
    digest.update(np.ascontiguousarray(summed).data)
    return digest.hexdigest()


# --- workers of a script ----------------------------------------------------------------------


# What gloo says if a peer is gone, or does not answer.
_GONE = re.compile("connection (closed|reset|refused)|broken pipe|timed out", re.I)


_SAME_SCRIPT = (
    "run the same script with the same settings, records and seed in all of them, on shared storage"
)
_SAME_CALL = (
    "agree on the flag first (torch.distributed.all_reduce), so that all of them call checkpoint() "
    "after the same step"
)


class WorkerLost(ClusterError):
    """Another process of a script is gone, so this one cannot continue."""


class ScriptReducer(Reducer):
    """Add up over the processes of a script; if one is gone, the others end with one line."""

    def _exchange(self, collective: Callable[..., Any], *words: Any, **options: Any) -> None:
        """Execute a collective. Raises WorkerLost if another worker is gone."""
        try:
            collective(*words, **options)
        except RuntimeError as error:
            if not _GONE.search(str(error)):
                raise
            others = [str(rank) for rank in range(self.world_size) if rank != self.rank]
            which = f"{'worker' if len(others) == 1 else 'one of workers'} {', '.join(others)}"
            install_error_hooks()  # before torch's, which names the rank
            raise WorkerLost(
                f"worker {self.rank}: lost {which} (killed, cut off or silent), and ends; the same "
                "command continues from the newest checkpoint"
            ) from None


class Workers:
    """Coordinate the processes that take a script's steps: only this one, or a process group.

    Guarantee: a step of several workers is the step of one. Each takes its own shard of the
    records, they add up, worker 0 puts the release on record, and only then all of them draw the
    same noise. All start with the same model, records and settings, or all raise an error.

    Args:
        reducer: exchanges texts between the workers; for sums see `reducer_on`.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._told: BaseException | None = None  # the last error that all workers know of

    @classmethod
    def of_this_process(cls) -> Workers:
        """Return the workers of the process group, or only this process.

        Raises:
            UserError: torchrun started several processes that have no process group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            started = int(os.environ.get("WORLD_SIZE", "1"))
            if dist.is_available() and dist.is_torchelastic_launched() and started > 1:
                raise UserError(
                    f"torch.distributed: must have a process group of the {started} processes that "
                    "torchrun started: call torch.distributed.init_process_group() before "
                    "PrivateTraining(...)",
                    see="how-to/own-loop.md#several-workers",
                )
            return cls(ScriptReducer(0, 1, torch.device("cpu")))
        let_go_of_the_group()
        device = "cpu" if "cpu" in _backends() else f"cuda:{torch.cuda.current_device()}"
        return cls(ScriptReducer(dist.get_rank(), dist.get_world_size(), torch.device(device)))

    @property
    def count(self) -> int:
        """Return the number of workers."""
        return self._reducer.world_size

    @property
    def rank(self) -> int:
        """Return the number of this worker, from 0 on."""
        return self._reducer.rank

    @property
    def first(self) -> bool:
        """Return whether this is worker 0, the only one that writes."""
        return self.rank == 0

    def reducer_on(self, device: torch.device) -> Reducer:
        """Return the reducer for sums on this device. Raises UserError for a wrong backend."""
        reducer = ScriptReducer(self._reducer.rank, self.count, device)
        if self.count > 1 and (found := _backends().get(device.type)) != reducer.backend:
            raise UserError(
                f"torch.distributed: must have the backend {reducer.backend} for a model on "
                f"{device.type}, got {found or 'none'}: name it in init_process_group"
            )
        return reducer

    def resources(self, section: Mapping[str, Any], reproducible: bool) -> dict[str, Any]:
        """Return a recipe's section with the actual number of workers. Raises UserError."""
        given = section.get("workers", 1)
        if given not in (1, self.count):
            raise UserError(
                f"resources.workers: must be {self.count}, the processes of this script, got "
                f"{given}: leave it out, and start the script by torchrun or Ray Train"
            )
        if reproducible and self.count > CANONICAL_SHARDS:
            raise UserError(
                f"reproducible: must be False with more than {CANONICAL_SHARDS} workers, got True "
                f"with {self.count}: use fewer, or leave it out"
            )
        return {**section, "workers": self.count}

    # --- agreement

    def agree(self, **told: Any) -> list[dict[str, Any]]:
        """Return the values of every worker, in order of rank, once all have called it.

        Raises:
            UserError, ClusterError: a worker had an error (`sharing_errors`).
        """
        found = [json.loads(text) for text in self._reducer.all_gather_text(json.dumps(told))]
        for rank, each in enumerate(found):
            if "error" in each:
                kind = UserError if each["users"] else ClusterError
                self._told = kind(f"worker {rank}: {each['error']}")
                raise self._told
        return found

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Send an error of this worker to the others, which wait for it in `agree`.

        Within the block workers must not wait for each other in any other way.
        """
        try:
            yield
        except Exception as error:
            if self.count > 1 and error is not self._told and not isinstance(error, WorkerLost):
                self._told = error
                users = isinstance(error, UserError)
                # Another error's text may hold what was computed from records.
                said = str(error) if users else f"failed with {type(error).__name__}"
                self._reducer.all_gather_text(json.dumps({"error": said, "users": users}))
            raise

    def check_same(self, parts: Mapping[str, str], **told: Any) -> list[dict[str, Any]]:
        """Check that each of `parts` is equal on all workers; return the other values of each.

        Raises:
            UserError: on all workers, the same one, if a part differs.
        """
        if self.count == 1:
            return [told]
        found = self.agree(parts=dict(parts), **told)
        for rank, each in enumerate(found):
            for name, value in found[0]["parts"].items():
                if each["parts"].get(name) != value:
                    cure = _SAME_CALL if name == "call" else _SAME_SCRIPT
                    self._told = UserError(
                        f"{name}: must be the same on all workers, got another on worker {rank} "
                        f"than on worker 0: {cure}"
                    )
                    raise self._told
        return found

    def of_first(self, value: str) -> str:
        """Return worker 0's text on all workers."""
        return str(self.agree(value=value if self.first else "")[0]["value"])

    # --- a release

    def announcing(self, announce: Callable[[], None]) -> None:
        """Let worker 0 put a step's release on record; return on all once it is durable.

        Raises:
            ReplayConflict: on all, if a different sum was announced for the step.
            ClusterError: on the others, if worker 0 could not put it on record.
        """
        if self.count == 1:
            announce()
            return
        conflict = ""
        with self.sharing_errors():
            if self.first:
                try:
                    announce()
                except ReplayConflict as error:
                    conflict = str(error)
            conflict = self.agree(conflict=conflict)[0]["conflict"]
        if conflict:
            raise ReplayConflict(conflict)


def let_go_of_the_group() -> None:
    """Drop torch's own references to the process group, so that destroying it ends its threads.

    Torch's optimizers load functions with the group as a default argument. Its threads would
    outlive `destroy_process_group`, and sometimes abort the process at its end.
    """
    from torch.distributed.nn import functional

    group = dist.group.WORLD
    for function in vars(functional).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(each is group for each in defaults):  # None, too, is the default group
            function.__defaults__ = tuple(None if each is group else each for each in defaults)


def _backends() -> dict[str, str]:
    """Return the process group's backend by kind of device."""
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config()).split(","))
    return {device: backend for device, _, backend in pairs}
