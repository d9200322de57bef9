"""Certify any classifier by object: a module, a callable, a factory's name, a run or a release.

`certify` is the command `dpdist certify` as a function. It runs the same job: resumable, and with
the same table, to the byte, on any number of actors.
"""

from __future__ import annotations

import copy
import dataclasses
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist import models
from dpdist.certification import job, statistics, table
from dpdist.certification.certificate import Certificate
from dpdist.certification.subject import DatasetLike, Subject, require_logits
from dpdist.cluster.executor import ExecutorName, check_executor_name, open_executor
from dpdist.cluster.resumable_job import CHUNK_SECONDS
from dpdist.config.training import ResourcesRecipe
from dpdist.core.console import Row, format_html_table, format_table
from dpdist.core.errors import UserError
from dpdist.core.script_errors import warn
from dpdist.data.dataset import Dataset
from dpdist.data.parquet import Columns
from dpdist.data.registry import BUILT_IN, DataSource
from dpdist.data.registry import load as load_data
from dpdist.data.test_inputs import find_test_inputs
from dpdist.evaluation import load_subject
from dpdist.importing import ForeignModel, build_foreign
from dpdist.models.factory_code import MAIN, FactoryCode, is_library, object_digest
from dpdist.release.bundle import Release
from dpdist.release.bundle import load as load_release
from dpdist.release.files import is_release
from dpdist.reports.plots import plot_certificates
from dpdist.runs.folder import RunFolder, open_run
from dpdist.runs.recipe import parse_section
from dpdist.training.records import data_source, data_source_under, load_test_records

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dpdist.cluster.job_folder import Progress


