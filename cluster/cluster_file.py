"""Check a cluster file for private training, offline, before anything is paid for.

A file for `ray up` (AWS, GCP, or own hosts over SSH) is held against Ray's own schema; KubeRay
manifests (RayCluster and RayJob, with the claims and services beside them) against the fields that
dpdist relies on. Then dpdist's rules: nothing open to the world, token authentication on every
host, the same versions everywhere, storage that all hosts share, room for the recipe, no secret in
the file.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

from dpdist.core.errors import ClusterError
from dpdist.core.files import read_yaml

# --- findings, and rules for both kinds of file -----------------------------------------------


@dataclass(frozen=True)
class Needs:
    """The needs of a recipe: so many training workers, each with so many CPUs and GPUs, and the
    folder of its data, None where they are built in."""

    workers: int
    cpus: float
    gpus: float
    data_root: str | None = None

    @classmethod
    def of(cls, resources: Any, data_root: object) -> Needs:
        """Return the needs of a recipe's section `resources`, and of its data."""
        root = None if data_root is None else str(data_root)
        return cls(
            resources.min_workers, resources.cpus_per_worker, resources.gpus_per_worker, root
        )


@dataclass
class Report:
    """errors: "key: what is wrong; what would be right". notes: worth knowing, not wrong.

    dpdist, ray, python ("py311"): the versions every host must have, which are this machine's.
    """

    dpdist: str
    needs: Needs | None = None
    ray: str = field(default_factory=lambda: version("ray"))
    python: str = "py{}{}".format(*sys.version_info)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_error(self, key: str, text: str) -> None:
        self.errors.append(f"{key}: {text}")


