"""While answers are counted, some of the counted rows are executed again, in other company.

A certificate speaks of one function of one input; what is executed is a batch of noisy copies of
one input. Whether a row's answer depends on the rows beside it cannot be shown by any finite test.
Before anything is counted made-up arrangements are tried (`dpdist.models.mixing`); here rows of the
counting itself are: alone, and among *other* inputs. Experts with a capacity, early exits, merged
equal inputs, dropped tokens and caches answer such a row otherwise. A row that is answered
otherwise stops the job: nothing that it counted holds.

What is compared is what is counted. Of votes, the classes, unless the two tie within rounding. Of
scores, each class's score too: rounding may move each logit by as much as it may move one of two
tied ones (`allowed_rounding`; of another number format, `OTHER_FORMATS`), and a score must be one
that logits moved so far can have.

Alone means in another process where the executed form is the module's own Python code, which may
keep what it has seen outside the module (`dpdist.certification.fresh_process`). A frozen form runs
no Python and keeps nothing.

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
from dpdist.certification.classifier import OTHER_FORMATS
from dpdist.certification.fresh_process import SameProcess
from dpdist.models import allowed_rounding, fresh_copy, predicted_classes, softmax_scores
from dpdist.randomness.keys import derive_key, new_run_key, words

LEAST_ROWS = 66  # on average: of a model that changes 5 % of its answers 0.95^64 >= e^-3.3 escape
_BLOCKS = 100  # of which one row is executed again: in a batch of its own, so one per cent of work
_SUMS = 1e-9  # what sums in float64 may do to a score
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
        alone: executes each of some rows alone, (B, ...) to (B, classes), given the network as it
            came and the form; by default in this process.
    """

    def __init__(
        self,
        choice: RowChoice,
        network: nn.Module,
        execute: Callable[[Tensor], Tensor],
        others: Tensor,
        form: str = "eager",
        alone: Callable[[nn.Module, str], Callable[[Tensor], Tensor]] = SameProcess,
    ) -> None:
        self._choice, self._network, self._execute = choice, fresh_copy(network.eval()), execute
        self._alone = alone(self._network, form)
        self._others, self._form = others, form
        self._found: str | None = None

    def __call__(
        self, index: int, stage: str, block: int, rows: Tensor, logits: Tensor, draws: int,
        scores: bool = False,
    ) -> None:  # fmt: skip
        """Check the chosen ones among the first `draws` of a block's rows.

        rows: (B, ...) as executed; logits: (B, classes), what was counted of them; scores: whether
        their scores were counted too. Raises InvalidResults for a row that is answered otherwise
        alone or among other inputs; then also at every later call.
        """
        if self._found is None:
            chosen = self._choice.of(index, stage, block, len(rows), draws)
            if len(chosen):
                places = torch.from_numpy(chosen).to(rows.device)
                self._found = self._difference(index, places, rows, logits, scores)
        if self._found is not None:
            raise InvalidResults(self._found)

    def _difference(
        self, index: int, chosen: Tensor, rows: Tensor, logits: Tensor, scores: bool
    ) -> str | None:
        """What is wrong, in words."""
        with torch.inference_mode():
            counted, again = logits[chosen], rows[chosen]
            answers = {
                "alone": self._alone(again),
                "among other inputs": self._among_others(again, chosen, len(rows)),
            }
            before = predicted_classes(counted)
            for where, found in answers.items():
                after = predicted_classes(found)
                for row in (before != after).nonzero()[:, 0].tolist():
                    classes = int(before[row]), int(after[row])
                    if not self._tied(*classes, counted[row], found[row]):
                        return _words(
                            index, _class(classes[0]), _class(classes[1]), where, self._form
                        )
                if scores and (seen := self._other_score(counted, found, again)) is not None:
                    return _words(index, *seen, where, self._form)
        return None

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
        allowed = self._allowed(self._others)
        most = float(allowed[before] + allowed[after])
        lead = float(counted[before].double() - counted[after].double())
        return lead <= most and float(again[after].double() - again[before].double()) <= most

    def _other_score(self, counted: Tensor, again: Tensor, rows: Tensor) -> tuple[str, str] | None:
        """The score of a row of logits (B, classes) in both executions, in words, where more than
        rounding tells them apart. Rows without a class have no scores."""
        has = (predicted_classes(counted) >= 0) & (predicted_classes(again) >= 0)
        if not bool(has.any()):
            return None
        counted, again = counted[has].double(), again[has].double()
        allowed = self._allowed(torch.cat([rows[has], self._others]))
        least, most = score_range(counted, allowed)
        scores = softmax_scores(again)
        beyond = ((scores < least) | (scores > most)).nonzero()
        if not len(beyond):
            return None
        row, label = beyond[0].tolist()
        before = float(softmax_scores(counted)[row, label])
        after = float(scores[row, label])
        return f"score {before:.6f} of class {label}", f"score {after:.6f} of class {label}"

    def _allowed(self, batch: Tensor) -> Tensor:
        """By how much rounding may move each logit: float64 (classes,)."""
        share = OTHER_FORMATS.get(self._form)
        if share is None:
            return allowed_rounding(fresh_copy(self._network), batch)
        return share * self._execute(self._others).double().abs().amax(0)


def score_range(logits: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and largest softmax scores of logits (B, K) of which each may move by
    allowed (K,): float64 (B, K) each.

    The score of a class is smallest where its own logit is smallest and all others are largest.
    """
    ends = []
    for sign in (-1, 1):
        others, own = logits - sign * allowed, logits + sign * allowed
        scores = torch.sigmoid(own - _without_own(others))
        ends.append(scores + sign * _SUMS)
    return ends[0], ends[1]


def _without_own(logits: Tensor) -> Tensor:
    """The logarithm of what all classes but one have together, for each of them: (B, K)."""
    total, top = logits.logsumexp(1, keepdim=True), logits.argmax(1, keepdim=True)
    rest = total + torch.log1p(-torch.exp(logits - total))
    # Behind the largest, where 1 - score would be lost:
    behind = logits.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    return rest.scatter(1, top, behind)


def _class(label: int) -> str:
    return "no class" if label < 0 else f"class {label}"


def _words(index: int, before: str, after: str, where: str, form: str) -> str:
    other = f", or `form: eager` if its form {form!r} computes something else" * (form != "eager")
    return (
        f"the model looks at its batch: a row of input {index} is {before} in the batch that was "
        f"counted and {after} {where}. Nothing that was counted of such a model holds: make it "
        "treat each example alone (no expert capacity, no early exit and no cache that a batch "
        f"shares{other}), remove the results and begin again"
    )
