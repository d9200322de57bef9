"""What is sent to a cluster: code and recipes; never data, runs, keys or hidden files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpdist.cluster.submission import PackageSpec, excluded_paths, pack
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


def test_too_much_is_refused_with_the_largest_files(tmp_path):
    source = tmp_path / "work"
    fill(source, ["a.py"])
    (source / "notes.yaml").write_bytes(bytes(3000))
    with pytest.raises(ClusterError, match=r"notes\.yaml"):
        pack(PackageSpec(source), tmp_path / "package", limit=2000)
    assert not (tmp_path / "package").exists()
    assert pack(PackageSpec(source), tmp_path / "package", limit=4000).size == 3004


@pytest.mark.parametrize("name", ["dpdist.py", "dpdist/__init__.py"])
def test_a_file_that_would_hide_a_package_is_refused(name, tmp_path):
    fill(tmp_path / "work", [name])
    with pytest.raises(ClusterError, match=name.partition("/")[0]):
        pack(PackageSpec(tmp_path / "work"), tmp_path / "package")


def test_names_of_our_folders_are_the_user_s_to_take(tmp_path):
    fill(tmp_path / "work", ["cluster.py", "tuning/x.py"])
    files = pack(PackageSpec(tmp_path / "work"), tmp_path / "package").files
    assert [str(path) for path in files] == ["cluster.py", "tuning/x.py"]


def test_from_a_checkout_our_packages_stay(tmp_path):
    """The hosts have them installed."""
    ours = ["dpdist/runs/recipe.py", "cluster/actor_pool.py", "tuning/a.py", "tests/x.py"]
    fill(tmp_path / "work", ["recipes/digits.yaml", *ours])
    assert [str(p) for p in pack(PackageSpec(tmp_path / "work"), tmp_path / "package").files] == [
        "recipes/digits.yaml"
    ]
