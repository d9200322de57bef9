"""Records made of arrays, tables, map-style data sets and loaders (`dpdist.data.protocol`).

Arrays and tables become columns in memory. Map-style data sets are read item by item, each with its
own seeds, and a loader's collate function gets one item at a time, so that a record cannot change
the tensors of another one.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils import data as torch_data

from dpdist.core.errors import UserError
from dpdist.core.files import FEATURES_KEY
from dpdist.data import names_nobody
from dpdist.data.column_names import (
    check_names,
    is_identifier_name,
    repeats_words,
    tells_answer,
)
from dpdist.data.protocol import (
    INPUTS,
    TARGETS,
    Records,
    check_labels,
    fields_of,
    find_generators,
    fingerprint_of,
    invented_like,
    kept_generators,
    map_fields,
    seed_generators,
    seed_of,
    warn_if_standardized,
)
from dpdist.data.record_hashes import digests_of_input, stored_input
from dpdist.data.tables import is_list

if TYPE_CHECKING:
    from dpdist.data.protocol import Batch

IGNORED = -100  # the label of tokens that are not learned, in torch and `transformers`
LABELS = "labels"
_MASKS = ("attention_mask", "token_type_ids")
_ONE_RECORD = (
    "each item of {} is computed from one record alone: no mixing of several, no overlapping "
    "windows, no statistics of the whole set, no state kept from item to item"
)
_CHECK_KEY = bytes(32)  # seeds the augmentations when records are checked; nothing is released


class RecordError(Exception):
    """A record that a collator of dpdist rejects: the broken rule and its fix, without a value."""

    def __init__(self, rule: str, then: str) -> None:
        super().__init__(rule, then)
        self.rule, self.then = rule, then


@dataclass(frozen=True)
class Options:
    """Arguments of `as_records`.

    inputs: () for all fields except target and unit. single: `inputs` was one name, not a list.
    """

    name: str = "data"
    inputs: tuple[str, ...] = ()
    target: str | None = None
    unit: str | Sequence[Hashable] | np.ndarray | None = None
    classes: int | None = None
    pad_to: int | Mapping[str, int] | None = None
    pad_value: float | Mapping[str, float] = 0
    ranges: Mapping[str, int | tuple[float, float]] = field(default_factory=dict)
    before_transform: Callable[[int], Any] | None = None
    single: bool = False

    def refuse(self, rule: str, then: str, see: str = "") -> NoReturn:
        """Raise UserError with the rule that the data break, the fix, and a page that helps."""
        raise UserError(f"{self.name}: {rule}; {then}", see=see) from None

    def length_of(self, name: str) -> int | None:
        """Return the public length of a field, or None if it is not padded."""
        if isinstance(self.pad_to, Mapping):
            return self.pad_to.get(name)
        return self.pad_to if name != TARGETS and name != self.target else None

    def padding_of(self, name: str, whole: bool, fields: Collection[str]) -> float:
        """Return the value that pads a field.

        Labels and targets get -100, which no loss counts, and masks 0: a `pad_value` for all fields
        would be learned or attended to.

        whole: whether the field has integers. fields: names of all fields of a record.

        Raises:
            UserError: no value is harmless, and `pad_value` does not name this field.
        """
        if isinstance(self.pad_value, Mapping) and name in self.pad_value:
            return self.pad_value[name]
        learned = name in (LABELS, TARGETS, self.target)
        if learned and whole:
            return IGNORED
        if name in _MASKS:
            return 0
        if learned or (whole and LABELS in fields and name != "input_ids"):
            self.refuse(
                f"pad_value must give a value for field {name!r}, which is padded, got none",
                f"give pad_value={{{name!r}: VALUE}}, and the length of some fields only by "
                "pad_to={FIELD: LENGTH}",
            )
        return 0 if isinstance(self.pad_value, Mapping) else self.pad_value


def as_records(
    data: Any,
    *,
    inputs: str | Sequence[str] = (),
    target: str | None = None,
    unit: str | Sequence[Hashable] | np.ndarray | None = None,
    classes: int | None = None,
    pad_to: int | Mapping[str, int] | None = None,
    pad_value: float | Mapping[str, float] = 0,
    ranges: Mapping[str, int | tuple[float, float]] | None = None,
    before_transform: Callable[[int], Any] | None = None,
    name: str = "data",
) -> Records:
    """Return records of arrays, tables, data sets or loaders, whose own samplers are not used.

    Guarantee: each record's tensors are computed from only one item, with seeds that depend on its
    position, and a loader's collate function gets one item at a time. A training draws its own
    samples: orders, weights and batches of a sampler are replaced, and `replaced` names them.

    Args:
        data: `(X, y)` or X, of arrays or tensors (X may be a tuple or dict of them); a map-style
            data set, a list of items or a `DataLoader`; a `datasets.Dataset`, a pandas `DataFrame`,
            a pyarrow `Table`, a dict of columns, a Ray Data set, the path of a Parquet, CSV or
            JSONL file; the name of a built-in data set; `Records`.
        inputs: name of the field that is the input, or several names: features of a table, else a
            dict. Default: all except target and unit.
        target: name of the field that a model should predict: one value or tensor per record.
        unit: the user or other unit that each record belongs to: a field's name, or one value for
            each record.
        classes: number of classes: integer targets must be in 0..classes-1.
        pad_to: public length of dimension 0 of a record's input, or of several by field: shorter
            ones are padded with `pad_value`, longer ones are cut.
        pad_value: value that pads short records, or values by field. Integer labels and targets are
            padded with -100, which no loss counts, and masks with 0, unless their field is named.
            You must name the pad values of floating targets and of integers other than `labels`.
        ranges: public ranges by field, for the examples on which a model is checked: n for integers
            0..n-1, (low, high) for others.
        before_transform: function that returns the item at a position without random transforms,
            for the fingerprint; required if a data set does not keep them in `transform`.
        name: name of the data in error messages and on cards.

    Returns:
        A `dpdist.Records`: its `batch(indices)` returns inputs (B, ...), a tensor or a tuple or
        dict of tensors, and `targets(indices)` returns a tensor (B,) or (B, ...). If `data` is a
        `Records` already, the same object.

    Raises:
        UserError: the data have no length or no records by position, or their records do not fit
            together. The message states what to do, and contains no record's value.

    Example:
        >>> import numpy as np, dpdist
        >>> data = np.zeros((4, 2)), np.array([0, 1, 1, 0])
        >>> records = dpdist.as_records(data, classes=2)
        >>> len(records), records.batch(np.array([0, 3])).shape
        (4, torch.Size([2, 2]))
    """
    single = isinstance(inputs, str)
    options = Options(
        name=name,
        inputs=(inputs,) if isinstance(inputs, str) else tuple(inputs),
        target=target,
        unit=unit,
        classes=classes,
        pad_to=pad_to,
        pad_value=pad_value,
        ranges=ranges or {},
        before_transform=before_transform,
        single=single,
    )
    return adapt(str(data) if isinstance(data, PathLike) else data, options)


def adapt(data: Any, options: Options) -> Records:
    """Return the records of any data that `as_records` accepts. Raises UserError."""
    if isinstance(data, str):
        data = _of_name(data, options)
    if isinstance(data, Records):
        if not hasattr(data, "name"):
            data.name = options.name
        return data
    found = _adapted(data, options)
    if isinstance(options.unit, str) and not found.unit_name:
        found.unit_name = options.unit
    return found


def _adapted(data: Any, options: Options) -> Records:
    if isinstance(data, torch_data.DataLoader):
        return _of_loader(data, options)
    library = type(data).__module__.partition(".")[0]
    if library == "ray":
        return _of_ray(data, options)
    if (columns := _columns_of(data, library, options)) is not None:
        return ArrayRecords.of(*columns, options)
    if library == "datasets":
        return _of_hugging_face(data, options)
    return ItemRecords(data, options, plain=without_transforms(data))


def _of_name(name: str, options: Options) -> Any:
    """Return a built-in data set's training split, or a file's rows as a table."""
    from dpdist.data import BUILT_IN, DataSource, load
    from dpdist.data.tables import open_table

    if name in BUILT_IN:
        return load(DataSource(name, BUILT_IN[name]), "train")
    if not Path(name).exists():
        options.refuse(
            f"must be a built-in data set ({', '.join(BUILT_IN)}) or a file, got {name!r}",
            "give the path of a Parquet, CSV or JSONL file",
        )
    file = open_table(Path(name))
    return file.read(file.schema.names).replace_schema_metadata(file.schema.metadata)


# --- columns of files, tables, arrays and tensors ----------------------------------------------


TABLE = "table"  # the form of named columns: those with one number per record become features


def _columns_of(
    data: Any, library: str, options: Options
) -> tuple[dict[str, Any], Any, Mapping[bytes, bytes]] | None:
    """Return columns by name, the form of a batch, and a file's metadata; None for items.

    The form is `dict`, `tuple`, `TABLE`, or None for a single input.
    """
    if library in ("pandas", "pyarrow"):
        names = list(data.columns if library == "pandas" else data.column_names)
        columns = [data.iloc[:, n] if library == "pandas" else data[n] for n in range(len(names))]
        check_names([name for name in names if isinstance(name, str)], options.name)
        found = dict(zip(map(str, names), columns, strict=True))
        if len(found) < len(names):
            options.refuse("must have columns of different names, got one twice", "rename it")
        return found, TABLE, getattr(getattr(data, "schema", None), "metadata", None) or {}
    if isinstance(data, Mapping) and data and all(isinstance(key, str) for key in data):
        check_names(list(data), options.name)
        return dict(data), TABLE, {}
    inputs, target = data, None
    if isinstance(data, torch_data.TensorDataset):
        inputs, target = (
            (data.tensors[:-1], data.tensors[-1]) if len(data.tensors) > 1 else (data.tensors, None)
        )
    elif isinstance(data, tuple) and len(data) == 2:
        inputs, target = data
    elif not isinstance(data, np.ndarray | Tensor):
        return None
    named: dict[str, Any] = {INPUTS: inputs[0] if isinstance(inputs, tuple) else inputs}
    form: Any = None
    if isinstance(inputs, Mapping):
        named, form = dict(inputs), dict
    elif isinstance(inputs, tuple) and len(inputs) > 1:
        named, form = {str(place): each for place, each in enumerate(inputs)}, tuple
    return named if target is None else {**named, TARGETS: target}, form, {}


class ArrayRecords(Records):
    """Records in memory as arrays, one row per record.

    inputs: a tensor (N, ...), or a tuple or dict of them. wanted: the targets (N, ...), or None.
    units: one value per record; None if each record is its own unit. of_features: a script computed
    them from other records, which a budget would not recognize.
    """

    of_features = False

    def __init__(
        self,
        inputs: Batch,
        wanted: Tensor | None,
        options: Options,
        units: Sequence[Hashable] | None = None,
    ) -> None:
        self.name, self.has_targets = options.name, wanted is not None
        self._inputs, self._units, self._ranges = inputs, units, _ranges(options)
        self._targets = (
            torch.zeros(rows_of(inputs), dtype=torch.int64) if wanted is None else wanted
        )

    @classmethod
    def of(
        cls,
        columns: Mapping[str, Any],
        form: Any,
        metadata: Mapping[bytes, bytes],
        options: Options,
    ) -> ArrayRecords:
        """Check columns and arrange them, as `_columns_of` returns them."""
        unit = options.unit if isinstance(options.unit, str) else None
        if form in (TABLE, dict) or unit is not None:
            _require_fields(options, columns)
        names = list(columns)
        if form is TABLE and options.inputs:
            names = [*options.inputs, *([] if options.target is None else [options.target])]
        names = [name for name in names if name != unit]
        named = {name: _numbers(name, columns[name], options, names) for name in names}
        units = options.unit if unit is None else _units_of(unit, columns[unit], options)
        lengths = {name: len(column) for name, column in named.items()}
        if len({*lengths.values()}) > 1:
            told = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
            options.refuse(f"fields must have one length, got {told}", "give one value per record")
        if form is TABLE:
            named, form = _arranged(named, options)
        if not (count := max(lengths.values(), default=0)):
            options.refuse("must have at least one record, got none", "check the source")
        target = TARGETS if TARGETS in named else options.target
        wanted = _long(named[target]) if target in named else None
        if wanted is not None:
            check_labels(wanted, options.classes, options.name)
        if form is not dict and target is not None:
            named.pop(target, None)
        for name, column in () if options.ranges else named.items():
            if column.is_floating_point() and column.dim() == 2:
                warn_if_standardized(column.float().cpu().numpy(), f"{options.name}: {name}")
        rows: Any = named
        if form is not dict:
            rows = tuple(named.values()) if form is tuple else next(iter(named.values()))
        found = cls(rows, wanted, options, _checked_units(units, count, options))
        if seen := metadata.get(FEATURES_KEY):  # by the network that made the features
            found.assumed = (*found.assumed, seen.decode(errors="replace"))
            found.of_features = True
        return found

    def __len__(self) -> int:
        return len(self._targets)

    def batch(self, indices: np.ndarray | slice) -> Batch:
        chosen = _positions(indices, len(self))
        return map_fields(lambda column: column[chosen], self._inputs)

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        return self._targets[_positions(indices, len(self))]

    def unit_id(self, index: int) -> Hashable:
        return index if self._units is None else self._units[index]

    def examples(self, count: int) -> tuple[Batch, Tensor]:
        few = slice(0, 1)
        return invented_like(self.batch(few), self.targets(few), count, self._ranges)


def _require_fields(
    options: Options, names: Collection[str], keys: Sequence[str] = ("inputs", "target", "unit")
) -> None:
    """Raise UserError, with the names of all fields, if an argument names a missing field."""
    for key in keys:
        asked = getattr(options, key)
        for name in (asked,) if isinstance(asked, str) else asked if key == "inputs" else ():
            if name not in names:
                options.refuse(
                    f"{key} must name a field, got {name!r}",
                    f"the fields are {', '.join(map(str, names))}",
                )


def _numbers(name: str, column: Any, options: Options, fields: Collection[str]) -> Tensor:
    """Return a column as a tensor of numbers (N, ...).

    column: an array, a tensor, lists, or a column of pandas or Arrow, whose lists are padded to
    their public length. fields: names of all columns that are read.
    """
    if isinstance(column, Tensor):
        _check_dense(name, column, options)
    else:
        if hasattr(column, "iloc") and column.ndim == 1:
            column = _arrow_of_pandas(name, column, options)
        if isinstance(column, pa.ChunkedArray):
            column = _array_of_arrow(name, column, options, fields)
        column = as_numbers(name, column, options)
    if column.is_floating_point() and not bool(torch.isfinite(column).all()):
        options.refuse(
            f"field {name!r} must have finite numbers, got NaN or Inf in some records",
            "fill or drop them first (and mark missing values in a separate field)",
        )
    return column.detach()


def as_numbers(name: str, values: Any, options: Options) -> Tensor:
    """Return an array or lists as a tensor, floats of more than 32 bits as float32."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        options.refuse(f"field {name!r} must not have masked numbers", "fill or drop them first")
    try:
        array = np.asarray(values)
    except ValueError:  # ragged lists: numpy would print their values
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf":
        kind = {"O": "object", "U": "text", "S": "bytes"}.get(array.dtype.kind, array.dtype)
        options.refuse(
            f"field {name!r} must have numbers of one shape, got dtype {kind}",
            "encode it as numbers first, and ragged records with pad_to=LENGTH",
        )
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        array = array.astype(np.float32)
    elif array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    shared = array.flags.writeable and min(array.strides, default=0) >= 0
    return torch.from_numpy(array if shared else array.copy(order="C"))


