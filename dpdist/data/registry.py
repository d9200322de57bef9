"""Load data sets by name: digits and synthetic images are built in, others are files."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpdist.core.errors import UserError
from dpdist.core.files import atomic_folder, atomic_replacement, make_private_folder
from dpdist.data.dataset import Dataset
from dpdist.data.parquet import Columns, finish_split, load_split
from dpdist.data.record_hashes import (
    GROUPS_FILE,
    stored_user_hashes,
    write_hashes,
)
from dpdist.data.synthetic import SCENE_CLASSES, STROKE_CLASSES, draw_scenes, draw_strokes
from dpdist.data.tables import split_files


@dataclass(frozen=True)
class DataSource:
    """A data set in root/name, or a built-in one if root is None.

    train, test: names of the splits' files or folders. labels: use only the records of these,
    renumbered in this order; () for all. class_names: names of the classes in the files.
    """

    name: str
    classes: int
    root: Path | None = None
    train: str = "train"
    test: str = "test"
    columns: Columns = field(default_factory=Columns)
    labels: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()

    def files(self, split: str) -> list[Path]:
        """Return the files of a split. Raises UserError if there are none."""
        assert self.root is not None
        return split_files(self.root, self.name, self.train if split == "train" else self.test)

    def stored(self, split: str) -> Path | None:
        """Return the folder of a split that is stored as arrays, not as files; else None."""
        assert self.root is not None
        folder = self.root / self.name / (self.train if split == "train" else self.test)
        return folder if (folder / "meta.json").exists() else None


SYNTHETIC_RECORDS = {"strokes": 60_000, "scenes": 50_000}  # of the training splits
_DRAW = {"strokes": draw_strokes, "scenes": draw_scenes}
BUILT_IN = {"digits": 10, "strokes": STROKE_CLASSES, "scenes": SCENE_CLASSES}
DOWNLOADABLE = ("mnist", "cifar10", "cifar100", "svhn")


def cache_folder() -> Path:
    """Return the folder of decoded splits: $DPDIST_CACHE, or ~/.cache/dpdist."""
    return Path(os.environ.get("DPDIST_CACHE") or Path.home() / ".cache" / "dpdist")


def load(source: DataSource, split: str) -> Dataset:
    """Return the split "train" or "test", decoded on first use and memory-mapped afterwards.

    Raises UserError for an unknown name, a missing root, and as `load_split`.
    """
    cache = cache_folder()
    whole = _load_all_labels(source, split, cache)
    return select_labels(whole, source.labels, cache) if source.labels else whole


def _load_all_labels(source: DataSource, split: str, cache: Path) -> Dataset:
    name = f"{source.name}/{split}"
    if source.root is None:
        if source.name not in BUILT_IN:
            raise UserError(
                f"data.name: {source.name!r} is not built in ({', '.join(BUILT_IN)}); "
                f"give by data.root the folder that contains {source.name}/"
            )
        if source.classes != BUILT_IN[source.name]:
            raise UserError(
                f"data.classes: must be {BUILT_IN[source.name]} with {source.name}, got "
                f"{source.classes}"
            )
        if source.columns.text is not None:
            raise UserError(f"data.text: {source.name} are images; leave it out")
        return _built_in(source.name, split, cache)
    if (stored := source.stored(split)) is not None:
        return Dataset.open(stored)
    first = None
    if split == "test" and split_exists(source, "train") and source.stored("train") is None:
        first = source.files("train")[0]
    return load_split(
        source.files(split), name, source.classes, source.columns, cache, source.class_names, first
    )


def split_exists(source: DataSource, split: str) -> bool:
    """Return whether the split's files exist, without reading them."""
    if source.root is None:
        return source.name in BUILT_IN
    if source.stored(split) is not None:
        return True
    try:
        source.files(split)
    except UserError:
        return False
    return True


def store_split(
    root: Path, name: str, inputs: np.ndarray, labels: np.ndarray, classes: int, kind: str
) -> None:
    """Write arrays as the test split of the data set root/name, unless it exists.

    Args:
        root: folder of data sets.
        name: of the data set.
        inputs: (N, ...) float32.
        labels: (N,) int64 in 0..classes-1, or (N, classes) float32 if they are not classes.
        classes: their number.
        kind: of the targets, "class", "number" or "labels".
    """
    folder = root / name / "test"
    if not folder.exists():
        meta = _meta(f"{name}/test", classes, inputs, labels)
        _write(folder, inputs, labels, meta if kind == "class" else {**meta, "target_kind": kind})


def split_by_id(records: int, fraction: float, salt: str) -> np.ndarray:
    """Return a mask (records,) of about this fraction of the records.

    Whether a record is in it depends only on its own id and the salt, so that adding or removing a
    record never moves a different one.
    """
    threshold = int(fraction * 2**64)
    sides = np.empty(records, dtype=bool)
    for record in range(records):
        raw = hashlib.blake2b(f"{salt}/{record}".encode(), digest_size=8).digest()
        sides[record] = int.from_bytes(raw, "little") < threshold
    return sides


