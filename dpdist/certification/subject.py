"""The model of a certification, an attack or a prediction.

Whether it is of a run, a release, a module, a callable or a function by name, it is loaded once and
hashed once, and every worker receives the same object.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dpdist.models.factory_code import FactoryCode

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn


class DatasetLike(Protocol):
    """The part of a data set that jobs read: ``dpdist.data.Dataset`` has it."""

    @property
    def classes(self) -> int:
        """Return the number of classes."""

    @property
    def fingerprint(self) -> str:
        """Return the hash that identifies the records."""

    @property
    def labels(self) -> np.ndarray:
        """Return the labels: int (N,)."""

    def batch(self, indices: np.ndarray | slice) -> Any:
        """Return the inputs of these indices as a tensor (B, ...)."""


class NamedDatasetLike(DatasetLike, Protocol):
    """A data set with a name for messages."""

    @property
    def name(self) -> str:
        """Return the name of the data set."""


@dataclass(frozen=True)
class Subject:
    """A model with all that a job needs to know of it.

    model: in evaluation mode. digest: hex, of everything that its answers depend on; a continued
    job must have the same. where: first words of error messages. code: that each worker must have.
    """

    model: nn.Module
    digest: str
    where: object
    code: FactoryCode = field(default_factory=FactoryCode)

    @classmethod
    def load(
        cls, folder: Path, trusted_factory: str | None = None, digest: str | None = None
    ) -> Subject:
        """Return the model in a folder. Raises UserError.

        digest: the hash of its files, if the caller has computed it.
        """
        from dpdist import models

        return cls(
            models.load(folder, trusted_factory=trusted_factory),
            digest or models.model_hash(folder),
            folder,
            models.read_factory_code(folder),
        )


def require_logits(model: nn.Module, batch: Tensor, classes: int | None = None) -> int:
    """Return the number of classes of a model, from its answer to a batch.

    Raises ValueError unless it returns finite logits for each input and class. classes: the
    required number; None: any number.
    """
    import torch

    from dpdist.models import fresh_copy

    with torch.inference_mode():
        logits = fresh_copy(model.eval())(batch)  # a copy, as a model may keep state of a batch
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if not isinstance(shape, tuple) or len(shape) != 2 or shape[0] != len(batch):
        raise ValueError(f"it returns {shape}, not logits ({len(batch)}, classes)")
    if shape[1] != (classes or shape[1]):
        raise ValueError(f"it returns {shape} for a batch, not {(len(batch), classes)}")
    if not bool(torch.isfinite(logits).all()):
        # The argmax of NaN is a constant, which would be certified with the largest radius.
        raise ValueError("its outputs are not finite numbers (did the training diverge?)")
    return int(shape[1])
