"""Convert raw columns to inputs by public constants, for files, tables and predictions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from dpdist.core.errors import UserError
from dpdist.core.fields import scale_to_unit, validation_message
from dpdist.core.files import data_error
from dpdist.core.preprocessing import SECONDS, ColumnPreprocessing, word_of
from dpdist.data.tables import TableFile, is_list, is_text, open_table

_AS_IT_IS = ColumnPreprocessing()
_WORD = re.compile(r"\w+")


def preprocess(
    table: pa.Table,
    columns: Sequence[str],
    rules: Mapping[str, ColumnPreprocessing],
    file: TableFile,
    first_row: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs of some rows, and values that identify their records: float32 (rows, n).

    Guarantee: a row of both depends only on that row and the rules. For a column of numbers without
    a rule, both are the numbers.

    Args:
        table: the rows.
        columns: names of the columns to read, in order.
        rules: preprocessing by column.
        file: source of the rows, for error messages.
        first_row: number of the first row.

    Raises:
        UserError: a cell breaks its column's rule; the message names row and column.
    """
    found = []
    for name in columns:
        rule, place = rules.get(name, _AS_IT_IS), (file, first_row, name)
        convert = _categories if rule.categories else _text if rule.text else _numbers
        found.append(convert(table[name].combine_chunks(), rule, *place))
    if len(found) > 1 and any(is_list(table[name].type) for name in columns):
        raise UserError("data.columns.features: must be columns of numbers, or one column of lists")
    inputs, identities = zip(*found, strict=True)
    return np.concatenate(inputs, axis=1), np.concatenate(identities, axis=1)


def numbers_of(values: pa.Array, file: TableFile, first_row: int, name: str) -> np.ndarray:
    """Return a column of numbers, booleans or lists of one length as float32 (rows, numbers).

    Missing values are NaN.
    """
    rows = len(values)
    if is_list(values.type):
        lengths = pc.fill_null(pc.list_value_length(values), -1)
        if len(lengths.unique()) != 1 or lengths[0].as_py() < 0:
            raise file.error("must have lists of one length", row=first_row, column=name)
        values = values.flatten()
    kind = values.type
    if pa.types.is_null(kind):  # a column of empty cells
        return np.full((rows, 1), np.nan, np.float32)
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise file.error(f"must be numbers, or lists of numbers, got {kind}", column=name)
    with np.errstate(over="ignore"):  # infinite values raise an error where they are used
        found = values.to_numpy(zero_copy_only=False).astype(np.float32)
    return found.reshape(rows, -1)


