"""One split of a data set: memory-mapped inputs and labels, and records in common with a second.

Splits are compared record by record, only by inputs: order and labels do not matter. Inputs of
different shapes cannot be compared, which is reported: it does not prove that nothing is shared.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpdist.core.errors import UserError
from dpdist.core.files import read_json
from dpdist.core.optional_imports import array_to_tensor
from dpdist.data.protocol import Records, UserRecords, Users, count_common, fingerprint_of
from dpdist.data.record_hashes import (
    hash_positions,
    stored_hashes,
    stored_user_hashes,
    to_model_inputs,
)
from dpdist.data.text import next_tokens

if TYPE_CHECKING:
    from torch import Tensor


# --- a split ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset(Records):
    """A split in `folder` (inputs.npy, labels.npy and meta.json), or a part of its records.

    Only the path is pickled. name: such as "mnist/train". inputs: (N, C, H, W) uint8 images, or
    float32 of any one shape. labels: (N,) int64 in 0..classes-1. stored_fingerprint: hex digest of
    all records in the folder, in order. limit: use only the first records; hash_range: of these,
    use records whose position by hash is in [low, high); excluded_folder: leave out records whose
    inputs are in that folder; selection_bits: packed mask of the rest. largest_user: most records
    of a user, if there is a user column. text_encoding: how texts became inputs.
    predicts_next_token: the targets of a record are its own next tokens, not its label.
    target_kind: "class"; or "number" and "labels", whose labels are float32 (N, classes). by_user:
    `hash_range` applies to the hash of a record's user, so that all records of a user are in one
    part.
    """

    folder: Path
    name: str
    classes: int
    stored_fingerprint: str
    limit: int | None = None
    largest_user: int | None = None
    hash_range: tuple[float, float] | None = None
    excluded_folder: Path | None = None
    selection_bits: bytes | None = None
    text_encoding: str = ""
    predicts_next_token: bool = False
    target_kind: str = "class"
    by_user: bool = False

    @staticmethod
    def open(folder: Path) -> Dataset:
        """Return the split of a folder of the cache."""
        meta = read_json(folder / "meta.json", {"name": str, "classes": int, "fingerprint": str})
        return Dataset(
            folder,
            meta["name"],
            meta["classes"],
            meta["fingerprint"],
            largest_user=meta.get("largest_user"),
            text_encoding=meta.get("read", ""),
            predicts_next_token=meta.get("following", False),
            target_kind=meta.get("target_kind", "class"),
        )

    def first(self, limit: int | None) -> Dataset:
        """Return the first `limit` records (None: all), for public records only.

        Removing one of them would let a different one in.
        """
        if limit is None or limit >= len(self):
            return self
        if self._row_indices is not None:
            raise ValueError("the first records of a part are not defined")
        return replace(self, limit=limit)

    def select_by_hash(self, low: float, high: float) -> Dataset:
        """Return the records whose position is in [low, high), 0 <= low < high <= 1.

        A record's position is a hash of its input (of the whole text; with `by_user`, of its user):
        adding or removing a record moves no other one, and equal inputs are in the same part.
        """
        if self.hash_range is not None:
            raise ValueError("a part of a part is not defined")
        return self if (low, high) == (0.0, 1.0) else replace(self, hash_range=(low, high))

    def without_records_of(self, other: Dataset) -> Dataset:
        """Return the records whose inputs are not among those of `other`, a whole public split.

        Whether a record stays depends only on that split and on the record.
        """
        if other.limit is not None or other._row_indices is not None:
            raise ValueError("only a whole split can be left out")
        return replace(self, excluded_folder=other.folder)

    def select(self, mask: np.ndarray) -> Dataset:
        """Return the records where `mask` (N,) is true."""
        if self.selection_bits is not None or len(mask) != len(self):
            raise ValueError("one bit for each record of a part that was not chosen so")
        return replace(self, selection_bits=np.packbits(mask).tobytes())

    @cached_property
    def fingerprint(self) -> str:
        """Return a hex digest of only these records, in order.

        So the fingerprint of a public part does not depend on private records in the same folder.
        """
        if self._row_indices is None and self.limit is None:
            return self.stored_fingerprint
        digest = hashlib.blake2b(digest_size=16, person=b"dpdist.data")
        digest.update(self.hashes.tobytes() + self.text_encoding.encode())
        digest.update(np.ascontiguousarray(self.labels).tobytes())
        return digest.hexdigest()

    def keyed_fingerprint(self, key: bytes) -> str:
        """Return a MAC of `fingerprint`, which stands for the records."""
        return fingerprint_of(key, self, iter([self.fingerprint]))

    @cached_property
    def _stored_inputs(self) -> np.ndarray:
        return np.load(self.folder / "inputs.npy", mmap_mode="r", allow_pickle=False)[: self.limit]

    @cached_property
    def _row_indices(self) -> np.ndarray | None:
        """Return the positions of this part's records in the folder; None for all."""
        if self.hash_range is None and self.excluded_folder is None and self.selection_bits is None:
            return None
        hashes = stored_hashes(self.folder)[: self.limit]
        kept = np.ones(len(hashes), dtype=bool)
        if self.hash_range is not None:
            places = hash_positions(self._stored_users if self.by_user else hashes)
            kept &= (places >= self.hash_range[0]) & (places < self.hash_range[1])
        if self.excluded_folder is not None:
            kept &= ~np.isin(hashes, stored_hashes(self.excluded_folder))
        rows = np.flatnonzero(kept)
        if self.selection_bits is None:
            return rows
        return rows[
            np.unpackbits(np.frombuffer(self.selection_bits, np.uint8), count=len(rows)) == 1
        ]

    @property
    def inputs(self) -> np.ndarray:
        """Return the inputs as stored; a copy for a part by hash."""
        return (
            self._stored_inputs
            if self._row_indices is None
            else self._stored_inputs[self._row_indices]
        )

    @property
    def hashes(self) -> np.ndarray:
        """Return the hashes of the records, (N,) of 16 bytes (`dpdist.data.record_hashes`)."""
        hashes = stored_hashes(self.folder)[: self.limit]
        return hashes if self._row_indices is None else hashes[self._row_indices]

    @property
    def _stored_users(self) -> np.ndarray:
        hashes = stored_user_hashes(self.folder)
        if hashes is None:
            raise UserError(f"{self.name}: has no user column; name it in data.columns.user")
        return hashes[: self.limit]

    @property
    def names_users(self) -> bool:
        """Return whether there is a user column."""
        return stored_user_hashes(self.folder) is not None

    @property
    def user_hashes(self) -> np.ndarray:
        """Return the hashes of the records' users, (N,) of 16 bytes.

        Raises UserError without a user column.
        """
        hashes = self._stored_users
        return hashes if self._row_indices is None else hashes[self._row_indices]

    @property
    def num_groups(self) -> int:
        """The number of users that these records belong to."""
        return len(np.unique(self.user_hashes))

    @cached_property
    def labels(self) -> np.ndarray:
        path = self.folder / "labels.npy"
        stored = np.load(path, mmap_mode="r", allow_pickle=False)[: self.limit]
        return stored if self._row_indices is None else stored[self._row_indices]

    def __getstate__(self) -> dict:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self._stored_inputs.shape[1:])

    def input_array(self, indices: np.ndarray | slice) -> np.ndarray:
        """Return inputs, float32 (B, *input_shape); bytes of images are divided by 255."""
        chosen = indices if self._row_indices is None else self._row_indices[indices]
        return to_model_inputs(np.ascontiguousarray(self._stored_inputs[chosen]))

    def batch(self, indices: np.ndarray | slice) -> Tensor:
        """Return `input_array` as a tensor."""
        return array_to_tensor(self.input_array(indices))

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        """Return labels, int64 (B,); next tokens, int64 (B, T); or numbers, float32 (B, classes).

        A next token is negative after the end of a document.
        """
        import torch

        if self.predicts_next_token:
            return torch.from_numpy(next_tokens(self.batch(indices).numpy()))
        return torch.from_numpy(np.array(self.labels[indices]))


