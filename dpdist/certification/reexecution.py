"""Execute a sample of counted rows again, alone and among other inputs, and compare the answers.

A certificate speaks of one function of one input; executed is a batch of noisy copies of one
input. Whether a row's answer depends on the rows beside it cannot be shown by any finite test.
Before counting, invented arrangements are tried (`dpdist.models.batch_independence`); here rows of
the counting itself are executed alone, and among *other* inputs. Experts with a capacity, early
exits, merged equal inputs, dropped tokens and caches answer such a row otherwise. A row that is
answered otherwise stops the job: nothing that it counted holds.

The compared quantity is the counted one. Of votes, the classes, unless the two tie within
rounding. Of scores, each class's score too: rounding may move each logit by as much as it may move
one of two tied ones (`rounding_tolerance`; of another number format, `REDUCED_PRECISION_FORMS`),
and a score must be one that logits moved so far can have. A row that is executed again is no draw:
counts and tables are the same with and without it.

Alone means by a fresh copy of the network, in the same process: state that a model keeps in itself
is not shared with the counted batches. Globals of its Python module, attributes of its class and
closures are. A frozen form runs no Python and keeps nothing.

The choice of rows follows from a key of the operating system's generator, drawn anew whenever a
job begins or continues. Not from the seed of the noise, which may be given in a recipe, known to
the model's author, and is stored with the results; the model must not know which of its answers
are checked. From the key it follows for each block by itself, so that it does not depend on which
worker counts which block, when, or how often.

Power. `EXPECTED_ROWS` rows on average are drawn from all that is counted for certain (of a test
that may stop early: its first block), and from the rest one row in `_BLOCKS` blocks. A model that
answers the share q of those rows otherwise, alone or among other inputs, escapes with probability
at most exp(-q LEAST_ROWS): 3.7 % at q = 0.05, as with 64 rows exactly. *Proof.* Of a block with
the share q_b of such rows, c rows drawn without replacement all miss with probability at most (1 -
q_b)^c, and c is rounded up or down at random, so in the mean at most exp(-q_b E c); the blocks are
drawn independently. A model that changes fewer answers is found with a smaller probability: below
that share, independence is an assumption.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.certification.inference import FORMS, REDUCED_PRECISION_FORMS
from dpdist.core.errors import InvalidResultsError
from dpdist.models import fresh_copy, predicted_classes, rounding_tolerance, softmax_scores
from dpdist.randomness.keys import derive_key, new_run_key, stream_words

# --- rows alone ---


def execute_alone(network: nn.Module, backend: str, row: Tensor) -> Tensor:
    """Return the logits of a batch of one row by a network that has kept nothing: (1, classes)."""
    network = fresh_copy(network)
    run = FORMS[backend](network, row) if backend in REDUCED_PRECISION_FORMS else network
    with torch.inference_mode():
        return run(row)


# --- choice and comparison of rows ------------------------------------------------------------


# on average: of a model that changes 5 % of its answers 0.95^64 >= e^-3.3 escape
EXPECTED_ROWS = 66
_BLOCKS = 100  # of which one row is executed again: in a batch of its own, so one per cent of work
_SUMS = 1e-9  # what sums in float64 may do to a score
_SHARE_AMONG = 8  # of a batch of other inputs, a row in so many is one that is tried


@dataclass(frozen=True)
class RowChoice:
    """The choice of counted rows that are executed again.

    key: secret, see above. certain_rows: so many are counted for certain in the first
    `certain_blocks` blocks of the inputs up to the index `last` (None: of all), and of these
    `EXPECTED_ROWS` are drawn on average. All other blocks have one row in `_BLOCKS` blocks.
    """

    certain_rows: int
    certain_blocks: int
    last: int | None = None
    key: bytes = field(default_factory=new_run_key, repr=False)

    def choose_rows(self, index: int, stage: str, block: int, size: int, draws: int) -> np.ndarray:
        """Return the places of the chosen rows, int64, among the first `draws` of a block of
        `size`: a pure function of the key and the block's name."""
        share = 1 / (_BLOCKS * size)
        if block < self.certain_blocks and (self.last is None or index <= self.last):
            share = min(1.0, max(share, EXPECTED_ROWS / self.certain_rows))
        key = derive_key(self.key, "reexecuted", index, stage, block)
        count = int(draws * share + stream_words(key, 0, 1)[0] / 2.0**64)
        if not count:
            return np.empty(0, dtype=np.int64)
        return np.argsort(stream_words(key, 1, draws), kind="stable")[: min(count, draws)].astype(
            np.int64
        )

    def for_purpose(self, purpose: str) -> RowChoice:
        """Return the choice for counts of another purpose, of blocks of the same names."""
        return replace(self, key=derive_key(self.key, purpose))


