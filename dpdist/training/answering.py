"""Answers that are paid for, counted before they are made: of a run whose models never leave, and
votes that are released once, before the steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dpdist.base.errors import UserError
from dpdist.cluster.packages import code_digest
from dpdist.privacy.journal import JournalError
from dpdist.privacy.ledger import Ledger, NoAnswersLeft, new_nonce
from dpdist.randomness.keys import derive_key, new_run_key
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.runs.released import check_released, read_released
from dpdist.training import charging
from dpdist.training.identity import recipe_digest
from dpdist.training.job import PACKAGES, TrainJob
from dpdist.training.teachers import Ensemble


class Oracle:
    """Answers by a run's teachers, as its method releases them; no more than its plan pays for.

    An input that was answered before gets the answer it got: that costs nothing, and nobody gains
    by asking again. left: new answers that may still be given. Raises UserError.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder) -> None:
        folder.require_trained()
        released = read_released(folder)
        self._recipe, self._folder, self._plan = recipe, folder, released.plan
        self._teachers = Ensemble(folder, recipe.model.name)
        self._nonce, self._charged = new_nonce(), recipe.privacy.budget is None
        self.left = self._plan.answers - released.ledger.asked
        self.input_shape = self._teachers.input_shape

    def __call__(self, inputs: Tensor) -> Tensor:
        """Noisy scores (B, classes), float64, of inputs (B, *input_shape).

        Raises UserError, and nothing was asked, when fewer answers are left than are new.
        """
        questions = [_question(one) for one in inputs]
        private = self._teachers.scores(inputs).swapaxes(0, 1)
        try:
            # Held to the end: of two processes at once, one takes the last answer.
            with self._opened() as ledger:
                check_released(self._folder, self._plan, ledger)
                new = sum(ledger.answer(one) is None for one in dict.fromkeys(questions))
                self.left = self._plan.answers - ledger.asked
                if new > self.left:
                    raise UserError(
                        f"{self._folder.path}: {self.left:,} of {self._plan.answers:,} answers are "
                        f"left, {new:,} would be needed; nothing was asked"
                    )
                if new:
                    self._charge(ledger)
                found = [
                    self._answer(ledger, *each) for each in zip(questions, private, strict=True)
                ]
                self.left = self._plan.answers - ledger.asked
        except JournalError as error:
            raise UserError(str(error)) from error
        return torch.tensor(found, dtype=torch.float64)

    def _opened(self) -> Ledger:
        return Ledger.open(self._folder.ledger, self._plan.fingerprint(), nonce=self._nonce)

    def _charge(self, ledger: Ledger) -> None:
        """Charge the records' budget for what is left to this process, before its first answer.

        A run alone was charged for all its answers before its training. A copy of its folder may
        answer as well, and counts for itself. Raises UserError, and nothing was asked.
        """
        if not self._charged:
            process = ledger.announce_process()
            charge = charging.charge_of(self._recipe, self._folder, process)
            charging.reserve(self._recipe, None, charge, str(self._folder.recipe_file))
            self._charged = True

    def affords(self, inputs: Tensor) -> int:
        """So many of these inputs, from the first on, can be answered with what is left: fewer than
        were planned for after a crash, which uses up the answer that it interrupts."""
        ledger, new = Ledger.read(self._folder.ledger), set[str]()
        for count, question in enumerate(map(_question, inputs)):
            if ledger.answer(question) is None:
                new.add(question)
            if len(new) > self.left:
                return count
        return len(inputs)

    def _answer(self, ledger: Ledger, question: str, scores: np.ndarray) -> list[float]:
        known = ledger.answer(question)
        if known is not None:
            return known
        number = ledger.ask(question, self._plan)
        fixed = self._recipe.privacy.run_key is not None  # for tests, which want the same again
        key = derive_key(self._folder.read_key() if fixed else new_run_key(), "answer", number)
        values = self._recipe.method.answer(scores, self._plan, key).tolist()
        ledger.keep(question, values)
        return values


def _question(one: Tensor) -> str:
    """Names an input."""
    digest = hashlib.blake2b(digest_size=32, person=b"dpdist.asked")
    digest.update(str(tuple(one.shape)).encode())
    digest.update((one + 0.0).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _once(about: bytes) -> str:
    """Name what is released once, by what it is drawn from."""
    return hashlib.blake2b(about, digest_size=32, person=b"dpdist.once").hexdigest()


def released_once(
    job: TrainJob, about: bytes, draw: Callable[[bytes], Sequence[float]]
) -> list[float]:
    """`dpdist.methods.base.Run.release`. What is drawn has a key of its own for everything that it
    is drawn from, the recipe included: to draw it again after a crash is an exact replay, and a
    copy of the folder in which anything is another draws other noise, or is refused."""
    about_id, question = _once(about), _once(about + recipe_digest(job.recipe).encode())
    folder, plan = job.folder, job.plan
    with Ledger.open(folder.ledger, plan.fingerprint()) as ledger:
        check_released(folder, plan, ledger)
        kept = ledger.answer(question)
        if kept is not None:
            return kept
        nonce = ledger.asked_under(question)
        if nonce is None:
            try:
                ledger.ask(question, plan)
            except NoAnswersLeft:
                raise UserError(
                    f"{folder.path}: what is private has changed since it was released, and would "
                    "be released a second time; choose another --name"
                ) from None
            nonce = ledger.nonce
        # A fixed key is for tests, which want the same again.
        labels = [nonce, code_digest(PACKAGES)] if job.recipe.privacy.run_key is None else []
        key = derive_key(folder.read_key(), "released", plan.fingerprint(), about_id, *labels)
        values = list(draw(key))
        ledger.keep(question, values)
        return values
