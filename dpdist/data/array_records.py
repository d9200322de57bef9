"""Records in memory: arrays, tensors and columns of tables (`dpdist.data.protocol`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from dpdist.core.errors import UserError
from dpdist.core.files import FEATURES_KEY
from dpdist.core.script_errors import warn
from dpdist.data import names_nobody
from dpdist.data.column_names import is_identifier_name, repeats_words, tells_answer
from dpdist.data.protocol import (
    INPUTS,
    TARGETS,
    Records,
    check_labels,
    fields_of,
    invented_like,
    map_fields,
    warn_if_standardized,
)
from dpdist.data.tables import is_list

if TYPE_CHECKING:
    from dpdist.data.protocol import Batch

IGNORED = -100  # the label of tokens that are not learned, in torch and `transformers`
LABELS = "labels"
_MASKS = ("attention_mask", "token_type_ids")


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


TABLE = "table"  # the form of named columns: those with one number per record become features


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
        self._inputs, self._units, self._ranges = inputs, units, ranges_of(options)
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
            require_fields(options, columns)
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
        wanted = as_targets(named[target]) if target in named else None
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
        found = cls(rows, wanted, options, checked_units(units, count, options))
        if seen := metadata.get(FEATURES_KEY):  # by the network that made the features
            found.assumed = (*found.assumed, seen.decode(errors="replace"))
            found.of_features = True
        return found

    def __len__(self) -> int:
        return len(self._targets)

    def batch(self, indices: np.ndarray | slice) -> Batch:
        chosen = positions_of(indices, len(self))
        return map_fields(lambda column: column[chosen], self._inputs)

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        return self._targets[positions_of(indices, len(self))]

    def unit_id(self, index: int) -> Hashable:
        return index if self._units is None else self._units[index]

    def examples(self, count: int) -> tuple[Batch, Tensor]:
        few = slice(0, 1)
        return invented_like(self.batch(few), self.targets(few), count, self._ranges)


def require_fields(
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
            refuse_ragged(name, options)
        found = pc.list_flatten(column)
        return np.array(found.to_numpy()).reshape(len(column), -1)
    fill = options.padding_of(name, pa.types.is_integer(kind), fields)
    padded = pc.list_slice(column, 0, size, return_fixed_size_list=True).combine_chunks().flatten()
    if fill == IGNORED:  # does not fit into uint8
        padded = padded.cast(pa.int64())
    filled = padded.fill_null(pa.scalar(fill).cast(padded.type))
    return np.array(filled.to_numpy(zero_copy_only=False)).reshape(len(column), size)


def refuse_ragged(name: str, options: Options) -> NoReturn:
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
            warn(
                f"{options.name}: {repeats_words(name, len(array), values)} The unit is one "
                f"record; to protect the person, give unit={name!r}; else leave it out of inputs"
            )


def _units_of(name: str, column: Any, options: Options) -> Any:
    """Return the values of a column of units."""
    if hasattr(column, "iloc"):
        column = _arrow_of_pandas(name, column, options)
    return column.to_pylist() if isinstance(column, pa.ChunkedArray) else column


def checked_units(units: Any, count: int, options: Options) -> list[Hashable] | None:
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


def _check_dense(name: str, column: Tensor, options: Options) -> None:
    """Raise UserError for a sparse, nested, quantized, 8-bit float or meta tensor."""
    eighth = column.is_floating_point() and column.element_size() == 1
    strided = column.layout is torch.strided and not (column.is_nested or column.is_quantized)
    if eighth or not strided or column.is_meta:
        options.refuse(
            f"field {name!r} must be a dense tensor of numbers, got another kind",
            "make one first (to_padded_tensor, to_dense, dequantize, float)",
        )


def as_targets(target: Tensor) -> Tensor:
    """Return integer targets as int64, and others as they are."""
    return target if target.is_floating_point() else target.long()


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


def positions_of(indices: np.ndarray | slice, count: int) -> Tensor:
    if isinstance(indices, slice):
        return torch.arange(count)[indices]
    return torch.as_tensor(np.asarray(indices, dtype=np.int64))


def ranges_of(options: Options) -> dict[str, int | tuple[float, float]]:
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
