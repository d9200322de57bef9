"""Records made of arrays, tables, map-style data sets and loaders (`dpdist.data.protocol`).

Arrays and tables become columns in memory. Data sets of items are asked item by item, each under
seeds of its own, and a loader's collate function is called with one item at a time, so that no
record can leave a trace in another one's tensors.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
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
    fields_of,
    find_generators,
    fingerprint_of,
    invented_like,
    kept_generators,
    seed_generators,
    seed_of,
    warn_if_standardized,
)
from dpdist.data.record_hashes import digests_of_input, stored_input

if TYPE_CHECKING:
    import pyarrow as pa

    from dpdist.data.protocol import Batch

IGNORED = -100  # what torch and `transformers` have in labels where nothing is learned
LABELS = "labels"
_MASKS = ("attention_mask", "token_type_ids")
_ONE_RECORD = (
    "each item of {} is made of one record alone: no mixing of several, no overlapping windows, no "
    "statistics of the whole set, nothing that is kept from item to item"
)
_AT_ONCE = 1024  # records whose targets are looked at together
_CHECK_KEY = bytes(32)  # of the draw that the records are checked in; nothing is released of it


class RecordError(Exception):
    """Why a collator of dpdist's own refuses a record: a rule and a way on, without any value."""

    def __init__(self, rule: str, then: str) -> None:
        super().__init__(rule, then)
        self.rule, self.then = rule, then


@dataclass(frozen=True)
class Options:
    """The arguments of `as_records`.

    inputs: () for all but target and unit. single: `inputs` was one name, not a list of names.
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
        """Raise UserError with a rule that the data break, a way on, and a page that helps."""
        raise UserError(f"{self.name}: {rule}; {then}", see=see) from None

    def length_of(self, name: str) -> int | None:
        """Return the public length of a field, or None where records are not padded."""
        if isinstance(self.pad_to, Mapping):
            return self.pad_to.get(name)
        return self.pad_to if name != TARGETS and name != self.target else None

    def padding_of(self, name: str, whole: bool, fields: Collection[str]) -> float:
        """Return the value that fills up a field: one rule for every kind of data.

        What is learned gets the value that no loss counts, and a mask 0; neither takes the one
        `pad_value` of all fields, which would be learned or seen.

        whole: it holds whole numbers. fields: names of all fields of a record.

        Raises:
            UserError: no value is harmless, and none was given for this field.
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
                f"pad_value must give a value for field {name!r}, which is filled up, got none",
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
    """Make records of arrays, tables, data sets and loaders, whose own samplers are not used.

    Guarantee: each record's tensors are made of one item alone, under seeds of its position, and a
    loader's collate function gets one item at a time. A training draws its own samples: orders,
    weights and batches of a sampler are replaced, and `replaced` names them.

    Args:
        data: `(X, y)` or X, of arrays or tensors (X may be a tuple or dict of them); a map-style
            data set, a list of items or a `DataLoader`; a `datasets.Dataset`, a pandas `DataFrame`,
            a pyarrow `Table`, a dict of columns, a Ray Data set, the path of a Parquet, CSV or
            JSONL file; the name of a built-in data set; `Records`.
        inputs: of named fields, the one that is the input, or several: features of a table, else a
            dict. Default: all but target and unit.
        target: of named fields, the one that a model should say: one value or tensor a record.
        unit: whom each record belongs to: a field's name, or one value for each record.
        classes: whole-number targets must lie in 0..classes-1.
        pad_to: public length of dimension 0 of a record's input, or of several by field: shorter
            ones are filled up with `pad_value`, longer ones are cut.
        pad_value: value that fills up short records, or values by field. Labels and targets of
            whole numbers are filled up with -100, which no loss counts, and masks with 0, unless
            their field is named. Fill values of floating targets, and of further whole numbers
            beside `labels`, have to be named.
        ranges: public ranges by field, for the examples that a model is checked on: n for whole
            numbers 0..n-1, (low, high) for others.
        before_transform: returns the item at a position without random transforms, for the
            fingerprint; needed where a data set does not keep them in `transform`.
        name: name of the data in complaints and on cards.

    Returns:
        `dpdist.Records`: their `batch(indices)` returns inputs (B, ...), a tensor or a tuple or
        dict of tensors, and `targets(indices)` returns a tensor (B,) or (B, ...). For `data` that
        are `Records` already, the same object.

    Raises:
        UserError: the data have no length or no records by position, or their records do not fit
            together. The text says how to go on, and holds no record's value.

    Example:
        >>> import numpy as np, dpdist
        >>> data = np.zeros((4, 2)), np.array([0, 1, 1, 0])
        >>> records = dpdist.as_records(data, classes=2)
        >>> len(records), records.batch(np.array([0, 3])).shape
        (4, torch.Size([2, 2]))
    """
    named = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    options = Options(
        name, named, target, unit, classes, pad_to, pad_value, ranges or {}, before_transform,
        isinstance(inputs, str),
    )  # fmt: skip
    return adapt(str(data) if isinstance(data, PathLike) else data, options)


