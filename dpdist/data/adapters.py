"""Records of any data that a script has: which of the two kinds it becomes.

Files, tables, arrays and tensors become columns in memory (`dpdist.data.array_records`). Map-style
data sets and loaders are read item by item (`dpdist.data.item_records`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor
from torch.utils import data as torch_data

from dpdist.data.array_records import TABLE, ArrayRecords, Options
from dpdist.data.column_names import check_names
from dpdist.data.item_records import ItemRecords, length_of_source, without_transforms
from dpdist.data.protocol import INPUTS, TARGETS, Records, fields_of


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
        length_of_source(source, options)
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
