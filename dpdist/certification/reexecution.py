"""While classes are counted, some of the counted rows are executed again, in other company.

A certificate speaks of one function of one input; what is executed is a batch of noisy copies of
one input. Whether a row's answer depends on the rows beside it cannot be shown by any finite test.
Before anything is counted made-up arrangements are tried (`dpdist.models.mixing`); here rows of the
counting itself are: alone, and among *other* inputs. Experts with a capacity, early exits, merged
equal inputs, dropped tokens and caches answer such a row otherwise. A row that is answered
otherwise, unless its two classes tie within rounding, stops the job: nothing that it counted holds.

A row that is executed again is no draw: counts and tables are the same with and without it.

Which rows they are follows from a key of the operating system's generator, drawn anew whenever a
job begins or goes on. Not from the seed of the noise: that may be given in a recipe, known to
whoever made the model, and is stored with the results; the model must not know which of its answers
are looked at. From the key it follows for each block by itself, so that it does not depend on which
worker counts which block, when, or how often.

Power. `LEAST_ROWS` rows on average are drawn from all that is counted for certain (of a test that
may stop early: its first block), and from the rest one row in `_BLOCKS` blocks. A model that
answers the share q of those rows otherwise, alone or among other inputs, escapes with probability
at most exp(-q LEAST_ROWS): 3.7 % at q = 0.05, as with 64 rows exactly. *Proof.* Of a block with the
share q_b of such rows, c rows drawn without replacement all miss with probability at most
(1 - q_b)^c, and c is rounded up or down at random, so in the mean at most exp(-q_b E c); the blocks
are drawn independently. A model that changes fewer answers is found with a smaller probability:
below that share, independence is an assumption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.base.errors import InvalidResults
from dpdist.certification.classifier import FORMS, OTHER_FORMATS
from dpdist.models import allowed_rounding, fresh_copy, predicted_classes
from dpdist.randomness.keys import derive_key, new_run_key, words

LEAST_ROWS = 66  # on average: of a model that changes 5 % of its answers 0.95^64 >= e^-3.3 escape
_BLOCKS = 100  # of which one row is executed again: in a batch of its own, so one per cent of work
_SHARE_AMONG = 8  # of a batch of other inputs, a row in so many is one that is tried


@dataclass(frozen=True)
class RowChoice:
    """Which counted rows are executed again.

    key: secret, see above. rows: so many are counted for certain in the first `blocks` blocks of
    the inputs up to the index `last` (None: of all), and of these `LEAST_ROWS` are drawn on
    average. All other blocks have one row in `_BLOCKS` blocks.
    """

    rows: int
    blocks: int
    last: int | None = None
    key: bytes = field(default_factory=new_run_key, repr=False)

    def of(self, index: int, stage: str, block: int, size: int, draws: int) -> np.ndarray:
        """Return the places of the chosen rows, int64, among the first `draws` of a block of
        `size`: a pure function of the key and the block's name."""
        share = 1 / (_BLOCKS * size)
        if block < self.blocks and (self.last is None or index <= self.last):
            share = min(1.0, max(share, LEAST_ROWS / self.rows))
        key = derive_key(self.key, "reexecuted", index, stage, block)
        count = int(draws * share + words(key, 0, 1)[0] / 2.0**64)
        if not count:
            return np.empty(0, dtype=np.int64)
        return np.argsort(words(key, 1, draws), kind="stable")[: min(count, draws)].astype(np.int64)

    def named(self, purpose: str) -> RowChoice:
        """Return the choice for counts of another purpose, of blocks of the same names."""
        return replace(self, key=derive_key(self.key, purpose))


