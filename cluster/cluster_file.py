"""Check a cluster file for private training, offline, before anything starts.

A file for `ray up` (AWS, GCP, or own hosts over SSH) is checked against Ray's schema. Five more
rules apply to it and to KubeRay manifests (RayCluster, RayJob, and other documents in the file):
nothing is open to the world, the network is your own, the dashboard listens on loopback, every host
requires a token, and the token is not in the file. Versions and the shared storage are checked on
the hosts when a job starts (`dpdist.cluster.versions`).
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from dpdist.core.errors import ClusterError
from dpdist.core.files import read_yaml

# --- findings, and rules for both kinds of file -----------------------------------------------


@dataclass
class Report:
    """The findings of a check. errors: "key: problem; cure". notes: other advice."""

    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_error(self, key: str, text: str) -> None:
        self.errors.append(f"{key}: {text}")


def check_strings(document: Any, report: Report, prefix: str = "") -> None:
    """Add to `report` placeholders, tokens and open address ranges in any value."""
    for key, value in iter_strings(document):
        where = prefix + key
        if "FILL-IN" in value:
            report.add_error(where, f"must be filled in, got {value!r}")
        if re.search(r"RAY_AUTH_TOKEN=(?!\$)[\"']?[A-Za-z0-9]", value):
            report.add_error(where, "contains a Ray token; store it in a file of its own")
        if re.search(r"(?<![\d.])0\.0\.0\.0/0(?!\d)|(?<![\w:])::/0(?!\d)", value):
            report.add_error(where, "opens the cluster to the world; name your own address range")


def iter_strings(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted key and value of every string in plain data."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from iter_strings(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from iter_strings(inner, f"{prefix}[{number}]")
    elif isinstance(value, str):
        yield prefix, value


# --- files for ray up -------------------------------------------------------------------------


def check_ray_up(raw: dict[str, Any], report: Report) -> None:
    """Add to `report` the problems of one cluster file, given as plain data."""
    config = _complete_config(raw, report)
    if config is None:
        return
    kind = config["provider"].get("type")
    _check_network(config, kind, report)
    sides = ("head", "worker")
    starts = [_start_command(config, f"{side}_start_ray_commands", report) for side in sides]
    _check_dashboard(starts[0], report)
    _check_ray_up_token(config, starts, report)
    if kind == "local":
        report.notes.append(
            "start it with RAY_UP_enable_autoscaler_v2=0 ray up: with your own hosts, the newer "
            "autoscaler counts the head as a worker, and does not start one of the hosts"
        )


def _complete_config(raw: dict[str, Any], report: Report) -> dict[str, Any] | None:
    """Return the file with Ray's defaults, which are checked too; None if Ray would reject it."""
    import jsonschema
    from ray.autoscaler._private.util import prepare_config, validate_config

    if not isinstance(raw.get("provider"), dict) or "type" not in raw["provider"]:
        report.add_error("provider.type", "must be given: aws, gcp or local")
        return None
    output = io.StringIO()
    logging.getLogger("ray").setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            config: dict[str, Any] = prepare_config(copy.deepcopy(raw))
            validate_config(config)
    except jsonschema.ValidationError as error:
        key = ".".join(str(part) for part in error.absolute_path) or "the file"
        report.add_error(key, f"{error.message} (Ray's schema)")
        return None
    except Exception as error:  # Ray raises many types; each means that `ray up` would fail
        text = " ".join((str(error) or output.getvalue() or type(error).__name__).split())
        report.add_error("the file", f"Ray rejects it: {text}")
        return None
    return config


def _check_network(config: dict[str, Any], kind: str, report: Report) -> None:
    for name, node in config.get("available_node_types", {}).items():
        setup, key = node.get("node_config", {}), f"available_node_types.{name}.node_config"
        if kind == "aws":
            cards = setup.get("NetworkInterfaces", [])
            own = setup.get("SecurityGroupIds") or (cards and all(c.get("Groups") for c in cards))
            if not own:
                report.add_error(
                    f"{key}.SecurityGroupIds",
                    "must be given: otherwise Ray creates a group whose port 22 is open to the "
                    "world (provider.security_group does not prevent it); name your own group",
                )
        if kind == "gcp":
            cards = setup.get("networkInterfaces") or []
            networks = [f"{c.get('network', '')} {c.get('subnetwork', '')}" for c in cards]
            if not cards or any(not n.strip() or n.rstrip().endswith("/default") for n in networks):
                report.add_error(
                    f"{key}.networkInterfaces",
                    "must not be the default network, whose port 22 is open to the world; name "
                    "your own subnetwork",
                )


def _start_command(config: dict[str, Any], key: str, report: Report) -> tuple[str, str]:
    """Return key and text of the command that starts Ray; the text is "" without one."""
    for number, command in enumerate(config.get(key) or []):
        if re.search(r"\bray\s+start\b", command):
            return f"{key}[{number}]", command
    report.add_error(key, "must contain a `ray start`")
    return key, ""


def _check_dashboard(start: tuple[str, str], report: Report) -> None:
    key, command = start
    hosts = re.findall(r"--dashboard-host[=\s]+[\"']?([^\s\"']+)", command)
    if command and not hosts:
        report.add_error(key, "--dashboard-host: must be 127.0.0.1")
    for host in hosts:
        if host not in ("127.0.0.1", "localhost", "::1"):
            report.add_error(key, f"--dashboard-host: must be 127.0.0.1, got {host}")


