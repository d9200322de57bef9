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
        "from dpdist.core import optional_imports as own; own.install_torchvision_hook(); "
        "own.install_torchvision_hook(); import torchvision.transforms; own.import_torchvision()",
        "from dpdist.models.spec import import_factory; "
        "import_factory('importlib:import_module')('torchvision')",
    ],
)
def test_torchvision_can_be_imported(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ASKING = """
import importlib.util, sys
import dpdist
print(importlib.util.find_spec("torchvision") is not None, "torch" in sys.modules)
sys.path[:] = [each for each in sys.path if "site-packages" not in each]
sys.path_importer_cache.clear()
print(importlib.util.find_spec("torchvision"))
"""


def test_asking_whether_torchvision_is_installed_imports_nothing_and_does_not_fail():
    """As transformers asks, with torchvision and without."""
    done = subprocess.run([sys.executable, "-c", ASKING], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "None"], done.stderr


def test_setup_hook_costs_no_import():
    """Every process that Ray starts runs it, its own actors included."""
    code = (
        "import sys; from dpdist.core.optional_imports import install_torchvision_hook as install; "
        "install(); "
        "print({'torch', 'torchvision'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
