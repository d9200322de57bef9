"""Check the tables of certificates in a release against its model.

The reader of tables (`dpdist.certification.table_reader`) recomputes every radius from its counts.
That cannot show that the counts were sampled, so `redraw_counts` samples them again for some inputs
with the table's noise.
"""

from __future__ import annotations

import secrets
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

_FORMAT = 2  # of a table's record
_MAX_VALUES = 2**27  # in one table: a small file may expand to more than the memory
_ROUNDING_TOLERANCE = 1e-4  # fraction of counts that rounding on a different machine may change
_MODEL_PROPERTIES = {"hidden", "sensitivity"}
_NON_COUNT_COLUMNS = {"index", "prediction", "n0", "cap"}
_DERIVED_COLUMNS = ("prediction", "radius")
_FLOAT_TOLERANCE = 1e-9  # for rounding on a different machine


class TableRecord(FileShape):
    """The job that wrote a table, as `redraw_counts` needs it.

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
        input_range: Smallest and largest number in the inputs.
        input_step: Size of the smallest change of inputs that are categories or counts.
        clean_wrong: Positions of inputs that are classified incorrectly without smoothing noise.
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
    input_step: FiniteFloat | None = None
    clean_wrong: Annotated[str, Field(pattern=r"^[0-9 ]*$")]


def read_table(path: Path) -> CertificateTable:
    """Return a release's table, in which each row follows from its counts and no input is missing.

    Raises:
        UserError: it is damaged, incomplete, or too large.
    """
    values = count_values(open_parquet(path))
    if values > _MAX_VALUES:
        raise UserError(f"{path}: must have at most {_MAX_VALUES:,} values, got {values:,}")
    return table_reader.read(path)


def check_table(
    table: CertificateTable, model_digest: str, model: nn.Module, spec: ModelSpec
) -> None:
    """Check that a table has the record of its job, and that the job used this model.

    Args:
        table: the table.
        model_digest: hash of the model's weights and architecture.
        model: the model.
        spec: its architecture.

    Raises:
        UserError: the record is incomplete, or the table has a different model, classes, noise or
            sensitivity.
    """
    about, where = table.job_record, table.path
    from dpdist.certification.inference import read_classifier_spec

    TableRecord.parse(about, str(where))
    for key, value in (("format", _FORMAT), ("model", model_digest), ("classes", spec.classes)):
        if about[key] != value:
            raise UserError(f"{where}: {key}: must be {value}, got {quoted(about[key])}")
    counted = {len(votes) for votes in table.table["histogram"].to_pylist() if votes is not None}
    if counted - {spec.classes}:
        raise UserError(f"{where}: histogram: must have {spec.classes} classes, got {max(counted)}")
    rows = [int(table.table[name].to_numpy().max()) for name in ("label", "prediction", "selected")]
    if max(rows) >= spec.classes:
        raise UserError(f"{where}: classes: must be below {spec.classes}, got {max(rows)}")
    settings, executed = table.read_settings(), read_classifier_spec(table.job_record, table.path)
    executed.check_memory(spec.input_shape, where)
    measured = settings.build_sampler(model, tuple(spec.input_shape)).identity
    for name in measured.keys() | (_MODEL_PROPERTIES & about.keys()):
        value = measured.get(name)
        if not json_equal(about.get(name), value):
            raise UserError(
                f"{where}: {name}: must be that of the model, {quoted(value)}, got "
                f"{quoted(about.get(name))}"
            )


def redraw_counts(
    table: CertificateTable, subject: Subject, data: NamedDatasetLike, num_inputs: int
) -> tuple[int, int]:
    """Sample the counts of some inputs of a table again with the noise of its seed, and compare.

    The inputs are chosen at random now, so the author of the table cannot know them. A table with
    false counts in a fraction f of its rows passes with probability at most (1 - f)^inputs.

    Args:
        table: the table, as `check_table` left it.
        subject: the released model.
        data: the verifier's copy of the test data of the table.
        num_inputs: the number of inputs, at most that of the table.

    Returns:
        The number of inputs that were sampled again, and the number of those that differ within the
        tolerance for rounding on a different machine.

    Raises:
        ReleaseError: a count differs, or the table has different data.
    """
    about, where = table.job_record, table.path
    if data.fingerprint != about["data"] or len(data.labels) != about["inputs"]:
        raise ReleaseError(f"{where}: data: must be all of {data.name}, got different data")
    if not np.array_equal(np.asarray(data.labels)[table.index], table.label):
        raise ReleaseError(f"{where}: labels: must be those of {data.name}")
    inputs = len(table.index)
    chosen = secrets.SystemRandom().sample(range(inputs), min(num_inputs, inputs))
    counter = _InputRecounter(table, subject, data)
    differing = 0
    for row in chosen:
        stated = table.table.slice(row, 1).to_pylist()[0]
        off = count_difference(stated, counter(stated["index"]), table.table.schema)
        most = _ROUNDING_TOLERANCE if counter.hardware_note else 0.0
        if off > most:
            raise ReleaseError(
                f"{where}: the counts of input {stated['index']} must be those of the table's "
                f"noise, {100 * off:.2g} % of the samples differ{counter.hardware_note}",
                see="how-to/releases.md#what-verify-holds-against-what",
            )
        differing += off > 0
    return len(chosen), differing


class _InputRecounter:
    """Sample the counts of inputs as the job of a table did.

    hardware_note: the job's machine, if it differs from this one; else "".
    """

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
                f" (sampled on {executed.machine} with torch {executed.torch_version}, here on "
                f"{here} with {torch.__version__}: rounding can change "
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
        # The counts are compared, so the check batch need not be.
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
    """Return the largest fraction by which the counts of two rows of one input differ.

    It is 1 if equal counts give a different result, as in a test of scores, which are not stored.
    """
    largest = 0.0
    for field in schema:
        kind = field.type.value_type if pa.types.is_list(field.type) else field.type
        if field.name in _NON_COUNT_COLUMNS or not pa.types.is_integer(kind):
            continue
        values = (row[field.name] for row in (stated, redrawn))
        one, other = (np.array([] if v is None else v, dtype=np.float64, ndmin=1) for v in values)
        if one.shape != other.shape:
            return 1.0
        apart = float(np.abs(one - other).sum())
        if field.name in ("label", "selected", "looks"):
            apart = float(apart > 0) * max(1.0, float(np.abs(one).sum()))
        largest = max(largest, apart / max(1.0, float(np.abs(one).sum())))
    same_error = stated["alpha"] == redrawn["alpha"]  # else certified again with a different alpha
    if largest == 0 and same_error:
        near = (abs(stated[name] - redrawn[name]) <= _FLOAT_TOLERANCE for name in _DERIVED_COLUMNS)
        return 0.0 if all(near) else 1.0
    return largest
