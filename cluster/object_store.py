"""Read and write objects under one prefix of S3, Google Cloud Storage, or a file system.

Credentials come from the environment (AWS_ACCESS_KEY_ID, an instance's role, ...), never from the
address. AWS_ENDPOINT_URL, or ``?endpoint_override=HOST:PORT&scheme=http`` in the address, names a
different S3-compatible store. The store must be strongly consistent (a written object can be read
and listed at once), like S3 since December 2020, MinIO, Ceph and Google Cloud Storage.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from dpdist.core.errors import ClusterError, UserError
from dpdist.core.files import (
    MAX_JSON_BYTES,
    MissingFileError,
    check_regular_file,
    check_relative_path,
)

SCHEMES = ("s3", "gs", "file")
_OPTIONS = {"region", "scheme", "endpoint_override"}
_CHUNK_BYTES = 8 * 2**20  # bytes


class ObjectNotFoundError(ClusterError):
    """There is no object with this name."""


def check_url(url: str) -> None:
    """Raise ClusterError unless `url` names a prefix. Messages do not contain credentials."""
    parts = urlsplit(url)
    if "@" in parts.netloc or set(parse_qs(parts.query)) - _OPTIONS:
        raise ClusterError(
            "the archive's address: must have no credentials, and no options other than "
            f"{', '.join(sorted(_OPTIONS))}; set credentials in the environment"
        )
    prefix = parts.path.strip("/")
    if parts.scheme not in SCHEMES or not prefix or (parts.scheme != "file" and not parts.netloc):
        raise ClusterError(
            f"{url}: must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER"
        )


class ObjectStore:
    """Objects by name, each written atomically. Raises ClusterError if the store fails."""

    def __init__(self, url: str) -> None:
        from pyarrow import fs

        check_url(url)
        self.url = url.rstrip("/")
        with self._translate_errors():
            self._fs, root = fs.FileSystem.from_uri(_with_region(self.url))
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, fs.LocalFileSystem)

    @contextmanager
    def _translate_errors(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise ObjectNotFoundError(f"{self.url}: no such {name or 'bucket'}") from error
        except (OSError, ValueError) as error:
            line = str(error).strip().splitlines()[0]
            raise ClusterError(f"{self.url}: {name + ': ' if name else ''}{line}") from error

    def _path(self, name: str) -> str:
        try:
            return f"{self._root}/{check_relative_path(name)}"
        except ValueError as error:
            raise ClusterError(f"{self.url}: {error}") from None

    def _open_input(self, name: str) -> Any:
        """Return the stream of an object, which must be a regular file in a file system."""
        path = self._path(name)
        if self._local:
            try:
                check_regular_file(path)
            except MissingFileError as error:
                raise FileNotFoundError(str(error)) from None
            except UserError as error:
                raise ClusterError(f"{self.url}: {error}") from None
        return self._fs.open_input_stream(path)

    def put(self, name: str, source: bytes | Path) -> tuple[str, int]:
        """Write an object, and return the digest and size of its content.

        An object that cannot be written completely does not exist afterwards. On a file system, and
        for bytes, the previous object is kept.
        """
        digest, size = hashlib.blake2b(digest_size=32), 0
        target = self._path(name)
        folder, _, base = target.rpartition("/")
        partial = f"{folder}/.{base}.{secrets.token_hex(4)}" if self._local else target
        with self._translate_errors(name):
            if self._local:
                self._fs.create_dir(folder, recursive=True)
            try:
                with self._fs.open_output_stream(partial) as stream:
                    for piece in _iter_chunks(source):
                        stream.write(piece)
                        digest.update(piece)
                        size += len(piece)
                if self._local:
                    self._fs.move(partial, target)
            except BaseException:
                # Closing the stream created an object from the part that was written.
                if self._local or isinstance(source, Path):
                    with suppress(OSError):
                        self._fs.delete_file(partial)
                raise
        return digest.hexdigest(), size

    def get(self, name: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        """Return an object's content.

        Raises ObjectNotFoundError, and ClusterError above `max_bytes` bytes.
        """
        with self._translate_errors(name), self._open_input(name) as stream:
            raw: bytes = stream.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise ClusterError(f"{self.url}: {name}: must have at most {max_bytes:,} bytes")
        return raw

    def download(self, name: str, target: Path, max_bytes: int) -> tuple[str, int]:
        """Copy an object into the new file `target`, and return the digest and size of the copy.

        The copy ends after `max_bytes` + 1 bytes. Raises ObjectNotFoundError.
        """
        digest, size = hashlib.blake2b(digest_size=32), 0
        with (
            self._translate_errors(name),
            self._open_input(name) as stream,
            open(target, "xb") as file,
        ):
            while size <= max_bytes and (
                piece := stream.read(min(_CHUNK_BYTES, max_bytes + 1 - size))
            ):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
        return digest.hexdigest(), size

    def list_names(self, folder: str) -> list[str]:
        """Return the sorted names directly in `folder`, without partial files of killed writers."""
        from pyarrow import fs

        with self._translate_errors(folder):
            selector = fs.FileSelector(self._path(folder), allow_not_found=True)
            found = sorted(info.base_name for info in self._fs.get_file_info(selector))
        return [name for name in found if not (self._local and name.startswith("."))]

    def delete(self, name: str) -> None:
        """Remove an object, if it exists."""
        with self._translate_errors(name):
            try:
                self._fs.delete_file(self._path(name))
            except FileNotFoundError:
                return

    def delete_folder(self, name: str) -> None:
        """Remove every object below `name`."""
        with self._translate_errors(name):
            try:
                self._fs.delete_dir(self._path(name))
            except FileNotFoundError:
                return

    def is_public(self, name: str) -> bool:
        """Return whether an S3 object can be read without credentials; False for other stores."""
        from pyarrow import fs

        parts = urlsplit(self.url)
        if parts.scheme != "s3":
            return False
        options: dict[str, Any] = {key: values[0] for key, values in parse_qs(parts.query).items()}
        options.setdefault("region", getattr(self._fs, "region", None))
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint and "endpoint_override" not in options:
            options["endpoint_override"] = endpoint
        try:
            anonymous = fs.S3FileSystem(anonymous=True, **options)
            with anonymous.open_input_stream(self._path(name)) as stream:
                stream.read(1)
        except OSError:
            return False
        return True


def _with_region(url: str) -> str:
    """Return the address with the environment's region, which saves a lookup of the bucket's."""
    parts = urlsplit(url)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if parts.scheme != "s3" or not region or "region" in parse_qs(parts.query):
        return url
    return f"{url}{'&' if parts.query else '?'}region={quote(region)}"


def _iter_chunks(source: bytes | Path) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    with open(source, "rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            yield piece