@dataclass(frozen=True)
class UserDataset(Dataset):
    """A split by user: `len`, `batch` and `targets` are of users, not of records.

    inputs, labels and hashes are of records. max_records: most records of a user that count in one
    step.
    """

    max_records: int = field(kw_only=True)

    @classmethod
    def from_records(cls, records: Dataset, max_records: int) -> UserDataset:
        """Return the records by user.

        Raises UserError if a record's user is missing, or is not an integer or text.
        """
        own = {part.name: getattr(records, part.name) for part in fields(Dataset)}
        if unknown := int((records.user_hashes == b"").sum()):
            raise UserError(
                f"{records.name}: data.columns.user: must be an integer or a text for each record, "
                f"got neither for {unknown:,} of {len(records):,}; drop these records, or give "
                "each a separate user"
            )
        return cls(**own, max_records=max_records)

    @cached_property
    def _grouped(self) -> UserRecords:
        values = self.user_hashes.tolist()
        own = Dataset(**{part.name: getattr(self, part.name) for part in fields(Dataset)})
        return UserRecords(own, Users.from_values(values, self.max_records))

    @property
    def users(self) -> Users:
        """Return the users of the records."""
        return self._grouped.users

    @property
    def records(self) -> Dataset:
        """Return the single records, to whose positions `users` refers."""
        found = self._grouped.records
        assert isinstance(found, Dataset)
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Return the fingerprint of the records and of their users."""
        digest = hashlib.blake2b(digest_size=16, person=b"dpdist.groups")
        digest.update(self.records.fingerprint.encode())
        digest.update(np.ascontiguousarray(self.users.codes).tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.users)

    def members(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return positions and mask of the records of users (`UserRecords.members`)."""
        return self._grouped.members(indices)

    def batch(self, indices: np.ndarray | slice) -> Tensor:
        """Return inputs of the users' records, float32 (B, max_records, *input_shape)."""
        found = self._grouped.batch(indices)
        assert not isinstance(found, tuple | dict)
        return found

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        return self._grouped.targets(indices)

    def for_step(self, key: bytes) -> UserRecords:
        """Return the users with the records that the key samples."""
        return self._grouped.for_step(key)


