"""Inspect a folder of data: splits, columns, classes and sizes, found from the files.

Accepted are Parquet files as `dpdist.data.parquet` reads them. CSV and JSONL files, and folders of
pictures, one for each class (SPLIT/CLASS/*.png), are turned into Parquet. A column of chats, two
columns of prompts and answers, or a column of texts beside no label are learned token by token.
"""

from __future__ import annotations

import csv as text_csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv
from pyarrow import json as json_lines

from dpdist.core.errors import UserError
from dpdist.core.files import (
    atomic_replacement,
    check_regular_file,
    check_utf8_name,
    data_error,
    error_text,
    open_parquet,
    parquet_errors,
    parse_any_json,
    read_bytes,
)
from dpdist.data.column_names import (
    LABELS,
    NAMED_BY_VALUES,
    check_names,
    is_identifier_name,
    is_label_name,
    tells_answer,
)
from dpdist.data.parquet import (
    FORMATS,
    PICTURES,
    Sources,
    check_sources,
    classes_in,
    decode_picture,
    image_bytes,
    is_list,
    pictures_in,
    read_rows,
    rows_of_nobody,
    split_files,
)

TRAIN = ("train", "training")
TEST = ("test", "testing", "validation", "valid", "val", "dev")
CHATS = ("messages", "conversation", "conversations", "chat")
_MESSAGES = (("role", "content"), ("from", "value"))  # fields of one, the latter ShareGPT's
PROMPTS = (
    ("prompt", "answer"), ("prompt", "completion"), ("prompt", "response"),
    ("question", "answer"), ("question", "response"), ("instruction", "output"),
    ("instruction", "response"),
)  # fmt: skip
_OF_PROMPTS = ("input", "context", "system")  # columns that some data sets add to a prompt
TEXTS = ("text", "sentence", "document", "review", "content", "body", "message")
_FEW_ROWS = 100  # of fewer records, whole numbers may all differ by chance
_MOST_CLASSES = 1000  # of a label column that was not named
_AT_ONCE = 500  # pictures in memory, of
_MOST_AT_ONCE = 2**26  # bytes in all, but for the last
_MOST_BYTES = 2**28  # of one picture


@dataclass(frozen=True)
class DiscoveredDataset:
    """A data set in root/name. feature_columns: numeric columns, where there is no image column.
    class_names: of the classes, by number; () where nobody says. input_shape: of one input.
    text_column: of texts, in place of pictures and features. label_column: None where the next
    tokens of texts or chats are learned; messages_column: of chats; answer_columns: of prompts and
    their answers. group_column: says whom a record belongs to; groups: of the training records.
    left_out: columns that are no input, and why. repeats: columns that may name persons, with the
    numbers of training records and of values."""

    root: Path
    name: str
    train_split: str
    test_split: str
    train_records: int
    test_records: int
    image_column: str | None
    feature_columns: tuple[str, ...]
    label_column: str | None
    classes: int
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    text_column: str | None = None
    group_column: str | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    messages_column: str | None = None
    answer_columns: tuple[str, str] | None = None
    groups: int | None = None
    repeats: tuple[tuple[str, int, int], ...] = ()

    @property
    def predicts_next_token(self) -> bool:
        """Return whether the next tokens of texts, answers or chats are learned."""
        return self.label_column is None


@dataclass(frozen=True)
class ChosenColumns:
    """Columns that a user names: the label, the features (or the text), and the group."""

    label: str | None = None
    features: tuple[str, ...] = ()
    group: str | None = None

    def check(self, names: Sequence[str], file: Path) -> None:
        """Raise UserError for a column that is not there, or that is named twice."""
        asked = {"--label": (self.label,), "--features": self.features, "--group": (self.group,)}
        for option, columns in asked.items():
            for column in columns:
                if column is not None and column not in names:
                    raise UserError(
                        f"{option}: must be a column of {file}, which has {', '.join(names)}; "
                        f"got {column}"
                    )
        named = [name for name in (self.label, *self.features, self.group) if name is not None]
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            raise UserError(f"--label, --features, --group: name {twice[0]} once")


_ANY = ChosenColumns()


