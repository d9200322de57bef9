"""Types of the fields that recipes and files are made of; a field's bounds belong to its type.

Numbers are finite and of a size that can be computed with; true is not a number; a path is one
that a file system can hold; free values (options of a model, choices of a search) are JSON. Small
vocabularies that several rooms share stand here as well: token numbers, image views, levels of
independence, names of norms and attacks.

An option that applies only beside others is refused where nothing would use it. Such conditions
hold for new runs: a run that was begun stays readable.
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

# --- options that apply only beside others ----------------------------------------------------


@dataclass(frozen=True)
class OptionCondition:
    """A condition under which options of a section apply.

    keys: below the section that states it, dotted. description: when they apply, behind "only
    applies". is_met: whether they do, for a section; without it they never do.
    """

    keys: tuple[str, ...]
    description: str
    is_met: Callable[[Any], bool] = lambda section: False


def collect_conditions(section_class: type[BaseModel]) -> list[OptionCondition]:
    """Return the conditions of a section's class, those of its bases first."""
    stated = [vars(each).get("conditions", ()) for each in reversed(section_class.__mro__)]
    return [condition for some in stated for condition in some]


def iter_unused_options(section: BaseModel, context: str = "") -> Iterator[str]:
    """Yield a complaint about each option of a section that is set and that nothing uses.

    An option is set when it differs from its default. Sections inside the section count too.
    context: begins each key.
    """
    yield from iter_condition_errors(collect_conditions(type(section)), section, context)
    for name in type(section).model_fields:
        inner = getattr(section, name)
        if isinstance(inner, BaseModel):
            yield from iter_unused_options(inner, f"{context}{name}.")


def iter_condition_errors(
    conditions: Iterable[OptionCondition], section: BaseModel, context: str = ""
) -> Iterator[str]:
    """Yield a complaint about each option of a section that these conditions refuse."""
    for condition in conditions:
        if condition.is_met(section):
            continue
        for key in condition.keys:
            value, usual = value_and_default(section, key)
            if value != usual:
                said = f"only applies {condition.description}, got {quoted(value)}"
                yield f"{context}{key}: {said}; leave it out"


def value_and_default(section: BaseModel, key: str) -> tuple[Any, Any]:
    """Return an option's value and its default; (None, None) where its section is missing."""
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
MAX_COUNT = 1_000_000_000  # of whatever is counted
MAX_MODELS = 10_000  # that one command trains: each is a training, and a folder
MAX_STEPS = 1_000_000  # of a training: more take minutes to account, and weeks to run
RESOURCE_LIMITS = (1e-4, 1024)  # CPUs or GPUs of one process: Ray counts in ten-thousandths
# of a noise multiplier above 0: beyond, no accountant's numbers are any good
NOISE_MULTIPLIER_LIMITS = (1e-2, 1e4)
MIN_DELTA = 1e-30


class Rule(NamedTuple):
    """A rule between options. key: which one breaks it, "" where `text` names them. see: a page."""

    broken: Any
    text: str
    key: str = ""
    see: str = ""


class Section(BaseModel):
    """One section of a recipe: no unknown keys, never changed, only finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    conditions: ClassVar[tuple[OptionCondition, ...]] = ()  # of its options; a base's hold as well

    def rules(self) -> Iterator[Rule]:
        """Yield the rules between its options; the first broken one is the error. By default none.

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
    """A rule of a number's field: between `low` and `high`, or 0 where `allow_zero`."""

    low: float
    high: float
    allow_zero: bool = False

    def __call__(self, value: float) -> float:
        """Return the value. Raises ValueError when it lies outside."""
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

    A recipe's file was anchored at its own folder before (`dpdist.runs.recipe.load_recipe`): what
    is still relative comes from an option or from Python, and begins at the current directory.
    """
    try:
        return validate_path(value).resolve()
    except (UserError, OSError, RuntimeError) as error:  # the last: links in a circle
        raise ValueError(str(error)) from None


def _check_one_line(value: str) -> str:
    if value.splitlines() not in ([], [value]):
        raise ValueError("must be one line")
    return value


def _check_json(value: Any, max_depth: int = 8) -> Any:
    """Return `value` when it is made of JSON types, at most 8 deep and 1,000 values wide."""
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
        raise ValueError(f"must be text, a number, true, false, null, a list or keys, no {kind}")
    if max_depth == 0 or len(inner) > 1000:
        raise ValueError("must be at most 8 deep and 1,000 values wide")
    for each in inner:
        _check_json(each, max_depth - 1)
    return value


def check_run_name(name: object) -> str:
    """Return the name of a run, which is also that of its folder. Raises ValueError."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(
            "must be letters, digits, '.', '_' and '-', at most 100 (it names the run folder)"
        )
    return name


def check_hex_key(value: str) -> str:
    """Return a key as hexadecimal text. Raises ValueError."""
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError("must be 64 lower-case hex digits")
    return value


