"""Map each kind of certificate to its three roles: settings and algorithm, table, description.

To add a kind, write the three and list them in `KINDS` and in the recipe's union `AnyCertificate`;
`register` does it for a kind of one's own, in Python alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Discriminator, Tag, TypeAdapter, ValidationError

from dpdist.certification.certificate import Certificate
from dpdist.certification.cohen import Cohen, Smoothing
from dpdist.certification.expected_scores import (
    BettingDescription,
    BettingScores,
    BettingTable,
    ExpectedScores,
    ScoreDescription,
    ScoreTable,
)
from dpdist.certification.sequential import (
    Anytime,
    AnytimeTable,
    TargetRadius,
    TargetRadiusTable,
    TargetScores,
    TargetScoresDescription,
    TargetScoresTable,
)
from dpdist.certification.table import CertificateKind, CohenTable, VoteDescription
from dpdist.certification.variants import HoeffdingVotes, TwoClass, TwoClassTable
from dpdist.core.errors import UserError
from dpdist.core.fields import key_error, validation_message
from dpdist.core.files import quoted

if TYPE_CHECKING:
    import pyarrow as pa

KINDS: tuple[CertificateKind, ...] = (
    CertificateKind(Cohen, CohenTable, VoteDescription("{n:,} draws an input")),
    CertificateKind(
        TargetRadius,
        TargetRadiusTable,
        VoteDescription("given radii decided by at most {n:,} draws"),
    ),
    CertificateKind(
        Anytime, AnytimeTable, VoteDescription("at most {n:,} draws, valid at any time")
    ),
    CertificateKind(
        TwoClass,
        TwoClassTable,
        VoteDescription("{n:,} draws an input, the runner-up bounded by its own"),
    ),
    CertificateKind(
        HoeffdingVotes,
        CohenTable,
        VoteDescription("{n:,} draws an input, bounded by Hoeffding's inequality"),
    ),
    CertificateKind(TargetScores, TargetScoresTable, TargetScoresDescription()),
    CertificateKind(BettingScores, BettingTable, BettingDescription()),
    CertificateKind(ExpectedScores, ScoreTable, ScoreDescription()),
)
CERTIFICATES: tuple[type[Certificate], ...] = tuple(kind.settings for kind in KINDS)
_USUAL = "clopper-pearson"  # bound of votes, where none is named
_FIXED = ("fixed", HoeffdingVotes.mode_name())  # modes of a number of draws fixed in advance
BY_MODE = {kind.settings.mode_name(): kind for kind in KINDS}

# Settings of some certificates, which are refused in a section of any other.
_OF_SOME_KINDS = ("sigma", "mode", "noise", "bound", "norm", "one_sided")


def _drop_neutral_settings(section: Any) -> Any:
    """Return the section without empty options.

    Raises ValueError for options of another certificate.
    """
    if not isinstance(section, Mapping):
        return section
    kind = BY_MODE[_requested_mode(section)].settings
    own = dict(section)
    if own.get("bound") == _USUAL and issubclass(kind, Smoothing):
        del own["bound"]
    if kind in (Cohen, HoeffdingVotes) and own.get("mode") in _FIXED:
        own["mode"] = kind.mode_name()  # which of them, `bound` says
    mode = own.get("mode")
    if "mode" in kind.model_fields and mode not in (None, kind.mode_name()):
        raise key_error(
            "mode", f"must be one of {', '.join(_allowed_modes(section))}, got {quoted(mode)}"
        )
    for name in _OF_SOME_KINDS:
        if name in own and name not in kind.model_fields:
            value = own.pop(name)
            if value is not None:
                instead = "".join(f" or be {other}" for other in _alternatives(section, name))
                raise key_error(
                    name, f"must be left out{instead} {kind.wrong_key_hint}, got {quoted(value)}"
                )
    return own


def _alternatives(section: Mapping[str, Any], name: str) -> list[str]:
    """Return the values that a key which fits no field of the certificate may have after all."""
    if name == "mode":
        return _allowed_modes(section)
    of_votes = _requested_mode(section) == Cohen.mode_name() and section.get("sigma") is not None
    return [_USUAL, HoeffdingVotes.mode_name()] if name == "bound" and of_votes else []


def _allowed_modes(section: Mapping[str, Any]) -> list[str]:
    """Return the values that `mode` may have in the section."""
    named = (k.mode_name() for k in CERTIFICATES if "mode" in k.model_fields)
    return [
        mode for mode in named if BY_MODE[mode].settings.accepts_section({**section, "mode": mode})
    ]


def _requested_mode(section: Any) -> str:
    """Return the certificate's mode that a section asks for; the first in the list by default."""
    if isinstance(section, Certificate):
        return type(section).mode_name()
    if isinstance(section, Mapping):
        section = _with_bound(section)
    fitting = (
        k for k in CERTIFICATES if isinstance(section, Mapping) and k.accepts_section(section)
    )
    return next(fitting, CERTIFICATES[0]).mode_name()