def adapt(data: Any, options: Options) -> Records:
    """Return records of anything that `as_records` takes. Raises UserError."""
    if isinstance(data, Records):
        if not hasattr(data, "name"):
            data.name = options.name
        return data
    found = _adapted(data, options)
    if isinstance(options.unit, str) and not found.unit_name:
        found.unit_name = options.unit
    return found


def _adapted(data: Any, options: Options) -> Records:
    if isinstance(data, str):
        return _of_name(data, options)
    if isinstance(data, torch_data.DataLoader):
        return _of_loader(data, options)
    if isinstance(data, torch_data.TensorDataset):
        tensors = tuple(data.tensors)
        return _of_fields(tensors[:-1] if len(tensors) > 1 else tensors, tensors, options)
    library = type(data).__module__.partition(".")[0]
    kind = type(data).__name__
    if library == "pandas":
        return _of_table(_arrow_of_pandas(data, options), options, named=False)
    if library == "pyarrow":
        return _of_table(data, options)
    if library == "ray":
        return ArrayRecords.of(*_ray_columns(data, options), options)
    if library == "datasets" and hasattr(data, "with_format"):
        return _of_hugging_face(data, kind, options)
    if isinstance(data, np.ndarray | Tensor):
        return _of_fields(data, None, options)
    if isinstance(data, tuple) and len(data) == 2:
        return _of_fields(data[0], data, options)
    if isinstance(data, Mapping) and data and all(isinstance(key, str) for key in data):
        return ArrayRecords.of(*_mapping_columns(data, options), options)
    return _of_items(data, options)


# --- arrays -----------------------------------------------------------------------------------


class ArrayRecords(Records):
    """Records that lie in memory as arrays, one row each.

    inputs: a tensor (N, ...), or a tuple or dict of them. wanted: the targets (N, ...); None where
    there are none. units: one value a record; None: each its own. of_features: `dpdist data
    features` made them of other records, which a budget would not know again.
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
        cls, columns: dict[str, np.ndarray | Tensor], shape: Any, options: Options
    ) -> ArrayRecords:
        """Check columns and arrange them. shape: `dict`, `tuple`, or None for a single input."""
        named = {name: _checked(name, column, options) for name, column in columns.items()}
        units = _units(options, named)
        lengths = {name: len(column) for name, column in named.items()}
        if len(set(lengths.values())) != 1:
            said = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
            options.refuse(f"fields must have one length, got {said}", "give one value a record")
        if not next(iter(lengths.values())):
            options.refuse("must hold one record at least, got none", "look where it comes from")
        target = TARGETS if TARGETS in named else options.target
        wanted = _long(named[target]) if target in named else None
        if wanted is not None:
            check_labels(wanted, options)
        if shape is not dict and target is not None:
            named.pop(target, None)
        for name, column in () if options.ranges else named.items():
            if column.is_floating_point() and column.dim() == 2:
                warn_if_standardized(column.float().cpu().numpy(), f"{options.name}: {name}")
        rows: Any = named
        if shape is not dict:
            rows = tuple(named.values()) if shape is tuple else next(iter(named.values()))
        return cls(rows, wanted, options, units)

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


def _of_fields(inputs: Any, pair: Any, options: Options) -> Records:
    """Return records of (X, y), of X, or of a TensorDataset's tensors."""
    columns: dict[str, Any] = {}
    shape: Any = None
    if isinstance(inputs, Mapping):
        columns, shape = dict(inputs), dict
    elif isinstance(inputs, tuple) and (len(inputs) > 1 or pair is None):
        columns, shape = {str(place): each for place, each in enumerate(inputs)}, tuple
    else:
        columns = {INPUTS: inputs[0] if isinstance(inputs, tuple) else inputs}
    if pair is not None and len(pair) > 1 and pair[-1] is not None:
        columns[TARGETS] = pair[-1]
    return ArrayRecords.of(columns, shape, options)


