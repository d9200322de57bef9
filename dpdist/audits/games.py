"""Membership games: which records each model of a bank is trained with, by keyed randomness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dpdist.base.errors import UserError
from dpdist.privacy.guarantee import Neighbours
from dpdist.randomness.keys import derive_key, words

Bits = NDArray[np.bool_]


@dataclass(frozen=True)
class Game:
    """Who is in which model. models: of the bank. key: secret until the attack is over.

    relation: under which a guarantee bounds what an adversary who does not know the key can tell.
    """

    models: int
    name: ClassVar[str]
    words: ClassVar[str]
    relation: ClassVar[Neighbours]
    nominal: ClassVar[bool] = False  # the number of members is drawn too

    def members(self, key: bytes, model: int, records: int) -> Bits:
        """Of all records, those that model 0 <= model < models is trained with."""
        raise NotImplementedError

    def size(self, records: int) -> int:
        """Expected number of members of a model."""
        return records // 2

    @property
    def targets(self) -> range:
        """Which models are attacked."""
        return range(self.models)

    def plain(self, model: int) -> bool:
        """Whether a model is trained without the recipe's method, by ordinary SGD."""
        return False

    def judged(self, key: bytes, model: int, records: int) -> Bits:
        """The records whose membership in a model the adversary of a target guesses."""
        return np.ones(records, dtype=bool)


@dataclass(frozen=True)
class Coins(Game):
    """Each record is in each model by a fair coin of its own (Carlini et al. 2022)."""

    name = "coins"
    words = "each record in each model by its own fair coin"
    relation = "add-or-remove-one"
    nominal = True

    def members(self, key: bytes, model: int, records: int) -> Bits:
        return words(derive_key(key, "coins", model), 0, records) >> np.uint64(63) == 1


@dataclass(frozen=True)
class Halves(Game):
    """Each model has a random half, exact but for one record of an odd number."""

    name = "halves"
    words = "each model with a random exact half"
    relation = "replace-one"

    def members(self, key: bytes, model: int, records: int) -> Bits:
        return _part(derive_key(key, "halves", model), records, 0, self.size(records))


@dataclass(frozen=True)
class Quarters(Game):
    """The residual perturbation paper's protocol: random halves for target and shadow, half of each
    in its model. Model 0 is the target, made by the recipe; model 1 the shadow, by ordinary SGD
    whatever the target is.
    """

    models: int = 2
    name = "quarters"
    words = "target and shadow with a random quarter each, another quarter out"
    relation = "replace-one"

    def __post_init__(self) -> None:
        if self.models != 2:
            raise UserError(f"membership: quarters has a target and a shadow, got {self.models}")

    def members(self, key: bytes, model: int, records: int) -> Bits:
        quarter = self.size(records)
        return _part(derive_key(key, "quarters"), records, 2 * model * quarter, quarter)

    def size(self, records: int) -> int:
        return records // 4

    @property
    def targets(self) -> range:
        return range(1)

    def plain(self, model: int) -> bool:
        return model == 1

    def judged(self, key: bytes, model: int, records: int) -> Bits:
        quarter = self.size(records)
        return _part(derive_key(key, "quarters"), records, 2 * model * quarter, 2 * quarter)


def _part(key: bytes, records: int, first: int, count: int) -> Bits:
    """So many records of a random order, from place `first`."""
    order = np.argsort(words(key, 0, records), kind="stable")
    chosen = np.zeros(records, dtype=bool)
    chosen[order[first : first + count]] = True
    return chosen


GAMES: dict[str, type[Game]] = {kind.name: kind for kind in (Coins, Halves, Quarters)}
