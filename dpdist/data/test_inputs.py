"""Read the test inputs of an imported model, and resize images to its input shape.

A file with inputs of the right size is read where it is. Folders of images, one for each class, and
images of other sizes are written to the run as Parquet: the shorter side is resized (bilinear,
antialiased) and the center is cropped, which the run states.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dpdist.core.errors import UserError
from dpdist.core.files import atomic_replacement, check_utf8_name
from dpdist.data.discovery import (
    TEST,
    classes_of_column,
    feature_columns,
    find_input_shape,
    image_column,
    label_column,
)
from dpdist.data.parquet import FORMATS, class_numbers, decode_row, image_bytes
from dpdist.data.tables import (
    PictureFolder,
    TableFile,
    classes_in,
    ending_of,
    open_table,
    picture_schema,
    split_files,
)

SPLIT = "test"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_GRAY = ("1", "L", "LA", "F", "I", "I;16", "I;16B", "I;16L")  # modes of Pillow
_AT_ONCE = 500

_Size = tuple[int, ...] | None  # (C, H, W) of images; None: that of the first input


@dataclass(frozen=True)
class TestInputs:
    """Test inputs of one size in files.

    root, name, split: as in a recipe. image: the column of images; None for features. names: of the
    classes; () if labels are numbers. shape: of one input. inputs: their number. resized: how
    images were resized, in words; "" if they were not.
    """

    __test__ = False  # not a test class of pytest

    root: Path
    name: str
    split: str
    image: str | None
    features: tuple[str, ...]
    label: str
    classes: int
    names: tuple[str, ...]
    shape: tuple[int, ...]
    inputs: int
    resized: str = ""


def find_test_inputs(
    path: Path, target: Path, size: tuple[int, ...] | None = None, resize: int | None = None
) -> TestInputs:
    """Return the test inputs at `path`, as files of inputs of one size.

    Args:
        path: a Parquet, CSV or JSONL file; a folder with one of the test split; or a folder of
            images, CLASS/*.png or test/CLASS/*.png, whose classes are numbered in alphabetical
            order.
        target: the folder for written files, if `path` cannot be read as it is; its parent becomes
            the root.
        size: the model's input shape, (C, H, W) for images; None: that of the first input.
        resize: pixels of the shorter side of a resized image; None: the larger of H and W, only for
            images of other sizes.

    Raises:
        UserError: nothing can be read, or inputs have different sizes and `size` is None.
    """
    check_utf8_name(path)
    path = path.resolve()
    if path.is_file():
        place = (path.parent.parent, path.parent.name, path.name[: -len(ending_of(path)) or None])
        return _found([path], place, target, size, resize)
    if not path.is_dir():
        raise UserError(f"--data: {path}: no such file or folder")
    for name in TEST:
        files: list[Path] = []
        with suppress(UserError):
            files = split_files(path.parent, path.name, name)
        if files:
            return _found(files, (path.parent, path.name, name), target, size, resize)
    if classes_in(path):
        return _found([path], (path.parent, path.name, SPLIT), target, size, resize)
    raise UserError(
        f"--data: {path}: must be a Parquet, CSV or JSONL file, or a folder with test.parquet, "
        "CLASS/*.png or test/CLASS/*.png"
    )


def _found(
    files: list[Path], place: tuple[Path, str, str], target: Path, size: _Size, resize: int | None
) -> TestInputs:
    """Return the inputs of files. place: root, name and split of a recipe."""
    tables = [open_table(file) for file in files]
    first = tables[0]
    if not first.num_rows:
        raise UserError(f"--data: {files[0]}: must have rows, got none")
    label, image = label_column(tables), image_column(first.schema)
    classes, names, _ = classes_of_column(tables, label)
    features = () if image is not None else feature_columns(first, label)
    inputs = sum(table.num_rows for table in tables)
    found = TestInputs(*place, image, features, label, classes, names, (), inputs)
    if image is None:
        shape = find_input_shape(first, None, features)
        if size not in (None, shape):
            raise UserError(
                f"--input: must be {shape[0]}, the features of {files[0]}, got {size_text(size)}"
            )
    else:
        sizes = {_shape_of(raw, file, row) for file in tables for row, raw in _encoded(file, image)}
        pixels = _pixels(next(_encoded(first, image))[1], first, 0)
        shape = _wanted(pixels.shape, sizes, size, files[0])
        if resize is not None or sizes != {shape} or isinstance(first, PictureFolder):
            return _written(tables, found, target, shape, resize)
    found = replace(found, shape=shape)
    return found if _readable(found, files) else _copied(found, files, target)


def _readable(found: TestInputs, files: list[Path]) -> bool:
    """Return whether a recipe with this root, name and split reads these files."""
    if not (_NAME.fullmatch(found.name) and _NAME.fullmatch(found.split)):
        return False
    with suppress(UserError):
        return split_files(found.root, found.name, found.split) == files
    return False


def _copied(found: TestInputs, files: list[Path], target: Path) -> TestInputs:
    target.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files):
        part = "" if len(files) == 1 else f"-{number:05d}"
        shutil.copyfile(file, target / f"{SPLIT}{part}{ending_of(file)}")
    return replace(found, root=target.parent, name=target.name, split=SPLIT)


def _encoded(table: TableFile, image: str) -> Iterator[tuple[int, bytes]]:
    """Yield the row and the bytes of each image of a column."""
    for first, some in table.rows([image]):
        encoded = image_bytes(some[image].combine_chunks(), table, image).to_pylist()
        for row, raw in enumerate(encoded, first):
            if raw is None:
                raise table.error("must have an image, got none", row=row, column=image)
            yield row, raw


def _shape_of(raw: bytes, table: TableFile, row: int) -> tuple[int, int, int]:
    """Return the shape of an image, (C, H, W), from its header."""
    try:
        with Image.open(io.BytesIO(raw), formats=FORMATS) as picture:
            return (1 if picture.mode in _GRAY else 3, picture.height, picture.width)
    except Exception as error:  # decoders raise any error for a damaged image
        raise table.error("the image cannot be decoded", row=row, cause=error) from None


def _wanted(
    first: tuple[int, ...],
    shapes: set[tuple[int, int, int]],
    size: tuple[int, ...] | None,
    where: Path,
) -> tuple[int, ...]:
    """Return the model's input shape, from the option `size` and the shapes of the images."""
    if size is None:
        if len(shapes) > 1:
            raise UserError(
                f"--input: is required, as the images of {where} have {len(shapes)} shapes; give "
                "that of the model, such as 3,224,224 (the shorter side is resized, the center "
                "cropped)"
            )
        return first
    if len(size) != 3 or size[0] not in (1, 3):
        raise UserError(
            f"--input: must be channels,height,width with 1 or 3 channels for the images of "
            f"{where}, got {size_text(size)}"
        )
    return size


def _written(
    tables: list[TableFile],
    found: TestInputs,
    target: Path,
    size: tuple[int, ...],
    resize: int | None,
) -> TestInputs:
    """Write images of this size as PNG in Parquet, and return their description."""
    height, width = size[1:]
    side = max(height, width) if resize is None else resize
    if side < max(height, width):
        raise UserError(
            f"--resize: must be at least {max(height, width)}, the larger side of the input, got "
            f"{side}"
        )
    target.mkdir(parents=True, exist_ok=True)
    named = list(found.names) or [str(number) for number in range(found.classes)]
    schema, changed = picture_schema(named), False
    rows: list[dict[str, Any]] = []
    with (
        atomic_replacement(target / f"{SPLIT}.parquet") as aside,
        pq.ParquetWriter(aside, schema) as file,
    ):
        for table in tables:
            pictures = _encoded(table, str(found.image))
            of_classes = found.label, found.classes, found.names
            labels = (
                label
                for first, some in table.rows([found.label])
                for label in class_numbers(some, table, first, *of_classes)
            )
            for (row, raw), label in zip(pictures, labels, strict=True):
                pixels = _pixels(raw, table, row)
                brought = fit_picture(pixels, size, resize)
                changed = changed or brought is not pixels
                png = io.BytesIO()
                Image.fromarray(_channels_last(brought)).save(png, format="PNG")
                rows.append({"image": {"bytes": png.getvalue(), "path": None}, "label": int(label)})
                if len(rows) == _AT_ONCE:
                    file.write_table(pa.Table.from_pylist(rows, schema))
                    rows = []
        if rows:
            file.write_table(pa.Table.from_pylist(rows, schema))
    how = f"shorter side resized to {side} (bilinear), center crop {height} x {width}"
    return replace(
        found,
        root=target.parent,
        name=target.name,
        split=SPLIT,
        image="image",
        features=(),
        label="label",
        shape=size,
        resized=how if changed else "",
    )


def _pixels(raw: bytes, table: TableFile, row: int) -> np.ndarray:
    pixels = decode_row(raw, table, row)
    if pixels.dtype != np.uint8:
        rule = f"must have 8 bits per channel to be resized, got {pixels.dtype}"
        raise table.error(rule, row=row)
    return pixels


def fit_picture(pixels: np.ndarray, size: tuple[int, ...], resize: int | None) -> np.ndarray:
    """Return an image resized and cropped to `size`, (C, H, W) uint8.

    resize: pixels of the shorter side before the crop; None: the larger side of `size`, and images
    that have this size are returned as they are.
    """
    if pixels.shape == size and resize is None:
        return pixels
    if pixels.dtype != np.uint8:
        raise ValueError("must have 8 bits per channel to be resized")
    channels, height, width = size
    side = max(height, width) if resize is None else resize
    found = np.asarray(resized(pixels, channels, side, (height, width)))
    return found[None] if found.ndim == 2 else np.moveaxis(found, -1, 0)


def resized(pixels: np.ndarray, channels: int, side: int, crop: tuple[int, int]) -> Image.Image:
    """Return an image with its shorter side resized to `side` and its center cropped.

    Args:
        pixels: (C, H, W) uint8, C = 1 or 3.
        channels: 1 or 3 of the result; colors become gray by ITU-R 601-2.
        side: pixels, at least both sides of `crop`.
        crop: (height, width) of the result.
    """
    picture = Image.fromarray(_channels_last(pixels)).convert("L" if channels == 1 else "RGB")
    shorter = min(picture.size)
    wide, high = (int(side * length / shorter) for length in picture.size)
    if picture.size != (wide, high):
        picture = picture.resize((wide, high), Image.Resampling.BILINEAR)
    left, top = round((wide - crop[1]) / 2), round((high - crop[0]) / 2)
    return picture.crop((left, top, left + crop[1], top + crop[0]))


def _channels_last(pixels: np.ndarray) -> np.ndarray:
    return pixels[0] if len(pixels) == 1 else np.ascontiguousarray(np.moveaxis(pixels, 0, -1))


def size_text(size: tuple[int, ...]) -> str:
    """Return a shape as the option --input takes it, such as "3,224,224"."""
    return ",".join(map(str, size))
