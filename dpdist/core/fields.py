"""Types of the fields of recipes and files; a field's bounds belong to its type.

Numbers are finite and within computable bounds; true is not a number; paths are valid for a file
system; free values (options of a model, choices of a search) are JSON. Small vocabularies that
several packages share are here as well: tokens, image views, levels of independence, names of norms
and attacks.

An option that nothing would use raises an error (`OptionCondition`). Conditions apply only to new
runs: a started run stays readable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dpdist.core.errors import UserError, with_page
from dpdist.core.files import quoted, read_json, validate_path

# --- options that apply only with others ------------------------------------------------------


@dataclass(frozen=True)
class OptionCondition:
    """A condition under which options of a section apply.

    keys: dotted, relative to the section. description: when they apply, after "only applies".
    is_met: whether they do, for a section; by default never.
    """

    keys: tuple[str, ...]
    description: str
    is_met: Callable[[Any], bool] = lambda section: False


def collect_conditions(section_class: type[BaseModel]) -> list[OptionCondition]:
    """Return the conditions of a section's class, starting with those of its bases."""
    stated = [vars(each).get("conditions", ()) for each in reversed(section_class.__mro__)]
    return [condition for some in stated for condition in some]


def iter_unused_options(section: BaseModel, context: str = "") -> Iterator[str]:
    """Yield a message about each option of a section, and of its sections, that nothing uses.

    Only options that differ from their defaults count. context: prefix of each key.
    """
    yield from iter_condition_errors(collect_conditions(type(section)), section, context)
    for name in type(section).model_fields:
        inner = getattr(section, name)
        if isinstance(inner, BaseModel):
            yield from iter_unused_options(inner, f"{context}{name}.")


def iter_condition_errors(
    conditions: Iterable[OptionCondition], section: BaseModel, context: str = ""
) -> Iterator[str]:
    """Yield a message about each option of a section that these conditions rule out."""
    for condition in conditions:
        if condition.is_met(section):
            continue
        for key in condition.keys:
            value, usual = value_and_default(section, key)
            if value != usual:
                rule = f"only applies {condition.description}, got {quoted(value)}"
                yield f"{context}{key}: {rule}; leave it out"


def value_and_default(section: BaseModel, key: str) -> tuple[Any, Any]:
    """Return an option's value and its default; (None, None) if its section is missing."""
    *path, name = key.split(".")
    for part in path:
        found = getattr(section, part)
        if found is None:
            return None, None
        section = found
    field = type(section).model_fields[name]
    return getattr(section, name), field.get_default(call_default_factory=True)


# --- types of fields --------------------------------------------------------------------------


MIN_POSITIVE, MAX_NUMBER = 1e-9, 1e9  # of a positive number in a recipe or on the command line
MAX_COUNT = 1_000_000_000
MAX_MODELS = 10_000  # models that one command trains, each with a folder
MAX_STEPS = 1_000_000  # of a training: more take minutes to account, and weeks to run
RESOURCE_LIMITS = (1e-4, 1024)  # CPUs or GPUs of one process: Ray counts in ten-thousandths
# of a noise multiplier above 0: no accountant is accurate beyond
NOISE_MULTIPLIER_LIMITS = (1e-2, 1e4)
MIN_DELTA = 1e-30


class Rule(NamedTuple):
    """A rule between options. key: of the wrong option, "" if `text` names it. see: a page."""

    broken: Any
    text: str
    key: str = ""
    see: str = ""


