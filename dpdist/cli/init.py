"""Write starter recipes for a user's data (``dpdist init``), and check data (``dpdist data``)."""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpdist.cli.options import (
    Changes,
    GroupedCommands,
    RecipeArgument,
    option,
    parse_numbers,
    path_callback,
    path_option,
)
from dpdist.core.console import format_percent
from dpdist.core.errors import UserError
from dpdist.core.fields import Finite

if TYPE_CHECKING:
    from dpdist.core.preprocessing import ColumnPreprocessing
    from dpdist.data.discovery import DiscoveredDataset


# --- dpdist init ------------------------------------------------------------------------------


_Folder = Annotated[
    Path,
    typer.Argument(
        callback=path_callback(),
        help="Folder of the data: train.parquet and test.parquet, train.csv and test.csv, "
        "train.jsonl and test.jsonl, or train/CLASS/*.png and test/CLASS/*.png.",
    ),
]
_RecipeFile = Annotated[
    Path | None,
    path_option(
        "The recipe file (default: the folder's name with .yaml, in the current folder).",
        "--output",
        callback=path_callback(".yaml", ".yml"),
    ),
]
_Label = Annotated[str | None, option("The column of labels.", None, "--label")]
_Features = Annotated[
    str | None, option("Columns of numbers, as a,b,c; or one column of texts.", None, "--features")
]
_User = Annotated[
    str | None,
    option("The column that identifies the user of a record; not a feature.", None, "--user"),
]
_Base = Annotated[
    Path | None,
    path_option(
        "Folder of a model and its tokenizer, to train adapters on: a causal model for chats and "
        "texts, any model for texts with labels.",
        "--base",
    ),
]
_PretrainingData = Annotated[
    str | None, option("Public training data of the base.", None, "--pretraining-data")
]
_Ranges = Annotated[
    list[str] | None,
    option(
        "Public constants of columns. Numbers: LOW,HIGH, which become 0 and 1; add log1p for "
        "amounts, and flag to mark missing cells. Words: the categories A,B,C, or text,64 to count "
        "words in 64 inputs by a hash. Dates: the first and the last day. You can repeat it, and "
        "name several columns (A,B=0,1) or a pattern. The first match of a column counts, so put "
        "'*=0,1' last.",
        None,
        "--range",
        metavar="COLUMN=LOW,HIGH",
    ),
]


def init_command(
    folder: _Folder,
    output: _RecipeFile = None,
    label: _Label = None,
    features: _Features = None,
    user: _User = None,
    ranges: _Ranges = None,
    base: _Base = None,
    pretraining_data: _PretrainingData = None,
) -> None:
    """Write a starter recipe, with comments, for your own data.

    Splits, columns, classes and the size of an input are read from the files, which are not
    changed. Columns that cannot be inputs, such as identifiers, are listed and left out.
    Preprocessing by public constants is proposed from the names and types of columns, never from
    values; in a terminal, you are asked for the rest.

    For chats, prompts and answers, or texts without a label, the recipe trains a language model;
    with --base, it trains adapters on that model. For texts with labels, it trains a classifier: a
    linear model of the words, or with --base adapters on that model.
    """
    from dpdist.data import discovery

    output = output or Path(f"{folder.resolve().name}.yaml")
    if output.exists():  # before anything is read or written
        raise UserError(f"{output}: already exists; choose a different --output")
    names = tuple(name.strip() for name in features.split(",")) if features else ()
    ranged = ",".join(text.rpartition("=")[0] for text in ranges or ()).split(",")
    chosen = discovery.ChosenColumns(label, names, user, tuple(ranged))
    found = discovery.inspect_folder(folder, chosen)
    if base is None and found.text_column is not None and found.label_column is not None:
        found = _words_as_features(found, found.text_column)
    target = found.label_column if found.predicts_number else None
    if target is not None and base is not None:
        raise UserError(f"--base: must be left out with {target}, a number to predict")
    rules = _propose_preprocessing(found, ranges)
    if target is not None and target not in rules:
        raise UserError(
            f"--range: must be given for {target}, a number to predict: add --range "
            f"{target}=LOW,HIGH, public limits, not those of these records; if these numbers are "
            "classes, write them as integers from 0, or texts"
        )
    read = [n for n in found.kinds if n in (*found.feature_columns, *rules) and n != target]
    left = tuple((name, why) for name, why in found.left_out if name not in rules)
    if len(read) > len(found.feature_columns):
        found = replace(found, input_shape=(len(read),))
    found = replace(found, feature_columns=tuple(read), left_out=left)
    model = _base_model(found, base, pretraining_data)
    _write_recipe(found, output, rules, model)
    typer.echo(f"wrote {output}: {describe_data(found)}")
    units = "records" if found.user_column is None else f"records, by {found.user_column}"
    typer.echo(f"protected: training {units}; not protected: test records, with public scores")
    count = len(found.labels) or found.classes
    if found.feature_columns and not found.class_names and count > _MANY_CLASSES:
        typer.echo(
            f"each of the {count} values of {found.label_column} is a class; to predict the number "
            f"instead, add --range {found.label_column}=LOW,HIGH, public limits"
        )
    if found.unread:
        typer.echo(f"not read: {', '.join(found.unread)}, since other files have these splits")
    _print_columns(found, rules)
    typer.echo(f"next: dpdist data check {output}; dpdist run {output} --dry-run")


