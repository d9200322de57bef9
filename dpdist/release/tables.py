"""Tables of certificates in a release, held against its model and against each other.

Every radius is computed again from its counts by the reader of tables
(`dpdist.certification.table_reader`). That cannot show that the counts were drawn: `redraw_counts`
executes inputs again, by the noise that the table names.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import Field, FiniteFloat

from dpdist.certification import table_reader
from dpdist.certification.certificate import ClassifierRecord
from dpdist.certification.table import CertificateTable
from dpdist.core.errors import UserError
from dpdist.core.fields import FileShape, Keys
from dpdist.core.files import count_values, json_equal, open_parquet, quoted
from dpdist.release.files import ReleaseError

if TYPE_CHECKING:
    from torch import nn

    from dpdist.certification.subject import NamedDatasetLike, Subject
    from dpdist.models import ModelSpec

_FORMAT = 2  # of what a table says of itself
_MAX_VALUES = 2**27  # in one table: a small file may name more than any memory holds
# Of counts, what rounding on another machine may change, and no more.
_ROUNDING_TOLERANCE = 1e-4
_MODEL_PROPERTIES = {"hidden", "sensitivity"}  # of the model, as its place's identity says it
_NON_COUNT_COLUMNS = {"index", "prediction", "n0", "cap"}
_DERIVED_COLUMNS = ("prediction", "radius")  # by the counts, and what is not kept of the draws
_FLOAT_TOLERANCE = 1e-9  # what other machines may round otherwise


class TableRecord(FileShape):
    """Hold the job that made a table, whose counts `redraw_counts` draws again.

    Attributes:
        format: Format of the job's folder.
        model: Digest of the model.
        data: Fingerprint of the inputs.
        seed: Seed of the noise.
        classes: Number of classes.
        inputs: Number of inputs of the data set.
        settings: Settings of the certificate.
        classifier: The classifier that was executed.
        input_shape: Sizes of one input.
        input_range: Least and largest number in the inputs.
        clean_wrong: Positions of inputs that are answered incorrectly without smoothing noise.
    """

    format: int
    model: str
    data: str
    seed: str
    classes: int
    inputs: int
    settings: Keys
    classifier: ClassifierRecord
    input_shape: list[int]
    input_range: Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]
    clean_wrong: Annotated[str, Field(pattern=r"^[0-9 ]*$")]


def read_table(path: Path) -> CertificateTable:
    """Read a release's table: every row follows from its counts, and no chosen input is missing.

    Raises:
        UserError: it is damaged, incomplete, or larger than any memory.
    """
    values = count_values(open_parquet(path))
    if values > _MAX_VALUES:
        raise UserError(f"{path}: holds {values:,} values, at most {_MAX_VALUES:,} are read")
    return table_reader.read(path)


def check_table(
    table: CertificateTable, model_digest: str, model: nn.Module, spec: ModelSpec
) -> None:
    """Check that a table says how it was made, and that it was made with this model.

    Args:
        table: the table.
        model_digest: hash of the model's weights and architecture.
        model: the model.
        spec: its architecture.

    Raises:
        UserError: the table does not say what `redraw_counts` needs, is of another model or of
            other
            classes, or states another noise or sensitivity than the model has.
    """
    about, where = table.job_record, table.path
    from dpdist.certification.inference import read_classifier_spec

    TableRecord.parse(about, str(where))
    if about["format"] != _FORMAT:
        raise UserError(f"{where}: damaged: format must be {_FORMAT}, got {about['format']}")
    if about["model"] != model_digest:
        raise UserError(f"{where}: of another model than this one")
    if about["classes"] != spec.classes:
        raise UserError(f"{where}: of {about['classes']} classes, the model has {spec.classes}")
    counted = {len(votes) for votes in table.table["histogram"].to_pylist() if votes is not None}
    if counted - {spec.classes}:
        raise UserError(f"{where}: damaged: counts {max(counted)} classes of {spec.classes}")
    rows = [int(table.table[name].to_numpy().max()) for name in ("label", "prediction", "selected")]
    if max(rows) >= spec.classes:
        raise UserError(f"{where}: damaged: names class {max(rows)} of {spec.classes}")
    settings, executed = table.read_settings(), read_classifier_spec(table.job_record, table.path)
    executed.check_memory(spec.input_shape, where)
    measured = settings.build_sampler(model, tuple(spec.input_shape)).identity
    for name in measured.keys() | (_MODEL_PROPERTIES & about.keys()):
        value = measured.get(name)
        if not json_equal(about.get(name), value):
            raise UserError(
                f"{where}: {name} is not that of the model: it says {quoted(about.get(name))}, "
                f"computed again {quoted(value)}"
            )


def redraw_counts(
    table: CertificateTable, subject: Subject, data: NamedDatasetLike, num_inputs: int
) -> tuple[int, int]:
    """Count inputs of a table again, by the noise of its seed, and compare.

    Which inputs is decided here and now, so that nobody who wrote the table could know. A table
    with false counts in a share f of its rows passes with probability at most (1 - f)^inputs.

    Args:
        table: the table, as `check_table` left it.
        subject: the released model.
        data: the test data by whose inputs it was made, brought by the reader.
        num_inputs: how many to count again; all where the table has fewer.

    Returns:
        How many inputs were counted again, and how many of them differ by what rounding on
        another machine explains.

    Raises:
        ReleaseError: a count is another one, or the table is of other data.
    """
    about, where = table.job_record, table.path
    if data.fingerprint != about["data"] or len(data.labels) != about["inputs"]:
        raise ReleaseError(f"{where}: was not made of these data ({data.name}), or not of all")
    if not np.array_equal(np.asarray(data.labels)[table.index], table.label):
        raise ReleaseError(f"{where}: its labels are not those of {data.name}")
    chosen = secrets.SystemRandom().sample(
        range(len(table.index)), min(num_inputs, len(table.index))
    )
    counter = _InputRecounter(table, subject, data)
    differing = 0
    for row in chosen:
        stated = table.table.slice(row, 1).to_pylist()[0]
        off = count_difference(stated, counter(stated["index"]), table.table.schema)
        most = _ROUNDING_TOLERANCE if counter.hardware_note else 0.0
        if off > most:
            raise ReleaseError(
                f"{where}: the counts of input {stated['index']} are not those of its noise: "
                f"{100 * off:.2g} % of the draws fell otherwise{counter.hardware_note}",
                see="how-to/releases.md#what-verify-holds-against-what",
            )
        differing += off > 0
    return len(chosen), differing


class _InputRecounter:
    """Counts inputs as those of a table were counted. hardware_note: says where that was, if not on
    a machine like this one."""

    def __init__(self, table: CertificateTable, subject: Subject, data: NamedDatasetLike) -> None:
        import torch

        from dpdist.certification import inference
        from dpdist.certification.job import build_assignment
        from dpdist.certification.worker import Worker

        settings = table.read_settings()
        executed = inference.read_classifier_spec(table.job_record, table.path)
        device = torch.device(executed.device if torch.cuda.is_available() else "cpu")
        here = inference.device_name(device)
        self.hardware_note = ""
        if (executed.machine, executed.torch_version) != (here, torch.__version__):
            self.hardware_note = (
                f" (counted on {executed.machine} with torch {executed.torch_version}, here on "
                f"{here} with {torch.__version__}: rounding explains "
                f"{100 * _ROUNDING_TOLERANCE:g} %)"
            )
        made = build_assignment(subject, data, settings, np.sort(table.index).tolist())
        assignment = replace(
            made,
            stream_keys=replace(made.stream_keys, seed=table.job_record["seed"]),
            sampler=made.sampler.with_pinned(table.job_record),
            spec=replace(executed, device=device.type),
            device=device.type,
            gpus=float(device.type == "cuda"),
            inputs=1,
        )
        self._settings, self._sampler, self._data = settings, assignment.sampler, data
        # The answers to the check batch are not compared: the counts themselves are.
        counter, _ = assignment.sampler.build_counter(
            assignment.on_device(), assignment.executed_spec
        )
        self._worker = Worker(assignment, counter)

    def __call__(self, index: int) -> dict[str, Any]:
        """Return the row of one input."""
        (values,) = self._data.batch(np.asarray([index])).numpy()
        verdict = self._worker.certify(np.array(values), index)
        label = int(self._data.labels[index])
        row: dict[str, Any] = self._settings.table_row(index, label, verdict, self._sampler)
        return row


def count_difference(stated: dict[str, Any], redrawn: dict[str, Any], schema: pa.Schema) -> float:
    """Return the largest share by which the counts of two rows of one input differ; 1 where equal
    counts certify something else, as a test of scores may whose scores are not kept."""
    largest = 0.0
    for field in schema:
        kind = field.type.value_type if pa.types.is_list(field.type) else field.type
        if field.name in _NON_COUNT_COLUMNS or not pa.types.is_integer(kind):
            continue
        one, other = (np.atleast_1d(_float_array(row[field.name])) for row in (stated, redrawn))
        if one.shape != other.shape:
            return 1.0
        apart = float(np.abs(one - other).sum())
        if field.name in ("label", "selected", "looks"):
            apart = float(apart > 0) * max(1.0, float(np.abs(one).sum()))
        largest = max(largest, apart / max(1.0, float(np.abs(one).sum())))
    same_error = stated["alpha"] == redrawn["alpha"]  # else certified again, at another one
    if largest == 0 and same_error:
        near = (abs(stated[name] - redrawn[name]) <= _FLOAT_TOLERANCE for name in _DERIVED_COLUMNS)
        return 0.0 if all(near) else 1.0
    return largest


def _float_array(value: int | Sequence[int] | None) -> np.ndarray:
    return np.asarray([] if value is None else value, dtype=np.float64)