class Section(BaseModel):
    """One section of a recipe: immutable, without unknown keys, only with finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    conditions: ClassVar[tuple[OptionCondition, ...]] = ()  # also those of bases apply

    def rules(self) -> Iterator[Rule]:
        """Yield the rules between its options, by default no rules; the first broken one is raised.

        Yields:
            A `Rule` each: `broken` (true if the settings break it), `text`, `key` and `see` (str).
        """
        yield from ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.rules():
            if rule.broken and rule.key:
                raise key_error(rule.key, rule.text, rule.see)
            if rule.broken:
                raise ValueError(with_page(rule.text, rule.see))
        return self


def _reject_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


@dataclass(frozen=True)
class Range:
    """A validator of a number between `low` and `high`, or 0 if `allow_zero`."""

    low: float
    high: float
    allow_zero: bool = False

    def __call__(self, value: float) -> float:
        """Return the value. Raises ValueError if it is outside."""
        if not (self.low <= value <= self.high or (self.allow_zero and value == 0)):
            also = "0, or " if self.allow_zero else ""
            raise ValueError(f"must be {also}between {self.low:g} and {self.high:g}")
        return value


def _whole_above_one(value: float) -> float:
    if value > 1 and value != int(value):
        raise ValueError("must be at most 1, or a whole number")
    return value


def _resolve_path(value: Path) -> Path:
    """Return the absolute path, so that a run continues from any directory and on any host.

    Paths of a recipe's file are already relative to its folder (`dpdist.runs.recipe.load_recipe`);
    other relative paths are from an option or Python, and start at the current directory.
    """
    try:
        return validate_path(value).resolve()
    except (UserError, OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ValueError(str(error)) from None


def _check_one_line(value: str) -> str:
    if value.splitlines() not in ([], [value]):
        raise ValueError("must be one line")
    return value


def _check_json(value: Any, max_depth: int = 8) -> Any:
    """Return `value` if it has only JSON types, at most 8 deep and 1,000 values wide."""
    inner: list[Any] = []
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    elif isinstance(value, int | float):  # bool is an int
        if not abs(value) < 2**63:  # nor is NaN
            raise ValueError("must be a number below 2^63")
    elif not isinstance(value, str) and value is not None:
        kind = type(value).__name__
        raise ValueError(f"must be text, a number, true, false, null, a list or keys, not {kind}")
    if max_depth == 0 or len(inner) > 1000:
        raise ValueError("must be at most 8 deep and 1,000 values wide")
    for each in inner:
        _check_json(each, max_depth - 1)
    return value


def check_run_name(name: object) -> str:
    """Return a valid name of a run, and of its folder. Raises ValueError."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(
            "must be letters, digits, '.', '_' and '-', at most 100 (it names the run folder)"
        )
    return name


def check_hex_key(value: str) -> str:
    """Return a valid key as hexadecimal text. Raises ValueError."""
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError("must be 64 lower-case hex digits")
    return value


HexKey = Annotated[str, AfterValidator(check_hex_key)]


def text_as(key: str) -> BeforeValidator:
    """Return a validator that accepts a text instead of a section with only this key."""
    return BeforeValidator(lambda given: {key: given} if isinstance(given, str) else given)


# accepts one value instead of a list
OneOrMore = BeforeValidator(
    lambda given: given if given is None or isinstance(given, list | tuple) else (given,)
)
RejectBool = BeforeValidator(_reject_bool)
Count = Annotated[int, RejectBool, Field(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, RejectBool, Field(ge=0, le=MAX_COUNT)]
Steps = Annotated[int, RejectBool, Field(ge=1, le=MAX_STEPS)]
# of a search, as mean or maximum
TrialCount = Annotated[int, RejectBool, Field(ge=1, le=10_000)]
ModelCount = Annotated[int, RejectBool, Field(ge=1, le=MAX_MODELS)]
ProcessCount = Annotated[int, RejectBool, Field(ge=1, le=10_000)]  # training workers, Ray actors
Seed = Annotated[int, RejectBool, Field(ge=0, lt=2**63)]
Positive = Annotated[
    float, RejectBool, Field(gt=0), AfterValidator(Range(MIN_POSITIVE, MAX_NUMBER))
]
PositiveOrZero = Annotated[
    float,
    RejectBool,
    Field(ge=0),
    AfterValidator(Range(MIN_POSITIVE, MAX_NUMBER, allow_zero=True)),
]
Cpus = Annotated[float, RejectBool, Field(gt=0), AfterValidator(Range(*RESOURCE_LIMITS))]
Gpus = Annotated[
    float,
    RejectBool,
    Field(ge=0),
    AfterValidator(Range(*RESOURCE_LIMITS, allow_zero=True)),
    AfterValidator(_whole_above_one),  # as Ray requires
]
# without the lower bound of PositiveOrZero, as it is only compared
NotNegative = Annotated[float, RejectBool, Field(ge=0, le=MAX_NUMBER)]
NoiseMultiplier = Annotated[
    float,
    RejectBool,
    Field(ge=0),
    AfterValidator(Range(*NOISE_MULTIPLIER_LIMITS, allow_zero=True)),
]
PositiveNoise = Annotated[
    float, RejectBool, Field(gt=0), AfterValidator(Range(*NOISE_MULTIPLIER_LIMITS))
]
Probability = Annotated[float, RejectBool, Field(gt=0, lt=1), AfterValidator(Range(MIN_DELTA, 1))]
PositiveFraction = Annotated[
    float, RejectBool, Field(gt=0, le=1), AfterValidator(Range(MIN_POSITIVE, 1))
]
FractionBelowOne = Annotated[float, RejectBool, Field(ge=0, lt=1)]
Finite = Annotated[float, RejectBool, AfterValidator(Range(-MAX_NUMBER, MAX_NUMBER))]
FilePath = Annotated[Path, AfterValidator(_resolve_path)]
RunName = Annotated[str, AfterValidator(check_run_name)]
Text = Annotated[str, Field(max_length=500)]
SingleLine = Annotated[Text, AfterValidator(_check_one_line)]
License = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]  # by SPDX
Json = Annotated[Any, AfterValidator(_check_json)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_check_json)]