_MANY_CLASSES = 20  # of whole numbers, which may be counts or years

Rules = Mapping[str, "ColumnPreprocessing"]


@dataclass(frozen=True)
class _BaseModel:
    """A folder of a model and its tokenizer, with the public training data of the model.

    length: number of tokens to read of a document. marks: whether the tokenizer has tokens for the
    begin or end of texts. kind: model_type of its configuration.
    """

    folder: Path
    length: int
    pretraining_data: str
    marks: bool
    kind: str


# Of a base without a GPU: 30 steps of a BERT with 22 million parameters take minutes on a core.
_LABEL_TOKENS, _NEXT_TOKENS, _BASE_BATCH, _BASE_STEPS = 32, 128, 256, 30


def _base_model(
    dataset: DiscoveredDataset, base: Path | None, pretraining_data: str | None
) -> _BaseModel | None:
    """Return the base for adapters; None without --base. Raises UserError."""
    from dpdist.core.files import parse_json, read_text

    if base is None:
        if (chats := _conversations(dataset)) is not None:
            raise UserError(
                f"--base: must be given for {chats}: the folder of a causal model with its "
                "tokenizer and chat template, as save_pretrained writes them; add "
                "--pretraining-data WHAT, the public data that it was trained on",
                see="how-to/adapters.md#language-models-with-their-own-head",
            )
        if pretraining_data is not None:
            raise UserError("--pretraining-data: must be left out without --base")
        return None
    if dataset.text_column is None and not dataset.predicts_next_token:
        raise UserError("--base: must be left out, since the records are not texts")
    if not (pretraining_data or "").strip():
        raise UserError(
            "--pretraining-data: must name the public data that the base was trained on, such as "
            "'English Wikipedia'; they must not contain your private records, and the privacy card "
            "repeats this"
        )
    config = parse_json(read_text(base / "config.json"), str(base / "config.json"))
    file = base / "tokenizer_config.json"
    settings = parse_json(read_text(file), str(file)) if file.is_file() else {}
    most = [config.get(key) for key in ("max_position_embeddings", "n_positions")]
    known = [each for each in most if isinstance(each, int) and each >= 4]
    marks = any(settings.get(key) for key in ("bos_token", "eos_token"))
    length = _NEXT_TOKENS if dataset.predicts_next_token else _LABEL_TOKENS
    kind = str(config.get("model_type"))
    return _BaseModel(base.resolve(), min([length, *known]), str(pretraining_data), marks, kind)


def _conversations(dataset: DiscoveredDataset) -> str | None:
    """Return a description of chats, or of prompts and answers; None for other records."""
    if dataset.messages_column is not None:
        return f"chats (column {dataset.messages_column})"
    if dataset.answer_columns is not None:
        return f"prompts and answers (columns {', '.join(dataset.answer_columns)})"
    return None