def _checked(name: str, column: Any, options: Options) -> Tensor:
    """Return a column as a tensor of numbers, floats of numpy's beyond float32 as float32."""
    if isinstance(column, np.ma.MaskedArray) and np.ma.is_masked(column):
        options.refuse(f"field {name!r} must hold no masked numbers", "fill or drop them first")
    if isinstance(column, Tensor):
        _check_dense(name, column, options)
    else:
        try:
            array = np.asarray(column)
        except ValueError:  # of ragged lists, whose values numpy would print
            array = np.empty(0, dtype=object)
        if array.dtype.kind not in "biuf":
            kind = {"O": "object", "U": "text", "S": "bytes"}.get(array.dtype.kind, array.dtype)
            options.refuse(
                f"field {name!r} must hold numbers of one shape, got dtype {kind}",
                "encode it as numbers first, and ragged records with pad_to=LENGTH",
            )
        if array.dtype.kind == "f" and array.dtype.itemsize > 4:
            array = array.astype(np.float32)
        elif array.dtype.kind == "u" and array.dtype != np.uint8:
            array = array.astype(np.int64)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        shared = array.flags.writeable and min(array.strides, default=0) >= 0
        column = torch.from_numpy(array if shared else array.copy(order="C"))
    if column.is_floating_point() and not bool(torch.isfinite(column).all()):
        options.refuse(
            f"field {name!r} must hold finite numbers, got NaN or Inf in some records",
            "fill or drop them first (and say what is missing in a field of its own)",
        )
    return column.detach()


def _check_dense(name: str, column: Tensor, options: Options) -> None:
    """Refuse a tensor whose numbers are not all there, each in a place of its own."""
    eighth = column.is_floating_point() and column.element_size() == 1
    strided = column.layout is torch.strided and not (column.is_nested or column.is_quantized)
    if eighth or not strided or column.is_meta:
        options.refuse(
            f"field {name!r} must be a dense tensor of numbers, got another kind",
            "make one first (to_padded_tensor, to_dense, dequantize, float)",
        )


def _long(target: Tensor) -> Tensor:
    """Return targets as int64 where they are whole numbers."""
    return target if target.is_floating_point() else target.long()


def check_targets(records: Records, loss: str, outputs: int) -> None:
    """Raise UserError for records that a named loss cannot learn: without targets, with floats for
    classes, or with classes without an output, whose value torch would tell in its error."""
    if not records.has_targets:
        Options(records.name).refuse(
            f"must have targets for the loss {loss}, got inputs alone",
            "give (X, y), name the field with as_records(..., target=...), or a loss of your own",
        )
    if loss == "cross-entropy":
        if records.examples(1)[1].is_floating_point():
            Options(records.name).refuse(
                "targets must be whole numbers for the loss cross-entropy, got floats",
                "number the classes from 0 (y.long(), or y.argmax(1) of one-hot rows)",
            )
        check_classes(records, outputs)


def check_labels(target: Tensor, options: Options) -> None:
    """Raise UserError for whole-number targets outside 0..classes-1. Below 0 are places without a
    target, where a record has many.
    """
    if options.classes is None or target.is_floating_point() or not target.numel():
        return
    low = 0 if target.dim() == 1 else int(np.iinfo(np.int64).min)
    if int(target.max()) >= options.classes or int(target.min()) < low:
        options.refuse(
            f"targets must be 0 to {options.classes - 1} ({options.classes} classes), got others",
            "number the classes from 0, or say how many there are",
        )


def check_one_class_each(records: Records, classes: int | None = None) -> None:
    """Raise UserError for records that have not one class each, by which they could be sampled.

    classes: all targets are below it; None: no target is looked at.
    """
    targets = records.examples(2)[1]
    if not records.has_targets or targets.is_floating_point() or targets.dim() != 1:
        raise UserError(
            "class_sampling: must be left out where records have not one class each as their "
            "target, (B,)"
        )
    if classes is not None:
        check_classes(records, classes)


def check_classes(records: Records, classes: int) -> None:
    """Raise UserError for a target outside 0..classes-1, whose value torch's own error would tell.

    Items were read once when they were checked, and are not read again.
    """
    options = Options(records.name, classes=classes)
    if isinstance(records, ItemRecords):
        for extreme in records.extremes:
            check_labels(extreme, options)
        return
    for start in range(0, len(records), _AT_ONCE):
        rows = np.arange(start, min(start + _AT_ONCE, len(records)))
        check_labels(records.targets(rows), options)


PACKED = (  # rule and remedy
    "must be one document, has position_ids that begin again: several documents in one row",
    "give each document a row of its own (packing=False)",
)


def begin_again(places: Tensor, mask: Tensor | None) -> bool:
    """Return whether numbers of positions (B, length) fall or repeat within a row.

    mask: 0 where nothing is, which does not count; None: all does.
    """
    places = places.reshape(len(places), -1)
    seen = mask if mask is not None and mask.shape == places.shape else torch.ones_like(places)
    rows = [row[there != 0] for row, there in zip(places, seen, strict=True)]
    return any(bool((row[1:] <= row[:-1]).any()) for row in rows)