def _arrow_of_pandas(name: str, column: Any, options: Options) -> pa.ChunkedArray:
    with suppress(pa.ArrowException, TypeError, ValueError):  # their text quotes a value
        return pa.table({name: column})[0]
    options.refuse(f"column {name!r} must have values of one type, got several", "convert them")


def _array_of_arrow(
    name: str, column: pa.ChunkedArray, options: Options, fields: Collection[str]
) -> np.ndarray:
    """Return a column of numbers (N,), or of lists of numbers (N, length)."""
    kind = column.type.value_type if is_list(column.type) else column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        then = "encode it by dpdist.Preprocessing, or leave it out with inputs=[...]"
        if name == options.target:
            then = "number its classes from 0, such as frame[name].astype('category').cat.codes"
        if pa.types.is_binary(column.type) or pa.types.is_struct(column.type):
            then = "decode images into an array, or train on the file by a recipe (dpdist init)"
        options.refuse(
            f"column {name!r} must have numbers or lists of numbers, got {column.type}", then
        )
    if column.null_count or (is_list(column.type) and pc.list_flatten(column).null_count):
        then = "fill them by dpdist.Preprocessing"
        if name == options.target:
            then = "remove the records without a target"
        options.refuse(f"column {name!r} must be filled, got empty values", then)
    if not is_list(column.type):
        return np.array(column.to_numpy())
    size = options.length_of(name)
    if size is None:
        if len(pc.list_value_length(column).unique()) > 1:
            _refuse_ragged(name, options)
        found = pc.list_flatten(column)
        return np.array(found.to_numpy()).reshape(len(column), -1)
    fill = options.padding_of(name, pa.types.is_integer(kind), fields)
    padded = pc.list_slice(column, 0, size, return_fixed_size_list=True).combine_chunks().flatten()
    if fill == IGNORED:  # does not fit into uint8
        padded = padded.cast(pa.int64())
    filled = padded.fill_null(pa.scalar(fill).cast(padded.type))
    return np.array(filled.to_numpy(zero_copy_only=False)).reshape(len(column), size)


