"""Count the records that two data sets share: the one comparison of recipes, scripts and searches.

Whatever is published of public records, or paid for with other ones, must not be about private
records. Records are compared by their inputs before random transforms, whatever their labels,
types, layouts and containers (`dpdist.data.record_hashes`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from dpdist.data.protocol import Records, UserRecords

_KEY_BYTES = 32


def single_records(records: Records) -> Records:
    """Return the records themselves, where they are grouped."""
    return records.records if isinstance(records, UserRecords) else records


def count_common(some: Any, others: Any) -> int:
    """Return how many of some records have an input that is among those of others.

    Guarantee: nothing is kept, and the digests compared are under a key that is thrown away.

    Args:
        some: `Records`, or a data set or file whose records' `hashes` are stored.
        others: the same.
    """
    stored = [getattr(each, "hashes", None) for each in (some, others)]
    if stored[0] is not None and stored[1] is not None:
        return int(np.isin(stored[0], stored[1]).sum())
    key = secrets.token_bytes(_KEY_BYTES)
    known = {mac for macs in _macs(others, key) for mac in macs}
    return sum(not known.isdisjoint(macs) for macs in _macs(some, key))


def _macs(records: Records, key: bytes) -> Iterator[tuple[bytes, ...]]:
    return single_records(records).input_macs(key)