def check_not_packed(records: Records) -> None:
    """Raise UserError for a row of several documents, which would be protected as one."""
    for start in range(0, len(records), _AT_ONCE):
        found = records.batch(np.arange(start, min(start + _AT_ONCE, len(records))))
        assert isinstance(found, dict)
        if begin_again(found["position_ids"], found.get("attention_mask")):
            Options(records.name).refuse(f"a record {PACKED[0]}", PACKED[1])


def check_tokens(records: Records, tokens: int, labels: int) -> None:
    """Raise UserError for a token or a label that a language model does not have, whose value
    torch's own error would tell in the middle of a run.
    """
    for start in range(0, len(records), _AT_ONCE):
        found = records.batch(np.arange(start, min(start + _AT_ONCE, len(records))))
        for name, low, count in (("input_ids", 0, tokens), ("labels", None, labels)):
            values = found.get(name) if isinstance(found, dict) else None
            if values is None or not values.numel():
                continue
            if int(values.max()) >= count or (low is not None and int(values.min()) < low):
                Options(records.name).refuse(
                    f"{name} must be 0 to {count - 1:,}, as the model knows them, got others",
                    "take the tokenizer of the model, or resize_token_embeddings",
                )


def _units(options: Options, named: dict[str, Tensor]) -> Sequence[Hashable] | None:
    """Take the units out of the columns, or from the values given."""
    if options.unit is None:
        return None
    if isinstance(options.unit, str):
        if options.unit not in named:
            options.refuse(f"unit must name a field, got {options.unit!r}", _known(named))
        return named.pop(options.unit).tolist()
    return _check_units(options, list(options.unit), len(next(iter(named.values()))))


def _check_units(options: Options, units: list[Any], count: int) -> list[Hashable]:
    found = [each.item() if isinstance(each, np.generic | Tensor) else each for each in units]
    if len(found) != count:
        options.refuse(
            f"unit must have one value for each of the {count:,} records, got {len(found):,}",
            "give one for each",
        )
    if any(map(names_nobody, found)):
        options.refuse("unit must be known for every record, got empty ones", "drop or fill them")
    return found


def _known(names: Any) -> str:
    return f"the fields are {', '.join(map(str, names))}"


# --- tables -----------------------------------------------------------------------------------


def _arrow_of_pandas(frame: Any, options: Options) -> pa.Table:
    import pyarrow as pa

    check_names([name for name in frame.columns if isinstance(name, str)], options.name)
    named = [str(name) for name in frame.columns]
    _check_columns(named, options)
    used = set(named) if not options.inputs else {*options.inputs, options.target, options.unit}
    columns = [place for place, name in enumerate(named) if name in used]
    table = None
    with suppress(pa.ArrowException, TypeError, ValueError):  # whose text has the value
        table = pa.Table.from_pandas(frame.iloc[:, columns], preserve_index=False)
    if table is None:
        options.refuse("columns must hold values of one type each, got several", "convert them")
    return table.rename_columns([named[place] for place in columns])


def _refuse_column(name: str, kind: str, options: Options) -> NoReturn:
    then = "encode it as numbers, or leave it out with inputs=[...]"
    if name == options.target:
        then = "number its classes from 0, such as frame[name].astype('category').cat.codes"
    if kind.startswith(("binary", "large_binary", "struct")):
        then = "decode pictures into an array first, or train on the file by a recipe (dpdist init)"
    options.refuse(f"column {name!r} must hold numbers or lists of numbers, got {kind}", then)


def _of_table(table: pa.Table, options: Options, *, named: bool = True) -> Records:
    """Return records of a table. named: its names of columns are still to be checked."""
    if named:
        check_names(table.column_names, options.name)
    records = ArrayRecords.of(*_table_columns(table, options), options)
    if said := (table.schema.metadata or {}).get(FEATURES_KEY):  # what their network saw
        records.assumed = (*records.assumed, said.decode(errors="replace"))
        records.of_features = True
    return records


def _check_columns(names: Sequence[str], options: Options) -> None:
    """Refuse a table without a column that is asked for, and say which it has."""
    unit = options.unit if isinstance(options.unit, str) else None
    wanted = {*options.inputs, options.target, unit} - {None}
    if missing := sorted(wanted - set(names), key=str):
        options.refuse(f"must have a column {missing[0]!r}, got none", _known(names))


def _mapping_columns(data: Mapping[str, Any], options: Options) -> tuple[dict[str, Any], Any]:
    """Return a dict of arrays, or what numpy.load returns of .npz, as columns of a table."""
    import pyarrow as pa

    def numbers(name: str, _: Collection[str]) -> Tensor:
        return _checked(name, data[name], options)

    def units(name: str) -> np.ndarray:
        return _unit_numbers(pa.chunked_array([pa.array(np.asarray(data[name]))]), options)

    check_names(list(data), options.name)
    return _arranged(list(data), numbers, units, options)


