"""What is sent to a cluster: code and recipes; never data, runs, keys or hidden files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpdist.base.errors import ClusterError
from dpdist.cluster.packing import pack

SENT = ["my.yaml", "nets.py", "sub/more.py", "sub/deep/text.txt"]
KEPT = [
    ".env", ".git/config", ".venv/x.py", ".ssh/id", "runs/a/run.json", "private/run.key",
    "data/mnist/train.parquet", "sub/rows.parquet", "sub/deep/array.npy", "id.pem", "server.key",
    "results/run.json", "results/private/ledger.jsonl", "env/pyvenv.cfg", "env/lib/x.py",
    "__pycache__/nets.pyc", "sub/private/key.txt", "fetched/a/recipe.yaml", "model.pt",
]  # fmt: skip


def fill(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_only_code_and_recipes_travel(tmp_path):
    source = tmp_path / "work"
    fill(source, SENT + KEPT)
    (source / "link.txt").symlink_to("/etc/hostname")
    packed = pack(source, tmp_path / "package")
    assert [str(path) for path in packed.files] == sorted(SENT)
    assert packed.size == sum(map(len, SENT))
    found = [p.relative_to(packed.folder) for p in packed.folder.rglob("*") if p.is_file()]
    assert sorted(map(str, found)) == sorted(SENT)
    assert (packed.folder / "sub/deep/text.txt").read_text() == "sub/deep/text.txt"


def test_too_much_is_refused_with_the_largest_files(tmp_path):
    source = tmp_path / "work"
    fill(source, ["a.py"])
    (source / "notes.bin").write_bytes(bytes(3000))
    with pytest.raises(ClusterError, match=r"largest: notes.bin .* shared storage"):
        pack(source, tmp_path / "package", limit=2000)
    assert not (tmp_path / "package").exists()
    assert pack(source, tmp_path / "package", limit=4000).size == 3004


@pytest.mark.parametrize("name", ["dpdist.py", "dpdist/__init__.py"])
def test_a_file_that_would_hide_a_package_is_refused(name, tmp_path):
    fill(tmp_path / "work", [name])
    with pytest.raises(ClusterError, match="would hide the package"):
        pack(tmp_path / "work", tmp_path / "package")


def test_names_of_our_folders_are_the_user_s_to_take(tmp_path):
    fill(tmp_path / "work", ["cluster.py", "tuning/x.py"])
    files = pack(tmp_path / "work", tmp_path / "package").files
    assert [str(path) for path in files] == ["cluster.py", "tuning/x.py"]


def test_from_a_checkout_our_packages_stay(tmp_path):
    """The hosts have them installed."""
    ours = ["dpdist/runs/recipe.py", "cluster/pool.py", "tuning/a.py", "tests/x.py"]
    fill(tmp_path / "work", ["recipes/digits.yaml", *ours])
    assert [str(p) for p in pack(tmp_path / "work", tmp_path / "package").files] == [
        "recipes/digits.yaml"
    ]