# --- records in common ------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordHashes:
    """The hashes of some records, for comparisons (`dpdist.data.record_hashes`)."""

    input_shape: tuple[int, ...]
    hashes: np.ndarray


def refuse_common_records(
    private: Dataset, others: Dataset | RecordHashes, context: str, reason: str
) -> bool:
    """Raise UserError if a private record is among the others; return whether they are comparable.

    context, reason: of the message "CONTEXT: 3 of the 100 private records of NAME REASON".
    """
    if others.input_shape != private.input_shape:
        return False
    if found := count_common(private, others):
        some = f"{found:,} of the {len(private):,} private records of {private.name}"
        raise UserError(f"{context}: {some} {reason}")
    return True


def check_test_split(train: Dataset, test: Dataset, context: str) -> None:
    """Raise UserError unless the two splits have inputs of one shape and share no record.

    Scores and certificates on the test split are published, so it must not contain protected
    records. If users are protected, no user may be in both; equal rows of two users are separate
    records.

    train: all records that are not declared public.
    """
    if train.input_shape != test.input_shape:
        raise UserError(
            f"{context}: {train.name} has inputs of shape {train.input_shape}, {test.name} of "
            f"{test.input_shape}"
        )
    if train.by_user:
        refuse_common_users(train, test, context)
        return
    why = (
        f"are also in {test.name}: scores on private records would be published; remove them from "
        f"the files, or {_how_to_leave_out(train, test)}"
    )
    refuse_common_records(train, test, context, why)


def _how_to_leave_out(train: Dataset, test: Dataset) -> str:
    """Return the fix for records in common, which depends on their number."""
    if count_common(train, test) <= len(train) // 10:
        return "leave them out of training with data.drop_test_records: true"
    return (
        "add a column that distinguishes records: equal rows are common in this table, and leaving "
        "out so many would change what is learned"
    )


def refuse_common_users(private: Dataset, others: Dataset, context: str) -> None:
    """Raise UserError if a private user has records among public ones."""
    if both := np.intersect1d(private.user_hashes, others.user_hashes).size:
        raise UserError(
            f"{context}: {both:,} users of {private.name} are also in {others.name}: scores on "
            "private users would be published; move all records of a user to one of the files",
            see="explanation/privacy.md#a-person-as-the-unit",
        )


def check_test_records_unseen(
    public: Dataset, test: Dataset, context: str, is_own_dataset: bool
) -> None:
    """Raise UserError if a test record is among the public ones that a model learns from.

    is_own_dataset: whether the public records are from the run's own data set.
    """
    if both := count_common(public, test):
        raise UserError(
            f"{context}: {both:,} of the {len(public):,} public records of {public.name} are in "
            f"{test.name}, whose scores would not apply to new records; "
            + ("set data.drop_test_records: true" if is_own_dataset else "use different ones")
        )