class Reexecution:
    """Executes chosen rows of counted blocks again, alone and among other inputs.

    Args:
        choice: which rows.
        network: what is executed, as a module: each row alone goes through it.
        execute: the executed backend, on whole batches: (B, ...) to logits (B, classes).
        other_inputs: (B, ...) rows that `execute` takes, of other inputs: the company.
        backend: of the executed form; another number format is kept for a row alone.
    """

    def __init__(
        self,
        choice: RowChoice,
        network: nn.Module,
        execute: Callable[[Tensor], Tensor],
        other_inputs: Tensor,
        backend: str = "eager",
    ) -> None:
        self._choice, self._network, self._execute = choice, fresh_copy(network.eval()), execute
        self._others, self._form = other_inputs, backend
        self._found: str | None = None

    def for_purpose(self, purpose: str) -> Reexecution:
        """Return the same for counts of another purpose, of blocks of the same names."""
        other = copy.copy(self)
        other._choice = self._choice.for_purpose(purpose)
        return other

    def __call__(
        self, index: int, stage: str, block: int, rows: Tensor, logits: Tensor, draws: int,
        scores: bool = False,
    ) -> None:  # fmt: skip
        """Check the chosen ones among the first `draws` of a block's rows.

        rows: (B, ...) as executed; logits: (B, classes), what was counted of them; scores: whether
        their scores were counted too. Raises InvalidResultsError for a row that is answered
        otherwise alone or among other inputs; then also at every later call.
        """
        if self._found is None:
            chosen = self._choice.choose_rows(index, stage, block, len(rows), draws)
            if len(chosen):
                places = torch.from_numpy(chosen).to(rows.device)
                self._found = self._find_difference(index, places, rows, logits, scores)
        if self._found is not None:
            raise InvalidResultsError(self._found)

    def _find_difference(
        self, index: int, chosen: Tensor, rows: Tensor, logits: Tensor, scores: bool
    ) -> str | None:
        """Return the fault in words, or None."""
        with torch.inference_mode():
            counted, again = logits[chosen], rows[chosen]
            answers = {
                "alone": torch.cat(
                    [execute_alone(self._network, self._form, row) for row in again.split(1)]
                ),
                "among other inputs": self._execute_among_others(again, chosen, len(rows)),
            }
            before = predicted_classes(counted)
            for where, found in answers.items():
                after = predicted_classes(found)
                for row in (before != after).nonzero()[:, 0].tolist():
                    classes = int(before[row]), int(after[row])
                    if not self._is_rounding_tie(*classes, counted[row], found[row]):
                        return _failure_text(
                            index,
                            _class_text(classes[0]),
                            _class_text(classes[1]),
                            where,
                            self._form,
                        )
                if (
                    scores
                    and (seen := self._find_score_difference(counted, found, again)) is not None
                ):
                    return _failure_text(index, *seen, where, self._form)
        return None

    def _execute_among_others(self, rows: Tensor, chosen: Tensor, size: int) -> Tensor:
        """The answers in batches of other inputs, at the same places: there are few in each."""
        company = self._others[torch.arange(size, device=rows.device) % len(self._others)]
        found = []
        few = max(1, size // _SHARE_AMONG)
        for some, places in zip(rows.split(few), chosen.split(few), strict=True):
            batch = company.clone()
            batch[places] = some
            found.append(self._execute(batch)[places])
        return torch.cat(found)

    def _is_rounding_tie(self, before: int, after: int, counted: Tensor, again: Tensor) -> bool:
        """Whether rounding alone may have put the one or the other class first."""
        if min(before, after) < 0:
            return False
        allowed = self._allowed_rounding(self._others)
        most = float(allowed[before] + allowed[after])
        lead = float(counted[before].double() - counted[after].double())
        return lead <= most and float(again[after].double() - again[before].double()) <= most

    def _find_score_difference(
        self, counted: Tensor, again: Tensor, rows: Tensor
    ) -> tuple[str, str] | None:
        """The score of a row of logits (B, classes) in both executions, in words, where more than
        rounding tells them apart. Rows without a class have no scores."""
        has = (predicted_classes(counted) >= 0) & (predicted_classes(again) >= 0)
        if not bool(has.any()):
            return None
        counted, again = counted[has].double(), again[has].double()
        allowed = self._allowed_rounding(torch.cat([rows[has], self._others]))
        least, most = score_range(counted, allowed)
        scores = softmax_scores(again)
        beyond = ((scores < least) | (scores > most)).nonzero()
        if not len(beyond):
            return None
        row, label = beyond[0].tolist()
        before = float(softmax_scores(counted)[row, label])
        after = float(scores[row, label])
        return f"score {before:.6f} of class {label}", f"score {after:.6f} of class {label}"

    def _allowed_rounding(self, batch: Tensor) -> Tensor:
        """Return how much rounding may move each logit: float64 (classes,)."""
        share = REDUCED_PRECISION_FORMS.get(self._form)
        if share is None:
            return rounding_tolerance(fresh_copy(self._network), batch)
        return share * self._execute(self._others).double().abs().amax(0)


def score_range(logits: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and largest softmax scores of logits (B, K) of which each may move by
    allowed (K,): float64 (B, K) each.

    The score of a class is smallest where its own logit is smallest and all others are largest.
    """
    ends = []
    for sign in (-1, 1):
        others, own = logits - sign * allowed, logits + sign * allowed
        scores = torch.sigmoid(own - _logsumexp_of_others(others))
        ends.append(scores + sign * _SUMS)
    return ends[0], ends[1]


def _logsumexp_of_others(logits: Tensor) -> Tensor:
    """The logarithm of what all classes but one have together, for each of them: (B, K)."""
    total, top = logits.logsumexp(1, keepdim=True), logits.argmax(1, keepdim=True)
    rest = total + torch.log1p(-torch.exp(logits - total))
    # Behind the largest, where 1 - score would be lost:
    behind = logits.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    return rest.scatter(1, top, behind)


def _class_text(label: int) -> str:
    return "no class" if label < 0 else f"class {label}"


def _failure_text(index: int, before: str, after: str, arrangement: str, backend: str) -> str:
    other = f", or `backend: eager` if its form {backend!r} computes something else" * (
        backend != "eager"
    )
    return (
        f"the model looks at its batch: a row of input {index} is {before} in the batch that was "
        f"counted and {after} {arrangement}. Nothing that was counted of such a model holds: make "
        "it treat each example alone (no expert capacity, no early exit and no cache that a batch "
        f"shares{other}), remove the results and begin again"
    )