class InputSelection(Section):
    """The choice of inputs of a data set.

    Attributes:
        start: Index of the first input.
        every: Take every k-th input from there on.
        max_inputs: The most inputs to take; None: no limit.
    """

    start: CountOrZero = 0
    every: Count = 1
    max_inputs: Count | None = None

    @final
    def indices(self, count: int) -> range:
        """Return the positions of the chosen inputs, a range; empty if `start` is too large.

        Args:
            count: number of inputs in the data set.
        """
        chosen = range(self.start, count, self.every)
        return chosen if self.max_inputs is None else chosen[: self.max_inputs]


def key_error(key: str, rule: str, see: str = "") -> PydanticCustomError:
    """Return the error of a rule about one key of a section, for a validator to raise.

    see: the page that helps, as in `with_page`.
    """
    return PydanticCustomError(
        "of_key", "{key}: {rule}", {"key": key, "rule": with_page(rule, see)}
    )


_ERROR_MESSAGES = {
    "extra_forbidden": "unknown key",
    "missing": "is required",
    "greater_than": "must be > {gt:g}",
    "greater_than_equal": "must be >= {ge:g}",
    "less_than": "must be < {lt:g}",
    "less_than_equal": "must be <= {le:g}",
    "of_key": "{rule}",
    "finite_number": "must be finite",
    "literal_error": "must be one of {expected}",
    "string_pattern_mismatch": "must be letters, digits, '.', '_' and '-'",
    "union_tag_invalid": "must be one of {expected_tags}",
    "union_tag_not_found": "name is required",
}


def validation_message(item: Any) -> str:
    """Return the rule that a value broke, from an entry of pydantic's `errors()`."""
    rule = _ERROR_MESSAGES.get(item["type"])
    if rule is not None:
        return rule.format(**item.get("ctx", {}))
    text: str = item["msg"].removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def validate_section(section: type[Section], value: Any) -> Section:
    """Return `value` as a section whose class is only known at run time, in a validator."""
    try:
        return section.model_validate(value)
    except ValidationError as error:
        raise PydanticCustomError("inside", "see inside", {"errors": error.errors()}) from None


def iter_errors(error: ValidationError) -> Iterator[Any]:
    """Yield the entries of pydantic's `errors()`, also those of `validate_section`."""
    for item in error.errors():
        for inner in item.get("ctx", {}).get("errors", [{**item, "loc": ()}]):
            yield {**inner, "loc": (*item["loc"], *inner["loc"])}


# --- the content of files ---------------------------------------------------------------------


def _check_number(value: Any) -> Any:
    if type(value) not in (int, float) or not abs(value) < 2**63:
        raise PydanticCustomError("float_type", "must be a number below 2^63")
    return value


def _check_secret_hex(value: str) -> str:
    try:
        bytes.fromhex(value)
    except ValueError:
        raise PydanticCustomError("secret", "must be hex digits") from None
    return value


SecretHex = Annotated[str, AfterValidator(_check_secret_hex)]  # messages never show the value
Number = Annotated[float, PlainValidator(_check_number)]  # 1 stays 1, not 1.0
WholeNumber = Annotated[int, Field(ge=0)]
Keys = dict[str, Any]

