"""A release: somebody else can use it and check it, and whatever is changed in it is noticed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from safetensors.torch import load_file, save_file
from support.local_execution import Done, command, run_without_ray
from support.recipes import write_recipe

import dpdist
from dpdist import models, publishing
from dpdist.certification import table as tables
from dpdist.certification import table_reader
from dpdist.cluster import job_folder
from dpdist.privacy import accounting
from dpdist.privacy.card import PRIVACY_CARD, PRIVACY_CARD_TEXT, card_markdown
from dpdist.privacy.guarantee import BEGAN_APART, format_epsilon
from dpdist.privacy.plan import PrivacyPlan
from dpdist.release import verify as verifying
from dpdist.release.description import certified_accuracy_record, parse_description
from dpdist.release.files import (
    ADAPTER_FILES,
    CHECKSUMMED_FILES,
    CHECKSUMS,
    DESCRIPTION,
    MODEL_CARD,
    REQUIRED_FILES,
    SETTINGS,
    SIGNATURE,
    TOKENIZER,
    WORDS,
    ReleaseError,
    compute_checksums,
    table_name,
    verify_checksums,
)
from dpdist.release.model_card import model_card
from dpdist.release.verify import verify_release
from dpdist.runs.folder import RunFolder

RECIPE = {
    "name": "small",
    "data": {"name": "digits", "max_train": 400},
    "model": {"name": "linear", "mean": [0.3], "std": [0.5]},
    "method": {"name": "input-noise", "sigma": 0.25},
    "privacy": {"noise_multiplier": 2.0, "delta": 1e-4},
    "training": {"batch_size": 100, "steps": 8, "learning_rate": 1.0},
    "certify": {
        "sigma": 0.25,
        "n": 60,
        "n0": 10,
        "max_inputs": 4,
        "seed": "unlucky-7",
        "radii": [0.1],
    },
}
PUBLIC = "public.pem"


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A run, trained, certified and released, and the key that signed it."""
    folder = tmp_path_factory.mktemp("work")
    write_recipe(folder, RECIPE, "small.yaml")
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "key.pem").write_bytes(private)
    write_public_key(key, folder / PUBLIC)
    return folder


def write_public_key(key: Ed25519PrivateKey, path: Path) -> Path:
    path.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


@pytest.fixture
def call(work, monkeypatch, capsys) -> Callable[..., Done]:
    def run(*arguments: object) -> Done:
        return command(monkeypatch, capsys, work, *arguments)

    return run


@pytest.fixture
def made(work, call, monkeypatch) -> Path:
    folder = work / "runs/small/release"
    if not folder.exists():
        run_without_ray(monkeypatch)
        done = call("run", "small.yaml")
        assert done.code == 0, done.err
        done = call("release", "small", "--license", "Apache-2.0", "--sign", "key.pem")
        assert done.code == 0, done.err
    return folder


@pytest.fixture
def copied(made, tmp_path) -> Path:
    """A release elsewhere, without its run."""
    return shutil.copytree(made, tmp_path / "elsewhere")


def sum_again(folder: Path) -> None:
    (folder / CHECKSUMS).write_text(compute_checksums(folder))


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """A JSON file changed; its sum too."""
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    sum_again(folder)


def changed_table(
    folder: Path,
    rows: Callable[[list[dict[str, Any]]], Any] = lambda rows: None,
    about: Callable[[dict[str, Any]], Any] = lambda about: None,
    name: str = table_name(1),
) -> None:
    """A table with other rows, or another description; its digest and its sum too."""
    table = tables.read(folder / name)
    found, said = table.to_pylist(), tables.read_job_record(table)
    rows(found)
    if job_folder.LABEL_DIGEST_KEY in said:
        pairs = [(row["index"], row["label"]) for row in found]
        said[job_folder.LABEL_DIGEST_KEY] = job_folder.label_digest(*zip(*pairs, strict=True))
    about(said)
    tables.write(tables.build(found, said, table.schema), folder / name)
    if (folder / CHECKSUMS).exists():
        sum_again(folder)


def write_pages(folder: Path) -> None:
    """The pages made anew from what lies beside them; their sums too."""
    card = json.loads((folder / PRIVACY_CARD).read_text())
    about = json.loads((folder / DESCRIPTION).read_text())
    described = parse_description(about, DESCRIPTION)
    (folder / PRIVACY_CARD_TEXT).write_text(card_markdown(card))
    (folder / MODEL_CARD).write_text(model_card(described, card, models.read_spec(folder)))
    sum_again(folder)


def name_model(folder: Path, digest: str) -> None:
    """Every file speaks of the model of this hash."""
    edit(folder, DESCRIPTION, at("model", to=digest))
    edit(folder, PRIVACY_CARD, at("extra", "model hash", to=digest))
    changed_table(folder, about=at("model", to=digest))


