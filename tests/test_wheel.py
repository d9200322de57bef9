"""The wheel holds what the checkout holds; dpdist works wherever it lies, beside a user's own files
that have the names of our folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.wheel import INSTALL, build, build_wheel

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """\
import cluster, tuning
import dpdist
from dpdist.cluster.cluster_file import templates
from dpdist.tuning import space
assert set(templates()) == {{"aws", "gcp", "local", "kuberay", "rayjob", "slurm"}}
assert cluster.OWNER == tuning.OWNER == "the user"
if __name__ == "__main__":
    print(dpdist.__file__)
    if {runs}:
        folder = dpdist.run("small.yaml")
        print(dpdist.load_results(folder).recipe.name)
"""
SMALL = """\
data: {name: digits}
model: {name: small-cnn, options: {width: 4}}
privacy: {noise_multiplier: 1.0, delta: 1.0e-4}
training: {batch_size: 100, steps: 3, learning_rate: 0.5}
certify: {sigma: 0.25, n: 100, max_inputs: 4, radii: [0.1]}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


PLACES = [
    "checkout",
    *(pytest.param(way, marks=pytest.mark.e2e) for way in ("--target", "--user")),
]


@pytest.fixture(scope="module", params=PLACES)
def place(request, tmp_path_factory) -> tuple[str, Path, dict[str, str]]:
    """(interpreter, where dpdist lies, what the environment says of it)."""
    if request.param == "checkout":
        return sys.executable, ROOT, {"PYTHONPATH": str(ROOT)}
    wheel = str(request.getfixturevalue("wheel"))
    folder = tmp_path_factory.mktemp("place")
    if request.param == "--target":
        pip = [sys.executable, *INSTALL, "--target", str(folder), wheel]
        subprocess.run(pip, check=True, capture_output=True)
        return sys.executable, folder, {"PYTHONPATH": str(folder)}
    # A virtual environment has no user's folder; the libraries are those of this one.
    base = getattr(sys, "_base_executable", sys.executable)
    environment = {"PYTHONUSERBASE": str(folder), "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    pip = [sys.executable, *INSTALL, "--user", wheel]
    if sys.prefix != sys.base_prefix:
        pip[0] = base
    done = subprocess.run(pip, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip install --user: {done.stderr[-200:]}")
    return base, folder, environment | {"PYTHONPATH": os.pathsep.join(_libraries(folder))}


def _libraries(site: Path) -> list[str]:
    """The user's folder first, as it would be without PYTHONPATH; then where the libraries are."""
    user = sysconfig.get_path("purelib", "posix_user", {"userbase": str(site)})
    return [user, *(p for p in sys.path if p.endswith("site-packages"))]


@pytest.fixture
def run(place, tmp_path):
    """Run Python beside a user's own cluster.py and tuning.py: its standard output."""
    for name in ("cluster", "tuning"):
        (tmp_path / f"{name}.py").write_text('OWNER = "the user"\n')
    (tmp_path / "small.yaml").write_text(SMALL)
    interpreter, _, environment = place

    def call(*arguments: str) -> str:
        command, env = [interpreter, *arguments], {**os.environ, **environment}
        done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


def test_the_wheel_holds_every_source_and_resource(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {"dpdist/py.typed"}
    for folder, at in (("dpdist", ""), ("cluster", "dpdist/"), ("tuning", "dpdist/")):
        for pattern in ("*.py", "*.html", "*.md", "*.yaml"):
            found = (ROOT / folder).rglob(pattern)
            wanted |= {at + str(path.relative_to(ROOT)) for path in found}
    assert wanted - names == set()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"dpdist"}


@pytest.mark.e2e
def test_the_command_line(run):
    """Recipes and packages are found, and none of them is the user's."""
    assert len(run("-m", "dpdist", "recipes").splitlines()) == len(
        list(ROOT.glob("dpdist/recipes/*"))
    )
    run("-m", "dpdist", "run", "small.yaml", "--dry-run")


def test_a_script_beside_a_user_s_own_files(run, place, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(runs=False))
    assert run("script.py").startswith(str(place[1]))


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_workers_of_ray_beside_a_user_s_own_files(run, place, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(runs=True))
    where, name = run("script.py").split()
    assert where.startswith(str(place[1])) and name == "small"


@pytest.mark.e2e
def test_no_module_is_loaded_under_two_names():
    """Also when everything is imported, in a checkout, where links lead to two folders."""
    code = (
        "import importlib, os, pkgutil, sys, dpdist\n"
        "for found in pkgutil.walk_packages(dpdist.__path__, 'dpdist.'):\n"
        "    if found.name != 'dpdist.__main__': importlib.import_module(found.name)\n"
        "files = [getattr(m, '__file__', None) for m in list(sys.modules.values())]\n"
        "files = [os.path.realpath(f) for f in files if f]\n"
        "ours = [f for f in files if f.startswith(tuple(sys.argv[1:]))]\n"
        "assert len(ours) > 150 and len(ours) == len(set(ours))\n"
        "import cluster"
    )
    folders = [f"{ROOT / name}{os.sep}" for name in ("dpdist", "cluster", "tuning")]
    here = [sys.executable, "-c", code, *folders]  # not an environment inside the checkout
    done = subprocess.run(here, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.endswith(
        "this folder is the package dpdist.cluster: import it by that name\n"
    )


@pytest.mark.e2e
def test_an_sdist_is_whole_and_passes_its_own_tests(tmp_path):
    """With the links of the checkout; its wheel is the checkout's."""
    source = tmp_path / "source"
    left = shutil.ignore_patterns(
        ".git", ".venv", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "build"
    )
    shutil.copytree(ROOT, source, symlinks=True, ignore=left)
    for made_here in ("runs", "site"):  # by commands and `make docs`; git ignores them
        shutil.rmtree(source / made_here, ignore_errors=True)
    whole = {str(path.relative_to(source)) for path in source.rglob("*") if not path.is_dir()}
    made = build(source, "sdist", tmp_path)
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    assert whole - names == set()
    unpacked = tmp_path / made.name.removesuffix(".tar.gz")
    links = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_symlink()}
    assert links and all((unpacked / link).is_symlink() for link in links)
    tests = ["tests/test_start_up.py", "tests/test_recipe.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=unpacked, env={**os.environ, "PYTHONPATH": str(unpacked)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    wheels = [zipfile.ZipFile(build(each, "wheel", tmp_path)) for each in (source, unpacked)]
    first, second = ({n for n in each.namelist() if "dist-info" not in n} for each in wheels)
    assert first == second