def _table_columns(table: pa.Table, options: Options) -> tuple[dict[str, Any], Any]:
    """Return a table's columns by name, features as one matrix, and the shape of a batch."""
    return _arranged(
        table.column_names,
        lambda name, fields: _array(name, table.column(name), options, fields),
        lambda name: _unit_numbers(table.column(name), options),
        options,
    )


def _arranged(
    names: Sequence[str],
    numbers: Callable[[str, Collection[str]], Any],
    units: Callable[[str], np.ndarray],
    options: Options,
) -> tuple[dict[str, Any], Any]:
    """Return columns by name, features as one matrix, and the shape of a batch.

    numbers: returns a column of numbers, given the names of all fields. units: returns a number for
    each record's unit.
    """
    _check_columns(names, options)
    unit = options.unit if isinstance(options.unit, str) else None
    chosen = options.inputs or [name for name in names if name not in (options.target, unit)]
    if not chosen:
        options.refuse("must have a column of inputs beside target and unit", _known(names))
    found: dict[str, Any] = {}
    wanted = [*chosen, *([] if options.target is None else [options.target])]
    arrays = {name: numbers(name, wanted) for name in wanted}
    answers = None if options.target is None else arrays.pop(options.target)
    shape: Any = None
    if len(chosen) == 1 and (options.single or arrays[chosen[0]].ndim > 1):
        found[INPUTS] = arrays[chosen[0]]
    elif all(array.ndim == 1 for array in arrays.values()):
        _check_features(arrays, answers, options)
        found[INPUTS] = np.stack([np.asarray(arrays[n], np.float32) for n in chosen], axis=1)
    else:
        found, shape = dict(arrays), dict
    if options.target is not None:
        found[options.target if shape is dict else TARGETS] = answers
    if unit is not None:
        found[unit] = units(unit)
    return found, shape


def _check_features(arrays: Mapping[str, Any], answers: Any, options: Options) -> None:
    """Refuse the answer among the features; warn of a column that may say whose a record is."""
    for name, array in arrays.items():
        flat = answers is not None and answers.ndim == 1
        if flat and tells_answer(np.asarray(array), np.asarray(answers)):
            options.refuse(
                f"inputs must not hold the answer, got {name!r}, which is {options.target!r} but "
                "for the names of its values",
                "leave it out with inputs=[...]",
            )
        if options.inputs or options.unit is not None or not is_identifier_name(name):
            continue
        if 1 < (values := len(np.unique(array))) < len(array):
            warnings.warn(
                f"{options.name}: {repeats_words(name, len(array), values)} The unit is one "
                f"record; to protect the person, give unit={name!r}; else leave it out of inputs",
                stacklevel=6,
            )


def _unit_numbers(column: pa.ChunkedArray, options: Options) -> np.ndarray:
    """Return a number for each unit, whatever names it: equal ones are the same unit."""
    encoded = column.combine_chunks().dictionary_encode()
    if column.null_count or any(map(names_nobody, encoded.dictionary.to_pylist())):
        options.refuse("unit must be known for every record, got empty ones", "drop or fill them")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def _array(
    name: str, column: pa.ChunkedArray, options: Options, fields: Collection[str]
) -> np.ndarray:
    """Return a column of numbers (N,), or of lists of numbers (N, length)."""
    import pyarrow as pa

    kind = column.type
    if column.null_count:
        options.refuse(f"column {name!r} must be filled, got empty values", "fill or drop them")
    nested = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if pa.types.is_fixed_size_list(kind):
        column, nested = column.cast(pa.list_(kind.value_type)), True
    value = column.type.value_type if nested else kind
    if not (
        pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_boolean(value)
    ):
        _refuse_column(name, str(kind), options)
    if not nested:
        return np.array(column.to_numpy())
    whole = column.combine_chunks()
    lengths = np.diff(np.asarray(whole.offsets))
    flat = whole.flatten()
    if flat.null_count:
        options.refuse(f"column {name!r} must be filled, got empty values", "fill or drop them")
    values = flat.to_numpy(zero_copy_only=False)
    size = options.length_of(name)
    if size is None:
        if len(set(lengths.tolist())) > 1:
            _refuse_ragged(name, options)
        return np.array(values.reshape(len(lengths), -1))
    fill = options.padding_of(name, values.dtype.kind in "iu", fields)
    kind = np.int64 if fill == IGNORED else values.dtype  # which an uint8 does not hold
    padded = np.full((len(lengths), size), fill, dtype=kind)
    begin = 0
    for row, length in enumerate(lengths):
        kept = min(length, size)
        padded[row, :kept] = values[begin : begin + kept]
        begin += length
    return padded