def _refuse_ragged(name: str, options: Options) -> NoReturn:
    options.refuse(
        f"records of field {name!r} must have one shape, got several",
        "give a public length with pad_to=LENGTH: shorter ones are padded, longer ones cut",
    )


def _arranged(named: dict[str, Tensor], options: Options) -> tuple[dict[str, Tensor], Any]:
    """Return columns of numbers as one matrix of features, and the form of a batch.

    A column stays as it is if it is the only input or has several numbers per record.
    """
    arrays = {name: column for name, column in named.items() if name != options.target}
    answers = {} if options.target is None else {TARGETS: named[options.target]}
    if not arrays:
        options.refuse("must have a column besides target and unit, got none", "add one")
    first = next(iter(arrays.values()))
    if len(arrays) == 1 and (options.single or first.dim() > 1):
        return {INPUTS: first, **answers}, None
    if any(column.dim() != 1 for column in arrays.values()):
        return named, dict
    _check_features(arrays, answers.get(TARGETS), options)
    features = torch.stack([column.float() for column in arrays.values()], 1)
    return {INPUTS: features, **answers}, None


def _check_features(arrays: Mapping[str, Tensor], answers: Any, options: Options) -> None:
    """Raise UserError if a feature is the target; warn of a column that may identify a person."""
    for name, array in arrays.items():
        flat = answers is not None and answers.dim() == 1
        if flat and tells_answer(array.numpy(), answers.numpy()):
            options.refuse(
                f"inputs must not include the answer, got {name!r}, which is {options.target!r} "
                "with other names for its values",
                "leave it out with inputs=[...]",
            )
        if options.inputs or options.unit is not None or not is_identifier_name(name):
            continue
        if 1 < (values := len(array.unique())) < len(array):
            warnings.warn(
                f"{options.name}: {repeats_words(name, len(array), values)} The unit is one "
                f"record; to protect the person, give unit={name!r}; else leave it out of inputs",
                stacklevel=6,
            )


