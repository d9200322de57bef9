"""Labels that spread over a graph of public inputs: from those that teachers gave to all others.

Zhou et al., "Learning with Local and Global Consistency" (NIPS 2003), in closed form, with the
class mass normalisation of Zhu et al. (ICML 2003). Not scikit-learn's LabelSpreading, whose graph
of neighbours is directed and unweighted, and which normalises no class: on MNIST's public inputs
three to eight points fewer labels right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from dpdist.base.errors import UserError
from dpdist.base.fields import SMALLEST, Count, Number, Section

if TYPE_CHECKING:
    from collections.abc import Callable

    from scipy.sparse import csr_matrix
    from torch import Tensor

    from dpdist.data import Dataset

FEATURES = "method.spreading.features"
_BATCH, _TOLERANCE = 500, 1e-8


class Spreading(Section):
    """How released labels spread over all public inputs: each gets one that the ties lead to.

    Only public inputs and released labels are read: post-processing, and free. Each input is tied
    to its `neighbours` nearest ones by `features`: of `inputs` as they are, or the fixed
    `scattering` of images (the model of that name). alpha: how far a label goes; an answer counts
    1 - alpha against its neighbours' word, so that a wrong one is overruled. equal_classes: each
    class's scores are divided by their sum, which takes classes for equally common: a class that is
    ten times rarer than others is then given to many of them (docs/evidence/pate.md has figures).
    """

    features: Literal["inputs", "scattering"] = "inputs"
    neighbours: Count = 10
    alpha: Annotated[float, Number, Field(ge=SMALLEST, le=0.9999)] = 0.99
    equal_classes: bool = True

    def check(self, public: Dataset, where: str) -> None:
        """Raise UserError where there are too few public inputs, or no such features of them."""
        if len(public) <= self.neighbours:
            raise UserError(
                f"{where}: method.spreading.neighbours: must be < {len(public):,}, the public "
                f"inputs of {public.name}, got {self.neighbours:,}"
            )
        if self.features != "inputs":
            try:
                _features(self.features, public)
            except UserError as error:
                raise UserError(f"{where}: {error}") from error

    def graph(self, public: Dataset) -> csr_matrix:
        """The ties of all public inputs, which passed `check`."""
        transform = _features(self.features, public)
        found = [
            transform(public.batch(slice(start, start + _BATCH)))
            for start in range(0, len(public), _BATCH)
        ]
        return ties(np.concatenate(found), self.neighbours)

    def labels(
        self, graph: csr_matrix, asked: np.ndarray, told: np.ndarray, classes: int
    ) -> np.ndarray:
        """The label of every public input, int64 (N,), -1 where none reaches it, or so faintly that
        it is lost in the solution's tolerance (far along thin ties, and where alpha is small).
        asked (A,): places of the inputs that were answered; told (A,): their released labels."""
        scores = spread(graph, asked, told, classes, self.alpha)
        if self.equal_classes:
            masses = scores.sum(axis=0)
            scores = scores / np.where(masses > 0, masses, 1.0)  # of a class that nobody named: 0
        return np.where(scores.max(axis=1) > 0, scores.argmax(axis=1), -1)


def _features(name: str, public: Dataset) -> Callable[[Tensor], np.ndarray]:
    """Of a batch of inputs (B, ...), float64 (B, D)."""
    import torch

    if name == "inputs":
        return lambda batch: batch.flatten(1).double().numpy()
    from dpdist.models.scattering import scattering

    shape = public.input_shape
    if len(shape) != 3:
        raise UserError(f"{FEATURES}: scattering is of images, {public.name} has inputs of {shape}")
    try:
        module = scattering(shape, 1)[0]
    except ValueError as error:
        raise UserError(f"{FEATURES}: scattering of {shape}: {error}; take inputs") from error

    def transform(batch: Tensor) -> np.ndarray:
        with torch.inference_mode():
            return module(batch).double().numpy()

    return transform


def ties(points: np.ndarray, neighbours: int) -> csr_matrix:
    """S = D^(-1/2) W D^(-1/2), sparse (N, N), of points (N, D): w_ij = exp(-d_ij^2 / (2 s^2)) for
    the nearest `neighbours` of each, s half the mean distance of the farthest; W is their mean with
    its transpose."""
    from scipy import sparse
    from sklearn.neighbors import NearestNeighbors

    distances, near = NearestNeighbors(n_neighbors=neighbours).fit(points).kneighbors()
    width = max(float(distances[:, -1].mean()) / 2, 1e-12)
    weights = np.exp(-((distances / width) ** 2) / 2)
    rows = np.repeat(np.arange(len(points)), neighbours)
    shape = (len(points), len(points))
    one_way = sparse.csr_matrix((weights.ravel(), (rows, near.ravel())), shape=shape)
    both = (one_way + one_way.T) / 2
    roots = np.sqrt(np.maximum(np.asarray(both.sum(axis=1)).ravel(), 1e-300))
    scale = sparse.diags(1 / roots)
    return (scale @ both @ scale).tocsr()


def spread(
    graph: csr_matrix, asked: np.ndarray, told: np.ndarray, classes: int, alpha: float
) -> np.ndarray:
    """Scores F = (I - alpha S)^(-1) Y, float64 (N, classes): Y is 1 where an input was told a
    class. The matrix is positive definite, so conjugate gradients solve it, to a residual of 1e-8
    of Y's norm."""
    from scipy import sparse
    from scipy.sparse.linalg import cg

    count = graph.shape[0]
    given = np.zeros((count, classes))
    given[asked, told] = 1.0
    system = sparse.identity(count, format="csr") - alpha * graph
    columns = [cg(system, given[:, each], rtol=_TOLERANCE)[0] for each in range(classes)]
    return np.maximum(np.stack(columns, axis=1), 0.0)