def _print_columns(found: DiscoveredDataset, rules: Rules) -> None:
    """Print columns that are left out, proposed preprocessing, and columns without any."""
    for column, why in found.left_out:
        typer.echo(f"left out: {column}: {why}")
    _print_repeats(found.repeats)
    if rules:
        typer.echo("preprocessing, from the names and types of columns, not from the records:")
        names: dict[str, list[str]] = {}
        for name, rule in rules.items():
            how = (
                rule.describe() if name in found.feature_columns else "learned in its public range"
            )
            names.setdefault(how, []).append(name)
        for described, alike in names.items():
            typer.echo(f"  {', '.join(alike)}: {described}")
    if lacking := [name for name in found.kinds if name not in rules]:
        few = ", ".join(lacking[:_MOST_ASKED])
        typer.echo(f"to fill in under data.columns.preprocessing, if you can: {few}")
    if found.feature_columns and not rules:
        typer.echo(
            "no public ranges: training needs features in about [0, 1]; use --range COLUMN=LOW,HIGH"
        )


def _print_repeats(repeats: Sequence[tuple[str, int, int]]) -> None:
    """Print the columns that may identify persons, who are not the unit of privacy yet."""
    from dpdist.data.column_names import repeats_words

    for each in repeats:
        typer.echo(
            f"{repeats_words(*each)} The unit is one record; to protect persons, run "
            f"`dpdist init` with --user {each[0]}"
        )


def _propose_preprocessing(
    dataset: DiscoveredDataset, given: Sequence[str] | None
) -> dict[str, ColumnPreprocessing]:
    """Return the rules of columns: as given, from public knowledge of names, or from the terminal.

    They never depend on the records, whose extremes and words are private. Raises UserError.
    """
    from dpdist.core.preprocessing import ColumnPreprocessing
    from dpdist.data.public_ranges import public_range

    features = dataset.feature_columns
    if not features:
        if given:
            raise UserError("--range: must be left out, since the inputs are not features")
        return {}
    found: dict[str, ColumnPreprocessing] = {}
    for name in features:
        known = public_range(name)
        if dataset.kinds[name] == "words":
            found[name] = ColumnPreprocessing(text=_HASHED)
        elif dataset.kinds[name] == "truth":
            found[name] = _scaling("truth", "0,1")
        elif known is not None:
            fill = known.typical if dataset.kinds[name] == "numbers" else None
            found[name] = ColumnPreprocessing(
                range=(known.low, known.high), missing=fill, log1p=known.log1p
            )
    answers: dict[str, ColumnPreprocessing] = {}
    for text in given or ():  # the first match of a column counts
        answers = _answered(dataset, text) | answers
    found |= answers
    if given or not _at_terminal():
        return found
    unknown = {n: kind for n, kind in dataset.kinds.items() if n not in found}
    if unknown:
        typer.echo("The names of these columns do not imply their constants:")
        for kind, names in itertools.groupby(unknown, unknown.__getitem__):
            typer.echo(f"  {', '.join(names)}: {_ASKED[kind]}")
        typer.echo("Enter public knowledge about such columns, and nothing from these records:")
        typer.echo("COLUMN=ANSWER, or A,B=0,1, or '*_test=neg,pos'; end with an empty line.")
    while unknown and (answer := typer.prompt(" ", default="", show_default=False)):
        try:
            found |= _answered(dataset, answer)
        except UserError as error:
            typer.echo(f"  {error}")
    return found


def _words_as_features(dataset: DiscoveredDataset, column: str) -> DiscoveredDataset:
    """Return labeled texts as a table of one column, whose words are counted by hash.

    Without a pre-trained base, a linear model of the words trains in seconds, and a network of
    tokens from random weights in many minutes.
    """
    return replace(
        dataset,
        text_column=None,
        feature_columns=(column,),
        kinds={**dataset.kinds, column: "words"},
        input_shape=(_HASHED,),
    )


_HASHED = 256  # inputs in which the words of a text are counted


_ASKED = {
    "numbers": "LOW,HIGH, or LOW,HIGH,log1p,flag",
    "lists": "LOW,HIGH",
    "target": "LOW,HIGH, the number to predict",
    "words": "the categories A,B,C, or text,64 to count words by hash",
    "dates": "FIRST,LAST, such as 2000-01-01,2030-12-31",
}


