"""Make a data set of PATIENT/CLASS/picture folders, as of the IDC patches of breast tissue.

    python papers/residual/patients.py FOLDER --fit pad --data-root DATA
    python papers/residual/patients.py --quick      # a smoke test on invented pictures

Each patient is in one split, by a hash of the name. The column `patient` serves privacy.unit:
group.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import parse_arguments, scratch_folder

from dpdist.core.errors import UserError
from dpdist.core.files import (
    atomic_folder,
    check_regular_file,
    check_utf8_name,
    error_text,
    read_bytes,
    write_json,
)
from dpdist.data.parquet import decode_picture
from dpdist.data.tables import classes_in, picture_schema, pictures_in
from dpdist.data.test_inputs import fit_picture

Log = Callable[[str], None]
_ROW_GROUP = 1000
Fit = Literal["pad", "resize"]
_MOST_BYTES = 2**28  # of one picture


def convert_patients(
    folder: Path,
    target: Path,
    *,
    size: tuple[int, int] = (50, 50),
    fit: Fit | None = None,
    test_fraction: float = 0.2,
    log: Log = lambda line: None,
) -> Path:
    """Write PATIENT/CLASS/picture as train.parquet and test.parquet; return their folder.

    Guarantee: each patient is in one split, by a hash of the patient's name alone. A column
    `patient` says whose a record is, for privacy.unit: user.

    Args:
        folder: Folder of the patients, such as that of the IDC patches (PATIENT/0, PATIENT/1).
        target: The folder to write; it must not be there.
        size: (height, width) of every record.
        fit: Rule for pictures of another size. None: they are refused. "pad": black is put around
            smaller ones, which stay in the center. "resize": the shorter side becomes the larger
            of `size` (bilinear) and the center is cropped.
        test_fraction: Share of patients that are for testing.
        log: Receives a line for each split.

    Raises:
        UserError: no such pictures, other sizes without a rule, a link that leads out of the
            folder, or a split without patients. Nothing is written.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if target.exists():
        raise UserError(f"{target}: is there already; name another --name")
    patients = {each.name: classes_in(each) for each in sorted(folder.iterdir()) if each.is_dir()}
    patients = {name: classes for name, classes in patients.items() if classes}
    names = sorted({each for classes in patients.values() for each in classes})
    if len(names) < 2:
        raise UserError(f"{folder}: must hold PATIENT/CLASS/pictures of two classes or more")
    splits: dict[str, list[str]] = {"train": [], "test": []}
    for name in patients:
        check_utf8_name(folder / name)
        splits["test" if _is_tested(name, test_fraction) else "train"].append(name)
    if empty := [split for split, members in splits.items() if not members]:
        raise UserError(
            f"{folder}: none of {len(patients):,} patients is in the {empty[0]} split; change "
            "--test-fraction"
        )
    schema = picture_schema(names).append(pa.field("patient", pa.string()))
    with atomic_folder(target) as aside:
        aside.mkdir(exist_ok=True)
        for split, members in splits.items():
            count = 0
            with pq.ParquetWriter(aside / f"{split}.parquet", schema) as file:
                for rows in _patient_rows(folder, members, patients, names, size, fit):
                    file.write_table(pa.Table.from_pylist(rows, schema))
                    count += len(rows)
            log(f"{split}: {count:,} pictures of {len(members):,} patients")
        about = {"size": list(size), "fit": fit, "test_fraction": test_fraction, "classes": names}
        write_json(aside / "conversion.json", about)
    return target


def _is_tested(patient: str, fraction: float) -> bool:
    raw = hashlib.blake2b(f"dpdist.patients/{patient}".encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") < int(fraction * 2**64)


def _patient_rows(
    folder: Path, members: list[str], patients: dict[str, list[str]], names: list[str],
    size: tuple[int, int], fit: Fit | None,
) -> Iterator[list[dict[str, Any]]]:  # fmt: skip
    inside, rows = folder.resolve(), list[dict[str, Any]]()
    for patient in members:
        for name in patients[patient]:
            for path in pictures_in(folder / patient / name):
                check_utf8_name(path)
                if not check_regular_file(path).resolve().is_relative_to(inside):
                    raise UserError(f"{path}: a link must not lead out of {folder}")
                image = {"bytes": _fit_bytes(path, size, fit), "path": path.name}
                rows.append({"image": image, "label": names.index(name), "patient": patient})
                if len(rows) == _ROW_GROUP:
                    yield rows
                    rows = []
    if rows:
        yield rows


def _fit_bytes(path: Path, size: tuple[int, int], fit: Fit | None) -> bytes:
    """Return a color picture of this size: the file's own bytes if it is one already."""
    raw = read_bytes(path, _MOST_BYTES)
    try:
        pixels = decode_picture(raw)
    except ValueError as error:
        raise UserError(f"{path}: the image cannot be decoded: {error_text(error)}") from error
    if pixels.dtype != np.uint8 or len(pixels) != 3:
        raise UserError(f"{path}: must be a picture of three colors of 8 bits")
    height, width = pixels.shape[1:]
    if (height, width) == size:
        return raw
    seen = f"{path}: must be {size[0]} x {size[1]} pixels, got {height} x {width}"
    if fit is None:
        raise UserError(f"{seen}; --fit pad puts black around it, --fit resize resizes and crops")
    if fit == "pad":
        if height > size[0] or width > size[1]:
            raise UserError(f"{seen}: --fit pad is for smaller ones; take --fit resize, or --size")
        top, left = (size[0] - height) // 2, (size[1] - width) // 2
        fitted = np.zeros((3, *size), np.uint8)
        fitted[:, top : top + height, left : left + width] = pixels
    else:
        fitted = fit_picture(pixels, (3, *size), None)
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(np.moveaxis(fitted, 0, -1))).save(buffer, format="PNG")
    return buffer.getvalue()


def _invented(folder: Path) -> Path:
    """Return a folder of ten patients with a black and a white picture each."""
    for number in range(10):
        for name, value in (("0", 0), ("1", 255)):
            (folder / f"p{number}" / name).mkdir(parents=True)
            image = Image.fromarray(np.full((50, 50, 3), value, np.uint8))
            image.save(folder / f"p{number}" / name / "a.png")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--name", default="idc", help="of the data set to make")
    parser.add_argument("--size", type=int, nargs=2, default=[50, 50], metavar=("H", "W"))
    parser.add_argument("--fit", choices=["pad", "resize"], help="pictures of another size")
    parser.add_argument("--test-fraction", type=float, default=0.2, help="of the patients")
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    given = parse_arguments(parser, {"data_root": scratch_folder() / "data"})
    if given.quick and given.folder is None:
        given.folder = _invented(scratch_folder() / "patients")
    if given.folder is None:
        parser.error("FOLDER is needed")
    try:
        made = convert_patients(
            given.folder, given.data_root / given.name, size=tuple(given.size),
            fit=given.fit, test_fraction=given.test_fraction, log=print,
        )  # fmt: skip
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {made}; next: dpdist init {made} --user patient")


if __name__ == "__main__":
    main()
