"""The protocol of data: the methods by which every training reads its records.

`dpdist.data.adapters.as_records` converts arrays, tables, data sets and loaders.

A record's augmentation, unit and position never depend on another record, and positions stay the
same for a whole run: a step samples positions by the run key. So a sampler or a shuffled loader,
which orders, weights or batches records itself, is replaced, and `replaced` names it.

Error messages name fields, types, shapes and positions, never a record's value.
"""

from __future__ import annotations

import hashlib
import math
import random
import secrets
import struct
import sysconfig
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist.core.errors import UserError
from dpdist.core.script_errors import warn
from dpdist.data.record_hashes import as_array, digests_of_rows, place_of_name

if TYPE_CHECKING:
    from torch import Tensor

    # One tensor, or several that belong to the same records: each has them on dimension 0.
    Batch = Tensor | tuple[Tensor, ...] | dict[str, Tensor]

_CHUNK = 1024  # records read at once
UNITS = 2**20  # a score's value is a multiple of 1 / UNITS, so that sums are exact
INPUTS, TARGETS = "inputs", "targets"  # names of fields without a name of their own
_KEY_BYTES = 32


class Records(ABC):
    """Records to train on, each at a position from 0 on that it keeps for the whole run.

    Guarantee: a private training samples these positions itself, and its guarantee applies to the
    records as this class returns them. So a record's tensors must not depend on a different record,
    and the same position must return the same record. dpdist cannot check that: every card lists
    the assumption that each row comes from only one record, and what `assumed` adds.

    A subclass defines `__len__`, `batch` and `targets`, and may define the other methods. A unit is
    a person or user that records belong to (`unit_id`); with `Privacy(unit="user", ...)` units
    are sampled, clipped and protected.

    Attributes:
        name: str, name of the records in error messages and on cards.
        has_targets: bool, whether the records have targets; a loss that you write may not need
            them.
        assumed: assumptions of the guarantee about these records that dpdist cannot check,
            sentences (str).
        replaced: parts of the data that are not used, in words, such as a loader's sampler.
        unit_name: name of what `unit_id` returns, such as "author", for the card; "" if unknown.
        tokenization: dict about the tokens of documents: length, chat, and the tokenizer's files by
            name; None for other records.

    Example:
        >>> import torch, dpdist
        >>> class Parity(dpdist.Records):
        ...     name = "parity"
        ...     def __len__(self):
        ...         return 100
        ...     def batch(self, indices):
        ...         return torch.arange(100.0)[indices, None]
        ...     def targets(self, indices):
        ...         return torch.arange(100)[indices] % 2
        >>> records = Parity()
        >>> records.batch([3, 5]).shape, records.targets([3, 4]).tolist(), records.unit_id(3)
        (torch.Size([2, 1]), [1, 0], 3)
    """

    name: str
    has_targets: bool = True
    assumed: Sequence[str] = ()
    replaced: Sequence[str] = ()
    unit_name: str = ""
    tokenization: Mapping[str, Any] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of records."""

    @abstractmethod
    def batch(self, indices: np.ndarray | slice) -> Batch:
        """Return the inputs of the records at these positions.

        Args:
            indices: (B,) positions, B >= 0.

        Returns:
            A tensor (B, ...), or a tuple or dict of such tensors, of the same shapes after B for
            all records.
        """

    @abstractmethod
    def targets(self, indices: np.ndarray | slice) -> Tensor:
        """Return the targets of the records at these positions.

        Args:
            indices: (B,) positions, B >= 0.

        Returns:
            A tensor (B,) of classes or numbers, or (B, ...), of the same shape after B for all
            records.
        """

    def unit_id(self, index: int) -> Hashable:
        """Return the unit that a record belongs to, such as a patient's number, a hashable value.

        Args:
            index: position of the record.

        Returns:
            Any hashable value, equal for all records of a unit. By default it is `index`: each
            record is its own unit.
        """
        return index

    def for_step(self, key: bytes) -> Records:
        """Return the records with the random transforms of one step.

        Args:
            key: 32 secret bytes of the run, the attempt and the step. Random transforms are seeded
                by it and by the record's position, so that a replayed step sees the same.

        Returns:
            `Records` of the same length, whose `batch` and `targets` return one draw of the
            transforms. The default, for records that are the same in all steps, returns the object
            itself.
        """
        return self

    def keyed_fingerprint(self, key: bytes) -> str:
        """Return a fingerprint of all records, in order, before random transforms.

        It is a MAC, not a plain hash: without the key, an attacker cannot test a guess of the
        records. It is kept in private/ nevertheless.

        Args:
            key: 16 to 64 secret bytes, used for nothing else.

        Returns:
            A str of 32 hex digits.
        """
        return fingerprint_of(
            key, self, ((self.batch(rows), self.targets(rows)) for rows in chunks_of(self))
        )

    def _checked_targets(self) -> Iterator[Tensor]:
        """Yield tensors of targets whose least and largest value are those of all records."""
        yield from map(self.targets, chunks_of(self))

    def input_macs(self, key: bytes) -> Iterator[tuple[bytes, ...]]:
        """Yield keyed hashes (MACs) of each record's input, by which two data sets are compared.

        Numbers of any type, layout and container are compared by value.

        Args:
            key: 16 to 64 secret bytes, used for nothing else.

        Yields:
            For each record, in order, a tuple of at least one MAC (bytes). Two records count as the
            same if their tuples share one.
        """
        for rows in chunks_of(self):
            named = fields_of(self.batch(rows))
            columns = [as_array(named[name]) for name in sorted(named, key=place_of_name)]
            yield from map(tuple, digests_of_rows(key, list(columns), len(rows)))

    def examples(self, count: int) -> tuple[Batch, Tensor]:
        """Return invented examples with the shapes, types and declared ranges of these records.

        They contain no record's value, so a model may be checked on them in public.

        Args:
            count: number of examples, B.

        Returns:
            A pair (inputs, targets): inputs (B, ...) as `batch` returns them, and a tensor of
            targets as `targets` returns it. Each call returns the same ones.
        """
        few = np.arange(min(1, len(self)))
        return invented_like(self.batch(few), self.targets(few), count)


def chunks_of(records: Records) -> Iterator[np.ndarray]:
    """Yield all positions in order, at most 1,024 at a time."""
    for start in range(0, len(records), _CHUNK):
        yield np.arange(start, min(start + _CHUNK, len(records)))


def warn_if_standardized(inputs: np.ndarray, name: str) -> None:
    """Warn of columns that look scaled by the mean and standard deviation of these records.

    One record moves such a mean, and so every row, which epsilon does not cover.

    inputs: (N, columns) of numbers that are not scaled by a public range.
    """
    if inputs.ndim == 2 and inputs.dtype.kind == "f":
        mean, spread = inputs.mean(0, dtype=np.float64), inputs.std(0, dtype=np.float64)
        warn_if_moments_of_standardized(len(inputs), mean, spread, name)


def warn_if_moments_of_standardized(
    count: int, mean: np.ndarray, spread: np.ndarray, name: str
) -> None:
    """Warn as `warn_if_standardized`, by the means and standard deviations of `count` rows."""
    if count < _FEWEST_ROWS:
        return
    scaled = (np.abs(mean) < _NO_MEAN) & (np.abs(spread - 1) < _UNIT_SPREAD)
    if scaled.sum() * 2 >= max(1, np.count_nonzero(spread)):
        warn(
            f"{name}: columns have mean 0 and standard deviation 1, as if scaled by these private "
            "records themselves (StandardScaler), which the guarantee does not cover; scale them "
            "by public constants, such as columns.preprocessing of a recipe"
        )


_FEWEST_ROWS, _NO_MEAN, _UNIT_SPREAD = 20, 1e-4, 0.03


# --- checks of targets ------------------------------------------------------------------------


def check_targets(records: Records, loss: str, outputs: int, ignored: int | None = None) -> None:
    """Raise UserError for targets that a named loss cannot use.

    Required are targets, and for cross-entropy integers below `outputs`: torch's own error would
    quote the value. ignored: the class whose records a criterion gives the loss 0, if any.
    """
    if not records.has_targets:
        raise UserError(
            f"{records.name}: must have targets for the loss {loss}, got only inputs; give (X, y), "
            "as_records(..., target=FIELD), or a loss function of your own"
        )
    if loss == "cross-entropy":
        if records.examples(1)[1].is_floating_point():
            raise UserError(
                f"{records.name}: targets must be integers for the loss cross-entropy, got floats; "
                "number the classes from 0 (y.long(), or y.argmax(1) of one-hot rows)"
            )
        check_classes(records, outputs, ignored)


def check_labels(target: Tensor, classes: int | None, name: str) -> None:
    """Raise UserError for integer targets outside 0..classes-1.

    If a record has many targets, negative ones mark positions without a target.
    """
    if classes is None or target.is_floating_point() or not target.numel():
        return
    if int(target.max()) >= classes or (target.dim() == 1 and int(target.min()) < 0):
        raise UserError(
            f"{name}: targets must be 0 to {classes - 1} ({classes} classes), got others; number "
            "the classes from 0, or give their number"
        ) from None


def check_classes(records: Records, classes: int, ignored: int | None = None) -> None:
    """Raise UserError for a target outside 0..classes-1, which torch's own error would quote.

    ignored: a target that is allowed nevertheless.
    """
    try:
        for targets in records._checked_targets():
            check_labels(targets, classes, records.name)
    except UserError:
        if ignored is None:
            raise
        for targets in map(records.targets, chunks_of(records)):  # extremes may hide others
            check_labels(targets[targets != ignored], classes, records.name)


def have_one_class_each(records: Records) -> bool:
    """Return whether the target of each record is one class, an integer (B,)."""
    targets = records.examples(2)[1]
    return records.has_targets and not targets.is_floating_point() and targets.dim() == 1


def check_one_class_each(records: Records, classes: int | None = None) -> None:
    """Raise UserError unless each record has one class, by which it can be sampled.

    classes: bound of all targets; None does not check them.
    """
    if not have_one_class_each(records):
        raise UserError(
            "class_sampling: must be left out unless the target of each record is one class, (B,)"
        )
    if classes is not None:
        check_classes(records, classes)


# --- records of users ------------------------------------------------------------------------


class Users:
    """Map users to their records, and sample the records that count in a step.

    Guarantee: the records sampled of a user depend only on the key, the user's position and its own
    records, so that adding or removing a user does not change those of others.

    Args:
        codes: (N,) int64, the user of each record; users are numbered 0, 1, ... in the order in
            which they first appear.
        max_records: most records of a user that count in one step.

    Example:
        >>> import numpy as np
        >>> users = Users(np.array([0, 1, 1, 0, 0]), max_records=2)
        >>> len(users)
        2
        >>> positions, present = users.draw(np.array([1]), key=bytes(32))
        >>> positions.tolist(), present.tolist()
        ([[1, 2]], [[True, True]])
    """

    def __init__(self, codes: np.ndarray, max_records: int) -> None:
        self.codes, self.max_records = codes, max_records
        self._order = np.argsort(codes, kind="stable")
        self._starts = np.searchsorted(codes[self._order], np.arange(codes.max(initial=-1) + 2))

    @classmethod
    def from_values(cls, values: Sequence[Hashable] | np.ndarray, max_records: int) -> Users:
        """Return the users of records (N,) whose values are equal."""
        known: dict[Hashable, int] = {}
        codes = [known.setdefault(value, len(known)) for value in values]
        return cls(np.array(codes, dtype=np.int64), max_records)

    def __len__(self) -> int:
        """Return the number of users."""
        return len(self._starts) - 1

    def records_of(self, user: int) -> np.ndarray:
        """Return the positions of all records of one user."""
        return self._order[self._starts[user] : self._starts[user + 1]]

    def sum_of_means(self, values: np.ndarray) -> float:
        """Return the sum over users of the mean of their records' values (N,), each in [0, 1].

        Guarantee: adding or removing a user changes it by at most 1, exactly, however many records
        it has.
        """
        means = [mean_units(values[self.records_of(user)]) for user in range(len(self))]
        return sum(means) / UNITS

    def draw(self, indices: np.ndarray, key: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Return the records of some users that count in the step of a key.

        If a user has more than `max_records`, a uniformly random subset of that size counts.

        Args:
            indices: (B,) users.
            key: 32 secret bytes of the step.

        Returns:
            Positions (B, max_records) of records, and a mask of those that count, bool
            (B, max_records); the others repeat the user's first record that counts.
        """
        positions = np.empty((len(indices), self.max_records), dtype=np.int64)
        present = np.zeros(positions.shape, dtype=bool)
        for row, user in enumerate(np.asarray(indices).tolist()):
            own = self.records_of(user)
            if len(own) > self.max_records:
                label = struct.pack("<q", user)
                seed = hashlib.blake2b(label, key=key, digest_size=16, person=b"dpdist.group")
                words = np.random.Philox(key=int.from_bytes(seed.digest(), "little"))
                smallest = np.argsort(words.random_raw(len(own)), kind="stable")
                own = own[np.sort(smallest[: self.max_records])]
            positions[row], present[row, : len(own)] = own[0], True
            positions[row, : len(own)] = own
        return positions, present