def _answered(dataset: DiscoveredDataset, text: str) -> dict[str, ColumnPreprocessing]:
    """Return the rules of COLUMN=ANSWER. Raises UserError.

    If a pattern matches several kinds of columns, an answer of two numbers is for numbers, an
    answer of two days for dates, and other answers for words.
    """
    pattern, _, answer = text.rpartition("=")
    patterns = [pattern, *map(str.strip, pattern.split(","))]  # a name may contain a comma
    fit = [n for n in dataset.kinds if any(fnmatch.fnmatchcase(n, each) for each in patterns)]
    fit = [n for n in fit if dataset.kinds[n] != "target" or n in patterns]  # '*' is for inputs
    left = [f"{n} ({why})" for n, why in dataset.left_out if n in patterns and n not in fit]
    if not fit and left:
        raise UserError(f"--range: must be for a column that is read, got {', '.join(left)}")
    if not fit:
        raise UserError(
            f"--range: must be COLUMN=LOW,HIGH for one of {', '.join(dataset.kinds)} (or a "
            f"pattern, '*=0,1'), got {text}"
        )
    dates = [name for name in fit if dataset.kinds[name] == "dates"]
    words = [name for name in fit if dataset.kinds[name] == "words"]
    numbers = [name for name in fit if name not in (*dates, *words)]
    if numbers and not (words and not _is_range(answer)):
        return {name: _scaling(dataset.kinds[name], answer) for name in numbers}
    if dates and not words:
        return dict.fromkeys(dates, _date_rule(answer))
    parts = [part.strip() for part in answer.split(",")]
    if _is_range(answer):
        raise UserError(
            f"--range: must be categories for {', '.join(words)}, which are text in the files, got "
            f"{text}; if they are numbers with thousands separators, write 1234, not 1,234"
        )
    from dpdist.data.preprocessing import checked_rule

    hashed = parts[0] == "text" and len(parts) == 2 and parts[1].isdigit()
    named = {"text": int(parts[1])} if hashed else {"categories": parts, "missing": "flag"}
    return dict.fromkeys(words, checked_rule("--range", named))


def _is_range(text: str) -> bool:
    with suppress(UserError):
        return bool(_scaling("numbers", text))
    return False


def _scaling(kind: str, text: str) -> ColumnPreprocessing:
    """Return the rule LOW,HIGH[,log1p][,flag] of numbers in a public range. Raises UserError.

    Missing numbers are flagged with `flag` or `log1p`, else they become the middle of the range.
    """
    from dpdist.core.preprocessing import ColumnPreprocessing

    parts = [part.strip() for part in text.split(",")]
    ends, words = parse_numbers(",".join(parts[:2]), "--range", Finite), set(parts[2:])
    if ends is None or len(ends) != 2 or not ends[0] < ends[1] or words - {"log1p", "flag"}:
        rule = "must be LOW,HIGH, such as 0,120, or LOW,HIGH,log1p,flag"
        raise UserError(f"--range: {rule}, got {text}")
    missing = "flag" if words else (ends[0] + ends[1]) / 2
    return ColumnPreprocessing(
        range=(ends[0], ends[1]),
        log1p="log1p" in words,
        missing=None if kind in ("lists", "target") else missing,
    )


def _date_rule(text: str) -> ColumnPreprocessing:
    """Return the rule FIRST,LAST of dates, as a fraction of the years in between."""
    from dpdist.core.preprocessing import ColumnPreprocessing, DateNumbers

    try:
        first, last = (date.fromisoformat(each.strip()) for each in text.split(","))
        if not first < last:
            raise ValueError
    except ValueError:
        rule = f"--range: must be FIRST,LAST, such as 2000-01-01,2030-12-31, got {text}"
        raise UserError(rule) from None
    years = max(1, round((last - first).days / 365.2425))
    since = DateNumbers(origin=first.isoformat(), unit="years")
    return ColumnPreprocessing(date=since, range=(0, years), missing="flag")


def _at_terminal() -> bool:
    return sys.stdin.isatty()


_MOST_ASKED = 30  # columns


def _write_recipe(
    dataset: DiscoveredDataset, output: Path, rules: Rules, base: _BaseModel | None
) -> None:
    """Write the recipe. Raises UserError if it is not valid."""
    from dpdist.core.files import parse_yaml, write_atomic
    from dpdist.runs.recipe import parse_recipe

    text = starter_recipe(dataset, output.stem, rules, base)
    parse_recipe(parse_yaml(text, str(output))[0], str(output))
    write_atomic(output, text)


