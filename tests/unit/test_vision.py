"""torchvision imports on a CPU-only torch, directly and behind our back, in fresh processes."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.e2e
@pytest.mark.parametrize(
    "code",
    [
        "from dpdist.core.optional_imports import import_torchvision; "
        "import_torchvision('models').resnet18()",
        "import dpdist, torchvision.transforms",
    ],
)
def test_torchvision_can_be_imported(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
