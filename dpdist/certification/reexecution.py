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

Alone means in another process where the executed form is the module's own Python code, which may
keep state outside the module: globals of its Python module, attributes of its class, closures. A
new interpreter is started; it receives the network as a cluster's worker receives it (pickled by
this very process, from a model whose factory was trusted; no file is unpickled), imports the
model's modules itself, checks that they are the code with which the model was saved, and executes
nothing. For each row it forks: the row is executed in the fork, which ends with it. On a GPU,
whose driver no fork survives, and where there is no fork but Linux's, the process itself executes
the rows one after the other, each by a fresh copy of the network: globals are then shared among
these rows, not with the counted batches. Files, the network, shared memory, the environment and
the hardware remain common to both. A frozen form runs no Python and keeps nothing.

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

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import IO

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.certification import inference
from dpdist.certification.inference import FORMS, REDUCED_PRECISION_FORMS, use_single_thread
from dpdist.core.errors import InvalidResultsError, UserError
from dpdist.models import fresh_copy, predicted_classes, rounding_tolerance, softmax_scores
from dpdist.models.factory_code import FactoryCode
from dpdist.randomness.keys import derive_key, new_run_key, stream_words

# --- rows alone in a fresh process ------------------------------------------------------------


_SHAPE = struct.Struct("<?QQ")  # whether it went well, rows and classes (or 0 and bytes of text)
_SIZE = struct.Struct("<Q")
_HINT = "the model must be executable in a process of its own, in which its rows are tried alone"


class SameProcess:
    """Executes each row alone by a fresh copy of the network, in this process."""

    def __init__(self, network: nn.Module, form: str = "eager") -> None:
        self._network, self._form = network, form

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the logits of rows (B, ...): (B, classes)."""
        return torch.cat([execute_alone(self._network, self._form, row) for row in rows.split(1)])


class FreshProcess:
    """A `SameProcess` in a process that executes nothing else. Started by the first call.

    Args:
        network: as it came, never executed in this process.
        form: of the executed classifier; another number format is kept for a row alone.
        code: with which the model was saved, which the process must have too.
    """

    def __init__(self, network: nn.Module, form: str, code: FactoryCode) -> None:
        import cloudpickle

        try:  # at once: a model may change its own parameters when it is executed
            self._raw = cloudpickle.dumps((network, form, code))
        except Exception as error:  # whatever a user's model does
            raise UserError(f"{_HINT}: it cannot be pickled ({error})") from error
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the logits of rows (B, ...): float64 (B, classes).

        Raises UserError where the process cannot be started, or cannot execute them.
        """
        with self._lock:
            try:
                process = self._process or self._start()
                assert process.stdin is not None and process.stdout is not None
                _send(process.stdin, pickle.dumps(rows.cpu()))
                logits = _read_answer(process.stdout)
            except (OSError, EOFError) as error:
                raise UserError(f"{_HINT}; it ended ({type(error).__name__})") from error
        return logits.to(rows.device)

    def _start(self) -> subprocess.Popen[bytes]:
        begin = f"from {__name__} import {serve_rows.__name__} as serve; serve()"
        code = f"import sys; sys.path[:] = {sys.path!r}; {begin}"
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        weakref.finalize(self, _end_process, process)
        assert process.stdin is not None and process.stdout is not None
        _send(process.stdin, self._raw)
        _read_answer(process.stdout)  # that it could be loaded
        self._process, self._raw = process, b""
        return process


def isolated_executor(
    form: str, code: FactoryCode
) -> Callable[[nn.Module, str], SameProcess | FreshProcess]:
    """Return what executes rows alone in a job, for a form: in another process where the form runs
    the model's own Python code, in this one where it is frozen into a graph."""
    if form == "frozen":
        return SameProcess
    return lambda network, form: FreshProcess(network, form, code)


def execute_alone(network: nn.Module, form: str, row: Tensor) -> Tensor:
    """Return the logits of a batch of one row by a network that has kept nothing: (1, classes)."""
    network = fresh_copy(network)
    run = FORMS[form](network, row) if form in REDUCED_PRECISION_FORMS else network
    with torch.inference_mode():
        return run(row)


