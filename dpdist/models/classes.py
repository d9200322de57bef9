"""The one place where logits become classes.

The argmax of a row that holds NaN is a constant, and of two infinities the first: such a row would
be certified as a class with the largest radius there is. So a row of logits that is not finite has
no class; whoever counts, scores or votes takes that for an outcome of its own, which nobody
selects.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_CLASS = -1


def softmax_scores(logits: Tensor) -> Tensor:
    """Return the softmax of each row, 0 in every class where a logit is not finite.

    logits: (..., classes). Returns scores in [0, 1] of the same shape, which add up to at most 1.
    """
    finite = logits.isfinite().all(-1, keepdim=True)
    return torch.softmax(logits, -1).masked_fill(~finite, 0.0)


def predicted_classes(logits: Tensor) -> Tensor:
    """Return the class with the largest logit of each row, NO_CLASS where a logit is not finite.

    Args:
        logits: (..., classes), of any floating-point format.

    Returns:
        int64 (...). Of equal largest logits the first one counts.

    Example:
        >>> predicted_classes(torch.tensor([[0.0, 2.0], [0.0, float("nan")]])).tolist()
        [1, -1]
    """
    return logits.argmax(-1).masked_fill(~logits.isfinite().all(-1), NO_CLASS)
