"""Cluster files are refused offline for each fault that would cost money, time or privacy."""

from __future__ import annotations

import copy
import json
import lzma
from pathlib import Path

import jsonschema
import pytest
import yaml

from dpdist.cluster.cluster_file import check_file, templates

RAY_UP = ("aws", "gcp", "local")
KUBERAY = ("kuberay", "rayjob")


def filled(name: str) -> list[dict]:
    """A template with every blank filled in."""
    text = templates()[name]
    for blank, value in (
        ("FILL-IN-AMI", "ami-0123456789abcdef0"),
        ("FILL-IN-SECURITY-GROUP", "sg-0123456789abcdef0"),
        ("FILL-IN-EFS", "fs-0123456789abcdef0"),
        ("FILL-IN-SUBNETWORK", "projects/p/regions/us-west1/subnetworks/mine"),
        ("FILL-IN-FILESTORE", "10.0.0.9"),
        ("FILL-IN-HEAD", "10.0.0.1"),
        ("FILL-IN-HOST-1", "10.0.0.2"),
        ("FILL-IN-HOST-2", "10.0.0.3"),
        ("FILL-IN-USER", "ubuntu"),
        ("FILL-IN-REGISTRY", "registry.example.org/me"),
        ("FILL-IN-SHARED-CLASS", "nfs-client"),
        ("FILL-IN-PROJECT", "my-project"),
        ("FILL-IN-IMAGE", "projects/p/global/images/gpu-docker"),
    ):
        text = text.replace(blank, value)
    return list(yaml.safe_load_all(text))


def complaints(documents: list[dict], tmp_path: Path) -> list[str]:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return check_file(path)[0]


def change(document, key: str, value) -> None:
    """Set a dotted key (numbers index lists); DELETE removes it."""
    *outer, last = [int(part) if part.isdigit() else part for part in key.split("/")]
    for part in outer:
        document = document[part]
    if value is DELETE:
        del document[last]
    else:
        document[last] = value


DELETE = object()


@pytest.mark.parametrize("name", [*RAY_UP, *KUBERAY])
def test_a_template_lacks_nothing_but_what_is_to_be_filled_in(name, tmp_path):
    path = tmp_path / "template.yaml"
    path.write_text(templates()[name])
    found, _ = check_file(path)
    assert found and all("FILL-IN" in text for text in found)
    assert complaints(filled(name), tmp_path) == []


START = {"head": "head_start_ray_commands/1", "worker": "worker_start_ray_commands/1"}


def edited(name: str, key: str, old: str, new: str) -> tuple[str, str, object]:
    """A change of part of a string."""
    value = filled(name)[0]
    for part in key.split("/"):
        value = value[int(part) if part.isdigit() else part]
    assert old in value
    return name, key, value.replace(old, new)