def test_what_is_in_it(made):
    assert {path.name for path in made.iterdir()} == {*REQUIRED_FILES, SIGNATURE, table_name(1)}
    for line in (made / CHECKSUMS).read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest
    about = json.loads((made / DESCRIPTION).read_text())
    assert about["classes"] == [str(digit) for digit in range(10)]
    assert about["certificate"]["sigma"] == 0.25 and about["certificate"]["n"] == 60
    assert "seed" not in about["certificate"] and "max_train" not in about["data"]
    (table,) = about["certified"]
    path = made.parent / "certificates" / table["title"] / "certificates.parquet"
    certified = table_reader.read(path)
    assert table["radii"] == [0.0, 0.1]
    assert table["accuracy"] == [certified.certified_accuracy(radius) for radius in (0.0, 0.1)]
    evaluation = json.loads((made.parent / "evaluation.json").read_text())
    assert about["tested"]["accuracy"] == evaluation["accuracy"]
    for path in made.iterdir():  # no path of the machine
        assert str(made.parent.parent).encode() not in path.read_bytes()
        # The seed of what was certified, by which it can be drawn again, is where that lies alone.
        assert (b"unlucky-7" in path.read_bytes()) == (path.name == table_name(1))


def test_it_holds(made, call, work):
    done = call("verify", made, "--signer", PUBLIC, "--redraw", 3)
    assert done.code == 0 and "for 3 random inputs" in done.out, done.err
    card = json.loads((made / PRIVACY_CARD).read_text())
    plan = PrivacyPlan.from_dict(card["accounted"])
    assert plan.guarantee().epsilon == card["guarantee"]["epsilon"]
    assert "650 parameters" in done.out and PUBLIC in done.out
    openssl = shutil.which("openssl")
    if openssl is not None:
        subprocess.run(
            [openssl, "pkeyutl", "-verify", "-pubin", "-inkey", work / PUBLIC, "-rawin",
             "-in", made / CHECKSUMS, "-sigfile", made / SIGNATURE],
            check=True, capture_output=True,
        )  # fmt: skip


def fails(call: Callable[..., Done], folder: Path, match: str, *options: object) -> None:
    done = call("verify", folder, *options)
    assert done.code == 1, done.out + done.err
    (line,) = done.err.splitlines()
    assert match in line and not done.out


