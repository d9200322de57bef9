"""torchvision imports on a CPU-only torch, directly and behind our back, in fresh processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.whole


@pytest.mark.long
@pytest.mark.parametrize(
    "code",
    [
        "from dpdist.core.optional_imports import import_torchvision; "
        "import_torchvision('models').resnet18()",
        "from dpdist.core import optional_imports as own; own.install_torchvision_hook(); "
        "own.install_torchvision_hook(); import torchvision.transforms; own.import_torchvision()",
        "from dpdist.models.spec import import_factory; "
        "import_factory('importlib:import_module')('torchvision')",
    ],
)
def test_torchvision_can_be_imported(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_setup_hook_costs_no_import():
    """Every process that Ray starts runs it, its own actors included."""
    code = (
        "import sys; from dpdist.core.optional_imports import install_torchvision_hook as install; "
        "install(); "
        "print({'torch', 'torchvision'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
