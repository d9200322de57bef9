"""Make data sets of other forms: features of a public classifier, and pictures by patient.

Features are the penultimate layer of a network that others trained. What that network saw lies
beside them and reaches every privacy card (`dpdist.training.provenance`). Folders
PATIENT/CLASS/picture, as of the IDC patches of breast tissue, become Parquet with a column of
patients, of which each is in one split.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dpdist import data, models
from dpdist.core.errors import UserError
from dpdist.core.files import (
    FEATURES_KEY,
    atomic_folder,
    check_regular_file,
    check_utf8_name,
    error_text,
    open_parquet,
    read_bytes,
    write_json,
)
from dpdist.data.discovery import (
    ChosenColumns,
    inspect_folder,
)
from dpdist.data.parquet import decode_picture
from dpdist.data.tables import classes_in, picture_schema, pictures_in, split_files
from dpdist.data.test_inputs import fit_picture
from dpdist.importing import ForeignModel, build_foreign
from dpdist.models.weights import file_digest
from dpdist.training.provenance import SAYS_WHAT_IT_SAW, declare_seen, describe_seen

if TYPE_CHECKING:
    from torch import nn

Log = Callable[[str], None]

# --- features of a classifier -----------------------------------------------------------------


_AT_ONCE = 256  # records in a pass; the last one is filled up, so that its shape is the same
_ROW_GROUP = 1000


@dataclass(frozen=True)
class _Source:
    source: data.DataSource
    train: data.Dataset
    test: data.Dataset


def make_features(
    pictures: str, network: ForeignModel | Path, target: Path, *, saw: str | None = None,
    resize: int | None = None, group: str | None = None, log: Log = lambda line: None,
) -> Path:  # fmt: skip
    """Write the penultimate features of every record as a data set; return its folder.

    Guarantee: no private record is among those that the network is known to have seen; what is only
    declared becomes an assumption of every run on the features. A network that draws, or mixes the
    records of a batch, is refused where one batch shows it.

    Args:
        pictures: The name of a built-in data set, or a folder of Parquet files with pictures.
        network: A classifier that ends in a linear layer: from elsewhere, or a folder that dpdist
            wrote (of `dpdist pretrain`, or a release).
        target: The folder to write; it must not be there.
        saw: What a network from elsewhere was trained on.
        resize: What the shorter side of pictures becomes before the centre is cropped; None: the
            network's larger side, where sizes differ.
        group: Column that is kept: whom a record belongs to.
        log: Receives a line for each split.

    Raises:
        UserError: nobody says what the network saw, it saw private records, or it is no such
            network; the pictures do not fit. Nothing is written.
    """
    found = _pictures(pictures, group)
    data.check_test_split(found.train, found.test, f"data features: {pictures}")
    if target.exists():
        raise UserError(f"{target}: is there already; name another --name")
    if isinstance(network, Path):
        if saw is not None:
            raise UserError("--saw: must be left out for a folder of dpdist's, which says it")
        about = describe_seen(network, found.train, found.train.name, f"--model: {network}")
        module, shape = _saved(network)
    else:
        about = declare_seen(network.name, saw, found.train.name)
        if network.weights is not None:
            if any((network.weights.parent / name).exists() for name in SAYS_WHAT_IT_SAW):
                raise UserError(
                    f"--weights: must be of a network from elsewhere, got {network.weights}, which "
                    "dpdist wrote: give its folder as --model, which says what it saw"
                )
            about["weights"] = {network.weights.name: file_digest(network.weights)}
        shape = network.input_shape or found.train.input_shape
        module, _ = build_foreign(network, shape, found.train.classes)
    about["network"] = network.resolve().name if isinstance(network, Path) else network.name
    return _write_features(module, shape, about, found, target, resize, group, log)


def _pictures(name: str, group: str | None) -> _Source:
    if name in data.BUILT_IN and not Path(name).exists():
        if group is not None:
            raise UserError(f"--group: must be left out for {name}, which is built in")
        source = data.DataSource(name, data.BUILT_IN[name])
    else:
        seen = inspect_folder(Path(name), ChosenColumns(group=group))
        if seen.image_column is None:
            raise UserError(f"{name}: must hold a column of pictures, to make features of")
        if seen.label_column is None:
            raise UserError(f"{name}: must hold a column of labels beside the pictures")
        columns = data.Columns(image=seen.image_column, label=seen.label_column)
        source = data.DataSource(
            seen.name, seen.classes, seen.root, seen.train_split, seen.test_split, columns,
            class_names=seen.class_names,
        )  # fmt: skip
    return _Source(source, data.load(source, "train"), data.load(source, "test"))


def _saved(folder: Path) -> tuple[nn.Module, tuple[int, ...]]:
    """A network that dpdist wrote, and the shape of its inputs."""
    spec = models.read_spec(folder)
    if spec.has_noise:
        raise UserError(f"--model: {folder}: must answer without noise; take another network")
    return models.load_network(folder), tuple(spec.input_shape)


def _write_features(
    module: nn.Module, shape: tuple[int, ...], about: dict[str, Any], found: _Source, target: Path,
    resize: int | None, group: str | None, log: Log,
) -> Path:  # fmt: skip
    import torch

    from dpdist.models.features import PenultimateFeatures

    penultimate = PenultimateFeatures(module, torch.zeros(2, *shape))
    with atomic_folder(target) as aside:
        aside.mkdir(exist_ok=True)
        files = {}
        assumed = about.get("assumed") or f"{about['network']}, which made them, saw no record"
        for split, records in (("train", found.train), ("test", found.test)):
            own = {} if group is None else {group: _column(found.source, split, group)}
            path = aside / f"{split}.parquet"
            width = _write_split(
                path, penultimate, records, shape, resize, found.source.class_names, own, assumed
            )
            files[path.name] = file_digest(path)
            log(f"{split}: {len(records):,} records, {width:,} features each")
        about |= {"features": width, "files": files, "data": found.train.name}
        write_json(aside / data.FEATURES_FILE, {**about, "fingerprint": found.train.fingerprint})
    return target


def _column(source: data.DataSource, split: str, name: str) -> pa.ChunkedArray:
    assert source.root is not None
    files = split_files(source.root, source.name, source.train if split == "train" else source.test)
    return pa.concat_tables(open_parquet(file).read([name]) for file in files)[name]


def _write_split(
    path: Path, penultimate: Any, records: data.Dataset, shape: tuple[int, ...], resize: int | None,
    names: tuple[str, ...], own: dict[str, Any], assumed: str,
) -> int:  # fmt: skip
    """Write a split, with what is assumed of its network; return the number of features."""
    parts = []
    for start in range(0, len(records), _AT_ONCE):
        inputs = _fitted(records, slice(start, start + _AT_ONCE), shape, resize)
        filled = inputs.new_zeros(_AT_ONCE, *shape)
        filled[: len(inputs)] = inputs
        found = penultimate(filled)[: len(inputs)].float()
        if not found.isfinite().all():
            raise UserError(f"{records.name}: the network gives features that are not finite")
        if not start:
            _check_alone(penultimate, filled, found[0], records.name)
        parts.append(found.numpy())
    values = np.concatenate(parts)
    width: int = values.shape[1]
    columns = {
        "features": pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), width).cast(
            pa.list_(pa.float32())
        ),
        "label": pa.array(np.asarray(records.labels)),
        **own,
    }
    about = {FEATURES_KEY: assumed, **(picture_schema(list(names)).metadata if names else {})}
    table = pa.table(columns).replace_schema_metadata(about)
    pq.write_table(table, path, row_group_size=_ROW_GROUP)
    return width


def _fitted(records: data.Dataset, rows: slice, shape: tuple[int, ...], resize: int | None) -> Any:
    """Inputs (B, *shape) float32, pictures of another size brought to it."""
    import torch

    if records.input_shape == shape and resize is None:
        return records.batch(rows)
    pixels = np.asarray(records.inputs[rows])
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or len(shape) != 3:
        raise UserError(
            f"--input: must be {','.join(map(str, records.input_shape))}, the shape of "
            f"{records.name}; only pictures of 8 bits are resized"
        )
    fitted = np.stack([fit_picture(each, shape, resize) for each in pixels])
    return torch.from_numpy(fitted).float() / 255


def _check_alone(penultimate: Any, inputs: Any, first: Any, name: str) -> None:
    """Raise UserError where the first record's features are drawn, or change with the others."""
    others = 1 - inputs
    others[0] = inputs[0]
    for changed, wrong in ((inputs, "draws random numbers"), (others, "mixes records of a batch")):
        again = penultimate(changed)[0].float()
        if not again.allclose(first, rtol=1e-4, atol=1e-5):
            raise UserError(f"{name}: the network {wrong}: a record's features must be its own")


# --- pictures by patient ----------------------------------------------------------------------


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
    `patient` says whose a record is, for privacy.unit: group.

    Args:
        folder: Folder of the patients, such as that of the IDC patches (PATIENT/0, PATIENT/1).
        target: The folder to write; it must not be there.
        size: (height, width) of every record.
        fit: Rule for pictures of another size. None: they are refused. "pad": black is put around
            smaller ones, which stay in the centre. "resize": the shorter side becomes the larger
            of `size` (bilinear) and the centre is cropped.
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
    """A picture of this size, in colours: the file itself where it is one."""
    raw = read_bytes(path, _MOST_BYTES)
    try:
        pixels = decode_picture(raw)
    except ValueError as error:
        raise UserError(f"{path}: the image cannot be decoded: {error_text(error)}") from error
    if pixels.dtype != np.uint8 or len(pixels) != 3:
        raise UserError(f"{path}: must be a picture of three colours of 8 bits")
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