def mean_units(values: Sequence[float]) -> int:
    """Return the mean of one unit's values, each cut to [0, 1], in multiples of 1 / `UNITS`.

    A unit is a record with its one value, or a user with the values of all its records: either adds
    0 to `UNITS` to a sum.
    """
    units = [math.floor(bounded(value) * UNITS) for value in values]
    return sum(units) // len(units)


def bounded(value: float) -> float:
    """Return a value cut to [0, 1]; 0 for NaN."""
    return 0.0 if math.isnan(value) else min(max(value, 0.0), 1.0)


class UserRecords(Records):
    """Records by user: position i is the i-th user, and a batch has several records of each.

    Guarantee: its length, and so every sampling rate and divisor computed from it, counts users.
    What `batch` returns of a user depends only on its own records and the step's key.

    Args:
        records: the single records.
        users: the users that they belong to.
        step_key: key of the step, which `for_step` sets.

    Example:
        >>> import torch, dpdist
        >>> records = dpdist.as_records((torch.randn(5, 3), torch.arange(5)), unit=list("abbaa"))
        >>> grouped = UserRecords(records, Users.from_values("abbaa", max_records=2))
        >>> len(grouped), grouped.batch(np.array([0, 1])).shape
        (2, torch.Size([2, 2, 3]))
    """

    def __init__(self, records: Records, users: Users, step_key: bytes = bytes(32)) -> None:
        self.records, self.users, self._step_key = records, users, step_key
        self._drawn: tuple[np.ndarray, tuple[np.ndarray, np.ndarray]] | None = None  # the last ones
        self.name, self.has_targets = records.name, records.has_targets
        self.assumed, self.replaced = records.assumed, records.replaced
        self.unit_name = records.unit_name

    def __len__(self) -> int:
        return len(self.users)

    def members(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return positions and mask of the records that count in this step, as `Users.draw`.

        Those of the last call are kept: a step reads inputs, targets and mask of the same users.
        """
        last = self._drawn  # read once: a second thread may read other users
        if last is None or not np.array_equal(last[0], indices):
            last = self._drawn = np.array(indices), self.users.draw(indices, self._step_key)
        positions, present = last[1]
        return positions.copy(), present.copy()  # a caller's writes must not reach the next one

    def batch(self, indices: np.ndarray | slice) -> Batch:
        """Return the inputs of the users' records in this step: (B, max_records, ...) each."""
        return _by_user(self.records.batch, self.members(np.arange(len(self))[indices])[0])

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        """Return the targets of the users' records in this step: (B, max_records, ...)."""
        found = self.members(np.arange(len(self))[indices])[0]
        wanted: Tensor = _by_user(self.records.targets, found)
        return wanted

    def for_step(self, key: bytes) -> UserRecords:
        """Return the users with the records that the key samples."""
        return UserRecords(self.records.for_step(key), self.users, key)

    def keyed_fingerprint(self, key: bytes) -> str:
        """Return the keyed fingerprint of all records and of the users that they belong to."""
        mac = _mac(key)
        mac.update(self.records.keyed_fingerprint(key).encode())
        mac.update(np.ascontiguousarray(self.users.codes).tobytes())
        return mac.hexdigest()

    def examples(self, count: int) -> tuple[Batch, Tensor]:
        """Return invented examples of single records."""
        return self.records.examples(count)


def _by_user(read: Callable[[np.ndarray], Any], positions: np.ndarray) -> Any:
    """Return what `read` returns at positions (B, K): tensors (B * K, ...) become (B, K, ...)."""
    found = read(positions.reshape(-1))
    return map_fields(lambda each: each.reshape(*positions.shape, *each.shape[1:]), found)


def map_fields(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return a batch of the same form with the function applied to each tensor."""
    if isinstance(batch, dict):
        return {name: function(each) for name, each in batch.items()}
    return tuple(map(function, batch)) if isinstance(batch, tuple) else function(batch)


# --- records in common ------------------------------------------------------------------------


def single_records(records: Records) -> Records:
    """Return the single records of `UserRecords`, and other records as they are."""
    return records.records if isinstance(records, UserRecords) else records


def count_common(some: Any, others: Any) -> int:
    """Return how many of some records have an input that is among those of others.

    Inputs are compared before random transforms, whatever their types, layouts and containers
    (`dpdist.data.record_hashes`), and whatever their targets.

    Guarantee: the compared digests use a key that is not kept.

    Args:
        some: `Records`, or a data set or file whose records' `hashes` are stored.
        others: the same.
    """
    stored = [getattr(each, "hashes", None) for each in (some, others)]
    if stored[0] is not None and stored[1] is not None:
        return int(np.isin(stored[0], stored[1]).sum())
    key = secrets.token_bytes(_KEY_BYTES)
    known = {mac for macs in single_records(others).input_macs(key) for mac in macs}
    return sum(not known.isdisjoint(macs) for macs in single_records(some).input_macs(key))


# --- fingerprints -----------------------------------------------------------------------------


def _mac(key: bytes) -> hashlib.blake2b:
    if len(key) < 16:
        raise ValueError(f"a fingerprint's key has at least 16 bytes, got {len(key)}")
    return hashlib.blake2b(key=key, digest_size=16, person=b"dpdist.records")


def fingerprint_of(key: bytes, records: Records, items: Iterable[Any]) -> str:
    """Return the keyed fingerprint of items that represent records, and of the records' units."""
    mac = _mac(key)
    for item in chain(items, map(records.unit_id, range(len(records)))):
        for part in canonical(item):
            mac.update(part)
    mac.update(struct.pack("<q", len(records)))
    return mac.hexdigest()


def seed_of(key: bytes, index: int) -> bytes:
    """Return 32 bytes that seed the random transforms of one record in the step of a key."""
    label = struct.pack("<q", index)
    return hashlib.blake2b(label, key=key, digest_size=32, person=b"dpdist.item").digest()


def canonical(value: Any) -> Iterator[bytes]:
    """Yield a value as bytes that differ for every value of a different type, shape or order.

    Raises:
        TypeError: it has parts other than numbers, arrays, tensors, images, text, bytes and lists,
            tuples and dicts of them.
    """
    if hasattr(value, "detach"):  # a tensor
        import torch

        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:  # numpy has none
            yield _tagged(b"bfloat16", b"")
            value = value.view(torch.int16)
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        if array.dtype.hasobject:
            raise TypeError("an array of objects")
        yield _tagged(b"array", f"{array.dtype.str}{np.shape(value)}".encode())
        yield array.tobytes()
    elif isinstance(value, dict):
        yield _tagged(b"dict", str(len(value)).encode())
        for key, inner in value.items():
            yield from canonical(key)
            yield from canonical(inner)
    elif isinstance(value, list | tuple):
        yield _tagged(b"list", str(len(value)).encode())
        for inner in value:
            yield from canonical(inner)
    elif isinstance(value, bytes | bytearray):
        yield _tagged(b"bytes", bytes(value))
    elif value is None or isinstance(value, str | bool | int | float):
        yield _tagged(type(value).__name__.encode(), repr(value).encode())
    elif callable(getattr(value, "tobytes", None)) and hasattr(value, "mode"):  # a picture
        yield _tagged(b"picture", f"{value.mode}{value.size}".encode())
        yield _tagged(b"pixels", value.tobytes())
    else:
        raise TypeError(f"a {type(value).__name__}")


def _tagged(kind: bytes, raw: bytes) -> bytes:
    return kind + struct.pack("<q", len(raw)) + raw


# --- seeds ------------------------------------------------------------------------------------


_MOST_HELD, _MOST_LOOKED_AT = 1000, 20_000  # of one container, and in all
_CONTAINERS: dict[type, Callable[[Any], Iterator[Any]]] = {
    dict: lambda held: iter(dict.values(held)),
    **{kind: kind.__iter__ for kind in (list, tuple, set, frozenset, deque)},
}
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@contextmanager
def kept_generators(own: Sequence[Any] = ()) -> Iterator[None]:
    """Restore the states of torch's (CPU), numpy's and random's generators, and of others."""
    import torch

    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    others = [(each, _state_of(each)) for each in own]
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        for each, state in others:
            _set_state(each, state)


def seed_generators(seed: bytes, own: Iterable[Any] = ()) -> None:
    """Seed the generators of torch (CPU), numpy and random, and others, with 32 bytes.

    A generator that continued from record to record would make a record's augmentation depend on
    the number of records before it. Random numbers of the operating system or a clock depend on no
    record but cannot be repeated: a replayed step then has a different sum, which the ledger never
    gives the announced noise.

    Args:
        seed: 32 bytes.
        own: the generators that `find_generators` returned; each gets a separate seed.
    """
    import torch

    torch.default_generator.manual_seed(int.from_bytes(seed[:8], "little") >> 1)
    np.random.seed(np.frombuffer(seed, dtype="<u4"))
    random.seed(seed)
    for number, generator in enumerate(own):
        each = seed_of(seed, number)
        words = np.frombuffer(each, dtype="<u4")
        if isinstance(generator, random.Random):
            generator.seed(each)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(int.from_bytes(each[:8], "little") >> 1)
        elif isinstance(generator, np.random.RandomState):
            kind = getattr(np.random, generator.get_state(legacy=False)["bit_generator"])
            _set_state(generator, _state_of(np.random.RandomState(kind(words))))
        else:
            bits = getattr(generator, "bit_generator", generator)
            bits.state = type(bits)(words).state


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, np.random.Generator | np.random.BitGenerator):
        bits: Any = getattr(generator, "bit_generator", generator)
        return bits.state
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        if state is not None:
            generator.setstate(state)
    elif isinstance(generator, np.random.Generator | np.random.BitGenerator):
        bits: Any = getattr(generator, "bit_generator", generator)
        bits.state = state
    else:
        generator.set_state(state)


def find_generators(*roots: Any) -> list[Any]:
    """Return the random generators reachable from these objects, in a reproducible order.

    Searched are attributes, items of containers, closures, and the globals that functions of a
    user's code name. A generator inside a library is not found. No code is run: attributes that are
    computed on access are not read.
    """
    import torch

    kinds = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)
    opaque = (str, bytes, int, float, complex, type(None), np.ndarray, torch.Tensor, ModuleType)
    found, seen, waiting = [], dict[int, Any](), deque(roots)  # kept alive: an id stays unique
    while waiting and len(seen) < _MOST_LOOKED_AT:
        each = waiting.popleft()
        if isinstance(each, opaque) or id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, (*kinds, np.random.BitGenerator)):
            found.append(each)
        else:
            waiting.extend(_held_by(each))
    return found