def inspect_folder(folder: Path, chosen: ChosenColumns = _ANY) -> DiscoveredDataset:
    """Describe the data set of a folder. Raises UserError for one that cannot be trained on.

    chosen: columns that the user names; the others are found out.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the one with the training and test files")
    check_utf8_name(folder)
    root, name = folder.parent, folder.name
    train, test = _split(folder, TRAIN, "training"), _split(folder, TEST, "test")
    files = split_files(root, name, train)
    schema = open_parquet(files[0]).schema_arrow
    check_names(schema.names, files[0])
    _refuse_twice(schema.names, files[0])
    chosen.check(schema.names, files[0])
    test_files = split_files(root, name, test)
    records, tested = (sum(map(_count_rows, each)) for each in (files, test_files))
    for count, each in ((records, files), (tested, test_files)):
        if not count:
            raise UserError(f"{each[0]}: {_NO_RECORDS}")
    if chosen.group is not None:
        _check_groups([*files, *test_files], chosen.group)
        persons, tested_persons = (_values(each, chosen.group) for each in (files, test_files))
        if both := len(persons & tested_persons):
            raise UserError(
                f"--group: no {chosen.group} may have records in training and test files, {both:,} "
                "have: scores on private groups would be published; move each one's records to one "
                "file"
            )
        found = _inspected(root, name, (train, test), (records, tested), files, schema, chosen)
        return replace(found, groups=len(persons))
    found = _inspected(root, name, (train, test), (records, tested), files, schema, chosen)
    return replace(found, repeats=repeating_columns(files, found.label_column))


def repeating_columns(files: Sequence[Path], label: str | None) -> tuple[tuple[str, int, int], ...]:
    """Return columns that may name persons, as they repeat: name, number of records, of values.

    files: of the training records, which are private, and so are the numbers.
    """
    schema, rows = open_parquet(files[0]).schema_arrow, sum(map(_count_rows, files))
    named = [
        field.name for field in schema
        if field.name != label and is_identifier_name(field.name) and _is_class(field.type)
    ]  # fmt: skip
    counted = ((name, rows, len(_values(files, name))) for name in named)
    return tuple(each for each in counted if 1 < each[2] < rows)


def _values(files: Sequence[Path], name: str) -> set[Any]:
    found = set[Any]()
    for file in files:
        for _, table in read_rows(file, open_parquet(file), [name]):
            found.update(pc.unique(table[name]).to_pylist())
    return found


def _inspected(
    root: Path, name: str, splits: tuple[str, str], counts: tuple[int, int], files: list[Path],
    schema: pa.Schema, chosen: ChosenColumns,
) -> DiscoveredDataset:  # fmt: skip
    """Describe the columns of a data set."""
    (train, test), (records, tested) = splits, counts
    if (documents := _documents_column(schema, chosen)) is not None:
        chats = is_list(schema.field(documents).type)
        return DiscoveredDataset(
            root, name, train, test, records, tested, None, (), None, 0, (), (),
            None if chats else documents, chosen.group,
            _beside_documents(schema, (documents,), chosen.group), documents if chats else None,
        )  # fmt: skip
    if (pair := _answer_columns(schema, chosen)) is not None:
        return DiscoveredDataset(
            root, name, train, test, records, tested, None, (), None, 0, (), (), None, chosen.group,
            _beside_documents(schema, pair, chosen.group), None, pair,
        )  # fmt: skip
    image = image_column(schema)
    label = chosen.label or label_column(schema, files, by_option=True)
    if pa.types.is_nested(schema.field(label).type):
        raise UserError(f"--label: must be a column of classes, got {label}, which holds lists")
    if not _is_class(schema.field(label).type):
        raise _no_classes("--label: must be a column of classes", schema.field(label), "")
    image = None if chosen.features else image
    features, text, left_out = _find_inputs(schema, files, (label, image), chosen)
    classes, names = classes_of_column(schema, files, label)
    shape = () if text is not None else _find_input_shape(files[0], image, features)
    return DiscoveredDataset(
        root, name, train, test, records, tested, image, features, label, classes, names, shape,
        text, chosen.group, left_out,
    )  # fmt: skip


_NO_RECORDS = "must hold one record at least, got no records"


def _refuse_twice(names: Sequence[str], file: Path) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{file}: has more than one column {twice[0]!r}; rename the others")


def _check_groups(files: Sequence[Path], group: str) -> None:
    """Raise UserError for a record that belongs to nobody: all of these would be one person's."""
    for file in files:
        for first, table in read_rows(file, open_parquet(file), [group]):
            if rows := rows_of_nobody(table[group].to_pylist()):
                raise UserError(
                    f"{file} row {first + rows[0]}: group column {group!r} must name whom each "
                    "record belongs to, got none; drop these records, or give each an own group"
                )


def _no_classes(rule: str, field: pa.Field, how: str) -> UserError:
    """The complaint about a column of numbers, or of another kind, as the label."""
    got = f"{rule}, whole numbers or texts, got {field.name} of {field.type}; {how}"
    if not pa.types.is_floating(field.type):
        return UserError(f"{got}write it as whole numbers from 0, or texts")
    return UserError(
        f"{got}where numbers are to be told, write a recipe with data.targets: number",
        see="how-to/own-data.md#numbers-labels-and-losses-of-your-own",
    )


