"""Which records two sets have in common: compared one by one, by their inputs alone.

Neither order nor label matters. Inputs of different shapes cannot be compared, which is said, never
taken for a proof that nothing is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpdist.base.errors import UserError
from dpdist.data.dataset import Dataset


@dataclass(frozen=True)
class Inputs:
    """What comparisons need of some records. hashes: of `dpdist.data.hashes`."""

    shape: tuple[int, ...]
    hashes: np.ndarray

    @staticmethod
    def of(records: Dataset) -> Inputs:
        return Inputs(records.input_shape, records.hashes)


def common(records: Dataset, others: Dataset | Inputs) -> int | None:
    """How many of the records have an input that is among the others'; None when the shapes of the
    inputs differ."""
    seen = Inputs.of(others) if isinstance(others, Dataset) else others
    if seen.shape != records.input_shape:
        return None
    return int(np.isin(records.hashes, seen.hashes).sum())


def refuse_common(private: Dataset, others: Dataset | Inputs, begin: str, why: str) -> bool:
    """Raise UserError when a private record is among the others; whether they could be compared.

    begin and why: of the complaint: "BEGIN: 3 of the 100 private records of NAME WHY".
    """
    found = common(private, others)
    if found:
        some = f"{found:,} of the {len(private):,} private records of {private.name}"
        raise UserError(f"{begin}: {some} {why}")
    return found is not None


def check_test(train: Dataset, test: Dataset, begin: str) -> None:
    """Raise UserError unless the two splits can be used with one model and share no record.

    train: all records that are not declared public. Scores and certificates on the test split are
    published, so it must not hold protected ones.
    """
    if train.input_shape != test.input_shape:
        raise UserError(
            f"{begin}: {train.name} has inputs of shape {train.input_shape}, {test.name} of "
            f"{test.input_shape}"
        )
    why = (
        f"are in {test.name} too: scores on private records would be published; take them out of "
        "the files, or leave them out of training with data.drop_test_records: true"
    )
    refuse_common(train, test, begin, why)


def check_unseen(public: Dataset, test: Dataset, begin: str, own: bool) -> None:
    """Raise UserError when a test record is among the public ones that a model learns from.

    own: whether these are the run's own data set's."""
    both = common(public, test)
    if both:
        raise UserError(
            f"{begin}: {both:,} of the {len(public):,} public records of {public.name} are in "
            f"{test.name}, whose scores would then say nothing about new records; "
            + ("set data.drop_test_records: true" if own else "take others")
        )