def _held_by(value: Any) -> Iterator[Any]:
    """Yield the values that `find_generators` searches next."""
    if isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__, value.__dict__)
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                yield cell.cell_contents
        if not value.__code__.co_filename.startswith(_LIBRARIES):
            yield from (value.__globals__.get(name) for name in _names_in(value.__code__))
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, type):
        yield from (each for each in vars(value).values() if not isinstance(each, type))
    else:
        yield from _held_by_an_object(value)


def _held_by_an_object(value: Any) -> Iterator[Any]:
    """Yield an object's items, attributes and classes, and the object of a bound method."""
    for kind, items in _CONTAINERS.items():
        if isinstance(value, kind):
            yield from islice(items(value), _MOST_HELD)
    with suppress(AttributeError):
        yield object.__getattribute__(value, "__dict__")
    if hasattr(type(value), "__self__"):  # a generator's own method
        yield value.__self__
    for kind in type(value).__mro__[:-1]:
        if kind not in _CONTAINERS:
            yield kind
            for slot in vars(kind).values():
                if isinstance(slot, MemberDescriptorType):
                    with suppress(AttributeError):  # an empty slot
                        yield slot.__get__(value)


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function's code, and functions in it, look up."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)


# --- invented examples --------------------------------------------------------------------------


def fields_of(batch: Any) -> dict[str, Tensor]:
    """Return a batch's tensors by name."""
    if isinstance(batch, dict):
        return dict(batch)
    if isinstance(batch, tuple):
        return {str(place): each for place, each in enumerate(batch)}
    return {INPUTS: batch}