def _documents_column(schema: pa.Schema, chosen: ChosenColumns) -> str | None:
    """Return the column of chats or texts whose next tokens are learned; None for other records.

    A column of texts is one where no column is a label by its name, and no other is numbers that
    are no whole ones, a list or a picture.
    """
    if chosen.label is not None or len(chosen.features) > 1:
        return None
    free = [
        f for f in schema if f.name != chosen.group and f.name in (chosen.features or schema.names)
    ]
    chats = [field.name for field in free if _is_chats(field.type)]
    named = sorted((n for n in chats if n.lower() in CHATS), key=lambda n: CHATS.index(n.lower()))
    if named or (chats and chosen.features):
        return named[0] if named else chats[0]
    others = [field for field in schema if field.name != chosen.group]
    labels = [f for f in others if f.name.lower() in LABELS and _is_class(f.type)]
    if labels or image_column(schema) or any(_is_feature(field.type) for field in others):
        return None
    texts = [field.name for field in free if _is_text(field.type)]
    named = sorted((n for n in texts if n.lower() in TEXTS), key=lambda n: TEXTS.index(n.lower()))
    return next(iter([*named, *(texts if chosen.features else ())]), None)


def _answer_columns(schema: pa.Schema, chosen: ChosenColumns) -> tuple[str, str] | None:
    """Return the columns of prompts and their answers; None beside a label or a picture."""
    if chosen.label is not None or chosen.features or image_column(schema):
        return None
    others = [field for field in schema if field.name != chosen.group]
    if any(field.name.lower() in LABELS and _is_class(field.type) for field in others):
        return None
    texts = {field.name.lower(): field.name for field in others if _is_text(field.type)}
    pairs = (pair for pair in PROMPTS if all(name in texts for name in pair))
    return next(((texts[prompt], texts[answer]) for prompt, answer in pairs), None)


