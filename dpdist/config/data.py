"""Define the recipe's `data` section: which records are read, and from which columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dpdist.core.fields import (
    Count,
    CountOrZero,
    FilePath,
    FractionBelowOne,
    OptionCondition,
    Positive,
    PositiveFraction,
    RejectBool,
    Rule,
    Section,
    SingleLine,
    Text,
    vocabulary_size,
)
from dpdist.core.preprocessing import ColumnPreprocessing, range_of_label

# The name of a split: a file's name without its ending, or a folder's.
SplitName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
# A folder under the data root; / for folders in folders.
DataName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$", max_length=100),
]
ClassCount = Annotated[int, RejectBool, Field(ge=1, le=2**20)]


BUILT_IN_DATASETS = ("digits", "strokes", "scenes")  # in `dpdist.data`, without files


class ColumnNames(Section):
    """Names of the columns that hold a record.

    Attributes:
        image: Column of the encoded image, such as the bytes of a PNG file.
        label: Column of the label.
        features: Columns of numbers that are the input, instead of the image. A pattern such as
            mean_* names all matching columns.
        user: Column of the user of a record, the unit with privacy.unit: user.
        preprocessing: By column, how its raw cells become inputs, by public constants. A release
            includes it, so that it predicts on raw rows. A label of numbers may have a range, in
            which it is learned, but not cut; scores and predictions are in its own unit.
    """

    image: Text = "image"
    label: Text = "label"
    features: list[Text] = Field(default=[])
    user: Text | None = None

    preprocessing: dict[Text, ColumnPreprocessing] = Field(default={}, max_length=10_000)

    def rules(self) -> Iterator[Rule]:
        kept = [name for name, rule in self.preprocessing.items() if not rule.drop]
        for name in kept:
            rule = "must be one of the features, by its own name"
            yield Rule(name not in (*self.features, self.label), rule, f"preprocessing.{name}")
        dropped = sorted(self.preprocessing.keys() - {*kept})
        both = [name for name in dropped if name in self.features]
        yield Rule(both, f"must not name {both[:1]}, which is dropped", "features")
        patterns = any(set(name) & set("*?[") for name in self.features)
        rule = "must be names, not patterns, with preprocessing other than drop"
        yield Rule(kept and patterns, rule, "features")

    @property
    def target_range(self) -> tuple[float, float]:
        """Return the numbers of the label that a model learns as 0 and 1, by default these."""
        return range_of_label(self.preprocessing, self.label)

    @property
    def feature_rules(self) -> dict[str, ColumnPreprocessing]:
        """Return the rule of each feature, in order; {} without preprocessing."""
        if not any(n != self.label and not r.drop for n, r in self.preprocessing.items()):
            return {}
        plain = ColumnPreprocessing()
        return {name: self.preprocessing.get(name, plain) for name in self.features}

    @property
    def in_unit_range(self) -> bool:
        """Return whether preprocessing maps all inputs to [0, 1]."""
        rules = self.feature_rules.values()
        return bool(rules) and all(rule.in_unit_range for rule in rules)

    @field_validator("features", mode="before")
    @classmethod
    def _wrap_feature(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class TextRecipe(Section):
    """Settings for records that are texts: at most `length` tokens of each, from its beginning.

    Without `tokenizer` and `words` the tokens are bytes, of which there are 258.

    Attributes:
        column: Column of the text.
        length: Largest number of tokens of a record, from its beginning.
        tokenizer: A tokenizer.json file, or its folder.
        words: Number of words from words.txt, which is next to the files.
        predict: The target: the label of a document, or the next token after each of its tokens.
        prompt: Column of prompts, which are read and not learned.
        answer: Column of their answers, which are learned.
        messages: Column of chats, messages with a role and a content; the assistant's are learned.
        bos_eos: Put the tokenizer's begin and end tokens around each document. One that is cut has
            no end token.
    """

    column: Text = "text"
    length: Annotated[int, RejectBool, Field(ge=4, le=2**16)] = 128
    tokenizer: FilePath | None = None
    words: Annotated[int, RejectBool, Field(ge=1, le=99_000)] | None = None
    predict: Literal["label", "next"] = "label"

    prompt: Text | None = None
    answer: Text | None = None
    messages: Text | None = None
    bos_eos: bool = False

    def rules(self) -> Iterator[Rule]:
        pair = (self.prompt is None) != (self.answer is None) or (self.prompt and self.messages)
        yield Rule(pair, "must be given together with answer, or messages alone", "prompt")
        cut = self.tokenizer is None or not self.predicts_next_token
        needs = "need tokenizer and predict: next"
        yield Rule(self.has_prompts and cut, needs, "prompt, answer, messages")
        marks = self.bos_eos and (self.tokenizer is None or self.has_prompts)
        yield Rule(marks, "must be false without tokenizer, or with prompt or messages", "bos_eos")
        two = self.words is not None and self.tokenizer is not None
        yield Rule(two, "must be left out with tokenizer", "words")

    @property
    def has_prompts(self) -> bool:
        """Return whether rows have parts that are read and not learned."""
        return self.prompt is not None or self.messages is not None

    @property
    def tokenizer_file(self) -> Path | None:
        """Return the path of the tokenizer.json, also if `tokenizer` is its folder."""
        folder = self.tokenizer is not None and self.tokenizer.is_dir()
        return self.tokenizer / "tokenizer.json" if folder else self.tokenizer  # type: ignore[operator]

    @property
    def predicts_next_token(self) -> bool:
        """Return whether next tokens are learned, and no label is read."""
        return self.predict == "next"


class DataRecipe(Section):
    """The data set: a built-in name, or a folder of tables or images in `root`.

    Attributes:
        name: A built-in name (digits, strokes, scenes), or a folder in `root` of Parquet, CSV or
            JSONL files, or of images (SPLIT/CLASS/*.png).
        root: Folder of the data sets.
        classes: Number of classes of the files; with other targets, number of targets of a record.
            By default the number of `names`, if given.
        names: Names of the classes, by number, as in a label column of text.
        labels: Use only the records of these labels, renumbered in this order.
        train: Name of the training split: a file without its ending, or a folder.
        test: Name of the test split, which is public and not protected.
        columns: Names of the columns that hold a record.
        text: Read records as texts, one document per record.
    """

    conditions = (
        OptionCondition(
            (
                "train",
                "test",
                "columns.image",
                "columns.label",
                "columns.features",
                "columns.user",
            ),
            "to files (data.root), not to built-in data sets",
            lambda data: data.root is not None or data.name not in BUILT_IN_DATASETS,
        ),
        OptionCondition(
            ("columns.image",),
            "without columns.features and text",
            lambda data: not data.columns.features and data.text is None,
        ),
        OptionCondition(
            ("columns.label",),
            "to records with a label, not to text.predict: next",
            lambda data: not data.predicts_next_token,
        ),
    )

    name: DataName
    targets: Literal["class", "number", "labels"] = Field(
        default="class",
        description="the label column: one of the classes; number(s); a 0 or 1 for each label",
    )
    root: FilePath | None = None
    classes: ClassCount = 10
    names: list[SingleLine] = Field(default=[], max_length=100_000)
    labels: list[CountOrZero] = Field(default=[], max_length=1000)
    train: SplitName = "train"
    test: SplitName = "test"
    columns: ColumnNames = ColumnNames()
    text: TextRecipe | None = None
    max_train: Count | None = Field(
        default=None, description="use about this many records, chosen by hash; for smoke runs"
    )
    drop_test_records: bool = Field(
        default=False, description="leave out of training records that are in the test split"
    )
    public: FractionBelowOne = Field(
        default=0.0, description="declare this fraction (by hash) public: no run trains on it"
    )
    private_eval_fraction: FractionBelowOne = Field(
        default=0.0, description="hold out this fraction (by hash) of the private records"
    )
    fraction: PositiveFraction = Field(
        default=1.0, description="train on this fraction (by hash) of the others"
    )
    class_sampling: dict[Text, Positive] = Field(
        default={},
        description="relative sampling rates by class, {ill: 4, well: 1}; a class is capped at 1",
        max_length=10_000,
    )
    class_counts: dict[Text, Count] = Field(
        default={},
        description="PUBLIC numbers of records by class, from which rates follow; never counted",
        max_length=10_000,
    )
    importance_weights: bool = Field(
        default=False,
        description="multiply a record's loss by 1/rate (mean 1) before its gradient is clipped",
    )

    @field_validator("class_sampling", "class_counts", mode="before")
    @classmethod
    def _name_classes(cls, value: Any) -> Any:
        """Convert a class's number, as YAML reads it, to its name."""
        if not isinstance(value, Mapping):
            return value
        named = {str(key) if type(key) is int else key: each for key, each in value.items()}
        if len(named) < len(value):
            raise ValueError("must name each class once, got a class by number and as text")
        return named

    @model_validator(mode="before")
    @classmethod
    def _infer_class_count(cls, value: Any) -> Any:
        """Set `classes`, if it is not given, to the number of tokens, outputs or names."""
        if not isinstance(value, dict) or "classes" in value:
            return value
        names, text = value.get("names"), value.get("text")
        if isinstance(text, dict) and text.get("predict") == "next" and not text.get("tokenizer"):
            words = text.get("words")
            if words is None or type(words) is int:
                return {**value, "classes": max(1, vocabulary_size(words))}
        if value.get("targets") in ("number", "labels"):
            return {**value, "classes": 1}
        return {**value, "classes": len(names)} if isinstance(names, list) and names else value

    def rules(self) -> Iterator[Rule]:
        names, labels, text = self.names, self.labels, self.text
        following = self.predicts_next_token
        each = f"one for each of the {self.classes} classes, all different"
        yield Rule(names and not len(names) == len(set(names)) == self.classes, each, "names")
        outside = max(labels, default=-1) >= self.classes
        rule = f"two or more of 0 to {self.classes - 1}, each once, got {labels}"
        yield Rule(len(set(labels)) != len(labels) or len(labels) == 1 or outside, rule, "labels")
        either = "must be left out with columns.features"
        yield Rule(text is not None and self.columns.features, either, "text")
        known = vocabulary_size(text.words) if text is not None else 0
        own = text is not None and following and text.tokenizer is None
        rule = f"must be left out with text.predict: next, or {known:,}, the number of tokens"
        yield Rule(own and self.classes != known, rule, "classes")
        other = self.targets != "class"
        without = (names or labels) and (following or other)
        yield Rule(without, "must be left out without classes", "names, labels")
        beside = f"must not be next with targets: {self.targets}"
        yield Rule(other and following, beside, "text.predict")
        label = self.columns.label
        scaling = self.columns.preprocessing.get(label, ColumnPreprocessing(drop=True))
        fits = text is None and self.targets == "number"
        fits &= scaling == ColumnPreprocessing(range=scaling.range)
        rule = "must be only a range, of a label with targets: number and without text"
        yield Rule(not (fits or scaling.drop), rule, f"columns.preprocessing.{label}")
        built_in = self.root is None and self.name in BUILT_IN_DATASETS
        rule = f"must be class: {self.name} is built in; give data.root"
        yield Rule(other and built_in, rule, "targets")
        yield from self._rate_rules()

    def _rate_rules(self) -> Iterator[Rule]:
        if not self.class_sampling:
            for key in ("class_counts", "importance_weights"):
                given = getattr(self, key)
                yield Rule(given, f"must be left out without data.class_sampling, got {given}", key)
            return
        why = self.single_label_error("must be left out") or ""
        yield Rule(
            why,
            why.removeprefix("must be left out: "),
            "class_sampling",
            see="explanation/privacy.md#rare-classes",
        )
        yield Rule(
            not self.class_counts,
            "must be the public number of records of each class with data.class_sampling, as "
            "counts of private records would change every rate",
            "class_counts",
            see="explanation/privacy.md#rare-classes",
        )
        for key in ("class_sampling", "class_counts"):
            given = getattr(self, key)
            lacks = [f"no {name!r}" for name in self.class_names if name not in given]
            unknown = [f"the unknown class {n!r}" for n in given if n not in self.class_names]
            got = ", ".join(lacks[:3] + unknown[:3])
            rule = f"must be one number for each of the {self.num_classes} classes, got {got}"
            yield Rule(got, rule, key)

    @property
    def predicts_next_token(self) -> bool:
        """Return whether the targets of a record are its next tokens."""
        return self.text is not None and self.text.predicts_next_token

    @property
    def privacy_unit(self) -> str:
        """Return the unit that the guarantee protects, in words."""
        return "one record" if self.text is None else "one document, a row of the table"

    @property
    def unverified_assumptions(self) -> list[str]:
        """Return the unchecked assumptions of the guarantee.

        A vocabulary learned from a private document would change the tokens of all others.
        """
        if self.text is None or (self.text.tokenizer is None and self.text.words is None):
            return []
        name = "the list of words"
        if self.text.tokenizer is not None:
            name = f"the tokenizer, {self.text.tokenizer.name},"
        return [f"no private document is among what {name} was learned from"]

    def numeric_input_error(self, option: str) -> str | None:
        """Return why `option`, which needs numeric inputs, is not supported; or None."""
        if self.text is None:
            return None
        return f"{option}: needs numeric inputs; those of data.text are tokens"

    def single_label_error(self, option: str) -> str | None:
        """Return why `option`, which needs one label per record, is not supported; or None."""
        if self.predicts_next_token:
            key = "data.text.predict: next"
        elif self.targets != "class":
            key = f"data.targets: {self.targets}"
        else:
            return None
        return f"{option}: is for records of one label; with {key} there is none"

    @property
    def num_classes(self) -> int:
        """Return the number of classes of a model of these records."""
        return len(self.labels) or self.classes

    @property
    def class_names(self) -> list[str]:
        """Return the names of the classes of a model of these records, by default numbers."""
        names = self.names or [str(number) for number in range(self.classes)]
        return [names[label] for label in self.labels] or names

    @property
    def content_filter_key(self) -> str | None:
        """Return the field that selects records by their content, or None."""
        fields = ("labels", "max_train", "drop_test_records", "public", "private_eval_fraction")
        found = next((name for name in fields if getattr(self, name)), None)
        return "fraction" if found is None and self.fraction < 1 else found
