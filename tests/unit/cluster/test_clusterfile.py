"""Cluster files are refused offline for each fault that would cost money, time or privacy."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from dpdist.cluster.cluster_file import check_file, templates

RAY_UP = ("aws", "gcp", "local")
KUBERAY = ("kuberay", "rayjob")


BLANKS = {
    "AMI": "ami-0123456789abcdef0", "SECURITY-GROUP": "sg-0123456789abcdef0",
    "EFS": "fs-0123456789abcdef0", "SUBNETWORK": "projects/p/regions/us-west1/subnetworks/mine",
    "FILESTORE": "10.0.0.9", "HEAD": "10.0.0.1", "HOST-1": "10.0.0.2", "HOST-2": "10.0.0.3",
    "USER": "ubuntu", "REGISTRY": "registry.example.org/me", "SHARED-CLASS": "nfs-client",
    "PROJECT": "my-project", "IMAGE": "projects/p/global/images/gpu-docker",
}  # fmt: skip


def filled(name: str) -> list[dict]:
    """A template with every blank filled in."""
    text = templates()[name]
    for blank, value in BLANKS.items():
        text = text.replace(f"FILL-IN-{blank}", value)
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


START = "head_start_ray_commands/1"


def edited(name: str, key: str, old: str, new: str) -> tuple[str, str, object]:
    """A change of part of a string."""
    value = filled(name)[0]
    for part in key.split("/"):
        value = value[int(part) if part.isdigit() else part]
    assert old in value
    return name, key, value.replace(old, new)


BAD_RAY_UP = {
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
    "open dashboard": (
        edited("aws", START, "--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0"),
        "head_start_ray_commands[1]: --dashboard-host",
    ),
    "no token on head": (
        edited("local", START, "RAY_AUTH_MODE=token ", ""),
        "head_start_ray_commands[1]: RAY_AUTH_MODE",
    ),
    "a token": (
        edited("local", START, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN=0123 RAY_AUTH_MODE"),
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
