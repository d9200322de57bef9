"""The code of a model of one's own is part of it: another function is another model."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import certificates
from support.certificates import Data
from support.local_execution import run_without_ray

from dpdist import models
from dpdist.attacks.job import Attacker, AttackJob, choose_backend
from dpdist.attacks.settings import AttackSettings
from dpdist.certification import job
from dpdist.certification.cohen import Cohen
from dpdist.certification.subject import Subject
from dpdist.core.errors import UserError
from dpdist.models.factory_code import FactoryCode, require_current_sources

SOURCES = {
    "mine.py": """
import json, os.path
from typing import TYPE_CHECKING
import numpy
from helpers import layers
from package.inner import scale
if TYPE_CHECKING:
    import only_for_types

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
    "only_for_types.py": "X = 1\n",
    "unrelated.py": "X = 1\n",
}
COVERED = [
    "helpers", "helpers.deep", "helpers.deep.one", "helpers.far", "helpers.layers", "helpers.sizes",
    "late", "mine", "package", "package.inner",
]  # fmt: skip
TOPS = {"far", "mine", "late", "helpers", "package", "only_for_types", "unrelated"}
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SOURCES if n.removesuffix(".py") != "unused"])
def test_changed_code_is_another_model(
    tmp_path: Path, use: Callable[[Path], None], name: str
) -> None:
    use(write(tmp_path / "code"))
    first = saved(tmp_path / "first")
    (tmp_path / "code" / name).write_text(SOURCES[name] + "\nCHANGED = True\n")
    use(tmp_path / "code")
    second = saved(tmp_path / "second")
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    same = module not in COVERED
    assert same == (name in ("helpers/unused.py", "only_for_types.py", "unrelated.py"))
    assert (models.model_hash(first) == models.model_hash(second)) == same
    if same:
        models.load(first, trusted_factory="mine:net")
    else:
        with pytest.raises(UserError, match=rf"model\.name: .* {module} of mine:net"):
            models.load(first, trusted_factory="mine:net")
    models.load(second, trusted_factory="mine:net")


