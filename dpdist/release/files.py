"""The files of a release, their checksums, and a signature over these.

SHA256SUMS is what `sha256sum -c SHA256SUMS` reads. The signature is Ed25519 (RFC 8032) over that
file, and so over all files that it names:

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out public.pem
    openssl pkeyutl -verify -pubin -inkey public.pem -rawin -in SHA256SUMS -sigfile SHA256SUMS.sig
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from dpdist.base.errors import UserError
from dpdist.base.reading import is_file, read_bytes, read_text, reason, regular_file

CARD, CARD_TEXT, DESCRIPTION, PAGE = (
    "privacy_card.json", "privacy_card.md", "release.json", "README.md",
)  # fmt: skip
WEIGHTS, ARCHITECTURE = "model.safetensors", "model.json"
SUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"
SUMMED = (PAGE, ARCHITECTURE, WEIGHTS, CARD, CARD_TEXT, DESCRIPTION)
RELEASED = (*SUMMED, SUMS)
"""What is in every release; beside it, `table_name(1)`, `table_name(2)`, ... where it certifies."""

_TABLE = re.compile(r"certificates-([1-9][0-9]{0,2})\.parquet")
_MOST = 2**20  # bytes of a file of sums, of a key


class ReleaseError(UserError):
    """A release that does not hold: files, sums, signature and statements that do not fit."""


def table_name(number: int) -> str:
    """Return the name of a release's table of certificates; the first one is number 1."""
    return f"certificates-{number}.parquet"


def is_released(name: str) -> bool:
    """Return whether a file of this name may lie in a release."""
    return name in (*RELEASED, SIGNATURE) or _TABLE.fullmatch(name) is not None


def tables_in(names: Iterable[str]) -> list[str]:
    """Return the names that are of tables of certificates, in the order of their numbers.

    Raises:
        ReleaseError: a number is left out.
    """
    numbers = sorted(int(found[1]) for found in map(_TABLE.fullmatch, names) if found)
    if numbers != list(range(1, len(numbers) + 1)):
        raise ReleaseError(f"tables of certificates must be numbered from 1 on, got {numbers}")
    return [table_name(number) for number in numbers]


def is_release(folder: Path) -> bool:
    """Whether somebody meant a release to lie there, whole or not."""
    return is_file(folder / SUMS) or (is_file(folder / DESCRIPTION) and is_file(folder / CARD))


def sums_of(folder: Path) -> str:
    """The text of SHA256SUMS for the files in `folder`."""
    tables = tables_in(path.name for path in folder.iterdir())
    return "".join(f"{_digest(folder / name)}  {name}\n" for name in (*SUMMED, *tables))


def check_sums(folder: Path) -> dict[str, str]:
    """Sums by name. Raises ReleaseError unless the files of a release lie there, no others, each
    with its sum.

    Names that begin with a dot are not looked at: tools that fetch releases leave such files, and
    nothing reads them.
    """
    try:
        found = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {reason(error)}") from None
    shown = [entry for entry in found if not entry.name.startswith(".")]
    for entry in shown:
        if not is_released(entry.name):
            raise ReleaseError(f"{folder}: holds {entry.name!r}, which is not of a release")
        if not entry.is_file(follow_symlinks=False):
            raise ReleaseError(f"{entry.path}: must be a file of its own, no link and no folder")
    missing = set(RELEASED) - {entry.name for entry in shown}
    if missing:
        raise ReleaseError(f"{folder}: lacks {', '.join(sorted(missing))}: no whole release")
    stated = _stated(folder / SUMS, [entry.name for entry in shown])
    for name in stated:
        if _digest(folder / name) != stated[name]:
            raise ReleaseError(f"{folder / name}: was changed: its sum is not that of {SUMS}")
    return stated


def _stated(path: Path, there: list[str]) -> dict[str, str]:
    """Return sums by name, of exactly the files that have one.

    Every line ends with a line feed alone, as `sha256sum -c` needs it.
    """
    names = (*SUMMED, *tables_in(there))
    *lines, rest = read_text(path, _MOST).split("\n")
    read = [re.fullmatch(r"([0-9a-f]{64})  ([A-Za-z0-9_.-]+)", line) for line in lines]
    stated = {match[2]: match[1] for match in read if match}
    if rest or len(stated) != len(lines) or stated.keys() != set(names):
        ends = " (its lines end as on Windows)" if any("\r" in line for line in lines) else ""
        raise ReleaseError(
            f"{path}: damaged{ends}: must have one line for each of {', '.join(names)}"
        )
    return stated


def _digest(path: Path) -> str:
    with regular_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def signature(key: Path, sums: bytes) -> bytes:
    """64 bytes, by an Ed25519 private key in PEM without a password. Raises UserError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        found = load_pem_private_key(read_bytes(key, _MOST), password=None)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{key}: no private key in PEM without a password: {reason(error)}"
        ) from None
    if not isinstance(found, Ed25519PrivateKey):
        raise UserError(f"{key}: must be an Ed25519 key (openssl genpkey -algorithm ed25519)")
    return found.sign(sums)


def check_signature(folder: Path, public: Path) -> None:
    """Raise ReleaseError unless the release is signed by the private key of `public` (PEM);
    UserError when that is no Ed25519 public key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(read_bytes(public, _MOST))
    except ValueError as error:
        raise UserError(f"{public}: no public key in PEM: {reason(error)}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise UserError(f"{public}: must be an Ed25519 public key (openssl pkey -pubout)")
    if not is_file(folder / SIGNATURE):
        raise ReleaseError(f"{folder}: is not signed: no {SIGNATURE}")
    try:
        key.verify(read_bytes(folder / SIGNATURE, _MOST), read_bytes(folder / SUMS, _MOST))
    except InvalidSignature:
        raise ReleaseError(f"{folder}: is not signed by the key of {public}") from None
