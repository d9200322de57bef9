"""How sure it is that a model treats each record alone: three words, the least sure first."""

from __future__ import annotations

from collections.abc import Iterable

SCREENED, BY_STRUCTURE, ISOLATED = "assumed, screened", "by structure", "isolated"
INDEPENDENCE = {
    SCREENED: "public and invented examples showed no mixing, which proves nothing about others",
    BY_STRUCTURE: "every operation of a pass is known to treat each record alone",
    ISOLATED: "each record runs through the model alone",
}


def weakest(found: Iterable[str]) -> str:
    """Return the least sure of several; of a word that is none of the three, SCREENED."""
    order = list(INDEPENDENCE)
    places = [order.index(each) if each in order else 0 for each in found]
    return order[min(places, default=0)]