@pytest.mark.e2e
def test_the_same_code_is_the_same_wherever_it_lies(
    tmp_path: Path, use: Callable[[Path], None]
) -> None:
    use(write(tmp_path / "code"))
    model = saved(tmp_path / "model")
    elsewhere = write(tmp_path / "other host" / "deeper")
    for path in elsewhere.rglob("*.py"):  # by another editor
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    use(elsewhere)
    models.load(model, trusted_factory="mine:net")
    assert models.model_hash(saved(tmp_path / "again")) == models.model_hash(model)
    # In another process, from its own working directory.
    program = (
        "import sys; from dpdist import models; from pathlib import Path;"
        "models.load(Path(sys.argv[1]), trusted_factory='mine:net');"
        "from dpdist.models.factory_code import FactoryCode;"
        "print(FactoryCode.from_factories(('mine:net',)).modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)],
        cwd=tmp_path / "code", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(models.read_factory_code(model).modules)


def test_what_a_process_has_imported_is_what_it_executes(
    tmp_path: Path, use: Callable[[Path], None]
) -> None:
    use(write(tmp_path / "code"))
    first = saved(tmp_path / "first")
    (tmp_path / "code" / "mine.py").write_text(SOURCES["mine.py"] + "# changed\n")
    # The old code is still there, executed and stated; once it is imported anew it is not.
    assert models.model_hash(saved(tmp_path / "second")) == models.model_hash(first)
    models.load(first, trusted_factory="mine:net")
    importlib.reload(sys.modules["mine"])
    with pytest.raises(UserError, match="mine of mine:net"):
        models.load(first, trusted_factory="mine:net")


def test_code_that_was_edited_since_it_was_imported_is_noticed(
    tmp_path: Path, use: Callable[[Path], None]
) -> None:
    """A training in this process would execute the old one, on Ray the new one."""
    use(write(tmp_path / "code"))
    require_current_sources("mine:net", "run")
    saved(tmp_path / "first")
    require_current_sources("mine:net", "run")
    (tmp_path / "code" / "late.py").write_text(SOURCES["late.py"] + "# changed\n")
    with pytest.raises(UserError, match=r"^run: late of mine:net"):
        require_current_sources("mine:net", "run")
    (tmp_path / "code" / "late.py").write_text(SOURCES["late.py"])
    require_current_sources("mine:net", "run")


def test_installed_code_covers_its_own_package(tmp_path: Path, use: Callable[[Path], None]) -> None:
    """In site-packages everything lies beside everything."""
    use(write(tmp_path / "lib" / "site-packages"))
    assert list(FactoryCode.from_factories(("mine:net",)).modules) == ["mine"]
    assert list(FactoryCode.from_factories(("helpers.layers:linear",)).modules) == [
        "helpers", "helpers.deep", "helpers.deep.one", "helpers.far", "helpers.layers",
        "helpers.sizes",
    ]  # fmt: skip


# ---- what is made of it


SETTINGS = Cohen(sigma=0.5, n0=20, n=200, batch=100, seed="5", backend="eager")
ATTACK = AttackSettings(norm="l2", sizes=(0.2,), attacks=("fgsm",), seed="1")


def attacked(model: Path, output: Path) -> Any:
    return certificates.attack_model(model, Data(), ATTACK, output, trusted_factory="mine:net")


def certified(model: Path, output: Path, **more: Any) -> Any:
    settings = SETTINGS.model_copy(update=more)
    return certificates.certify(model, Data(), settings, output, trusted_factory="mine:net")


def test_a_finished_table_is_refused_for_changed_code(
    tmp_path: Path, use: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_without_ray(monkeypatch)
    use(write(tmp_path / "code"))
    model = saved(tmp_path / "model")
    table = certified(model, tmp_path / "out")
    attacked(model, tmp_path / "attack")
    (tmp_path / "code" / "package" / "inner.py").write_text("scale = -1.0\n")
    use(tmp_path / "code")
    for again in (
        lambda: certified(model, tmp_path / "out"),
        lambda: certified(model, tmp_path / "new"),
        lambda: attacked(model, tmp_path / "attack"),
    ):
        with pytest.raises(UserError, match=r"package\.inner of mine:net"):
            again()
    assert not (tmp_path / "new").exists()
    shutil.copytree(write(tmp_path / "back"), tmp_path / "code", dirs_exist_ok=True)
    use(tmp_path / "code")
    assert certified(model, tmp_path / "out").equals(table)


def test_a_worker_with_other_code_does_nothing(
    tmp_path: Path, use: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has imported the old code; a worker imports what lies there now."""
    run_without_ray(monkeypatch)
    use(write(tmp_path / "code"))
    model = saved(tmp_path / "model")
    certifying = job.CertificationJob(Subject.load(model, "mine:net"), Data(), SETTINGS)._assignment
    attacking = AttackJob(Subject.load(model, "mine:net"), Data(), ATTACK).assignment
    certifying.on_device()
    Attacker(attacking)
    (tmp_path / "code" / "late.py").write_text(SOURCES["late.py"] + "# changed\n")
    use(tmp_path / "code")
    for begin in (
        certifying.on_device,
        lambda: Attacker(attacking),
        lambda: choose_backend(attacking.counting),
    ):
        with pytest.raises(UserError, match=r"this worker: .* late of mine:net"):
            begin()


LAYERS = """
from torch import nn
def net(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(36, classes))
"""
LAZY = """
import ast
import importlib
def __getattr__(name):
    if name == "net":
        return getattr(importlib.import_module({module}), name)
    raise AttributeError(name)
"""


@pytest.mark.parametrize(
    ("sources", "factory", "changed"),
    [
        ({"mine.py": "def net(*about):\n    import importlib\n"
          "    return importlib.import_module('late').net(*about)\n", "late.py": LAYERS},
         "mine:net", "late.py"),
        ({"mine.py": "net = __import__('late').net\n", "late.py": LAYERS}, "mine:net", "late.py"),
        ({"helpers/__init__.py": LAZY.format(module="'helpers.far'"), "helpers/far.py": LAYERS},
         "helpers:net", "helpers/far.py"),
        ({"helpers/__init__.py": LAZY.format(module="'.far', 'helpers'"), "helpers/far.py": LAYERS},
         "helpers:net", "helpers/far.py"),
        ({"helpers/deep/one.py": "import package.inner.layers as far\nnet = far.net\n",
          "package/inner/layers.py": LAYERS}, "helpers.deep.one:net", "package/inner/layers.py"),
    ],
    ids=["import_module", "__import__", "a lazy package", "a lazy relative import", "namespaces"],
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