def _built_in(name: str, split: str, cache: Path) -> Dataset:
    """Return a built-in split, which is built on first use.

    A fifth of scikit-learn's 1,797 digits of 8 x 8 pixels, by hash of the index, is the test split.
    The test split of synthetic images has other records of the same classes.
    """
    folder = cache / f"{name}-{split}-1"
    if not folder.exists():
        if name in _DRAW:
            count = SYNTHETIC_RECORDS[name]
            count, seed = (count, 0) if split == "train" else (count // 10, 1)
            inputs, labels = _DRAW[name](count, seed)
        else:
            from sklearn.datasets import load_digits

            digits = load_digits()
            chosen = split_by_id(len(digits.target), 0.2, "dpdist.digits") == (split == "test")
            inputs = np.round(digits.images[chosen, None] * (255 / 16)).astype(np.uint8)
            labels = digits.target[chosen].astype(np.int64)
        _write(folder, inputs, labels, _meta(f"{name}/{split}", BUILT_IN[name], inputs, labels))
    return Dataset.open(folder)


def _meta(name: str, classes: int, inputs: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    fingerprint = hashlib.blake2b(inputs.tobytes() + labels.tobytes(), digest_size=16)
    return {"name": name, "classes": classes, "fingerprint": fingerprint.hexdigest()}


def select_labels(dataset: Dataset, labels: tuple[int, ...], cache: Path) -> Dataset:
    """Return the records of a whole split with these labels, renumbered in this order.

    They are a separate data set, whose fingerprint does not depend on other records. Raises
    UserError if there are no such records.
    """
    folder = cache / f"{dataset.folder.name}-labels-{'-'.join(map(str, labels))}"
    if not folder.exists():
        found = np.asarray(dataset.labels)
        rows = np.flatnonzero(np.isin(found, labels))
        if not len(rows):
            raise UserError(
                f"data.labels: must be labels of {dataset.name}, got {list(labels)}, which no "
                "record has"
            )
        numbers = np.full(dataset.classes, -1, dtype=np.int64)
        numbers[list(labels)] = np.arange(len(labels))
        inputs, marks = np.ascontiguousarray(dataset.inputs[rows]), numbers[found[rows]]
        digest = hashlib.blake2b(digest_size=16, person=b"dpdist.data")
        digest.update(inputs.tobytes())
        digest.update(marks.tobytes())
        meta = {
            "name": dataset.name,
            "classes": len(labels),
            "fingerprint": digest.hexdigest(),
            "largest_user": dataset.largest_user,  # of all labels, so an upper bound
            "read": dataset.text_encoding,
        }
        users = stored_user_hashes(dataset.folder)
        users = None if users is None else users[rows]
        _write(folder, inputs, marks, meta, dataset.hashes[rows], users)
    return Dataset.open(folder)


def _write(
    folder: Path,
    inputs: np.ndarray,
    labels: np.ndarray,
    meta: dict[str, Any],
    hashes: np.ndarray | None = None,
    users: np.ndarray | None = None,
) -> None:
    with atomic_folder(folder, keep_existing=True) as aside:
        make_private_folder(aside)
        np.save(aside / "inputs.npy", inputs)
        np.save(aside / "labels.npy", labels)
        if hashes is not None:
            write_hashes(aside, hashes.tobytes())
        if users is not None:
            write_hashes(aside, users.tobytes(), GROUPS_FILE)
        finish_split(aside, meta)


def fetch(name: str, root: Path, log: Callable[[str], None] = lambda line: None) -> Path:
    """Download a data set by torchvision, write it to root/NAME as Parquet, and return this path.

    An existing split is kept. Raises UserError for an unknown name or if the download fails.
    """
    if name not in DOWNLOADABLE:
        raise UserError(f"data fetch: must be one of {', '.join(DOWNLOADABLE)}, got {name!r}")
    from dpdist.core.optional_imports import import_torchvision

    datasets = import_torchvision("datasets")
    target = root / name
    download = root / ".download"
    for split in ("train", "test"):
        path = target / f"{split}.parquet"
        if path.exists():
            log(f"{path} is already there")
            continue
        log(f"downloading {name} {split} ...")
        try:
            if name == "svhn":
                source = datasets.SVHN(download, split=split, download=True)
            else:
                maker = getattr(datasets, {"mnist": "MNIST"}.get(name, name.upper()))
                source = maker(download, train=split == "train", download=True)
        except Exception as error:  # urllib, ssl, OSError, RuntimeError
            raise UserError(
                f"data fetch {name}: the download failed ({type(error).__name__}: {error}); check "
                f"the network, or write Parquet files with columns image and label to "
                f"{target}/train.parquet and test.parquet"
            ) from error
        target.mkdir(parents=True, exist_ok=True)
        _write_images(source, path)
        log(f"wrote {path}")
    shutil.rmtree(download, ignore_errors=True)
    return target


def _write_images(source, path: Path) -> None:
    images, labels = [], []
    for position in range(len(source)):
        picture, label = source[position]
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG")
        images.append({"bytes": buffer.getvalue(), "path": f"{position}.png"})
        labels.append(int(label))
    with atomic_replacement(path) as aside:
        pq.write_table(pa.table({"image": images, "label": labels}), aside, row_group_size=1000)
