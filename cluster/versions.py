"""Check that all workers run the driver's code and versions.

A user's own dpdist.py in the working directory would shadow the package in workers only, and a
host may have another version installed.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import secrets
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dpdist.core.errors import ClusterError

LIBRARIES = ("torch", "ray", "numpy", "scipy", "dp-accounting", "transformers", "peft")


@cache
def package_fingerprints(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of this process: of package sources, by digest, and of libraries.

    Package name to "path:digest of its Python sources", library name to version. Read once: the
    process has loaded the files of that time, not those that replace them later.
    """
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in packages:
        module = importlib.import_module(name)
        if module.__file__ is None:
            raise ClusterError(f"package {name!r} has no __init__.py; another folder of that name?")
        folder = Path(module.__file__).parent
        digest = hashlib.blake2b(digest_size=8)
        for file in _python_files(folder):
            digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
        found[name] = f"{folder}:{digest.hexdigest()}"
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "missing"
    return found


def _python_files(folder: Path) -> list[Path]:
    """Return the Python sources, those that links in a checkout lead to included.

    A wheel holds these as folders.
    """
    walk = os.walk(folder, followlinks=True)
    return sorted(Path(at, n) for at, _, names in walk for n in names if n.endswith(".py"))


def code_digest(packages: Sequence[str]) -> str:
    """One digest for code and library versions, wherever they are installed."""
    found = package_fingerprints(tuple(packages))
    parts = [f"{name}={found[name].rpartition(':')[2]}" for name in sorted(found)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def check_same_versions(driver: dict[str, str], packages: Sequence[str], context: str) -> None:
    """Raise ClusterError in a worker whose packages differ from the driver's fingerprint.

    The place of installation may differ between hosts; the sources and versions may not.
    """
    here = package_fingerprints(tuple(packages))
    for name, expected in driver.items():
        if here.get(name, "missing").rpartition(":")[2] != expected.rpartition(":")[2]:
            raise ClusterError(
                f"{context}: {name} is {here.get(name, 'missing')}, on the driver it is "
                f"{expected}; install the same version on every host, and keep no file or folder "
                "named dpdist in the directory the command is started from",
                see="how-to/cluster.md#what-every-cluster-needs",
            )


def check_nodes(packages: Sequence[str], shared_folder: Path) -> None:
    """Check on every live node the driver's packages, and the driver's files under `shared_folder`.

    Raises ClusterError naming the node that differs.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    driver = package_fingerprints(tuple(packages))
    # Called like a file that is being written: a killed command's goes with the next one.
    token = shared_folder / f".seen.{os.getpid()}-{secrets.token_hex(4)}"
    token.write_bytes(secrets.token_bytes(16))
    check = ray.remote(num_cpus=0)(_check_node)
    waiting = []
    for node in ray.nodes():
        if node["Alive"]:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            name = f"node {node['NodeManagerAddress']}"
            task = check.options(scheduling_strategy=where)
            waiting.append(task.remote(driver, packages, name, token, token.read_bytes()))
    try:
        ray.get(waiting, timeout=120)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ClusterError):
            raise ClusterError(str(error.cause)) from error
        raise ClusterError(f"a node cannot run dpdist: {error.cause}") from error
    except ray.exceptions.GetTimeoutError as error:
        raise ClusterError("a node did not answer within 120 s") from error
    finally:
        token.unlink()


def _check_node(
    driver: dict[str, str], packages: Sequence[str], context: str, token: Path, content: bytes
) -> None:
    check_same_versions(driver, packages, context)
    try:
        seen = token.read_bytes()
    except OSError:
        seen = b""
    if seen != content:
        raise ClusterError(
            f"{context} does not see the run folder {token.parent}: put runs on storage that all "
            "hosts share (--runs)",
            see="how-to/cluster.md#what-every-cluster-needs",
        )


# --- what else the bits depend on -------------------------------------------------------------


# Settings of torch.backends that change bits, as a new process has them; the whole before its
# parts.
NEW_BACKENDS: dict[str, dict[str, Any]] = {
    "": {"fp32_precision": "none"},
    "mkldnn": {"enabled": True, "deterministic": False, "fp32_precision": "none"},
    "cudnn": {
        "enabled": True, "deterministic": False, "benchmark": False, "allow_tf32": True,
        "fp32_precision": "none",
    },
    "cuda.matmul": {"fp32_precision": "none"},
    **{f"mkldnn.{each}": {"fp32_precision": "none"} for each in ("matmul", "conv", "rnn")},
    **{f"cudnn.{each}": {"fp32_precision": "tf32"} for each in ("conv", "rnn")},
}  # fmt: skip


def backend_setting(name: str, key: str) -> Any:
    """Return a setting of `NEW_BACKENDS` as it is now; None where its parts differ, and torch
    refuses to name one."""
    try:
        return getattr(_backend(name), key)
    except RuntimeError:
        return None


def set_backend(name: str, key: str, value: Any) -> None:
    """Set a setting of `NEW_BACKENDS`, unless it is so: to set a whole would set its parts."""
    if backend_setting(name, key) != value:
        setattr(_backend(name), key, value)


def _backend(name: str) -> Any:
    import torch

    found: Any = torch.backends
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    return found


def torch_settings() -> list[Any]:
    """Return what a program may set in torch that changes the bits of what it computes."""
    import torch

    from dpdist.core.torch_settings import DETERMINISTIC

    blocks = [
        (torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device)))
        for device in ("cpu", "cuda")
    ]
    found = [backend_setting(name, key) for name, keys in NEW_BACKENDS.items() for key in keys]
    return [DETERMINISTIC.chosen()[0], *found, *blocks]