def _is_feature(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or is_list(kind)


def _is_chats(kind: pa.DataType) -> bool:
    """Return whether values are lists of messages, each a struct of a role and a content.

    The fields may have ShareGPT's names.
    """
    if not (is_list(kind) and pa.types.is_struct(kind.value_type)):
        return False
    found = {field.name: field.type for field in kind.value_type}
    return any(
        all(name in found and _is_text(found[name]) for name in names) for names in _MESSAGES
    )


def _beside_documents(
    schema: pa.Schema, documents: tuple[str, ...], group: str | None
) -> tuple[tuple[str, str], ...]:
    """Return the columns that are left out beside texts, answers or chats, and why."""
    others = [field for field in schema if field.name not in (*documents, group)]
    beside = f"beside {' and '.join(documents)}"
    texts = len(documents) == 1 and not is_list(schema.field(documents[0]).type)

    def why(field: pa.Field) -> str:
        if len(documents) == 2 and field.name.lower() in _OF_PROMPTS:
            return f"{beside}; what belongs to a prompt must stand in {documents[0]}"
        if not _is_class(field.type):
            return beside
        if texts:
            return f"to tell it, give --label {field.name}"
        return f"{beside}; if it says whose a record is, give --group {field.name}"

    return tuple((field.name, why(field)) for field in others)


def _find_inputs(
    schema: pa.Schema,
    files: Sequence[Path],
    used: tuple[str, str | None],
    chosen: ChosenColumns,
) -> tuple[tuple[str, ...], str | None, tuple[tuple[str, str], ...]]:
    """Return the feature columns, or the column of texts, and what is left out and why.

    used: the columns of labels, and of pictures where there are any.
    """
    label, image = used
    others = [name for name in schema.names if name not in (*used, chosen.group)]
    if image is not None:
        return (), None, tuple((name, "beside pictures") for name in others)
    texts = [name for name in others if _is_text(schema.field(name).type)]
    if chosen.features:
        for name in sorted(_answers(schema, files, chosen.features, label)):
            raise UserError(
                f"--features: must not hold the answer, got {name}, which is {label} but for the "
                f"names of its values; leave out {name}"
            )
        asked = [name for name in chosen.features if name in texts]
        if asked and len(chosen.features) > 1:
            raise UserError(f"--features: must be numbers, or one column of texts, got {asked[0]}")
        rest = tuple((n, "not among --features") for n in others if n not in chosen.features)
        return (() if asked else chosen.features), (asked[0] if asked else None), rest
    answers = dict.fromkeys(
        _answers(schema, files, others, label), f"the answer: {label} but for names of its values"
    )
    for name in others:
        if is_label_name(name, schema.names):
            answers.setdefault(name, "a label by its name; to read it, give it in --features")
    texts = [name for name in texts if name not in answers]
    reasons = {name: answers.get(name) or _why_no_feature(schema, files, name) for name in others}
    numbers = [name for name in others if not reasons[name]]
    lists = [name for name in numbers if is_list(schema.field(name).type)]
    numbers = lists[:1] or numbers
    named = [name for name in texts if name.lower() in TEXTS]
    text = None if numbers else next(iter([*named, *texts]), None)
    if not numbers and text is None:
        found = "".join(f"; {name}: {why}" for name, why in reasons.items())
        raise UserError(f"{files[0]}: neither pictures nor numeric columns beside {label!r}{found}")
    left = [n for n in others if n not in (*numbers, text)]
    return tuple(numbers), text, tuple((n, reasons[n] or "beside a list") for n in left)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _answers(
    schema: pa.Schema, files: Sequence[Path], names: Sequence[str], label: str
) -> set[str]:
    """Return which columns are the label but for the names of their values."""
    names = [name for name in names if not pa.types.is_nested(schema.field(name).type)]
    few = next(iter(read_rows(files[0], open_parquet(files[0]), [*names, label])))[1]
    alike = [name for name in names if _tells_answer(few, name, label)]
    if not alike:
        return set()
    every = [
        table for file in files for _, table in read_rows(file, open_parquet(file), [*alike, label])
    ]
    return {name for name in alike if _tells_answer(pa.concat_tables(every), name, label)}


def _tells_answer(table: pa.Table, name: str, label: str) -> bool:
    first, second = (
        pc.dictionary_encode(table[each].combine_chunks(), null_encoding="encode").indices
        for each in (name, label)
    )
    return tells_answer(first.to_numpy(), second.to_numpy())


def _why_no_feature(schema: pa.Schema, files: Sequence[Path], name: str) -> str:
    """Return why a column is no feature; "" where it is one."""
    kind = schema.field(name).type
    if is_list(kind) or pa.types.is_floating(kind):
        return ""
    if _is_text(kind):
        return "text"
    if not pa.types.is_integer(kind):
        return f"{kind}, no number"
    if is_identifier_name(name):
        return "an identifier, by its name"
    rows, seen = 0, set[Any]()
    for file in files:
        for _, table in read_rows(file, open_parquet(file), [name]):
            rows += len(table)
            seen.update(pc.unique(table[name]).to_pylist())
            if len(seen) < rows:
                return ""
    return "an identifier: whole numbers that all differ" if rows >= _FEW_ROWS else ""


def _split(folder: Path, names: Sequence[str], what: str) -> str:
    for name in names:
        try:
            split_files(folder.parent, folder.name, name)
            return name
        except UserError:
            continue
    looked = ", ".join(f"{name}.parquet" for name in names[:2])
    raise UserError(
        f"{folder}: no {what} split (looked for {looked}, ..., also SPLIT-*.parquet, data/ and "
        f"SPLIT/*.parquet, for SPLIT.csv and SPLIT.jsonl, and for pictures in {names[0]}/CLASS/)"
        + (_MAKE_TEST.format(f"{names[0]}.parquet") if names is TEST else "")
    )


_MAKE_TEST = (
    "; move some records, chosen without looking at them, such as every tenth, out of the training "
    "file into {}"
)


def _count_rows(file: Path) -> int:
    return open_parquet(file).metadata.num_rows


def _is_class(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)


def label_column(schema: pa.Schema, files: Sequence[Path], *, by_option: bool = False) -> str:
    """The column of labels, by its name or as the only one that could be. by_option: --label names
    it otherwise. Raises UserError where nobody could say which one it is."""
    by_name = {name.lower(): name for name in schema.names}
    for known in LABELS:
        if known in by_name and _is_class(schema.field(by_name[known]).type):
            return by_name[known]
    for known in LABELS[:4]:
        if known in by_name:
            how = "name another column with --label, or " if by_option else ""
            raise _no_classes(
                f"{files[0]}: the label must be a class", schema.field(by_name[known]), how
            )
    fit = [field.name for field in schema if _is_class(field.type)]
    if len(fit) == 1:
        return fit[0]
    few = ", ".join(fit[:8]) + (", ..." if len(fit) > 8 else "")
    some = f"{len(fit)} that could be it ({few})" if fit else "no other"
    how = "name it with --label COLUMN, or rename it" if by_option else "rename it"
    raise UserError(
        f"{files[0]}: no column {', '.join(LABELS[:4])}, and {some} of whole numbers or texts; "
        f"{how} to label, or texts to text, prompts and answers to prompt and answer, and chats to "
        "messages"
    )


def image_column(schema: pa.Schema) -> str | None:
    """The first column of encoded pictures."""
    for field in schema:
        inner = field.type
        if pa.types.is_struct(inner) and inner.get_field_index("bytes") >= 0:
            return field.name
        if pa.types.is_binary(inner) or pa.types.is_large_binary(inner):
            return field.name
    return None


def feature_columns(schema: pa.Schema, label: str, file: Path) -> tuple[str, ...]:
    lists = [field.name for field in schema if is_list(field.type)]
    if lists:
        return (lists[0],)
    numbers = [
        field.name
        for field in schema
        if field.name != label
        and (pa.types.is_floating(field.type) or pa.types.is_integer(field.type))
    ]
    if not numbers:
        raise UserError(f"{file}: neither pictures nor numeric columns beside {label!r}")
    return tuple(numbers)


def classes_of_column(
    schema: pa.Schema, files: Sequence[Path], label: str
) -> tuple[int, tuple[str, ...]]:
    """How many there are, and their names: from the metadata that `datasets` writes, or from a
    column of text."""
    described = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        names = parse_any_json(described, str(files[0]))["info"]["features"][label]["names"]
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            for name in names:
                check_utf8_name(name)
            return len(names), tuple(names)
    except (UserError, KeyError, TypeError):
        pass  # the column itself says it as well
    found = sorted(_distinct_labels(files, label, schema.field(label).type))
    if not found:
        raise UserError(f"{files[0]}: column {label!r} has no values: no classes")
    if isinstance(found[0], str):
        for one in found:
            if (other := one.strip()) != one and other in found:
                raise data_error(
                    files[0], "has two classes that differ in blanks only; remove these",
                    column=label,
                )  # fmt: skip
        return len(found), tuple(found)
    if found[0] < 0:
        raise data_error(files[0], "must have classes from 0, has some below", column=label)
    return found[-1] + 1, ()


def _distinct_labels(files: Sequence[Path], label: str, kind: pa.DataType) -> set[Any]:
    """The different values of the label column. Raises UserError for too many to be classes."""
    found: set[Any] = set()
    for file in files:
        for first, table in read_rows(file, open_parquet(file), [label]):
            if table[label].type != kind:
                raise UserError(
                    f"{file}: label column {label!r} is {table[label].type}, in {files[0]} {kind}"
                )
            if (row := _first_blank(table[label])) is not None:
                raise data_error(file, _NO_VALUE, row=first + row, column=label)
            found |= set(pc.unique(table[label]).to_pylist()) - {None}
            if len(found) > _MOST_CLASSES:
                raise UserError(
                    f"{file}: column {label!r} has more than {_MOST_CLASSES:,} values: no classes"
                )
    return found


def _first_blank(column: pa.ChunkedArray) -> int | None:
    """The first row whose text is empty or of blanks alone; None where there is none."""
    if not _is_text(column.type):
        return None
    row: int = pc.index(pc.equal(pc.utf8_trim_whitespace(column), ""), True).as_py()
    return None if row < 0 else row


def _find_input_shape(file: Path, image: str | None, features: tuple[str, ...]) -> tuple[int, ...]:
    columns = [image] if image is not None else list(features)
    try:
        batches = open_parquet(file).iter_batches(batch_size=1, columns=columns)
        first = next(batches, None)
    except parquet_errors() as error:
        raise data_error(file, "damaged near row 0", cause=error) from None
    if first is None or not first.num_rows:
        raise UserError(f"{file}: no records")
    if image is None:
        several = is_list(first.schema.field(0).type)
        value = first.column(0)[0].as_py() if several else features
        if value is None:
            raise UserError(f"{file} row 0: column {columns[0]!r} has no features")
        return (len(value),)
    raw = image_bytes(first.column(0), file, image)[0].as_py()
    if raw is None:
        raise UserError(f"{file} row 0: no image")
    try:
        return decode_picture(raw).shape
    except ValueError as error:
        raise UserError(
            f"{file} row 0: the image cannot be decoded: {error_text(error)}"
        ) from error


# --- CSV and JSONL ----------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundSources:
    """Files and folders of which Parquet is to be made, or which are not read.

    csv: SPLIT.csv or SPLIT.jsonl, training first. pictures: names of the folders SPLIT/ that hold
    SPLIT/CLASS/picture. unread: those that are not read, as Parquet of other origin lies there.
    """

    csv: tuple[Path, ...] = ()
    pictures: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(path.name for path in self.csv) or self.pictures


def find_sources(folder: Path) -> FoundSources:
    """Return of what the Parquet files of a folder are to be made; nothing where some lie there,
    which are read as they are.

    Raises UserError where these were made of sources that changed since.
    """
    if not folder.is_dir():
        return FoundSources()
    every = (path.relative_to(folder) for path in folder.rglob("*.parquet"))
    seen = [path for path in every if not any(part.startswith(".") for part in path.parts)]
    found, there = FoundSources(tuple(csv_splits(folder))), any(len(p.parts) == 1 for p in seen)
    pictures = tuple(n for n in (*TRAIN, *TEST) if classes_in(folder / n))
    if not found.csv and set(pictures) & {*TRAIN}:
        found, there = FoundSources(pictures=pictures), bool(seen)
    if not there:
        return found
    check_sources(folder)
    kept = Sources.read(folder)
    unread = (n for n in found.names if not kept.made(folder, f"{Path(n).stem}.parquet"))
    return FoundSources(unread=tuple(unread))


def csv_splits(folder: Path) -> list[Path]:
    """Return SPLIT.csv, or SPLIT.jsonl, of a folder, training first."""
    for kind in ("csv", "jsonl"):
        found = [folder / f"{name}.{kind}" for name in (*TRAIN, *TEST)]
        if found := [path for path in found if path.is_file()]:
            return found
    return []


def inspect_csv_folder(
    folder: Path, staging_folder: Path, chosen: ChosenColumns = _ANY
) -> DiscoveredDataset:
    """Return what lies in a folder of CSV or JSONL files once the Parquet files in `staging_folder`
    lie there too.

    Writes these: SPLIT.parquet for each file, with the columns and types of the training split.
    Raises UserError for what could not be trained on; the folder itself is as it was.
    """
    types: dict[str, pa.DataType] = {}
    splits = csv_splits(folder)
    stamps = Sources.stamps(folder, [path.name for path in splits])
    first, stems = splits[0], {path.stem for path in splits}
    if not stems & {*TEST}:
        make = _MAKE_TEST.format(f"{TEST[0]}{first.suffix}")
        raise UserError(f"{folder}: no test split beside {first.name}{make}")
    if not stems & {*TRAIN}:
        raise UserError(
            f"{folder}: no training split beside {first.name}; name its file "
            f"{TRAIN[0]}{first.suffix}"
        )
    for path in splits:
        table = (_read_csv if path.suffix == ".csv" else _read_json_lines)(path, types)
        if types and table.column_names != list(types):
            raise UserError(
                f"{path}: must have the columns {', '.join(types)}, as the training split, got "
                f"{', '.join(table.column_names)}"
            )
        if not table.num_rows:
            raise UserError(f"{path}: {_NO_RECORDS}")
        types = types or dict(zip(table.column_names, table.schema.types, strict=True))
        pq.write_table(table, staging_folder / f"{path.stem}.parquet")
    try:
        found = inspect_folder(staging_folder, chosen)
        _check_texts(found, staging_folder.resolve(), splits)
    except UserError as error:
        told, place, written = str(error), folder.resolve(), staging_folder.resolve()
        for path in splits:
            told = told.replace(f"{written / path.stem}.parquet", str(place / path.name))
        raise UserError(told.replace(str(written), str(place))) from error
    Sources.write(folder, stamps, staging_folder)
    return replace(found, root=folder.resolve().parent, name=folder.resolve().name)


def _check_texts(found: DiscoveredDataset, made: Path, splits: Sequence[Path]) -> None:
    """Raise UserError, by a row of the Parquet files in `made`, for a text that is empty, and for a
    group that CSV says is missing."""
    missing = set(csv.ConvertOptions().null_values)
    texts = [found.label_column, found.text_column, *(found.answer_columns or ())]
    for file in (made / f"{path.stem}.parquet" for path in splits):
        for column in filter(None, [*texts, found.group_column]):
            for first, table in read_rows(file, open_parquet(file), [column]):
                row = _first_blank(table[column])
                if column == found.group_column and splits[0].suffix == ".csv":
                    values = enumerate(table[column].to_pylist())
                    row = next((n for n, value in values if value in missing), None)
                if row is not None:
                    raise data_error(file, _NO_VALUE, row=first + row, column=column)


_NO_VALUE = "must have a value, got none"


def _check_utf8(path: Path) -> None:
    """Raise UserError for a file that is no UTF-8 text, by its first line that is none."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                two = line.startswith((b"\xff\xfe", b"\xfe\xff"))
                perhaps = "UTF-16" if two else "Latin-1 or Windows-1252"
                raise data_error(
                    path, f"must be UTF-8 text, got another encoding (perhaps {perhaps}); save it "
                    "as UTF-8", line=number,
                ) from None  # fmt: skip


def _check_header(path: Path) -> None:
    """Raise UserError for a line of names with one name twice, or with another separator."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            names = next(filter(None, text_csv.reader(file)), [])
        except text_csv.Error:
            return  # the other reader says what it is
    for separator, name in {";": "semicolons", "\t": "tabs", "|": "bars"}.items():
        if len(names) == 1 and separator in names[0]:
            raise data_error(
                path, f"must have its columns between commas, got one column with {name}; save it "
                "with commas"
            )  # fmt: skip
    check_names(names, path)
    _refuse_twice(names, path)


def _read_csv(path: Path, types: dict[str, pa.DataType]) -> pa.Table:
    """Return a CSV file with a line of names; types: of the columns, {} lets the file decide."""
    check_utf8_name(path)
    check_regular_file(path)
    _check_utf8(path)
    _check_header(path)
    try:
        found = csv.read_csv(path, convert_options=csv.ConvertOptions(column_types=types))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _csv_error(path, types, error) from None
    for place, name in enumerate(found.column_names):
        if found[name].null_count:
            row = int(np.flatnonzero(found[name].is_null().to_numpy())[0])
            raise data_error(path, _NO_VALUE, row=row, column=name)
        if _is_text(found[name].type) and pc.any(pc.equal(found[name], name)).as_py():
            raise data_error(path, NAMED_BY_VALUES.format(place + 1))
    return found


def _csv_error(path: Path, types: dict[str, pa.DataType], error: Exception) -> UserError:
    """Return why a CSV file could not be read: the first line with another number of cells, or with
    a cell of another kind than in the training split."""
    width, ended = 0, 0
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = text_csv.reader(file)
        try:
            for cells in reader:
                width = width or len(cells)
                if cells and len(cells) != width:
                    rule = f"must have {width} cells, as the first line, got {len(cells)}"
                    return data_error(
                        path, f"{rule}; put texts with commas in quotes", line=ended + 1
                    )
                ended = reader.line_num
        except text_csv.Error:
            return data_error(path, "must be readable as CSV", line=reader.line_num)
    try:
        as_texts = csv.ConvertOptions(column_types=dict.fromkeys(types, pa.string()))
        table = csv.read_csv(path, convert_options=as_texts)
    except (pa.ArrowException, OSError):
        return data_error(path, "cannot be read as CSV", cause=error)
    for name, kind in types.items():
        if name in table.column_names and (row := _first_misfit(table[name], kind)) is not None:
            rule = f"must be {kind}, as in the training split, got another value"
            return data_error(path, rule, row=row, column=name)
    return data_error(path, "cannot be read as CSV", cause=error)


def _first_misfit(texts: pa.ChunkedArray, kind: pa.DataType) -> int | None:
    """Return the first row of a column of texts that is no value of a type; None without one."""
    empty = pc.is_in(texts, pa.array(csv.ConvertOptions().null_values))
    values = pc.if_else(empty, None, texts)

    def fits(rows: int) -> bool:
        try:
            pc.cast(values.slice(0, rows), kind)
        except pa.ArrowException:
            return False
        return True

    low, high = 0, len(values)  # the first `low` rows fit, the first `high` do not
    if fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _read_json_lines(path: Path, types: dict[str, pa.DataType]) -> pa.Table:
    """Return a JSONL file, an object a line; types: of the columns, {} lets the file decide."""
    check_utf8_name(path)
    check_regular_file(path)
    _check_utf8(path)
    block = min(max(2**20, path.stat().st_size), 2**30)  # a line lies in one block
    form = json_lines.ParseOptions(explicit_schema=pa.schema(types.items()) if types else None)
    read = json_lines.ReadOptions(use_threads=False, block_size=block)
    try:
        return json_lines.read_json(path, read_options=read, parse_options=form)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _json_error(path, types, error) from None


def _json_error(path: Path, types: dict[str, pa.DataType], error: Exception) -> UserError:
    """Return why a JSONL file could not be read: the first line that is no object, or with a field
    of another kind than before, or than in the training split."""
    kinds: dict[str, type] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict):
                return data_error(path, "must be one JSON object", line=number)
            for name, value in found.items():
                if value is not None and not _is_alike(
                    value, types.get(name), kinds.setdefault(name, _kind(value))
                ):
                    kind = types.get(name, "of one type")
                    rule = f"must be {kind}, as the values before it or in the training split"
                    return data_error(path, f"{rule}, got another", line=number, column=name)
    rule = "cannot be read as JSONL, an object a line with one type a field"
    return data_error(path, rule, cause=error)


