"""Run keys have all their bits from the operating system."""

from __future__ import annotations

import numpy as np

from dpdist.randomness.keys import KEY_BYTES, new_run_key


def rank(rows: np.ndarray) -> int:
    """Over two elements. rows: bool (n, bits)."""
    rows, found = rows.copy(), 0
    for bit in range(rows.shape[1]):
        pivots = np.flatnonzero(rows[found:, bit]) + found
        if not len(pivots):
            continue
        rows[[found, pivots[0]]] = rows[[pivots[0], found]]
        others = np.flatnonzero(rows[:, bit])
        rows[others[others != found]] ^= rows[found]
        found += 1
    return found


def test_no_bit_of_a_run_key_follows_from_others():
    """512 keys span all 256 bits; false failures: 2^-256. Fewer random bits, repeated or combined
    linearly, span no more than they are."""
    raw = b"".join(new_run_key() for _ in range(512))
    keys = np.unpackbits(np.frombuffer(raw, np.uint8)).reshape(512, -1).astype(bool)
    assert KEY_BYTES == 32 and keys.shape == (512, 256)
    assert rank(keys) == 256