def _units_of(name: str, column: Any, options: Options) -> Any:
    """Return the values of a column of units."""
    if hasattr(column, "iloc"):
        column = _arrow_of_pandas(name, column, options)
    return column.to_pylist() if isinstance(column, pa.ChunkedArray) else column


def _checked_units(units: Any, count: int, options: Options) -> list[Hashable] | None:
    if units is None:
        return None
    found = [each.item() if isinstance(each, np.generic | Tensor) else each for each in units]
    if len(found) != count:
        options.refuse(
            f"unit must have one value for each of the {count:,} records, got {len(found):,}",
            "give one for each",
        )
    if any(map(names_nobody, found)):
        options.refuse("unit must be given for every record, got empty ones", "drop or fill them")
    return found


def _of_ray(data: Any, options: Options) -> Records:
    """Return the records of a Ray Data set, read once and sorted by a hash of each row's values.

    Blocks may arrive in a different order when the same command resumes.
    """
    import ray

    if options.unit is not None and not isinstance(options.unit, str):
        options.refuse("unit must name a column of Ray Data, whose rows are reordered", "add one")
    blocks = ray.get(data.materialize().to_arrow_refs())
    filled = [block for block in blocks if block.num_rows]
    if not filled:
        options.refuse("must have at least one record, got none", "check the source")
    table = pa.concat_tables(filled)
    records = _adapted(table, options)
    every = [*fields_of(records.batch(slice(None))).values(), records.targets(slice(None))]
    names = table[options.unit].to_pylist() if isinstance(options.unit, str) else [0] * len(records)
    digests = []
    for row, name in enumerate(names):
        digest = hashlib.blake2b(repr(name).encode(), digest_size=16, person=b"dpdist.order")
        for part in every:
            digest.update(part[row].numpy().tobytes())
        digests.append(digest.digest())
    return _adapted(table.take(sorted(range(len(digests)), key=digests.__getitem__)), options)


