"""What is found in a cluster file, and the rules for either kind of file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any


@dataclass(frozen=True)
class Needs:
    """What a recipe asks for: so many training workers, each with so many CPUs and GPUs."""

    workers: int
    cpus: float
    gpus: float


@dataclass
class Findings:
    """complaints: "key: what is wrong; what would be right". notes: worth knowing, not wrong.

    dpdist, ray, python ("py311"): the versions every host must have, which are this machine's.
    """

    dpdist: str
    needs: Needs | None = None
    ray: str = field(default_factory=lambda: version("ray"))
    python: str = "py{}{}".format(*sys.version_info)
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def wrong(self, key: str, text: str) -> None:
        self.complaints.append(f"{key}: {text}")


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


def check_strings(document: Any, findings: Findings, prefix: str = "") -> None:
    """Rules about any value, wherever it stands: placeholders, secrets, the open world."""
    for key, value in strings(document):
        where = prefix + key
        if "FILL-IN" in value:
            findings.wrong(where, f"fill in {value!r}")
        for kind, pattern in _SECRETS.items():
            if re.search(pattern, value):
                findings.wrong(where, f"holds {kind}; keep it in a file or secret store outside")
        if re.search(r"(?<![\d.])0\.0\.0\.0/0(?!\d)|(?<![\w:])::/0(?!\d)", value):
            findings.wrong(where, "opens the cluster to the world; name your own address range")


def strings(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, string) of every string in plain data."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from strings(inner, f"{prefix}[{number}]")
    elif isinstance(value, str):
        yield prefix, value


def check_images(images: dict[str, str], findings: Findings) -> None:
    """images: key -> image. All the same kind, pinned, and Ray's own at our versions."""
    kinds = {}
    for key, image in images.items():
        name, _, tag = image.rpartition(":")
        if not name or "/" in tag or tag == "latest":
            findings.wrong(key, f"{image} names no version; pin a tag or a digest")
            continue
        found = re.fullmatch(r"(\d+\.\d+\.\d+)(?:\.[0-9a-f]+)?(?:-(py\d+))?(?:-.*)?", tag)
        if name.split("/")[-1] in ("ray", "ray-ml") and found:
            wanted = (findings.ray, findings.python)
            if (found[1], found[2]) != wanted:
                findings.wrong(
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
        findings.wrong(
            next(iter(images)), f"head and workers differ ({listed}); use one image version"
        )


def within(path: str, folder: str) -> bool:
    """Whether `path` lies in `folder` or is it; the root folder holds nothing."""
    place, outer = PurePosixPath(path), PurePosixPath(folder)
    return len(outer.parts) > 1 and (place == outer or outer in place.parents)


def check_room(kinds: list[tuple[int, float, float]], key: str, findings: Findings) -> None:
    """kinds: (number of hosts, CPUs, GPUs of each). Complains when the recipe does not fit."""
    needs = findings.needs
    if needs is None:
        return
    room = 0
    for hosts, cpus, gpus in kinds:
        by_cpu = cpus // needs.cpus
        by_gpu = gpus // needs.gpus if needs.gpus else by_cpu
        room += hosts * int(min(by_cpu, by_gpu))
    if room < needs.workers:
        each = f"{needs.cpus:g} CPUs and {needs.gpus:g} GPUs each"
        findings.wrong(
            key,
            f"has room for {room} training workers, the recipe asks for {needs.workers} with "
            f"{each}; raise the number of hosts, take a larger type, or lower resources.workers",
        )
    if needs.gpus == 0 and any(gpus for _, _, gpus in kinds):
        findings.notes.append(
            "training asks for no GPU (resources.gpus_per_worker), hosts have: certification takes "
            "them, unless resources.certify_gpus is 0"
        )