@pytest.mark.parametrize("name", [PRIVACY_CARD, CHECKSUMS])
def test_a_file_that_was_changed_is_noticed(copied, call, name):
    content = bytearray((copied / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copied / name).write_bytes(bytes(content))
    fails(call, copied, "SHA256SUMS")
    (copied / name).unlink()
    if name != CHECKSUMS:
        fails(call, copied, f"lacks {name}")


def test_every_file_that_is_read_has_a_checksum(tmp_path):
    read = {WORDS, TOKENIZER, SETTINGS, *ADAPTER_FILES, table_name(1), *CHECKSUMMED_FILES}
    for name in read:
        (tmp_path / name).write_text(name)
    sum_again(tmp_path)
    assert verify_checksums(tmp_path).keys() == read
    for name in read:
        (tmp_path / name).write_text(f"{name}.")
        with pytest.raises(ReleaseError):
            verify_checksums(tmp_path)
        (tmp_path / name).write_text(name)


def test_other_files_and_links_are_no_part_of_it(copied, call, tmp_path):
    (copied / ".gitattributes").write_text("x")
    assert call("verify", copied).code == 0
    (copied / "more.bin").write_text("x")
    fails(call, copied, "'more.bin'")
    (copied / "more.bin").unlink()
    (tmp_path / "card").write_bytes((copied / PRIVACY_CARD).read_bytes())
    (copied / PRIVACY_CARD).unlink()
    (copied / PRIVACY_CARD).symlink_to(tmp_path / "card")
    fails(call, copied, PRIVACY_CARD)


def halved(card: Any) -> None:
    card["guarantee"]["epsilon"] /= 2


def at(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for part in path[:-1]:
            value = value[part]
        value[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        (PRIVACY_CARD, halved, "guarantee"),
        (DESCRIPTION, at("certified", 0, "accuracy", to=[1.0, 1.0]), "accuracy"),
        ("model.json", at("classes", to=11), "classes"),
    ],
)
def test_what_does_not_follow_is_noticed_with_right_sums(copied, call, name, change, match):
    """Every single field of every file: test_release_edits.py."""
    edit(copied, name, change)
    fails(call, copied, match)
    fails(call, copied, "", "--signer", PUBLIC)


@pytest.mark.parametrize("delta", [1e-6, 1e-3])
def test_the_cost_of_all_runs_is_compared_at_its_own_delta(copied, delta):
    """The run states delta 1e-4."""
    least = dpdist.load(copied).plan.guarantee(delta=delta)

    def state(epsilon: float) -> None:
        edit(copied, PRIVACY_CARD, at("data_set", to=least.to_dict() | {"epsilon": epsilon}))
        write_pages(copied)

    state(least.epsilon)
    verify_release(copied)
    state(0.99 * least.epsilon)
    with pytest.raises(ReleaseError, match="data_set"):
        verify_release(copied)


def test_the_base_of_an_adapter_is_named_without_a_path_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/tiny").mkdir(parents=True)
    facts: Any = SimpleNamespace(
        recipe=SimpleNamespace(model=SimpleNamespace(initial=None), by_script="a script")
    )
    names = {}
    for stored in (str(tmp_path / "models/tiny"), "/gone/tiny", "models/tiny", "hub/tiny"):
        adapter: Any = SimpleNamespace(config=SimpleNamespace(base_model_name_or_path=stored))
        names[stored] = publishing._base_name(facts, adapter)
    assert names.pop("hub/tiny") == "hub/tiny"
    assert set(names.values()) == {"tiny"}


def test_an_epsilon_that_omits_an_earlier_run_is_not_that_of_the_release(copied):
    own = dpdist.load(copied).plan.guarantee()
    total = own.to_dict() | {"epsilon": 2 * own.epsilon}
    omitted = [f"{BEGAN_APART} an earlier run"]
    edit(copied, PRIVACY_CARD, lambda card: card.update(data_set=total, assumptions=omitted))
    release = dpdist.load(copied)
    assert release.epsilon == 2 * own.epsilon
    privacy = next(row.value for row in release.rows if row.name == "privacy")
    assert format_epsilon(2 * own.epsilon) in privacy
    assert format_epsilon(own.epsilon) not in privacy


def test_other_weights_are_noticed_with_right_sums(copied, call):
    weights = copied / "model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values())).view(-1)[0] += 1e-3
    save_file(tensors, weights)
    sum_again(copied)
    fails(call, copied, "model is not the one")
    digest = models.model_hash(copied)
    edit(copied, DESCRIPTION, at("model", to=digest))
    fails(call, copied, "model hash")
    edit(copied, PRIVACY_CARD, at("extra", "model hash", to=digest))
    fails(call, copied, f"{table_name(1)}: model")


def test_a_release_of_another_version_is_verified_with_that_one(copied, monkeypatch):
    """A machine with another accounting library verifies it; another dpdist does not."""
    for name in (PRIVACY_CARD, PRIVACY_CARD_TEXT, MODEL_CARD):
        text = (copied / name).read_text()
        (copied / name).write_text(text.replace(accounting.library_version(), "dp-accounting 9.9"))
    sum_again(copied)
    verify_release(copied)
    monkeypatch.setattr(verifying, "__version__", "9.9")
    with pytest.raises(ReleaseError, match=r"dpdist 0\.1\.0"):
        verify_release(copied)


def test_whoever_reads_a_release_can_name_its_signer(copied, call, work, tmp_path):
    """predict, certify and dpdist.load, as verify: before anything is answered."""
    other = write_public_key(Ed25519PrivateKey.generate(), tmp_path / "other.pem")
    image = tmp_path / "x.npy"
    np.save(image, np.zeros((1, 8, 8), np.float32))
    for arguments in (["predict", copied, image], ["certify", copied]):
        done = call(*arguments, "--signer", other)
        assert done.code == 2 and str(other) in done.err and not done.out, arguments
    assert call("predict", copied, image, "--set", "certify.n=100", "--signer", PUBLIC).code == 0
    with pytest.raises(ReleaseError, match=other.name):
        dpdist.load(copied, signer=other)
    assert dpdist.load(copied, signer=work / PUBLIC).name == dpdist.load(copied).name


def test_no_key_and_another_key(copied, call, tmp_path):
    other = write_public_key(Ed25519PrivateKey.generate(), tmp_path / "other.pem")
    fails(call, copied, "other.pem", "--signer", other)
    (copied / SIGNATURE).write_bytes(b"short")
    fails(call, copied, PUBLIC, "--signer", PUBLIC)
    (copied / SIGNATURE).unlink()
    fails(call, copied, SIGNATURE, "--signer", PUBLIC)
    assert call("verify", copied).code == 0


def test_nothing_is_unpickled(copied, monkeypatch):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(copied / "evil"),))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    (copied / "model.safetensors").write_bytes(pickle.dumps(Evil()))
    sum_again(copied)
    for module, name in ((pickle, "loads"), (pickle, "load"), (torch, "load")):
        monkeypatch.setattr(module, name, never)
    with pytest.raises(ReleaseError):
        verify_release(copied)
    assert not (copied / "evil").exists()


