"""Encoded pictures to pixels: exactly, or not at all."""

from __future__ import annotations

import io
import re
import struct
import zlib

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import PHOTOMETRIC_INTERPRETATION, TiffImageFile

from dpdist.base.reading import reason

_PNG = b"\x89PNG\r\n\x1a\n"
# First column and row of each pass of an interlaced PNG, and the steps between them.
_ADAM7 = (
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2),
    (0, 1, 1, 2),
)  # fmt: skip
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")


class Inexact(ValueError):
    """A picture whose pixels would not be what was stored."""


class Unreadable(ValueError):
    """Bytes that are no picture, or one of more pixels than are decoded."""


def decode(raw: bytes, size: tuple[int, int] | None = None) -> np.ndarray:
    """Pixels (C, H, W), C = 1 for grey and 3 for colour. size: the only (H, W) that is decoded;
    another one raises Unreadable before its pixels take room.

    uint8 for at most 8 bits (by their range; palettes are looked up), float32 in [0, 1] for grey
    pictures of 16 bits (v / 65535) and of floats. An alpha channel goes when it says opaque
    everywhere. An EXIF orientation is not applied: pixels lie as they are stored. Raises Inexact
    for what would lose something (transparency, several frames, colours of 16 bits, CMYK and other
    colour spaces, floats outside [0, 1]); Unreadable for bytes that are no picture of these
    formats.
    """
    try:
        return _decode(raw, size)
    except (Inexact, Unreadable):
        raise
    except UnidentifiedImageError:  # whose words are an address in this process's memory
        raise Unreadable(f"no picture in {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise whatever a damaged picture leads them to
        raise Unreadable(reason(error)) from error


def _decode(raw: bytes, size: tuple[int, int] | None) -> np.ndarray:
    with Image.open(io.BytesIO(raw), formats=FORMATS) as picture:
        found = (picture.height, picture.width)
        if size not in (None, found):
            raise Unreadable(f"{found[0]} x {found[1]} pixels, not those of the model")
        frames = getattr(picture, "n_frames", 1)
        if frames != 1:
            raise Inexact(f"it has {frames} frames; store the one that is meant")
        stored = _stored_as(picture)
        if picture.format == "PNG":
            _check_png(raw)
        picture.load()
        pixels = _pixels(picture, stored)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def _check_png(raw: bytes) -> None:
    """Raise Unreadable for a PNG that holds fewer rows than it says: they would be black."""
    at, found, wanted = len(_PNG), 0, 0
    stream = zlib.decompressobj()
    while at + 8 <= len(raw):
        length, kind = struct.unpack(">I4s", raw[at : at + 8])
        content = raw[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            wanted = _png_bytes(*struct.unpack(">IIBBxxB", content))
        elif kind == b"IDAT" and found < wanted:
            found += len(stream.decompress(content, wanted - found))
        at += 12 + length
    if found < wanted:
        raise Unreadable(f"it is cut: {found:,} bytes of pixels are there, {wanted:,} belong to it")


def _png_bytes(width: int, height: int, depth: int, colour: int, interlaced: int) -> int:
    """Return the bytes of all rows of a PNG before compression, each with its filter's byte."""
    bits = depth * {2: 3, 4: 2, 6: 4}.get(colour, 1)
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    sizes = [(-((x - width) // dx), -((y - height) // dy)) for x, y, dx, dy in passes]
    return sum(rows * (1 + (bits * columns + 7) // 8) for columns, rows in sizes if columns)


def _stored_as(picture: Image.Image) -> str:
    """How the decoder reads the samples; known only before they are loaded."""
    tiles = getattr(picture, "tile", [])
    arguments = tiles[0][3] if tiles else ""
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""


def _pixels(picture: Image.Image, stored: str) -> np.ndarray:
    """Shape (H, W) or (H, W, 3)."""
    mode = picture.mode
    if mode not in ("1", "L") and _white_is_zero(picture):  # these the decoder turns round
        raise Inexact("its zero is white; store it with zero for black")
    if mode == "F":
        values = np.asarray(picture, dtype=np.float32)
        if not ((values >= 0) & (values <= 1)).all():
            raise Inexact("its numbers are not all in [0, 1]; scale them")
        return values
    if mode.startswith("I;16") and stored.startswith("I;16") and "S" not in stored:
        if "transparency" in picture.info:
            raise Inexact("it has a transparent grey; put it before a background")
        return np.asarray(picture).astype(np.float32) / np.float32(65535)
    if re.search(r";1[0-6]", stored):
        raise Inexact(f"its samples ({stored}) cannot be read in full; store 8 bits per channel")
    if mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        return _opaque(picture)
    if mode == "1":
        return np.asarray(picture.convert("L"))
    if mode == "P":
        return np.asarray(picture.convert("RGB"))
    if mode in ("L", "RGB"):
        return np.asarray(picture)
    raise Inexact(f"its colours ({mode}) have no exact grey or RGB values; convert it")


def _white_is_zero(picture: Image.Image) -> bool:
    return (
        isinstance(picture, TiffImageFile) and picture.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == 0
    )


def _opaque(picture: Image.Image) -> np.ndarray:
    """The pixels of a picture that could be transparent and nowhere is."""
    whole = np.asarray(picture.convert("RGBA"))
    if (whole[..., 3] != 255).any():
        raise Inexact("it is transparent in places; put it before a background")
    return whole[..., 0] if picture.mode in ("1", "L", "LA") else whole[..., :3]
