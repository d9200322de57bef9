"""Make a data set of the penultimate features of a classifier that saw no private record.

    python papers/dplis/features.py DATA/cifar100 --name cifar100-features \\
        --model torchvision:efficientnet_b0 --weights FILE \\
        --pretraining-data ImageNet-1k --data-root DATA
    python papers/dplis/features.py --quick      # a smoke test on the built-in digits

DPlis' Table 3 trains private heads on such features. The records are the pictures', one for one.
What the classifier saw is written beside them and becomes an assumption of each run on them, unless
it was compared (`dpdist.training.provenance`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _common import parse_arguments, scratch_folder

from dpdist import data, models
from dpdist.cli import importing
from dpdist.core.errors import UserError
from dpdist.core.files import FEATURES_KEY, atomic_folder, open_parquet, write_json
from dpdist.data.discovery import ChosenColumns, inspect_folder
from dpdist.data.tables import picture_schema, split_files
from dpdist.data.test_inputs import fit_picture
from dpdist.importing import ForeignModel, build_foreign
from dpdist.models.weights import file_digest
from dpdist.runs.recipe import parse_changes
from dpdist.training.provenance import SAYS_WHAT_IT_SAW, describe_seen, was_compared

if TYPE_CHECKING:
    from torch import nn

Log = Callable[[str], None]
_ROW_GROUP = 1000
_AT_ONCE = 256  # records in a pass; the last one is filled up, so that its shape is the same


def declare_seen(network: str, pretraining_data: str | None, private: str) -> dict[str, Any]:
    """Return what a network from elsewhere has seen, by declaration, as `describe_seen` does.

    private: name of the records' data set. Raises UserError where nothing is declared, or that set
    is: the network's cost would have to be added.
    """
    if not pretraining_data:
        raise UserError(
            "--pretraining-data: must say what the network was trained on, such as ImageNet-1k; a "
            "network that "
            "saw private records must not make their features"
        )
    own = private.partition("/")[0]
    if re.search(rf"(?<!\w){re.escape(own.casefold())}(?!\w)", pretraining_data.casefold()):
        raise UserError(
            f"--pretraining-data: must be other data than {own}, which is private here; a network "
            "that "
            "saw them must not make their features: its cost would have to be added, which is not "
            "done"
        )
    return {
        "model": network,
        "public": True,
        "checked": False,
        "pretraining_data": f"{pretraining_data} (declared, not checked)",
        "assumed": f"no private record is among what {network}, which made the features, saw, "
        f"{pretraining_data}: declared only",
    }


@dataclass(frozen=True)
class _Source:
    source: data.DataSource
    train: data.Dataset
    test: data.Dataset


def make_features(
    pictures: str, network: ForeignModel | Path, target: Path, *,
    pretraining_data: str | None = None,
    resize: int | None = None, user: str | None = None, log: Log = lambda line: None,
) -> Path:  # fmt: skip
    """Write the penultimate features of every record as a data set; return its folder.

    Guarantee: no private record is among those that the network is known to have seen; what is only
    declared becomes an assumption of every run on the features. A network that draws, or mixes the
    records of a batch, is refused where one batch shows it.

    Args:
        pictures: The name of a built-in data set, or a folder of Parquet files with pictures.
        network: A classifier that ends in a linear layer: from elsewhere, or a folder that dpdist
            wrote (of `dpdist run --until pretrain`, or a release).
        target: The folder to write; it must not be there.
        saw: What a network from elsewhere was trained on.
        resize: What the shorter side of pictures becomes before the center is cropped; None: the
            network's larger side, where sizes differ.
        user: Column that is kept: whom a record belongs to.
        log: Receives a line for each split.

    Raises:
        UserError: nobody says what the network saw, it saw private records, or it is no such
            network; the pictures do not fit. Nothing is written.
    """
    found = _pictures(pictures, user)
    data.check_test_split(found.train, found.test, f"features: {pictures}")
    if target.exists():
        raise UserError(f"{target}: is there already; name another --name")
    if isinstance(network, Path):
        if pretraining_data is not None:
            raise UserError(
                "--pretraining-data: must be left out for a folder of dpdist's, which says it"
            )
        about = _seen_by(network, found.train)
        module, shape = _saved(network)
    else:
        about = declare_seen(network.name, pretraining_data, found.train.name)
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
    return _write_features(module, shape, about, found, target, resize, user, log)


def _pictures(name: str, user: str | None) -> _Source:
    if name in data.BUILT_IN and not Path(name).exists():
        if user is not None:
            raise UserError(f"--user: must be left out for {name}, which is built in")
        source = data.DataSource(name, data.BUILT_IN[name])
    else:
        seen = inspect_folder(Path(name), ChosenColumns(user=user))
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
    """Return a network that dpdist wrote, and the shape of its inputs."""
    spec = models.read_spec(folder)
    if spec.has_noise:
        raise UserError(f"--model: {folder}: must answer without noise; take another network")
    return models.load_network(folder), tuple(spec.input_shape)


def _seen_by(network: Path, private: data.Dataset) -> dict[str, Any]:
    """Return what the model of a folder that dpdist wrote has seen: model, saw, checked, assumed.

    private: records that must not be among it. Raises UserError when one is, or when nothing beside
    the model says what it saw.
    """
    context = f"--model: {network}"
    if not (network / "model.json").exists():
        raise UserError(f"{context}: no model there")
    compared, model = was_compared(network, private, context), models.model_hash(network)
    found = describe_seen(network, model, private.name.partition("/")[0], context, compared)
    if found is None:
        raise UserError(
            f"{context}: nothing says what it was trained on; take a folder of "
            "`dpdist run --until pretrain`, or a release",
            see="explanation/denoisers.md#what-the-frozen-part-saw",
        )
    return {"model": model, **found}


def _write_features(
    module: nn.Module, shape: tuple[int, ...], about: dict[str, Any], found: _Source, target: Path,
    resize: int | None, user: str | None, log: Log,
) -> Path:  # fmt: skip
    import torch

    from dpdist.models.features import PenultimateFeatures

    penultimate = PenultimateFeatures(module, torch.zeros(2, *shape))
    with atomic_folder(target) as aside:
        aside.mkdir(exist_ok=True)
        files = {}
        assumed = about.get("assumed") or f"{about['network']}, which made them, saw no record"
        for split, records in (("train", found.train), ("test", found.test)):
            own = {} if user is None else {user: _column(found.source, split, user)}
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
    """Return inputs (B, *shape) float32, resizing pictures of another size."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("pictures", nargs="?", help="folder of Parquet files, or a built-in name")
    parser.add_argument("--name", help="of the data set to make")
    parser.add_argument("--model", help="package.module:factory, torchvision:NAME, or a folder")
    parser.add_argument(
        "--pretraining-data", help="what a classifier from elsewhere was trained on"
    )
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--option", action="append", help="KEY=VALUE, of the factory")
    parser.add_argument("--input", help="shape of an input, such as 3,32,32")
    parser.add_argument("--classes", type=int, help="of the classifier (default: of the data)")
    parser.add_argument("--normalize", help="MEAN/STD")
    parser.add_argument("--resize", type=int, help="of the shorter side")
    parser.add_argument("--user", help="column that is kept: whom a record belongs to")
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    tiny = {
        "pictures": "digits",
        "name": "digit-features",
        "model": "mlp",
        "pretraining_data": "nothing",
    }
    given = parse_arguments(parser, tiny | {"data_root": scratch_folder()})
    if not (given.pictures and given.name and given.model):
        parser.error("PICTURES, --name and --model are needed")
    mean, std = importing.normalization(given.normalize)
    network: ForeignModel | Path = Path(given.model)
    if not (Path(given.model) / "model.json").exists():
        network = ForeignModel(
            given.model, given.weights, parse_changes(given.option),
            given.input and tuple(map(int, given.input.split(","))), given.classes, mean, std,
        )  # fmt: skip
    try:
        folder = make_features(
            given.pictures, network, given.data_root / given.name,
            pretraining_data=given.pretraining_data, resize=given.resize, user=given.user,
            log=print,
        )  # fmt: skip
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {folder}; next: dpdist init {folder}")


if __name__ == "__main__":
    main()
