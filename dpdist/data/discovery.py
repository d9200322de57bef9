"""Inspect a folder of data: infer splits, columns, classes and sizes from the files.

Files are read by `dpdist.data.tables`. A column of chats, two columns of prompts and answers, or a
column of texts without a label are learned token by token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dpdist.core.errors import UserError
from dpdist.core.files import check_utf8_name, parse_any_json
from dpdist.data.column_names import LABELS, is_identifier_name, is_label_name, tells_answer
from dpdist.data.parquet import (
    FORMATS,
    NO_GROUP,
    NO_RECORDS,
    decode_row,
    image_bytes,
    rows_of_nobody,
    users_of,
)
from dpdist.data.tables import (
    TABLES,
    PictureFolder,
    TableFile,
    are_marked_numbers,
    is_list,
    is_text,
    open_table,
    others_in,
    pictures_in,
    split_files,
)

TRAIN = ("train", "training")
TEST = ("test", "testing", "validation", "valid", "val", "dev")
CHATS = ("messages", "conversation", "conversations", "chat")
_MESSAGES = (("role", "content"), ("from", "value"))  # fields of one, the latter ShareGPT's
PROMPTS = (
    ("prompt", "answer"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
)
_OF_PROMPTS = ("input", "context", "system")  # columns that belong to a prompt in some data sets
TEXTS = ("text", "sentence", "document", "review", "content", "body", "message")
_FEW_ROWS = 100  # among fewer records, integers may all differ by chance
_MOST_CLASSES = 1000


@dataclass(frozen=True)
class DiscoveredDataset:
    """A data set in root/name.

    feature_columns: numeric columns, if there is no image column. class_names: of the classes, by
    number, or (). input_shape: of one input. text_column: of texts, instead of images and features.
    label_column: None if the next tokens of texts or chats are learned; messages_column: of chats;
    answer_columns: of prompts and answers. user_column: of users; users: their number in the
    training split. left_out: columns that are not read, and why. repeats: columns that may identify
    persons, with the numbers of training records and of values. labels: the integers of a label
    column that is not 0, 1, and so on; the recipe renumbers them. unread: other files of these
    splits. kinds: numbers, lists, truth, words or dates, by column, of features and of columns that
    preprocessing could read; target, of a label of numbers.
    """

    root: Path
    name: str
    train_split: str
    test_split: str
    train_records: int
    test_records: int
    image_column: str | None = None
    feature_columns: tuple[str, ...] = ()
    label_column: str | None = None
    classes: int = 0
    class_names: tuple[str, ...] = ()
    input_shape: tuple[int, ...] = ()
    text_column: str | None = None
    user_column: str | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    messages_column: str | None = None
    answer_columns: tuple[str, str] | None = None
    users: int | None = None
    repeats: tuple[tuple[str, int, int], ...] = ()
    labels: tuple[int, ...] = ()
    unread: tuple[str, ...] = ()
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def predicts_number(self) -> bool:
        """Return whether the label is a number, not a class."""
        return "target" in self.kinds.values()

    @property
    def predicts_next_token(self) -> bool:
        """Return whether the next tokens of texts, answers or chats are learned."""
        return self.label_column is None


@dataclass(frozen=True)
class ChosenColumns:
    """Columns chosen by options: label, features (or text), and user; ranged, which are numbers."""

    label: str | None = None
    features: tuple[str, ...] = ()
    user: str | None = None
    ranged: tuple[str, ...] = ()

    def check(self, names: Sequence[str], file: Path) -> None:
        """Raise UserError for a missing column, or one that is named twice."""
        asked = {"--label": (self.label,), "--features": self.features, "--user": (self.user,)}
        for option, columns in asked.items():
            for column in columns:
                if column is not None and column not in names:
                    raise UserError(
                        f"{option}: must be a column of {file}, which has {', '.join(names)}; "
                        f"got {column}"
                    )
        named = [name for name in (self.label, *self.features, self.user) if name is not None]
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            raise UserError(f"--label, --features, --user: name {twice[0]} once")


_ANY = ChosenColumns()


def inspect_folder(folder: Path, chosen: ChosenColumns = _ANY) -> DiscoveredDataset:
    """Return a description of a folder's data set. Raises UserError if it cannot be trained on.

    chosen: columns of the command's options; the others are inferred.
    """
    folder = folder.resolve()
    check_utf8_name(folder)
    names = _split(folder, TRAIN, "training"), _split(folder, TEST, "test")
    files = [split_files(folder.parent, folder.name, name) for name in names]
    train = [open_table(file) for file in files[0]]
    test = [open_table(file, train[0].schema) for file in files[1]]
    chosen.check(train[0].schema.names, train[0].path)
    for each in (train, test):
        if not sum(table.num_rows for table in each):
            raise each[0].error(NO_RECORDS)
    found = _inspected(folder, names, train, test, chosen)
    _check_filled(found, [*train, *test])
    if (label := found.label_column) is not None and not found.predicts_number:
        if (len(found.labels) or found.classes) < 2:
            rule = "must have two classes or more, got one; name a different column with --label"
            raise train[0].error(rule, None, label)
        _check_test_classes(found, label, test)
    found = replace(found, unread=tuple(_unread(folder, [*files[0], *files[1]])))
    if chosen.user is None:
        return replace(found, repeats=repeating_columns(train, label))
    persons, tested = (_values(each, chosen.user) for each in (train, test))
    if both := len(persons & tested):
        raise UserError(
            f"--user: no {chosen.user} may have records in both training and test files, got "
            f"{both:,}: scores on private users would be published; move their records to one file"
        )
    return replace(found, users=len(persons))


def _unread(folder: Path, read: Sequence[Path]) -> Iterator[str]:
    """Yield the names of the splits' files that are not read."""
    for name in (*TRAIN, *TEST):
        for ending in (".parquet", *TABLES):
            if (path := folder / f"{name}{ending}").exists() and path not in read:
                yield path.name