def describe_data(dataset: DiscoveredDataset) -> str:
    """Return a description of the data in one line."""
    shape = "x".join(map(str, dataset.input_shape))
    inputs = f"images {shape}" if dataset.image_column is not None else f"{shape} features"
    text = dataset.text_column
    if [*dataset.kinds.values()] == ["words"]:  # counted by hash
        (text,) = dataset.kinds
    if text is not None:
        inputs = f"texts of column {text}"
    if dataset.messages_column is not None:
        inputs = f"chats of column {dataset.messages_column}"
    if dataset.answer_columns is not None:
        inputs = "prompts of column {}, answers of column {}".format(*dataset.answer_columns)
    targets = "next tokens"
    if not dataset.predicts_next_token:
        targets = f"{len(dataset.labels) or dataset.classes} classes"
    if dataset.predicts_number:
        targets = f"numbers of column {dataset.label_column}"
    if dataset.labels:
        targets += f" (labels {', '.join(map(str, dataset.labels[:8]))})"
    return (
        f"{dataset.train_records:,} training and {dataset.test_records:,} test records, {inputs}, "
        f"{targets}"
    )


def starter_recipe(
    dataset: DiscoveredDataset, name: str, rules: Rules, base: _BaseModel | None = None
) -> str:
    """Return the recipe of a first run as YAML.

    Images: DP-SGD on noisy copies, and certificates. Tables: DP-SGD of a small model. Texts: DP-SGD
    of adapters on `base`; without it, of a linear model of the words, or of a small model of the
    next byte.
    """
    units = dataset.users or dataset.train_records
    batch, duration, longer = _default_batch_size(units), "epochs: 20", ""
    if base is not None:
        longer = f"                    # on a GPU: epochs: 20, batch_size: {batch}, a longer text"
        batch, duration = min(batch, _BASE_BATCH), f"steps: {_BASE_STEPS}"
    texts = dataset.text_column is not None or dataset.predicts_next_token
    pictures = dataset.image_column is not None
    model = _picture_model(dataset) if pictures else _table_model(dataset, rules)
    if texts:
        model = _NEXT_MODEL if base is None else _base_lines(base, dataset.predicts_next_token)
    lines = [
        _on_one_line(f"# Starter recipe for {dataset.name}: {describe_data(dataset)}."),
        "# Column names, classes, sizes and the number of records were read from the files, and",
        "# are public with this recipe. All other values were chosen without reading a record.",
        *(_on_one_line(f"# Left out: {column}: {why}.") for column, why in dataset.left_out),
        f"name: {_json_text(name)}",
        "data:",
        f"  name: {_json_text(dataset.name)}               # the folder below root",
        f"  root: {_json_text(str(dataset.root))}",
        *_data_lines(dataset, rules, base),
        *_bought_lines(dataset, rules),
        *model,
        "privacy:",
        "  epsilon: 3.0                 # the noise is calibrated so that epsilon is at most this",
        f"  delta: {_default_delta(units):.1e}               # well below 1 / {units:,} "
        f"{'records' if dataset.users is None else 'users'}",
        f"  clip_norm: {0.1 if dataset.predicts_number else 1.0}",
        *_unit_lines(dataset),
        "training:",
        f"  batch_size: {batch}             # expected; large batches need less noise per record",
        f"  {duration}{longer}",
        *(_TEXT_OPTIMIZER if texts else _optimizer(model, pictures, units)),
        *(_certify_lines(dataset) if pictures else []),
        "resources:",
        "  workers: 1                   # keep it during a run, or set training.reproducible: true",
    ]
    return "\n".join(lines) + "\n"


def _unit_lines(dataset: DiscoveredDataset) -> list[str]:
    """Return the lines about the unit of privacy: a record, or a user."""
    from dpdist.data.column_names import repeats_words

    if dataset.users is not None:
        whose = _on_one_line(f"# all records of one {dataset.user_column}")
        return [
            f"  unit: user                  {whose}",
            "  max_records_per_user: 4     # per step; more need more time, and the same epsilon",
        ]
    suspects = [
        f"  {_on_one_line(f'# {repeats_words(*each)} Then: dpdist init --user {each[0]}')}"
        for each in dataset.repeats
    ]
    return [
        *suspects,
        "  # unit: user                # sample, clip and protect persons instead of records",
        "  # budget: budgets            # count all runs on these records in one budget",
    ]