class CertificateTable(table.CertificateTable):
    """A finished certification: one row for each certified input, in arrays of equal length.

    Guarantee: each row by itself is wrong with probability at most `alpha`, over the noise.
    `certified_accuracy(size)` is the fraction of these inputs, a measured number;
    `population_bounds()` bounds the fraction in the population that the inputs come from.
    `to_arrow()` has all columns; `print(table)` shows the summary, with the verdict first.

    Attributes:
        index: (N,) int64 positions of the inputs in the data.
        label: (N,) int64 true classes.
        prediction: (N,) int64 certified classes; -1 if the classifier abstains.
        radius: (N,) float64 certified radii in input units of `norm`; 0 if the classifier abstains.
        alpha: float, error probability of each certificate.
        sigma, n, mode, norm: as in the settings: standard deviation of the noise (float), draws for
            each input (int), name of the certificate (str) and norm of the radii, such as "l2".
        clean_accuracy: float in [0, 1], accuracy of the model itself on these inputs, without
            smoothing noise; None if the table does not state it.
        input_range: pair of floats, least and largest number in the inputs (in 1,000 of them, if
            there are more); None if the table does not state it.
        path: `Path` of certificates.parquet; the file does not exist if you gave `certify` no
            folder.

    Example:
        >>> import numpy as np, torch, dpdist
        >>> inputs, labels = np.eye(2, dtype=np.float32), np.array([0, 1])
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))  # answers the larger coordinate
        >>> settings = dpdist.Cohen(sigma=0.25, n=1000)
        >>> table = dpdist.certify(model, (inputs, labels), settings, executor="local")
        >>> table.certified_accuracy(0.25), table.to_arrow().num_rows, table.norm
        (1.0, 2, 'l2')
        >>> [bound.radius for bound in table.population_bounds([0.25])]
        [0.25]
    """

    def __str__(self) -> str:
        """Return the summary that `dpdist certify` prints, its verdict first."""
        return format_table(self.rows, title=self._caption)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same rows as a table, for a notebook."""
        return format_html_table(self.rows, self._caption)

    @property
    def _caption(self) -> str:
        return f"Certificates {self.name} ({len(self.index):,} inputs)"

    @property
    def rows(self) -> list[Row]:
        """Return what `print(table)` shows, a list of `Row`: the verdict first.

        A `Row` has `name`, `value` and `beside` (how to read the value), all str, and `brief`
        (bool: whether short summaries show it).
        """
        return statistics.table_rows(self)

    def plot(self, ax: Any = None) -> Any:
        """Plot certified accuracy against the radius, and return the matplotlib `Axes`.

        Args:
            ax: matplotlib axes to draw into; default: the current ones.
        """
        return plot_certificates(self, ax)

    def population_bounds(
        self, radii: Sequence[float] | None = None, error: float = statistics.ERROR
    ) -> list[statistics.PopulationBound]:
        """Return lower bounds of the population's certified accuracy, a list of `PopulationBound`.

        The bounds of all radii hold together with probability at least 1 - error, if the inputs are
        an independent sample.

        Args:
            radii: radii in input units, not chosen by the results; None: `reported_radii`.
            error: error probability of all bounds together.

        Returns:
            An entry for each radius: `radius`, `accuracy_lower_bound` (float in [0, 1]) and
            `certifiable_upper_bound` (float, an upper bound of the fraction that more draws could
            certify; None if the table has no counts of all classes).
        """
        return statistics.population_bounds(self, radii, error)


def certify(
    what: Any,
    data: Any = None,
    settings: Certificate | None = None,
    *,
    folder: str | Path | None = None,
    resources: Mapping[str, Any] | None = None,
    executor: ExecutorName | None = None,
    normalize: tuple[float | Sequence[float], float | Sequence[float]] | None = None,
    weights: str | Path | None = None,
    progress: Progress | None = None,
    trusted_factory: str | None = None,
    chunk_seconds: float = CHUNK_SECONDS,
    say: Callable[[str], None] | None = None,
) -> CertificateTable:
    """Certify the answers of any classifier, on all CPUs of this machine or of a cluster.

    Guarantee: each certificate is wrong with probability at most `settings.alpha`, over the noise.
    The table is the same to the byte on any number of actors. The same call with the same folder
    continues an interrupted certification, or returns the finished one. Small work is done in this
    process; other work starts and ends a session of Ray, unless you are inside `dpdist.connect()`.

    Args:
        what: the classifier: float32 inputs (B, ...) to logits (B, classes), each row by itself. A
            torch module (certified in evaluation mode), any other callable, a factory by name
            ("package.module:factory"), a `RunFolder`, a `Release`, or the path of a run, of a
            release or of a model folder.
        data: the inputs to certify and their labels: the name of a built-in set; a path as `dpdist
            import --data` takes it; `(X, y)` of arrays or tensors, and all else that
            `dpdist.as_records` takes; a data set that `dpdist.data.load` returned. None: the test
            split of the run or release. Pictures of uint8 become numbers from 0 to 1.
        settings: the certificate, such as `dpdist.Cohen(sigma=0.25, n=100_000)`, and which inputs.
            None: those of the run or release.
        folder: receives certificates.parquet, timings.csv, settings and the journal. None: a
            temporary folder, so that you cannot continue the certification.
        resources: keys of the recipe's section: certify_actors and certify_gpus.
        executor: where the draws are counted: "local" in this process, "ray" on actors, None by the
            size of the work (`dpdist.cluster.executor`). No bit of the result depends on it.
        normalize: (mean, std) of the training inputs, each one number or one per channel. They
            become part of the model: give inputs that are not normalized, and sigma and radii are
            in their units. Only for a module, a callable or a factory.
        weights: a state dict (.pt) or .safetensors file, loaded into a copy of the module or into
            what the factory builds.
        progress: called with inputs done, inputs in all, and draws per second.
        trusted_factory: "package.module:factory" that may be imported for a model folder.
        chunk_seconds: the work that an actor gets at a time.
        say: function that gets a line (str) about the GPUs.

    Returns:
        A `CertificateTable` with one row for each certified input: arrays `label`, `prediction` (-1
        if it abstains) and `radius`, and methods such as `certified_accuracy(radius)` and
        `to_pandas()`. It prints its summary. Warns if the results are doubtful, such as for images
        outside 0 to 1, or for a model that is not better than the most frequent class.

    Raises:
        UserError: classifier, data and settings do not fit, or the folder contains a different
            certification.
        ClusterError: the actors failed for good.

    Source:
        Cohen, Rosenfeld and Kolter, ICML 2019; the other settings name theirs.

    Example:
        >>> import numpy as np, torch, dpdist
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> inputs = np.random.default_rng(0).random((6, 4), dtype=np.float32)
        >>> labels = model(torch.from_numpy(inputs)).argmax(1)
        >>> settings = dpdist.Cohen(sigma=0.1, n=100)
        >>> table = dpdist.certify(model, (inputs, labels), settings, executor="local")
        >>> len(table.radius), table.certified_accuracy(0.0) <= 1
        (6, True)
    """
    check_executor_name(executor)
    asked = parse_resources(resources or {})
    changed = _Changed(normalize, None if weights is None else Path(weights))
    inputs, chosen, subject = _resolved(what, data, settings, trusted_factory, changed)
    with open_executor(executor), ExitStack() as stack:
        aside = tempfile.TemporaryDirectory(prefix="dpdist-certify-")
        found = job.certify(
            subject,
            inputs,
            chosen,
            Path(stack.enter_context(aside) if folder is None else folder),
            actors=asked.certify_actors,
            progress=progress,
            chunk_seconds=chunk_seconds,
            gpus=asked.certify_gpus,
            log=say,
        )
    for text in statistics.doubts(found):
        warn(text)
    return CertificateTable(
        **{each.name: getattr(found, each.name) for each in dataclasses.fields(found)}
    )


def parse_resources(given: Mapping[str, Any]) -> ResourcesRecipe:
    """Return the recipe's section of these keys. Raises UserError."""
    return parse_section(ResourcesRecipe, given, "resources")


