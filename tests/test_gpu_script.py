"""`benchmarks/gpu/gpu.py` needs torch and what its head names, no Ray; parts end alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.benchmarks import BENCHMARKS

GPU = BENCHMARKS / "gpu"
# What the wheels of the head bring along, torch's own included, by module.
NEEDED = {
    "torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe",
    "fsspec", "filelock", "tqdm", "opt_einsum", "numpy", "scipy", "pydantic", "pydantic_core",
    "annotated_types", "typing_inspection", "typing_extensions", "yaml", "cryptography", "cffi",
    "cython_runtime", "psutil", "optree", "packaging", "setuptools", "pkg_resources", "distutils",
}  # fmt: skip
ALONE = """
import sys
needed, own = set(sys.argv[1].split(",")), {"dpdist", "_common", "_networks", "_gpu_checks",
    "_resnet20", "_training", "_certification", "_language_models", "gpu", "__main__"}
class Fewer:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        known = first in sys.stdlib_module_names or first.startswith("_")
        if known or first in needed or first in own:
            return self.finder.find_spec(name, path, target)
        return None
sys.meta_path[:] = map(Fewer, sys.meta_path)
script = sys.argv[2]
sys.argv = [script, *sys.argv[3:]]
sys.path.insert(0, script.rpartition("/")[0])
import runpy
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_it_runs_where_ray_and_all_else_is_missing(tmp_path: Path) -> None:
    results = tmp_path / "gpu.jsonl"
    parts = ["check-*", "noise-speed", "certify-*", "step-cnn", "step-gpt2-small-lora"]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, ",".join(NEEDED), str(GPU / "gpu.py"), "--quick",
         "--results", str(results), "--only", *parts],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = {line["part"]: line for line in map(json.loads, results.read_text().splitlines())}
    missing = lines.pop("step-gpt2-small-lora")
    assert missing["state"] == "missing" and "pip install" in missing["error"]
    assert len(lines) == 13
    assert {line["state"] for line in lines.values()} == {"passed", "measured"}, done.stdout
    assert set(lines["step-cnn"]["found"]["ms"]) == {"ours", "ordinary", "ordinary channels-last"}
