"""Records of map-style data sets, read item by item (`dpdist.data.protocol`).

Each item has its own seeds, and a loader's collate function gets one item at a time, so that a
record cannot change the tensors of another one.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from dpdist.core.console import log
from dpdist.data.array_records import (
    IGNORED,
    Options,
    as_numbers,
    as_targets,
    checked_units,
    positions_of,
    ranges_of,
    refuse_ragged,
    require_fields,
    stack_fields,
)
from dpdist.data.protocol import (
    INPUTS,
    TARGETS,
    Records,
    canonical,
    check_labels,
    find_generators,
    fingerprint_of,
    invented_like,
    kept_generators,
    map_fields,
    seed_generators,
    seed_of,
    warn_if_moments_of_standardized,
)
from dpdist.data.record_hashes import digests_of_input, stored_input

if TYPE_CHECKING:
    from dpdist.data.protocol import Batch

_ONE_RECORD = (
    "each item of {} is computed from one record alone: no mixing of several, no overlapping "
    "windows, no statistics of the whole set, no state kept from item to item"
)
_CHECK_KEY = bytes(32)  # seeds the augmentations when records are checked; nothing is released
_DIGEST = 32  # bytes
_PATIENCE = 3.0  # seconds of silence


class RecordError(Exception):
    """A record that a collator of dpdist rejects: the broken rule and its fix, without a value."""

    def __init__(self, rule: str, then: str) -> None:
        super().__init__(rule, then)
        self.rule, self.then = rule, then


class ItemRecords(Records):
    """Records of a map-style data set, read item by item with seeds for each record.

    source: has `__len__` and `__getitem__`. collate: called with a list of one item, or None.
    plain: the source without random transforms. Outside of steps, items are read with a fixed key;
    `for_step` returns the augmentations of a step.
    """

    def __init__(
        self,
        source: Any,
        options: Options,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        plain: Any,
        replaced: Sequence[str] = (),
    ) -> None:
        self.name, self.replaced = options.name, replaced
        self.assumed = (_ONE_RECORD.format(self.name),)
        self._source, self._options, self._collate = source, options, collate
        self._plain, self._key = plain, _CHECK_KEY
        self._generators = self._find_generators()
        self._last: tuple[bytes, Any, Tensor] | None = None
        self._extremes: tuple[Tensor, ...] = ()  # least and largest integer targets, (1, ...) each
        self._count = length_of_source(source, options)
        self._spec: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._digests = bytearray()  # of the items as the check read them; empty: read them again
        with kept_generators(self._generators):
            self._units = self._check()
        if (found := self._find_generators()) != self._generators:  # the check's were not seeded
            self._generators, self._digests = found, bytearray()

    def __len__(self) -> int:
        return self._count

    def for_step(self, key: bytes) -> Records:
        records = copy.copy(self)
        records._key, records._last = key, None
        records._generators = self._find_generators()  # code may make them on first use
        return records

    def _checked_targets(self) -> Iterator[Tensor]:
        yield from self._extremes

    def _find_generators(self) -> list[Any]:
        told = self._options.before_transform
        return find_generators(self._source, self._plain, self._collate, told)

    def batch(self, indices: np.ndarray | slice) -> Batch:
        return self._read(indices)[0]

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        return self._read(indices)[1]

    def unit_id(self, index: int) -> Hashable:
        return index if self._units is None else self._units[index]

    def examples(self, count: int) -> tuple[Batch, Tensor]:
        few = slice(0, 1)
        return invented_like(self.batch(few), self.targets(few), count, ranges_of(self._options))

    def keyed_fingerprint(self, key: bytes) -> str:
        options = self._options
        read = options.before_transform or self._plain.__getitem__
        lengths, fills = (
            dict(each) if isinstance(each, Mapping) else each
            for each in (options.pad_to, options.pad_value)
        )
        told = (options.inputs, options.target, options.classes, lengths, fills)
        then = "ask the data set for that record yourself to see why"
        if options.before_transform is None and self._plain is not self._source:
            then = "it is read without its transform for the fingerprint: give before_transform="
        items = (
            bytes(self._digests[_DIGEST * index : _DIGEST * (index + 1)])
            if self._digests
            else _digest_of(self._item(read, index, _CHECK_KEY, then))
            for index in range(len(self))
        )
        try:
            with kept_generators(self._generators):
                return fingerprint_of(key, self, chain((told,), items))
        except TypeError as error:
            options.refuse(
                f"items must be numbers, arrays, images or text for a fingerprint, got {error}",
                "give before_transform=, a function from a position to such values",
            )

    def input_macs(self, key: bytes) -> Iterator[tuple[bytes, ...]]:
        """Yield MACs of each record's tensors, and of its item before random transforms."""
        options, hidden = self._options, self._plain is self._source
        read = options.before_transform or self._plain.__getitem__
        for index, macs in enumerate(super().input_macs(key)):
            with kept_generators(self._generators):
                named, _ = _fields_of_item(self._item(read, index, _CHECK_KEY))
            beside = (options.target or TARGETS, options.unit)
            names = {*options.inputs} & named.keys() or {n for n in named if n not in beside}
            named = {name: named[name] for name in names}
            found = {*macs}
            for item in (named, stored_input(self._source, index, files=hidden)):
                with suppress(TypeError):  # an unknown type: only its tensors are compared
                    found |= set() if item is None else digests_of_input(key, item)
            yield tuple(found)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None, "_digests": bytearray()}  # no key hides these

    def _item(
        self,
        read: Callable[[int], Any],
        index: int,
        key: bytes,
        then: str = "ask the data set for that record yourself to see why",
    ) -> Any:
        """Return one item, read with its seeds.

        An error names only the type of what its code raised, whose text may quote a value.
        """
        try:
            seed_generators(seed_of(key, index), self._generators)
            return read(index)
        except Exception as error:
            kind = type(error).__name__
        self._options.refuse(f"record {index} must be readable, but its code raised {kind}", then)

    def _fields(self, index: int) -> tuple[dict[str, Tensor], Any]:
        """Return one record's tensors by field, and the form of a batch: dict, tuple or None."""
        return self._fields_of(index, self._item(self._source.__getitem__, index, self._key))

    def _fields_of(self, index: int, item: Any) -> tuple[dict[str, Tensor], Any]:
        """Return what `_fields` returns, of the item."""
        options = self._options
        if self._collate is not None:
            try:
                seed_generators(seed_of(self._key, index), self._generators)
                item = self._collate([item])
            except RecordError as error:
                options.refuse(f"record {index} {error.rule}", error.then)
            except Exception as error:
                kind = type(error).__name__
            else:
                kind = ""
            if kind:
                options.refuse(
                    f"collate_fn must take a list of one record, but raised {kind}",
                    "pass the data set itself, or a collate_fn that needs no other record",
                )
        named, shape = _fields_of_item(item)
        require_fields(options, named, ("inputs", "target"))
        if options.inputs:
            named = {n: named[n] for n in (*options.inputs, options.target) if n is not None}
        elif isinstance(options.unit, str):
            named.pop(options.unit, None)
        return {name: self._tensor(name, value, named) for name, value in named.items()}, shape

    def _tensor(self, name: str, value: Any, fields: Collection[str]) -> Tensor:
        options = self._options
        if isinstance(value, Tensor):
            tensor = value.detach()
        elif isinstance(value, bool | int | float | np.ndarray | np.generic | list | tuple):
            tensor = as_numbers(name, value, options)
        else:
            options.refuse(
                f"field {name!r} must be a tensor, an array or a number, got a "
                f"{type(value).__name__}",
                "convert it in the data set (an image with torchvision's ToTensor)",
            )
        if self._collate is not None:
            if tensor.dim() == 0 or len(tensor) != 1:
                options.refuse(
                    f"collate_fn must put records on dimension 0, got shape {tuple(tensor.shape)} "
                    f"for one record in field {name!r}",
                    "let it stack records there",
                )
            tensor = tensor[0]
        size = options.length_of(name)
        if size is None or tensor.dim() == 0:
            return tensor
        whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
        fill = options.padding_of(name, whole, fields)
        if fill == IGNORED:  # does not fit into uint8
            tensor = tensor.long()
        padded = tensor.new_full((size, *tensor.shape[1:]), fill)
        kept = min(size, len(tensor))
        padded[:kept] = tensor[:kept]
        return padded

    def _split(self, named: dict[str, Tensor], shape: Any) -> tuple[Any, Tensor | None]:
        """Return one record's input and target."""
        target = self._options.target or (TARGETS if TARGETS in named else None)
        wanted = None if target is None else as_targets(named[target])
        if shape is dict:
            if self._options.single:
                return named[self._options.inputs[0]], wanted
            return named, wanted
        rest = [value for name, value in named.items() if name != target]
        return (tuple(rest) if shape is tuple else rest[0]), wanted

    def _check(self) -> list[Hashable] | None:
        """Check fields, types, shapes and labels of every record once; return the units."""
        options, units = self._options, []
        sums: dict[str, Tensor] = {}  # of each column, and of its squares, by field
        digested = options.before_transform is None and self._plain is self._source
        start, silent = time.monotonic(), True
        for index in range(self._count):
            if silent and time.monotonic() > start + _PATIENCE:
                log(f"{self.name}: reading {self._count:,} records once, to check them")
                silent = False
            item = self._item(self._source.__getitem__, index, self._key)
            if digested:  # now: reading all items again would double the time before a training
                try:
                    self._digests += _digest_of(item)
                except TypeError:  # `keyed_fingerprint` names the type
                    digested, self._digests = False, bytearray()
            named, shape = self._fields_of(index, item)
            own = {n: (t.dtype, tuple(t.shape)) for n, t in named.items()}
            if not index:
                self._spec = own
            self._compare(own)
            for name, row in named.items() if not options.ranges else ():
                if row.dim() == 1 and row.is_floating_point() and name != options.target:
                    row = row.double()
                    sums[name] = sums.get(name, 0.0) + torch.stack([row, row.square()])
            target = self._split(named, shape)[1]
            self.has_targets = target is not None
            if target is not None:
                row = target.unsqueeze(0)
                check_labels(row, options.classes, options.name)
                if not row.is_floating_point() and row.numel():
                    least, most = self._extremes or (row, row)
                    self._extremes = torch.minimum(least, row), torch.maximum(most, row)
            if isinstance(options.unit, str):
                item = self._item(self._plain.__getitem__, index, _CHECK_KEY)
                named = _fields_of_item(item)[0]
                require_fields(options, named, ("unit",))
                units.append(named[options.unit])
        for name, (total, squares) in sums.items():
            mean = total / self._count
            spread = (squares / self._count - mean.square()).clamp(min=0).sqrt()
            told = f"{options.name}: {name}"
            warn_if_moments_of_standardized(self._count, mean.numpy(), spread.numpy(), told)
        given = units if isinstance(options.unit, str) else options.unit
        return checked_units(given, self._count, options)

    def _compare(self, own: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Raise UserError if fields, types or shapes differ from those of the first record."""
        if own == self._spec:
            return
        for name, (_, shape) in own.items():
            if name in self._spec and shape != self._spec[name][1]:
                refuse_ragged(name, self._options)
        self._options.refuse(
            "records must have the same fields of the same dtypes, got others", "convert them"
        )

    def _read(self, indices: np.ndarray | slice) -> tuple[Any, Tensor]:
        """Return inputs and targets; those of the last call are kept, since both are needed."""
        chosen = positions_of(indices, self._count).numpy()
        mark = chosen.tobytes()
        if self._last is None or self._last[0] != mark:
            with kept_generators(self._generators):
                self._last = (mark, *self._stacked(chosen))
        return self._last[1], self._last[2]

    def _stacked(self, chosen: np.ndarray) -> tuple[Any, Tensor]:
        options = self._options
        if not len(chosen):
            inputs, wanted = self._stacked(np.zeros(1, dtype=np.int64))
            return map_fields(lambda column: column[:0], inputs), wanted[:0]
        rows, targets = [], []
        for index in chosen.tolist():
            named, shape = self._fields(index)
            self._compare({n: (t.dtype, tuple(t.shape)) for n, t in named.items()})
            row, target = self._split(named, shape)
            rows.append(row)
            targets.append(torch.zeros((), dtype=torch.int64) if target is None else target)
        found = torch.stack(targets)
        check_labels(found, options.classes, options.name)
        return stack_fields(rows), found


def _digest_of(item: Any) -> bytes:
    """Return the digest of an item for a fingerprint. Raises TypeError as `canonical` does."""
    return hashlib.blake2b(b"".join(canonical(item)), digest_size=_DIGEST).digest()


def length_of_source(source: Any, options: Options) -> int:
    """Return a data set's length. Raises UserError if it has no length or no items by position."""
    kind = type(source).__name__
    iterable = isinstance(source, torch_data.IterableDataset) or kind.startswith("Iterable")
    if iterable or not hasattr(source, "__getitem__"):
        options.refuse(
            f"must have a length and records by position, got a {kind}",
            "the records of a step are sampled by position: collect them in a list or in arrays",
        )
    try:
        count = len(source)
    except (TypeError, NotImplementedError):
        options.refuse(
            f"must have a length (__len__), got a {kind} without",
            "the sampling rate is computed from it: define __len__",
        )
    if count < 1:
        options.refuse("must have at least one record, got none", "check the source")
    return count


def _fields_of_item(item: Any) -> tuple[dict[str, Any], Any]:
    """Return an item's fields by name, and the form of a batch: dict, tuple or None."""
    if isinstance(item, Mapping):
        return dict(item), dict
    if isinstance(item, tuple | list) and len(item) > 1:
        *inputs, target = item
        if len(inputs) == 1:
            return {INPUTS: inputs[0], TARGETS: target}, None
        return {**{str(n): each for n, each in enumerate(inputs)}, TARGETS: target}, tuple
    return {INPUTS: item[0] if isinstance(item, tuple | list) else item}, None


def _unchanged(value: Any) -> Any:
    return value


def _both_unchanged(value: Any, target: Any) -> Any:
    return value, target


_UNCHANGED = {
    "transform": _unchanged,
    "target_transform": _unchanged,
    "transforms": _both_unchanged,
}


def without_transforms(source: Any) -> Any:
    """Return a copy of a data set without transforms, or the data set itself if it has none.

    They are `transform`, `target_transform` and `transforms`, as in torchvision, also those of the
    data sets inside a `Subset` or `ConcatDataset`.
    """
    changes: dict[str, Any] = {
        name: unchanged
        for name, unchanged in _UNCHANGED.items()
        if getattr(source, name, None) is not None
    }
    inner, parts = getattr(source, "dataset", None), getattr(source, "datasets", None)
    if inner is not None and (plain := without_transforms(inner)) is not inner:
        changes["dataset"] = plain
    if isinstance(parts, list):
        plain_parts = [without_transforms(part) for part in parts]
        if any(one is not other for one, other in zip(plain_parts, parts, strict=True)):
            changes["datasets"] = plain_parts
    if not changes:
        return source
    copied = copy.copy(source)
    try:
        for name, value in changes.items():
            setattr(copied, name, value)
    except AttributeError:  # a property that cannot be set
        return source
    return copied