def _numbers(
    values: pa.Array, rule: ColumnPreprocessing, file: TableFile, first_row: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return a column as filled and scaled numbers, and as the original ones."""
    if rule.date is not None:
        raw = _dates(values, rule, file, first_row, name)
    else:
        if is_text(values.type):
            key = f"data.columns.preprocessing.{name}"
            hint = f"; words need {key}.categories, dates in words {key}.date"
            raise file.error(f"must be numbers, got {values.type}{hint}", column=name)
        raw = numbers_of(values, file, first_row, name)
    absent = np.isnan(raw)
    fits = np.isfinite(raw) | (absent if rule.missing is not None else False)
    if rule.log1p and rule.range is None:
        fits &= absent | (raw > -1)
    if len(bad := np.flatnonzero(~fits.all(axis=1))):
        row = int(bad[0])
        rule_text = "must be finite as float32"
        if absent[row].any():
            hint = f"data.columns.preprocessing.{name}.missing fills in a constant"
            rule_text = f"must have a value, got none; {hint}"
        elif np.isfinite(raw[row]).all():
            rule_text = "must be above -1 with log1p"
        raise file.error(rule_text, first_row + row, name)
    if rule == _AS_IT_IS:
        return raw, raw
    found = raw.astype(np.float64)
    flagged = rule.missing == "flag"
    if rule.missing is not None and not flagged:
        found[absent] = rule.missing
    ends = rule.range
    if rule.log1p:
        found = np.log1p(found if ends is None else found.clip(*ends))
        ends = None if ends is None else tuple(np.log1p(ends))
    found = found if ends is None else scale_to_unit(found, *ends)
    if flagged:
        found = np.concatenate([np.where(absent, 0, found), absent], axis=1)
    return found.astype(np.float32), np.where(absent, np.float32(np.nan), raw)


def _dates(
    values: pa.Array, rule: ColumnPreprocessing, file: TableFile, first_row: int, name: str
) -> np.ndarray:
    """Return dates as numbers since their origin, NaN if missing. Times without a zone are UTC."""
    assert rule.date is not None
    if is_text(values.type):
        moments = []
        for row, text in enumerate(values.to_pylist(), first_row):
            try:
                blank = not (text or "").strip() or text in file.missing_words
                moments.append(None if blank else _moment(text.strip()))
            except ValueError:
                raise file.error("must be a date, YYYY-MM-DD", row, name) from None
        values = pa.array(moments, pa.timestamp("us", "UTC"))
    kind = values.type
    if pa.types.is_null(kind):
        return np.full((len(values), 1), np.nan, np.float32)
    if not (pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
        raise file.error(f"must be dates, got {kind}", column=name)
    zone = kind.tz if pa.types.is_timestamp(kind) else None
    counted = values.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64())
    since = counted.fill_null(0).to_numpy() - _moment(rule.date.origin).timestamp() * 1e6
    found = since / (1e6 * SECONDS[rule.date.unit])
    found[counted.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return found.astype(np.float32)[:, None]


def _moment(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _categories(
    values: pa.Array, rule: ColumnPreprocessing, file: TableFile, first_row: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return a column of words or numbers as 0s and 1s, or as codes, and hashes of the words."""
    listed = list(rule.categories)
    coded = _words(values, file, name).dictionary_encode()
    words = coded.dictionary.to_pylist()
    gone = {"", *file.missing_words} - set(listed)
    other, places = len(listed), {word: place for place, word in enumerate(listed)}
    # The last entry of each is that of a missing cell.
    codes = np.array([-1 if w in gone else places.get(w, other) for w in words] + [-1])
    digests = [
        [-1.0] * 8 if w in gone else list(hashlib.blake2b(w.encode(), digest_size=8).digest())
        for w in words
    ]
    marks = np.array([*digests, [-1.0] * 8], np.float32)
    indices = coded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
    code, identity = codes[indices], marks[indices]
    absent = code < 0
    if rule.missing is None and absent.any():
        row = first_row + int(np.flatnonzero(absent)[0])
        hint = f"data.columns.preprocessing.{name}.missing fills in a constant"
        raise file.error(f"must have a value, got none; {hint}", row, name)
    flagged = rule.missing == "flag"
    if not flagged and rule.missing is not None:
        code = np.where(absent, listed.index(word_of(rule.missing)), code)
    if rule.codes:
        found = np.where(code < 0, other, code)[:, None]
    else:
        found = code[:, None] == np.arange(other + 1)
    if flagged:
        found = np.concatenate([found, absent[:, None]], axis=1)
    return found.astype(np.float32), identity


def _text(
    values: pa.Array, rule: ColumnPreprocessing, file: TableFile, first_row: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return texts as counts of words by hash, and hashes of the texts.

    Source: Weinberger et al. (2009), "Feature hashing for large scale multitask learning".
    """
    assert rule.text is not None
    texts = [
        "" if t in (None, *file.missing_words) else t
        for t in _words(values, file, name).to_pylist()
    ]
    found = np.zeros((len(texts), rule.text))
    for row, text in enumerate(texts):
        places = [crc32(word.encode()) % rule.text for word in _WORD.findall(text.lower())]
        np.add.at(found[row], places, 1)
    found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1)
    if rule.missing == "flag":
        absent = np.array([[not text] for text in texts])
        found = np.concatenate([found, absent], axis=1)
    digests = [list(hashlib.blake2b(text.encode(), digest_size=8).digest()) for text in texts]
    return found.astype(np.float32), np.array(digests, np.float32).reshape(-1, 8)


def _words(values: pa.Array, file: TableFile, name: str) -> pa.Array:
    """Return a column as words without blanks around them; 1.0 becomes "1"."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        values = values.cast(kind.value_type)
        kind = values.type
    if pa.types.is_nested(kind) or pa.types.is_binary(kind):
        raise file.error(f"must have one word or number per record, got {kind}", column=name)
    if pa.types.is_floating(kind):
        found = [None if v is None or v != v else word_of(v) for v in values.to_pylist()]
        return pa.array(found, pa.string())
    return pc.utf8_trim_whitespace(values.cast(pa.string()))


class Sequences(NamedTuple):
    """Records of one person each, from several rows per person.

    Attributes:
        inputs: float32 (persons, length, inputs + 1). A person's last rows, the latest last, after
            rows of zeros if there are fewer; the last input is 1 for a row and 0 for padding.
        targets: the target of each person's last row, (persons,); None without a target column.
        persons: the persons, in the order of the records.
    """

    inputs: np.ndarray
    targets: np.ndarray | None
    persons: list[Any]


class Preprocessing:
    """Convert raw columns to a model's inputs by public constants, each record by itself.

    Guarantee: a row of `transform` depends only on that record and the constants, so that one
    record changes no other one's inputs, as differential privacy requires. It cannot be fitted.

    Args:
        columns: by name, in the order of the inputs, the rules of
            `data.columns.preprocessing`: range, missing, categories, codes, date, log1p,
            text, drop; {} for numbers as they are. Other columns of a table are not read.

    Raises:
        UserError: a rule is invalid.

    Source: clipping and encoding by constants that are chosen without the records, as section 5.3
    of Ponomareva et al. (2023) advises, https://arxiv.org/abs/2303.00654.

    Example:
        >>> import dpdist
        >>> age, sex = {"range": [0, 120], "missing": "flag"}, {"categories": ["f", "m"]}
        >>> made = dpdist.Preprocessing({"age": age, "sex": sex})
        >>> made.transform({"age": [30, None], "sex": ["m", "x"]}).tolist()
        [[0.25, 0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0, 1.0]]
    """

    def __init__(self, columns: Mapping[str, Mapping[str, Any] | ColumnPreprocessing]) -> None:
        rules = {name: checked_rule(name, rule) for name, rule in columns.items()}
        self._rules = {name: rule for name, rule in rules.items() if not rule.drop}

    def fit(self, *records: Any, **more: Any) -> NoReturn:
        """Raise UserError: constants must not be fitted to records.

        It always raises, whatever the arguments, and never returns.
        """
        raise UserError(
            "Preprocessing.fit: must not be called: means, ranges and categories fitted to private "
            "records let one record change the inputs of all others, which epsilon does not cover; "
            "give constants that are public knowledge, or computed only from public rows, and call "
            "transform",
            see="how-to/preprocessing.md#preprocessing-by-public-constants",
        )

    fit_transform = fit

    def transform(self, data: Any) -> np.ndarray:
        """Return the model's inputs for the rows of a table, a float32 array (rows, inputs).

        Inputs are in the order of `get_feature_names_out`.

        Args:
            data: a pandas DataFrame, a pyarrow Table, a dict of columns, or the path of a Parquet,
                CSV or JSONL file.

        Raises:
            UserError: a column is missing, or a cell breaks its rule; the message names row and
                column, never the value.
        """
        return self.transform_file(as_table_file(data))

    def transform_file(self, file: TableFile) -> np.ndarray:
        """Return the model's inputs for the rows of an open file, a float32 array (rows, inputs).

        Args:
            file: a `TableFile` of `dpdist.data.tables`, as `open_table(path)` returns it.

        Raises:
            UserError: as `transform` does.
        """
        names = list(self._rules)
        parts = [
            preprocess(table, names, self._rules, file, first)[0]
            for first, table in file.rows(names)
        ]
        if not parts:
            raise file.error("must have at least one record, got none")
        return np.concatenate(parts)

    def sequences(
        self, data: Any, *, person: str, order: str, length: int, target: str | None = None
    ) -> Sequences:
        """Return one record per person from a table of several rows per person, a `Sequences`.

        Guarantee: a record depends only on the rows of its person and the constants, so that one
        record is one person, and the unit of privacy can stay one record.

        Args:
            data: as in `transform`.
            person: name of the column of persons.
            order: column of numbers, dates or ISO dates as text by which a person's rows are
                sorted; rows with equal values stay in the table's order.
            length: number of a person's last rows to read; a public constant.
            target: column of the person's class or number, which is read from the last row.

        Returns:
            A `Sequences` of three. First `inputs`, float32 (persons, length, inputs + 1): a
            person's last rows, the latest last, after rows of zeros if there are fewer; the last
            input is 1 for a row and 0 for padding. Second `targets`, an array (persons,); None
            without `target`. Third `persons`, a list of the values that name them, in the order of
            the records.

        Raises:
            UserError: as `transform`, or a row has no person or no order.

        Example:
            >>> import dpdist
            >>> made = dpdist.Preprocessing({"dose": {"range": [0, 10]}})
            >>> visits = {"who": ["a", "b", "a"], "day": [2, 1, 1], "dose": [10, 5, 0]}
            >>> made.sequences(visits, person="who", order="day", length=2).inputs.tolist()
            [[[0.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.5, 1.0]]]
        """
        if length < 1:
            raise UserError(f"sequences: length: must be 1 or more, got {length}")
        file = as_table_file(data)
        others = [person, order] + ([] if target is None else [target])
        table = pa.concat_tables(table.select(others) for _, table in file.rows(others))
        for name in others:
            if len(gone := np.flatnonzero(table[name].is_null().to_numpy())):
                raise file.error("must have a value", int(gone[0]), name)
        rows = self.transform_file(file)
        ranks = pc.rank(table[order], tiebreaker="first").to_numpy()
        persons = table[person].combine_chunks().dictionary_encode()
        codes = persons.indices.to_numpy()
        by_person = np.lexsort((ranks, codes))
        ends = np.cumsum(np.bincount(codes))
        inputs = np.zeros((len(ends), length, rows.shape[1] + 1), np.float32)
        for number, own in enumerate(np.split(by_person, ends[:-1])):
            last = own[-length:]
            inputs[number, length - len(last) :, :-1] = rows[last]
            inputs[number, length - len(last) :, -1] = 1
        targets = None if target is None else table[target].to_numpy()[by_person[ends - 1]]
        return Sequences(inputs, targets, persons.dictionary.to_pylist())

    def transform_record(self, record: Any) -> np.ndarray:
        """Return the model's inputs for one record, a float32 array (inputs,).

        Args:
            record: a dict of its cells by column, or an array of numbers in the order of the
                columns.

        Raises:
            UserError: as `transform` does, or the array has a different length.
        """
        cells = record
        if not isinstance(record, Mapping):
            names = list(self._rules)
            cells = dict(zip(names, [record] if len(names) == 1 else record, strict=False))
            if len(names) == 1 and np.shape(record) == (1,):
                cells = {names[0]: record[0]}
            elif len(names) > 1 and np.shape(record) != (len(names),):
                raise UserError(f"a record must have {len(names)} numbers, got {len(record)}")
        found: np.ndarray = self.transform({name: [cell] for name, cell in cells.items()})[0]
        return found

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Return the names of the inputs, an array of str, in the order of `transform`.

        A column of lists has one name for all of its inputs. Name and argument are those of
        scikit-learn's method.

        Args:
            input_features: ignored.
        """
        names = [each for name, rule in self._rules.items() for each in rule.names(name)]
        return np.array(names, dtype=object)


def checked_rule(name: str, rule: Any) -> ColumnPreprocessing:
    """Return the rule of a column. Raises UserError, by key, for an invalid one."""
    try:
        return ColumnPreprocessing.model_validate(rule)
    except ValidationError as error:
        item: Any = error.errors()[0]
        of_key = [item["ctx"]["key"]] if item["type"] == "of_key" else []
        key = ".".join(map(str, [name, *item["loc"], *of_key]))
        raise UserError(f"{key}: {validation_message(item)}") from None


class _GivenTable(TableFile):
    """A table in memory."""

    path = Path("data")

    def __init__(self, table: pa.Table) -> None:
        self._table, self.schema, self.num_rows = table, table.schema, table.num_rows

    def _tables(self, columns: list[str]) -> Iterator[pa.Table]:
        yield self._table.select(columns)


def as_table_file(data: Any) -> TableFile:
    """Return a DataFrame, an Arrow table, a dict of columns or the path of a file as a table.

    Raises UserError for other data, by their type, and for a column whose cells have several types.
    """
    if isinstance(data, str | Path):
        return open_table(Path(data))
    if not (isinstance(data, Mapping) or hasattr(data, "columns")):
        raise UserError(
            "data: must be rows of a table: a DataFrame, an Arrow table, a dict of columns or a "
            f"path, got {type(data).__name__}"
        )
    if not isinstance(data, pa.Table):
        columns = {}
        for name in data:  # a dict, or a DataFrame
            try:
                columns[str(name)] = pa.table({str(name): data[name]})[0]
            except (pa.ArrowException, TypeError, ValueError) as error:  # its text quotes a value
                rule = "must have values of one type"
                raise data_error("data", rule, column=str(name), cause=error) from None
        if len({len(column) for column in columns.values()}) > 1:
            raise UserError("data: must have equally many cells in each column")
        data = pa.table(columns)
    return _GivenTable(data)