def _optimizer(model: list[str], pictures: bool, units: int) -> list[str]:
    """Return the lines with the best learning rate in benchmarks/results/tables.md."""
    rate = 2.0 if model in (_LINEAR_MODEL, _WORDS_MODEL) else 0.5
    rate = 0.1 if not pictures and units < _FEW_UNITS else rate
    if model == _NUMBER_MODEL:  # its gradients, of errors of a part of the range, are small
        return ["  loss: mse", "  learning_rate: 0.2", "  momentum: 0.9"]
    return [f"  learning_rate: {rate}           {_TRY_OTHERS}", "  momentum: 0.9"]


_TRY_OTHERS = "# to try others privately, use `dpdist tune`"
_FEW_UNITS = 500  # below this number, the steps on a table have much noise
_TEXT_OPTIMIZER = ["  optimizer: adam", f"  learning_rate: 0.003         {_TRY_OTHERS}"]


def _on_one_line(comment: str) -> str:
    """Return a comment without line ends, after which a column's name could become a key."""
    return re.sub(r"\s+", " ", comment)


_NEXT_MODEL = [
    "model:",
    "  name: next-word-lstm         # of bytes; for adapters on your own causal model, use",
    "                 # `dpdist init FOLDER --base MODEL --pretraining-data PUBLIC`",
]


_ATTENTION = {"bert": "[query, value]", "roberta": "[query, value]", "distilbert": "[q_lin, v_lin]"}


def _base_lines(base: _BaseModel, next_token: bool) -> list[str]:
    head = ["    head: own                  # the head in the folder"] if next_token else []
    layers = "all-linear" if next_token else _ATTENTION.get(base.kind, "all-linear")
    return [
        "model:",
        "  name: transformer            # needs dpdist[hf]",
        "  options:",
        *head,
        f"    adapter: {{kind: lora, r: 8, lora_alpha: 16, target_modules: {layers}}}",
        f"  initial: {{folder: {_json_text(str(base.folder))}, "
        f"pretraining_data: {_json_text(base.pretraining_data)}}}",
    ]


def _table_model(dataset: DiscoveredDataset, rules: Rules) -> list[str]:
    """Return a linear model, or a small network if there are many units per weight."""
    units, inputs = dataset.users or dataset.train_records, math.prod(dataset.input_shape)
    if "lists" not in dataset.kinds.values():
        names = [rules[n].names(n) if n in rules else [n] for n in dataset.feature_columns]
        inputs = sum(map(len, names))
    weights = _HIDDEN * (inputs + dataset.classes)
    if dataset.predicts_number:
        return _NUMBER_MODEL
    if [*dataset.kinds.values()] == ["words"]:
        return _WORDS_MODEL
    if units < _UNITS_PER_WEIGHT * weights:
        return _LINEAR_MODEL
    return [
        "model:                         # or linear, or your own: package.module:factory",
        f"  name: mlp\n  options: {{hidden: [{_HIDDEN}]}}",
    ]


_LINEAR_MODEL = [
    "model: linear                  # logistic regression; or your own: package.module:f"
]
_NUMBER_MODEL = ["model: linear                  # or your own: package.module:f"]
_WORDS_MODEL = [
    "model: linear                  # or adapters of a pre-trained model: dpdist init FOLDER "
    "--base MODEL"
]
_HIDDEN, _UNITS_PER_WEIGHT = 32, 10


def _picture_model(dataset: DiscoveredDataset) -> list[str]:
    model = "tf-cnn" if min(dataset.input_shape[1:]) >= 20 else "small-cnn"
    return [
        f"model: {model}              # or your own without BatchNorm: package.module:factory",
        "method:",
        "  name: input-noise            # trains on noisy copies, like those of the certificate",
        "  sigma: 0.25                  # standard deviation; inputs are in [0, 1]",
        "  augmentations: 4             # copies of each record, averaged before clipping",
    ]