_SECRETS = {
    "an AWS access key": r"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    "an AWS secret key": r"aws_secret_access_key\s*[=:]\s*[A-Za-z0-9/+]{30,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a Ray token": r"RAY_AUTH_TOKEN=(?!\$)[\"']?[A-Za-z0-9]",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{20,}",
    "a password": r"(?i)\bpassw(or)?d\s*[=:]\s*(?![$<])\S+",
    "credentials in an address": r"\w+://[^/\s:@$]+:[^/\s:@$]+@",
}


def check_strings(document: Any, report: Report, prefix: str = "") -> None:
    """Rules about any value, wherever it stands: placeholders, secrets, the open world."""
    for key, value in iter_strings(document):
        where = prefix + key
        if "FILL-IN" in value:
            report.add_error(where, f"fill in {value!r}")
        for kind, pattern in _SECRETS.items():
            if re.search(pattern, value):
                report.add_error(where, f"holds {kind}; keep it in a file or secret store outside")
        if re.search(r"(?<![\d.])0\.0\.0\.0/0(?!\d)|(?<![\w:])::/0(?!\d)", value):
            report.add_error(where, "opens the cluster to the world; name your own address range")


def iter_strings(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, string) of every string in plain data."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from iter_strings(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from iter_strings(inner, f"{prefix}[{number}]")
    elif isinstance(value, str):
        yield prefix, value


def check_images(images: dict[str, str], report: Report) -> None:
    """images: key -> image. All the same kind, pinned, and Ray's own at our versions."""
    kinds = {}
    for key, image in images.items():
        name, _, tag = image.rpartition(":")
        if not name or "/" in tag or tag == "latest":
            report.add_error(key, f"{image} names no version; pin a tag or a digest")
            continue
        found = re.fullmatch(r"(\d+\.\d+\.\d+)(?:\.[0-9a-f]+)?(?:-(py\d+))?(?:-.*)?", tag)
        if name.split("/")[-1] in ("ray", "ray-ml") and found:
            wanted = (report.ray, report.python)
            if (found[1], found[2]) != wanted:
                report.add_error(
                    key,
                    f"{image} is Ray {found[1]} on {found[2] or 'an unnamed Python'}; here it is "
                    f"Ray {wanted[0]} on {wanted[1]}: take rayproject/ray:{wanted[0]}-{wanted[1]}"
                    "-gpu (or -cpu)",
                )
            kinds[key] = found.groups()
        else:
            kinds[key] = (image,)
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{key} {image}" for key, image in images.items())
        report.add_error(
            next(iter(images)), f"head and workers differ ({listed}); use one image version"
        )


def is_within(path: str, folder: str) -> bool:
    """Whether `path` lies in `folder` or is it; the root folder holds nothing."""
    place, outer = PurePosixPath(path), PurePosixPath(folder)
    return len(outer.parts) > 1 and (place == outer or outer in place.parents)


def check_capacity(host_types: list[tuple[int, float, float]], key: str, report: Report) -> None:
    """host_types: (number of hosts, CPUs, GPUs of each). Complains when the recipe does not fit."""
    needs = report.needs
    if needs is None:
        return
    room = 0
    for hosts, cpus, gpus in host_types:
        by_cpu = cpus // needs.cpus
        by_gpu = gpus // needs.gpus if needs.gpus else by_cpu
        room += hosts * int(min(by_cpu, by_gpu))
    if room < needs.workers:
        each = f"{needs.cpus:g} CPUs and {needs.gpus:g} GPUs each"
        report.add_error(
            key,
            f"has room for {room} training workers, the recipe asks for {needs.workers} with "
            f"{each}; raise the number of hosts, take a larger type, or lower resources.workers",
        )
    if needs.gpus == 0 and any(gpus for _, _, gpus in host_types):
        report.notes.append(
            "training asks for no GPU (resources.gpus_per_worker), hosts have: certification takes "
            "them, unless resources.certify_gpus is 0"
        )


# --- files for ray up -------------------------------------------------------------------------


# Instance type -> (vCPUs, GPUs): Amazon EC2's accelerated-computing pages, 2026. Only to catch a
# contradiction between a type and its `resources`; a type that is not listed is believed.
_AWS_INSTANCE_TYPES = {
    "g4dn.xlarge": (4, 1), "g4dn.2xlarge": (8, 1), "g4dn.12xlarge": (48, 4),
    "g5.xlarge": (4, 1), "g5.2xlarge": (8, 1), "g5.12xlarge": (48, 4), "g5.48xlarge": (192, 8),
    "g6.xlarge": (4, 1), "g6.2xlarge": (8, 1), "g6.12xlarge": (48, 4), "g6.48xlarge": (192, 8),
    "p3.2xlarge": (8, 1), "p4d.24xlarge": (96, 8), "p5.48xlarge": (192, 8),
}  # fmt: skip
_INSTALL = re.compile(
    r"dpdist-(?P<wheel>\d[^-\s/]*)-py3-none-any\.whl"
    r"|dpdist[^\s\"']*\.git@(?P<git>[^\s\"'#]+)"
    r"|dpdist[^\s\"']*\.git(?P<unpinned>)(?=[\s\"'#]|$)"
    r"|dpdist(?:\[[\w,]+\])?==(?P<exact>[^\s\"']+)"
)


def check_ray_up(raw: dict[str, Any], report: Report) -> None:
    """Add to `report` what is wrong with one cluster file, given as plain data."""
    config = _complete_config(raw, report)
    if config is None:
        return
    kind = config["provider"].get("type")
    _check_network(config, kind, report)
    starts = {
        side: _start_command(config, f"{side}_start_ray_commands", report)
        for side in ("head", "worker")
    }
    _check_dashboard(starts["head"], report)
    _check_ray_up_token(config, starts, report)
    _check_versions(config, report)
    _check_ray_up_storage(config, starts, report)
    _check_file_mounts(raw.get("file_mounts") or {}, report)
    if kind == "local":
        report.notes.append(
            "start it with RAY_UP_enable_autoscaler_v2=0 ray up: the newer autoscaler counts the "
            "head among the workers of one's own hosts and leaves one host out"
        )
        if report.needs is not None:
            report.notes.append("whether the recipe fits on your own hosts cannot be seen here")
    else:
        _check_instance_types(config, report)


MISSING_FILE = "file_mounts: "  # begins the notes on files that are not here
_MAKERS = {".whl": "pip wheel --no-deps -w dist .", "auth_token": "ray get-auth-token --generate"}


def _check_file_mounts(mounts: dict[str, Any], report: Report) -> None:
    """Note what `ray up` would miss: it takes paths from the directory that it is called in."""
    for local in map(str, mounts.values()):
        if not Path(local).expanduser().exists():
            how = next((f"; `{how}` makes it" for end, how in _MAKERS.items()
                        if local.endswith(end)), "")  # fmt: skip
            report.notes.append(
                f"{MISSING_FILE}{local} is not there, seen from {Path.cwd()}; `ray up` takes it "
                f"from the directory that it is called in{how}"
            )


def check_data_root(shared: Sequence[str], report: Report) -> None:
    """Note a recipe's data outside the folders that all hosts share."""
    root = report.needs.data_root if report.needs is not None else None
    if root is not None and shared and not any(is_within(root, folder) for folder in shared):
        note = (
            f"the recipe's data.root, {root}, must lie on the storage of all hosts "
            f"({', '.join(dict.fromkeys(shared))}), or be there on each of them: put the data "
            "there, and say so with --data-root"
        )
        if note not in report.notes:
            report.notes.append(note)


def _complete_config(raw: dict[str, Any], report: Report) -> dict[str, Any] | None:
    """The file completed with Ray's defaults, or None (and a complaint) when Ray would refuse it.

    Ray's defaults are what `ray up` would run, so they are checked like the rest.
    """
    import jsonschema
    from ray.autoscaler._private.util import prepare_config, validate_config

    if not isinstance(raw.get("provider"), dict) or "type" not in raw["provider"]:
        report.add_error("provider.type", "is missing; give aws, gcp or local")
        return None
    said = io.StringIO()
    logging.getLogger("ray").setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            config: dict[str, Any] = prepare_config(copy.deepcopy(raw))
            validate_config(config)
    except jsonschema.ValidationError as error:
        key = ".".join(str(part) for part in error.absolute_path) or "the file"
        report.add_error(key, f"{error.message} (Ray's schema)")
        return None
    except Exception as error:  # Ray aborts in many ways; each means that `ray up` would refuse
        text = " ".join((str(error) or said.getvalue() or type(error).__name__).split())
        report.add_error("the file", f"Ray refuses it: {text}")
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
                    "is missing: Ray then makes a group whose port 22 is open to the world "
                    "(whatever provider.security_group says); name a group of your own",
                )
        if kind == "gcp":
            cards = setup.get("networkInterfaces") or []
            networks = [f"{c.get('network', '')} {c.get('subnetwork', '')}" for c in cards]
            if not cards or any(not n.strip() or n.rstrip().endswith("/default") for n in networks):
                report.add_error(
                    f"{key}.networkInterfaces",
                    "is missing or names the default network, whose port 22 is open to the world; "
                    "name a subnetwork of your own",
                )


def _start_command(config: dict[str, Any], key: str, report: Report) -> tuple[str, str]:
    """(key, command) of the one that starts Ray; the command is empty when there is none."""
    for number, command in enumerate(config.get(key) or []):
        if re.search(r"\bray\s+start\b", command):
            return f"{key}[{number}]", command
    report.add_error(key, "no `ray start` among them")
    return key, ""


def _check_dashboard(start: tuple[str, str], report: Report) -> None:
    key, command = start
    hosts = re.findall(r"--dashboard-host[=\s]+[\"']?([^\s\"']+)", command)
    if command and not hosts:
        report.add_error(key, "give --dashboard-host=127.0.0.1")
    for host in hosts:
        if host not in ("127.0.0.1", "localhost", "::1"):
            report.add_error(
                key, f"--dashboard-host={host} shows the dashboard to others; give 127.0.0.1"
            )


def _variable_at_start(command: str, name: str) -> str | None:
    """The value that environment variable `name` has for the `ray start` of a command."""
    head = re.split(r"\bray\s+start\b", command)[0]
    found = re.findall(rf"\b{name}=[\"']?([^\s\"';]+)", head)
    return found[-1] if found else None


def _check_ray_up_token(
    config: dict[str, Any], starts: dict[str, tuple[str, str]], report: Report
) -> None:
    mounts = config.get("file_mounts") or {}
    for key, command in starts.values():
        if not command:
            continue
        mode = _variable_at_start(command, "RAY_AUTH_MODE")
        if mode != "token":
            report.add_error(
                key, f"RAY_AUTH_MODE is {mode or 'not set'}; put RAY_AUTH_MODE=token before it"
            )
        place = _variable_at_start(command, "RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
        if place not in mounts:
            report.add_error(
                "file_mounts",
                f"no token reaches the hosts ({key}); add {place}: ~/.ray/auth_token",
            )


def _check_versions(config: dict[str, Any], report: Report) -> None:
    docker = config.get("docker") or {}
    images = {
        f"docker.{side}_image" if docker.get(f"{side}_image") else "docker.image": docker.get(
            f"{side}_image"
        )
        or docker.get("image", "")
        for side in ("head", "worker")
    }
    if any(images.values()):
        check_images({key: image for key, image in images.items() if image}, report)
    installed = {}
    for side in ("head", "worker"):
        key = f"{side}_setup_commands"
        commands = config.get(key) or []
        installed[side] = _installed_packages(key, commands, report)
        if not installed[side]:
            report.add_error(
                key,
                "(with setup_commands) installs no dpdist; pip install its wheel or a pinned git "
                "reference, with -c constraints.txt",
            )
        for wanted in re.findall(r"\bray(?:\[[\w,]+\])?==([\w.]+)", "\n".join(commands)):
            if wanted != report.ray:
                report.add_error(key, f"installs Ray {wanted}, here it is {report.ray}")
    if installed["head"] and installed["worker"] and installed["head"] != installed["worker"]:
        report.add_error(
            "setup_commands",
            f"the head installs {sorted(installed['head'])}, the workers "
            f"{sorted(installed['worker'])}; install once, in setup_commands",
        )


def _installed_packages(key: str, commands: list[str], report: Report) -> set[str]:
    """Return the installations of dpdist in these commands; complain about loose versions."""
    found = set()
    for command in commands:
        if "pip install" not in command:
            continue
        for match in _INSTALL.finditer(command):
            wheel, git, exact = match["wheel"], match["git"], match["exact"]
            found.add(match[0])
            released = wheel or exact or (git or "").removeprefix("v")
            if match["unpinned"] is not None or git == "":
                report.add_error(key, f"{match[0]} follows a branch; pin @v{report.dpdist}")
            elif git and re.fullmatch(r"[0-9a-f]{40}", git):
                report.notes.append(f"{key}: is commit {git[:12]} what this machine has?")
            elif released != report.dpdist:
                report.add_error(
                    key,
                    f"installs dpdist {released}, here it is {report.dpdist}; take the same "
                    f"wheel, @v{report.dpdist}, or a full commit",
                )
            if not re.search(r"(\s-c|--constraint)[=\s]\S*constraints\.txt", command):
                report.add_error(key, "installs dpdist without -c constraints.txt")
    return found


def _check_ray_up_storage(
    config: dict[str, Any], starts: dict[str, tuple[str, str]], report: Report
) -> None:
    places = {}
    for side, (key, command) in starts.items():
        if command:
            places[side] = _variable_at_start(command, "DPDIST_RUNS")
            if not (places[side] or "").startswith("/"):
                report.add_error(
                    key, "put DPDIST_RUNS=/a/shared/folder before it, the same on all hosts"
                )
    if len(set(places.values())) > 1:
        report.add_error(
            starts["worker"][0], f"DPDIST_RUNS differs between head and workers: {places}"
        )
    for side, place in places.items():
        if place is None or not place.startswith("/"):
            continue
        commands = [*(config.get("initialization_commands") or []),
                    *(config.get(f"{side}_setup_commands") or [])]  # fmt: skip
        for node in config.get("available_node_types", {}).values():
            commands += node.get("initialization_commands") or []
        text = "\n".join(c for c in commands if re.search(r"\bmount(point)?\b", c))
        folders = [word for word in re.findall(r"/[\w./-]+", text) if is_within(place, word)]
        check_data_root(folders, report)
        if not folders:
            report.add_error(
                f"{side}_setup_commands",
                f"nothing mounts or checks the shared storage of DPDIST_RUNS={place}; mount it in "
                "initialization_commands, or check it with `mountpoint -q`",
            )
        docker = config.get("docker") or {}
        options = [*(docker.get("run_options") or []), *(docker.get(f"{side}_run_options") or [])]
        inside = re.findall(r"(?:-v|--volume)[=\s]+[^\s:]+:([^\s:]+)", " ".join(options))
        if docker.get("container_name") and not any(is_within(place, target) for target in inside):
            report.add_error(
                "docker.run_options",
                f"the container of the {side} does not see {place}; add -v FOLDER:FOLDER",
            )


def _check_instance_types(config: dict[str, Any], report: Report) -> None:
    kinds = []
    head = config.get("head_node_type")
    for name, node in config.get("available_node_types", {}).items():
        key = f"available_node_types.{name}"
        resources, setup = node.get("resources") or {}, node.get("node_config") or {}
        known = _AWS_INSTANCE_TYPES.get(setup.get("InstanceType", ""))
        gpus = resources.get("GPU", known[1] if known else 0)
        cpus = resources.get("CPU", known[0] if known else None)
        if known and gpus > known[1]:
            report.add_error(
                f"{key}.resources.GPU",
                f"{setup['InstanceType']} has {known[1]} GPUs, not {gpus}",
            )
        if setup.get("InstanceType", "").startswith(("p2.", "p3.", "p3dn.")):
            report.add_error(
                f"{key}.node_config.InstanceType",
                f"{setup['InstanceType']}: CUDA 13, which the pinned torch is built for, no longer "
                "supports its GPU; take g4dn, g5, g6, p4d or p5",
            )
        if name == head:
            if (setup.get("InstanceMarketOptions") or {}).get("MarketType") == "spot":
                report.notes.append(f"{key}: a head on spot takes every job with it when it goes")
            hosts = 1
        else:
            hosts = min(node.get("max_workers", config["max_workers"]), config["max_workers"])
        if report.needs is not None and cpus is None:
            report.add_error(
                f"{key}.resources", "give CPU and GPU, so that the recipe can be checked"
            )
        kinds.append((hosts, cpus or 0, gpus))
    check_capacity(kinds, "available_node_types", report)


# --- KubeRay manifests ------------------------------------------------------------------------


_SHARED_VOLUME_TYPES = ("persistentVolumeClaim", "nfs", "csi")


def check_kuberay(documents: list[dict[str, Any]], report: Report) -> None:
    """Add to `report` what is wrong with a file of manifests."""
    claims = {}
    seen = 0
    for number, document in enumerate(documents):
        kind, spec = document.get("kind"), document.get("spec") or {}
        key = f"[{number}].{kind}"
        if kind == "PersistentVolumeClaim":
            claims[(document.get("metadata") or {}).get("name")] = (key, spec)
        elif kind == "Secret" and (document.get("data") or document.get("stringData")):
            report.add_error(key, "holds a secret; create it with kubectl, outside of files")
        elif kind == "Ingress":
            report.add_error(key, "leads the world to the cluster; use kubectl port-forward")
        elif kind == "Service" and spec.get("type") in ("LoadBalancer", "NodePort"):
            report.add_error(f"{key}.spec.type", f"{spec['type']} opens the cluster; use ClusterIP")
    for number, document in enumerate(documents):
        kind, spec = document.get("kind"), document.get("spec") or {}
        if kind not in ("RayCluster", "RayJob"):
            continue
        seen += 1
        key = f"[{number}].{kind}.spec"
        if document.get("apiVersion") != "ray.io/v1":
            report.add_error(f"[{number}].apiVersion", f"must be ray.io/v1 for a {kind}")
        if kind == "RayJob":
            if "dpdist " not in str(spec.get("entrypoint", "")):
                report.add_error(f"{key}.entrypoint", "must run dpdist, as in `dpdist run my.yaml`")
            if "rayClusterSpec" not in spec:
                if not spec.get("clusterSelector"):
                    report.add_error(f"{key}.rayClusterSpec", "is missing")
                continue
            key, spec = f"{key}.rayClusterSpec", spec["rayClusterSpec"]
        _check_cluster(key, spec, claims, report)
    if not seen:
        report.add_error("kind", "there is no RayCluster and no RayJob in the file")


def _check_cluster(key: str, spec: dict[str, Any], claims: dict[Any, Any], report: Report) -> None:
    if spec.get("rayVersion") != report.ray:
        report.add_error(
            f"{key}.rayVersion", f"is {spec.get('rayVersion')}, here it is {report.ray}"
        )
    head = spec.get("headGroupSpec") or {}
    workers = spec.get("workerGroupSpecs") or []
    if not head or not workers:
        report.add_error(key, "needs headGroupSpec and workerGroupSpecs")
        return
    if head.get("serviceType") not in (None, "ClusterIP"):
        report.add_error(
            f"{key}.headGroupSpec.serviceType",
            f"{head['serviceType']} opens the dashboard and the job server; leave it at ClusterIP",
        )
    groups = {f"{key}.headGroupSpec": head}
    groups |= {f"{key}.workerGroupSpecs[{n}]": group for n, group in enumerate(workers)}
    images, places, kinds = {}, {}, []
    managed = (spec.get("authOptions") or {}).get("mode") == "token"
    for where, group in groups.items():
        pod = (group.get("template") or {}).get("spec") or {}
        containers = pod.get("containers") or []
        if not containers:
            report.add_error(f"{where}.template.spec.containers", "is missing")
            continue
        ray, where_ray = containers[0], f"{where}.template.spec.containers[0]"
        images[f"{where_ray}.image"] = str(ray.get("image", ""))
        environment = {entry.get("name"): entry for entry in ray.get("env") or []}
        if not managed:
            _check_kuberay_token(where_ray, environment, report)
        place = (environment.get("DPDIST_RUNS") or {}).get("value")
        places[where] = place
        _check_kuberay_storage(where_ray, place, ray, pod, claims, report)
        limits = (ray.get("resources") or {}).get("limits") or {}
        hosts = 1 if where.endswith("headGroupSpec") else int(group.get("maxReplicas", 1))
        start = group.get("rayStartParams") or {}
        cpus = float(start.get("num-cpus", _parse_cpus(limits.get("cpu", 0))))
        kinds.append((hosts, cpus, float(limits.get("nvidia.com/gpu", 0))))
    check_images(images, report)
    for where, image in images.items():
        if re.match(r"(docker\.io/)?rayproject/ray", image):
            report.add_error(where, f"{image} has no dpdist in it; build an image on top of it")
    if len(set(places.values())) > 1:
        report.add_error(key, f"DPDIST_RUNS differs between the groups: {sorted(map(str, places))}")
    check_capacity(kinds, f"{key}.workerGroupSpecs", report)


def _check_kuberay_token(key: str, environment: dict[Any, Any], report: Report) -> None:
    mode = (environment.get("RAY_AUTH_MODE") or {}).get("value")
    token = environment.get("RAY_AUTH_TOKEN") or {}
    if mode != "token":
        report.add_error(
            f"{key}.env", "token authentication is off; give spec.authOptions: {mode: token}"
        )
    elif "secretKeyRef" not in (token.get("valueFrom") or {}):
        report.add_error(f"{key}.env", "RAY_AUTH_TOKEN must come from a secret (valueFrom)")


def _check_kuberay_storage(
    key: str,
    runs_folder: Any,
    container: dict[str, Any],
    pod: dict[str, Any],
    claims: dict[Any, Any],
    report: Report,
) -> None:
    if not str(runs_folder or "").startswith("/"):
        report.add_error(f"{key}.env", "give DPDIST_RUNS, a folder on the shared volume")
        return
    mounted = [
        mount
        for mount in container.get("volumeMounts") or []
        if is_within(str(runs_folder), mount["mountPath"])
    ]
    volumes = {volume.get("name"): volume for volume in pod.get("volumes") or []}
    shared = [volumes.get(mount.get("name"), {}) for mount in mounted]
    if not any(any(kind in volume for kind in _SHARED_VOLUME_TYPES) for volume in shared):
        report.add_error(
            f"{key}.volumeMounts",
            f"DPDIST_RUNS={runs_folder} is on no volume that all pods share; mount a "
            "persistentVolumeClaim (ReadWriteMany) or nfs there",
        )
    check_data_root([str(mount["mountPath"]) for mount in mounted], report)
    for volume in shared:
        name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        where, spec = claims.get(name, ("", None))
        if spec is not None and "ReadWriteMany" not in (spec.get("accessModes") or []):
            complaint = f"{where}.spec.accessModes: must hold ReadWriteMany: every host writes"
            if complaint not in report.errors:
                report.errors.append(complaint)


def _parse_cpus(text: Any) -> float:
    """Kubernetes counts CPUs as 4 or "3500m"."""
    text = str(text)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


# --- any cluster file -------------------------------------------------------------------------


def check_file(
    path: Path, dpdist_version: str, needs: Needs | None = None
) -> tuple[list[str], list[str]]:
    """(complaints, notes) about a cluster file. Raises UserError when it cannot be read."""
    documents = [document for document in read_yaml(path, other_bases=True) if document is not None]
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise ClusterError(f"{path}: holds no mapping of keys to values")
    findings = Report(dpdist_version, needs)
    if any("apiVersion" in document for document in documents):
        check_kuberay(documents, findings)
    elif len(documents) > 1:
        raise ClusterError(f"{path}: a file for `ray up` is one document, this has several")
    else:
        check_ray_up(documents[0], findings)
    for number, document in enumerate(documents):
        prefix = f"[{number}]." if len(documents) > 1 else ""
        check_strings(document, findings, prefix)
    return findings.errors, findings.notes


def templates() -> dict[str, str]:
    """The cluster files that come along: name -> text, for this machine's Ray and Python."""
    here = Report("")
    tag = here.python.removeprefix("py")
    written_for = {
        "py311": here.python,
        "python3.11": f"python{tag[0]}.{tag[1:]}",
        "Python 3.11": f"Python {tag[0]}.{tag[1:]}",
        "2.60.0": here.ray,
    }
    found = {}
    for path in sorted(Path(str(files(__package__)), "templates").glob("*.*")):
        text = path.read_text()
        for old, new in written_for.items():
            text = text.replace(old, new)
        found[path.stem] = text
    return found
