"""Rules for a cluster file of `ray up`: AWS, GCP, or one's own hosts over SSH."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
from typing import Any

from dpdist.cluster.findings import Findings, check_images, check_room, within

# Instance type -> (vCPUs, GPUs): Amazon EC2's accelerated-computing pages, 2026. Only to catch a
# contradiction between a type and its `resources`; a type that is not listed is believed.
_AWS_GPUS = {
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


def check_ray_up(raw: dict[str, Any], findings: Findings) -> None:
    """Add to `findings` what is wrong with one cluster file, given as plain data."""
    config = _prepared(raw, findings)
    if config is None:
        return
    kind = config["provider"].get("type")
    _check_network(config, kind, findings)
    starts = {
        side: _start_command(config, f"{side}_start_ray_commands", findings)
        for side in ("head", "worker")
    }
    _check_dashboard(starts["head"], findings)
    _check_token(config, starts, findings)
    _check_versions(config, findings)
    _check_storage(config, starts, findings)
    if kind == "local":
        findings.notes.append(
            "start it with RAY_UP_enable_autoscaler_v2=0 ray up: the newer autoscaler counts the "
            "head among the workers of one's own hosts and leaves one host out"
        )
        if findings.needs is not None:
            findings.notes.append("whether the recipe fits on your own hosts cannot be seen here")
    else:
        _check_types(config, findings)


def _prepared(raw: dict[str, Any], findings: Findings) -> dict[str, Any] | None:
    """The file completed with Ray's defaults, or None (and a complaint) when Ray would refuse it.

    Ray's defaults are what `ray up` would run, so they are checked like the rest.
    """
    import jsonschema
    from ray.autoscaler._private.util import prepare_config, validate_config

    if not isinstance(raw.get("provider"), dict) or "type" not in raw["provider"]:
        findings.wrong("provider.type", "is missing; give aws, gcp or local")
        return None
    said = io.StringIO()
    logging.getLogger("ray").setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            config = prepare_config(copy.deepcopy(raw))
            validate_config(config)
    except jsonschema.ValidationError as error:
        key = ".".join(str(part) for part in error.absolute_path) or "the file"
        findings.wrong(key, f"{error.message} (Ray's schema)")
        return None
    except Exception as error:  # Ray aborts in many ways; each means that `ray up` would refuse
        text = " ".join((str(error) or said.getvalue() or type(error).__name__).split())
        findings.wrong("the file", f"Ray refuses it: {text}")
        return None
    return config


def _check_network(config: dict[str, Any], kind: str, findings: Findings) -> None:
    for name, node in config.get("available_node_types", {}).items():
        setup, key = node.get("node_config", {}), f"available_node_types.{name}.node_config"
        if kind == "aws":
            cards = setup.get("NetworkInterfaces", [])
            own = setup.get("SecurityGroupIds") or (cards and all(c.get("Groups") for c in cards))
            if not own:
                findings.wrong(
                    f"{key}.SecurityGroupIds",
                    "is missing: Ray then makes a group whose port 22 is open to the world "
                    "(whatever provider.security_group says); name a group of your own",
                )
        if kind == "gcp":
            cards = setup.get("networkInterfaces") or []
            networks = [f"{c.get('network', '')} {c.get('subnetwork', '')}" for c in cards]
            if not cards or any(not n.strip() or n.rstrip().endswith("/default") for n in networks):
                findings.wrong(
                    f"{key}.networkInterfaces",
                    "is missing or names the default network, whose port 22 is open to the world; "
                    "name a subnetwork of your own",
                )


def _start_command(config: dict[str, Any], key: str, findings: Findings) -> tuple[str, str]:
    """(key, command) of the one that starts Ray; the command is empty when there is none."""
    for number, command in enumerate(config.get(key) or []):
        if re.search(r"\bray\s+start\b", command):
            return f"{key}[{number}]", command
    findings.wrong(key, "no `ray start` among them")
    return key, ""


def _check_dashboard(start: tuple[str, str], findings: Findings) -> None:
    key, command = start
    hosts = re.findall(r"--dashboard-host[=\s]+[\"']?([^\s\"']+)", command)
    if command and not hosts:
        findings.wrong(key, "give --dashboard-host=127.0.0.1")
    for host in hosts:
        if host not in ("127.0.0.1", "localhost", "::1"):
            findings.wrong(
                key, f"--dashboard-host={host} shows the dashboard to others; give 127.0.0.1"
            )


def _before_start(command: str, name: str) -> str | None:
    """The value that environment variable `name` has for the `ray start` of a command."""
    head = re.split(r"\bray\s+start\b", command)[0]
    found = re.findall(rf"\b{name}=[\"']?([^\s\"';]+)", head)
    return found[-1] if found else None


def _check_token(
    config: dict[str, Any], starts: dict[str, tuple[str, str]], findings: Findings
) -> None:
    mounts = config.get("file_mounts") or {}
    for key, command in starts.values():
        if not command:
            continue
        mode = _before_start(command, "RAY_AUTH_MODE")
        if mode != "token":
            findings.wrong(
                key, f"RAY_AUTH_MODE is {mode or 'not set'}; put RAY_AUTH_MODE=token before it"
            )
        place = _before_start(command, "RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
        if place not in mounts:
            findings.wrong(
                "file_mounts",
                f"no token reaches the hosts ({key}); add {place}: ~/.ray/auth_token",
            )


def _check_versions(config: dict[str, Any], findings: Findings) -> None:
    docker = config.get("docker") or {}
    images = {
        f"docker.{side}_image" if docker.get(f"{side}_image") else "docker.image": docker.get(
            f"{side}_image"
        )
        or docker.get("image", "")
        for side in ("head", "worker")
    }
    if any(images.values()):
        check_images({key: image for key, image in images.items() if image}, findings)
    installed = {}
    for side in ("head", "worker"):
        key = f"{side}_setup_commands"
        commands = config.get(key) or []
        installed[side] = _installs(key, commands, findings)
        if not installed[side]:
            findings.wrong(
                key,
                "(with setup_commands) installs no dpdist; pip install its wheel or a pinned git "
                "reference, with -c constraints.txt",
            )
        for wanted in re.findall(r"\bray(?:\[[\w,]+\])?==([\w.]+)", "\n".join(commands)):
            if wanted != findings.ray:
                findings.wrong(key, f"installs Ray {wanted}, here it is {findings.ray}")
    if installed["head"] and installed["worker"] and installed["head"] != installed["worker"]:
        findings.wrong(
            "setup_commands",
            f"the head installs {sorted(installed['head'])}, the workers "
            f"{sorted(installed['worker'])}; install once, in setup_commands",
        )


def _installs(key: str, commands: list[str], findings: Findings) -> set[str]:
    """What of dpdist these commands install; complains about loose versions."""
    found = set()
    for command in commands:
        if "pip install" not in command:
            continue
        for match in _INSTALL.finditer(command):
            wheel, git, exact = match["wheel"], match["git"], match["exact"]
            found.add(match[0])
            released = wheel or exact or (git or "").removeprefix("v")
            if match["unpinned"] is not None or git == "":
                findings.wrong(key, f"{match[0]} follows a branch; pin @v{findings.dpdist}")
            elif git and re.fullmatch(r"[0-9a-f]{40}", git):
                findings.notes.append(f"{key}: is commit {git[:12]} what this machine has?")
            elif released != findings.dpdist:
                findings.wrong(
                    key,
                    f"installs dpdist {released}, here it is {findings.dpdist}; take the same "
                    f"wheel, @v{findings.dpdist}, or a full commit",
                )
            if not re.search(r"(\s-c|--constraint)[=\s]\S*constraints\.txt", command):
                findings.wrong(key, "installs dpdist without -c constraints.txt")
    return found


def _check_storage(
    config: dict[str, Any], starts: dict[str, tuple[str, str]], findings: Findings
) -> None:
    places = {}
    for side, (key, command) in starts.items():
        if command:
            places[side] = _before_start(command, "DPDIST_RUNS")
            if not (places[side] or "").startswith("/"):
                findings.wrong(
                    key, "put DPDIST_RUNS=/a/shared/folder before it, the same on all hosts"
                )
    if len(set(places.values())) > 1:
        findings.wrong(
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
        if not any(within(place, word) for word in re.findall(r"/[\w./-]+", text)):
            findings.wrong(
                f"{side}_setup_commands",
                f"nothing mounts or checks the shared storage of DPDIST_RUNS={place}; mount it in "
                "initialization_commands, or check it with `mountpoint -q`",
            )
        docker = config.get("docker") or {}
        options = [*(docker.get("run_options") or []), *(docker.get(f"{side}_run_options") or [])]
        inside = re.findall(r"(?:-v|--volume)[=\s]+[^\s:]+:([^\s:]+)", " ".join(options))
        if docker.get("container_name") and not any(within(place, target) for target in inside):
            findings.wrong(
                "docker.run_options",
                f"the container of the {side} does not see {place}; add -v FOLDER:FOLDER",
            )


def _check_types(config: dict[str, Any], findings: Findings) -> None:
    kinds = []
    head = config.get("head_node_type")
    for name, node in config.get("available_node_types", {}).items():
        key = f"available_node_types.{name}"
        resources, setup = node.get("resources") or {}, node.get("node_config") or {}
        known = _AWS_GPUS.get(setup.get("InstanceType", ""))
        gpus = resources.get("GPU", known[1] if known else 0)
        cpus = resources.get("CPU", known[0] if known else None)
        if known and gpus > known[1]:
            findings.wrong(
                f"{key}.resources.GPU",
                f"{setup['InstanceType']} has {known[1]} GPUs, not {gpus}",
            )
        if setup.get("InstanceType", "").startswith(("p2.", "p3.", "p3dn.")):
            findings.wrong(
                f"{key}.node_config.InstanceType",
                f"{setup['InstanceType']}: CUDA 13, which the pinned torch is built for, no longer "
                "supports its GPU; take g4dn, g5, g6, p4d or p5",
            )
        if name == head:
            if (setup.get("InstanceMarketOptions") or {}).get("MarketType") == "spot":
                findings.notes.append(f"{key}: a head on spot takes every job with it when it goes")
            hosts = 1
        else:
            hosts = min(node.get("max_workers", config["max_workers"]), config["max_workers"])
        if findings.needs is not None and cpus is None:
            findings.wrong(
                f"{key}.resources", "give CPU and GPU, so that the recipe can be checked"
            )
        kinds.append((hosts, cpus or 0, gpus))
    check_room(kinds, "available_node_types", findings)
