"""Pictures are decoded exactly or refused, naming file and row; tables hold what they say."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from support.datasets import write_split

from dpdist.certification.predict import to_model_input
from dpdist.core.errors import UserError
from dpdist.data import DataSource, load
from dpdist.data.parquet import InexactImage, UnreadableImage, decode_picture

GRAY = np.random.default_rng(0).integers(0, 256, (5, 4), dtype=np.uint8)
COLOR = np.random.default_rng(1).integers(0, 256, (5, 4, 3), dtype=np.uint8)
DEEP = np.random.default_rng(2).integers(0, 65536, (5, 4), dtype=np.uint16)


def saved(picture: Image.Image | np.ndarray, kind: str = "PNG", **options) -> bytes:
    picture = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def png(bits: int, color: int, width: int, row: bytes) -> bytes:
    """A PNG of one row, of any depth and color type (Pillow does not write them all)."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checked = name + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, 1, bits, color, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def with_alpha(alpha: int) -> Image.Image:
    return Image.fromarray(np.dstack([COLOR, np.full((5, 4), alpha, np.uint8)]))


def palette() -> Image.Image:
    picture = Image.fromarray(np.arange(20, dtype=np.uint8).reshape(5, 4) % 7, "P")
    picture.putpalette(list(COLOR.reshape(-1)[:21]))
    return picture


def white_is_zero(pixels: np.ndarray) -> bytes:
    """A TIFF whose photometric interpretation says so (Pillow does not write them)."""
    raw = bytearray(saved(pixels, "TIFF"))
    start = struct.unpack_from("<I", raw, 4)[0]
    (count,) = struct.unpack_from("<H", raw, start)
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        if struct.unpack_from("<H", raw, entry)[0] == 262:
            struct.pack_into("<H", raw, entry + 8, 0)
    return bytes(raw)


@pytest.mark.parametrize(
    "raw, expected",
    [
        (saved(GRAY), GRAY[None]),
        (saved(COLOR), COLOR.transpose(2, 0, 1)),
        (saved(COLOR, "BMP"), COLOR.transpose(2, 0, 1)),
        (saved(COLOR, "WEBP", lossless=True), COLOR.transpose(2, 0, 1)),
        (saved(DEEP), (DEEP / np.float32(65535))[None]),
        (saved(DEEP, "TIFF"), (DEEP / np.float32(65535))[None]),
        (saved(GRAY.astype(np.uint16) * 257), (GRAY / np.float32(255))[None]),
        (saved(GRAY / np.float32(255), "TIFF"), (GRAY / np.float32(255))[None]),
        (saved(GRAY > 100), (255 * (GRAY > 100))[None]),
        (png(2, 0, 4, b"\x1b"), np.array([[[0, 85, 170, 255]]])),  # two bits, by their range
        (saved(with_alpha(255)), COLOR.transpose(2, 0, 1)),
        (saved(Image.fromarray(GRAY).convert("LA")), GRAY[None]),
        (saved(palette()), np.asarray(palette().convert("RGB")).transpose(2, 0, 1)),
        (white_is_zero(GRAY), 255 - GRAY[None]),
        (saved(palette(), "GIF"), np.asarray(palette().convert("RGB")).transpose(2, 0, 1)),
    ],
)
def test_what_is_stored_is_what_is_read(raw, expected):
    found = decode_picture(raw)
    assert found.dtype == (np.float32 if expected.dtype.kind == "f" else np.uint8)
    assert np.array_equal(found, expected)


def moving(kind: str) -> bytes:
    return saved(GRAY, kind, save_all=True, append_images=[Image.fromarray(GRAY[::-1])])


REFUSED = [
    (saved(with_alpha(128)), "transparent in places"),
    (saved(Image.fromarray(COLOR), transparency=tuple(int(v) for v in COLOR[2, 2])), "transpar"),
    *((moving(kind), "2 frames") for kind in ("GIF", "PNG", "TIFF", "WEBP")),
    (png(16, 2, 1, b"\x12\x34" * 3), r"samples \(RGB;16B\) cannot be read in full"),
    (png(16, 4, 1, b"\x12\x34" * 2), r"samples \(LA;16B\)"),
    (png(16, 6, 1, b"\x12\x34" * 4), r"samples \(RGBA;16B\)"),
    (saved(Image.fromarray(COLOR).convert("CMYK"), "JPEG"), "CMYK"),
    (saved(Image.fromarray(COLOR).convert("LAB"), "TIFF"), "LAB"),
    (saved(DEEP.astype(np.int32), "TIFF"), r"colors \(I\)"),
    (saved(DEEP, transparency=int(DEEP[2, 2])), "transparent gray"),
    (white_is_zero(DEEP), "zero is white"),
    (white_is_zero(GRAY / np.float32(255)), "zero is white"),
    (saved(GRAY.astype(np.float32), "TIFF"), r"not all in \[0, 1\]"),
    (saved(np.full((2, 2), np.nan, np.float32), "TIFF"), r"not all in \[0, 1\]"),
]


@pytest.mark.parametrize("raw, message", REFUSED)
def test_what_cannot_be_read_exactly_is_refused(raw, message, tmp_path):
    with pytest.raises(InexactImage, match=message):
        decode_picture(raw)
    write_split(tmp_path / "t", image=[saved(GRAY), raw], label=[0, 1])
    with pytest.raises(UserError, match=rf"train.parquet row 1: .*{message}"):
        load(DataSource("t", 2, tmp_path), "train")


# --- tables


@pytest.mark.parametrize("kind", [complex, bool, str])
def test_inputs_to_predict_are_real_numbers(kind):
    with pytest.raises(ValueError, match="real numbers"):
        to_model_input(np.ones((1, 2, 2)).astype(kind), (1, 2, 2))


@pytest.mark.parametrize("raw", [b"", b"PAR1", b"\x89PNG\r\n"])
def test_what_is_no_picture_is_said_without_an_address_in_memory(raw):
    """The words go into messages and into a server's answers."""
    with pytest.raises(UnreadableImage) as error:
        decode_picture(raw)
    assert "0x" not in str(error.value) and "object" not in str(error.value)
