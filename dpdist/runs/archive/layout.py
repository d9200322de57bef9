"""What an archive consists of: names, claims, the manifest and the permit."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpdist.base.errors import UserError
from dpdist.base.fields import check_run_name
from dpdist.base.names import check_path, check_paths
from dpdist.base.reading import NoSuchFile, check_shape, parse_json, read_json, shown
from dpdist.cluster.objectstore import Missing, ObjectStore

FORMAT = 1
MANIFEST = "manifest.json"
KEY = "DPDIST_ARCHIVE_KEY"
_KEY_CHARACTERS = 32
_PERMIT = {"epoch": int, "step": int, "steps": int}
_MANIFEST = {"run": str, "private": bool, "trained": bool, "permit": dict | None, "files": dict}


@dataclass(frozen=True)
class Permit:
    """Leave to release, in this attempt epoch, the steps from `step` up to but not `steps`."""

    epoch: int
    step: int
    steps: int

    def __post_init__(self) -> None:
        numbers = (self.epoch, self.step, self.steps)
        if not all(type(n) is int and n >= 0 for n in numbers) or self.step > self.steps:
            raise ValueError(f"not a permit: {self}")


def read_permit(path: Path) -> Permit | None:
    """A permit that was asked for or granted; None when there is none."""
    try:
        found = read_json(path, _PERMIT)
    except NoSuchFile:
        return None
    try:
        return Permit(found["epoch"], found["step"], found["steps"])
    except ValueError as error:
        raise UserError(f"{path}: damaged: {error}") from None


def permit_of(manifest: dict[str, Any]) -> Permit | None:
    """The permit of a manifest that `read_manifest` gave."""
    found = manifest["permit"]
    return found and Permit(**found)


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
        manifest = read_manifest(raw, f"{store.url}: {name}", number)
        return number, manifest
    raise UserError(
        f"{store.url}: no upload was ever finished (no manifest); there is nothing to restore"
    )


def folder_of(number: int) -> str:
    return f"{number:08d}"


def new_claim(number: int) -> str:
    return f"{folder_of(number)}-{secrets.token_hex(8)}"


def number_of(claim: str) -> int:
    """The number of a claim. Raises UserError for an object that is none."""
    number = claim.partition("-")[0]
    if not (number.isascii() and number.isdigit() and len(number) <= 16):
        raise UserError(f"claims/{claim!r} is no claim of an archive; remove it")
    return int(number)


def archive_key() -> bytes:
    """The secret that keys manifests, from the environment; empty when there is none."""
    secret = os.environ.get(KEY, "")
    if secret and len(secret) < _KEY_CHARACTERS:
        raise UserError(
            f"{KEY}: must have at least {_KEY_CHARACTERS} characters; take those that `openssl "
            "rand -hex 32` prints"
        )
    return hashlib.blake2b(secret.encode(), person=b"dpdist.archive").digest() if secret else b""


def write_manifest(body: dict[str, Any]) -> bytes:
    """The manifest as it is stored: with a check, keyed when there is a key."""
    body = {**body, "keyed": bool(archive_key())}
    return json.dumps({**body, "check": digest_of(body)}, sort_keys=True, allow_nan=False).encode()


def read_manifest(raw: bytes, where: str, number: int) -> dict[str, Any]:
    """Inverse of `write_manifest`: every name in it lies below the run's folder, or the prefix's.

    Raises UserError when it is damaged, of a newer version, or not made with this machine's key.
    """
    try:
        manifest = parse_json(raw, where, {"format": int, "dpdist": str, "check": str})
        if manifest["format"] > FORMAT:
            raise UserError(f"{where}: written by a newer dpdist ({shown(manifest['dpdist'])})")
        check, keyed = manifest.pop("check"), manifest.get("keyed") is True
        if keyed != bool(archive_key()):
            why = (
                f"was written with a key: set {KEY} to it"
                if keyed
                else f"was written without a key, by anybody who can write there; {KEY} is set"
            )
            raise UserError(f"{where}: {why}")
        if not hmac.compare_digest(check.encode(), digest_of(manifest).encode()):
            raise ValueError("its check does not fit its content")
        _check_manifest(check_shape(manifest, where, _MANIFEST), where, number)
    except (ValueError, TypeError) as error:
        raise UserError(f"{where} is damaged: {error}") from error
    return manifest


def _check_manifest(manifest: dict[str, Any], where: str, number: int) -> None:
    check_run_name(manifest["run"])
    if manifest["permit"] is not None:
        check_shape(manifest["permit"], f"{where}: permit", _PERMIT)
        permit_of(manifest)
    check_paths(manifest["files"], "files")
    begin = f"{folder_of(number)}/files/"
    for path, entry in manifest["files"].items():
        check_shape(entry, f"{where}: {path}", {"object": str, "digest": str, "size": int})
        if not check_path(entry["object"], path).startswith(begin):
            raise ValueError(f"{path}: its object must lie in {begin}")


def digest_of(body: dict[str, Any]) -> str:
    """Of a manifest's content; with a key in the environment, a message authentication code."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=32, key=archive_key()).hexdigest()