BAD_RAY_UP = {
    "no provider": (("aws", "provider", DELETE), "provider.type: "),
    "unknown provider": (("aws", "provider/type", "moon"), "the file: "),
    "ray's own group": (
        ("aws", "available_node_types/gpu/node_config/SecurityGroupIds", DELETE),
        "available_node_types.gpu.node_config.SecurityGroupIds: ",
    ),
    "open rule": (
        ("aws", "provider/security_group",
         {"IpPermissions": [{"FromPort": 22, "ToPort": 22, "IpProtocol": "tcp",
                             "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]}),
        "provider.security_group.IpPermissions[0].IpRanges[0].CidrIp: ",
    ),
    "default network": (
        ("gcp", "available_node_types/gpu/node_config/networkInterfaces", DELETE),
        "available_node_types.gpu.node_config.networkInterfaces: ",
    ),
    "open dashboard": (
        edited("aws", START["head"], "--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0"),
        "head_start_ray_commands[1]: --dashboard-host",
    ),
    "Ray's own start commands": (
        ("aws", "head_start_ray_commands", DELETE), ": --dashboard-host",
    ),
    "no token on head": (
        edited("local", START["head"], "RAY_AUTH_MODE=token ", ""),
        "head_start_ray_commands[1]: RAY_AUTH_MODE",
    ),
    "token set too late": (
        ("local", START["worker"],
         "DPDIST_RUNS=/mnt/dpdist/runs ray start --address=x; RAY_AUTH_MODE=token"),
        "worker_start_ray_commands[1]: RAY_AUTH_MODE",
    ),
    "no token file": (("local", "file_mounts", {}), "file_mounts: "),
    "a token": (
        edited(
            "local", START["head"], "RAY_AUTH_MODE=token",
            "RAY_AUTH_TOKEN=0123 RAY_AUTH_MODE=token",
        ),
        "head_start_ray_commands[1]: ",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD_RAY_UP)
def test_each_fault_of_a_cluster_file_is_named(case, tmp_path):
    (name, key, value), expected = BAD_RAY_UP[case]
    documents = copy.deepcopy(filled(name))
    change(documents[0], key, value)
    found = complaints(documents, tmp_path)
    assert any(expected in text for text in found), found


HEAD = "1/spec/headGroupSpec/"
BAD_KUBERAY = {
    "no token": (("1/spec/authOptions", DELETE), ".env: "),
    "token off": (("1/spec/authOptions", {"mode": "disabled"}), ".env: "),
    "open service": ((HEAD + "serviceType", "LoadBalancer"), "headGroupSpec.serviceType: "),
    "a secret": (
        ("0", {"apiVersion": "v1", "kind": "Secret", "stringData": {"auth_token": "x"}}),
        "[0].Secret: ",
    ),
    "an open service beside it": (
        ("0", {"apiVersion": "v1", "kind": "Service", "spec": {"type": "NodePort"}}),
        "[0].Service.spec.type: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_KUBERAY)
def test_each_fault_of_a_manifest_is_named(case, tmp_path):
    (key, value), expected = BAD_KUBERAY[case]
    documents = copy.deepcopy(filled("kuberay"))
    change(documents, key, value)
    found = complaints(documents, tmp_path)
    assert any(expected in text for text in found), found


# The schemas that KubeRay's operator gives an API server, of its oldest version that the page names
# and of a newer one: `versions[v1].schema` of ray-operator/config/crd/bases/ray.io_*.yaml at these
# tags, without descriptions. sha256: of the file they were taken from. Apache-2.0.
CRDS = json.loads(
    lzma.decompress((Path(__file__).parent / "kuberay_crds.json.xz").read_bytes())
)  # fmt: skip
KUBERAY_VERSIONS = ("v1.5.1", "v1.7.0")


def _closed(schema):
    """A structural schema that refuses fields it does not name, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items()}
    named = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if named and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def crd_errors(documents: list[dict], version: str) -> list[str]:
    """Return the complaints of an API server with this operator's CRDs about manifests."""
    found = []
    for document in documents:
        if document["kind"] in ("RayCluster", "RayJob"):
            schema = _closed(CRDS[f"{version} {document['kind']}"]["schema"])
            errors = jsonschema.Draft7Validator(schema).iter_errors(document)
            found += [f"{error.json_path}: {error.message}" for error in errors]
    return found


@pytest.mark.parametrize("version", KUBERAY_VERSIONS)
@pytest.mark.parametrize("name", KUBERAY)
def test_manifests_are_what_the_operators_schemas_say(name, version):
    documents = filled(name)
    assert {each["kind"] for each in documents} & {"RayCluster", "RayJob"}
    assert crd_errors(documents, version) == []


def test_a_token_from_a_secret_is_good_and_a_literal_one_is_not(tmp_path):
    documents = filled("kuberay")
    del documents[1]["spec"]["authOptions"]
    groups = [documents[1]["spec"]["headGroupSpec"], *documents[1]["spec"]["workerGroupSpecs"]]
    for group in groups:
        reference = {"secretKeyRef": {"name": "dpdist", "key": "auth_token"}}
        group["template"]["spec"]["containers"][0]["env"] += [
            {"name": "RAY_AUTH_MODE", "value": "token"},
            {"name": "RAY_AUTH_TOKEN", "valueFrom": reference},
        ]
    assert complaints(documents, tmp_path) == []
    groups[1]["template"]["spec"]["containers"][0]["env"][-1] = {
        "name": "RAY_AUTH_TOKEN",
        "value": "abc",
    }
    assert any("RAY_AUTH_TOKEN" in text for text in complaints(documents, tmp_path))
