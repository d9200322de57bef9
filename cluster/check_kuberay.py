"""Rules for KubeRay manifests: RayCluster and RayJob, with the claims and services beside them."""

from __future__ import annotations

import re
from typing import Any

from dpdist.cluster.findings import Findings, check_images, check_room, within

_SHARED = ("persistentVolumeClaim", "nfs", "csi")


def check_kuberay(documents: list[dict[str, Any]], findings: Findings) -> None:
    """Add to `findings` what is wrong with a file of manifests."""
    claims = {}
    seen = 0
    for number, document in enumerate(documents):
        kind, spec = document.get("kind"), document.get("spec") or {}
        key = f"[{number}].{kind}"
        if kind == "PersistentVolumeClaim":
            claims[(document.get("metadata") or {}).get("name")] = (key, spec)
        elif kind == "Secret" and (document.get("data") or document.get("stringData")):
            findings.wrong(key, "holds a secret; create it with kubectl, outside of files")
        elif kind == "Ingress":
            findings.wrong(key, "leads the world to the cluster; use kubectl port-forward")
        elif kind == "Service" and spec.get("type") in ("LoadBalancer", "NodePort"):
            findings.wrong(f"{key}.spec.type", f"{spec['type']} opens the cluster; use ClusterIP")
    for number, document in enumerate(documents):
        kind, spec = document.get("kind"), document.get("spec") or {}
        if kind not in ("RayCluster", "RayJob"):
            continue
        seen += 1
        key = f"[{number}].{kind}.spec"
        if document.get("apiVersion") != "ray.io/v1":
            findings.wrong(f"[{number}].apiVersion", f"must be ray.io/v1 for a {kind}")
        if kind == "RayJob":
            if "dpdist " not in str(spec.get("entrypoint", "")):
                findings.wrong(f"{key}.entrypoint", "must run dpdist, as in `dpdist run my.yaml`")
            if "rayClusterSpec" not in spec:
                if not spec.get("clusterSelector"):
                    findings.wrong(f"{key}.rayClusterSpec", "is missing")
                continue
            key, spec = f"{key}.rayClusterSpec", spec["rayClusterSpec"]
        _check_cluster(key, spec, claims, findings)
    if not seen:
        findings.wrong("kind", "there is no RayCluster and no RayJob in the file")


def _check_cluster(
    key: str, spec: dict[str, Any], claims: dict[Any, Any], findings: Findings
) -> None:
    if spec.get("rayVersion") != findings.ray:
        findings.wrong(
            f"{key}.rayVersion", f"is {spec.get('rayVersion')}, here it is {findings.ray}"
        )
    head = spec.get("headGroupSpec") or {}
    workers = spec.get("workerGroupSpecs") or []
    if not head or not workers:
        findings.wrong(key, "needs headGroupSpec and workerGroupSpecs")
        return
    if head.get("serviceType") not in (None, "ClusterIP"):
        findings.wrong(
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
            findings.wrong(f"{where}.template.spec.containers", "is missing")
            continue
        ray, where_ray = containers[0], f"{where}.template.spec.containers[0]"
        images[f"{where_ray}.image"] = str(ray.get("image", ""))
        environment = {entry.get("name"): entry for entry in ray.get("env") or []}
        if not managed:
            _check_token(where_ray, environment, findings)
        place = (environment.get("DPDIST_RUNS") or {}).get("value")
        places[where] = place
        _check_storage(where_ray, place, ray, pod, claims, findings)
        limits = (ray.get("resources") or {}).get("limits") or {}
        hosts = 1 if where.endswith("headGroupSpec") else int(group.get("maxReplicas", 1))
        start = group.get("rayStartParams") or {}
        cpus = float(start.get("num-cpus", _cpus(limits.get("cpu", 0))))
        kinds.append((hosts, cpus, float(limits.get("nvidia.com/gpu", 0))))
    check_images(images, findings)
    for where, image in images.items():
        if re.match(r"(docker\.io/)?rayproject/ray", image):
            findings.wrong(where, f"{image} has no dpdist in it; build an image on top of it")
    if len(set(places.values())) > 1:
        findings.wrong(key, f"DPDIST_RUNS differs between the groups: {sorted(map(str, places))}")
    check_room(kinds, f"{key}.workerGroupSpecs", findings)


def _check_token(key: str, environment: dict[Any, Any], findings: Findings) -> None:
    mode = (environment.get("RAY_AUTH_MODE") or {}).get("value")
    token = environment.get("RAY_AUTH_TOKEN") or {}
    if mode != "token":
        findings.wrong(
            f"{key}.env", "token authentication is off; give spec.authOptions: {mode: token}"
        )
    elif "secretKeyRef" not in (token.get("valueFrom") or {}):
        findings.wrong(f"{key}.env", "RAY_AUTH_TOKEN must come from a secret (valueFrom)")


def _check_storage(
    key: str,
    place: Any,
    container: dict[str, Any],
    pod: dict[str, Any],
    claims: dict[Any, Any],
    findings: Findings,
) -> None:
    if not str(place or "").startswith("/"):
        findings.wrong(f"{key}.env", "give DPDIST_RUNS, a folder on the shared volume")
        return
    mounted = [
        mount
        for mount in container.get("volumeMounts") or []
        if within(str(place), mount["mountPath"])
    ]
    volumes = {volume.get("name"): volume for volume in pod.get("volumes") or []}
    shared = [volumes.get(mount.get("name"), {}) for mount in mounted]
    if not any(any(kind in volume for kind in _SHARED) for volume in shared):
        findings.wrong(
            f"{key}.volumeMounts",
            f"DPDIST_RUNS={place} is on no volume that all pods share; mount a "
            "persistentVolumeClaim (ReadWriteMany) or nfs there",
        )
    for volume in shared:
        name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        where, spec = claims.get(name, ("", None))
        if spec is not None and "ReadWriteMany" not in (spec.get("accessModes") or []):
            complaint = f"{where}.spec.accessModes: must hold ReadWriteMany: every host writes"
            if complaint not in findings.complaints:
                findings.complaints.append(complaint)


def _cpus(text: Any) -> float:
    """Kubernetes counts CPUs as 4 or "3500m"."""
    text = str(text)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
