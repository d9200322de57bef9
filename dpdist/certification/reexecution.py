"""Execute a sample of counted rows again, alone and among other inputs, and compare the answers.

A certificate applies to a function of one input, but a batch of noisy copies of it is executed. No
finite test can show that a row's answer does not depend on the other rows. Before counting,
constructed batches are tested (`dpdist.models.batch_independence`); here rows of the counting
itself are executed alone, and among *other* inputs. Experts with a capacity, early exits, merged
equal inputs, dropped tokens and caches answer such a row differently. A row with a different answer
stops the job: none of its counts are valid.

The compared quantity is the counted one. For votes it is the class, unless the two tie within
rounding. For scores it is each class's score too: rounding may move each logit by as much as it may
move one of two tied ones (`rounding_tolerance`; in a different number format,
`REDUCED_PRECISION_FORMS`), and the score must be possible with logits that moved by at most that.
Re-execution makes no draws: counts and tables are the same with and without it.

A row is executed alone by a fresh copy of the network, in the same process: state that a model
keeps in itself is not shared with the counted batches. Globals of its Python module, attributes of
its class and closures are shared. A frozen backend runs no Python and has no state.

The choice of rows follows from a key of the operating system's generator, drawn again whenever a
job starts or continues. It does not follow from the seed of the noise, which may be given in a
recipe, known to the model's author, and is stored with the results: the model must not know which
of its answers are checked. Each block has its own choice, which does not depend on the worker that
counts it, nor on when or how often it is counted.

Power. `EXPECTED_ROWS` rows on average are chosen from all that is certainly counted (in a test that
may stop early, its first block), and from the rest one row in `_BLOCKS` blocks. A model that
answers a fraction q of those rows differently, alone or among other inputs, is not detected with
probability at most exp(-q EXPECTED_ROWS): 3.7 % at q = 0.05, as with exactly 64 rows. *Proof.* In a
block with the fraction q_b of such rows, c rows chosen without replacement all miss them with
probability at most (1 - q_b)^c, and c is rounded up or down at random, so on average at most
exp(-q_b E c); the blocks are chosen independently. A model that changes fewer answers is detected
with a smaller probability: below that fraction, independence is an assumption.
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
    """Return the logits of one row by a fresh copy of the network: (1, classes)."""
    network = fresh_copy(network)
    run = FORMS[backend](network, row) if backend in REDUCED_PRECISION_FORMS else network
    with torch.inference_mode():
        return run(row)


# --- choice and comparison of rows ------------------------------------------------------------


EXPECTED_ROWS = 66  # on average: at 5 % changed answers, e^-3.3 <= 0.95^64 is not detected
_BLOCKS = 100  # with one row executed again, as a batch: one percent more work
_SUMS = 1e-9  # rounding of a score by sums in float64
_SHARE_AMONG = 8  # in a batch of other inputs, one of so many rows is a checked one


@dataclass(frozen=True)
class RowChoice:
    """The choice of counted rows that are executed again.

    key: secret, see above. certain_rows: the number of rows that are certainly counted, in the
    first `certain_blocks` blocks of the inputs up to the index `last` (None: of all);
    `EXPECTED_ROWS` of them are chosen on average. Of all other blocks, one in `_BLOCKS` has one
    chosen row.
    """

    certain_rows: int
    certain_blocks: int
    last: int | None = None
    key: bytes = field(default_factory=new_run_key, repr=False)

    def choose_rows(self, index: int, stage: str, block: int, size: int, draws: int) -> np.ndarray:
        """Return the positions of the chosen rows, int64, among the first `draws` of a block.

        They are a pure function of the key and the block's name. size: rows of the block.
        """
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
        """Return the choice for counts of a different purpose, in blocks of the same names."""
        return replace(self, key=derive_key(self.key, purpose))


class Reexecution:
    """Executes chosen rows of counted blocks again, alone and among other inputs.

    Args:
        choice: which rows.
        network: the executed network, as a module that gets each row alone.
        execute: the executed backend, on whole batches: (B, ...) to logits (B, classes).
        other_inputs: (B, ...) rows of other inputs for `execute`.
        backend: name of the executed backend; its number format is kept for a row alone.
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
        """Return the same for counts of a different purpose, in blocks of the same names."""
        other = copy.copy(self)
        other._choice = self._choice.for_purpose(purpose)
        return other

    def __call__(
        self, index: int, stage: str, block: int, rows: Tensor, logits: Tensor, draws: int,
        scores: bool = False,
    ) -> None:  # fmt: skip
        """Check the chosen ones among the first `draws` of a block's rows.

        rows: (B, ...) as executed. logits: (B, classes) that were counted. scores: whether their
        scores were counted too. Raises InvalidResultsError for a row that is answered differently
        alone or among other inputs, and then at every later call.
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
        """Return a description of the first difference, or None."""
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
                        seen = _class_text(classes[0]), _class_text(classes[1])
                        return _failure_text(index, *seen, where, self._form)
                moved = self._find_score_difference(counted, found, again) if scores else None
                if moved is not None:
                    return _failure_text(index, *moved, where, self._form)
        return None

    def _execute_among_others(self, rows: Tensor, chosen: Tensor, size: int) -> Tensor:
        """Return the answers in batches of other inputs, at the same rows, few in each."""
        company = self._others[torch.arange(size, device=rows.device) % len(self._others)]
        found = []
        few = max(1, size // _SHARE_AMONG)
        for some, places in zip(rows.split(few), chosen.split(few), strict=True):
            batch = company.clone()
            batch[places] = some
            found.append(self._execute(batch)[places])
        return torch.cat(found)

    def _is_rounding_tie(self, before: int, after: int, counted: Tensor, again: Tensor) -> bool:
        """Return whether rounding may have exchanged the two classes."""
        if min(before, after) < 0:
            return False
        allowed = self._allowed_rounding(self._others)
        most = float(allowed[before] + allowed[after])
        lead = float(counted[before].double() - counted[after].double())
        return lead <= most and float(again[after].double() - again[before].double()) <= most

    def _find_score_difference(
        self, counted: Tensor, again: Tensor, rows: Tensor
    ) -> tuple[str, str] | None:
        """Return a score that differs by more than rounding, as text before and after, or None.

        counted, again: logits (B, classes) of both executions. Rows without a class have no scores.
        """
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
    """Return the least and largest softmax scores of logits that may move: float64 (B, K) each.

    logits: (B, K). allowed: (K,), by how much each may move. A class's score is smallest if its own
    logit is smallest and all others are largest.
    """
    ends = []
    for sign in (-1, 1):
        others, own = logits - sign * allowed, logits + sign * allowed
        scores = torch.sigmoid(own - _logsumexp_of_others(others))
        ends.append(scores + sign * _SUMS)
    return ends[0], ends[1]


def _logsumexp_of_others(logits: Tensor) -> Tensor:
    """Return the logsumexp of all classes but one, for each of them: (B, K)."""
    total, top = logits.logsumexp(1, keepdim=True), logits.argmax(1, keepdim=True)
    rest = total + torch.log1p(-torch.exp(logits - total))
    # Behind the largest, where 1 - score would be lost:
    behind = logits.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    return rest.scatter(1, top, behind)


def _class_text(label: int) -> str:
    return "no class" if label < 0 else f"class {label}"


def _failure_text(index: int, before: str, after: str, arrangement: str, backend: str) -> str:
    other = (
        ""
        if backend == "eager"
        else f", or `backend: eager` if {backend!r} computes something else"
    )
    return (
        f"the model looks at its batch: a row of input {index} is {before} in the batch that was "
        f"counted and {after} {arrangement}. None of its counts are valid: make it treat each "
        "example separately (without expert capacity, early exits and caches that a batch "
        f"shares{other}), remove the results and start again"
    )
