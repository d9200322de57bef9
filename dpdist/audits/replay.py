"""What no statistics are needed for: the same thing done twice, and compared to the last bit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from dpdist.audits.driving import Driven
from dpdist.privacy.ledger import Ledger

# Noise lies on a grid of 2^-24 of its scale: of 1,024 numbers two are equal one time in a hundred,
# by chance, and so many one time in 1e20. One key for two releases makes 128.
_COMMON = 8


def reuses_noise(driven: Driven, steps: int = 4) -> bool:
    """Whether two of the first steps, or of two attempts at them, have noise in common: the
    difference of two such releases is noise-free. Without records all is noise."""
    released = []
    for attempt in ("audit/0", "audit/1"):
        driven.attempt = attempt
        released += [driven.seen(np.arange(0), step) for step in range(steps)]
    noise = np.concatenate([seen.ravel() for seen in released if seen is not None])
    return len(noise) - len(np.unique(noise)) >= _COMMON


def forgets_releases(ledger: type[Ledger] = Ledger, steps: int = 5) -> bool:
    """Whether a ledger, read back, lacks releases of an attempt that another one superseded."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        with ledger.open(path, "0" * 64) as kept:
            for attempt in ("first", "second"):
                kept.begin_attempt({"attempt": attempt})
                for step in range(steps):
                    name = f"{attempt}/{step}".encode()
                    kept.record(step, hashlib.blake2b(name, digest_size=32).hexdigest())
        found = ledger.read(path)
        return found.releases != dict.fromkeys(range(steps), 2)