def _certify_lines(dataset: DiscoveredDataset) -> list[str]:
    return [
        "certify:",
        "  sigma: 0.25",
        "  n: 10000                     # noise samples per input",
        f"  max_inputs: {min(500, dataset.test_records)}           # of the test split; leave it "
        "out for all",
        "  radii: [0.1, 0.25, 0.5]      # L2 radii to report, in input units",
    ]


def _text_line(dataset: DiscoveredDataset, base: _BaseModel | None) -> str:
    columns = {"messages": dataset.messages_column, "column": dataset.text_column}
    columns |= zip(("prompt", "answer"), dataset.answer_columns or (None, None), strict=True)
    said = [f"{key}: {_json_text(name)}" for key, name in columns.items() if name is not None]
    line = f"  text: {{{', '.join(said)}, length: {base.length if base else 128}"
    if dataset.predicts_next_token:
        line += ", predict: next"
    if base is not None:
        line += f", tokenizer: {_json_text(str(base.folder))}"
        if base.marks and dataset.text_column is not None and dataset.predicts_next_token:
            line += ", bos_eos: true"
    return line + "}"


def _data_lines(
    dataset: DiscoveredDataset, rules: Rules, base: _BaseModel | None = None
) -> list[str]:
    lines = [] if dataset.predicts_next_token else [f"  classes: {dataset.classes}"]
    if dataset.predicts_number:
        lines = ["  targets: number              # scores and predictions are in the label's unit"]
    if dataset.class_names:
        lines.append(f"  names: {_json_text(list(dataset.class_names))}")
    if dataset.labels:
        lines.append(f"  labels: {list(dataset.labels)}   # the classes, renumbered from 0")
    for key, value, usual in (
        ("train", dataset.train_split, "train"),
        ("test", dataset.test_split, "test"),
    ):
        if value != usual:
            lines.append(f"  {key}: {_json_text(value)}")
    columns: list[str] = []
    if dataset.text_column is not None or dataset.predicts_next_token:
        lines.append(_text_line(dataset, base))
    elif dataset.image_column is None:
        columns.append(f"features: {_json_text(list(dataset.feature_columns))}")
    elif dataset.image_column != "image":
        columns.append(f"image: {_json_text(dataset.image_column)}")
    if dataset.label_column not in ("label", None):
        columns.append(f"label: {_json_text(dataset.label_column)}")
    if dataset.user_column is not None:
        columns.append(f"user: {_json_text(dataset.user_column)}   # for privacy.unit: user")
    columns += _rule_lines(dataset, rules)
    return lines + (["  columns:"] + [f"    {line}" for line in columns] if columns else [])


def _rule_lines(dataset: DiscoveredDataset, rules: Rules) -> list[str]:
    """Return the lines of public constants, and comments for those to be filled in."""
    from dpdist.data.public_ranges import public_range

    comment = "# public constants, from names and types of columns, not from the records"
    lines = [f"preprocessing:    {comment}"] if rules else []
    for name, rule in rules.items():
        known = public_range(name)
        same = known is not None and rule.missing == known.typical
        source = f"   # {known.unit}: {known.source}" if same and known is not None else ""
        text = _json_text(rule.model_dump(mode="json", exclude_defaults=True))
        lines.append(f"  {_json_text(name)}: {text}{source}")
    lacking = [name for name in dataset.kinds if name not in rules][:_MOST_ASKED]
    if lacking and not rules:
        lines.append("# preprocessing:")
    for name in lacking:
        more = "" if name in dataset.feature_columns else "   # and add it to features"
        line = _on_one_line(f"{_json_text(name)}: {_TO_FILL[dataset.kinds[name]]}{more}")
        lines.append(f"  # {line}" if rules else f"#   {line}")
    return lines


def _bought_lines(dataset: DiscoveredDataset, rules: Rules) -> list[str]:
    """Return comments with a section that buys the unknown ranges of columns."""
    kinds = dataset.kinds.items()
    lacking = [name for name, kind in kinds if kind == "numbers" and name not in rules]
    if not lacking:
        return []
    columns = ", ".join(f"{_json_text(name)}: {{}}" for name in lacking[:_MOST_ASKED])
    return [
        "# statistics:                  # or buy ranges, with noise: privacy.epsilon covers both",
        "#   epsilon: 0.3",
        f"#   {_on_one_line(f'columns: {{{columns}}}')}",
    ]


