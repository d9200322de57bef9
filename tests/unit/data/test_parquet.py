"""Splits, parts and pictures of data sets: what is stored is what is read, or it is refused."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from support.datasets import png, write_split

from dpdist import data
from dpdist.core.errors import UserError
from dpdist.data import DataSource, load, split_by_id, synthetic
from dpdist.data.parquet import InexactImage, decode_picture
from dpdist.data.record_hashes import to_model_inputs
from dpdist.data.registry import SYNTHETIC_RECORDS


def images(count: int = 6, side: int = 5) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (side, side), dtype=np.uint8) for _ in range(count)]


def write(root, name="shapes", split="train", *, rows=None, labels=None, image=None):
    rows = [{"bytes": png(p), "path": "x.png"} for p in images()] if rows is None else rows
    labels = list(range(len(rows))) if labels is None else labels
    write_split(root / name, split, **{image or "image": rows}, label=labels)


def test_some_labels_are_a_data_set_of_their_own(tmp_path):
    """Renumbered in the order asked for; no other record shows in anything, its number included."""
    write(tmp_path, labels=[3, 0, 5, 3, 1, 5])
    source = DataSource("shapes", 6, tmp_path, labels=(5, 3))
    chosen = load(source, "train")
    assert (chosen.classes, chosen.labels.tolist()) == (2, [1, 0, 1, 0])
    assert np.array_equal(chosen.inputs[:, 0], np.stack(images())[[0, 2, 3, 5]])
    assert chosen.folder.stat().st_mode & 0o077 == 0
    first = chosen.first(3)  # not a part: it is whole
    assert len(first) == 3
    kept = [image for place, image in enumerate(images()) if place in (0, 2, 3, 5)]
    rows = [{"bytes": png(image), "path": ""} for image in kept]
    write(tmp_path, name="alone", rows=rows, labels=[1, 0, 1, 0])
    alone = load(DataSource("alone", 2, tmp_path), "train")
    assert chosen.fingerprint == alone.fingerprint
    with pytest.raises(UserError, match=r"data\.labels"):
        load(DataSource("shapes", 6, tmp_path, labels=(2, 4)), "train")


def test_split_by_id_never_moves_other_records():
    sides = split_by_id(1000, 0.3, "salt")
    assert np.array_equal(split_by_id(999, 0.3, "salt"), sides[:999])
    assert not np.array_equal(split_by_id(1000, 0.3, "other"), sides)
    # Binomial(1000, 0.3): outside 200..400 with probability below 1e-11
    assert 200 < sides.sum() < 400


def test_bytes_become_the_same_floats_as_in_torch():
    values = np.arange(256, dtype=np.uint8).repeat(5)  # more than a vector's width, and a rest
    assert np.array_equal(
        to_model_inputs(values), torch.from_numpy(values).float().div_(255).numpy()
    )
    floats = np.array([0.25, -0.0], dtype=np.float32)
    assert to_model_inputs(floats) is floats


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "classes", "shape"), [("strokes", 200, (1, 28, 28)), ("scenes", 100, (3, 32, 32))]
)
def test_they_follow_from_the_seed_and_are_a_data_set_by_name(
    name, classes, shape, monkeypatch, tmp_path
):
    draw = {"strokes": synthetic.draw_strokes, "scenes": synthetic.draw_scenes}[name]
    np.random.seed(1)
    images, labels = draw(300, seed=0)
    np.random.seed(2)
    again, _ = draw(300, seed=0)
    others, same_labels = draw(300, seed=1)
    assert images.shape == (300, *shape) and images.dtype == np.uint8
    assert np.array_equal(images, again) and np.array_equal(labels, same_labels)
    assert not (images == others).all((1, 2, 3)).any() and set(labels) == set(range(classes))

    monkeypatch.setenv("DPDIST_CACHE", str(tmp_path))
    monkeypatch.setitem(SYNTHETIC_RECORDS, name, 400)
    splits = [data.load(data.DataSource(name, classes), s) for s in ("train", "test")]
    assert [len(split) for split in splits] == [400, 40]
    assert splits[0].input_shape == shape and splits[0].classes == classes
    assert not np.isin(splits[1].hashes, splits[0].hashes).any()


GRAY = np.random.default_rng(0).integers(0, 256, (5, 4), dtype=np.uint8)
COLOR = np.random.default_rng(1).integers(0, 256, (5, 4, 3), dtype=np.uint8)
DEEP = np.random.default_rng(2).integers(0, 65536, (5, 4), dtype=np.uint16)


def saved(picture: Image.Image | np.ndarray, kind: str = "PNG", **options) -> bytes:
    picture = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def raw_png(bits: int, color: int, width: int, row: bytes) -> bytes:
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
        (saved(COLOR, "WEBP", lossless=True), COLOR.transpose(2, 0, 1)),
        (saved(DEEP), (DEEP / np.float32(65535))[None]),
        (saved(DEEP, "TIFF"), (DEEP / np.float32(65535))[None]),
        (saved(GRAY / np.float32(255), "TIFF"), (GRAY / np.float32(255))[None]),
        (saved(GRAY > 100), (255 * (GRAY > 100))[None]),
        (raw_png(2, 0, 4, b"\x1b"), np.array([[[0, 85, 170, 255]]])),  # two bits, by their range
        (saved(with_alpha(255)), COLOR.transpose(2, 0, 1)),
        (saved(palette()), np.asarray(palette().convert("RGB")).transpose(2, 0, 1)),
        (white_is_zero(GRAY), 255 - GRAY[None]),
    ],
)
def test_what_is_stored_is_what_is_read(raw, expected):
    found = decode_picture(raw)
    assert found.dtype == (np.float32 if expected.dtype.kind == "f" else np.uint8)
    assert np.array_equal(found, expected)


REFUSED = [
    saved(with_alpha(128)),
    saved(GRAY, "TIFF", save_all=True, append_images=[Image.fromarray(GRAY[::-1])]),
    raw_png(16, 2, 1, b"\x12\x34" * 3),
    raw_png(16, 4, 1, b"\x12\x34" * 2),
    saved(Image.fromarray(COLOR).convert("CMYK"), "JPEG"),
    saved(Image.fromarray(COLOR).convert("LAB"), "TIFF"),
    saved(DEEP.astype(np.int32), "TIFF"),
    saved(DEEP, transparency=int(DEEP[2, 2])),
    white_is_zero(DEEP),
    saved(GRAY.astype(np.float32), "TIFF"),
    saved(np.full((2, 2), np.nan, np.float32), "TIFF"),
]


@pytest.mark.parametrize("raw", REFUSED)
def test_what_cannot_be_read_exactly_is_refused(raw, tmp_path):
    with pytest.raises(InexactImage):
        decode_picture(raw)
    write_split(tmp_path / "t", image=[saved(GRAY), raw], label=[0, 1])
    with pytest.raises(UserError, match=r"train.parquet row 1"):
        load(DataSource("t", 2, tmp_path), "train")
