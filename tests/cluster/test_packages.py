"""Workers must run the driver's code: what differs is named."""

from __future__ import annotations

import pytest

from dpdist.cluster.versions import (
    _check_node,
    check_same_versions,
    code_digest,
    package_fingerprints,
)
from dpdist.core.errors import ClusterError

PACKAGES = ("dpdist",)


def test_same_code_passes_wherever_it_lies():
    driver = package_fingerprints(PACKAGES)
    moved = {k: v.replace("/", "/elsewhere/", 1) if ":" in v else v for k, v in driver.items()}
    assert moved["dpdist"] == f"/elsewhere{driver['dpdist']}"
    check_same_versions(driver, PACKAGES, "here")
    check_same_versions(moved, PACKAGES, "here")
    with pytest.raises(ClusterError, match="here: dpdist"):
        check_same_versions(moved | {"dpdist": moved["dpdist"] + "0"}, PACKAGES, "here")


@pytest.mark.parametrize("name", ["dpdist", "torch", "python"])
def test_a_difference_is_named(name):
    driver = dict(package_fingerprints(PACKAGES))
    driver[name] = "/somewhere:0123"
    with pytest.raises(ClusterError, match=f"node 7: {name}: "):
        check_same_versions(driver, PACKAGES, "node 7")


def test_a_shadowing_package_changes_the_digest(tmp_path, monkeypatch):
    before = code_digest(("dpdist.cluster",))
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "shadowed_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("x = 1\n")
    first = code_digest(("shadowed_package",))
    (folder / "__init__.py").write_text("x = 2\n")
    assert code_digest(("shadowed_package",)) == first  # of what this process has loaded
    package_fingerprints.cache_clear()  # as in another process
    assert code_digest(("shadowed_package",)) != first
    assert code_digest(("dpdist.cluster",)) == before


def test_a_host_without_the_shared_folder_is_named(tmp_path):
    token = tmp_path / ".seen"
    token.write_bytes(b"driver's")
    driver = package_fingerprints(PACKAGES)
    _check_node(driver, PACKAGES, "node 7", token, b"driver's")
    for other, content in ((token, b"another folder's"), (tmp_path / "x" / ".seen", b"driver's")):
        with pytest.raises(ClusterError, match=r"^node 7: .*--runs"):
            _check_node(driver, PACKAGES, "node 7", other, content)