def _with_bound(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section with the mode that a bound of votes stands for."""
    if section.get("sigma") is None or (section.get("mode") or "fixed") not in _FIXED:
        return section
    if HoeffdingVotes.accepts_section(section):
        return {**section, "mode": HoeffdingVotes.mode_name()}
    return {**section, "mode": "fixed"} if section.get("bound") == _USUAL else section


AnyCertificate = Annotated[
    Annotated[Cohen, Tag("fixed")]
    | Annotated[TargetRadius, Tag("target")]
    | Annotated[Anytime, Tag("anytime")]
    | Annotated[TwoClass, Tag("two-class")]
    | Annotated[HoeffdingVotes, Tag("hoeffding")]
    | Annotated[TargetScores, Tag("target-scores")]
    | Annotated[BettingScores, Tag("betting")]
    | Annotated[ExpectedScores, Tag("scores")],
    Discriminator(_requested_mode),
    BeforeValidator(_drop_neutral_settings),
]
"""The recipe's ``certify`` section."""


def settings_of(section: Mapping[str, Any], defaults: Certificate | None = None) -> Certificate:
    """Return the certificate that settings ask for.

    It smooths the inputs when ``sigma`` is given (``mode`` says how), else it is the certificate by
    expected scores of the model's own noise.

    Args:
        section: settings by name, as in a recipe's section `certify`; None counts as not given.
        defaults: gives those that are not given, such as the recipe's. Where another kind of
            certificate is asked for, its defaults that this kind does not have are left out.

    Returns:
        The checked settings, an instance of a certificate's class such as `dpdist.Cohen`.

    Raises:
        UserError: a value cannot be used, or belongs to another certificate.

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
        kind = BY_MODE[_requested_mode(kept | given)].settings
        asked = {
            name: value
            for name, value in kept.items()
            if name in kind.model_fields or value != fields[name].default
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


def kind_of(settings: type[Certificate]) -> CertificateKind:
    """Return the three roles of a class of settings.

    A class that is neither listed nor registered has the table and the description of the nearest
    one that is, and that it inherits from. Raises UserError where it inherits from none.
    """
    listed = {kind.settings: kind for kind in (*KINDS, *BY_MODE.values())}
    for parent in settings.__mro__:
        if parent in listed:
            return replace(listed[parent], settings=settings)
    raise UserError(
        f"{settings.__qualname__}: must be listed in dpdist.certification.registry.KINDS with its "
        "table and its description, or inherit from one that is"
    )


def register(kind: CertificateKind | type[Certificate]) -> None:
    """Make the tables of a kind of one's own readable in this process.

    Args:
        kind: the three roles, or the settings alone where table and description are those of the
            nearest listed class that they inherit from.

    Raises:
        UserError: another kind has its mode.

    Example:
        >>> from typing import Literal
        >>> from dpdist.certification.cohen import Cohen
        >>> from dpdist.certification.registry import BY_MODE, register
        >>> class Halved(Cohen):
        ...     mode: Literal["halved"] = "halved"
        >>> register(Halved)
        >>> BY_MODE.pop("halved").settings.__name__
        'Halved'
    """
    own = kind if isinstance(kind, CertificateKind) else kind_of(kind)
    mode, name = own.settings.mode_name(), own.settings.__qualname__
    taken = BY_MODE.get(mode)
    if taken is not None and taken.settings.__qualname__ != name:
        raise UserError(
            f"{name}: mode {mode!r} is that of {taken.settings.__qualname__}; give it a mode of "
            "its own"
        )
    BY_MODE[mode] = own


def require_readable(settings: type[Certificate]) -> None:
    """Raise UserError for settings whose table could not be read once it is computed."""
    mode, listed = settings.mode_name(), BY_MODE.get(settings.mode_name())
    if listed is None or not issubclass(settings, listed.settings):
        taken = "" if listed is None else f" is that of {listed.settings.__qualname__}, and"
        raise UserError(
            f"{settings.__qualname__}: mode {mode!r}{taken} is not registered; give the class a "
            "mode of its own and call dpdist.certification.registry.register with it"
        )


def kind_of_table(table: pa.Table, context: object = "the table") -> CertificateKind:
    """Return the kind of certificate of a table.

    Raises UserError when there is none such, or several.
    """
    modes = table["mode"].unique().to_pylist()
    if len(modes) != 1 or modes[0] not in BY_MODE:
        raise UserError(
            f"{context}: its rows differ in mode ({', '.join(sorted(modes))}), or it is one that "
            f"this version does not know ({', '.join(BY_MODE)}); register a kind of your own first"
        )
    return BY_MODE[modes[0]]
