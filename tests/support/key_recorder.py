"""A recorder of keys: which were derived from which, and which random streams they opened.

It wraps the functions that derive and expand keys wherever a module of ours holds them, so it sees
the real wiring and changes nothing: every wrapped call returns what the original returns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from dpdist.gradients import perturbations
from dpdist.gradients.independence import SYNTHETIC_KEY
from dpdist.randomness import device_generators, keys
from dpdist.randomness.keys import StreamKeys

# Loaded with the work, after a recorder may have begun: wrapped like all others.


@dataclass(frozen=True)
class Derived:
    """One call of derive_key."""

    parent: bytes
    purpose: str
    labels: tuple[str | int, ...]
    key: bytes


@dataclass(frozen=True)
class Stream:
    """One use of a key's stream: entries start to start + count - 1. kind: words (ChaCha20, with
    the function that asked for them), draws (Philox) or units (certification)."""

    key: bytes
    kind: str
    caller: str
    start: int = 0
    count: int = 0


@dataclass
class KeyRecorder:
    """What was seen. root: the run key, once known; all keys should descend from it."""

    derived: list[Derived] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    def clear(self) -> None:
        self.derived.clear()
        self.streams.clear()

    def keys_opened_by(self, caller: str) -> list[bytes]:
        """Keys whose streams one function opened, in order of first use."""
        return list(dict.fromkeys(s.key for s in self.streams if s.caller == caller))

    def derivation_of(self, key: bytes) -> Derived | None:
        """How a key was derived; None for one that was not (a run key, a seed)."""
        return next((d for d in self.derived if d.key == key), None)

    def derivation_chain(self, key: bytes) -> list[Derived]:
        """From a key up to what it was derived from in the end."""
        found = []
        while (step := self.derivation_of(key)) is not None:
            found.append(step)
            key = step.parent
        return found

    def ancestors(self, key: bytes) -> set[bytes]:
        return {step.parent for step in self.derivation_chain(key)}

    def labels(self, key: bytes) -> set[str]:
        """All labels on the way from the root to a key, as text."""
        return {
            str(label)
            for step in self.derivation_chain(key)
            for label in (step.purpose, *step.labels)
        }


SAMPLING, NOISE, DRAWS, UNITS = "poisson_sample", "_pieces", "draws", "units"


def replace_everywhere(
    patch: pytest.MonkeyPatch, original: Callable[..., Any], new: Callable[..., Any]
) -> None:
    """Put `new` wherever a module of ours holds `original` under any name."""
    for module in _ours():
        for name, value in list(vars(module).items()):
            if value is original:
                patch.setattr(module, name, new)


def _ours() -> Iterable[ModuleType]:
    return [m for n, m in sys.modules.items() if m is not None and n.split(".")[0] == "dpdist"]


def record_keys(patch: pytest.MonkeyPatch) -> KeyRecorder:
    """Begin to record; ends with the monkeypatch. Modules must be imported before. What is drawn
    for invented examples has a public key and is not recorded."""
    seen, public = KeyRecorder(), {SYNTHETIC_KEY}
    derive, words, philox = keys.derive_key, keys.stream_words, perturbations._philox_key
    reader, unit, fill = keys.WordReader, StreamKeys.key, device_generators.ChaChaBlocks.fill

    def derive_key(key: bytes, purpose: str, *labels: str | int) -> bytes:
        found = derive(key, purpose, *labels)
        if key in public:
            public.add(found)
        else:
            seen.derived.append(Derived(key, purpose, labels, found))
        return found

    def expanded(key: bytes, start: int, count: int) -> Any:
        caller = sys._getframe(1).f_code.co_name
        if key not in public:
            seen.streams.append(Stream(key, "words", caller, start, count))
        return words(key, start, count)

    def opened(key: bytes, start: int, count: int, most: int) -> Any:
        caller = sys._getframe(1).f_code.co_name
        if key not in public:
            seen.streams.append(Stream(key, "words", caller, start, count))
        return reader(key, start, count, most)

    def filled(self: device_generators.ChaChaBlocks, key: bytes, first: int) -> Any:
        seen.streams.append(Stream(key, "words", NOISE, 8 * first, 8 * self.count))
        return fill(self, key, first)

    def philox_key(draw_key: bytes, purpose: str, draw: int) -> int:
        found = philox(draw_key, purpose, draw)
        if draw_key not in public:
            seen.streams.append(Stream(found.to_bytes(16, "little"), "draws", DRAWS, draw))
        return found

    def unit_key(self: StreamKeys, index: int | None, stage: str, block: int) -> bytes:
        found = unit(self, index, stage, block)
        seen.streams.append(Stream(found, f"{stage}/{index}/{block}", UNITS))
        return found

    replace_everywhere(patch, derive, derive_key)
    replace_everywhere(patch, words, expanded)
    replace_everywhere(patch, reader, opened)
    replace_everywhere(patch, philox, philox_key)
    patch.setattr(StreamKeys, "key", unit_key)
    patch.setattr(device_generators.ChaChaBlocks, "fill", filled)
    return seen