_TO_FILL = {
    "numbers": "{range: [LOW, HIGH], missing: VALUE}",
    "lists": "{range: [LOW, HIGH]}",
    "words": "{categories: [A, B], missing: flag}, or for free text {text: 256}",
    "dates": "{date: {origin: YYYY-MM-DD, unit: years}, range: [0, YEARS], missing: flag}",
}


def _json_text(value: Any) -> str:
    """Return JSON, which is also YAML."""
    return json.dumps(value, ensure_ascii=False)


def _default_delta(records: int) -> float:
    """Return the largest power of ten that is at most 0.1 / records."""
    return 10.0 ** -math.ceil(math.log10(10 * max(records, 10)))


def _default_batch_size(records: int) -> int:
    """Return a power of two, about an eighth of the records, at most 2,048."""
    result: int = 2 ** max(0, min(11, math.floor(math.log2(max(records, 8) / 8))))
    return result


# --- dpdist data ------------------------------------------------------------------------------


data_app = typer.Typer(
    cls=GroupedCommands, help="List, check and fetch data sets.", no_args_is_help=True
)


@data_app.command("check")
def check_data(recipe: RecipeArgument, changes: Changes = None) -> None:
    """Read all records of a recipe; report the first error with file and row, or describe them."""
    from dpdist.data import discovery, load
    from dpdist.data.tables import open_table, split_files
    from dpdist.evaluation import data_units_row
    from dpdist.runs.recipe import parse_changes, resolve_recipe
    from dpdist.training.job import check_data as check_training_data
    from dpdist.training.records import data_source

    resolved = resolve_recipe(recipe, changes=parse_changes(changes))
    source = data_source(resolved)
    train, _ = check_training_data(resolved, source, recipe)
    test = load(source, "test")
    counted = resolved.counted
    for split, word in ((train, counted), (test, "records")):
        shape = "x".join(map(str, split.input_shape))
        targets = _TARGETS[split.target_kind]
        typer.echo(
            f"{split.name}: {len(split):,} {word}, inputs {shape}, {split.classes} {targets}"
        )
    section = resolved.data
    names = section.class_names
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    following = section.predicts_next_token
    if section.targets == "class":
        typer.echo("classes: the next token" if following else f"classes: {shown}")
    if section.root is not None:
        columns = section.columns
        inputs = ", ".join(source.columns.input_columns)
        label = "" if following else f"; label {columns.label}"
        typer.echo(f"columns: inputs {inputs}{label}")
        if columns.user is None:
            files = split_files(section.root, section.name, section.train)
            tables, label = [open_table(file) for file in files], columns.label
            _print_repeats(discovery.repeating_columns(tables, None if following else label))
    for _, text in data_units_row(resolved, test):
        typer.echo(f"units: {text}")
    unit, how = ("record", "content") if resolved.user_unit is None else ("user", "name")
    typer.echo(f"protected: the training {counted}; no {unit} is in both splits, by {how}")
    typer.echo(f"not protected: the records of {test.name}; scores on them are published")
    delta, batch = resolved.privacy.delta, resolved.training.batch_size
    typer.echo(f"privacy.delta {delta:g}: below 1 / {len(train):,}, as required")
    typer.echo(f"training.batch_size {batch:,}: {format_percent(batch / len(train), 1)} % of them")


_TARGETS = {"class": "classes", "number": "numbers to predict", "labels": "labels to predict"}


@data_app.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(help="mnist, cifar10, cifar100, svhn or docstrings.")],
    data_root: Annotated[
        Path,
        typer.Option("--data-root", callback=path_callback(), help="Folder for the data set."),
    ] = Path("data"),
) -> None:
    """Download a public data set through torchvision, and write it as Parquet.

    The data set docstrings is not downloaded: its texts are those of installed Python packages.
    """
    from dpdist import data
    from dpdist.data import text

    if name == text.DATASET_NAME:
        typer.echo(str(text.make_docstrings(data_root, typer.echo)))
        return
    typer.echo(str(data.fetch(name, data_root, typer.echo)))