HexKey = Annotated[str, AfterValidator(check_hex_key)]
# one value stands for a list of it
OneOrMore = BeforeValidator(
    lambda given: given if given is None or isinstance(given, list | tuple) else (given,)
)
RejectBool = BeforeValidator(_reject_bool)
Count = Annotated[int, RejectBool, Field(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, RejectBool, Field(ge=0, le=MAX_COUNT)]
Steps = Annotated[int, RejectBool, Field(ge=1, le=MAX_STEPS)]
# of a search, on average or at most
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
    AfterValidator(_whole_above_one),  # which is Ray's rule
]
NotNegative = Annotated[
    float, RejectBool, Field(ge=0, le=MAX_NUMBER)
]  # only compared: no number too small
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
    """Return the error of a section's rule about one of its keys, for a validator to raise.

    see: the page that helps; see `with_page`.
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
    said = item["msg"].removeprefix("Value error, ")
    text: str = said[:1].lower() + said[1:]
    return text


def validate_section(section: type[Section], value: Any) -> Section:
    """Return `value` as a section that is only known at run time; for use in a validator."""
    try:
        return section.model_validate(value)
    except ValidationError as error:
        raise PydanticCustomError("inside", "see inside", {"errors": error.errors()}) from None


def iter_errors(error: ValidationError) -> Iterator[Any]:
    """Yield the entries of pydantic's `errors()`, including those of sections known at run time.

    See `validate_section`.
    """
    for item in error.errors():
        for inner in item.get("ctx", {}).get("errors", [{**item, "loc": ()}]):
            yield {**inner, "loc": (*item["loc"], *inner["loc"])}


# --- the content of files ---------------------------------------------------------------------


def _check_number(value: Any) -> Any:
    if type(value) not in (int, float) or not abs(value) < 2**63:
        raise PydanticCustomError("float_type", "no number of a float's size")
    return value


def _check_secret_hex(value: str) -> str:
    try:
        bytes.fromhex(value)
    except ValueError:
        raise PydanticCustomError("secret", "must be hex digits") from None
    return value


SecretHex = Annotated[str, AfterValidator(_check_secret_hex)]  # which no message shows
Number = Annotated[float, PlainValidator(_check_number)]  # kept as it is: 1 stays 1, and not 1.0
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
    """The content of one file format: the keys it must have, and the type of each.

    Types are strict: true is no number, and a number is no text. Keys that no field names are left
    alone, because a later version may write more. `Section` is for what people write.

    newest_format: the highest value of the key format that this version reads.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    newest_format: ClassVar[int | None] = None

    @classmethod
    def parse(cls, record: Keys, context: str) -> Self:
        """Return the content of a JSON object.

        Raises UserError, in one line that begins with `context`, for a newer format, and for the
        first key that is missing or of another type.
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
            said = f"{key} {rule or validation_message(item)}{got}".strip()
            raise UserError(f"{context}: damaged: {said}") from None

    @classmethod
    def refuse_newer(cls, record: Keys, context: str) -> None:
        """Raise UserError where the key format is above `newest_format`."""
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
        """Return the JSON object of a file that `read` accepts, with the keys no field names."""
        record = read_json(path)
        cls.parse(record, str(path))
        return record


# --- measures of what is no class -------------------------------------------------------------


# By data.targets: of numbers, over all of a record's; of labels, shares of labels and of records.
MEASURES = {
    "number": ("mean squared error", "mean absolute error"),
    "labels": ("labels right", "records with all labels right"),
}


# --- token numbers ----------------------------------------------------------------------------


BEGIN, END, FIRST_BYTE = 0, 1, 2  # byte b is b + 2
UNKNOWN, FIRST_WORD = 2, 3  # of a list of words, the first is 3
BYTES = 256 + FIRST_BYTE
PADDING = -1  # is no token, whatever the tokenizer
PROMPT = -2  # a token t that is read and not learned, as of a prompt, stands as -2 - t


def scale_to_unit(values: Any, low: Any, high: Any) -> Any:
    """Return numbers with their public ranges mapped to [0, 1]; what lies beyond is cut.

    values: an array (..., features). low, high: a number, or an array (features,).
    """
    return ((values - low) / (high - low)).clip(0, 1)


def vocabulary_size(num_words: int | None) -> int:
    """Return the number of tokens: begin, end, unknown and so many words; None means bytes."""
    return BYTES if num_words is None else num_words + FIRST_WORD


# --- views of an image ------------------------------------------------------------------------


MAX_SHIFT = 8  # pixels by which an image is moved


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


# assumed where a model draws random numbers in its passes (`dpdist.gradients.random_passes`)
DRAWS_BY_ROW = (
    "each row's random draws are independent of other rows, and torch's generator (not "
    "cryptographic) cannot be told from true randomness"
)
MOST_MOVED = 1025  # records that one record more may move: those of its keyed block
# By precision: bits of what is assumed of a move, and of the slack that the clip has for it.
_ROUNDING_BITS = {"float32": (19, 8), "float64": (35, 24)}


def describe_rounding(
    rounding: str,
    micro_batch: int | None,
    precision: str,
    moves: float | None,
    nominal: bool = False,
) -> str:
    """Return what a guarantee assumes of floating point, in sentences for the card.

    Args:
        rounding: `resources.rounding`.
        micro_batch: `resources.micro_batch`.
        precision: of the trained parameters, float32 or float64.
        moves: measured change of a clipped gradient, in clip norms; None where it was not measured.
        nominal: whether the number of records is protected, so that those behind a record move up.
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
    shown = f"{math.ceil(moves / rounded) * rounded:.2g}"  # never less than was measured
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
    """Return the least sure of several statements of independence.

    A word that is none of the three counts as SCREENED.
    """
    order = list(INDEPENDENCE)
    places = [order.index(each) if each in order else 0 for each in levels]
    return order[min(places, default=0)]


# --- names of norms and attacks ---------------------------------------------------------------


Norm = Literal["linf", "l2"]
NORMS: tuple[Norm, ...] = ("linf", "l2")
AttackName = Literal["fgsm", "i-fgsm", "mim", "pgd"]
ATTACKS: tuple[AttackName, ...] = ("fgsm", "i-fgsm", "mim", "pgd")


def describe_input_fields(fields: Mapping[str, tuple[Sequence[int], str]]) -> str:
    """Return the fields that a model reads in words.

    fields: by name, the shape of one record's and the type of its numbers.
    """
    return ", ".join(
        f"{name} ({' x '.join(map(str, size)) or 1} {kind})"
        for name, (size, kind) in fields.items()
    )
