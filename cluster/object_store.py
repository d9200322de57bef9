"""Whole objects under one prefix of S3, Google Cloud Storage, or a file system, by pyarrow.fs.

Credentials come from the environment (AWS_ACCESS_KEY_ID, an instance's role, ...), never from the
address. AWS_ENDPOINT_URL, or ``?endpoint_override=HOST:PORT&scheme=http`` in the address, leads to
another store that speaks S3. The store must be strongly consistent: a written object is read and
listed at once, as in S3 since December 2020, MinIO, Ceph and Google Cloud Storage.
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
    """There is no object of that name."""


def check_url(url: str) -> None:
    """Raise ClusterError unless `url` names a prefix. Never repeats an address with a password."""
    parts = urlsplit(url)
    if "@" in parts.netloc or set(parse_qs(parts.query)) - _OPTIONS:
        raise ClusterError(
            "the archive's address may not hold credentials or options besides "
            f"{', '.join(sorted(_OPTIONS))}: credentials come from the environment"
        )
    prefix = parts.path.strip("/")
    if parts.scheme not in SCHEMES or not prefix or (parts.scheme != "file" and not parts.netloc):
        raise ClusterError(
            f"{url}: must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER"
        )


class ObjectStore:
    """Objects by name, each written whole. Raises ClusterError when the store cannot be used."""

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
            raise ObjectNotFoundError(f"{self.url}: there is no {name or 'such bucket'}") from error
        except (OSError, ValueError) as error:
            said = str(error).strip().splitlines()[0]
            raise ClusterError(f"{self.url}: {name + ': ' if name else ''}{said}") from error

    def _path(self, name: str) -> str:
        try:
            return f"{self._root}/{check_relative_path(name)}"
        except ValueError as error:
            raise ClusterError(f"{self.url}: {error}") from None

    def _open_input(self, name: str) -> Any:
        """The stream of an object; of a file system, of a regular file only."""
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
        """Write an object; return the digest and size of what was written.

        One that cannot be written whole is not there afterwards. On a file system, and of bytes,
        the object that was there before is.
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
                # The end of the stream made an object of what was written until then.
                if self._local or isinstance(source, Path):
                    with suppress(OSError):
                        self._fs.delete_file(partial)
                raise
        return digest.hexdigest(), size

    def get(self, name: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        """An object's content. Raises Missing, and ClusterError above `max_bytes` bytes."""
        with self._translate_errors(name), self._open_input(name) as stream:
            raw: bytes = stream.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise ClusterError(
                f"{self.url}: {name}: more than {max_bytes:,} bytes, must be at most that"
            )
        return raw

    def download(self, name: str, target: Path, max_bytes: int) -> tuple[str, int]:
        """Copy an object into the new file `target`; return its digest and size. Of one of more
        than `max_bytes` bytes no piece beyond that is written. Raises Missing."""
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
        """Return the names directly in `folder`, sorted; not what a killed writer left of one."""
        from pyarrow import fs

        with self._translate_errors(folder):
            selector = fs.FileSelector(self._path(folder), allow_not_found=True)
            found = sorted(info.base_name for info in self._fs.get_file_info(selector))
        return [name for name in found if not (self._local and name.startswith("."))]

    def delete(self, name: str) -> None:
        """Remove an object; one that is gone already is no error."""
        with self._translate_errors(name):
            try:
                self._fs.delete_file(self._path(name))
            except FileNotFoundError:
                return

    def delete_folder(self, name: str) -> None:
        """Remove every object below `name`; none is no error."""
        with self._translate_errors(name):
            try:
                self._fs.delete_dir(self._path(name))
            except FileNotFoundError:
                return

    def is_public(self, name: str) -> bool:
        """Whether somebody without credentials can read this object (of S3; False elsewhere)."""
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
            stranger = fs.S3FileSystem(anonymous=True, **options)
            with stranger.open_input_stream(self._path(name)) as stream:
                stream.read(1)
        except OSError:
            return False
        return True


def _with_region(url: str) -> str:
    """Return the address with the environment's region, so that the bucket's is not looked up."""
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