def test_foreign_code_is_imported_only_when_it_is_named(copied, call, tmp_path, monkeypatch):
    (tmp_path / "foreign.py").write_text(
        "from dpdist.models.zoo import linear\n"
        "def net(shape, classes, **options):\n    return linear(shape, classes, **options)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    edit(copied, "model.json", at("name", to="foreign:net"))
    name_model(copied, models.model_hash(copied))
    write_pages(copied)
    done = call("verify", copied)
    assert done.code == 2 and "--trust-factory foreign:net" in done.err
    assert "foreign" not in sys.modules
    done = call("verify", copied, "--trust-factory", "foreign:net")
    assert done.code == 0, done.err


def image(work: Path) -> Path:
    from sklearn.datasets import load_digits

    path = work / "digit.npy"
    np.save(path, (load_digits().images[0] / 16).astype(np.float32)[None])
    return path


def test_a_release_answers_without_its_run(copied, call, work):
    path = image(work)
    done = call("predict", copied, path, "--set", "certify.n=300", "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert answer["sigma"] == 0.25 and answer["alpha"] == 0.001
    loaded = dpdist.load(copied)
    assert loaded.epsilon == json.loads((copied / PRIVACY_CARD).read_text())["guarantee"]["epsilon"]
    again = loaded.answerer(n=300)(np.load(path))
    assert again.as_json["abstain"] == (again.label == -1)
    assert again.abstain or (again.name == str(again.label) and again.radius > 0)
    run = RunFolder(work / "runs/small")
    x = torch.rand(5, 1, 8, 8)
    assert torch.equal(loaded.model(x), models.load(run.model_folder)(x))
    with pytest.raises(ValueError, match="shape"):
        loaded.answerer(n=300)(np.zeros((3, 3)))
    edit(copied, DESCRIPTION, at("certificate", to=None))
    done = call("predict", copied, path, "--set", "certify.n=300")
    assert done.code == 2 and "certify.sigma" in done.err
    label = int(loaded.model(torch.from_numpy(np.load(path))[None]).argmax())
    done = call("predict", copied, path)
    assert done.code == 0 and done.out.startswith(f"{path}: {label} ")


def test_a_release_is_certified_without_its_run(copied, call, work, monkeypatch):
    run_without_ray(monkeypatch)
    done = call("certify", copied, "--n", "50", "--set", "certify.max_inputs=3")
    assert done.code == 0, done.err
    (path,) = (work / "certificates/small").glob("*/certificates.parquet")
    table = table_reader.read(path)
    assert table.job_record["model"] == models.model_hash(copied)
    assert (table.sigma, table.n, len(table.index)) == (0.25, 50, 3)
    done = call("certify", copied, "--output", copied / "certificates")
    assert done.code == 2 and "--output" in done.err
    done = call("certify", copied, "--set", "attacked.attack=pgd")
    assert done.code == 2 and "attacked" in done.err
    assert call("verify", copied).code == 0


def all_radii(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["radius"], row["prediction"] = 3.0, row["label"]


def say_what_follows(folder: Path) -> None:
    """release.json and the pages say what an edited table says."""
    found = table_reader.from_arrow(tables.read(folder / table_name(1)))
    edit(folder, DESCRIPTION, at("certified", 0, to=certified_accuracy_record(found)))
    write_pages(folder)


def test_half_a_table_is_noticed(copied, call):
    changed_table(copied, lambda rows: rows.pop())
    say_what_follows(copied)
    fails(call, copied, table_name(1))
    changed_table(copied, about=at("settings", "max_inputs", to=3))
    assert call("verify", copied).code == 0  # a smaller certification, and it says so


def test_counts_of_another_seed_or_data_are_noticed(copied, call):
    whole = (copied / table_name(1)).read_bytes()
    for change, match in (
        (at("seed", to="8"), "noise"),
        (at("data", to="0" * 32), "data"),
        (at("inputs", to=100), "data"),
        (at("classifier", "batch", to=7), "noise"),
    ):
        changed_table(copied, about=change)
        fails(call, copied, match, "--redraw", 4)
        (copied / table_name(1)).write_bytes(whole)

    def other_label(rows: list[dict[str, Any]]) -> None:
        rows[0]["label"] = (rows[0]["label"] + 1) % 10

    changed_table(copied, other_label)
    say_what_follows(copied)
    fails(call, copied, "labels", "--redraw", 1)


def test_a_radius_that_does_not_follow_from_its_counts_is_noticed(copied, call):
    """All radii set to 3.0 by hand, and everything that follows from that made again."""
    changed_table(copied, all_radii)
    say_what_follows(copied)
    fails(call, copied, table_name(1))


def test_a_file_without_a_sum_is_missed(copied, call):
    lines = (copied / CHECKSUMS).read_text().splitlines(keepends=True)
    for name in (PRIVACY_CARD, table_name(1)):
        (copied / CHECKSUMS).write_text("".join(line for line in lines if name not in line))
        fails(call, copied, CHECKSUMS)
