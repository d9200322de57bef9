"""What an archive consists of: names, claims, the manifest and the permit."""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from cluster.objectstore import Missing, ObjectStore
from cluster.reading import NoSuchFile, read_json
from dpdist.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Permit:
    """Leave to release, in this attempt epoch, the steps from `step` up to but not `steps`."""

    epoch: int
    step: int
    steps: int


def read_permit(path: Path) -> Permit | None:
    """A permit that was asked for or granted; None when there is none."""
    try:
        found = read_json(path, {"epoch": int, "step": int, "steps": int})
    except NoSuchFile:
        return None
    return Permit(found["epoch"], found["step"], found["steps"])


def newest(store: ObjectStore) -> tuple[int, dict[str, Any]]:
    """Number and content of the newest whole manifest. Raises UserError when there is none."""
    numbers = sorted({number_of(claim) for claim in store.names("claims")}, reverse=True)
    if not numbers:
        raise UserError(f"{store.url}: there is no archive of a run")
    for number in numbers:
        name = f"{folder_of(number)}/{MANIFEST}"
        try:
            raw = store.get(name)
        except Missing:
            continue  # its owner never finished an upload, and so never released anything
        try:
            manifest = json.loads(raw)
            if manifest["format"] > FORMAT:
                raise UserError(f"{store.url}: written by a newer dpdist ({manifest['dpdist']})")
            if manifest.pop("check") != digest_of(manifest):
                raise ValueError("its check does not fit its content")
            for path in manifest["files"]:
                pure = PurePosixPath(path)
                if pure.is_absolute() or ".." in pure.parts:
                    raise ValueError(f"it names {path!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{store.url}: {name} is damaged: {error}") from error
        return number, manifest
    raise UserError(
        f"{store.url}: no upload was ever finished (no manifest); there is nothing to restore"
    )


def folder_of(number: int) -> str:
    return f"{number:08d}"


def new_claim(number: int) -> str:
    return f"{folder_of(number)}-{secrets.token_hex(8)}"


def number_of(claim: str) -> int:
    return int(claim.partition("-")[0])


def digest_of(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
