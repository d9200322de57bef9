"""The code of a model of one's own is part of it: another function is another model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import certificates
from support.certificates import Data

from dpdist import models
from dpdist.attacks.job import Attacker, AttackJob
from dpdist.attacks.settings import AttackSettings
from dpdist.certification import job
from dpdist.certification.cohen import Cohen
from dpdist.certification.subject import Subject
from dpdist.core.errors import UserError
from dpdist.models.factory_code import FactoryCode, require_current_sources

SOURCES = {
    "mine.py": """
import json, os.path
from helpers import layers
from package.inner import scale

def net(input_shape, classes):
    import late
    return late.net(layers.linear(input_shape, classes), scale)
""",
    "late.py": """
from torch import nn

class Scaled(nn.Module):
    def __init__(self, inner, scale):
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, x):
        return self.scale * self.inner(x)

def net(inner, scale):
    return Scaled(inner, scale)
""",
    "helpers/__init__.py": "",
    "helpers/layers.py": """
import math
from torch import nn
from . import sizes
from .deep import one
from .sizes import *

def linear(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(sizes.numbers(input_shape), classes))
""",
    "helpers/sizes.py": "from math import prod as numbers\n",
    "helpers/deep/__init__.py": "",
    "helpers/deep/one.py": "from ..far import X\n",
    "helpers/far.py": "X = 1\n",
    "helpers/unused.py": "X = 1\n",
    "package/__init__.py": "from .inner import scale\n",
    "package/inner.py": "scale = 1.0\n",
}
COVERED = [
    "helpers", "helpers.deep", "helpers.deep.one", "helpers.far", "helpers.layers", "helpers.sizes",
    "late", "mine", "package", "package.inner",
]  # fmt: skip
TOPS = {"mine", "late", "helpers", "package"}
SPEC = models.ModelSpec("mine:net", (1, 6, 6), 3)


def forget() -> None:
    """As in a process that has not imported them yet."""
    for name in [name for name in sys.modules if name.partition(".")[0] in TOPS]:
        del sys.modules[name]
    importlib.invalidate_caches()


def write(folder: Path, **changes: str) -> Path:
    for name, text in SOURCES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name, text in changes.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """From now on the modules lie in this folder."""
    before = list(sys.path)

    def used(folder: Path) -> None:
        monkeypatch.setattr(sys, "path", [str(folder), *before])
        forget()

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield used
    forget()


def saved(folder: Path) -> Path:
    models.save(models.initialize(SPEC, 1), SPEC, folder)
    return folder


@pytest.mark.parametrize(
    "name", ["late.py", "helpers/__init__.py", "helpers/far.py", "helpers/unused.py"]
)
def test_changed_code_is_another_model(tmp_path, use, name):
    use(write(tmp_path / "code"))
    first = saved(tmp_path / "first")
    (tmp_path / "code" / name).write_text(SOURCES[name] + "\nCHANGED = True\n")
    use(tmp_path / "code")
    second = saved(tmp_path / "second")
    same = name == "helpers/unused.py"
    assert (models.model_hash(first) == models.model_hash(second)) == same
    if same:
        models.load(first, trusted_factory="mine:net")
    else:
        with pytest.raises(UserError, match=r"model\.name: "):
            models.load(first, trusted_factory="mine:net")
    models.load(second, trusted_factory="mine:net")


def test_the_same_code_is_the_same_wherever_it_lies(tmp_path, use):
    use(write(tmp_path / "code"))
    model = saved(tmp_path / "model")
    elsewhere = write(tmp_path / "other host" / "deeper")
    for path in elsewhere.rglob("*.py"):  # by another editor
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    use(elsewhere)
    models.load(model, trusted_factory="mine:net")
    assert models.model_hash(saved(tmp_path / "again")) == models.model_hash(model)
    assert list(models.read_factory_code(model).modules) == COVERED


def test_code_that_was_edited_since_it_was_imported_is_noticed(tmp_path, use):
    """A training in this process would execute the old one, on Ray the new one."""
    use(write(tmp_path / "code"))
    require_current_sources("mine:net", "run")
    saved(tmp_path / "first")
    require_current_sources("mine:net", "run")
    (tmp_path / "code" / "late.py").write_text(SOURCES["late.py"] + "# changed\n")
    with pytest.raises(UserError, match=r"^run: "):
        require_current_sources("mine:net", "run")


# ---- what is made of it


SETTINGS = Cohen(sigma=0.5, n0=20, n=200, batch=100, seed="5", backend="eager")
ATTACK = AttackSettings(norm="l2", sizes=(0.2,), attacks=("fgsm",), seed="1")


def attacked(model: Path, output: Path) -> Any:
    return certificates.attack_model(model, Data(), ATTACK, output, trusted_factory="mine:net")


def certified(model: Path, output: Path) -> Any:
    return certificates.certify(model, Data(), SETTINGS, output, trusted_factory="mine:net")


def test_a_finished_table_is_refused_for_changed_code(tmp_path, use, here):
    use(write(tmp_path / "code"))
    model = saved(tmp_path / "model")
    certified(model, tmp_path / "out")
    attacked(model, tmp_path / "attack")
    (tmp_path / "code" / "package" / "inner.py").write_text("scale = -1.0\n")
    use(tmp_path / "code")
    for again in (
        lambda: certified(model, tmp_path / "out"),
        lambda: certified(model, tmp_path / "new"),
        lambda: attacked(model, tmp_path / "attack"),
    ):
        with pytest.raises(UserError):
            again()
    assert not (tmp_path / "new").exists()


def test_a_worker_with_other_code_does_nothing(tmp_path, use, here):
    """The driver has imported the old code; a worker imports what lies there now."""
    use(write(tmp_path / "code"))
    model = saved(tmp_path / "model")
    certifying = job.CertificationJob(Subject.load(model, "mine:net"), Data(), SETTINGS)._assignment
    attacking = AttackJob(Subject.load(model, "mine:net"), Data(), ATTACK).assignment
    certifying.on_device()
    Attacker(attacking)
    (tmp_path / "code" / "late.py").write_text(SOURCES["late.py"] + "# changed\n")
    use(tmp_path / "code")
    for begin in (certifying.on_device, lambda: Attacker(attacking)):
        with pytest.raises(UserError):
            begin()


LAYERS = """
from torch import nn
def net(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(36, classes))
"""


@pytest.mark.parametrize(
    ("sources", "factory", "changed"),
    [
        ({"mine.py": "def net(*about):\n    import importlib\n"
          "    return importlib.import_module('late').net(*about)\n", "late.py": LAYERS},
         "mine:net", "late.py"),
        ({"helpers/deep/one.py": "import package.inner.layers as far\nnet = far.net\n",
          "package/inner/layers.py": LAYERS}, "helpers.deep.one:net", "package/inner/layers.py"),
    ],
    ids=["import_module", "namespaces"],
)  # fmt: skip
def test_modules_that_are_named_in_text_are_covered(tmp_path, use, sources, factory, changed):
    digests = set()
    for text in ("", "\nCHANGED = True\n"):
        for name, source in sources.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(source + text * (name == changed))
        use(tmp_path)
        code = FactoryCode.from_factories((factory,)).modules
        assert changed.removesuffix(".py").replace("/", ".") in code
        models.initialize(models.ModelSpec(factory, (1, 6, 6), 3), 1)
        digests.add(tuple(code.items()))
    assert len(digests) == 2