def _kind(value: object) -> type:
    return float if type(value) is int else type(value)


def _is_alike(value: Any, kind: pa.DataType | None, before: type) -> bool:
    """Return whether a value is of a type; without one, of the kind of the values before it."""
    if kind is None:
        return _kind(value) is before
    if type(value) is float and pa.types.is_integer(kind):  # pyarrow would cut it
        return False
    try:
        pa.array([value], kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True


# --- folders of pictures


def picture_schema(names: list[str]) -> pa.Schema:
    """As `datasets` writes pictures: bytes and file name, a number for the class."""
    about = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    fields = [("image", image), ("label", pa.int64())]
    return pa.schema(fields, {"huggingface": json.dumps(about)})


def _check_picture(path: Path) -> None:
    """Raise UserError unless a file can be decoded."""
    try:
        decode_picture(read_bytes(path, _MOST_BYTES))
    except ValueError as error:
        raise UserError(f"{path}: the image cannot be decoded: {error_text(error)}") from error


def _image_chunks(paths: Iterator[Path]) -> Iterator[list[dict[str, Any]]]:
    """Yield the content and names of some pictures at a time."""
    some: list[dict[str, Any]] = []
    size = 0
    for path in paths:
        check_utf8_name(path)
        name = f"{path.parent.name}/{path.name}"
        some.append({"bytes": read_bytes(path, _MOST_BYTES), "path": name})
        size += len(some[-1]["bytes"])
        if len(some) == _AT_ONCE or size > _MOST_AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def inspect_picture_folder(folder: Path, staging_folder: Path) -> DiscoveredDataset:
    """Return what lies in a folder of pictures once the Parquet files in `staging_folder` lie
    there too.

    Writes these: SPLIT.parquet for each SPLIT/ of pictures. Raises UserError for what could not be
    trained on; the folder itself is as it was.
    """
    names = [name for name in (*TRAIN, *TEST) if classes_in(folder / name)]
    stamps = Sources.stamps(folder, names)
    _write_pictures(folder, staging_folder)
    try:
        found = inspect_folder(staging_folder)
    except UserError as error:
        place, written = f"{folder.resolve()}", f"{staging_folder.resolve()}"
        raise UserError(str(error).replace(written, place)) from error
    Sources.write(folder, stamps, staging_folder)
    whole, others = folder.resolve(), _no_pictures([folder / name for name in names])
    return replace(found, root=whole.parent, name=whole.name, left_out=(*found.left_out, *others))


def _no_pictures(splits: Sequence[Path]) -> tuple[tuple[str, str], ...]:
    """Return how many files and folders in the folders of classes are no pictures, by ending."""
    kinds = (kind for split in splits for kind in split.iterdir() if kind.is_dir())
    inside = (path for kind in kinds for path in kind.iterdir() if not path.name.startswith("."))
    others = (path for path in inside if path.suffix.lower() not in PICTURES)
    counts = Counter("folder" if p.is_dir() else f"file {p.suffix}".strip() for p in others)
    why = f"no picture in {', '.join(FORMATS)}"
    return tuple((f"{count:,} x {name}", why) for name, count in sorted(counts.items()))


def _write_pictures(folder: Path, target: Path) -> None:
    """Write SPLIT.parquet for each SPLIT/ of pictures, in which CLASS is its place in alphabetical
    order, with the names of the classes.

    Raises UserError for a test class that training lacks, and for a picture that is no regular file
    or that a link brings from outside the folder: whatever it is would be copied.
    """
    check_utf8_name(folder)
    splits = [name for name in (*TRAIN, *TEST) if classes_in(folder / name)]
    if not set(splits) & set(TEST):
        raise UserError(f"{folder}: no test split: put its pictures into {TEST[0]}/CLASS/")
    names = classes_in(folder / next(name for name in TRAIN if name in splits))
    for split in splits:
        classes = classes_in(folder / split)
        for name in classes:
            check_utf8_name(folder / split / name)
            _check_inside(folder, pictures_in(folder / split / name))
            _check_picture(next(pictures_in(folder / split / name)))
        unknown = set(classes) - set(names)
        if unknown:
            raise UserError(f"{folder / split / min(unknown)}: a class without training pictures")
    for split in splits:
        path = target / f"{split}.parquet"
        with (
            atomic_replacement(path) as aside,
            pq.ParquetWriter(aside, picture_schema(names)) as file,
        ):
            _write_split(folder / split, names, file)


def _check_inside(folder: Path, pictures: Iterator[Path]) -> None:
    """Raise UserError unless all of these are regular files below the folder, links followed."""
    inside = folder.resolve()
    for picture in pictures:
        if not check_regular_file(picture).resolve().is_relative_to(inside):
            raise UserError(
                f"{picture}: a link must not lead out of {folder}, this one leads to "
                f"{picture.resolve()}; put the pictures themselves there"
            )


def _write_split(folder: Path, names: list[str], file: pq.ParquetWriter) -> None:
    for number, name in enumerate(names):
        for images in _image_chunks(pictures_in(folder / name)):
            rows = {"image": images, "label": [number] * len(images)}
            file.write_table(pa.table(rows, picture_schema(names)))
