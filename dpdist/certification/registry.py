"""List the kinds of certificates: one class each, with a mode as its name.

To add a kind, write its class and list it in `AnyCertificate`, the recipe's union. `register` adds
a user's own kind, for use from Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Discriminator, Tag, TypeAdapter, ValidationError

from dpdist.certification.certificate import Certificate
from dpdist.certification.cohen import Cohen
from dpdist.certification.expected_scores import BettingScores, ExpectedScores
from dpdist.certification.sequential import Anytime, TargetRadius, TargetScores
from dpdist.certification.variants import HoeffdingVotes, TwoClass
from dpdist.core.errors import UserError
from dpdist.core.fields import key_error, validation_message
from dpdist.core.files import quoted

if TYPE_CHECKING:
    import pyarrow as pa

CERTIFICATES: tuple[type[Certificate], ...] = (
    Cohen, TargetRadius, Anytime, TwoClass, HoeffdingVotes, TargetScores, BettingScores,
    ExpectedScores,
)  # fmt: skip
BY_MODE: dict[str, type[Certificate]] = {kind.mode_name(): kind for kind in CERTIFICATES}
_USUAL = "clopper-pearson"  # the default bound of votes
# The mode that `bound` selects, of two modes with a fixed number of draws.
_BY_BOUND: dict[tuple[str, str], str] = {
    ("fixed", "hoeffding"): "hoeffding",
    ("hoeffding", _USUAL): "fixed",
    ("scores", "betting"): "betting",
}


def _mode_of(section: Any) -> str:
    """Return the mode of a section: the one that it names, else by votes if it gives sigma."""
    if isinstance(section, Certificate):
        return type(section).mode_name()
    if not isinstance(section, Mapping):
        return Cohen.mode_name()
    votes = section.get("sigma") is not None
    mode = section.get("mode") or (Cohen if votes else ExpectedScores).mode_name()
    return _BY_BOUND.get((str(mode), str(section.get("bound"))), str(mode))


def _of_one_kind(section: Any) -> Any:
    """Return the section with the keys of its kind, without empty options."""
    if not isinstance(section, Mapping):
        return section
    mode = _mode_of(section)
    if mode not in BY_MODE:
        raise key_error("mode", f"must be one of {', '.join(BY_MODE)}, got {mode!r}")
    fields = BY_MODE[mode].model_fields
    own = {key: value for key, value in section.items() if key in fields or value is not None}
    if own.get("bound") == _USUAL and "noise" in fields and "bound" not in fields:
        del own["bound"]
    if mode == Cohen.mode_name() and own.get("bound") is not None:
        raise key_error("bound", f"must be {_USUAL} or hoeffding, got {own['bound']!r}")
    if "mode" not in fields:
        own.pop("mode", None)
    elif own.get("mode", mode) is not None:
        own["mode"] = mode
    return own


AnyCertificate = Annotated[
    Annotated[Cohen, Tag("fixed")]
    | Annotated[TargetRadius, Tag("target-radius")]
    | Annotated[Anytime, Tag("anytime")]
    | Annotated[TwoClass, Tag("two-class")]
    | Annotated[HoeffdingVotes, Tag("hoeffding")]
    | Annotated[TargetScores, Tag("target-scores")]
    | Annotated[BettingScores, Tag("betting")]
    | Annotated[ExpectedScores, Tag("scores")],
    Discriminator(_mode_of),
    BeforeValidator(_of_one_kind),
]
"""The recipe's ``certify`` section."""


def settings_of(section: Mapping[str, Any], defaults: Certificate | None = None) -> Certificate:
    """Return the certificate that settings select, such as a `dpdist.Cohen`.

    It smooths the inputs if ``sigma`` is given (``mode`` selects how), else it is the certificate
    by expected scores with the model's own noise.

    Args:
        section: settings by name, as in a recipe's section `certify`; None counts as not given.
        defaults: settings for the names that are not in `section`, such as the recipe's. If
            `section` selects a different kind of certificate, defaults that this kind does not have
            are ignored.

    Returns:
        The checked settings, an instance of a certificate's class such as `dpdist.Cohen`.

    Raises:
        UserError: a value cannot be used, or belongs to a different certificate.

    Example:
        >>> import dpdist
        >>> settings = dpdist.settings_of({"sigma": 0.25, "n": 1000})
        >>> settings.mode, settings.alpha
        ('fixed', 0.001)
    """
    given = asked = {name: value for name, value in section.items() if value is not None}
    if defaults is not None:
        kept, fields = defaults.model_dump(), type(defaults).model_fields
        scored = kept.get("sigma") is None and "bound" in kept  # a bound of scores, not of votes
        if scored and "sigma" in given and kept["bound"] == fields["bound"].default:
            del kept["bound"]
        mode = _mode_of(kept | given)
        own = BY_MODE[mode].model_fields if mode in BY_MODE else {}
        asked = {
            name: value
            for name, value in kept.items()
            if name in own or value != fields[name].default
        } | given
    try:
        return _ADAPTER.validate_python(asked)
    except ValidationError as error:
        raise UserError("\n".join(_complaint(item) for item in error.errors())) from None


_ADAPTER: TypeAdapter[Certificate] = TypeAdapter(AnyCertificate)


def _complaint(item: Any) -> str:
    key, rule = [*item["loc"][1:]], validation_message(item)
    if item["type"] == "of_key":
        key.append(item["ctx"]["key"])
    got = "" if isinstance(item["input"], Mapping) else f", got {quoted(item['input'])}"
    return f"certify.{'.'.join(map(str, key))}: {rule}{got}"


def register(kind: type[Certificate]) -> None:
    """Make the tables of your own kind of certificate readable in this process.

    Args:
        kind: its class, such as a subclass of `dpdist.Cohen` with a separate mode.

    Raises:
        UserError: a different kind has its mode.

    Example:
        >>> from typing import Literal
        >>> from dpdist.certification.cohen import Cohen
        >>> from dpdist.certification.registry import BY_MODE, register
        >>> class Halved(Cohen):
        ...     mode: Literal["halved"] = "halved"
        >>> register(Halved)
        >>> BY_MODE.pop("halved").__name__
        'Halved'
    """
    mode, name = kind.mode_name(), kind.__qualname__
    taken = BY_MODE.get(mode)
    if taken is not None and taken.__qualname__ != name:
        raise UserError(
            f"{name}: mode {mode!r} is that of {taken.__qualname__}; give it a different mode"
        )
    BY_MODE[mode] = kind


def require_readable(settings: type[Certificate]) -> None:
    """Raise UserError for settings whose computed table could not be read."""
    mode, listed = settings.mode_name(), BY_MODE.get(settings.mode_name())
    if listed is None or not issubclass(settings, listed):
        taken = "" if listed is None else f" is that of {listed.__qualname__}, and"
        raise UserError(
            f"{settings.__qualname__}: mode {mode!r}{taken} is not registered; give the class a "
            "different mode and call dpdist.certification.registry.register with it"
        )


def class_of_table(table: pa.Table, context: object = "the table") -> type[Certificate]:
    """Return the class of a table's certificates. Raises UserError unless there is exactly one."""
    modes = table["mode"].unique().to_pylist()
    if len(modes) != 1 or modes[0] not in BY_MODE:
        raise UserError(
            f"{context}: mode must be one of {', '.join(BY_MODE)} for all rows, got "
            f"{', '.join(sorted(modes))}; register a kind of your own first"
        )
    return BY_MODE[modes[0]]
