"""Name, checksum and sign the files of a release.

`sha256sum -c SHA256SUMS` checks the files. The signature is the Ed25519 (RFC 8032) signature of
SHA256SUMS, and so of all files in it:

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out public.pem
    openssl pkeyutl -verify -pubin -inkey public.pem -rawin -in SHA256SUMS -sigfile SHA256SUMS.sig
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from dpdist.core.errors import UserError
from dpdist.core.files import (
    check_regular_file,
    error_text,
    exists_as_non_folder,
    read_bytes,
    read_text,
)
from dpdist.privacy.card import PRIVACY_CARD, PRIVACY_CARD_TEXT

DESCRIPTION, MODEL_CARD = "release.json", "README.md"
WEIGHTS, ARCHITECTURE = "model.safetensors", "model.json"
CHECKSUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"
CHECKSUMMED_FILES = (
    MODEL_CARD,
    ARCHITECTURE,
    WEIGHTS,
    PRIVACY_CARD,
    PRIVACY_CARD_TEXT,
    DESCRIPTION,
)
REQUIRED_FILES = (*CHECKSUMMED_FILES, CHECKSUMS)
"""The files in every release. With certificates, it also has `table_name(1)` and so on."""
WORDS, TOKENIZER, SETTINGS = "words.txt", "tokenizer.json", "tokenizer_config.json"
"""A text model has one of the first two, unless its tokens are bytes, and the third one if the
tokenizer has special tokens or a chat template."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base.json"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE)
"""A model of which only an adapter was trained has these, in the format of `peft`."""

_TABLE = re.compile(r"certificates-([1-9][0-9]{0,2})\.parquet")
_MAX_BYTES = 2**20  # of a file of checksums, and of a key


class ReleaseError(UserError):
    """The release is not valid: its files, checksums, signature or statements do not agree."""


def table_name(number: int) -> str:
    """Return the name of a release's table of certificates; numbers start at 1."""
    return f"certificates-{number}.parquet"


def is_release_file(name: str) -> bool:
    """Return whether a file of this name may be in a release."""
    known = (*REQUIRED_FILES, SIGNATURE, WORDS, TOKENIZER, SETTINGS, *ADAPTER_FILES)
    return name in known or _TABLE.fullmatch(name) is not None


def list_table_names(names: Iterable[str]) -> list[str]:
    """Return the names of tables of certificates in the order of their numbers.

    Raises:
        ReleaseError: a number is missing.
    """
    numbers = sorted(int(found[1]) for found in map(_TABLE.fullmatch, names) if found)
    if numbers != list(range(1, len(numbers) + 1)):
        raise ReleaseError(f"tables of certificates: must be numbered from 1, got {numbers}")
    return [table_name(number) for number in numbers]


def is_release(folder: Path) -> bool:
    """Return whether a folder is a release, complete or not."""
    return exists_as_non_folder(folder / CHECKSUMS) or (
        exists_as_non_folder(folder / DESCRIPTION) and exists_as_non_folder(folder / PRIVACY_CARD)
    )


def compute_checksums(folder: Path) -> str:
    """Return the text of SHA256SUMS for the files in `folder`."""
    names = _checksummed_names([path.name for path in folder.iterdir()])
    return "".join(f"{_digest(folder / name)}  {name}\n" for name in names)


def _checksummed_names(present: Collection[str]) -> tuple[str, ...]:
    """Return the names that SHA256SUMS must have a line for, given the files in the folder."""
    optional = (WORDS, TOKENIZER, SETTINGS, *ADAPTER_FILES)
    others = (name for name in optional if name in present)
    return (*CHECKSUMMED_FILES, *others, *list_table_names(present))


def verify_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums by name, checked against the files.

    Raises ReleaseError if a file is missing, changed, or not one of a release. Names that begin
    with a dot are ignored: tools that fetch releases create such files, and nothing reads them.
    """
    try:
        found = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error_text(error)}") from None
    shown = [entry for entry in found if not entry.name.startswith(".")]
    for entry in shown:
        if not is_release_file(entry.name):
            raise ReleaseError(f"{folder}: contains {entry.name!r}, which is not part of a release")
        if not entry.is_file(follow_symlinks=False):
            raise ReleaseError(f"{entry.path}: must be a regular file, not a link or a folder")
    missing = set(REQUIRED_FILES) - {entry.name for entry in shown}
    if missing:
        raise ReleaseError(f"{folder}: is incomplete: lacks {', '.join(sorted(missing))}")
    stated = _read_checksums(folder / CHECKSUMS, [entry.name for entry in shown])
    for name in stated:
        if _digest(folder / name) != stated[name]:
            raise ReleaseError(f"{folder / name}: was changed: its checksum differs in {CHECKSUMS}")
    return stated


def _read_checksums(path: Path, present_names: list[str]) -> dict[str, str]:
    """Return the checksums by name, one for each file that must have one.

    Every line must end with a line feed only, as `sha256sum -c` requires.
    """
    names = _checksummed_names(present_names)
    *lines, rest = read_text(path, _MAX_BYTES).split("\n")
    read = [re.fullmatch(r"([0-9a-f]{64})  ([A-Za-z0-9_.-]+)", line) for line in lines]
    stated = {match[2]: match[1] for match in read if match}
    if rest or len(stated) != len(lines) or stated.keys() != set(names):
        ends = " (Windows line ends)" if any("\r" in line for line in lines) else ""
        raise ReleaseError(
            f"{path}: is damaged{ends}: must have one line for each of {', '.join(names)}"
        )
    return stated


def _digest(path: Path) -> str:
    with check_regular_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sign_checksums(key: Path, checksums: bytes) -> bytes:
    """Return the signature, 64 bytes, by an Ed25519 private key in PEM without a password.

    Raises UserError.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        found = load_pem_private_key(read_bytes(key, _MAX_BYTES), password=None)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{key}: must be a private key in PEM without a password: {error_text(error)}"
        ) from None
    if not isinstance(found, Ed25519PrivateKey):
        raise UserError(f"{key}: must be an Ed25519 key (openssl genpkey -algorithm ed25519)")
    return found.sign(checksums)


def verify_signature(folder: Path, public_key: Path) -> None:
    """Raise ReleaseError unless the release is signed by the private key of `public_key` (PEM).

    Raises UserError if `public_key` is not an Ed25519 public key.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(read_bytes(public_key, _MAX_BYTES))
    except ValueError as error:
        raise UserError(f"{public_key}: must be a public key in PEM: {error_text(error)}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise UserError(f"{public_key}: must be an Ed25519 public key (openssl pkey -pubout)")
    if not exists_as_non_folder(folder / SIGNATURE):
        raise ReleaseError(
            f"{folder}: is not signed: {SIGNATURE} is missing", see="how-to/releases.md#releases"
        )
    try:
        key.verify(
            read_bytes(folder / SIGNATURE, _MAX_BYTES), read_bytes(folder / CHECKSUMS, _MAX_BYTES)
        )
    except InvalidSignature:
        raise ReleaseError(
            f"{folder}: is not signed by the key of {public_key}", see="how-to/releases.md#releases"
        ) from None