_FILE_RULES = {
    "missing": "is missing",
    "extra_forbidden": "is an unknown key",
    "int_type": "must be int",
    "float_type": "must be float",
    "string_type": "must be str",
    "bool_type": "must be bool",
    "dict_type": "must be dict",
    "model_type": "must be dict",
    "list_type": "must be list",
    "greater_than_equal": "must be a whole number >= {ge:g}",
}


class FileShape(BaseModel):
    """The content of one file format: its required keys and their types.

    Types are strict: true is not a number, and a number is not a text. Unknown keys are ignored, as
    a later version may write more. `Section` is for files that people write.

    newest_format: the highest value of the key format that this version reads.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    newest_format: ClassVar[int | None] = None

    @classmethod
    def parse(cls, record: Keys, context: str) -> Self:
        """Return the content of a JSON object.

        Raises UserError, in one line that begins with `context`, for a newer format, and for the
        first key that is missing or has a wrong type.
        """
        cls.refuse_newer(record, context)
        try:
            return cls.model_validate(record)
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
            key = ".".join(map(str, item["loc"])) or item.get("ctx", {}).get("key", "")
            rule = _FILE_RULES.get(item["type"], "").format(**item.get("ctx", {}))
            silent = item["type"] in ("missing", "secret")
            got = "" if silent else f", got {quoted(item['input'])}"
            text = f"{key} {rule or validation_message(item)}{got}".strip()
            raise UserError(f"{context}: damaged: {text}") from None

    @classmethod
    def refuse_newer(cls, record: Keys, context: str) -> None:
        """Raise UserError if the key format is above `newest_format`."""
        version = record.get("format")
        if cls.newest_format is not None and type(version) is int and version > cls.newest_format:
            maker = f"{quoted(record['dpdist'], 20).strip(chr(39))}, " if "dpdist" in record else ""
            raise UserError(
                f"{context}: written by a newer dpdist ({maker}format {version}; this one reads "
                f"format {cls.newest_format}); upgrade to read it"
            )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the content of a JSON file. Raises as `dpdist.core.files.read_json`."""
        return cls.parse(read_json(path), str(path))

    @classmethod
    def read_keys(cls, path: Path) -> Keys:
        """Return the JSON object of a file that `read` accepts, with unknown keys."""
        record = read_json(path)
        cls.parse(record, str(path))
        return record


# --- measures of numbers and labels -----------------------------------------------------------


# By data.targets: for numbers, over all of a record; for labels, fractions of labels and records.
MEASURES = {
    "number": ("mean squared error", "mean absolute error"),
    "labels": ("labels right", "records with all labels right"),
}


# --- tokens -----------------------------------------------------------------------------------


BEGIN, END, FIRST_BYTE = 0, 1, 2  # byte b is b + 2
UNKNOWN, FIRST_WORD = 2, 3  # the first word of a list is 3
BYTES = 256 + FIRST_BYTE
PADDING = -1  # not a token of any tokenizer
PROMPT = -2  # a token t that is read and not learned, as in a prompt, is stored as -2 - t


def scale_to_unit(values: Any, low: Any, high: Any) -> Any:
    """Return numbers with their public ranges mapped to [0, 1]; values beyond are cut.

    values: an array (..., features). low, high: a number, or an array (features,).
    """
    return ((values - low) / (high - low)).clip(0, 1)


def vocabulary_size(num_words: int | None) -> int:
    """Return the number of tokens: begin, end, unknown and the words; None means bytes."""
    return BYTES if num_words is None else num_words + FIRST_WORD


# --- views of an image ------------------------------------------------------------------------


MAX_SHIFT = 8  # pixels


def list_shifts(max_shift: int) -> list[tuple[int, int]]:
    """Return (0, 0), then every distance up to `max_shift`, down, up, right and left."""
    ways = ((1, 0), (-1, 0), (0, 1), (0, -1))
    return [(0, 0)] + [(d * y, d * x) for d in range(1, max_shift + 1) for y, x in ways]


def describe_averaging(name: str, max_shift: int, mirrored: bool) -> str:
    """Return the name of a model together with its average over views."""
    over = [f"{len(list_shifts(max_shift))} shifts"] if max_shift else []
    over += ["the image and its mirror image"] if mirrored else []
    return f"{name}, averaged over {', each of '.join(over)}" if over else name