def _variable_at_start(command: str, name: str) -> str | None:
    """Return the value of an environment variable at a command's `ray start`, if it is set."""
    head = re.split(r"\bray\s+start\b", command)[0]
    found = re.findall(rf"\b{name}=[\"']?([^\s\"';]+)", head)
    return found[-1] if found else None


def _check_ray_up_token(
    config: dict[str, Any], starts: list[tuple[str, str]], report: Report
) -> None:
    mounts = config.get("file_mounts") or {}
    for key, command in starts:
        if not command:
            continue
        mode = _variable_at_start(command, "RAY_AUTH_MODE")
        if mode != "token":
            report.add_error(
                key, f"RAY_AUTH_MODE must be token, got {mode}; put RAY_AUTH_MODE=token before it"
            )
        place = _variable_at_start(command, "RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
        if place not in mounts:
            report.add_error(
                "file_mounts",
                f"must contain the token of the hosts ({key}); add {place}: ~/.ray/auth_token",
            )


# --- KubeRay manifests ------------------------------------------------------------------------


def check_kuberay(documents: list[dict[str, Any]], report: Report) -> None:
    """Add to `report` the problems of a file of manifests."""
    for number, document in enumerate(documents):
        kind, spec = document.get("kind"), document.get("spec") or {}
        key = f"[{number}].{kind}"
        if kind == "Secret" and (document.get("data") or document.get("stringData")):
            report.add_error(key, "contains a secret; create it with kubectl instead")
        elif kind == "Ingress":
            report.add_error(key, "opens the cluster to the world; use kubectl port-forward")
        elif kind == "Service" and spec.get("type") in ("LoadBalancer", "NodePort"):
            report.add_error(f"{key}.spec.type", f"{spec['type']} opens the cluster; use ClusterIP")
        elif kind in ("RayCluster", "RayJob"):
            key = f"{key}.spec"
            if kind == "RayJob" and "rayClusterSpec" in spec:
                key, spec = f"{key}.rayClusterSpec", spec["rayClusterSpec"]
            if "headGroupSpec" in spec:  # else the job is for an existing cluster
                _check_cluster(key, spec, report)


def _check_cluster(key: str, spec: dict[str, Any], report: Report) -> None:
    head = spec.get("headGroupSpec") or {}
    if head.get("serviceType") not in (None, "ClusterIP"):
        report.add_error(
            f"{key}.headGroupSpec.serviceType",
            f"{head['serviceType']} opens the dashboard and the job server; use ClusterIP",
        )
    if (spec.get("authOptions") or {}).get("mode") == "token":
        return
    groups = {f"{key}.headGroupSpec": head}
    for number, group in enumerate(spec.get("workerGroupSpecs") or []):
        groups[f"{key}.workerGroupSpecs[{number}]"] = group
    for where, group in groups.items():
        pod = (group.get("template") or {}).get("spec") or {}
        ray = (pod.get("containers") or [{}])[0]
        environment = {entry.get("name"): entry for entry in ray.get("env") or []}
        _check_kuberay_token(f"{where}.template.spec.containers[0]", environment, report)


def _check_kuberay_token(key: str, environment: dict[Any, Any], report: Report) -> None:
    mode = (environment.get("RAY_AUTH_MODE") or {}).get("value")
    token = environment.get("RAY_AUTH_TOKEN") or {}
    if mode != "token":
        report.add_error(
            f"{key}.env", "token authentication is off; set spec.authOptions: {mode: token}"
        )
    elif "secretKeyRef" not in (token.get("valueFrom") or {}):
        report.add_error(f"{key}.env", "RAY_AUTH_TOKEN must come from a secret (valueFrom)")


# --- any cluster file -------------------------------------------------------------------------


def check_file(path: Path) -> tuple[list[str], list[str]]:
    """Return errors and notes about a cluster file. Raises UserError if it cannot be read."""
    if path.suffix == ".sbatch":
        raise ClusterError(
            f"{path}: must be a file for `ray up` or KubeRay, got a batch script; check it with "
            f"`bash -n {path}` and `grep -n FILL-IN {path}`"
        )
    documents = [document for document in read_yaml(path, other_bases=True) if document is not None]
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise ClusterError(f"{path}: must be a mapping of keys to values")
    findings = Report()
    if any("apiVersion" in document for document in documents):
        check_kuberay(documents, findings)
    elif len(documents) > 1:
        raise ClusterError(f"{path}: must be one document for `ray up`, got {len(documents)}")
    else:
        check_ray_up(documents[0], findings)
    for number, document in enumerate(documents):
        prefix = f"[{number}]." if len(documents) > 1 else ""
        check_strings(document, findings, prefix)
    return findings.errors, findings.notes


def templates() -> dict[str, str]:
    """Return the text of dpdist's cluster files by name, for this machine's Ray and Python."""
    major, minor = sys.version_info[:2]
    written_for = {
        "py311": f"py{major}{minor}",
        "python3.11": f"python{major}.{minor}",
        "Python 3.11": f"Python {major}.{minor}",
        "2.60.0": version("ray"),
    }
    found = {}
    for path in sorted(Path(str(files(__package__)), "templates").glob("*.*")):
        text = path.read_text()
        for old, new in written_for.items():
            text = text.replace(old, new)
        found[path.stem] = text
    return found