def _required(settings: Certificate | None) -> Certificate:
    if settings is None or not hasattr(settings, "indices"):
        raise UserError(
            "settings: must be a certificate such as dpdist.Cohen(sigma=0.25, n=100_000), got "
            f"{type(settings).__name__}"
        )
    return settings


# --- the classifier ---------------------------------------------------------------------------


class _Changed:
    """The normalization and the weights that a module, callable or factory is certified with."""

    def __init__(self, normalize: Any, weights: Path | None) -> None:
        self.weights = weights
        self.mean: tuple[float, ...] = ()
        self.std: tuple[float, ...] = ()
        if normalize is not None:
            self.mean, self.std = _constants(normalize)

    def require_none(self, what: Any) -> None:
        """Raise UserError if one is given, for a run, a release or the folder of a model."""
        if self.mean or self.weights:
            raise UserError(
                f"{'normalize' if self.mean else 'weights'}: must be left out for a "
                f"{type(what).__name__}, whose model has its own"
            )

    def loaded(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module in evaluation mode, with the weights."""
        from dpdist.models.weights import load_foreign, read_weights

        if self.weights is None:
            return models.fresh_copy(module).eval()
        copied = copy.deepcopy(module).eval()
        load_foreign(copied, read_weights(self.weights), self.weights)
        return copied

    def normalized(self, module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """Return the module after the normalization of its inputs, of this shape."""
        if not self.mean:
            return module
        return models.normalized(module, shape, self.mean, self.std)


def _constants(given: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std, each as a tuple. Raises UserError."""
    try:
        mean, std = (tuple(map(float, np.atleast_1d(np.asarray(each)))) for each in given)
    except (TypeError, ValueError):
        mean = std = ()
    if not (mean and std and np.isfinite([*mean, *std]).all() and min(std) > 0):
        raise UserError(
            "normalize: must be (mean, std), each a number or one for each channel, std > 0, such "
            "as ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
        )
    return mean, std


def _resolved(
    what: Any, data: Any, settings: Certificate | None, trusted_factory: str | None,
    changed: _Changed,
) -> tuple[DatasetLike, Certificate, Subject]:  # fmt: skip
    """Return inputs, settings and model. Raises UserError."""
    import torch

    if isinstance(what, str | Path) and not _is_factory(what):
        what = _at_path(Path(what), trusted_factory)
    if isinstance(what, RunFolder | Release | Subject):
        changed.require_none(what)
    if isinstance(what, RunFolder):
        return _resolve_run(what, data, settings)
    if isinstance(what, Release):
        return _resolve_release(what, data, settings)
    chosen = _required(settings)
    inputs = test_inputs(data)
    shape = tuple(inputs.batch(slice(0, 1)).shape[1:])
    if isinstance(what, Subject):
        subject = what
    elif isinstance(what, str):
        known = getattr(inputs, "classes", None) or int(np.max(inputs.labels)) + 1
        foreign = ForeignModel(what, changed.weights, mean=changed.mean, std=changed.std)
        network, spec = build_foreign(foreign, shape, known)
        code = FactoryCode.from_factories(spec.user_factories)
        subject = Subject(network, _digest(network), what, code)
    elif isinstance(what, torch.nn.Module):
        subject = _of_module(what, changed, shape)
    elif callable(what):
        subject = _of_callable(what, changed, shape)
    else:
        raise UserError(
            "what: must be a torch module, a callable, 'package.module:factory', a RunFolder, a "
            f"Release or a path, got {type(what).__name__}"
        )
    if chosen.backend is None and models.may_hold_script(subject.model):
        # A trace would record one path through the user's code.
        chosen = chosen.model_copy(update={"backend": "eager"})
    return _with_classes(inputs, _answered(subject, inputs)), chosen, subject


def _resolve_run(
    run: RunFolder, data: Any, settings: Certificate | None
) -> tuple[DatasetLike, Certificate, Subject]:
    recipe = run.read_recipe()
    subject = load_subject(recipe, run)
    own = data is None
    inputs = load_test_records(recipe, data_source(recipe)) if own else test_inputs(data)
    inputs = _with_classes(inputs, recipe.data.num_classes)
    return inputs, _required(settings or recipe.certify), subject


def _resolve_release(
    release: Release, data: Any, settings: Certificate | None
) -> tuple[DatasetLike, Certificate, Subject]:
    about = release.description
    source = data_source_under(about.data, None)
    inputs = load_data(source, "test") if data is None else test_inputs(data)
    inputs = _with_classes(inputs, len(about.classes))
    return inputs, _required(settings or about.certificate), release.subject


def _is_factory(what: str | Path) -> bool:
    """Return whether a text names code or an architecture, not a path."""
    return (
        isinstance(what, str)
        and not Path(what).exists()
        and (":" in what or what in models.named_networks())
    )


def _at_path(path: Path, trusted_factory: str | None) -> RunFolder | Release | Subject:
    if is_release(path):
        return load_release(path, trusted_factory=trusted_factory)
    if (path / "model.json").is_file() and not (path / "run.json").exists():
        return Subject.load(path, trusted_factory)
    return open_run(str(path), Path("runs"))


def _of_module(module: nn.Module, changed: _Changed, shape: tuple[int, ...]) -> Subject:
    import torch

    from dpdist.models.outputs import Answers

    copied = changed.loaded(module)  # the caller's module stays in its mode
    if isinstance(copied, torch.jit.ScriptModule):  # which lacks some methods of a module
        copied = Answers(copied).eval()
    copied = changed.normalized(copied, shape)
    return Subject(copied, _digest(copied), type(module).__name__, _code_of(type(module)))


def _of_callable(
    function: Callable[..., Any], changed: _Changed, shape: tuple[int, ...]
) -> Subject:
    """Return a callable as a module. Raises UserError if workers could not receive it."""
    import cloudpickle

    from dpdist.models.outputs import Answers

    name = getattr(function, "__qualname__", type(function).__qualname__)
    if changed.weights is not None:
        raise UserError(
            f"weights: must be left out for {name}, which is not a module: load them into what it "
            "calls, or give the module"
        )
    code = _code_of(function if hasattr(function, "__module__") else type(function))
    try:
        cloudpickle.dumps(function)
    except Exception as error:  # whatever a user's object does
        raise UserError(
            f"what: {name}: must be a callable that can be pickled, as workers receive it, got "
            f"{type(error).__name__}: {error}"
        ) from error
    module = changed.normalized(Answers(function), shape).eval()
    return Subject(module, _digest(module if changed.mean else function), name, code)


def _code_of(what: Any) -> FactoryCode:
    """Return the code that each worker must have; it is empty if workers receive it by value."""
    module = getattr(what, "__module__", None) or "__main__"
    if module in MAIN or is_library(module):
        return FactoryCode()
    name = f"{module}:{getattr(what, '__qualname__', 'factory')}"
    try:
        code = FactoryCode.from_factories((name,))
    except UserError:  # no source to compare
        return FactoryCode()
    return code if code.modules else FactoryCode()


def _digest(classifier: Any) -> str:
    """Return a digest of everything that a classifier's answers depend on.

    If a part cannot be read, the digest is random: then no table is taken for that of a different
    classifier, and none is continued.
    """
    return object_digest(classifier) or secrets.token_hex(16)


def _answered(subject: Subject, inputs: DatasetLike) -> int:
    """Return the number of the classifier's classes. Raises UserError if it fails on an input."""
    some = inputs.batch(slice(0, 2))
    try:
        return require_logits(subject.model, some)
    except Exception as error:  # whatever a user's model does
        first = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"{subject.where}: must return logits (inputs, classes) for inputs of shape "
            f"{tuple(some.shape)}, got {type(error).__name__}: {first}"
        ) from error