def invented_like(
    inputs: Any,
    targets: Tensor,
    count: int,
    ranges: Mapping[str, int | tuple[float, float]] | None = None,
) -> tuple[Any, Tensor]:
    """Return invented examples with the shapes and types of these, whose values are not read.

    Args:
        inputs: a batch of any number of records.
        targets: their targets.
        count: number of examples.
        ranges: by field: n for integers 0..n-1, (low, high) for others. Without a range integers
            are 0 or 1, and other numbers in [0, 1), or far away for a quarter of the examples.
    """
    import torch

    generator = torch.Generator().manual_seed(0)

    def invent(name: str, like: Tensor) -> Tensor:
        shape, known = (count, *like.shape[1:]), (ranges or {}).get(name)
        if not like.is_floating_point():
            most = known if isinstance(known, int) else int(known[1]) + 1 if known else 2
            return torch.randint(max(1, most), shape, generator=generator).to(like.dtype)
        found = torch.rand(shape, generator=generator)
        if isinstance(known, tuple):
            return (known[0] + (known[1] - known[0]) * found).to(like.dtype)
        far = count - count // 4
        if name != TARGETS:
            found[far:] = 10 * found[far:] + 3
        return found.to(like.dtype)

    named = {name: invent(name, like) for name, like in fields_of(inputs).items()}
    if not isinstance(inputs, dict | tuple):
        return named[INPUTS], invent(TARGETS, targets)
    made = named if isinstance(inputs, dict) else tuple(named.values())
    return made, invent(TARGETS, targets)