def _refuse_ragged(name: str, options: Options) -> NoReturn:
    options.refuse(
        f"records of field {name!r} must have one shape, got several",
        "give a public length with pad_to=LENGTH: shorter ones are filled up, longer ones cut",
    )


def _ray_columns(data: Any, options: Options) -> tuple[dict[str, Any], Any]:
    """Materialize a Ray Data set once. Its rows are put in the order of a hash of each row's own
    values, because blocks may come in another order when the same command goes on.
    """
    import pyarrow as pa
    import ray

    if options.unit is not None and not isinstance(options.unit, str):
        options.refuse("unit must name a column of Ray Data, whose rows are reordered", "add one")
    blocks = ray.get(data.materialize().to_arrow_refs())
    filled = [block for block in blocks if block.num_rows]
    if not filled:
        options.refuse("must hold one record at least, got none", "look where it comes from")
    check_names(filled[0].column_names, options.name)
    columns, shape = _table_columns(pa.concat_tables(filled), options)
    arrays = [np.asarray(column) for column in columns.values()]
    digests = []
    for row in range(len(arrays[0])):
        digest = hashlib.blake2b(digest_size=16, person=b"dpdist.order")
        for array in arrays:
            digest.update(np.ascontiguousarray(array[row]).tobytes())
        digests.append(digest.digest())
    order = sorted(range(len(digests)), key=digests.__getitem__)
    return {name: np.asarray(column)[order] for name, column in columns.items()}, shape


def _of_name(name: str, options: Options) -> Records:
    """Return a built-in data set's training split, or a file's rows."""
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
    return _of_table(
        file.read(file.schema.names).replace_schema_metadata(file.schema.metadata), options
    )


# --- items ------------------------------------------------------------------------------------