# --- the inputs -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LabeledInputs:
    """Inputs of a source by position, with labels (N,) int64 and a digest of all of them."""

    source: Any
    labels: np.ndarray
    fingerprint: str
    classes: int

    def batch(self, indices: np.ndarray | slice) -> torch.Tensor:
        """Return inputs (B, ...) as float32; those of uint8 divided by 255."""
        return as_numbers(self.source.batch(indices))


def as_numbers(inputs: Any) -> torch.Tensor:
    """Return inputs as float32, those of uint8 divided by 255. Raises UserError for others."""
    import torch

    if not isinstance(inputs, torch.Tensor):
        raise UserError(
            "data: must have one input per record, a tensor, got several by name; give `inputs` to "
            "dpdist.as_records"
        )
    numbers = inputs.to(torch.float32)
    return numbers / 255 if inputs.dtype == torch.uint8 else numbers


def test_inputs(data: Any) -> DatasetLike:
    """Return inputs with labels, from anything that `certify` takes. Raises UserError."""
    if data is None:
        raise UserError(
            "data: must be given for a model without a run: the inputs and their labels"
        )
    if isinstance(data, Dataset | LabeledInputs):
        return data
    if all(hasattr(data, name) for name in ("classes", "fingerprint", "labels", "batch")):
        found: DatasetLike = data
        return found
    if isinstance(data, str | Path):
        return _by_name(data)
    from dpdist.data.adapters import as_records

    records = as_records(data)
    if not records.has_targets:
        raise UserError("data: must have a label for each input: give (X, y)")
    labels = records.targets(slice(0, len(records))).numpy()
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise UserError(
            f"data: labels must be whole numbers from 0 on, one per input, got {labels.dtype} of "
            f"shape {labels.shape}"
        )
    fingerprint = records.keyed_fingerprint(b"dpdist.test-inputs")  # a public key: inputs are too
    return LabeledInputs(records, labels.astype(np.int64), fingerprint, int(labels.max()) + 1)


def _by_name(data: str | Path) -> DatasetLike:
    if isinstance(data, str) and data in BUILT_IN and not Path(data).exists():
        return load_data(DataSource(data, BUILT_IN[data]), "test")
    with tempfile.TemporaryDirectory(prefix="dpdist-inputs-") as aside:
        found = find_test_inputs(Path(data), Path(aside) / "inputs")
        columns = Columns(found.image or "image", found.label, found.features)
        source = DataSource(
            found.name, found.classes, found.root, test=found.split, columns=columns,
            class_names=found.names,
        )  # fmt: skip
        return load_data(source, "test")


def _with_classes(inputs: DatasetLike, classes: int) -> DatasetLike:
    """Return the inputs with the classifier's number of classes.

    Raises UserError for a label beyond them.
    """
    most = int(np.max(inputs.labels)) + 1
    if most > classes:
        raise UserError(
            f"data: labels must be 0 to {classes - 1}, the classifier's classes, got {most - 1}"
        )
    if inputs.classes == classes:
        return inputs
    labels = np.asarray(inputs.labels)
    return LabeledInputs(inputs, labels, inputs.fingerprint, classes)
