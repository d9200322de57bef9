"""Sums over the training workers, and the sharing of a step's release among them.

A missing worker is an error, never a smaller sum. Sums travel in float64, or in float32, for which
the clip makes room. The optimizers (SGD with momentum and Adam) work on one flat vector; all of it
is post-processing of noisy gradients.

Every worker makes the whole of a release, or its own part. A sharded release is the same release
to the bit: sums add up in the same order, every entry gets the noise of its place in the key's
stream, ids in the ledger are made of the same digests, and parameters are updated a leaf at a time
in both. With three workers or more and without `training.reproducible` a whole sum is added up in
an order of the network's own; only then do last bits differ. Another way to share is a class in
`UPDATE_CLASSES`.

Under `torchrun`, or inside Ray Train's `TorchTrainer`, one script runs in several processes, its
workers (`Workers`). They find one another by the process group of `torch.distributed` that the
script, or Ray, made. Worker 0 alone writes: run folder, ledger, checkpoints. A step is on its
ledger before any worker draws the noise, so no process holds a noisy gradient that is on no record.
Whatever one worker refuses, all refuse, so that none waits for it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dpdist.config.training import CANONICAL_SHARDS, TrainingRecipe
from dpdist.core.errors import ClusterError, UserError
from dpdist.gradients.sampling import worker_range
from dpdist.privacy.ledger import ReplayConflict
from dpdist.training import checkpoint

# --- number formats of sums -------------------------------------------------------------------


_FLOAT32_ROUNDING = 2.0**-23  # twice float32's unit roundoff: two sums are rounded
_LOG_FAILURE_BOUND = 70.0  # exp(-70) = 4e-31
MAX_CLIP_REDUCTION = 2.0**-7  # of the clip; what needs more stays float64


@dataclass(frozen=True)
class ReduceDtype:
    """Numbers of one kind for sums of at most `max_records` records each.

    Guarantee: where one record moves an executed sum by at most C' = C / (1 + room) in L2 norm, it
    moves what arrives by at most C.

    Proof for float32. Taking its n <= most records away one by one shows that a sum has a norm of
    at most n C'. A number s arrives as s (1 + d), |d| <= 2^-24, so a sum arrives off by at most
    2^-24 n C', whatever the number of parameters, and two that differ in one record are together
    off by at most 2^-23 most C'. Their difference is then at most C' (1 + 2^-23 most), and
    room = 2^-23 (most + 1). The one more is for numbers below 2^-126, which may arrive as zero:
    2^-125 sqrt(size) is far below 2^-23 C' for a recipe's clip norms, 1e-9 at least. A record is in
    one sum only, and those that arrived are added up in float64, as they are without rounding.

    More records than `max_records` release nothing (`check`). By Bernstein's inequality Poisson
    sampling passes that bound, in which no record has a say, with a probability below 4e-31 for
    each sum and
    step: what delta would pay for it in a million steps of a thousand sums is 10^-21.
    """

    name: str = "float64"
    max_records: float = math.inf

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.name == "float32" else torch.float64

    @property
    def clip_reduction(self) -> float:
        """Return how much the clip is lowered, relative."""
        return _FLOAT32_ROUNDING * (self.max_records + 1) if self.name == "float32" else 0.0

    def check(self, records: int) -> None:
        """Raise ValueError for a sum of more records than there is room for."""
        if records > self.max_records:
            raise ValueError(
                f"a sum of more than {self.max_records:g} records; nothing is released"
            )

    def cast(self, sums: Tensor) -> Tensor:
        """Sums (...), float64, as they travel."""
        return sums.to(self.dtype)

    @classmethod
    def for_batches(
        cls, name: str, expected: float, parts: int, cap: int | None = None
    ) -> ReduceDtype:
        """For batches of `expected` records, at most `cap`, summed in at least `parts` parts."""
        if name == "float64":
            return cls()
        mean = expected / parts + 1  # a part may have one record more than others to draw from
        most = math.ceil(
            mean + math.sqrt(2 * _LOG_FAILURE_BOUND * mean) + _LOG_FAILURE_BOUND * 2 / 3
        )
        return cls(name, float(most if cap is None else min(most, cap)))

    @property
    def unsupported_reason(self) -> str:
        """Return why sums of this size do not travel so; empty if they do."""
        if self.clip_reduction <= MAX_CLIP_REDUCTION:
            return ""
        return (
            f"{self.name} has room for sums of {MAX_CLIP_REDUCTION / _FLOAT32_ROUNDING:,.0f} "
            f"records, here a worker may have {self.max_records:,.0f}: take more workers, or "
            "float64"
        )

    def describe(self) -> str:
        """Return the description of float32 for a dry run."""
        return (
            f"{self.name}, 4 bytes a parameter; the clip is {100 * self.clip_reduction:.2g} % "
            f"lower, for sums of up to {self.max_records:,.0f} records"
        )


# --- sums over the workers --------------------------------------------------------------------


_SHORT_TEXT = 508  # bytes


class MissingRank(RuntimeError):
    """A step in which some worker did not take part; it never updates the model."""


class Reducer:
    """Sums over the workers; with one worker, nothing to do."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._buffer, self._rows = torch.zeros(0, dtype=torch.float64), torch.zeros(0)

    @property
    def backend(self) -> str:
        """Return the communication backend of workers on this kind of device."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def zero_rows(self, count: int, size: int) -> Tensor:
        """Zeros (count, size), float64, for `sum_rows`: the memory of the last ones, if as many.
        New memory costs more than all that is done with it: the kernel clears it page by page."""
        if len(self._buffer) != count * size + 2:
            self._buffer = torch.empty(count * size + 2, dtype=torch.float64, device=self.device)
        self._rows = self._buffer.zero_()[:-2].view(count, size)
        return self._rows

    def sum_rows(self, rows: Tensor, flag: bool) -> tuple[Tensor, bool]:
        """Sum of float64 rows (S, size) over workers, added up in row order; and whether any flag
        was up. Made where this worker's rows lie, if they are those of `rows`.

        Every worker also adds a one: raises MissingRank unless all are counted.
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

    def any_flag(self, flag: bool) -> bool:
        """Whether any worker's flag was up. Raises MissingRank unless all take part."""
        return self.sum_rows(torch.zeros(1, 0, dtype=torch.float64, device=self.device), flag)[1]

    def all_to_all(
        self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> Tensor:
        """Send each worker its piece of `tensor` (sizes, in order of rank): what came from each, of
        the awaited sizes, one behind the other."""
        if self.world_size == 1:
            return tensor
        found = tensor.new_empty(sum(receive_sizes))
        sizes = list(receive_sizes), list(send_sizes)
        self._exchange(dist.all_to_all_single, found, tensor.contiguous(), *sizes)
        return found

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Make `tensor` that of worker `source`, in place."""
        if self.world_size > 1:
            self._exchange(dist.broadcast, tensor, src=source)

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum `buffer` over the workers, in place."""
        if self.world_size > 1:
            self._exchange(dist.all_reduce, buffer)

    def all_equal(self, digest: Tensor) -> bool:
        """Whether all workers hold the same int64 (1,)."""
        if self.world_size == 1:
            return True
        low, high = digest.to(self.device).clone(), digest.to(self.device).clone()
        self._exchange(dist.all_reduce, low, op=dist.ReduceOp.MIN)
        self._exchange(dist.all_reduce, high, op=dist.ReduceOp.MAX)
        return bool((low == high).all())

    def broadcast_int(self, value: int) -> int:
        """Worker 0's integer, on all."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        self.broadcast(tensor, 0)
        return int(tensor.item())

    def all_gather_text(self, text: str) -> list[str]:
        """One string of each worker, in order of rank; short ones in a single exchange."""
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
        """At most `size` bytes of each worker, filled up with zeros."""
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
LEAF = 2**16  # entries: a sharded vector is cut at multiples of it, and updated by as many at once


class FlatOptimizer:
    """Updates parameters (size,) in place from a gradient (size,).

    slots: its state by name, saved with checkpoints. The learning rate of step t is
    learning_rate * schedule(t / steps).
    """

    def __init__(self, training: TrainingRecipe, steps: int, flat: Tensor) -> None:
        self.training, self.steps = training, steps
        names = ["momentum"] if training.momentum else []
        names = names if training.optimizer == "sgd" else ["mean", "square"]
        self.slots = {name: torch.zeros_like(flat) for name in names}
        if training.ema is not None:
            self.slots["ema"] = flat.clone()

    def learning_rate(self, step: int) -> float:
        """The rate of step 0 <= step < steps."""
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
        """One step; exact: no fused kernels, the same operations on every machine, and leaf by
        leaf, so that a worker that updates some of the leaves gets the bits of one with all.
        gradient: of any precision, rounded to that of `flat`."""
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
        """The parameters to publish: the average when there is one."""
        return self.slots.get("ema", flat)


# --- whole and sharded releases ---------------------------------------------------------------


_FLOAT64 = ReduceDtype()
_LEAVES_PER_EXCHANGE = 32  # leaves that travel together, of all parts and rows


@dataclass(frozen=True)
class Shards:
    """Shards of the records, and the worker that owns each.

    num_rows: length of the reduced stack; row r is worker 0's, then worker 1's, ... largest:
    records planned for any shard. local_shards: (row, first record, end) of this worker's shards.
    held: rows of each worker; where every worker has the same one row, they are stacked first.
    """

    num_rows: int
    largest_shard: int
    local_shards: list[tuple[int, int, int]]
    rows_per_worker: Sequence[int] = (1,)


class ReplicatedUpdate:
    """Every worker adds up, noises and updates everything."""

    def __init__(self, reduce_dtype: ReduceDtype = _FLOAT64) -> None:
        self.reduce_dtype = reduce_dtype

    def local_slice(self, reducer: Reducer, size: int) -> slice:
        """The entries of a vector of `size` that this worker releases and updates."""
        return slice(0, size)

    def sum_rows(
        self, reducer: Reducer, rows: Tensor, shards: Shards, flag: bool
    ) -> tuple[Tensor, bool]:
        """Its entries of all workers' rows (S, size), added up in row order, maybe in the rows' own
        memory; and whether any flag was up. The rows are spent. Raises MissingRank unless all
        workers are counted."""
        return reducer.sum_rows(rows, flag)

    def all_leaf_digests(
        self, reducer: Reducer, label: str, summed: np.ndarray, size: int
    ) -> list[bytes]:
        """Return the digests of all leaves of a sum of `size` entries, for worker 0.

        Each worker gives its own.
        """
        return leaf_digests(label, summed) if reducer.rank == 0 else []

    def broadcast_updates(self, reducer: Reducer, flat: Tensor) -> None:
        """Bring what every worker updated of a vector to all."""

    def memory_bytes(self, size: int, slots: int, rows: int, workers: int) -> int:
        """Bytes on each worker, all through the training, that grow with the trained parameters.
        slots: vectors that the optimizer keeps. rows: of the reduced stack, where the release is
        made."""
        return size * (4 + 4 * slots + 8 * rows)

    def fingerprint_entries(self, reducer: Reducer, reproducible: bool) -> dict[str, str]:
        """Return its part of all that can change a sum."""
        return {}

    def write_optimizer_parts(
        self, reducer: Reducer, folder: Path, step: int, slots: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], int]:
        """The optimizer's state that worker 0 keeps in a checkpoint, and in how many files beside
        its own the rest is by now."""
        return slots, 0


class ShardedUpdate(ReplicatedUpdate):
    """Every worker its own part, cut at whole leaves, and of momentum, Adam's state and averages
    that part alone."""

    def local_slice(self, reducer: Reducer, size: int) -> slice:
        return _parts(size, reducer.world_size)[reducer.rank]

    def sum_rows(
        self, reducer: Reducer, rows: Tensor, shards: Shards, flag: bool
    ) -> tuple[Tensor, bool]:
        flagged = reducer.any_flag(flag)
        parts = _parts(rows.shape[1], reducer.world_size)
        total = rows[0, parts[reducer.rank]]
        # A piece at a time: neither what is sent nor what arrives needs memory of its own length.
        step = LEAF * max(1, _LEAVES_PER_EXCHANGE // max(len(parts), shards.num_rows))
        for low in range(0, max(part.stop - part.start for part in parts), step):
            pieces = [
                slice(min(p.start + low, p.stop), min(p.start + low + step, p.stop)) for p in parts
            ]
            found = self._exchange_and_sum(reducer, rows, pieces, shards)
            total[low : low + step] = found  # over rows of its own, which were just sent
        return total, flagged

    def _exchange_and_sum(
        self, reducer: Reducer, rows: Tensor, pieces: list[slice], shards: Shards
    ) -> Tensor:
        """This worker's piece of the sum, given all workers' rows."""
        world, held, own = reducer.world_size, shards.rows_per_worker, pieces[reducer.rank]
        first = shards.local_shards[0][0] if shards.local_shards else 0
        local_rows = rows[first : first + len(shards.local_shards)]
        sent = torch.cat(
            [self.reduce_dtype.cast(local_rows[:, piece]).reshape(-1) for piece in pieces]
        )
        sizes = [len(local_rows) * (piece.stop - piece.start) for piece in pieces]
        length = own.stop - own.start
        found = reducer.all_to_all(sent, sizes, [count * length for count in held])
        stack = found.view(sum(held), length)
        total = stack[0].to(rows.dtype)
        for row in stack[1:]:
            total += row
        # A sum over several workers has no negative zero: they add zeros to each other's rows.
        return total.add_(0.0) if world > 1 and shards.num_rows > 1 else total

    def all_leaf_digests(
        self, reducer: Reducer, label: str, summed: np.ndarray, size: int
    ) -> list[bytes]:
        raw = torch.zeros(-(-size // LEAF), 32, dtype=torch.uint8)
        first = self.local_slice(reducer, size).start // LEAF
        for place, digest in enumerate(leaf_digests(label, summed), first):
            raw[place] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        raw = raw.to(reducer.device)
        reducer.all_reduce(raw)  # others hold zeros in its place
        return [bytes(row) for row in raw.cpu().tolist()]

    def broadcast_updates(self, reducer: Reducer, flat: Tensor) -> None:
        for rank, part in enumerate(_parts(len(flat), reducer.world_size)):
            if part.start < part.stop:
                reducer.broadcast(flat[part], rank)

    def memory_bytes(self, size: int, slots: int, rows: int, workers: int) -> int:
        return size * (4 + 8 * rows) + 4 * slots * -(-size // workers)

    def fingerprint_entries(self, reducer: Reducer, reproducible: bool) -> dict[str, str]:
        ordered = reproducible or reducer.world_size < 3
        wire = (
            {}
            if self.reduce_dtype == _FLOAT64
            else {"wire": f"{self.reduce_dtype.name}, {self.reduce_dtype.max_records:g}"}
        )
        return wire | ({} if ordered else {"sums": "in order of rank"})

    def write_optimizer_parts(
        self, reducer: Reducer, folder: Path, step: int, slots: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], int]:
        if not slots:
            return {}, 0
        checkpoint.save_part(folder, step, reducer.rank, reducer.world_size, slots)
        # nobody's part may be missing once worker 0 says it is done
        reducer.all_gather_text("written")
        return {}, reducer.world_size


UPDATE_CLASSES: dict[str, type[ReplicatedUpdate]] = {
    "whole": ReplicatedUpdate,
    "sharded": ShardedUpdate,
}


def _parts(size: int, count: int) -> list[slice]:
    """Contiguous parts of a vector, one a worker; of a short one, some are empty."""
    cuts = [worker_range(-(-size // LEAF), rank, count) for rank in range(count)]
    return [slice(min(size, LEAF * low), min(size, LEAF * high)) for low, high in cuts]


def leaf_digests(label: str, summed: np.ndarray) -> list[bytes]:
    """Return the digests of the bits of float64 (size,), leaf by leaf, with the sum's owner."""
    found = []
    for at in range(0, len(summed), LEAF):
        digest = hashlib.blake2b(label.encode(), digest_size=32, person=b"dpdist.release")
        digest.update(np.ascontiguousarray(summed[at : at + LEAF]).data)
        found.append(digest.digest())
    return found


def release_id(label: str, leaves: Sequence[bytes]) -> str:
    """Return the id of a whole sum, from its leaves' digests; of a single leaf, its own."""
    if len(leaves) == 1:
        return leaves[0].hex()
    digest = hashlib.blake2b(label.encode(), digest_size=32, person=b"dpdist.leaves")
    digest.update(b"".join(leaves))
    return digest.hexdigest()


# --- workers of a script ----------------------------------------------------------------------


_HINTS = {
    "model": "seed torch before it is built, or load the same weights in all of them",
    "data": "give all of them the same records in the same order",
    "held-out records": "give all of them the same records in the same order",
    "checkpoint": "is the storage shared?",
    "call": (
        "agree on the flag first (torch.distributed.all_reduce), so that all of them call "
        "checkpoint() after the same step"
    ),
    "parameters": "let the lines between two steps do the same in all of them",
}
_HINT = "run the same script with the same settings in all of them"
_FAILED, _ON_RECORD, _CONFLICT = range(3)  # what became of a step's announcement
# What gloo says where a peer is gone, or answers no more.
_GONE = re.compile("connection (closed|reset|refused)|broken pipe|timed out", re.I)


class WorkerLost(ClusterError):
    """Another process of a script is gone, so this one cannot go on."""


class ScriptReducer(Reducer):
    """Sums over the processes of a script; where one is gone, the others end with one line."""

    def _exchange(self, collective: Callable[..., Any], *words: Any, **options: Any) -> None:
        """Execute a collective. Raises WorkerLost where another worker is gone."""
        try:
            collective(*words, **options)
        except RuntimeError as error:
            if not _GONE.search(str(error)):
                raise
            others = [str(rank) for rank in range(self.world_size) if rank != self.rank]
            which = f"{'worker' if len(others) == 1 else 'one of workers'} {', '.join(others)}"
            _show_in_one_line(WorkerLost)
            raise WorkerLost(
                f"worker {self.rank}: lost {which} (killed, cut off or silent), and ends. Nothing "
                "that was released is lost: run the same command again, and it continues from the "
                "newest checkpoint"
            ) from None


def _show_in_one_line(kind: type[Exception]) -> None:
    """Let Python print an error of this kind, where a script does not catch it, without a trace."""
    before = sys.excepthook

    def show(found: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(found, kind):
            print(error, file=sys.stderr, flush=True)
        else:
            before(found, error, trace)

    sys.excepthook = show


class Workers:
    """The processes that take a script's steps together: this one alone, or a process group.

    Guarantee: a step of several workers is the step of one. Each takes its own shard of the
    records, they add up, worker 0 puts the release on record, and only then all of them draw the
    same noise. All begin with the same model, records and settings, or none begins.

    Args:
        reducer: carries what the workers tell each other; sums travel by `reducer_on`.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._told: BaseException | None = None  # the last error that all workers know of

    @classmethod
    def of_this_process(cls) -> Workers:
        """Return the workers of the process group, or this process alone.

        Raises:
            UserError: torchrun started several processes that made no process group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            started = int(os.environ.get("WORLD_SIZE", "1"))
            if dist.is_available() and dist.is_torchelastic_launched() and started > 1:
                raise UserError(
                    f"torch.distributed: must have a process group, torchrun started {started} "
                    "processes without one: call torch.distributed.init_process_group() before "
                    "PrivateTraining is made",
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
        """Return whether this is worker 0, which alone writes."""
        return self.rank == 0

    def reducer_on(self, device: torch.device) -> Reducer:
        """Return what adds up sums that lie on this device. Raises UserError."""
        reducer = ScriptReducer(self._reducer.rank, self.count, device)
        if self.count > 1 and (found := _backends().get(device.type)) != reducer.backend:
            raise UserError(
                f"torch.distributed: must have the backend {reducer.backend} for a model on "
                f"{device.type}, got {found or 'none'}: name it in init_process_group"
            )
        return reducer

    def resources(self, section: Mapping[str, Any], reproducible: bool) -> dict[str, Any]:
        """Return a recipe's section with the number of workers that there are. Raises UserError."""
        given = section.get("workers", 1)
        if given not in (1, self.count):
            raise UserError(
                f"resources.workers: must be {self.count}, the processes of this script, got "
                f"{given}: leave it out, and start the script by torchrun or Ray Train"
            )
        if reproducible and self.count > CANONICAL_SHARDS:
            raise UserError(
                f"reproducible: must be False with more than {CANONICAL_SHARDS} workers, got True "
                f"with {self.count}: take fewer, or leave it out"
            )
        return {**section, "workers": self.count}

    # --- agreement

    def agree(self, **told: Any) -> list[dict[str, Any]]:
        """Return what every worker tells, in order of rank, once all have come here.

        Raises:
            UserError, ClusterError: a worker came here with an error (`sharing_errors`).
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
        """Bring an error of this worker to the others, which wait for it in `agree`.

        In the block nobody waits for the others in any other way.
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
        """Check that each of `parts` is equal on all workers; return what each tells besides.

        Raises:
            UserError: on all workers, the same one, where a part differs.
        """
        if self.count == 1:
            return [told]
        found = self.agree(parts=dict(parts), **told)
        for rank, each in enumerate(found):
            for name, value in found[0]["parts"].items():
                if each["parts"].get(name) != value:
                    self._told = UserError(
                        f"{name}: must be the same on all workers, got another on worker {rank} "
                        f"than on worker 0: {_HINTS.get(name, _HINT)}"
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
            ReplayConflict: on all, where another sum was announced for the step.
            ClusterError: on the others, where worker 0 could not put it on record.
        """
        if self.count == 1:
            announce()
            return
        verdict = _FAILED
        if not self.first:
            verdict = self._reducer.broadcast_int(verdict)
            if verdict == _CONFLICT:
                raise ReplayConflict("worker 0 announced the step with a different sum before")
            if verdict != _ON_RECORD:
                raise ClusterError("worker 0 could not put the step on record; nothing is released")
            return
        try:
            announce()
            verdict = _ON_RECORD
        except ReplayConflict:
            verdict = _CONFLICT
            raise
        finally:
            self._reducer.broadcast_int(verdict)


P = ParamSpec("P")


def refused_by_all(
    initialise: Callable[Concatenate[Any, P], None],
) -> Callable[Concatenate[Any, P], None]:
    """Find the workers before an object of theirs is made; what one refuses, all refuse."""

    @wraps(initialise)
    def made(self: Any, /, *args: P.args, **options: P.kwargs) -> None:
        self._workers = Workers.of_this_process()
        with self._workers.sharing_errors():
            initialise(self, *args, **options)

    return made


def let_go_of_the_group() -> None:
    """Let the process group end where it is destroyed.

    Torch's optimizers load functions whose default argument is then the group that there is. Its
    threads outlive `destroy_process_group`, and now and then abort the process that ends.
    """
    from torch.distributed.nn import functional

    group = dist.group.WORLD
    for function in vars(functional).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(each is group for each in defaults):  # None, too, is the default group
            function.__defaults__ = tuple(None if each is group else each for each in defaults)


def _backends() -> dict[str, str]:
    """Return the process group's backend of each kind of device."""
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config()).split(","))
    return {device: backend for device, _, backend in pairs}