# --- levels of independence of records --------------------------------------------------------


SCREENED, KNOWN_LAYERS, PER_EXAMPLE = "screened", "known layers", "per-example"
INDEPENDENCE = {
    SCREENED: "33 public or synthetic examples gave the same loss and gradient alone and among "
    "others, which proves nothing about other values",
    KNOWN_LAYERS: "the model is dpdist's own, or composed of layer types that treat each record "
    "alone",
    PER_EXAMPLE: "each record runs alone, by torch.func",
}


# assumed if a model uses random numbers in its passes (`dpdist.gradients.random_passes`)
DRAWS_BY_ROW = (
    "each row's random draws are independent of other rows, and torch's generator (not "
    "cryptographic) cannot be told from true randomness"
)
MOST_MOVED = 1025  # records of a keyed block, which one more record may move
# By precision: bits of the assumed effect of a move, and of the slack of the clip.
_ROUNDING_BITS = {"float32": (19, 8), "float64": (35, 24)}


def describe_rounding(
    rounding: str,
    micro_batch: int | None,
    precision: str,
    moves: float | None,
    nominal: bool = False,
) -> str:
    """Return the floating-point assumptions of a guarantee, in sentences for the card.

    Args:
        rounding: `resources.rounding`.
        micro_batch: `resources.micro_batch`.
        precision: of the trained parameters, float32 or float64.
        moves: measured change of a clipped gradient, in clip norms; None if it was not measured.
        nominal: whether the number of records is protected, so that later records move up.
    """
    if micro_batch == 1:
        return (
            "Floating point: every record runs alone. Assumed: equal passes give equal bits. "
            "Sums are float64."
        )
    if rounding == "fixed-row":
        return (
            "Floating point: every record has a row that follows from its id and the step's key; "
            "other records change only which pass it is in and beside whom. Assumed: equal passes "
            "give equal bits; a row's result does not depend on the other rows; no shape inside "
            "depends on values. Sums are float64."
        )
    assumed, slack = _ROUNDING_BITS[precision]
    kept = "their blocks" if nominal else "their positions in the data set and their blocks"
    said = (
        "Floating point: assumed that moving a record to another row, or to a pass of another "
        f"length, changes its clipped gradient by at most 2^-{assumed} C, so that the "
        f"{MOST_MOVED:,} records of a keyed block stay within the slack of the clip (2^-{slack}). "
        "Passes have one shape but a block's last, which has the rows that are left; one record "
        f"more changes the passes of one block only (others keep {kept}); sums are float64."
    )
    if moves is None:
        return f"{said} Not measured."
    rounded = 10.0 ** (math.floor(math.log10(moves)) - 1) if moves else 1.0
    shown = f"{math.ceil(moves / rounded) * rounded:.2g}"  # rounded up
    said += (
        " Measured on the training device, in the training precision, on 64 public or synthetic "
        "records (moved by a row, and to a pass of another length; a model's random draws move "
        f"with their rows): at most {shown} C."
    )
    if moves > 2.0 ** -(assumed + 1):
        said += (
            f" That is more than 2^-{assumed + 1} C: rounding is an assumption here that the slack "
            "does not cover; resources.rounding: fixed-row does not rest on it."
        )
    return said


def weakest(levels: Iterable[str]) -> str:
    """Return the weakest of several levels of independence; unknown words count as SCREENED."""
    order = list(INDEPENDENCE)
    places = [order.index(each) if each in order else 0 for each in levels]
    return order[min(places, default=0)]


# --- names of norms and attacks ---------------------------------------------------------------


Norm = Literal["linf", "l2"]
NORMS: tuple[Norm, ...] = ("linf", "l2")
AttackName = Literal["fgsm", "i-fgsm", "mim", "pgd"]
ATTACKS: tuple[AttackName, ...] = ("fgsm", "i-fgsm", "mim", "pgd")


def describe_input_fields(fields: Mapping[str, tuple[Sequence[int], str]]) -> str:
    """Return the fields that a model reads, in words.

    fields: by name, the shape of one record and the type of its numbers.
    """
    return ", ".join(
        f"{name} ({' x '.join(map(str, size)) or 1} {kind})"
        for name, (size, kind) in fields.items()
    )
