"""Code and recipes are sent to a cluster, but no data, runs, keys or hidden files. The hosts must
have the driver's versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpdist.cluster.submission import PackageSpec, excluded_paths, pack
from dpdist.cluster.versions import (
    _check_node,
    check_same_versions,
    code_digest,
    package_fingerprints,
)
from dpdist.core.errors import ClusterError

SENT = ["Makefile", "my.yaml", "nets.py", "requirements-extra.txt", "sub/deep/kernel.CU",
        "sub/more.py"]  # fmt: skip
# What may be a record, a key or anything else, whatever the folder: named, and left.
LEFT = [
    "face.png", "sub/scan.JPG", "sub/deep/slice.dcm", "rows.tsv", "rows.sqlite", "notes.txt",
    "labels.json", "rows.csv", "sub/rows.parquet", "sub/deep/array.npy", "model.pt", "id.pem",
    "server.key", "id_rsa", "x.safetensors", "a.ipynb", "b.budget.jsonl",
]  # fmt: skip
KEPT = [
    *LEFT,
    ".env", ".git/config", ".venv/x.py", ".ssh/id", "runs/a/run.json", "private/run.key",
    "data/mnist/train.parquet", "results/run.json", "results/private/ledger.jsonl",
    "env/pyvenv.cfg", "env/lib/x.py", "__pycache__/nets.pyc", "sub/private/key.txt",
    "fetched/a/recipe.yaml",
]  # fmt: skip


def fill(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_only_code_and_recipes_travel(tmp_path):
    source = tmp_path / "work"
    fill(source, SENT + KEPT)
    (source / "link.txt").symlink_to("/etc/hostname")
    packed = pack(PackageSpec(source), tmp_path / "package")
    assert [str(path) for path in packed.files] == sorted(SENT)
    assert packed.size == sum(map(len, SENT))
    found = [p.relative_to(packed.folder) for p in packed.folder.rglob("*") if p.is_file()]
    assert sorted(map(str, found)) == sorted(SENT)
    assert (packed.folder / "sub/more.py").read_text() == "sub/more.py"
    folders = ["data/", "env/", "fetched/", "private/", "results/", "runs/", "sub/private/"]
    assert list(packed.excluded) == sorted([*LEFT, *folders, "link.txt"])


def test_what_is_named_travels_and_secrets_never_do(tmp_path):
    source = tmp_path / "work"
    fill(source, SENT + KEPT)
    named = (source / "notes.txt", source / "sub" / "deep")
    sent = {
        str(path)
        for path in PackageSpec(source, named, (source / "labels.json",)).select_files()[0]
    }
    more = {"notes.txt", "sub/deep/slice.dcm", "sub/deep/array.npy", "labels.json"}
    assert sent == {*SENT, *more}
    for name in ("id.pem", "runs", "sub/private/key.txt", ".env", "nowhere", "../other.txt"):
        with pytest.raises(ClusterError, match="--send"):
            PackageSpec(source, ((source / name),)).select_files()
    # What the recipe reads is a wish of the user's, too, but no reason to refuse.
    assert PackageSpec(source, recipe_files=(source / "runs", source / "model.pt")).select_files()[
        0
    ]


def test_nothing_below_data_or_a_budget_travels(tmp_path):
    source = tmp_path / "work"
    inside = ["sets/mine/train.py", "sets/readme.md", "spent/x.yaml", "old/copy/a.py", "pub/b.py"]
    fill(source, ["my.yaml", *inside])
    recipe = {
        "data": {"name": "mine", "root": "sets", "train": "train"},
        "privacy": {"budget": str(source / "spent")},
        "resources": {"archive": f"file://{source}/old"},
        "tune": {"score": {"public": {"name": "pub", "root": "."}}},
    }
    closed = excluded_paths(recipe, source)
    assert set(closed) == {source / name for name in ("sets", "sets/mine", "spent", "old", "pub")}
    sent, left = PackageSpec(source, excluded=closed).select_files()
    assert [str(path) for path in sent] == ["my.yaml"]
    assert left == ["old/", "pub/", "sets/", "spent/"]
    with pytest.raises(ClusterError, match="--send"):
        PackageSpec(source, (source / "sets" / "mine",), excluded=closed).select_files()
    # A root that holds the directory itself: the data set below it, and those of other sections.
    around = {
        "data": {"name": "mine", "root": str(source)},
        "public": {"name": "pub", "root": None},
    }
    assert set(excluded_paths(around, source)) == {source / "mine", source / "pub"}


@pytest.mark.parametrize("name", ["dpdist.py", "dpdist/__init__.py"])
def test_a_file_that_would_hide_a_package_is_refused(name, tmp_path):
    fill(tmp_path / "work", [name])
    with pytest.raises(ClusterError, match=name.partition("/")[0]):
        pack(PackageSpec(tmp_path / "work"), tmp_path / "package")


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
