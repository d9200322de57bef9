"""Find the test inputs that a model from elsewhere is certified on, and bring pictures to its size.

A Parquet file that already holds inputs of the right size is read where it lies. Folders of
pictures, one for each class, and pictures of other sizes are written as Parquet beside the run:
the shorter side is resized (bilinear, antialiased) and the centre is cropped, which is stated.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dpdist.core.errors import UserError
from dpdist.core.files import (
    atomic_replacement,
    check_utf8_name,
    error_text,
    open_parquet,
    read_bytes,
)
from dpdist.data.discovery import (
    TEST,
    classes_of_column,
    feature_columns,
    image_column,
    label_column,
    picture_schema,
)
from dpdist.data.parquet import (
    FORMATS,
    classes_in,
    decode_picture,
    image_bytes,
    is_list,
    pictures_in,
    read_rows,
    split_files,
)

SPLIT = "test"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_GREY = ("1", "L", "LA", "F", "I", "I;16", "I;16B", "I;16L")  # modes of Pillow
_AT_ONCE = 500
_MOST_BYTES = 2**28  # of one picture

_Size = tuple[int, ...] | None  # (C, H, W) of pictures; None: of the first input


@dataclass(frozen=True)
class TestInputs:
    """Name test inputs of one size, and where their files lie.

    root, name, split: where a recipe finds them. image: the column of pictures; None for features.
    names: of the classes; () where labels are numbers. shape: of one input. inputs: their number.
    resized: how pictures were brought to the shape; "" where nothing was done.
    """

    __test__ = False  # no test of pytest's

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
    """Return the test inputs at `path`, as Parquet of inputs of one size.

    Args:
        path: a Parquet file; a folder with test.parquet; or a folder of pictures, CLASS/*.png or
            test/CLASS/*.png, whose classes are numbered in alphabetical order.
        target: the folder that Parquet files are written into where `path` cannot be read as it
            is; its parent becomes the root.
        size: the model's input shape, (C, H, W) for pictures; None: that of the first input.
        resize: what the shorter side of a picture is resized to; None: the larger of H and W,
            where pictures have another size.

    Raises:
        UserError: nothing there can be read, or inputs have another size and `size` is None.
    """
    check_utf8_name(path)
    path = path.resolve()
    if path.is_file():
        place = (path.parent.parent, path.parent.name, path.stem)
        return _of_parquet([path], place, target, size, resize)
    if not path.is_dir():
        raise UserError(f"--data: {path}: no such file or folder")
    for name in TEST:
        with suppress(UserError):
            files = split_files(path.parent, path.name, name)
            break
    else:
        files = []
    if files:
        return _of_parquet(files, (path.parent, path.name, name), target, size, resize)
    for folder in (*(path / name for name in TEST), path):
        if names := classes_in(folder):
            return _of_pictures(folder, names, target, size, resize)
    raise UserError(
        f"--data: {path}: must be a Parquet file, or a folder with test.parquet, CLASS/*.png or "
        "test/CLASS/*.png"
    )


# --- Parquet ----------------------------------------------------------------------------------


def _of_parquet(
    files: list[Path], place: tuple[Path, str, str], target: Path, size: _Size, resize: int | None
) -> TestInputs:
    """Find inputs in Parquet files. place: root, name and split by which a recipe names them."""
    reader = open_parquet(files[0])
    schema = reader.schema_arrow
    inputs = sum(open_parquet(file).metadata.num_rows for file in files)
    if not reader.metadata.num_rows:
        raise UserError(f"--data: {files[0]}: must have rows, got none")
    label, image = label_column(schema, files), image_column(schema)
    classes, names = classes_of_column(schema, files, label)
    features = () if image is not None else feature_columns(schema, label, files[0])
    found = TestInputs(*place, image, features, label, classes, names, (), inputs)
    if image is None:
        shape = (len(features),)
        if is_list(schema.field(features[0]).type):
            shape = (len(reader.read_row_group(0, [features[0]])[0][0].as_py() or ()),)
        if size not in (None, shape):
            raise UserError(
                f"--input: must be {shape[0]}, the features of {files[0]}, got {_by(size)}"
            )
        found = replace(found, shape=shape)
        return found if _readable(found, files) else _copied(found, files, target)
    sizes = {each for file in files for each in _sizes(_encoded(file, image), file)}
    first = _decoded(next(_encoded(files[0], image)), files[0]).shape
    wanted = _wanted(first, sizes, size, files[0])
    if resize is None and sizes == {wanted}:
        found = replace(found, shape=wanted)
        return found if _readable(found, files) else _copied(found, files, target)
    pictures = (
        pair
        for file in files
        for pair in zip(_encoded(file, image), _label_numbers(file, label, names), strict=True)
    )
    return _written(pictures, names, classes, target, wanted, resize, str(files[0]))


def _readable(found: TestInputs, files: list[Path]) -> bool:
    """Whether a recipe that names root, name and split reads these files."""
    if not (_NAME.fullmatch(found.name) and _NAME.fullmatch(found.split)):
        return False
    with suppress(UserError):
        return split_files(found.root, found.name, found.split) == files
    return False


def _copied(found: TestInputs, files: list[Path], target: Path) -> TestInputs:
    target.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files):
        name = f"{SPLIT}.parquet" if len(files) == 1 else f"{SPLIT}-{number:05d}.parquet"
        shutil.copyfile(file, target / name)
    return replace(found, root=target.parent, name=target.name, split=SPLIT)


def _encoded(path: Path, image: str) -> Iterator[bytes]:
    """Yield the bytes of each picture of a column."""
    for first, table in read_rows(path, open_parquet(path), [image]):
        for row, raw in enumerate(
            image_bytes(table[image].combine_chunks(), path, image).to_pylist()
        ):
            if raw is None:
                raise UserError(f"{path} row {first + row}: no image")
            yield raw


def _sizes(pictures: Iterable[bytes], where: Path) -> set[tuple[int, int, int]]:
    """The shapes of all pictures, (C, H, W), from their headers."""
    found = set()
    for raw in pictures:
        try:
            with Image.open(io.BytesIO(raw), formats=FORMATS) as picture:
                channels = 1 if picture.mode in _GREY else 3
                found.add((channels, picture.height, picture.width))
        except Exception as error:  # decoders raise whatever a damaged picture leads them to
            raise UserError(f"{where}: an image cannot be decoded: {error_text(error)}") from error
    return found


def _label_numbers(path: Path, label: str, names: tuple[str, ...]) -> Iterator[int]:
    number = {name: place for place, name in enumerate(names)}
    for first, table in read_rows(path, open_parquet(path), [label]):
        for row, value in enumerate(table[label].to_pylist()):
            if value is None:
                raise UserError(f"{path} row {first + row}: no label")
            yield number[value] if isinstance(value, str) else int(value)


# --- pictures ---------------------------------------------------------------------------------


def _of_pictures(
    folder: Path, names: list[str], target: Path, size: tuple[int, ...] | None, resize: int | None
) -> TestInputs:
    files = [(path, place) for place, name in enumerate(names)
             for path in pictures_in(folder / name)]  # fmt: skip
    for path, _ in files:
        check_utf8_name(path)
    sizes = {s for path, _ in files for s in _sizes([read_bytes(path, _MOST_BYTES)], path)}
    first = _decoded(read_bytes(files[0][0], _MOST_BYTES), files[0][0]).shape
    wanted = _wanted(first, sizes, size, folder)
    pictures = ((read_bytes(path, _MOST_BYTES), label) for path, label in files)
    return _written(pictures, tuple(names), len(names), target, wanted, resize, str(folder))


def _wanted(
    first: tuple[int, ...],
    shapes: set[tuple[int, int, int]],
    size: tuple[int, ...] | None,
    where: Path,
) -> tuple[int, ...]:
    """The model's input shape, from what was asked for and what lies there."""
    if size is None:
        if len(shapes) > 1:
            raise UserError(
                f"--input: is required: the pictures of {where} have {len(shapes)} shapes; give "
                "that of the model, such as 3,224,224 (the shorter side is resized, the centre "
                "cropped)"
            )
        return first
    if len(size) != 3 or size[0] not in (1, 3):
        raise UserError(f"--input: must be channels,height,width with 1 or 3 channels for the "
                        f"pictures of {where}, got {_by(size)}")  # fmt: skip
    return size


def _written(
    pictures: Iterator[tuple[bytes, int]], names: tuple[str, ...], classes: int, target: Path,
    size: tuple[int, ...], resize: int | None, where: str,
) -> TestInputs:  # fmt: skip
    """Write pictures of the wanted size as PNG in Parquet."""
    height, width = size[1:]
    side = max(height, width) if resize is None else resize
    if side < max(height, width):
        raise UserError(f"--resize: must be at least {max(height, width)}, the larger side of the "
                        f"input, got {side}")  # fmt: skip
    target.mkdir(parents=True, exist_ok=True)
    named = list(names) or [str(number) for number in range(classes)]
    schema, changed, inputs = picture_schema(named), False, 0
    rows: list[tuple[bytes, int]] = []
    with (
        atomic_replacement(target / f"{SPLIT}.parquet") as aside,
        pq.ParquetWriter(aside, schema) as file,
    ):
        for raw, label in pictures:
            pixels = _decoded(raw, f"{where} picture {inputs}")
            brought = fit_picture(pixels, size, resize)
            changed = changed or brought is not pixels
            rows.append((_png(Image.fromarray(_channels_last(brought))), label))
            inputs += 1
            if len(rows) == _AT_ONCE:
                file.write_table(_table(rows, schema))
                rows = []
        if rows:
            file.write_table(_table(rows, schema))
    how = ""
    if changed:
        how = f"shorter side resized to {side} (bilinear), centre crop {height} x {width}"
    return TestInputs(
        target.parent, target.name, SPLIT, "image", (), "label", classes, names, size, inputs, how
    )


def _table(rows: list[tuple[bytes, int]], schema: pa.Schema) -> pa.Table:
    image = [{"bytes": raw, "path": None} for raw, _ in rows]
    return pa.table({"image": image, "label": [label for _, label in rows]}, schema)


def _decoded(raw: bytes, where: object) -> np.ndarray:
    try:
        pixels = decode_picture(raw)
    except ValueError as error:
        raise UserError(f"{where}: the image cannot be decoded: {error_text(error)}") from error
    if pixels.dtype != np.uint8:
        raise UserError(f"{where}: must have 8 bits a channel to be resized, got {pixels.dtype}")
    return pixels


def fit_picture(pixels: np.ndarray, size: tuple[int, ...], resize: int | None) -> np.ndarray:
    """Return a picture as an input of `size`, (C, H, W) uint8: itself where it has that size.

    resize: what the shorter side becomes, of every picture; None: the larger side of `size`, of
    pictures that have another size.
    """
    if pixels.shape == size and resize is None:
        return pixels
    if pixels.dtype != np.uint8:
        raise ValueError("must have 8 bits for each colour to be resized")
    channels, height, width = size
    side = max(height, width) if resize is None else resize
    found = np.asarray(resized(pixels, channels, side, (height, width)))
    return found[None] if found.ndim == 2 else np.moveaxis(found, -1, 0)


def resized(pixels: np.ndarray, channels: int, side: int, crop: tuple[int, int]) -> Image.Image:
    """Return a picture with its shorter side resized to `side` and its centre cropped.

    Args:
        pixels: (C, H, W) uint8, C = 1 or 3.
        channels: 1 or 3 of the result; colours become grey by ITU-R 601-2.
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


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _by(size: tuple[int, ...]) -> str:
    return ",".join(map(str, size))