def repeating_columns(
    files: Sequence[TableFile], label: str | None
) -> tuple[tuple[str, int, int], ...]:
    """Return columns that may identify persons, as their values repeat.

    Each is a name, the number of records and of values; these numbers are private.
    """
    rows = sum(file.num_rows for file in files)
    named = [
        field.name
        for field in files[0].schema
        if field.name != label and is_identifier_name(field.name) and _is_class(field.type)
    ]
    counted = ((name, rows, len(_values(files, name))) for name in named)
    return tuple(each for each in counted if 1 < each[2] < rows)


def _values(files: Sequence[TableFile], name: str) -> set[Any]:
    found = set[Any]()
    for file in files:
        for _, table in file.rows([name]):
            found.update(pc.unique(table[name]).to_pylist())
    return found


def _inspected(
    folder: Path,
    splits: tuple[str, str],
    files: Sequence[TableFile],
    test: Sequence[TableFile],
    chosen: ChosenColumns,
) -> DiscoveredDataset:
    """Return a description of the columns of a data set."""
    schema = files[0].schema
    counts = [sum(file.num_rows for file in each) for each in (files, test)]
    found = DiscoveredDataset(
        folder.parent, folder.name, *splits, counts[0], counts[1], user_column=chosen.user
    )
    if (documents := _documents_column(schema, chosen)) is not None:
        left = _beside_documents(schema, (documents,), chosen.user)
        chats = is_list(schema.field(documents).type)
        column = {"messages_column": documents} if chats else {"text_column": documents}
        return replace(found, left_out=left, **column)  # type: ignore[arg-type]
    if (pair := _answer_columns(schema, chosen)) is not None:
        left = _beside_documents(schema, pair, chosen.user)
        return replace(found, left_out=left, answer_columns=pair)
    image = image_column(schema)
    label = chosen.label or label_column(files, by_option=True)
    if pa.types.is_nested(schema.field(label).type):
        raise UserError(f"--label: must be a column of classes, got {label}, a column of lists")
    kind = schema.field(label).type
    ranged = label in chosen.ranged and pa.types.is_integer(kind)
    number = image is None and (ranged or pa.types.is_floating(kind))
    if not number and not _is_class(kind):
        raise _no_classes("--label: must be a column of classes", schema.field(label), "")
    image = None if chosen.features else image
    features, text, left_out = _find_inputs(files, (label, image), chosen)
    if isinstance(files[0], PictureFolder):
        others = others_in(files[0].path) + others_in(test[0].path)
        why = f"not an image ({', '.join(FORMATS)}) of a class"
        left_out += tuple((f"{count:,} x {name}", why) for name, count in sorted(others.items()))
    classes, names, labels = (1, (), ()) if number else classes_of_column(files, label)
    shape = () if text is not None else find_input_shape(files[0], image, features)
    return replace(
        found,
        image_column=image,
        feature_columns=features,
        label_column=label,
        classes=classes,
        class_names=names,
        input_shape=shape,
        text_column=text,
        left_out=left_out,
        labels=labels,
        kinds=_kinds(schema, features, left_out) | ({label: "target"} if number else {}),
    )