class Reexecution:
    """Executes chosen rows of counted blocks again, alone and among other inputs.

    Args:
        choice: which rows.
        network: what is executed, as a module: each row alone goes through it.
        execute: the executed form, on whole batches: (B, ...) to logits (B, classes).
        others: (B, ...) rows that `execute` takes, of other inputs: the company.
        form: of the executed form; another number format is kept for a row alone.
    """

    def __init__(
        self,
        choice: RowChoice,
        network: nn.Module,
        execute: Callable[[Tensor], Tensor],
        others: Tensor,
        form: str = "eager",
    ) -> None:
        self._choice, self._network, self._execute = choice, fresh_copy(network.eval()), execute
        self._others, self._form = others, form
        self._found: str | None = None

    def __call__(
        self, index: int, stage: str, block: int, rows: Tensor, logits: Tensor, draws: int
    ) -> None:
        """Check the chosen ones among the first `draws` of a block's rows.

        rows: (B, ...) as executed; logits: (B, classes), what was counted of them. Raises
        InvalidResults for a row whose class is another one alone or among other inputs; then also
        at every later call.
        """
        if self._found is None:
            chosen = self._choice.of(index, stage, block, len(rows), draws)
            if len(chosen):
                places = torch.from_numpy(chosen).to(rows.device)
                self._found = self._difference(index, places, rows, logits)
        if self._found is not None:
            raise InvalidResults(self._found)

    def _difference(self, index: int, chosen: Tensor, rows: Tensor, logits: Tensor) -> str | None:
        """What is wrong, in words."""
        with torch.inference_mode():
            counted, again = logits[chosen], rows[chosen]
            answers = {
                "alone": self._one_by_one(again),
                "among other inputs": self._among_others(again, chosen, len(rows)),
            }
            before = predicted_classes(counted)
            for where, found in answers.items():
                after = predicted_classes(found)
                if torch.equal(before, after):
                    continue
                for row in (before != after).nonzero()[:, 0].tolist():
                    classes = int(before[row]), int(after[row])
                    if not self._tied(*classes, counted[row], found[row]):
                        return _words(index, *classes, where, self._form)
        return None

    def _one_by_one(self, rows: Tensor) -> Tensor:
        """The answers of the network as it came, without what it may have kept of other rows."""
        form = FORMS[self._form] if self._form in OTHER_FORMATS else None
        found = []
        for row in rows.split(1):
            network = fresh_copy(self._network)
            found.append((network if form is None else form(network, row))(row))
        return torch.cat(found)

    def _among_others(self, rows: Tensor, chosen: Tensor, size: int) -> Tensor:
        """The answers in batches of other inputs, at the same places: there are few in each."""
        company = self._others[torch.arange(size, device=rows.device) % len(self._others)]
        found = []
        few = max(1, size // _SHARE_AMONG)
        for some, places in zip(rows.split(few), chosen.split(few), strict=True):
            batch = company.clone()
            batch[places] = some
            found.append(self._execute(batch)[places])
        return torch.cat(found)

    def _tied(self, before: int, after: int, counted: Tensor, again: Tensor) -> bool:
        """Whether rounding alone may have put the one or the other class first."""
        if min(before, after) < 0:
            return False
        share = OTHER_FORMATS.get(self._form)
        if share is None:
            allowed = allowed_rounding(self._network, self._others)
        else:
            allowed = share * self._execute(self._others).double().abs().amax(0)
        most = float(allowed[before] + allowed[after])
        lead = float(counted[before].double() - counted[after].double())
        return lead <= most and float(again[after].double() - again[before].double()) <= most


def _words(index: int, before: int, after: int, where: str, form: str) -> str:
    other = f", or `form: eager` if its form {form!r} computes something else" * (form != "eager")
    names = ["no class" if each < 0 else f"class {each}" for each in (before, after)]
    return (
        f"the model looks at its batch: a row of input {index} is {names[0]} in the batch that was "
        f"counted and {names[1]} {where}. Nothing that was counted of such a model holds: make it "
        "treat each example alone (no expert capacity, no early exit and no cache that a batch "
        f"shares{other}), remove the results and begin again"
    )
