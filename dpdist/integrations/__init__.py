"""Private training inside the trainers of other libraries, each an extra of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from dpdist.core.errors import UserError


def refusal(key: str, must: str, got: Any, then: str) -> UserError:
    """Return the error for an argument of a trainer: its rule, its value and what to do instead."""
    return UserError(f"{key}: must {must}, got {got}: {then}")


def refuse(key: str, must: str, got: Any, then: str) -> NoReturn:
    """Raise UserError for an argument of a trainer: its rule, its value and what to do instead."""
    raise refusal(key, must, got, then)


def raise_all(found: Iterable[UserError]) -> None:
    """Raise one UserError with a line for each of these, in order, if there are any."""
    if lines := [str(each) for each in found]:
        raise UserError("\n".join(lines))