class ItemRecords(Records):
    """Records of a map-style data set, asked item by item under seeds of each record's own.

    source: has `__len__` and `__getitem__`. collate: called with a list of one item; None where
    items are taken as they are. Between steps an item is read with a fixed key; `for_step` gives
    each step its draw.
    """

    def __init__(
        self,
        source: Any,
        options: Options,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        plain: Any = None,
        replaced: Sequence[str] = (),
    ) -> None:
        self.name, self.replaced = options.name, tuple(replaced)
        self.assumed = (_ONE_RECORD.format(self.name),)
        self._source, self._options, self._collate = source, options, collate
        self._plain = source if plain is None else plain
        self._key = _CHECK_KEY
        self._generators = self._find_generators()
        self._last: tuple[bytes, Any, Tensor] | None = None
        self.extremes: tuple[Tensor, ...] = ()  # targets (1, ...) with the least and largest class
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
        records._generators = self._find_generators()  # code may make them when it is first used
        return records

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
            then = "read without its transform, for the fingerprint: give before_transform="
        items = (self._item(read, index, _CHECK_KEY, then) for index in range(len(self)))
        try:
            with kept_generators(self._generators):
                return fingerprint_of(key, self, _chained((told,), items))
        except TypeError as error:
            options.refuse(
                f"items must be numbers, arrays, pictures or text for a fingerprint, got {error}",
                "give before_transform=, a function from a position to such values",
            )

    def input_macs(self, key: bytes) -> Iterator[tuple[bytes, ...]]:
        """Yield MACs of each record's tensors, and of its item before random transforms."""
        options, hidden = self._options, self._plain is self._source
        read = options.before_transform or self._plain.__getitem__
        for index, macs in enumerate(super().input_macs(key)):
            with kept_generators(self._generators):
                named, _ = _named(self._item(read, index, _CHECK_KEY), options)
            for name in (options.target or TARGETS, options.unit):
                named.pop(name, None) if isinstance(name, str) else None
            found = {*macs}
            for item in (named, stored_input(self._source, index, files=hidden)):
                with suppress(TypeError):  # an item of another kind: its tensors alone are compared
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
        """Ask for one item under its seeds. What its code raises may hold values: only the type is
        told.
        """
        try:
            seed_generators(seed_of(key, index), self._generators)
            return read(index)
        except Exception as error:
            kind = type(error).__name__
        self._options.refuse(
            f"record {index} must be readable, but its code raised {kind}",
            then,
        )

    def _fields(self, index: int) -> tuple[dict[str, Tensor], Any]:
        """Return one record's tensors by field, and the shape of a batch: dict, tuple or None."""
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
        named, shape = _named(item, options)
        if options.unit is not None and isinstance(options.unit, str):
            named.pop(options.unit, None)
        return {name: self._tensor(name, value, named) for name, value in named.items()}, shape

    def _tensor(self, name: str, value: Any, fields: Collection[str]) -> Tensor:
        options = self._options
        if isinstance(value, Tensor):
            tensor = value.detach()
        elif isinstance(value, bool | int | float | np.ndarray | np.generic | list | tuple):
            try:
                array = np.asarray(value)
            except ValueError:
                array = np.empty(0, dtype=object)
            if array.dtype.kind not in "biuf":
                self._refuse_type(name, "values that are no numbers of one shape")
            floating = array.dtype == np.float64
            tensor = torch.from_numpy(np.array(array, np.float32 if floating else None))
        else:
            self._refuse_type(name, f"a {type(value).__name__}")
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
        if fill == IGNORED:  # which an uint8 does not hold
            tensor = tensor.long()
        padded = tensor.new_full((size, *tensor.shape[1:]), fill)
        kept = min(size, len(tensor))
        padded[:kept] = tensor[:kept]
        return padded

    def _refuse_type(self, name: str, got: str) -> NoReturn:
        self._options.refuse(
            f"field {name!r} must be a tensor, an array or a number, got {got}",
            "convert it in the data set (a picture with torchvision's ToTensor)",
        )

    def _split(self, named: dict[str, Tensor], shape: Any) -> tuple[Any, Tensor | None]:
        """Return one record's input and target."""
        target = self._options.target or (TARGETS if TARGETS in named else None)
        if self._options.target is not None and self._options.target not in named:
            self._options.refuse(
                f"items must have a field {self._options.target!r}, got none", _known(named)
            )
        wanted = None if target is None else _long(named[target])
        if shape is dict:
            if self._options.single:
                return named[self._options.inputs[0]], wanted
            return named, wanted
        rest = [value for name, value in named.items() if name != target]
        return (tuple(rest) if shape is tuple else rest[0]), wanted

    def _check(self) -> list[Hashable] | None:
        """Look at every record once: fields, types, shapes, labels and units."""
        options, units = self._options, []
        for index in range(self._count):
            named, shape = self._fields(index)
            own = {n: (t.dtype, tuple(t.shape)) for n, t in named.items()}
            if not index:
                self._spec = own
                self.has_targets = self._split(named, shape)[1] is not None
            self._compare(own)
            wanted = self._split(named, shape)[1]
            if wanted is not None:
                check_labels(wanted.unsqueeze(0), options)
                self._widen(wanted)
            if isinstance(options.unit, str):
                item = self._item(self._plain.__getitem__, index, _CHECK_KEY)
                if not isinstance(item, Mapping) or options.unit not in item:
                    options.refuse(f"unit must name a field, got {options.unit!r}", _known(named))
                units.append(item[options.unit])
        if isinstance(options.unit, str):
            return _check_units(options, units, self._count)
        return None if options.unit is None else _check_units(
            options, list(options.unit), self._count
        )  # fmt: skip

    def _widen(self, wanted: Tensor) -> None:
        """Remember a record's target where it is the least or the largest so far."""
        if wanted.is_floating_point() or not wanted.numel():
            return
        least, most = self.extremes or (wanted.unsqueeze(0), wanted.unsqueeze(0))
        if wanted.min() < least.min():
            least = wanted.unsqueeze(0)
        if wanted.max() > most.max():
            most = wanted.unsqueeze(0)
        self.extremes = least, most

    def _compare(self, own: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Raise UserError for a record of other fields, types or shapes than the first one."""
        if own == self._spec:
            return
        for name, (_, shape) in own.items():
            if name in self._spec and shape != self._spec[name][1]:
                _refuse_ragged(name, self._options)
        self._options.refuse(
            "records must have the same fields of the same dtypes, got others", "convert them"
        )

    def _read(self, indices: np.ndarray | slice) -> tuple[Any, Tensor]:
        """Return inputs and targets of one draw; those of the last call are kept, since both are
        asked for.
        """
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
        check_labels(found, options)
        return stack_fields(rows), found


def _chained(first: tuple[Any, ...], items: Iterator[Any]) -> Iterator[Any]:
    yield from first
    yield from items


def _length(source: Any, options: Options) -> int:
    """Return a data set's length. Raises UserError without one, or without items by position."""
    kind = type(source).__name__
    iterable = isinstance(source, torch_data.IterableDataset) or kind.startswith("Iterable")
    if iterable or not hasattr(source, "__getitem__"):
        options.refuse(
            f"must have a length and records by position, got a {kind}",
            "which record joins a step is drawn by position: collect the records in a list or in "
            "arrays first",
        )
    try:
        count = len(source)
    except (TypeError, NotImplementedError):
        options.refuse(
            f"must have a length (__len__), got a {kind} without",
            "the sampling rate is computed from it: define __len__",
        )
    if count < 1:
        options.refuse("must hold one record at least, got none", "look where it comes from")
    return count


def _named(item: Any, options: Options) -> tuple[dict[str, Any], Any]:
    """Return an item's fields by name, and the form of a batch of them: dict, tuple or None."""
    if isinstance(item, Mapping):
        if options.inputs:
            unit = options.unit if isinstance(options.unit, str) else None
            wanted = [*options.inputs, *(n for n in (options.target, unit) if n)]
            if missing := [name for name in wanted if name not in item]:
                options.refuse(f"items must have a field {missing[0]!r}, got none", _known(item))
            item = {name: item[name] for name in wanted}
        return dict(item), dict
    if isinstance(item, tuple | list) and len(item) > 1:
        *inputs, target = item
        if len(inputs) == 1:
            return {INPUTS: inputs[0], TARGETS: target}, None
        return {**{str(n): each for n, each in enumerate(inputs)}, TARGETS: target}, tuple
    return {INPUTS: item[0] if isinstance(item, tuple | list) else item}, None


def _of_items(data: Any, options: Options) -> Records:
    return ItemRecords(data, options, plain=without_transforms(data))


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
    """Return a copy of a data set whose `transform`, `target_transform` and `transforms`, as
    torchvision names them, change nothing; of a part or of several, with those of the wholes."""
    changes: dict[str, Any] = {
        name: unchanged for name, unchanged in _UNCHANGED.items()
        if getattr(source, name, None) is not None
    }  # fmt: skip
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
    except AttributeError:  # a property: the data set keeps its own way
        return source
    return copied


_HUGGING_FACE = {"IterableDataset": "dataset.take(n) collected with Dataset.from_list",
                 "DatasetDict": 'one of its splits, such as data["train"]',
                 "IterableDatasetDict": "a split of a map-style data set"}  # fmt: skip


def _of_hugging_face(data: Any, kind: str, options: Options) -> Records:
    if kind in _HUGGING_FACE:
        options.refuse(f"must be a datasets.Dataset, got a {kind}", f"give {_HUGGING_FACE[kind]}")
    plain = data.with_format(None)
    seen = data if data.format["type"] is not None else data.with_format("torch")
    return ItemRecords(seen, options, plain=plain)


# --- loaders ----------------------------------------------------------------------------------


_ORDERS = (torch_data.RandomSampler, torch_data.SequentialSampler)
_DRAWN = "a record joins each step with the plan's rate, drawn under the run key"


def _of_loader(loader: torch_data.DataLoader[Any], options: Options) -> Records:
    """Take a loader's data set and collate function; refuse what cannot be replaced honestly."""
    source = loader.dataset
    if isinstance(source, torch_data.IterableDataset):
        _length(source, options)
    batches, sampler = loader.batch_sampler, loader.sampler
    own = next(
        (
            type(each).__name__
            for each, known in (
                (batches, (torch_data.BatchSampler, type(None))),
                (sampler, (*_ORDERS, torch_data.DistributedSampler)),
            )
            if type(each) not in known
        ),
        "drop_last=True" if loader.drop_last else "",
    )
    if own:
        options.refuse(
            f"the DataLoader must not choose, weight or drop records itself, got {own}",
            f"{_DRAWN}: pass the data set itself, a part of it by torch.utils.data.Subset, and put "
            "weights into the loss",
            see="how-to/own-data.md#data-in-python",
        )
    words = (
        f"the DataLoader's {type(sampler).__name__} and batch_size={loader.batch_size}: {_DRAWN}"
    )
    if isinstance(source, torch_data.TensorDataset) and _default(loader):
        records = adapt(source, options)
        records.replaced = (words,)
        return records
    return ItemRecords(
        source,
        options,
        collate=None if _default(loader) else loader.collate_fn,
        plain=without_transforms(source),
        replaced=(words,),
    )


def _default(loader: torch_data.DataLoader[Any]) -> bool:
    names = (torch_data.default_collate, torch_data.default_convert)
    return loader.collate_fn in names


# --- batches of one or several tensors --------------------------------------------------------


def map_fields(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return a batch of the same kind with the function's result for each tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: function(each) for name, each in batch.items()}
    return tuple(function(each) for each in batch)


def rows_of(batch: Any) -> int:
    """Return how many records a batch holds."""
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
    """Return public ranges by field, with that of the targets."""
    found = dict(options.ranges)
    if options.classes is not None:
        found.setdefault(options.target or TARGETS, options.classes)
        found.setdefault(TARGETS, options.classes)
    elif options.target in found:
        found.setdefault(TARGETS, found[options.target])
    if options.single and options.inputs and options.inputs[0] in found:
        found.setdefault(INPUTS, found[options.inputs[0]])
    return found
