"""Arrays that may not be written become tensors without a word on the user's terminal."""

from __future__ import annotations

import numpy as np
import torch

from dpdist.core.optional_imports import array_to_tensor


def test_what_may_not_be_written_is_copied_and_all_else_shared(recwarn) -> None:
    own = np.arange(4, dtype=np.float32)
    array_to_tensor(own)[0] = 9
    assert own[0] == 9
    own.flags.writeable = False
    copied = array_to_tensor(own)
    copied[0] = 5
    assert own[0] == 9 and torch.equal(copied[1:], torch.tensor([1.0, 2.0, 3.0]))
    assert not recwarn.list
