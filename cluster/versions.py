"""Check that all workers run the driver's code and versions.

A user's own dpdist.py in the working directory would hide the package in workers only, and a host
may have a different version installed.
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

PACKAGES = ("dpdist",)  # whose sources must be the driver's on every host
LIBRARIES = ("torch", "ray", "numpy", "scipy", "dp-accounting", "transformers", "peft")


@cache
def package_fingerprints(packages: tuple[str, ...]) -> dict[str, str]:
    """Return "path:digest of its Python sources" by package, and the version by library.

    They are read once, since a process keeps the files that it has loaded.
    """
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in packages:
        module = importlib.import_module(name)
        if module.__file__ is None:
            raise ClusterError(f"package {name!r} has no __init__.py; rename other such folders")
        folder = Path(module.__file__).parent
        digest = hashlib.blake2b(digest_size=8)
        # Links in a checkout lead to sources that are folders in a wheel.
        walk = os.walk(folder, followlinks=True)
        sources = sorted(Path(at, n) for at, _, names in walk for n in names if n.endswith(".py"))
        for file in sources:
            digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
        found[name] = f"{folder}:{digest.hexdigest()}"
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "missing"
    return found


def code_digest(packages: Sequence[str]) -> str:
    """Return one digest of code and library versions, which does not depend on their paths."""
    found = package_fingerprints(tuple(packages))
    parts = [f"{name}={found[name].rpartition(':')[2]}" for name in sorted(found)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def check_same_versions(driver: dict[str, str], packages: Sequence[str], context: str) -> None:
    """Raise ClusterError in a worker whose sources or versions differ from the driver's.

    Their paths may differ.
    """
    here = package_fingerprints(tuple(packages))
    for name, expected in driver.items():
        if here.get(name, "missing").rpartition(":")[2] != expected.rpartition(":")[2]:
            raise ClusterError(
                f"{context}: {name}: must be {expected}, as on the driver, got "
                f"{here.get(name, 'missing')}; install the same version on every host, and remove "
                "files and folders named dpdist from the folder in which the command starts",
                see="how-to/cluster.md#what-every-cluster-needs",
            )


def check_nodes(packages: Sequence[str], shared_folder: Path) -> None:
    """Raise ClusterError if a live node has different packages, or does not see `shared_folder`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    driver = package_fingerprints(tuple(packages))
    # Named like a partial file, so that the next command removes that of a killed one.
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
        raise ClusterError("a node did not answer within 120 s; check its Ray processes") from error
    except ray.exceptions.RayError as error:  # such as TaskUnschedulableError
        raise ClusterError(
            "a node was lost during the check of the nodes; run the same command again",
            see="how-to/cluster.md#faults",
        ) from error
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
            f"{context}: does not see the run folder {token.parent}; put runs on storage that all "
            "hosts share (--runs)",
            see="how-to/cluster.md#what-every-cluster-needs",
        )


# --- settings of torch ------------------------------------------------------------------------


# Settings of torch.backends that affect results, with the values of a new process; a whole comes
# before its parts.
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
    """Return the current value of a setting of `NEW_BACKENDS`; None if its parts differ."""
    try:
        return getattr(_backend(name), key)
    except RuntimeError:
        return None


def set_backend(name: str, key: str, value: Any) -> None:
    """Set a setting of `NEW_BACKENDS` if it differs, since setting a whole sets its parts."""
    if backend_setting(name, key) != value:
        setattr(_backend(name), key, value)


def _backend(name: str) -> Any:
    import torch

    found: Any = torch.backends
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    return found


def torch_settings() -> list[Any]:
    """Return the settings of torch that a program may change and that affect results."""
    import torch

    from dpdist.core.torch_settings import DETERMINISTIC

    blocks = [
        (torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device)))
        for device in ("cpu", "cuda")
    ]
    found = [backend_setting(name, key) for name, keys in NEW_BACKENDS.items() for key in keys]
    return [DETERMINISTIC.chosen()[0], *found, *blocks]
