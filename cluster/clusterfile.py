"""Is a cluster file fit for private training? Checked offline, before anything is paid for.

A file for `ray up` is held against Ray's own schema; KubeRay manifests against the fields that we
rely on. Then our rules: nothing open to the world, token authentication on every host, the same
versions everywhere, storage that all hosts share, room for the recipe, no secret in the file.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from dpdist.base.errors import ClusterError
from dpdist.base.yaml_files import read_yaml
from dpdist.cluster.check_kuberay import check_kuberay
from dpdist.cluster.check_ray_up import check_ray_up
from dpdist.cluster.findings import Findings, Needs, check_strings


def check_file(
    path: Path, dpdist_version: str, needs: Needs | None = None
) -> tuple[list[str], list[str]]:
    """(complaints, notes) about a cluster file. Raises UserError when it cannot be read."""
    documents = [document for document in read_yaml(path, other_bases=True) if document is not None]
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise ClusterError(f"{path}: holds no mapping of keys to values")
    findings = Findings(dpdist_version, needs)
    if any("apiVersion" in document for document in documents):
        check_kuberay(documents, findings)
    elif len(documents) > 1:
        raise ClusterError(f"{path}: a file for `ray up` is one document, this has several")
    else:
        check_ray_up(documents[0], findings)
    for number, document in enumerate(documents):
        prefix = f"[{number}]." if len(documents) > 1 else ""
        check_strings(document, findings, prefix)
    return findings.complaints, findings.notes


def templates() -> dict[str, str]:
    """The cluster files that come along: name -> text, for this machine's Ray and Python."""
    here = Findings("")
    tag = here.python.removeprefix("py")
    written_for = {
        "py311": here.python,
        "python3.11": f"python{tag[0]}.{tag[1:]}",
        "Python 3.11": f"Python {tag[0]}.{tag[1:]}",
        "2.60.0": here.ray,
    }
    found = {}
    for path in sorted(Path(str(files(__package__)), "templates").glob("*.yaml")):
        text = path.read_text()
        for old, new in written_for.items():
            text = text.replace(old, new)
        found[path.stem] = text
    return found