def serve_rows() -> None:
    """Answer what comes through standard input until it ends: the other side of `FreshProcess`."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a user's module prints is no answer
    use_single_thread()
    try:
        network, form, code = pickle.loads(_read(asked))
        code.check("the process in which rows are executed alone")
    except EOFError:
        return
    except Exception as error:  # whatever a user's module does
        _write_answer(answers, error)
        return
    _write_answer(answers, torch.empty(0, 0))
    while True:
        try:
            rows = pickle.loads(_read(asked))
        except EOFError:
            return
        _write_answer(answers, _execute_rows(network, form, rows))


def _execute_rows(network: nn.Module, form: str, rows: Tensor) -> Tensor | Exception:
    """The logits of each row alone, or why there are none."""
    device = next((each.device for each in network.parameters()), torch.device("cpu"))
    try:
        if device.type == "cpu" and sys.platform == "linux":
            return torch.cat([_execute_in_fork(network, form, row) for row in rows.split(1)])
        inference.make_deterministic(device)
        return SameProcess(network, form)(rows.to(device)).double().cpu()
    except Exception as error:  # whatever a user's model does
        return error


def _execute_in_fork(network: nn.Module, form: str, row: Tensor) -> Tensor:
    """Execute a row in a fork of this process, which has executed nothing."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with os.fdopen(into, "wb") as pipe:
                try:
                    _write_answer(pipe, execute_alone(network, form, row))
                except Exception as error:  # whatever a user's model does
                    _write_answer(pipe, error)
        finally:
            os._exit(0)
    os.close(into)
    try:
        with os.fdopen(out, "rb") as pipe:
            return _read_answer(pipe)
    finally:
        os.waitpid(pid, 0)


def _write_answer(pipe: IO[bytes], outcome: Tensor | Exception) -> None:
    if isinstance(outcome, Exception):
        raw = (str(outcome).strip() or type(outcome).__name__).splitlines()[0].encode()
        pipe.write(_SHAPE.pack(False, 0, len(raw)) + raw)
    else:
        values = outcome.double().cpu().numpy().astype("<f8")
        pipe.write(_SHAPE.pack(True, *values.shape) + values.tobytes())
    pipe.flush()


def _read_answer(pipe: IO[bytes]) -> Tensor:
    """The logits of an answer. Raises UserError for an error, EOFError where none came."""
    well, rows, classes = _SHAPE.unpack(_exactly(pipe, _SHAPE.size))
    if not well:
        raise UserError(f"{_HINT}: {_exactly(pipe, classes).decode()}")
    raw = _exactly(pipe, 8 * rows * classes)
    return torch.from_numpy(np.frombuffer(raw, "<f8").copy().reshape(rows, classes))


def _send(pipe: IO[bytes], raw: bytes) -> None:
    pipe.write(_SIZE.pack(len(raw)) + raw)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    return _exactly(pipe, _SIZE.unpack(_exactly(pipe, _SIZE.size))[0])


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    raw = pipe.read(size)
    if len(raw) < size:
        raise EOFError
    return raw


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """End the process: it stops when nothing more can come."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


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
        execute: the executed form, on whole batches: (B, ...) to logits (B, classes).
        other_inputs: (B, ...) rows that `execute` takes, of other inputs: the company.
        form: of the executed form; another number format is kept for a row alone.
        build_isolated_executor: executes each of some rows alone, (B, ...) to (B, classes), given
            the network as it
            came and the form; by default in this process.
    """

    def __init__(
        self,
        choice: RowChoice,
        network: nn.Module,
        execute: Callable[[Tensor], Tensor],
        other_inputs: Tensor,
        form: str = "eager",
        build_isolated_executor: Callable[
            [nn.Module, str], Callable[[Tensor], Tensor]
        ] = SameProcess,
    ) -> None:
        self._choice, self._network, self._execute = choice, fresh_copy(network.eval()), execute
        self._alone = build_isolated_executor(self._network, form)
        self._others, self._form = other_inputs, form
        self._found: str | None = None

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
                "alone": self._alone(again),
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


def _failure_text(index: int, before: str, after: str, arrangement: str, form: str) -> str:
    other = f", or `form: eager` if its form {form!r} computes something else" * (form != "eager")
    return (
        f"the model looks at its batch: a row of input {index} is {before} in the batch that was "
        f"counted and {after} {arrangement}. Nothing that was counted of such a model holds: make "
        "it treat each example alone (no expert capacity, no early exit and no cache that a batch "
        f"shares{other}), remove the results and begin again"
    )