# --- checks of numbers ------------ --------------------------------------------------------------


def _check_dense(name: str, column: Tensor, options: Options) -> None:
    """Raise UserError for a sparse, nested, quantized, 8-bit float or meta tensor."""
    eighth = column.is_floating_point() and column.element_size() == 1
    strided = column.layout is torch.strided and not (column.is_nested or column.is_quantized)
    if eighth or not strided or column.is_meta:
        options.refuse(
            f"field {name!r} must be a dense tensor of numbers, got another kind",
            "make one first (to_padded_tensor, to_dense, dequantize, float)",
        )


def _long(target: Tensor) -> Tensor:
    """Return integer targets as int64, and others as they are."""
    return target if target.is_floating_point() else target.long()


# --- items ------------------------------------------------------------------------------------


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
        self._count = _length(source, options)
        self._spec: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        with kept_generators(self._generators):
            self._units = self._check()
        self._generators = self._find_generators()

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
        return invented_like(self.batch(few), self.targets(few), count, _ranges(self._options))

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
        items = (self._item(read, index, _CHECK_KEY, then) for index in range(len(self)))
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
        return {**self.__dict__, "_last": None}

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
        options = self._options
        item = self._item(self._source.__getitem__, index, self._key)
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
        _require_fields(options, named, ("inputs", "target"))
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
        wanted = None if target is None else _long(named[target])
        if shape is dict:
            if self._options.single:
                return named[self._options.inputs[0]], wanted
            return named, wanted
        rest = [value for name, value in named.items() if name != target]
        return (tuple(rest) if shape is tuple else rest[0]), wanted

    def _check(self) -> list[Hashable] | None:
        """Check fields, types, shapes and labels of every record once; return the units."""
        options, units = self._options, []
        for index in range(self._count):
            named, shape = self._fields(index)
            own = {n: (t.dtype, tuple(t.shape)) for n, t in named.items()}
            if not index:
                self._spec = own
            self._compare(own)
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
                _require_fields(options, named, ("unit",))
                units.append(named[options.unit])
        given = units if isinstance(options.unit, str) else options.unit
        return _checked_units(given, self._count, options)

    def _compare(self, own: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Raise UserError if fields, types or shapes differ from those of the first record."""
        if own == self._spec:
            return
        for name, (_, shape) in own.items():
            if name in self._spec and shape != self._spec[name][1]:
                _refuse_ragged(name, self._options)
        self._options.refuse(
            "records must have the same fields of the same dtypes, got others", "convert them"
        )

    def _read(self, indices: np.ndarray | slice) -> tuple[Any, Tensor]:
        """Return inputs and targets; those of the last call are kept, since both are needed."""
        chosen = _positions(indices, self._count).numpy()
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


def _length(source: Any, options: Options) -> int:
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


def _of_hugging_face(data: Any, options: Options) -> Records:
    if (kind := type(data).__name__) != "Dataset":
        options.refuse(
            f"must be a datasets.Dataset, got a {kind}",
            'give one of its splits, such as data["train"]; of a stream, '
            "Dataset.from_list(list(data.take(n)))",
        )
    plain = data.with_format(None)
    seen = data if data.format["type"] is not None else data.with_format("torch")
    return ItemRecords(seen, options, plain=plain)


# --- loaders ----------------------------------------------------------------------------------


_ORDERS = (
    torch_data.RandomSampler,
    torch_data.SequentialSampler,
    torch_data.DistributedSampler,
)
_DRAWN = "each step samples every record with the plan's rate, by the run key"


def _of_loader(loader: torch_data.DataLoader[Any], options: Options) -> Records:
    """Return the records of a loader's data set and collate function.

    Raises UserError if its sampler, batch sampler or drop_last cannot be replaced.
    """
    source: Any = loader.dataset
    if isinstance(source, torch_data.IterableDataset):
        _length(source, options)
    sampler = loader.sampler
    custom = []
    if type(loader.batch_sampler) not in (torch_data.BatchSampler, type(None)):
        custom.append(type(loader.batch_sampler).__name__)
    if type(sampler) not in _ORDERS:
        custom.append(type(sampler).__name__)
    if loader.drop_last:
        custom.append("drop_last=True")
    if custom:
        options.refuse(
            f"the DataLoader must not choose, weight or drop records itself, got {custom[0]}",
            f"{_DRAWN}: pass the data set itself, a part of it by torch.utils.data.Subset, and put "
            "weights into the loss",
            see="how-to/python-data.md#data-in-python",
        )
    if loader.collate_fn in (torch_data.default_collate, torch_data.default_convert):
        records = adapt(source, options)
    else:
        plain = without_transforms(source)
        records = ItemRecords(source, options, collate=loader.collate_fn, plain=plain)
    records.replaced = (
        f"the DataLoader's {type(sampler).__name__} and batch_size={loader.batch_size}: {_DRAWN}",
    )
    return records


# --- batches of one or several tensors --------------------------------------------------------


def rows_of(batch: Any) -> int:
    """Return the number of records of a batch."""
    return len(next(iter(fields_of(batch).values())))


def stack_fields(rows: list[Any]) -> Any:
    """Return the batch of these single records."""
    if isinstance(rows[0], Tensor):
        return torch.stack(rows)
    if isinstance(rows[0], dict):
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def _positions(indices: np.ndarray | slice, count: int) -> Tensor:
    if isinstance(indices, slice):
        return torch.arange(count)[indices]
    return torch.as_tensor(np.asarray(indices, dtype=np.int64))


def _ranges(options: Options) -> dict[str, int | tuple[float, float]]:
    """Return the public ranges by field, including that of the targets."""
    found = dict(options.ranges)
    if options.classes is not None:
        found.setdefault(options.target or TARGETS, options.classes)
        found.setdefault(TARGETS, options.classes)
    elif options.target in found:
        found.setdefault(TARGETS, found[options.target])
    if options.single and options.inputs and options.inputs[0] in found:
        found.setdefault(INPUTS, found[options.inputs[0]])
    return found