def _kinds(
    schema: pa.Schema, features: Sequence[str], left_out: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """Return the kind of each feature, and of words and dates next to features, by their types."""
    kinds = dict.fromkeys(features, "numbers")
    for name in features:
        kind = schema.field(name).type
        if is_list(kind) or pa.types.is_boolean(kind):
            kinds[name] = "lists" if is_list(kind) else "truth"
    beside = {why: kind for kind, why in (("words", "text"), ("dates", "dates"))}
    return kinds | {
        name: beside[why]
        for name, why in left_out
        if features and why in beside and not is_identifier_name(name) and name.lower() not in TEXTS
    }


def _check_filled(found: DiscoveredDataset, files: Sequence[TableFile]) -> None:
    """Raise UserError for records without a label, text or user, naming the first of each column.

    Records without a user would count as those of one person.
    """
    read = [found.label_column, found.text_column]  # preprocessing fills gaps in features
    empty = list[str]()
    for file in files:
        for column in filter(None, [*read, *(found.answer_columns or ())]):
            places = ((first, _first_empty(table[column])) for first, table in file.rows([column]))
            if (row := next((first + row for first, row in places if row >= 0), None)) is not None:
                empty.append(
                    str(
                        file.error(
                            "must have a value, got none; fill it, or remove the record",
                            row,
                            column,
                        )
                    )
                )
        if (user := found.user_column) is not None:
            for first, table in file.rows([user]):
                if rows := rows_of_nobody(users_of(table, file, first, user)):
                    rule = f"must name a user for each record, got none; {NO_GROUP}"
                    empty.append(str(file.error(rule, row=first + rows[0], column=user)))
                    break
    if empty:
        raise UserError("; ".join(empty))


def _first_empty(column: pa.ChunkedArray) -> int:
    """Return the first row without a value or with a blank text; -1 if there is none."""
    empty = column.is_null()
    if is_text(column.type):
        empty = pc.or_kleene(empty, pc.equal(pc.utf8_trim_whitespace(column), ""))
    row: int = pc.index(empty, True).as_py()
    return row


_UNSEEN = (
    "must be a class of the training split, got a different one; add records of it to the training "
    "split, or remove it from the test split"
)


def _check_test_classes(found: DiscoveredDataset, label: str, test: Sequence[TableFile]) -> None:
    """Raise UserError for a class that only the test split has."""
    text = is_text(test[0].schema.field(label).type)
    known = {*(found.class_names if text else found.labels or range(found.classes))}
    for file in test:
        for first, table in file.rows([label]):
            for row, value in enumerate(table[label].to_pylist(), first):
                if (value.strip() if text else value) not in known:
                    raise file.error(_UNSEEN, row, label)


def _no_classes(rule: str, field: pa.Field, how: str) -> UserError:
    """Return the error about a label column that is not integers or texts."""
    got = f"{rule}, integers or texts, got {field.name} of {field.type}; {how}"
    if not pa.types.is_floating(field.type):
        return UserError(f"{got}write it as integers from 0, or texts")
    return UserError(
        f"{got}to predict numbers, write a recipe with data.targets: number",
        see="how-to/own-data.md#numbers-labels-and-losses-of-your-own",
    )


def _documents_column(schema: pa.Schema, chosen: ChosenColumns) -> str | None:
    """Return the column of chats or texts whose next tokens are learned; None for other records.

    Texts qualify if no column is a label by its name, and none has floats, lists or images.
    """
    if chosen.label is not None or len(chosen.features) > 1:
        return None
    free = [
        f for f in schema if f.name != chosen.user and f.name in (chosen.features or schema.names)
    ]
    chats = [field.name for field in free if _is_chats(field.type)]
    named = sorted((n for n in chats if n.lower() in CHATS), key=lambda n: CHATS.index(n.lower()))
    if named or (chats and chosen.features):
        return named[0] if named else chats[0]
    others = [field for field in schema if field.name != chosen.user]
    labels = [f for f in others if f.name.lower() in LABELS and _is_class(f.type)]
    if labels or image_column(schema) or any(_is_feature(field.type) for field in others):
        return None
    texts = [field.name for field in free if is_text(field.type)]
    named = sorted((n for n in texts if n.lower() in TEXTS), key=lambda n: TEXTS.index(n.lower()))
    return next(iter([*named, *(texts if chosen.features else ())]), None)


def _answer_columns(schema: pa.Schema, chosen: ChosenColumns) -> tuple[str, str] | None:
    """Return the columns of prompts and answers; None if there is a label or an image."""
    if chosen.label is not None or chosen.features or image_column(schema):
        return None
    others = [field for field in schema if field.name != chosen.user]
    if any(field.name.lower() in LABELS and _is_class(field.type) for field in others):
        return None
    texts = {field.name.lower(): field.name for field in others if is_text(field.type)}
    pairs = (pair for pair in PROMPTS if all(name in texts for name in pair))
    return next(((texts[prompt], texts[answer]) for prompt, answer in pairs), None)


def _is_feature(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or is_list(kind)


def _is_chats(kind: pa.DataType) -> bool:
    """Return whether the type is a list of messages, by the names of templates or of ShareGPT."""
    if not (is_list(kind) and pa.types.is_struct(kind.value_type)):
        return False
    found = {field.name: field.type for field in kind.value_type}
    return any(all(name in found and is_text(found[name]) for name in names) for names in _MESSAGES)


def _beside_documents(
    schema: pa.Schema, documents: tuple[str, ...], user: str | None
) -> tuple[tuple[str, str], ...]:
    """Return the columns that are left out next to texts, answers or chats, and why."""
    others = [field for field in schema if field.name not in (*documents, user)]
    beside = f"next to {' and '.join(documents)}"
    texts = len(documents) == 1 and not is_list(schema.field(documents[0]).type)

    def why(field: pa.Field) -> str:
        if len(documents) == 2 and field.name.lower() in _OF_PROMPTS:
            return f"{beside}; put what belongs to a prompt into {documents[0]}"
        if not _is_class(field.type):
            return beside
        if texts:
            return f"to predict it, give --label {field.name}"
        return f"{beside}; if it names users, give --user {field.name}"

    return tuple((field.name, why(field)) for field in others)


def _find_inputs(
    files: Sequence[TableFile],
    used: tuple[str, str | None],
    chosen: ChosenColumns,
) -> tuple[tuple[str, ...], str | None, tuple[tuple[str, str], ...]]:
    """Return the feature columns, or the column of texts, and what is left out and why.

    used: the columns of labels, and of images or None.
    """
    (label, image), schema = used, files[0].schema
    others = [name for name in schema.names if name not in (*used, chosen.user)]
    if image is not None:
        return (), None, tuple((name, "next to images") for name in others)
    texts = [name for name in others if is_text(schema.field(name).type)]
    if chosen.features:
        for name in sorted(_answers(files, chosen.features, label)):
            raise UserError(
                f"--features: must not include the answer, got {name}, which is {label} with other "
                f"names for its values; leave out {name}"
            )
        asked = [name for name in chosen.features if name in texts]
        if asked and len(chosen.features) > 1:
            raise UserError(f"--features: must be numbers, or one column of texts, got {asked[0]}")
        rest = tuple((n, "not among --features") for n in others if n not in chosen.features)
        return (() if asked else chosen.features), (asked[0] if asked else None), rest
    answers = dict.fromkeys(
        _answers(files, others, label), f"the answer: {label} with other names for its values"
    )
    for name in others:
        if is_label_name(name, schema.names):
            answers.setdefault(name, "a label by its name; to read it, give it in --features")
    texts = [name for name in texts if name not in answers]
    reasons = {name: answers.get(name) or _why_no_feature(files, name) for name in others}
    numbers = [name for name in others if not reasons[name]]
    lists = [name for name in numbers if is_list(schema.field(name).type)]
    numbers = lists[:1] or numbers
    named = [name for name in texts if name.lower() in TEXTS]
    text = None if numbers else next(iter([*named, *texts]), None)
    if not numbers and text is None:
        told = "".join(f"; {name}: {why}" for name, why in reasons.items())
        raise files[0].error(f"must have images or numeric columns besides {label!r}{told}")
    left = [n for n in others if n not in (*numbers, text)]
    return tuple(numbers), text, tuple((n, reasons[n] or "next to a list") for n in left)


def _answers(files: Sequence[TableFile], names: Sequence[str], label: str) -> set[str]:
    """Return the columns that are the label with other names for its values."""
    names = [name for name in names if not pa.types.is_nested(files[0].schema.field(name).type)]
    few = next(files[0].rows([*names, label]))[1]
    alike = [name for name in names if _tells_answer(few, name, label)]
    if not alike:
        return set()
    every = pa.concat_tables([file.read([*alike, label]) for file in files])
    return {name for name in alike if _tells_answer(every, name, label)}


def _tells_answer(table: pa.Table, name: str, label: str) -> bool:
    first, second = (
        pc.dictionary_encode(table[each].combine_chunks(), null_encoding="encode").indices
        for each in (name, label)
    )
    return tells_answer(first.to_numpy(), second.to_numpy())


def _why_no_feature(files: Sequence[TableFile], name: str) -> str:
    """Return why a column is not a feature; "" if it is one."""
    kind = files[0].schema.field(name).type
    if is_list(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return ""
    if is_text(kind):
        marked = all(are_marked_numbers(file.read([name])[name]) for file in files)
        return f"text{marked * ', of numbers with commas or separators: write 1234.5'}"
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return "dates"
    if not pa.types.is_integer(kind):
        return f"{kind}, not a number"
    if is_identifier_name(name):
        return "an identifier, by its name"
    rows, seen = 0, set[Any]()
    for file in files:
        for _, table in file.rows([name]):
            rows += len(table)
            seen.update(pc.unique(table[name]).to_pylist())
            if len(seen) < rows:
                return ""
    return "an identifier: integers that all differ" if rows >= _FEW_ROWS else ""


def _split(folder: Path, names: Sequence[str], what: str) -> str:
    """Return the name of a split that exists. Raises UserError if there is none."""
    for name in names:
        try:
            split_files(folder.parent, folder.name, name)
            return name
        except UserError:
            if not folder.is_dir() or any(pictures_in(folder / name)):
                raise
    how = ""
    if names is TEST:
        how = (
            "; move some records, chosen without looking at them, such as every tenth (all records "
            "of every tenth person), from the training file to a test file"
        )
    raise UserError(
        f"{folder}: no {what} split: must have {names[0]}.parquet, {names[0]}.csv, "
        f"{names[0]}.jsonl, or images in {names[0]}/CLASS/{how}"
    )


def _is_class(kind: pa.DataType) -> bool:
    return (
        pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
    )


def label_column(files: Sequence[TableFile], *, by_option: bool = False) -> str:
    """Return the column of labels, by its name or as the only possible one.

    by_option: whether --label could name it. Raises UserError if it is ambiguous.
    """
    schema = files[0].schema
    by_name = {name.lower(): name for name in schema.names}
    for known in LABELS:
        if known in by_name and _is_class(schema.field(by_name[known]).type):
            return by_name[known]
    for known in LABELS[:4]:
        if known in by_name:
            how = "name a different column with --label, or " if by_option else ""
            field = schema.field(by_name[known])
            if by_option and pa.types.is_floating(field.type):
                return field.name
            raise _no_classes(f"{files[0].path}: the label must be a class", field, how)
    fit = [f.name for f in schema if _is_class(f.type) and not pa.types.is_boolean(f.type)]
    fit = fit or [field.name for field in schema if _is_class(field.type)]
    if len(fit) == 1:
        return fit[0]
    few = ", ".join(fit[:8]) + (", ..." if len(fit) > 8 else "")
    some = f"{len(fit)} candidates ({few})" if fit else "no other"
    how = "name it with --label COLUMN, or rename it" if by_option else "rename it"
    raise files[0].error(
        f"no column {', '.join(LABELS[:4])}, and {some} of integers or texts; {how} to label, or "
        "texts to text, prompts and answers to prompt and answer, and chats to messages"
    )


def image_column(schema: pa.Schema) -> str | None:
    """Return the first column of encoded images, or None."""
    for field in schema:
        inner = field.type
        if pa.types.is_struct(inner) and inner.get_field_index("bytes") >= 0:
            return field.name
        if pa.types.is_binary(inner) or pa.types.is_large_binary(inner):
            return field.name
    return None


def feature_columns(file: TableFile, label: str) -> tuple[str, ...]:
    """Return the columns of numbers, or the first one of lists. Raises UserError without them."""
    lists = [field.name for field in file.schema if is_list(field.type)]
    if lists:
        return (lists[0],)
    numbers = [
        field.name
        for field in file.schema
        if field.name != label
        and (pa.types.is_floating(field.type) or pa.types.is_integer(field.type))
    ]
    if not numbers:
        raise file.error(f"must have images or numeric columns besides {label!r}")
    return tuple(numbers)


def classes_of_column(
    files: Sequence[TableFile], label: str
) -> tuple[int, tuple[str, ...], tuple[int, ...]]:
    """Return the number of classes, their names, and their numbers if these are not 0, 1, ...

    Names are from the metadata that `datasets` writes, or from a column of text.
    """
    schema = files[0].schema
    described = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        names = parse_any_json(described, str(files[0].path))["info"]["features"][label]["names"]
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            for name in names:
                check_utf8_name(name)
            return len(names), tuple(names), ()
    except (UserError, KeyError, TypeError):
        pass  # no names there: the column itself has the classes
    found = sorted(_distinct_labels(files, label))
    if not found:
        raise files[0].error("must have labels, got none", column=label)
    if isinstance(found[0], str):
        return len(found), tuple(found), ()
    if found[0] < 0:
        rule = (
            "must have classes from 0, got negative ones (-1 often marks a missing label: drop "
            "these records); number them from 0, or write them as texts"
        )
        raise files[0].error(rule, column=label)
    return found[-1] + 1, (), () if found == [*range(len(found))] else tuple(found)


def _distinct_labels(files: Sequence[TableFile], label: str) -> set[Any]:
    """Return the different labels. Raises UserError if they are too many to be classes."""
    found: set[Any] = set()
    kind = files[0].schema.field(label).type
    for file in files:
        for _, table in file.rows([label]):
            if table[label].type != kind:
                rule = f"must be {kind}, as in {files[0].path}, got {table[label].type}"
                raise file.error(rule, column=label)
            values = pc.utf8_trim_whitespace(table[label]) if is_text(kind) else table[label]
            found |= set(pc.unique(values).to_pylist()) - {None, ""}
            if len(found) > _MOST_CLASSES:
                rule = f"must have at most {_MOST_CLASSES:,} classes; to predict numbers, give "
                raise file.error(f"{rule}dpdist init --range {label}=LOW,HIGH", column=label)
    return found


def find_input_shape(
    file: TableFile, image: str | None, features: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the shape of a file's first input."""
    columns = [image] if image is not None else list(features)
    table = next(file.rows(columns))[1]
    if image is not None:
        raw = image_bytes(table[image].combine_chunks(), file, image)[0].as_py()
        return decode_row(raw, file, 0, image).shape
    if not is_list(table[features[0]].type):
        return (len(features),)
    return (len(table[features[0]][0].as_py() or ()),)
